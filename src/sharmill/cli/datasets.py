"""Commands that make manifests, and that show or change datasets; ``report`` and the like show a run as well."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import click
import yaml

from sharmill.audio.encoding import count_clipped
from sharmill.cli.command import (
    FAILED,
    OK,
    describe_cost,
    is_override,
    json_option,
    load_configs,
    make_console,
    parse_pairs,
    print_json,
    print_pairs,
    print_table,
    say,
    say_all,
    workers_option,
)
from sharmill.cli.progress import ProgressListener
from sharmill.cli.run import run_configs
from sharmill.collect.manifest import INFO, REJECTS, ManifestOptions, make_manifest
from sharmill.engine.order import config_of_run
from sharmill.engine.run_dir import RunDir
from sharmill.errors import ConfigError, printable_line, refuse
from sharmill.export.run import export_dataset
from sharmill.files.location import Location
from sharmill.grow.join import append_dataset, merge_datasets
from sharmill.grow.publish import publish_dataset
from sharmill.grow.split import split_dataset
from sharmill.inspect.cuts import (
    choose_codec,
    cut_rows,
    dataset_rows,
    decode_stored_codes,
    export_audio,
    export_cut,
    field_rows,
    find_cut,
    find_shard,
    load_decoder,
    read_shard,
    shard_rows,
)
from sharmill.pipeline import stages_of_run
from sharmill.report.facts import read_dataset_facts, read_run_facts
from sharmill.report.page import write_page
from sharmill.shar.fields import DATASET_FILE
from sharmill.shar.index import ShardRecord, open_directory, read_dataset
from sharmill.shar.rebuild import parse_codec_facts, rebuild_index
from sharmill.shar.sidecars import write_sidecars


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="CONFIG [KEY=VALUE...] | DATASET NEW")
@click.option("--copy", is_flag=True, help="Copy the files; by default they are hard links where possible.")
@json_option
def append(arguments: tuple[str, ...], copy: bool) -> int:
    """Append shards to a finished dataset.

    With a CONFIG, all stages make its dataset_dir of the records that the dataset append_to has not, and its shards are
    appended to append_to. DATASET NEW appends the shards of the finished dataset NEW. Old files stay as they are.
    """
    if any(argument.endswith((".yaml", ".yml")) and not is_override(argument) for argument in arguments):
        (config,) = load_configs("append", arguments, single=True)
        if config.append_to is None:
            raise ConfigError(
                "the configuration does not say which dataset grows: set append_to, as in append_to=data/speech",
                code="missing_key",
            )
        dataset, new = config.append_to, config.dataset_dir
        [(status, _)] = run_configs([config], None)
        if status != OK:
            return status
    else:
        refuse((len(arguments) != 2, "'append' takes one configuration, or two datasets"), code="bad_usage")
        dataset, new = arguments
    appended = append_dataset(dataset, new, copy=copy)
    say(appended.describe(dataset, new))
    print_json(appended)
    return OK


@click.command()
@click.argument("datasets", nargs=-1, required=True, metavar="DATASET... OUT", type=click.Path(path_type=str))
@click.option("--copy", is_flag=True, help="Copy the files; by default they are hard links where possible.")
@click.option("--name", help="The name of the new dataset (default: that of its folder).")
@json_option
def merge(datasets: tuple[str, ...], copy: bool, name: str | None) -> None:
    """Make one dataset of several.

    OUT is a new dataset directory with the shards of all DATASETs, in order. These stay as they are.
    """
    *sources, out = datasets
    refuse((len(sources) < 2, "'merge' takes two datasets or more, and then the new directory"), code="bad_usage")
    merged = merge_datasets(sources, out, copy=copy, name=name)
    record = merged.record
    say(
        f"{out}: {record.num_shards} shards, {record.num_cuts} cuts, {record.target_seconds / 3600:.3f} h; "
        f"{merged.placed['linked']} files linked, {merged.placed['copied']} copied"
    )
    print_json({"dataset": record, "files": merged.placed})


@click.command()
@click.argument("dataset", type=click.Path(path_type=str))
@click.argument("out", type=click.Path(path_type=str))
@click.option("--by-speaker", is_flag=True, required=True, help="No two splits have a speaker in common.")
@click.option("--valid", metavar="SHARE", help="Share of the seconds for valid: 1%.")
@click.option("--test", metavar="SHARE", help="Share of the seconds for test.")
@click.option("--seed", default=42, show_default=True, help="Makes the choice of speakers.")
@click.option("--shard-size", type=click.IntRange(1), help="Cuts of a shard (default: as in DATASET).")
@click.option("--restart", is_flag=True, help="Discard what an interrupted split has left, instead of going on.")
@workers_option
@json_option
def split(
    dataset: str, out: str, by_speaker: bool, valid: str | None, test: str | None, seed: int, shard_size: int | None,
    restart: bool, workers: int | Literal["auto"],
) -> None:  # fmt: skip
    """Divide a dataset by speakers.

    Writes OUT/train, OUT/valid and OUT/test, datasets whose audio and codes are copied. DATASET stays as it is.
    """
    shares = {name: _parse_share(name, text) for name, text in (("valid", valid), ("test", test)) if text is not None}
    refuse((not shares, "say how much goes into --valid or --test, as in --valid 1%"), code="bad_usage")
    with ProgressListener() as listener:
        splits = split_dataset(
            dataset, out, shares, seed=seed, shard_size=shard_size, workers=workers, listener=listener, restart=restart
        )
    total = sum(part.record.target_seconds for part in splits)
    rows = []
    for part in splits:
        record = part.record
        hours, share = f"{record.target_seconds / 3600:.3f}", f"{record.target_seconds / total:.2%}"
        rows.append((part.name, str(part.num_speakers), str(record.num_cuts), hours, share, str(record.num_shards)))
    print_table(None, ("split", "speakers", "cuts", "hours", "share", "shards"), rows, left=("split",))
    say(f"{sum(part.record.num_cuts for part in splits)} cuts, each in exactly one split")
    print_json(splits)


def _parse_share(name: str, text: str) -> float:
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ConfigError(f"--{name} {text}: write a share such as 1% or 0.01", code="bad_usage") from None


@click.command()
@click.argument("dataset", type=click.Path(path_type=str))
@click.option("--name", help="The name of the dataset (default: as it was, or the folder's).")
@click.option("--codec", "codecs", multiple=True, metavar="NAME,KEY=VALUE,...",
              help="What the files cannot tell of a codec: codebook_size, sampling_rate ...")  # fmt: skip
@json_option
def index(dataset: str, name: str | None, codecs: tuple[str, ...]) -> None:
    """Make the index of a dataset from its files.

    Writes shards.jsonl and dataset.json again, or for the first time for a Shar of another tool.
    """
    notes = say_all(rebuild_index(Path(dataset), [parse_codec_facts(text) for text in codecs], name=name))
    print_json({"dataset": read_dataset(Path(dataset)), "notes": notes})


@click.command()
@click.argument("dataset", type=click.Path(path_type=str))
@click.option("--into", type=click.Path(path_type=str), metavar="DIR", help="Where to write (default: into DATASET).")
def sidecars(dataset: str, into: str | None) -> None:
    """Write the index files of lhotse 2 for a dataset.

    With them lhotse takes any cut by its number; sharmill's own reader needs none.
    """
    write_sidecars(dataset, into)
    say(f"wrote index files of {read_dataset(Path(dataset)).num_shards} shards: {into or dataset}")


@click.command()
@click.argument("dataset", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--to", "form", required=True, metavar="FORM",
              help="nemo_codes: a NeMo manifest with a file of codes per utterance. "
                   "nemo_tarred: NeMo's tarred audio.")  # fmt: skip
@click.option("--codec", help="Whose codes, where there are several.")
@click.option("--buckets", type=int, metavar="N", help="Tarred sets, for N equal ranges of durations (default: 1).")
@click.option("--min-duration", type=float, metavar="SECONDS", help="Of tarred audio, the shortest (default: 0).")
@click.option("--max-duration", type=float, metavar="SECONDS", help="Tarred audio is shorter than this.")
@json_option
def export(dataset: Path, out: Path, form: str, **options: Any) -> None:
    """Write a dataset as files for trainers that do not read Shar."""
    say(f"exporting {dataset}", style="dim")
    with make_console().status("export") as status:
        exported = export_dataset(
            dataset, form, out, **options,
            progress=lambda done, total: status.update(f"export: part {done:,} of {total:,}"),
        )  # fmt: skip
    left_out = f"; {exported.num_left_out:,} cuts {exported.left_out} are left out" if exported.num_left_out else ""
    say(f"wrote {exported.manifest}: {exported.num_cuts:,} cuts, {exported.seconds / 3600:,.2f} hours{left_out}")
    print_json({**asdict(exported), "manifest": str(exported.manifest)})


@click.command()
@click.argument("dataset", type=click.Path(path_type=str))
@click.argument("url")
@json_option
def publish(dataset: str, url: str) -> None:
    """Copy a finished dataset to an object store.

    URL is a folder of a bucket: s3://BUCKET/FOLDER, gs:// or ais://. The index comes last. The same command continues
    after an interruption, and copies what is new of a dataset that grew.
    """
    say(f"publishing {dataset}", style="dim")
    with make_console().status("publish") as status:
        files = publish_dataset(
            dataset, url, progress=lambda done, total: status.update(f"publish: file {done:,} of {total:,}")
        )
    say(f"{url}: {files['copied']:,} files copied, {files['there']:,} were there already")
    print_json({"url": url, "files": files})


# Of a table of cuts; see ``shard_rows``.
_COLUMNS = ("cut", "s", "context s", "similarity", "speaker", "text")


@click.command()
@click.argument("directory", metavar="RUN_DIR|DATASET", type=click.Path(path_type=Path))
@click.option("--codec-model", "models", multiple=True, metavar="CODEC=MODEL", callback=parse_pairs,
              help="Model of a codec that is to be decoded, where it is not one that sharmill brings.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE.html",
              help="File to write; by default report.html in the run directory, or here for a dataset.")  # fmt: skip
@json_option
def report(directory: Path, output: Path | None, models: dict[str, str]) -> None:
    """Make a page to look at and to listen to.

    It is one HTML file, which works offline.

    Of a run directory it has the accounts, the configuration and measures of all cuts; of a dataset alone what its
    index and a sample of its shards say.
    """
    say(f"reading {directory}", style="dim")
    run_dir = RunDir(directory)
    if run_dir.config.exists():
        config = config_of_run(directory)
        facts, path = read_run_facts(config, stages_of_run(config), models), output or run_dir.report
    else:
        facts, path = read_dataset_facts(directory, models), output or Path("report.html")
    if facts.absence and (facts.dataset_dir / DATASET_FILE).exists():
        say(f"the dataset {facts.dataset_dir} is not on the page: {facts.absence}", style="yellow")
    size = write_page(facts, path)
    say(f"wrote {path}: {size / 1e6:.1f} MB")
    print_json({"page": str(path), "bytes": size})


@click.command()
@click.argument("source", metavar="DATASET|URL")
@click.argument("cut_id", required=False)
@click.option("--shard", "shard_index", type=click.IntRange(min=0), metavar="N", help="Show the table of a shard.")
@click.option("--export", "folder", type=click.Path(path_type=Path), metavar="FOLDER",
              help="Write the cut, its audio and its codes to this folder.")  # fmt: skip
@json_option
def inspect(source: str, cut_id: str | None, shard_index: int | None, folder: Path | None) -> None:
    """Look at a dataset, a shard or a cut.

    A cut is shown in full, with the shapes of its fields and a line of waveform; a shard is shown as a table. Of a URL
    (https://, s3://, gs:// or ais://) the files that are read are copied to ~/.cache/sharmill.
    """
    refuse(
        (cut_id is not None and shard_index is not None, "give the id of a cut or --shard, not both"),
        (folder is not None and cut_id is None, "--export writes a cut: give its id"),
        code="bad_usage",
    )
    dataset = open_directory(source)
    if shard_index is not None:
        _show_shard(dataset, find_shard(dataset, shard_index))
    elif cut_id is not None:
        stored = find_cut(dataset, cut_id)
        files = [] if folder is None else export_cut(stored, folder)
        rows = list(field_rows(stored))
        fields = {field: {"shape": shape, "looks_like": picture} for field, shape, picture in rows}
        print_json({
            "shard": stored.shard, "number": stored.number, "cut": stored.cut, "fields": fields,
            "files": [str(file) for file in files],
        })  # fmt: skip
        say(f"cut {stored.number} of shard {stored.shard}", style="bold")
        print_pairs(cut_rows(stored.cut))
        for field, shape, picture in rows:
            say(f"{field}: {shape}", style="bold")
            say(f"  {picture}")
        say_all(f"wrote {file}" for file in files)
    else:
        record = read_dataset(dataset)
        print_json(record)
        print_pairs(dataset_rows(dataset, record))
        say(f"sharmill inspect {dataset} --shard 0 lists the cuts of a shard", style="dim")


def _show_shard(directory: Location, shard: ShardRecord) -> None:
    cuts = list(read_shard(directory, shard))
    print_json({"shard": shard, "cuts": cuts})
    # Datasets without contexts have nothing in some columns.
    columns = {
        name: [printable_line(cell)[:80] for cell in cells]
        for name, *cells in zip(_COLUMNS, *shard_rows(iter(cuts)), strict=True)
        if any(cells)
    }
    title = f"shard {shard.index}: {shard.count} cuts, {shard.target_seconds:.1f} s of target audio"
    # Ids and numbers stay whole, since they are what one looks up; speakers and texts get what is left.
    print_table(title, tuple(columns), zip(*columns.values(), strict=True), left=_COLUMNS, no_wrap=_COLUMNS[:4])
    say_all(f"{field}: {file.file}, {file.size:,} bytes" for field, file in shard.fields.items())


@click.command()
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option("--cut", "cut_id", required=True, metavar="ID", help="The id of the cut.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE.wav",
              help="File to write: .wav, .flac, .mp3 or .opus.")  # fmt: skip
@click.option("--codec", help="Whose codes, where there are several.")
@click.option("--context", is_flag=True, help="Decode the codes of the context instead of those of the target.")
@click.option("--codec-model", "models", multiple=True, metavar="CODEC=MODEL", callback=parse_pairs,
              help="Model of the codec, where it is not one that sharmill brings.")  # fmt: skip
@json_option
def decode(dataset: Path, cut_id: str, output: Path, codec: str | None, context: bool, models: dict[str, str]) -> None:
    """Turn the codes of a cut into audio that can be listened to."""
    described = read_dataset(dataset)
    record = choose_codec(described, codec)
    refuse(
        (models.keys() - {record.name}, f"--codec-model is for {record.name}: write {record.name}=MODEL"),
        code="bad_usage",
    )
    stored = find_cut(dataset, cut_id)
    say(f"loading the codec {record.name}", style="dim")
    decoder = load_decoder(record, models.get(record.name))
    samples, rate = decode_stored_codes(stored, described, record, decoder, context=context)
    export_audio(output, samples, rate)
    if clipped := count_clipped(samples):
        say(f"{clipped:,} samples beyond full scale were clipped", style="yellow")
    if not record.trained:
        say(f"the codec {record.name} is untrained: its codes mean nothing", style="yellow")
    say(f"wrote {output}: {len(samples) / rate:.3f} s at {rate} Hz")
    print_json({
        "file": str(output), "codec": record.name, "trained": record.trained, "num_samples": len(samples),
        "sampling_rate": rate,
    })  # fmt: skip


def _parse_list(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else ()


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("-o", "--output", required=True, metavar="FILE", help="The manifest: JSON lines.")
@click.option("--from", "corpus", metavar="CORPUS",
              help="SOURCE is this corpus as it was published: librispeech, an4, lhotse:NAME.")  # fmt: skip
@click.option("--splits", metavar="NAME,...", callback=_parse_list,
              help="Of a corpus: splits or patterns of them, as train-*,dev-clean.")  # fmt: skip
@click.option("--recipe-option", "recipe_options", multiple=True, metavar="KEY=VALUE", callback=parse_pairs,
              help="Argument of the recipe.")  # fmt: skip
@click.option("--download", is_flag=True, help="Have lhotse download the corpus, or its --splits, to SOURCE first.")
@click.option("--remove-noises", is_flag=True,
              help="Of Fisher: no tags, punctuation, capitals or uncertain utterances in the texts.")  # fmt: skip
@click.option("--min-segment", type=click.FloatRange(min=0.0, min_open=True), metavar="SECONDS",
              help="Of a corpus: join consecutive utterances of a channel until they last so long.")  # fmt: skip
@click.option("--vocabulary", metavar="FILE", help="Write the characters of the texts (of the training splits).")
@click.option("--vocabulary-of", type=click.Choice(["characters", "words"]), default="characters", show_default=True)
@click.option("--audio-root", metavar="DIR", help="Folder that the paths are relative to (default: SOURCE).")
@click.option("--speaker", metavar="TEMPLATE", help="Name of the speaker, as {path[0]}, {path[-1]:prefix} or {key}.")
@click.option("--language", metavar="CODE", help="Language of records that name none.")
@click.option("--dataset", metavar="NAME", help="Name of the dataset in speaker tags (default: that of the folder).")
@click.option("--channel", metavar="NUMBER|downmix", help="Channel of audio that has several.")
@click.option("--text-root", metavar="DIR", help="Of a folder: where its texts lie, if not beside the audio.")
@click.option("--audio-suffix", "audio_suffixes", multiple=True, metavar="END", help="End of audio names: _mic1.flac.")
@click.option("--text-suffix", "text_suffixes", multiple=True, metavar="END", help="End of the names of texts: .lab.")
@click.option("--encoding", metavar="NAME", help="Encoding of texts and tables (default: utf-8).")
@click.option("--delimiter", metavar="CHARACTER", help="Of a table: what stands between cells (default: , or a tab).")
@click.option("--header", metavar="NAME,...", callback=_parse_list,
              help="Of a table: names of the columns, where its first row has none.")  # fmt: skip
@click.option("--quotes/--no-quotes", default=None,
              help="Of a table: cells may stand in quotes (default: not with tabs or |).")  # fmt: skip
@click.option("--column", "columns", multiple=True, metavar="KEY=COLUMN", callback=parse_pairs,
              help="Of a table or manifest: column of a key, as text=sentence, or text=texts.0.")  # fmt: skip
@click.option("--decimal", type=click.Choice([".", ","]), help="Of a table: decimal mark of numbers (default: .).")
@click.option("--audio", metavar="TEMPLATE", help="Of a table: audio_filepath made of columns, as wavs/{id}.wav.")
@click.option("--number", "numbers", multiple=True, metavar="KEY", help="Of a table: a key whose cells are numbers.")
@workers_option
@click.option("--force", is_flag=True, help="Replace FILE, what lies beside it under its name, and the vocabulary.")
@json_option
def manifest(sources: tuple[str, ...], output: str, workers: int | Literal["auto"], force: bool, **given: Any) -> int:
    """Make a manifest of a folder, a table or a corpus.

    SOURCE is a folder of audio, with .txt or .lab beside it; a table (.csv, .tsv); or a manifest to be completed. Only
    headers are read. Rejects are in FILE's .rejects.jsonl, the root of all paths is in its .info.yaml.
    """
    try:
        # Numbers, lists and the like are written as YAML has them.
        recipe_options = {key: yaml.safe_load(text) for key, text in given["recipe_options"].items()}
    except yaml.YAMLError as error:
        texts = " ".join(given["recipe_options"].values())
        raise ConfigError(f"--recipe-option: {texts} is not valid YAML", code="bad_usage") from error
    recipe_options |= {"remove_noises": True} if given["remove_noises"] else {}
    options = ManifestOptions(
        audio_root=given["audio_root"], corpus=given["corpus"], vocabulary=given["vocabulary"],
        word_vocabulary=given["vocabulary_of"] == "words", splits=given["splits"], force=force,
        recipe_options=recipe_options, keys=_source_keys(given), download=given["download"],
        min_segment=given["min_segment"],
    )  # fmt: skip
    with ProgressListener() as listener:
        try:
            made, totals = make_manifest(sources, output, options, workers=workers, listener=listener)
        except KeyboardInterrupt:
            click.echo("Interrupted. Run the same command again to begin anew.", err=True)
            return FAILED
    rejects = made.beside(REJECTS)
    say(f"{made.path}: {totals.num_out} records, {describe_cost(totals.hours * 3600, records=False)}")
    if totals.rejects:
        listed = ", ".join(f"{reason} {count}" for reason, count in sorted(totals.rejects.items()))
        say(f"rejects: {totals.num_rejected}: {listed} (see {rejects})")
    say_all([*totals.notes, f"audio root: {made.root} (noted in {made.beside(INFO)})"])
    print_json({
        "ok": True, "totals": totals, "manifest": str(made.path), "rejects": str(rejects),
        "audio_root": str(made.root),
    })  # fmt: skip
    return OK


def _source_keys(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of sources, as a configuration has them, that options stand for."""
    keys = {
        key: given[key]
        for key in ("speaker", "language", "dataset", "text_root", "encoding", "audio", "quotes", "decimal")
    }
    keys |= {key: list(given[key]) or None for key in ("audio_suffixes", "text_suffixes", "numbers", "header")}
    channel, delimiter = given["channel"], given["delimiter"]
    keys["channel"] = int(channel) if channel and channel.isdecimal() else channel
    keys["delimiter"] = "\t" if delimiter == "\\t" else delimiter
    keys["columns"] = given["columns"] or None
    return {key: value for key, value in keys.items() if value is not None}

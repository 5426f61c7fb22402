"""Commands that create manifests, and commands that show or change datasets; some also accept a run directory."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import click
import yaml

from sharmill.audio.encoding import count_clipped
from sharmill.cli.command import (
    FAILED,
    OK,
    LocalPath,
    describe_cost,
    echo,
    echo_all,
    is_override,
    json_option,
    load_configs,
    make_console,
    parse_pairs,
    print_json,
    print_pairs,
    print_table,
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
@click.option("--copy", is_flag=True, help="Copy files instead of hard-linking them where possible.")
@json_option
def append(arguments: tuple[str, ...], copy: bool) -> int:
    """Append shards to a finished dataset.

    With a CONFIG, build its dataset_dir from the records that are missing from the dataset append_to, then append the
    new shards to append_to. With DATASET NEW, append the shards of the finished dataset NEW to DATASET. Existing files
    are not changed.
    """
    if any(argument.endswith((".yaml", ".yml")) and not is_override(argument) for argument in arguments):
        (config,) = load_configs("append", arguments, single=True)
        if config.append_to is None:
            raise ConfigError(
                "the configuration does not name the dataset to append to: set append_to, as in append_to=data/speech",
                code="missing_key",
            )
        dataset, new = config.append_to, config.dataset_dir
        [(status, _)] = run_configs([config], None)
        if status != OK:
            return status
    else:
        refuse((len(arguments) != 2, "'append' takes one configuration or two datasets"), code="bad_usage")
        dataset, new = arguments
    appended = append_dataset(dataset, new, copy=copy)
    echo(appended.describe(dataset, new))
    print_json(appended)
    return OK


@click.command()
@click.argument("datasets", nargs=-1, required=True, metavar="DATASET... OUT", type=LocalPath(path_type=str))
@click.option("--copy", is_flag=True, help="Copy files instead of hard-linking them where possible.")
@click.option("--name", help="Name of the new dataset (default: the name of its folder).")
@json_option
def merge(datasets: tuple[str, ...], copy: bool, name: str | None) -> None:
    """Merge several datasets into one.

    OUT is a new dataset directory with the shards of all DATASETs, in order. The DATASETs are not changed.
    """
    *sources, out = datasets
    refuse((len(sources) < 2, "'merge' takes two or more datasets, followed by the new directory"), code="bad_usage")
    merged = merge_datasets(sources, out, copy=copy, name=name)
    record = merged.record
    echo(
        f"{out}: {record.num_shards} shards, {record.num_cuts} cuts, {record.target_seconds / 3600:.3f} h; "
        f"{merged.placed['linked']} files linked, {merged.placed['copied']} copied"
    )
    print_json({"dataset": record, "files": merged.placed})


@click.command()
@click.argument("dataset", type=click.Path(path_type=str))
@click.argument("out", type=LocalPath(path_type=str))
@click.option("--by-speaker", is_flag=True, required=True, help="Assign each speaker to exactly one split.")
@click.option("--valid", metavar="SHARE", help="Share of the audio for valid, as in 1%.")
@click.option("--test", metavar="SHARE", help="Share of the audio for test.")
@click.option("--seed", default=42, show_default=True, help="Random seed for the choice of speakers.")
@click.option("--shard-size", type=click.IntRange(1), help="Cuts per shard (default: as in DATASET).")
@click.option("--where", default="", metavar="CONDITIONS", help="Keep only cuts that meet these, as in 'score > 3'.")
@click.option("--restart", is_flag=True, help="Discard the output of an interrupted split instead of resuming.")
@workers_option
@json_option
def split(
    dataset: str, out: str, by_speaker: bool, valid: str | None, test: str | None, seed: int, shard_size: int | None,
    where: str, restart: bool, workers: int | Literal["auto"],
) -> None:  # fmt: skip
    """Split a dataset by speaker.

    Write the datasets OUT/train, OUT/valid and OUT/test, with copies of audio and codes. DATASET is not changed.
    """
    shares = {name: _parse_share(name, text) for name, text in (("valid", valid), ("test", test)) if text is not None}
    refuse((not shares, "no share is given: use --valid or --test, as in --valid 1%"), code="bad_usage")
    with ProgressListener() as listener:
        splits = split_dataset(
            dataset, out, shares, seed=seed, shard_size=shard_size, where=where, workers=workers, listener=listener,
            restart=restart,
        )  # fmt: skip
    total = sum(part.record.target_seconds for part in splits)
    rows = []
    for part in splits:
        record = part.record
        hours, share = f"{record.target_seconds / 3600:.3f}", f"{record.target_seconds / total:.2%}"
        rows.append((part.name, str(part.num_speakers), str(record.num_cuts), hours, share, str(record.num_shards)))
    print_table(None, ("split", "speakers", "cuts", "hours", "share", "shards"), rows, left=("split",))
    num_cuts = sum(part.record.num_cuts for part in splits)
    left_out = f"; {read_dataset(Path(dataset)).num_cuts - num_cuts} cuts do not meet {where}" if where else ""
    echo(f"{num_cuts} cuts, each in exactly one split{left_out}")
    print_json(splits)


def _parse_share(name: str, text: str) -> float:
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ConfigError(f"--{name} {text} is not a share: use a value such as 1% or 0.01", code="bad_usage") from None


@click.command()
@click.argument("dataset", type=click.Path(path_type=str))
@click.option("--name", help="Name of the dataset (default: the present name, or the name of the folder).")
@click.option("--codec", "codecs", multiple=True, metavar="NAME,KEY=VALUE,...",
              help="Properties of a codec that the files do not contain, such as codebook_size.")  # fmt: skip
@json_option
def index(dataset: str, name: str | None, codecs: tuple[str, ...]) -> None:
    """Rebuild the index of a dataset from its files.

    Write shards.jsonl and dataset.json, also for a Shar dataset that another tool wrote.
    """
    notes = echo_all(rebuild_index(Path(dataset), [parse_codec_facts(text) for text in codecs], name=name))
    print_json({"dataset": read_dataset(Path(dataset)), "notes": notes})


@click.command()
@click.argument("dataset", type=click.Path(path_type=str))
@click.option("--into", type=LocalPath(path_type=str), metavar="DIR", help="Folder to write to (default: DATASET).")
def sidecars(dataset: str, into: str | None) -> None:
    """Write lhotse 2 index files for a dataset.

    They let lhotse load any cut by its number. sharmill's own reader does not need them.
    """
    write_sidecars(dataset, into)
    echo(f"wrote index files for {read_dataset(Path(dataset)).num_shards} shards to {into or dataset}")


@click.command()
@click.argument("dataset", type=click.Path(path_type=Path))
@click.argument("out", type=LocalPath(path_type=Path))
@click.option("--to", "form", required=True, metavar="FORM",
              help="nemo_codes: a NeMo manifest with one file of codes per utterance; "
                   "nemo_tarred: NeMo's tarred audio.")  # fmt: skip
@click.option("--codec", help="Codec to export, if the dataset has several.")
@click.option("--buckets", type=int, metavar="N", help="Write N tarred sets, by duration (default: 1).")
@click.option("--min-duration", type=float, metavar="SECONDS", help="Shortest tarred audio (default: 0).")
@click.option("--max-duration", type=float, metavar="SECONDS", help="Upper limit of the duration of tarred audio.")
@json_option
def export(dataset: Path, out: Path, form: str, **options: Any) -> None:
    """Export a dataset for trainers that cannot read Shar."""
    echo(f"exporting {dataset}", style="dim")
    with make_console().status("export") as status:
        exported = export_dataset(
            dataset, form, out, **options,
            progress=lambda done, total: status.update(f"export: part {done:,} of {total:,}"),
        )  # fmt: skip
    left_out = f"; left out {exported.num_left_out:,} cuts {exported.left_out}" if exported.num_left_out else ""
    echo(f"wrote {exported.manifest}: {exported.num_cuts:,} cuts, {exported.seconds / 3600:,.2f} hours{left_out}")
    print_json({**asdict(exported), "manifest": str(exported.manifest)})


@click.command()
@click.argument("dataset", type=click.Path(path_type=str))
@click.argument("url")
@json_option
def publish(dataset: str, url: str) -> None:
    """Copy a finished dataset to an object store.

    URL is a folder in a bucket: s3://BUCKET/FOLDER, gs:// or ais://. The index is copied last. Run the same command
    again to resume after an interruption, or to copy the new files of a dataset that has grown.
    """
    echo(f"publishing {dataset}", style="dim")
    with make_console().status("publish") as status:
        files = publish_dataset(
            dataset, url, progress=lambda done, total: status.update(f"publish: file {done:,} of {total:,}")
        )
    echo(f"{url}: {files['copied']:,} files copied, {files['there']:,} already up to date")
    print_json({"url": url, "files": files})


# Columns of a table of cuts; see ``shard_rows``.
_COLUMNS = ("cut", "s", "context s", "similarity", "speaker", "text")


@click.command()
@click.argument("directory", metavar="RUN_DIR|DATASET", type=click.Path(path_type=Path))
@click.option("--codec-model", "models", multiple=True, metavar="CODEC=MODEL", callback=parse_pairs,
              help="Model to decode a codec with, unless the codec is built in.")  # fmt: skip
@click.option("-o", "--output", type=LocalPath(path_type=Path), metavar="FILE.html",
              help="Output file (default: report.html in the run directory, or here for a dataset).")  # fmt: skip
@json_option
def report(directory: Path, output: Path | None, models: dict[str, str]) -> None:
    """Create an HTML report with plots and audio.

    The report is a single file that works offline.

    For a run directory, it shows the record counts of all stages, the configuration and statistics of all cuts. For a
    dataset alone, it shows the index and statistics of a sample of shards.
    """
    echo(f"reading {directory}", style="dim")
    run_dir = RunDir(directory)
    if run_dir.config.exists():
        config = config_of_run(directory)
        facts, path = read_run_facts(config, stages_of_run(config), models), output or run_dir.report
    else:
        facts, path = read_dataset_facts(directory, models), output or Path("report.html")
    if facts.absence and (facts.dataset_dir / DATASET_FILE).exists():
        echo(f"the dataset {facts.dataset_dir} is missing from the report: {facts.absence}", style="yellow")
    size = write_page(facts, path)
    echo(f"wrote {path}: {size / 1e6:.1f} MB")
    print_json({"page": str(path), "bytes": size})


@click.command()
@click.argument("source", metavar="DATASET|URL")
@click.argument("cut_id", required=False)
@click.option("--shard", "shard_index", type=click.IntRange(min=0), metavar="N", help="List the cuts of a shard.")
@click.option("--export", "folder", type=LocalPath(path_type=Path), metavar="FOLDER",
              help="Write the cut, its audio and its codes to this folder.")  # fmt: skip
@json_option
def inspect(source: str, cut_id: str | None, shard_index: int | None, folder: Path | None) -> None:
    """Show a dataset, shard or cut.

    A cut is shown in full, with the shapes of its fields and a one-line waveform. A shard is shown as a table. Files
    of a dataset behind a URL (https://, s3://, gs:// or ais://) are cached in ~/.cache/sharmill when they are read.
    """
    refuse(
        (cut_id is not None and shard_index is not None, "give either the id of a cut or --shard, not both"),
        (folder is not None and cut_id is None, "--export needs a cut: give its id"),
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
        echo(f"cut {stored.number} of shard {stored.shard}", style="bold")
        print_pairs(cut_rows(stored.cut))
        for field, shape, picture in rows:
            echo(f"{field}: {shape}", style="bold")
            echo(f"  {picture}")
        echo_all(f"wrote {file}" for file in files)
    else:
        record = read_dataset(dataset)
        print_json(record)
        print_pairs(dataset_rows(dataset, record))
        echo(f"to list the cuts of a shard, run sharmill inspect {dataset} --shard 0", style="dim")


def _show_shard(directory: Location, shard: ShardRecord) -> None:
    cuts = list(read_shard(directory, shard))
    print_json({"shard": shard, "cuts": cuts})
    # Some columns are empty for datasets without contexts.
    columns = {
        name: [printable_line(cell)[:80] for cell in cells]
        for name, *cells in zip(_COLUMNS, *shard_rows(iter(cuts)), strict=True)
        if any(cells)
    }
    title = f"shard {shard.index}: {shard.count} cuts, {shard.target_seconds:.1f} s of target audio"
    # Ids and numbers stay on one line, so that they can be copied; speakers and texts share the remaining width.
    print_table(title, tuple(columns), zip(*columns.values(), strict=True), left=_COLUMNS, no_wrap=_COLUMNS[:4])
    echo_all(f"{field}: {file.file}, {file.size:,} bytes" for field, file in shard.fields.items())


@click.command()
@click.argument("dataset", type=click.Path(path_type=Path))
@click.option("--cut", "cut_id", required=True, metavar="ID", help="Id of the cut.")
@click.option("-o", "--output", required=True, type=LocalPath(path_type=Path), metavar="FILE.wav",
              help="Output file: .wav, .flac, .mp3 or .opus.")  # fmt: skip
@click.option("--codec", help="Codec to decode, if the dataset has several.")
@click.option("--context", is_flag=True, help="Decode the codes of the context instead of the target.")
@click.option("--codec-model", "models", multiple=True, metavar="CODEC=MODEL", callback=parse_pairs,
              help="Model of the codec, unless the codec is built in.")  # fmt: skip
@json_option
def decode(dataset: Path, cut_id: str, output: Path, codec: str | None, context: bool, models: dict[str, str]) -> None:
    """Decode the codes of a cut to an audio file."""
    described = read_dataset(dataset)
    record = choose_codec(described, codec)
    refuse(
        (models.keys() - {record.name}, f"--codec-model must name the codec {record.name}: use {record.name}=MODEL"),
        code="bad_usage",
    )
    stored = find_cut(dataset, cut_id)
    echo(f"loading the codec {record.name}", style="dim")
    decoder = load_decoder(record, models.get(record.name))
    samples, rate = decode_stored_codes(stored, described, record, decoder, context=context)
    export_audio(output, samples, rate)
    if clipped := count_clipped(samples):
        echo(f"{clipped:,} samples exceeded full scale and were clipped", style="yellow")
    if not record.trained:
        echo(f"the codec {record.name} is untrained: its codes are meaningless", style="yellow")
    echo(f"wrote {output}: {len(samples) / rate:.3f} s at {rate} Hz")
    print_json({
        "file": str(output), "codec": record.name, "trained": record.trained, "num_samples": len(samples),
        "sampling_rate": rate,
    })  # fmt: skip


def _parse_list(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else ()


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("-o", "--output", required=True, metavar="FILE", help="Manifest to write, as JSON lines.")
@click.option("--from", "corpus", metavar="CORPUS",
              help="SOURCE is a published corpus: librispeech, an4 or lhotse:NAME.")  # fmt: skip
@click.option("--splits", metavar="NAME,...", callback=_parse_list,
              help="Corpus: splits or patterns, as in train-*,dev-clean.")  # fmt: skip
@click.option("--recipe-option", "recipe_options", multiple=True, metavar="KEY=VALUE", callback=parse_pairs,
              help="Corpus: argument of the lhotse recipe.")  # fmt: skip
@click.option("--download", is_flag=True, help="Corpus: download it, or its --splits, to SOURCE first, with lhotse.")
@click.option("--remove-noises", is_flag=True,
              help="Fisher: remove tags, punctuation, capitals and uncertain utterances.")  # fmt: skip
@click.option("--segment", type=click.Choice(["vad"]),
              help="vad: cut recordings into utterances by voice activity.")  # fmt: skip
@click.option("--min-segment", type=click.FloatRange(min=0.0, min_open=True), metavar="SECONDS",
              help="Shortest utterance of --segment (default: 1). Corpus: join consecutive utterances of a channel up "
                   "to this duration.")  # fmt: skip
@click.option("--max-segment", type=click.FloatRange(min=0.0, min_open=True), metavar="SECONDS",
              help="Longest utterance of --segment (default: 20).")  # fmt: skip
@click.option("--vocabulary", metavar="FILE", help="Write the vocabulary of the (training) texts to this file.")
@click.option("--vocabulary-of", type=click.Choice(["characters", "words"]), default="characters", show_default=True,
              help="Units of the vocabulary.")  # fmt: skip
@click.option("--audio-root", metavar="DIR", help="Folder that paths are relative to (default: SOURCE).")
@click.option("--speaker", metavar="TEMPLATE", help="Speaker name, as in {path[0]}, {path[-1]:prefix} or {key}.")
@click.option("--language", metavar="CODE", help="Language of records without one.")
@click.option("--dataset", metavar="NAME", help="Dataset name in speaker tags (default: the name of the folder).")
@click.option("--channel", metavar="NUMBER|downmix", help="Channel to use of multi-channel audio.")
@click.option("--text-root", metavar="DIR", help="Folder: root of the text files (default: beside the audio).")
@click.option("--audio-suffix", "audio_suffixes", multiple=True, metavar="END",
              help="Ending of audio file names, as in _mic1.flac.")  # fmt: skip
@click.option("--text-suffix", "text_suffixes", multiple=True, metavar="END",
              help="Ending of text file names, as in .lab.")  # fmt: skip
@click.option("--encoding", metavar="NAME", help="Encoding of texts and tables (default: utf-8).")
@click.option("--delimiter", metavar="CHARACTER", help="Table: delimiter of cells (default: a comma or tab).")
@click.option("--header", metavar="NAME,...", callback=_parse_list,
              help="Table: column names, if its first row does not contain them.")  # fmt: skip
@click.option("--quotes/--no-quotes", default=None,
              help="Table: cells may be quoted (default: not with tabs or |).")  # fmt: skip
@click.option("--column", "columns", multiple=True, metavar="KEY=COLUMN", callback=parse_pairs,
              help="Table or manifest: column of a key, as in text=sentence or text=texts.0.")  # fmt: skip
@click.option("--decimal", type=click.Choice([".", ","]), help="Table: decimal mark (default: .).")
@click.option("--audio", metavar="TEMPLATE", help="Table: audio_filepath from columns, as in wavs/{id}.wav.")
@click.option("--number", "numbers", multiple=True, metavar="KEY", help="Table: key with numeric values.")
@workers_option
@click.option("--force", is_flag=True, help="Replace FILE, its companion files and the vocabulary.")
@click.option("--restart", is_flag=True, help="Discard the output of an interrupted --segment instead of resuming.")
@json_option
def manifest(sources: tuple[str, ...], output: str, workers: int | Literal["auto"], force: bool, **given: Any) -> int:
    """Create a manifest from a folder, table or corpus.

    SOURCE is a folder of audio with .txt or .lab files, a table (.csv, .tsv), a manifest to complete, or with --from a
    corpus. Only the headers of audio files are read, unless --segment cuts the recordings. Rejected records are written
    to FILE's .rejects.jsonl, and the root of all paths to its .info.yaml.
    """
    try:
        # The values are YAML, so that they can be numbers or lists.
        recipe_options = {key: yaml.safe_load(text) for key, text in given["recipe_options"].items()}
    except yaml.YAMLError as error:
        texts = " ".join(given["recipe_options"].values())
        raise ConfigError(f"--recipe-option {texts} is not valid YAML: correct the value", code="bad_usage") from error
    recipe_options |= {"remove_noises": True} if given["remove_noises"] else {}
    options = ManifestOptions(
        audio_root=given["audio_root"], corpus=given["corpus"], vocabulary=given["vocabulary"],
        word_vocabulary=given["vocabulary_of"] == "words", splits=given["splits"], force=force,
        recipe_options=recipe_options, keys=_source_keys(given), download=given["download"],
        segment=given["segment"], min_segment=given["min_segment"], max_segment=given["max_segment"],
        restart=given["restart"],
    )  # fmt: skip
    with ProgressListener() as listener:
        try:
            made, totals = make_manifest(sources, output, options, workers=workers, listener=listener)
        except KeyboardInterrupt:
            again = "resume" if options.segment else "start over"
            click.echo(f"Interrupted. Run the same command again to {again}.", err=True)
            return FAILED
    rejects = made.beside(REJECTS)
    echo(f"{made.path}: {totals.facts['records']} records, {describe_cost(totals.hours * 3600, records=False)}")
    if totals.rejects:
        listed = ", ".join(f"{reason} {count}" for reason, count in sorted(totals.rejects.items()))
        echo(f"rejects: {totals.num_rejected} ({listed}); see {rejects}")
    echo_all([*totals.notes, f"audio root: {made.root} (see {made.beside(INFO)})"])
    print_json({
        "ok": True, "totals": totals, "manifest": str(made.path), "rejects": str(rejects),
        "audio_root": str(made.root),
    })  # fmt: skip
    return OK


def _source_keys(given: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration keys of a source that are given by options."""
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

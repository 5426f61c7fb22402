"""``sharmill manifest``: a manifest of a folder, a table or a corpus, from headers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sharmill.cli.arguments import parse_workers, workers_option
from sharmill.cli.console import describe_cost, json_option, make_console, print_json, print_lines
from sharmill.cli.exit_status import FAILED, OK
from sharmill.errors import ConfigError

if TYPE_CHECKING:
    from sharmill.collect.manifest import Destination
    from sharmill.engine.unit import Totals


def _refuse_restart(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        raise click.UsageError("the option '--restart' was removed: every call begins anew; --force replaces FILE")


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("-o", "--output", required=True, metavar="FILE", help="The manifest: JSON lines.")
@click.option("--from", "corpus", metavar="CORPUS",
              help="SOURCE is this corpus as it was published: librispeech, an4, lhotse:NAME.")  # fmt: skip
@click.option("--splits", metavar="NAME,...", help="Of a corpus: splits or patterns of them, as train-*,dev-clean.")
@click.option("--recipe-option", "recipe_options", multiple=True, metavar="KEY=VALUE", help="Argument of the recipe.")
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
@click.option("--header", metavar="NAME,...", help="Of a table: names of the columns, where its first row has none.")
@click.option("--no-quotes", is_flag=True, help="Of a table: quotes are letters.")
@click.option("--column", "columns", multiple=True, metavar="KEY=COLUMN", help="Of a table: column of a key.")
@click.option("--audio", metavar="TEMPLATE", help="Of a table: audio_filepath made of columns, as wavs/{id}.wav.")
@click.option("--number", "numbers", multiple=True, metavar="KEY", help="Of a table: a key whose cells are numbers.")
@workers_option
@click.option("--force", is_flag=True, help="Replace FILE, what lies beside it under its name, and the vocabulary.")
@click.option("--restart", is_flag=True, hidden=True, expose_value=False, callback=_refuse_restart)
@json_option
def manifest(sources: tuple[str, ...], output: str, workers: str, force: bool, as_json: bool, **given: Any) -> int:
    """Make a manifest of a folder, a table or a corpus.

    SOURCE is a folder of audio, with .txt or .lab beside it; a table (.csv, .tsv); or a manifest to be completed. Only
    headers are read. Rejects are in FILE's .rejects.jsonl, the root of all paths is in its .info.yaml.
    """
    from rich.progress import Progress

    from sharmill.collect.manifest import REJECTS, ManifestOptions, make_manifest

    options = ManifestOptions(
        audio_root=given["audio_root"], corpus=given["corpus"], vocabulary=given["vocabulary"],
        of_words=given["vocabulary_of"] == "words", splits=_listed(given["splits"]),
        recipe_options=_parse_values(given["recipe_options"]), keys=_source_keys(given),
    )  # fmt: skip
    console = make_console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("manifest", total=None)

        def show(records: int, rejects: int) -> None:
            bar.update(task, description=f"manifest: {records} records, {rejects} rejects")

        try:
            destination, totals = make_manifest(
                sources, output, options, workers=parse_workers(workers), force=force, progress=show
            )
        except KeyboardInterrupt:
            click.echo("Interrupted. Run the same command again to begin anew.", err=True)
            return FAILED
    if as_json:
        paths = {"manifest": destination.path, "rejects": destination.beside(REJECTS), "audio_root": destination.root}
        print_json({"ok": True, "totals": totals, **{key: str(path) for key, path in paths.items()}})
    else:
        print_lines(_describe(destination, totals), as_json=False)
    return OK


def _source_keys(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of sources, as a configuration has them, that options stand for."""
    keys = {key: given[key] for key in ("speaker", "language", "dataset", "text_root", "encoding", "audio")}
    keys |= {key: list(given[key]) or None for key in ("audio_suffixes", "text_suffixes", "numbers")}
    channel, delimiter = given["channel"], given["delimiter"]
    keys["channel"] = int(channel) if channel and channel.isdecimal() else channel
    keys["delimiter"] = "\t" if delimiter == "\\t" else delimiter
    keys["header"] = list(_listed(given["header"])) or None
    keys["quotes"] = False if given["no_quotes"] else None
    keys["columns"] = dict(_split_pair("--column", pair) for pair in given["columns"]) or None
    return {key: value for key, value in keys.items() if value is not None}


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else ()


def _split_pair(option: str, pair: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if not (key and equals and value):
        raise ConfigError(f"{option} {pair}: write it as KEY=VALUE", code="bad_usage")
    return key, value


def _parse_values(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of ``KEY=VALUE``: numbers, lists and the like as YAML has them."""
    import yaml

    try:
        return {key: yaml.safe_load(value) for key, value in (_split_pair("--recipe-option", pair) for pair in pairs)}
    except yaml.YAMLError as error:
        raise ConfigError(f"--recipe-option {' '.join(pairs)} is not valid YAML", code="bad_usage") from error


def _describe(destination: Destination, totals: Totals) -> list[str]:
    """Return lines about what was made, and what a dataset may miss in it."""
    from sharmill.collect.manifest import INFO, REJECTS

    hours = describe_cost(totals.hours * 3600, records=False)
    lines = [f"{destination.path}: {totals.num_out} records, {hours}"]
    if totals.rejects:
        listed = ", ".join(f"{reason} {count}" for reason, count in sorted(totals.rejects.items()))
        lines.append(f"rejects: {totals.num_rejected}: {listed} (see {destination.beside(REJECTS)})")
    return [*lines, *totals.notes, f"audio root: {destination.root} (noted in {destination.beside(INFO)})"]

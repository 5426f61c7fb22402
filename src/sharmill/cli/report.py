"""``sharmill report``: a page about a run or a dataset."""

from __future__ import annotations

from pathlib import Path

import click

from sharmill.cli.arguments import parse_codec_models
from sharmill.cli.console import json_option, make_console, plain, print_json
from sharmill.cli.exit_status import OK


@click.command()
@click.argument("directory", metavar="RUN_DIR|DATASET", type=click.Path(path_type=Path))
@click.option("--codec-model", "codec_models", multiple=True, metavar="CODEC=MODEL",
              help="Model of a codec that is to be decoded, where it is not one that sharmill brings.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE.html",
              help="File to write; by default report.html in the run directory, or here for a dataset.")  # fmt: skip
@json_option
def report(directory: Path, output: Path | None, codec_models: tuple[str, ...], as_json: bool) -> int:
    """Make a page to look at and to listen to.

    It is one HTML file, which works offline.

    Of a run directory it has the accounts, the configuration and measures of all cuts; of a dataset alone what its
    index and a sample of its shards say.
    """
    from sharmill.cli.stage_status import stages_of_run
    from sharmill.engine.rundir import RunDir
    from sharmill.pipeline import config_of_run
    from sharmill.report.facts import read_dataset_facts, read_run_facts
    from sharmill.report.page import write_page

    models = parse_codec_models(codec_models)
    run_dir = RunDir(directory)
    if run_dir.config.exists():
        config = config_of_run(directory)
        facts, path = read_run_facts(config, stages_of_run(config), models), output or run_dir.report
    else:
        facts, path = read_dataset_facts(directory, models), output or Path("report.html")
    size = write_page(facts, path)
    make_console().print(plain(f"wrote {path}: {size / 1e6:.1f} MB"), soft_wrap=True)
    if as_json:
        print_json({"page": str(path), "bytes": size})
    return OK

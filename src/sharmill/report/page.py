"""The HTML page with all sections of the report, in one self-contained file.

Writing the page is the last step of a run; an error in writing it does not fail the run.
"""

import base64
import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

from markupsafe import Markup

from sharmill.config import Config
from sharmill.encode.config import EncodeConfig
from sharmill.engine.run_dir import RunDir
from sharmill.engine.stage import StageRun
from sharmill.errors import SharmillError, refuse
from sharmill.files.atomic import write_atomic
from sharmill.registry import SECTIONS
from sharmill.report.section import Section, render
from sharmill.report.text import plain_text
from sharmill.shar.fields import DATASET_FILE

if TYPE_CHECKING:
    from sharmill.report.facts import Facts

log = logging.getLogger(__name__)

# The order matters: ``page.js`` uses plotly.
_SCRIPTS: Final = ("plotly-basic.min.js", "page.js")


def make_page(facts: "Facts") -> str:
    """Return the page as HTML; equal facts give an identical page."""
    sections: list[Section] = sorted((SECTIONS.load(name) for name in SECTIONS.names()), key=lambda one: one.order)
    made = [(section, content) for section in sections if (content := section.make(facts)) is not None]
    templates = files("sharmill.report").joinpath("templates")
    scripts = [templates.joinpath(name).read_text() for name in _SCRIPTS]
    # The browser runs only scripts with these digests, even if untrusted text became an HTML element.
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    html = render(
        "page.html", facts=facts, sections=made, style=Markup(templates.joinpath("page.css").read_text()),
        scripts=[Markup(script) for script in scripts], digests=digests, headline=make_headline(facts),
        notice=Markup(templates.joinpath("plotly-basic.txt").read_text()),
    )  # fmt: skip
    return plain_text(html)


def make_headline(facts: "Facts") -> list[tuple[str, str]]:
    """Return the key numbers at the top of the page, with their labels."""
    numbers: list[tuple[str, str]] = []
    if (record := facts.record) is not None:
        numbers += [
            (f"{record.target_seconds / 3600:,.2f}", "hours of target audio"), (f"{record.num_cuts:,}", "cuts"),
            (f"{record.num_shards:,}", "shards"),
        ]  # fmt: skip
    if facts.run is not None and facts.run.stats:
        of_run = " of this run" if facts.has_other_cuts else ""
        for key, what in (("by_speaker", "speakers"), ("by_language", "languages")):
            kept = sum(1 for row in facts.run.stats[key].values() if row["records_out"])
            numbers.append((f"{kept:,}", (what if kept != 1 else what[:-1]) + of_run))
        records_in = facts.run.stats["records_in"]
        if record is not None and records_in and not facts.has_other_cuts:
            numbers.append((f"{record.num_cuts / records_in:.1%}", "of all records kept"))
    elif facts.sample is not None:
        numbers.append((f"{len(facts.sample.speakers):,}", "speakers in the sample"))
    return numbers


def write_page(facts: "Facts", path: Path) -> int:
    """Write the page, and return its size in bytes.

    Raises:
        ConfigError: the path is a folder, or inside a dataset, which must not contain other files.
        FatalError: the file cannot be written.
    """
    is_inside = any((folder / DATASET_FILE).exists() for folder in path.resolve().parents)
    refuse(
        (path.is_dir(), f"{path} is a folder: name a file"),
        (is_inside, f"{path} is inside a dataset, which must not contain other files: name another file"),
        code="bad_usage",
    )
    data = make_page(facts).encode()
    write_atomic(path, data)
    return len(data)


def report_on_run(config: Config, stages: Sequence[StageRun], *, decode: bool) -> str:
    """Write the page to the run directory, and return a sentence with its path or the error.

    A page that was written after the end of all stages is kept.

    Args:
        stages: all stages of the run.
        decode: load the codecs of the configuration, to include audio decoded from codes.
    """
    path = RunDir(Path(config.run_dir)).report
    with suppress(FileNotFoundError):
        if all(stage.dir.done.stat().st_mtime_ns <= path.stat().st_mtime_ns for stage in stages):
            return f"report: {path}, {path.stat().st_size / 1e6:.1f} MB"
    # This import loads torch, which is not needed if the page is up to date.
    from sharmill.report.facts import read_run_facts

    models = {codec.name: codec.model for codec in config.section(EncodeConfig).codecs if codec.model != "builtin"}
    try:
        size = write_page(read_run_facts(config, stages, models, decode=decode), path)
    except Exception as error:
        # The data of the run are complete, so an error in the report must not fail the run.
        reason = str(error)
        if not isinstance(error, SharmillError):
            log.warning("the report could not be written", exc_info=True)
            reason = f"{type(error).__name__}: {error}"
        return (
            f"the report could not be written: {reason}; the run is complete, run sharmill report {config.run_dir} to "
            "try again"
        )
    return f"report: {path}, {size / 1e6:.1f} MB"

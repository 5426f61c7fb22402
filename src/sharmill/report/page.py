"""The page itself: all sections in one file, which asks for nothing else."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path
from typing import Final

from markupsafe import Markup

from sharmill.errors import ConfigError
from sharmill.files.storage import write_atomic
from sharmill.registry import SECTIONS
from sharmill.report.charts import plain_text
from sharmill.report.facts import Facts
from sharmill.report.section import Section, render
from sharmill.shar.layout import DATASET_FILE

# In this order: the library comes before what uses it.
_SCRIPTS: Final = ("plotly-basic.min.js", "page.js")


def make_page(facts: Facts) -> str:
    """Return the page as HTML. The same facts give the same page."""
    sections: list[Section] = sorted((SECTIONS.load(name) for name in SECTIONS.names()), key=lambda one: one.order)
    made = [(section, content) for section in sections if (content := section.make(facts)) is not None]
    templates = files("sharmill.report").joinpath("templates")
    scripts = [templates.joinpath(name).read_text() for name in _SCRIPTS]
    # Should text of others ever become an element after all, the browser runs no script but these.
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    html = render(
        "page.html", facts=facts, sections=made, style=Markup(templates.joinpath("page.css").read_text()),
        scripts=[Markup(script) for script in scripts], digests=digests, headline=make_headline(facts),
        notice=Markup(templates.joinpath("plotly-basic.txt").read_text()),
    )  # fmt: skip
    return plain_text(html)


def make_headline(facts: Facts) -> list[tuple[str, str]]:
    """Return the few numbers above all sections, and what they are."""
    numbers: list[tuple[str, str]] = []
    if (record := facts.record) is not None:
        numbers += [(f"{record.target_seconds / 3600:,.2f}", "hours of target audio"), (f"{record.num_cuts:,}", "cuts")]
        numbers += [(f"{record.num_shards:,}", "shards")]
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


def write_page(facts: Facts, path: Path) -> int:
    """Write the page, and return its size in bytes.

    Raises:
        ConfigError: the file would lie in a dataset, which holds nothing else.
        FatalError: it cannot be written.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name a file", code="bad_usage")
    if any((folder / DATASET_FILE).exists() for folder in path.resolve().parents):
        raise ConfigError(f"{path} is inside a dataset, which holds nothing else: name another file", code="bad_usage")
    data = make_page(facts).encode()
    write_atomic(path, data)
    return len(data)

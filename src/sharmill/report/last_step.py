"""The page of a run as the last step of the run itself, which it never fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from sharmill.config import Config
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.errors import SharmillError

log = logging.getLogger(__name__)


def report_on_run(config: Config, stages: Sequence[Stage], *, decode: bool) -> str:
    """Write the page into the run directory, and return a sentence: where it is, or why it could not be made.

    A page that was written after all stages were finished stays.

    Args:
        stages: all stages of the run.
        decode: load the codecs of the configuration, to have audio made from codes on the page.
    """
    path = RunDir(Path(config.run_dir)).report
    if _is_newest(path, [stage.dir.done for stage in stages]):
        return f"report: {path}, {path.stat().st_size / 1e6:.1f} MB"
    # Decoding and sketches of audio need torch, which a run with nothing to do does without.
    from sharmill.report.facts import own_models, read_run_facts
    from sharmill.report.page import write_page

    try:
        facts = read_run_facts(config, stages, own_models(config), decode=decode)
        size = write_page(facts, path)
    except SharmillError as error:
        reason = str(error)
    except Exception as error:
        # The data of the run is whole; what shows it must not take that away, whatever is wrong with it.
        log.warning("the report could not be made", exc_info=True)
        reason = f"{type(error).__name__}: {error}"
    else:
        return f"report: {path}, {size / 1e6:.1f} MB"
    return f"the report could not be made: {reason}; the run is whole, sharmill report {config.run_dir} tries again"


def _is_newest(path: Path, others: Sequence[Path]) -> bool:
    """Return True if all files are there, and none of the others was written after the first."""
    try:
        return all(other.stat().st_mtime_ns <= path.stat().st_mtime_ns for other in others)
    except FileNotFoundError:
        return False

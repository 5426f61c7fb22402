"""The setup lines of a cluster profile in scripts of jobs, and why a job ended before Python could say so.

``set -e`` would break the scripts of conda and Lmod, which have commands that fail. So the status of each line as a
whole is looked at, and where it failed the script ends with one line in the job's log.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from sharmill.engine.stored import read_stored
from sharmill.errors import SharmillError

_FAILED: Final = "sharmill: the setup line failed with status "
_SAYS_WHY: Final = re.compile(
    r"(?!\s).*(error|exception|not ?found|no such|denied|cannot|could not|unable|fail|killed)", re.IGNORECASE
)
_MOST_LOGS: Final = 50
_MOST_CHARACTERS: Final = 300


def checked_lines(lines: Sequence[str]) -> list[str]:
    """Return shell lines that run the setup lines of a profile, and end the script where one of them fails.

    What failed is in the variable ``setup_failure`` then, fit to stand in a text in JSON.
    """
    if not lines:
        return []
    checked = []
    for line in lines:
        title = line.strip().partition("\n")[0]
        in_json = msgspec.json.encode(f": the setup line failed: {title}").decode()[1:-1]
        checked.append(f"eval {shlex.quote(line)} || setup_failed $? {shlex.quote(title)} {shlex.quote(in_json)}")
    return [
        "setup_failed() {",
        "    setup_failure=$3",
        f"""    echo "{_FAILED}$1: $2" >&2""",
        "    exit 1",
        "}",
        *checked,
    ]


def find_reason(jobs: Path, since: float = 0.0) -> str:
    """Return what the newest log of a job in a folder says of its end, in one line; "" where none says anything.

    Logs of before ``since``, by the clock of the file system, are of other rounds and stages.
    """
    own = os.environ.get("SLURM_JOB_ID", "none")
    logs = [path for path in jobs.glob("*_log.err") if not path.name.startswith(f"{own}_")]
    by_age = sorted(((path.stat().st_mtime, path) for path in logs), reverse=True)
    for path in [path for written, path in by_age if written >= since][:_MOST_LOGS]:
        try:
            text = read_stored(path).decode(errors="replace")
        except (OSError, SharmillError):
            continue  # the log of another job may say it
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        if said := [line for line in lines if _SAYS_WHY.match(line)]:
            failed = next((line for line in said if line.startswith(_FAILED)), "")
            first = said[0].removeprefix("sharmill: ")
            reason = f"{failed.removeprefix('sharmill: ')} ({first})" if failed and said[0] != failed else first
            return f"{reason[:_MOST_CHARACTERS]}; {path}"
    return ""

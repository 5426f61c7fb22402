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

from sharmill.engine.run_notes import End
from sharmill.engine.rundir import RunDir
from sharmill.engine.stored import read_stored
from sharmill.errors import SharmillError
from sharmill.storage import path_aside

_FAILED: Final = "sharmill: the setup line failed with status "
_SAYS_WHY: Final = re.compile(
    r"(?!\s).*(error|exception|not ?found|no such|denied|cannot|could not|unable|fail|killed)", re.IGNORECASE
)
# Where the shell puts the setup line that failed, if one did.
_WHY: Final = "@WHY@"
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


def lines_that_note_failure(run_dir: RunDir) -> tuple[str, ...]:
    """Return shell lines that note the failure of a run whose last job ends before its Python could do so.

    A Python that is told to leave, and requeued, ends with status 255.
    """
    message = (
        f"an advance job ended before its work did, and so did the job behind it{_WHY}: see the last logs in "
        f"{run_dir.jobs}, and submit again"
    )
    end = msgspec.json.encode(End(state="failed", message=message, code="jobs_gone")).decode()
    before, _, after = end.partition(_WHY)
    path, aside = shlex.quote(str(run_dir.end)), shlex.quote(str(path_aside(run_dir.end)))
    return (
        "note_failure() {",
        "    case $? in 0|255) return ;; esac",
        f"    [ -e {path} ] && return",
        f"""    printf '%s%s%s\\n' {shlex.quote(before)} "${{setup_failure-}}" {shlex.quote(after)} > {aside} &&""",
        # Else a loss of power may leave an empty file.
        f"        sync {aside} &&",
        f"        mv -f {aside} {path}",
        "}",
        "trap note_failure EXIT",
    )


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

"""The end of a chain: the command that tells people, and the shell's note where no Python could write one."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess

import msgspec

from sharmill.engine.rundir import RunDir
from sharmill.executors.slurm.chain_state import ChainState
from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.storage import path_aside

log = logging.getLogger(__name__)

# Where the shell puts the setup line that failed, if one did.
_WHY = "@WHY@"
_SECONDS_TO_NOTIFY = 60.0


def lines_that_note_failure(run_dir: RunDir, command: str) -> tuple[str, ...]:
    """Return shell lines that note the failure of a watcher job whose Python could not do so.

    A Python that is told to leave, and requeued, ends with status 255.
    """
    message = (
        f"a driver job ended before its work did, and so did the watcher job behind it{_WHY}: see the last logs in "
        f"{run_dir.jobs}, and submit again"
    )
    state = msgspec.json.encode(ChainState(state="failed", message=message, command=command)).decode()
    before, _, after = state.partition(_WHY)
    path, aside = shlex.quote(str(run_dir.chain)), shlex.quote(str(path_aside(run_dir.chain)))
    return (
        "note_failure() {",
        "    case $? in 0|255) return ;; esac",
        f"""    grep -qs '"state":"waiting"' {path} || return""",
        # On a full disk what was noted before stays.
        f"    printf '%s%s%s\\n' {shlex.quote(before)} \"${{setup_failure-}}\" {shlex.quote(after)} > {aside} &&",
        # Else a loss of power may leave an empty file.
        f"        sync {aside} &&",
        f"        mv -f {aside} {path}",
        "}",
        "trap note_failure EXIT",
    )


def notify(profile: ClusterProfile, name: str, run_dir: RunDir, state: ChainState) -> None:
    """Run the command of the profile; what becomes of it changes nothing."""
    # Who submits sees the end of what ends at once.
    if profile.notify is None or "SLURM_JOB_ID" not in os.environ:
        return
    values = {
        "SHARMILL_NAME": name,
        "SHARMILL_STATE": state.state,
        "SHARMILL_FINDINGS": str(state.findings),
        "SHARMILL_MESSAGE": state.message,
        "SHARMILL_RUN_DIR": str(run_dir.path),
    }
    try:
        subprocess.run(
            ["bash", "-c", profile.notify], env={**os.environ, **values},
            input=f"{state.message}\n".encode(), capture_output=True, check=True, timeout=_SECONDS_TO_NOTIFY,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or b""
        log.warning("notify: %s %s", error, said.decode(errors="replace"))

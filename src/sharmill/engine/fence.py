"""The fence around the output of a stage: only ranks of the present plan, of one run, can publish there.

Each plan has a random token, which its ranks carry from the start on. All that they write lies below two folders that
are named by it: ``ranks/<token>`` in the stage's folder of the run directory, and one in the staging folder beside the
final files. Only the process that directs the run makes these; a restart removes them before anything else, so that
every late write and rename of an older rank fails.
"""

from __future__ import annotations

from pathlib import Path

from sharmill.engine.patience import Patience
from sharmill.engine.rundir import StageDir
from sharmill.engine.stage import Stage
from sharmill.errors import FatalError
from sharmill.files.staging import token_staging
from sharmill.files.storage import make_folder, remove_asides, remove_at_once

_TOKEN = "-".join(2 * [16 * "[0-9a-f]"])


def fenced_folders(stage: Stage) -> list[Path]:
    """Return all folders that the ranks of the stage's plan write to."""
    return [
        *stage.dir.folders_of_ranks,
        token_staging(stage.root, stage.token),
        *(stage.root / name for name in stage.folders),
    ]


def make_fence(stage: Stage) -> None:
    """Make all folders that the ranks of the stage's plan write to; those that are there stay as they are."""
    remove_asides(stage.dir.path / "ranks")
    for folder in (*fenced_folders(stage), stage.dir.logs):
        make_folder(folder)


def wait_for_plan(stage: Stage, patience: Patience) -> None:
    """Wait until this node sees the stage's plan and the folders that ranks write to; the caller looks at them."""
    paths, folders = stage.dir, fenced_folders(stage)
    patience.wait_until(
        lambda: paths.read_token() == stage.token and all(folder.is_dir() for folder in folders),
        f"{stage.name}: the plan {stage.token}, or a folder of it,",
    )


def require_current(stage: Stage) -> None:
    """Raise FatalError unless ranks of the stage's plan may write: another process has replaced or finished it."""
    if not is_current(stage):
        raise superseded(stage)


def is_current(stage: Stage) -> bool:
    """Return True as long as ranks of the stage's plan may write."""
    return stage.dir.ranks.is_dir() and token_staging(stage.root, stage.token).is_dir()


def superseded(stage: Stage) -> FatalError:
    """Return the error of a rank whose plan is not the present one any more, or was never seen on its node."""
    late = (
        f", or cannot be seen on this node even {stage.seconds_until_seen:g} s later (executor.seconds_until_seen)"
        if stage.seconds_until_seen
        else ""
    )
    return FatalError(
        f"{stage.name}: the plan {stage.token} that this rank works for has been replaced or finished by another "
        f"process in {stage.run_dir.path}{late}: it stops and changes nothing",
        code="superseded_plan",
    )


def remove_fences(paths: StageDir, root: Path) -> None:
    """Remove the folders of a stage's plans: whatever their ranks still write comes to nothing."""
    for ranks in (paths.path / "ranks").glob(_TOKEN):
        for folder in (root, paths.path):
            remove_at_once(token_staging(folder, ranks.name))
        remove_at_once(ranks)
    remove_asides(paths.path / "ranks")


def stop_ranks(stage: Stage) -> None:
    """Stop ranks that are at work for the stage's plan, which stays with what they have done: a later run goes on."""
    for ranks in (stage.dir.path / "ranks").glob(_TOKEN):
        remove_at_once(token_staging(stage.root, ranks.name))

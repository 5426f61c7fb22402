"""The right to direct a run: its run directory and its folders of a dataset directory belong to this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from sharmill.engine.fence import claim_for_run, release_run
from sharmill.engine.locks import FolderLock
from sharmill.engine.run import Executor, locked
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage
from sharmill.engine.state import find_live
from sharmill.errors import FatalError
from sharmill.executors.slurm.chain_state import require_no_chain, require_not_withdrawn, take_over_chain
from sharmill.executors.slurm.executor import SlurmExecutor
from sharmill.storage import disk_errors


@contextmanager
def directed(
    run_dir: RunDir, executor: Executor, *, wait_seconds: float = 0.0, take_over: bool = False
) -> Iterator[FolderLock]:
    """Hold a run directory as long as the context lasts.

    Args:
        executor: what runs the stages; only that of SLURM goes on where jobs of the run directory are left.
        wait_seconds: how long to wait for another process to leave the run directory.
        take_over: go on also where SLURM cannot be asked whether jobs are left.

    Raises:
        ConfigError: another process, or jobs of a chain, are at work there, or a user has ended this one's chain.
    """
    with disk_errors(run_dir.path), locked(run_dir, wait_seconds) as lock:
        if isinstance(executor, SlurmExecutor):
            # It looks for jobs by itself, and knows which belong to it. A user may have ended the chain while its
            # driver job waited for the run directory: that claims nothing more.
            require_not_withdrawn(run_dir)
        else:
            require_no_chain(run_dir, take_over=take_over)
            if take_over:
                take_over_chain(run_dir)
        yield lock


@contextmanager
def claimed(run_dir: RunDir, stages: Sequence[Stage], executor: Executor, *, restart: bool) -> Iterator[None]:
    """Claim what the stages of a run publish into as long as the context lasts.

    Claims of a chain on SLURM stay until that has come to an end.

    Raises:
        ConfigError: another run has claimed it.
    """

    def release() -> None:
        # What others still need stays; they release it.
        if not isinstance(executor, SlurmExecutor) and not any(map(find_live, stages)):
            release_run(run_dir)

    try:
        claim_for_run(stages, restart=restart)
        yield
    except BaseException:
        # The error that ended the run is the one to be raised.
        with suppress(FatalError, OSError):
            release()
        raise
    release()

"""Processes of ranks: forked from a forkserver of multiprocessing that one supervisor has for itself.

``multiprocessing`` has one forkserver for the whole process, which belongs to the program that runs sharmill: its other
children depend on it. A supervisor needs its own, since it preloads the modules of its stage, and ends with its ranks.
"""

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import popen_forkserver, reduction, spawn, util
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from sharmill.files.host import safe_path, variable

PRELOAD: Final = "SHARMILL_PRELOAD"
# The environment of this process is that of the servers that it starts.
_environment = threading.Lock()


class RankServer(ForkServer):
    """A forkserver that imports ``modules`` once for all processes, and prints to ``log``."""

    def __init__(self, modules: Sequence[str], log: Path) -> None:
        super().__init__()
        self.set_forkserver_preload(["sharmill.executors.preload"])
        self._settings = json.dumps([modules, sys.path, str(log)])

    def ensure_running(self) -> None:
        """Start the server unless it runs; multiprocessing calls this before it forks a process."""
        with _environment, variable(PRELOAD, self._settings), safe_path():
            super().ensure_running()

    def end(self) -> None:
        """End the server; the kernel ends all processes that were forked from it."""
        server: Any = self
        if server._forkserver_pid is not None:
            with suppress(ProcessLookupError):
                os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()


class RankProcess(popen_forkserver.Popen):
    """A process that is forked from a given server; its base takes the server of multiprocessing.

    Args:
        target: the function that it calls with ``arguments``; both are pickled.

    Raises:
        OSError, EOFError: it cannot be started.
    """

    def __init__(self, server: RankServer, target: Callable[..., object], arguments: Sequence[Any], name: str) -> None:
        self._server = server
        super().__init__(ForkServerProcess(target=target, args=arguments, name=name))

    def _launch(self, process: BaseProcess) -> None:
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), message)
            reduction.dump(process, message)
        finally:
            set_spawning_popen(None)
        fds: list[int] = self._fds  # type: ignore[attr-defined]
        self.sentinel, writer = self._server.connect_to_new_process(fds)
        # As long as this end is open, the process sees that its parent is alive.
        held = os.dup(writer)
        self.finalizer = util.Finalize(self, util.close_fds, (held, self.sentinel))  # type: ignore[attr-defined]
        with io.BufferedWriter(io.FileIO(writer, "w")) as stream:
            stream.write(message.getbuffer())
        self.pid = read_signed(self.sentinel)

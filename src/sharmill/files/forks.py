"""Processes that are forked from a forkserver of multiprocessing which one process has for itself.

``multiprocessing`` has one forkserver for the whole process, which belongs to the program that runs sharmill: its other
children depend on it. A supervisor and a rank need their own, since these preload what their children need, and end
with their makers.
"""

import io
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import popen_forkserver, reduction, spawn, util
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from multiprocessing.forkserver import ForkServer as _ForkServer, read_signed
from multiprocessing.process import BaseProcess, current_process
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from sharmill.files.host import end_with_parent, safe_path, variable

PRELOAD: Final = "SHARMILL_PRELOAD"
# The environment of this process is that of the servers that it starts.
_environment = threading.Lock()
# Characters in the name of the folder of temporary files; names of sockets below it have thirty more.
_MOST_CHARACTERS: Final = 70
# Process id of the server that this process was forked from, or is.
_server: int | None = None


def become_server(parent: int) -> None:
    """Note that processes will be forked from this one, which ends with its parent."""
    global _server
    _server = os.getpid()
    end_with_parent(parent)


def end_with_server() -> None:
    """Have the kernel kill this process when the server ends that it was forked from, and that with its parent."""
    end_with_parent(_server)


def _make_socket_folder() -> None:
    """Make the folder for the sockets of servers, unless there is one.

    It is one of this process, which ends in order and removes it, and not of those that are forked. The kernel takes
    paths of 107 characters, so that it is not below a TMPDIR with a long name.
    """
    config: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None and len(tempfile.gettempdir()) > _MOST_CHARACTERS:
        folder = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
        config["tempdir"] = folder
    util.get_temp_dir()


class ForkServer(_ForkServer):
    """A process that imports ``modules`` once for all that are forked from it.

    Args:
        log: what they print goes to the end of this file; by default to where this process prints.
        environment: variables that they have beside those of this process.
        runs_main: they import the main module of this process, which may define what they are to do.
    """

    def __init__(
        self, modules: Sequence[str], log: Path | None = None, *,
        environment: Mapping[str, str] = MappingProxyType({}), runs_main: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.set_forkserver_preload(["sharmill.files.preload"])
        settings = json.dumps([os.getpid(), modules, sys.path, None if log is None else str(log)])
        self._variables = {**environment, PRELOAD: settings}
        self.runs_main = runs_main

    def ensure_running(self) -> None:
        """Start the server unless it runs; multiprocessing calls this before it forks a process."""
        with _environment, ExitStack() as stack:
            for name, value in self._variables.items():
                stack.enter_context(variable(name, value))
            stack.enter_context(safe_path())
            super().ensure_running()

    def end(self) -> None:
        """End the server; the kernel ends all processes that were forked from it."""
        server: Any = self
        if server._forkserver_pid is not None:
            with suppress(ProcessLookupError):
                os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()


class ForkedProcess(popen_forkserver.Popen):
    """A process that is forked from a given server; its base takes the server of multiprocessing.

    Args:
        target: the function that it calls with ``arguments``; both are pickled.

    Raises:
        OSError, EOFError: it cannot be started.
    """

    def __init__(self, server: ForkServer, target: Callable[..., object], arguments: Sequence[Any], name: str) -> None:
        self._server = server
        # First, since a process has the folder that its parent has when it is made.
        _make_socket_folder()
        super().__init__(ForkServerProcess(target=target, args=arguments, name=name))

    def _launch(self, process: BaseProcess) -> None:
        message = io.BytesIO()
        preparation = spawn.get_preparation_data(process.name)
        if not self._server.runs_main:
            preparation = {key: value for key, value in preparation.items() if not key.startswith("init_main_from_")}
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, message)
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

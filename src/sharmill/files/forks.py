"""Processes that are forked from a private multiprocessing forkserver.

``multiprocessing`` has one forkserver per process. It belongs to the program that runs sharmill, since that program's
other children depend on it. Supervisors and ranks need servers of their own, which preload the modules of their
children and end with the process that started them.
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
# Lock on the environment of this process, which servers inherit when they start.
_environment = threading.Lock()
# Maximum length of the path of the folder for temporary files; the paths of the sockets in it are up to 30 characters
# longer.
_MOST_CHARACTERS: Final = 70
# Process id of the server that forked this process, or of this process if it is the server.
_server: int | None = None


def become_server(parent: int) -> None:
    """Register this process as a server from which others are forked; it ends with its parent."""
    global _server
    _server = os.getpid()
    end_with_parent(parent)


def end_with_server() -> None:
    """Have the kernel kill this process when its server ends; the server ends with its parent."""
    end_with_parent(_server)


def _make_socket_folder() -> None:
    """Create the folder for the sockets of servers, unless it exists.

    It belongs to this process, which removes it at exit, and not to the forked processes. The kernel limits socket
    paths to 107 characters, so a TMPDIR with a long path is not used.
    """
    config: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None and len(tempfile.gettempdir()) > _MOST_CHARACTERS:
        folder = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
        config["tempdir"] = folder
    util.get_temp_dir()


class ForkServer(_ForkServer):
    """A server process that imports ``modules`` once for all processes forked from it.

    Args:
        log: file to which the server and its processes append their output; None to print where this process prints.
        environment: additional environment variables for the server and its processes.
        runs_main: True if the forked processes import this process's main module, which may define their functions.
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
        """Start the server unless it is running; multiprocessing calls this before it forks a process."""
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
    """A process that is forked from the given server; its base class always uses multiprocessing's own server.

    Args:
        target: function to call with ``arguments``; both are pickled.

    Raises:
        OSError, EOFError: the process cannot be started.
    """

    def __init__(self, server: ForkServer, target: Callable[..., object], arguments: Sequence[Any], name: str) -> None:
        self._server = server
        # Create the folder first: when a process object is created, it inherits its parent's folder.
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
        # While this end of the pipe is open, the process knows that its parent is alive.
        held = os.dup(writer)
        self.finalizer = util.Finalize(self, util.close_fds, (held, self.sentinel))  # type: ignore[attr-defined]
        with io.BufferedWriter(io.FileIO(writer, "w")) as stream:
            stream.write(message.getbuffer())
        self.pid = read_signed(self.sentinel)

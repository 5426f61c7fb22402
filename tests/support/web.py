"""A web server on this machine that serves a folder, and misbehaves where its paths say so."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

_KINDS: Final = ("cut", "large", "drip", "endless", "length", "to")


class WebServer:
    """A server of the files below ``folder``; ``requests`` counts what was asked for, by path.

    The first part of a path may be a status (``/404/a.wav``), ``once-500`` and the like for one that only the first
    request gets, ``cut`` and ``once-cut`` for a body that ends early, ``large`` for one that says it has 5 GiB,
    ``endless`` for one without a length, ``drip`` for one of which no more than a byte comes, ``length`` for one whose
    Content-Length is what follows the ``?``, and ``to`` for a redirect to that, unquoted. Behind it is the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: Counter[str] = Counter()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.02)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(folder: Path) -> Iterator[WebServer]:
    """Serve a folder for as long as the context lasts."""
    server = WebServer(folder)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


def _is_status(text: str) -> bool:
    return text.isdigit() and len(text) == 3


def _handler(server: WebServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            server.requests[self.path] += 1
            kind, _, name = unquote(parts.path).lstrip("/").partition("/")
            if kind.startswith("once-"):
                kind = kind.removeprefix("once-") if server.requests[self.path] == 1 else ""
            else:
                name = name if _is_status(kind) or kind in _KINDS else f"{kind}/{name}"
            file = server.folder / name
            if kind == "to":
                self._head(302, {"Location": unquote(parts.query)})
            elif _is_status(kind):
                self._head(int(kind), {})
            elif kind == "large":
                self._head(200, {"Content-Length": str(5 << 30)})
            elif not file.is_file():
                self._head(404, {})
            else:
                data = file.read_bytes()
                length = unquote(parts.query) if kind == "length" else str(len(data))
                self._head(200, {} if kind == "endless" else {"Content-Length": length})
                self.wfile.write(data[: {"cut": len(data) // 2, "drip": 1}.get(kind, len(data))])
                if kind == "drip":
                    # Until the client hangs up; one that waits for the rest is cut off.
                    self.connection.settimeout(3.0)
                    with suppress(TimeoutError):
                        self.connection.recv(1)

        def _head(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return Handler

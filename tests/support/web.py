"""A local web server that serves a folder, and misbehaves if its paths request it."""

import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit


class WebServer(ThreadingHTTPServer):
    """A server of the files below ``folder``; ``requests`` counts what was asked for, by path.

    The first part of a path may be a status (``/404/a.wav``), ``once-500`` and the like for one that only the first
    request gets, ``cut`` and ``once-cut`` for a body that ends early, ``large`` for one that says it has 5 GiB,
    ``endless`` for one without a length, ``length`` for one whose Content-Length is what follows the ``?``, and
    ``to`` for a redirect to that, unquoted. ``raw`` is for an answer that is what follows the ``?``, of which ``~`` is
    70,000 bytes, and ``slow`` for one that is sent byte by byte. Behind it is the file, or its end where a range asks
    for that.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.requests: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def send(connection: socket.socket, data: bytes, slowly: bool) -> None:
    """Send an answer as it is, also byte by byte, to a client that may not wait for its end."""
    size = 1 if slowly else 1 << 20
    with suppress(OSError):
        for start in range(0, len(data), size):
            time.sleep(0.02 * slowly)
            connection.sendall(data[start : start + size])


@contextmanager
def serving(folder: Path) -> Iterator[WebServer]:
    """Serve a folder for as long as the context lasts."""
    with WebServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: WebServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self.server.requests[self.path] += 1
        kind, _, name = unquote(parts.path).lstrip("/").partition("/")
        if kind.startswith("once-"):
            kind = kind.removeprefix("once-") if self.server.requests[self.path] == 1 else ""
        elif not re.fullmatch(r"[2-5]\d\d|cut|large|endless|length|to|raw|slow", kind):
            kind, name = "", f"{kind}/{name}"
        file = self.server.folder / name
        if kind in ("raw", "slow"):
            send(self.connection, unquote_to_bytes(parts.query).replace(b"~", b"a" * 70_000), kind == "slow")
            return
        if kind == "to":
            self._head(302, {"Location": unquote(parts.query)})
        elif kind.isdigit():
            self._head(int(kind), {"Location": "http://127.0.0.1:9/elsewhere"})
        elif kind == "large":
            self._head(200, {"Content-Length": str(5 << 30)})
        elif not file.is_file():
            self._head(404, {})
        else:
            data = file.read_bytes()
            start = int((re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
            if start and start >= len(data):
                self._head(416, {"Content-Range": f"bytes */{len(data)}"})
                return
            data = data[start:]
            length = unquote(parts.query) if kind == "length" else str(len(data))
            self._head(206 if start else 200, {} if kind == "endless" else {"Content-Length": length})
            self.wfile.write(data[: len(data) // 2] if kind == "cut" else data)

    do_HEAD = do_GET

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass

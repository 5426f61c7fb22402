"""Limits on the time and size of server responses, for the libraries requests and fsspec.

Both libraries limit only the time between two bytes, so a server that sends one byte per minute could block them
forever. Here, bytes are counted as they arrive from the network, including the framing of chunked responses.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import TYPE_CHECKING, Any, Final, cast

from sharmill.errors import RejectRecord

if TYPE_CHECKING:
    import requests

SECONDS: Final = 60.0
# A server that sends less than 1 KiB per second is treated like a silent one.
_BLOCK_BYTES: Final = 60 << 10


class TooLarge(RejectRecord):
    """Raised for a file that is larger than allowed."""


def check_size(url: str, num_bytes: int, max_bytes: float) -> None:
    """Raise TooLarge if a file has more than ``max_bytes``."""
    if num_bytes > max_bytes:
        raise TooLarge("unreadable_audio", f"{url} has more than {max_bytes:,} bytes")


class AnswerPace:
    """The deadline for the next block of a response, and the size limit of its body.

    The response's head, of any length, and the first block share one deadline. fsspec accepts this object as a
    callback.

    Args:
        url: URL of the file, for messages.
        max_bytes: size limit of the body.
        together: number of bytes that are transferred without visible progress; the deadline is extended to allow for
            them.
    """

    def __init__(self, url: str = "", max_bytes: float = math.inf, together: int = 0) -> None:
        self._url, self._max_bytes, self._seconds = url, max_bytes, SECONDS * (1 + together // _BLOCK_BYTES)
        self._left = time.monotonic()
        self.set_size(None)

    def set_size(self, _: int | None) -> None:
        """Restart the count of bytes; fsspec calls this before a retry."""
        self._size = self._end_of_block = 0
        self.relative_update(0)

    def relative_update(self, num_bytes: int) -> None:
        """Count bytes of the body; raise TooLarge if there are too many."""
        self._size += num_bytes
        check_size(self._url, self._size, self._max_bytes)
        if self._size >= self._end_of_block:
            self._end_of_block, self._deadline = self._size + _BLOCK_BYTES, time.monotonic() + self._seconds

    def seconds_left(self) -> float:
        """Return the time left for the current block in seconds; raise TimeoutError if none is left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the response is too slow")
        return left

    @contextmanager
    def waiting(self) -> Iterator[float]:
        """Provide the seconds left for the current block.

        Time spent outside this context, for example on a slow disk, does not count.
        """
        self._deadline += time.monotonic() - self._left
        try:
            yield self.seconds_left()
        finally:
            self._left = time.monotonic()


async def run_in_time(pace: AnswerPace, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of an fsspec coroutine; cancel it and raise TimeoutError if it is too slow."""
    task = asyncio.ensure_future(coroutine)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=pace.seconds_left())
        return task.result()
    finally:
        task.cancel()


class _Response(HTTPResponse):
    """A response in which each read from the connection may only take the time left for the current block."""

    def __init__(self, connection: Any, *args: Any, **options: Any) -> None:
        super().__init__(connection, *args, **options)
        raw, pace = cast("Any", self.fp).raw, AnswerPace()
        read = raw.readinto

        def readinto(buffer: memoryview) -> int | None:
            with pace.waiting() as seconds:
                connection.settimeout(seconds)
                size: int | None = read(buffer)
            if self.headers is not None:
                pace.relative_update(size or 0)
            return size

        raw.readinto = readinto


def limit_response_times(session: requests.Session, connections: int) -> None:
    """Limit the time that each response to a session may take, also through proxies.

    Args:
        connections: number of connections that the session keeps open for reuse.
    """
    from requests.adapters import HTTPAdapter

    class Adapter(HTTPAdapter):
        def get_connection_with_tls_context(self, *args: Any, **options: Any) -> Any:
            pool = super().get_connection_with_tls_context(*args, **options)
            if "response_class" not in vars(pool.ConnectionCls):
                pool.ConnectionCls = type("Connection", (pool.ConnectionCls,), {"response_class": _Response})
            return pool

    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter(pool_maxsize=connections))

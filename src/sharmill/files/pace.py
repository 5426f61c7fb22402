"""Limits on the time and the size of what servers send, by requests and by fsspec.

Both libraries limit the time between two bytes alone, so that a server that sends one byte a minute is waited for
without end. Here bytes are counted as they come from the network: those of lines of chunks like all others.
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
# A server that sends less than 1 KiB a second is as good as one that is silent.
_BLOCK_BYTES: Final = 60 << 10


class TooLarge(RejectRecord):
    """A file that has more bytes than it may."""


def check_size(url: str, num_bytes: int, max_bytes: float) -> None:
    """Raise TooLarge if a file has too many bytes."""
    if num_bytes > max_bytes:
        raise TooLarge("unreadable_audio", f"{url} has more than {max_bytes:,} bytes")


class AnswerPace:
    """The time by which the next block of an answer must have come, and the bytes that its body may have.

    Its head, however long, and the first block have one deadline. fsspec takes it as a callback.

    Args:
        url: of the file, for errors.
        max_bytes: of the body.
        together: bytes that are waited for together, where it is not seen how many have come.
    """

    def __init__(self, url: str = "", max_bytes: float = math.inf, together: int = 0) -> None:
        self._url, self._max_bytes, self._seconds = url, max_bytes, SECONDS * (1 + together // _BLOCK_BYTES)
        self._left = time.monotonic()
        self.set_size(None)

    def set_size(self, _: int | None) -> None:
        """Count from the begin, as where fsspec makes another try."""
        self._size = self._end_of_block = 0
        self.relative_update(0)

    def relative_update(self, num_bytes: int) -> None:
        """Count bytes of the body; raise TooLarge where they are too many."""
        self._size += num_bytes
        check_size(self._url, self._size, self._max_bytes)
        if self._size >= self._end_of_block:
            self._end_of_block, self._deadline = self._size + _BLOCK_BYTES, time.monotonic() + self._seconds

    def seconds_left(self) -> float:
        """Return how long the block may be waited for; raise TimeoutError if that time is over."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it comes too slowly")
        return left

    @contextmanager
    def waiting(self) -> Iterator[float]:
        """Give the seconds that are left; time outside this context, in which a disk may be slow, does not count."""
        self._deadline += time.monotonic() - self._left
        try:
            yield self.seconds_left()
        finally:
            self._left = time.monotonic()


async def in_time(pace: AnswerPace, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine of fsspec's gives; end it by a TimeoutError where it does not keep the pace."""
    task = asyncio.ensure_future(coroutine)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=pace.seconds_left())
        return task.result()
    finally:
        task.cancel()


class _Response(HTTPResponse):
    """An answer of which each read from the connection has what is left of the time."""

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


def keep_pace(session: requests.Session, connections: int) -> None:
    """Have all answers to a session, by proxies too, come in time; it keeps so many connections open."""
    from requests.adapters import HTTPAdapter

    class Adapter(HTTPAdapter):
        def get_connection_with_tls_context(self, *args: Any, **options: Any) -> Any:
            pool = super().get_connection_with_tls_context(*args, **options)
            if "response_class" not in vars(pool.ConnectionCls):
                pool.ConnectionCls = type("Connection", (pool.ConnectionCls,), {"response_class": _Response})
            return pool

    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter(pool_maxsize=connections))

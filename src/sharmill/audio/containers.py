"""Recordings inside container files, such as the members of tar archives: taken out by their place, never unpacked.

A container may be read by several threads at once. What was taken out last is kept, since a recording in a container
may have many segments.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Final

from sharmill.audio.decoder import AudioBytes
from sharmill.audio.files import Recording, open_audio, open_bytes
from sharmill.audio.row_files import file_state, is_mapped, read_audio
from sharmill.audio.spool import Kept, Spool
from sharmill.errors import RejectRecord
from sharmill.manifest import Member

_KEPT_BYTES: Final = 64 << 20
_Key = tuple[Path, Member, tuple[int, int] | None]


def read_member(path: Path, member: Member) -> bytes:
    """Return the audio file at a place in a container that lies at ``path``, as bytes.

    Raises:
        RejectRecord: missing_audio or unreadable_audio where there is no such container, or it ends before.
    """
    return _recent.get(path, member)


@contextmanager
def gather_rows(recordings: Iterable[tuple[Path, Member]]) -> Iterator[None]:
    """Keep the audio of rows of parquet files at hand for as long as the context lasts.

    A whole row group is read to have one row of it. They are gone through in their order here, so that each group is
    read once, in whatever order the rows are then wanted. Beyond 64 MiB they wait in a temporary file. Several threads
    may be in such contexts, also of the same rows.
    """
    rows = {(path, member) for path, member in recordings if member.kind != "bytes" and not is_mapped(path)}
    gathered: list[_Key] = []
    spool = Spool(_KEPT_BYTES)
    try:
        for path, member in sorted(rows):
            # Who asks for it is told what is wrong.
            with suppress(RejectRecord):
                gathered.append(_recent.gather(path, member, spool))
        yield
    finally:
        _recent.forget(gathered)


@contextmanager
def open_member(path: Path, member: Member, name: str) -> Iterator[Recording]:
    """Open the audio file at a place in a container; a range of bytes is read in parts, as a file is.

    Raises:
        RejectRecord: as ``read_member`` and ``sharmill.audio.files.probe``.
    """
    if member.kind != "bytes":
        with open_bytes(AudioBytes(name, read_member(path, member))) as recording:
            yield recording
        return
    with open_audio(path) as file:
        if os.fstat(file.fileno()).st_size < member.start + member.size:
            raise RejectRecord("unreadable_audio", f"{path} ends within the recording at byte {member.start}")
        with open_bytes(AudioBytes(name, file, member.start, member.size)) as recording:
            yield recording


def _take_out(path: Path, member: Member) -> bytes:
    """Return the audio of a row of a parquet or Arrow file, or a range of bytes, as a member of a tar archive is."""
    if member.kind != "bytes":
        return read_audio(path, member.kind.partition(":")[2], member.start, member.size)
    with open_audio(path) as stream:
        data = AudioBytes(str(path), stream, member.start, member.size).read()
    if len(data) < member.size:
        raise RejectRecord("unreadable_audio", f"{path} ends within the recording at byte {member.start}")
    return data


class _Recent:
    """The recordings that were taken out last, as many as fit into some bytes, and always the last one."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[_Key, bytes] = OrderedDict()
        self._gathered: dict[_Key, list[tuple[Spool, Kept]]] = {}
        self._lock = Lock()

    def get(self, path: Path, member: Member) -> bytes:
        # A container that was replaced is read anew.
        key = (path, member, file_state(path))
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            gathered = self._gathered.get(key)
            newest = gathered[-1] if gathered else None
        if newest is not None:
            spool, kept = newest
            return spool.get(kept)
        data = _take_out(path, member)
        with self._lock:
            self._kept[key] = data
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > self._max_bytes:
                self._kept.popitem(last=False)
        return data

    def gather(self, path: Path, member: Member, spool: Spool) -> _Key:
        """Keep a recording in a spool until it is forgotten as often as it was gathered."""
        key = (path, member, file_state(path))
        with self._lock:
            if (before := self._gathered.get(key)) is not None:
                before.append(before[0])
                return key
        kept = spool.put(_take_out(path, member))
        with self._lock:
            self._gathered.setdefault(key, []).append((spool, kept))
        return key

    def forget(self, keys: Iterable[_Key]) -> None:
        """Let go of recordings that were gathered; the file of a spool goes with the last of them."""
        with self._lock:
            for key in keys:
                self._gathered[key].pop()
                if not self._gathered[key]:
                    del self._gathered[key]


_recent: Final = _Recent(_KEPT_BYTES)

"""Audio roots: the files that the audio paths of a manifest stand for, inside one folder and never a command.

Every stage asks here, so that all of them agree on which file a path means. A root may be a URL: audio below it is
copied into the cache of the run, where every stage and rank finds the same copy.
"""

import dataclasses
import itertools
import math
import os
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import ENOENT
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import quote, unquote

from sharmill.errors import ConfigError, DeviceError, RejectRecord, refuse
from sharmill.files.cache import Cache
from sharmill.files.location import Location, RemoteLocation, is_url, local
from sharmill.files.similar import describe_similar
from sharmill.manifest import MAX_PATH, Segment

# A part of a URL's path goes up whatever query or parameter is behind it.
_GOES_UP: Final = re.compile(r"(?:^|[/\\])\.\.(?:[/\\?;#]|$)")
# The problem of an absolute path, and of a URL, that is not below the root.
_NOT_BELOW: Final = {
    False: "the audio path is absolute and not below the audio root",
    True: "the audio path is a URL and not below the audio root; it is fetched where audio_root is the begin of it, "
    "https://host/folder",
}
# More than a day of speech at 16 kHz in WAV.
_MAX_BYTES: Final = 4 << 30


def normalise_path(audio_filepath: str, roots: Iterable[str] = ()) -> str:
    """Return an audio path of a manifest relative to its root: without ``.``, ``..`` and double slashes.

    Only the text is looked at, not the disk. ``roots`` are the absolute paths, or URLs, that the root is known by.

    Raises:
        RejectRecord: ``outside_root`` where the path names a command, is absolute or a URL and below none of ``roots``,
            or leaves the root by ``..``; ``missing_audio`` where it is longer than any path.

    Example:
        >>> normalise_path("/data/./speech/a/../b.wav", ["/data/speech"])
        'b.wav'
    """
    if audio_filepath.startswith("pipe:") or audio_filepath.rstrip().endswith("|"):
        raise RejectRecord("outside_root", "the audio path names a command, not a file")
    if "\0" in audio_filepath:
        raise RejectRecord("outside_root", "the audio path has a null character, which no path can have")
    if len(audio_filepath) > MAX_PATH:
        raise RejectRecord(
            "missing_audio", f"the audio path has {len(audio_filepath):,} characters, more than a path can have"
        )
    relative, is_remote = audio_filepath, is_url(audio_filepath)
    if is_remote or audio_filepath.startswith("/"):
        behind = [rest for root in roots if (rest := _behind(root, audio_filepath)) is not None]
        if not behind:
            raise RejectRecord("outside_root", _NOT_BELOW[is_remote])
        relative = behind[0]
    if is_remote:
        _check_dots(relative)
        return relative
    parts: list[str] = []
    for part in relative.split("/"):
        if part in ("", "."):
            continue
        if part != "..":
            parts.append(part)
        elif parts:
            parts.pop()
        else:
            raise RejectRecord("outside_root", "the audio path leaves the audio root by '..'")
    return "/".join(parts)


def _behind(root: str, path: str) -> str | None:
    """Return the part of an absolute path or a URL below a root; None if it lies elsewhere."""
    if is_url(path):
        return path.removeprefix(f"{root}/") if path.startswith(f"{root}/") else None
    pure = PurePosixPath(path)
    return str(pure.relative_to(root)) if pure.is_relative_to(root) else None


def _check_dots(relative: str) -> None:
    """Raise RejectRecord ``outside_root`` where a path below a URL goes up: a server undoes the quoting before."""
    if _GOES_UP.search(unquote(relative)):
        raise RejectRecord("outside_root", "the audio path leaves the audio root by '..'")


@dataclass(frozen=True)
class AudioRoot:
    """A folder, or a URL, that no audio path of one source may leave.

    Args:
        path: the folder; of a URL there is none.
        absolute_only: paths relative to it are rejected: of ``audio_root: null``, where it is the root of all folders.
        url: without a slash at its end; empty for a folder.
        float_scale: full scale of files below it that hold floats.
    """

    path: Path
    absolute_only: bool = False
    url: str = ""
    float_scale: float = 1.0

    @classmethod
    def of(cls, path: str | Path | None, float_scale: float = 1.0) -> "AudioRoot":
        """Make the root of a value of ``audio_root``: ``~`` is a home folder, and None is all folders."""
        if path is None:
            return cls(Path("/"), absolute_only=True, float_scale=float_scale)
        if is_url(str(path)):
            return cls(Path(), url=str(path).rstrip("/"), float_scale=float_scale)
        return cls(Path(os.path.expanduser(path)), float_scale=float_scale)  # noqa: PTH111

    def check(self) -> None:
        """Raise ConfigError where the folder is not there, or has nothing in it; a URL is not asked for."""
        if self.url:
            return
        fault = "is empty"
        try:
            with os.scandir(self.path) as entries:
                # A disk that is not mounted leaves an empty folder.
                if next(entries, None) is not None:
                    return
        except PermissionError:
            return  # its files may be readable
        except NotADirectoryError:
            fault = "is not a folder"
        except OSError as error:
            fault = "does not exist" if error.errno == ENOENT else f"cannot be read ({error.strerror})"
        where = "" if self.path.is_absolute() else f", which is relative to {Path.cwd()},"
        raise ConfigError(
            f"the audio root {self.path}{where} {fault}; correct audio_root, or run from the folder that it is "
            f"relative to{describe_similar(self.path) if fault == 'does not exist' else ''}",
            code="missing_input",
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The absolute paths that it is known by: as it is written, without ``..``, and with links resolved."""
        if self.url:
            return (self.url,)
        return str(self.path.absolute()), os.path.normpath(self.path.absolute()), os.path.realpath(self.path)

    @property
    def real(self) -> str:
        """The absolute path, links resolved, or the URL."""
        return self.names[-1]

    def _join(self, relative: str) -> str:
        # pathlib would take a tenth of the time that checking a record takes.
        return os.path.join(self.path, relative)  # noqa: PTH118

    def holds(self, absolute: str) -> bool:
        """Return True if an absolute path or a URL is below one of the names of the root."""
        return any(_behind(name, absolute) is not None for name in self.names)

    def has(self, relative: str) -> bool:
        """Return True if there is a file of a normalised path on this machine."""
        return not self.url and os.path.exists(self._join(relative))  # noqa: PTH110

    def name_of(self, relative: str) -> str:
        """Return the name of a file that is the same by whatever links it is reached: a real path, or a URL."""
        return _url_below(self.url, relative) if self.url else os.path.realpath(self._join(relative))

    def check_inside(self, relative: str) -> None:
        """Raise RejectRecord ``outside_root`` where a normalised path leads out: by a symbolic link, or quoted dots."""
        if self.url:
            _check_dots(relative)
            return
        real = os.path.realpath(self._join(relative))
        inside = os.path.join(self.real, "")  # noqa: PTH118 - a Path has no separator at its end
        if not (real == self.real or real.startswith(inside)):
            raise RejectRecord("outside_root", "the audio path leaves the audio root by a symbolic link")


@dataclass(frozen=True)
class AudioRoots:
    """The audio roots of all sources of a dataset, numbered in their order in the configuration.

    Attributes:
        roots: by number.
        numbers: those of each source.
        cache: where what is below URLs is copied to.
    """

    roots: tuple[AudioRoot, ...]
    numbers: tuple[tuple[int, ...], ...]
    cache: Cache

    @classmethod
    def of(
        cls,
        audio_roots: Iterable[str | Path | Sequence[str] | None],
        cache: Cache | None = None,
        float_scales: Iterable[float] = (),
    ) -> "AudioRoots":
        """Make the roots of the values of ``audio_root``, one of each source, and of a cache, by default the user's.

        ``float_scales`` are those of the first sources; the scale of all others is 1.
        """
        roots: list[AudioRoot] = []
        numbers = []
        for value, float_scale in zip(audio_roots, itertools.chain(float_scales, itertools.repeat(1.0)), strict=False):
            paths = [value] if value is None or isinstance(value, (str, Path)) else value
            numbers.append(tuple(range(len(roots), len(roots) + len(paths))))
            roots += [AudioRoot.of(path, float_scale) for path in paths]
        # A redirect may lead to the host of another root.
        origins = frozenset(root.url for root in roots if root.url)
        return cls(tuple(roots), tuple(numbers), dataclasses.replace(cache or Cache.at(None), origins=origins))

    def check(self) -> None:
        """Raise ConfigError where a folder is not there, or one of a source lies within another of it."""
        for root in self.roots:
            root.check()
        for numbers in self.numbers:
            for one, other in itertools.permutations(numbers, 2):
                outer, inner = self.roots[one], self.roots[other]
                is_inside = Path(inner.real).is_relative_to(outer.real)
                refuse((is_inside, f"the audio root {inner.path} lies within {outer.path}; name the outer one only"))

    def check_node(self) -> None:
        """Raise DeviceError where this node does not see a folder: all records there would be rejected, one by one."""
        for root in self.roots:
            try:
                root.check()
            except ConfigError as error:
                raise DeviceError(
                    f"this node does not see the audio: {error}",
                    place=f"node {socket.gethostname()}",
                    code="unlike_nodes",
                ) from error

    def place(self, source: int, audio_filepath: str) -> tuple[int, str]:
        """Return the root of a record's audio, by its number, and the normalised path below it, links left as they are.

        A relative path is below the first folder of the source that has such a file, else below its first root. Of
        equal roots the first one is returned, so that one file is one file in whichever source it is; roots are not
        equal if their float scales differ.

        Raises:
            RejectRecord: ``outside_root``, as ``normalise_path``, and where a symbolic link, or a quoted ``..`` below a
                URL, leads out.
        """
        numbers = self.numbers[source]
        relative = normalise_path(audio_filepath, [name for number in numbers for name in self.roots[number].names])
        number = numbers[0]
        if audio_filepath.startswith("/") or is_url(audio_filepath):
            number = next(n for n in numbers if self.roots[n].holds(audio_filepath))
        elif self.roots[number].absolute_only:
            raise RejectRecord("outside_root", "the audio path is relative, and its source has audio_root: null")
        elif len(numbers) > 1:
            # A URL is not asked: records must not depend on what it has at that moment.
            number = next((n for n in numbers if self.roots[n].has(relative)), number)
        found = self.roots[number]
        found.check_inside(relative)
        return next(
            n for n, root in enumerate(self.roots)
            if root.real == found.real and root.float_scale == found.float_scale
        ), relative  # fmt: skip

    def may_have(self, record: Any, source: int | None) -> bool:
        """Return True if the file of a record of a source, or of any for None, is there, or below a URL.

        A URL is not asked.
        """
        with suppress(RejectRecord, KeyError, TypeError):
            for one in range(len(self.numbers)) if source is None else [source]:
                number, relative = self.place(one, record["audio_filepath"])
                if self.roots[number].url or self.roots[number].has(relative):
                    return True
        return False

    def locate(self, segment: Segment) -> Path:
        """Return where the file of a segment, or its container, lies, as ``obtain``.

        Raises:
            RejectRecord: ``outside_root`` where the path leads out by now, and what ``Cache.get`` raises.
        """
        self.roots[segment.root].check_inside(segment.file)
        return self.obtain(segment.root, segment.file, is_container=segment.member is not None)

    def obtain(self, number: int, relative: str, *, is_container: bool) -> Path:
        """Return where the file of a path that ``place`` has just returned lies, links as they are; of a URL the copy.

        A copy is not evicted as long as the path that is returned lives.

        Raises:
            RejectRecord: what ``Cache.get`` raises.
        """
        return local(self.path_of(number, relative, math.inf if is_container else _MAX_BYTES))

    def path_of(self, number: int, relative: str, max_bytes: float = math.inf) -> Location:
        """Return the location of a file below a root; behind a URL, a file of more than ``max_bytes`` is refused."""
        root = self.roots[number]
        if root.url:
            return RemoteLocation(_url_below(root.url, relative), self.cache, max_bytes=max_bytes)
        return root.path / relative

    def real_name(self, segment: Segment) -> str:
        """Return a name of a segment's recording: the same for one file, by whatever links and roots it is named."""
        path = self.roots[segment.root].name_of(segment.file)
        return path if segment.member is None else f"{path}\0{segment.member.start}"


def _url_below(root: str, relative: str) -> str:
    """Return the URL of a path below a root; what URLs of web servers cannot have is quoted.

    >>> _url_below("https://host/speech", "84/a b.flac")
    'https://host/speech/84/a%20b.flac'
    """
    # Characters that are quoted already stay so.
    safe = "/%?=&+,:;@~!$'()*[]"
    return f"{root}/{quote(relative, safe=safe) if root.startswith('http') else relative}"

"""Audio roots: the folders and URLs in which the audio paths of manifests are resolved.

All stages resolve paths here, so that they agree on the file that a path means. A path that leaves its root or is a
command is rejected. A root may be a URL; audio below it is copied into the cache of the run, where every stage and rank
finds the same copy.
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

# ".." in a URL leads to the parent folder even if a query or a parameter follows.
_GOES_UP: Final = re.compile(r"(?:^|[/\\])\.\.(?:[/\\?;#]|$)")
# The error message for an absolute path (False) or a URL (True) that is not below the root.
_NOT_BELOW: Final = {
    False: "the audio path is absolute and not below the audio root",
    True: "the audio path is a URL and not below the audio root; set audio_root to the beginning of the URL, such as "
    "https://host/folder",
}
# Maximum size of a file below a URL: more than a day of speech as WAV at 16 kHz.
_MAX_BYTES: Final = 4 << 30


def normalise_path(audio_filepath: str, roots: Iterable[str] = ()) -> str:
    """Return an audio path of a manifest relative to its root, without ``.``, ``..`` and double slashes.

    Only the text is examined, not the disk.

    Args:
        audio_filepath: the path in the manifest.
        roots: the absolute paths or URLs of the root.

    Raises:
        RejectRecord: ``outside_root`` if the path is a command, contains a null character, leaves the root through
            ``..``, or is absolute or a URL and below none of ``roots``; ``missing_audio`` if it is longer than a path
            can be.

    Example:
        >>> normalise_path("/data/./speech/a/../b.wav", ["/data/speech"])
        'b.wav'
    """
    if audio_filepath.startswith("pipe:") or audio_filepath.rstrip().endswith("|"):
        raise RejectRecord("outside_root", "the audio path is a command, not a file")
    if "\0" in audio_filepath:
        raise RejectRecord("outside_root", "the audio path contains a null character, which paths cannot have")
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
    """Return an absolute path or a URL relative to a root; None if it is not below the root."""
    if is_url(path):
        return path.removeprefix(f"{root}/") if path.startswith(f"{root}/") else None
    pure = PurePosixPath(path)
    return str(pure.relative_to(root)) if pure.is_relative_to(root) else None


def _check_dots(relative: str) -> None:
    """Raise RejectRecord ``outside_root`` if a path below a URL contains ``..``, percent-encoded or not."""
    if _GOES_UP.search(unquote(relative)):
        raise RejectRecord("outside_root", "the audio path leaves the audio root by '..'")


@dataclass(frozen=True)
class AudioRoot:
    """A folder, or a URL, that the audio paths of a source must not leave.

    Args:
        path: the folder; unused for a URL.
        absolute_only: True to reject relative paths, as for ``audio_root: null``, whose folder is ``/``.
        url: the URL without a trailing slash; empty for a folder.
        float_scale: the value of full scale in float files below the root.
    """

    path: Path
    absolute_only: bool = False
    url: str = ""
    float_scale: float = 1.0

    @classmethod
    def of(cls, path: str | Path | None, float_scale: float = 1.0) -> "AudioRoot":
        """Create the root for a value of ``audio_root``; ``~`` means a home folder, and None allows all folders."""
        if path is None:
            return cls(Path("/"), absolute_only=True, float_scale=float_scale)
        if is_url(str(path)):
            return cls(Path(), url=str(path).rstrip("/"), float_scale=float_scale)
        return cls(Path(os.path.expanduser(path)), float_scale=float_scale)  # noqa: PTH111

    def check(self) -> None:
        """Raise ConfigError if the folder is missing or empty; a URL is not requested."""
        if self.url:
            return
        fault = "is empty"
        try:
            with os.scandir(self.path) as entries:
                # The mount point of a disk that is not mounted is an empty folder.
                if next(entries, None) is not None:
                    return
        except PermissionError:
            return  # the files in it may still be readable
        except NotADirectoryError:
            fault = "is not a folder"
        except OSError as error:
            fault = "does not exist" if error.errno == ENOENT else f"cannot be read ({error.strerror})"
        where = "" if self.path.is_absolute() else f", which is relative to {Path.cwd()},"
        raise ConfigError(
            f"the audio root {self.path}{where} {fault}; correct audio_root, or run from the folder to which it is "
            f"relative{describe_similar(self.path) if fault == 'does not exist' else ''}",
            code="missing_input",
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The absolute paths of the root: as written, without ``..``, and with links resolved; or its URL."""
        if self.url:
            return (self.url,)
        return str(self.path.absolute()), os.path.normpath(self.path.absolute()), os.path.realpath(self.path)

    @property
    def real(self) -> str:
        """The absolute path with links resolved, or the URL."""
        return self.names[-1]

    def _join(self, relative: str) -> str:
        # With pathlib, this line would take a tenth of the time that it takes to check a record.
        return os.path.join(self.path, relative)  # noqa: PTH118

    def holds(self, absolute: str) -> bool:
        """Return True if an absolute path or a URL is below one of the names of the root."""
        return any(_behind(name, absolute) is not None for name in self.names)

    def has(self, relative: str) -> bool:
        """Return True if the root is a folder and contains the file of a normalised path."""
        return not self.url and os.path.exists(self._join(relative))  # noqa: PTH110

    def name_of(self, relative: str) -> str:
        """Return a name for a file that does not depend on links: its real path, or its URL."""
        return _url_below(self.url, relative) if self.url else os.path.realpath(self._join(relative))

    def check_inside(self, relative: str) -> None:
        """Raise RejectRecord ``outside_root`` if a normalised path leaves the root by a link or an encoded ``..``."""
        if self.url:
            _check_dots(relative)
            return
        real = os.path.realpath(self._join(relative))
        inside = os.path.join(self.real, "")  # noqa: PTH118 - a Path has no trailing separator
        if not (real == self.real or real.startswith(inside)):
            raise RejectRecord("outside_root", "the audio path leaves the audio root by a symbolic link")


@dataclass(frozen=True)
class AudioRoots:
    """The audio roots of all sources of a dataset, numbered in their order in the configuration.

    Attributes:
        roots: all roots; the number of a root is its index.
        numbers: for each source, the numbers of its roots.
        cache: the cache for copies of files below URLs.
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
        """Create the roots from the values of ``audio_root``, one value for each source.

        Args:
            audio_roots: the values; each is a folder or URL, a list of them, or None.
            cache: the cache for files below URLs; by default the user's cache.
            float_scales: the value of full scale in float files, for each of the first sources; 1 for all other
                sources.
        """
        roots: list[AudioRoot] = []
        numbers = []
        for value, float_scale in zip(audio_roots, itertools.chain(float_scales, itertools.repeat(1.0)), strict=False):
            paths = [value] if value is None or isinstance(value, (str, Path)) else value
            numbers.append(tuple(range(len(roots), len(roots) + len(paths))))
            roots += [AudioRoot.of(path, float_scale) for path in paths]
        # Redirects may lead to the host of any root.
        origins = frozenset(root.url for root in roots if root.url)
        return cls(tuple(roots), tuple(numbers), dataclasses.replace(cache or Cache.at(None), origins=origins))

    def check(self) -> None:
        """Raise ConfigError if a folder is missing, or lies within another folder of the same source."""
        for root in self.roots:
            root.check()
        for numbers in self.numbers:
            for one, other in itertools.permutations(numbers, 2):
                outer, inner = self.roots[one], self.roots[other]
                is_inside = Path(inner.real).is_relative_to(outer.real)
                refuse((is_inside, f"the audio root {inner.path} lies within {outer.path}; name the outer one only"))

    def check_node(self) -> None:
        """Raise DeviceError if this node cannot see a folder, instead of rejecting all records in it one by one."""
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
        """Return the number of the root for a record's audio, and the normalised path below it; links are not resolved.

        A relative path belongs to the first folder of the source in which the file exists, or else to the source's
        first root. If sources share a root, the first of the equal roots is returned, so that a file has the same place
        in all sources. Roots with different float scales are not equal.

        Raises:
            RejectRecord: see ``normalise_path``; also ``outside_root`` if the path leaves the root through a symbolic
                link or, below a URL, through a percent-encoded ``..``.
        """
        numbers = self.numbers[source]
        relative = normalise_path(audio_filepath, [name for number in numbers for name in self.roots[number].names])
        number = numbers[0]
        if audio_filepath.startswith("/") or is_url(audio_filepath):
            number = next(n for n in numbers if self.roots[n].holds(audio_filepath))
        elif self.roots[number].absolute_only:
            raise RejectRecord("outside_root", "the audio path is relative, and its source has audio_root: null")
        elif len(numbers) > 1:
            # Do not request URLs: the choice of a root must not depend on which files exist there at the moment.
            number = next((n for n in numbers if self.roots[n].has(relative)), number)
        found = self.roots[number]
        found.check_inside(relative)
        return next(
            n for n, root in enumerate(self.roots)
            if root.real == found.real and root.float_scale == found.float_scale
        ), relative  # fmt: skip

    def may_have(self, record: Any, source: int | None) -> bool:
        """Return True if the audio of a record exists in a source (in any source if None), or is below a URL.

        URLs are not requested.
        """
        with suppress(RejectRecord, KeyError, TypeError):
            for one in range(len(self.numbers)) if source is None else [source]:
                number, relative = self.place(one, record["audio_filepath"])
                if self.roots[number].url or self.roots[number].has(relative):
                    return True
        return False

    def locate(self, segment: Segment) -> Path:
        """Return the local path of the file or container that holds a segment; see ``obtain``.

        Raises:
            RejectRecord: ``outside_root`` if the path now leaves the root; also see ``Cache.get``.
        """
        self.roots[segment.root].check_inside(segment.file)
        return self.obtain(segment.root, segment.file, is_container=segment.member is not None)

    def obtain(self, number: int, relative: str, *, is_container: bool) -> Path:
        """Return the local path for a result of ``place``; below a URL, it is the path of the copy in the cache.

        A copy is not evicted while the returned path object exists.

        Args:
            number: the number of the root.
            relative: the normalised path below the root.
            is_container: True for a container, whose size is not limited.

        Raises:
            RejectRecord: see ``Cache.get``.
        """
        return local(self.path_of(number, relative, math.inf if is_container else _MAX_BYTES))

    def path_of(self, number: int, relative: str, max_bytes: float = math.inf) -> Location:
        """Return the location of a file below a root; a file below a URL is refused if larger than ``max_bytes``."""
        root = self.roots[number]
        if root.url:
            return RemoteLocation(_url_below(root.url, relative), self.cache, max_bytes=max_bytes)
        return root.path / relative

    def real_name(self, segment: Segment) -> str:
        """Return a name for a segment's recording that depends neither on links nor on roots."""
        path = self.roots[segment.root].name_of(segment.file)
        return path if segment.member is None else f"{path}\0{segment.member.start}"


def _url_below(root: str, relative: str) -> str:
    """Return the URL of a path below a root; characters that HTTP URLs cannot contain are percent-encoded.

    >>> _url_below("https://host/speech", "84/a b.flac")
    'https://host/speech/84/a%20b.flac'
    """
    # "%" is safe, so that characters that are already percent-encoded stay as they are.
    safe = "/%?=&+,:;@~!$'()*[]"
    return f"{root}/{quote(relative, safe=safe) if root.startswith('http') else relative}"

"""Audio roots: the files that the audio paths of a manifest stand for, inside one folder and never a command.

A root may be a URL: what is below it is fetched. Every stage asks here, so that all of them agree on which file a path
means.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from errno import ENOENT
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote

from sharmill.audio.fetch import copy_of, fetch, is_url, origin, url_below
from sharmill.errors import ConfigError, DeviceError, RejectRecord
from sharmill.manifest import Segment

# A part of a URL's path goes up whatever query or parameter is behind it.
_GOES_UP: Final = re.compile(r"(?:^|[/\\])\.\.(?:[/\\?;#]|$)")


def normalise_path(audio_filepath: str, roots: Iterable[str] = ()) -> str:
    """Return an audio path of a manifest relative to its root: without ``.``, ``..`` and double slashes.

    Only the text is looked at, not the disk. ``roots`` are the absolute paths, or URLs, that the root is known by.

    Raises:
        RejectRecord: ``outside_root`` where the path names a command, is absolute or a URL and below none of ``roots``,
            or leaves the root by ``..``.

    Example:
        >>> normalise_path("/data/./speech/a/../b.wav", ["/data/speech"])
        'b.wav'
    """
    if audio_filepath.startswith("pipe:") or audio_filepath.rstrip().endswith("|"):
        raise RejectRecord("outside_root", "the audio path names a command, not a file")
    if "\0" in audio_filepath:
        raise RejectRecord("outside_root", "the audio path has a null character, which no path can have")
    if is_url(audio_filepath):
        return _below_url(audio_filepath, roots)
    relative = audio_filepath
    if audio_filepath.startswith("/"):
        path = PurePosixPath(audio_filepath)
        root = next((root for root in roots if path.is_relative_to(root)), None)
        if root is None:
            raise RejectRecord("outside_root", "the audio path is absolute and not below the audio root")
        relative = str(path.relative_to(root))
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


def _below_url(url: str, roots: Iterable[str]) -> str:
    """Return the part of a URL below one of ``roots``, as it stands."""
    root = next((root for root in roots if url.startswith(f"{root}/")), None)
    if root is None:
        raise RejectRecord(
            "outside_root",
            "the audio path is a URL and not below the audio root; it is fetched where audio_root is the begin of it, "
            "https://host/folder",
        )
    relative = url[len(root) + 1 :]
    _check_dots(relative)
    return relative


def _check_dots(relative: str) -> None:
    """Raise RejectRecord ``outside_root`` where a path below a URL goes up: a server undoes the quoting before."""
    if _GOES_UP.search(unquote(relative)):
        raise RejectRecord("outside_root", "the audio path leaves the audio root by '..'")


@dataclass(frozen=True)
class AudioRoot:
    """A folder, or a URL, that no audio path of one source may leave.

    Args:
        path: the folder; of a URL that of the copies.
        absolute_only: paths relative to it are rejected: of ``audio_root: null``, where it is the root of all folders.
        url: without a slash at its end; empty for a folder.
    """

    path: Path
    absolute_only: bool = False
    url: str = ""

    @classmethod
    def of(cls, path: str | Path | None, copies: Path = Path()) -> AudioRoot:
        """Make the root of a value of ``audio_root``: ``~`` is a home folder, and None is all folders.

        ``copies`` is the folder for what is fetched of a URL.
        """
        if path is None:
            return cls(Path("/"), absolute_only=True)
        if is_url(str(path)):
            return cls(copies, url=str(path).rstrip("/"))
        return cls(Path(os.path.expanduser(path)))  # noqa: PTH111

    def check(self) -> None:
        """Raise ConfigError where the folder is not there, or has nothing in it; a URL is not asked for."""
        if not self.url and (fault := self._fault()):
            where = "" if self.path.is_absolute() else f", which is relative to {Path.cwd()},"
            raise ConfigError(
                f"the audio root {self.path}{where} {fault}; correct audio_root, or run from the folder "
                "that it is relative to",
                code="missing_input",
            )

    def _fault(self) -> str:
        try:
            with os.scandir(self.path) as entries:
                # A disk that is not mounted leaves an empty folder.
                return "" if next(entries, None) is not None else "is empty"
        except PermissionError:
            return ""  # its files may be readable
        except NotADirectoryError:
            return "is not a folder"
        except OSError as error:
            return "does not exist" if error.errno == ENOENT else f"cannot be read ({error.strerror})"

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

    @cached_property
    def _real_prefix(self) -> str:
        return os.path.join(self.real, "")  # noqa: PTH118 - a Path has no separator at its end

    @cached_property
    def _text(self) -> str:
        return str(self.path)

    def _join(self, relative: str) -> str:
        # Without pathlib, which would be a tenth of the time that checking a record takes.
        return os.path.join(self._text, relative)  # noqa: PTH118

    def holds(self, absolute: str) -> bool:
        """Return True if an absolute path or a URL is below one of the names of the root."""
        if self.url or is_url(absolute):
            return absolute.startswith(f"{self.url}/")
        return any(PurePosixPath(absolute).is_relative_to(name) for name in self.names)

    def has(self, relative: str) -> bool:
        """Return True if there is a file of a normalised path on this machine; of a URL, a copy."""
        return os.path.exists(copy_of(self.name_of(relative), self.path) if self.url else self._join(relative))  # noqa: PTH110

    def name_of(self, relative: str) -> str:
        """Return the name of a file that is the same by whatever links it is reached: a real path, or a URL."""
        return url_below(self.url, relative) if self.url else os.path.realpath(self._join(relative))

    def check_inside(self, relative: str) -> None:
        """Raise RejectRecord ``outside_root`` where a normalised path leads out: by a symbolic link, or quoted dots."""
        if self.url:
            _check_dots(relative)
            return
        real = os.path.realpath(self._join(relative))
        if not real.startswith(self._real_prefix) and real != self.real:
            raise RejectRecord("outside_root", "the audio path leaves the audio root by a symbolic link")


@dataclass(frozen=True)
class AudioRoots:
    """The audio roots of all sources of a dataset, numbered in their order in the configuration.

    Attributes:
        roots: by number.
        numbers: those of each source.
    """

    roots: tuple[AudioRoot, ...]
    numbers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, audio_roots: Iterable[str | Path | Sequence[str] | None], copies: Path = Path()) -> AudioRoots:
        """Make the roots of the values of ``audio_root``, one of each source; ``copies`` is for what is fetched."""
        roots: list[AudioRoot] = []
        numbers = []
        for value in audio_roots:
            paths = [value] if value is None or isinstance(value, (str, Path)) else value
            numbers.append(tuple(range(len(roots), len(roots) + len(paths))))
            roots += [AudioRoot.of(path, copies) for path in paths]
        return cls(tuple(roots), tuple(numbers))

    def check(self) -> None:
        """Raise ConfigError where a folder is not there, or one of a source lies within another of it."""
        for root in self.roots:
            root.check()
        for numbers in self.numbers:
            for one, other in itertools.permutations(numbers, 2):
                outer, inner = self.roots[one], self.roots[other]
                if Path(inner.real).is_relative_to(outer.real):
                    raise ConfigError(
                        f"the audio root {inner.path} lies within {outer.path}; name the outer one only",
                        code="bad_config_value",
                    )

    def check_node(self) -> None:
        """Raise DeviceError where this node does not see a folder: all records there would be rejected, one by one."""
        for root in self.roots:
            try:
                root.check()
            except ConfigError as error:
                message = f"this node does not see the audio: {error}"
                raise DeviceError(message, place=f"node {socket.gethostname()}", code="unlike_nodes") from error

    def fetches(self, source: int) -> bool:
        """Return True if a root of a source is a URL."""
        return any(self.roots[number].url for number in self.numbers[source])

    def place(self, source: int, audio_filepath: str) -> tuple[int, str]:
        """Return the root of a record's audio, by its number, and the normalised path below it, links left as they are.

        A relative path is below the first folder of the source that has such a file, else below its first root. Of
        equal roots the first one is returned, so that one file is one file in whichever source it is.

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
            number = next((n for n in numbers if not self.roots[n].url and self.roots[n].has(relative)), number)
        self.roots[number].check_inside(relative)
        return self._first_equal(number), relative

    def _first_equal(self, number: int) -> int:
        return next(n for n, root in enumerate(self.roots) if root.real == self.roots[number].real)

    def locate(self, segment: Segment) -> Path:
        """Return where the file of a segment, or its container, lies, as ``obtain``.

        Raises:
            RejectRecord: ``outside_root`` where the path leads out by now, and what ``fetch`` raises.
        """
        self.roots[segment.root].check_inside(segment.file)
        return self.obtain(segment.root, segment.file)

    def obtain(self, number: int, relative: str) -> Path:
        """Return where the file of a path that ``place`` has just returned lies, links as they are; of a URL the copy.

        Raises:
            RejectRecord: what ``fetch`` raises.
        """
        root = self.roots[number]
        if root.url:
            return fetch(url_below(root.url, relative), root.path, self._origins)
        return root.path / relative

    def real_name(self, segment: Segment) -> str:
        """Return a name of a segment's recording: the same for one file, by whatever links and roots it is named."""
        path = self.roots[segment.root].name_of(segment.file)
        return path if segment.member is None else f"{path}\0{segment.member.start}"

    @cached_property
    def _origins(self) -> frozenset[str]:
        return frozenset(origin(root.url) for root in self.roots if root.url)

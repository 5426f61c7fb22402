"""Audio roots: the files that the audio paths of a manifest stand for, inside one folder and never a command.

Every stage asks here, so that all of them agree on which file a path means.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from sharmill.errors import ConfigError, RejectRecord
from sharmill.manifest import Segment


def normalise_path(audio_filepath: str, roots: Iterable[str] = ()) -> str:
    """Return an audio path of a manifest relative to its root: without ``.``, ``..`` and double slashes.

    Only the text is looked at, not the disk. ``roots`` are the absolute paths that the root is known by.

    Raises:
        RejectRecord: ``outside_root`` where the path names a command, is absolute and below none of ``roots``, or
            leaves the root by ``..``.

    Example:
        >>> normalise_path("/data/./speech/a/../b.wav", ["/data/speech"])
        'b.wav'
    """
    if audio_filepath.startswith("pipe:") or audio_filepath.rstrip().endswith("|"):
        raise RejectRecord("outside_root", "the audio path names a command, not a file")
    if "\0" in audio_filepath:
        raise RejectRecord("outside_root", "the audio path has a null character, which no path can have")
    path = PurePosixPath(audio_filepath)
    if path.is_absolute():
        root = next((root for root in roots if path.is_relative_to(root)), None)
        if root is None:
            raise RejectRecord("outside_root", "the audio path is absolute and not below the audio root")
        path = path.relative_to(root)
    parts: list[str] = []
    for part in path.parts:
        if part != "..":
            parts.append(part)
        elif parts:
            parts.pop()
        else:
            raise RejectRecord("outside_root", "the audio path leaves the audio root by '..'")
    return "/".join(parts)


@dataclass(frozen=True)
class AudioRoot:
    """A folder that no audio path of one source may leave.

    Args:
        path: the folder.
        absolute_only: paths relative to it are rejected: of ``audio_root: null``, where it is the root of all folders.
    """

    path: Path
    absolute_only: bool = False

    @classmethod
    def of(cls, path: str | Path | None) -> AudioRoot:
        """Make the root of a value of ``audio_root``: ``~`` is a home folder, and None is all folders."""
        return cls(Path("/"), absolute_only=True) if path is None else cls(Path(os.path.expanduser(path)))  # noqa: PTH111

    def check(self) -> None:
        """Raise ConfigError where the folder is not there."""
        if not self.path.is_dir():
            where = "" if self.path.is_absolute() else f", which is relative to {Path.cwd()},"
            found = "is not a folder" if self.path.exists() else "does not exist"
            raise ConfigError(
                f"the audio root {self.path}{where} {found}; correct audio_root in sources, or run from the folder "
                "that it is relative to",
                code="missing_input",
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The absolute paths that it is known by: as it is written, without ``..``, and with links resolved."""
        return str(self.path.absolute()), os.path.normpath(self.path.absolute()), os.path.realpath(self.path)

    @property
    def real(self) -> str:
        """The absolute path, links resolved."""
        return self.names[-1]

    def locate(self, relative: str) -> Path:
        """Return where the file of a normalised path lies, links left as they are.

        Raises:
            RejectRecord: ``outside_root`` where a symbolic link leads out of the root.
        """
        real = os.path.realpath(self.path / relative)
        if real != self.real and not real.startswith(os.path.join(self.real, "")):  # noqa: PTH118 - a Path has no separator at its end
            raise RejectRecord("outside_root", "the audio path leaves the audio root by a symbolic link")
        return self.path / relative


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
    def of(cls, audio_roots: Iterable[str | Path | Sequence[str] | None]) -> AudioRoots:
        """Make the roots of the values of ``audio_root``, one of each source."""
        roots: list[AudioRoot] = []
        numbers = []
        for value in audio_roots:
            paths = [value] if value is None or isinstance(value, (str, Path)) else value
            numbers.append(tuple(range(len(roots), len(roots) + len(paths))))
            roots += [AudioRoot.of(path) for path in paths]
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

    def place(self, source: int, audio_filepath: str) -> tuple[int, str]:
        """Return the root of a record's audio, by its number, and the normalised path below it, links left as they are.

        A relative path is below the first root of the source that has such a file. Of equal roots the first one is
        returned, so that one file is one file in whichever source it is.

        Raises:
            RejectRecord: ``outside_root``, as ``normalise_path``, and where a symbolic link leads out.
        """
        numbers = self.numbers[source]
        relative = normalise_path(audio_filepath, [name for number in numbers for name in self.roots[number].names])
        number = numbers[0]
        if audio_filepath.startswith("/"):
            path = PurePosixPath(audio_filepath)
            number = next(n for n in numbers if any(path.is_relative_to(name) for name in self.roots[n].names))
        elif self.roots[number].absolute_only:
            raise RejectRecord("outside_root", "the audio path is relative, and its source has audio_root: null")
        elif len(numbers) > 1:
            number = next((n for n in numbers if (self.roots[n].path / relative).exists()), number)
        self.roots[number].locate(relative)
        return self._first_equal(number), relative

    def _first_equal(self, number: int) -> int:
        return next(n for n, root in enumerate(self.roots) if root.real == self.roots[number].real)

    def locate(self, segment: Segment) -> Path:
        """Return where the file of a segment, or its container, lies.

        Raises:
            RejectRecord: ``outside_root`` where a link leads out.
        """
        return self.roots[segment.root].locate(segment.file)

    def real_name(self, segment: Segment) -> str:
        """Return a name of a segment's recording: the same for one file, by whatever links and roots it is named."""
        path = os.path.realpath(self.roots[segment.root].path / segment.file)
        return path if segment.member is None else f"{path}\0{segment.member.start}"

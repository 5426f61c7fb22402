"""Audio roots: the files that the audio paths of a manifest stand for, inside one folder and never a command.

Every stage asks here, so that all of them agree on which file a path means.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
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
    """The folder that no audio path of one source may leave."""

    path: Path

    def check(self) -> None:
        """Raise ConfigError where the folder is not there."""
        if not self.path.is_dir():
            where = "" if self.path.is_absolute() else f", which is relative to {Path.cwd()},"
            found = "is not a folder" if self.path.exists() else "does not exist"
            remedy = "correct audio_root in sources, or run from the folder that it is relative to"
            if str(self.path).startswith("~"):
                remedy = "'~' stands for a home folder in shells only; write the whole path"
            raise ConfigError(
                f"the audio root {self.path}{where} {found}; {remedy}",
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

    def relative(self, audio_filepath: str) -> str:
        """Return the normalised path relative to the root, links left as they are.

        Raises:
            RejectRecord: ``outside_root``, as ``normalise_path``, and where a symbolic link leads out;
                ``missing_audio`` where a link leads to itself.
        """
        relative = normalise_path(audio_filepath, self.names)
        self.locate(relative)
        return relative

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
    """The audio roots of the sources of a dataset, in their order in the configuration."""

    roots: tuple[AudioRoot, ...]

    @classmethod
    def of(cls, paths: Iterable[str | Path]) -> AudioRoots:
        """Make the roots of the folders at ``paths``."""
        return cls(tuple(AudioRoot(Path(path)) for path in paths))

    def __getitem__(self, source: int) -> AudioRoot:
        return self.roots[source]

    def check(self) -> None:
        """Raise ConfigError where a folder is not there."""
        for root in self.roots:
            root.check()

    def first_equal(self, source: int) -> int:
        """Return the first source with the same folder, so that one file is one file in whichever manifest it is."""
        return next(number for number, root in enumerate(self.roots) if root.real == self.roots[source].real)

    def locate(self, segment: Segment) -> Path:
        """Return where the file of a segment lies; raise RejectRecord ``outside_root`` where a link leads out."""
        return self.roots[segment.source].locate(segment.audio_filepath)

    def real_path(self, segment: Segment) -> str:
        """Return the path of a segment's file with links resolved: the same for one file, however it is named."""
        return os.path.realpath(self.roots[segment.source].path / segment.audio_filepath)

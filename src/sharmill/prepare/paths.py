"""Audio paths of a manifest: inside the audio root, and never a command."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from sharmill.errors import ConfigError, RejectRecord


class AudioRoot:
    """Resolves the audio paths of one source. ``root`` is the folder that no path may leave, ``real`` where it lies."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise ConfigError(f"the audio root {root} is not a folder; correct audio_root in sources")
        self.real = self.root.resolve()

    def relative(self, audio_filepath: str) -> str:
        """The normalised path relative to the root, links left as they are.

        Raises:
            RejectRecord: ``outside_root`` where the path leaves the root, by ``..``, by an absolute path or by a
                symbolic link, or names a command.
        """
        if audio_filepath.startswith("pipe:") or audio_filepath.rstrip().endswith("|"):
            raise RejectRecord("outside_root", "the audio path names a command, not a file")
        if "\0" in audio_filepath:
            raise RejectRecord("outside_root", "the audio path has a null character, which no path can have")
        path = PurePosixPath(audio_filepath)
        if path.is_absolute():
            path = self._below_root(path)
        parts: list[str] = []
        for part in path.parts:
            if part != "..":
                parts.append(part)
            elif parts:
                parts.pop()
            else:
                raise RejectRecord("outside_root", "the audio path leaves the audio root by '..'")
        relative = "/".join(parts)
        try:
            real = (self.real / relative).resolve()
        except (OSError, RuntimeError) as error:
            raise RejectRecord("missing_audio", f"the audio path cannot be resolved: {error}") from error
        if not real.is_relative_to(self.real):
            raise RejectRecord("outside_root", "the audio path leaves the audio root by a symbolic link")
        return relative

    def _below_root(self, path: PurePosixPath) -> PurePosixPath:
        for root in (self.root.absolute(), self.real):
            if path.is_relative_to(root):
                return path.relative_to(root)
        raise RejectRecord("outside_root", "the audio path is absolute and not below the audio root")

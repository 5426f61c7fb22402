"""Model names as the configuration gives them: ``backend`` or ``backend:target``.

Only spelling and the existence of local files are looked at here; nothing heavy is imported.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sharmill.errors import ConfigError

SPEAKER_BACKENDS: Final[tuple[str, ...]] = ("resemblyzer", "nemo")
CODEC_BACKENDS: Final[tuple[str, ...]] = ("builtin", "nemo", "transformers")

_FORMS: Final[dict[str, str]] = {
    "resemblyzer": "resemblyzer",
    "builtin": "builtin",
    "nemo": "nemo:<pretrained name or path of a .nemo file>",
    "transformers": "transformers:<directory or hub name>",
}
_PATH_STARTS: Final[tuple[str, ...]] = ("/", "./", "../", "~")


@dataclass(frozen=True, kw_only=True)
class ModelName:
    """A parsed model name.

    Args:
        name: as it was given.
        backend: what loads it.
        target: what follows the colon, "" if nothing does.
        path: the local file or directory that the target is, or None for a name to be looked up elsewhere.
    """

    name: str
    backend: str
    target: str = ""
    path: Path | None = None

    @property
    def portable(self) -> str:
        """The name without the folders of this machine, for what is published; a checksum tells which model it was."""
        return self.name if self.path is None else f"{self.backend}:{self.path.name}"


def parse_speaker_encoder_name(name: str) -> ModelName:
    """Parses the name of a speaker encoder; raises ConfigError if it cannot name one."""
    return _parse(name, "speaker encoder", SPEAKER_BACKENDS)


def parse_codec_name(name: str) -> ModelName:
    """Parses the name of a codec; raises ConfigError if it cannot name one."""
    return _parse(name, "codec", CODEC_BACKENDS)


def _parse(name: str, kind: str, backends: tuple[str, ...]) -> ModelName:
    backend, _, target = name.partition(":")
    if backend not in backends:
        raise ConfigError(_unknown(name, backend, kind, backends))
    takes_target = "<" in _FORMS[backend]
    if takes_target != bool(target):
        raise ConfigError(f"{kind} {name!r} is incomplete or has too much: write {_FORMS[backend]}")
    path = {"nemo": _nemo_path, "transformers": _transformers_path}[backend](target) if target else None
    return ModelName(name=name, backend=backend, target=target, path=path)


def _unknown(name: str, backend: str, kind: str, backends: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(backend.lower(), backends, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}: valid are {', '.join(_FORMS[b] for b in backends)}{hint}"


def _nemo_path(target: str) -> Path | None:
    if not target.endswith(".nemo"):
        if target.startswith(_PATH_STARTS):
            raise ConfigError(f"{target} is not a .nemo file: give the path of one, or the name of a pretrained model")
        return None
    path = Path(target).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no file {target}: correct the path of the .nemo checkpoint")
    return path


def _transformers_path(target: str) -> Path | None:
    path = Path(target).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{target} has no config.json: give a directory written by save_pretrained")
        return path
    if path.is_file() or target.startswith(_PATH_STARTS):
        raise ConfigError(f"{target} is not a directory: give a directory written by save_pretrained, or a hub name")
    return None

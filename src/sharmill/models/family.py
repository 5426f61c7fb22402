"""The base of families of models, and how one of their models is found by its name in a configuration.

Importing this module, a family's own module, or finding a model imports neither torch nor what a model is made with.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import typing
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Final

import msgspec
import xxhash

from sharmill.errors import ConfigError
from sharmill.files.storage import checksum
from sharmill.registry import Registry, nearest

PATH_STARTS: Final[tuple[str, ...]] = ("/", "./", "../", "~")


@dataclass(frozen=True, kw_only=True)
class ModelFamily(ABC):
    """A family of codecs or of speaker encoders; an object of the class is one of its models, not loaded yet.

    A family is a frozen, keyword-only dataclass derived from this one. Its fields are its options: a configuration
    gives them beside the name of the model. What the output does not depend on is a field with ``compare=False``.

    Args:
        name: the model as a configuration names it, ``family`` or ``family:target``.
        target: what follows the family and a colon in the name; "" if nothing does.
        version: of the package that brings the family, or the checksum of its file; "" for sharmill's own.
    """

    name: str
    target: str
    version: str = ""

    packages: ClassVar[tuple[str, ...]] = ()
    """Packages that its models are computed with beside torch, by the names that pip has."""
    modules: ClassVar[tuple[str, ...]] = ()
    """Modules that ``load`` imports, and that take the most time to import: the ranks of a machine import them once."""
    strangers: ClassVar[tuple[tuple[float, float], ...]] = ()
    """Of speaker encoders: similarities of two utterances of different speakers, in increasing order, each with the
    share of pairs that are less similar; empty if none were measured."""

    @property
    def dependencies(self) -> tuple[str, ...]:
        """All packages whose versions are part of what a stage depends on that loads the model."""
        return ("torch", *self.packages)

    @property
    def min_similarity(self) -> float | None:
        """The least similarity of two utterances that a speaker encoder takes for one voice; None if none is known.

        Similarities of two encoders cannot be compared, so that each needs a number of its own.
        """
        return None

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the types of the options by their names."""
        hints, own = typing.get_type_hints(cls), {field.name for field in dataclasses.fields(ModelFamily)}
        return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.name not in own}

    def resolve(self) -> Path | None:
        """Return the file or directory that the target is; None for a name, which is looked up elsewhere.

        Raises:
            ConfigError: the model cannot be loaded, for a reason that can be seen without loading it.
        """
        for package in self.packages:
            require_installed(package)
        path = Path(self.target).expanduser()
        return path if self.target and path.exists() else None

    def check(self) -> None:
        """Raise ConfigError, within seconds, unless the model is on this machine or can be fetched.

        It is called before a stage that loads the model, and may import the packages.
        """
        self.resolve()

    def identity(self) -> dict[str, Any]:
        """Return what tells the model from others, as JSON values: names, options, checksum of a local file.

        Raises:
            ConfigError: as of ``resolve``.
        """
        path = self.resolve()
        found: dict[str, Any] = {"backend": Registry.split(self.name)[0], "name": self.name}
        found |= {"version": self.version} if self.version else {}
        compared = {field.name for field in dataclasses.fields(self) if field.compare}
        options = {option: getattr(self, option) for option in self.options() if option in compared}
        found |= {"options": options} if options else {}
        return found | ({} if path is None else {"checksum": checksum_of(path)})

    @property
    def published_name(self) -> str:
        """The name without the folders of this machine, for what is published."""
        path = Path(self.target).expanduser()
        return f"{Registry.split(self.name)[0]}:{path.name}" if self.target and path.exists() else self.name

    @abstractmethod
    def load(self, device: str) -> Any:
        """Return the model on a torch device: a ``Codec`` or a ``SpeakerEncoder``.

        Raises:
            ConfigError: the model, its file or the installation is wrong; one line that says what to do.
        """

    def refuse_target(self) -> None:
        """Raise ConfigError if the name has a target; for a family of one model."""
        if self.target:
            family = Registry.split(self.name)[0]
            raise ConfigError(f"'{self.name}' has too much: write {family}", code="bad_model")


def find_model(registry: Registry, name: str, options: Mapping[str, Any]) -> ModelFamily:
    """Return a model by its name, with options of its family.

    Raises:
        ConfigError: there is no such family, it cannot be imported, or it has no such option or value of one.
    """
    implementation, target = registry.split(name)
    family = registry.load(implementation)
    if not (isinstance(family, type) and issubclass(family, ModelFamily)):
        raise ConfigError(
            f"the {registry.kind} {implementation!r} is not a class derived from sharmill.models.ModelFamily",
            code="bad_plugin",
        )
    valid = list(family.options())
    for option in options:
        if option not in valid:
            hint = nearest(option, valid, otherwise=None if valid else "")
            raise ConfigError(f"the {registry.kind} {name!r} has no option {option!r}{hint}", code="unknown_key")
    facts = {"name": name, "target": target, "version": registry.version(implementation)}
    try:
        return msgspec.convert(facts | dict(options), family, strict=False)
    except msgspec.ValidationError as error:
        what = str(error).replace("Object missing required field", "it needs the option").replace("$.", "")
        raise ConfigError(f"the {registry.kind} {name!r}: {what}", code="bad_config_value") from error


def require_installed(package: str) -> None:
    """Raise ConfigError unless a package is installed, by the name that pip has; import nothing."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"the package {package} is not installed: run pip install {package}", code="missing_package"
        ) from None


def refuse_packed_weights(stream: IO[bytes], num_bytes: int, origin: str) -> None:
    """Raise ConfigError where tensors in a file of torch's would take more memory than the file has bytes.

    Torch stores them as they are, in an archive that could have them compressed, or one over the other.
    """
    try:
        with zipfile.ZipFile(stream) as weights:
            unpacked = sum(info.file_size for info in weights.infolist())
    except (zipfile.BadZipFile, NotImplementedError):
        return  # of an older form, or damaged, which torch says
    if unpacked > num_bytes:
        raise ConfigError(
            f"{origin} is not loaded: its weights would unpack to {unpacked:,} bytes from {num_bytes:,}, and torch "
            "itself packs none",
            code="untrusted_model",
        )


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files of a directory."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def checksum_of(path: Path) -> str:
    """Return the xxh3 of a file's bytes, or of the names, sizes and bytes of a directory's files but hidden ones.

    Download tools keep their own notes, with times in them, in hidden folders beside the model.
    """
    if not path.is_dir():
        return checksum(path)
    digest = xxhash.xxh3_64()
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    for name in sorted(files):
        if "/." not in f"/{name}":
            digest.update(f"{name}\0{files[name].stat().st_size}\0{checksum(files[name])}".encode())
    return digest.hexdigest()

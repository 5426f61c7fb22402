"""Speaker encoders and codecs: two protocols, and functions that find and load models by name or by dataset record.

Importing this package and finding a model imports neither torch nor NeMo nor transformers; loading or checking a model
does. Callers decode, resample and batch the audio. A model gets float32 audio at its own sampling rate. Its results for
an item do not depend on the other items in the batch, apart from the rounding of float arithmetic.

>>> find_codec("builtin").identity()["backend"]
'builtin'

A family of models is a class derived from ``ModelFamily``. sharmill's own families are listed in ``sharmill.registry``.
Another package adds a family by an entry point in the group ``sharmill.encoders`` or ``sharmill.codecs``, or a
configuration refers to the family's class as ``python:package.module:Class``. Scorers are families too; see
``sharmill.scores.scorer``.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import msgspec
import xxhash

from sharmill.config import Precision
from sharmill.errors import ConfigError, FatalError, UnitFailed
from sharmill.files.checksums import checksum
from sharmill.models.device import make_deterministic, with_precision
from sharmill.registry import CODECS, ENCODERS, Registry, describe_missing, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from sharmill.shar.index import CodecRecord

__all__ = [
    "Codec",
    "DecodingCodec",
    "ModelFamily",
    "SpeakerEncoder",
    "find_codec",
    "find_model",
    "find_recorded_codec",
    "find_speaker_encoder",
    "load_codec",
    "load_recorded_codec",
    "load_speaker_encoder",
    "make_deterministic",
]


@runtime_checkable
class SpeakerEncoder(Protocol):
    """A model that turns utterances into vectors whose cosine similarity measures the similarity of the voices.

    Attributes:
        sampling_rate: the rate of the audio that ``embed`` expects, in Hz.
        embedding_size: the number of values in an embedding.
        checksum: the xxh3 (hex) of the parameters and saved buffers, in the order of their names.
    """

    sampling_rate: int
    embedding_size: int
    checksum: str

    def embed(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Embed a batch of utterances.

        Args:
            audio: (batch, samples) float32; samples beyond an item's ``num_samples`` are ignored.
            num_samples: (batch,) int64, the length of each item in samples.

        Returns:
            (batch, embedding_size) float32, on the CPU or on the model's device. Every row has length 1, except that
            the row of digital silence (all samples zero) is the zero vector, whose similarity to everything is 0.

        Raises:
            ValueError: the shapes are inconsistent.
        """


@runtime_checkable
class Codec(Protocol):
    """A model that turns audio into discrete codes.

    Attributes:
        sampling_rate: the rate of the audio that ``encode`` expects, in Hz.
        samples_per_frame: the number of samples of audio in one frame of codes.
        num_codebooks: the number of codes per frame.
        codebook_size: the number of possible values of a code; every code is in ``range(codebook_size)``.
        checksum: the xxh3 (hex) of the parameters and saved buffers, in the order of their names.
        trained: False for a model whose codes are meaningless.
        equal_lengths_only: True if padding on the right changes an item's codes. The backend then encodes only items
            with equal numbers of frames together, and is fastest if the caller batches such items.
    """

    sampling_rate: int
    samples_per_frame: int
    num_codebooks: int
    codebook_size: int
    checksum: str
    trained: bool
    equal_lengths_only: bool

    def encode(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Encode a batch of segments.

        An item of n samples has exactly ``ceil(n / samples_per_frame)`` frames; the last frame is padded with zeros
        before encoding.

        Args:
            audio: (batch, samples) float32; samples beyond an item's ``num_samples`` are ignored.
            num_samples: (batch,) int64, the length of each item in samples.

        Returns:
            (batch, num_codebooks, max_frames) int64 on the CPU, 0 beyond an item's last frame.

        Raises:
            ValueError: the shapes are inconsistent.
            FatalError: the model returns a different number of frames.
            UnitFailed: the model returns an index outside its codebook, or values that are not finite. If the code is
                ``bad_codes``, the segments are encoded again one by one, and a segment that fails again gets no codes.
        """


@runtime_checkable
class DecodingCodec(Codec, Protocol):
    """A codec that also turns codes into audio.

    Attributes:
        decoded_sampling_rate: the rate of the audio that ``decode`` returns, in Hz; None if the model cannot decode.
    """

    decoded_sampling_rate: int | None

    def decode(self, codes: Tensor, num_frames: Tensor) -> Tensor:
        """Turn codes into audio. Each item is decoded alone, so the result does not depend on its batch.

        Args:
            codes: (batch, num_codebooks, frames) integers; frames beyond an item's ``num_frames`` are ignored.
            num_frames: (batch,) int64, the length of each item in frames.

        Returns:
            (batch, samples) float32 on the CPU, at ``decoded_sampling_rate``; 0 beyond an item's last frame.

        Raises:
            ValueError: the shapes are inconsistent, or codes lie outside the codebook.
            ConfigError: the model cannot decode.
        """


@dataclass(frozen=True, kw_only=True)
class ModelFamily(ABC):
    """A family of codecs or speaker encoders. An instance is one model of the family, which is not loaded yet.

    A family is a frozen, keyword-only dataclass derived from this one. Its fields are options, which a configuration
    sets next to the name of the model. Options that do not affect the output are fields with ``compare=False``.

    Args:
        name: the model as named in the configuration, ``family`` or ``family:target``.
        target: the part of the name after the colon; "" without a colon.
        version: the version of the package with the family, or the checksum of its file; "" for sharmill's own.
    """

    name: str
    target: str
    version: str = ""

    packages: ClassVar[tuple[str, ...]] = ()
    """PyPI names of the packages, besides torch, that compute the models of the family."""
    modules: ClassVar[tuple[str, ...]] = ()
    """Modules that ``load`` needs and that are slow to import; the ranks of a machine import them only once."""
    takes_target: ClassVar[bool] = True
    """False for a family with a single model, whose name has no target."""
    cross_speaker_similarities: ClassVar[tuple[tuple[float, float], ...]] = ()
    """For speaker encoders: similarities of utterances by different speakers, in increasing order, each with the share
    of such pairs that have a lower similarity; empty if not measured.
    """

    @property
    def min_similarity(self) -> float | None:
        """Minimum similarity at which a speaker encoder considers two voices to be the same; None if unknown.

        Similarities of different encoders are not comparable, so each encoder needs its own threshold.
        """
        return None

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Return the type of each option by its name."""
        hints, own = typing.get_type_hints(cls), {field.name for field in dataclasses.fields(ModelFamily)}
        return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.name not in own}

    def resolve(self) -> Path | None:
        """Return the path of the target if it is a file or directory; None for a name to be looked up elsewhere.

        Raises:
            ConfigError: the model cannot be loaded, for a reason that is found without loading it.
        """
        if self.target and not self.takes_target:
            raise ConfigError(f"'{self.name}' takes no target: write {Registry.split(self.name)[0]}", code="bad_model")
        for package in self.packages:
            try:
                importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                raise ConfigError(
                    describe_missing(package, f"run pip install {package}"), code="missing_package"
                ) from None
        path = Path(self.target).expanduser()
        return path if self.target and path.exists() else None

    def check(self) -> None:
        """Raise ConfigError, within seconds, unless the model is on this machine or can be downloaded.

        This is called before a stage that loads the model, and may import the packages of the family.
        """
        self.resolve()

    def identity(self) -> dict[str, Any]:
        """Return the facts that distinguish the model, as JSON values: names, options, checksum of a local file.

        Raises:
            ConfigError: see ``resolve``.
        """
        path = self.resolve()
        found: dict[str, Any] = {"backend": Registry.split(self.name)[0], "name": self.name}
        found |= {"version": self.version} if self.version else {}
        compared = {field.name for field in dataclasses.fields(self) if field.compare}
        options = {option: getattr(self, option) for option in self.options() if option in compared}
        found |= {"options": options} if options else {}
        return found | ({} if path is None else {"checksum": _checksum_of(path)})

    @property
    def published_name(self) -> str:
        """The model's name without the path of a local folder, for publication."""
        path = Path(self.target).expanduser()
        return f"{Registry.split(self.name)[0]}:{path.name}" if self.target and path.exists() else self.name

    @abstractmethod
    def load(self, device: str) -> Any:
        """Return the model on a torch device: a ``Codec`` or a ``SpeakerEncoder``.

        Raises:
            ConfigError: the model, its file or the installation is wrong; the message is one line that includes the
                remedy.
        """


def find_speaker_encoder(name: str, **options: Any) -> ModelFamily:
    """Find a speaker encoder by its name and the options of its family, without loading it.

    Raises:
        ConfigError: the family or one of the options does not exist.

    >>> find_speaker_encoder("nemo:titanet_large").min_similarity
    0.6
    """
    model: ModelFamily = find_model(ENCODERS, name, options)
    return model


def find_codec(name: str, **options: Any) -> ModelFamily:
    """Find a codec by its name and the options of its family, without loading it.

    Raises:
        ConfigError: the family or one of the options does not exist.

    >>> find_codec("nemo:nvidia/low-frame-rate-speech-codec-22khz").published_name
    'nemo:nvidia/low-frame-rate-speech-codec-22khz'
    """
    model: ModelFamily = find_model(CODECS, name, options)
    return model


def load_speaker_encoder(
    name: str, device: str = "cpu", *, precision: Precision = "fp32", **options: Any
) -> SpeakerEncoder:
    """Load a speaker encoder.

    Args:
        name: ``resemblyzer``, ``nemo:titanet_large`` (any pretrained name), ``nemo:/path/model.nemo``, or an encoder of
            another package.
        device: the torch device of the model.
        precision: the arithmetic in which the model computes.
        options: options of the model's family, such as ``allow_targets`` for NeMo.

    Raises:
        ConfigError: the name, the file or the installation is wrong, or the device does not support the precision; the
            message is one line that includes the remedy.

    >>> load_speaker_encoder("resemblyzer").embedding_size
    256
    """
    return _load_model(ENCODERS, name, device, precision, options, SpeakerEncoder, "embed")


def load_codec(name: str, device: str = "cpu", *, precision: Precision = "fp32", **options: Any) -> Codec:
    """Load a codec.

    Args:
        name: ``builtin``, ``nemo:<pretrained name or .nemo file>``, ``transformers:<directory or hub name>``, or a
            codec of another package.
        device: the torch device of the model.
        precision: the arithmetic in which the model computes.
        options: options of the model's family, such as ``allow_targets`` for NeMo.

    Raises:
        ConfigError: the name, the file or the installation is wrong, the device does not support the precision, or 1, 2
            or 5 frames of audio are not encoded to as many frames of valid codes; the message is one line that includes
            the remedy.

    >>> load_codec("builtin").samples_per_frame
    640
    """
    codec: Codec = _load_model(CODECS, name, device, precision, options, Codec, "encode")
    import torch

    for num_frames in (1, 2, 5):
        samples = num_frames * codec.samples_per_frame
        try:
            codes = codec.encode(torch.zeros(1, samples), torch.tensor([samples]))
        except (FatalError, UnitFailed) as error:
            # A wrong number of frames is the fault of the model; wrong values may be the fault of the device.
            code = "bad_model" if isinstance(error, FatalError) else error.code
            raise ConfigError(f"{error}; use another codec", code=code) from error
        is_as_long = tuple(codes.shape) == (1, codec.num_codebooks, num_frames)
        if not (is_as_long and 0 <= int(codes.min()) <= int(codes.max()) < codec.codebook_size):
            problem = "outside its codebook" if is_as_long else f"of shape {tuple(codes.shape)} for {num_frames} frames"
            raise ConfigError(f"codec {name} returned codes {problem}; use another codec", code="bad_model")
    return codec


def find_recorded_codec(
    record: CodecRecord, given: str | None, options: Mapping[str, Any] | None = None
) -> ModelFamily:
    """Find the codec that made the codes of a dataset, without loading it.

    Datasets are untrusted, so the name of a model in a dataset is not enough to load the model. The user must name it
    too, unless it is the codec that comes with sharmill.

    Args:
        record: the record of the codec in the dataset.
        given: the model that the user names; None for sharmill's own codec.
        options: options of the model's family.

    Raises:
        ConfigError: the user names no model, although the dataset's model is not sharmill's own or was removed; or the
            model cannot be loaded, for a reason that is found without loading it.
    """
    hint = f"(name the model with --codec-model {record.name}=MODEL)"
    if given is None and record.model == "untrained":
        raise ConfigError(
            f"the codes {record.name!r} were made by an untrained codec, which no longer exists: encode again with "
            "the codec builtin",
            code="bad_codec",
        )
    if given is None and record.model != "builtin":
        raise ConfigError(
            f"the dataset names the model {record.model}, which is loaded only if you name it too {hint}",
            code="untrusted_model",
        )
    try:
        model = find_codec(given or record.model, **(options or {}))
        model.resolve()
    except ConfigError as error:
        # A dataset stores the names of local models without their folders, so the user may have to give the path.
        raise ConfigError(f"{error} {hint}", code=error.code) from error
    return model


def load_recorded_codec(
    record: CodecRecord, given: str | None, options: Mapping[str, Any] | None = None, precision: Precision = "fp32"
) -> Codec:
    """Load the codec that made the codes of a dataset.

    Args:
        record: the record of the codec in the dataset.
        given: see ``find_recorded_codec``.
        options: options of the model's family.
        precision: the arithmetic in which the model computes.

    Raises:
        ConfigError: see ``find_recorded_codec``; also if the model differs from the record.
    """
    find_recorded_codec(record, given, options)
    name = given or record.model
    codec = load_codec(name, precision=precision, **(options or {}))
    if codec.checksum != record.checksum:
        raise ConfigError(
            f"{name} has the checksum {codec.checksum}, but the codes {record.name!r} were made by a model with "
            f"{record.checksum}: pass that model with --codec-model {record.name}=MODEL",
            code="bad_codec",
        )
    for fact in ("sampling_rate", "samples_per_frame", "num_codebooks", "codebook_size"):
        if (made := getattr(codec, fact)) != getattr(record, fact):
            raise ConfigError(
                f"dataset.json states {fact} {getattr(record, fact)} for the codec {record.name!r}, but the model has "
                f"{made}: dataset.json is damaged",
                code="bad_codec",
            )
    return codec


def _load_model(
    registry: Registry, name: str, device: str, precision: Precision, options: Mapping[str, Any], protocol: type,
    method: str,
) -> Any:  # fmt: skip
    """Load a model and set the precision of its ``method``; raise ConfigError if it lacks a part of its protocol."""
    model = find_model(registry, name, options).load(device)
    if missing := [part for part in (*protocol.__annotations__, method) if not hasattr(model, part)]:
        raise ConfigError(f"the {registry.kind} {name!r} lacks {' and '.join(missing)}", code="bad_plugin")
    if precision != "fp32":
        setattr(model, method, with_precision(getattr(model, method), device, precision))
    return model


def find_model(registry: Registry, name: str, options: Mapping[str, Any]) -> Any:
    """Find a model by its name and the options of its family, without loading it.

    Raises:
        ConfigError: the family does not exist or cannot be imported, or an option or its value is invalid.
    """
    implementation, target = registry.split(name)
    family = registry.load_class(implementation)
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


def _checksum_of(path: Path) -> str:
    """Return the xxh3 of a file, or of the names, sizes and bytes of all files in a directory except hidden ones.

    Download tools keep records with timestamps in hidden folders beside the model.
    """
    if not path.is_dir():
        return checksum(path)
    digest = xxhash.xxh3_64()
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    for name in sorted(files):
        if "/." not in f"/{name}":
            digest.update(f"{name}\0{files[name].stat().st_size}\0{checksum(files[name])}".encode())
    return digest.hexdigest()

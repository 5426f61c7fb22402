"""The families of models that come with sharmill. This module imports neither torch nor the packages of the models."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sharmill.errors import refuse
from sharmill.models import Codec, ModelFamily, SpeakerEncoder
from sharmill.models.checkpoints import check_transformers_config, read_nemo_config
from sharmill.models.hub import require_on_hub
from sharmill.registry import require_package

if TYPE_CHECKING:
    from sharmill.models.codec_backend import CodecBackend

BUILTIN_FILE: Final = Path(__file__).parent / "builtin_codec.nemo"
_PATH_STARTS: Final = ("/", "./", "../", "~")


@dataclass(frozen=True, kw_only=True)
class BuiltinCodec(ModelFamily):
    """``builtin``: a small codec for first experiments; only decoding needs NeMo."""

    modules: ClassVar = ("sharmill.models.builtin_codec",)
    takes_target: ClassVar = False

    def resolve(self) -> Path:
        super().resolve()
        return BUILTIN_FILE

    def load(self, device: str) -> Codec:
        path = self.resolve()
        from sharmill.models.builtin_codec import load_builtin_codec

        return load_builtin_codec(path, device, NemoCodec(name=self.name, target=str(path)))


@dataclass(frozen=True, kw_only=True)
class Resemblyzer(ModelFamily):
    """``resemblyzer``: its weights come with the package, so the package version identifies them."""

    packages: ClassVar = ("resemblyzer",)
    modules: ClassVar = ("sharmill.models.resemblyzer_encoder",)
    takes_target: ClassVar = False
    # Measured on read speech: of the pairs from one speaker (10 speakers, 450 pairs), 99.8 % reach 0.75. Of the pairs
    # from different speakers, only 0.2 % (10 speakers, 4,500 pairs) and 3.2 % (248 speakers, 30,628 pairs) do. At 0.6,
    # the last two shares would be 23 % and 47 %.
    min_similarity: ClassVar = 0.75
    # Measured on the same 30,628 pairs.
    cross_speaker_similarities: ClassVar = (
        (0.296, 0.0), (0.434, 0.01), (0.477, 0.05), (0.502, 0.1), (0.532, 0.2), (0.555, 0.3), (0.576, 0.4),
        (0.595, 0.5), (0.615, 0.6), (0.637, 0.7), (0.664, 0.8), (0.701, 0.9), (0.732, 0.95), (0.759, 0.975),
        (0.785, 0.99), (0.8, 0.995), (0.821, 0.998), (0.833, 0.999), (0.852, 0.9995), (0.88, 0.9999), (0.9, 1.0),
    )  # fmt: skip

    def load(self, device: str) -> SpeakerEncoder:
        self.resolve()
        from sharmill.models.resemblyzer_encoder import ResemblyzerEncoder

        return ResemblyzerEncoder(device)


@dataclass(frozen=True, kw_only=True)
class NemoModel(ModelFamily):
    """Base class of NeMo's codecs and speaker encoders: ``nemo:<pretrained name or path of a .nemo file>``."""

    allow_targets: list[str] = field(default_factory=list, compare=False)
    """Further classes and functions that a .nemo file may name; only for models that you trust."""

    packages: ClassVar = ("nemo_toolkit",)
    class_name: ClassVar[str]
    """The class of the models, as ``module:name``."""

    def resolve(self) -> Path | None:
        target, path = self.target, Path(self.target).expanduser()
        is_file, family = target.endswith(".nemo"), self.name.partition(":")[0]
        refuse(
            (not target, f"'{family}' is incomplete: write {family}:<pretrained name or path of a .nemo file>"),
            (not is_file and target.startswith(_PATH_STARTS),
             f"{target} is not a .nemo file: give the path of one, or the name of a pretrained model"),
            (is_file and not path.is_file(), f"{target} does not exist: correct the path of the .nemo checkpoint"),
            code="bad_model",
        )  # fmt: skip
        require_package("nemo")
        if not is_file:
            return None
        read_nemo_config(path, self.allow_targets)
        return path

    def check(self) -> None:
        if self.resolve() is None:
            from sharmill.models.nemo_models import require_pretrained

            require_pretrained(self.name, self.class_name)

    def restore(self, parts: tuple[str, ...], optional: tuple[str, ...] = ()) -> Any:
        """Load the model with NeMo; see ``restore_model``."""
        from sharmill.models.nemo_models import restore_model

        return restore_model(self.name, self.resolve(), self.class_name, self.allow_targets, parts, optional)


@dataclass(frozen=True, kw_only=True)
class NemoEncoder(NemoModel):
    """Speaker encoders of the class EncDecSpeakerLabelModel, such as TitaNet, SpeakerNet and ECAPA."""

    modules: ClassVar = ("sharmill.models.nemo_models", "nemo.collections.asr.models")
    class_name: ClassVar = "nemo.collections.asr.models:EncDecSpeakerLabelModel"

    @property
    def min_similarity(self) -> float | None:
        # The published scripts choose contexts with TitaNet and this threshold.
        return 0.6 if "titanet" in Path(self.target).name.lower() else None

    def load(self, device: str) -> SpeakerEncoder:
        from sharmill.models.nemo_models import NemoSpeakerEncoder

        return NemoSpeakerEncoder(self.restore(("preprocessor.", "encoder.", "decoder.")), device)


@dataclass(frozen=True, kw_only=True)
class NemoCodec(NemoModel):
    """Codecs of the class AudioCodecModel."""

    modules: ClassVar = ("sharmill.models.nemo_models", "nemo.collections.tts.models")
    class_name: ClassVar = "nemo.collections.tts.models:AudioCodecModel"

    def load(self, device: str) -> CodecBackend:
        from sharmill.models.nemo_models import ENCODING_PARTS, NemoCodecBackend

        return NemoCodecBackend(self.restore(ENCODING_PARTS, optional=("audio_decoder",)), self.name, device)


@dataclass(frozen=True, kw_only=True)
class TransformersCodec(ModelFamily):
    """``transformers:<directory or hub name>``: EnCodec without chunks, DAC and Mimi."""

    packages: ClassVar = ("transformers",)
    modules: ClassVar = ("sharmill.models.transformers_codec", "transformers.models.auto.modeling_auto")

    def resolve(self) -> Path | None:
        target, path = self.target, Path(self.target).expanduser()
        is_directory = path.is_dir()
        refuse(
            (not target, "'transformers' is incomplete: write transformers:<directory or hub name>"),
            (is_directory and not (path / "config.json").is_file(),
             f"{target} has no config.json: give a directory written by save_pretrained"),
            (not is_directory and (path.is_file() or target.startswith(_PATH_STARTS)),
             f"{target} is not a directory: give a directory written by save_pretrained, or a hub name"),
            code="bad_model",
        )  # fmt: skip
        require_package("transformers")
        if not is_directory:
            return None
        check_transformers_config(path)
        return path

    def check(self) -> None:
        if self.resolve() is None:
            require_on_hub(self.name, "config.json")

    def load(self, device: str) -> Codec:
        path = self.resolve()
        from sharmill.models.transformers_codec import load_transformers_codec

        return load_transformers_codec(self.name, self.target if path is None else path, device)

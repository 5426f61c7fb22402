"""The families of NeMo's speaker encoders and codecs, by pretrained names and .nemo files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sharmill.errors import ConfigError
from sharmill.models.family import PATH_STARTS, ModelFamily
from sharmill.models.nemo_config import read_nemo_config
from sharmill.models.protocols import SpeakerEncoder
from sharmill.registry import require_package

if TYPE_CHECKING:
    from nemo.core import ModelPT

    from sharmill.models.codec_backend import CodecBackend

ENCODING_PARTS: Final = ("audio_encoder.", "vector_quantizer.")


@dataclass(frozen=True, kw_only=True)
class NemoModel(ModelFamily):
    """``nemo:<pretrained name or path of a .nemo file>``."""

    allow_targets: list[str] = field(default_factory=list, compare=False)
    """Classes and functions that the configuration in a .nemo file may name beside those that speech codecs and speaker
    models are made of, for a model whose makers you trust."""

    packages: ClassVar = ("nemo_toolkit",)

    def resolve(self) -> Path | None:
        target = self.target
        if not target:
            raise ConfigError(
                "'nemo' is incomplete: write nemo:<pretrained name or path of a .nemo file>", code="bad_model"
            )
        is_file = target.endswith(".nemo")
        if not is_file and target.startswith(PATH_STARTS):
            raise ConfigError(
                f"{target} is not a .nemo file: give the path of one, or the name of a pretrained model",
                code="bad_model",
            )
        path = Path(target).expanduser()
        if is_file and not path.is_file():
            raise ConfigError(f"there is no file {target}: correct the path of the .nemo checkpoint", code="bad_model")
        require_package("nemo")
        if not is_file:
            return None
        read_nemo_config(path, self.allow_targets)
        return path

    def check(self) -> None:
        if self.resolve() is None:
            from sharmill.models.nemo_checkpoint import require_pretrained

            require_pretrained(self)

    @staticmethod
    def find_class() -> type[ModelPT]:
        """Import and return the class that models must be of."""
        raise NotImplementedError

    def restore(self, parts: tuple[str, ...], optional: tuple[str, ...] = ()) -> Any:
        """Return the model of NeMo's, on the CPU; see ``restore_model``."""
        path = self.resolve()
        from sharmill.models.nemo_checkpoint import restore_model

        return restore_model(self, path, parts, optional)


@dataclass(frozen=True, kw_only=True)
class NemoEncoder(NemoModel):
    """Speaker encoders of the class EncDecSpeakerLabelModel: TitaNet, SpeakerNet, ECAPA and their kin."""

    modules: ClassVar = ("sharmill.models.nemo_speaker", "nemo.collections.asr.models")

    @property
    def min_similarity(self) -> float | None:
        # Of the published scripts that choose contexts with TitaNet.
        return 0.6 if "titanet" in Path(self.target).name.lower() else None

    @staticmethod
    def find_class() -> type[ModelPT]:
        from nemo.collections.asr.models import EncDecSpeakerLabelModel

        return EncDecSpeakerLabelModel

    def load(self, device: str) -> SpeakerEncoder:
        model = self.restore(("preprocessor.", "encoder.", "decoder."))
        from sharmill.models.nemo_speaker import NemoSpeakerEncoder

        return NemoSpeakerEncoder(model, device)


@dataclass(frozen=True, kw_only=True)
class NemoCodec(NemoModel):
    """Codecs of the class AudioCodecModel."""

    modules: ClassVar = ("sharmill.models.nemo_codec", "nemo.collections.tts.models")

    @staticmethod
    def find_class() -> type[ModelPT]:
        from nemo.collections.tts.models import AudioCodecModel

        return AudioCodecModel

    def load(self, device: str) -> CodecBackend:
        model = self.restore(ENCODING_PARTS, optional=("audio_decoder",))
        from sharmill.models.nemo_codec import NemoCodecBackend

        return NemoCodecBackend(model, self.name, device)

"""Codecs and speaker encoders of NeMo: loading with actionable errors, and adapters to sharmill's protocols.

Importing this module imports torch, but not NeMo.
"""

from __future__ import annotations

import logging
import pkgutil
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import torch

from sharmill.errors import ConfigError, is_device_error, one_line, refuse
from sharmill.models.checkpoints import read_nemo_config
from sharmill.models.codec_backend import CodecBackend, CodecSpec
from sharmill.models.cpu_layers import fit_hifigan_to_cpu, fit_titanet_to_cpu
from sharmill.models.hub import require_on_hub, require_reachable
from sharmill.models.tensors import (
    find_reach,
    fit_length,
    limited_layers,
    loading,
    move_batch,
    require_whole,
    unit_embeddings,
    weights_checksum,
)
from sharmill.registry import nearest, require_package

if TYPE_CHECKING:
    from nemo.collections.asr.models import EncDecSpeakerLabelModel
    from nemo.collections.tts.models import AudioCodecModel
    from nemo.core import ModelPT
    from torch import Tensor, nn

# Submodules of NeMo's codecs that are needed for encoding.
ENCODING_PARTS: Final = ("audio_encoder.", "vector_quantizer.")
# Tolerance for the effect of padding. Rounding in float32 causes differences of 1e-6 to 1e-5, and padding that affects
# a model causes far larger differences than this tolerance.
_RELATIVE_TOLERANCE: Final = 1e-3
_TRIED_FRAMES: Final = (1, 2, 4, 8, 16, 32)
# Minimum length of audio; shorter audio is padded with zeros. Features are normalised by their standard deviation over
# time, which needs several frames.
_MIN_SECONDS: Final = 0.1
# NeMo pads the features of a batch to a multiple of 16 frames, which can hide the effect of the batch's padding. Audio
# of this length has 1 + 159 frames of 10 ms, which need no such padding.
_TRIED_SECONDS: Final = 1.59
# Errors of damaged checkpoints and failed downloads. Any other error is a bug, and is raised unchanged.
_LOADING_ERRORS = (
    AttributeError,
    EOFError,
    KeyError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    tarfile.TarError,
)


@contextmanager
def quiet_nemo() -> Iterator[None]:
    """Silence the log of NeMo, including its first import; errors in the log are also raised, so none is lost.

    Raises:
        ConfigError: NeMo is not installed.
    """
    require_package("nemo")
    telemetry = logging.getLogger("nv_one_logger")
    level = telemetry.level
    telemetry.setLevel(logging.ERROR)
    try:
        from nemo.utils import logging as nemo_logging

        with nemo_logging.temp_verbosity(logging.CRITICAL):
            yield
    finally:
        telemetry.setLevel(level)


@contextmanager
def _filters_of_archives() -> Iterator[None]:
    """Let NeMo unpack archives with ``filter="data"`` on Python before 3.11.4 (Debian 12), which has no filters.

    NeMo itself refuses links and names that lead out of the folder. This replacement refuses anything but files and
    folders.
    """
    if hasattr(tarfile, "data_filter"):
        yield
        return
    original = tarfile.TarFile.extract

    def extract(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, filter: str) -> None:
        if not (member.isreg() or member.isdir()):
            raise tarfile.ExtractError(f"{member.name} is neither a file nor a folder")
        original(archive, member, path, set_attrs=False)

    tarfile.TarFile.extract = extract  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        tarfile.TarFile.extract = original  # type: ignore[method-assign]


def restore_model(
    name: str, path: Path | None, class_name: str, allow_targets: Collection[str], parts: tuple[str, ...],
    optional: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """Load a NeMo model on the CPU, frozen and in evaluation mode.

    Args:
        name: the model as named in the configuration.
        path: the file of the model; None for a pretrained model.
        class_name: the class of the model, as ``module:name``.
        allow_targets: further names that its configuration may contain; see ``read_nemo_config``.
        parts: prefixes of the submodules that are used, whose weights must all be in the checkpoint. NeMo's codec would
            replace missing weights with random ones.
        optional: submodules to set to None if some of their weights are missing.

    Raises:
        ConfigError: the file is not a checkpoint of this class, or the pretrained model cannot be downloaded.
    """
    with quiet_nemo():
        model_class = pkgutil.resolve_name(class_name)
    from huggingface_hub.errors import HfHubHTTPError
    from hydra.errors import HydraException

    # The hub client raises the errors of its HTTP library, which depends on the version of the client.
    errors = (*_LOADING_ERRORS, HydraException, *HfHubHTTPError.__bases__)
    with loading(name, *errors), quiet_nemo(), _filters_of_archives(), torch.random.fork_rng(devices=[]):
        # A model has random weights until the checkpoint is loaded. The fork preserves the caller's random state.
        options = {
            "map_location": torch.device("cpu"),
            "save_restore_connector": _strict_connector(name, allow_targets, parts, optional),
        }
        if path is not None:
            restored = model_class.restore_from(str(path), **options)
        else:
            require_pretrained(name, class_name)
            restored = model_class.from_pretrained(name.partition(":")[2], **options)
    if not isinstance(restored, model_class):
        raise ConfigError(
            f"{name} is a {type(restored).__name__}, not a {model_class.__name__}: use another model",
            code="bad_model",
        )
    restored.freeze()
    return restored.eval()


def _strict_connector(
    name: str, allow_targets: Collection[str], parts: tuple[str, ...], optional: tuple[str, ...]
) -> Any:
    """Return a connector for NeMo that uses only checked parts of a checkpoint.

    See ``restore_model`` for the arguments.
    """
    from nemo.core.connectors.save_restore_connector import SaveRestoreConnector
    from omegaconf import OmegaConf

    class StrictConnector(SaveRestoreConnector):
        def load_config_and_state_dict(
            self, calling_cls: type[ModelPT], restore_path: str, override_config_path: object = None, *rest: Any
        ) -> Any:
            # Use the checked configuration, even if the archive contains another one of that name.
            source = Path(self.model_extracted_dir or restore_path)
            config = read_nemo_config(source, allow_targets)
            with limited_layers(name, source):
                return super().load_config_and_state_dict(calling_cls, restore_path, OmegaConf.create(config), *rest)

        @staticmethod
        def _load_state_dict_from_disk(model_weights: str, map_location: Any = "cpu") -> Any:
            # In NeMo's version of this method, an environment variable can allow pickled code to run.
            return torch.load(model_weights, map_location=map_location, weights_only=True)

        def load_instance_with_state_dict(
            self, instance: nn.Module, state_dict: Mapping[str, Any], strict: bool
        ) -> None:
            wanted = {key for key in instance.state_dict() if key.startswith(parts)}
            require_whole(name, wanted - state_dict.keys())
            super().load_instance_with_state_dict(instance, state_dict, strict)
            for part in optional:
                if any(key.startswith(f"{part}.") for key in instance.state_dict().keys() - state_dict.keys()):
                    setattr(instance, part, None)

    return StrictConnector()


def require_pretrained(name: str, class_name: str) -> None:
    """Raise ConfigError unless a pretrained model is on this machine or its server responds.

    A name with "/" is a name on the hub. NeMo is imported only for other names.

    Args:
        name: see ``restore_model``.
        class_name: see ``restore_model``.
    """
    target = name.partition(":")[2]
    if "/" in target:
        require_on_hub(name, f"{PurePosixPath(target).name}.nemo")
        return
    with quiet_nemo():
        from nemo.utils.data_utils import resolve_cache_dir

        model_class = pkgutil.resolve_name(class_name)
        known = {info.pretrained_model_name: str(info.location) for info in model_class.list_available_models() or ()}
        if target not in known:
            raise ConfigError(
                f"NeMo has no pretrained {model_class.__name__} {target!r}{nearest(target, sorted(known))}",
                code="unknown_name",
            )
        filename = PurePosixPath(known[target]).name
        if not any((resolve_cache_dir() / filename.removesuffix(".nemo")).glob(f"*/{filename}")):
            require_reachable(known[target], name)


def _right_padding_matters(encode: Callable[[Tensor, Tensor], Tensor], short: int, long: int) -> bool:
    """Return True if a trial shows that padding on the right affects the encoding of an item.

    A single unmasked layer has this effect, so it is tested rather than derived from the architecture: seeded noise is
    encoded alone, and in a batch with a longer item.

    Args:
        encode: (audio (batch, samples), num_samples (batch,)) -> (batch, values) or (batch, channels, frames).
        short: the number of samples of the item.
        long: the number of samples of the longer item.
    """
    noise = torch.randn(2, long, generator=torch.Generator().manual_seed(0)) * 0.1
    noise[0, short:] = 0.0
    alone = encode(noise[:1, :short], torch.tensor([short]))
    beside = encode(noise, torch.tensor([short, long]))[:1, ..., : alone.shape[-1]]
    return bool((alone - beside).abs().max() > _RELATIVE_TOLERANCE * alone.abs().max())


class NemoCodecBackend(CodecBackend):
    """The encoder and quantizer of an AudioCodecModel, and its decoder if the checkpoint has the weights.

    The parts are called directly, because the model's ``encode`` would pad whole frames again and may resample. Padding
    in a batch affects all encoders except causal ones. When a model is loaded, a trial shows whether its encoder is
    affected.
    """

    def __init__(self, model: AudioCodecModel, name: str, device: str) -> None:
        refuse(
            (model.vector_quantizer is None, f"{name} has no quantizer and thus no codes: use another codec"),
            (model.semantic_codec is not None,
             f"{name} contains a second, semantic codec, which is not supported: use another codec"),
            code="bad_model",
        )  # fmt: skip
        encoder = model.audio_encoder.eval().to(device)
        self._encoder = fit_hifigan_to_cpu(encoder) if device == "cpu" else encoder
        self._quantize = model.quantize
        self._dequantize = model.dequantize
        self._decoder = None if model.audio_decoder is None else model.audio_decoder.eval().to(device)
        model.vector_quantizer.eval().to(device)
        self.device = torch.device(device)
        frame = int(model.samples_per_frame)
        min_frames = self._find_min_frames(frame, name)
        short = max(4, min_frames) * frame
        weights = {key: value for key, value in model.state_dict().items() if key.startswith(ENCODING_PARTS)}
        spec = CodecSpec(
            name=name,
            sampling_rate=int(model.sample_rate),
            samples_per_frame=frame,
            num_codebooks=int(model.num_codebooks),
            codebook_size=int(model.codebook_size),
            checksum=weights_checksum(weights),
            equal_lengths_only=_right_padding_matters(self._encoded, short, 3 * short),
            min_frames=min_frames,
            decoded_sampling_rate=None if self._decoder is None else int(model.output_sample_rate),
        )
        super().__init__(spec, device)

    def _find_min_frames(self, samples_per_frame: int, name: str) -> int:
        """Return the minimum number of frames, a power of two, for the encoder; mirror padding needs several frames."""
        for num_frames in _TRIED_FRAMES:
            samples = num_frames * samples_per_frame
            try:
                self._encoded(torch.zeros(1, samples), torch.tensor([samples]))
            except RuntimeError as error:
                if is_device_error(error) or isinstance(error, torch.OutOfMemoryError):
                    raise
                refusal = error
            else:
                return num_frames
        raise ConfigError(
            f"{name} cannot encode {samples} samples: {one_line(refusal)}; use another codec", code="bad_model"
        )

    def find_reach(self) -> tuple[int, int] | None:
        return find_reach(lambda audio: self._encoded(audio, torch.tensor([audio.shape[1]])), self.samples_per_frame)

    def encode_frames(self, audio: Tensor, num_frames: Tensor) -> Tensor:
        encoded, encoded_len = self._encoder(audio=audio, audio_len=num_frames * self.samples_per_frame)
        return self._quantize(encoded=encoded, encoded_len=encoded_len)

    def decode_frames(self, codes: Tensor) -> Tensor:
        assert self._decoder is not None
        num_frames = torch.tensor([codes.shape[2]], device=codes.device)
        audio, _ = self._decoder(inputs=self._dequantize(tokens=codes, tokens_len=num_frames), input_len=num_frames)
        return audio

    @torch.no_grad()
    def _encoded(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        encoded, _ = self._encoder(audio=audio.to(self.device), audio_len=num_samples.to(self.device))
        return encoded.float().cpu()


class NemoSpeakerEncoder:
    """A speaker encoder based on a NeMo speaker model.

    Padding in a batch affects some models (ECAPA), but not models with masked convolutions (TitaNet). When a model is
    loaded, a trial shows whether it is affected. If so, only utterances of equal length share a batch, which is slower.
    """

    def __init__(self, model: EncDecSpeakerLabelModel, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.sampling_rate = int(model.cfg.preprocessor.sample_rate)
        self.checksum = weights_checksum(model.state_dict())
        self._model = model.eval().to(self.device)
        if self.device.type == "cpu":
            fit_titanet_to_cpu(model)
        self._min_samples = int(_MIN_SECONDS * self.sampling_rate)
        tried = int(_TRIED_SECONDS * self.sampling_rate)
        self._equal_lengths_only = _right_padding_matters(self._forward, tried, 2 * tried)
        self.embedding_size = self._forward(torch.zeros(1, tried), torch.tensor([tried])).shape[1]

    def embed(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        """Embed a batch of utterances; see ``SpeakerEncoder.embed``."""
        # ``there`` is the copy of ``num_samples`` on the device, which is needed for masks.
        audio, there, num_samples = move_batch(audio, num_samples, self.device)
        audio = fit_length(audio, there, max(audio.shape[1], self._min_samples))
        lengths = num_samples.clamp(min=self._min_samples)
        if not self._equal_lengths_only:
            return self._embed(audio, lengths)
        embeddings = torch.zeros(len(audio), self.embedding_size, device=self.device)
        for same in lengths.unique().tolist():
            rows = (lengths == same).nonzero()[:, 0]
            embeddings[rows] = self._embed(audio[rows], lengths[rows])
        return embeddings

    def _embed(self, audio: Tensor, lengths: Tensor) -> Tensor:
        if not len(lengths):
            return torch.zeros(0, self.embedding_size, device=self.device)
        audio = audio[:, : int(lengths.max())]
        return unit_embeddings(self._forward(audio, lengths), audio)

    @torch.no_grad()
    def _forward(self, audio: Tensor, num_samples: Tensor) -> Tensor:
        audio, num_samples = (one.to(self.device, non_blocking=True) for one in (audio, num_samples))
        _, embeddings = self._model(input_signal=audio, input_signal_length=num_samples)
        return embeddings.float()

"""NeMo's models, loaded: its codecs and its speaker encoders behind the protocols, with errors that a user can act on.

Importing this module imports torch, and not NeMo.
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

# Submodules of NeMo's codecs that encode.
ENCODING_PARTS: Final = ("audio_encoder.", "vector_quantizer.")
# The noise of float32 arithmetic is 1e-6 to 1e-5; a model that sees the padding does far more than this.
_RELATIVE_TOLERANCE: Final = 1e-3
_TRIED_FRAMES: Final = (1, 2, 4, 8, 16, 32)
# Features are normalised by their standard deviation over time, which needs some frames: shorter audio is filled up
# with zeros.
_MIN_SECONDS: Final = 0.1
# NeMo fills up the features of a batch to a multiple of 16 frames, which hides the batch's padding from most layers.
# This length gives 1 + 159 frames of 10 ms, so that there is nothing to fill up.
_TRIED_SECONDS: Final = 1.59
# Errors of a damaged checkpoint or a failed download; any other is a fault of ours and is shown as it is.
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
    """Silence NeMo, whose errors are raised as well as logged; also around its first import.

    Raises:
        ConfigError: if NeMo is not installed.
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
    """Let NeMo unpack with ``filter="data"`` where Python is older than 3.11.4, as Debian 12's, and knows no filters.

    NeMo itself refuses links and names that lead out; of the rest only files and folders are unpacked here.
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
        name: the model as the configuration names it.
        path: its file; None for a pretrained model.
        class_name: the module and the name of its class, with a colon between.
        allow_targets: names in its configuration that are let through, see ``read_nemo_config``.
        parts: the submodules that are used; all their weights must be in the checkpoint. (NeMo's codec lets weights
            be absent, and would go on with random ones.)
        optional: names of submodules that are None in the model if weights of theirs are absent.

    Raises:
        ConfigError: if the file is no checkpoint of this class or the pretrained model cannot be fetched.
    """
    with quiet_nemo():
        model_class = pkgutil.resolve_name(class_name)
    from huggingface_hub.errors import HfHubHTTPError
    from hydra.errors import HydraException

    # The hub's client lets the errors of its HTTP library through, and that library changes with its version.
    errors = (*_LOADING_ERRORS, HydraException, *HfHubHTTPError.__bases__)
    with loading(name, *errors), quiet_nemo(), _filters_of_archives(), torch.random.fork_rng(devices=[]):
        # A model draws its first weights before it gets those of the checkpoint: hence the fork.
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
    """Return the object by which NeMo reads checkpoints, one that takes only what was checked; as ``restore_model``."""
    from nemo.core.connectors.save_restore_connector import SaveRestoreConnector
    from omegaconf import OmegaConf

    class StrictConnector(SaveRestoreConnector):
        def load_config_and_state_dict(
            self, calling_cls: type[ModelPT], restore_path: str, override_config_path: object = None, *rest: Any
        ) -> Any:
            # Only what was checked is used, whatever else of that name is in the archive.
            source = Path(self.model_extracted_dir or restore_path)
            config = read_nemo_config(source, allow_targets)
            with limited_layers(name, source):
                return super().load_config_and_state_dict(calling_cls, restore_path, OmegaConf.create(config), *rest)

        @staticmethod
        def _load_state_dict_from_disk(model_weights: str, map_location: Any = "cpu") -> Any:
            # NeMo leaves it to the environment whether pickled code is run.
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
    """Raise ConfigError unless a pretrained model is on this machine or can be asked for.

    A "/" in its name stands for the hub. NeMo is imported for NeMo's own names alone.

    Args:
        name, class_name: as of ``restore_model``.
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
    """Return True if an item's encoding depends on the padding to its right, which is tried.

    An architecture does not tell: one unmasked layer is enough. So seeded noise is encoded alone and beside a longer
    item.

    Args:
        encode: (audio (batch, samples), num_samples (batch,)) -> (batch, values) or (batch, channels, frames).
        short: samples of the item.
        long: samples of its neighbour.
    """
    noise = torch.randn(2, long, generator=torch.Generator().manual_seed(0)) * 0.1
    noise[0, short:] = 0.0
    alone = encode(noise[:1, :short], torch.tensor([short]))
    beside = encode(noise, torch.tensor([short, long]))[:1, ..., : alone.shape[-1]]
    return bool((alone - beside).abs().max() > _RELATIVE_TOLERANCE * alone.abs().max())


class NemoCodecBackend(CodecBackend):
    """Codec made of an AudioCodecModel: its encoder, its quantizer and, where its weights are there, its decoder.

    The model's own ``encode`` pads again what is whole already and may resample; so its parts are called as they are.
    Causal encoders do not see the padding of a batch, the others do: this is found out when the model is loaded.
    """

    def __init__(self, model: AudioCodecModel, name: str, device: str) -> None:
        refuse(
            (model.vector_quantizer is None, f"{name} has no quantizer, so it has no codes: use another codec"),
            (model.semantic_codec is not None,
             f"{name} adds a second, semantic codec, which is not supported: use another codec"),
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
        """Return the fewest frames, a power of two, that the encoder takes: mirror padding refuses shorter audio."""
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
    """Speaker encoder made of a NeMo speaker model.

    Models with masked convolutions (TitaNet) do not see the padding of a batch. Others (ECAPA) do: this is found out
    when the model is loaded, and then only utterances of equal length share a batch, which is slower.
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
        # The mask is made on the device.
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

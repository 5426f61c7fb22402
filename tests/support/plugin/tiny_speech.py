"""A third-party package with a minimal source, speaker encoder and codec."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sharmill.models import ModelFamily
from sharmill.sources import Piece, Source

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TinySource(Source):
    """A table of lines ``path,seconds,speaker,text``."""

    file_keys: ClassVar = ("table",)
    type: str = "tiny"
    table: str
    skip_lines: int = 0

    def identity(self) -> dict[str, Any]:
        return {self.table: Path(self.table).stat().st_size}

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        count = len(self._lines())
        for begin in range(0, count, records_per_piece):
            end = min(begin + records_per_piece, count)
            yield Piece(end - begin, {"begin": begin, "end": end})

    def read(self, piece: dict[str, Any]) -> Iterator[bytes]:
        for line in self._lines()[piece["begin"] : piece["end"]]:
            path, seconds, speaker, text = line.split(",")
            record = {"audio_filepath": path, "duration": float(seconds), "speaker": speaker, "text": text}
            yield json.dumps(record).encode()

    def _lines(self) -> list[str]:
        return Path(self.table).read_text().splitlines()[self.skip_lines :]


@dataclass(frozen=True, kw_only=True)
class TinyEncoder(ModelFamily):
    """Mean levels of the parts of an utterance, as a vector of length 1."""

    def load(self, device: str) -> Any:
        return _Encoder(self.target, device)


class _Encoder:
    sampling_rate = 16000
    embedding_size = 4
    checksum = "00000000000000aa"

    def __init__(self, target: str, device: str) -> None:
        self.target, self.device = target, device

    def embed(self, audio: "Tensor", num_samples: "Tensor") -> "Tensor":
        import torch

        items = [row[:length] for row, length in zip(audio, num_samples, strict=True)]
        levels = [[float(part.abs().mean()) for part in item.tensor_split(4)] for item in items]
        return torch.nn.functional.normalize(torch.tensor(levels), dim=1)


@dataclass(frozen=True, kw_only=True)
class TinyCodec(ModelFamily):
    """The level of every 10 ms in ``target`` steps (100 if there is no target)."""

    def load(self, device: str) -> Any:
        return _load_codec(int(self.target or 100), device)


@dataclass(frozen=True, kw_only=True)
class WrongCodec(ModelFamily):
    """A codec that gives one frame too many."""

    def load(self, device: str) -> Any:
        return _load_codec(100, device, surplus_frames=1)


@dataclass(frozen=True, kw_only=True)
class BadCodec(ModelFamily):
    """A codec that fails on audio longer than 3 s, in the way given by ``target``: nan, index or frames."""

    def load(self, device: str) -> Any:
        return _load_codec(50, device, bad=self.target)


@dataclass(frozen=True, kw_only=True)
class BrokenRankCodec(ModelFamily):
    """A codec that gives NaN in the first process, which makes the file ``target``: for silence too if that is load."""

    def load(self, device: str) -> Any:
        try:
            Path(self.target).open("x").close()
        except FileExistsError:
            return _load_codec(50, device)
        return _load_codec(50, device, bad=Path(self.target).name)


def _load_codec(steps: int, device: str, surplus_frames: int = 0, bad: str = "") -> Any:
    from torch.nn.functional import pad

    from sharmill.models.codec_backend import CodecBackend, CodecSpec

    class Codec(CodecBackend):
        def encode_frames(self, audio: "Tensor", num_frames: "Tensor") -> "Tensor":
            levels = audio.unflatten(1, (-1, 160)).abs().amax(dim=2)
            codes = (levels.clamp(0, 1) * (self.codebook_size - 1)).long()[:, None]
            rows = {"speech": audio.any(dim=1), "load": num_frames > 0}.get(bad, num_frames > 300)
            if bad == "frames" and rows.any():
                return pad(codes, (0, 1))
            return (
                codes.float().masked_fill(rows[:, None, None], -9.0 if bad == "index" else math.nan) if bad else codes
            )

        def encode(self, audio: "Tensor", num_samples: "Tensor") -> "Tensor":
            return pad(super().encode(audio, num_samples), (0, surplus_frames))

    spec = CodecSpec(
        name="tiny", sampling_rate=16000, samples_per_frame=160, num_codebooks=1, codebook_size=steps,
        checksum=f"{steps:016x}",
    )  # fmt: skip
    return Codec(spec, device)


@dataclass(frozen=True, kw_only=True)
class NoCodec(ModelFamily):
    """A family whose models are no codecs."""

    def load(self, device: str) -> Any:
        return _Encoder(self.target, device)


def no_family() -> None:
    """Something that is no family."""

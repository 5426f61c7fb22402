"""Codes in the form that models take: whole frames of one codec between begin and end, and slices of contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sharmill.errors import ConfigError
from sharmill.shar.layout import TARGET_CODES
from sharmill.training.cut_data import (
    TOLERANCE,
    ContextLimits,
    ContextSlice,
    epoch_of,
    load_array,
    target_codes_on_time,
)

if TYPE_CHECKING:
    from lhotse import MonoCut


@dataclass(frozen=True, kw_only=True)
class CodecForm:
    """The form of a codec's codes, and the ids that mark their begin and end.

    ``bos`` and ``eos`` default to ``codebook_size`` and ``codebook_size + 1``, the first ids that are no codes; the
    context's default to the target's. ``marks=False`` adds none at all. ``num_codebooks`` may be left out for a
    ``ContextSpeechDataset``, where the codes themselves say it.
    """

    sampling_rate: int
    samples_per_frame: int
    codebook_size: int
    num_codebooks: int | None = None
    bos: int | None = None
    eos: int | None = None
    context_bos: int | None = None
    context_eos: int | None = None
    marks: bool = True

    @property
    def frame_shift(self) -> float:
        """Seconds."""
        return self.samples_per_frame / self.sampling_rate

    def num_frames(self, duration: float) -> int:
        """Return the frames of so many seconds."""
        return math.ceil(duration / self.frame_shift - TOLERANCE)

    @property
    def target_marks(self) -> tuple[int, int]:
        bos = self.codebook_size if self.bos is None else self.bos
        eos = self.codebook_size + 1 if self.eos is None else self.eos
        return bos, eos

    @property
    def context_marks(self) -> tuple[int, int]:
        bos, eos = self.target_marks
        return bos if self.context_bos is None else self.context_bos, (
            eos if self.context_eos is None else self.context_eos
        )

    @classmethod
    def of_dataset(cls, dataset: str | Path, codec: str | None = None, **ids: Any) -> CodecForm:
        """Return the form of a codec of a dataset directory; ``codec`` may be left out where there is one.

        Raises:
            ConfigError: there is no finished dataset, or not this codec, or several to choose from.
        """
        from sharmill.shar.index import read_dataset

        records = {record.name: record for record in read_dataset(Path(dataset)).codecs}
        names = ", ".join(records) or "none"
        if codec is None and len(records) != 1:
            raise ConfigError(
                f"{dataset} has no codec: encode it, or use ContextSpeechDataset(None), which gives audio"
                if not records
                else f"{dataset} has the codecs {names}: name one with codec=",
                code="unknown_codec",
            )
        record = records.get(codec or next(iter(records)))
        if record is None:
            raise ConfigError(f"{dataset} has no codec {codec!r}; it has {names}", code="unknown_codec")
        return cls(
            sampling_rate=record.sampling_rate,
            samples_per_frame=record.samples_per_frame,
            codebook_size=record.codebook_size,
            num_codebooks=record.num_codebooks,
            **ids,
        )


class ContextDraws:
    """Draws of a slice of each context, by seed, epoch and cut alone.

    Raises:
        ValueError: see ``ContextLimits``.
    """

    def __init__(self, min_duration: float, max_duration: float, seed: int) -> None:
        self._limits = partial(ContextLimits, min_duration, max_duration)
        self._limits(1.0)  # Wrong durations are an error here.
        self._seed = seed
        # In shared memory, so that worker processes of a loader that keeps them see the next epoch too.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Draw other slices from now on."""
        self._epoch.fill_(epoch)

    def draw(self, cut: MonoCut, num_frames: int, frame_shift: float) -> ContextSlice:
        """Return the slice of the context of a cut, which has so many frames, of ``frame_shift`` seconds each."""
        if num_frames == 0:
            raise ValueError(f"the context of cut {cut.id!r} is empty")
        epoch = (int(self._epoch), epoch_of(cut))
        return self._limits(frame_shift).draw(num_frames, f"{self._seed}/{epoch}/{cut.id}")


def load_target(cut: MonoCut, codec: CodecForm) -> np.ndarray:
    """Return the codes of a cut's target between BOS and EOS, (codebooks, frames), int64.

    Raises:
        ValueError: they are of another codec, or cannot follow what was done to the cut.
    """
    _require_frame_shift(cut, codec)
    return mark_codes(load_array(cut, TARGET_CODES), codec, codec.target_marks, cut)


def mark_codes(codes: np.ndarray, codec: CodecForm, marks: tuple[int, int], cut: MonoCut) -> np.ndarray:
    """Return codes (codebooks, frames) with BOS before and EOS behind them."""
    size = codec.codebook_size
    if codes.ndim != 2 or codes.shape[1] == 0:
        raise ValueError(f"the codes of cut {cut.id!r} have the shape {codes.shape}, not (codebooks, frames)")
    if codes.min() < 0 or codes.max() >= size:
        raise ValueError(f"the codes of cut {cut.id!r} are {codes.min()} to {codes.max()}, not 0 to {size - 1}")
    if not codec.marks:
        return codes.astype(np.int64)
    bos, eos = marks
    return np.pad(codes.astype(np.int64), ((0, 0), (1, 1)), constant_values=((0, 0), (bos, eos)))


def _require_frame_shift(cut: MonoCut, codec: CodecForm) -> None:
    """Raise ValueError where the codes of a cut have another frame rate than the codec.

    Other tools give each cut a frame shift of its own, which misses the codec's by less than a frame a cut.
    """
    array = target_codes_on_time(cut)
    if array is not None:
        frames = array.shape[array.temporal_dim]
        if abs(array.frame_shift - codec.frame_shift) * frames > 2 * codec.frame_shift:
            raise ValueError(
                f"the codes of cut {cut.id!r} have a frame each {array.frame_shift:.4g} s, and the codec has one "
                f"each {codec.frame_shift:.4g} s: give the CodecForm of the codec that open_shar reads"
            )

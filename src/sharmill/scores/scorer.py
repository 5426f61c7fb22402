"""The interface of scorers, and the clips that they score."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sharmill.audio.files import decode_bytes
from sharmill.audio.resample import resample
from sharmill.errors import RejectRecord, UnitFailed
from sharmill.models import ModelFamily
from sharmill.models.hub import packaged_file
from sharmill.shar.histograms import supervision_of


class Clip:
    """A cut's target audio, text and duration. The audio is decoded on first use, and resampled once for each rate.

    Args:
        cut: the cut as stored in the dataset.
        data: the encoded audio; None if the dataset has none for this cut.

    Attributes:
        id: the id of the cut.
        text: its text; "" if it has none.
        duration: its duration in seconds.
    """

    def __init__(self, cut: Mapping[str, Any], data: bytes | None) -> None:
        self.cut = cut
        self.id = str(cut["id"])
        self.text = str(supervision_of(cut)[0].get("text") or "")
        self.duration = float(cut["duration"])
        self._data = data
        self._resampled: dict[int, np.ndarray] = {}

    @cached_property
    def stored(self) -> tuple[np.ndarray, int]:
        """The audio (samples,) as float32 at its stored sampling rate, and this rate.

        Raises:
            LookupError: the dataset has no audio for this cut.
            UnitFailed: the stored audio is damaged.
        """
        if self._data is None:
            raise LookupError("the cut has no target audio")
        try:
            return decode_bytes(self._data, name=self.id)
        except RejectRecord as error:
            raise UnitFailed(f"the stored audio of {self.id} is unusable: {error}", code="damaged_shard") from error

    def samples(self, sampling_rate: int) -> np.ndarray:
        """Return the audio (samples,) as float32 at a sampling rate.

        Raises:
            ValueError: the audio is too short for a sample at this rate.
            RejectRecord: ``unsupported_rate``.
            LookupError, UnitFailed: as in ``stored``.
        """
        if sampling_rate not in self._resampled:
            samples = resample(*self.stored, sampling_rate)
            if not len(samples):
                raise ValueError(f"the audio is shorter than a sample at {sampling_rate} Hz")
            self._resampled[sampling_rate] = samples
        return self._resampled[sampling_rate]


# A loaded scorer: a function that maps clips to one row per clip, with a number, NaN or None for each column.
Score = Callable[[Sequence[Clip]], Sequence[Sequence[float | None]]]


@dataclass(frozen=True, kw_only=True)
class Scorer(ModelFamily):
    """A scorer: a family of models whose ``load`` returns a function of type ``Score``.

    The scores of a clip must not depend on the clips beside it, except for rounding errors.
    """

    takes_target: ClassVar[bool] = False
    columns: ClassVar[Mapping[str, tuple[float, float] | None]]
    """The names of the columns, each with the limits of its values, or None."""
    uses_device: ClassVar[bool] = False
    """True if ranks with a GPU should load it there; otherwise it gets the device ``cpu``."""
    weights: ClassVar[tuple[str, ...]] = ()
    """The name of a package, followed by its files with weights."""
    loader: ClassVar[str] = ""
    """The function that ``load`` calls with the scorer and the device, as ``module:name``."""

    def resolve(self) -> Path | None:
        path = super().resolve()
        self.weight_files()
        return path

    def weight_files(self) -> list[Path]:
        """Return the paths of the files in ``weights``; raise ConfigError if one is missing."""
        return [packaged_file(self.weights[0], file) for file in self.weights[1:]]

    def load(self, device: str) -> Score:
        score: Score = pkgutil.resolve_name(self.loader)(self, device)
        return score


def mean_over_windows(
    clips: Sequence[np.ndarray],
    cut: Callable[[np.ndarray], Iterator[np.ndarray]],
    model: Callable[[np.ndarray], np.ndarray],
    most: int = 16,
) -> np.ndarray:
    """Return the mean of a model's values over the windows of each clip.

    Args:
        clips: the audio of each clip, (samples,).
        cut: a function that yields the windows of a clip, which all have the same length.
        model: a function that maps windows (windows, samples) to values (windows, columns).
        most: the maximum number of windows in a batch; windows of several clips share a batch.

    Returns:
        (clips, columns) float64.
    """
    windows = ((number, window) for number, samples in enumerate(clips) for window in cut(samples))
    found: list[list[np.ndarray]] = [[] for _ in clips]
    while batch := list(islice(windows, most)):
        values = model(np.stack([window for _, window in batch]))
        for (number, _), row in zip(batch, values, strict=True):
            found[number].append(row)
    return np.array([np.mean(rows, axis=0, dtype=np.float64) for rows in found])

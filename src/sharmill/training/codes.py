"""The data of a cut, from ``open_shar`` or plain lhotse: audio at a rate, text, and codes in the form that models take.

Codes are whole frames of one codec between begin and end. A batch gets a part of each context: a random slice in whole
frames of the codec, the same for the same cut.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lhotse import MonoCut, Recording
from lhotse.array import TemporalArray
from lhotse.cut import Cut, MixedCut, PaddingCut

from sharmill.errors import refuse
from sharmill.files.location import Location
from sharmill.shar.fields import CONTEXT_AUDIO, CONTEXT_CODES, TARGET_AUDIO, TARGET_CODES
from sharmill.shar.index import open_directory, read_dataset
from sharmill.shar.reading.in_memory import SafeSource, TimeLastArray, check_claims

# Sources of recordings whose data has been read; a file is where the audio came from, and nothing to load.
_LOADED = ("memory", "shar")
# Durations are sums of floats; a frame that is missing by less than this share of it is there.
TOLERANCE = 1e-6


def refuse_example(*problems: tuple[object, str]) -> None:
    """Raise ValueError for the first problem, a condition and a sentence, of which the condition is true."""
    for is_there, problem in problems:
        if is_there:
            raise ValueError(problem)


def holds(cut: MonoCut, field: str) -> bool:
    """Return True if the cut carries this field."""
    return recording_of(cut) is not None if field == TARGET_AUDIO else cut.has_custom(field)


def require_one_supervision(cut: MonoCut) -> None:
    """Raise ValueError for a cut that is not one utterance."""
    count = len(cut.supervisions)
    refuse_example((count != 1, f"cut {cut.id!r} has {count} supervisions instead of one"))


def without_padding(cut: Cut) -> tuple[MonoCut, float]:
    """Return the cut that was padded at its end, and its seconds with the padding; another cut as it is.

    Raises:
        ValueError: the cut is padded at its begin, or mixed.
    """
    if isinstance(cut, MonoCut):
        return cut, cut.duration
    tracks = cut.tracks if isinstance(cut, MixedCut) else []
    # The tracks of a cut that was padded at its begin have the padding first.
    if tracks and isinstance(tracks[0].cut, MonoCut) and all(isinstance(one.cut, PaddingCut) for one in tracks[1:]):
        return tracks[0].cut, cut.duration
    raise ValueError(
        f"cut {cut.id!r} is a {type(cut).__name__}; batches are made of MonoCuts, which may be padded at their end "
        "(pad_min_duration with pad_direction: right)"
    )


def load_array(cut: MonoCut, field: str) -> np.ndarray:
    """Return codes (codebooks, frames): the target's frames of this cut, or the whole context.

    Raises:
        ValueError: the target's audio was perturbed, which its codes cannot follow.
    """
    array = (cut.custom or {})[field]
    done = _perturbations(cut) if field == TARGET_CODES else ""
    refuse_example(
        (done, f"cut {cut.id!r} was changed by {done}, and its codes were not: load audio (codes=False), or leave that "
               "out"),
    )  # fmt: skip
    if field != TARGET_CODES or not isinstance(array, TemporalArray):
        return array.load()
    # lhotse's own class cuts an array in memory along its codebooks.
    on_time = array if isinstance(array, TimeLastArray) else TimeLastArray(**vars(array))
    return on_time.load(cut.start, cut.duration)


def load_audio(cut: MonoCut, field: str, sampling_rate: int) -> np.ndarray:
    """Return samples (time,) at ``sampling_rate``, float32: the target's part of this cut, or the whole context.

    Raises:
        ValueError: the cut does not carry it, it has several channels, or it cannot follow a perturbation of the cut.
        AudioLoadingError: it cannot be decoded, or would be more audio than its bytes and its recording allow.
    """
    is_target = field == TARGET_AUDIO
    recording: Any = recording_of(cut) if is_target else (cut.custom or {}).get(field)
    done = _perturbations(cut) if is_target and recording is not cut.recording else ""
    refuse_example(
        (recording is None, f"cut {cut.id!r} has no {field}; name it in open_shar(..., fields=[...])"),
        (done, f"cut {cut.id!r} was changed by {done}, and its {field} was not: read it with open_shar"),
    )
    part = {"offset": cut.start, "duration": cut.duration} if is_target else {}
    for source in recording.sources:
        # Plain lhotse's; those of ``open_shar`` look themselves.
        if isinstance(source.source, bytes) and not isinstance(source, SafeSource):
            check_claims(source.source, None if recording.transforms else recording.duration, part.get("duration"))
    samples = recording.resample(sampling_rate).load_audio(**part)
    return mono(samples, f"the {field} of cut {cut.id!r}")


def mono(samples: np.ndarray, what: str) -> np.ndarray:
    """Return the one channel of samples (channels, time) as float32 (time,); raise ValueError if there are several."""
    refuse_example((len(samples) != 1, f"{what} has {len(samples)} channels; mono is needed"))
    return samples[0].astype(np.float32, copy=False)


def epoch_of(cut: MonoCut) -> int:
    """Return the epoch of the cut's reader: of our ``shar_position``, or lhotse's ``shar_epoch``; else 0."""
    custom = cut.custom or {}
    position = custom.get("shar_position")
    return position[0] if position is not None else custom.get("shar_epoch", 0)


def text_of(cut: MonoCut, field: str) -> str | None:
    """Return the supervision's text, or the value that its ``custom`` has under another name."""
    supervision = cut.supervisions[0]
    return supervision.text if field == "text" else (supervision.custom or {}).get(field)


def recording_of(cut: MonoCut) -> Recording | None:
    """Return the target's audio: the field of that name, or the cut's own recording where its data has been read."""
    field = (cut.custom or {}).get(TARGET_AUDIO)
    own = cut.recording
    if own is None or not all(source.type in _LOADED for source in own.sources):
        return field
    # ``open_shar`` attaches the field as the recording too, and lhotse perturbs the recording alone.
    same = field is None or all(a.source is b.source for a, b in zip(own.sources, field.sources, strict=False))
    return own if same else field


def _perturbations(cut: MonoCut) -> str:
    """Return the names of lhotse's transforms of the cut's recording, resampling apart, such as ``Speed``."""
    transforms = (cut.recording.transforms if cut.recording is not None else None) or []
    names = [one["name"] if isinstance(one, dict) else type(one).__name__ for one in transforms]
    return ", ".join(name for name in names if name != "Resample")


@dataclass(frozen=True)
class ContextSlice:
    """``length`` frames, from frame ``first`` on, of a context of ``num_frames``, which starts over at its end."""

    first: int
    length: int
    num_frames: int
    frame_shift: float

    def of_samples(self, samples: np.ndarray, sampling_rate: int) -> np.ndarray:
        """Return the same seconds of samples (time,) at ``sampling_rate``.

        The context is brought to its whole frames first, with zeros behind it or, where it was rounded up at another
        rate, without its last sample: so what is repeated stays in step with the codes.
        """
        per_frame = self.frame_shift * sampling_rate
        whole = round(self.num_frames * per_frame)
        framed = np.pad(samples[:whole], (0, max(0, whole - len(samples))))
        first = round(self.first * per_frame)
        return _take(framed, first, round((self.first + self.length) * per_frame) - first)


def _take(values: np.ndarray, first: int, length: int) -> np.ndarray:
    """Return ``length`` values along the last axis from ``first`` on, starting over at the end."""
    size = values.shape[-1]
    if first + length <= size:
        return values[..., first : first + length]
    return np.take(values, np.arange(first, first + length) % size, axis=-1)


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
        """BOS and EOS."""
        return (
            self.codebook_size if self.bos is None else self.bos,
            self.codebook_size + 1 if self.eos is None else self.eos,
        )

    @property
    def context_marks(self) -> tuple[int, int]:
        """BOS and EOS of contexts."""
        bos, eos = self.target_marks
        return (
            bos if self.context_bos is None else self.context_bos,
            eos if self.context_eos is None else self.context_eos,
        )

    @classmethod
    def of_dataset(cls, dataset: str | Location, codec: str | None = None, **ids: Any) -> "CodecForm":
        """Return the form of a codec of a dataset directory or URL; ``codec`` may be left out where there is one.

        Raises:
            ConfigError: there is no finished dataset, or not this codec, or several to choose from.
        """
        records = {record.name: record for record in read_dataset(open_directory(dataset)).codecs}
        names = ", ".join(records) or "none"
        refuse(
            (codec is None and not records,
             f"{dataset} has no codec: encode it, or use ContextSpeechDataset(None), which gives audio"),
            (codec is None and len(records) > 1, f"{dataset} has the codecs {names}: name one with codec="),
            (codec is not None and codec not in records, f"{dataset} has no codec {codec!r}; it has {names}"),
            code="unknown_codec",
        )  # fmt: skip
        record = records[codec or next(iter(records))]
        return cls(
            sampling_rate=record.sampling_rate,
            samples_per_frame=record.samples_per_frame,
            codebook_size=record.codebook_size,
            num_codebooks=record.num_codebooks,
            **ids,
        )


class ContextDraws:
    """Draws of a slice of each context, by seed, epoch and cut alone.

    The shortest slice is ``min_duration`` rounded up to whole frames of the codec, the longest ``max_duration`` rounded
    down, but never below the shortest.

    Raises:
        ValueError: ``min_duration`` is not positive, or above ``max_duration``, or this has no end.
    """

    def __init__(self, min_duration: float, max_duration: float, seed: int) -> None:
        refuse_example(
            (not 0 < min_duration <= max_duration < math.inf,
             f"context_duration_min ({min_duration}) must be positive and not above context_duration_max "
             f"({max_duration}), a number of seconds"),
        )  # fmt: skip
        self._min_duration, self._max_duration, self._seed = min_duration, max_duration, seed
        # In shared memory, so that worker processes of a loader that keeps them see the next epoch too.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def draw(self, cut: MonoCut, num_frames: int, frame_shift: float) -> ContextSlice:
        """Return the slice of the context of a cut, which has so many frames, of ``frame_shift`` seconds each.

        Its length is drawn evenly between the shortest and the smaller of the longest and ``num_frames``, then its
        place among all places. A context shorter than the shortest slice is repeated from its beginning to that length.
        """
        refuse_example((num_frames == 0, f"the context of cut {cut.id!r} is empty"))
        shortest = max(1, math.ceil(self._min_duration / frame_shift - TOLERANCE))
        longest = max(shortest, math.floor(self._max_duration / frame_shift + TOLERANCE))
        draws = random.Random(f"{self._seed}/{(int(self.epoch), epoch_of(cut))}/{cut.id}")
        length = draws.randint(shortest, max(shortest, min(longest, num_frames)))
        return ContextSlice(draws.randint(0, max(0, num_frames - length)), length, num_frames, frame_shift)

    def draw_codes(self, cut: MonoCut, codec: CodecForm) -> tuple[ContextSlice, np.ndarray]:
        """Return the slice of a cut's context, and its codes between BOS and EOS, (codebooks, frames), int64."""
        codes = load_array(cut, CONTEXT_CODES)
        part = self.draw(cut, codes.shape[-1], codec.frame_shift)
        return part, _mark(_take(codes, part.first, part.length), codec, codec.context_marks, cut)

    def draw_audio(self, cut: MonoCut, sampling_rate: int, samples_per_frame: int) -> tuple[ContextSlice, np.ndarray]:
        """Return the slice of a cut's context, in whole frames, and its samples (time,)."""
        samples = load_audio(cut, CONTEXT_AUDIO, sampling_rate)
        num_frames = -(-len(samples) // samples_per_frame)
        part = self.draw(cut, num_frames, samples_per_frame / sampling_rate)
        return part, part.of_samples(samples, sampling_rate)


def load_target(cut: MonoCut, codec: CodecForm) -> np.ndarray:
    """Return the codes of a cut's target between BOS and EOS, (codebooks, frames), int64.

    Raises:
        ValueError: they are of another codec, or cannot follow what was done to the cut.
    """
    array = (cut.custom or {}).get(TARGET_CODES)
    if isinstance(array, TemporalArray):
        # Other tools give each cut a frame shift of its own, which misses the codec's by less than a frame a cut.
        frames = array.shape[array.temporal_dim]
        refuse_example(
            (abs(array.frame_shift - codec.frame_shift) * frames > 2 * codec.frame_shift,
             f"the codes of cut {cut.id!r} have a frame each {array.frame_shift:.4g} s, and the codec has one each "
             f"{codec.frame_shift:.4g} s: give the CodecForm of the codec that open_shar reads"),
        )  # fmt: skip
    return _mark(load_array(cut, TARGET_CODES), codec, codec.target_marks, cut)


def _mark(codes: np.ndarray, codec: CodecForm, marks: tuple[int, int], cut: MonoCut) -> np.ndarray:
    """Return codes (codebooks, frames) with BOS before and EOS behind them."""
    name, size = f"the codes of cut {cut.id!r}", codec.codebook_size
    refuse_example(
        (codes.ndim != 2 or codes.shape[1] == 0, f"{name} have the shape {codes.shape}, not (codebooks, frames)")
    )
    least, most = codes.min(), codes.max()
    refuse_example((least < 0 or most >= size, f"{name} are {least} to {most}, not 0 to {size - 1}"))
    if not codec.marks:
        return codes.astype(np.int64)
    return np.pad(codes.astype(np.int64), ((0, 0), (1, 1)), constant_values=((0, 0), marks))

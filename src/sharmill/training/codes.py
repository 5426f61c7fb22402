"""The data of cuts from ``open_shar`` or plain lhotse: resampled audio, text, and codes with BOS and EOS.

Batches use a random slice of each context, in whole frames of the codec. The slice depends only on the seed, the epoch
and the cut.
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

# Types of recording sources that hold their audio in memory. Sources of other types only name the original file.
_LOADED = ("memory", "shar")
# Tolerance for rounding errors in durations, as a fraction of a frame.
TOLERANCE = 1e-6


def refuse_example(*problems: tuple[object, str]) -> None:
    """Raise ValueError with the message of the first (condition, message) pair whose condition is true."""
    for condition, message in problems:
        if condition:
            raise ValueError(message)


def holds(cut: MonoCut, field: str) -> bool:
    """Return True if the cut has data for this field."""
    return recording_of(cut) is not None if field == TARGET_AUDIO else cut.has_custom(field)


def require_one_supervision(cut: MonoCut) -> None:
    """Raise ValueError if the cut does not have exactly one supervision."""
    count = len(cut.supervisions)
    refuse_example((count != 1, f"cut {cut.id!r} has {count} supervisions instead of one"))


def without_padding(cut: Cut) -> tuple[MonoCut, float]:
    """Return a cut without the padding at its end, and its duration in seconds including the padding.

    Raises:
        ValueError: the cut is padded at its beginning, or it is a mix of several cuts.
    """
    if isinstance(cut, MonoCut):
        return cut, cut.duration
    tracks = cut.tracks if isinstance(cut, MixedCut) else []
    # If a cut was padded at its beginning, the padding is its first track.
    if tracks and isinstance(tracks[0].cut, MonoCut) and all(isinstance(one.cut, PaddingCut) for one in tracks[1:]):
        return tracks[0].cut, cut.duration
    raise ValueError(
        f"cut {cut.id!r} is a {type(cut).__name__}: batches are built only from MonoCuts, which may be padded at their "
        "end (pad_min_duration with pad_direction: right)"
    )


def load_array(cut: MonoCut, field: str) -> np.ndarray:
    """Load the codes (codebooks, frames) of a cut's target or context.

    Only the part of the target that the cut covers is loaded; a context is always loaded as a whole.

    Raises:
        ValueError: the target's audio was perturbed, so its codes no longer match.
    """
    array = (cut.custom or {})[field]
    done = _perturbations(cut) if field == TARGET_CODES else ""
    refuse_example(
        (done, f"cut {cut.id!r} was perturbed by {done}, but its codes were not: load audio (codes=False), or turn the "
               "perturbation off"),
    )  # fmt: skip
    if field != TARGET_CODES or not isinstance(array, TemporalArray):
        return array.load()
    # lhotse's TemporalArray would slice an array in memory along its codebooks instead of its frames.
    on_time = array if isinstance(array, TimeLastArray) else TimeLastArray(**vars(array))
    return on_time.load(cut.start, cut.duration)


def load_audio(cut: MonoCut, field: str, sampling_rate: int) -> np.ndarray:
    """Load the audio of a cut's target or context as float32 (time,), resampled to ``sampling_rate`` Hz.

    Only the part of the target that the cut covers is loaded; a context is always loaded as a whole.

    Raises:
        ValueError: the audio is missing or has several channels, or the cut was perturbed but this audio was not.
        AudioLoadingError: the audio cannot be decoded, or its header claims more samples than its size or its recording
            allow.
    """
    is_target = field == TARGET_AUDIO
    recording: Any = recording_of(cut) if is_target else (cut.custom or {}).get(field)
    done = _perturbations(cut) if is_target and recording is not cut.recording else ""
    refuse_example(
        (recording is None, f"cut {cut.id!r} has no {field}: request it in open_shar(..., fields=[...])"),
        (done, f"cut {cut.id!r} was perturbed by {done}, but its {field} was not: read it with open_shar"),
    )
    part = {"offset": cut.start, "duration": cut.duration} if is_target else {}
    for source in recording.sources:
        # Sources of ``open_shar`` check the length of their audio themselves, but sources of plain lhotse do not.
        if isinstance(source.source, bytes) and not isinstance(source, SafeSource):
            check_claims(source.source, None if recording.transforms else recording.duration, part.get("duration"))
    samples = recording.resample(sampling_rate).load_audio(**part)
    return mono(samples, f"the {field} of cut {cut.id!r}")


def mono(samples: np.ndarray, what: str) -> np.ndarray:
    """Return the only channel of samples (channels, time) as float32 (time,); raise ValueError if there are several."""
    refuse_example((len(samples) != 1, f"{what} has {len(samples)} channels: mono is required"))
    return samples[0].astype(np.float32, copy=False)


def epoch_of(cut: MonoCut) -> int:
    """Return the epoch that the cut's reader recorded in ``shar_position`` or lhotse's ``shar_epoch``; 0 if unknown."""
    custom = cut.custom or {}
    position = custom.get("shar_position")
    return position[0] if position is not None else custom.get("shar_epoch", 0)


def text_of(cut: MonoCut, field: str) -> str | None:
    """Return the text of a cut's supervision; None if missing.

    Args:
        field: ``text`` for the supervision's own text; any other name is a key of the supervision's ``custom``.
    """
    supervision = cut.supervisions[0]
    return supervision.text if field == "text" else (supervision.custom or {}).get(field)


def recording_of(cut: MonoCut) -> Recording | None:
    """Return the recording that contains the target's audio; None if there is none.

    This is the cut's own recording if it holds the target's audio in memory, and otherwise the one in the custom field.
    """
    field = (cut.custom or {}).get(TARGET_AUDIO)
    own = cut.recording
    if own is None or not all(source.type in _LOADED for source in own.sources):
        return field
    # ``open_shar`` provides the same audio twice, as the recording and in the field. The recording is preferred,
    # because lhotse perturbs only the recording.
    same = field is None or all(a.source is b.source for a, b in zip(own.sources, field.sources, strict=False))
    return own if same else field


def _perturbations(cut: MonoCut) -> str:
    """Return the names of the recording's transforms, such as ``Speed``, in one string; resampling is left out."""
    transforms = (cut.recording.transforms if cut.recording is not None else None) or []
    names = [one["name"] if isinstance(one, dict) else type(one).__name__ for one in transforms]
    return ", ".join(name for name in names if name != "Resample")


@dataclass(frozen=True)
class ContextSlice:
    """A slice of ``length`` frames of a context, which begins at frame ``first`` and wraps around at the context's end.

    ``num_frames`` is the length of the whole context; ``frame_shift`` is in seconds.
    """

    first: int
    length: int
    num_frames: int
    frame_shift: float

    def of_samples(self, samples: np.ndarray, sampling_rate: int) -> np.ndarray:
        """Return the part of the context's samples (time,) that this slice covers, at ``sampling_rate`` Hz.

        The samples are first padded or trimmed to ``num_frames`` whole frames, so that repeated audio stays aligned
        with the codes.
        """
        per_frame = self.frame_shift * sampling_rate
        whole = round(self.num_frames * per_frame)
        framed = np.pad(samples[:whole], (0, max(0, whole - len(samples))))
        first = round(self.first * per_frame)
        return _slice_wrapped(framed, first, round((self.first + self.length) * per_frame) - first)


def _slice_wrapped(values: np.ndarray, first: int, length: int) -> np.ndarray:
    """Return ``length`` values along the last axis, starting at ``first`` and wrapping around at the end."""
    size = values.shape[-1]
    if first + length <= size:
        return values[..., first : first + length]
    return np.take(values, np.arange(first, first + length) % size, axis=-1)


@dataclass(frozen=True, kw_only=True)
class CodecForm:
    """The sampling rate and frame size of a codec, the size and number of its codebooks, and the ids of BOS and EOS.

    ``bos`` and ``eos`` default to ``codebook_size`` and ``codebook_size + 1``, the first ids after the codes;
    ``context_bos`` and ``context_eos`` default to ``bos`` and ``eos``. With ``marks=False``, BOS and EOS are not added.
    A ``ContextSpeechDataset`` does not need ``num_codebooks``, because it takes the number from the codes.
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
        """Duration of a frame in seconds."""
        return self.samples_per_frame / self.sampling_rate

    def num_frames(self, duration: float) -> int:
        """Return the number of frames in ``duration`` seconds, rounded up."""
        return math.ceil(duration / self.frame_shift - TOLERANCE)

    @property
    def target_marks(self) -> tuple[int, int]:
        """Ids of BOS and EOS for targets."""
        return (
            self.codebook_size if self.bos is None else self.bos,
            self.codebook_size + 1 if self.eos is None else self.eos,
        )

    @property
    def context_marks(self) -> tuple[int, int]:
        """Ids of BOS and EOS for contexts."""
        bos, eos = self.target_marks
        return (
            bos if self.context_bos is None else self.context_bos,
            eos if self.context_eos is None else self.context_eos,
        )

    @classmethod
    def of_dataset(cls, dataset: str | Location, codec: str | None = None, **ids: Any) -> "CodecForm":
        """Return the form of a codec with which a dataset was encoded.

        Args:
            dataset: directory or URL of the dataset.
            codec: name of the codec; may be omitted if the dataset has only one.
            ids: further fields of the form, such as ``bos``.

        Raises:
            ConfigError: the dataset is missing or unfinished, it lacks the codec, or the codec is omitted although the
                dataset does not have exactly one.
        """
        records = {record.name: record for record in read_dataset(open_directory(dataset)).codecs}
        names = ", ".join(records) or "none"
        refuse(
            (codec is None and not records,
             f"{dataset} has no codec: encode it, or load audio with ContextSpeechDataset(None)"),
            (codec is None and len(records) > 1, f"{dataset} has the codecs {names}: choose one with codec="),
            (codec is not None and codec not in records, f"{dataset} has no codec {codec!r}: choose from {names}"),
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
    """Random slices of contexts, which depend only on the seed, the epoch and the cut.

    The minimum length of a slice is ``min_duration`` in seconds, rounded up to whole frames of the codec. The maximum
    length is ``max_duration``, rounded down, but at least the minimum length.

    Raises:
        ValueError: ``min_duration`` is not positive or exceeds ``max_duration``, or ``max_duration`` is infinite.
    """

    def __init__(self, min_duration: float, max_duration: float, seed: int) -> None:
        refuse_example(
            (not 0 < min_duration <= max_duration < math.inf,
             f"context_duration_min ({min_duration}) must be positive and at most context_duration_max "
             f"({max_duration}), which must be finite"),
        )  # fmt: skip
        self._min_duration, self._max_duration, self._seed = min_duration, max_duration, seed
        # Persistent workers of a loader see a new epoch only through shared memory.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def draw(self, cut: MonoCut, num_frames: int, frame_shift: float) -> ContextSlice:
        """Draw a slice of a cut's context, which has ``num_frames`` frames of ``frame_shift`` seconds.

        The length is drawn uniformly between the minimum length and the longest permitted length that fits into the
        context. The first frame is then drawn uniformly from the positions at which the slice fits. A context shorter
        than the minimum length is repeated.
        """
        refuse_example((num_frames == 0, f"the context of cut {cut.id!r} is empty"))
        shortest = max(1, math.ceil(self._min_duration / frame_shift - TOLERANCE))
        longest = max(shortest, math.floor(self._max_duration / frame_shift + TOLERANCE))
        draws = random.Random(f"{self._seed}/{(int(self.epoch), epoch_of(cut))}/{cut.id}")
        length = draws.randint(shortest, max(shortest, min(longest, num_frames)))
        return ContextSlice(draws.randint(0, max(0, num_frames - length)), length, num_frames, frame_shift)

    def draw_codes(self, cut: MonoCut, codec: CodecForm) -> tuple[ContextSlice, np.ndarray]:
        """Draw a slice of a cut's context; return it with its codes between BOS and EOS, int64 (codebooks, frames)."""
        codes = load_array(cut, CONTEXT_CODES)
        part = self.draw(cut, codes.shape[-1], codec.frame_shift)
        return part, _check_and_mark(_slice_wrapped(codes, part.first, part.length), codec, codec.context_marks, cut)

    def draw_audio(self, cut: MonoCut, sampling_rate: int, samples_per_frame: int) -> tuple[ContextSlice, np.ndarray]:
        """Draw a slice of whole frames from a cut's context, and return it with its samples (time,)."""
        samples = load_audio(cut, CONTEXT_AUDIO, sampling_rate)
        num_frames = -(-len(samples) // samples_per_frame)
        part = self.draw(cut, num_frames, samples_per_frame / sampling_rate)
        return part, part.of_samples(samples, sampling_rate)


def load_target(cut: MonoCut, codec: CodecForm) -> np.ndarray:
    """Load the codes of a cut's target, and return them between BOS and EOS as int64 (codebooks, frames).

    Raises:
        ValueError: the codes are from another codec, or the cut was perturbed.
    """
    array = (cut.custom or {}).get(TARGET_CODES)
    if isinstance(array, TemporalArray):
        # Other tools compute the frame shift from each cut's duration, so its error adds up to less than one frame over
        # a whole cut.
        frames = array.shape[array.temporal_dim]
        refuse_example(
            (abs(array.frame_shift - codec.frame_shift) * frames > 2 * codec.frame_shift,
             f"the codes of cut {cut.id!r} have a frame every {array.frame_shift:.4g} s, but the codec has one every "
             f"{codec.frame_shift:.4g} s: pass the CodecForm of the codec that open_shar reads"),
        )  # fmt: skip
    return _check_and_mark(load_array(cut, TARGET_CODES), codec, codec.target_marks, cut)


def _check_and_mark(codes: np.ndarray, codec: CodecForm, marks: tuple[int, int], cut: MonoCut) -> np.ndarray:
    """Check codes (codebooks, frames), and return them as int64, between BOS and EOS if the codec uses these."""
    name, size = f"the codes of cut {cut.id!r}", codec.codebook_size
    refuse_example(
        (codes.ndim != 2 or codes.shape[1] == 0, f"{name} have the shape {codes.shape}, not (codebooks, frames)")
    )
    least, most = codes.min(), codes.max()
    refuse_example((least < 0 or most >= size, f"{name} range from {least} to {most}, not from 0 to {size - 1}"))
    if not codec.marks:
        return codes.astype(np.int64)
    return np.pad(codes.astype(np.int64), ((0, 0), (1, 1)), constant_values=((0, 0), marks))

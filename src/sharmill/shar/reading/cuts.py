"""Lhotse's objects from decoded JSON: the same as lhotse makes, in a tenth of the time.

What looks as sharmill and lhotse usually write it is put together directly. Whatever has further keys (features,
alignments, transforms, video) is left to lhotse's own functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from lhotse import AudioSource, Features, MonoCut, Recording, SupervisionSegment
from lhotse.array import Array, TemporalArray
from lhotse.audio import AudioLoadingError
from lhotse.cut import Cut
from lhotse.serialization import deserialize_custom_field, deserialize_item

from sharmill.shar.arrays import array_from_bytes, array_layout
from sharmill.shar.reading.memory_audio import memory_source, same_fields
from sharmill.shar.reading.safety import SAFE_SOURCES, block_sources, find_forbidden, is_device, is_no_plain_file

# What decoding raises of values that are not what they should be.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, AssertionError)

_CUT_TYPES = ("MonoCut", "MultiCut", "MixedCut", "Cut")
_CUT_KEYS = frozenset({"id", "start", "duration", "channel", "supervisions", "recording", "custom", "type"})
_CUT_FIELDS = frozenset(MonoCut.__dataclass_fields__)
_CUT_NEEDS = frozenset({"id", "start", "duration", "channel"})
_SUPERVISION_DEFAULTS = {
    "channel": 0, "text": None, "language": None, "speaker": None, "gender": None, "custom": None, "alignment": None,
}  # fmt: skip
_SUPERVISION_NEEDS = frozenset({"id", "recording_id", "start", "duration"})
_SUPERVISION_KEYS = _SUPERVISION_NEEDS | _SUPERVISION_DEFAULTS.keys() - {"alignment"}
_RECORDING_KEYS = frozenset({"id", "sources", "sampling_rate", "num_samples", "duration", "channel_ids"})
_SOURCE_KEYS = frozenset({"type", "channels", "source"})
_ARRAY_KEYS = frozenset({"storage_type", "storage_path", "storage_key", "shape"})
_TEMPORAL_KEYS = frozenset({"array", "temporal_dim", "frame_shift", "start"})

_STORAGE_TYPES = {"npy": "memory_npy", "llc": "memory_lilcom"}

_new = object.__new__
_set = object.__setattr__


def read_cut(values: dict[str, Any]) -> Cut:
    """Return the cut that lhotse's ``deserialize_item`` makes of ``values``, which are used up.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, AssertionError (``MALFORMED``): it is not a cut, or has
            audio that is not in a file.
    """
    if values.get("type") != "MonoCut" or not (_CUT_NEEDS <= values.keys() <= _CUT_KEYS):
        if values.get("type") not in _CUT_TYPES:
            raise ValueError(f"its type is {values.get('type')!r}")
        _require_safe(values)
        return deserialize_item(values)
    recording = values.get("recording")
    cut = _new(MonoCut)
    # lhotse's cuts take attributes that they do not know for custom ones, so that these cannot be set one by one.
    _set(
        cut,
        "__dict__",
        {
            "id": values["id"],
            "start": values["start"],
            "duration": values["duration"],
            "channel": values["channel"],
            "supervisions": [_make_supervision(supervision) for supervision in values.get("supervisions", ())],
            "features": None,
            "recording": None if recording is None else _make_recording(recording),
            "custom": _make_custom(values.get("custom")),
        },
    )
    return cut


def is_method_of_cuts(name: str) -> bool:
    """Return True if lhotse's cuts have something other than data under a name, which no field can have then."""
    return name not in MonoCut.__dataclass_fields__ and hasattr(MonoCut, name)


def read_item(metadata: dict[str, Any], extension: str, data: bytes) -> Any:
    """Return the item of a tar field for a cut: a Recording, Array, TemporalArray or Features with its data in memory.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, AssertionError (``MALFORMED``): it is none of these, or has
            something in it that would be loaded from elsewhere.
        DamagedShard: it is an array that cannot be loaded.
    """
    keys = metadata.keys()
    if keys == _RECORDING_KEYS:
        (source,) = metadata["sources"]
        return _recording(metadata, [memory_source(source["channels"], data, metadata["duration"])])
    if keys == _TEMPORAL_KEYS and metadata["array"].keys() == _ARRAY_KEYS:
        array = _array(metadata["array"]["shape"], extension, data)
        time_last = metadata["temporal_dim"] in (-1, len(array.shape) - 1)
        temporal = _new(TimeLastArray if time_last else TemporalArray)
        temporal.__dict__.update(metadata, array=array)
        return temporal
    if keys == _ARRAY_KEYS:
        return _array(metadata["shape"], extension, data)
    _require_safe(metadata)
    return _fill(deserialize_item(metadata), extension, data)


def as_array(temporal: TemporalArray) -> Array:
    """Return the same array without a time line, so that it is never cut."""
    array = _new(_MemoryArray)
    array.__dict__.update(temporal.array.__dict__)
    return array


def set_field(cut: MonoCut, name: str, value: Any) -> None:
    """Set an attribute of a cut without lhotse's checks, which cost more than all the rest."""
    if name in _CUT_FIELDS:
        _set(cut, name, value)
    else:
        cut.custom[name] = value


def with_id(recording: Recording, recording_id: str) -> Recording:
    """Return the same recording under another id."""
    other = _new(Recording)
    other.__dict__.update(recording.__dict__, id=recording_id)
    return other


def _require_safe(values: Any) -> None:
    """Raise ValueError where lhotse would load what does not lie in the dataset; see the module ``safety``."""
    if found := find_forbidden(values):
        raise ValueError(f"it has {found}, which is not loaded")
    block_sources(values)


def _make_supervision(values: dict[str, Any]) -> SupervisionSegment:
    if not (_SUPERVISION_NEEDS <= values.keys() <= _SUPERVISION_KEYS):
        _require_safe(values)
        return SupervisionSegment.from_dict(values)
    supervision = _new(SupervisionSegment)
    merged = _SUPERVISION_DEFAULTS | values
    _make_custom(merged["custom"])
    _set(supervision, "__dict__", merged)
    return supervision


def _make_recording(values: dict[str, Any]) -> Recording:
    sources = values["sources"]
    if values.keys() != _RECORDING_KEYS or any(source.keys() != _SOURCE_KEYS for source in sources):
        _require_safe(values)
        return Recording.from_dict(values)
    for source in sources:
        if source["type"] not in SAFE_SOURCES or is_no_plain_file(source):
            _require_safe(values)
    return _recording(values, [_source(**source) for source in sources])


def _recording(values: dict[str, Any], sources: list[AudioSource]) -> Recording:
    recording = _new(Recording)
    recording.__dict__.update(values, sources=sources, transforms=None)
    return recording


def _source(type: str, channels: list[int], source: Any) -> AudioSource:
    made = _new(_NamedSource)
    made.__dict__.update({"type": type, "channels": channels, "source": source, "video": None})
    return made


def _array(shape: list[int], extension: str, data: bytes) -> Array:
    if extension == "npy":
        array_layout(data, "its array")  # where it is loaded, nobody knows where it came from
    array = _new(_MemoryArray)
    storage = {"storage_type": _STORAGE_TYPES[extension], "storage_path": "", "storage_key": data, "shape": shape}
    array.__dict__.update(storage)
    return array


def _make_custom(custom: dict[str, Any] | None) -> dict[str, Any] | None:
    if custom:
        for value in custom.values():
            if type(value) is dict:
                _require_safe(custom)
                return deserialize_custom_field(custom)
    return custom


def _fill(manifest: Any, extension: str, data: bytes) -> Any:
    """Put the data into a manifest that lhotse made, and return it."""
    if isinstance(manifest, Recording):
        (source,) = manifest.sources
        # Where there are transforms, the recording is as long as they make it.
        manifest.sources = [memory_source(source.channels, data, None if manifest.transforms else manifest.duration)]
    elif not isinstance(manifest, (Array, TemporalArray, Features)):
        raise ValueError(f"a {type(manifest).__name__} is not read")
    elif extension not in _STORAGE_TYPES:
        raise ValueError(f"arrays in the format {extension!r} are not read")
    else:
        stored = manifest.array if isinstance(manifest, TemporalArray) else manifest
        stored.storage_type, stored.storage_key = _STORAGE_TYPES[extension], data
    return manifest


class _NamedSource(AudioSource):
    """An audio source that looks at the file of its name where it is loaded; equal to lhotse's own."""

    def load_audio(
        self, offset: float = 0.0, duration: float | None = None, force_opus_sampling_rate: int | None = None
    ) -> np.ndarray:
        """Return the samples that lhotse decodes.

        Raises:
            AudioLoadingError: there is a FIFO, a device or a folder of this name.
        """
        if self.type == "file" and is_device(self.source):
            raise AudioLoadingError(f"{self.source!r} is no plain file, and is not opened")
        return super().load_audio(offset, duration, force_opus_sampling_rate)

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other, AudioSource)

    __hash__ = None  # type: ignore[assignment]


# A frame that is asked for by less than this share of it is not: times are sums of floats.
_TOLERANCE = 1e-6
_NPY = "memory_npy"


@dataclass(eq=False)
class _MemoryArray(Array):
    """An Array that is loaded without numpy's costly look at its header; equal to lhotse's with the same content."""

    def load(self) -> np.ndarray:
        if self.storage_type != _NPY or not isinstance(self.storage_key, bytes):
            return super().load()
        # A copy, since what lies in bytes cannot be written to.
        return array_from_bytes(self.storage_key, "an array in memory").copy(order="K")

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other, Array)

    __hash__ = None  # type: ignore[assignment]


@dataclass(eq=False)
class TimeLastArray(TemporalArray):
    """A TemporalArray with ``temporal_dim=-1`` that loads the right part of itself."""

    def load(self, start: float | None = None, duration: float | None = None) -> np.ndarray:
        """Return the codes (codebooks, frames) of ``duration`` seconds from ``start`` on; by default all.

        There are ``ceil(duration / frame_shift)`` frames, or as many as are left. What begins in the last frame has it.

        Raises:
            ValueError: ``start`` lies before the array.
        """
        array = self.array.load()
        offset = 0.0 if start is None else start - self.start
        if offset < -1e-5:
            raise ValueError(f"the array begins at {self.start} s, after {start} s")
        frames = offset / self.frame_shift
        first = math.floor(frames + 0.5)
        if first == array.shape[-1] and frames < first - _TOLERANCE:
            # The nearest beginning is behind the last frame, as for the short rest that windows leave.
            first -= 1
        if duration is None:
            return array[..., first:]
        return array[..., first : first + math.ceil(duration / self.frame_shift - _TOLERANCE)]

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other, TemporalArray)

    __hash__ = None  # type: ignore[assignment]

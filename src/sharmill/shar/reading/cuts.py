"""Construction of lhotse's cuts and items from JSON, about ten times faster than by lhotse itself.

Manifests in the usual layout of sharmill and lhotse are constructed directly. Manifests with further keys (features,
transforms, video) are left to lhotse's own functions.
"""

from typing import Any, TypeVar

from lhotse import Features, MonoCut, Recording, SupervisionSegment
from lhotse.array import Array, TemporalArray
from lhotse.cut import Cut
from lhotse.serialization import deserialize_custom_field, deserialize_item
from lhotse.supervision import AlignmentItem

from sharmill.shar.arrays import array_layout
from sharmill.shar.reading.in_memory import STORAGE_TYPES, MemoryArray, SafeSource, TimeLastArray
from sharmill.shar.reading.safety import SAFE_SOURCES, block_sources, find_forbidden, needs_more_than_open

# Errors that decoding raises for malformed values.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, AssertionError)

_CUT_KEYS = frozenset({"id", "start", "duration", "channel", "supervisions", "recording", "custom", "type"})
_CUT_FIELDS = frozenset(MonoCut.__dataclass_fields__)
_CUT_NEEDS = frozenset({"id", "start", "duration", "channel"})
_SUPERVISION_DEFAULTS = {
    "channel": 0, "text": None, "language": None, "speaker": None, "gender": None, "custom": None, "alignment": None,
}  # fmt: skip
_SUPERVISION_NEEDS = frozenset({"id", "recording_id", "start", "duration"})
_SUPERVISION_KEYS = _SUPERVISION_NEEDS | _SUPERVISION_DEFAULTS.keys()
_RECORDING_KEYS = frozenset({"id", "sources", "sampling_rate", "num_samples", "duration", "channel_ids"})
_SOURCE_KEYS = frozenset({"type", "channels", "source"})
_ARRAY_KEYS = frozenset({"storage_type", "storage_path", "storage_key", "shape"})
_TEMPORAL_KEYS = frozenset({"array", "temporal_dim", "frame_shift", "start"})


T = TypeVar("T")
_new = object.__new__
_set = object.__setattr__


def read_cut(values: dict[str, Any]) -> Cut:
    """Return the cut that lhotse's ``deserialize_item`` would make from ``values``, which may be modified.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, AssertionError (``MALFORMED``): the values are not a cut, or
        contain something that must not be loaded.
    """
    if values.get("type") != "MonoCut" or not (_CUT_NEEDS <= values.keys() <= _CUT_KEYS):
        if values.get("type") not in ("MonoCut", "MultiCut", "MixedCut", "Cut"):
            raise ValueError(f"its type is {values.get('type')!r}, which is not a type of cut")
        _require_safe(values)
        return deserialize_item(values)
    recording = values.get("recording")
    return make(
        MonoCut,
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


def make(kind: type[T], attributes: dict[str, Any]) -> T:
    """Return an object of a lhotse class with these attributes, bypassing its constructor and checks."""
    made = _new(kind)
    # lhotse's cuts store unknown attributes as custom ones, so the attributes cannot be set one by one.
    _set(made, "__dict__", attributes)
    return made


def is_method_of_cuts(name: str) -> bool:
    """Return True if ``name`` is a method or property of lhotse's cuts, so that no field can have this name."""
    return name not in MonoCut.__dataclass_fields__ and hasattr(MonoCut, name)


def read_item(metadata: dict[str, Any], extension: str, data: bytes) -> Any:
    """Return a cut's item of a tar field: a Recording, Array, TemporalArray or Features with its data in memory.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, AssertionError (``MALFORMED``): the metadata describes none
        of these, or contains something that would be loaded from elsewhere.
        DamagedShard: the data is an array that cannot be loaded.
    """
    keys = metadata.keys()
    if keys == _RECORDING_KEYS:
        (source,) = metadata["sources"]
        sources = [_memory_source(source["channels"], data, metadata["duration"])]
        return make(Recording, {**metadata, "sources": sources, "transforms": None})
    if keys == _TEMPORAL_KEYS and metadata["array"].keys() == _ARRAY_KEYS:
        array = _array(metadata["array"]["shape"], extension, data)
        time_last = metadata["temporal_dim"] in (-1, len(array.shape) - 1)
        return make(TimeLastArray if time_last else TemporalArray, {**metadata, "array": array})
    if keys == _ARRAY_KEYS:
        return _array(metadata["shape"], extension, data)
    _require_safe(metadata)
    return _fill(deserialize_item(metadata), extension, data)


def as_array(temporal: TemporalArray) -> Array:
    """Return the same array without a time line, so that it is never truncated with the cut."""
    return make(MemoryArray, {**temporal.array.__dict__})


def set_field(cut: MonoCut, name: str, value: Any) -> None:
    """Set an attribute of a cut without lhotse's checks, which would take most of the time."""
    if name in _CUT_FIELDS:
        _set(cut, name, value)
    else:
        cut.custom[name] = value


def with_id(recording: Recording, recording_id: str) -> Recording:
    """Return the same recording under another id."""
    return make(Recording, {**recording.__dict__, "id": recording_id})


def _memory_source(channels: list[int], data: bytes, seconds: Any) -> SafeSource:
    """Return the source of a recording in memory; ``seconds`` is the duration that the recording claims, or None."""
    claimed = seconds if seconds is None or type(seconds) in (int, float) else 0.0
    attributes = {"type": "memory", "channels": channels, "source": data, "video": None, "claimed": claimed}
    return make(SafeSource, attributes)


def _require_safe(values: Any) -> None:
    """Raise ValueError if the values contain something that must not be loaded; see the module ``safety``.

    Make sources unloadable if they are not regular files.
    """
    if found := find_forbidden(values):
        raise ValueError(f"it has {found}, which is not loaded")
    block_sources(values)


def _make_supervision(values: dict[str, Any]) -> SupervisionSegment:
    if not (_SUPERVISION_NEEDS <= values.keys() <= _SUPERVISION_KEYS):
        _require_safe(values)
        return SupervisionSegment.from_dict(values)
    merged = _SUPERVISION_DEFAULTS | values
    _make_custom(merged["custom"])
    if (alignments := merged["alignment"]) is not None:
        merged["alignment"] = {kind: list(map(AlignmentItem.deserialize, items)) for kind, items in alignments.items()}
    return make(SupervisionSegment, merged)


def _make_recording(values: dict[str, Any]) -> Recording:
    sources = values["sources"]
    if values.keys() != _RECORDING_KEYS or any(source.keys() != _SOURCE_KEYS for source in sources):
        _require_safe(values)
        return Recording.from_dict(values)
    for source in sources:
        if source["type"] not in SAFE_SOURCES or needs_more_than_open(source):
            _require_safe(values)
    made = [make(SafeSource, {**source, "video": None}) for source in sources]
    return make(Recording, {**values, "sources": made, "transforms": None})


def _array(shape: list[int], extension: str, data: bytes) -> Array:
    if extension == "npy":
        array_layout(data, "its array")  # check now: an error on loading could not name the shard
    storage = {"storage_type": STORAGE_TYPES[extension], "storage_path": "", "storage_key": data, "shape": shape}
    return make(MemoryArray, storage)


def _make_custom(custom: dict[str, Any] | None) -> dict[str, Any] | None:
    if custom:
        for value in custom.values():
            if type(value) is dict:
                _require_safe(custom)
                return deserialize_custom_field(custom)
    return custom


def _fill(manifest: Any, extension: str, data: bytes) -> Any:
    """Put the data into a manifest that lhotse made, and return the manifest."""
    if isinstance(manifest, Recording):
        (source,) = manifest.sources
        # Transforms may change the duration of a recording.
        manifest.sources = [_memory_source(source.channels, data, None if manifest.transforms else manifest.duration)]
    elif not isinstance(manifest, (Array, TemporalArray, Features)):
        raise ValueError(f"a {type(manifest).__name__} cannot be read")
    elif extension not in STORAGE_TYPES:
        raise ValueError(f"arrays in the format {extension!r} cannot be read")
    else:
        stored = manifest.array if isinstance(manifest, TemporalArray) else manifest
        stored.storage_type, stored.storage_key = STORAGE_TYPES[extension], data
    return manifest

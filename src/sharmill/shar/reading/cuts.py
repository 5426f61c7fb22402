"""Cuts of an open shard, each with its item of the chosen fields, as lhotse's objects: its own, in a tenth of the time.

What looks as sharmill and lhotse usually write it is put together directly. Whatever has further keys (features,
transforms, video) is left to lhotse's own functions.

Audio in memory is decoded where it is loaded, and only as far as its bytes and its record go: a FLAC of some kilobytes
can hold hours of silence. The limits are those of ``sharmill.audio``, which decodes the recordings that a dataset is
made of. Audio that is decoded ahead of its use is decoded by libraries that work without Python's lock, so that threads
serve.
"""

import hashlib
import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, TypeVar

import msgspec
import numpy as np
import soundfile as sf
from lhotse import AudioSource, Features, MonoCut, Recording, SupervisionSegment
from lhotse.array import Array, TemporalArray
from lhotse.audio import AudioLoadingError, DurationMismatchError
from lhotse.cut import Cut
from lhotse.serialization import deserialize_custom_field, deserialize_item
from lhotse.supervision import AlignmentItem
from lhotse.utils import compute_num_samples
from miniaudio import ffi, lib

from sharmill.audio.decoder import MAX_SAMPLES_PER_BYTE, SAMPLES_IN_ANY_SIZE, to_float
from sharmill.audio.flac import flac_header
from sharmill.errors import DamagedShard, RejectRecord, one_line
from sharmill.files.location import local
from sharmill.files.stored import NOT_JSON
from sharmill.shar.arrays import array_from_bytes, array_layout
from sharmill.shar.fields import (
    CONTEXT_AUDIO,
    CONTEXT_CODES,
    CONTEXT_UNALIGNED,
    CUTS,
    RECORDING,
    TARGET_AUDIO,
    TARGET_CODES,
)
from sharmill.shar.items import NO_DATA, ItemTable, ValueTable, open_items
from sharmill.shar.offsets import open_indexed_lines
from sharmill.shar.reading.safety import SAFE_SOURCES, block_sources, find_forbidden, is_device, is_no_plain_file
from sharmill.shar.reading.shard_files import ShardFiles

# Errors that decoding raises for values of another form.
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

# lhotse allows less; what is longer than this was not written by a tool.
_SECONDS_TOO_LONG: Final = 1.0
_STORAGE_TYPES = {"npy": "memory_npy", "llc": "memory_lilcom"}
# A frame of which less than this share is asked for is left out: times are sums of floats.
_TOLERANCE: Final = 1e-6
POSITION: Final = "shar_position"

T = TypeVar("T")
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_new = object.__new__
_set = object.__setattr__


def read_cut(values: dict[str, Any]) -> Cut:
    """Return the cut that lhotse's ``deserialize_item`` makes of ``values``, which are used up.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, AssertionError (``MALFORMED``): it is not a cut, or has
            audio that is not in a file.
    """
    if values.get("type") != "MonoCut" or not (_CUT_NEEDS <= values.keys() <= _CUT_KEYS):
        if values.get("type") not in ("MonoCut", "MultiCut", "MixedCut", "Cut"):
            raise ValueError(f"its type is {values.get('type')!r}")
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
    """Return an object of a class of lhotse's with these attributes, without its constructor and its checks."""
    made = _new(kind)
    # lhotse's cuts take attributes that they do not know for custom ones, so that these cannot be set one by one.
    _set(made, "__dict__", attributes)
    return made


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
        sources = [memory_source(source["channels"], data, metadata["duration"])]
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
    """Return the same array without a time line, so that it is never cut."""
    return make(_MemoryArray, {**temporal.array.__dict__})


def set_field(cut: MonoCut, name: str, value: Any) -> None:
    """Set an attribute of a cut without lhotse's checks, which cost more than all the rest."""
    if name in _CUT_FIELDS:
        _set(cut, name, value)
    else:
        cut.custom[name] = value


def with_id(recording: Recording, recording_id: str) -> Recording:
    """Return the same recording under another id."""
    return make(Recording, {**recording.__dict__, "id": recording_id})


def _require_safe(values: Any) -> None:
    """Raise ValueError where lhotse would load what does not lie in the dataset; see the module ``safety``."""
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
        if source["type"] not in SAFE_SOURCES or is_no_plain_file(source):
            _require_safe(values)
    made = [make(SafeSource, {**source, "video": None}) for source in sources]
    return make(Recording, {**values, "sources": made, "transforms": None})


def _array(shape: list[int], extension: str, data: bytes) -> Array:
    if extension == "npy":
        array_layout(data, "its array")  # where it is loaded, nobody knows where it came from
    storage = {"storage_type": _STORAGE_TYPES[extension], "storage_path": "", "storage_key": data, "shape": shape}
    return make(_MemoryArray, storage)


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
        # Transforms may change the length of a recording.
        manifest.sources = [memory_source(source.channels, data, None if manifest.transforms else manifest.duration)]
    elif not isinstance(manifest, (Array, TemporalArray, Features)):
        raise ValueError(f"a {type(manifest).__name__} is not read")
    elif extension not in _STORAGE_TYPES:
        raise ValueError(f"arrays in the format {extension!r} are not read")
    else:
        stored = manifest.array if isinstance(manifest, TemporalArray) else manifest
        stored.storage_type, stored.storage_key = _STORAGE_TYPES[extension], data
    return manifest


class _EqualToLhotses:
    """Equality with an object of lhotse's own, of the dataclass ``_kind``, that has the same content."""

    _kind: ClassVar[type]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, self._kind):
            return NotImplemented
        return all(getattr(self, field.name) == getattr(other, field.name) for field in fields(self._kind))

    __hash__ = None  # type: ignore[assignment]


class SafeSource(_EqualToLhotses, AudioSource):
    """An audio source that looks at its bytes in memory, or at the file of its name, before lhotse decodes them.

    Attributes:
        claimed: the seconds that the recording says of bytes; None where they say nothing about them, or the source is
            a copy made by ``dataclasses.replace``.
    """

    _kind = AudioSource
    claimed: float | None = None

    def load_audio(
        self, offset: float = 0.0, duration: float | None = None, force_opus_sampling_rate: int | None = None
    ) -> np.ndarray:
        """Return the samples that lhotse decodes; raises as ``check``."""
        self.check(duration)
        return super().load_audio(offset, duration, force_opus_sampling_rate)

    def check(self, wanted: float | None = None) -> None:
        """Raise AudioLoadingError as ``check_claims`` does, and where there is no plain file of the name."""
        if self.type == "file" and is_device(self.source):
            raise AudioLoadingError(f"{self.source!r} is no plain file, and is not opened")
        if isinstance(self.source, bytes):
            check_claims(self.source, self.claimed, wanted)


def memory_source(channels: list[int], data: bytes, seconds: Any) -> SafeSource:
    """Make the source of a recording that says it has so many seconds, whatever it says; None: it says nothing."""
    claimed = seconds if seconds is None or type(seconds) in (int, float) else 0.0
    attributes = {"type": "memory", "channels": channels, "source": data, "video": None, "claimed": claimed}
    return make(SafeSource, attributes)


def check_claims(data: bytes, claimed: float | None, wanted: float | None = None) -> None:
    """Look at the header of an audio file in memory, before it is decoded.

    Args:
        claimed: the seconds that its recording says.
        wanted: the seconds that are to be decoded; None is all.

    Raises:
        AudioLoadingError: there are too few bytes for the samples that would be decoded, or all are wanted and they are
            more than ``claimed``.
    """
    # For WAV and MP3, the file size bounds the number of samples.
    if data.startswith((b"RIFF", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")):
        return
    found = flac_header(data)
    if found is None:
        try:
            with sf.SoundFile(io.BytesIO(data)) as sound:
                found = sound.frames, sound.channels, sound.samplerate
        except (sf.LibsndfileError, TypeError):  # TypeError: soundfile's, of what it takes for raw samples
            return  # lhotse says so
    num_samples, channels, rate = found
    if wanted is not None:
        num_samples = min(num_samples, math.ceil(max(0.0, wanted) * rate))
    if num_samples * channels > max(SAMPLES_IN_ANY_SIZE, len(data) * MAX_SAMPLES_PER_BYTE):
        raise AudioLoadingError(f"{len(data)} bytes are too few for {num_samples} samples of speech")
    if wanted is None and claimed is not None and num_samples / rate > claimed + _SECONDS_TOO_LONG:
        raise AudioLoadingError(f"the audio has {num_samples / rate:g} s, its recording says {claimed:g} s")


@dataclass(eq=False)
class _MemoryArray(_EqualToLhotses, Array):
    """An Array that is loaded without numpy's costly look at its header."""

    _kind = Array

    def load(self) -> np.ndarray:
        if self.storage_type != "memory_npy" or not isinstance(self.storage_key, bytes):
            return super().load()
        # A copy, since what lies in bytes cannot be written to.
        return array_from_bytes(self.storage_key, "an array in memory").copy(order="K")


@dataclass(eq=False)
class TimeLastArray(_EqualToLhotses, TemporalArray):
    """A TemporalArray with ``temporal_dim=-1`` that loads the right part of itself."""

    _kind = TemporalArray

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


class OpenShard:
    """A shard whose files are open, with all that can be seen without decoding items looked at already.

    Args:
        files: which to open.
        foreign: not of a dataset by sharmill: its time lines may have to be put right.
        needed: the fields without which a cut is left out.

    Raises:
        DamagedShard: when it is made, where a file is not as it should be.
    """

    def __init__(self, files: ShardFiles, *, foreign: bool, needed: Sequence[str] = ()) -> None:
        self.index = files.index
        self._foreign = foreign
        self._needed = needed
        try:
            # Copies of remote files are not evicted as long as the shard is open.
            self._held = [local(location) for location in files.locations]
        except RejectRecord as reject:
            raise self.damage(reject.detail) from reject
        self._lines = (
            open_indexed_lines(files.cuts, files.sidecars.get(CUTS, ())) if files.lines is None else files.lines
        )
        if files.count not in (None, len(self._lines)):
            raise self.damage(f"there are {len(self._lines)} {CUTS} instead of {files.count}")
        self._tables: dict[str, ItemTable | ValueTable] = {}
        for name, path in files.fields.items():
            if not foreign and is_method_of_cuts(name):
                raise self.damage(f"the field {name} is called like a method of cuts")
            table = self._tables[name] = open_items(path, sidecars=files.sidecars.get(name, ()))
            if len(table) != len(self._lines):
                raise self.damage(f"{name} ({path}) has {len(table)} items for {len(self._lines)} {CUTS}")

    def read(self, number: int, position: tuple[int, ...]) -> Cut | None:
        """Read a cut with the fields' items for it as its attributes; a placeholder is not attached.

        Return None for a cut that has a placeholder in a needed field.

        Args:
            number: of the cut in the shard.
            position: epoch, group, draw, block and item: the place in the order of all epochs, noted in the cut.

        Raises:
            DamagedShard: anything is not as it should be.
        """
        try:
            cut = read_cut(_decode_json(self._lines[number]))
            cut_id = cut.id
        except (*NOT_JSON, *MALFORMED) as error:
            raise self.damage(f"cut {number} is not a cut that can be read: {error!r}") from error
        items = {
            name: _read_item(table, number, cut_id)
            if isinstance(table, ItemTable)
            else _read_value(table, name, number, cut_id)
            for name, table in self._tables.items()
        }
        if any(items[name] is None for name in self._needed):
            return None
        if type(cut) is MonoCut:
            self._attach(cut, items, position)
        elif self._foreign:
            for name, item in items.items():
                if item is not None:
                    setattr(cut, name, item)
            setattr(cut, POSITION, position)
        else:
            raise self.damage(f"{cut_id!r} is not a MonoCut")
        return cut

    def _attach(self, cut: MonoCut, items: dict[str, Any], position: tuple[int, ...]) -> None:
        if cut.custom is None:
            set_field(cut, "custom", {})
        custom = cut.custom
        custom[POSITION] = position
        for name, item in items.items():
            if item is not None:
                set_field(cut, name, item)
        if self._foreign:
            _align(cut, custom)
        target = items.get(TARGET_AUDIO)
        # Others' Shars for speech-to-speech have a recording of their own beside it: what is answered.
        if target is not None and items.get(RECORDING) is None:
            set_field(cut, RECORDING, with_id(target, cut.recording.id) if cut.recording is not None else target)

    def damage(self, what: str) -> DamagedShard:
        return DamagedShard(f"shard {self.index}: {what}")


def _read_item(table: ItemTable, number: int, cut_id: str) -> Any:
    """Return the item of a cut in a tar field as an object of lhotse's, None for a placeholder."""
    found, extension, data, metadata = table.raw(number)
    if found != cut_id:
        raise table.damage(f"member '{found}.{extension}' is where one for {cut_id!r} should be")
    if extension == NO_DATA:
        return None
    try:
        return read_item(_decode_json(metadata), extension, data)
    except (*NOT_JSON, *MALFORMED) as error:
        raise table.damage(f"the metadata of '{found}.{extension}' cannot be read: {error!r}") from error
    except DamagedShard as error:
        raise table.damage(f"member '{found}.{extension}': {error}") from error


def _read_value(table: ValueTable, name: str, number: int, cut_id: str) -> Any:
    """Return the value of a cut in a field of values."""
    try:
        values = _decode_json(table.line(number))
    except NOT_JSON as error:
        raise table.damage(f"item {number} is not JSON: {error}") from error
    if values.get("cut_id") != cut_id:
        raise table.damage(f"item {number} is that of {values.get('cut_id')!r}, not of {cut_id!r}")
    value = values.get(name)
    if found := find_forbidden(value):
        raise table.damage(f"item {number} has {found}, which is not loaded")
    return value


def _align(cut: MonoCut, custom: dict[str, Any]) -> None:
    """Undo what the published scripts leave: the offset of the target in the cut, and contexts on its time line.

    Their audio and codes are of the segments alone. lhotse, which takes them for as long as the whole recording, would
    look for them at the offset.
    """
    if isinstance(custom.get(CONTEXT_AUDIO), Recording):
        custom[CONTEXT_UNALIGNED] = True
    context_codes = custom.get(CONTEXT_CODES)
    if isinstance(context_codes, TemporalArray):
        custom[CONTEXT_CODES] = as_array(context_codes)
    target = custom.get(TARGET_AUDIO)
    if isinstance(target, Recording) and _lasts(target.duration, cut.duration):
        for supervision in cut.supervisions:
            # lhotse counts the times of alignments from the start of the recording, and the cut is one now.
            for kind, items in (supervision.alignment or {}).items():
                supervision.alignment[kind] = [item.with_offset(-cut.start) for item in items]
            # The start of the cut itself, rounded by lhotse, which counts from the beginning of the cut.
            if cut.start > 0 and math.isclose(supervision.start, cut.start, abs_tol=1e-3):
                supervision.start = 0.0
        set_field(cut, "start", 0.0)
    codes = custom.get(TARGET_CODES)
    if isinstance(codes, TemporalArray) and _lasts(codes.duration, cut.duration, 2 * codes.frame_shift):
        codes.start = cut.start
        # The scripts round the frames of a second, so that the last frame of a slice would be left out: the frames
        # there are last as long as the cut.
        codes.frame_shift = min(codes.frame_shift, cut.duration / codes.shape[-1])


def _lasts(found: float, expected: float, tolerance: float = 0.025) -> bool:
    return math.isclose(found, expected, rel_tol=0.0, abs_tol=tolerance)


def _decode_json(line: bytes) -> dict[str, Any]:
    try:
        return _decode(line)
    except msgspec.DecodeError as error:
        # Python writes NaN and Infinity, which are no JSON, and lhotse with it.
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            raise error from None
        if not isinstance(values, dict):
            raise
        return values


def decode_audio(cut: Cut, shard: OpenShard) -> Cut:
    """Decode the audio that a cut holds in memory, and return the cut.

    Raises:
        DamagedShard: it cannot be decoded.
    """
    decoded: dict[int, Recording] = {}
    for name, recording in list(cut.iter_data()) if hasattr(cut, "iter_data") else ():
        if not isinstance(recording, Recording) or not recording.is_in_memory:
            continue
        source = id(recording.sources[0])
        if source not in decoded:
            try:
                decoded[source] = _decode_recording(recording)
            except (AudioLoadingError, DurationMismatchError, RuntimeError, ValueError, OSError) as error:
                raise shard.damage(f"{name} of {cut.id!r} cannot be decoded: {one_line(error)}") from error
        set_field(cut, name, with_id(decoded[source], recording.id))
    return cut


class _DecodedSource(SafeSource):
    """An audio source in memory that has been decoded once: loading takes a slice.

    Everything of lhotse works on it as on any other (``resample``, ``truncate``, saving), since it holds the encoded
    bytes as well. A copy made by ``dataclasses.replace`` decodes again.
    """

    samples: np.ndarray
    sampling_rate: int

    def load_audio(
        self, offset: float = 0.0, duration: float | None = None, force_opus_sampling_rate: int | None = None
    ) -> np.ndarray:
        """Return a copy of the samples (channels, num_samples) that lhotse would decode."""
        if not hasattr(self, "samples"):
            return super().load_audio(offset, duration, force_opus_sampling_rate)
        first = compute_num_samples(offset, self.sampling_rate) if offset > 0 else 0
        if duration is None:
            return as_floats(self.samples[..., first:])
        end = first + compute_num_samples(duration, self.sampling_rate)
        if end > self.samples.shape[-1]:
            # lhotse decides how much too short audio may be.
            return super().load_audio(offset, duration, force_opus_sampling_rate)
        return as_floats(self.samples[..., first:end])


def _decode_recording(recording: Recording) -> Recording:
    """Return the same Recording with its audio decoded.

    Raises:
        Exception: whatever lhotse raises for audio that cannot be decoded.
    """
    (source,) = recording.sources
    # For others than FLAC and WAV lhotse chooses among decoders, and resamples what Opus gives.
    if source.source[:4] in (b"fLaC", b"RIFF"):
        if isinstance(source, SafeSource):
            source.check()
        samples = decode_samples(source.source)
    else:
        samples = source.load_audio(force_opus_sampling_rate=recording.sampling_rate)
    attributes = {**source.__dict__, "samples": samples, "sampling_rate": recording.sampling_rate}
    return make(Recording, {**recording.__dict__, "sources": [make(_DecodedSource, attributes)]})


def decode_samples(data: bytes) -> np.ndarray:
    """Return samples (channels, num_samples) of FLAC or WAV, int16 or float32, in less time than libsndfile.

    dr_flac takes 70 % of the time of libFLAC, which libsndfile has, but passes over damage. What it decodes is taken if
    its MD5 sum is the one in the file; all else is left to libsndfile.
    """
    samples = _decode_flac(data)
    if samples is None:
        # A file of the system libsndfile reads by itself; else each read would wait for Python.
        with os.fdopen(os.memfd_create("sharmill"), "w+b") as file:
            file.write(data)
            file.seek(0)
            with sf.SoundFile(file.fileno(), closefd=False) as sound:
                samples = sound.read(dtype="float32", always_2d=True)
    return np.ascontiguousarray(samples.T)


def as_floats(samples: np.ndarray) -> np.ndarray:
    """Return a copy as float32 in [-1, 1), the same values as of lhotse's ``soundfile_load``."""
    floats = to_float(samples)
    return floats.copy() if floats is samples else floats


def _decode_flac(data: bytes) -> np.ndarray | None:
    """Return int16 samples (num_samples, channels) of FLAC of 16 bits; None without the MD5 sum that it states."""
    num_samples, channels, sampling_rate = flac_header(data) or (0, 0, 0)
    if not 0 < num_samples <= len(data) * MAX_SAMPLES_PER_BYTE:
        return None
    flac = lib.ma_dr_flac_open_memory(data, len(data), ffi.NULL)
    if not flac:
        return None
    try:
        if (flac.channels, flac.sampleRate, flac.bitsPerSample) != (channels, sampling_rate, 16):
            return None
        samples = np.empty((num_samples, channels), np.int16)
        address = ffi.cast("short *", samples.ctypes.data)
        num_decoded = lib.ma_dr_flac_read_pcm_frames_s16(flac, num_samples, address)
    finally:
        lib.ma_dr_flac_close(flac)
    if num_decoded != num_samples:
        # The rest of the array may be old memory, with samples from an earlier decoding of the same recording.
        return None
    # STREAMINFO, the first block, has the MD5 sum of the samples.
    return samples if hashlib.md5(samples.data, usedforsecurity=False).digest() == data[26:42] else None

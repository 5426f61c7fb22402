"""A dataset directory: what a field is, the fields of the published layout, the index, and the files that stages write.

A dataset says itself which fields it has; see ``DatasetRecord.layout``. The names of the published layout are for those
that write these fields, or use them: training, exports, the page. The index is ``shards.jsonl`` and ``dataset.json``.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, Final, Literal, TypeVar
from urllib.parse import unquote

import msgspec

from sharmill.config import Precision, require
from sharmill.errors import ConfigError, DamagedShard, FatalError, RejectRecord
from sharmill.files.atomic import fsync, open_atomic, remove, remove_if_empty, remove_temp_files, write_atomic
from sharmill.files.cache import Cache, RemoteFile
from sharmill.files.checksums import checksum, checksum_bytes
from sharmill.files.locks import LOCK_NAME, FolderLock
from sharmill.files.remote import check_url, is_url
from sharmill.files.staging import STAGING_NAME, PublishedFile
from sharmill.files.stored import NOT_JSON
from sharmill.files.trust import require_trusted_owner
from sharmill.shar.tar import open_field

FORMAT_VERSION: Final = 1
# For other processes that change the index.
SECONDS_TO_WAIT_FOR_INDEX = 600.0

CUTS: Final = "cuts"
TARGET_AUDIO: Final = "target_audio"
# The target audio in lhotse's own Shars.
RECORDING: Final = "recording"
CONTEXT_AUDIO: Final = "context_audio"
TARGET_CODES: Final = "target_codes"
CONTEXT_CODES: Final = "context_codes"
# Set in the ``custom`` of every cut that sharmill writes: its context must not be cut along with it.
CONTEXT_UNALIGNED: Final = "context_audio_unaligned"

# Of a dataset with contexts; see ``base_fields``.
BASE_FIELDS: Final = (CUTS, TARGET_AUDIO, CONTEXT_AUDIO)
DATASET_FILE: Final = "dataset.json"
SHARDS_FILE: Final = "shards.jsonl"

_CODES_PREFIX: Final = "codes_"


# Where a file pattern has the index of the shard.
_INDEX: Final = "{:06d}"
_ENDINGS: Final = {"cuts": ".jsonl.gz", "audio": ".tar", "array": ".tar", "value": ".jsonl.gz"}
# Folders that are not hidden, one in the other.
_NAME: Final = re.compile(r"[^./{][^/{]*(?:/[^./{][^/{]*)*")
_STEM: Final = re.compile(r"[\w-]+")
_CODEC: Final = re.compile(r"[\w.-]+")
# What a cut has without any field; the last three are set by the writer and the reader.
_OWN_ATTRIBUTES: Final = frozenset({
    "id", "start", "duration", "channel", "supervisions", "features", "recording", "custom", "type", "end",
    CONTEXT_UNALIGNED, "shar_position", "shar_padding",
})  # fmt: skip


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One column of a dataset: a file for each shard, with something for each of its cuts.

    Attributes:
        name: the folder of its files, and its key in ``shards.jsonl``, such as ``codes_mimi/target_codes``.
        file: the path of a shard's file in the dataset, with ``{:06d}`` for the index of the shard.
        kind: ``audio`` and ``array`` are tar archives in lhotse's form, with a Recording, or an Array or TemporalArray,
            for each cut; ``value`` is JSON lines ``{"cut_id": ..., attribute: value}``.
        attribute: the name of it on a cut.
        optional: cuts may lack it: there is a ``.nodata`` member, or a line without a value.
        limits: the lowest and the highest value; then values are numbers.
        by: the codec or stage that made it.
        settings: the keys of that stage that its values depend on.

    Raises:
        ValueError: the file lies elsewhere, the attribute is one that cuts have anyway, or the limits are none.

    Example:
        >>> field = Field(name="score", file="score/score.{:06d}.jsonl.gz", kind="value", attribute="score")
        >>> field.path(7)
        'score/score.000007.jsonl.gz'
    """

    name: str
    file: str
    kind: Literal["cuts", "audio", "array", "value"]
    attribute: str
    optional: bool = False
    limits: tuple[float, float] | None = None
    by: str = ""
    settings: dict[str, Any] = {}

    def __post_init__(self) -> None:
        before, behind = f"{self.name}/", f".{_INDEX}{_ENDINGS[self.kind]}"
        stem = self.file.removeprefix(before).removesuffix(behind)
        for is_wrong, problem in (
            (not self.name.isprintable() or not _NAME.fullmatch(self.name) or self.name in (DATASET_FILE, SHARDS_FILE),
             f"{self.name!r} is not the name of a field"),
            (not _STEM.fullmatch(stem) or self.file != f"{before}{stem}{behind}",
             f"the files of the field {self.name} are called {self.file!r} instead of {before}NAME{behind}"),
            ((self.kind == "cuts") != (self.name == CUTS), f"the field {self.name} is of the kind {self.kind}"),
            (not self.attribute.isidentifier() or self.attribute[0] == "_" or self.attribute in _OWN_ATTRIBUTES,
             f"the field {self.name} cannot be called {self.attribute!r} on a cut"),
            (self.limits is not None and not -math.inf < self.limits[0] <= self.limits[1] < math.inf,
             f"the limits of the field {self.name} are {self.limits}"),
        ):  # fmt: skip
            if is_wrong:
                raise ValueError(problem)

    @property
    def is_published(self) -> bool:
        """True for a field of the published layout: of cuts, audio or a codec."""
        return published_field(self.name) is not None

    def path(self, shard: int) -> str:
        """Return the path of the file of one shard, relative to the dataset directory."""
        return self.file.replace(_INDEX, f"{shard:06d}")

    def describe(self) -> str:
        """Return what it is, in a few words.

        >>> Field(name="score", file="score/score.{:06d}.jsonl.gz", kind="value", attribute="score", by="x").describe()
        'value of each cut, made by x'
        """
        what = f"{self.kind} of each cut" if self.attribute == self.name else f"{self.kind}, cut.{self.attribute}"
        limits = f", from {self.limits[0]:g} to {self.limits[1]:g}" if self.limits else ""
        missing = ", which may be missing" if self.optional else ""
        settings = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        made = f", made by {self.by}{' with ' if settings else ''}{settings}" if self.by else ""
        return f"{what}{limits}{missing}{made}"


def codes_field(codec: str, field: str) -> str:
    """Return the name of ``target_codes`` or ``context_codes`` of one codec in ``shards.jsonl``: its folder.

    >>> codes_field("mimi", "target_codes")
    'codes_mimi/target_codes'
    """
    return f"{_CODES_PREFIX}{codec}/{field}"


def codec_of_field(field: str) -> str | None:
    """Return the codec whose codes a field has, or None: the reverse of ``codes_field``."""
    folder, _, name = field.rpartition("/")
    return folder.removeprefix(_CODES_PREFIX) if name and folder.startswith(_CODES_PREFIX) else None


def published_field(name: str) -> Field | None:
    """Return a field of the published layout by its name, or None: there is none of this name.

    >>> published_field("codes_mimi/target_codes").path(7)
    'codes_mimi/target_codes/codes.000007.tar'
    """
    if name == CUTS:
        return Field(name=name, file=f"{CUTS}/cuts.{_INDEX}.jsonl.gz", kind="cuts", attribute=CUTS)
    if name in BASE_FIELDS:
        return Field(name=name, file=f"{name}/{RECORDING}.{_INDEX}.tar", kind="audio", attribute=name)
    codec, attribute = codec_of_field(name), name.rpartition("/")[2]
    if codec is None or not _CODEC.fullmatch(codec) or attribute not in (TARGET_CODES, CONTEXT_CODES):
        return None
    return Field(name=name, file=f"{name}/codes.{_INDEX}.tar", kind="array", attribute=attribute, by=codec)


def base_fields(*, contexts: bool) -> list[Field]:
    """Return the fields of cuts and audio of a dataset with or without contexts, in the order of an index.

    >>> [field.name for field in base_fields(contexts=False)]
    ['cuts', 'target_audio']
    """
    return _published(BASE_FIELDS if contexts else (CUTS, TARGET_AUDIO))


def codec_fields(codec: str, *, contexts: bool = True) -> list[Field]:
    """Return the fields of a codec: target codes and, unless the dataset has no contexts, context codes."""
    names = (TARGET_CODES, CONTEXT_CODES) if contexts else (TARGET_CODES,)
    return _published(codes_field(codec, name) for name in names)


def _published(names: Iterable[str]) -> list[Field]:
    return [field for name in names if (field := published_field(name)) is not None]


def sorted_fields(fields: Iterable[str]) -> list[str]:
    """Return fields in the order of an index: those of cuts and audio, then all others by name."""
    fields = set(fields)
    base = [name for name in BASE_FIELDS if name in fields]
    return [*base, *sorted(fields - set(base))]


def sidecar_files(file: str) -> tuple[str, ...]:
    """Return the files that may lie beside one of a dataset for readers with random access; see ``sidecars``.

    >>> sidecar_files("cuts/cuts.000007.jsonl.gz")
    ('cuts/cuts.000007.jsonl', 'cuts/cuts.000007.jsonl.idx')
    >>> sidecar_files("target_audio/recording.000007.tar")
    ('target_audio/recording.000007.tar.idx',)
    """
    if file.endswith(".jsonl.gz"):
        plain = file.removesuffix(".gz")
        return (plain, f"{plain}.idx")
    return (f"{file}.idx",)


def context_id(recording_id: str, offset: float, duration: float) -> str:
    """Return the id of the Recording in ``context_audio``."""
    return f"context_cut-{recording_id}-{offset:.2f}-{duration:.2f}"


Positive = Annotated[int, msgspec.Meta(gt=0)]
# Numbers that JSON and arrays hold exactly.
_AtMost = Annotated[int, msgspec.Meta(le=1 << 53)]
_Total = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class FieldFile(msgspec.Struct, frozen=True):
    """A file of a field and shard, relative to the dataset directory."""

    file: str
    size: int
    xxh3: str

    def __post_init__(self) -> None:
        # A web server undoes the quoting, and some take a backslash for a slash.
        path = PurePosixPath(unquote(self.file).replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{self.file!r} lies outside the dataset")

    @property
    def max_bytes(self) -> float:
        """The bytes that the file may have at a URL; infinite where the index does not know its size."""
        return self.size if self.size >= 0 else math.inf

    def below(self, directory: Path) -> Path:
        """Return the path of the file; of a dataset at a URL, only the content of this checksum is read."""
        if isinstance(directory, RemoteFile):
            return RemoteFile.of((directory / self.file).url, directory.cache, self.xxh3, self.max_bytes)
        return directory / self.file


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``shards.jsonl``: number of cuts, seconds of target and context audio, and the fields' files.

    ``context_seconds`` is 0 in a dataset without contexts. Of a shard that was found without an index only the names of
    its files are known: ``count`` and the sizes are -1, and the checksums empty.
    """

    index: _AtMost
    count: _AtMost
    target_seconds: float
    context_seconds: float
    fields: dict[str, FieldFile]

    @property
    def files(self) -> dict[str, str]:
        """The names of the files by their fields."""
        return {field: file.file for field, file in self.fields.items()}

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of target and context audio by their fields."""
        return {TARGET_AUDIO: self.target_seconds, CONTEXT_AUDIO: self.context_seconds}


# No record has `omit_defaults`: msgspec leaves a default out if it is the same object, so that the bytes of a record
# would depend on whether its values have been pickled.
class CodecRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a codec that its codes are read by, and what made them.

    ``codebook_size`` is the number of values of one code. ``devices`` are the kinds of device that made the codes, in
    alphabetical order; none where that is not known.
    """

    name: str
    model: str
    checksum: str
    trained: bool
    sampling_rate: Positive
    samples_per_frame: Positive
    num_codebooks: Positive
    codebook_size: Positive
    devices: list[str] = []
    precision: Precision = "fp32"

    @property
    def fields(self) -> list[Field]:
        """The fields of its codes: of targets, and of contexts where the dataset has any."""
        return codec_fields(self.name)


class DatasetRecord(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The content of ``dataset.json``. ``limits`` are those that every context satisfies; none without contexts.

    ``fields`` are the names of the fields, and ``layout`` says what each is. A file from before there was that key has
    the published layout, as ``complete`` finds it. Of shards of another tool it may be unknown what a field is.

    ``contract: foreign`` says that another tool wrote the files and only the index is sharmill's: what sharmill
    promises of its cuts and codes does not hold. ``match_precision`` is that of the speaker encoder, and
    ``match_devices`` are the kinds of device that it chose contexts on; empty for CPUs alone.
    """

    format_version: int
    name: str
    fields: list[str]
    num_shards: _Total
    num_cuts: _Total
    target_seconds: float
    context_seconds: float
    audio_format: str
    sampling_rate: int | None
    limits: dict[str, Any]
    codecs: list[CodecRecord]
    contract: Literal["sharmill", "foreign"] = "sharmill"
    match_precision: Precision = "fp32"
    match_devices: list[str] = []
    layout: list[Field] = []

    @property
    def has_contexts(self) -> bool:
        """Return True if the dataset has context audio."""
        return CONTEXT_AUDIO in self.fields

    @property
    def audio_fields(self) -> list[str]:
        """The fields that have codes of a codec: targets, which lhotse calls ``recording``, and contexts."""
        target = TARGET_AUDIO if TARGET_AUDIO in self.fields else RECORDING
        return [target, CONTEXT_AUDIO] if self.has_contexts else [target]

    @property
    def own_fields(self) -> list[str]:
        """The names of the fields that a dataset of sharmill's own with these codecs and added fields has."""
        number = len(self.audio_fields)
        codes = [field for codec in self.codecs for field in codec.fields[:number]]
        return [field.name for field in (*base_fields(contexts=self.has_contexts), *codes, *self.added_fields)]

    def contradictions(self) -> Iterator[str]:
        """Yield a sentence about each field that a dataset of sharmill's own should have, or should not have."""
        for name, times in Counter(self.fields).items():
            if times > 1:
                yield f"the field {name} is named {times} times"
        for name in sorted(set(self.own_fields) ^ set(self.fields)):
            yield f"the field {name} {'is not of its codecs' if name in self.fields else 'is missing'}"
        attributes: dict[str, list[Field]] = {}
        for field in self.layout:
            attributes.setdefault(field.attribute, []).append(field)
        for attribute, fields in attributes.items():
            if len(fields) > 1 and any(codec_of_field(field.name) is None for field in fields):
                yield f"the fields {' and '.join(field.name for field in fields)} are all called {attribute} on a cut"
        if self.has_contexts and not self.limits:
            yield f"there is a field {CONTEXT_AUDIO}, but no limits of contexts"
        if not self.has_contexts and (self.limits or self.context_seconds):
            yield f"there is no field {CONTEXT_AUDIO}, but limits of contexts or seconds of context audio"

    @property
    def added_fields(self) -> list[Field]:
        """The fields that are not of the published layout."""
        return [field for field in self.layout if not field.is_published]

    @cached_property
    def fields_by_name(self) -> dict[str, Field]:
        """The fields that the dataset says what they are."""
        return {field.name: field for field in self.layout}

    def complete(self) -> "DatasetRecord":
        """Return the record with a layout of all fields that are known, in their order."""
        if self.contract != "sharmill":
            return self
        known = {field.name: field for field in self.layout}
        fields = [published_field(name) or known.get(name) for name in dict.fromkeys(self.fields)]
        # Of a published field, what the file says counts for nothing, but that cuts may lack codes.
        may_lack = {
            name for name, told in known.items() if told.optional and (told.kind == "array" or not told.is_published)
        }
        layout = [msgspec.structs.replace(one, optional=one.name in may_lack) for one in fields if one is not None]
        return msgspec.structs.replace(self, layout=layout)


class _Version(msgspec.Struct):
    format_version: int


# Of dataset.json, or of a line of shards.jsonl. What a sparse file claims is not read into memory.
_MAX_BYTES: Final = 16 << 20

T = TypeVar("T")
_shard_decoder = msgspec.json.Decoder(ShardRecord)


def open_directory(dataset: str | Path, cache_dir: str | None = None, cache_gib: float = 100.0) -> Path:
    """Return the path of a dataset directory, which reads the files behind a URL from a cache.

    Raises:
        ConfigError: it is a URL at which there is no index, or that cannot be one of a dataset.
        OSError: a server cannot be reached.
    """
    if isinstance(dataset, Path):
        return dataset
    if not is_url(dataset):
        return Path(dataset)
    try:
        check_url(dataset, "dataset")
        require(isinstance(cache_gib, (int, float)) and cache_gib > 0, f"cache_gib is {cache_gib!r}, and not above 0")
    except ValueError as error:
        raise ConfigError(str(error), code="bad_config_value") from error
    directory = RemoteFile.of(dataset, Cache.at(cache_dir, cache_gib))
    try:
        for name in (DATASET_FILE, SHARDS_FILE):
            directory.cache.refresh(str(directory / name))
    except RejectRecord as reject:
        raise ConfigError(
            f"no dataset can be read at {directory}: {reject.detail}; one without an index (sharmill index) is read "
            "from a disk only",
            code="no_dataset",
        ) from reject
    return directory


def read_dataset(directory: Path) -> DatasetRecord:
    """Read ``dataset.json``.

    Raises:
        ConfigError: there is no finished dataset, or one of another format version.
        DamagedShard: the file is damaged.
    """
    path = directory / DATASET_FILE
    with open_index_file(directory, DATASET_FILE) as stream:
        data = stream.read(_MAX_BYTES)
    try:
        # First of all, since a dataset of another version may have other keys.
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{path} has format version {version}; this sharmill reads {FORMAT_VERSION}", code="wrong_version"
            )
        return msgspec.json.decode(data, type=DatasetRecord).complete()
    except NOT_JSON as error:
        raise DamagedShard(f"{path}: {error}") from error


def read_shards(directory: Path, num_shards: int | None = None) -> Iterator[ShardRecord]:
    """Yield the lines of ``shards.jsonl``, in the order of the shards.

    Args:
        num_shards: how many shards ``dataset.json`` counts. Lines behind them are of an append that is not committed,
            and no part of the dataset; by default they are yielded too.

    Raises:
        ConfigError: there is no finished dataset.
        DamagedShard: the file is damaged.
    """
    return decode_shards(directory, num_shards, _shard_decoder)


def decode_shards(directory: Path, num_shards: int | None, decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
    """Yield what a decoder makes of the lines of ``shards.jsonl``; raises as ``read_shards``."""
    # In large reads: each may be a message to a file server, and the index of 100,000 shards has 8,000 small ones.
    with open_index_file(directory, SHARDS_FILE, buffering=1 << 20) as lines:
        try:
            # A line that is longer than any is cut off, and then no JSON.
            for line in islice(iter(partial(lines.readline, _MAX_BYTES), b""), num_shards):
                yield decoder.decode(line)
        except NOT_JSON as error:
            raise DamagedShard(f"{directory / SHARDS_FILE}: {error}") from error


def open_index_file(directory: Path, name: str, *, buffering: int = -1) -> BinaryIO:
    """Open a file of the index of a dataset.

    Raises:
        ConfigError: there is no finished dataset.
        DamagedShard: it is not a regular file.
    """
    path = directory / name
    try:
        return open_field(path, buffering=buffering)
    except DamagedShard:
        if path.exists() and not path.is_dir():
            raise
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder", code="no_dataset")
    if directory.parts and directory.parts[0].endswith(":"):
        address = str(directory).replace(":/", "://", 1)
        raise ConfigError(f"{address} is an address: copy the dataset to a folder, and name that", code="no_dataset")
    hint = ""
    if (directory / CUTS).is_dir() or any(directory.glob(f"{CUTS}.*")):
        hint = f"; finish the run that writes it, or, for shards of another tool, make it: sharmill index {directory}"
    raise ConfigError(f"{directory} is not a finished dataset: there is no {name}{hint}", code="no_dataset")


def is_indexed(directory: Path) -> bool:
    """Return True if a folder has an index, or will have one when the run that writes it has finished."""
    return any((directory / name).exists() for name in (DATASET_FILE, SHARDS_FILE, STAGING_NAME))


def write_shards(directory: Path, shards: Iterable[ShardRecord]) -> None:
    """Publish ``shards.jsonl``."""
    with open_atomic(directory / SHARDS_FILE) as stream:
        stream.writelines(msgspec.json.encode(shard, order="sorted") + b"\n" for shard in shards)


def write_dataset(directory: Path, record: DatasetRecord) -> None:
    """Publish ``dataset.json``, the last file of a dataset to be written."""
    data = msgspec.json.encode(record.complete())
    write_atomic(directory / DATASET_FILE, msgspec.json.format(data, indent=2) + b"\n")


@contextmanager
def changing_index(directory: Path) -> Iterator[None]:
    """Keep other processes from changing the index meanwhile: two runs may add codecs to one dataset.

    What those that were killed have left of a change is removed.
    """
    with FolderLock(directory, wait_seconds=SECONDS_TO_WAIT_FOR_INDEX):
        remove_temp_files(directory, {SHARDS_FILE, DATASET_FILE})
        yield
    # The dataset may be finished now: the folder of the lock is not to come back.
    fsync(directory)


def audio_checksum(shards: Sequence[ShardRecord], fields: Sequence[str]) -> str:
    """Return a checksum of the cuts and audio of a dataset, whatever codes it has; ``fields`` are those.

    Raises:
        DamagedShard: a shard lacks one of these fields.
    """
    for shard in shards:
        if missing := [field for field in fields if field not in shard.fields]:
            raise DamagedShard(f"{SHARDS_FILE} names no {missing[0]} of shard {shard.index}")
    base = [[shard.index, shard.count, [shard.fields[field].xxh3 for field in fields]] for shard in shards]
    return checksum_bytes(msgspec.json.encode(base))


class ShardedDataset:
    """A dataset directory of sharmill's own, finished or not.

    Args:
        directory: the dataset directory; it need not exist.

    Example:
        >>> dataset = ShardedDataset(Path("data/librispeech"))
        >>> dataset.file("target_audio", 7).as_posix()
        'data/librispeech/target_audio/recording.000007.tar'
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def index_files(self) -> list[Path]:
        """The files that make a dataset a finished one."""
        return [self.directory / DATASET_FILE, self.directory / SHARDS_FILE]

    def record(self) -> DatasetRecord:
        """Read ``dataset.json``.

        Raises:
            ConfigError: there is no finished dataset, or it is of another format version.
            DamagedShard: the file is damaged.
        """
        return read_dataset(self.directory)

    def shards(self) -> list[ShardRecord]:
        """Read as many lines of ``shards.jsonl`` as ``dataset.json`` counts shards; raises as ``record`` does."""
        return list(read_shards(self.directory, self.record().num_shards))

    def audio_checksum(self) -> str:
        """Return the checksum of cuts and audio, whatever codes there are."""
        return audio_checksum(self.shards(), (CUTS, *self.record().audio_fields))

    def file(self, field: str, shard: int) -> Path:
        """Return the path of the file of one shard of a field.

        Raises:
            ConfigError: the dataset has no such field, or is not finished.
        """
        found = published_field(field) or self.record().fields_by_name.get(field)
        if found is None:
            raise ConfigError(f"{self.directory} has no field {field!r}", code="unknown_field")
        return self.directory / found.path(shard)

    def is_empty(self) -> bool:
        """Return True if there is no directory, or nothing in it but folders that wait for files."""
        if not self.directory.exists():
            return True
        own = (STAGING_NAME, LOCK_NAME)
        found = (p for p in self.directory.iterdir() if not p.name.startswith(own))
        return all(path.is_dir() and not path.is_symlink() and _has_no_files(path) for path in found)

    def is_made_of(self, fields: Sequence[str], files: Iterable[PublishedFile]) -> bool:
        """Return True if these files are the fields' content; what other fields there are does not matter.

        Where the index lists the fields, all that it says of them must be among ``files``: names, sizes and checksums.
        Without it, one of the files in place must be, by its checksum. The names of all files in the folders of other
        fields must be, as of context audio where the index is that of a dataset without contexts.
        """
        known = {FieldFile(file.name, file.size, file.xxh3) for file in files}
        try:
            shards = list(read_shards(self.directory))
        except (ConfigError, DamagedShard):
            shards = None
        listed = {field for field in fields if any(field in shard.fields for shard in shards or ())}
        others = {name for field in fields if field not in listed for name in self._stored(field)}
        if not others <= {file.file for file in known}:
            return False
        if shards is not None and not shards:
            return not known
        if listed:
            return all(shard.fields.get(field) in known for shard in shards or () for field in listed)
        paths = ((self.directory / file.file, file) for file in known if file.file in others)
        return any(
            path.is_file() and path.stat().st_size == file.size and checksum(path) == file.xxh3 for path, file in paths
        )

    def write_index(self, record: DatasetRecord, shards: Sequence[ShardRecord]) -> None:
        """Write the index of cuts and audio, unless it is there and whole: then it may list codecs too, and stays."""
        with changing_index(self.directory):
            if not self._has_index_of(record, shards):
                write_shards(self.directory, shards)
                write_dataset(self.directory, record)

    def remove(self, num_shards: int | None, added: Sequence[Field] = ()) -> None:
        """Remove all files of a dataset of so many shards, the index first; what others have put beside them stays.

        Args:
            num_shards: None for all shards that are there.
            added: fields that stages may have added, beside those that the index lists: it may be gone already.

        Raises:
            ConfigError: a folder of a field is a link, or a stranger's; nothing was removed.
        """
        with suppress(ConfigError, DamagedShard):
            added = [*added, *self.record().added_fields]
        codes = [field for codec in self.stored_codecs() for field in codec_fields(codec)]
        fields = [*added, *codes, *base_fields(contexts=True)]
        require_trusted_owner(self.directory, (self.directory / field.name for field in fields))
        remove(*self.index_files)
        self._remove_files(fields, num_shards)

    def has_files(self, fields: Iterable[str]) -> bool:
        """Return True if there are files in the folder of a field, whether or not the index lists it."""
        folders = [self.directory / field for field in fields]
        return any(folder.is_dir() and not _has_no_files(folder) for folder in folders)

    def stored_codecs(self) -> list[str]:
        """Return the names of the codecs that have a folder, whether or not the index lists them."""
        if not self.directory.is_dir():
            return []
        folders = sorted(path for path in self.directory.iterdir() if path.is_dir() and not _has_no_files(path))
        codecs = (codec_of_field(f"{folder.name}/{TARGET_CODES}") for folder in folders)
        return [codec for codec in codecs if codec is not None]

    def add_fields(
        self, fields: Sequence[Field], files: Sequence[Mapping[str, FieldFile]], codec: CodecRecord | None = None
    ) -> None:
        """List fields in the index, in the place of what it lists under their names.

        Args:
            fields: what a stage has made.
            files: for each shard the files of the fields.
            codec: whose codes they are, where they are codes.

        Raises:
            FatalError: the dataset has grown since these shards were made.
        """
        with changing_index(self.directory):
            shards, dataset = self.shards(), self.record()
            if len(files) != len(shards):
                raise FatalError(
                    f"{self.directory} has {len(shards)} shards now, and {fields[0].name if fields else 'codes'} of "
                    f"{len(files)}: shards were appended meanwhile; make it anew with --restart",
                    code="changed_input",
                )
            added = [
                msgspec.structs.replace(shard, fields={**shard.fields, **new})
                for shard, new in zip(shards, files, strict=True)
            ]
            kept = _without_fields(dataset, fields)
            names = sorted_fields([*kept.fields, *(field.name for field in fields)])
            codecs = sorted([*kept.codecs, *([codec] if codec else [])], key=lambda listed: listed.name)
            made = msgspec.structs.replace(kept, fields=names, layout=[*kept.layout, *fields], codecs=codecs)
            write_shards(self.directory, added)
            write_dataset(self.directory, made)

    def remove_fields(self, fields: Sequence[Field], num_shards: int | None) -> None:
        """Remove the files of fields, if there are any, from the index first; raises as ``remove``."""
        names = {field.name for field in fields}
        if not self.has_files(names):
            return
        require_trusted_owner(self.directory, (self.directory / name for name in names))
        with changing_index(self.directory):
            write_dataset(self.directory, _without_fields(self.record(), fields))
            shards = []
            for shard in self.shards():
                files = {name: file for name, file in shard.fields.items() if name not in names}
                shards.append(msgspec.structs.replace(shard, fields=files))
            write_shards(self.directory, shards)
        self._remove_files(fields, num_shards)

    def _stored(self, field: str) -> list[str]:
        """Return the names of the files in a field's folder, sidecars aside."""
        folder = self.directory / field
        found = sorted(f"{field}/{path.name}" for path in folder.iterdir()) if folder.is_dir() else []
        sidecars = {sidecar for name in found for sidecar in sidecar_files(name)}
        return [name for name in found if name not in sidecars]

    def _remove_files(self, fields: Sequence[Field], num_shards: int | None) -> None:
        for field in fields:
            # Numbers in the names of files that are there, which may be those of shards.
            found = {int(part) for name in self._stored(field.name) for part in name.split(".") if part.isdecimal()}
            files = {field.path(shard) for shard in (found if num_shards is None else range(num_shards))}
            names = files | {sidecar for file in files for sidecar in sidecar_files(file)}
            folder = self.directory / field.name
            remove_temp_files(folder, {PurePosixPath(name).name for name in names})
            stored = folder.iterdir() if folder.is_dir() else ()
            remove(*(path for path in stored if f"{field.name}/{path.name}" in names))
            remove_if_empty(folder, *(() if folder.parent == self.directory else (folder.parent,)))

    def _has_index_of(self, record: DatasetRecord, shards: Sequence[ShardRecord]) -> bool:
        if not all(path.exists() for path in self.index_files):
            return False
        try:
            dataset, found = self.record(), self.shards()
        except DamagedShard:
            return False
        fields = set(dataset.own_fields)
        if set(dataset.fields) != fields or any(set(shard.fields) != fields for shard in found):
            return False
        own = [field.name for field in base_fields(contexts=dataset.has_contexts)]
        base = [msgspec.structs.replace(s, fields={name: s.fields[name] for name in own}) for s in found]
        known = msgspec.structs.replace(dataset, fields=record.fields, codecs=[]).complete()
        return base == list(shards) and known == record.complete()


def _has_no_files(folder: Path) -> bool:
    return all(path.is_dir() and not path.is_symlink() and _has_no_files(path) for path in folder.iterdir())


def _without_fields(dataset: DatasetRecord, fields: Sequence[Field]) -> DatasetRecord:
    """Return the record of a dataset without fields, and without the codecs whose they are."""
    names = {field.name for field in fields}
    codecs = {codec_of_field(name) for name in names}
    return msgspec.structs.replace(
        dataset,
        fields=[name for name in dataset.fields if name not in names],
        layout=[field for field in dataset.layout if field.name not in names],
        codecs=[codec for codec in dataset.codecs if codec.name not in codecs],
    )

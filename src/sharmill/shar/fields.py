"""The fields of a dataset: their declaration, and the names and files of the fields in the published layout.

Every dataset lists its own fields; see ``DatasetRecord.layout``. The published layout is the one that the published
context-Shar scripts write; its names are for code that writes or uses exactly these fields: training, exports, and the
report page.
"""

import math
import re
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

CUTS: Final = "cuts"
TARGET_AUDIO: Final = "target_audio"
# The name of the target audio in lhotse's own Shars.
RECORDING: Final = "recording"
CONTEXT_AUDIO: Final = "context_audio"
TARGET_CODES: Final = "target_codes"
CONTEXT_CODES: Final = "context_codes"
# Set in the ``custom`` of every cut that sharmill writes: the context must not be truncated with the cut.
CONTEXT_UNALIGNED: Final = "context_audio_unaligned"
# The attribute in which the reader stores a cut's position in the order of all epochs.
POSITION: Final = "shar_position"

# Name of the duration of a cut in seconds, which conditions can use like a column.
DURATION: Final = "duration"

# The fields of a dataset with contexts; see ``base_fields``.
BASE_FIELDS: Final = (CUTS, TARGET_AUDIO, CONTEXT_AUDIO)
# The files of the index and lhotse's index pack (see ``sidecars``), whose names no field may use.
DATASET_FILE: Final = "dataset.json"
SHARDS_FILE: Final = "shards.jsonl"
INDEX_PACK_FILE: Final = "dataset.idxpack"

_CODES_PREFIX: Final = "codes_"
# The placeholder for the shard's index in a file pattern.
_INDEX: Final = "{:06d}"
_ENDINGS: Final = {"cuts": ".jsonl.gz", "audio": ".tar", "array": ".tar", "value": ".jsonl.gz"}
# A path of one or more folders, none of which is hidden.
_NAME: Final = re.compile(r"[^./{][^/{]*(?:/[^./{][^/{]*)*")
_STEM: Final = re.compile(r"[\w-]+")
_CODEC: Final = re.compile(r"[\w.-]+")
# Attributes that every cut has even without fields; the last three are set by the writer and the reader.
_OWN_ATTRIBUTES: Final = frozenset({
    "id", "start", "duration", "channel", "supervisions", "features", "recording", "custom", "type", "end",
    CONTEXT_UNALIGNED, POSITION, "shar_padding",
})  # fmt: skip


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One column of a dataset, stored as one file per shard with one item per cut.

    Attributes:
        name: the folder of the field's files, and the field's key in ``shards.jsonl``, such as
            ``codes_mimi/target_codes``.
        file: the path of a shard's file in the dataset, with ``{:06d}`` in place of the shard's index.
        kind: ``audio`` and ``array`` are tar archives in lhotse's format, with a Recording (``audio``), or an Array or
            TemporalArray (``array``), per cut; ``value`` is JSON lines
            ``{"cut_id": ..., attribute: value}``.
        attribute: the name of the attribute of a cut that holds the item.
        optional: True if cuts may lack an item; they then have a ``.nodata`` member, or a line without a value.
        limits: the lowest and highest allowed value, for numeric values.
        by: the codec or stage that made the field.
        settings: the stage's configuration keys, with their values, on which the field's values depend.

    Raises:
        ValueError: the file is not in the folder of the field, every cut already has this attribute, or the limits are
            invalid.

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
        prefix, suffix = f"{self.name}/", f".{_INDEX}{_ENDINGS[self.kind]}"
        stem = self.file.removeprefix(prefix).removesuffix(suffix)
        for is_wrong, problem in (
            (not self.name.isprintable() or not _NAME.fullmatch(self.name)
             or self.name in (DATASET_FILE, SHARDS_FILE, INDEX_PACK_FILE),
             f"{self.name!r} is not a valid field name"),
            (not _STEM.fullmatch(stem) or self.file != f"{prefix}{stem}{suffix}",
             f"the files of the field {self.name} are named {self.file!r} instead of {prefix}NAME{suffix}"),
            ((self.kind == "cuts") != (self.name == CUTS), f"the field {self.name} is of the kind {self.kind}"),
            (not self.attribute.isidentifier() or self.attribute[0] == "_" or self.attribute in _OWN_ATTRIBUTES,
             f"the field {self.name} cannot be named {self.attribute!r} on a cut"),
            (self.limits is not None and not -math.inf < self.limits[0] <= self.limits[1] < math.inf,
             f"the limits of the field {self.name} are {self.limits}: they must be finite and in ascending order"),
        ):  # fmt: skip
            if is_wrong:
                raise ValueError(problem)

    @property
    def is_published(self) -> bool:
        """True if the field belongs to the published layout: cuts, audio, or the codes of a codec."""
        return published_field(self.name) is not None

    def path(self, shard: int) -> str:
        """Return the path of the file of one shard, relative to the dataset directory."""
        return self.file.replace(_INDEX, f"{shard:06d}")

    def describe(self) -> str:
        """Return a short description of the field.

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
    """Return the field name of a codec's ``target_codes`` or ``context_codes``, which is their folder and their key in
    ``shards.jsonl``.

    >>> codes_field("mimi", "target_codes")
    'codes_mimi/target_codes'
    """
    return f"{_CODES_PREFIX}{codec}/{field}"


def codec_of_field(field: str) -> str | None:
    """Return the codec whose codes a field holds, or None; the inverse of ``codes_field``."""
    folder, _, name = field.rpartition("/")
    return folder.removeprefix(_CODES_PREFIX) if name and folder.startswith(_CODES_PREFIX) else None


def published_field(name: str) -> Field | None:
    """Return the field of the published layout with this name, or None.

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
    """Return the fields of cuts and audio, with or without contexts, in the order of the index.

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
    """Sort the names of fields in the order of the index: cuts and audio first, then all others by name."""
    fields = set(fields)
    base = [name for name in BASE_FIELDS if name in fields]
    return [*base, *sorted(fields - set(base))]


def sidecar_files(file: str) -> tuple[str, ...]:
    """Return the names of a dataset file's sidecars, which allow random access; see ``sharmill.shar.sidecars``.

    >>> sidecar_files("cuts/cuts.000007.jsonl.gz")
    ('cuts/cuts.000007.jsonl', 'cuts/cuts.000007.jsonl.idx')
    >>> sidecar_files("target_audio/recording.000007.tar")
    ('target_audio/recording.000007.tar.idx',)
    """
    if file.endswith(".jsonl.gz"):
        plain = file.removesuffix(".gz")
        return (plain, f"{plain}.idx")
    return (f"{file}.idx",)

"""Names of the fields and files of a dataset directory, which all other code takes from here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

FORMAT_VERSION: Final = 1

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


def codec_folder(codec: str) -> str:
    """Return the folder of a codec's fields.

    >>> codec_folder("mimi")
    'codes_mimi'
    """
    return f"{_CODES_PREFIX}{codec}"


def codec_of_folder(folder: str) -> str | None:
    """Return the codec whose folder this is, or None: the reverse of ``codec_folder``."""
    return folder[len(_CODES_PREFIX) :] if folder.startswith(_CODES_PREFIX) else None


def base_fields(*, contexts: bool) -> tuple[str, ...]:
    """Return the fields of cuts and audio of a dataset with or without contexts, in the order of an index.

    >>> base_fields(contexts=False)
    ('cuts', 'target_audio')
    """
    return BASE_FIELDS if contexts else (CUTS, TARGET_AUDIO)


def codec_fields(codec: str, *, contexts: bool = True) -> tuple[str, ...]:
    """Return the fields of a codec: target codes and, unless the dataset has no contexts, context codes."""
    targets = codes_field(codec, TARGET_CODES)
    return (targets, codes_field(codec, CONTEXT_CODES)) if contexts else (targets,)


def codes_field(codec: str, field: str) -> str:
    """Return the name of ``target_codes`` or ``context_codes`` of one codec in ``shards.jsonl``: its folder."""
    return f"{codec_folder(codec)}/{field}"


def codec_of_field(field: str) -> str | None:
    """Return the codec whose codes a field has, or None: the reverse of ``codes_field``."""
    folder, _, name = field.rpartition("/")
    return codec_of_folder(folder) if name else None


def sorted_fields(fields: Iterable[str]) -> list[str]:
    """Return fields in the order of an index: those of cuts and audio, then all others by name."""
    fields = set(fields)
    base = [name for name in BASE_FIELDS if name in fields]
    return [*base, *sorted(fields - set(base))]


def shard_file(field: str, index: int) -> str:
    """Return the path of a field's file of one shard, relative to the dataset directory.

    >>> shard_file("codes_mimi/target_codes", 7)
    'codes_mimi/target_codes/codes.000007.tar'
    """
    if field == CUTS:
        return f"{CUTS}/cuts.{index:06d}.jsonl.gz"
    stem = "codes" if field.startswith(_CODES_PREFIX) else RECORDING
    return f"{field}/{stem}.{index:06d}.tar"


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

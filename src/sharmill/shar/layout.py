"""Names of the fields and files of a dataset directory. Nothing else spells them out."""

from __future__ import annotations

from typing import Final

FORMAT_VERSION: Final = 1

CUTS: Final = "cuts"
TARGET_AUDIO: Final = "target_audio"
CONTEXT_AUDIO: Final = "context_audio"
TARGET_CODES: Final = "target_codes"
CONTEXT_CODES: Final = "context_codes"
# Set in the ``custom`` of every cut that sharmill writes: its context must not be cut along with it.
CONTEXT_UNALIGNED: Final = "context_audio_unaligned"

BASE_FIELDS: Final = (CUTS, TARGET_AUDIO, CONTEXT_AUDIO)
DATASET_FILE: Final = "dataset.json"
SHARDS_FILE: Final = "shards.jsonl"

_CODES_PREFIX: Final = "codes_"


def codec_folder(codec: str) -> str:
    """The folder of a codec's fields: ``codes_<codec>``."""
    return f"{_CODES_PREFIX}{codec}"


def codes_field(codec: str, field: str) -> str:
    """How ``target_codes`` or ``context_codes`` of one codec is called in ``shards.jsonl``: its folder."""
    return f"{codec_folder(codec)}/{field}"


def codec_of_field(field: str) -> str | None:
    """The codec whose codes a field has, or None: the reverse of ``codes_field``."""
    folder, _, name = field.rpartition("/")
    return folder[len(_CODES_PREFIX) :] if name and folder.startswith(_CODES_PREFIX) else None


def shard_file(field: str, index: int) -> str:
    """The path of a field's file of one shard, relative to the dataset directory.

    >>> shard_file("codes_mimi/target_codes", 7)
    'codes_mimi/target_codes/codes.000007.tar'
    """
    if field == CUTS:
        return f"{CUTS}/cuts.{index:06d}.jsonl.gz"
    stem = "codes" if field.startswith(_CODES_PREFIX) else "recording"
    return f"{field}/{stem}.{index:06d}.tar"


def sidecar_files(file: str) -> tuple[str, ...]:
    """What may lie beside a file of a dataset for readers with random access; see ``sidecars``.

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
    """The id of the Recording in ``context_audio``."""
    return f"context_cut-{recording_id}-{offset:.2f}-{duration:.2f}"

"""The entry types of ``input_cfg``, with the keys that each type accepts and the keys that name its files."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sharmill.errors import ConfigError, refuse
from sharmill.files.location import Location
from sharmill.registry import nearest
from sharmill.shar.index import open_directory

Settings = dict[str, Any]

# This type replaces the type of those NeMo entries that sharmill's reader divides among ranks and workers.
DIVIDED: Final = "sharmill_divided"

# Seeds that are not numbers: each rank draws "trng" at random; "randomized" is derived from ``seed``.
SEEDS: Final = ("trng", "randomized")

# Keys that name the files of tarred data.
TARRED: Final = ("manifest_filepath", "tarred_audio_filepaths")

# Keys that any entry can have. Entries inherit them from their group.
ENTRY_KEYS: Final = (
    "type", "weight", "tags", "shuffle", "shard_seed", "force_finite", "force_map_dataset", "metadata_only",
    # The following keys have no effect on sharmill's datasets.
    "text_field", "lang_field", "max_open_streams", "audio_locator_tag", "token_equivalent_duration",
    "skip_missing_manifest_entries", "force_iterable_dataset", "reweight_temperature", "input_cfg", "slice_length",
)  # fmt: skip
_CONVERTER_KEYS: Final = (
    "input_roles", "output_roles", "strip_timestamp_tokens", "move_agent_text_back_by",
    "filter_samples_starting_with_agent", "agent_roles", "user_roles", "target_agent_name", "target_user_name",
    "add_extra_end_silence", "extra_end_silence_range", "max_cer", "min_context_speaker_similarity", "target_speaker",
    "sample_rate",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EntryType:
    """A type of entries in ``input_cfg``.

    Attributes:
        needs: required keys, which may be inherited from enclosing groups.
        takes: optional keys.
        files: keys that name the files, for types that sharmill's reader divides among ranks and workers. A shard has
            one file per key. Except for ``shar_path``, each line of the first file is an example.
        holds: ``cuts``, ``text`` or ``conversations``; empty if the content depends on the data.
        is_stream: NeMo always reads the type as a stream; it reads other types as streams only if they are tarred.
        is_marked: every example records its origin, and no example is dropped.
    """

    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    holds: str = ""
    is_stream: bool = False
    is_marked: bool = True


_text = partial(EntryType, holds="text", is_stream=True)
_converter = partial(EntryType, needs=("input_cfg",), takes=_CONVERTER_KEYS)

# All types except those that other packages register.
TYPES: Final[dict[str, EntryType]] = {
    "sharmill": EntryType(
        needs=("dataset",), holds="cuts", is_stream=True,
        takes=("fields", "codec", "where", "decode_threads", "sidecars", "on_damage", "max_damaged", "speaker_tags",
               "seed", "cache_dir", "cache_gib", "rank", "world_size", "whole_part"),
    ),
    DIVIDED: EntryType(is_stream=True),
    "group": EntryType(needs=("input_cfg",), holds="cuts"),
    "txt": _text(needs=("paths",), files=("paths",), takes=("language",)),
    "txt_jsonl": _text(needs=("paths",), files=("paths",), takes=("language",)),
    "txt_pair": _text(
        needs=("source_paths", "target_paths"), files=("source_paths", "target_paths"),
        takes=("source_language", "target_language", "questions_path", "questions_language"),
    ),
    "nemo_sft_jsonl": _text(needs=("paths",), files=("paths",), takes=("language",)),
    "tts_text": _text(needs=("manifest_filepath",), files=("manifest_filepath",), takes=("language",)),
    "multimodal_conversation": EntryType(
        needs=("manifest_filepath", "audio_locator_tag"), takes=("tarred_audio_filepaths",), files=TARRED,
        holds="conversations", is_stream=True,
    ),
    "share_gpt": EntryType(
        needs=("manifest_filepath", "audio_locator_tag", "audio_placeholders"), files=TARRED,
        takes=("tarred_audio_filepaths", "audio_root"), holds="conversations", is_stream=True,
    ),
    "share_gpt_webdataset": EntryType(
        needs=("data_dir", "audio_locator_tag"), takes=("audio_placeholders",), holds="conversations", is_stream=True
    ),
    "parquet": EntryType(
        needs=("manifest_filepath",), takes=("audio_field", "duration_field", "sampling_rate"), holds="cuts",
        is_stream=True,
    ),
    "nemo": EntryType(
        needs=("manifest_filepath",), takes=("tarred_audio_filepaths", "extra_fields", "passes", "limits"),
        files=TARRED,
        holds="cuts",
    ),
    "nemo_tarred": EntryType(needs=TARRED, takes=("extra_fields", "passes", "limits"), files=TARRED, holds="cuts"),
    "lhotse": EntryType(takes=("cuts_path", "shar_path"), holds="cuts"),
    "lhotse_shar": EntryType(needs=("shar_path",), takes=("cuts_path", "passes"), files=("shar_path",), holds="cuts"),
    "lhotse_as_conversation": _converter(holds="conversations"),
    "sqa_as_conversation": _converter(holds="conversations"),
    "s2s_as_conversation": _converter(holds="conversations", is_marked=False),
    "lhotse_magpietts_data_as_continuation": _converter(is_marked=False),
    "s2s_duplex_overlap_as_s2s_duplex": _converter(is_marked=False),
    "s2s_duplex_reverse_role": _converter(),
}  # fmt: skip


def type_of(entry: Mapping[str, Any]) -> EntryType:
    """Return the type of an entry or a group; anything else, such as a sampler's settings, has an empty type."""
    return TYPES.get(str(entry.get("type")), EntryType())


def entry_directory(entry: Mapping[str, Any]) -> Location:
    """Return the dataset directory of an entry of ``type: sharmill``; raises the errors of ``open_directory``."""
    return open_directory(entry["dataset"], entry.get("cache_dir"), entry.get("cache_gib", 100.0))


def is_number(value: Any, kind: Any = (int, float)) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def is_weight(value: Any) -> bool:
    """Return True for a valid weight: a finite positive number."""
    return is_number(value) and 0 < value < math.inf


def check_entry(entry: Settings, handed_down: Settings) -> None:
    """Raise ConfigError for a missing key, an invalid value, or an unknown key, which NeMo would ignore.

    Args:
        entry: the entry; types that other packages register are not checked.
        handed_down: settings inherited from the sampler and enclosing groups.
    """
    kind = str(entry.get("type"))
    if kind not in TYPES:
        return
    known = [*ENTRY_KEYS, *TYPES[kind].needs, *TYPES[kind].takes]
    subject = "a group" if kind == "group" else f"type {kind}"
    for key in entry:
        if key not in known:
            raise ConfigError(f"input_cfg: {subject} has no option {key!r}{nearest(key, known)}", code="unknown_key")
    missing = [key for key in TYPES[kind].needs if entry.get(key) is None and handed_down.get(key) is None]
    refuse((missing, f"input_cfg: {subject} needs {' and '.join(missing)}"), code="missing_key")
    tags, seed, weight = entry.get("speaker_tags", "kept"), entry.get("shard_seed", 0), entry.get("weight")
    refuse(
        (weight is not None and not is_weight(weight), f"input_cfg: weight must be a positive number, not {weight!r}"),
        (kind == "sharmill" and entry.get("slice_length") is not None,
         "slice_length does not apply to type sharmill, which is shuffled as a whole: remove it"),
        (tags not in ("kept", "nemo"), f"input_cfg: speaker_tags must be kept or nemo, not {tags!r}"),
        (not isinstance(seed, int) and seed not in SEEDS,
         f"input_cfg: shard_seed must be an integer, trng or randomized, not {seed!r}"),
    )  # fmt: skip


def is_divided(entry: Mapping[str, Any]) -> bool:
    """Return True if sharmill's reader divides this entry, which must come from ``prepare_settings``."""
    return entry.get("type") in ("sharmill", DIVIDED)


def is_divisible(entry: Settings) -> bool:
    """Return True if the data can be divided among readers, which must be whole files that can be reread."""
    if not type_of(entry).files or entry.get("slice_length") is not None or entry.get("extra_fields"):
        return False
    return not any("pipe:" in path for path in texts_in(entry))


def texts_in(value: Any) -> Iterator[str]:
    """Yield the strings in nested lists and mappings, such as names of files."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts_in(one)

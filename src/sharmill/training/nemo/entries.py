"""The types of ``input_cfg``: the keys that an entry of each type takes, and those of them that name its files."""

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

# The type of an entry of NeMo whose examples our reader divides among ranks and workers.
DIVIDED: Final = "sharmill_divided"

# Seeds beside numbers: drawn by each rank, or for each worker from ``seed``.
SEEDS: Final = ("trng", "randomized")

# Keys that name the files of tarred data.
TARRED: Final = ("manifest_filepath", "tarred_audio_filepaths")

# Keys that any entry can have. NeMo hands those of a group down to its entries.
OF_ENTRY: Final = (
    "type", "weight", "tags", "shuffle", "shard_seed", "force_finite", "force_map_dataset", "metadata_only",
    # These have no meaning for our datasets.
    "text_field", "lang_field", "max_open_streams", "audio_locator_tag", "token_equivalent_duration",
    "skip_missing_manifest_entries", "force_iterable_dataset", "reweight_temperature", "input_cfg", "slice_length",
)  # fmt: skip
_OF_CONVERTERS: Final = (
    "input_roles", "output_roles", "strip_timestamp_tokens", "move_agent_text_back_by",
    "filter_samples_starting_with_agent", "agent_roles", "user_roles", "target_agent_name", "target_user_name",
    "add_extra_end_silence", "extra_end_silence_range", "max_cer", "min_context_speaker_similarity", "target_speaker",
    "sample_rate",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EntryType:
    """A type of ``input_cfg``.

    Attributes:
        needs: the keys that it must have, itself or from the groups around it.
        takes: further keys.
        files: of a type that our reader divides among ranks and workers the keys that name its files, one of each for a
            shard. An example is a line of the first one, but of ``shar_path``.
        holds: ``cuts``, ``text`` or ``conversations``; nothing where it depends.
        is_stream: NeMo reads it as a stream wherever it lies; other types if they are tarred.
        is_marked: its examples say where they come from, and none is dropped.
    """

    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    holds: str = ""
    is_stream: bool = False
    is_marked: bool = True


_text = partial(EntryType, holds="text", is_stream=True)
_converter = partial(EntryType, needs=("input_cfg",), takes=_OF_CONVERTERS)

# All types but those that other packages register.
TYPES: Final[dict[str, EntryType]] = {
    "sharmill": EntryType(
        needs=("dataset",), holds="cuts", is_stream=True,
        takes=("fields", "codec", "decode_threads", "sidecars", "on_damage", "max_damaged", "speaker_tags", "seed",
               "cache_dir", "cache_gib", "rank", "world_size", "whole_part"),
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
    """Return the type of an entry, or of a group; a sampler's settings count as a type of another package."""
    return TYPES.get(str(entry.get("type")), EntryType())


def entry_directory(entry: Mapping[str, Any]) -> Location:
    """Return the directory of the dataset of an entry of ``type: sharmill``; raises as ``open_directory``."""
    return open_directory(entry["dataset"], entry.get("cache_dir"), entry.get("cache_gib", 100.0))


def is_number(value: Any, kind: Any = (int, float)) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def is_weight(value: Any) -> bool:
    """Return True for a weight of an entry, or of a manifest in a list."""
    return is_number(value) and 0 < value < math.inf


def check_entry(entry: Settings, handed_down: Settings) -> None:
    """Raise ConfigError for a key that NeMo would pass over, or that it needs and does not find.

    Args:
        entry: types that other packages register have keys of their own, which are not checked.
        handed_down: what the settings and groups around it say.
    """
    kind = str(entry.get("type"))
    if kind not in TYPES:
        return
    known = [*OF_ENTRY, *TYPES[kind].needs, *TYPES[kind].takes]
    subject = "a group" if kind == "group" else f"type {kind}"
    for key in entry:
        if key not in known:
            raise ConfigError(f"input_cfg: {subject} has no option {key!r}{nearest(key, known)}", code="unknown_key")
    missing = [key for key in TYPES[kind].needs if entry.get(key) is None and handed_down.get(key) is None]
    refuse((missing, f"input_cfg: {subject} needs {' and '.join(missing)}"), code="missing_key")
    tags, seed, weight = entry.get("speaker_tags", "kept"), entry.get("shard_seed", 0), entry.get("weight")
    refuse(
        (weight is not None and not is_weight(weight), f"input_cfg: weight is a number above 0, not {weight!r}"),
        (kind == "sharmill" and entry.get("slice_length") is not None,
         "slice_length is not for datasets of sharmill: their order is shuffled as a whole"),
        (tags not in ("kept", "nemo"), f"input_cfg: speaker_tags is kept or nemo, not {tags!r}"),
        (not isinstance(seed, int) and seed not in SEEDS,
         f"input_cfg: shard_seed is a number, trng or randomized, not {seed!r}"),
    )  # fmt: skip


def is_divided(entry: Mapping[str, Any]) -> bool:
    """Return True for an entry that our reader divides, as ``prepare_settings`` leaves it."""
    return entry.get("type") in ("sharmill", DIVIDED)


def is_divisible(entry: Settings) -> bool:
    """Return True for data that every reader can have a part of: files that can be read anew, as a whole."""
    if not type_of(entry).files or entry.get("slice_length") is not None or entry.get("extra_fields"):
        return False
    return not any("pipe:" in path for path in texts_in(entry))


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in nested lists and mappings, such as the names of files."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts_in(one)

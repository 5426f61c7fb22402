"""The keys of each type of ``input_cfg``: NeMo passes over those that it does not know."""

from __future__ import annotations

from typing import Any, Final

from sharmill.errors import ConfigError
from sharmill.registry import nearest
from sharmill.training.nemo.classic import CONVERTERS

# What any entry can say. What a group says, NeMo hands down to its entries.
OF_ENTRY: Final = (
    "type", "weight", "tags", "shuffle", "shard_seed", "force_finite", "force_map_dataset", "metadata_only",
)  # fmt: skip
# What has no meaning for our datasets.
OF_OTHERS: Final = (
    "text_field", "lang_field", "max_open_streams", "audio_locator_tag", "token_equivalent_duration",
    "skip_missing_manifest_entries", "force_iterable_dataset", "reweight_temperature",
)  # fmt: skip
_ANY: Final = (*OF_ENTRY, *OF_OTHERS, "input_cfg", "slice_length")

# Of each type of NeMo's: the keys that it needs, and further ones that it takes.
_KEYS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "group": (("input_cfg",), ()),
    "txt": (("paths",), ("language",)),
    "txt_jsonl": (("paths",), ("language",)),
    "txt_pair": (
        ("source_paths", "target_paths"),
        ("source_language", "target_language", "questions_path", "questions_language"),
    ),
    "nemo_sft_jsonl": (("paths",), ("language",)),
    "tts_text": (("manifest_filepath",), ("language",)),
    "multimodal_conversation": (("manifest_filepath", "audio_locator_tag"), ("tarred_audio_filepaths",)),
    "share_gpt": (
        ("manifest_filepath", "audio_locator_tag", "audio_placeholders"),
        ("tarred_audio_filepaths", "audio_root"),
    ),
    "share_gpt_webdataset": (("data_dir", "audio_locator_tag"), ("audio_placeholders",)),
    "parquet": (("manifest_filepath",), ("audio_field", "duration_field", "sampling_rate")),
    "nemo": (("manifest_filepath",), ("tarred_audio_filepaths", "extra_fields")),
    "nemo_tarred": (("manifest_filepath", "tarred_audio_filepaths"), ("extra_fields",)),
    "lhotse": ((), ("cuts_path", "shar_path")),
    "lhotse_shar": (("shar_path",), ("cuts_path",)),
}
_OF_CONVERTERS: Final = (
    "input_roles", "output_roles", "strip_timestamp_tokens", "move_agent_text_back_by",
    "filter_samples_starting_with_agent", "agent_roles", "user_roles", "target_agent_name", "target_user_name",
    "add_extra_end_silence", "extra_end_silence_range", "max_cer", "min_context_speaker_similarity", "target_speaker",
    "sample_rate",
)  # fmt: skip


def check_keys_of_entry(entry: dict[str, Any], handed_down: dict[str, Any]) -> None:
    """Raise ConfigError for a key that NeMo would pass over, or that it needs and does not find.

    Args:
        entry: of a type that NeMo knows; types that other packages register have keys of their own.
        handed_down: what the settings and groups around it say.
    """
    kind = entry["type"]
    required, further = (("input_cfg",), _OF_CONVERTERS) if kind in CONVERTERS else _KEYS.get(kind, (None, None))
    if required is None or further is None:
        return
    known = [*_ANY, *required, *further]
    subject = "a group" if kind == "group" else f"type {kind}"
    for key in entry:
        if key not in known:
            raise ConfigError(f"input_cfg: {subject} has no option {key!r}{nearest(key, known)}", code="unknown_key")
    for key in required:
        if entry.get(key) is None and handed_down.get(key) is None:
            raise ConfigError(f"input_cfg: {subject} needs {key}", code="missing_key")

"""Settings as NeMo's classic loaders and its documentation have them, in the form that its Lhotse loader reads.

``FATES`` says what becomes of each classic key; the table in docs/training.md is made from it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sharmill.errors import ConfigError
from sharmill.training.nemo.setting_values import bad_value

Settings = dict[str, Any]

log = logging.getLogger(__name__)

IGNORED: Final = "ignored"

# What becomes of a key: words for the documentation, or IGNORED, beginning with it, with the reason.
FATES: Final[dict[str, str]] = {
    "use_multimodal_dataloading": "`use_multimodal_sampling`",
    "shard_strategy": "`tarred_shard_strategy`",
    "tarred_audio_filepath": "`tarred_audio_filepaths`, in an entry as well",
    "source_path": "`source_paths` of `txt_pair`",
    "target_path": "`target_paths` of `txt_pair`",
    "bucketing_batch_size": "`bucket_batch_size`, and `batch_size` is dropped; of a whole number n and k buckets "
    "[k·n, …, 2·n, n]; without `bucket_duration_bins`, the buckets are k equal ranges from `min_duration` to "
    "`max_duration`, k being the number of manifests or else `num_buckets`",
    "bucketing_weights": "weights of the manifests: passes times utterances",
    "bucketing_strategy": "`synced_randomized` is what the loader does; `fully_randomized` lets ranks draw buckets on "
    "their own; `fixed_order` is ignored: buckets are always drawn",
    "tarred_shard_strategy": "`scatter`: `shard_seed: randomized`, `replicate`: `shard_seed: trng`, unless set",
    "use_semi_sorted_batching": "`use_bucketing`, with 1 / `randomization_factor` buckets unless `num_buckets` is set: "
    "as wide as the noise on the durations that are sorted",
    "randomization_factor": "the width of a bucket: see `use_semi_sorted_batching`",
    "min_tpt": "a fraction works as well",
    "min_tps": "a fraction works as well",
    "augmentor": "ignored: use the loader's own augmentations, such as `noise_path` and `perturb_speed`",
    "bos_id": "ignored: the tokenizer's",
    "blank_index": "ignored: the model's",
    "code_switched": "ignored: use `concatenate_samples`",
    "concat_sampling_probabilities": "ignored: use `weight` of entries",
    "concat_sampling_scale": "ignored: use `limit_train_batches` of the trainer",
    "concat_sampling_seed": "ignored: `seed`",
    "concat_sampling_technique": "ignored: use `weight` of entries",
    "concat_sampling_temperature": "ignored: use `reweight_temperature`",
    "concat_shuffle": "ignored: `shuffle` mixes all data",
    "defer_setup": "ignored: data are opened where they are read",
    "eos_id": "ignored: the tokenizer's",
    "int_values": "ignored: audio is floating-point",
    "is_code_switched": "ignored: use `concatenate_samples`",
    "is_concat": "ignored: use `weight` of entries",
    "is_tarred": "ignored: `tarred_audio_filepaths` says it",
    "labels": "ignored: the tokenizer's",
    "manifest_parse_func": "ignored: use `type` of an entry",
    "max_utts": "ignored",
    "normalize": "ignored: texts are taken as they are",
    "normalize_transcripts": "ignored: texts are taken as they are",
    "pad_id": "ignored: the dataset class's",
    "parser": "ignored: texts are taken as they are",
    "return_sample_id": "ignored: cuts have ids",
    "semi_sort_sampler_seed": "ignored: `seed`",
    "shard_manifests": "ignored: manifests are read shard by shard",
    "shuffle_n": "ignored: `shuffle_buffer_size`",
    "tarred_audio_index_filepaths": "ignored: tars are read from their begin",
    "trim": "ignored: audio is taken as it is",
    "trim_silence": "ignored: audio is taken as it is",
    "unk_index": "ignored: the tokenizer's",
    "use_dali": "ignored: workers decode",
    "use_start_end_token": "ignored: the dataset class's",
}

_PATHS: Final = ("manifest_filepath", "tarred_audio_filepaths", "cuts_path", "shar_path")
# They read the data of another entry, and make something else of it.
CONVERTERS: Final = frozenset({
    "lhotse_as_conversation", "sqa_as_conversation", "s2s_as_conversation", "lhotse_magpietts_data_as_continuation",
    "s2s_duplex_overlap_as_s2s_duplex", "s2s_duplex_reverse_role",
})  # fmt: skip


def translate(section: Settings) -> None:
    """Put the settings of one sampler into the form of NeMo's Lhotse loader.

    All data are entries of ``input_cfg`` then, each of one manifest. What is ignored is named in one warning.

    Raises:
        ConfigError: a value that has no counterpart.
    """
    _rename(section)
    num_manifests = _as_entries(section)
    _translate_buckets(section, num_manifests)
    _translate_2d(section)
    strategy = section.pop("tarred_shard_strategy", None)
    if strategy not in (None, "scatter", "replicate"):
        raise bad_value("tarred_shard_strategy is scatter or replicate", strategy)
    if strategy is not None:
        section.setdefault("shard_seed", "randomized" if strategy == "scatter" else "trng")
    entries = section.get("input_cfg")
    if isinstance(entries, list):
        section["input_cfg"] = [_translate_entry(entry) if isinstance(entry, dict) else entry for entry in entries]
    drop_ignored(section)


def drop_ignored(section: Settings) -> None:
    """Drop the classic keys that mean nothing here, and name them in one warning."""
    if found := [key for key in section if FATES.get(key, "").startswith(IGNORED)]:
        for key in found:
            del section[key]
        log.warning("the loader ignores %s: see the table of classic keys in docs/training.md", ", ".join(found))


def _rename(settings: Settings) -> None:
    renamed = {"shard_strategy": "tarred_shard_strategy",
               "tarred_audio_filepath": "tarred_audio_filepaths", "source_path": "source_paths",
               "target_path": "target_paths", "use_multimodal_dataloading": "use_multimodal_sampling"}  # fmt: skip
    for old, new in renamed.items():
        if old in settings:
            if new in settings:
                raise ConfigError(f"{old} and {new} are the same setting: keep one", code="bad_config_value")
            settings[new] = settings.pop(old)


def _translate_entry(entry: Settings) -> Settings:
    """Return an entry of ``input_cfg`` with NeMo's keys, or a group of entries where it names several manifests."""
    _rename(entry)
    drop_ignored(entry)
    kind = entry.get("type")
    if kind in ("txt", "txt_jsonl"):
        entry.setdefault("language", None)
    tag = entry.get("audio_locator_tag")
    if isinstance(tag, list) and len(tag) == 1:
        entry["audio_locator_tag"] = f"[{tag[0]}]"  # what YAML makes of [audio]
    if kind in CONVERTERS and entry.get("input_cfg") is None:
        _as_entries(entry)
    elif kind in ("nemo", "nemo_tarred", "lhotse", "lhotse_shar"):
        return _split_lists(entry, None)
    if isinstance(inner := entry.get("input_cfg"), list):
        entry["input_cfg"] = [_translate_entry(one) if isinstance(one, dict) else one for one in inner]
    return entry


def _as_entries(section: Settings) -> int:
    """Make an entry of the paths that settings name themselves; return the number of manifests."""
    weights = section.pop("bucketing_weights", None)
    paths = {key: section.pop(key) for key in _PATHS if section.get(key) is not None}
    if section.get("input_cfg") is not None or not paths:
        if weights is not None:
            raise bad_value(
                "bucketing_weights belong to a list of manifests; entries of input_cfg have a weight", weights
            )
        return 0
    if "shar_path" in paths:
        entry = {"type": "lhotse_shar", "shar_path": paths["shar_path"]}
    elif "cuts_path" in paths:
        entry = {"type": "lhotse", "cuts_path": paths["cuts_path"]}
    else:
        for key, value in paths.items():
            if isinstance(value, str) and "," in value and "{" not in value:
                paths[key] = value.split(",")
        entry = {"type": "nemo_tarred" if "tarred_audio_filepaths" in paths else "nemo", **paths}
    made = _split_lists(entry, weights)
    section["input_cfg"] = [made]
    return len(made.get("input_cfg", ()))


def _split_lists(entry: Settings, passes: Sequence[float] | None) -> Settings:
    """Return a group with an entry for each manifest of a list, weighted as NeMo does it: by utterances, or as said."""
    key = "shar_path" if entry.get("shar_path") is not None else "manifest_filepath"
    listed = entry.get(key)
    if not isinstance(listed, list):
        return entry
    tars = entry.get("tarred_audio_filepaths")
    if tars is not None and (not isinstance(tars, list) or len(tars) != len(listed)):
        raise bad_value(f"tarred_audio_filepaths has as many items as manifest_filepath, {len(listed)}", tars)
    if passes is not None and len(passes) != len(listed):
        raise bad_value(f"bucketing_weights has as many numbers as there are manifests, {len(listed)}", passes)
    outer: Settings = {name: entry[name] for name in ("weight", "tags") if name in entry}
    inner = {name: value for name, value in entry.items() if name not in (key, "tarred_audio_filepaths", *outer)}
    made: list[Settings] = []
    for number, item in enumerate(listed):
        path, *weight = item if isinstance(item, list) else [item]
        if not isinstance(path, str) or len(weight) > 1 or not all(isinstance(one, (int, float)) for one in weight):
            raise bad_value(f"{key} is a path, or a list of paths or of [path, weight]", item)
        one = {**inner, key: path}
        if tars is not None:
            one["tarred_audio_filepaths"] = tars[number][0] if isinstance(tars[number], list) else tars[number]
        one["weight"] = (weight[0] if weight else _count(path, key)) * (passes[number] if passes else 1)
        made.append(one)
    if len(made) == 1:
        del made[0]["weight"]
        return {**made[0], **outer}
    return {"type": "group", **outer, "input_cfg": made}


def _count(path: str, key: str) -> int:
    """Count the utterances of a manifest, or the cuts of a Shar."""
    from nemo.collections.common.data.lhotse.nemo_adapters import expand_sharded_filepaths

    from sharmill.shar.layout import CUTS
    from sharmill.shar.reading.foreign import find_shards
    from sharmill.training.nemo.examples import count_lines

    if key == "shar_path":
        return sum(count_lines(str(shard.files[CUTS])) for shard in find_shards(Path(path)))
    return sum(count_lines(name) for name in expand_sharded_filepaths(path))


def _translate_buckets(section: Settings, num_manifests: int) -> None:
    factor = section.pop("randomization_factor", None)
    if section.pop("use_semi_sorted_batching", False):
        section["use_bucketing"] = True
        section.setdefault("num_buckets", max(2, round(1 / (factor or 0.1))))
    strategy = section.get("bucketing_strategy")
    if strategy not in (None, "fixed_order", "synced_randomized", "fully_randomized"):
        raise bad_value("bucketing_strategy is synced_randomized or fully_randomized", strategy)
    if strategy == "fixed_order":
        log.warning("the loader ignores bucketing_strategy: fixed_order: buckets are drawn, on all ranks in step")
    sizes = section.pop("bucketing_batch_size", None)
    if sizes is None:
        return
    count = len(section.get("bucket_duration_bins") or ()) or num_manifests or section.get("num_buckets", 0)
    if isinstance(sizes, int):
        if count < 1:
            raise bad_value("bucketing_batch_size needs bucket_duration_bins or num_buckets", sizes)
        sizes = [sizes * (count - number) for number in range(count)]
    if section.get("bucket_duration_bins") is None:
        longest, shortest = section.get("max_duration"), max(0.0, section.get("min_duration") or 0.0)
        if longest is None or math.isinf(longest):
            raise bad_value("bucketing_batch_size needs bucket_duration_bins or max_duration", sizes)
        step = (longest - shortest) / len(sizes)
        section["bucket_duration_bins"] = [round(shortest + step * (n + 1), 3) for n in range(len(sizes))]
    section |= {"bucket_batch_size": sizes, "num_buckets": len(sizes)}
    section.pop("batch_size", None)


def _translate_2d(section: Settings) -> None:
    """Give buckets of two dimensions the batch sizes that a batch's duration or tokens allow at their bounds.

    lhotse cannot compare such buckets with a duration, and would do no more than this: count padded seconds.
    """
    bins = section.get("bucket_duration_bins")
    if not bins or not isinstance(bins[0], Sequence) or section.get("bucket_batch_size") is not None:
        return
    multimodal = section.get("use_multimodal_sampling", False)
    limit = section.get("batch_tokens" if multimodal else "batch_duration")
    quadratic = section.get("quadratic_factor" if multimodal else "quadratic_duration")
    if limit is None and section.get("batch_size") is None:
        raise ConfigError(
            "bucket_duration_bins of two dimensions need bucket_batch_size, which sharmill tune-batch finds, or "
            "batch_duration (batch_tokens with use_multimodal_sampling)",
            code="missing_key",
        )
    sizes = []
    for bound in bins:
        length = sum(bound) if multimodal and section.get("measure_total_length", True) else bound[0]
        penalized = length + (length**2 / quadratic if quadratic else 0)
        most = math.inf if limit is None else max(1, int(limit / penalized))
        sizes.append(int(min(most, section.get("batch_size") or math.inf)))
    section |= {"bucket_batch_size": sizes, "num_buckets": len(bins)}

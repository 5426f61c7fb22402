"""Translation of the settings of NeMo's classic loaders into settings of its Lhotse loader.

``CLASSIC_KEY_HANDLING`` describes how each classic key is handled; the table in docs/training.md is generated from it.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any, Final

from sharmill.errors import refuse
from sharmill.training.nemo.entries import TARRED, Settings, type_of

log = logging.getLogger(__name__)

_RENAMED: Final = {
    "shard_strategy": "tarred_shard_strategy", "tarred_audio_filepath": "tarred_audio_filepaths",
    "source_path": "source_paths", "target_path": "target_paths",
    "use_multimodal_dataloading": "use_multimodal_sampling",
}  # fmt: skip

# Handling of each key, as text for the documentation. It begins with "ignored" if the key has no effect here.
CLASSIC_KEY_HANDLING: Final[dict[str, str]] = {
    "use_multimodal_dataloading": "`use_multimodal_sampling`",
    "shard_strategy": "`tarred_shard_strategy`",
    "tarred_audio_filepath": "`tarred_audio_filepaths`, also in an entry",
    "source_path": "`source_paths` of `txt_pair`",
    "target_path": "`target_paths` of `txt_pair`",
    "bucketing_batch_size": "`bucket_batch_size`, and `batch_size` is ignored: see **Batch sizes** above",
    "bucketing_weights": "number of passes over each manifest in an epoch",
    "bucketing_strategy": "the order of manifests or of buckets: see **Lists of lists** above",
    "tarred_shard_strategy": "`shard_seed` unless it is set: `randomized` for `scatter`, `trng` for `replicate`",
    "use_semi_sorted_batching": "NeMo's sampler in map style; for streams `use_bucketing`, with 1 / "
    "`randomization_factor` buckets unless `num_buckets` is set",
    "randomization_factor": "see `use_semi_sorted_batching`",
    "min_tpt": "unchanged, but may also be a fraction",
    "min_tps": "unchanged, but may also be a fraction",
    "augmentor": "ignored: use the loader's own augmentations, such as `noise_path` and `perturb_speed`",
    "bos_id": "ignored: set by the tokenizer",
    "blank_index": "ignored: set by the model",
    "code_switched": "ignored: use `concatenate_samples`",
    "concat_sampling_probabilities": "ignored: use `weight` of entries",
    "concat_sampling_scale": "ignored: use `limit_train_batches` of the trainer",
    "concat_sampling_seed": "ignored: use `seed`",
    "concat_sampling_technique": "ignored: use `weight` of entries",
    "concat_sampling_temperature": "ignored: use `reweight_temperature`",
    "concat_shuffle": "ignored: `shuffle` mixes all data",
    "defer_setup": "ignored: if torch.distributed is initialized, ranks wait for copies of data from object stores",
    "eos_id": "ignored: set by the tokenizer",
    "int_values": "ignored: audio is floating-point",
    "is_code_switched": "ignored: use `concatenate_samples`",
    "is_concat": "ignored: use `weight` of entries",
    "is_tarred": "ignored: determined by `tarred_audio_filepaths`",
    "labels": "ignored: set by the tokenizer",
    "manifest_parse_func": "ignored: use `type` of an entry",
    "max_open_streams": "ignored: each entry has one file open at a time, and a limit would drop entries",
    "max_utts": "ignored",
    "normalize": "ignored: texts are used unchanged",
    "normalize_transcripts": "ignored: texts are used unchanged",
    "pad_id": "ignored: set by the dataset class",
    "parser": "ignored: texts are used unchanged",
    "return_sample_id": "ignored: cuts have ids",
    "semi_sort_sampler_seed": "ignored: use `seed`",
    "shard_manifests": "ignored: manifests are read shard by shard",
    "shuffle_n": "ignored: use `shuffle_buffer_size`",
    "tarred_audio_index_filepaths": "ignored: tars are read sequentially",
    "trim": "ignored: audio is used unchanged",
    "trim_silence": "ignored: audio is used unchanged",
    "unk_index": "ignored: set by the tokenizer",
    "use_dali": "ignored: workers decode the audio",
    "use_start_end_token": "ignored: set by the dataset class",
}

_SIZES: Final = ("bucket_batch_size", "batch_duration", "batch_tokens")
# Batching keys that only NeMo's Lhotse loader has.
_LHOTSE_KEYS: Final = (
    *_SIZES, "bucket_buffer_size", "bucket_duration_bins", "num_buckets", "num_cuts_for_bins_estimate",
    "quadratic_duration", "use_bucketing", "use_multimodal_sampling",
)  # fmt: skip

# The shard seed for each value of tarred_shard_strategy.
_SHARD_SEEDS: Final = {"scatter": "randomized", "replicate": "trng"}
_STRATEGIES: Final = ("fixed_order", "synced_randomized", "fully_randomized")
# Settings that name data directly, each with the type of entry that replaces it. The first one present is used.
_PATHS: Final = {
    "shar_path": "lhotse_shar", "cuts_path": "lhotse", "tarred_audio_filepaths": "nemo_tarred",
    "manifest_filepath": "nemo",
}  # fmt: skip


def translate(section: Settings) -> str | None:
    """Translate the settings of one sampler in place into those of NeMo's Lhotse loader.

    Afterwards all data are entries of ``input_cfg``, with one manifest per entry. Warnings name the keys that are
    translated and the keys that are ignored.

    Returns:
        The strategy for reading the entries one after the other, each with its ``batch_size``; None if the entries are
        mixed.

    Raises:
        ConfigError: a value has no counterpart in the Lhotse loader.
    """
    from nemo.collections.common.data.lhotse.cutset import count_input_cfg_levels

    _rename(section)
    depth = count_input_cfg_levels(section)
    if not depth and section.pop("reweight_temperature", None) is not None:
        log.warning("ignored: reweight_temperature, which applies only to the levels of input_cfg")
    temperature = section.get("reweight_temperature")
    refuse(
        (isinstance(temperature, list) and len(temperature) != depth,
         f"reweight_temperature must be a number, or one for each of {depth} levels of input_cfg, not {temperature!r}"),
    )  # fmt: skip
    in_turn = _translate_buckets(section, _as_entries(section))
    _translate_2d(section)
    if (strategy := section.pop("tarred_shard_strategy", None)) is not None:
        refuse((strategy not in _SHARD_SEEDS, f"tarred_shard_strategy must be scatter or replicate, not {strategy!r}"))
        seed = section.setdefault("shard_seed", _SHARD_SEEDS[strategy])
        log.warning("tarred_shard_strategy: %s is read as shard_seed: %s", strategy, seed)
    _translate_entries(section)
    if isinstance(temperature, list):
        temperature += [1.0] * (count_input_cfg_levels(section) - depth)  # groups made from lists add levels
    drop_ignored(section)
    return in_turn


def is_read_by_lhotse(section: Settings) -> bool:
    """Return True if the settings request NeMo's Lhotse loader.

    They request it by ``use_lhotse`` or, if that is not set, by any key that only this loader has.
    """
    asked = section.get("use_lhotse")
    return any(map(section.get, _LHOTSE_KEYS)) if asked is None else bool(asked)


def drop_ignored(section: Settings) -> None:
    """Drop the classic keys that have no effect, and name them in one warning."""
    found = [key for key in section if CLASSIC_KEY_HANDLING.get(key, "").startswith("ignored")]
    for key in found:
        del section[key]
    if found:
        log.warning("ignored: %s; see docs/training.md for replacements", ", ".join(found))


def _rename(settings: Settings) -> None:
    for old, new in _RENAMED.items():
        if old in settings:
            refuse((new in settings, f"{old} and {new} are the same setting: keep one"))
            settings[new] = settings.pop(old)


def _translate_entries(settings: Settings) -> None:
    """Translate the entries of a sampler or a group at all levels; items that are not mappings are refused later."""
    if isinstance(entries := settings.get("input_cfg"), list):
        settings["input_cfg"] = [_translate_entry(entry) if isinstance(entry, dict) else entry for entry in entries]


def _translate_entry(entry: Settings) -> Settings:
    """Return an entry of ``input_cfg`` with NeMo's keys, or a group of entries if the entry names several manifests."""
    _rename(entry)
    drop_ignored(entry)
    kind = entry.get("type")
    if kind in ("txt", "txt_jsonl"):
        entry.setdefault("language", None)
    tag = entry.get("audio_locator_tag")
    if isinstance(tag, list) and len(tag) == 1:
        entry["audio_locator_tag"] = f"[{tag[0]}]"  # YAML parses an unquoted [audio] as a list
    if type_of(entry).needs == ("input_cfg",) and kind != "group" and entry.get("input_cfg") is None:
        _as_entries(entry)
        entry.setdefault("reweight_temperature", None)
    elif kind in ("nemo", "nemo_tarred", "lhotse", "lhotse_shar"):
        return _split_lists(entry, None)
    _translate_entries(entry)
    return entry


def _as_entries(section: Settings) -> list[Settings]:
    """Replace the paths in the settings with entries of ``input_cfg``.

    Returns:
        The entries of NeMo's buckets, if ``manifest_filepath`` is a list of one-item lists; otherwise an empty list.
    """
    weights = section.pop("bucketing_weights", None)
    paths = {key: section.pop(key) for key in _PATHS if section.get(key) is not None}
    by_entries = section.get("input_cfg") is not None
    kind, key = next(((kind, key) for key, kind in _PATHS.items() if key in paths), ("", ""))
    names = () if by_entries else type_of({"type": kind}).files or (key,)
    if unread := [name for name in paths if name not in names]:
        log.warning("data are read from %s; ignored: %s", "input_cfg" if by_entries else key, ", ".join(unread))
    if by_entries or not paths:
        refuse(
            (weights is not None,
             f"bucketing_weights {weights!r} need a list of manifests: set weight in the entries of input_cfg instead"),
        )  # fmt: skip
        return []
    if weights is not None:
        log.warning("bucketing_weights: %s are used as the number of passes over each manifest per epoch", weights)
    entry: Settings = {"type": kind} | {name: paths[name] for name in names if name in paths}
    for name, value in entry.items():
        if name in TARRED and isinstance(value, str) and "," in value and "{" not in value:
            entry[name] = value.split(",")
    listed = entry.get("manifest_filepath")
    made = _split_lists(entry, weights)
    section["input_cfg"] = [made]
    bucketed = isinstance(listed, list) and all(isinstance(item, list) and len(item) == 1 for item in listed)
    return made.get("input_cfg", []) if bucketed else []


def _split_lists(entry: Settings, passes: Sequence[int] | None) -> Settings:
    """Return a group with one entry per listed manifest; an entry without a list is returned unchanged.

    As in NeMo, the weight of a manifest is given in the list; by default, it is the number of utterances.

    Args:
        passes: number of passes over each manifest in an epoch.
    """
    key = "shar_path" if entry.get("shar_path") is not None else "manifest_filepath"
    listed = entry.get(key)
    if not isinstance(listed, list):
        return entry
    from nemo.collections.common.data.lhotse.nemo_adapters import expand_sharded_filepaths

    from sharmill.training.nemo.examples import open_examples

    tars = entry.get("tarred_audio_filepaths")
    refuse(
        (tars is not None and (not isinstance(tars, list) or len(tars) != len(listed)),
         f"tarred_audio_filepaths must have {len(listed)} items like manifest_filepath, not {tars!r}"),
        (passes is not None and len(passes) != len(listed),
         f"bucketing_weights must have {len(listed)} numbers, one per manifest, not {passes!r}"),
        (not all(isinstance(one, int) and one > 0 for one in passes or ()),
         f"bucketing_weights must be positive integers, the passes over each manifest, not {passes!r}"),
    )  # fmt: skip
    outer: Settings = {name: entry[name] for name in ("weight", "tags") if name in entry}
    inner = {name: value for name, value in entry.items() if name not in (key, "tarred_audio_filepaths", *outer)}
    made: list[Settings] = []
    for number, item in enumerate(listed):
        path, *weight = item if isinstance(item, list) else [item]
        is_listed = isinstance(path, str) and len(weight) <= 1 and all(isinstance(one, (int, float)) for one in weight)
        refuse((not is_listed, f"{key} must be a path, or a list of paths or of [path, weight], not {item!r}"))
        one = {**inner, key: path}
        if tars is not None:
            names = tars[number] if isinstance(tars[number], list) else [tars[number]]
            several = [tar for name in names for tar in expand_sharded_filepaths(name)]
            one["tarred_audio_filepaths"] = names[0] if len(names) == 1 else several
        # The default weight is the number of utterances in a manifest, or of cuts in a Shar.
        kind = "lhotse_shar" if key == "shar_path" else "nemo"
        one["weight"] = weight[0] if weight else len(open_examples({"of_type": kind, key: path}))
        if passes is not None:
            one |= {"weight": one["weight"] * passes[number], "passes": passes[number]}
        made.append(one)
    if len(made) == 1:
        del made[0]["weight"]
        return {**made[0], **outer}
    # NeMo applies the weights of a list as given, without the temperature of input_cfg.
    return {"type": "group", **outer, "reweight_temperature": None, "input_cfg": made}


def _translate_strategy(section: Settings, manifests: Sequence[Settings]) -> str | None:
    """Return the ``bucketing_strategy`` if it applies to NeMo's buckets, and explain its effect in one warning.

    Raises:
        ConfigError: the strategy does not exist.
    """
    strategy: str | None = section.pop("bucketing_strategy", None)
    known = strategy is None or strategy in _STRATEGIES
    refuse((
        not known,
        f"bucketing_strategy must be fixed_order, synced_randomized or fully_randomized, not {strategy!r}",
    ))  # fmt: skip
    in_turn = bool(manifests) and not is_read_by_lhotse(section)
    effect = "reads an epoch of each manifest in turn; to mix them by weight, set use_lhotse: true"
    if not in_turn:
        effect = "has no effect"
        if strategy == "fully_randomized" and not section.get("use_lhotse"):
            section["bucketing_strategy"], effect = strategy, "lets each rank draw its buckets, if any, independently"
        if manifests:
            effect += ", and the manifests are mixed by weight; to read them in turn, set use_lhotse: false"
    if strategy is not None:
        log.warning("bucketing_strategy: %s %s", strategy, effect)
    return strategy if in_turn else None


def _translate_buckets(section: Settings, manifests: Sequence[Settings]) -> str | None:
    """Translate the classic bucketing keys; return the strategy if manifests are read in turn, or None.

    Args:
        manifests: the entries of NeMo's buckets, which NeMo's Lhotse loader does not keep separate.
    """
    in_turn, sizes = _translate_strategy(section, manifests), section.pop("bucketing_batch_size", None)
    size, others = section.get("batch_size"), [key for key in _LHOTSE_KEYS if section.get(key)]
    if sizes is not None and in_turn is None and (used := [key for key in others if key in _SIZES]):
        log.warning("ignored: bucketing_batch_size, because %s sizes the batches", used[0])
        sizes = None
    elif manifests and in_turn is None and sizes is None and size and not others and not section.get("use_lhotse"):
        if math.isinf(section.get("max_duration") or math.inf):
            log.warning("batches mix the buckets of manifest_filepath: set max_duration to keep them separate")
        else:
            sizes = [size] * len(manifests)
    if sizes is None:
        return in_turn
    count = len(section.get("bucket_duration_bins") or ()) or len(manifests) or section.get("num_buckets", 0)
    if isinstance(sizes, int):
        refuse((count < 1, f"bucketing_batch_size: {sizes!r} needs bucket_duration_bins or num_buckets: set one"))
        sizes = [sizes * (count - number) for number in range(count)]
    if in_turn is not None:
        refuse(
            (len(sizes) != len(manifests),
             f"bucketing_batch_size must have {len(manifests)} numbers, one per manifest, not {sizes!r}"),
        )  # fmt: skip
        for entry, size in zip(manifests, sizes, strict=True):
            entry["batch_size"] = size
        return in_turn
    if section.get("bucket_duration_bins") is None:
        longest: Any = section.get("max_duration")
        shortest = max(0.0, section.get("min_duration") or 0.0)
        refuse(
            (longest is None or math.isinf(longest),
             f"bucketing_batch_size: {sizes!r} needs bucket_duration_bins or max_duration: set one"),
        )  # fmt: skip
        step = (longest - shortest) / len(sizes)
        section["bucket_duration_bins"] = [round(shortest + step * (n + 1), 3) for n in range(len(sizes))]
    section |= {"bucket_batch_size": sizes, "num_buckets": len(sizes)}
    section.pop("batch_size", None)
    log.warning(
        "batch sizes are %s for buckets of up to %s s; longer examples are dropped",
        section["bucket_batch_size"], section["bucket_duration_bins"],
    )  # fmt: skip
    return None


def _translate_2d(section: Settings) -> None:
    """Compute the batch sizes of two-dimensional buckets from the maximum duration or tokens of a batch.

    lhotse supports such a maximum only for one-dimensional buckets. This function counts the padded length in the same
    way.
    """
    bins = section.get("bucket_duration_bins")
    if not bins or not isinstance(bins[0], Sequence) or section.get("bucket_batch_size") is not None:
        return
    multimodal = section.get("use_multimodal_sampling", False)
    limit = section.get("batch_tokens" if multimodal else "batch_duration")
    quadratic = section.get("quadratic_factor" if multimodal else "quadratic_duration")
    refuse(
        (limit is None and section.get("batch_size") is None,
         "two-dimensional bucket_duration_bins need batch sizes: set bucket_batch_size (see sharmill tune-batch) or "
         "batch_duration (batch_tokens with use_multimodal_sampling)"),
        code="missing_key",
    )  # fmt: skip
    sizes = []
    for bound in bins:
        length = sum(bound) if multimodal and section.get("measure_total_length", True) else bound[0]
        penalized = length + (length**2 / quadratic if quadratic else 0)
        most = math.inf if limit is None else max(1, int(limit / penalized))
        sizes.append(int(min(most, section.get("batch_size") or math.inf)))
    section |= {"bucket_batch_size": sizes, "num_buckets": len(bins)}

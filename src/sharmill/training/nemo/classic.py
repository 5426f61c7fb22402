"""The settings of NeMo's classic loaders in the form that its Lhotse loader reads.

``CLASSIC_KEY_HANDLING`` describes the handling of each classic key; the table in docs/training.md is made from it.
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

# How each key is used, in words for the documentation, which begin with "ignored" if the key has no effect here.
CLASSIC_KEY_HANDLING: Final[dict[str, str]] = {
    "use_multimodal_dataloading": "`use_multimodal_sampling`",
    "shard_strategy": "`tarred_shard_strategy`",
    "tarred_audio_filepath": "`tarred_audio_filepaths`, in an entry as well",
    "source_path": "`source_paths` of `txt_pair`",
    "target_path": "`target_paths` of `txt_pair`",
    "bucketing_batch_size": "`bucket_batch_size`, and `batch_size` is dropped; of a whole number n and k buckets "
    "[k·n, …, 2·n, n]; without `bucket_duration_bins`, the buckets are k equal ranges from `min_duration` to "
    "`max_duration`, k being the number of manifests in a list of lists, or else `num_buckets`; if it is not set, a "
    "list of lists has buckets of `batch_size`; ignored beside `batch_duration`, `batch_tokens` and "
    "`bucket_batch_size`, which size the batches",
    "bucketing_weights": "passes over each manifest in an epoch",
    "bucketing_strategy": "a list of lists of manifests without Lhotse's keys, or with `use_lhotse: false`: an epoch "
    "of each in turn, in an order that is fixed, or drawn by all ranks or each. Else the data are mixed by weight, and "
    "batches draw their buckets in step, or with `fully_randomized` and without `use_lhotse: true` apart",
    "tarred_shard_strategy": "`scatter`: `shard_seed: randomized`, `replicate`: `shard_seed: trng`, unless set",
    "use_semi_sorted_batching": "NeMo's sampler in map style; for streams `use_bucketing`, with 1 / "
    "`randomization_factor` buckets unless `num_buckets` is set",
    "randomization_factor": "see `use_semi_sorted_batching`",
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
    "defer_setup": "ignored: ranks wait for copies of data in stores where torch.distributed is initialized",
    "eos_id": "ignored: the tokenizer's",
    "int_values": "ignored: audio is floating-point",
    "is_code_switched": "ignored: use `concatenate_samples`",
    "is_concat": "ignored: use `weight` of entries",
    "is_tarred": "ignored: `tarred_audio_filepaths` says it",
    "labels": "ignored: the tokenizer's",
    "manifest_parse_func": "ignored: use `type` of an entry",
    "max_open_streams": "ignored: each entry has one file open at a time, and a limit would leave entries out",
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

_SIZES: Final = ("bucket_batch_size", "batch_duration", "batch_tokens")
# Keys by which NeMo's Lhotse loader makes batches, and its classic loaders do not.
_OF_LHOTSE: Final = (
    *_SIZES, "bucket_buffer_size", "bucket_duration_bins", "num_buckets", "num_cuts_for_bins_estimate",
    "quadratic_duration", "use_bucketing", "use_multimodal_sampling",
)  # fmt: skip

# The shard seed that each strategy stands for.
_SHARD_SEEDS: Final = {"scatter": "randomized", "replicate": "trng"}
_STRATEGIES: Final = ("fixed_order", "synced_randomized", "fully_randomized")
# Keys of settings that name data themselves, and the type of entry that is made of each; the first one counts.
_PATHS: Final = {
    "shar_path": "lhotse_shar", "cuts_path": "lhotse", "tarred_audio_filepaths": "nemo_tarred",
    "manifest_filepath": "nemo",
}  # fmt: skip


def translate(section: Settings) -> str | None:
    """Put the settings of one sampler into the form of NeMo's Lhotse loader.

    All data are entries of ``input_cfg`` then, each of one manifest. A warning names each key that is read as something
    else, and another one those that are ignored.

    Returns:
        The strategy by which the entries are to be taken one after the other, each with its ``batch_size``; None if
        they are mixed.

    Raises:
        ConfigError: a value that has no counterpart.
    """
    from nemo.collections.common.data.lhotse.cutset import count_input_cfg_levels

    _rename(section)
    depth = count_input_cfg_levels(section)
    if not depth and section.pop("reweight_temperature", None) is not None:
        log.warning("ignored: reweight_temperature, which is for the levels of input_cfg")
    temperature = section.get("reweight_temperature")
    refuse(
        (isinstance(temperature, list) and len(temperature) != depth,
         f"reweight_temperature is a number, or a number for each of {depth} levels of input_cfg, not {temperature!r}"),
    )  # fmt: skip
    in_turn = _translate_buckets(section, _as_entries(section))
    _translate_2d(section)
    if (strategy := section.pop("tarred_shard_strategy", None)) is not None:
        refuse((strategy not in [*_SHARD_SEEDS], f"tarred_shard_strategy is scatter or replicate, not {strategy!r}"))
        seed = section.setdefault("shard_seed", _SHARD_SEEDS[strategy])
        log.warning("tarred_shard_strategy: %s is read as shard_seed: %s", strategy, seed)
    _translate_entries(section)
    if isinstance(temperature, list):
        temperature += [1.0] * (count_input_cfg_levels(section) - depth)  # lists have become groups
    drop_ignored(section)
    return in_turn


def is_read_by_lhotse(section: Settings) -> bool:
    """Return True if a sampler's settings ask for Lhotse dataloading: by ``use_lhotse``, or else by a Lhotse key."""
    asked = section.get("use_lhotse")
    return any(map(section.get, _OF_LHOTSE)) if asked is None else bool(asked)


def drop_ignored(section: Settings) -> None:
    """Drop the classic keys that mean nothing here, and name them in one warning."""
    found = [key for key in section if CLASSIC_KEY_HANDLING.get(key, "").startswith("ignored")]
    for key in found:
        del section[key]
    if found:
        log.warning("ignored: %s; docs/training.md says what to use instead", ", ".join(found))


def _rename(settings: Settings) -> None:
    for old, new in _RENAMED.items():
        if old in settings:
            refuse((new in settings, f"{old} and {new} are the same setting: keep one"))
            settings[new] = settings.pop(old)


def _translate_entries(settings: Settings) -> None:
    """Translate the entries of a sampler or a group, at all levels; items that are no mappings are refused later."""
    if isinstance(entries := settings.get("input_cfg"), list):
        settings["input_cfg"] = [_translate_entry(entry) if isinstance(entry, dict) else entry for entry in entries]


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
    if type_of(entry).needs == ("input_cfg",) and kind != "group" and entry.get("input_cfg") is None:
        _as_entries(entry)
        entry.setdefault("reweight_temperature", None)
    elif kind in ("nemo", "nemo_tarred", "lhotse", "lhotse_shar"):
        return _split_lists(entry, None)
    _translate_entries(entry)
    return entry


def _as_entries(section: Settings) -> list[Settings]:
    """Make entries of the paths that settings name themselves.

    Returns:
        The entries of NeMo's buckets: of a list of manifests, each in a list of its own; else none.
    """
    weights = section.pop("bucketing_weights", None)
    paths = {key: section.pop(key) for key in _PATHS if section.get(key) is not None}
    by_entries = section.get("input_cfg") is not None
    kind, key = next(((kind, key) for key, kind in _PATHS.items() if key in paths), ("", ""))
    names = () if by_entries else type_of({"type": kind}).files or (key,)
    if unread := [name for name in paths if name not in names]:
        log.warning("%s is read, and %s is not", "input_cfg" if by_entries else key, ", ".join(unread))
    if by_entries or not paths:
        refuse(
            (weights is not None,
             f"bucketing_weights belong to a list of manifests, not {weights!r}; entries of input_cfg have a weight"),
        )  # fmt: skip
        return []
    if weights is not None:
        log.warning("bucketing_weights: %s are passes over each manifest in an epoch", weights)
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
    """Return a group with an entry for each manifest of a list, with NeMo's weights: as given, or by utterances.

    Args:
        passes: how often each is read in an epoch.
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
         f"tarred_audio_filepaths has as many items as manifest_filepath, {len(listed)}, not {tars!r}"),
        (passes is not None and len(passes) != len(listed),
         f"bucketing_weights has as many numbers as there are manifests, {len(listed)}, not {passes!r}"),
        (not all(isinstance(one, int) and one > 0 for one in passes or ()),
         f"bucketing_weights are whole numbers above 0, the passes over each manifest, not {passes!r}"),
    )  # fmt: skip
    outer: Settings = {name: entry[name] for name in ("weight", "tags") if name in entry}
    inner = {name: value for name, value in entry.items() if name not in (key, "tarred_audio_filepaths", *outer)}
    made: list[Settings] = []
    for number, item in enumerate(listed):
        path, *weight = item if isinstance(item, list) else [item]
        is_listed = isinstance(path, str) and len(weight) <= 1 and all(isinstance(one, (int, float)) for one in weight)
        refuse((not is_listed, f"{key} is a path, or a list of paths or of [path, weight], not {item!r}"))
        one = {**inner, key: path}
        if tars is not None:
            names = tars[number] if isinstance(tars[number], list) else [tars[number]]
            several = [tar for name in names for tar in expand_sharded_filepaths(name)]
            one["tarred_audio_filepaths"] = names[0] if len(names) == 1 else several
        # Utterances of a manifest, or cuts of a Shar.
        kind = "lhotse_shar" if key == "shar_path" else "nemo"
        one["weight"] = weight[0] if weight else len(open_examples({"of_type": kind, key: path}))
        if passes is not None:
            one |= {"weight": one["weight"] * passes[number], "passes": passes[number]}
        made.append(one)
    if len(made) == 1:
        del made[0]["weight"]
        return {**made[0], **outer}
    # NeMo weights a list as it is said, whatever the temperature of input_cfg.
    return {"type": "group", **outer, "reweight_temperature": None, "input_cfg": made}


def _translate_strategy(section: Settings, manifests: Sequence[Settings]) -> str | None:
    """Return the ``bucketing_strategy`` if NeMo's buckets are read in its order; say in one warning what it does.

    Raises:
        ConfigError: there is no such strategy.
    """
    strategy: str | None = section.pop("bucketing_strategy", None)
    known = strategy is None or strategy in _STRATEGIES
    refuse((not known, f"bucketing_strategy is fixed_order, synced_randomized or fully_randomized, not {strategy!r}"))
    in_turn = bool(manifests) and not is_read_by_lhotse(section)
    told = "reads an epoch of one manifest after the other: use_lhotse: true mixes them by weight"
    if not in_turn:
        told = "has no effect"
        if strategy == "fully_randomized" and not section.get("use_lhotse"):
            section["bucketing_strategy"], told = strategy, "lets each rank draw buckets, if there are any, by itself"
        if manifests:
            told += ", and the manifests are mixed by weight: use_lhotse: false reads one after the other"
    if strategy is not None:
        log.warning("bucketing_strategy: %s %s", strategy, told)
    return strategy if in_turn else None


def _translate_buckets(section: Settings, manifests: Sequence[Settings]) -> str | None:
    """Make buckets of NeMo's Lhotse loader of the classic keys; return the strategy of buckets taken in turn.

    Args:
        manifests: the entries of NeMo's buckets, which Lhotse dataloading does not tell apart.
    """
    in_turn, sizes = _translate_strategy(section, manifests), section.pop("bucketing_batch_size", None)
    size, others = section.get("batch_size"), [key for key in _OF_LHOTSE if section.get(key)]
    if sizes is not None and in_turn is None and (used := [key for key in others if key in _SIZES]):
        log.warning("ignored: bucketing_batch_size, since %s sizes the batches", used[0])
        sizes = None
    elif manifests and in_turn is None and sizes is None and size and not others and not section.get("use_lhotse"):
        if math.isinf(section.get("max_duration") or math.inf):
            log.warning("batches mix the buckets of manifest_filepath: set max_duration, and they will not")
        else:
            sizes = [size] * len(manifests)
    if sizes is None:
        return in_turn
    count = len(section.get("bucket_duration_bins") or ()) or len(manifests) or section.get("num_buckets", 0)
    if isinstance(sizes, int):
        refuse((count < 1, f"bucketing_batch_size needs bucket_duration_bins or num_buckets, not {sizes!r}"))
        sizes = [sizes * (count - number) for number in range(count)]
    if in_turn is not None:
        refuse(
            (len(sizes) != len(manifests),
             f"bucketing_batch_size has as many numbers as there are manifests, {len(manifests)}, not {sizes!r}"),
        )  # fmt: skip
        for entry, size in zip(manifests, sizes, strict=True):
            entry["batch_size"] = size
        return in_turn
    if section.get("bucket_duration_bins") is None:
        longest: Any = section.get("max_duration")
        shortest = max(0.0, section.get("min_duration") or 0.0)
        refuse(
            (longest is None or math.isinf(longest),
             f"bucketing_batch_size needs bucket_duration_bins or max_duration, not {sizes!r}"),
        )  # fmt: skip
        step = (longest - shortest) / len(sizes)
        section["bucket_duration_bins"] = [round(shortest + step * (n + 1), 3) for n in range(len(sizes))]
    section |= {"bucket_batch_size": sizes, "num_buckets": len(sizes)}
    section.pop("batch_size", None)
    log.warning(
        "examples come in batches of %s from buckets of up to %s s, and longer ones never",
        section["bucket_batch_size"], section["bucket_duration_bins"],
    )  # fmt: skip
    return None


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
    refuse(
        (limit is None and section.get("batch_size") is None,
         "bucket_duration_bins of two dimensions need bucket_batch_size, which sharmill tune-batch finds, or "
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

"""Reading, checking and preparing the settings of a training loader.

NeMo's loader ignores unknown keys, and under some settings that look harmless, it gives examples to several ranks or to
none. Here, both raise an error.
"""

import copy
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sharmill.errors import ConfigError, one_line, refuse
from sharmill.files.regular import open_regular
from sharmill.registry import nearest
from sharmill.training.nemo.classic import CLASSIC_KEY_HANDLING, drop_ignored, translate
from sharmill.training.nemo.entries import (
    DIVIDED,
    ENTRY_KEYS,
    SEEDS,
    Settings,
    check_entry,
    is_divided,
    is_divisible,
    is_number,
    texts_in,
    type_of,
)
from sharmill.training.nemo.stores import is_stored

if TYPE_CHECKING:
    from nemo.collections.common.prompts import PromptFormatter

log = logging.getLogger(__name__)

_FUSIONS: Final = ("round_robin", "randomized_round_robin", "zip")
_LIMITS: Final = ("duration", "tps", "tokens", "tpt")
# Settings that are not checked against NeMo's types, because other checks apply or the types are too narrow.
_UNTYPED: Final = ("input_cfg", "min_tps", "min_tpt", "seed", "shard_seed", "sampler_weights")

# lhotse adds the rank times this number to the seed of a worker process.
_SEEDS_PER_RANK: Final = 100_000

# Keys that NeMo takes from the top level of a multi_config, ignoring values in its sections.
_SHARED: Final = (
    "seed", "shard_seed", "num_workers", "pin_memory", "shuffle", "sampler_fusion", "sampler_weights", "multi_config",
    "metadata_only", "force_finite",
)  # fmt: skip
_TOP_LEVEL_KEYS: Final = (*_SHARED, "cuda_expandable_segments", "use_lhotse")


def read_yaml(path: str | os.PathLike[str]) -> DictConfig | ListConfig:
    """Load a YAML file without resolving its interpolations.

    Raises:
        ConfigError: the file is missing, not a regular file, or not YAML.
    """
    try:
        with open_regular(path) as stream:
            return OmegaConf.load(stream)
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read {path}: it does not exist", code="missing_input") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot read {path}: {one_line(error)}", code="bad_config_file") from error


def resolve(settings: Any, origin: str = "the settings") -> Any:
    """Convert a plain or OmegaConf dict or list to a plain one, and resolve its interpolations.

    Args:
        origin: name of the settings in messages.

    Raises:
        ConfigError: an interpolation cannot be resolved.
    """
    try:
        # An OmegaConf node is not copied first, because it may refer to its parents, as in ${model.sample_rate}.
        node = settings if OmegaConf.is_config(settings) else OmegaConf.create(settings)
        return OmegaConf.to_container(node, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        said, where = str(error).strip().partition("\n")[0], getattr(error, "full_key", None)
        at = f" at {where}" if where else ""
        raise ConfigError(f"{origin} cannot be resolved{at}: {said}", code="bad_config_value") from error


def resolve_settings(cfg: Mapping[str, Any], origin: str = "the settings") -> Settings:
    """Return a resolved copy of the settings, with each file name in ``input_cfg`` replaced by the file's contents.

    Args:
        origin: name of the settings in messages.

    Raises:
        ConfigError: the settings are not a mapping, an interpolation cannot be resolved, or a file cannot be read.
    """
    settings = resolve(cfg, origin)
    refuse((not isinstance(settings, dict), f"{origin} must be a mapping"))
    for section in sections_of(settings):
        _inline_files(section)
    return settings


def _inline_files(settings: Settings) -> None:
    """Replace each file name in ``input_cfg``, at all levels, with the contents of the file."""
    from lhotse.serialization import load_yaml

    if isinstance(path := settings.get("input_cfg"), str):
        # lhotse's reader, which NeMo uses, downloads URLs.
        settings["input_cfg"] = resolve(load_yaml(path) if "://" in path else read_yaml(path), path)
    entries = settings.get("input_cfg")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            _inline_files(entry)


def read_train_settings(path: str | Path, section: str = "train_ds") -> Settings:
    """Read a loader's settings from a YAML file.

    The settings are read from ``section`` at one of its usual places in NeMo recipes. If there is no such section, the
    whole file is used.

    Raises:
        ConfigError: the file cannot be read or has no settings of a loader.
    """
    loaded = read_yaml(path)
    refuse((not isinstance(loaded, DictConfig), f"{path} is a list, not the settings of a loader"),
           code="bad_config_file")  # fmt: skip
    for key in (f"model.{section}.dataset", f"model.{section}", section, f"data.{section}"):
        with suppress(OmegaConfBaseException):  # the key passes through an interpolation that cannot be resolved
            if (found := OmegaConf.select(loaded, key)) is not None:
                refuse((not isinstance(found, DictConfig), f"{path}: {key} must hold the settings of a loader"),
                       code="bad_config_file")  # fmt: skip
                loaded = found
                break
    settings = resolve_settings(loaded, str(path))  # type: ignore[arg-type]
    settings.pop("resumable", None)  # only used by sharmill.training.nemo.datamodule
    named = set().union(*sections_of(settings))
    refuse(
        (named.isdisjoint({"input_cfg", "manifest_filepath", "shar_path", "cuts_path"}),
         f"{path} has no settings of a loader: it needs input_cfg, or a section {section} with input_cfg"),
        code="bad_config_file",
    )  # fmt: skip
    return settings


def check_types(section: Settings) -> None:
    """Check the values of one sampler's settings.

    Raises:
        ConfigError: a value is missing (``???``), has the wrong type, or is out of range.
    """
    if missing := OmegaConf.missing_keys(section):
        raise ConfigError(f"{min(missing)} has no value (???): set it", code="missing_key")
    schema = loader_schema()
    for key in [key for key in section if key in schema and key not in _UNTYPED]:
        try:
            schema[key] = section[key]
        except OmegaConfBaseException as error:
            said = str(error).partition("\n")[0]
            raise ConfigError(f"{key}: {said}", code="bad_config_value") from error
    for key in ("seed", "shard_seed"):
        value = section.get(key)
        is_seed = value is None or is_number(value, int) or value in SEEDS
        refuse((not is_seed, f"{key} must be an integer, trng or randomized, not {value!r}"))
    for name in _LIMITS:
        least: Any = section.get(f"min_{name}")
        most: Any = section.get(f"max_{name}")
        refuse((is_number(least) and is_number(most) and least > most,
                f"min_{name}: {least} is above max_{name}: {most}, so no example passes"))  # fmt: skip
    if (bins := section.get("bucket_duration_bins")) is not None:
        check_bins(bins)


def check_batches(section: Settings) -> None:
    """Check the settings with which one sampler sizes batches and measures examples, in the form that NeMo receives.

    If text is measured in tokens and ``prompt_format`` is not set, it is set to plain with a warning.

    Raises:
        ConfigError: a setting is missing, or has no effect in combination with the others.
    """
    bins, sizes = section.get("bucket_duration_bins") or (), section.get("bucket_batch_size")
    is_2d, in_tokens, prompt = _is_2d(bins), section.get("use_multimodal_sampling"), section.get("prompt_format")
    # A list has one limit per bucket, which NeMo applies only to two-dimensional buckets.
    ratios = {key: section[key] for key in ("max_tps", "max_tpt") if isinstance(section.get(key), list)}
    per_bucket = is_2d and section.get("bucketing_2d_strict_mode", True)
    refuse(
        (sizes is not None and len(sizes) != len(bins),
         f"bucket_batch_size has {len(sizes or ())} numbers for {len(bins)} bucket_duration_bins: give one for each "
         "bin, in the same order"),
        (ratios and not per_bucket,
         f"{' and '.join(ratios)} must be a number: a list needs two-dimensional bucket_duration_bins in strict mode"),
        *((len(limits) != len(bins), f"{key} has {len(limits)} numbers for {len(bins)} buckets: give one for each")
          for key, limits in ratios.items()),
    )  # fmt: skip
    holds = {type_of(entry).holds: entry.get("type") for entry in entries_of(section)}
    if "text" in holds and in_tokens and prompt is None:
        prompt = section["prompt_format"] = "plain"
        log.warning("prompt_format is not set: using plain to count the tokens of entries of type %s", holds["text"])
    if prompt is not None:
        resolve_format(prompt, "prompt_format")
    limit, duration = "batch_tokens" if in_tokens else "batch_duration", "token_equivalent_duration"
    sources = sources_of(section)
    # A token_equivalent_duration in an entry applies only to the entry's conversations.
    set_by_entries = not _has_plain_audio(section) and any(source.get(duration) is not None for source in sources)
    has_duration = set_by_entries or section.get(duration) is not None
    refuse(
        (sizes is None and section.get("batch_size") is None and section.get(limit) is None,
         f"the batch size is not set: set {limit}, batch_size, or bucket_duration_bins and bucket_batch_size"),
        ("text" in holds and not in_tokens,
         f"data of type {holds.get('text')} are measured in tokens: set use_multimodal_sampling: true"),
        ("conversations" in holds and prompt is None and section.get("pretokenize", True),
         f"data of type {holds.get('conversations')} need a prompt_format: set it"),
        (in_tokens and not has_duration and not all(type_of(source).holds == "text" for source in sources),
         "use_multimodal_sampling measures audio in tokens: set token_equivalent_duration, the seconds per token"),
        code="missing_key",
    )  # fmt: skip


def check_tokenizer(sections: Sequence[Settings], tokenizer: Any) -> None:
    """Raise ConfigError if settings count tokens but there is no suitable tokenizer."""
    for section in sections:
        counted = tokenizer is not None and section.get("pretokenize", True)
        limits = [key for key in ("min_tps", "max_tps", "min_tpt", "max_tpt") if section.get(key) is not None]
        if limits and not counted:
            log.warning("%s has no effect without a tokenizer, or with pretokenize: false", ", ".join(limits))
        refuse(
            (section.get("prompt_format") is not None and not hasattr(tokenizer, "text_to_ids"),
             "prompt_format needs a tokenizer of NeMo: pass one with text_to_ids"),
            (section.get("use_multimodal_sampling") and tokenizer is None,
             "use_multimodal_sampling needs a tokenizer: pass one"),
            (_is_2d(section.get("bucket_duration_bins")) and not counted,
             "two-dimensional bucket_duration_bins count tokens: pass a tokenizer, and set pretokenize: true"),
            code="bad_tokenizer",
        )  # fmt: skip


def loader_schema() -> DictConfig:
    """Return NeMo's loader settings with their defaults and types."""
    from nemo.collections.common.data.lhotse.dataloader import LhotseDataLoadingConfig

    return OmegaConf.structured(LhotseDataLoadingConfig)


def check_bins(bins: Any, name: str = "bucket_duration_bins") -> None:
    """Raise ConfigError unless bucket bounds are a list of numbers, or of pairs of numbers, in ascending order."""
    flat = isinstance(bins, list) and all(map(is_number, bins))
    pairs = isinstance(bins, list) and all(
        isinstance(bound, list) and len(bound) == 2 and all(map(is_number, bound)) for bound in bins
    )
    rising = bins and (flat or pairs) and all(before < after for before, after in pairwise(bins))
    refuse((not rising, f"{name} must be an ascending list of numbers, or of [length, tokens], not {bins!r}"))


def resolve_format(name: str, setting: str) -> "type[PromptFormatter]":
    """Return NeMo's prompt formatter with this name.

    Args:
        setting: name of the setting that contains ``name``, for messages.

    Raises:
        ConfigError: there is no such formatter.
    """
    from nemo.collections.common.prompts import PromptFormatter

    try:
        return PromptFormatter.resolve(name)
    except RuntimeError as error:
        raise ConfigError(f"{setting}: {error}", code="unknown_name") from error


def _has_plain_audio(entry: Settings) -> bool:
    """Return True if an entry or a sampler's settings include audio outside conversations."""
    if (holds := type_of(entry).holds) == "conversations":
        return False
    return holds != "text" if entry.get("input_cfg") is None else any(map(_has_plain_audio, entry["input_cfg"]))


def _is_2d(bins: Any) -> bool:
    return bool(bins) and isinstance(bins[0], Sequence)


def prepare_settings(cfg: Mapping[str, Any], rank: int, world_size: int) -> Settings:
    """Return a checked and resolved copy of the settings for NeMo's loader, with the options of sharmill's readers.

    Raises:
        ConfigError: a key is unknown, or some examples would go to several readers or to none.
    """
    from lhotse.dataset.dataloading import resolve_seed

    refuse((not 0 <= rank < world_size, f"rank {rank} must be from 0 to {world_size - 1} for world_size {world_size}"))
    settings = resolve_settings(cfg)
    settings.pop("canonical", None)  # handled by get_dataloader, which prepares each part separately
    in_turn = None
    for section in sections_of(settings):
        check_types(section)
        if section is not settings:
            section["use_lhotse"] = True  # NeMo's classic loaders do not support multi_config
        in_turn = translate(section) or in_turn
    drop_ignored(settings)
    _check_keys(settings)
    if in_turn is not None:
        settings = _split_into_buckets(settings, in_turn)
    sections = sections_of(settings)
    for section in sections:
        _check_entries(section, {key: section.get(key) for key in ("audio_locator_tag", "token_equivalent_duration")})
        _translate_semi_sorted(section, settings)
        check_batches(section)
        # With concurrent bucketing, lhotse hangs forever if the thread that fills the buckets fails.
        section.setdefault("concurrent_bucketing", False)
    common_seed = isinstance(settings.setdefault("seed", 0), int) or world_size == 1
    settings["seed"] = resolve_seed(settings["seed"])
    shard_seed = settings.setdefault("shard_seed", "trng")
    settings.setdefault("shuffle", False)
    sources = [source for section in sections for source in _sources(section, shard_seed)]
    map_style = any(is_map_style(section) for section in sections)
    _check_orders(settings, sources, world_size, map_style=map_style, common_seed=common_seed)
    for section in filter(is_map_style, sections):
        section["force_map_dataset"] = True  # the style must not change when entries are replaced below
    for entry, entry_seed in sources:
        # NeMo does not find audio next to a manifest in an object store, so sharmill reads such entries, even in map
        # style.
        in_store = map_style and any(map(is_stored, texts_in(entry)))
        if (in_store or not map_style) and is_divisible(entry):
            entry |= {"of_type": entry["type"], "type": DIVIDED} | ({"force_finite": True} if in_store else {})
        if is_divided(entry):
            readers = {"seed": settings["seed"], "rank": rank, "world_size": world_size}
            entry |= readers | {"shard_seed": entry_seed, "force_map_dataset": map_style}
    if shard_seed == "randomized" and (map_style or not settings.get("num_workers", 0)):
        # Outside a worker process, lhotse resolves "randomized" to a number that does not depend on the seed.
        settings["shard_seed"] = settings["seed"] + (0 if map_style else _SEEDS_PER_RANK * rank)
    return settings


def _split_into_buckets(settings: Settings, strategy: str) -> Settings:
    """Return settings with one sampler per bucket, and with the strategy at the top level.

    Raises:
        ConfigError: the end of an epoch of a bucket cannot be determined.
    """
    refuse(
        (is_map_style(settings) or not all(map(is_divisible, sources_of(settings))),
         f"bucketing_strategy: {strategy} reads the manifests one after the other as streams: set "
         "force_iterable_dataset: true and remove pipes, slice_length and extra_fields; or set use_lhotse: true"),
    )  # fmt: skip
    (group,) = settings.pop("input_cfg")
    shared = {key: settings.pop(key) for key in _TOP_LEVEL_KEYS if key in settings}
    limits = [settings.get(key) for key in ("min_duration", "max_duration")]
    sections = {
        f"bucket{number}": copy.deepcopy(settings)
        | {"batch_size": entry.pop("batch_size", settings.get("batch_size")), "input_cfg": [entry | {"limits": limits}]}
        for number, entry in enumerate(group["input_cfg"], 1)
    }
    return shared | sections | {"multi_config": True, "bucketing_strategy": strategy}


def _translate_semi_sorted(section: Settings, settings: Settings) -> None:
    """Translate semi-sorted batching: keep ``randomization_factor`` in map style, or use buckets for streams."""
    factor = section.pop("randomization_factor", 0.1)
    if not section.pop("use_semi_sorted_batching", False):
        return
    map_style = is_map_style(section)
    how = "sorts whole epochs, as with force_finite: true" if map_style else "is read as use_bucketing: true"
    log.warning("use_semi_sorted_batching %s", how)
    refuse(
        (not is_number(factor) or factor < 0, f"randomization_factor must be at least 0, not {factor!r}"),
        (map_style and section.get("batch_size") is None, "use_semi_sorted_batching needs batch_size: set it"),
    )
    if not map_style:
        count = section.get("num_buckets", max(2, round(1 / (factor or 0.1))))
        section |= {"use_bucketing": True, "num_buckets": count}
        return
    section |= {"randomization_factor": factor, "use_bucketing": False}
    settings["force_finite"] = True  # sorting requires the durations of a whole epoch


def sections_of(settings: Settings) -> list[Settings]:
    """Return the settings of each sampler: the sections of a ``multi_config``, or the settings themselves."""
    if not settings.get("multi_config", False):
        return [settings]
    return [settings[name] for name in section_names(settings)]


def section_names(settings: Settings) -> list[str]:
    """Return the names of the samplers of a ``multi_config``."""
    return [key for key, value in settings.items() if isinstance(value, dict) and key != "sampler_weights"]


def sources_of(settings: Settings) -> list[Settings]:
    """Return the entries that read data themselves, at all levels and of all samplers."""
    return [source for section in sections_of(settings) for source, _ in _sources(section, 0)]


def tag_names(settings: Settings) -> list[str]:
    """Return the names of all tags that entries set, at all levels, each once and in order."""
    return list(dict.fromkeys(name for entry in entries_of(settings) for name in entry.get("tags") or ()))


def entries_of(settings: Settings) -> Iterator[Settings]:
    """Yield all entries at all levels, including groups and conversions."""
    for section in sections_of(settings):
        for entry in section.get("input_cfg") or ():
            yield entry
            yield from entries_of(entry)


def _check_keys(settings: Settings) -> None:
    known = [*loader_schema(), "use_lhotse", "bucketing_strategy", "use_semi_sorted_batching", "randomization_factor"]
    sections = sections_of(settings)
    at_top = [key for key, value in settings.items() if not any(value is section for section in sections)]
    for key in (key for section in (at_top, *sections) for key in section if key not in known):
        hint = nearest(key, [*known, *CLASSIC_KEY_HANDLING], "; see docs/training.md for a list of settings")
        where = ": it belongs in the entries of input_cfg" if key in ENTRY_KEYS else hint
        raise ConfigError(f"the loader has no setting {key!r}{where}", code="unknown_key")
    if not settings.get("multi_config", False):
        return
    # NeMo silently ignores keys at the wrong level.
    fusion, names = settings.get("sampler_fusion", _FUSIONS[0]), section_names(settings)
    weights = settings.get("sampler_weights")
    weighted = isinstance(weights, dict) and set(weights) == set(names) and all(map(is_number, weights.values()))
    misplaced = [key for key in at_top if key not in _TOP_LEVEL_KEYS]
    shared = [
        key for key in _SHARED if any(section.get(key, settings.get(key)) != settings.get(key) for section in sections)
    ]
    refuse((not sections, "multi_config has no sections: add one per sampler, each with its own input_cfg"),
           code="missing_key")  # fmt: skip
    refuse(
        (misplaced,
         f"with multi_config, {', '.join(misplaced)} has no effect at the top level: set it in each section"),
        (fusion not in _FUSIONS, f"sampler_fusion must be one of {', '.join(_FUSIONS)}, not {fusion!r}"),
        (weights is not None and not weighted,
         f"sampler_weights must have a number for each of {', '.join(names)}, not {weights!r}"),
        (shared, f"with multi_config, {', '.join(shared)} has no effect in a section: set it at the top level"),
    )  # fmt: skip


def _check_entries(settings: Settings, handed_down: Settings) -> None:
    """Check the entries at all levels, because NeMo may misinterpret an entry with a misspelt key."""
    from nemo.collections.common.data.lhotse.cutset import get_known_config_data_types

    types = [*get_known_config_data_types(), "sharmill", "tts_text"]
    entries = settings.get("input_cfg")
    listed = entries is None or (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries))
    refuse((not listed, "input_cfg must be a list of entries, each with a type"))
    for entry in entries or ():
        if (kind := entry.get("type")) not in types:
            raise ConfigError(f"input_cfg: unknown type {kind!r}{nearest(str(kind), types)}", code="unknown_name")
        check_entry(entry, handed_down)
        _check_entries(entry, {**handed_down, **entry})


def _sources(settings: Settings, shard_seed: int | str) -> Iterator[tuple[Settings, int | str]]:
    """Yield each entry that reads data with its shard seed, which may be inherited from the enclosing groups."""
    shard_seed = settings.get("shard_seed", shard_seed)
    if settings.get("input_cfg") is None:
        yield settings, shard_seed
    for entry in settings.get("input_cfg") or ():
        yield from _sources(entry, shard_seed)


def is_map_style(section: Settings) -> bool:
    """Return True if NeMo, by its own rules, would sample in the main process (map style)."""
    if section.get("force_map_dataset", False) or section.get("force_iterable_dataset", False):
        return bool(section.get("force_map_dataset", False))
    entry, _ = next(_sources(section, 0), ({}, 0))
    refuse((not entry, "input_cfg has no entries: add at least one"), code="missing_key")
    return not (type_of(entry).is_stream or entry.get("shar_path") or entry.get("tarred_audio_filepaths"))


def _check_orders(
    settings: Settings,
    sources: list[tuple[Settings, int | str]],
    world_size: int,
    *,
    map_style: bool,
    common_seed: bool,
) -> None:
    """Raise ConfigError if some examples would go to several readers or to none.

    In map style, all ranks draw the same order, and each rank's sampler takes every n-th batch. Readers of streams take
    their parts of a common order. Data that cannot be divided is read completely by every worker.

    Args:
        sources: the entries that read data, each with its shard seed.
        common_seed: all ranks have the same seed.
    """
    shuffle, finite = settings["shuffle"], settings.get("force_finite", False) or settings.get("metadata_only", False)
    refuse(
        (finite and any(entry.get("passes", 1) > 1 and (map_style or not is_divisible(entry)) for entry, _ in sources),
         "bucketing_weights can repeat data in a finite pass only as a stream: set force_iterable_dataset: true, and "
         "remove pipes, slice_length and extra_fields"),
    )  # fmt: skip
    if map_style:
        seeds = {settings["shard_seed"], *(seed for _, seed in sources)}
        drawn = world_size > 1 and (shuffle or len(sources) > 1)
        refuse(
            (drawn and "trng" in seeds,
             "shard_seed: trng gives each rank a different order, so the map-style sampler would repeat some samples "
             "and miss others: set shard_seed to randomized or a number"),
            (drawn and "randomized" in seeds and not common_seed,
             "shard_seed: randomized needs the same seed on all ranks: set seed to a number"),
            (not common_seed and any("randomization_factor" in section for section in sections_of(settings)),
             "use_semi_sorted_batching needs the same seed on all ranks: set seed to a number"),
            code="split_wrong",
        )  # fmt: skip
        return
    readers = world_size * max(1, settings.get("num_workers", 0))
    others = [
        (str(entry.get("type")), seed)
        for entry, seed in sources
        if not (entry.get("type") == "sharmill" or is_divisible(entry))
    ]
    ours = [seed for entry, seed in sources if entry.get("type") == "sharmill" or is_divisible(entry)]
    kinds = ", ".join(sorted({kind for kind, _ in others}))
    in_same_order = ", ".join(sorted({kind for kind, seed in others if isinstance(seed, int) or not shuffle}))
    refuse(
        (not common_seed and shuffle and any(finite or seed == "randomized" for seed in ours),
         "all ranks must share one order: set seed to a number, the same on all ranks"),
        (finite and readers > 1 and others,
         f"with force_finite, each of {readers} readers (ranks x workers) would read all data of type {kinds}: set "
         "force_map_dataset: true"),
        (readers > 1 and in_same_order,
         f"each of {readers} readers (ranks x workers) would read the data of type {in_same_order} in the same order: "
         "set shuffle: true, and shard_seed to randomized or trng (entries may have their own)"),
        code="split_wrong",
    )  # fmt: skip

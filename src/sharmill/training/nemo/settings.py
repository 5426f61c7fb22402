"""The settings of a training loader, read and checked, with the readers of every entry of ``type: sharmill``.

NeMo's loader ignores keys that it does not know, and hands samples to ranks twice, or not at all, under settings that
look harmless; both are errors here.
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
    OF_ENTRY,
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
# Checked here, or accepted where NeMo's own type is too narrow.
_UNTYPED: Final = ("input_cfg", "min_tps", "min_tpt", "seed", "shard_seed", "sampler_weights")

# The number that lhotse adds to the seed of a worker process, per rank.
_SEEDS_PER_RANK: Final = 100_000

# Keys that NeMo takes from the top level for all sections of a multi_config, whatever these say.
_SHARED: Final = (
    "seed", "shard_seed", "num_workers", "pin_memory", "shuffle", "sampler_fusion", "sampler_weights", "multi_config",
    "metadata_only", "force_finite",
)  # fmt: skip
_OF_TOP: Final = (*_SHARED, "cuda_expandable_segments", "use_lhotse")


def read_yaml(path: str | os.PathLike[str]) -> DictConfig | ListConfig:
    """Return what a YAML file has, with its interpolations still open.

    Raises:
        ConfigError: it is not there, not a regular file, or no YAML.
    """
    try:
        with open_regular(path) as stream:
            return OmegaConf.load(stream)
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read {path}: it is not there", code="missing_input") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot read {path}: {one_line(error)}", code="bad_config_file") from error


def resolve(settings: Any, origin: str = "the settings") -> Any:
    """Return a dict or list, plain or of OmegaConf, with its interpolations in place; ``origin`` names it in messages.

    Raises:
        ConfigError: an interpolation leads nowhere.
    """
    try:
        # A part of a larger configuration refers to it: ${model.sample_rate}.
        node = settings if OmegaConf.is_config(settings) else OmegaConf.create(settings)
        return OmegaConf.to_container(node, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        said, where = str(error).strip().partition("\n")[0], getattr(error, "full_key", None)
        at = f" at {where}" if where else ""
        raise ConfigError(f"{origin} cannot be resolved{at}: {said}", code="bad_config_value") from error


def resolve_settings(cfg: Mapping[str, Any], origin: str = "the settings") -> Settings:
    """Return a copy of the settings, with the contents of the files that ``input_cfg`` names in their place.

    Args:
        origin: names them in messages.

    Raises:
        ConfigError: they are no mapping, an interpolation leads nowhere, or a file that they name cannot be read.
    """
    settings = resolve(cfg, origin)
    refuse((not isinstance(settings, dict), f"{origin} are no mapping of settings"))
    for section in sections_of(settings):
        _inline_files(section)
    return settings


def _inline_files(settings: Settings) -> None:
    """Put the contents of a file that ``input_cfg`` names in its place, at all levels."""
    from lhotse.serialization import load_yaml

    if isinstance(path := settings.get("input_cfg"), str):
        # NeMo's own reader fetches an address.
        settings["input_cfg"] = resolve(load_yaml(path) if "://" in path else read_yaml(path), path)
    entries = settings.get("input_cfg")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            _inline_files(entry)


def read_train_settings(path: str | Path, section: str = "train_ds") -> Settings:
    """Return a loader's settings in a YAML file: those below ``section`` where NeMo's recipes have it, or all of it.

    Raises:
        ConfigError: it is no such file.
    """
    loaded = read_yaml(path)
    refuse((not isinstance(loaded, DictConfig), f"{path} is a list, not the settings of a loader"),
           code="bad_config_file")  # fmt: skip
    for key in (f"model.{section}.dataset", f"model.{section}", section, f"data.{section}"):
        with suppress(OmegaConfBaseException):  # an interpolation on the way that leads nowhere
            if (found := OmegaConf.select(loaded, key)) is not None:
                refuse((not isinstance(found, DictConfig), f"{path}: {key} has no settings of a loader"),
                       code="bad_config_file")  # fmt: skip
                loaded = found
                break
    settings = resolve_settings(loaded, str(path))  # type: ignore[arg-type]
    settings.pop("resumable", None)  # is for sharmill.training.nemo.datamodule
    named = set().union(*sections_of(settings))
    refuse(
        (named.isdisjoint({"input_cfg", "manifest_filepath", "shar_path", "cuts_path"}),
         f"{path} has no settings of a loader: neither input_cfg nor {section} with one"),
        code="bad_config_file",
    )  # fmt: skip
    return settings


def check_types(section: Settings) -> None:
    """Check the settings of one sampler as they are written.

    Raises:
        ConfigError: a value that is left open (``???``), of another type than the setting's, or out of range.
    """
    if missing := OmegaConf.missing_keys(section):
        raise ConfigError(f"{min(missing)} is ???: set it", code="missing_key")
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
        refuse((not is_seed, f"{key} is a whole number, trng or randomized, not {value!r}"))
    for name in _LIMITS:
        least: Any = section.get(f"min_{name}")
        most: Any = section.get(f"max_{name}")
        refuse((is_number(least) and is_number(most) and least > most,
                f"min_{name}: {least} is above max_{name}: {most}, so that nothing passes"))  # fmt: skip
    if (bins := section.get("bucket_duration_bins")) is not None:
        check_bins(bins)


def check_batches(section: Settings) -> None:
    """Check how the settings of one sampler, as NeMo gets them, size batches and count examples.

    Text that is counted in tokens gets the ``prompt_format`` plain if there is none, with a warning.

    Raises:
        ConfigError: a setting that is missing, or has no effect beside the others.
    """
    bins, sizes = section.get("bucket_duration_bins") or (), section.get("bucket_batch_size")
    in_two, in_tokens, prompt = _in_two(bins), section.get("use_multimodal_sampling"), section.get("prompt_format")
    # A list of limits is one for each bucket: NeMo looks at it with buckets of two dimensions alone.
    ratios = {key: section[key] for key in ("max_tps", "max_tpt") if isinstance(section.get(key), list)}
    of_buckets = in_two and section.get("bucketing_2d_strict_mode", True)
    refuse(
        (sizes is not None and len(sizes) != len(bins),
         f"bucket_batch_size has {len(sizes or ())} numbers for {len(bins)} bucket_duration_bins: one for each, the "
         "last for the longest"),
        (ratios and not of_buckets,
         f"{' and '.join(ratios)} is a number; a list of them is for bucket_duration_bins of two dimensions in strict "
         "mode"),
        *((len(limits) != len(bins), f"{key} has {len(limits)} numbers for {len(bins)} buckets")
          for key, limits in ratios.items()),
    )  # fmt: skip
    holds = {type_of(entry).holds: entry.get("type") for entry in entries_of(section)}
    if "text" in holds and in_tokens and prompt is None:
        prompt = section["prompt_format"] = "plain"
        log.warning("prompt_format is plain, since it is not set: it counts the tokens of type %s", holds["text"])
    if prompt is not None:
        resolve_format(prompt, "prompt_format")
    limit, duration = "batch_tokens" if in_tokens else "batch_duration", "token_equivalent_duration"
    sources = sources_of(section)
    # The value of an entry is for its conversations alone.
    of_entries = not _has_plain_audio(section) and any(source.get(duration) is not None for source in sources)
    has_duration = of_entries or section.get(duration) is not None
    refuse(
        (sizes is None and section.get("batch_size") is None and section.get(limit) is None,
         f"the size of batches is not set: {limit}, batch_size, or bucket_duration_bins and bucket_batch_size"),
        ("text" in holds and not in_tokens,
         f"data of type {holds.get('text')} are counted in tokens: set use_multimodal_sampling: true"),
        ("conversations" in holds and prompt is None and section.get("pretokenize", True),
         f"data of type {holds.get('conversations')} need prompt_format"),
        (in_tokens and not has_duration and not all(type_of(source).holds == "text" for source in sources),
         "with use_multimodal_sampling, audio is counted in tokens: set token_equivalent_duration, the seconds of one"),
        code="missing_key",
    )  # fmt: skip


def check_tokenizer(sections: Sequence[Settings], tokenizer: Any) -> None:
    """Raise ConfigError where settings count tokens that no tokenizer makes."""
    for section in sections:
        counted = tokenizer is not None and section.get("pretokenize", True)
        limits = [key for key in ("min_tps", "max_tps", "min_tpt", "max_tpt") if section.get(key) is not None]
        if limits and not counted:
            log.warning("%s has no effect without a tokenizer, or with pretokenize: false", ", ".join(limits))
        refuse(
            (section.get("prompt_format") is not None and not hasattr(tokenizer, "text_to_ids"),
             "prompt_format needs a tokenizer of NeMo, one with text_to_ids"),
            (section.get("use_multimodal_sampling") and tokenizer is None,
             "use_multimodal_sampling needs a tokenizer"),
            (_in_two(section.get("bucket_duration_bins")) and not counted,
             "bucket_duration_bins of two dimensions count tokens: they need a tokenizer, and pretokenize: true"),
            code="bad_tokenizer",
        )  # fmt: skip


def loader_schema() -> DictConfig:
    """Return NeMo's settings of its loader, with their defaults and types."""
    from nemo.collections.common.data.lhotse.dataloader import LhotseDataLoadingConfig

    return OmegaConf.structured(LhotseDataLoadingConfig)


def check_bins(bins: Any, name: str = "bucket_duration_bins") -> None:
    """Raise ConfigError for bounds of buckets that are no list of numbers, or of pairs, in ascending order."""
    flat = isinstance(bins, list) and all(map(is_number, bins))
    pairs = isinstance(bins, list) and all(
        isinstance(bound, list) and len(bound) == 2 and all(map(is_number, bound)) for bound in bins
    )
    rising = bins and (flat or pairs) and all(before < after for before, after in pairwise(bins))
    told = f"{name} is a list of numbers, or of [length, tokens], each above the one before, not {bins!r}"
    refuse((not rising, told))


def resolve_format(name: str, setting: str) -> "type[PromptFormatter]":
    """Return NeMo's prompt formatter of a name, which a setting has.

    Raises:
        ConfigError: there is none.
    """
    from nemo.collections.common.prompts import PromptFormatter

    try:
        return PromptFormatter.resolve(name)
    except RuntimeError as error:
        raise ConfigError(f"{setting}: {error}", code="unknown_name") from error


def _has_plain_audio(entry: Settings) -> bool:
    """Return True if an entry, or the settings of a sampler, has audio outside conversations."""
    if (holds := type_of(entry).holds) == "conversations":
        return False
    return holds != "text" if entry.get("input_cfg") is None else any(map(_has_plain_audio, entry["input_cfg"]))


def _in_two(bins: Any) -> bool:
    return bool(bins) and isinstance(bins[0], Sequence)


def prepare_settings(cfg: Mapping[str, Any], rank: int, world_size: int) -> Settings:
    """Return the settings for NeMo's loader: a checked, resolved copy, in which every sharmill entry has its readers.

    Raises:
        ConfigError: an unknown key, or settings under which ranks would get samples twice or not at all.
    """
    from lhotse.dataset.dataloading import resolve_seed

    refuse((not 0 <= rank < world_size, f"there is no rank {rank} among {world_size} data-parallel ranks"))
    settings = resolve_settings(cfg)
    settings.pop("canonical", None)  # of get_dataloader, which prepares each part by itself
    in_turn = None
    for section in sections_of(settings):
        check_types(section)
        if section is not settings:
            section["use_lhotse"] = True  # NeMo's classic loaders know no multi_config
        in_turn = translate(section) or in_turn
    drop_ignored(settings)
    _check_keys(settings)
    if in_turn is not None:
        settings = _take_in_turn(settings, in_turn)
    sections = sections_of(settings)
    for section in sections:
        _check_entries(section, {key: section.get(key) for key in ("audio_locator_tag", "token_equivalent_duration")})
        _translate_semi_sorted(section, settings)
        check_batches(section)
        # lhotse loses an error in the thread that would fill the buckets, and waits for it for ever.
        section.setdefault("concurrent_bucketing", False)
    common_seed = isinstance(settings.setdefault("seed", 0), int) or world_size == 1
    settings["seed"] = resolve_seed(settings["seed"])
    shard_seed = settings.setdefault("shard_seed", "trng")
    settings.setdefault("shuffle", False)
    sources = [source for section in sections for source in _sources(section, shard_seed)]
    map_style = any(is_map_style(section) for section in sections)
    _check_orders(settings, sources, world_size, map_style=map_style, common_seed=common_seed)
    for section in filter(is_map_style, sections):
        section["force_map_dataset"] = True  # whatever becomes of its entries
    for entry, entry_seed in sources:
        # NeMo does not find audio beside a manifest in a store, which is no stream for all that.
        in_store = map_style and any(map(is_stored, texts_in(entry)))
        if (in_store or not map_style) and is_divisible(entry):
            entry |= {"of_type": entry["type"], "type": DIVIDED} | ({"force_finite": True} if in_store else {})
        if is_divided(entry):
            readers = {"seed": settings["seed"], "rank": rank, "world_size": world_size}
            entry |= readers | {"shard_seed": entry_seed, "force_map_dataset": map_style}
    if shard_seed == "randomized" and (map_style or not settings.get("num_workers", 0)):
        # Outside a worker process, lhotse takes for it a number that is the same for every seed.
        settings["shard_seed"] = settings["seed"] + (0 if map_style else _SEEDS_PER_RANK * rank)
    return settings


def _take_in_turn(settings: Settings, strategy: str) -> Settings:
    """Return settings with a sampler for each bucket, and the strategy beside them.

    Raises:
        ConfigError: it is not known where an epoch of a bucket ends.
    """
    refuse(
        (is_map_style(settings) or not all(map(is_divisible, sources_of(settings))),
         f"bucketing_strategy: {strategy} takes one manifest after the other, as a stream: set "
         "force_iterable_dataset: true, without pipes, slice_length and extra_fields; or leave it out, or set "
         "use_lhotse: true"),
    )  # fmt: skip
    (group,) = settings.pop("input_cfg")
    shared = {key: settings.pop(key) for key in _OF_TOP if key in settings}
    limits = [settings.get(key) for key in ("min_duration", "max_duration")]
    sections = {
        f"bucket{number}": copy.deepcopy(settings)
        | {"batch_size": entry.pop("batch_size", settings.get("batch_size")), "input_cfg": [entry | {"limits": limits}]}
        for number, entry in enumerate(group["input_cfg"], 1)
    }
    return shared | sections | {"multi_config": True, "bucketing_strategy": strategy}


def _translate_semi_sorted(section: Settings, settings: Settings) -> None:
    """Leave ``randomization_factor`` where NeMo's own sampler makes the batches, in map style; else make buckets."""
    factor = section.pop("randomization_factor", 0.1)
    if not section.pop("use_semi_sorted_batching", False):
        return
    map_style = is_map_style(section)
    how = "sorts whole epochs, as with force_finite: true" if map_style else "is read as use_bucketing: true"
    log.warning("use_semi_sorted_batching %s", how)
    refuse(
        (not is_number(factor) or factor < 0, f"randomization_factor is a number of at least 0, not {factor!r}"),
        (map_style and section.get("batch_size") is None, "use_semi_sorted_batching needs batch_size"),
    )
    if not map_style:
        count = section.get("num_buckets", max(2, round(1 / (factor or 0.1))))
        section |= {"use_bucketing": True, "num_buckets": count}
        return
    section |= {"randomization_factor": factor, "use_bucketing": False}
    settings["force_finite"] = True  # all durations of an epoch are sorted


def sections_of(settings: Settings) -> list[Settings]:
    """Return the settings of each sampler: those of a ``multi_config``, or the settings themselves."""
    if not settings.get("multi_config", False):
        return [settings]
    return [settings[name] for name in section_names(settings)]


def section_names(settings: Settings) -> list[str]:
    """Return the names of the samplers of a ``multi_config``."""
    return [key for key, value in settings.items() if isinstance(value, dict) and key != "sampler_weights"]


def sources_of(settings: Settings) -> list[Settings]:
    """Return all entries that read data, of all samplers."""
    return [source for section in sections_of(settings) for source, _ in _sources(section, 0)]


def tag_names(settings: Settings) -> list[str]:
    """Return the names of all tags that entries give their data, at all levels, in order."""
    return list(dict.fromkeys(name for entry in entries_of(settings) for name in entry.get("tags") or ()))


def entries_of(settings: Settings) -> Iterator[Settings]:
    """Yield all entries at all levels, groups and conversions as well."""
    for section in sections_of(settings):
        for entry in section.get("input_cfg") or ():
            yield entry
            yield from entries_of(entry)


def _check_keys(settings: Settings) -> None:
    known = [*loader_schema(), "use_lhotse", "bucketing_strategy", "use_semi_sorted_batching", "randomization_factor"]
    sections = sections_of(settings)
    at_top = [key for key, value in settings.items() if not any(value is section for section in sections)]
    for key in (key for section in (at_top, *sections) for key in section if key not in known):
        hint = nearest(key, [*known, *CLASSIC_KEY_HANDLING], "; docs/training.md says where all of them are listed")
        where = ": it belongs to the entries of input_cfg" if key in OF_ENTRY else hint
        raise ConfigError(f"the loader has no setting {key!r}{where}", code="unknown_key")
    if not settings.get("multi_config", False):
        return
    # NeMo would ignore a key at the wrong level.
    fusion, names = settings.get("sampler_fusion", _FUSIONS[0]), section_names(settings)
    weights = settings.get("sampler_weights")
    weighted = isinstance(weights, dict) and set(weights) == set(names) and all(map(is_number, weights.values()))
    misplaced = [key for key in at_top if key not in _OF_TOP]
    shared = [
        key for key in _SHARED if any(section.get(key, settings.get(key)) != settings.get(key) for section in sections)
    ]
    refuse((not sections, "multi_config has no sections: each sampler has one, with an input_cfg of its own"),
           code="missing_key")  # fmt: skip
    refuse(
        (misplaced,
         f"with multi_config, {', '.join(misplaced)} has no effect at the top level: set it in each section"),
        (fusion not in _FUSIONS, f"sampler_fusion is one of {', '.join(_FUSIONS)}, not {fusion!r}"),
        (weights is not None and not weighted,
         f"sampler_weights has a number for each of {', '.join(names)}, not {weights!r}"),
        (shared, f"with multi_config, {', '.join(shared)} has no effect in a section: set it at the top level"),
    )  # fmt: skip


def _check_entries(settings: Settings, handed_down: Settings) -> None:
    """Check the entries at all levels: NeMo takes a group for what it is not where a key is misspelt."""
    from nemo.collections.common.data.lhotse.cutset import get_known_config_data_types

    types = [*get_known_config_data_types(), "sharmill", "tts_text"]
    entries = settings.get("input_cfg")
    listed = entries is None or (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries))
    refuse((not listed, "input_cfg is a list of entries, each with its type"))
    for entry in entries or ():
        if (kind := entry.get("type")) not in types:
            raise ConfigError(f"input_cfg has no type {kind!r}{nearest(str(kind), types)}", code="unknown_name")
        check_entry(entry, handed_down)
        _check_entries(entry, {**handed_down, **entry})


def _sources(settings: Settings, shard_seed: int | str) -> Iterator[tuple[Settings, int | str]]:
    """Yield the entries that read data, each with its shard seed: its own, or that of the nearest group around it."""
    shard_seed = settings.get("shard_seed", shard_seed)
    if settings.get("input_cfg") is None:
        yield settings, shard_seed
    for entry in settings.get("input_cfg") or ():
        yield from _sources(entry, shard_seed)


def is_map_style(section: Settings) -> bool:
    """Return True if NeMo samples in the main process, as it decides it."""
    if section.get("force_map_dataset", False) or section.get("force_iterable_dataset", False):
        return bool(section.get("force_map_dataset", False))
    entry, _ = next(_sources(section, 0), ({}, 0))
    refuse((not entry, "input_cfg has no entries"), code="missing_key")
    return not (type_of(entry).is_stream or entry.get("shar_path") or entry.get("tarred_audio_filepaths"))


def _check_orders(
    settings: Settings,
    sources: list[tuple[Settings, int | str]],
    world_size: int,
    *,
    map_style: bool,
    common_seed: bool,
) -> None:
    """Raise ConfigError where readers would get examples twice, or not at all.

    In map style all ranks draw the same order, and the sampler of each takes every n-th batch of it. Of streams,
    readers take their parts of one order; of data that cannot be divided every worker reads everything.

    Args:
        sources: the entries that read data, each with its shard seed.
        common_seed: all ranks have the same seed.
    """
    shuffle, finite = settings["shuffle"], settings.get("force_finite", False) or settings.get("metadata_only", False)
    refuse(
        (finite and any(entry.get("passes", 1) > 1 and (map_style or not is_divisible(entry)) for entry, _ in sources),
         "bucketing_weights repeat data of a finite pass as a stream: set force_iterable_dataset: true, without pipes, "
         "slice_length and extra_fields"),
    )  # fmt: skip
    if map_style:
        seeds = {settings["shard_seed"], *(seed for _, seed in sources)}
        drawn = world_size > 1 and (shuffle or len(sources) > 1)
        refuse(
            (drawn and "trng" in seeds,
             "shard_seed: trng makes a different order on each rank, of which the map-style sampler would take samples "
             "twice and miss others: set shard_seed to randomized or a number"),
            (drawn and "randomized" in seeds and not common_seed,
             "shard_seed: randomized needs a seed that all ranks share: set seed to a number"),
            (not common_seed and any("randomization_factor" in section for section in sections_of(settings)),
             "use_semi_sorted_batching needs a seed that all ranks share: set seed to a number"),
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
    alike = ", ".join(sorted({kind for kind, seed in others if isinstance(seed, int) or not shuffle}))
    refuse(
        (not common_seed and shuffle and any(finite or seed == "randomized" for seed in ours),
         "the ranks share one order: set seed to a number, the same on all of them"),
        (finite and readers > 1 and others,
         f"with force_finite, each of {readers} readers (ranks x workers) would read all data of type {kinds}: set "
         "force_map_dataset: true"),
        (readers > 1 and alike,
         f"each of {readers} readers (ranks x workers) would read the data of type {alike} in the same order: set "
         "shuffle: true, and a shard_seed of randomized or trng (an entry can have its own)"),
        code="split_wrong",
    )  # fmt: skip

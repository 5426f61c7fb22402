"""The settings of a training loader, checked, with the readers of every entry of ``type: sharmill``.

NeMo's loader ignores keys that it does not know, and hands samples to ranks twice, or not at all, under settings that
look harmless; both are errors here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from sharmill.errors import ConfigError
from sharmill.registry import nearest
from sharmill.training.nemo.classic import FATES, drop_ignored, translate
from sharmill.training.nemo.entry_keys import OF_ENTRY, check_keys_of_entry
from sharmill.training.nemo.setting_values import check_batches, check_fusion, check_types
from sharmill.training.yaml_files import read_yaml, resolve

Settings = dict[str, Any]

# What lhotse adds to the seed of a worker process, per rank.
_SEEDS_PER_RANK: Final = 100_000

# The type of an entry of NeMo's whose examples our reader divides among ranks and workers, and the types that can be.
DIVIDED: Final = "sharmill_divided"
_DIVISIBLE: Final = frozenset({
    "txt", "txt_jsonl", "txt_pair", "nemo_sft_jsonl", "multimodal_conversation", "share_gpt", "nemo", "nemo_tarred",
    "lhotse_shar", "tts_text",
})  # fmt: skip

# Types that NeMo reads as a stream wherever they lie. The others are streams if they are tarred.
_STREAMS: Final = frozenset({
    "sharmill", DIVIDED, "txt", "txt_jsonl", "txt_pair", "nemo_sft_jsonl", "multimodal_conversation", "share_gpt",
    "share_gpt_webdataset", "parquet", "tts_text",
})  # fmt: skip

# What NeMo takes from the top level for all sections of a multi_config, over what they say themselves.
_SHARED: Final = (
    "seed", "shard_seed", "num_workers", "pin_memory", "shuffle", "sampler_fusion", "sampler_weights", "multi_config",
    "metadata_only", "force_finite",
)  # fmt: skip
_OF_TOP: Final = (*_SHARED, "cuda_expandable_segments", "use_lhotse")


def prepare_settings(cfg: Mapping[str, Any], rank: int, world_size: int) -> Settings:
    """Return the settings for NeMo's loader: a checked, resolved copy, in which every sharmill entry has its readers.

    Raises:
        ConfigError: an unknown key, or settings under which ranks would get samples twice or not at all.
    """
    from lhotse.dataset.dataloading import resolve_seed

    if not 0 <= rank < world_size:
        raise ConfigError(f"there is no rank {rank} among {world_size} data-parallel ranks", code="bad_config_value")
    settings = resolve_settings(cfg)
    for section in sections_of(settings):
        check_types(section)
        translate(section)
        # The loader looks at these itself.
        for key in (*float_limits(section), "bucketing_strategy"):
            section.pop(key, None)
    drop_ignored(settings)
    _check_keys(settings)
    sections = sections_of(settings)
    for section in sections:
        _check_entries(section, {key: section.get(key) for key in ("audio_locator_tag", "token_equivalent_duration")})
        check_batches(section, sources_of(section), [str(entry.get("type")) for entry in _entries(section)])
        # lhotse loses an error in the thread that would fill the buckets, and waits for it for ever.
        section.setdefault("concurrent_bucketing", False)
    common_seed = isinstance(settings.setdefault("seed", 0), int) or world_size == 1
    settings["seed"] = resolve_seed(settings["seed"])
    shard_seed = settings.setdefault("shard_seed", "trng")
    settings.setdefault("shuffle", False)
    sources = [source for section in sections for source in _sources(section, shard_seed)]
    map_style = any(is_map_style(section) for section in sections)
    if map_style:
        _check_map_style(settings, sources, world_size, common_seed)
    else:
        _check_streams(settings, sources, world_size, common_seed)
    for entry, entry_seed in sources:
        if not map_style and is_divisible(entry):
            entry |= {"of_type": entry["type"], "type": DIVIDED}
        if entry.get("type") in ("sharmill", DIVIDED):
            readers = {"seed": settings["seed"], "rank": rank, "world_size": world_size}
            entry |= readers | {"shard_seed": entry_seed, "force_map_dataset": map_style}
    if shard_seed == "randomized" and (map_style or not settings.get("num_workers", 0)):
        # Outside a worker process, lhotse takes for it a number that is the same for every seed.
        settings["shard_seed"] = settings["seed"] + (0 if map_style else _SEEDS_PER_RANK * rank)
    return settings


def float_limits(section: Mapping[str, Any]) -> dict[str, float]:
    """Return the lower limits of tokens of a sampler that NeMo does not take, which takes whole numbers only."""
    return {key: section[key] for key in ("min_tps", "min_tpt") if isinstance(section.get(key), float)}


def limit_filters(section: Mapping[str, Any]) -> list[Callable[[Any], bool]]:
    """Return NeMo's filters for these limits; they look at tokens, which a tokenizer has made before."""
    from nemo.collections.common.data.lhotse.sampling import TokenPerSecondFilter, TokenPerTokenFilter

    if section.get("pretokenize", True) is False:
        return []
    filters = {"min_tps": TokenPerSecondFilter, "min_tpt": TokenPerTokenFilter}
    return [filters[key](limit, math.inf) for key, limit in float_limits(section).items()]


def resolve_settings(cfg: Mapping[str, Any], origin: str = "the settings") -> Settings:
    """Return a copy of the settings, with the contents of the files that ``input_cfg`` names in their place.

    Args:
        origin: names them in messages.

    Raises:
        ConfigError: they are no mapping, an interpolation leads nowhere, or a file that they name cannot be read.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # A part of a larger configuration refers to it: ${model.sample_rate}.
        node = cfg if OmegaConf.is_config(cfg) else OmegaConf.create(cfg)  # type: ignore[call-overload]
    except OmegaConfBaseException as error:
        said = str(error).partition("\n")[0]
        raise ConfigError(f"{origin} cannot be read: {said}", code="bad_config_value") from error
    settings: Settings = resolve(node, origin)  # type: ignore[arg-type]
    if not isinstance(settings, dict):
        raise ConfigError(f"{origin} are no mapping of settings", code="bad_config_value")
    for section in sections_of(settings):
        _inline_files(section)
    return settings


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


def types_in(settings: Settings) -> list[str]:
    """Return the types of all entries at all levels, of groups and conversions as well."""
    return [str(entry.get("type")) for entry in _entries(settings)]


def tag_names(settings: Settings) -> list[str]:
    """Return the names of all tags that entries give their data, at all levels, in order."""
    return list(dict.fromkeys(name for entry in _entries(settings) for name in entry.get("tags") or ()))


def _entries(settings: Settings) -> Iterator[Settings]:
    for section in sections_of(settings):
        for entry in section.get("input_cfg") or ():
            yield entry
            yield from _entries(entry)


def _check_keys(settings: Settings) -> None:
    from nemo.collections.common.data.lhotse.dataloader import LhotseDataLoadingConfig

    known = [*LhotseDataLoadingConfig.__dataclass_fields__, "use_lhotse"]
    sections = sections_of(settings)
    at_top = [key for key, value in settings.items() if not any(value is section for section in sections)]
    for key in [*at_top, *(key for section in sections for key in section)]:
        if key not in known:
            where = (
                ": it belongs to the entries of input_cfg"
                if key in OF_ENTRY
                else nearest(key, [*known, *FATES], "; docs/training.md says where all of them are listed")
            )
            raise ConfigError(f"the loader has no setting {key!r}{where}", code="unknown_key")
    if settings.get("multi_config", False):
        _check_levels(settings, at_top, sections)


def _check_levels(settings: Settings, at_top: list[str], sections: list[Settings]) -> None:
    """Raise ConfigError for a key at the wrong level of a multi_config, which NeMo would ignore."""
    if not sections:
        raise ConfigError(
            "multi_config has no sections: each sampler has one, with an input_cfg of its own", code="missing_key"
        )
    if misplaced := [key for key in at_top if key not in _OF_TOP]:
        raise ConfigError(
            f"with multi_config, {misplaced[0]} has no effect at the top level: set it in each section",
            code="bad_config_value",
        )
    check_fusion(settings, section_names(settings))
    for key in _SHARED:
        if any(key in section and section[key] != settings.get(key) for section in sections):
            raise ConfigError(
                f"with multi_config, {key} has no effect in a section: set it at the top level", code="bad_config_value"
            )


def _check_entries(settings: Settings, handed_down: Settings) -> None:
    """Check the entries at all levels: NeMo takes a group for what it is not where a key is misspelt."""
    from nemo.collections.common.data.lhotse.cutset import get_known_config_data_types

    types = [*get_known_config_data_types(), "sharmill", "tts_text"]
    entries = settings.get("input_cfg")
    if entries is not None and not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
        raise ConfigError("input_cfg is a list of entries, each with its type", code="bad_config_value")
    for entry in entries or ():
        if (kind := entry.get("type")) not in types:
            raise ConfigError(f"input_cfg has no type {kind!r}{nearest(str(kind), types)}", code="unknown_name")
        if kind == "sharmill" and "dataset" not in entry:
            raise ConfigError("input_cfg: type sharmill needs dataset: the dataset directory", code="missing_key")
        check_keys_of_entry(entry, handed_down)
        _check_entries(entry, {**handed_down, **entry})


def _inline_files(settings: Settings) -> None:
    """Put the contents of a file that ``input_cfg`` names in its place, at all levels."""
    from lhotse.serialization import load_yaml
    from omegaconf import OmegaConf

    if isinstance(path := settings.get("input_cfg"), str):
        # NeMo's own reader fetches an address.
        loaded = OmegaConf.create(load_yaml(path)) if "://" in path else read_yaml(path)
        settings["input_cfg"] = resolve(loaded, path)
    entries = settings.get("input_cfg")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            _inline_files(entry)


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
    first = next(_sources(section, 0), None)
    if first is None:
        raise ConfigError("input_cfg has no entries", code="missing_key")
    return not _is_stream(first[0])


def _is_stream(entry: Settings) -> bool:
    return entry.get("type") in _STREAMS or bool(entry.get("shar_path") or entry.get("tarred_audio_filepaths"))


def is_divisible(entry: Settings) -> bool:
    """Return True for data that every reader can have a part of: files that can be read anew, as a whole."""
    if entry.get("type") not in _DIVISIBLE or entry.get("slice_length") is not None or entry.get("extra_fields"):
        return False
    return not any("pipe:" in path for path in _paths_in(entry))


def _paths_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _paths_in(one)


def _check_map_style(
    settings: Settings, sources: list[tuple[Settings, int | str]], world_size: int, common_seed: bool
) -> None:
    """Check that all ranks draw the same order, since the sampler of each takes every n-th batch of it."""
    if world_size == 1 or not (settings["shuffle"] or len(sources) > 1):
        return
    seeds = {settings["shard_seed"], *(seed for _, seed in sources)}
    if "trng" in seeds:
        raise ConfigError(
            "shard_seed: trng makes a different order on each rank, of which the map-style sampler would take samples "
            "twice and miss others: set shard_seed to randomized or a number",
            code="split_wrong",
        )
    if "randomized" in seeds and not common_seed:
        raise ConfigError(
            "shard_seed: randomized needs a seed that all ranks share: set seed to a number", code="split_wrong"
        )


def _check_streams(
    settings: Settings, sources: list[tuple[Settings, int | str]], world_size: int, common_seed: bool
) -> None:
    """Check streams: readers take their parts of one order; of what cannot be divided every worker reads everything."""
    finite = settings.get("force_finite", False) or settings.get("metadata_only", False)
    divided = [entry.get("type") == "sharmill" or is_divisible(entry) for entry, _ in sources]
    ours = [seed for (_, seed), part in zip(sources, divided, strict=True) if part]
    if not common_seed and settings["shuffle"] and any(finite or seed == "randomized" for seed in ours):
        raise ConfigError(
            "the ranks share one order: set seed to a number, the same on all of them", code="split_wrong"
        )
    readers = world_size * max(1, settings.get("num_workers", 0))
    others = [(str(entry.get("type")), seed) for (entry, seed), part in zip(sources, divided, strict=True) if not part]
    if finite and readers > 1 and others:
        raise ConfigError(
            f"with force_finite, each of {readers} readers (ranks x workers) would read all data of type "
            f"{', '.join(sorted({kind for kind, _ in others}))}: set force_map_dataset: true",
            code="split_wrong",
        )
    alike = sorted({kind for kind, seed in others if isinstance(seed, int) or not settings["shuffle"]})
    if readers > 1 and alike:
        raise ConfigError(
            f"each of {readers} readers (ranks x workers) would read the data of type {', '.join(alike)} in the same "
            "order: set shuffle: true, and a shard_seed of randomized or trng (an entry can have its own)",
            code="split_wrong",
        )

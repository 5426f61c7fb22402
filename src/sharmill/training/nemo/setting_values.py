"""Values of the loader's settings that NeMo passes over, or that end in an error of NeMo's or lhotse's own.

Which keys there are is checked in ``loader_settings``, and what an entry of ``input_cfg`` takes in ``entry_keys``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sharmill.errors import ConfigError

if TYPE_CHECKING:
    from nemo.collections.common.prompts import PromptFormatter

Settings = dict[str, Any]

TEXTS: Final = frozenset({"txt", "txt_jsonl", "txt_pair", "nemo_sft_jsonl", "tts_text"})
_CONVERSATIONS: Final = frozenset({
    "multimodal_conversation", "share_gpt", "share_gpt_webdataset", "lhotse_as_conversation", "sqa_as_conversation",
    "s2s_as_conversation",
})  # fmt: skip
_FUSIONS: Final = ("round_robin", "randomized_round_robin", "zip")
_LIMITS: Final = ("duration", "tps", "tokens", "tpt")
_SEEDS: Final = ("trng", "randomized")
# Checked here, or accepted where NeMo's own type is too narrow.
_UNTYPED: Final = ("input_cfg", "min_tps", "min_tpt", "seed", "shard_seed", "sampler_weights")
_FILES: Final = ("manifest_filepath", "tarred_audio_filepaths", "cuts_path", "paths", "source_paths", "target_paths",
                 "questions_path")  # fmt: skip


def check_types(section: Settings) -> None:
    """Check the settings of one sampler as they are written.

    Raises:
        ConfigError: a value that is left open (``???``), of another type than the setting's, or out of range.
    """
    if (path := next(_open_values(section), None)) is not None:
        raise ConfigError(f"{path} is ???: set it", code="missing_key")
    _check_schema(section)
    for key in ("seed", "shard_seed"):
        value = section.get(key)
        if value is not None and not _is_number(value, int) and value not in _SEEDS:
            raise bad_value(f"{key} is a whole number, trng or randomized", value)
    for name in _LIMITS:
        least: Any = section.get(f"min_{name}")
        most: Any = section.get(f"max_{name}")
        if _is_number(least) and _is_number(most) and least > most:
            raise ConfigError(
                f"min_{name}: {least} is above max_{name}: {most}, so that nothing passes", code="bad_config_value"
            )
    _check_bins(section)


def check_batches(section: Settings, sources: Sequence[Settings], types: Sequence[str]) -> None:
    """Check how the settings of one sampler, as NeMo gets them, size batches and count examples.

    Args:
        section: the settings.
        sources: the entries that read data.
        types: those of all its entries.

    Raises:
        ConfigError: a setting that is missing, or has no effect beside the others.
    """
    _check_batch_size(section)
    _check_ratios(section)
    prompt = section.get("prompt_format")
    if prompt is not None:
        resolve_format(prompt, "prompt_format")
    texts = [kind for kind in types if kind in TEXTS]
    for key in ("use_multimodal_sampling", "prompt_format") if texts else ():
        if not section.get(key):
            raise ConfigError(
                f"data of type {texts[0]} are counted in tokens: set use_multimodal_sampling: true and prompt_format, "
                "which may be plain",
                code="missing_key",
            )
    spoken = [kind for kind in types if kind in _CONVERSATIONS]
    if spoken and prompt is None and section.get("pretokenize", True):
        raise ConfigError(f"data of type {spoken[0]} need prompt_format", code="missing_key")
    if section.get("use_multimodal_sampling") and not _has_token_duration(section, sources):
        raise ConfigError(
            "with use_multimodal_sampling, audio is counted in tokens: set token_equivalent_duration, the seconds of "
            "one",
            code="missing_key",
        )


def check_tokenizer(sections: Sequence[Settings], tokenizer: Any) -> None:
    """Raise ConfigError where settings count tokens that no tokenizer makes."""
    for section in sections:
        prompted = section.get("prompt_format") is not None
        if prompted and not hasattr(tokenizer, "text_to_ids"):
            raise ConfigError("prompt_format needs a tokenizer of NeMo, one with text_to_ids", code="bad_tokenizer")
        counted = section.get("use_multimodal_sampling", False)
        if counted and tokenizer is None:
            raise ConfigError("use_multimodal_sampling needs a tokenizer", code="bad_tokenizer")
        if _in_two(section.get("bucket_duration_bins")) and (tokenizer is None or not section.get("pretokenize", True)):
            raise ConfigError(
                "bucket_duration_bins of two dimensions count tokens: they need a tokenizer, and pretokenize: true",
                code="bad_tokenizer",
            )


def check_fusion(settings: Settings, names: Sequence[str]) -> None:
    """Check how the samplers of a ``multi_config`` are put together; ``names`` are those of its sections."""
    if (fusion := settings.get("sampler_fusion", _FUSIONS[0])) not in _FUSIONS:
        raise bad_value(f"sampler_fusion is one of {', '.join(_FUSIONS)}", fusion)
    weights = settings.get("sampler_weights")
    if weights is None:
        return
    if not isinstance(weights, dict) or set(weights) != set(names) or not all(map(_is_number, weights.values())):
        raise bad_value(f"sampler_weights has a number for each of {', '.join(names)}", weights)


def check_files(kind: str, entry: Mapping[str, Any]) -> None:
    """Raise ConfigError for a file of an entry that is not there; of tars, look for the first and the last.

    Pipes and addresses are left to NeMo.
    """
    from nemo.collections.common.data.lhotse.nemo_adapters import expand_sharded_filepaths

    for key in _FILES:
        if entry.get(key) is None:
            continue
        names = [name for name in expand_sharded_filepaths(entry[key]) if isinstance(name, str)]
        for name in (names[0], names[-1]) if key == "tarred_audio_filepaths" and names else names:
            if "://" not in name and not name.startswith("pipe:") and not Path(name).exists():
                raise ConfigError(f"input_cfg: type {kind}: there is no file {name}", code="missing_input")


def _open_values(value: Any, path: str = "") -> Iterator[str]:
    if value == "???":
        yield path
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _open_values(one, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _open_values(one, f"{path}[{number}]")


def _check_schema(section: Settings) -> None:
    """Check the types of values against those of NeMo's settings."""
    from nemo.collections.common.data.lhotse.dataloader import LhotseDataLoadingConfig
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    schema = OmegaConf.structured(LhotseDataLoadingConfig)
    for key, value in section.items():
        if key in schema and key not in _UNTYPED:
            try:
                schema[key] = value
            except OmegaConfBaseException as error:
                said = str(error).partition("\n")[0]
                raise ConfigError(f"{key}: {said}", code="bad_config_value") from error


def _check_bins(section: Settings) -> None:
    bins = section.get("bucket_duration_bins")
    if bins is None:
        return
    flat = isinstance(bins, list) and all(_is_number(bound) for bound in bins)
    pairs = isinstance(bins, list) and all(
        isinstance(bound, list) and len(bound) == 2 and all(map(_is_number, bound)) for bound in bins
    )
    if not bins or not (flat or pairs) or any(after <= before for before, after in pairwise(bins)):
        raise bad_value(
            "bucket_duration_bins is a list of numbers, or of [length, tokens], each above the one before", bins
        )


def _check_batch_size(section: Settings) -> None:
    bins, sizes = section.get("bucket_duration_bins"), section.get("bucket_batch_size")
    if sizes is not None and len(sizes) != len(bins or ()):
        raise ConfigError(
            f"bucket_batch_size has {len(sizes)} numbers for {len(bins or ())} bucket_duration_bins: one for each, the "
            "last for the longest",
            code="bad_config_value",
        )
    limit = "batch_tokens" if section.get("use_multimodal_sampling") else "batch_duration"
    if sizes is None and section.get("batch_size") is None and section.get(limit) is None:
        raise ConfigError(
            f"the size of batches is not set: {limit}, batch_size, or bucket_duration_bins and bucket_batch_size",
            code="missing_key",
        )


def _check_ratios(section: Settings) -> None:
    """Check a list of limits, one for each bucket: NeMo looks at it with buckets of two dimensions alone."""
    bins: Any = section.get("bucket_duration_bins")
    for key in ("max_tps", "max_tpt"):
        ratios = section.get(key)
        if not isinstance(ratios, list):
            continue
        if not _in_two(bins) or not section.get("bucketing_2d_strict_mode", True):
            raise bad_value(
                f"{key} is a number; a list of them is for bucket_duration_bins of two dimensions in strict mode",
                ratios,
            )
        if len(ratios) != len(bins):
            raise ConfigError(f"{key} has {len(ratios)} numbers for {len(bins)} buckets", code="bad_config_value")


def resolve_format(name: str, setting: str) -> type[PromptFormatter]:
    """Return NeMo's prompt formatter of a name, which a setting has.

    Raises:
        ConfigError: there is none.
    """
    from nemo.collections.common.prompts import PromptFormatter

    try:
        return PromptFormatter.resolve(name)
    except RuntimeError as error:
        raise ConfigError(f"{setting}: {error}", code="unknown_name") from error


def _has_token_duration(section: Settings, sources: Sequence[Settings]) -> bool:
    """Return True if what is not text has a length in tokens; that of an entry is for its conversations alone."""
    key = "token_equivalent_duration"
    if section.get(key) is not None or all(source.get("type") in TEXTS for source in sources):
        return True
    return not _has_plain_audio(section) and any(source.get(key) is not None for source in sources)


def _has_plain_audio(entry: Settings) -> bool:
    """Return True if an entry, or the settings of a sampler, has audio outside conversations."""
    if entry.get("type") in _CONVERSATIONS:
        return False
    if entry.get("input_cfg") is None:
        return entry.get("type") not in TEXTS
    return any(map(_has_plain_audio, entry["input_cfg"]))


def _in_two(bins: Any) -> bool:
    return bool(bins) and isinstance(bins[0], Sequence)


def _is_number(value: Any, kind: Any = (int, float)) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def bad_value(rule: str, found: Any) -> ConfigError:
    """Return the error of a value that is not what ``rule`` says of it."""
    return ConfigError(f"{rule}, not {found!r}", code="bad_config_value")

"""The data that ``sharmill bins`` is given, as the settings of a loader."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from nemo.collections.common.data.lhotse.cutset import get_known_config_data_types
from nemo.collections.common.data.lhotse.nemo_adapters import expand_sharded_filepaths
from omegaconf import ListConfig

from sharmill.errors import ConfigError
from sharmill.shar.layout import DATASET_FILE
from sharmill.shar.reading.shard_source import open_shard_source
from sharmill.training.buckets.mixture import Reading
from sharmill.training.buckets.prompts import ExamplePrompt, load_nemo_tokenizer
from sharmill.training.buckets.report import frame_shift
from sharmill.training.nemo.classic import translate
from sharmill.training.nemo.examples import open_listed
from sharmill.training.nemo.loader_settings import Settings, resolve_settings, section_names, sources_of, types_in
from sharmill.training.nemo.setting_values import resolve_format
from sharmill.training.nemo.trial import read_train_settings
from sharmill.training.yaml_files import read_yaml

# Those of a training that say which examples there are, and how they are measured.
_KEPT: Final = (
    "input_cfg", "manifest_filepath", "tarred_audio_filepaths", "tarred_audio_filepath", "bucketing_weights",
    "cuts_path", "shar_path", "text_field", "lang_field", "channel_selector", "skip_missing_manifest_entries",
    "audio_locator_tag", "prompt_format", "use_multimodal_sampling", "use_multimodal_dataloading",
    "token_equivalent_duration", "measure_total_length", "cut_text_into_windows_tokens", "reweight_temperature",
    "min_duration", "max_duration", "min_tokens", "max_tokens", "max_cer", "min_context_speaker_similarity", "keep",
)  # fmt: skip
# Types whose examples are all cuts.
_OF_CUTS: Final = frozenset({"group", "sharmill", "nemo", "nemo_tarred", "lhotse", "lhotse_shar", "parquet"})
_OF_TEXT: Final = frozenset({"group", "txt", "txt_jsonl", "txt_pair", "nemo_sft_jsonl", "tts_text"})


def open_inputs(
    sources: Sequence[str],
    tokenizer: Sequence[str],
    *,
    token_bins: bool,
    seconds_per_frame: float | None,
    prompt_format: str | None,
    prompt: str | None,
    section: str | None,
    samples: int,
) -> Reading:
    """Return the settings for the data that these texts name, with tokenizer and prompt.

    Raises:
        ConfigError: they are no data, do not go together, or need tokens or a frame's length that is not given.
    """
    settings = {key: value for key, value in _settings_of(sources, section).items() if key in _KEPT}
    translate(settings)
    kinds = set(types_in(settings))
    in_tokens = token_bins or bool(settings.get("use_multimodal_sampling"))
    settings["use_multimodal_sampling"] = in_tokens
    # The loader names types that do not exist.
    if texts := (kinds - _OF_CUTS) & set(get_known_config_data_types()):
        if not in_tokens:
            raise ConfigError(
                f"data of type {min(texts)} are counted in tokens: give --tokens and a --tokenizer", code="bad_usage"
            )
        if prompt is not None:
            raise ConfigError(
                f"--prompt is for speech: data of type {min(texts)} bring their own prompts", code="bad_usage"
            )
        settings.setdefault("prompt_format", prompt_format or "plain")
    if prompt_format is not None:
        settings["prompt_format"] = prompt_format
    prompt_format = settings.get("prompt_format") if tokenizer else settings.pop("prompt_format", None)
    if prompt_format is not None:
        resolve_format(prompt_format, "--prompt-format")
    if (in_tokens or prompt_format is not None) and not tokenizer:
        raise ConfigError("tokens are counted by a tokenizer: name a --tokenizer, such as 'bytes'", code="bad_usage")
    if in_tokens and not kinds <= _OF_TEXT:
        frame = seconds_per_frame or settings.get("token_equivalent_duration")
        own = [Path(source["dataset"]) for source in sources_of(settings) if source.get("type") == "sharmill"]
        settings["token_equivalent_duration"] = frame or frame_shift(own)
    loaded = load_nemo_tokenizer(tokenizer, prompt_format) if tokenizer else None
    example = ExamplePrompt(str(prompt_format), prompt, loaded) if prompt is not None else None
    return Reading(settings=settings, tokenizer=loaded, in_tokens=in_tokens, prompt=example, samples=samples)


def _settings_of(sources: Sequence[str], section: str | None) -> Settings:
    """Return the settings of one sampler for what the command line names."""
    first = sources[0].strip()
    if first.startswith("[") or first.endswith((".yaml", ".yml")):
        if len(sources) > 1:
            raise ConfigError(
                f"{first} says by itself which data there are: name nothing else beside it", code="bad_usage"
            )
        return _listed(first) if first.startswith("[") else _of_yaml(Path(first), section)
    if all(Path(source).is_dir() for source in sources):
        return {"input_cfg": [_entry_of_folder(source) for source in sources]}
    kinds = {source: _kind_of(source) for source in sources}
    if len(set(kinds.values())) > 1:
        told = ", ".join(f"{source} ({kind})" for source, kind in kinds.items())
        raise ConfigError(f"data of several kinds are mixed by an input_cfg.yaml: {told}", code="bad_usage")
    kind = kinds[sources[0]]
    if kind == "nemo":
        return {"manifest_filepath": sources[0] if len(sources) == 1 else list(sources)}
    return {"input_cfg": [{"type": kind, "paths": [path for one in sources for path in expand_sharded_filepaths(one)]}]}


def _entry_of_folder(folder: str) -> Settings:
    weight = open_shard_source(Path(folder), [], None).num_cuts()
    if (Path(folder) / DATASET_FILE).exists():
        return {"type": "sharmill", "dataset": folder, "weight": weight}
    return {"type": "lhotse_shar", "shar_path": folder, "weight": weight}


def _listed(text: str) -> Settings:
    """Read ``[[a.json,0.7],[b.json,0.3]]``."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        found = None
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{text} is not a list of manifests: write [[a.json,0.7],[b.json,0.3]]", code="bad_usage")
    for item in found:
        path, *weight = item if isinstance(item, list) and item else [item]
        if (
            not isinstance(path, str)
            or len(weight) > 1
            or not all(isinstance(one, (int, float)) and not isinstance(one, bool) and one > 0 for one in weight)
        ):
            raise ConfigError(f"{text}: {item} is not [MANIFEST,WEIGHT] with a weight above 0", code="bad_config_value")
        _kind_of(path)
    if len({isinstance(item, list) and len(item) for item in found}) > 1:
        raise ConfigError(f"{text}: some manifests have a weight and others have none", code="bad_config_value")
    return {"manifest_filepath": found}


def _of_yaml(path: Path, section: str | None) -> Settings:
    listed = isinstance(read_yaml(path), ListConfig)
    settings = resolve_settings({"input_cfg": str(path)}) if listed else read_train_settings(path)
    if not settings.get("multi_config", False):
        if section is not None:
            raise ConfigError(f"--section is for a multi_config, which {path} is not", code="bad_usage")
        return settings
    names = section_names(settings)
    if section not in names:
        raise ConfigError(
            f"{path} has a sampler for each of {', '.join(names)}: choose one with --section", code="bad_usage"
        )
    one: Settings = settings[section]
    return one


def _kind_of(source: str) -> str:
    """Return the type of ``input_cfg`` that a file is: text, or what the first line of JSON says."""
    paths = [str(path) for path in expand_sharded_filepaths(source)]
    if "://" not in paths[0] and not Path(paths[0]).is_file():
        raise ConfigError(
            f"{source} is neither a folder of a dataset nor a file: name a manifest, a text, or an input_cfg.yaml",
            code="no_dataset",
        )
    if ".json" not in paths[0]:
        return "txt"
    try:
        with open_listed(paths[0]) as lines:
            record: Any = json.loads(next(line for line in lines if line.strip()))
    except (OSError, ValueError, StopIteration) as error:
        raise ConfigError(f"{paths[0]} does not begin with a line of JSON", code="bad_manifest") from error
    if isinstance(record, dict):
        if "audio_filepath" in record:
            return "nemo"
        turns = record.get("conversations") or [{}]
        if any("type" in turn for turn in turns):
            raise ConfigError(
                f"{source} has conversations with audio: name them in an input_cfg.yaml, as - {{type: "
                f"multimodal_conversation, manifest_filepath: {source}, audio_locator_tag: ...}}",
                code="bad_usage",
            )
        if "conversations" in record:
            return "nemo_sft_jsonl"
        if "text" in record:
            return "txt_jsonl"
    raise ConfigError(
        f"{source} has neither audio_filepath, conversations nor text in its first line", code="bad_manifest"
    )

"""Lengths of any data that NeMo's loader reads: manifests, text, conversations, and weighted mixtures of them.

The loader itself reads the examples, so its own tokens and prompts are counted. The number of examples read from each
source is in proportion to its weight, and these examples are spread evenly over the source's files.
"""

import ast
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from lhotse.cut import Cut
from nemo.collections.common.data.lhotse.cutset import get_known_config_data_types, temperature_reweighting
from nemo.collections.common.data.lhotse.nemo_adapters import expand_sharded_filepaths
from nemo.collections.common.tokenizers.aggregate_tokenizer import AggregateTokenizer
from nemo.collections.common.tokenizers.canary_tokenizer import (
    CANARY_SPECIAL_TOKENIZER,
    CanaryBPETokenizer,
    CanaryTokenizer,
)
from nemo.collections.common.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from nemo.utils import logging as nemo_logging
from omegaconf import ListConfig

from sharmill.errors import ConfigError, SharmillError, one_line, refuse
from sharmill.shar.fields import DATASET_FILE
from sharmill.shar.index import open_directory
from sharmill.shar.reading.shard_source import open_shard_source
from sharmill.training.buckets.lengths import BinsOptions, Lengths, frame_shift, is_dataset
from sharmill.training.nemo.classic import translate
from sharmill.training.nemo.entries import Settings, entry_directory, is_weight, type_of
from sharmill.training.nemo.examples import count_lines, entry_files, open_listed
from sharmill.training.nemo.input_type import entry_size
from sharmill.training.nemo.loader import get_dataloader
from sharmill.training.nemo.partition import cuts_of
from sharmill.training.nemo.settings import (
    entries_of,
    read_train_settings,
    read_yaml,
    resolve_format,
    resolve_settings,
    section_names,
    sections_of,
    sources_of,
)
from sharmill.training.nemo.trial import count_tokens
from sharmill.training.tokenizers import PromptTokenizer, Tokenizer, load_tokenizers, tokenize

_CANARY: Final = "canary"
# Training settings that select examples, or define how they are measured.
_KEPT: Final = (
    "input_cfg", "manifest_filepath", "tarred_audio_filepaths", "tarred_audio_filepath", "bucketing_weights",
    "cuts_path", "shar_path", "text_field", "lang_field", "channel_selector", "skip_missing_manifest_entries",
    "audio_locator_tag", "prompt_format", "use_multimodal_sampling", "use_multimodal_dataloading",
    "token_equivalent_duration", "measure_total_length", "cut_text_into_windows_tokens", "reweight_temperature",
    "min_duration", "max_duration", "min_tokens", "max_tokens", "max_cer", "min_context_speaker_similarity", "keep",
)  # fmt: skip
_BATCH: Final = 64
# Errors that NeMo raises for invalid data, which it checks with assertions or not at all.
_DATA_ERRORS: Final = (AssertionError, AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError)


def load_nemo_tokenizer(names: Sequence[str], prompt_format: str | None) -> Any:
    """Load tokenizers like ``load_tokenizers``, but return a single NeMo tokenizer.

    Tokenizers of several languages are combined in an AggregateTokenizer, or in a CanaryTokenizer if ``spl_tokens`` is
    one of the languages.

    Raises:
        ConfigError: a tokenizer cannot be loaded, or Canary's special tokens are missing.
    """
    loaded = load_tokenizers(names)
    by_language = isinstance(loaded, Mapping)
    paths = dict(name.split("=", 1) for name in names) if by_language else {"": names[0]}
    in_pieces = all(path.endswith(".model") for path in paths.values())
    canary = prompt_format is not None and prompt_format.startswith(_CANARY)
    special = CANARY_SPECIAL_TOKENIZER in paths
    refuse(
        (canary and not (special if by_language else in_pieces),
         f"{prompt_format} has special tokens: add --tokenizer {CANARY_SPECIAL_TOKENIZER}=tokenizer.model to the "
         "tokenizers of the languages, or give one SentencePiece .model with all tokens"),
        (canary and not in_pieces, f"{prompt_format} needs SentencePiece tokenizers: give .model files"),
        code="bad_tokenizer",
    )  # fmt: skip
    if isinstance(loaded, Mapping):
        if not in_pieces:
            return _LanguageTokenizers(loaded)
        aggregate = CanaryTokenizer if special else AggregateTokenizer
        return aggregate({language: SentencePieceTokenizer(path) for language, path in paths.items()})
    if not in_pieces:
        return PromptTokenizer(loaded)
    return (CanaryBPETokenizer if canary else SentencePieceTokenizer)(names[0])


class _LanguageTokenizers(AggregateTokenizer):
    """Tokenizers of any kind, one per language, with the interface of NeMo's AggregateTokenizer."""

    def __init__(self, tokenizers: Mapping[str, Tokenizer]) -> None:
        self._by_language = tokenizers

    def text_to_ids(self, text: str, lang_id: str) -> list[int]:
        return tokenize(self._by_language, text, lang_id, "?")


def load_prompt(prompt_format: str, text: str, tokenizer: Any) -> Callable[[str, str | None], int]:
    """Load a prompt that is the same for all cuts: the turns before the answer, which is the text of the cut.

    Args:
        prompt_format: name of one of NeMo's ``PromptFormatter`` classes.
        text: the turns as a list, ``[{'role': 'user', 'slots': {...}}]``.
        tokenizer: tokenizer from ``load_nemo_tokenizer``.

    Returns:
        A function that takes the text and language of a cut, and returns the number of tokens of prompt and text,
        including special tokens.

    Raises:
        ConfigError: the format does not exist, or the turns do not match it.
    """
    formatter = resolve_format(prompt_format, "--prompt-format")(tokenizer)
    turns: Any = None
    with suppress(ValueError, SyntaxError):
        turns = ast.literal_eval(text.strip())
    listed = isinstance(turns, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("slots"), dict) for turn in turns
    )
    refuse((not listed, f"--prompt is {text!r}; it must be a list of turns: [{{'role': 'user', 'slots': {{...}}}}]"))
    try:
        formatter.encode_dialog(turns)
    except AssertionError as error:  # NeMo checks roles and slots with assertions
        raise ConfigError(f"--prompt: {prompt_format}: {error}", code="bad_config_value") from error
    own_language = next((turn["slots"]["target_lang"] for turn in turns if "target_lang" in turn["slots"]), None)

    def count_tokens_of(text: str, language: str | None) -> int:
        answer: dict[str, Any] = dict.fromkeys(formatter.get_slots(formatter.OUTPUT_ROLE), text)
        answer[formatter.PROMPT_LANGUAGE_SLOT] = language or own_language
        turn = {"role": formatter.OUTPUT_ROLE, "slots": answer}
        return len(formatter.encode_dialog([*turns, turn])["input_ids"])

    return count_tokens_of


def read_mixture(sources: Sequence[str], options: BinsOptions) -> tuple[Lengths, Settings]:
    """Read the lengths of a mixture of sources in proportion to their weights.

    Returns:
        The lengths, and the loader's settings with which they were measured.

    Raises:
        ConfigError: the data cannot be read, an option for tokens or frames is missing, weights are missing or invalid,
            or no example is left.
    """
    settings, tokenizer, measured = _open_inputs(sources, options)
    columns, num_all, looked_at = [], 0.0, 0
    leaves = list(_leaves(settings["input_cfg"], 1.0, settings.get("reweight_temperature")))
    for share, entry in leaves:
        wanted = max(1, round(share * options.samples))
        with tempfile.TemporaryDirectory(prefix="sharmill-bins-") as folder:
            thinned, size = _thin(entry, wanted, Path(folder))
            one = {key: value for key, value in settings.items() if key != "reweight_temperature"}
            found = _read(one | {"input_cfg": [thinned]}, wanted, tokenizer, measured)
        columns.append(found)
        looked_at += len(found)
        num_all = max(size, len(found)) + num_all if size else math.nan
    rows = _resample_rows(columns, [share for share, _ in leaves], options.samples)
    in_tokens = settings["use_multimodal_sampling"]
    lengths = Lengths.of_counts(
        rows[:, 0], rows[:, 1].astype(np.int64) if in_tokens else rows[:, 1], rows[:, 2].astype(np.int64),
        counted=tokenizer is not None, limits=(options.min_duration, options.max_duration),
        text_ratios=None if np.isnan(rows[:, 3]).all() else rows[:, 3],
    )  # fmt: skip
    total = "" if math.isnan(num_all) else f" of {num_all:,.0f}"
    drawn = f", in {len(rows):,} draws by weight" if len(leaves) > 1 else ""
    return replace(lengths, looked_at=f"looked at {looked_at:,}{total} examples{drawn}", in_tokens=in_tokens), settings


def _leaves(entries: Sequence[Settings], share: float, temperatures: Any) -> Iterator[tuple[float, Settings]]:
    """Yield a pair per entry that reads data: its share of all examples, and the entry within copies of its groups.

    Args:
        share: share of ``entries`` among all examples.
        temperatures: NeMo's ``reweight_temperature``: one value, or a sequence with one value per level of groups.
    """
    here, below = temperatures, temperatures
    if isinstance(temperatures, Sequence):
        here, below = (temperatures[0], temperatures[1:]) if temperatures else (None, ())
    weights = [entry.get("weight") for entry in entries]
    given = [weight for weight in weights if weight is not None]
    wrong = [repr(weight) for weight in given if not is_weight(weight)]
    refuse((wrong, f"input_cfg: weight is {' and '.join(wrong)}; it must be a positive number"))
    refuse(
        (None in weights and given, "input_cfg: some entries have a weight and others have none: set it for all"),
        code="missing_key",
    )
    shares = [1 / len(entries)] * len(entries)
    if None not in weights and len(entries) > 1:
        shares = temperature_reweighting(weights, temperature=1.0 if here is None else here)
    for entry, part in zip(entries, shares, strict=True):
        if not entry.get("input_cfg"):
            yield share * part, entry
            continue
        for inner, leaf in _leaves(entry["input_cfg"], share * part, entry.get("reweight_temperature", below)):
            yield inner, {**entry, "input_cfg": [leaf]}


def _thin(entry: Settings, wanted: int, folder: Path) -> tuple[Settings, int]:
    """Return an entry reduced to ``wanted`` evenly spaced lines, and the number of examples of the original entry.

    If the examples can only be counted by reading the data, the number is 0 and the entry is returned unchanged. An
    entry of type sharmill is never reduced.

    Args:
        folder: folder for the reduced files.
    """
    if entry.get("input_cfg"):
        inner, size = _thin(entry["input_cfg"][0], wanted, folder)
        return {**entry, "input_cfg": [inner]}, size
    kind = str(entry.get("type"))
    if kind == "sharmill" and isinstance(entry.get("dataset"), str):
        return entry, entry_size(entry)
    known = type_of(entry)
    if known.files in ((), ("shar_path",)) or known.holds == "conversations" or entry.get("extra_fields"):
        return entry, 0
    if kind == "nemo_tarred":
        # The tars are not needed and may be missing.
        entry = {**{key: value for key, value in entry.items() if key != "tarred_audio_filepaths"}, "type": "nemo"}
    shards = entry_files(kind, entry)
    counts = [count_lines(next(iter(files.values()))) for files in shards]
    total = sum(counts)
    if total <= wanted:
        return entry, total
    # Choose the middle line of each of ``wanted`` equal ranges.
    chosen = ((np.arange(wanted) + 0.5) * (total / wanted)).astype(np.int64)
    begin, thinned = 0, {key: str(folder / f"{key}.jsonl") for key in shards[0]}
    for files, count in zip(shards, counts, strict=True):
        numbers = set((chosen[(chosen >= begin) & (chosen < begin + count)] - begin).tolist())
        for key, path in files.items():
            with open_listed(path) as lines, Path(thinned[key]).open("ab") as output:
                output.writelines(line.rstrip(b"\n") + b"\n" for n, line in enumerate(lines) if n in numbers)
        begin += count
    return {**entry, **thinned}, total


def _read(settings: Settings, wanted: int, tokenizer: Any, measured: "_MeasuredExamples") -> np.ndarray:
    """Return rows (N, 4) for up to ``wanted`` examples of one source; see ``_MeasuredExamples``."""
    kind = sources_of(settings)[0].get("type")
    settings = {
        **settings, "batch_size": _BATCH, "use_bucketing": False, "shuffle": True, "shuffle_buffer_size": _BATCH,
        "seed": 0, "shard_seed": "randomized", "metadata_only": True, "force_finite": True, "num_workers": 0,
        "force_iterable_dataset": True, "pretokenize": measured.prompt is None,
    }  # fmt: skip
    rows: list[list[float]] = []
    try:
        with nemo_logging.temp_verbosity(logging.ERROR):
            for batch in get_dataloader(settings, 0, 1, tokenizer, dataset=measured):  # type: ignore[arg-type]
                rows += batch
                if len(rows) >= wanted:
                    break
    except SharmillError:
        raise
    except _DATA_ERRORS as error:
        raise ConfigError(f"input_cfg: type {kind} cannot be read: {one_line(error)}", code="bad_manifest") from error
    refuse((not rows, f"input_cfg: no example of type {kind} passes the filters: relax them"), code="too_few_cuts")
    return np.array(rows[:wanted], dtype=np.float64)


@dataclass(frozen=True)
class _MeasuredExamples:
    """A dataset that turns each example into a row of four numbers.

    A row has the seconds, the length, the number of tokens (-1 without text), and the output tokens per input token.

    Attributes:
        frame: seconds per frame if audio is measured in frames, otherwise None.
        prompt: counts the tokens of a cut with a prompt that replaces those of the data; None keeps the prompts of the
            data.
    """

    frame: float | None
    prompt: Callable[[str, str | None], int] | None

    def __getitem__(self, examples: Any) -> list[list[float]]:
        return [self._measure(example) for example in examples]

    def _measure(self, example: Any) -> list[float]:
        if not isinstance(example, Cut):
            tokens, context = example.output_length, len(example.context_ids)
            ratio = math.inf if tokens is None or not context else len(example.answer_ids) / context
            seconds = sum(cut.duration for cut in cuts_of(example))
            return [seconds, example.input_length, -1 if tokens is None else tokens, ratio]
        tokens = count_tokens(example)
        if self.prompt is not None:
            texts = [(one.text, one.language) for one in example.supervisions if one.text]
            tokens = self.prompt(" ".join(text for text, _ in texts), texts[0][1]) if texts else -1
        length = example.duration if self.frame is None else math.ceil(example.duration / self.frame)
        return [example.duration, length, tokens, math.nan]


def _resample_rows(columns: Sequence[np.ndarray], shares: Sequence[float], most: int) -> np.ndarray:
    """Select evenly spaced rows from each source, in proportion to its share.

    The result has at most about ``most`` rows. Rows of a source are repeated if it has fewer rows than its share
    requires.
    """
    if len(columns) == 1:
        return columns[0]
    total = min(most, max(len(rows) / share for rows, share in zip(columns, shares, strict=True)))
    parts = []
    for rows, share in zip(columns, shares, strict=True):
        count = max(1, round(total * share))
        parts.append(rows[((np.arange(count) + 0.5) * (len(rows) / count)).astype(np.int64)])
    return np.concatenate(parts)


def _open_inputs(sources: Sequence[str], options: BinsOptions) -> tuple[Settings, Any, _MeasuredExamples]:
    """Return the settings for the sources, NeMo's tokenizer, and the dataset that measures examples."""
    settings = {key: value for key, value in _settings_of(sources, options.section).items() if key in _KEPT}
    translate(settings)
    types = {str(entry.get("type")): type_of(entry) for entry in entries_of(settings)}
    in_tokens = options.token_bins or bool(settings.get("use_multimodal_sampling"))
    settings["use_multimodal_sampling"] = in_tokens
    # Unknown types are skipped here, because the loader reports them.
    texts = [kind for kind in get_known_config_data_types() if kind in types and types[kind].holds != "cuts"]
    if texts:
        settings.setdefault("prompt_format", options.prompt_format or "plain")
    if options.prompt_format is not None:
        settings["prompt_format"] = options.prompt_format
    prompt_format = settings.get("prompt_format") if options.tokenizer else settings.pop("prompt_format", None)
    kinds = ", ".join(sorted(texts))
    refuse(
        (texts and not in_tokens, f"data of type {kinds} are measured in tokens: give --tokens and a --tokenizer"),
        (texts and options.prompt is not None,
         f"--prompt is only for speech, but data of type {kinds} have their own prompts: remove --prompt"),
        ((in_tokens or prompt_format is not None) and not options.tokenizer,
         "counting tokens needs a tokenizer: give a --tokenizer, such as 'bytes'"),
        code="bad_usage",
    )  # fmt: skip
    if prompt_format is not None:
        resolve_format(prompt_format, "--prompt-format")
    if in_tokens and not all(kind == "group" or one.holds == "text" for kind, one in types.items()):
        frame = options.seconds_per_frame or settings.get("token_equivalent_duration")
        own = [entry_directory(source) for source in sources_of(settings) if source.get("type") == "sharmill"]
        settings["token_equivalent_duration"] = frame or frame_shift(own)
    loaded = load_nemo_tokenizer(options.tokenizer, prompt_format) if options.tokenizer else None
    prompt = load_prompt(str(prompt_format), options.prompt, loaded) if options.prompt is not None else None
    return settings, loaded, _MeasuredExamples(settings.get("token_equivalent_duration") if in_tokens else None, prompt)


def _settings_of(sources: Sequence[str], section: str | None) -> Settings:
    """Return the settings of one sampler for the sources named on the command line."""
    first = sources[0].strip()
    listed, is_yaml = first.startswith("["), first.endswith((".yaml", ".yml"))
    refuse(
        ((listed or is_yaml) and len(sources) > 1,
         f"{first} already describes all data: remove the other sources"),
        code="bad_usage",
    )  # fmt: skip
    if listed:
        return _parse_list(first)
    if is_yaml:
        entries_alone = isinstance(read_yaml(first), ListConfig)
        settings = resolve_settings({"input_cfg": first}) if entries_alone else read_train_settings(first)
        several = settings.get("multi_config", False)
        names = section_names(settings) if several else []
        refuse(
            (not several and section is not None, f"--section needs a multi_config, but {first} has none: remove it"),
            (several and section not in names,
             f"{first} has the samplers {', '.join(names)}: choose one with --section"),
            code="bad_usage",
        )  # fmt: skip
        return sections_of(settings)[names.index(str(section))] if several else settings
    if all(map(is_dataset, sources)):
        return {"input_cfg": [_entry_of_dataset(source) for source in sources]}
    kinds = {source: _kind_of(source) for source in sources}
    found = ", ".join(f"{source} ({kind})" for source, kind in kinds.items())
    refuse(
        (len(set(kinds.values())) > 1, f"the sources have several types: {found}; mix them in an input_cfg.yaml"),
        code="bad_usage",
    )
    kind = kinds[sources[0]]
    if kind == "nemo":
        return {"manifest_filepath": sources[0] if len(sources) == 1 else list(sources)}
    return {"input_cfg": [{"type": kind, "paths": [path for one in sources for path in expand_sharded_filepaths(one)]}]}


def _entry_of_dataset(source: str) -> Settings:
    """Return an entry for a dataset or another tool's Shar, weighted by its number of cuts."""
    directory = open_directory(source)
    own = (directory / DATASET_FILE).exists()
    entry = {"type": "sharmill", "dataset": source} if own else {"type": "lhotse_shar", "shar_path": source}
    return entry | {"weight": open_shard_source(directory, [], None).num_cuts()}


def _parse_list(text: str) -> Settings:
    """Parse a list of manifests with weights, such as ``[[a.json,0.7],[b.json,0.3]]``."""
    found: Any = None
    with suppress(yaml.YAMLError):
        found = yaml.safe_load(text)
    refuse(
        (not isinstance(found, list) or not found,
         f"{text} is not a list of manifests: write [[a.json,0.7],[b.json,0.3]]"),
        code="bad_usage",
    )  # fmt: skip
    for item in found:
        path, *weight = item if isinstance(item, list) and item else [item]
        weighted = isinstance(path, str) and len(weight) <= 1 and all(map(is_weight, weight))
        refuse((not weighted, f"{text}: {item} must be [MANIFEST,WEIGHT] with a positive weight"))
        _kind_of(path)
    forms = {isinstance(item, list) and len(item) for item in found}
    refuse((len(forms) > 1, f"{text}: some manifests have a weight and others have none: give all a weight"))
    return {"manifest_filepath": found}


def _kind_of(source: str) -> str:
    """Return the ``input_cfg`` type of a file: ``txt`` or, for JSON, the type that its first record implies."""
    path = str(expand_sharded_filepaths(source)[0])
    refuse(
        ("://" not in path and not Path(path).is_file(),
         f"{source} is neither a dataset folder nor a file: give a manifest, a text file, or an input_cfg.yaml"),
        code="no_dataset",
    )  # fmt: skip
    if ".json" not in path:
        return "txt"
    try:
        with open_listed(path) as lines:
            record: Any = json.loads(next(line for line in lines if line.strip()))
    except (OSError, ValueError, StopIteration) as error:
        raise ConfigError(f"{path} does not begin with a line of JSON", code="bad_manifest") from error
    kinds = {"audio_filepath": "nemo", "conversations": "nemo_sft_jsonl", "text": "txt_jsonl"}
    kind = next((kind for key, kind in kinds.items() if isinstance(record, dict) and key in record), "")
    refuse(
        (kind == "nemo_sft_jsonl" and any("type" in turn for turn in record["conversations"] or ()),
         f"{source} has conversations with audio: add them to an input_cfg.yaml, as in - {{type: "
         f"multimodal_conversation, manifest_filepath: {source}, audio_locator_tag: ...}}"),
        code="bad_usage",
    )  # fmt: skip
    refuse(
        (not kind, f"the first line of {source} has none of audio_filepath, conversations and text: give a manifest"),
        code="bad_manifest",
    )
    return kind

"""The lengths of whatever NeMo's loader reads: manifests, text, conversations, and mixtures of them by weight.

The examples are those that the loader itself makes of them, with its tokens and prompts. Of each source so many are
looked at as its weight asks for, from all over its files.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from lhotse.cut import Cut
from nemo.collections.common.data.lhotse.cutset import temperature_reweighting
from nemo.utils import logging as nemo_logging

from sharmill.errors import ConfigError, SharmillError
from sharmill.shar import open_shar
from sharmill.training.buckets.lengths import Lengths
from sharmill.training.buckets.prompts import ExamplePrompt
from sharmill.training.nemo.examples import count_lines, entry_files, open_listed
from sharmill.training.nemo.loader import get_dataloader
from sharmill.training.nemo.loader_settings import Settings

# Of which a line is an example, wherever it is written.
_LINE_TYPES: Final = frozenset({"txt", "txt_jsonl", "txt_pair", "nemo_sft_jsonl", "tts_text", "nemo", "nemo_tarred"})
_BATCH: Final = 64
# NeMo checks data by assertions, and looks for keys as it goes.
_OF_DATA: Final = (AssertionError, AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Settings of a loader that say which examples there are, and how they are measured.

    Attributes:
        settings: of one sampler, with an ``input_cfg``.
        tokenizer: of NeMo, or None to count no tokens.
        in_tokens: audio counts in frames of ``token_equivalent_duration`` seconds.
        prompt: one prompt for all cuts, in place of those of the data.
        samples: the number of examples to look at.
    """

    settings: Settings
    tokenizer: Any
    in_tokens: bool
    prompt: ExamplePrompt | None
    samples: int


def read_mixture(reading: Reading, *, min_duration: float, max_duration: float) -> Lengths:
    """Read the lengths of a mixture, of which every source has the share that its weight gives it.

    Raises:
        ConfigError: a source cannot be read, weights are missing or no numbers, or nothing is left.
    """
    settings = {**reading.settings}
    temperatures = settings.pop("reweight_temperature", None)
    leaves = list(_leaves(settings["input_cfg"], 1.0, temperatures))
    columns, num_all, looked_at = [], 0.0, 0
    for share, entry in leaves:
        wanted = max(1, round(share * reading.samples))
        with tempfile.TemporaryDirectory(prefix="sharmill-bins-") as folder:
            thinned, size = _thin(entry, wanted, Path(folder))
            found = _read(replace(reading, settings={**settings, "input_cfg": [thinned]}), wanted, _innermost(entry))
        columns.append(found)
        looked_at += len(found)
        num_all = max(size, len(found)) + num_all if size else math.nan
    rows = _in_shares(columns, [share for share, _ in leaves], reading.samples)
    lengths = Lengths.of_counts(
        rows[:, 0], rows[:, 1].astype(np.int64) if reading.in_tokens else rows[:, 1], rows[:, 2].astype(np.int64),
        counted=reading.tokenizer is not None, limits=(min_duration, max_duration),
        text_ratios=None if np.isnan(rows[:, 3]).all() else rows[:, 3],
    )  # fmt: skip
    of_all = "" if math.isnan(num_all) else f" of {num_all:,.0f}"
    drawn = f", in {len(rows):,} draws by weight" if len(leaves) > 1 else ""
    return replace(lengths, looked_at=f"looked at {looked_at:,}{of_all} examples{drawn}", in_tokens=reading.in_tokens)


def _leaves(entries: Sequence[Settings], share: float, temperatures: Any) -> Iterator[tuple[float, Settings]]:
    """Yield every entry that reads data, inside copies of its groups, and its share of the mixture."""
    here, below = temperatures, temperatures
    if isinstance(temperatures, Sequence):
        here, below = (temperatures[0], temperatures[1:]) if temperatures else (None, ())
    weights = [entry.get("weight") for entry in entries]
    if wrong := [weight for weight in weights if weight is not None and not _is_weight(weight)]:
        raise ConfigError(f"input_cfg: weight is {wrong[0]!r}; it is a number above 0", code="bad_config_value")
    if None in weights and any(weight is not None for weight in weights):
        raise ConfigError("input_cfg: some entries have a weight and others have none", code="missing_key")
    shares = [1 / len(entries)] * len(entries)
    if None not in weights and len(entries) > 1:
        shares = temperature_reweighting(weights, temperature=1.0 if here is None else here)
    for entry, part in zip(entries, shares, strict=True):
        if not entry.get("input_cfg"):
            yield share * part, entry
            continue
        for inner, leaf in _leaves(entry["input_cfg"], share * part, below):
            yield inner, {**entry, "input_cfg": [leaf]}


def _is_weight(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _innermost(entry: Settings) -> Settings:
    while entry.get("input_cfg"):
        entry = entry["input_cfg"][0]
    return entry


def _thin(entry: Settings, wanted: int, folder: Path) -> tuple[Settings, int]:
    """Return an entry with every n-th of its lines, if it has more than ``wanted``, and the number of its examples.

    The number is 0 where finding it would mean reading the data.
    """
    if entry.get("input_cfg"):
        inner, size = _thin(entry["input_cfg"][0], wanted, folder)
        return {**entry, "input_cfg": [inner]}, size
    kind = entry.get("type")
    if kind == "sharmill" and isinstance(entry.get("dataset"), str):
        return entry, len(open_shar(entry["dataset"], fields=[]).data)  # type: ignore[arg-type]
    if kind not in _LINE_TYPES or entry.get("extra_fields"):
        return entry, 0
    if kind == "nemo_tarred":
        # The tars are not needed, and perhaps not there.
        entry = {**{key: value for key, value in entry.items() if key != "tarred_audio_filepaths"}, "type": "nemo"}
    shards = entry_files(kind, entry)
    counts = [count_lines(next(iter(files.values()))) for files in shards]
    total = sum(counts)
    if total <= wanted:
        return entry, total
    # The middle of each of as many equal ranges.
    chosen = ((np.arange(wanted) + 0.5) * (total / wanted)).astype(np.int64)
    begin, thinned = 0, {key: str(folder / f"{key}.jsonl") for key in shards[0]}
    for files, count in zip(shards, counts, strict=True):
        of_file = chosen[(chosen >= begin) & (chosen < begin + count)] - begin
        for key, path in files.items():
            _copy_lines(path, of_file, thinned[key])
        begin += count
    return {**entry, **thinned}, total


def _copy_lines(path: str, numbers: np.ndarray, target: str) -> None:
    """Append the lines of these ascending numbers to another file."""
    with open_listed(path) as lines, Path(target).open("ab") as output:
        wanted = iter(numbers.tolist())
        number = next(wanted, None)
        for at, line in enumerate(lines):
            if number is None:
                break
            if at == number:
                output.write(line if line.endswith(b"\n") else line + b"\n")
                number = next(wanted, None)


def _read(reading: Reading, wanted: int, source: Settings) -> np.ndarray:
    """Return rows (N, 4) of up to ``wanted`` examples: see ``_Measured``."""
    settings = {
        **reading.settings, "batch_size": _BATCH, "use_bucketing": False, "shuffle": True,
        "shuffle_buffer_size": _BATCH, "seed": 0, "shard_seed": "randomized", "metadata_only": True,
        "force_finite": True, "num_workers": 0, "force_iterable_dataset": True, "pretokenize": reading.prompt is None,
    }  # fmt: skip
    rows: list[list[float]] = []
    try:
        with nemo_logging.temp_verbosity(logging.ERROR):
            for batch in get_dataloader(settings, 0, 1, reading.tokenizer, dataset=_Measured(reading)):  # type: ignore[arg-type]
                rows += batch
                if len(rows) >= wanted:
                    break
    except SharmillError:
        raise
    except _OF_DATA as error:
        what = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"input_cfg: type {source.get('type')} cannot be read: {what}", code="bad_manifest"
        ) from error
    if not rows:
        raise ConfigError(f"input_cfg: type {source.get('type')} has no example that passes", code="too_few_cuts")
    return np.array(rows[:wanted], dtype=np.float64)


class _Measured:
    """Batches of rows: seconds, length, tokens (-1 without text), and tokens per input token of text."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._frame = reading.settings.get("token_equivalent_duration")

    def __getitem__(self, examples: Any) -> list[list[float]]:
        return [self._measure(example) for example in examples]

    def _measure(self, example: Any) -> list[float]:
        if isinstance(example, Cut):
            length = math.ceil(example.duration / self._frame) if self._reading.in_tokens else example.duration
            return [example.duration, length, self._tokens_of(example), math.nan]
        seconds = sum(cut.duration for cut in example.list_cuts()) if hasattr(example, "list_cuts") else 0.0
        answer = -1 if example.output_length is None else example.output_length
        context = len(example.context_ids)
        ratio = len(example.answer_ids) / context if answer >= 0 and context else math.inf
        return [seconds, example.input_length, answer, ratio]

    def _tokens_of(self, cut: Any) -> int:
        texts = [(one.text, one.language) for one in cut.supervisions if one.text]
        if self._reading.prompt is not None:
            return self._reading.prompt.count(" ".join(text for text, _ in texts), texts[0][1]) if texts else -1
        if hasattr(cut, "input_ids"):
            return len(cut.input_ids)
        counts = [len(one.tokens) for one in cut.supervisions if one.text and one.has_custom("tokens")]
        return sum(counts) if counts else -1


def _in_shares(columns: Sequence[np.ndarray], shares: Sequence[float], most: int) -> np.ndarray:
    """Repeat or thin the rows of each source evenly, so that it has its share of at most about ``most`` rows."""
    if len(columns) == 1:
        return columns[0]
    total = min(most, max(len(rows) / share for rows, share in zip(columns, shares, strict=True)))
    parts = []
    for rows, share in zip(columns, shares, strict=True):
        count = max(1, round(total * share))
        parts.append(rows[((np.arange(count) + 0.5) * (len(rows) / count)).astype(np.int64)])
    return np.concatenate(parts)

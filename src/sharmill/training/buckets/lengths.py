"""The lengths of the cuts of datasets, in seconds and in text tokens: from the cuts' files alone, shard by shard."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sharmill.engine.child import safe_path
from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar.cut_lines import read_cuts
from sharmill.shar.reading.shard_source import open_shard_source
from sharmill.training.tokenizers import Tokenizers, load_tokenizers, tokenize


@dataclass(frozen=True)
class Lengths:
    """Lengths of N cuts, or of other examples.

    Attributes:
        seconds: (N,) of audio; 0 for text.
        lengths: (N,): the seconds as float64, or frames (of text: input tokens) as int64.
        tokens: (N,), of their texts (of text: output tokens); None if they were not counted, or no cut has a text.
        text_ratios: (N,) output tokens per input token of text, infinite without input, NaN for cuts; None if all are.
        without_text: number of the cuts without a text, whose tokens are 0; 0 if they were not counted.
        num_discarded: number of other cuts, which lay outside the limits.
        looked_at: words about the sample that they are; None where datasets were read as a whole.
        in_tokens: lengths are frames and input tokens.
    """

    seconds: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray | None
    text_ratios: np.ndarray | None = None
    without_text: int = 0
    num_discarded: int = 0
    looked_at: str | None = None
    in_tokens: bool = False

    @classmethod
    def of_counts(
        cls,
        seconds: np.ndarray,
        lengths: np.ndarray,
        tokens: np.ndarray,
        *,
        counted: bool,
        limits: tuple[float, float],
        text_ratios: np.ndarray | None = None,
    ) -> Lengths:
        """Make them of columns (N,), leaving out what has less or more seconds; text has no seconds and stays.

        Args:
            tokens: -1 where there is no text.
            counted: tokens were counted.
            limits: the least and the most seconds.

        Raises:
            ConfigError: nothing is left.
        """
        kept = ((seconds >= limits[0]) & (seconds <= limits[1])) | (seconds == 0)
        if not kept.any():
            raise ConfigError(
                f"none of the {len(kept)} cuts has {limits[0]:g} to {limits[1]:g} seconds", code="too_few_cuts"
            )
        tokens = tokens[kept]
        return cls(
            seconds=seconds[kept],
            lengths=lengths[kept],
            tokens=np.maximum(tokens, 0) if counted and (tokens >= 0).any() else None,
            text_ratios=None if text_ratios is None else text_ratios[kept],
            without_text=int((tokens < 0).sum()) if counted else 0,
            num_discarded=int((~kept).sum()),
        )

    @property
    def hours(self) -> float:
        return math.fsum(self.seconds.tolist()) / 3600

    def in_frames(self, seconds_per_frame: float) -> Lengths:
        """Return the same with lengths in frames, as NeMo counts audio in tokens: every begun frame is one."""
        lengths = np.ceil(self.seconds / seconds_per_frame).astype(np.int64)
        return replace(self, lengths=lengths, in_tokens=True)

    def in_total(self) -> Lengths:
        """Return the same with text tokens added to the frames."""
        assert self.tokens is not None
        return replace(self, lengths=self.lengths + self.tokens)


def read_lengths(
    datasets: Sequence[str | Path],
    *,
    tokenizer: Sequence[str] = (),
    min_duration: float = 0.0,
    max_duration: float = math.inf,
    workers: int | str = "auto",
) -> Lengths:
    """Read the lengths of all cuts of these datasets, in no particular order.

    Args:
        tokenizer: names as ``load_tokenizers`` takes them; tokens are counted if there are any.
        min_duration, max_duration: seconds; cuts outside are left out, and counted.
        workers: processes, or ``auto`` for one per core.

    Raises:
        ConfigError: there is no finished dataset nor a Shar of another tool, or no such tokenizer, or no cut is left.
        DamagedShard: a file of cuts is not as it should be.
    """
    sources = [open_shard_source(Path(dataset), [], None) for dataset in datasets]
    shards = [source.files(number) for source in sources for number in range(source.num_shards)]
    files = [(shard.cuts, shard.count) for shard in shards]
    if tokenizer:
        load_tokenizers(tokenizer)  # A wrong name is an error of this process, in one line.
    measure = partial(_measure, tokenizer=tuple(tokenizer))
    workers = min(len(os.sched_getaffinity(0)) if workers == "auto" else int(workers), len(files))
    if workers <= 1:
        parts = [measure(file) for file in files]
    else:
        # Not forked: this process may have threads, and locks that they hold.
        with safe_path(), ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            parts = list(pool.map(measure, files, chunksize=max(1, min(32, len(files) // (4 * workers)))))
    if not parts:
        raise ConfigError(f"there are no cuts in {', '.join(map(str, datasets))}", code="too_few_cuts")
    durations = np.concatenate([part[0] for part in parts])
    tokens = np.concatenate([part[1] for part in parts])
    return Lengths.of_counts(durations, durations, tokens, counted=bool(tokenizer), limits=(min_duration, max_duration))


_loaded: dict[tuple[str, ...], Tokenizers] = {}


def _measure(file: tuple[Path, int | None], tokenizer: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Read durations, and numbers of tokens (-1 without a text), of one file (path, number of cuts if known)."""
    path, count = file
    if tokenizer and tokenizer not in _loaded:
        _loaded[tokenizer] = load_tokenizers(tokenizer)
    durations, tokens = [], []
    for cut in read_cuts(path):
        try:
            durations.append(cut["duration"])
            tokens.append(_tokens_of(cut, _loaded[tokenizer]) if tokenizer else 0)
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedShard(f"{path}: {cut.get('id')!r} is not a cut: {error!r}") from error
        if not (isinstance(durations[-1], (int, float)) and 0 < durations[-1] < math.inf):
            raise DamagedShard(f"{path}: the duration of {cut.get('id')!r} is {durations[-1]!r}")
    if count is not None and len(durations) != count:
        raise DamagedShard(f"{path}: there are {len(durations)} cuts instead of {count}")
    return np.array(durations, dtype=np.float64), np.array(tokens, dtype=np.int64)


def _tokens_of(cut: dict[str, Any], tokenizers: Tokenizers) -> int:
    texts = [(supervision.get("text"), supervision.get("language")) for supervision in cut["supervisions"]]
    counts = [len(tokenize(tokenizers, text, language, cut["id"])) for text, language in texts if text]
    return sum(counts) if counts else -1

"""Lengths of the cuts of datasets, or of other examples, and the options of ``sharmill bins``.

Folders of datasets are read whole, by many processes.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from sharmill.errors import DamagedShard, refuse
from sharmill.files.location import Location, is_url
from sharmill.shar.fields import DATASET_FILE
from sharmill.shar.index import open_directory, read_dataset
from sharmill.shar.json_lines import read_cuts
from sharmill.shar.reading.shard_source import open_shard_source
from sharmill.training.parallel import parallel_map
from sharmill.training.tokenizers import load_tokenizers, tokenize

# A process that reads many files loads them once.
_load_once = cache(load_tokenizers)


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
    ) -> "Lengths":
        """Make them of columns (N,), leaving out what has less or more seconds; text has no seconds and stays.

        Args:
            tokens: -1 where there is no text.
            counted: tokens were counted.
            limits: the least and the most seconds.

        Raises:
            ConfigError: nothing is left.
        """
        kept = ((seconds >= limits[0]) & (seconds <= limits[1])) | (seconds == 0)
        told = f"none of the {len(kept)} cuts has {limits[0]:g} to {limits[1]:g} seconds"
        refuse((not kept.any(), told), code="too_few_cuts")
        tokens = tokens[kept]
        return cls(
            seconds=seconds[kept],
            lengths=lengths[kept],
            tokens=np.maximum(tokens, 0) if counted and (tokens >= 0).any() else None,
            text_ratios=None if text_ratios is None else text_ratios[kept],
            without_text=int((tokens < 0).sum()) if counted else 0,
            num_discarded=int((~kept).sum()),
        )


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
    sources = [open_shard_source(open_directory(dataset), [], None) for dataset in datasets]
    shards = [source.files(number) for source in sources for number in range(source.num_shards)]
    files = [(shard.cuts, shard.count) for shard in shards]
    if tokenizer:
        _load_once(tuple(tokenizer))  # A wrong name is an error of this process, in one line.
    measure = partial(_measure, tokenizer=tuple(tokenizer))
    workers = min(len(os.sched_getaffinity(0)) if workers == "auto" else int(workers), len(files))
    parts = list(parallel_map(files, measure, workers, kind="process") if workers > 1 else map(measure, files))
    refuse((not parts, f"there are no cuts in {', '.join(map(str, datasets))}"), code="too_few_cuts")
    durations = np.concatenate([part[0] for part in parts])
    tokens = np.concatenate([part[1] for part in parts])
    return Lengths.of_counts(durations, durations, tokens, counted=bool(tokenizer), limits=(min_duration, max_duration))


def _measure(file: tuple[Path, int | None], tokenizer: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Read durations, and numbers of tokens (-1 without a text), of one file (path, number of cuts if known)."""
    path, count = file
    durations, tokens = [], []
    for cut in read_cuts(path):
        try:
            durations.append(cut["duration"])
            supervisions = cut.get("supervisions", ()) if tokenizer else ()
            texts = [(one["text"], one.get("language")) for one in supervisions if one.get("text")]
            counts = [len(tokenize(_load_once(tokenizer), *one, cut["id"])) for one in texts]
            tokens.append(sum(counts) if counts else -1)
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedShard(f"{path}: {cut.get('id')!r} is not a cut: {error!r}") from error
        if not (isinstance(durations[-1], (int, float)) and 0 < durations[-1] < math.inf):
            raise DamagedShard(f"{path}: the duration of {cut.get('id')!r} is {durations[-1]!r}")
    if count is not None and len(durations) != count:
        raise DamagedShard(f"{path}: there are {len(durations)} cuts instead of {count}")
    return np.array(durations, dtype=np.float64), np.array(tokens, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class BinsOptions:
    """Options of ``sharmill bins``.

    Attributes:
        sub_buckets: divide each bucket into so many by number of text tokens.
        tokenizer: names of tokenizers; see ``load_tokenizers``.
        token_bins: count audio in frames, which NeMo calls tokens.
        seconds_per_frame: the length of a frame; by default that of the datasets' codec.
        closed: end one dimension with the longest cut, as ``bucket_batch_size`` needs it.
        min_duration, max_duration: seconds; what lies outside is left out, and counted.
        prompt_format, prompt: a name of NeMo's, and the turns before the answer.
        section: one sampler of a ``multi_config``.
        samples: the number of examples to look at, of data that are no folders of datasets.
        workers: processes that read folders.
    """

    num_buckets: int = 30
    sub_buckets: int | None = None
    tokenizer: Sequence[str] = ()
    token_bins: bool = False
    seconds_per_frame: float | None = None
    closed: bool = False
    min_duration: float = 0.0
    max_duration: float = math.inf
    outlier_threshold: float = 4.0
    prompt_format: str | None = None
    prompt: str | None = None
    section: str | None = None
    samples: int = 100_000
    workers: int | str = "auto"


def is_dataset(source: str) -> bool:
    """Return True if a source is the folder of a dataset, or a URL that does not end as that of a file."""
    return Path(source).is_dir() or (is_url(source) and not Path(source).suffix)


def frame_shift(datasets: Sequence[Location]) -> float:
    """Return the seconds of a frame of the datasets' codecs; a Shar of another tool does not describe its codes."""
    codecs = [codec for path in datasets if (path / DATASET_FILE).exists() for codec in read_dataset(path).codecs]
    shifts = {codec.samples_per_frame / codec.sampling_rate for codec in codecs}
    names = ", ".join(codec.name for codec in codecs) or "none"
    told = f"the codecs are {names}: say how long a frame is with --token-equivalent-duration"
    refuse((len(shifts) != 1, told), code="unknown_codec")
    return shifts.pop()

"""Lengths of the cuts of datasets or of other examples, and the options of ``sharmill bins``.

Dataset folders are read completely, by parallel processes.
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

# Each process loads the tokenizers once for all files that it reads.
_load_once = cache(load_tokenizers)


@dataclass(frozen=True)
class Lengths:
    """Lengths of N cuts or other examples.

    Attributes:
        seconds: (N,), duration of the audio; 0 for text.
        lengths: (N,), seconds as float64, or numbers of frames (for text, of input tokens) as int64.
        tokens: (N,), numbers of text tokens (for text examples, of output tokens); None if tokens were not counted or
            no cut has text.
        text_ratios: (N,), output tokens per input token of text examples; infinite without input, NaN for cuts. None if
            there are only cuts.
        without_text: number of cuts without text, which count as having 0 tokens; 0 if tokens were not counted.
        num_discarded: number of further cuts that were excluded because of their duration.
        looked_at: description of the sample; None if datasets were read completely.
        in_tokens: whether ``lengths`` are frames and input tokens rather than seconds.
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
        """Create lengths from columns (N,), excluding cuts outside the duration limits; text is always kept.

        Args:
            tokens: number of tokens of each example; -1 for examples without text.
            counted: whether tokens were counted.
            limits: minimum and maximum duration in seconds.

        Raises:
            ConfigError: no cut is within the limits.
        """
        kept = ((seconds >= limits[0]) & (seconds <= limits[1])) | (seconds == 0)
        refuse(
            (
                not kept.any(),
                f"none of the {len(kept)} cuts has {limits[0]:g} to {limits[1]:g} seconds: relax the limits",
            ),
            code="too_few_cuts",
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
        tokenizer: names for ``load_tokenizers``; without names, tokens are not counted.
        min_duration, max_duration: seconds; cuts outside these limits are excluded and counted.
        workers: number of processes, or ``auto`` for one per core.

    Raises:
        ConfigError: a source is neither a finished dataset nor another tool's Shar, a tokenizer does not exist, or no
            cut is left.
        DamagedShard: a file of cuts is damaged.
    """
    sources = [open_shard_source(open_directory(dataset), [], None) for dataset in datasets]
    shards = [source.files(number) for source in sources for number in range(source.num_shards)]
    files = [(shard.cuts, shard.count) for shard in shards]
    if tokenizer:
        _load_once(tuple(tokenizer))  # a wrong name must fail here rather than in a worker
    measure = partial(_measure, tokenizer=tuple(tokenizer))
    workers = min(len(os.sched_getaffinity(0)) if workers == "auto" else int(workers), len(files))
    parts = list(parallel_map(files, measure, workers, kind="process") if workers > 1 else map(measure, files))
    refuse((not parts, f"there are no cuts in {', '.join(map(str, datasets))}"), code="too_few_cuts")
    durations = np.concatenate([part[0] for part in parts])
    tokens = np.concatenate([part[1] for part in parts])
    return Lengths.of_counts(durations, durations, tokens, counted=bool(tokenizer), limits=(min_duration, max_duration))


def _measure(file: tuple[Path, int | None], tokenizer: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the durations in seconds (N,) and the numbers of text tokens (N,) of the cuts in a file.

    Args:
        file: path of the file, and its number of cuts or None if that is unknown.
        tokenizer: names of tokenizers; a cut without text, or any cut without tokenizers, has -1 tokens.
    """
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
        sub_buckets: number of sub-buckets per bucket, by number of text tokens.
        tokenizer: names of tokenizers; see ``load_tokenizers``.
        token_bins: measure audio in frames, which NeMo calls tokens.
        seconds_per_frame: duration of a frame; by default taken from the datasets' codec.
        closed: in one dimension, add a last bin that ends at the longest cut, as ``bucket_batch_size`` requires.
        min_duration, max_duration: seconds; examples outside these limits are excluded and counted.
        prompt_format, prompt: name of NeMo's prompt format, and the turns before the answer.
        section: name of one sampler of a ``multi_config``.
        samples: number of examples to read if the data are not dataset folders.
        workers: number of processes that read dataset folders.
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
    """Return True if a source is a folder, or a URL that does not end in a file suffix."""
    return Path(source).is_dir() or (is_url(source) and not Path(source).suffix)


def frame_shift(datasets: Sequence[Location]) -> float:
    """Return the seconds per frame that all codecs of the datasets share; raise ConfigError if there is no such value.

    A Shar dataset of another tool does not record its codec, and is ignored.
    """
    codecs = [codec for path in datasets if (path / DATASET_FILE).exists() for codec in read_dataset(path).codecs]
    shifts = {codec.samples_per_frame / codec.sampling_rate for codec in codecs}
    names = ", ".join(codec.name for codec in codecs) or "none"
    refuse(
        (len(shifts) != 1, f"the codecs are {names}: set the duration of a frame with --token-equivalent-duration"),
        code="unknown_codec",
    )
    return shifts.pop()

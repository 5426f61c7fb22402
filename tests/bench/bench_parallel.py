"""Prints how much faster ``parallel_map`` is than a loop over the same cuts.

    python tests/bench/bench_parallel.py DATASET

Decoding, resampling to 16 kHz and a log-mel spectrogram of every target, then a function that holds Python's lock. Each
way takes the same eager cuts, in turn with the others, in every round; the figures are medians of the rounds, whose
ratios hold where other work distorts the times. Time counts from the first result: before it, processes start.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torchaudio
from lhotse.cut import Cut

from sharmill.shar import open_shar
from sharmill.training import parallel_map

ROUNDS, REPEATS = 5, 4


def features(cut: Cut) -> np.ndarray:
    """A log-mel spectrogram (80, frames) of the target at 16 kHz."""
    audio = torch.from_numpy(cut.target_audio.resample(16000).load_audio())
    mel = torchaudio.compliance.kaldi.fbank(audio, num_mel_bins=80, sample_frequency=16000)
    return mel.numpy()


def letters(cut: Cut) -> int:
    """Plain Python: about as long as the features."""
    return sum(ord(letter) * number % 7 for number, letter in enumerate(cut.supervisions[0].text * 800))


def rates(items: Iterable[Any]) -> tuple[float, float]:
    """Results per second from the first on, and seconds until there was one."""
    began = time.perf_counter()
    results = iter(items)
    next(results)
    first = time.perf_counter()
    rest = sum(1 for _ in results)
    return rest / (time.perf_counter() - first), first - began


def main() -> None:
    torch.set_num_threads(1)
    cuts = list(open_shar(sys.argv[1], ["target_audio"])) * REPEATS
    for fn in (features, letters):
        ways: dict[str, Callable[[], Iterable[Any]]] = {
            "loop": lambda fn=fn: map(fn, cuts),
            "2 threads": lambda fn=fn: parallel_map(cuts, fn, 2),
            "2 processes": lambda fn=fn: parallel_map(cuts, fn, 2, kind="process"),
        }
        rounds = [{name: rates(way()) for name, way in ways.items()} for _ in range(ROUNDS)]
        for name in ways:
            rate = statistics.median(one[name][0] for one in rounds)
            ratio = statistics.median(one[name][0] / one["loop"][0] for one in rounds)
            first = statistics.median(one[name][1] for one in rounds)
            print(f"{fn.__name__:10} {name:12} {rate:7.1f} a second, {ratio:.2f} times; the first after {first:.2f} s")


if __name__ == "__main__":
    main()

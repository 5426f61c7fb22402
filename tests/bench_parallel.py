"""Prints how much faster ``parallel_map`` is than a loop over the same cuts.

    python tests/bench_parallel.py DATASET

Decoding, resampling to 16 kHz and a log-mel spectrogram of every target, then a function that holds Python's lock. Each
way reads the same eager cuts three times, in turn with the others; the fastest counts. The start of processes is timed
apart.
"""

from __future__ import annotations

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

ROUNDS = 3


def features(cut: Cut) -> np.ndarray:
    """A log-mel spectrogram (80, frames) of the target at 16 kHz."""
    audio = torch.from_numpy(cut.target_audio.resample(16000).load_audio())
    mel = torchaudio.compliance.kaldi.fbank(audio, num_mel_bins=80, sample_frequency=16000)
    return mel.numpy()


def letters(cut: Cut) -> int:
    """Plain Python: about as long as the features."""
    return sum(ord(letter) * number % 7 for number, letter in enumerate(cut.supervisions[0].text * 3000))


def start(item: int) -> int:
    """Nothing, but by a process that has imported what the others need."""
    return item


def timed(items: Callable[[], Iterable[Any]]) -> float:
    began = time.perf_counter()
    for _ in items():
        pass
    return time.perf_counter() - began


def main() -> None:
    torch.set_num_threads(1)
    cuts = list(open_shar(sys.argv[1], ["target_audio"]))
    for fn in (features, letters):
        ways: dict[str, Callable[[], Iterable[Any]]] = {
            "loop": lambda fn=fn: map(fn, cuts),
            "2 threads": lambda fn=fn: parallel_map(cuts, fn, 2),
            "2 processes": lambda fn=fn: parallel_map(cuts, fn, 2, kind="process"),
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(ROUNDS):
            for name, way in ways.items():
                best[name] = min(best[name], timed(way))
        started = min(timed(lambda: parallel_map(range(2), start, 2, kind="process")) for _ in range(2))
        for name, seconds in best.items():
            ratio = f"{best['loop'] / seconds:.2f} times"
            print(f"{fn.__name__:10} {name:12} {seconds:7.2f} s  {ratio}")
        without = best["loop"] / (best["2 processes"] - started)
        print(f"{fn.__name__:10} {'':12} starting the processes took {started:.2f} s; without it {without:.2f} times")


if __name__ == "__main__":
    main()

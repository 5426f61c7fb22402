"""Rows of ``parallel_map`` on cuts that are loaded, beside a loop over them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torchaudio
from lhotse import CutSet
from lhotse.cut import Cut

from bench.read import AUDIO, make_shards
from bench.rows import Case, row
from sharmill.shar import open_shar
from sharmill.training import parallel_map


def features(cut: Cut) -> np.ndarray:
    """A log-mel spectrogram (80, frames) of the target at 16 kHz."""
    audio = torch.from_numpy(cut.target_audio.resample(16000).load_audio())
    return torchaudio.compliance.kaldi.fbank(audio, num_mel_bins=80, sample_frequency=16000).numpy()


def letters(cut: Cut) -> int:
    """Plain Python: about as long as the features."""
    return sum(ord(letter) * number % 7 for number, letter in enumerate(cut.supervisions[0].text * 800))


def _case(folder: Path, tiny: bool, fn, **options) -> Case:
    torch.set_num_threads(1)
    make_shards(folder, 1, 8 if tiny else 200)
    cuts = CutSet.from_cuts(open_shar(folder, AUDIO)).to_eager()

    def use(results) -> None:
        assert sum(1 for _ in results) == len(cuts)

    return Case(
        amount=len(cuts), unit="cuts", by="wall",
        ours=lambda: use(parallel_map(cuts, fn, 2, **options)), baseline=lambda: use(map(fn, cuts)),
    )  # fmt: skip


@row("parallel map, threads", baseline="a loop", group="further")
def threads(folder: Path, tiny: bool) -> Case:
    """Decoding, resampling and a log-mel spectrogram in two threads."""
    return _case(folder, tiny, features)


@row("parallel map, processes", baseline="a loop", group="further")
def processes(folder: Path, tiny: bool) -> Case:
    """Plain Python in two processes, their start included."""
    return _case(folder, tiny, letters, kind="process")

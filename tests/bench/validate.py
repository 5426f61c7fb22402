"""Rows of the checker beside ``cat`` of the same files, both warm, and of its deep level."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
from support.shar import Project, voice

from bench.rows import Case, row
from sharmill.validate.checked_dataset import read_checked_dataset
from sharmill.validate.shard import ShardCheck


def make_dataset(folder: Path, tiny: bool) -> tuple[Path, float]:
    """A dataset of glides in noise of 8 to 16 s, which take as many bytes as read speech; and its seconds."""
    project = Project(folder)
    for number in range(4 if tiny else 120):
        seconds = 8 + number % 40 / 5
        noise = np.random.default_rng(number).standard_normal(round(seconds * 16000)) * 0.01
        samples = voice(seconds, pitch=120 + 3 * (number % 40), seed=number) + noise.astype(np.float32)
        project.add(f"{number}.flac", np.round(samples * 32767) / 32768)
    config = project.write(write={"shard_size": 2 if tiny else 60}, match={"min_duration": 0.0})
    project.encode(config)
    return project.dataset, sum(record["duration"] for record in project.records)


def check_all(dataset: Path, *, deep: bool = False) -> None:
    """All shards in this process, as a rank does, without plan and ledger."""
    subject = read_checked_dataset(dataset)
    check = ShardCheck(subject, deep=deep)
    for shard in subject.shards:
        checked = check(shard)
        assert not checked.findings, checked.findings[:3]


@row("validate", baseline="`cat` of the same files", group="further", inverse=True)
def default_level(folder: Path, tiny: bool) -> Case:
    """The default level of the checker, in one process."""
    dataset, seconds = make_dataset(folder, tiny)
    files = sorted(path for path in dataset.rglob("*") if path.is_file())
    return Case(
        amount=seconds / 3600, unit="hours of targets", ours=lambda: check_all(dataset),
        baseline=lambda: subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True) and None,
    )  # fmt: skip


@row("validate deep", group="further")
def deep_level(folder: Path, tiny: bool) -> Case:
    """The deep level of the checker, which decodes all audio, in one process."""
    dataset, seconds = make_dataset(folder, tiny)
    return Case(amount=seconds / 3600, unit="hours of targets", ours=lambda: check_all(dataset, deep=True))

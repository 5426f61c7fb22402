"""Training that is killed and goes on: real processes with real loaders, on other numbers of ranks and workers."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["lhotse", "lhotse.dataset", "torchdata.stateful_dataloader", "sharmill.shar.reading.loading"]


@dataclass(frozen=True)
class Setting:
    """What stays the same over a schedule."""

    dataset: Path
    folder: Path
    seed: int
    bucketing: bool
    num_cuts: int


def rank_process(setting: Setting, attempt: int, rank: int, world_size: int, num_workers: int, limit: int) -> None:
    """Trains without end: gets a batch, and writes a checkpoint with the loader's state and all that was used."""
    os.setpgrp()
    from torchdata.stateful_dataloader import StatefulDataLoader

    from sharmill.shar import open_shar
    from sharmill.shar.reading.loading import ResumableDataset

    cuts = open_shar(
        setting.dataset, [], shuffle=True, seed=setting.seed, infinite=True, rank=rank, world_size=world_size,
        block_size=1,
    )  # fmt: skip
    dataset = ResumableDataset(cuts, buckets if setting.bucketing else None, finish=describe)
    if (state := setting.folder / "merged.json").exists():
        dataset.load_state_dict(json.loads(state.read_bytes()))
    # Or each rank would start a server of its own, which imports everything anew.
    start = "fork" if num_workers else None
    loader = StatefulDataLoader(dataset, batch_size=None, num_workers=num_workers, multiprocessing_context=start)
    used: list = []
    checkpoint = setting.folder / f"{attempt}.{rank}.json"
    for batch in iter(loader):
        used.extend(batch)
        checkpoint.with_suffix(".tmp").write_text(json.dumps({"used": used, "loader": loader.state_dict()}))
        checkpoint.with_suffix(".tmp").replace(checkpoint)
        if len(used) >= limit:
            signal.pause()  # enough: the others need the cores


def buckets(cuts):
    """A sampler that holds many cuts back."""
    from lhotse.dataset import DynamicBucketingSampler

    return DynamicBucketingSampler(
        cuts, max_cuts=3, num_buckets=2, duration_bins=[0.5], buffer_size=20, shuffle=True, world_size=1, rank=0
    )


def describe(made) -> list:
    """(epoch, id) of the cuts of a batch, or of a single cut."""
    from lhotse import CutSet

    return [[cut.shar_position[0], cut.id] for cut in (made if isinstance(made, CutSet) else [made])]


def run_attempt(setting: Setting, attempt: int, rng: random.Random, max_ranks: int) -> tuple[list, int, int]:
    """Starts ranks, kills them at some moment, and leaves their merged state for the next; what they used."""
    from sharmill.shar.reading.loading import merge_loader_states

    world_size, num_workers = rng.randint(1, max_ranks), rng.randint(0, 3)
    wanted = rng.randint(1, setting.num_cuts)
    limit = 2 * wanted // world_size + 1
    processes = [
        CONTEXT.Process(target=rank_process, args=(setting, attempt, rank, world_size, num_workers, limit))
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + 300
        while True:
            found = [read_checkpoint(setting, attempt, rank) for rank in range(world_size)]
            if all(found) and sum(len(one["used"]) for one in found) >= wanted:
                break
            assert all(process.is_alive() for process in processes), "a rank ended by itself"
            assert time.monotonic() < deadline, "the ranks take too long"
            time.sleep(0.02)
    finally:
        for process in processes:
            # With its workers, which are in its group as soon as it runs.
            for kill in (lambda pid: os.killpg(pid, signal.SIGKILL), lambda pid: os.kill(pid, signal.SIGKILL)):
                try:
                    kill(process.pid)
                except ProcessLookupError:
                    pass
            process.join()
    found = [read_checkpoint(setting, attempt, rank) for rank in range(world_size)]
    state = merge_loader_states([one["loader"] for one in found])
    (setting.folder / "merged.json").write_text(json.dumps(state))
    return [tuple(entry) for one in found for entry in one["used"]], world_size, num_workers


def read_checkpoint(setting: Setting, attempt: int, rank: int) -> dict | None:
    try:
        return json.loads((setting.folder / f"{attempt}.{rank}.json").read_bytes())
    except FileNotFoundError:
        return None


def run_schedule(dataset: Path, folder: Path, seed: int, *, bucketing: bool, max_ranks: int) -> str:
    """Trains over one whole epoch at least, with kills; raises AssertionError unless each id came exactly once."""
    from sharmill.shar import open_shar

    rng = random.Random(seed)
    folder.mkdir(parents=True)
    ids = {cut.id for cut in open_shar(dataset, [])}
    setting, seen, attempts = Setting(dataset, folder, seed, bucketing, len(ids)), Counter(), []
    while not attempts or json.loads((folder / "merged.json").read_bytes())["epoch"] < 1:
        used, world_size, num_workers = run_attempt(setting, len(attempts), rng, max_ranks)
        seen.update(used)
        attempts.append(f"{world_size}x{num_workers}")
    assert set(seen.values()) == {1}, [entry for entry, count in seen.items() if count > 1]
    assert {cut_id for epoch, cut_id in seen if epoch == 0} == ids
    return f"seed {seed}: ranks x workers {' '.join(attempts)}: {sum(seen.values())} cuts, each once per epoch"

"""Power failures at any moment: readers get nothing bad, and a relaunch gives the same bytes.

``make torture`` runs longer; SEED, STATES and MINUTES in the environment set its extent for each run. See ``runs.py``
for the model of crashes. The same seed finds the same crashes.
"""

import logging
import os
import shutil
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from faults.runs import STAGES, PowerCuts, PoweredRun
from support.project import TINY_CODEC, TINY_ENCODER, Project, make_voices, put, voice

from sharmill.collect.manifest import ManifestOptions, make_manifest
from sharmill.config import Config
from sharmill.engine.executor import Listener
from sharmill.engine.order import choose_stages
from sharmill.export.run import export_dataset
from sharmill.grow.join import append_dataset, merge_datasets
from sharmill.grow.split import split_dataset
from sharmill.pipeline import run_dataset
from sharmill.shar.fields import TARGET_AUDIO, published_field
from sharmill.shar.rebuild import rebuild_index
from sharmill.shar.sidecars import write_sidecars
from sharmill.validate.findings import read_report, take_back_commits

SEED, STATES, MINUTES = (int(os.environ.get(name, value)) for name, value in
                         (("SEED", "20"), ("STATES", "24"), ("MINUTES", "5")))  # fmt: skip
# The folder with the fastest writes.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

pytestmark = pytest.mark.timeout(60 * MINUTES + 600)


_TOY = {"name": "toy", "model": TINY_CODEC}
_MATCH = {"encoder": TINY_ENCODER, "min_duration": 0.0, "min_similarity": 0.0, "unit_seconds": 0.6}


def _config(work: Path, changes: dict[str, Any]) -> Config:
    """Return the configuration of six utterances of two voices and one missing file, in two shards."""
    project = Project(work.parent)
    is_new = not project.root.exists()
    for number in range(6):
        samples = voice(0.3, pitch=200 + 2 * number, seed=number) if is_new else None
        project.add(f"{number}.wav", samples, duration=0.3, speaker=f"s{number % 2}")
    project.add("absent.wav", duration=0.3)
    project.run_dir, project.dataset = work / "run", work / "dataset"
    values: dict[str, Any] = {
        "prepare": {"min_duration": 0.0, "unit_records": 4}, "match": _MATCH,
        "voices": {"window_seconds": 0.1},
        "write": {"shard_size": 3}, "encode": {"codecs": [_TOY]}, "executor": {"workers": 1, "device": "cpu"},
    }  # fmt: skip
    return project.configure(**values | changes)


def _run(work: Path, *stages: str, restart: bool = False, **changes: Any) -> None:
    """Run stages, by default all."""
    assert run_dataset(_config(work, changes), Listener(), stages=stages or STAGES, restart=restart).ok


def _of_stage(name: str, *before: str) -> PoweredRun:
    """Return the run of one stage after the stages in ``before``."""
    datasets = [] if name in ("prepare", "voices", "match") else ["dataset"]
    return PoweredRun(
        name, lambda work: _run(work, *before) if before else None, lambda work: _run(work, name), datasets
    )


def _begin_other(work: Path) -> None:
    """Make a dataset with other content, more shards and another manifest, which a restart must remove."""
    _run(work, write={"shard_size": 2, "seed": 1}, match=_MATCH | {"min_similarity": 0.5})


def _damage(work: Path) -> None:
    """Make a finished dataset with a damaged shard, and a validation report about it."""
    _run(work, *STAGES[:-1])
    shard = work / "dataset" / published_field(TARGET_AUDIO).path(1)
    shard.write_bytes(bytes(shard.stat().st_size))
    _run(work, "validate")
    shutil.copy(work / "run/validate/report.json", work.parent)


def _redo(work: Path) -> None:
    config = _config(work, {})
    take_back_commits(config, read_report(work.parent / "report.json"), choose_stages(config))
    _run(work)


def _make_datasets(work: Path) -> None:
    """Make two datasets of four cuts in two shards, with codes."""
    for name in "ab":
        made = make_voices(work.parent / name, name, codecs="t")
        shutil.copytree(made.dataset, work / name)


def _lose_index(work: Path) -> None:
    _make_datasets(work)
    (work / "a/shards.jsonl").unlink()


def _put_speech(work: Path) -> None:
    """Make three recordings of two speakers, two of them with texts, and a file that is no audio."""
    for name in ("anna/one", "anna/two", "ben/three"):
        put(work / f"speech/{name}.wav", voice(0.3, seed=len(name)))
        (work / f"speech/{name}.txt").write_text(f"the text of {name}\n")
    (work / "speech/ben/three.txt").unlink()
    (work / "speech/ben/four.wav").write_bytes(b"no audio")


def _collect(work: Path) -> None:
    options = ManifestOptions(keys={"speaker": "{path[0]}", "language": "en"}, vocabulary=str(work / "words.txt"),
                              force=True)  # fmt: skip
    make_manifest([str(work / "speech")], str(work / "speech.json"), options, workers=1)


# The runs in order of their number of steps.
RUNS = [
    PoweredRun("index", _lose_index, lambda work: list(rebuild_index(work / "a")), "a"),
    PoweredRun("append", _make_datasets, lambda work: append_dataset(work / "a", work / "b"), "ab"),
    PoweredRun("merge", _make_datasets, lambda work: merge_datasets([work / "a", work / "b"], work / "c"), "abc"),
    PoweredRun("sidecars", _make_datasets, lambda work: write_sidecars(work / "a"), "a"),
    PoweredRun("export", _make_datasets, lambda work: export_dataset(work / "a", "nemo_codes", work / "x"), "a"),
    PoweredRun("export tar", _make_datasets, lambda work: export_dataset(work / "a", "nemo_tarred", work / "x"), "a"),
    PoweredRun("manifest", _put_speech, _collect),
    *(_of_stage(name, *STAGES[:number]) for number, name in enumerate(STAGES)),
    PoweredRun("split", _make_datasets, lambda work: split_dataset(work / "a", work / "s", {"valid": 0.4}, workers=1),
               ["a", "s/train", "s/valid"]),
    PoweredRun("redo", _damage, _redo, ["dataset"]),
    PoweredRun("add codec", _run, lambda work: _run(work, encode={"codecs": [_TOY, _TOY | {"name": "other"}]}),
               ["dataset"], "toy"),
    PoweredRun("pipeline", lambda work: None, _run, ["dataset"]),
    PoweredRun("restart", _begin_other, lambda work: _run(work, restart=True), ["dataset"]),
]  # fmt: skip


def cut_power(run: PoweredRun, states: int, without: str | None = None) -> tuple[int, list[str]]:
    """Return the number of disk states from which a run was relaunched, and a list of problems."""
    ends = time.monotonic() + 60 * MINUTES
    count, problems = 0, []
    logging.disable(logging.WARNING)  # relaunches would print thousands of warnings
    try:
        with tempfile.TemporaryDirectory(prefix="sharmill-power-", dir=MEMORY) as folder:
            for crash, _, problem in islice(PowerCuts(run, Path(folder), without).cut_all(SEED), states):
                count += 1
                if problem:
                    problems.append(f"seed {SEED}, after step {crash.after}, losses {crash.number}: {problem}")
                if time.monotonic() > ends:
                    break
    finally:
        logging.disable(logging.NOTSET)
    return count, problems


def test_an_fsync_that_is_left_out_is_found():
    count, problems = cut_power(RUNS[0], 40, "atomic.open_atomic < index.write_shards")
    assert count == 40
    assert problems


@pytest.mark.parametrize(
    "run", [RUNS[0], *(pytest.param(run, marks=pytest.mark.slow) for run in RUNS[1:])], ids=lambda run: run.name
)
def test_a_run_survives(run):
    count, problems = cut_power(run, STATES)
    assert problems == []
    assert count > 0

"""A small run of the whole pipeline that can be put back to the moment before any of its stages.

Each stage is run once without trouble; what it left is kept and is what every troubled run has to come to as well.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lhotse import CutSet

from sharmill.demo.corpus import make_corpus
from sharmill.errors import ConfigError
from sharmill.files.locks import LOCK_NAME
from sharmill.files.staging import STAGING_NAME
from sharmill.shar import open_shar
from sharmill.shar.index import read_shards
from sharmill.shar.layout import BASE_FIELDS, CONTEXT_CODES, CUTS, TARGET_CODES, codes_field, published_field
from support.models import save_encodec
from support.paths import REPOSITORY

STAGES = ("prepare", "match", "write", "encode", "validate")
CODEC = "tiny"
# Of one run only: who did what and when. Each of them may differ from run to run.
_PERSONAL = {
    "attempts", "claims", "end.json", "given.json", "id", "jobs", "ledger", "logs", "progress",
    "reserved", "resolved_config.yaml", "round.json", "token",
}  # fmt: skip
# It has the times of the dataset's files.
_PERSONAL_FILES = {"run/validate/plan/identity.json"}
_INDEX = {"dataset.json", "shards.jsonl"}


@dataclass(frozen=True)
class Pace:
    """How long a stage took: seconds to the first commit, from there to the last one, and from there to the end."""

    start: float
    units: float
    end: float
    num_units: int


class SmallRun:
    """``work`` has the run directory and the dataset directory; ``states/<stage>`` is ``work`` after that stage."""

    def __init__(self, folder: Path, *, num_voices: int = 8, utterances_per_voice: int = 4, **units: int) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.dataset = self.work / "dataset"
        self.paces: dict[str, Pace] = {}
        self.config = folder / "config.yaml"
        corpus = make_corpus(folder / "corpus", num_voices=num_voices, utterances_per_voice=utterances_per_voice)
        codec = save_encodec(folder / "encodec", upsampling_ratios=[8, 5, 4, 2])
        values = {
            "name": "small",
            "run_dir": str(self.work / "run"),
            "dataset_dir": str(self.dataset),
            "sources": [{"manifest": str(corpus.manifest), "audio_root": str(corpus.audio_root)}],
            "prepare": {"unit_records": units.get("records", 3)},
            "match": {"unit_seconds": units.get("seconds", 2.0)},
            "write": {"shard_size": units.get("shard", 2)},
            "encode": {"codecs": [{"name": CODEC, "model": f"transformers:{codec}"}]},
        }
        self.config.write_text(yaml.safe_dump(values))
        self.work.mkdir()
        self._save("begin")
        for stage in STAGES:
            self.paces[stage] = self._measure(stage)
            self._save(stage)

    def command(self, stage: str, workers: int = 1) -> list[str]:
        """The command line that runs one stage."""
        return [sys.executable, "-m", "sharmill", "run", str(self.config), stage, f"executor.workers={workers}"]

    def run(self, stage: str, workers: int = 1, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs one stage to its end."""
        return subprocess.run(
            self.command(stage, workers), capture_output=True, text=True, timeout=300, check=False, cwd=REPOSITORY,
            **options,
        )  # fmt: skip

    def stage_dirs(self, stage: str) -> list[Path]:
        """The folders in the run directory of what the command line runs under the name of a stage."""
        names = ("survey", f"encode/{CODEC}", f"assemble/{CODEC}") if stage == "encode" else (stage,)
        return [self.work / "run" / name for name in names]

    def state(self, stage: str) -> Path:
        """The folder that has ``work`` as the stage left it."""
        return self.folder / "states" / stage

    def before(self, stage: str) -> Path:
        """The folder that has ``work`` as the stage finds it."""
        return self.state(("begin", *STAGES)[STAGES.index(stage)])

    def restore(self, stage: str) -> None:
        """Puts ``work`` back to the moment before the stage; the folder itself stays, for it may be a mount."""
        for path in self.work.iterdir():
            shutil.rmtree(path)
        shutil.copytree(self.before(stage), self.work, dirs_exist_ok=True)

    def commits(self, stage: str) -> int:
        """How many commits are in the ledger."""
        ledgers = (path for folder in self.stage_dirs(stage) for path in folder.glob("ranks/*/ledger/*.jsonl"))
        return sum(path.read_bytes().count(b"\n") for path in ledgers)

    def attempts(self, stage: str) -> Counter[str]:
        """How often each unit was begun, by the logs of the ranks."""
        lines = [
            (folder, line)
            for folder in self.stage_dirs(stage)
            for path in folder.glob("logs/rank-*.log")
            for line in path.read_text().split("\n")
        ]
        return Counter(
            f"{folder.name} {line.split('unit ', 1)[1].split(' begins')[0]}"
            for folder, line in lines
            if " begins: " in line
        )

    def differences(self, stage: str) -> list[str]:
        """How ``work`` differs from what the stage leaves without trouble: nothing may."""
        expected, found = lasting_files(self.state(stage)), lasting_files(self.work)
        wrong = [f"{name} is missing" for name in expected.keys() - found.keys()]
        wrong += [f"{name} is too much" for name in found.keys() - expected.keys()]
        for name in expected.keys() & found.keys():
            if expected[name] != found[name]:
                wrong.append(f"{name} has other bytes")
        staging = [path.parent.relative_to(self.work) for path in self.work.rglob(f"{STAGING_NAME}/*")]
        return sorted(wrong) + [f"{name} is left over" for name in (*self.leftovers(), *staging)]

    def leftovers(self, below: str = "") -> list[str]:
        """Temporary files and folders, wherever they are; in a staging folder what an attempt has left."""
        names = (path.relative_to(self.work).as_posix() for path in sorted((self.work / below).rglob("*")))
        return [name for name in names if is_temporary(name)]

    def check_readers(self, stage: str) -> None:
        """Proves that who reads the dataset directory at this moment, while a stage is at work, gets nothing bad."""
        self.check_published()
        shards = self._committed(CUTS)
        self._check_with_lhotse(shards, {field: field for field in BASE_FIELDS})
        # Of the codes, those of the contexts come last.
        with_codes = self._committed(codes_field(CODEC, CONTEXT_CODES))
        codes = {field: codes_field(CODEC, field) for field in (TARGET_CODES, CONTEXT_CODES)}
        self._check_with_lhotse(with_codes, {CUTS: CUTS, **codes})
        try:
            cuts = open_shar(self.dataset)
        except ConfigError:
            assert stage in ("prepare", "match", "write"), "a finished dataset has lost its index"
            return
        assert stage not in ("prepare", "match"), "there is a dataset already"
        assert _load_all(cuts) == sum(self._counts())

    def check_published(self) -> None:
        """Every file under a final name has its final bytes; the index may be that before the codes came or after."""
        for top in sorted(self.dataset.glob("[!.]*")):
            for path in [top] if top.is_file() else sorted(top.rglob("[!.]*.*")):
                name = path.relative_to(self.dataset).as_posix()
                states = ("write", "encode") if name in _INDEX else ("encode",)
                assert path.read_bytes() in [(self.state(s) / "dataset" / name).read_bytes() for s in states], name

    def _committed(self, last_field: str) -> list[int]:
        final = [published_field(last_field).path(index) for index in range(self.paces["write"].num_units)]
        return [index for index, name in enumerate(final) if (self.dataset / name).exists()]

    def _counts(self) -> list[int]:
        return [shard.count for shard in read_shards(self.state("write") / "dataset")]

    def _check_with_lhotse(self, shards: list[int], fields: dict[str, str]) -> None:
        if shards:
            files = {
                name: [str(self.dataset / published_field(f).path(index)) for index in shards]
                for name, f in fields.items()
            }
            counts = self._counts()
            assert _load_all(CutSet.from_shar(fields=files)) == sum(counts[index] for index in shards)

    def _measure(self, stage: str) -> Pace:
        began = time.monotonic()
        seen: list[float] = []
        process = subprocess.Popen(self.command(stage), stdout=subprocess.DEVNULL, cwd=REPOSITORY)
        while process.poll() is None:
            seen += [time.monotonic()] * (self.commits(stage) - len(seen))
            time.sleep(0.001)
        assert process.returncode == 0
        seen += [time.monotonic()] * (self.commits(stage) - len(seen))
        return Pace(seen[0] - began, seen[-1] - seen[0], time.monotonic() - seen[-1], len(seen))

    def _save(self, state: str) -> None:
        shutil.copytree(self.work, self.state(state))


def _load_all(cuts: CutSet) -> int:
    """Loads all that the cuts have; returns how many they are."""
    count = 0
    for cut in cuts:
        for field in ("target_audio", "context_audio"):
            if cut.has_custom(field):
                assert getattr(cut, f"load_{field}")().shape == (1, getattr(cut, field).num_samples)
        for field in (TARGET_CODES, CONTEXT_CODES):
            if cut.has_custom(field):
                assert getattr(cut, field).load().shape == tuple(getattr(cut, field).shape)
        count += 1
    return count


def lasting(names: Iterable[str]) -> list[str]:
    """Return the names, relative to the folder of a run, of files whose bytes must be the same after every run."""
    own = (*_PERSONAL, LOCK_NAME)
    return [name for name in names if not set(own) & set(name.split("/")) and name not in _PERSONAL_FILES]


def lasting_files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of these files, by relative name."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    # The folder of a plan's ranks is called by a random token.
    return {re.sub("/ranks/[0-9a-f]+-[0-9a-f]+/", "/ranks/", name): found[name].read_bytes() for name in lasting(found)}


def is_temporary(name: str) -> bool:
    """Return True for what only a process that was ended leaves, by its name below the folder of a run."""
    own = name.rpartition("/")[2]
    in_staging = name.partition(f"{STAGING_NAME}/")[2]
    return (own.startswith(".") and own != STAGING_NAME) or own.endswith(".tmp") or "/" in in_staging

"""Seeded mutations of every format that sharmill reads: nothing but errors that it means may come out of them.

    PYTHONPATH=tests python tests/security/fuzz.py --seed 7 --rounds 100000

``tests/security/test_fuzz.py`` does some rounds of it. What is found becomes a case of the tests beside it.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import logging
import math
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from support.fuzzed_datasets import DatasetTargets
from support.mutations import Target, mutate_values
from support.shar import Project, voice
from support.source_forms import FORMS

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.cli.status import QueueView, print_status
from sharmill.config import Config, load_config, to_yaml
from sharmill.engine.listener import Listener
from sharmill.engine.progress import RankProgress
from sharmill.errors import RejectRecord, SharmillError
from sharmill.executors.local import LocalExecutor
from sharmill.files.staging import Staging, token_staging
from sharmill.manifest import Utterance
from sharmill.pipeline import make_stages, run_dataset
from sharmill.prepare.check import parse_record
from sharmill.prepare.stage import PrepareStage
from sharmill.report.facts import read_run_facts
from sharmill.report.page import make_page
from sharmill.shar.arrays import array_from_bytes, array_to_bytes
from sharmill.shar.cut_lines import read_cuts
from sharmill.shar.index import read_dataset, read_shards
from sharmill.shar.items import ItemTable
from sharmill.sources.nemo import NemoSource
from sharmill.sources.table import TableSource
from sharmill.validate.accounts import hash_record
from sharmill.validate.checked_dataset import check_index, read_checked_dataset
from sharmill.validate.findings import encode_report, make_report, read_report


class Corpus:
    """A small run and its dataset, and a target for each of their files and for the inputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        project = Project(folder / "project")
        for number in range(4):
            project.add(f"{number}.wav", voice(1.0, seed=number), speaker=f"s{number // 2}")
        project.add("absent.wav", duration=1.0)
        self.config = project.configure(
            match={"min_similarity": -1.0, "min_duration": 0.0}, write={"shard_size": 2}, executor={"workers": 1},
            max_reject_fraction=0.9,
        )  # fmt: skip
        assert run_dataset(self.config, Listener(), executor=LocalExecutor(1)).ok
        self.run_dir, self.dataset = project.run_dir, project.dataset
        self.manifest = project.folder / "small.json"
        self._add_files_of_work()

    def _add_files_of_work(self) -> None:
        """Add what a run has only while it is under way, or on a cluster."""
        stage = self.run_dir / "write"
        (stage / "done.json").unlink()
        token = (stage / "plan/token").read_text()
        progress = stage / "ranks" / token / "progress"
        progress.mkdir(parents=True, exist_ok=True)
        record = RankProgress(
            rank=0, slot="a/rank 0", owner="b", pid=7, host="a", started=1.0, updated=2.0, unit=1, unit_began=1.5,
            units_done=1,
        )  # fmt: skip
        (progress / "rank-000.json").write_bytes(msgspec.json.encode(record))
        (stage / "failures.jsonl").write_bytes(b'{"index":1,"message":"m","traceback":"t"}\n')
        (self.run_dir / "given.json").write_bytes(b'{"stages":["prepare"],"command":"c","cluster":"d"}')

    def targets(self) -> Iterator[Target]:
        """Yield what is fuzzed."""
        line = self.manifest.read_bytes().splitlines()[0]
        yield Target("record", line, lambda data: hash_record(parse_record(data)))
        yield Target("manifest", self.manifest.read_bytes(), self._read_manifest)
        table = b"audio_filepath|duration|text|speaker\na.wav|1.0|hello|x\nb.wav|2.0|you|y\n"
        yield Target("table", table, self._read_table)
        yield Target("configuration", to_yaml(self.config), lambda data: load_config(self._put("config.yaml", data)))
        report = make_report(self.dataset, [], level={}, checked={}, unchecked=[])
        yield Target("report", encode_report(report), lambda data: read_report(self._put("report.json", data)))
        yield Target("array", array_to_bytes(np.arange(8).reshape(2, 4)), lambda data: array_from_bytes(data, "x"))
        cuts = gzip.decompress((self.dataset / "cuts/cuts.000000.jsonl.gz").read_bytes())
        yield Target("cuts", cuts, lambda data: list(read_cuts(self._put("cuts.jsonl.gz", gzip.compress(data, 1)))))
        yield Target("gzip", gzip.compress(cuts), lambda data: list(read_cuts(self._put("cuts.jsonl.gz", data))))
        tar = (self.dataset / "target_audio/recording.000000.tar").read_bytes()
        yield Target("tar", tar, self._read_tar)
        for name in ("dataset.json", "shards.jsonl"):
            yield Target(name, (self.dataset / name).read_bytes(), lambda data, name=name: self._read_index(name, data))
        for path in sorted(self.run_dir.rglob("*")):
            name = path.relative_to(self.run_dir).as_posix()
            if path.suffix in (".json", ".jsonl", ".yaml", "") and path.is_file() and not name.startswith("manifests"):
                yield Target(f"run/{name}", path.read_bytes(), lambda data, name=name: self._show(name, data))
                if path.suffix in (".json", ".jsonl") and path.stat().st_size:
                    rows = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
                    lines = b"\n".join(json.dumps(json.loads(row)).encode() for row in rows)
                    yield Target(
                        f"report/{name}", lines, lambda data, name=name: self._report(name, data), mutate_values
                    )

    def source_targets(self) -> Iterator[Target]:
        """Yield every file of one small corpus in the forms of all sources, read as the stage prepare reads it."""
        audio = self.folder / "project/audio"
        records = [
            {"audio_filepath": f"{number}.wav", "duration": 1.0, "text": f"text {number}", "speaker": f"s{number // 2}"}
            for number in range(4)
        ]
        for name, make in FORMS.items():
            folder = self.folder / "forms" / name
            folder.mkdir(parents=True)
            source = make(folder, records, audio)
            project = Project(self.folder / "forms" / f"{name}-run")
            project.folder.mkdir()
            config = project.configure(match=None, sources=[source])
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                title = f"{name}/{path.relative_to(folder).as_posix()}"
                yield Target(title, path.read_bytes(),
                             lambda data, path=path, config=config: self._prepare(config, path, data))  # fmt: skip

    def _prepare(self, config: Config, path: Path, data: bytes) -> None:
        """Read all records of a source of which one file has other data, and the audio of those that are kept."""
        good = path.read_bytes()
        stage, segments = PrepareStage(config), SegmentReader(AudioRoots.of(s.audio_root for s in config.sources))
        shutil.rmtree(self.folder / "planned", ignore_errors=True)
        (self.folder / "planned").mkdir()
        token_staging(self.folder / "planned", "0" * 16).mkdir(parents=True)
        try:
            path.write_bytes(data)
            for source in config.sources:
                source.check()
                source.check_speaker()
            stage.identity()
            processor = stage.open("cpu")
            for unit in stage.plan(self.folder / "planned"):
                with Staging(self.folder / "planned", "0" * 16) as staging:
                    output = processor.process(unit, staging, lambda amount: None)
                    for line in staging.path(output.files[0]).read_bytes().splitlines():
                        with suppress(RejectRecord):
                            segments.read(Utterance.from_json(line).segment)
        finally:
            path.write_bytes(good)

    def _put(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(data)
        return path

    def _read_manifest(self, data: bytes) -> None:
        source = NemoSource(manifest=str(self._put("fuzzed.json", data)), audio_root=".")
        source.check()
        for piece in source.pieces(2):
            for line in source.read(piece.params):
                parse_or_reject(line)

    def _read_table(self, data: bytes) -> None:
        source = TableSource(table=str(self._put("fuzzed.csv", data)), audio_root=".", delimiter="|")
        source.check()
        for piece in source.pieces(2):
            list(source.read(piece.params))

    def _read_tar(self, data: bytes) -> None:
        table = ItemTable(self._put("fuzzed.tar", data))
        for number in range(len(table)):
            table.item(number, copy=True)

    def _read_index(self, name: str, data: bytes) -> None:
        good = (self.dataset / name).read_bytes()
        try:
            (self.dataset / name).write_bytes(data)
            list(check_index(read_checked_dataset(self.dataset)))
            read_dataset(self.dataset)
            list(read_shards(self.dataset))
        finally:
            (self.dataset / name).write_bytes(good)

    def _show(self, name: str, data: bytes) -> None:
        path = self.run_dir / name
        good = path.read_bytes()
        try:
            path.write_bytes(data)
            queue = QueueView(self.run_dir, next_question=float("inf"))
            print_status(Console(file=io.StringIO(), width=120), self.run_dir, queue)
        finally:
            path.write_bytes(good)

    def _report(self, name: str, data: bytes) -> None:
        """Make the page of a run of which one file has other values."""
        path = self.run_dir / name
        good = path.read_bytes()
        try:
            path.write_bytes(data)
            make_page(read_run_facts(self.config, make_stages(self.config), {}, decode=False))
        finally:
            path.write_bytes(good)


def parse_or_reject(line: bytes) -> None:
    """Parse a record, and its hashes, or have it rejected."""
    try:
        hash_record(parse_record(line))
    except SharmillError:
        return


def fuzz(
    folder: Path, seed: int, rounds: int, only: str = "", minutes: float = math.inf
) -> tuple[list[str], Counter[str]]:
    """Return what went wrong (a target, the seed of its mutation, the end of the traceback), and the rounds by end."""
    found: dict[str, str] = {}
    ended: Counter[str] = Counter()
    ends = time.monotonic() + 60 * minutes
    corpus = Corpus(folder)
    datasets = DatasetTargets(folder, corpus.dataset)
    every = chain(corpus.targets(), corpus.source_targets(), datasets.targets())
    targets = [target for target in every if target.name.startswith(only)]
    for number in range(rounds):
        if time.monotonic() > ends:
            break
        target = targets[number % len(targets)]
        draws = random.Random(f"{seed} {target.name} {number}")
        try:
            target.read(target.change(target.data, draws))
            ended["read"] += 1
        except SharmillError as error:
            ended["refused with an error of sharmill's"] += 1
            if not str(error).strip():
                found[target.name] = f"{target.name}, round {number}: an error without a sentence"
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            ended["another error"] += 1
            frames = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in frames if "sharmill" in frame.filename][-1]
            place = f"{Path(ours.filename).name}:{ours.lineno}"
            found.setdefault(f"{place} {type(error).__name__}",
                             f"{target.name}, seed {seed}, round {number}: {place}: {error!r:.200}")  # fmt: skip
    return sorted(found.values()), ended


def main() -> int:
    """Fuzz for a while, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no round begins after that")
    parser.add_argument("--only", default="", help="targets whose names begin like this")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # warnings about lines that are no records
    folder = Path(tempfile.mkdtemp(prefix="sharmill-fuzz-"))
    try:
        found, ended = fuzz(folder, options.seed, options.rounds, options.only, options.minutes)
    finally:
        shutil.rmtree(folder)
    rounds = ended.total()
    print("\n".join([*found, f"seed {options.seed}: {rounds} rounds, {len(found)} kinds of errors"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

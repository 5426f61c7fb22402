"""Seeded mutations of every format that sharmill reads end in the intended errors.

    SEED=7 ROUNDS=100000 pytest -m slow tests/security/test_fuzz.py

runs until it is interrupted or finished. Problems that it finds become cases of the neighbouring tests.
"""

import bz2
import gzip
import json
import logging
import lzma
import os
import random
import re
import resource
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from support.project import REPOSITORY, Project, check_of, reindex, stage_of, voice
from support.sources import FORMS, tar_bytes

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.cli.main import cli
from sharmill.config import Config, load_config, load_typed, to_yaml
from sharmill.engine.executor import Listener
from sharmill.engine.fence import refuse_reservations
from sharmill.engine.order import make_stages
from sharmill.engine.progress import RankProgress
from sharmill.engine.stage import StageRun
from sharmill.errors import RejectRecord, SharmillError
from sharmill.executors.local import LocalExecutor
from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.files.locks import LOCK_NAME, lock_owner
from sharmill.files.staging import STAGING_NAME, Staging, token_staging
from sharmill.manifest import Utterance
from sharmill.models.checkpoints import check_transformers_config, read_nemo_config
from sharmill.pipeline import run_dataset
from sharmill.report.facts import read_run_facts
from sharmill.report.page import make_page
from sharmill.shar import open_shar
from sharmill.shar.arrays import array_from_bytes, array_to_bytes
from sharmill.shar.items import read_field
from sharmill.shar.sidecars import write_sidecars
from sharmill.validate.findings import encode_report, make_report, read_report
from sharmill.validate.stage import ValidateStage

TOKENS = (
    b"\0", b"\xff", b"\n", b"\r\n", b'"', b"{", b"[", b"]}", b"-1", b"1e999", b"NaN", b"null", b"true", b"../../x",
    b"/etc", b"9" * 400, b"\xed\xa0\x80", b"\\ud800", b"a" * 5000, b"[" * 2000, b"0", b"18446744073709551616",
    b"-9223372036854775809", b"\x1b[2J", b"9007199254740993", b"1e308", b"253402300800",
)  # fmt: skip
COMMAND = {"id": "r", "sources": [{"type": "command", "channels": [0], "source": "touch ran"}],
           "sampling_rate": 16000, "num_samples": 16000, "duration": 1.0}  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, -(2**70), 1e308, -0.5, "", "x", "../../etc/passwd", "/etc", "a\0b", "\x1b[2J\n",
    "a" * 5000, [], {}, [[]], [0], ["shar"], {"a": None}, {"width": 1}, {"shape": [1]}, {"array": {}}, 10**15,
    {"storage_type": "s3", "shape": [1]}, COMMAND, {"type": "command", "channels": [0], "source": "touch ran"},
    {"name": "Speed", "kwargs": {"factor": 0.0}}, [{"name": "Nothing"}], json.loads("[" * 200 + "]" * 200),
    [{"name": "Speed", "kwargs": {"factor": None}}], [{"name": "Speed", "kwargs": {"factor": "x"}}],
    {**COMMAND, "sources": [{"type": "shar", "channels": [0], "source": ""}], "sampling_rate": 10**15,
     "transforms": [{"name": "Speed", "kwargs": {"factor": "x"}}]},
)  # fmt: skip
KEYS = ("type", "id", "transforms", "features", "custom", "recording", "tracks", "x")
TOKEN = "0" * 16


def mutate(data: bytes, draws: random.Random) -> bytes:
    """Change data; if it is JSON, change its values in half of the cases, as changed bytes are rarely JSON."""
    for lines in (data.splitlines(), [data]) if draws.random() < 0.5 else ():
        with suppress(ValueError):
            rows = [json.loads(line) for line in lines]
            for _ in range(draws.randint(1, 3)):
                number = draws.randrange(len(rows))
                rows[number] = mutate_value(rows[number], draws)
            return b"\n".join(json.dumps(row).encode() for row in rows) + b"\n"
    return mutate_bytes(data, draws)


def mutate_bytes(data: bytes, draws: random.Random) -> bytes:
    """Change data in one to six places."""
    changed = bytearray(data)
    for _ in range(draws.randint(1, 6)):
        place, start = draws.randrange(len(changed) + 1), draws.randrange(len(changed) + 1)
        length, token = draws.choice((1, 1, 2, 8, 64, 600)), draws.choice(TOKENS)
        flipped = bytes(byte ^ 1 << draws.randrange(8) for byte in changed[place : place + 1])
        digit = re.compile(rb"[0-9]|$").search(changed, place)
        at, size, new = draws.choice([
            (place, 1, flipped), (place, 0, token), (place, length, token), (place, length, b""),
            (place, len(changed), b""), (place, 0, changed[start : start + length]), (digit.start(), 1, token),
        ])  # fmt: skip
        changed[at : at + size] = new
    return bytes(changed)


def mutate_value(root: Any, draws: random.Random) -> Any:
    """Change, remove or add one value within a value."""
    # Copy the value: inserting a value into itself would make it infinite.
    new = deepcopy(draws.choice(VALUES))
    places: list[tuple[Any, Any]] = []
    pending = [root]
    while pending:
        value = pending.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        places += [(value, key) for key in keys]
        pending += [value[key] for key in keys]
    if not places or draws.random() < 0.02:
        return new
    (holder, key), (other, place) = draws.choice(places), draws.choice(places)
    kind = draws.randrange(5)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[draws.choice(KEYS)] = new
    else:
        holder[key] = deepcopy(other[place]) if kind == 2 else new
    return root


@dataclass(frozen=True)
class Target:
    """A file to change, and a function that reads it; ``pack`` makes its bytes from ``data``."""

    name: str
    path: Path
    read: Callable[[], object]
    data: bytes
    pack: Callable[[bytes], bytes] = bytes

    def try_one(self, draws: random.Random) -> None:
        """Read the file with other data in it."""
        before = self.path.read_bytes() if self.path.exists() else None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(self.pack(mutate(self.data, draws)))
        try:
            self.read()
        finally:
            self.path.unlink(missing_ok=True)
            if before is not None:
                self.path.write_bytes(before)


def of_run(folder: Path) -> tuple[Config, Project]:
    """Return a small run and its dataset, with files that a run has only while it works, or on a cluster."""
    project = Project(folder / "project")
    for number in range(4):
        project.add(f"{number}.wav", voice(1.0, seed=number), speaker=f"s{number // 2}")
    project.add("absent.wav", duration=1.0)
    config = project.configure(
        match={"min_similarity": -1.0, "min_duration": 0.0}, write={"shard_size": 2}, executor={"workers": 1},
        max_reject_fraction=0.9,
    )  # fmt: skip
    assert run_dataset(config, Listener(), executor=LocalExecutor(1)).ok
    record = RankProgress(
        rank=0, slot="a/rank 0", owner="b", pid=7, host="a", started=1.0, updated=2.0, unit=1, unit_began=1.5,
        units_done=1,
    )  # fmt: skip
    under_way = {
        "write/progress/rank-000.json": msgspec.json.encode(record),
        "write/failures.jsonl": b'{"index":1,"message":"m","traceback":"t"}\n',
        "given.json": b'{"stages":["prepare"],"command":"c","cluster":"d"}',
    }
    for name, data in under_way.items():
        (project.run_dir / name).parent.mkdir(exist_ok=True)
        (project.run_dir / name).write_bytes(data)
    (project.run_dir / "write/done.json").unlink()
    return config, project


def run_targets(config: Config, run_dir: Path) -> Iterator[Target]:
    """Yield the files of a run directory, read by ``status`` and by the report page."""

    def read() -> None:
        ended = CliRunner().invoke(cli, ["status", str(run_dir)])
        if ended.exception is not None and not isinstance(ended.exception, SystemExit | SharmillError):
            raise ended.exception
        make_page(read_run_facts(config, make_stages(config), {}, decode=False))

    for path in sorted(run_dir.rglob("*")):
        name = path.relative_to(run_dir).as_posix()
        if path.suffix in (".json", ".jsonl", ".yaml", "") and path.is_file() and not name.startswith("manifests"):
            yield Target(f"run/{name}", path, read, path.read_bytes())


def source_targets(folder: Path, audio: Path) -> Iterator[Target]:
    """Yield the files of one small corpus in the forms of all sources, read as the stage prepare reads them."""
    records = [
        {"audio_filepath": f"{number}.wav", "duration": 1.0, "text": f"text {number}", "speaker": f"s{number // 2}"}
        for number in range(4)
    ]
    for name, make in FORMS.items():
        inputs = folder / "forms" / name
        inputs.mkdir(parents=True)
        project = Project(folder / "forms" / f"{name}-run")
        project.folder.mkdir()
        config = project.configure(match=None, sources=[make(inputs, records, audio)])
        for path in sorted(path for path in inputs.rglob("*") if path.is_file()):
            title = f"{name}/{path.relative_to(inputs).as_posix()}"
            yield Target(title, path, lambda config=config: prepare(config, folder / "planned"), path.read_bytes())


def prepare(config: Config, planned: Path) -> None:
    """Read all records of the sources, and the audio of those that are kept."""
    for source in config.sources:
        source.check()
        source.check_keys()
    segments = SegmentReader(AudioRoots.of(source.audio_root for source in config.sources))
    for files in outputs(stage_of(config, "prepare"), planned):
        for line in files[0].splitlines():
            with suppress(RejectRecord):
                segments.read(Utterance.from_json(line).segment)


def outputs(stage: StageRun, planned: Path) -> Iterator[list[bytes]]:
    """Yield the contents of the files of each unit of a stage, processed in this process."""
    shutil.rmtree(planned, ignore_errors=True)
    token_staging(planned, TOKEN).mkdir(parents=True)
    stage = replace(stage, plan_draft=planned)
    stage.declaration.identity(stage)
    processor = stage.declaration.open(stage, "cpu")
    for unit in stage.declaration.plan(stage):
        with Staging(planned, TOKEN) as staging:
            try:
                output = processor.process(unit, staging, lambda amount: None)
            except SharmillError as error:
                # A broken dataset may be refused. A unit of the checker may have findings, but never an error.
                raise AssertionError(error) if isinstance(stage.declaration, ValidateStage) else error from error
            yield [staging.path(name).read_bytes() for name in output.files]


def dataset_targets(folder: Path, dataset: Path) -> Iterator[Target]:
    """Yield the files of a dataset of sharmill and of a dataset without an index, both read and checked deeply."""
    for name in ("own", "foreign"):
        copy = folder / name
        shutil.copytree(dataset, copy)
        if name == "own":
            write_sidecars(copy)
        index = [copy / "dataset.json", copy / "shards.jsonl"]
        for path in index if name == "foreign" else ():
            path.unlink()
        for path in sorted(path for path in copy.rglob("*") if path in index or ".000000." in path.name):
            title = f"{name}/{path.relative_to(copy).as_posix()}"

            def read(copy: Path = copy, path: Path = path) -> None:
                use_dataset(copy, path, folder)

            yield Target(title, path, read, path.read_bytes())
            if path.suffix == ".gz":
                yield Target(f"{title}/text", path, read, gzip.decompress(path.read_bytes()), gzip.compress)
            elif path.suffix == ".tar":
                items = list(read_field(path))
                lines = b"\n".join(json.dumps(item.metadata).encode() for item in items)
                yield Target(f"{title}/metadata", path, read, lines, partial(with_metadata, items))


def use_dataset(dataset: Path, changed: Path, folder: Path) -> None:
    """Read a whole dataset, and check it. Errors that lhotse raises when loading audio or codes are accepted."""
    index = dataset / "shards.jsonl"
    before = index.read_bytes() if index.exists() and changed != index else None
    if before is not None and changed.stat().st_size % 2:
        reindex(dataset)  # in half of the cases, only the deeper checks can see it
    try:
        for options in ({}, {"decode_threads": 1}, {"shuffle": "global"}):
            with suppress(SharmillError):
                for cut in open_shar(dataset, **options):
                    load_all(cut)
        list(outputs(check_of(dataset, folder / "checked", deep=True), folder / "planned"))
    finally:
        if before is not None:
            index.write_bytes(before)


def load_all(cut: Any) -> None:
    for name in ("audio", "target_audio", "context_audio", "target_codes", "context_codes"):
        if name == "audio" or cut.has_custom(name):
            try:
                getattr(cut, f"load_{name}")()
            except (MemoryError, RecursionError):
                raise
            except Exception:  # noqa: BLE001 - lhotse's, of any kind
                pass


def with_metadata(items: list, data: bytes) -> bytes:
    lines = [*data.splitlines(), *[b""] * len(items)]
    pairs = zip(items, lines, strict=False)
    return tar_bytes(
        member
        for item, line in pairs
        for member in ((f"{item.cut_id}.{item.extension}", bytes(item.data)), (f"{item.cut_id}.json", line))
    )


def nemo_of(config: bytes, pack: Callable[[bytes], bytes] = bytes) -> bytes:
    return pack(tar_bytes([("./model_config.yaml", config), ("./model_weights.ckpt", b"x" * 100)]))


def other_targets(folder: Path, config: Config, own: Path) -> Iterator[Target]:
    """Yield files that users write or others may have left: configurations, models, locks and notes in a dataset."""
    codec = {"model_type": "encodec", "sampling_rate": 24000, "codebook_size": 16}
    alone = folder / "alone"
    files: list[tuple[Path, bytes, Callable[[Path], object]]] = [
        (alone / "config.yaml", to_yaml(config), load_config),
        (alone / "profile.yaml", (REPOSITORY / "configs/clusters/example.yaml").read_bytes(),
         partial(load_typed, ClusterProfile)),
        (alone / "report.json", encode_report(make_report(own, [], level={}, checked={}, unchecked=[])), read_report),
        (alone / "array", array_to_bytes(np.arange(8).reshape(2, 4)),
         lambda path: array_from_bytes(path.read_bytes(), "x")),
        (alone / "model/config.json", json.dumps(codec).encode(), lambda path: check_transformers_config(path.parent)),
        (own / STAGING_NAME / "0123456789abcdef.reservation", b'{"id":"0123456789abcdef","run":"/r","host":"h",'
         b'"user":"u","since":"s","device":1,"folders":["cuts"]}', lambda path: refuse_reservations(own)),
        (own / LOCK_NAME, b'{"host":"h","pid":1,"user":"u","lease_seconds":60.0}', lambda path: lock_owner(own)),
    ]  # fmt: skip
    for path, data, read in files:
        yield Target(path.name, path, lambda path=path, read=read: read(path), data)
    model = b"target: nemo.collections.tts.models.audio_codec.AudioCodecModel\nsample_rate: 16000\nlayers: [1, 2]\n"
    path = alone / "model.nemo"
    yield Target("nemo yaml", path, lambda: read_nemo_config(path), model, nemo_of)
    for pack in (bytes, gzip.compress, lzma.compress, bz2.compress):
        yield Target(f"nemo {pack.__module__}", path, lambda: read_nemo_config(path), nemo_of(model, pack))


@pytest.fixture
def bounded_memory():
    """Limit memory, so that a reader that trusts a claimed size fails instead of exhausting the machine."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.usefixtures("bounded_memory")
def test_mutations_end_in_errors_that_are_meant(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # hide warnings about invalid records
    config, project = of_run(tmp_path)
    targets = [
        *run_targets(config, project.run_dir), *source_targets(tmp_path, project.root),
        *dataset_targets(tmp_path, project.dataset), *other_targets(tmp_path, config, tmp_path / "own"),
    ]  # fmt: skip
    seed, found = os.environ.get("SEED", "0"), set()
    for number in range(int(os.environ.get("ROUNDS", "600"))):
        target = targets[number % len(targets)]
        place = f"{target.name}, seed {seed}, round {number}"
        try:
            target.try_one(random.Random(f"{seed} {target.name} {number}"))
        except SharmillError as error:
            if not str(error).strip():
                found.add(f"{place}: an error without a sentence")
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            frames = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in frames if "sharmill" in frame.filename] or frames
            found.add(f"{place}: {Path(ours[-1].filename).name}:{ours[-1].lineno}: {error!r:.200}")
    assert found == set()

"""Targets of the fuzzer: datasets, own and foreign, read and checked as a whole, and what lies in and beside them."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch  # noqa: F401 - before lhotse, which else imports it while the first cut is read

from sharmill.engine.reservations import refuse_reservations
from sharmill.engine.rundir import RunDir
from sharmill.errors import SharmillError
from sharmill.executors.slurm.profile import load_profile
from sharmill.files.locks import LOCK_NAME, lock_owner
from sharmill.files.staging import STAGING_NAME, Staging, token_staging
from sharmill.grow.append import NOTE_NAME, append_dataset
from sharmill.models.nemo_config import read_nemo_config
from sharmill.models.transformers import check_transformers_config
from sharmill.shar import open_shar
from sharmill.shar.items import read_field
from sharmill.shar.reading.loading import merge_loader_states
from sharmill.shar.sidecars import write_sidecars
from sharmill.validate.stage import ValidateStage
from support.mutations import Target, mutate, mutate_values
from support.shar import reindex

_TOKEN = "0" * 16
Change = Callable[[bytes, random.Random], bytes]


class DatasetTargets:
    """Copies of a dataset: one of sharmill's, one without an index, and one to which shards are appended."""

    def __init__(self, folder: Path, dataset: Path) -> None:
        self.folder = folder
        self.own = folder / "own"
        shutil.copytree(dataset, self.own)
        write_sidecars(self.own)
        self.foreign = folder / "foreign"
        shutil.copytree(dataset, self.foreign)
        for name in ("dataset.json", "shards.jsonl"):
            (self.foreign / name).unlink()

    def targets(self) -> Iterator[Target]:
        """Yield what is fuzzed."""
        for kind, dataset in (("own", self.own), ("foreign", self.foreign)):
            for path in sorted(path for path in dataset.rglob("*.000000.*") if path.is_file()):
                name = f"{kind}/{path.relative_to(dataset).as_posix()}"
                if path.suffix == ".gz":
                    yield self._file(name, dataset, path, mutate_values, gzip.decompress, gzip.compress)
                elif path.suffix == ".tar":
                    yield self._metadata(f"{name}/metadata", dataset, path)
                    yield self._file(name, dataset, path, mutate)
                else:
                    yield self._file(name, dataset, path, mutate)
        for name in ("dataset.json", "shards.jsonl"):
            yield self._file(f"own/{name}", self.own, self.own / name, mutate_values, _one_line)
        yield from self._beside()

    def _file(
        self, name: str, dataset: Path, path: Path, change: Change, unpack: Callable[[bytes], bytes] = bytes,
        pack: Callable[[bytes], bytes] = bytes,
    ) -> Target:  # fmt: skip
        def read(data: bytes) -> None:
            good, index = path.read_bytes(), (dataset / "shards.jsonl")
            before = index.read_bytes() if index.exists() else None
            try:
                path.write_bytes(pack(data))
                if before is not None and len(data) % 2 and path != index:
                    reindex(dataset)  # half of them are seen by deeper checks alone
                use(dataset, sidecars=path.suffix in (".idx", ".jsonl"))
                self._check(dataset)
            finally:
                path.write_bytes(good)
                if before is not None:
                    index.write_bytes(before if path != index else good)

        return Target(name, unpack(path.read_bytes()), read, change)

    def _check(self, dataset: Path) -> None:
        """Check a dataset deeply, as ``sharmill validate`` does; a unit of it has findings, and never an error."""
        planned = self.folder / "planned"
        shutil.rmtree(planned, ignore_errors=True)
        token_staging(planned, _TOKEN).mkdir(parents=True)
        stage = ValidateStage(dataset, RunDir(self.folder / "checked"), deep=True)
        stage.identity()
        processor = stage.open("cpu")
        for unit in stage.plan(planned):
            with Staging(planned, _TOKEN) as staging:
                try:
                    processor.process(unit, staging, lambda amount: None)
                except SharmillError as error:
                    raise AssertionError(f"the checker itself failed: {error}") from error

    def _metadata(self, name: str, dataset: Path, path: Path) -> Target:
        """Return a target whose data is the metadata of the items of a tar, in lines."""
        items = list(read_field(path))

        def pack(data: bytes) -> bytes:
            members = []
            for item, line in zip(items, data.splitlines(), strict=True):
                members += [(f"{item.cut_id}.{item.extension}", bytes(item.data)), (f"{item.cut_id}.json", line)]
            return _tar(members)

        def unpack(data: bytes) -> bytes:
            return b"\n".join(json.dumps(item.metadata).encode() for item in items)

        return self._file(name, dataset, path, mutate_values, unpack, pack)

    def _beside(self) -> Iterator[Target]:
        """Yield files that others may have left in a dataset, models, and states of readers."""
        reservation = self.own / STAGING_NAME / "target_audio.reservation"
        content = b'{"id":"0123456789abcdef","run":"/r","host":"h","user":"u","since":"s","device":1}'
        yield self._alone("reservation", reservation, content, lambda: refuse_reservations(self.own))
        yield self._alone("lock", self.own / LOCK_NAME, b'{"host":"h","pid":1,"user":"u","lease_seconds":60.0}',
                          lambda: lock_owner(self.own))  # fmt: skip
        note = self.own / STAGING_NAME / NOTE_NAME
        yield self._alone("append note", note, b'{"fields":["cuts"],"first":2,"count":1}',
                          lambda: append_dataset(self.own, self.own))  # fmt: skip
        config = json.dumps({"model_type": "encodec", "sampling_rate": 24000, "codebook_size": 16}).encode()
        yield self._alone("config.json", self.folder / "transformers/config.json", config,
                          lambda: check_transformers_config(self.folder / "transformers"))  # fmt: skip
        example = Path(__file__).parents[2] / "configs/clusters/example.yaml"
        yield self._alone("profile", self.folder / "profile.yaml", example.read_bytes(),
                          lambda: load_profile(self.folder / "profile.yaml"), mutate)  # fmt: skip
        model = b"target: nemo.collections.tts.models.audio_codec.AudioCodecModel\nsample_rate: 16000\nlayers: [1, 2]\n"
        for mode in ("", "gz", "xz", "bz2"):
            path = self.folder / f"model-{mode}.nemo"
            yield self._alone(
                f"nemo {mode}", path, _nemo(model, mode), lambda path=path: read_nemo_config(path), mutate
            )
        yield Target("nemo yaml", model, self._read_nemo, mutate)
        with_state = open_shar(self.own, shuffle=True, seed=3)
        list(with_state)
        state = json.dumps(with_state.data.state_dict()).encode()
        yield Target("state", state, self._go_on, mutate_values)

    def _alone(
        self, name: str, path: Path, data: bytes, read: Callable[[], object], change: Change = mutate_values
    ) -> Target:
        def put(data: bytes) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            try:
                read()
            finally:
                path.unlink(missing_ok=True)

        return Target(name, data, put, change)

    def _read_nemo(self, data: bytes) -> None:
        path = self.folder / "one.nemo"
        path.write_bytes(_nemo(data))
        read_nemo_config(path)

    def _go_on(self, data: bytes) -> None:
        state = json.loads(data)
        reader = open_shar(self.own, shuffle=True, seed=3)
        if isinstance(state, dict):
            reader.data.load_state_dict(state)
            list(reader)
            merge_loader_states([{"dataset_state": state}])


def use(dataset: Path, *, sidecars: bool = False) -> None:
    """Read all of a dataset. What lhotse raises where audio or codes are loaded is its own, but for lacks of memory."""
    for options in ({}, {"decode_threads": 1}, {"shuffle": "global"} if sidecars else None):
        if options is None:
            continue
        try:
            for cut in open_shar(dataset, **options):
                for name in ("target_audio", "context_audio", "target_codes", "context_codes"):
                    if cut.has_custom(name):
                        _load(getattr(cut, f"load_{name}"))
                _load(cut.load_audio)
        except SharmillError:
            continue


def _load(load: Callable[[], object]) -> None:
    try:
        load()
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 - lhotse's, of any kind
        pass


def _one_line(data: bytes) -> bytes:
    lines = data.splitlines()
    try:
        return b"\n".join(json.dumps(json.loads(line)).encode() for line in lines)
    except ValueError:
        return json.dumps(json.loads(data)).encode()


def _nemo(config: bytes, mode: str = "") -> bytes:
    return _tar([("./model_config.yaml", config), ("./model_weights.ckpt", b"x" * 100)], mode)


def _tar(members: list[tuple[str, bytes]], mode: str = "") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=f"w:{mode}") as archive:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()

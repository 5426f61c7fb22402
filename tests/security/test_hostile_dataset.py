"""A dataset from a stranger: reading and checking it runs nothing, writes nothing, and needs no memory that it names.

Each attack goes to ``open_shar``, which must refuse it or be unharmed, and to the checker, which must find it.
(An index that names files outside of the dataset: see ``tests/shar/test_reader.py``.)
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pickle
import subprocess
import sys
import tarfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from lhotse import Recording
from lhotse.audio import AudioLoadingError
from support import odd_audio as odd
from support.errors import raises
from support.shar import copy, lines, reindex, rewrite, run, snapshot

from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.cut_lines import read_lines, salvage_lines
from sharmill.shar.items import FieldWriter, Item, read_field
from sharmill.shar.reading import foreign
from sharmill.shar.reading.safety import find_forbidden, is_no_plain_file
from sharmill.shar.sidecars import write_sidecars
from sharmill.validate.findings import read_report
from sharmill.validate.stage import ValidateStage

CUTS = "cuts/cuts.000000.jsonl.gz"
TARGETS = "target_audio/recording.000000.tar"
CODES = "codes_toy/target_codes/codes.000000.tar"


@pytest.fixture
def dataset(built, tmp_path, monkeypatch):
    """A copy to spoil; whatever is written to the current folder is seen."""
    folder = tmp_path / "current/one/two"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return copy(built.dataset, tmp_path / "dataset")


def check(dataset: Path) -> set[str]:
    """The codes of what the checker finds."""
    stage = ValidateStage(dataset, RunDir(dataset.parent / "check"), deep=True)
    assert run(stage).ok
    return {finding.code for finding in stage.findings()}


def load_all(dataset: Path, fields: list[str] | None = None) -> None:
    """Everything that a training script might touch."""
    for cut in open_shar(dataset, fields):
        for name in ("audio", "target_audio", "context_audio", "target_codes", "context_codes", "extra"):
            if name == "audio" or cut.has_custom(name):
                getattr(cut, f"load_{name}")()


def change_cut(dataset: Path, change) -> None:
    cuts = lines(dataset / CUTS)
    change(cuts[0])
    rewrite(dataset / CUTS, cuts)
    reindex(dataset)


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def recording(kind: str, source: str) -> dict:
    sources = [{"type": kind, "channels": [0], "source": source}]
    return {"id": "x", "sources": sources, "sampling_rate": 16000, "num_samples": 16000, "duration": 1.0}


def array(kind: str, path: str = "", key: str = "") -> dict:
    return {"storage_type": kind, "storage_path": path, "storage_key": key, "shape": [1]}


def features() -> dict:
    return {"type": "fbank", "num_frames": 1, "num_features": 1, "frame_shift": 0.01, "sampling_rate": 16000,
            "start": 0, "duration": 1, "storage_type": "kaldiio", "storage_path": "x", "storage_key": "y"}  # fmt: skip


def reverb(sources: dict) -> dict:
    """A transform that convolves the audio with a recording of its own."""
    return {"name": "ReverbWithImpulseResponse", "kwargs": {"rir": {**sources, "channel_ids": [0]}}}


def transform(name: str, **settings) -> dict:
    return {"name": name, "kwargs": settings}


def cut_of(recording: dict) -> dict:
    return {"id": "x", "start": 0, "duration": 1.0, "channel": 0, "supervisions": [], "recording": recording,
            "type": "MonoCut"}  # fmt: skip


FORBIDDEN = {
    "a recording of a command": (lambda cut: cut.update(recording=recording("command", "touch ran")), "command"),
    "a recording of a URL": (lambda cut: cut.update(recording=recording("url", "http://127.0.0.1:9/a.wav")), "url"),
    "a field of the cut that is a command": (
        lambda cut: cut["custom"].update(target_audio=recording("command", "touch ran")), "command"),
    "another key of the cut that is a command": (
        lambda cut: cut["custom"].update(extra=recording("command", "touch ran")), "command"),
    "a key of the supervision that is a command": (
        lambda cut: cut["supervisions"][0]["custom"].update(extra=recording("command", "touch ran")), "command"),
    "codes that are a pickle": (lambda cut: cut["custom"].update(target_codes=array("memory_raw")), "memory_raw"),
    "an array that is a pickle": (lambda cut: cut["custom"].update(extra=array("memory_raw")), "memory_raw"),
    "an array from Kaldi": (
        lambda cut: cut["custom"].update(extra={"array": array("kaldiio", "pipe:touch ran |"), "temporal_dim": 0,
                                                "frame_shift": 0.1, "start": 0}), "kaldiio"),
    "features from Kaldi": (lambda cut: cut.update(features=features()), "kaldiio"),
    "an image that Pillow may give to a program": (
        lambda cut: cut["custom"].update(extra={
            "storage_type": "pillow_files", "storage_path": ".", "storage_key": "x.eps", "width": 1, "height": 1,
        }), "pillow_files"),
    "a command beside an alignment": (
        lambda cut: cut["supervisions"][0].update(
            alignment={"word": [["hi", 0, 1]]}, custom={"extra": recording("command", "touch ran")}), "command"),
    "a command deep in a key of the supervision": (
        lambda cut: cut["supervisions"][0]["custom"].update(a={"b": [recording("command", "touch ran")]}), "command"),
    "a transform of the origin with a command": (
        lambda cut: cut["recording"].update(transforms=[reverb(recording("command", "touch ran"))]), "command"),
    "a transform that is not lhotse's": (
        lambda cut: cut["recording"].update(transforms=[{"name": "Evil", "kwargs": {}}]), "Evil"),
    "a file that is a URL": (
        lambda cut: cut["recording"]["sources"][0].update(source="http://127.0.0.1:9/a.wav"), "that is a URL"),
    "a transform with a file that is a URL": (
        lambda cut: cut["recording"].update(transforms=[reverb(recording("file", "http://h/x.wav"))]), "that is a URL"),
    "a transform with a key that lhotse does not know": (
        lambda cut: cut["recording"].update(transforms=[transform("Speed", factor=1.1, more=1)]), "'more'"),
    "a recording within that has a key of its own": (
        lambda cut: cut["custom"].update(extra={**recording("file", "x"), "loader": "x"}), "'loader'"),
    "a source within that has a key of its own": (
        lambda cut: cut["custom"].update(
            extra=recording("file", "x") | {"sources": [{"type": "file", "channels": [0], "source": "x", "k": 1}]}),
        "'k'"),
    "a recording whose sources are none": (
        lambda cut: cut["custom"].update(extra={**recording("file", "x"), "sources": {"type": "file"}}), "no list"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "what"), FORBIDDEN.values(), ids=FORBIDDEN.keys())
@pytest.mark.parametrize("fields", [None, []], ids=["all fields", "cuts only"])
def test_what_lhotse_would_run_is_refused(dataset, tmp_path, change, what, fields):
    change_cut(dataset, change)
    with raises(DamagedShard, "damaged_shard", what):
        load_all(dataset, fields)
    assert "bad_cut" in check(dataset)
    assert not list(tmp_path.rglob("ran"))


def test_a_file_name_for_a_shell_is_not_loaded(dataset, tmp_path):
    """lhotse reads .sph through a shell that sees the name as it stands, and ours only tell where audio came from."""
    change_cut(dataset, lambda cut: cut["recording"]["sources"][0].update(source="x;touch ran;x.SPH"))
    first = next(iter(open_shar(dataset, [])))
    with pytest.raises(Exception, match=r"Shar|shar"):
        first.load_audio()
    assert first.recording.sources[0].source == "x;touch ran;x.SPH"
    load_all(dataset)
    assert not list(tmp_path.rglob("ran"))


def test_the_name_of_an_opus_file_for_a_shell_is_not_loaded(dataset, tmp_path):
    """lhotse reads .opus through a shell where this variable asks for it, which it looks at once in a process."""
    change_cut(dataset, lambda cut: cut["recording"]["sources"][0].update(source="x;touch ran;x.Opus"))
    script = """
import sys
from sharmill.shar import open_shar
first = next(iter(open_shar(sys.argv[1], [])))
print(first.recording.sources[0].type, first.recording.sources[0].source)
try:
    first.load_audio()
except Exception as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", script, dataset], capture_output=True, text=True, check=True,
                          env={**os.environ, "LHOTSE_LEGACY_OPUS_LOADING": "1"})  # fmt: skip
    assert done.stdout.splitlines()[0] == "shar x;touch ran;x.Opus"
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", ["pipe:0", "concat:a|b", "/dev/zero", "-", "fifo", "//proc/self/mem", "/tmp/../dev/zero", "/./dev/zero"]
)
def test_what_is_no_plain_file_is_kept_as_a_name_and_not_opened(dataset, name):
    os.mkfifo("fifo")
    change_cut(dataset, lambda cut: cut["recording"].update(
        sources=[{"type": "file", "channels": [0], "source": name}],
        **({"transforms": [reverb(recording("file", name))]} if name == "fifo" else {})))  # fmt: skip
    first = next(iter(open_shar(dataset, [])))
    with pytest.raises(Exception, match="Shar placeholder"):
        first.load_audio()
    assert first.recording.sources[0].source == name


@pytest.mark.timeout(60)
def test_a_fifo_under_any_name_is_not_opened(dataset):
    """In the form that is usual, in which no file is looked at before it is loaded."""
    os.mkfifo("fifo.wav")
    change_cut(dataset, lambda cut: cut["recording"]["sources"][0].update(source="fifo.wav"))
    first = next(iter(open_shar(dataset, ["target_codes"])))
    for cut in (first, first.truncate(duration=0.1), first.resample(8000)):
        with pytest.raises(AudioLoadingError, match=r"'fifo\.wav' is no plain file"):
            cut.load_audio()
    assert first.recording == Recording.from_dict(first.recording.to_dict())


IMMENSE = {
    "a slow speed": (transform("Speed", factor=1e-9), "factor"),
    "speeds without a common divisor": (transform("Speed", factor=0.999999), "Hz"),
    "a tempo": (transform("Tempo", factor=1e9), "factor"),
    "a rate": (transform("Resample", source_sampling_rate=16000, target_sampling_rate=10**9), "target_sampling_rate"),
    "rates without a common divisor": (
        transform("Resample", source_sampling_rate=16000, target_sampling_rate=655349),
        "Hz",
    ),
    "a rate that is none": (transform("Resample", source_sampling_rate=16000, target_sampling_rate=math.nan), "target"),
    "a narrow band": (transform("Narrowband", codec="mulaw", source_sampling_rate=655349, restore_orig_sr=True), "Hz"),
    "an echo": (transform("ReverbWithImpulseResponse", rir_generator={"max_T60": 1e6}), "max_T60"),
    "an echo at a rate": (transform("ReverbWithImpulseResponse", rir_generator={"sr": 10**9}), "sr"),
    "an echo of its own": (transform("ReverbWithImpulseResponse", rir_generator="os.system"), "rir_generator"),
    "a filter": (transform("DereverbWPE", taps=10**9), "taps"),
    "no settings": ({"name": "Speed"}, "form"),
}


@pytest.mark.parametrize(("change", "what"), IMMENSE.values(), ids=IMMENSE.keys())
def test_transforms_are_bounded(change, what):
    values = {**recording("memory", ""), "sampling_rate": 655350, "transforms": [change]}
    assert what in find_forbidden(values)
    assert what in find_forbidden([{"extra": {"deep": values}}])


@pytest.mark.parametrize(
    "value", ["x", None, True, [1.1], {"a": 1}, 1e400, math.nan, 10**400], ids=lambda value: repr(value)[:20]
)
@pytest.mark.parametrize(("name", "key"), [("Speed", "factor"), ("Resample", "target_sampling_rate")])
def test_settings_of_another_type_are_refused_before_they_are_used(name, key, value):
    values = {**recording("shar", ""), "transforms": [transform(name, **{key: value})]}
    assert f"a transform {name} with {key} " in find_forbidden(values)


@pytest.mark.parametrize(
    "rate", [10**15, 10**400, 0, -16000, "x", None, True, [16000], math.nan], ids=lambda value: repr(value)[:20]
)
def test_transforms_of_audio_at_no_rate_are_refused(rate):
    for settings in ({"factor": 1.1}, {"factor": "x"}):
        values = {**recording("shar", ""), "sampling_rate": rate, "transforms": [transform("Speed", **settings)]}
        assert "transforms of audio of" in find_forbidden(values)


@pytest.mark.parametrize("transforms", [{"name": "Speed"}, {}, "Speed", 1, True], ids=lambda value: repr(value)[:20])
def test_transforms_that_are_no_list_are_refused(transforms):
    for values in (recording("shar", ""), {"id": "x", "tracks": []}):
        assert find_forbidden({**values, "transforms": transforms}) == "transforms that are no list"


HOSTILE_VALUES = {
    "a setting of another type": (
        {**recording("shar", ""), "transforms": [transform("Speed", factor=None)]},
        "item 0 has a transform Speed with factor None",
    ),
    "a command": (recording("command", "touch ran"), "command"),
}


@pytest.mark.parametrize(("values", "what"), HOSTILE_VALUES.values(), ids=HOSTILE_VALUES.keys())
def test_hostile_lines_of_values_are_damage(dataset, values, what):
    """A field in lhotse's JSON lines, whose values are given as they are."""
    for name in ("dataset.json", "shards.jsonl"):
        (dataset / name).unlink()
    for path in sorted((dataset / "cuts").iterdir()):
        index = path.name.removeprefix("cuts.").removesuffix(".jsonl.gz")
        (dataset / "extra").mkdir(exist_ok=True)
        rewrite(
            dataset / f"extra/extra.{index}.jsonl.gz", [{"cut_id": cut["id"], "extra": values} for cut in lines(path)]
        )
        rewrite(path, [cut | {"custom": None} for cut in lines(path)])
    with raises(DamagedShard, "damaged_shard", what):
        load_all(dataset, ["extra"])


@pytest.mark.parametrize(
    "known",
    [transform("Speed", factor=1.1), transform("Speed", factor=0.9), transform("Volume", factor=0.3),
     transform("Resample", source_sampling_rate=44100, target_sampling_rate=16000),
     transform("Resample", source_sampling_rate=16000, target_sampling_rate=22050),
     transform("Narrowband", codec="mulaw", source_sampling_rate=44100, restore_orig_sr=True),
     transform("ReverbWithImpulseResponse", rir=None, rir_channels=[0], rir_generator={"sr": 16000, "room_seed": 7})],
)  # fmt: skip
def test_transforms_that_trainings_use_are_allowed(known):
    for rate in (16000, 22050, 44100, 48000):
        assert find_forbidden({**recording("memory", ""), "sampling_rate": rate, "transforms": [known]}) is None


@pytest.mark.parametrize(("rate", "factor"), [(22050, 0.95), (22050, 1.05), (11025, 0.9)])
def test_ordinary_speeds_are_allowed_at_rates_that_divide_badly(rate, factor):
    values = {**recording("memory", ""), "sampling_rate": rate, "transforms": [transform("Speed", factor=factor)]}
    assert find_forbidden(values) is None


def test_files_of_the_disk_in_memory_are_files():
    assert not is_no_plain_file({"type": "file", "channels": [0], "source": "/dev/shm/data/a.wav"})
    assert is_no_plain_file({"type": "file", "channels": [0], "source": "/dev//zero"})


def test_sources_beside_the_audio_are_not_used(dataset, tmp_path):
    """The metadata in the archive names a command: the audio beside it is what counts."""
    items = list(read_field(dataset / TARGETS))
    with FieldWriter(dataset / TARGETS) as writer:
        for item in items:
            metadata = item.metadata | {"sources": recording("command", "touch ran")["sources"]}
            writer.add(Item(item.cut_id, item.extension, item.data, metadata))
    reindex(dataset)
    load_all(dataset)
    assert not list(tmp_path.rglob("ran"))


def change_metadata(path: Path, keys: dict) -> None:
    items = list(read_field(path))
    with FieldWriter(path) as writer:
        for item in items:
            writer.add(Item(item.cut_id, item.extension, item.data, item.metadata | keys))


HOSTILE_METADATA = {
    "a reverberation by a command": (TARGETS, {"transforms": [reverb(recording("command", "touch ran"))]}, "command"),
    "a reverberation by a cut of a command": (
        TARGETS, {"transforms": [
            {"name": "ReverbWithImpulseResponse", "kwargs": {"rir": cut_of(recording("command", "touch ran"))}}]},
        "command"),
    "a reverberation by a reverberation by a command": (
        TARGETS, {"transforms": [
            reverb({**recording("file", "x"), "transforms": [reverb(recording("command", "touch ran"))]})]}, "command"),
    "a transform that is not lhotse's": (TARGETS, {"transforms": [{"name": "Evil", "kwargs": {}}]}, "Evil"),
    "a transform without a name": (TARGETS, {"transforms": [["Speed"]]}, "Speed"),
    "a command beside the array": (CODES, {"custom": recording("command", "touch ran")}, "custom|command"),
    "a key that lhotse does not know": (TARGETS, {"evil": 1}, "evil"),
}  # fmt: skip


@pytest.mark.parametrize("foreign", [False, True], ids=["own", "foreign"])
@pytest.mark.parametrize(("field", "keys", "what"), HOSTILE_METADATA.values(), ids=HOSTILE_METADATA.keys())
def test_metadata_in_an_archive_run_nothing(dataset, tmp_path, field, keys, what, foreign):
    change_metadata(dataset / field, keys)
    if foreign:
        for name in ("dataset.json", "shards.jsonl"):
            (dataset / name).unlink()
        for path in (dataset / "cuts").iterdir():
            rewrite(path, [cut | {"custom": None} for cut in lines(path)])
    else:
        reindex(dataset)
    with pytest.raises(DamagedShard, match=what):
        load_all(dataset)
    assert check(dataset) == {"bad_codes" if field == CODES else "bad_audio"}
    assert not list(tmp_path.rglob("ran"))


def test_transforms_without_other_sources_are_applied(dataset, tmp_path):
    """A recording that is another rate, speed and loudness of what is stored."""
    items = list(read_field(dataset / TARGETS))
    with FieldWriter(dataset / TARGETS) as writer:
        for item in items:
            stored = Recording.from_dict(dict(item.metadata))
            changed = stored.resample(8000).perturb_speed(0.9).perturb_volume(0.5)
            metadata = changed.to_dict() | {"id": stored.id}
            assert len(metadata["transforms"]) == 3
            writer.add(Item(item.cut_id, item.extension, item.data, metadata))
    reindex(dataset)
    found = next(iter(open_shar(dataset, ["target_audio"])))
    assert found.target_audio.sampling_rate == 8000
    again = next(item for item in read_field(dataset / TARGETS) if item.cut_id == found.id)
    expected = Recording.from_dict(again.metadata)
    expected.sources[0].type, expected.sources[0].source = "memory", again.data
    expected = expected.load_audio()
    np.testing.assert_array_equal(found.target_audio.load_audio(), expected)
    assert expected.shape == (1, found.target_audio.num_samples)


def npy(data: np.ndarray, **options) -> bytes:
    stream = io.BytesIO()
    np.save(stream, data, **options)
    return stream.getvalue()


def npy_claiming(shape: str) -> bytes:
    header = f"{{'descr': '<i2', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header


def put_codes(dataset: Path, data: bytes) -> None:
    first, *rest = read_field(dataset / CODES)
    with FieldWriter(dataset / CODES) as writer:
        for item in (Item(first.cut_id, "npy", data, first.metadata), *rest):
            writer.add(item)
    reindex(dataset)


@pytest.mark.parametrize("kind", ["objects", "a bare pickle"])
def test_pickled_arrays_are_refused(dataset, tmp_path, kind):
    bomb = Bomb(str(tmp_path / "ran"))
    objects = npy(np.array([bomb], dtype=object), allow_pickle=True)
    put_codes(dataset, objects if kind == "objects" else pickle.dumps(bomb))
    assert not (tmp_path / "ran").exists()
    with raises(DamagedShard, "damaged_shard", "codes.0"):
        load_all(dataset)
    assert "bad_codes" in check(dataset)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("model", ["python:evil:Codec", "nemo:m.nemo", "transformers:someone/codec"])
def test_a_model_that_only_the_dataset_names_is_not_loaded(dataset, tmp_path, monkeypatch, model):
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    Path("m.nemo").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    facts = json.loads((dataset / "dataset.json").read_text())
    for codec in facts["codecs"]:
        codec["model"] = model
    (dataset / "dataset.json").write_text(json.dumps(facts))
    with raises(ConfigError, "untrusted_model", model, "--codec-model"):
        run(ValidateStage(dataset, RunDir(tmp_path / "check"), recheck_codes=1.0))
    assert not (tmp_path / "ran").exists()


def member(name: str, data: bytes = b"x", kind: bytes = tarfile.REGTYPE) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(data), "/etc/passwd"
    return info, data


def put_members(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    """Puts members before those that are there."""
    with tarfile.open(path) as old:
        kept = [(info, old.extractfile(info).read()) for info in old]
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as new:
        for info, data in [*members, *kept]:
            new.addfile(info, io.BytesIO(data))


HOSTILE_MEMBERS = {
    "an absolute name": [member("/tmp/sharmill-escape.flac"), member("/tmp/sharmill-escape.json", b"{}")],
    "'..'": [member("../../escape.flac"), member("../../escape.json", b"{}")],
    "a symbolic link": [member("a.flac", b"", tarfile.SYMTYPE)],
    "a hard link": [member("a.flac", b"", tarfile.LNKTYPE)],
    "a device": [member("a.flac", b"", tarfile.CHRTYPE)],
    "a FIFO": [member("a.flac", b"", tarfile.FIFOTYPE)],
    "a folder": [member("../a", b"", tarfile.DIRTYPE)],
}


@pytest.mark.parametrize("members", HOSTILE_MEMBERS.values(), ids=HOSTILE_MEMBERS.keys())
def test_members_are_never_written_and_never_followed(dataset, tmp_path, members):
    put_members(dataset / TARGETS, members)
    reindex(dataset)
    before = snapshot(tmp_path)
    with raises(DamagedShard, "damaged_shard"):
        load_all(dataset)
    assert snapshot(tmp_path) == before
    assert check(dataset) & {"wrong_id", "wrong_count", "damaged"}
    written = {name for name in snapshot(tmp_path) if not name.startswith("check/")}
    assert written == set(before)
    assert not Path("/tmp/sharmill-escape.flac").exists()


def test_ids_like_paths_are_ids(dataset, tmp_path):
    """Cut and member agree on a name that leads out of every folder: it names nothing on disk."""
    cuts = lines(dataset / CUTS)
    bad = "cut-../../../escape-0.00-1.00"
    old, cuts[0]["id"] = cuts[0]["id"], bad
    rewrite(dataset / CUTS, cuts)
    for path in dataset.rglob("*.000000.tar"):
        items = list(read_field(path))
        with FieldWriter(path) as writer:
            for item in items:
                name = bad if item.cut_id == old else item.cut_id
                writer.add(Item(name, item.extension, item.data, item.metadata))
    reindex(dataset)
    before = snapshot(tmp_path)
    load_all(dataset)
    assert snapshot(tmp_path) == before
    assert "bad_cut" in check(dataset)
    assert {name for name in snapshot(tmp_path) if not name.startswith("check/")} == set(before)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [CUTS, TARGETS, CODES])
def test_a_fifo_in_place_of_a_file_hangs_nobody(dataset, name):
    (dataset / name).unlink()
    os.mkfifo(dataset / name)
    with raises(DamagedShard, "damaged_shard", name):
        load_all(dataset)
    assert "missing_file" in check(dataset)


def bounded(dataset: Path) -> subprocess.CompletedProcess[str]:
    """Reads and checks a dataset in a process that may have 1 GiB more than its libraries need."""
    script = """
import resource, sys
from pathlib import Path
import lhotse, torch, torchaudio
from support.shar import run
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.validate.stage import ValidateStage
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30),) * 2)
dataset = Path(sys.argv[1])
try:
    for cut in open_shar(dataset):
        cut.load_target_audio(), cut.load_target_codes(), cut.load_context_audio(), cut.load_context_codes()
    print("read")
except (DamagedShard, ValueError, MemoryError) as error:
    print("refused")
stage = ValidateStage(dataset, RunDir(dataset.parent / "check"), deep=True)
result = run(stage)
print(sorted({finding.code for finding in stage.findings()}) if result.ok else result.failures)
"""
    command = [sys.executable, "-c", script, str(dataset)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def _cuts_of(data: bytes, repeat: int) -> bytes:
    """Gzip of ``data`` again and again, made without holding it."""
    stream = io.BytesIO()
    with gzip.GzipFile(fileobj=stream, mode="wb", mtime=0, compresslevel=6) as packed:
        for _ in range(repeat):
            packed.write(data)
    return stream.getvalue()


def _claim_in_tar(dataset: Path, size: int) -> None:
    info = tarfile.TarInfo("a.flac")
    info.size = size
    path = dataset / TARGETS
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + path.read_bytes())


def _long_name(dataset: Path) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    path = dataset / TARGETS
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + path.read_bytes())


def _audio(dataset: Path, data: bytes, extension: str, num_samples: int) -> None:
    """Audio, and metadata that agrees with what its header claims."""
    first, *rest = read_field(dataset / TARGETS)
    metadata = first.metadata | {"num_samples": num_samples, "duration": num_samples / 16000}
    with FieldWriter(dataset / TARGETS) as writer:
        for item in (Item(first.cut_id, extension, data, metadata), *rest):
            writer.add(item)


# What makes it, what the reader does, what the checker finds.
OVERSIZED = {
    "an array of a petabyte": (lambda d: put_codes(d, npy_claiming("(3, 200000000000000)")), "refused", "bad_codes"),
    "an array of 20 GB": (lambda d: put_codes(d, npy_claiming("(1, 10000000000)")), "refused", "bad_codes"),
    "a member of 8 exabytes": (lambda d: _claim_in_tar(d, 1 << 63), "refused", "damaged"),
    "a member of 7 GB": (lambda d: _claim_in_tar(d, 7 << 30), "refused", "damaged"),
    "a name of a terabyte": (_long_name, "refused", "damaged"),
    "a cut of 3 GB in gzip": (
        lambda d: (d / CUTS).write_bytes(_cuts_of(b" " * (1 << 20), 3 << 10)), "refused", "damaged"),
    "JSON of 100,000 levels": (
        lambda d: (d / CUTS).write_bytes(gzip.compress(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)),
        "refused", "damaged"),
    # The reader takes the part that the cut asks for, which is there.
    "a WAV that claims 2^32 bytes": (
        lambda d: _audio(d, odd.wav(data_size=2**32 - 64), "wav", 2**31 - 32), "read", "bad_audio"),
    "a FLAC that claims 2^32 samples": (
        lambda d: _audio(d, odd.flac_claiming(2**32), "flac", 2**32), "read", "bad_audio"),
    "a FLAC that claims 2^36 samples": (
        lambda d: _audio(d, odd.flac_claiming(2**36 - 1), "flac", 2**36 - 1), "read", "bad_audio"),
}  # fmt: skip


# Each is a process of its own: `make test` has two of them.
QUICK = ("an array of 20 GB", "a member of 7 GB")
OVERSIZED_CASES = [
    pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in OVERSIZED.items()
]


@pytest.mark.parametrize(("make", "ending", "code"), OVERSIZED_CASES)
def test_sizes_that_are_only_claimed_cost_no_memory(dataset, make, ending, code):
    make(dataset)
    reindex(dataset)
    ended = bounded(dataset)
    assert ended.returncode == 0, ended.stderr
    read, found = ended.stdout.splitlines()
    assert read == ending
    assert code in json.loads(found.replace("'", '"'))


def test_the_limit_on_memory_lets_a_good_dataset_through(dataset):
    ended = bounded(dataset)
    assert ended.stdout.splitlines() == ["read", "[]"], ended.stderr


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
HOSTILE_INDEX = {
    "JSON of 100,000 levels": lambda path: path.write_bytes(DEEP),
    "a line of 100,000 levels": lambda path: path.write_bytes(b'{"format_version": 1, "index": 0, "x": ' + DEEP + b"}"),
    "a terabyte of nothing": lambda path: (path.write_bytes(b""), os.truncate(path, 1 << 40)),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link to a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("change", HOSTILE_INDEX.values(), ids=HOSTILE_INDEX.keys())
@pytest.mark.parametrize("name", ["dataset.json", "shards.jsonl"])
def test_an_index_that_is_none_ends_in_one_line(dataset, name, change):
    change(dataset / name)
    with raises(DamagedShard, "damaged_shard", name):
        load_all(dataset)
    assert check(dataset) & {"damaged", "missing_file"}


def test_a_report_of_100000_levels_is_none(tmp_path):
    (tmp_path / "report.json").write_bytes(DEEP)
    with raises(ConfigError, "bad_findings", "report.json"):
        read_report(tmp_path / "report.json")


@pytest.mark.timeout(120)
def test_links_that_lead_in_circles_are_followed_once(dataset):
    for name in ("dataset.json", "shards.jsonl"):
        (dataset / name).unlink()
    for path in sorted((dataset / "cuts").iterdir()):
        rewrite(path, [cut | {"custom": None} for cut in lines(path)])
    for name in "abc":
        (dataset / name).symlink_to(".")
        (dataset / "cuts" / name).symlink_to("..")
    assert len(list(open_shar(dataset, ["target_audio"]))) == 7


def test_a_folder_that_vanishes_while_shards_are_looked_for_ends_in_one_line(dataset, monkeypatch):
    monkeypatch.setattr(os, "walk", lambda *_, **__: iter([(str(dataset / "gone"), [], [])]))
    with raises(ConfigError, "bad_layout", "gone cannot be looked at"):
        foreign.find_shards(dataset)


@pytest.mark.parametrize("name", ["cuts.000000.jsonl", "cuts.000000.jsonl.gz"])
def test_sparse_cuts_are_damage(dataset, name):
    path = dataset / "cuts" / name
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)
    for read in (read_lines, salvage_lines):
        with pytest.raises(DamagedShard, match="not more than 256 MiB") if read is read_lines else nullcontext():
            assert read(path)[0] == []
    if name.endswith("gz"):
        with raises(DamagedShard, "damaged_shard", "not more than 256 MiB"):
            load_all(dataset)
        # Of the size too; the terabyte is not read for its checksum.
        assert check(dataset) >= {"damaged", "wrong_size"}


def test_a_sparse_index_of_a_sidecar_is_damage(dataset):
    write_sidecars(dataset)
    for path in (dataset / "cuts").glob("*.idx"):
        os.truncate(path, 1 << 40)
    with raises(DamagedShard, "damaged_shard", "more than 64 MiB: it is not the index of a shard"):
        list(open_shar(dataset, shuffle="global"))


@pytest.mark.parametrize("count", [10**12, 10**30, -1, 0.5])
def test_counts_that_no_shard_can_have_are_damage(dataset, count):
    index = dataset / "shards.jsonl"
    rows = [json.loads(line) for line in index.read_bytes().splitlines()]
    record = json.loads((dataset / "dataset.json").read_bytes())
    record["num_cuts"] += count - rows[0]["count"]
    (dataset / "dataset.json").write_text(json.dumps(record))
    rows[0]["count"] = count
    index.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with raises(DamagedShard, "damaged_shard"):
        load_all(dataset)


@pytest.mark.parametrize("name", ["n" * 5000, "n/" * 3000 + "n", "a\0b"])
def test_names_that_no_file_can_have_are_missing_files(dataset, name):
    index = dataset / "shards.jsonl"
    rows = [json.loads(line) for line in index.read_bytes().splitlines()]
    rows[0]["fields"]["target_audio"]["file"] = name
    index.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with raises(DamagedShard, "damaged_shard"):
        load_all(dataset)
    assert "missing_file" in check(dataset)

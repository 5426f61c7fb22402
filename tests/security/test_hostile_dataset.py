"""An untrusted dataset: reading and checking it executes nothing, writes nothing, and allocates no claimed memory.

Each attack is tried on ``open_shar``, which refuses it, and on the checker, which finds it.
(``tests/shar/test_reader.py`` tests an index that names files outside the dataset.)
"""

import gzip
import io
import json
import math
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support import audio as odd, damage as do
from support.project import check_dataset, copy, lines, raises, reindex, snapshot, write_lines

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.reading.safety import find_forbidden

CUTS = "cuts/cuts.000000.jsonl.gz"
TARGETS = "target_audio/recording.000000.tar"
CODES = "codes_toy/target_codes/codes.000000.tar"
INDEX = ("dataset.json", "shards.jsonl")


@pytest.fixture
def dataset(built, tmp_path, monkeypatch):
    """A copy to damage; the current folder is an empty one, in which written files would be noticed."""
    folder = tmp_path / "current/one/two"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return copy(built.dataset, tmp_path / "dataset")


def check(dataset: Path) -> set[str]:
    """Return the codes of the checker's findings."""
    return {row["code"] for row in check_dataset(dataset, dataset.parent / "check", deep=True).findings}


def load_all(dataset: Path, fields: list[str] | None = None) -> None:
    """Access everything that a training script might use."""
    for cut in list(open_shar(dataset, fields)):
        for name in ("audio", "target_audio", "context_audio", "target_codes", "context_codes", "extra"):
            if name == "audio" or cut.has_custom(name):
                getattr(cut, f"load_{name}")()


def written(folder: Path) -> dict[Path, int]:
    """Return when each file below a folder was written, except for the checker's files."""
    found = (path for path in folder.rglob("*") if not path.is_dir() and "check" not in path.parts)
    return {path: path.lstat().st_mtime_ns for path in found}


def recording(kind: str, source: str) -> dict:
    sources = [{"type": kind, "channels": [0], "source": source}]
    return {"id": "x", "sources": sources, "sampling_rate": 16000, "num_samples": 16000, "duration": 1.0}


def array(kind: str, path: str = "") -> dict:
    return {"storage_type": kind, "storage_path": path, "storage_key": "", "shape": [1]}


def transform(name: str, **settings) -> dict:
    return {"name": name, "kwargs": settings}


def reverb(impulse: dict) -> dict:
    """Return a transform that convolves the audio with another recording."""
    return transform("ReverbWithImpulseResponse", rir={**impulse, "channel_ids": [0]})


def in_cut(**values) -> do.Damage:
    """Return a change that puts values into the first cut, each at keys and indices joined by ``__``."""

    def change(cuts):
        for place, value in values.items():
            *way, last = place.split("__")
            inner = cuts[0]
            for key in way:
                inner = inner[int(key) if key.isdigit() else key]
            inner[last] = value
        return cuts

    return do.change_cuts(CUTS, change)


def before_members(*members: tuple[str, bytes, bytes]) -> do.Damage:
    """Return a change that inserts members (name, data, type) before those of the target audio."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(data), "/etc/passwd"
            archive.addfile(info, io.BytesIO(data))
        # Read the stream before it is closed, so that the archive has no end marker.
        return before_bytes(stream.getvalue())


def before_bytes(data: bytes) -> do.Damage:
    return do.change_bytes(TARGETS, lambda old: data + old)


def npy(kind: str, shape: str, data: bytes = b"") -> bytes:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + data


def without_index(dataset: Path) -> None:
    """Leave a dataset as another tool would write it: no index, and only the usual keys of cuts."""
    for name in INDEX:
        (dataset / name).unlink()
    for path in (dataset / "cuts").iterdir():
        write_lines(path, [cut | {"custom": None} for cut in lines(path)])


COMMAND = recording("command", "touch ran")
# A pickle that creates a folder when it is loaded.
PICKLE = b"cos\nmkdir\n(S'ran'\ntR."
FILE = recording("file", "x")
URL = "http://127.0.0.1:9/a.wav"
KALDI = {"array": array("kaldiio", "pipe:touch ran |"), "temporal_dim": 0, "frame_shift": 0.1, "start": 0}
FEATURES = {"type": "fbank", "num_frames": 1, "num_features": 1, "frame_shift": 0.01, "sampling_rate": 16000,
            "start": 0, "duration": 1, "storage_type": "kaldiio", "storage_path": "x", "storage_key": "y"}  # fmt: skip
IMAGE = {"storage_type": "pillow_files", "storage_path": ".", "storage_key": "x.eps", "width": 1, "height": 1}
CUT = {"id": "x", "start": 0, "duration": 1.0, "channel": 0, "supervisions": [], "recording": COMMAND,
       "type": "MonoCut"}  # fmt: skip
# Values to put into a cut, and a word of the refusal.
IN_CUTS = {
    "a recording of a command": (in_cut(recording=COMMAND), "command"),
    "a recording of a URL": (in_cut(recording=recording("url", URL)), "url"),
    "a field of the cut that is a command": (in_cut(custom__target_audio=COMMAND), "command"),
    "another key of the cut that is a command": (in_cut(custom__extra=COMMAND), "command"),
    "a key of the supervision that is a command": (in_cut(supervisions__0__custom__extra=COMMAND), "command"),
    "codes that are a pickle": (in_cut(custom__target_codes=array("memory_raw")), "memory_raw"),
    "an array that is a pickle": (in_cut(custom__extra=array("memory_raw")), "memory_raw"),
    "an array from Kaldi": (in_cut(custom__extra=KALDI), "kaldiio"),
    "features from Kaldi": (in_cut(features=FEATURES), "kaldiio"),
    "an image that Pillow may give to a program": (in_cut(custom__extra=IMAGE), "pillow_files"),
    "a command beside an alignment": (
        in_cut(supervisions__0__alignment={"word": [["hi", 0, 1]]}, supervisions__0__custom={"extra": COMMAND}),
        "command"),
    "a command deep in a key of the supervision": (in_cut(supervisions__0__custom__a={"b": [COMMAND]}), "command"),
    "a transform of the origin with a command": (in_cut(recording__transforms=[reverb(COMMAND)]), "command"),
    "a transform that is not lhotse's": (in_cut(recording__transforms=[transform("Evil")]), "Evil"),
    "a file that is a URL": (in_cut(recording__sources__0__source=URL), "that is a URL"),
    "a transform with a file that is a URL": (
        in_cut(recording__transforms=[reverb(recording("file", URL))]), "that is a URL"),
    "a transform with a key that lhotse does not know": (
        in_cut(recording__transforms=[transform("Speed", factor=1.1, more=1)]), "'more'"),
    "a recording within that has a key of its own": (in_cut(custom__extra={**FILE, "loader": "x"}), "'loader'"),
    "a source within that has a key of its own": (
        in_cut(custom__extra=FILE | {"sources": [{"type": "file", "channels": [0], "source": "x", "k": 1}]}), "'k'"),
    "a recording whose sources are none": (in_cut(custom__extra=FILE | {"sources": {"type": "file"}}), "not a list"),
}  # fmt: skip
# Changes to the metadata in an archive: its field, the keys, and a word of the refusal.
IN_METADATA = {
    "a reverberation by a command": (TARGETS, {"transforms": [reverb(COMMAND)]}, "command"),
    "a reverberation by a cut of a command": (TARGETS, {"transforms": [
        transform("ReverbWithImpulseResponse", rir=CUT)]}, "command"),
    "a reverberation by a reverberation by a command": (
        TARGETS, {"transforms": [reverb(FILE | {"transforms": [reverb(COMMAND)]})]}, "command"),
    "metadata with a transform that is not lhotse's": (TARGETS, {"transforms": [transform("Evil")]}, "Evil"),
    "a transform without a name": (TARGETS, {"transforms": [["Speed"]]}, "Speed"),
    "a command beside the array": (CODES, {"custom": COMMAND}, "custom|command"),
    "a key that lhotse does not know": (TARGETS, {"evil": 1}, "evil"),
}  # fmt: skip
PICKLES = {
    "objects": (do.change_item(CODES, 0, data=npy("|O", "(1,)", PICKLE)), r"codes\.0", {"bad_codes"}),
    "a bare pickle": (do.change_item(CODES, 0, data=PICKLE), r"codes\.0", {"bad_codes"}),
}
MEMBERS = {
    "an absolute name": [("/tmp/sharmill-escape.flac", b"x", b"0"), ("/tmp/sharmill-escape.json", b"{}", b"0")],
    "'..'": [("../../escape.flac", b"x", b"0"), ("../../escape.json", b"{}", b"0")],
    "a symbolic link": [("a.flac", b"", tarfile.SYMTYPE)],
    "a hard link": [("a.flac", b"", tarfile.LNKTYPE)],
    "a device": [("a.flac", b"", tarfile.CHRTYPE)],
    "a FIFO": [("a.flac", b"", tarfile.FIFOTYPE)],
    "a folder": [("../a", b"", tarfile.DIRTYPE)],
}
# Harmless in the place of an index: a link to a good file counts as the file, a loop as a missing index, and zeros
# after lines are not read.
LEFT_OUT = ("a link", "a loop of links", "a terabyte of nothing")
# Files that reader and checker must refuse, whatever the index lists for them.
NO_FILES = {
    **{f"{what} in the place of {name}": (lambda dataset, name=name, make=make: make(dataset / name), name)
       for what, make in do.STRANGE_FILES.items() for name in INDEX if what not in LEFT_OUT},
    **{f"a terabyte of nothing in the place of {name}": (lambda dataset, name=name: (
        (dataset / name).write_bytes(b""), os.truncate(dataset / name, 1 << 40)), name) for name in INDEX},
    **{f"a FIFO in the place of {name}": (do.replace_by(name, os.mkfifo), name) for name in (CUTS, TARGETS, CODES)},
    **{f"a deep line in {name}": (
        do.change_bytes(name, lambda data: b'{"format_version": 1, "index": 0, "x": ' + do.DEEP + b"}"), name)
       for name in INDEX},
}  # fmt: skip
NUMBERS = {
    "-1 shards": (do.change_description(num_shards=-1), {"damaged"}),
    "1e30 shards": (
        do.change_bytes("dataset.json", lambda data: data.replace(b'"num_shards": ', b'"num_shards": 1e30, "x": ')),
        {"damaged"}),
    "1e30 cuts of a shard": (
        do.change_bytes("shards.jsonl", lambda data: data.replace(b'"count":', b'"count":1e30,"x":')), {"damaged"}),
    "-1 cuts": (do.change_description(num_cuts=-1), {"damaged"}),
    "1e18 cuts": (do.change_description(num_cuts=10**18), {"damaged"}),
    "1e12 cuts": (do.change_description(num_cuts=10**12), {"wrong_totals"}),
    "no fields": (do.change_description(fields=[]), {"wrong_totals"}),
    "no field of cuts": (do.change_description(fields=lambda fields: fields[1:]), {"wrong_totals"}),
}  # fmt: skip
# By name: the change, a regular expression for the refusal, and codes of which the checker finds at least one.
ATTACKS = {
    **{name: (do.all_of(change, reindex), word, {"bad_cut"}) for name, (change, word) in IN_CUTS.items()},
    **{f"{name}, {index.__name__}": (
        do.all_of(do.change_metadata(field, 0, **keys), index), word, {"bad_codes" if field == CODES else "bad_audio"})
       for name, (field, keys, word) in IN_METADATA.items() for index in (reindex, without_index)},
    **{name: (do.all_of(change, reindex), word, found) for name, (change, word, found) in PICKLES.items()},
    **{f"a member: {name}": (
        do.all_of(before_members(*members), reindex), "", {"wrong_id", "wrong_count", "damaged"})
       for name, members in MEMBERS.items()},
    **{name: (change, "", found) for name, (change, found) in NUMBERS.items()},
    **{name: (change, word, {"damaged", "missing_file"}) for name, (change, word) in NO_FILES.items()},
}  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("attack", "words", "found"), ATTACKS.values(), ids=ATTACKS.keys())
def test_an_attack_is_refused_and_found_and_changes_nothing(dataset, tmp_path, attack, words, found):
    attack(dataset)
    before = written(tmp_path)
    # Lines of cuts are checked whichever fields are read.
    for fields in (None, []) if "bad_cut" in found else (None,):
        with pytest.raises(DamagedShard, match=words):
            load_all(dataset, fields)
    assert check(dataset) & found
    assert written(tmp_path) == before
    assert not [*tmp_path.rglob("ran"), *Path("/tmp").glob("sharmill-escape*")]


NAMES = ["x;touch ran;x.SPH", "pipe:0", "concat:a|b", "/dev/zero", "-", "fifo", "//proc/self/mem", "/tmp/../dev/zero",
         "/./dev/zero"]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_plain_file_is_kept_as_a_name_and_not_opened(dataset, tmp_path, name):
    """lhotse passes .sph names to a shell unescaped, but in our datasets they only name the origin of the audio."""
    os.mkfifo("fifo")
    values = {"recording__sources": recording("file", name)["sources"]}
    if name == "fifo":
        values["recording__transforms"] = [reverb(recording("file", name))]
    in_cut(**values)(dataset)
    first = next(iter(open_shar(dataset, [])))
    with pytest.raises(Exception, match="Shar placeholder"):
        first.load_audio()
    assert first.recording.sources[0].source == name
    assert not list(tmp_path.rglob("ran"))


def test_the_name_of_an_opus_file_for_a_shell_is_not_loaded(dataset, tmp_path):
    """lhotse reads .opus through a shell if this variable asks for it, which it checks once per process."""
    in_cut(recording__sources__0__source="x;touch ran;x.Opus")(dataset)
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


RESAMPLE = {"source_sampling_rate": 16000}
# Transforms of audio at a rate, and a word of their refusal; transforms that are common in training are allowed.
TRANSFORMS = [
    *((655350, *row) for row in (
        (transform("Speed", factor=1e-9), "factor"),
        (transform("Speed", factor=0.999999), "Hz"),  # the rates have no common divisor
        (transform("Tempo", factor=1e9), "factor"),
        (transform("Resample", **RESAMPLE, target_sampling_rate=10**9), "target_sampling_rate"),
        (transform("Resample", **RESAMPLE, target_sampling_rate=655349), "Hz"),
        (transform("Resample", **RESAMPLE, target_sampling_rate=math.nan), "target"),
        (transform("Narrowband", codec="mulaw", source_sampling_rate=655349, restore_orig_sr=True), "Hz"),
        (transform("ReverbWithImpulseResponse", rir_generator={"max_T60": 1e6}), "max_T60"),
        (transform("ReverbWithImpulseResponse", rir_generator={"sr": 10**9}), "sr"),
        (transform("ReverbWithImpulseResponse", rir_generator="os.system"), "rir_generator"),
        (transform("DereverbWPE", taps=10**9), "taps"),
        ({"name": "Speed"}, "form"),
    )),
    *((rate, transform("Speed", factor=factor), "transforms of audio of")
      for rate in (10**15, 10**400, 0, -16000, "x", None, True, [16000], math.nan) for factor in (1.1, "x")),
    *((rate, known, None) for rate in (16000, 22050, 44100, 48000) for known in (
        transform("Speed", factor=1.1), transform("Speed", factor=0.9), transform("Volume", factor=0.3),
        transform("Resample", source_sampling_rate=44100, target_sampling_rate=16000),
        transform("Resample", **RESAMPLE, target_sampling_rate=22050),
        transform("Narrowband", codec="mulaw", source_sampling_rate=44100, restore_orig_sr=True),
        transform("ReverbWithImpulseResponse", rir=None, rir_channels=[0],
                  rir_generator={"sr": 16000, "room_seed": 7}),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("rate", "change", "word"), TRANSFORMS, ids=lambda value: repr(value)[:40])
def test_transforms_are_bounded(rate, change, word):
    values = {**recording("memory", ""), "sampling_rate": rate, "transforms": [change]}
    found = find_forbidden([{"extra": {"deep": values}}])
    assert found is None if word is None else word in found


HOSTILE_VALUES = {
    "a setting of another type": (
        recording("shar", "") | {"transforms": [transform("Speed", factor=None)]},
        "item 0 has a transform Speed with factor None",
    ),
    "a command": (COMMAND, "command"),
}


@pytest.mark.parametrize(("values", "what"), HOSTILE_VALUES.values(), ids=HOSTILE_VALUES.keys())
def test_hostile_lines_of_values_are_damage(dataset, values, what):
    """The values of a field in lhotse's JSON lines are returned unchanged, so they must be checked."""
    without_index(dataset)
    (dataset / "extra").mkdir()
    for path in (dataset / "cuts").iterdir():
        rows = [{"cut_id": cut["id"], "extra": values} for cut in lines(path)]
        write_lines(dataset / "extra" / path.name.replace("cuts", "extra"), rows)
    with raises(DamagedShard, "damaged_shard", what):
        load_all(dataset, ["extra"])


@pytest.mark.parametrize("model", ["python:evil:Codec", "nemo:m.nemo", "transformers:someone/codec"])
def test_a_model_that_only_the_dataset_names_is_not_loaded(dataset, tmp_path, monkeypatch, model):
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    Path("m.nemo").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    do.change_codec(model=model)(dataset)
    with raises(ConfigError, "untrusted_model", model, "--codec-model"):
        check_dataset(dataset, tmp_path / "check", recheck_codes=1.0)
    assert not (tmp_path / "ran").exists()


def test_ids_like_paths_are_ids(dataset, tmp_path):
    """Cut and member agree on a name that leads out of every folder, but it names nothing on disk."""
    bad = "cut-../../../escape-0.00-1.00"
    in_cut(id=bad)(dataset)
    for path in dataset.rglob("*.000000.tar"):
        do.change_item(path.relative_to(dataset), 0, cut_id=bad)(dataset)
    reindex(dataset)
    before = snapshot(tmp_path)
    load_all(dataset)
    assert snapshot(tmp_path) == before
    assert "bad_cut" in check(dataset)
    assert {name for name in snapshot(tmp_path) if not name.startswith("check/")} == set(before)


# A program that reads and checks a dataset with at most 1 GiB more memory than its libraries need.
BOUNDED = """
import resource, sys
from pathlib import Path
import lhotse, torch, torchaudio
from support.project import check_of, run
from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.validate.findings import read_report
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30),) * 2)
dataset = Path(sys.argv[1])
try:
    for cut in open_shar(dataset):
        cut.load_target_audio(), cut.load_target_codes(), cut.load_context_audio(), cut.load_context_codes()
    print("read")
except (DamagedShard, ValueError) as error:
    print("refused")
stage = check_of(dataset, dataset.parent / "check", deep=True)
result = run(stage)
report = read_report(stage.product("validate/report")) if result.ok else None
print(sorted({row["code"] for row in report.findings}) if report else result.failures)
"""


def spaces(data: bytes) -> bytes:
    """Return gzip data of 3 GiB of spaces, made without holding them in memory."""
    stream = io.BytesIO()
    with gzip.GzipFile(fileobj=stream, mode="wb", mtime=0, compresslevel=6) as packed:
        for _ in range(3 << 10):
            packed.write(b" " * (1 << 20))
    return stream.getvalue()


def header(size: int, name: str = "a.flac", kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return the header of a member without its data."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def audio(data: bytes, extension: str, num_samples: int) -> do.Damage:
    """Return a change to audio whose metadata agrees with what its header claims."""
    claims = {"num_samples": num_samples, "duration": num_samples / 16000}
    return do.change_item(TARGETS, 0, data=data, extension=extension, metadata=lambda old: old | claims)


# The change, the reader's result, and the checker's finding.
OVERSIZED = {
    "an array of a petabyte": (
        do.change_item(CODES, 0, data=npy("<i2", "(3, 200000000000000)")), "refused", "bad_codes"),
    "an array of 20 GB": (do.change_item(CODES, 0, data=npy("<i2", "(1, 10000000000)")), "refused", "bad_codes"),
    "a member of 8 exabytes": (before_bytes(header(1 << 63)), "refused", "damaged"),
    "a member of 7 GB": (before_bytes(header(7 << 30)), "refused", "damaged"),
    "16,777,216 cuts of a shard": (
        do.all_of(do.change_shard(0, count=1 << 24), do.change_description(num_cuts=(1 << 24) + 4)),
        "refused", "wrong_count"),
    "40,000 fields": (do.change_description(
        fields=lambda fields: [*fields, *(f"f{number}" for number in range(40_000))],
        layout=lambda layout: [*layout, *({"name": f"f{number}", "file": f"f{number}/x.{{:06d}}.tar", "kind": "array",
                                           "attribute": f"f{number}"} for number in range(40_000))],
        ), "refused", "missing_field"),
    "a name of a terabyte": (
        before_bytes(header(1 << 40, "././@LongLink", tarfile.GNUTYPE_LONGNAME)), "refused", "damaged"),
    "a cut of 3 GB in gzip": (do.change_bytes(CUTS, spaces), "refused", "damaged"),
    "JSON of 100,000 levels": (do.change_bytes(CUTS, lambda data: gzip.compress(do.DEEP)), "refused", "damaged"),
    # The reader takes the part that the cut asks for, which exists.
    "a WAV that claims 2^32 bytes": (audio(odd.wav(data_size=2**32 - 64), "wav", 2**31 - 32), "read", "bad_audio"),
    "a FLAC that claims 2^32 samples": (audio(odd.flac_claiming(2**32), "flac", 2**32), "read", "bad_audio"),
    "a FLAC that claims 2^36 samples": (audio(odd.flac_claiming(2**36 - 1), "flac", 2**36 - 1), "read", "bad_audio"),
}  # fmt: skip
# Each case needs a separate process, so `make test` runs only two of them.
QUICK = ("16,777,216 cuts of a shard", "40,000 fields", "an array of 20 GB", "a member of 7 GB")
OVERSIZED_CASES = [
    pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, case in OVERSIZED.items()
]


@pytest.mark.parametrize(("make", "ending", "code"), OVERSIZED_CASES)
def test_sizes_that_are_only_claimed_cost_no_memory(dataset, make, ending, code):
    do.all_of(make, reindex)(dataset)
    command = [sys.executable, "-c", BOUNDED, str(dataset)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    read, found = ended.stdout.splitlines()
    assert read == ending
    assert code in json.loads(found.replace("'", '"'))


@pytest.mark.timeout(120)
def test_links_that_lead_in_circles_are_followed_once(dataset):
    without_index(dataset)
    for name in "abc":
        (dataset / name).symlink_to(".")
        (dataset / "cuts" / name).symlink_to("..")
    assert len(list(open_shar(dataset, ["target_audio"]))) == 7

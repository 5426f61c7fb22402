"""A run directory from a stranger, or on a disk that others write to: what is in it runs nothing and leads nowhere."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from support.errors import raises
from support.shar import Project, voice

from sharmill.cli.status import QueueView, print_status
from sharmill.engine.listener import Listener
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError, SharmillError
from sharmill.executors.local import LocalExecutor
from sharmill.executors.logs import one_line, printable
from sharmill.executors.slurm.queue import job_comment
from sharmill.files.locks import LOCK_NAME, FolderLock
from sharmill.files.staging import PublishedFile
from sharmill.files.storage import write_atomic
from sharmill.files.stored import load_stored_array, map_stored_array, read_stored, read_stored_lines
from sharmill.manifest import read_lines_at, records_checksum
from sharmill.match.groups import index_manifest
from sharmill.models.transformers import check_transformers_config
from sharmill.pipeline import run_dataset
from sharmill.write.order import index_matched

DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
SECRET = "root:x:0:0"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A run directory after ``prepare``, of four records of which one is rejected, and its configuration."""
    project = Project(tmp_path_factory.mktemp("rundir"))
    for number in range(3):
        project.add(f"{number}.wav", voice(1.0, seed=number))
    project.add("absent.wav", duration=1.0)
    config = project.configure(prepare={"min_duration": 0.0, "unit_records": 2}, executor={"workers": 1})
    assert prepare(config).ok
    return project.run_dir, config


@pytest.fixture
def run_dir(prepared):
    """The run directory, put back afterwards: paths in it are its own."""
    folder, _ = prepared
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    yield folder
    shutil.rmtree(folder)
    kept.rename(folder)


def prepare(config, **options):
    return run_dataset(config, Listener(), stages=("prepare",), executor=LocalExecutor(1), **options)


def show(run_dir: Path) -> None:
    print_status(Console(quiet=True), run_dir, QueueView(run_dir, next_question=float("inf")))


def is_whole(prepared) -> None:
    """Going on mends what can be mended."""
    assert prepare(prepared[1]).ok
    rejects = (prepared[0] / "rejects.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["reason"] for line in rejects] == ["missing_audio"]


def assert_clear(read) -> None:
    """Going well, or ending in one line about the run directory."""
    errors: list[ConfigError] = []
    try:
        read()
    except ConfigError as error:
        errors.append(error)
    assert [error for error in errors if error.code not in ("damaged_run_dir", "changed_plan", "foreign_output")] == []
    assert not any("\n" in str(error) for error in errors)


LEDGER = "prepare/ranks/*/ledger/*.jsonl"
HOSTILE = {
    "JSON of 100,000 levels": lambda path: path.write_bytes(DEEP + b"\n"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\n"),
    "a list": lambda path: path.write_bytes(b"[]\n"),
    "a terabyte of nothing": lambda path: os.truncate(path, 1 << 40),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a loop of links": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "a link": lambda path: (path.rename(path.with_name("other")), path.symlink_to("other")),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("name", ["plan/identity.json", "plan/units.jsonl", "plan/token", "done.json"])
def test_files_of_plans_that_are_none_end_in_one_line(prepared, run_dir, name, change):
    change(run_dir / "prepare" / name)
    for read in (lambda: show(run_dir), lambda: prepare(prepared[1])):
        assert_clear(read)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["jobs", "given.json", "end.json", "prepare/failures.jsonl"])
def test_other_files_that_are_none_end_in_one_line(run_dir, name):
    write_atomic(run_dir / name, DEEP)
    assert_clear(lambda: show(run_dir))


@pytest.mark.parametrize("name", ["/etc/passwd", "../../../../../../../../etc/passwd", "a/../../b", "", "a\nb"])
def test_names_in_a_ledger_that_lead_out_are_no_records(prepared, run_dir, name):
    with pytest.raises(ValueError, match="no name below a folder"):
        PublishedFile(name, 1, "x")
    (ledger,) = run_dir.glob(LEDGER)
    lines = ledger.read_bytes().splitlines()
    commit = json.loads(lines[0])
    status = Path("/etc/passwd").stat()
    commit["files"][0].update(name=name, size=status.st_size)
    ledger.write_bytes(b"\n".join([json.dumps(commit).encode(), *lines[1:]]) + b"\n")
    (run_dir / "prepare/done.json").unlink()
    is_whole(prepared)
    assert not [path for path in run_dir.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_a_linked_file_of_rejects_is_made_again_and_not_copied(prepared, run_dir):
    rejects = next(path for path in run_dir.glob("prepare/ranks/*/rejects/*.jsonl") if path.stat().st_size)
    rejects.unlink()
    rejects.symlink_to("/etc/passwd")
    (run_dir / "prepare/done.json").unlink()
    (run_dir / "prepare/rejects.jsonl").unlink()
    prepare(prepared[1])
    assert not rejects.is_symlink()
    assert (run_dir / "prepare/rejects.jsonl").stat().st_size
    assert not [path for path in run_dir.rglob("*") if not path.is_symlink() and path.is_file()
                and SECRET.encode() in path.read_bytes()]  # fmt: skip


def test_progress_of_nonsense_is_not_shown(run_dir):
    (run_dir / "prepare/done.json").unlink()
    (ranks,) = (run_dir / "prepare/ranks").iterdir()
    (ranks / "progress").mkdir(exist_ok=True)
    good = {"rank": 0, "pid": 1, "host": "a", "started": 1.0, "updated": 2.0, "unit": 0, "unit_began": 1.0}
    for key in ("started", "updated", "unit_began", "cost_done", "unit_cost_done", "peak_memory_mb"):
        for value in (1e308, -1e308, 1e18):
            (ranks / "progress/rank-000.json").write_bytes(msgspec.json.encode(good | {key: value}))
            show(run_dir)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_manifests_that_are_none_end_in_one_line(run_dir, change):
    path = next((run_dir / "manifests").glob("*_prepared.json"))
    change(path)
    for index in (lambda: index_manifest(path, lambda name, speaker: speaker), lambda: index_matched(path)):
        with raises(ConfigError, "damaged_run_dir", path.name) as error:
            index()
        assert "\n" not in str(error.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["a FIFO", "a device", "a loop of links", "a link"])
def test_lines_of_manifests_are_read_from_files_alone(run_dir, name):
    path = next((run_dir / "manifests").glob("*_prepared.json"))
    HOSTILE[name](path)
    for read in (lambda: read_lines_at(path, np.zeros(1, dtype=np.int64)), lambda: records_checksum(path)):
        with raises(ConfigError, "damaged_run_dir", path.name):
            read()


def test_an_array_of_a_terabyte_is_not_read(tmp_path):
    path = tmp_path / "bounds.npy"
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(
            stream, {"descr": "<u8", "fortran_order": False, "shape": (((1 << 40) - 128) // 8,)}
        )
    os.truncate(path, 1 << 40)
    with raises(ConfigError, "damaged_run_dir", "bounds.npy", "larger than 1024 MiB"):
        load_stored_array(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", [HOSTILE[name] for name in HOSTILE if name != "a terabyte of nothing"])
def test_mapped_arrays_that_are_none_end_in_one_line(tmp_path, change):
    path = tmp_path / "offsets.npy"
    np.save(path, np.asfortranarray(np.arange(6).reshape(2, 3)))
    assert map_stored_array(path).tolist() == [[0, 1, 2], [3, 4, 5]]
    change(path)
    with raises(ConfigError, "damaged_run_dir", path.name):
        map_stored_array(path)


@pytest.mark.parametrize("array", [np.array([{}], dtype=object), None], ids=["objects", "shorter than its header says"])
def test_mapped_arrays_have_numbers_only_and_all_of_them(tmp_path, array):
    path = tmp_path / "offsets.npy"
    np.save(path, np.arange(1000) if array is None else array)
    if array is None:
        os.truncate(path, path.stat().st_size - 8)
    with raises(ConfigError, "damaged_run_dir", path.name):
        map_stored_array(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_what_a_stranger_put_where_anybody_may_write_is_refused(prepared, run_dir):
    """One who may write by the group of a folder is no stranger."""
    stranger = 12345
    for path in (run_dir / "prepare/plan/units.jsonl", run_dir / "manifests"):
        os.chown(path, stranger, -1)
        (run_dir / "prepare/done.json").unlink(missing_ok=True)
        path.parent.chmod(0o770)
        is_whole(prepared)
        (run_dir / "prepare/done.json").unlink()
        path.parent.chmod(0o777)
        with pytest.raises(ConfigError, match="belongs to another user"):
            prepare(prepared[1])
        os.chown(path, os.geteuid(), -1)
        path.parent.chmod(0o755)


def test_an_id_of_a_run_that_is_none_asks_for_no_jobs(run_dir):
    write_atomic(run_dir / "id", b".*|x\n")
    with raises(ConfigError, "damaged_run_dir", "is not the id of a run directory"):
        job_comment(RunDir(run_dir), "rank")


def test_a_lock_that_is_a_link_is_refused(tmp_path):
    (tmp_path / LOCK_NAME).write_text("a file")
    with raises(ConfigError, "locked", LOCK_NAME), FolderLock(tmp_path):
        pass
    (tmp_path / LOCK_NAME).unlink()
    (tmp_path / LOCK_NAME).mkdir()
    os.mkfifo(tmp_path / LOCK_NAME / "owner-1.json")
    with raises(ConfigError, "locked", LOCK_NAME), FolderLock(tmp_path):
        pass
    (tmp_path / LOCK_NAME / "owner-1.json").unlink()
    (tmp_path / LOCK_NAME / "owner-1.json").symlink_to("/etc/passwd")
    with raises(ConfigError, "locked", "owner-1.json"), FolderLock(tmp_path):
        pass
    assert Path("/etc/passwd").exists()


def test_stored_files_are_bounded(tmp_path):
    path = tmp_path / "x"
    path.touch()
    os.truncate(path, 1 << 40)
    with raises(ConfigError, "damaged_run_dir", "larger than 64 MiB"):
        read_stored(path)
    assert len(next(read_stored_lines(path))) == 64 << 20
    with raises(ConfigError, "damaged_run_dir"):
        load_stored_array(path)
    with raises(ConfigError, "damaged_run_dir"):
        read_stored(tmp_path / ("n" * 300))


@pytest.mark.timeout(60)
def test_the_configuration_of_a_model_may_be_anything(tmp_path):
    path = tmp_path / "config.json"
    makers = (
        lambda: path.write_bytes(DEEP),
        lambda: os.truncate(path, 1 << 40),
        lambda: (path.unlink(), os.mkfifo(path)),
        lambda: (path.unlink(), path.write_bytes(b"\xff")),
    )
    for make in makers:
        make()
        with raises(ConfigError, "bad_model", "config.json"):
            check_transformers_config(tmp_path)


def test_no_name_makes_up_a_line():
    forged = "a.wav\n2026-01-01 INFO all is well\r\x85x\u2028y"
    assert printable(forged).splitlines() == ["a.wav", "  2026-01-01 INFO all is well\ufffd\ufffdx\ufffdy"]
    assert printable("one\n  two\n\nthree\n") == "one\n  two\n\n  three\n"
    assert len(one_line(forged).splitlines()) == 1
    assert isinstance(ConfigError(forged), SharmillError)

"""A run directory that is untrusted or writable by others: its contents execute nothing and lead nowhere."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from support.damage import STRANGE_FILES
from support.project import Project, raises, run_sharmill, stage_of

from sharmill.cli.status import read_run
from sharmill.engine.executor import Listener
from sharmill.engine.view import read_or_preview_units
from sharmill.errors import ConfigError
from sharmill.executors.local import LocalExecutor
from sharmill.files.locks import LOCK_NAME, FolderLock
from sharmill.files.staging import PublishedFile, Staging, token_staging
from sharmill.pipeline import run_dataset

strange = pytest.mark.parametrize("change", STRANGE_FILES.values(), ids=STRANGE_FILES.keys())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A run directory after ``prepare`` of four records, one of them rejected, and its configuration."""
    project = Project(tmp_path_factory.mktemp("rundir")).add_voices([1.0] * 3, "{}.wav")
    project.add("absent.wav", duration=1.0)
    config = project.configure(prepare={"min_duration": 0.0, "unit_records": 2}, executor={"workers": 1})
    assert prepare(config).ok
    return project.run_dir, config


@pytest.fixture
def run_dir(prepared):
    """The run directory, restored after the test; it must stay in place, since it contains its own paths."""
    folder, _ = prepared
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    yield folder
    shutil.rmtree(folder)
    kept.rename(folder)


def prepare(config, **options):
    return run_dataset(config, Listener(), stages=("prepare",), executor=LocalExecutor(1), **options)


def require_whole(prepared) -> None:
    """Require that resuming repairs everything that can be repaired, and that no file of this machine was copied."""
    run_dir, config = prepared
    assert prepare(config).ok
    rejects = (run_dir / "rejects.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["reason"] for line in rejects] == ["missing_audio"]
    files = [path for path in run_dir.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in files if b"root:x:0:0" in path.read_bytes()]


def error_of(read) -> ConfigError | None:
    try:
        read()
    except ConfigError as error:
        return error
    return None


@pytest.mark.timeout(60)
@strange
@pytest.mark.parametrize("name", ["plan/identity.json", "plan/units.jsonl", "plan/token", "done.json"])
def test_invalid_plan_files_do_no_harm_or_end_in_one_line(prepared, run_dir, name, change):
    change(run_dir / "prepare" / name)
    for read in (lambda: read_run(run_dir), lambda: prepare(prepared[1])):
        error = error_of(read)
        assert error is None or error.code in ("damaged_run_dir", "changed_plan", "foreign_output")
        assert "\n" not in str(error)


def test_a_file_of_a_plan_that_is_missing_ends_in_one_line(run_dir):
    path = run_dir / "prepare/plan/identity.json"
    path.unlink()
    error = run_sharmill("report", run_dir, status=1).stderr
    assert (error.count("\n"), str(path) in error) == (1, True)


@pytest.mark.timeout(60)
@strange
@pytest.mark.parametrize("name", ["manifests/*_prepared.json", "prepare/merged/seconds.npy"])
def test_manifests_that_are_none_end_in_one_line(prepared, run_dir, name, change):
    (path,) = run_dir.glob(name)
    change(path)
    error = error_of(lambda: read_or_preview_units(stage_of(prepared[1], "match")))
    assert error is not None
    assert error.code in ("damaged_run_dir", "stage_not_run", "foreign_output")
    assert "\n" not in str(error)


def test_a_column_that_is_too_short_loses_no_record(prepared, run_dir):
    path = run_dir / "prepare/merged/first_of_group.npy"
    np.save(path, np.load(path)[:-1])
    with raises(ConfigError, "stage_not_run", str(path), "--restart"):
        read_or_preview_units(stage_of(prepared[1], "match"))


@pytest.mark.parametrize("key", ["products", "facts"])
def test_an_end_without_products_or_facts_ends_in_one_line(prepared, run_dir, key):
    done = run_dir / "prepare/done.json"
    done.write_text(json.dumps(json.loads(done.read_bytes()) | {key: {}}))
    with raises(ConfigError, "stage_not_run", "prepare has left no", "--restart"):
        read_or_preview_units(stage_of(prepared[1], "match"))


@pytest.mark.parametrize(("fact", "value"), [("duration_tolerance", "0.1"), ("records", 7)])
def test_a_fact_of_another_type_ends_in_one_line_before_any_work(prepared, run_dir, fact, value):
    done = run_dir / "prepare/done.json"
    record = json.loads(done.read_bytes())
    record["facts"][fact] = value
    done.write_text(json.dumps(record))
    with raises(ConfigError, "damaged_run_dir", str(done), fact, "--restart"):
        read_or_preview_units(stage_of(prepared[1], "match"))


def test_a_stage_with_a_damaged_end_is_begun_anew(prepared, run_dir):
    (run_dir / "prepare/done.json").write_bytes(b"{")
    with raises(ConfigError, "damaged_run_dir", "--restart"):
        prepare(prepared[1])
    assert prepare(prepared[1], restart=True).ok


def test_a_product_behind_a_link_is_neither_read_nor_removed(prepared, run_dir, tmp_path):
    (tmp_path / "mine.json").touch()
    (run_dir / "linked").symlink_to(tmp_path)
    done = run_dir / "prepare/done.json"
    record = json.loads(done.read_bytes())
    record["products"]["manifest"]["name"] = "linked/mine.json"
    done.write_text(json.dumps(record))
    for use in (
        lambda: read_or_preview_units(stage_of(prepared[1], "match")),
        lambda: prepare(prepared[1], restart=True),
    ):
        with raises(ConfigError, "foreign_output", "linked is a link"):
            use()
    assert (tmp_path / "mine.json").exists()


@pytest.mark.parametrize("name", ["/etc/passwd", "../../../../../../../../etc/passwd", "a/../../b", "", "a\nb"])
def test_names_that_lead_out_are_no_outputs(prepared, run_dir, tmp_path, name):
    token_staging(tmp_path, "0" * 16).mkdir(parents=True)
    with Staging(tmp_path, "0" * 16) as staging:
        for use in (staging.path, lambda name: PublishedFile(name, 1, "x")):
            with pytest.raises(ValueError, match="not a relative path"):
                use(name)
    (ledger,) = run_dir.glob("prepare/ranks/*/ledger/*.jsonl")
    first, *others = ledger.read_bytes().splitlines(keepends=True)
    commit = json.loads(first)
    commit["files"][0].update(name=name, size=Path("/etc/passwd").stat().st_size)
    ledger.write_bytes(json.dumps(commit).encode() + b"\n" + b"".join(others))
    (run_dir / "prepare/done.json").unlink()
    require_whole(prepared)


def test_a_linked_file_of_rejects_is_made_again_and_not_copied(prepared, run_dir):
    rejects = next(path for path in run_dir.glob("prepare/ranks/*/rejects/*.jsonl") if path.stat().st_size)
    rejects.unlink()
    rejects.symlink_to("/etc/passwd")
    (run_dir / "prepare/done.json").unlink()
    (run_dir / "prepare/rejects.jsonl").unlink()
    require_whole(prepared)
    assert not rejects.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("name", ["prepare/plan/units.jsonl", "manifests"])
def test_what_a_stranger_put_where_anybody_may_write_is_refused(prepared, run_dir, name):
    """A user who may write because of a folder's group is trusted."""
    os.chown(run_dir / name, 12345, -1)
    (run_dir / name).parent.chmod(0o770)
    (run_dir / "prepare/done.json").unlink()
    require_whole(prepared)
    (run_dir / "prepare/done.json").unlink()
    (run_dir / name).parent.chmod(0o777)
    with pytest.raises(ConfigError, match="belongs to another user"):
        prepare(prepared[1])


# The thing in place of a lock, and the name in the refusal.
LOCKS = {
    "a file": (lambda lock: lock.write_text("a file"), LOCK_NAME),
    "a FIFO as its owner": (lambda lock: (lock.mkdir(), os.mkfifo(lock / "owner-1.json")), LOCK_NAME),
    "a link as its owner": (
        lambda lock: (lock.mkdir(), (lock / "owner-1.json").symlink_to("/etc/passwd")),
        "owner-1.json",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("make", "named"), LOCKS.values(), ids=LOCKS.keys())
def test_a_lock_that_is_none_is_refused(tmp_path, make, named):
    make(tmp_path / LOCK_NAME)
    with raises(ConfigError, "locked", named), FolderLock(tmp_path):
        pass
    assert Path("/etc/passwd").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seconds", [1e300, -1.0])
def test_an_absurd_lease_counts_as_a_torn_record(tmp_path, seconds):
    (tmp_path / LOCK_NAME).mkdir()
    record = {"host": "node7", "kernel": "another", "lease_seconds": seconds}
    (tmp_path / LOCK_NAME / "owner-1.json").write_text(json.dumps(record))
    began = time.monotonic()
    with FolderLock(tmp_path, lease_seconds=1.0):
        assert time.monotonic() - began >= 1.0

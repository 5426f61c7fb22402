"""Links and files of others below run and dataset directories: nothing behind them is read, written or removed."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from support.errors import raises
from support.growing import make_dataset
from support.shar import copy, snapshot
from support.toy_stage import ToyStage, run
from support.web import serving

from sharmill.audio.fetch import copy_of, fetch
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.executors.logs import logging_to, redirect_output
from sharmill.files.staging import STAGING_NAME, Staging, token_staging
from sharmill.files.storage import make_private_folder, open_stored
from sharmill.grow.append import append_dataset
from sharmill.grow.merge import merge_datasets
from sharmill.grow.split import split_dataset
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.layout import codec_fields
from sharmill.shar.sidecars import write_sidecars

CODES = "codes_a/target_codes"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two small datasets that can become one, with one codec."""
    folder = tmp_path_factory.mktemp("links")
    return [make_dataset(folder / name, name, codecs="a").dataset for name in "pq"]


@pytest.fixture
def dataset(made, tmp_path):
    return copy(made[0], tmp_path / "dataset")


def put_elsewhere(path: Path) -> Path:
    """Puts a file or a folder beside, with a link in its place."""
    behind = path.with_name(f"elsewhere-{path.name}")
    path.rename(behind)
    path.symlink_to(behind.name)
    return behind


class TestRunDirectory:
    @pytest.mark.parametrize("name", ["toy/logs/rank-000.log", "toy/logs/driver.log", "jobs/7_0_log.out", "copies"])
    def test_links_are_refused_before_anything_is_appended(self, tmp_path, name):
        run(ToyStage(tmp_path))
        mine = tmp_path / "mine"
        mine.write_text("mine")
        link = tmp_path / "run" / name
        link.unlink(missing_ok=True)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(mine)
        (tmp_path / "out/last/000000.txt").unlink()
        with raises(ConfigError, "foreign_output", f"{link} is a link"):
            run(ToyStage(tmp_path))
        assert mine.read_text() == "mine"

    def test_links_that_submitit_makes_are_let_be(self, tmp_path):
        (tmp_path / "run/jobs").mkdir(parents=True)
        (tmp_path / "run/jobs/.submission_file_0a1b.sh").symlink_to("7_submission.sh")
        assert run(ToyStage(tmp_path))[0].ok

    @pytest.mark.timeout(60)
    def test_logs_are_appended_to_files_alone(self, tmp_path):
        """A link that came after the folders were looked at."""
        mine = tmp_path / "mine"
        mine.write_text("mine")
        (tmp_path / "link.log").symlink_to(mine)
        os.mkfifo(tmp_path / "fifo.log")
        for name in ("link.log", "fifo.log"):
            with raises(ConfigError, "damaged_run_dir", name), logging_to(tmp_path / name):
                pass
            with raises(ConfigError, "damaged_run_dir", name):
                redirect_output(tmp_path / name)
            with raises(ConfigError, "damaged_run_dir", name):
                open_stored(tmp_path / name, append=True)
        assert mine.read_text() == "mine"

    def test_a_log_is_appended_to_and_closed(self, tmp_path):
        for text in ("one", "two"):
            with logging_to(tmp_path / "logs/rank-000.log"):
                logging.getLogger("sharmill").info("%s\x1b", text)
        lines = (tmp_path / "logs/rank-000.log").read_text().splitlines()
        assert [line.partition("sharmill: ")[2] for line in lines] == ["one\ufffd", "two\ufffd"]

    def test_a_folder_of_jobs_that_is_a_link_keeps_its_permissions(self, tmp_path):
        (tmp_path / "home").mkdir(mode=0o755)
        (tmp_path / "jobs").symlink_to("home")
        with raises(ConfigError, "foreign_output", "jobs is a link"):
            make_private_folder(tmp_path / "jobs")
        assert (tmp_path / "home").stat().st_mode & 0o777 == 0o755

    @pytest.mark.parametrize("name", ["/etc/passwd", "../../mine", "a/../../mine", ""])
    def test_names_of_a_plan_that_lead_out_are_not_written(self, tmp_path, name):
        token_staging(tmp_path / "data", "0" * 16).mkdir(parents=True)
        with Staging(tmp_path / "data", "0" * 16) as staging, pytest.raises(ValueError, match="no name below"):
            staging.path(name)

    def test_a_name_in_a_ledger_with_a_link_in_its_middle_is_refused(self, tmp_path):
        run(ToyStage(tmp_path))
        (ledger,) = (tmp_path / "run").glob("toy/ranks/*/ledger/*.jsonl")
        lines = [json.loads(line) for line in ledger.read_bytes().splitlines()]
        lines[0]["files"][1].update(name="last/evil/passwd", size=Path("/etc/passwd").stat().st_size)
        ledger.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        (tmp_path / "out/last/evil").symlink_to("/etc")
        (tmp_path / "run/toy/done.json").unlink()
        (tmp_path / "out/merged.txt").unlink()
        with raises(ConfigError, "foreign_output", "last/evil is a link"):
            run(ToyStage(tmp_path))
        assert not (tmp_path / "out/merged.txt").exists()

    def test_an_output_that_is_a_link_is_not_taken_for_one_of_this_run(self, tmp_path):
        run(ToyStage(tmp_path))
        behind = put_elsewhere(tmp_path / "out/last/000001.txt")
        (tmp_path / "run/toy/done.json").unlink()
        assert run(ToyStage(tmp_path))[0].ok
        assert not (tmp_path / "out/last/000001.txt").is_symlink()
        assert (tmp_path / "out/last/000001.txt").read_bytes() == behind.read_bytes()

    def test_a_folder_that_becomes_a_link_while_ranks_are_at_work(self, tmp_path):
        (tmp_path / "data/cuts").mkdir(parents=True)
        token_staging(tmp_path / "data", "0" * 16).mkdir(parents=True)
        with Staging(tmp_path / "data", "0" * 16) as staging:
            staging.path("cuts/a").write_bytes(b"new")
            behind = put_elsewhere(tmp_path / "data/cuts")
            with raises(ConfigError, "foreign_output", "cuts is a link"):
                staging.publish(["cuts/a"])
        assert list(behind.iterdir()) == []


class TestCopiesOfUrls:
    @pytest.fixture
    def web(self, tmp_path, monkeypatch):
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        (tmp_path / "web").mkdir()
        (tmp_path / "web/a.flac").write_bytes(b"audio")
        with serving(tmp_path / "web") as server:
            yield server

    def test_a_link_in_the_place_of_a_copy_is_replaced(self, web, tmp_path):
        secret = tmp_path / "secret"
        secret.write_bytes(b"secret")
        url = f"{web.url}/a.flac"
        path = copy_of(url, tmp_path / "copies")
        path.parent.mkdir(parents=True)
        path.symlink_to(secret)
        assert fetch(url, tmp_path / "copies", {web.url}).read_bytes() == b"audio"
        assert not path.is_symlink()
        assert secret.read_bytes() == b"secret"

    def test_a_folder_of_copies_that_is_a_link_is_refused(self, web, tmp_path):
        url = f"{web.url}/a.flac"
        path = fetch(url, tmp_path / "copies", {web.url})
        behind = put_elsewhere(path.parent)
        (behind / path.name).write_bytes(b"planted")
        with raises(ConfigError, "foreign_output", f"{path.parent} is a link"):
            fetch(url, tmp_path / "copies", {web.url})


class TestDataset:
    @pytest.mark.parametrize("field", ["cuts", "target_audio", CODES, "codes_a"])
    def test_sidecars_are_not_written_behind_a_link(self, dataset, field):
        behind = put_elsewhere(dataset / field)
        before = snapshot(behind)
        with raises(ConfigError, "foreign_output", f"{dataset / field} is a link"):
            write_sidecars(dataset)
        assert snapshot(behind) == before

    def test_sidecars_elsewhere_are_not_written_behind_a_link_either(self, dataset, tmp_path):
        (tmp_path / "mine").mkdir()
        (tmp_path / "index").mkdir()
        (tmp_path / "index/cuts").symlink_to(tmp_path / "mine")
        with raises(ConfigError, "foreign_output", "cuts is a link"):
            write_sidecars(dataset, tmp_path / "index")
        assert list((tmp_path / "mine").iterdir()) == []

    @pytest.mark.parametrize("field", ["cuts", CODES, "codes_a", STAGING_NAME])
    def test_nothing_is_appended_or_cleaned_up_behind_a_link(self, made, dataset, field):
        note = dataset / STAGING_NAME / "append.json"
        note.parent.mkdir(exist_ok=True)
        fields = ["cuts", "target_audio", "context_audio", CODES, "codes_a/context_codes"]
        note.write_bytes(msgspec.json.encode({"first": 2, "count": 2, "fields": fields}))
        (dataset / "cuts/cuts.000002.jsonl.gz").write_bytes(b"mine")
        (dataset / CODES / "codes.000002.tar").write_bytes(b"mine")
        behind = put_elsewhere(dataset / field)
        before = snapshot(behind)
        with raises(ConfigError, "foreign_output", f"{dataset / field} is a link"):
            append_dataset(dataset, made[1])
        assert snapshot(behind) == before

    @pytest.mark.parametrize("field", ["cuts", "codes_a"])
    def test_nothing_is_removed_behind_a_link(self, dataset, field):
        behind = put_elsewhere(dataset / field)
        before = snapshot(behind)
        removals = [lambda: ShardedDataset(dataset).remove(2)]
        if field == "codes_a":
            removals.append(lambda: ShardedDataset(dataset).remove_fields(codec_fields("a"), 2))
        for remove in removals:
            with raises(ConfigError, "foreign_output", f"{dataset / field} is a link"):
                remove()
        assert snapshot(behind) == before
        assert ShardedDataset(dataset).record().num_shards == 2

    def test_a_merge_does_not_begin_behind_a_link(self, made, tmp_path):
        mine = tmp_path / "mine/dataset"
        mine.mkdir(parents=True)
        (mine / "file").write_text("mine")
        (tmp_path / f".out{STAGING_NAME}").symlink_to("mine")
        with raises(ConfigError, "foreign_output", "is a link"):
            merge_datasets(made, tmp_path / "out")
        assert snapshot(mine) == {"file": b"mine"}

    def test_the_state_of_a_split_is_no_link(self, made, tmp_path):
        (tmp_path / "mine").mkdir()
        (tmp_path / ".out.split").symlink_to("mine")
        with raises(ConfigError, "foreign_output", ".out.split is a link"):
            split_dataset(made[0], tmp_path / "out", {"valid": 0.5}, workers=1)
        assert (tmp_path / ".out.split").is_symlink()


def test_a_run_directory_as_a_whole_may_be_a_link(tmp_path):
    run(ToyStage(tmp_path))
    shutil.move(tmp_path / "run", tmp_path / "disk")
    (tmp_path / "run").symlink_to("disk")
    assert run(ToyStage(tmp_path))[0].ok
    assert RunDir(tmp_path / "run").stage("toy").done.exists()

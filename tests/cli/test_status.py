"""What `sharmill status` says, from files whose content and age are known."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from datetime import datetime
from itertools import islice
from unittest import mock

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from support.manifests import config_for, make_record, write_manifest
from support.packages import add_distribution
from support.pipelines import run_sharmill

from sharmill.cli import status
from sharmill.cli.stage_status import read_stage
from sharmill.cli.status import QueueView, print_status
from sharmill.config import to_yaml
from sharmill.engine.claims import Rank
from sharmill.engine.fence import make_fence
from sharmill.engine.outcomes import FailedAttempt
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.progress import RankProgress
from sharmill.engine.reservations import make_run_id
from sharmill.engine.run import locked
from sharmill.engine.run_notes import End, Given, begin_run, note_end
from sharmill.engine.state import begin_round
from sharmill.engine.work import work
from sharmill.executors.slurm.queue import QueuedJob
from sharmill.files.host import state_and_start, this_kernel
from sharmill.files.storage import write_atomic
from sharmill.prepare.stage import PrepareStage

NOW = datetime(2026, 3, 1, 12, 0, 0)


class NoonClock(datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


@pytest.fixture
def noon(monkeypatch):
    """The time at which the status is asked for, in Unix seconds."""
    monkeypatch.setattr(status, "datetime", NoonClock)
    monkeypatch.setattr("sharmill.cli.stage_status.time_of_folder", lambda folder: NOW.timestamp())
    return NOW.timestamp()


@pytest.fixture
def stage(tmp_path, audio_root):
    """``prepare`` over four units of two records, of which the first is done and rejected one."""
    records = [make_record(audio_filepath="a.wav", offset=0.1 * number, duration=0.5) for number in range(8)]
    records[1]["text"] = ""
    config = config_for(
        tmp_path, [(write_manifest(tmp_path / "m.json", records), audio_root)], prepare={"unit_records": 2}
    )
    stage = PrepareStage(config)
    units = read_or_make_plan(stage, restart=False)
    make_fence(stage)
    write_atomic(stage.run_dir.config, to_yaml(config))
    do_units(stage, units[:1])
    for path in stage.dir.progress.iterdir():
        path.unlink()
    return stage


def do_units(stage, units):
    begin_round(stage, units, 1)
    work(stage, Rank(0, "node/rank 0", "cpu"))


def put_rank(stage, rank, *, started, updated, pid=1234, **values):
    values = {"unit_began": updated} | values
    values |= {"slot": f"node7/rank {rank}", "owner": str(rank), "host": "node7"}
    record = RankProgress(rank=rank, pid=pid, started=started, updated=updated, **values)
    path = stage.dir.rank_progress(str(rank))
    path.write_bytes(msgspec.json.encode(record))
    os.utime(path, (updated, updated))


def shown(stage, queue=None, *, width=160) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        print_status(console, stage.run_dir.path, queue)
    return capture.get()


def row(text, stage_name) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{stage_name}  ")]
    return re.split(r"  +", line.strip())


def test_units_done_running_failed_and_left(stage, noon):
    put_rank(stage, 0, started=noon - 100, updated=noon - 4, unit=1, units_done=1, cost_done=2.0)
    write_atomic(stage.dir.failures, msgspec.json.encode(FailedAttempt(2, "ValueError: no", "Traceback")) + b"\n")
    seen = read_stage(stage)
    assert (seen.units, seen.units_done, seen.units_running, seen.units_failed, seen.units_left) == (4, 1, 1, 1, 1)
    assert seen.state == "under way"
    text = shown(stage)
    assert row(text, "prepare")[:6] == ["prepare", "under way", "1/4", "1", "1", "1"]
    assert row(text, "match")[:2] == ["match", "not begun"]
    assert "prepare unit 2 failed: ValueError: no" in text
    assert f"tracebacks: {stage.dir.failures}" in text


def test_rejects_are_listed_by_reason(stage, noon):
    assert "prepare rejects: empty_text 1" in shown(stage)
    assert row(shown(stage), "prepare") == ["prepare", "stopped", "1/4", "0", "0", "3", "2/8 records", "1"]


def test_the_end_is_predicted_from_the_rate_of_all_living_ranks(stage, noon):
    """Two ranks with 2 records in 100 s each leave 6 of 8 records for 150 s."""
    (stage.dir.ledger / "other.jsonl").touch()
    put_rank(stage, 0, started=noon - 100, updated=noon, cost_done=2.0)
    put_rank(stage, 1, started=noon - 100, updated=noon, cost_done=2.0)
    assert read_stage(stage).seconds_left == pytest.approx(150.0)
    assert row(shown(stage), "prepare")[-1] == "0:02:30"
    assert "prepare: done at about 12:02:30" in shown(stage)


def test_the_time_left_of_all_stages_is_as_much_as_is_known(stage, noon, monkeypatch):
    (stage.dir.ledger / "other.jsonl").touch()
    put_rank(stage, 0, started=noon - 100, updated=noon, cost_done=2.0)
    assert "all stages: at least 0:05:00 left" in shown(stage)
    rest = dict.fromkeys(("match", "write", "survey", "encode/builtin", "assemble/builtin", "validate"), 60.0)
    monkeypatch.setattr("sharmill.pilot.predict.expect_seconds", lambda config, stages: rest)
    assert "all stages: 0:11:00 left" in shown(stage)


def test_a_damaged_pilot_takes_nothing_from_the_status(stage, noon):
    put_rank(stage, 0, started=noon - 100, updated=noon, cost_done=2.0)
    stage.run_dir.calibration.write_text("{")
    text = shown(stage)
    assert "the time left of the whole run is not known: " in text
    assert row(text, "prepare")[1] == "under way"


def test_a_price_is_refused_with_json(stage, call):
    code, out, err = call("status", stage.run_dir.path, "--json", "--gpu-hour", "2.5")
    assert (code, out) == (2, "")
    assert "--gpu-hour is of the text: --json has the seconds of each stage" in err


def test_units_under_way_count_for_what_is_done(stage, noon):
    put_rank(stage, 0, started=noon - 100, updated=noon, unit=1, cost_done=2.0, unit_cost_done=1.0)
    assert row(shown(stage), "prepare")[6] == "3/8 records"
    assert read_stage(stage).seconds_left == pytest.approx(5 / 0.03)


def test_a_rank_that_is_silent_for_more_than_a_minute_is_marked(stage, noon):
    put_rank(stage, 0, started=noon - 1000, updated=noon - 59, unit=1, unit_began=noon - 299, cost_done=2.0)
    put_rank(stage, 1, started=noon - 1000, updated=noon - 61, unit=2, unit_began=noon - 661, cost_done=2.0)
    lively, silent = [line for line in shown(stage).splitlines() if line.startswith("prepare rank")]
    assert lively == "prepare rank 0 on node7: unit 1 for 0:04:00, 0 done, 0 MB, seen 59 s ago"
    assert silent == "prepare rank 1 on node7: unit 2 for 0:10:00, 0 done, 0 MB, SILENT for 61 s (pid 1234)"
    seen = read_stage(stage)
    assert seen.state == "under way"
    assert seen.rate == pytest.approx(2.0 / 941)
    assert seen.units_running == 1
    stage.dir.rank_progress(0).unlink()
    assert read_stage(stage).state == "silent"
    # Another job goes on with it.
    assert read_stage(stage, queued=True).state == "in the queue"


def test_a_rank_without_a_unit_is_loading_or_between_two(stage, noon):
    put_rank(stage, 0, started=noon - 10, updated=noon)
    put_rank(stage, 1, started=noon - 10, updated=noon, units_done=2)
    loading, between = [line for line in shown(stage).splitlines() if line.startswith("prepare rank")]
    assert "on node7: loading, 0 done" in loading
    assert "on node7: between units, 2 done" in between


def test_ranks_that_have_ended_are_not_shown(stage, noon):
    put_rank(stage, 0, started=noon - 100, updated=noon, ended=True, cost_done=2.0)
    assert "prepare rank" not in shown(stage)
    assert read_stage(stage).state == "stopped"
    assert read_stage(stage).seconds_left is None


@pytest.fixture
def waiting(stage, noon):
    """A run that was submitted and has not ended."""
    begin_run(stage.run_dir, Given(stages=["prepare"], command="cd / && sharmill submit", cluster="here"))


def test_a_stage_whose_jobs_wait_is_in_the_queue(stage, waiting):
    jobs = [QueuedJob(f"8_{n}", "PENDING", "Priority", "", "ann", "rank") for n in range(3)]
    jobs.append(QueuedJob("9", "PENDING", "Dependency", "afterany:8_*", "ann", "advance"))
    jobs.append(QueuedJob("10", "RUNNING", "None", "", "ann", "second"))
    text = shown(stage, QueueView(stage.run_dir.path, jobs, next_question=math.inf))
    assert row(text, "prepare")[1] == "in the queue"
    assert "rank job 8_0 and 2 more: PENDING (Priority)" in text
    assert "advance job 9: PENDING (Dependency: afterany:8_*)\n" in text
    assert "the job behind it 10: RUNNING\n" in text
    assert "run: " not in text


@pytest.mark.parametrize(("jobs", "state"), [(["rank"], "in the queue"), ([], "stopped")])
def test_json_and_the_exit_status_say_if_jobs_are_left(stage, waiting, call, jobs, state):
    queued = [QueuedJob("8", "PENDING", "Priority", "", "ann", role) for role in jobs]
    with mock.patch("sharmill.executors.slurm.queue.queued_jobs", return_value=queued):
        code, out, _ = call("status", stage.run_dir.path, "--json")
        assert call("status", stage.run_dir.path, "--check")[0] == (0 if jobs else 1)
    shown = json.loads(out)
    found = {one["name"]: one["state"] for one in shown["stages"]}
    assert code == 0
    # A run whose jobs are gone has failed.
    assert (shown["end"] and (shown["end"]["state"], shown["end"]["code"])) == (
        None if jobs else ("failed", "jobs_gone")
    )
    assert [(job["id"], job["state"], job["reason"]) for job in shown["jobs"]] == [("8", "PENDING", "Priority")] * len(
        jobs
    )
    assert shown["problem"] == ""
    assert found["prepare"] == state
    assert found["match"] == "not begun"


def test_jobs_that_are_gone_are_to_be_submitted_again(stage, waiting):
    text = shown(stage, QueueView(stage.run_dir.path, next_question=math.inf))
    assert row(text, "prepare")[1] == "stopped"
    assert "run: failed: no job is left though work is: submit again: cd / && sharmill submit" in text


def test_the_end_of_a_run_is_shown_with_its_time(stage, waiting, noon):
    note_end(stage.run_dir, End(state="cancelled", message="cancelled by ann"))
    os.utime(stage.run_dir.end, (noon, noon))
    assert "run: cancelled since 2026-03-01 12:00:00: cancelled by ann" in shown(stage)


def test_where_nobody_can_be_asked_status_says_so(stage, waiting, monkeypatch):
    make_run_id(stage.run_dir)
    stage.run_dir.jobs.mkdir()
    monkeypatch.setenv("PATH", str(stage.run_dir.path))
    text = shown(stage)
    assert row(text, "prepare")[1] == "in the queue"
    assert "it is not known whether its jobs are left: there is no squeue here" in text


def test_a_unit_that_takes_far_longer_than_the_others_is_named_and_no_time_left_is_told(stage, noon):
    (ledger,) = stage.dir.ledger.iterdir()
    ledger.write_bytes(msgspec.json.encode(msgspec.json.decode(ledger.read_bytes()) | {"seconds": 4.0}) + b"\n")
    put_rank(stage, 0, started=noon - 300, updated=noon - 100, unit=1, unit_began=noon - 130, cost_done=2.0)
    # Two records at one in two seconds; a file of 30 s ago says that the unit had taken 30 s.
    os.utime(stage.dir.rank_progress(0), (noon - 30, noon - 30))
    assert read_stage(stage).late == []
    # It takes longer than it should already, and will hardly end at once.
    assert read_stage(stage).seconds_left >= 60
    put_rank(
        stage,
        0,
        started=noon - 300,
        updated=noon - 100,
        unit=1,
        unit_began=noon - 190,
        unit_limit=1800.0,
        cost_done=2.0,
    )
    os.utime(stage.dir.rank_progress(0), (noon - 30, noon - 30))
    (late,) = read_stage(stage).late
    assert (late.unit, late.rank, late.seconds, late.expected) == (1, 0, 120.0, 4.0)
    assert read_stage(stage).seconds_left is None
    text = shown(stage)
    assert "unit 1 has taken rank 0 0:02:00, where 0:00:04 is usual" in text
    assert "it is ended after 0:30:00" in text


def test_several_run_directories_are_shown_one_after_the_other(stage, call):
    path = stage.run_dir.path
    code, out, _ = call("status", path, f"{path}/", "--json")
    assert code == 0
    assert [one["name"] for one in json.loads(out)[str(path)]["stages"]][:2] == ["prepare", "match"]
    code, out, _ = call("status", path, path)
    assert out.count("not begun") == 2 * out.split(str(path))[1].count("not begun") > 0


def test_a_monitor_is_told_by_the_exit_status(stage, noon, call):
    path = stage.run_dir.path
    assert call("status", path, "--check")[0] == 0
    write_atomic(stage.dir.failures, msgspec.json.encode(FailedAttempt(2, "ValueError: no", "Traceback")) + b"\n")
    assert call("status", path)[0] == 0
    assert call("status", path, "--check")[0] == 1


def test_prometheus_reads_the_numbers(stage, noon, call, tmp_path):
    put_rank(stage, 0, started=noon - 100, updated=noon, unit=1, unit_began=noon)
    assert call("status", stage.run_dir.path, "--prometheus", tmp_path / "sharmill.prom")[0] == 0
    families = text_string_to_metric_families((tmp_path / "sharmill.prom").read_text())
    values = {
        (sample.name, *(value for name, value in sample.labels.items() if name != "run_dir")): sample.value
        for family in families
        for sample in family.samples
    }
    assert values["sharmill_units", "done", "prepare"] == 1
    assert values["sharmill_units", "all", "prepare"] == 4
    assert values["sharmill_stage_state", "prepare", "under way"] == 1
    assert values["sharmill_stage_state", "match", "not begun"] == 1
    assert values["sharmill_rejects", "empty_text", "prepare"] == 1
    assert values["sharmill_run_failed",] == 0


def test_watch_shows_it_again_until_it_is_interrupted(stage):
    command = [sys.executable, "-m", "sharmill", "status", str(stage.run_dir.path), "--watch"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    seen = []
    for line in islice(process.stdout, 200):
        if line.startswith("prepare  "):
            seen.append(re.split(r"  +", line)[2].partition("/")[0])
            if len(seen) == 1:
                do_units(stage, read_or_make_plan(stage, restart=False)[1:2])
            elif seen[-1] == "2":
                break
    process.send_signal(2)
    _, errors = process.communicate(timeout=60)
    assert seen[0] == "1"
    assert process.returncode == 0
    assert errors == ""


def test_it_fits_80_columns(stage, noon):
    put_rank(stage, 0, started=noon - 100, updated=noon - 4, unit=1, units_done=1, cost_done=2.0)
    put_rank(stage, 1, started=noon - 9000, updated=noon - 4000, unit=2, units_done=1, cost_done=2.0)
    text = shown(stage, width=80)
    assert row(text, "stage") == ["stage", "state", "units", "processed", "rejects", "time left"]
    assert row(text, "prepare") == ["prepare", "under way", "1/4", "2/8 records", "1", "0:04:48"]
    assert not [line for line in text.splitlines() if "…" in line or len(line) > 80]


def test_codecs_of_earlier_runs_are_shown(stage):
    folder = stage.run_dir.stage("encode/earlier").plan
    folder.mkdir(parents=True)
    (folder / "units.jsonl").touch()
    names = [line.split()[0] for line in shown(stage).splitlines() if line.startswith(("encode/", "assemble/"))]
    assert names == ["encode/earlier", "encode/builtin", "assemble/earlier", "assemble/builtin"]


def test_a_folder_that_is_no_run_directory_is_refused(tmp_path):
    outcome = run_sharmill("status", tmp_path)
    assert outcome.returncode == 2
    assert str(tmp_path) in outcome.stderr
    assert "resolved_config.yaml" in outcome.stderr


def test_no_code_of_a_source_or_model_is_imported(stage, tmp_path, monkeypatch):
    (tmp_path / "strangers_code.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = yaml.safe_load(stage.run_dir.config.read_bytes())
    config["sources"] = [{"type": "python:strangers_code:Source", "audio_root": "a", "table": "t.csv"}]
    config["match"] |= {"encoder": "python:strangers_code:Encoder", "options": {"a": 1}}
    codec = {"name": "theirs", "model": "python:strangers_code:Codec", "level": 3, "options": {"a": 1}}
    config["encode"]["codecs"] = [codec]
    config["executor"] = {"kind": "python:strangers_code:Executor"}
    stage.run_dir.config.write_text(yaml.safe_dump(config))
    assert "encode/theirs" in shown(stage)
    assert not (tmp_path / "ran").exists()


def test_a_stage_that_cannot_be_imported_does_not_hide_the_others(stage, tmp_path, monkeypatch):
    before, config = shown(stage), yaml.safe_load(stage.run_dir.config.read_bytes())
    add_distribution(tmp_path / "site", "theirs", "1.0", "[sharmill.stages]\ntheirs = no_such_module:Stage\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    stage.run_dir.config.write_text(yaml.safe_dump(config | {"theirs": {"level": 1}}))
    assert shown(stage) == before


def test_keys_of_another_version_do_not_matter(stage):
    before, config = shown(stage), yaml.safe_load(stage.run_dir.config.read_bytes())
    for values in (config, config["executor"], config["match"], config["encode"]["codecs"][0]):
        values["key_of_another_version"] = 1
    stage.run_dir.config.write_text(yaml.safe_dump(config))
    assert shown(stage) == before


def test_nothing_is_written(stage):
    before = {path: path.stat().st_mtime_ns for path in stage.run_dir.path.rglob("*")}
    began = time.time_ns()
    shown(stage)
    assert {path: path.stat().st_mtime_ns for path in stage.run_dir.path.rglob("*")} == before
    assert max(before.values()) < began


def test_a_rank_with_another_clock_has_the_age_of_its_file(stage):
    """Its clock is an hour ahead; before, it was seen -3600 s ago."""
    ahead = time.time() + 3600
    put_rank(stage, 0, started=ahead - 100, updated=ahead, unit=1, unit_began=ahead - 50)
    path = stage.dir.rank_progress(0)
    os.utime(path)
    (line,) = [line for line in shown(stage).splitlines() if line.startswith("prepare rank")]
    assert re.fullmatch(r"prepare rank 0 on node7: unit 1 for 0:00:50, 0 done, 0 MB, seen \d s ago", line)


def test_a_killed_process_of_this_machine_is_silent_at_once(stage):
    with subprocess.Popen(["sleep", "60"]) as process:
        record = {"kernel": this_kernel(), "pid": process.pid, "process_started": state_and_start(process.pid)[1]}
        put_rank(stage, 0, started=time.time(), updated=time.time(), **record)
        assert read_stage(stage).state == "under way"
        process.kill()
    assert read_stage(stage).state == "silent"


def test_a_run_directory_that_cannot_be_written_has_the_time_of_this_machine(stage, monkeypatch):
    def refuse(**options):
        raise PermissionError

    monkeypatch.setattr("sharmill.files.storage.tempfile.TemporaryFile", refuse)
    put_rank(stage, 0, started=time.time(), updated=time.time())
    assert read_stage(stage).now == pytest.approx(time.time(), abs=60)
    assert read_stage(stage).state == "under way"


def test_a_run_whose_first_jobs_are_not_submitted_yet_is_not_in_trouble(stage, waiting, call):
    """The process that submits them holds the run directory."""
    with locked(stage.run_dir):
        assert call("status", stage.run_dir.path, "--check")[0] == 0


def test_one_bad_run_directory_hides_no_other(stage, call, tmp_path):
    code, out, err = call(
        "status", stage.run_dir.path, tmp_path / "gone", "--json", "--prometheus", tmp_path / "m.prom"
    )
    assert code == 2
    assert list(json.loads(out)) == [str(stage.run_dir.path)]
    assert "gone is not a run directory" in err
    assert "sharmill_unread_run_dirs 1.0" in (tmp_path / "m.prom").read_text()
    assert 'kind="done",run_dir' in (tmp_path / "m.prom").read_text()


@pytest.mark.parametrize("options", [["--prometheus", "/no/such/folder/m.prom"], ["--watch", "--json"]])
def test_what_cannot_be_is_one_line(stage, call, options):
    code, _, err = call("status", stage.run_dir.path, *options)
    assert code == 2
    assert len(err.splitlines()) == 1


def test_hours_of_gpus_have_a_price_and_memory_stands_beside_what_was_asked_for(stage, call):
    (ledger,) = stage.dir.ledger.glob("*.jsonl")
    facts = {"device_kind": "A GPU", "seconds": 3600.0, "memory_mb": 6012.0, "memory_asked_mb": 48000.0}
    commits = [json.loads(line) | facts for line in ledger.read_text().splitlines()]
    ledger.write_text("".join(json.dumps(commit) + "\n" for commit in commits))
    _, out, _ = call("status", stage.run_dir.path, "--gpu-hour", "2.5")
    assert f"{len(commits)}:00:00 of ranks on GPUs so far" in out
    assert f"{2.5 * len(commits):.2f} if each had a GPU of its own" in out
    assert "at most 6,012 MB on a rank, of 48,000 MB asked; hosts: 1" in out

"""The output of `sharmill status` for files of known content and age."""

import json
import os
import re
import subprocess
import sys
from datetime import datetime
from itertools import islice

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.project import config_for, make_record, stage_of, write_lines

from sharmill.cli import status
from sharmill.config import to_yaml
from sharmill.engine.fence import make_fence
from sharmill.engine.launch import begin_launch
from sharmill.engine.parent import Rank
from sharmill.engine.plan import read_or_make_plan
from sharmill.engine.progress import RankProgress
from sharmill.engine.run import locked
from sharmill.engine.run_dir import RunOutcome, RunRequest
from sharmill.engine.unit import FailedAttempt
from sharmill.engine.view import StageReader
from sharmill.engine.watch import Watcher
from sharmill.engine.work import work
from sharmill.executors.slurm.queue import QueuedJob
from sharmill.files.atomic import write_atomic
from sharmill.files.host import this_kernel

NOW = datetime(2026, 3, 1, 12, 0, 0)
NOON = NOW.timestamp()


class NoonClock(datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


@pytest.fixture
def noon(monkeypatch):
    """The time at which the status is asked for, in Unix seconds."""
    monkeypatch.setattr(status, "datetime", NoonClock)
    monkeypatch.setattr("sharmill.engine.view.time_of_folder", lambda folder: NOON)
    return NOON


@pytest.fixture
def stage(tmp_path, audio_root):
    """``prepare`` over four units of two records, of which the first is done and rejected one."""
    records = [make_record(audio_filepath="a.wav", offset=0.1 * number, duration=0.5) for number in range(8)]
    records[1]["text"] = ""
    config = config_for(
        tmp_path, [(write_lines(tmp_path / "m.json", records), audio_root)], prepare={"unit_records": 2}
    )
    stage, units = read_or_make_plan(stage_of(config, "prepare"))
    make_fence(stage)
    write_atomic(stage.run_dir.config, to_yaml(config))
    do_units(stage, units[:1])
    for path in stage.ranks.progress.iterdir():
        path.unlink()
    return stage


def do_units(stage, units):
    begin_launch(stage, units, 1)
    work(stage, Rank(0, "node/rank 0", "cpu"), Watcher(stage))


def heartbeat(stage, rank, beat="1"):
    return stage.ranks.progress / f"rank-{rank}.{beat}.0.json"


def put_rank(stage, rank, *, started, updated, pid=1234, **values):
    values = {"unit_began": updated} | values
    values |= {"slot": f"node7/rank {rank}", "owner": str(rank), "host": "node7"}
    record = RankProgress(rank=rank, pid=pid, started=started, updated=updated, **values)
    path = heartbeat(stage, rank, "ended" if record.ended else "1")
    path.write_bytes(msgspec.json.encode(record))
    os.utime(path, (updated, updated))


@pytest.fixture
def shown(stage, call, monkeypatch):
    """Returns a function: columns of the terminal -> status output for the run of ``stage``."""

    def show(width=160):
        monkeypatch.setenv("COLUMNS", str(width))
        return call("status", stage.run_dir.path)[1]

    return show


def row(text, stage_name) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{stage_name}  ")]
    return re.split(r"  +", line.strip())


def test_units_done_running_failed_and_left(stage, noon, call, shown):
    assert call("status", stage.run_dir.path, "--check")[0] == 0
    put_rank(stage, 0, started=noon - 100, updated=noon - 4, unit=1, units_done=1, cost_done=2.0)
    write_atomic(stage.dir.failures, msgspec.json.encode(FailedAttempt(2, "ValueError: no", "Traceback")) + b"\n")
    text = shown()
    assert row(text, "prepare")[:6] == ["prepare", "under way", "1/4", "1", "1", "1"]
    assert row(text, "match")[:2] == ["match", "not begun"]
    assert "prepare unit 2 failed: ValueError: no" in text
    assert f"tracebacks: {stage.dir.failures}" in text
    heartbeat(stage, 0).unlink()
    assert [call("status", stage.run_dir.path, *options)[0] for options in ([], ["--check"])] == [0, 1]


# Heartbeats of ranks that started 100 s ago, the row of prepare, and lines below the table.
RANKS = {
    # Two ranks with 2 records in 100 s each leave 6 of 8 records for 150 s.
    "two": ([{"cost_done": 2.0}, {"cost_done": 2.0}], "under way 1/4 3 2/8 records 1 0:02:30",
            ["prepare: finishes at about 12:02:30"]),
    "silent for a minute": (
        [{"started": NOON - 1000, "updated": NOON - age, "unit": age - 58, "unit_began": NOON - age - 240,
          "cost_done": 2.0} for age in (59, 61)],
        "under way 1/4 1 2 2/8 records 1",
        ["prepare rank 0 on node7: unit 1 for 0:04:00, 0 done, 0 MB, last seen 59 s ago",
         "prepare rank 1 on node7: unit 3 for 0:04:00, 0 done, 0 MB, SILENT for 61 s (pid 1234)"],
    ),
    "none": ([], "stopped 1/4 3 2/8 records 1", ["prepare rejects: empty_text 1", "total so far: 0:00:0"]),
    "loading": ([{"cost_done": 0.0}], "under way 1/4 3 2/8 records 1", ["node7: loading, 0 done"]),
    "between units": ([{"units_done": 2}], "under way 1/4 3 2/8 records 1", ["node7: between units, 2 done"]),
    "within a unit": (
        [{"unit": 1, "cost_done": 2.0, "unit_cost_done": 1.0}],
        "under way 1/4 1 2 3/8 records 1 0:02:47",
        ["prepare: finishes at about 12:02:46", "all stages: at least 0:02:47 left"],
    ),
    "since it had loaded": ([{"ready": NOON - 50, "cost_done": 2.0}],
                            "under way 1/4 3 2/8 records 1 0:02:30", []),
    "ended": ([{"cost_done": 2.0, "ended": True}], "stopped 1/4 3 2/8 records 1", []),
    "of this machine, gone": ([{"kernel": this_kernel(), "pid": 1 << 22}],
                              "silent 1/4 3 2/8 records 1", ["SILENT"]),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "cells", "words"), RANKS.values(), ids=RANKS)
def test_ranks_and_the_time_left_are_shown(stage, noon, shown, ranks, cells, words):
    for number, values in enumerate(ranks):
        put_rank(stage, number, **{"started": noon - 100, "updated": noon} | values)
    text = shown()
    assert " ".join(row(text, "prepare")[1:]).startswith(cells)
    assert [word for word in words if word not in text] == []


def jobs_of(*roles):
    return [QueuedJob(str(8 + n), "PENDING", "Priority", "", "ann", role) for n, role in enumerate(roles)]


GONE = "run: failed: work is left, but no job for it: submit again: cd / && sharmill submit"
# Jobs in the queue (None: there is no squeue), the end that was noted; state, exit status of --check, words.
QUEUES = {
    "waiting": (jobs_of("rank", "rank", "advance"), None, "in the queue", 0,
                ["rank job 8 and 1 more: PENDING (Priority)", "driver job 10: PENDING"]),
    "gone": ([], None, "stopped", 1, [GONE]),
    "not to be asked": (None, None, "in the queue", 0,
                        ["the run's jobs are unknown: squeue was not found"]),
    "cancelled": ([], RunOutcome(state="cancelled", message="cancelled by ann"), "stopped", 1,
                  ["run: cancelled 2026-03-01 12:00:00: cancelled by ann"]),
}  # fmt: skip


@pytest.mark.parametrize(("jobs", "end", "state", "code", "words"), QUEUES.values(), ids=QUEUES)
def test_text_json_and_exit_status_say_if_jobs_are_left(
    stage, noon, call, monkeypatch, jobs, end, state, code, words, shown
):
    stage.run_dir.begin(RunRequest(stages=["prepare"], command="cd / && sharmill submit", cluster="here"))
    if end is not None:
        stage.run_dir.note_outcome(end)
        os.utime(stage.run_dir.outcome, (noon, noon))
    if jobs is None:
        stage.run_dir.make_id()
        stage.run_dir.jobs.mkdir()
        monkeypatch.setenv("PATH", str(stage.run_dir.path))
    else:
        monkeypatch.setattr(status, "queued_jobs", lambda *_, **options: jobs)
    text = shown()
    assert row(text, "prepare")[1] == state
    assert [word for word in words if word not in text] == []
    assert call("status", stage.run_dir.path, "--check")[0] == code
    found = json.loads(call("status", stage.run_dir.path, "--json")[1])
    assert [one["state"] for one in found["stages"]][:2] == [state, "not begun"]
    assert [job["id"] for job in found["jobs"]] == [job.id for job in jobs or ()]
    assert (found["end"] is not None, found["problem"] != "") == (code == 1, jobs is None)


def test_a_process_that_submits_the_first_jobs_is_no_trouble(stage, call, monkeypatch):
    stage.run_dir.begin(RunRequest(stages=["prepare"], cluster="here"))
    monkeypatch.setattr(status, "queued_jobs", lambda *_, **options: [])
    with locked(stage.run_dir):
        assert call("status", stage.run_dir.path, "--check")[0] == 0


def test_status_ignores_a_damaged_pilot_and_unknown_keys(stage, noon, shown):
    put_rank(stage, 0, started=noon - 100, updated=noon, cost_done=2.0)
    config = yaml.safe_load(stage.run_dir.config.read_bytes()) | {"theirs": {"level": 1}, "new_key": 1}
    config["encode"]["codecs"][0]["new_key"] = 1
    stage.run_dir.config.write_text(yaml.safe_dump(config))
    stage.run_dir.calibration.write_text("{")
    text = shown(80)
    assert "the time left of the whole run is unknown: " in text
    assert row(text, "prepare") == ["prepare", "under way", "1/4", "2/8 records", "1", "0:05:00"]
    assert max(map(len, text.splitlines()[:4])) <= 80


def test_status_shows_cost_memory_and_codecs_of_earlier_runs(stage, call):
    (ledger,) = stage.ranks.ledger.glob("*.jsonl")
    facts = {"device_kind": "A GPU", "seconds": 3600.0, "memory_mb": 6012.0, "memory_asked_mb": 48000.0}
    ledger.write_text(json.dumps(json.loads(ledger.read_text()) | facts) + "\n")
    folder = stage.run_dir.stage("encode/earlier").plan
    folder.mkdir(parents=True)
    (folder / "units.jsonl").touch()
    before = {path: path.stat().st_mtime_ns for path in stage.run_dir.path.rglob("*")}
    _, out, _ = call("status", stage.run_dir.path, "--gpu-hour", "2.5", "--verbose")
    words = ["total so far: 1:00:00 of GPU workers", "(price with one GPU per worker: 2.50)", "encode/earlier",
             "peak memory per worker: 6,012 MB of 48,000 MB requested; hosts: 1"]  # fmt: skip
    assert [word for word in words if word not in out] == []
    # Nothing is written.
    assert {path: path.stat().st_mtime_ns for path in stage.run_dir.path.rglob("*")} == before


WRONG = {
    "--json --gpu-hour 2.5": "--gpu-hour cannot be combined with --json",
    "--watch --json": "--watch cannot be combined",
    "--prometheus /no/such/folder/m.prom": "cannot write /no/such/folder/m.prom",
}


@pytest.mark.parametrize("options", WRONG)
def test_what_cannot_be_is_one_line(stage, call, options):
    code, out, err = call("status", stage.run_dir.path, *options.split())
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert WRONG[options] in err


def test_a_late_unit_is_named_and_hides_the_time_left(stage, noon, shown):
    (ledger,) = stage.ranks.ledger.iterdir()
    ledger.write_bytes(msgspec.json.encode(msgspec.json.decode(ledger.read_bytes()) | {"seconds": 4.0}) + b"\n")
    put_rank(stage, 0, started=noon - 300, updated=noon - 100, unit=1, unit_began=noon - 130, cost_done=2.0)
    # Two records take four seconds. The heartbeat file is 30 s old, and the unit had taken 30 s then.
    os.utime(heartbeat(stage, 0), (noon - 30, noon - 30))
    assert StageReader(stage).read().late == []
    # It takes longer than it should already, and will hardly end at once.
    assert StageReader(stage).read().seconds_left >= 60
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
    os.utime(heartbeat(stage, 0), (noon - 30, noon - 30))
    (late,) = StageReader(stage).read().late
    assert (late.unit, late.rank, late.seconds, late.expected) == (1, 0, 120.0, 4.0)
    assert StageReader(stage).read().seconds_left is None
    text = shown()
    assert "unit 1 on rank 0 has taken 0:02:00 instead of the usual 0:00:04" in text
    assert "the unit is stopped after 0:30:00" in text


def test_prometheus_reads_the_numbers(stage, noon, call, tmp_path):
    put_rank(stage, 0, started=noon - 100, updated=noon, unit=1, unit_began=noon)
    said = f"wrote {tmp_path / 'sharmill.prom'}: 1 run directories\n"
    assert call("status", stage.run_dir.path, "--prometheus", tmp_path / "sharmill.prom") == (0, said, "")
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
                do_units(stage, stage.dir.read_units()[1:2])
            elif seen[-1] == "2":
                break
    process.send_signal(2)
    _, errors = process.communicate(timeout=60)
    assert seen[0] == "1"
    assert process.returncode == 0
    assert errors == ""


def test_no_code_of_a_source_or_model_is_imported(stage, tmp_path, monkeypatch, shown):
    (tmp_path / "strangers_code.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = yaml.safe_load(stage.run_dir.config.read_bytes())
    config["sources"] = [{"type": "python:strangers_code:Source", "audio_root": "a", "table": "t.csv"}]
    config["match"] |= {"encoder": "python:strangers_code:Encoder", "options": {"a": 1}}
    codec = {"name": "theirs", "model": "python:strangers_code:Codec", "level": 3, "options": {"a": 1}}
    config["encode"]["codecs"] = [codec]
    config["executor"] = {"kind": "python:strangers_code:Executor"}
    stage.run_dir.config.write_text(yaml.safe_dump(config))
    assert "encode/theirs" in shown()
    assert not (tmp_path / "ran").exists()


def test_one_bad_run_directory_hides_no_other(stage, call, tmp_path):
    code, out, err = call(
        "status", stage.run_dir.path, tmp_path / "gone", "--json", "--prometheus", tmp_path / "m.prom"
    )
    assert code == 2
    assert list(json.loads(out)) == [str(stage.run_dir.path)]
    assert "gone is not a run directory" in err
    assert "sharmill_unread_run_dirs 1.0" in (tmp_path / "m.prom").read_text()
    assert 'kind="done",run_dir' in (tmp_path / "m.prom").read_text()

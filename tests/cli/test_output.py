"""Options that all commands have: --quiet, --json, completion by click; and the state of the machine."""

from __future__ import annotations

import errno
import json
from types import SimpleNamespace
from unittest import mock

import pytest
from support.errors import raises
from support.packages import add_distribution
from support.reader import make_dataset
from support.shar import Project, copy, lines, put, reindex, rewrite, run, voice

from sharmill.cli.main import COMMANDS, cli, main
from sharmill.cli.progress import ProgressListener
from sharmill.cli.stage_status import read_stage, stages_in
from sharmill.config import to_yaml
from sharmill.engine.delays import spent_on, take_delays
from sharmill.errors import ConfigError
from sharmill.executors import machine
from sharmill.prepare.stage import PrepareStage


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A configuration whose prepare is done."""
    project = Project(tmp_path_factory.mktemp("done"))
    for number in range(4):
        project.add(f"utt{number}.wav", voice(0.5, seed=number))
    config = project.configure(prepare={"unit_records": 2})
    path = project.folder / "config.yaml"
    path.write_bytes(to_yaml(config))
    assert run(PrepareStage(config)).ok
    (project.run_dir / "resolved_config.yaml").write_bytes(to_yaml(config))
    return SimpleNamespace(path=path, config=config, run_dir=project.run_dir)


def call(capsys, *arguments, status=0) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    output = capsys.readouterr()
    assert ended.value.code == status, output.err
    return output.out


def test_quiet_prints_nothing(done, capsys):
    assert call(capsys, "plan", done.path)
    assert call(capsys, "plan", done.path, "--quiet") == ""
    assert call(capsys, "status", done.run_dir, "-q") == ""


def test_a_disk_that_fails_while_the_time_left_is_estimated_is_no_traceback(done, capsys):
    failing = OSError(errno.EIO, "Input/output error", "token")
    with mock.patch("sharmill.pilot.predict.expect_seconds", side_effect=failing):
        said = call(capsys, "run", done.path, "prepare")
    assert "the time left of the whole run is not known: cannot read or write token: Input/output error" in said


def test_quiet_still_says_what_is_wrong(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "missing.yaml", "--quiet"])
    assert ended.value.code == 2
    assert "missing.yaml" in capsys.readouterr().err


ONLY_LINES = ("bins", "tune-batch", "verify-resume")


@pytest.mark.parametrize("command", [name for names in COMMANDS.values() for name in names if name not in ONLY_LINES])
def test_every_command_that_prints_results_can_be_quiet(command):
    for _ in range(2):
        found = cli.get_command(None, command)
    assert [parameter.name for parameter in found.params].count("quiet") == 1


# Prints nothing.
NO_JSON = ("sidecars",)


@pytest.mark.parametrize("command", [name for names in COMMANDS.values() for name in names if name not in NO_JSON])
def test_every_command_that_prints_results_has_json(command):
    options = [option for parameter in cli.get_command(None, command).params for option in parameter.opts]
    assert "--json" in options


def test_json_of_commands_that_make_datasets(tmp_path, capsys):
    one, other, out = tmp_path / "one", tmp_path / "other", tmp_path / "out"
    reindex(make_dataset(one, [3, 2]))
    merged = json.loads(call(capsys, "merge", one, copy_with_other_ids(one, other), out, "--json"))
    assert (merged["dataset"]["num_shards"], merged["dataset"]["num_cuts"]) == (4, 10)
    assert merged["files"]["linked"] + merged["files"]["copied"] == 4
    indexed = json.loads(call(capsys, "index", out, "--json"))
    assert indexed["dataset"]["num_cuts"] == 10
    assert indexed["notes"]


def test_json_of_buckets_and_batches_has_the_keys_of_the_yaml(tmp_path, capsys, monkeypatch):
    reindex(make_dataset(tmp_path / "one", [3, 2]))
    found = json.loads(call(capsys, "bins", tmp_path / "one", "-b", "2", "--closed", "--json"))
    assert found["use_bucketing"] is True
    assert found["num_buckets"] == len(found["bucket_duration_bins"])
    monkeypatch.setattr("sharmill.training.buckets.batch_size.tune_batch_sizes", lambda *_, **options: [9, 4])
    tuned = json.loads(call(capsys, "tune-batch", "--step", "a:b", "--bins", "[1.5, 3.0]", "--json"))
    assert tuned == {"use_bucketing": True, "bucket_duration_bins": [1.5, 3.0], "bucket_batch_size": [9, 4]}


def copy_with_other_ids(dataset, to):
    copy(dataset, to)
    for path in sorted(to.glob("cuts/*.gz")):
        rewrite(path, [cut | {"id": f"other-{cut['id']}"} for cut in lines(path)])
    reindex(to)
    return to


def test_json_of_a_manifest_and_of_cancel(done, tmp_path, capsys):
    folder = put(tmp_path / "audio/a.wav", voice(0.5)).parent
    found = json.loads(call(capsys, "manifest", folder, "-o", tmp_path / "m.json", "--json"))
    assert (found["ok"], found["totals"]["num_out"]) == (True, 1)
    assert found["manifest"] == str(tmp_path / "m.json")
    assert json.loads(call(capsys, "cancel", done.run_dir, "--json")) == {
        "slurm_jobs": [], "ended": [], "reservations": [],
    }  # fmt: skip


def test_json_of_plan_and_status_is_all_that_is_printed(done, capsys):
    (predicted,) = json.loads(call(capsys, "plan", done.path, "--json"))
    assert (predicted["name"], predicted["is_planned"], predicted["rank_seconds"]) == ("prepare", True, 0.0)
    first, *others = json.loads(call(capsys, "status", done.run_dir, "--json"))["stages"]
    assert (first["name"], first["state"], first["units_done"]) == ("prepare", "done", 2)
    assert {other["state"] for other in others} == {"not begun"}


def test_json_of_a_run_has_accounts_and_paths(done, capsys):
    (found,) = json.loads(call(capsys, "run", done.path, "prepare", "--json"))
    assert found["ok"]
    assert found["stages"][0]["totals"]["num_in"] == 4
    assert found["paths"]["run directory"] == str(done.run_dir)
    assert found["paths"]["next"].startswith("sharmill ")


def test_a_run_ends_with_its_paths_and_the_next_command(done, capsys):
    output = call(capsys, "run", done.path, "prepare")
    assert "run directory" in output
    assert f"sharmill report {done.run_dir}" in " ".join(output.split())


def test_words_are_completed(monkeypatch, capsys):
    monkeypatch.setenv("_SHARMILL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "sharmill cali")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert "calibrate" in call(capsys)


def test_lines_say_which_stage_of_how_many():
    printed = []
    listener = ProgressListener(SimpleNamespace(is_terminal=False, print=lambda text, **_: printed.append(str(text))),
                                names=["prepare", "match", "write", "encode/toy", "validate"])  # fmt: skip
    stage = SimpleNamespace(name="prepare", cost_unit="records", resource="cpu")
    listener.stage_started(stage, [SimpleNamespace(index=0, cost=3.0)], [])
    assert printed == ["prepare (stage 1 of 5): 1 unit, 3 records"]


def test_time_is_noted_by_its_delay():
    take_delays()
    with spent_on("decoding"), spent_on("disk"):
        pass
    assert set(take_delays()) == {"decoding", "disk"}
    assert take_delays() == {}


def test_status_has_cost_slowest_units_and_delays(done, capsys):
    pace = read_stage(PrepareStage(done.config)).pace
    assert pace.seconds > 0
    assert [index for index, _ in pace.slowest_units] in ([0, 1], [1, 0])
    assert 0 <= pace.delays["disk"] <= 1
    output = call(capsys, "status", done.run_dir)
    assert "of ranks on cores so far" in output
    assert "slowest units" in output


def test_doctor_looks_at_the_machine(tmp_path, capsys):
    with mock.patch.object(machine.shutil, "which", return_value=None):
        found = {one["name"]: one for one in json.loads(call(capsys, "doctor", "--folder", tmp_path, "--json"))}
    assert {"python", "torch", "GPUs", "file system", "free space", "SLURM", "Ray"} <= set(found)
    assert found["SLURM"]["found"] == "none here"
    assert not any(one["to_do"] for one in found.values())
    assert [*tmp_path.iterdir()] == []


def checks_of(folder):
    with mock.patch.object(machine.shutil, "which", return_value=None):
        return {check.name: check for check in machine.examine_machine(folder)}


def test_doctor_says_what_to_do_about_a_full_disk(tmp_path):
    space = SimpleNamespace(f_bavail=1000, f_frsize=4096, f_files=10**6, f_favail=12)
    with mock.patch.object(machine.os, "statvfs", return_value=space):
        found = checks_of(tmp_path)
    assert "make room" in found["free space"].to_do
    assert "small files" in found["free inodes"].to_do


def test_doctor_names_an_executor_that_cannot_be_imported(tmp_path, monkeypatch):
    add_distribution(tmp_path / "site", "broken", "1.0", "[sharmill.executors]\nbroken = no_such_module:Executor\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found = checks_of(tmp_path)
    assert "no_such_module" in found["executor broken"].to_do
    assert "Ray" in found


def test_doctor_says_what_to_do_about_locks(tmp_path):
    with mock.patch.object(machine, "FolderLock", side_effect=OSError("no locks available")):
        found = checks_of(tmp_path)
    assert "no locks available" in found["file system"].found
    assert "choose a folder" in found["file system"].to_do


def test_doctor_says_what_to_do_about_packages(tmp_path):
    def versions(*packages):
        return dict.fromkeys(("sharmill", *packages), "1.0") | {"torchaudio": "2.0", "lhotse": "absent"}

    with mock.patch.object(machine, "versions", versions):
        found = checks_of(tmp_path)
    assert found["lhotse"].to_do == "pip install lhotse"
    assert "torchaudio==1.0" in found["torchaudio"].to_do


def test_a_folder_that_is_no_run_has_no_status(tmp_path):
    with raises(ConfigError, "no_run_dir", "not a run directory"):
        stages_in(tmp_path)

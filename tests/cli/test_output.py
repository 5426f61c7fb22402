"""Options that all commands have: --quiet, --json, completion by click; and the state of the machine."""

import json
import os
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import pytest
from support.project import Project, copy, lines, make_bare_dataset, reindex, run, stage_of, voice, write_lines

from sharmill.cli.command import resolve_stages
from sharmill.config import to_yaml
from sharmill.executors import machine


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A configuration whose prepare is done, and has rejected one of four records."""
    project = Project(tmp_path_factory.mktemp("done"))
    for number in range(4):
        project.add(f"utt{number}.wav", voice(0.5, seed=number), text="spoken" if number else "")
    config = project.configure(prepare={"unit_records": 2})
    path = project.folder / "config.yaml"
    path.write_bytes(to_yaml(config))
    assert run(stage_of(config, "prepare")).ok
    (project.run_dir / "resolved_config.yaml").write_bytes(to_yaml(config))
    return SimpleNamespace(path=path, config=config, run_dir=project.run_dir)


@pytest.fixture
def printed(call):
    """Returns a function: arguments of a successful command -> its output."""

    def show(*arguments) -> str:
        status, out, err = call(*arguments)
        assert status == 0, err
        return out

    return show


def test_quiet_prints_nothing(done, printed):
    assert printed("plan", done.path)
    assert printed("plan", done.path, "--quiet") == ""
    assert printed("status", done.run_dir, "-q") == ""


def test_json_of_commands_that_make_datasets(tmp_path, printed):
    one, other, out = tmp_path / "one", tmp_path / "other", tmp_path / "out"
    reindex(make_bare_dataset(one, [3, 2]))
    merged = json.loads(printed("merge", one, copy_with_other_ids(one, other), out, "--json"))
    assert (merged["dataset"]["num_shards"], merged["dataset"]["num_cuts"]) == (4, 10)
    assert merged["files"]["linked"] + merged["files"]["copied"] == 4
    indexed = json.loads(printed("index", out, "--json"))
    assert indexed["dataset"]["num_cuts"] == 10
    assert indexed["notes"]


def copy_with_other_ids(dataset, to):
    copy(dataset, to)
    for path in sorted(to.glob("cuts/*.gz")):
        write_lines(path, [cut | {"id": f"other-{cut['id']}"} for cut in lines(path)])
    reindex(to)
    return to


def test_json_of_plan_and_status_is_all_that_is_printed(done, printed):
    (predicted,) = json.loads(printed("plan", done.path, "--json"))
    assert (predicted["name"], predicted["is_planned"], predicted["rank_seconds"]) == ("prepare", True, 0.0)
    first, *others = json.loads(printed("status", done.run_dir, "--json"))["stages"]
    assert (first["name"], first["state"], first["units_done"]) == ("prepare", "done", 2)
    assert {other["state"] for other in others} == {"not begun"}


def test_a_run_prints_counts_paths_and_the_next_command(done, printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed("run", done.path, "prepare").splitlines()
    (heading, row), words = [line.split() for line in lines if line[:5] in ("stage", "prepa")][-2:], " ".join(lines)
    assert heading == ["stage", "in", "out", "rejects", "processed", "target", "audio"]
    assert row == ["prepare", "4", "3", "1", "4", "records", "0.000", "h"]
    assert f"rejects: empty_text 1 (see {done.run_dir}/rejects.jsonl)" in lines
    assert f"run directory {done.run_dir}" in " ".join(words.split())
    assert f"sharmill report {done.run_dir}" in " ".join(words.split())


def test_a_run_warns_once_about_a_permissive_umask(done, call):
    usual = os.umask(0)
    try:
        status, _, err = call("run", done.path, "prepare")
    finally:
        os.umask(usual)
    assert (status, err.count("\n")) == (0, 1)
    assert "umask 022" in err
    assert call("run", done.path, "prepare")[::2] == (0, "")


def test_findings_are_told_with_their_place_and_what_to_do(tmp_path, call):
    dataset = make_bare_dataset(tmp_path / "one", [3] * 6)
    reindex(dataset)
    for number in range(2, 6):
        (dataset / f"cuts/cuts.{number:06}.jsonl.gz").unlink()
    (dataset / ("x" * 200)).touch()
    status, out, _ = call("validate", dataset)
    assert status == 3
    assert "error: missing_file, 4 findings\n  shard 2, " in out
    assert "\n  what to do: " in out
    assert "\nnot checked: " in out
    # Three examples of each, of 160 characters at most.
    assert out.count("\n  shard ") == 3
    assert [len(line.strip()) for line in out.splitlines() if "xxx" in line] == [160]


def test_words_are_completed(monkeypatch, printed):
    monkeypatch.setenv("_SHARMILL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "sharmill cali")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert "calibrate" in printed()


def test_doctor_looks_at_the_machine(tmp_path, printed):
    with mock.patch.object(machine.shutil, "which", return_value=None):
        found = {one["name"]: one for one in json.loads(printed("doctor", "--folder", tmp_path, "--json"))}
    assert {"python", "torch", "GPUs", "file system", "free space", "SLURM", "Ray"} <= set(found)
    assert found["SLURM"]["found"] == "not installed here"
    assert not any(one["to_do"] for one in found.values())
    assert [*tmp_path.iterdir()] == []


SPACE = SimpleNamespace(f_bavail=1000, f_frsize=4096, f_files=10**6, f_favail=12)
VERSIONS = defaultdict(lambda: "1.0.0", torchaudio="2.10.1", lhotse="absent")
# Deficiencies of the machine: the patched function with its result, the name of the check, and words of the remedy.
LACKING = [
    ("shutil.which", {"return_value": None}, "SLURM", "not installed here"),
    ("os.statvfs", {"return_value": SPACE}, "free space", "make room"),
    ("os.statvfs", {"return_value": SPACE}, "shared memory", "--shm-size"),
    ("os.statvfs", {"return_value": SPACE}, "free inodes", "small files"),
    ("FolderLock", {"side_effect": OSError("no locks available")}, "file system", "choose a writable folder"),
    ("versions", {"return_value": VERSIONS}, "lhotse", "pip install lhotse"),
    ("versions", {"return_value": VERSIONS}, "torchaudio", "torchaudio==1.0.0"),
]


@pytest.mark.parametrize(("part", "answers", "check", "words"), LACKING)
def test_doctor_says_what_to_do(part, answers, check, words, tmp_path, call):
    with mock.patch(f"sharmill.executors.machine.{part}", **answers):
        status, out, _ = call("doctor", "--folder", tmp_path, "--json")
    (found,) = [one for one in json.loads(out) if one["name"] == check]
    assert words in f"{found['found']} {found['to_do']}"
    assert status == (3 if found["to_do"] else 0)
    assert [*tmp_path.iterdir()] == []


def test_doctor_accepts_a_torchaudio_older_than_torch(tmp_path, call):
    # torchaudio 2.11 is built for all later versions of torch, and pip installs such a pair.
    found = defaultdict(lambda: "2.14.1", torchaudio="2.11.1")
    with mock.patch("sharmill.executors.machine.versions", return_value=found):
        _, out, _ = call("doctor", "--folder", tmp_path, "--json")
    assert [one["to_do"] for one in json.loads(out) if one["name"] == "torchaudio"] == [""]


def test_former_stages_are_rounds_and_a_line_says_so(capsys):
    assert resolve_stages(["survey", "assemble", "stage1"]) == ["encode.segments", "encode.shards", "match"]
    assert "survey is now a round of the stage encode: name encode" in capsys.readouterr().out

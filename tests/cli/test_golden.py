"""Output for people at 80 and 120 columns, kept in ``golden/`` to be read. ``GOLDEN=write`` writes them again."""

import os
import re
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from support.project import Project, write_config, write_lines

from sharmill.executors import machine

GOLDEN = Path(__file__).parent / "golden"
HELP = [[], *([command] for command in ("plan", "run", "status", "validate", "doctor", "calibrate"))]
# Text that differs between two runs: folder, dates, times, speeds, sizes of pages and versions. Widths of tables stay.
VARIABLE = [
    (r"/tmp/golden-\w{8}", lambda found: "/tmp/golden-folder__"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", lambda found: "2026-01-31 12:00:00"),
    (r"(?<!-31 )\b\d+:\d\d:\d\d", lambda found: "0:00:00"),
    (r"\b\d+ s of (?=CPU|GPU)", lambda found: "1 s of "),
    (r" *\b[\d,.]+ ?(x|/s)(?! real)", lambda found: f"1 {found[1]}".rjust(len(found[0]))),
    (r"\b[\d,.]+ ?x(?= real)", lambda found: "1x"),
    (r"\b[\d.]+ MB\b", lambda found: "1.0 MB"),
]


def settled(text: str) -> str:
    for pattern, value in VARIABLE:
        text = re.sub(pattern, value, text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@pytest.fixture(params=[80, 120])
def check_golden(request, call, monkeypatch):
    """Returns a function: name, commands -> None; it compares all that they print with the file of that name."""
    monkeypatch.setenv("COLUMNS", str(request.param))
    # One line for the beginning of a stage, and one for its end.
    monkeypatch.setenv("CI", "true")

    def check(name: str, *commands: list) -> None:
        printed = ""
        for words in commands:
            status, out, err = call(*words)
            printed += f"$ sharmill {' '.join(map(str, words))}\n{out}{err}" + f"exit status {status}\n" * (status != 0)
        path = GOLDEN / f"{name}.{request.param}.txt"
        if os.environ.get("GOLDEN") == "write":
            path.write_text(settled(printed))
        assert settled(printed) == path.read_text()

    return check


@pytest.fixture
def folder():
    """A folder whose name always has the same length, since tables are as wide as the paths in them."""
    with tempfile.TemporaryDirectory(prefix="golden-", dir="/tmp") as name:
        yield Path(name)


def test_help(check_golden):
    check_golden("help", *([*words, "--help"] for words in HELP))


def test_a_dataset_from_its_plan_to_its_damage(check_golden, folder):
    project = Project(folder)
    for name in ("anna", "ben"):
        project.add_voices([2.0, 2.5, 3.5, 4.0, 4.5, 5.0], f"{name}-{{}}.wav", speaker=name)
    project.records[1]["text"] = ""
    manifest = write_lines(folder / "m.json", project.records)
    config = write_config(folder, manifest, project.root, name="speech", write={"shard_size": 4})
    check_golden("plan", ["plan", config])
    check_golden("run", ["run", config])
    check_golden("done", ["plan", config], ["status", folder / "run"], ["run", config])
    check_golden("calibrate", ["calibrate", config, "run_dir=" + str(folder / "pilot")])
    check_golden("validate", ["validate", folder / "dataset"])
    (folder / "dataset/target_audio/recording.000001.tar").write_bytes(bytes(1024))
    check_golden("damage", ["validate", folder / "dataset"])


def test_the_machine(check_golden, folder, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    space = os.statvfs_result((4096, 4096, 10**9, 10**9, 50_000_000, 10**9, 10**9, 2_000_000, 0, 255))
    with (
        mock.patch.object(machine, "versions", lambda *packages: dict.fromkeys(["sharmill", *packages], "1.0.0")),
        mock.patch.multiple(
            "sharmill.executors.machine.platform", python_version=lambda: "3.11.7", platform=lambda: "Linux"
        ),
        mock.patch.object(machine.os, "statvfs", return_value=space),
        mock.patch.object(machine.os, "cpu_count", return_value=8),
        mock.patch.object(machine.os, "sched_getaffinity", return_value=range(8)),
        mock.patch.object(machine.shutil, "which", return_value=None),
    ):
        check_golden("doctor", ["doctor", "--folder", folder])

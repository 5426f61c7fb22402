"""The archive of the GPU benchmarks: what it has, and that it runs beside torch, torchaudio and transformers alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
import time
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement
from support.paths import TESTS

from bench_gpu import archive

BASE = ("torch", "torchaudio", "transformers")


def needed_by(names):
    """The installed distributions that some need, with themselves."""
    found, waiting = {}, list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if name not in found:
            found[name] = distribution
            wanted = map(Requirement, distribution.requires or [])
            waiting += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture
def bare(tmp_path) -> Path:
    """A Python that has the three packages, what they need, and what the archive would bring, but not the project."""
    folder = tmp_path / "bare"
    venv.create(folder, symlinks=True, with_pip=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for distribution in needed_by([*BASE, *archive.MISSING]).values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(distribution.locate_file(name))).resolve())
    return folder / "bin" / "python"


def test_the_archive_runs_by_itself_and_has_the_program_and_the_wheels(tmp_path):
    (tmp_path / "a-1-py3-none-any.whl").write_bytes(b"a wheel")
    archive.make_archive(tmp_path / "new" / "bench-gpu.pyz", tmp_path)
    with zipfile.ZipFile(tmp_path / "new" / "bench-gpu.pyz") as found:
        assert found.read("wheels/a-1-py3-none-any.whl") == b"a wheel"
        assert found.read("__main__.py") == (TESTS / "bench_gpu" / "launch.py").read_bytes()
        assert {f"program/{name}" for name in archive.PROGRAM} < set(found.namelist())


def test_an_archive_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100"):
        archive.make_archive(tmp_path / "bench-gpu.pyz", tmp_path)


def test_all_that_it_fetches_has_a_version():
    assert [line.partition("==")[0].lower() for line in archive.pinned()] == sorted(archive.MISSING)


@pytest.mark.slow
def test_the_archive_measures_on_a_cpu_beside_three_packages_alone(bare, tmp_path):
    archive.build_wheel(tmp_path)
    archive.make_archive(tmp_path / "bench-gpu.pyz", tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    rows = ["speed of the speaker", "model", "precision of the speaker", "compiled", "not"]
    command = [str(bare), "bench-gpu.pyz", "--device", "cpu", "--seconds", "500", "--rows", *rows]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no figures for GPUs" in done.stdout
    found = json.loads((tmp_path / "bench-gpu.json").read_text())
    assert len(found["rows"]) == len(rows)
    one, other, graphs = found["rows"]["compiled codec of NeMo's kind and size"]["lines"]
    assert one["differ"] == other["differ"] == 0
    assert "not measured" in graphs["left out"]
    stages = [(line["stage"], line["precision"]) for line in found["rows"]["model's share of stages"]["lines"]]
    assert stages == [("match", "fp32"), ("match", "bf16"), ("encode", "fp32"), ("encode", "bf16")]
    assert all(line["hours per hour"] > 0 for line in found["rows"]["model's share of stages"]["lines"])


@pytest.mark.slow
def test_rows_for_which_no_time_is_left_say_so(tmp_path, monkeypatch, capsys):
    from bench_gpu import program

    arguments = ["--device", "cpu", "--until", str(time.time()), "--folder", str(tmp_path / "data")]
    # They would hold for the tests behind this one.
    monkeypatch.setattr(program, "make_deterministic", lambda device: 1)
    monkeypatch.setattr(program, "logging", mock.Mock())
    monkeypatch.setattr("sys.argv", ["program", *arguments, "--json", str(tmp_path / "found.json")])
    assert program.main() == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert len(rows) == 10
    assert all("left out" in line for row in rows.values() for line in row["lines"])
    assert "speed of the Mimi: left out" in capsys.readouterr().out

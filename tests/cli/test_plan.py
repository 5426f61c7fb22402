"""``sharmill plan``: ranks of the configuration, and columns that fit a terminal of 80 columns."""

from __future__ import annotations

import io

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.manifests import make_record, write_manifest, write_tone
from support.shar import run, snapshot, voice

from sharmill.cli.main import cli
from sharmill.cli.plan import print_plan
from sharmill.config import to_config, to_yaml
from sharmill.files.host import usable_cores
from sharmill.prepare.stage import PrepareStage


@pytest.fixture
def config(tmp_path):
    """Returns a function: workers -> configuration of a dataset of three records."""
    write_tone(tmp_path / "audio/a.wav")
    manifest = write_manifest(tmp_path / "m.json", [make_record(offset=0.5 * n, duration=0.5) for n in range(3)])

    def make(workers):
        return to_config({
            "name": "small",
            "run_dir": str(tmp_path / "run"),
            "dataset_dir": str(tmp_path / "dataset"),
            "sources": [{"manifest": str(manifest), "audio_root": str(tmp_path / "audio")}],
            "prepare": {"unit_records": 1},
            "executor": {"workers": workers},
        }, "test")  # fmt: skip

    return make


def row(config, stage="prepare") -> list[str]:
    console = Console(width=80, file=io.StringIO(), highlight=False)
    print_plan(console, config)
    lines = console.file.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert lines[1].split() == ["stage", "units", "to", "process", "ranks", "largest", "balance", "disk"]
    return next(line for line in lines if line.startswith(f"{stage} ")).split()


def test_ranks_are_those_of_the_configuration(config):
    assert row(config(1)) == ["prepare", "0/3", "3", "records", "1", "3", "records", "100%"]
    assert row(config(2)) == ["prepare", "0/3", "3", "records", "2", "2", "records", "75%"]


def test_auto_is_the_number_of_cores_for_a_stage_without_a_model(config):
    assert row(config("auto"))[4] == str(usable_cores())


@pytest.mark.parametrize("begun", [False, True])
def test_nothing_is_written_into_the_run_directory(config, tmp_path, begun):
    config = config(1)
    if begun:
        assert run(PrepareStage(config)).ok
    before = snapshot(tmp_path)
    print_plan(Console(file=io.StringIO()), config)
    assert snapshot(tmp_path) == before


def test_stages_that_cannot_be_planned_yet_have_a_line(config):
    assert row(config(1), stage="match: not yet:")[-1]


@pytest.mark.parametrize("is_canonical", [False, True])
def test_measured_sizes_are_those_of_the_shapes_that_the_configuration_has(project, is_canonical):
    project.add("a.flac", voice(0.5))
    encode = {"codecs": [{"name": "small", "model": "builtin"}], "canonical_shapes": is_canonical}
    path = project.folder / "small.yaml"
    path.write_bytes(to_yaml(project.configure(match=None, encode=encode)))
    result = CliRunner().invoke(cli, ["plan", str(path), "--measure"])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    # 250 frames become 256.
    assert ("10.24 s: " in said) == is_canonical
    assert ("measured at canonical lengths, in batches of canonical size" in said) == is_canonical
    assert ("codecs take segments one by one, whatever encode.batch_seconds is" in said) == is_canonical
    # On a CPU there are two sizes, and segments one by one have none.
    assert any(f"encode.batch_seconds={size}" in said for size in (5, 10)) != is_canonical

"""A stage of an installed package that adds a column: nothing of sharmill names it, its keys or its column."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from lhotse import CutSet
from plugins.test_codec import install
from support.errors import raises
from support.shar import Project, voice

from sharmill.audio.sound import measure_sound
from sharmill.cli.main import main
from sharmill.config import load_config, to_yaml
from sharmill.engine.listener import Listener
from sharmill.errors import ConfigError
from sharmill.executors.slurm.profile import ClusterProfile
from sharmill.pipeline import make_stages, run_dataset, stages_of
from sharmill.shar import open_shar
from sharmill.validate.redo import take_back_commits

COLUMNS = {"loudness_plain": 0.0, "loudness_quiet": -40.0}
STAGE_NAMES = ["prepare", "write", "loudness/plain", "loudness/quiet", "validate"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Six recordings in three shards, with the package of the stage installed."""
    for folder in (tmp_path / "site", Path(__file__).parent / "loudness"):
        monkeypatch.syspath_prepend(str(folder))
    install(tmp_path / "site", "loudness-stage", "1.0", "[sharmill.stages]\nloudness = loudness_stage:LoudnessStage\n")
    yield make_project(tmp_path / "one", "a")
    sys.modules.pop("loudness_stage", None)


def make_project(folder, name):
    folder.mkdir()
    project = Project(folder)
    for number in range(6):
        samples = voice(0.4 + number / 10, seed=number) / (number + 1)
        project.add(f"{name}{number}.flac", samples, speaker=f"{name}{number // 2}")
    return project


def configure(project, **changes):
    """A configuration with two stages of the package."""
    settings = [{"name": name.partition("_")[2], "level": level} for name, level in COLUMNS.items()]
    values = {"match": None, "write": {"shard_size": 2}, "encode": {"codecs": []}, "loudness": settings}
    values["executor"] = {"workers": 1}
    return project.configure(**values | changes)


def require_columns(dataset):
    """Assert that every cut has its values, by sharmill's reader and by lhotse's."""
    cuts = list(open_shar(dataset, ["cuts", "target_audio", *COLUMNS]))
    for cut in cuts:
        loudness = measure_sound(cut.load_audio()[0], 16000).loudness
        assert [getattr(cut, name) for name in COLUMNS] == pytest.approx([loudness - at for at in COLUMNS.values()])
    fields = {name: sorted(map(str, (dataset / name).glob("*.jsonl.gz"))) for name in ("cuts", *COLUMNS)}
    theirs = {cut.id: cut.loudness_quiet for cut in CutSet.from_shar(fields=fields)}
    assert theirs == {cut.id: cut.loudness_quiet for cut in cuts}
    return len(cuts)


def test_a_stage_runs_resumes_and_is_listed(project, monkeypatch, capsys):
    config = configure(project)
    assert stages_of(config) == ("prepare", "write", "survey", "loudness", "encode", "assemble", "validate")
    assert [stage.name for stage in make_stages(config)] == STAGE_NAMES
    processor = sys.modules["loudness_stage"].LoudnessProcessor
    write, written = processor.write, []

    def write_one(self, unit, ids, paths):
        if written:
            raise KeyboardInterrupt
        write(self, unit, ids, paths)
        written.append(unit.index)

    with monkeypatch.context() as patch:
        patch.setattr(processor, "write", write_one)
        with pytest.raises(KeyboardInterrupt):
            run_dataset(config, Listener())
    first = project.dataset / "loudness_plain/values.000000.jsonl.gz"
    before = first.stat().st_mtime_ns
    result = run_dataset(config, Listener())
    assert result.ok
    assert result.num_errors == 0
    assert first.stat().st_mtime_ns == before
    assert require_columns(project.dataset) == 6
    with pytest.raises(SystemExit, match="0"):
        main(["status", str(project.run_dir)])
    shown = capsys.readouterr().out
    assert all(name in shown for name in STAGE_NAMES)


def test_other_settings_or_other_audio_make_the_column_anew(project):
    config = configure(project)
    assert run_dataset(config, Listener()).ok
    other = configure(project, loudness=[{"name": "plain", "level": 1.0}])
    with raises(ConfigError, "changed_plan", "loudness/plain", "settings.level is 1.0, was 0.0"):
        run_dataset(other, Listener())
    assert run_dataset(config, Listener(), stages=["write"], restart=True).ok
    assert not any((project.dataset / name).exists() for name in COLUMNS)
    assert run_dataset(config, Listener()).ok
    assert require_columns(project.dataset) == 6


@pytest.mark.parametrize("damage", ["lost", "missing", "beyond"])
def test_a_damaged_column_is_found_and_done_again(damage, project):
    config = configure(project)
    assert run_dataset(config, Listener()).ok
    path = project.dataset / "loudness_quiet/values.000001.jsonl.gz"
    before, lines = path.read_bytes(), gzip.decompress(path.read_bytes()).splitlines()
    if damage == "lost":
        path.unlink()
    else:
        lines[0] = json.dumps(
            json.loads(lines[0]) | {"loudness_quiet": None if damage == "missing" else 999.0}
        ).encode()
        path.write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))
    report = run_dataset(config, Listener(), stages=["validate"]).report
    assert {(unit.stage, unit.shard) for unit in report.units_to_repeat} == {("loudness/quiet", 1)}
    take_back_commits(config, report, stages_of(config))
    assert run_dataset(config, Listener()).num_errors == 0
    assert path.read_bytes() == before


def test_its_ranks_have_resources_of_their_own_in_a_cluster_profile(project):
    profile = ClusterProfile(stages={"loudness": {"cores": 3}})
    stage = make_stages(configure(project))[2]
    assert profile.for_stage(stage.name, stage.resource).cores == 3
    with pytest.raises(ValueError, match="stages has no 'loudnes'; did you mean 'loudness'"):
        ClusterProfile(stages={"loudnes": {}})


def test_its_keys_are_checked_stored_and_left_out(project, tmp_path):
    path = tmp_path / "stored.yaml"
    path.write_bytes(to_yaml(configure(project)))
    assert load_config(path) == configure(project)
    assert load_config(path, ["loudness=null"]).sections["loudness"] is None
    for override, code, names in (
        ("loudness.0.levle=1", "unknown_key", ["'loudness[0].levle'", "'level'"]),
        ("loudness.1.level=high", "bad_config_value", ["loudness[1].level", "`float`"]),
        ("loudness.1.name=plain", "bad_config_value", ["loudness[1]", "'plain'"]),
        ("loudness.1.name=../up", "bad_config_value", ["loudness[1]", "'../up'"]),
    ):
        with raises(ConfigError, code, *names):
            load_config(path, [override])


def test_one_section_is_one_stage(project):
    assert [stage.name for stage in make_stages(configure(project, loudness={"level": 3.0}))][2] == "loudness"


def test_without_the_package_the_dataset_is_read_checked_and_grown(project, tmp_path):
    second = make_project(tmp_path / "two", "b")
    for one in (project, second):
        assert run_dataset(configure(one), Listener()).ok
    program = "import sys; from sharmill.cli.main import main; main(sys.argv[1:])"

    def sharmill(*arguments):
        """Run a command in another process, which does not see the package, and return what it prints."""
        command = [sys.executable, "-P", "-c", program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    merged, parts = tmp_path / "merged", tmp_path / "parts"
    sharmill("merge", project.dataset, second.dataset, merged)
    sharmill("split", merged, parts, "--by-speaker", "--valid", "30%")
    sharmill("append", project.dataset, second.dataset)
    for dataset in (merged, project.dataset, parts / "train", parts / "valid"):
        sharmill("validate", dataset)
    assert require_columns(merged) == require_columns(project.dataset) == 12
    assert require_columns(parts / "train") + require_columns(parts / "valid") == 12
    assert "loudness_quiet" in sharmill("inspect", merged)
    assert "loudness/quiet" not in sharmill("status", project.run_dir)

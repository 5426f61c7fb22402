"""Damage, the units that would mend it, and doing those again: afterwards the bytes are the original ones."""

from __future__ import annotations

import json

import pytest
from support.errors import raises
from support.shar import Project, ToyCodec, codec_stages, lines, loading, put, rewrite, run, snapshot, voice

from sharmill.engine import ledger
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError, FatalError
from sharmill.validate.findings import encode_report, read_report
from sharmill.validate.redo import take_back_commits
from sharmill.validate.stage import ValidateStage
from sharmill.write.stage import WriteStage

STAGES = ["write", "survey", "encode", "assemble"]
CODECS = ("a", "b")
TARGETS = "target_audio/recording.000001.tar"
CODES = "codes_b/target_codes/codes.000001.tar"


class Finished:
    """A finished dataset of three shards and two codecs, with the run directory that made it."""

    def __init__(self, folder) -> None:
        self.project = Project(folder)
        for number in range(7):
            self.project.add(f"{number}.flac", voice(0.4 + number / 10, seed=number))
        codecs = [{"name": name, "model": "builtin"} for name in CODECS]
        options = {"write": {"shard_size": 3, "order": "manifest"}, "match": {"min_duration": 0.0}}
        self.config = self.project.configure(encode={"codecs": codecs}, **options)
        self.project.match_by_hand(self.config)
        self.run()
        self.original = snapshot(self.dataset)
        self.ledgers = self.commits()

    @property
    def dataset(self):
        return self.project.dataset

    def stages(self):
        return [WriteStage(self.config), *(stage for name in CODECS for stage in codec_stages(self.config, name))]

    def run(self):
        """The ordinary relaunch."""
        with loading(ToyCodec()):
            assert all(run(stage).ok for stage in self.stages())

    def validate(self, scratch):
        stage = ValidateStage(self.dataset, RunDir(scratch))
        assert run(stage).ok
        return stage.report()

    def commits(self):
        return {
            stage.name: sum(len(path.read_bytes().splitlines()) for path in stage.dir.ledger.glob("*.jsonl"))
            for stage in self.stages()
        }


@pytest.fixture
def finished(tmp_path):
    return Finished(tmp_path)


def flip(path, position=1500):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def edit_description(dataset, **keys):
    path = dataset / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def edit_shards(dataset, change):
    rewrite(dataset / "shards.jsonl", change(lines(dataset / "shards.jsonl")))


def drop_field(shards):
    del shards[1]["fields"]["codes_a/target_codes"]
    return shards


DAMAGES = {
    "audio": (lambda d: flip(d / TARGETS), [("write", 1)]),
    "audio that is cut off": (lambda d: (d / TARGETS).write_bytes((d / TARGETS).read_bytes()[:-1]), [("write", 1)]),
    "audio that is gone": (lambda d: (d / TARGETS).unlink(), [("write", 1)]),
    "cuts": (lambda d: flip(d / "cuts/cuts.000002.jsonl.gz", 100), [("write", 2)]),
    "codes": (lambda d: flip(d / CODES, 700), [("assemble/b", 1)]),
    "codes that are gone": (lambda d: (d / CODES).unlink(), [("assemble/b", 1)]),
    "several": (lambda d: (flip(d / TARGETS), flip(d / CODES, 700)), [("assemble/b", 1), ("write", 1)]),
    "a description that is cut off": (lambda d: (d / "dataset.json").write_bytes(b"{"), [("index", None)]),
    "a list of shards that is cut off": (lambda d: (d / "shards.jsonl").write_bytes(b'{"in'), [("index", None)]),
    "no index": (lambda d: (d / "shards.jsonl").unlink(), [("index", None)]),
    "a shard that is not listed": (lambda d: edit_shards(d, lambda shards: shards[:-1]), [("index", None)]),
    "a field that is not listed": (
        lambda d: edit_shards(d, drop_field), [("assemble/a", 1), ("index", None)],
    ),
    "other totals": (lambda d: edit_description(d, num_cuts=9), [("index", None)]),
    "a codec without fields": (
        lambda d: edit_description(d, fields=["cuts", "target_audio", "context_audio"]), [("index", None)],
    ),
    "a list of an older dataset": (
        lambda d: edit_shards(d, lambda s: [s[0] | {"count": 2, "target_seconds": 0.5}, *s[1:]]),
        [("index", None), ("write", 0), ("assemble/a", 0), ("assemble/b", 0)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_named_is_done_again_with_the_same_bytes(finished, tmp_path, damage):
    inflict, expected = DAMAGES[damage]
    inflict(finished.dataset)
    report = finished.validate(tmp_path / "first")
    named = [(unit.stage, unit.shard) for unit in report.units_to_repeat]
    assert set(named) >= set(expected)
    assert {stage for stage, _ in named} == {stage for stage, _ in expected}
    take_back_commits(finished.config, report, STAGES)
    finished.run()
    assert snapshot(finished.dataset) == finished.original
    assert finished.validate(tmp_path / "second").findings == []
    assert not [stage for stage in finished.stages() if stage.dir.revoked.exists()]


def test_only_the_units_that_are_named_are_done_again(finished, tmp_path):
    flip(finished.dataset / TARGETS)
    flip(finished.dataset / "codes_b/target_codes/codes.000002.tar", 700)
    times = {path: path.stat().st_mtime_ns for path in finished.dataset.rglob("*.tar")}
    take_back_commits(finished.config, finished.validate(tmp_path / "check"), STAGES)
    gone = {name: number - finished.commits()[name] for name, number in finished.ledgers.items()}
    assert gone == {"write": 1, "survey": 0, "encode/a": 0, "assemble/a": 0, "encode/b": 0, "assemble/b": 1}
    finished.run()
    written = {
        path.relative_to(finished.dataset).as_posix() for path in times if path.stat().st_mtime_ns != times[path]
    }
    assert written == {
        *(f"{field}/recording.000001.tar" for field in ("target_audio", "context_audio")),
        *(f"codes_b/{role}_codes/codes.000002.tar" for role in ("target", "context")),
    }


@pytest.mark.parametrize("writes", range(4))
def test_interrupted_anywhere_it_goes_on_with_the_same_command(finished, tmp_path, monkeypatch, writes):
    """The revocation dies at its n-th write; a relaunch does no harm, and the same command makes up for it."""
    flip(finished.dataset / TARGETS)
    flip(finished.dataset / CODES, 700)
    report = finished.validate(tmp_path / "first")
    left = writes

    def write_atomic(path, data):
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        path.write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "write_atomic", write_atomic)
        with pytest.raises(KeyboardInterrupt):
            take_back_commits(finished.config, report, STAGES)
    finished.run()
    take_back_commits(finished.config, report, STAGES)
    finished.run()
    assert snapshot(finished.dataset) == finished.original


def test_a_report_survives_its_file(finished, tmp_path):
    flip(finished.dataset / TARGETS)
    report = finished.validate(tmp_path / "check")
    (tmp_path / "report.json").write_bytes(encode_report(report))
    assert read_report(tmp_path / "report.json") == report
    (row,) = report.findings
    assert row == {
        "code": "wrong_checksum",
        "severity": "error",
        "shard": 1,
        "field": "target_audio",
        "file": TARGETS,
        "member": None,
        "where": TARGETS,
        "sentence": "the bytes have changed since they were written",
        "to_do": "rebuild the shard: sharmill run CONFIG --redo FINDINGS.json",
    }
    assert (report.errors, report.warnings, [(kind.code, kind.count) for kind in report.kinds]) == (
        1, 0, [("wrong_checksum", 1)],
    )  # fmt: skip


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format_version": 1}'])
def test_what_is_no_report_is_a_configuration_error(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with raises(ConfigError, "bad_findings", "x.json"):
        read_report(tmp_path / "x.json")
    with raises(ConfigError, "bad_findings", "nothing.json"):
        read_report(tmp_path / "nothing.json")


def test_a_clean_report_names_nothing_to_do(finished, tmp_path):
    with raises(ConfigError, "bad_findings"):
        take_back_commits(finished.config, finished.validate(tmp_path / "check"), STAGES)


def test_a_context_that_is_a_copy_needs_another_match_and_no_redo(tmp_path):
    """The writer would store the same context again: only the stage match can pick another."""
    project = Project(tmp_path)
    for number in (0, 1):
        project.add(f"{number}.flac", voice(1.0, seed=7))
    project.add("2.flac", voice(1.0, seed=8))
    config = project.write(contexts=[1, 2, 0], match={"min_duration": 0.0})
    stage = ValidateStage(project.dataset, RunDir(tmp_path / "check"))
    assert run(stage).ok
    report = stage.report()
    (row,) = report.findings
    assert (row["code"], row["member"]) == ("copied_context", "cut-rec-0-0.00-1.00")
    assert "sharmill run CONFIG --restart" in row["to_do"]
    assert report.units_to_repeat == []
    with raises(ConfigError, "bad_findings", "to_do"):
        take_back_commits(config, report, ["write"])


def test_strays_are_for_a_person_to_remove(finished, tmp_path):
    (finished.dataset / "notes.txt").touch()
    report = finished.validate(tmp_path / "check")
    assert report.units_to_repeat == []
    assert report.findings[0]["to_do"] == "look whose it is, then remove it"
    with raises(ConfigError, "bad_findings", "to_do"):
        take_back_commits(finished.config, report, STAGES)


def test_what_cannot_be_done_again_is_refused_before_any_work(finished, tmp_path):
    flip(finished.dataset / TARGETS)
    flip(finished.dataset / CODES, 700)
    report = finished.validate(tmp_path / "check")
    with raises(ConfigError, "bad_findings", "write"):
        take_back_commits(finished.config, report, ["assemble"])
    other = Project(tmp_path / "other").configure
    (tmp_path / "other").mkdir()
    with raises(ConfigError, "bad_findings", str(finished.dataset)):
        take_back_commits(other(), report, STAGES)
    same_place = {"dataset_dir": str(finished.dataset), "run_dir": str(tmp_path / "elsewhere")}
    with raises(ConfigError, "bad_findings", "'b'"):
        take_back_commits(other(encode={"codecs": [{"name": "a", "model": "builtin"}]}, **same_place), report, STAGES)
    codecs = {"codecs": [{"name": name, "model": "builtin"} for name in CODECS]}
    with raises(ConfigError, "bad_findings", "write"):
        take_back_commits(other(encode=codecs, **same_place), report, STAGES)
    assert finished.commits() == finished.ledgers


def test_a_shard_whose_source_has_changed_is_not_passed_off_as_the_same(finished, tmp_path):
    flip(finished.dataset / TARGETS)
    take_back_commits(finished.config, finished.validate(tmp_path / "check"), STAGES)
    # Of the same size: another size would be noticed before anything is written.
    path = finished.project.root / "4.flac"
    size = path.stat().st_size
    path.write_bytes(put(path, 0.5 * voice(0.8, seed=99)).read_bytes().ljust(size, b"\0"))
    assert path.stat().st_size == size
    with raises(FatalError, "changed_input", "unit 1"):
        run(WriteStage(finished.config))
    put(finished.project.root / "4.flac", voice(0.8, seed=4))
    take_back_commits(finished.config, finished.validate(tmp_path / "check"), STAGES)
    finished.run()
    assert snapshot(finished.dataset) == finished.original


def test_a_lost_source_costs_no_record(finished, tmp_path):
    flip(finished.dataset / TARGETS)
    take_back_commits(finished.config, finished.validate(tmp_path / "check"), STAGES)
    (finished.project.root / "4.flac").unlink()
    with raises(FatalError, "changed_input", "1", "3"):
        run(WriteStage(finished.config))

"""Damage, the units that repair it, and doing these again, which restores the original bytes."""

import pytest
from support import damage as do
from support.project import (
    Project,
    ToyCodec,
    check_dataset,
    codec_stages,
    loading,
    put,
    raises,
    run,
    snapshot,
    stage_of,
    voice,
)

from sharmill.cli.run import read_redo_report
from sharmill.errors import ConfigError, FatalError
from sharmill.validate.findings import encode_report, read_report, take_back_commits

STAGES = ["write", "encode.segments", "encode", "encode.shards"]
CODECS = ("a", "b")
CODES = "codes_b/target_codes/codes.000001.tar"


class Finished:
    """A finished dataset of three shards and two codecs, with the run directory that made it."""

    def __init__(self, folder) -> None:
        self.project = Project(folder).add_voices([0.4 + number / 10 for number in range(7)])
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
        return [
            stage_of(self.config, "write"),
            *(stage for name in CODECS for stage in codec_stages(self.config, name)),
        ]

    def run(self):
        """Run the same configuration again."""
        with loading(ToyCodec()):
            assert all(run(stage).ok for stage in self.stages())

    def validate(self, scratch):
        return check_dataset(self.dataset, scratch)

    def commits(self):
        return {
            stage.key: sum(len(path.read_bytes().splitlines()) for path in stage.ranks.ledger.glob("*.jsonl"))
            for stage in self.stages()
        }


@pytest.fixture
def finished(tmp_path):
    return Finished(tmp_path)


flip_audio, flip_codes = do.flip_bit(do.TARGETS, 1500), do.flip_bit(CODES, 700)

DAMAGES = {
    "audio": (flip_audio, [("write", 1)]),
    "audio that is cut off": (do.change_bytes(do.TARGETS, lambda data: data[:-1]), [("write", 1)]),
    "audio that is gone": (do.remove_files(do.TARGETS), [("write", 1)]),
    "cuts": (do.flip_bit("cuts/cuts.000002.jsonl.gz", 100), [("write", 2)]),
    "codes": (flip_codes, [("encode/b", 1)]),
    "codes that are gone": (do.remove_files(CODES), [("encode/b", 1)]),
    "several": (do.all_of(flip_audio, flip_codes), [("encode/b", 1), ("write", 1)]),
    "a description that is cut off": (do.change_bytes("dataset.json", lambda data: b"{"), [("index", None)]),
    "a list of shards that is cut off": (do.change_bytes("shards.jsonl", lambda data: b'{"in'), [("index", None)]),
    "no index": (do.remove_files("shards.jsonl"), [("index", None)]),
    "a shard that is not listed": (do.change_shards(lambda shards: shards[:-1]), [("index", None)]),
    "a field that is not listed": (
        do.change_shard(1, fields=lambda f: {name: f[name] for name in f if name != "codes_a/target_codes"}),
        [("encode/a", 1), ("index", None)],
    ),
    "other totals": (do.change_description(num_cuts=9), [("index", None)]),
    "a codec without fields": (
        do.change_description(fields=["cuts", "target_audio", "context_audio"]), [("index", None)],
    ),
    "a list of an older dataset": (
        do.change_shard(0, count=2, target_seconds=0.5),
        [("index", None), ("write", 0), ("encode/a", 0), ("encode/b", 0)],
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
    flip_audio(finished.dataset)
    do.flip_bit("codes_b/target_codes/codes.000002.tar", 700)(finished.dataset)
    times = {path: path.stat().st_mtime_ns for path in finished.dataset.rglob("*.tar")}
    take_back_commits(finished.config, finished.validate(tmp_path / "check"), STAGES)
    gone = {name: number - finished.commits()[name] for name, number in finished.ledgers.items()}
    assert {name for name, number in gone.items() if number} == {"write", "encode.shards/b"}
    assert max(gone.values()) == 1
    finished.run()
    written = {
        path.relative_to(finished.dataset).as_posix() for path in times if path.stat().st_mtime_ns != times[path]
    }
    assert written == {
        *(f"{field}/recording.000001.tar" for field in ("target_audio", "context_audio")),
        *(f"codes_b/{role}_codes/codes.000002.tar" for role in ("target", "context")),
    }


def test_a_report_survives_its_file(finished, tmp_path):
    flip_audio(finished.dataset)
    report = finished.validate(tmp_path / "check")
    (tmp_path / "report.json").write_bytes(encode_report(report))
    assert read_report(tmp_path / "report.json") == report
    (row,) = report.findings
    assert row == {
        "code": "wrong_checksum",
        "severity": "error",
        "shard": 1,
        "field": "target_audio",
        "file": do.TARGETS,
        "member": None,
        "where": do.TARGETS,
        "sentence": "the bytes have changed since they were written",
        "to_do": "rebuild the shard: sharmill run CONFIG --redo FINDINGS.json",
    }
    assert (report.errors, report.warnings, [(kind.code, kind.count) for kind in report.kinds]) == (
        1, 0, [("wrong_checksum", 1)],
    )  # fmt: skip


def test_a_report_may_have_the_former_name_of_a_round(finished, tmp_path, capsys):
    flip_codes(finished.dataset)
    report = finished.validate(tmp_path / "check")
    path = tmp_path / "report.json"
    path.write_bytes(encode_report(report).replace(b'"encode/b"', b'"assemble/b"'))
    take_back_commits(finished.config, read_redo_report(str(path), [finished.config], restart=False), STAGES)
    finished.run()
    assert snapshot(finished.dataset) == finished.original
    assert "assemble/b is now a round of the stage encode\n" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format_version": 1}'])
def test_what_is_no_report_is_a_configuration_error(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with raises(ConfigError, "bad_findings", "x.json"):
        read_report(tmp_path / "x.json")
    with raises(ConfigError, "bad_findings", "nothing.json"):
        read_report(tmp_path / "nothing.json")


def test_a_copied_context_needs_another_match_and_no_redo(tmp_path):
    """The writer would store the same context again; only the stage match can choose another."""
    project = Project(tmp_path)
    for number in (0, 1):
        project.add(f"{number}.flac", voice(1.0, seed=7))
    project.add("2.flac", voice(1.0, seed=8))
    config = project.write(contexts=[1, 2, 0], match={"min_duration": 0.0})
    report = check_dataset(project.dataset, tmp_path / "check")
    (row,) = report.findings
    assert (row["code"], row["member"]) == ("copied_context", "cut-rec-0-0.00-1.00")
    assert "sharmill run CONFIG --restart" in row["to_do"]
    assert report.units_to_repeat == []
    with raises(ConfigError, "bad_findings", "to_do"):
        take_back_commits(config, report, ["write"])


def test_what_cannot_be_done_again_is_refused_before_any_work(finished, tmp_path):
    flip_audio(finished.dataset)
    flip_codes(finished.dataset)
    report = finished.validate(tmp_path / "check")
    other = Project(tmp_path / "other").configure
    (tmp_path / "other").mkdir()
    same_place = {"dataset_dir": str(finished.dataset), "run_dir": str(tmp_path / "elsewhere")}
    codecs = [{"name": name, "model": "builtin"} for name in CODECS]
    for config, stages, words in (
        (finished.config, ["encode.shards"], "write"),
        (other(), STAGES, str(finished.dataset)),
        (other(encode={"codecs": codecs[:1]}, **same_place), STAGES, "'b'"),
        (other(encode={"codecs": codecs}, **same_place), STAGES, "write"),
    ):
        with raises(ConfigError, "bad_findings", words):
            take_back_commits(config, report, stages)
    assert finished.commits() == finished.ledgers


def test_a_shard_with_a_changed_source_is_not_rebuilt(finished, tmp_path):
    flip_audio(finished.dataset)
    take_back_commits(finished.config, finished.validate(tmp_path / "check"), STAGES)
    # Keep the size, since another size would be noticed before anything is written.
    path = finished.project.root / "4.flac"
    size = path.stat().st_size
    path.write_bytes(put(path, 0.5 * voice(0.8, seed=99)).read_bytes().ljust(size, b"\0"))
    assert path.stat().st_size == size
    with raises(FatalError, "changed_input", "unit 1"):
        run(stage_of(finished.config, "write"))
    put(finished.project.root / "4.flac", voice(0.8, seed=4))
    take_back_commits(finished.config, finished.validate(tmp_path / "check"), STAGES)
    finished.run()
    assert snapshot(finished.dataset) == finished.original

"""``--against``: every record of the manifests ends in the dataset or among the rejects, once."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises
from support.manifests import speaker_tag
from support.shar import lines, rewrite, run, voice

from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.shar.cut_lines import read_cuts
from sharmill.sources.nemo import NemoSource
from sharmill.validate.accounts import ExpectedRecords, count_surplus, hash_cut, hash_record
from sharmill.validate.findings import read_report
from sharmill.validate.stage import ValidateStage


def account(project, scratch, **changes):
    """(code, shard, what names the record) of the findings about accounts."""
    options = {
        "sources": (NemoSource(manifest=str(project.folder / "small.json"), audio_root="."),),
        "rejects": tuple(str(path) for path in sorted(project.run_dir.glob("*/rejects.jsonl"))),
        "audio_roots": (str(project.root),),
    }
    stage = ValidateStage(project.dataset, RunDir(scratch), against=ExpectedRecords(**(options | changes)))
    assert run(stage).ok
    return [(f.code, f.shard, f.member) for f in stage.findings() if f.code.endswith(("_record", "_text"))]


@pytest.fixture
def many_kinds(project):
    """Records of all forms that ends in the dataset or in the rejects of ``prepare`` and ``write``."""
    long = voice(3.0, seed=1)
    project.add("book/long.wav", long, offset=0.5, duration=1.0)
    project.add("book/long.wav", offset=1.5, duration=1)
    project.add("book/long.wav", offset=1.5, duration=1.0, text="the same segment again")
    project.add("./book/../whole.flac", voice(1.0, seed=2), offset=None)
    project.add(str(project.root / "absolute.wav"), voice(1.0, seed=3), duration=1.0)
    project.add("größer 日本.wav", voice(1.0, seed=4))
    project.add("absent.wav", duration=1.0)
    project.add("book/long.wav", offset=-1, duration=1.0)
    project.add("book/long.wav", offset="0", duration=1.0)
    project.add("book/long.wav", offset=0.0, duration=None)
    project.add("book/long.wav", offset=0.0, duration=1.0, _skipme=1)
    project.add("late.wav", voice(1.0, seed=5))
    config = project.configure(match={"min_duration": 0.0}, write={"shard_size": 2, "order": "manifest"})
    manifest = project.folder / "small.json"
    broken = [b"", b"no json", b"3", b'"text"', b'["list"]', b'{"audio_filepath": "\xff.wav"}', b"[" * 200 + b"]" * 200]
    deep = json.dumps({"audio_filepath": "a.wav", "duration": 1.0, "deep": json.loads("[" * 150 + "]" * 150)}).encode()
    manifest.write_bytes(b"\n".join([manifest.read_bytes(), *broken, deep]) + b"\n")
    project.match_by_hand(config)
    (project.root / "late.wav").write_bytes(b"this became text since it was prepared")
    from sharmill.write.stage import WriteStage

    assert run(WriteStage(config)).ok
    return project


def test_all_forms_of_records_are_accounted_for(many_kinds, tmp_path):
    assert len(many_kinds.rejects("prepare")) == 12
    assert len(many_kinds.rejects("write")) == 2  # the record itself, and that whose context it is
    assert account(many_kinds, tmp_path / "check") == []


def test_the_report_says_where_the_records_were_found(many_kinds, tmp_path):
    account(many_kinds, tmp_path / "check")
    checked = read_report(tmp_path / "check" / "validate" / "report.json").checked
    counts = {name: number for name, number in checked.items() if name.startswith("records")}
    assert counts == {
        "records of the manifests": 19,
        "records found as cuts": checked["cuts"],
        "records found among the rejects": 14,
        "records not found": 0,
    }


def test_a_changed_transcript_is_told_with_both_texts(project, tmp_path):
    for number in range(3):
        project.add(f"{number}.wav", voice(0.5, seed=number))
    project.write(match={"min_duration": 0.0}, write={"order": "manifest", "shard_size": 2})
    assert account(project, tmp_path / "before") == []
    manifest = project.folder / "small.json"
    manifest.write_text(manifest.read_text().replace("text of 2.wav", "another text"))
    assert account(project, tmp_path / "after") == [("different_text", 1, "2.wav at 0.0 s, 0.5 s long")]
    report = read_report(tmp_path / "after" / "validate" / "report.json")
    (row,) = report.findings
    assert "'text of 2.wav'" in row["sentence"]
    assert "'another text'" in row["sentence"]
    assert (row["severity"], report.units_to_repeat) == ("error", [])
    assert report.checked["records found as cuts"] == report.checked["records of the manifests"] == 3


def test_normalized_text_is_the_transcript_where_there_is_no_other(project, tmp_path):
    project.add("a.wav", voice(1.0), text="", normalized_text="spoken")
    project.add("b.wav", voice(1.0, seed=1), text="written", normalized_text="other")
    project.write(match={"min_duration": 0.0})
    assert account(project, tmp_path / "check") == []


def test_a_cut_that_is_gone_is_a_lost_record(many_kinds, tmp_path):
    path = many_kinds.dataset / "cuts/cuts.000001.jsonl.gz"
    lost = lines(path)[-1]["supervisions"][0]["custom"]
    rewrite(path, lines(path)[:-1])
    named = f"{lost['audio_filepath']} at {lost['offset']} s, {lost['duration']} s long"
    assert [finding[0] for finding in account(many_kinds, tmp_path / "check")] == ["lost_record"]
    (found,) = account(many_kinds, tmp_path / "check")
    assert named.rsplit("/", 1)[-1].split(" at ")[0] in found[2]


def test_a_cut_that_is_there_twice_is_a_doubled_record(many_kinds, tmp_path):
    path = many_kinds.dataset / "cuts/cuts.000001.jsonl.gz"
    cuts = lines(path)
    rewrite(path, [*cuts, cuts[0]])
    ((code, shard, member),) = account(many_kinds, tmp_path / "check")
    assert (code, shard) == ("doubled_record", 1)
    assert member.startswith(cuts[0]["supervisions"][0]["custom"]["audio_filepath"])


def test_a_record_that_is_in_the_dataset_and_rejected_is_doubled(many_kinds, tmp_path):
    custom = lines(many_kinds.dataset / "cuts/cuts.000000.jsonl.gz")[0]["supervisions"][0]["custom"]
    extra = tmp_path / "more.jsonl"
    rewrite(extra, [{"stage": "match", "reason": "malformed", "detail": "x", "record": custom}])
    rejects = tuple(str(path) for path in many_kinds.run_dir.glob("*/rejects.jsonl"))
    ((code, shard, _),) = account(many_kinds, tmp_path / "check", rejects=(*rejects, str(extra)))
    assert (code, shard) == ("doubled_record", 0)


def test_without_the_rejects_these_are_lost(many_kinds, tmp_path):
    codes = [code for code, _, _ in account(many_kinds, tmp_path / "check", rejects=())]
    # The segment that is there twice has one hash, and one finding.
    assert codes == ["lost_record"] * 14


def test_of_a_manifest_that_was_not_given_all_is_unknown_and_only_a_warning(many_kinds, tmp_path):
    other = tmp_path / "other.json"
    other.write_text("")
    with raises(ConfigError, "bad_manifest", str(other)):
        account(many_kinds, tmp_path / "check", sources=(NemoSource(manifest=str(other), audio_root="."),))
    record = {"audio_filepath": "x.wav", "duration": 1.0, "speaker": speaker_tag("x"), "text": "x"}
    other.write_text(json.dumps(record) + "\n")
    stage = ValidateStage(
        many_kinds.dataset,
        RunDir(tmp_path / "check"),
        against=ExpectedRecords(sources=(NemoSource(manifest=str(other), audio_root="."),)),
    )
    assert run(stage).ok
    report = stage.report()
    counts = {kind.code: (kind.severity, kind.count) for kind in report.kinds}
    num_cuts = sum(1 for path in (many_kinds.dataset / "cuts").iterdir() for _ in read_cuts(path))
    assert counts == {"lost_record": ("error", 1), "unknown_record": ("warning", num_cuts)}


def test_files_that_are_not_what_they_should_be_are_configuration_errors(many_kinds, tmp_path):
    with raises(ConfigError, "missing_input", "nothing.json"):
        account(many_kinds, tmp_path / "check", sources=(NemoSource(manifest="nothing.json", audio_root="."),))
    with raises(ConfigError, "missing_input", "nothing.jsonl"):
        account(many_kinds, tmp_path / "check", rejects=("nothing.jsonl",))
    with raises(ConfigError, "bad_manifest", "small.json"):
        account(many_kinds, tmp_path / "check", rejects=(str(many_kinds.folder / "small.json"),))


def test_a_cut_that_does_not_say_where_it_came_from_has_no_hash():
    assert hash_cut({"id": "x", "supervisions": []})[1:] == (0, 0)
    for custom in ({}, {"audio_filepath": "a"}, {"audio_filepath": "a", "duration": "1"},
                   {"audio_filepath": "a", "duration": 10**400}):  # fmt: skip
        assert hash_cut({"supervisions": [{"custom": custom}]})[1:] == (0, 0)


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_the_surplus_is_the_difference_of_multisets(left, right):
    found = count_surplus(np.array(left, np.uint64), np.array(right, np.uint64))
    numbers = {key: left.count(key) - right.count(key) for key in {*left, *right}}
    assert found == {key: number for key, number in numbers.items() if number}


@given(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1),
    st.floats(0, 1e6, allow_nan=False),
    st.floats(0, 1e6, allow_nan=False),
)
def test_a_record_has_the_hash_of_its_cut(path, offset, duration):
    """As the stage prepare writes it down."""
    custom = {"audio_filepath": path.lstrip("/") or "x", "offset": offset, "duration": duration, "text": path}
    cut = {"supervisions": [{"custom": custom, "text": path}]}
    assert hash_record(custom) == hash_cut(cut)[1:]

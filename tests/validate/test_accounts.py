"""``--against``: every manifest record is in the dataset or among the rejects, exactly once."""

import json
import resource
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st
from support.project import check_dataset, lines, raises, run, speaker_tag, stage_of, voice, write_lines

from sharmill.errors import ConfigError, FatalError
from sharmill.shar.json_lines import read_cuts
from sharmill.sources.nemo import NemoSource
from sharmill.validate.accounts import ExpectedRecords, RecordRow, open_accounts, row_of, row_of_cut
from sharmill.validate.findings import read_report


def account(project, scratch, **changes):
    """Return (code, shard, name of the record) of the findings about accounts."""
    options = {
        "sources": (NemoSource(manifest=str(project.folder / "small.json"), audio_root="."),),
        "rejects": tuple(str(path) for path in sorted(project.run_dir.glob("*/rejects.jsonl"))),
        "audio_roots": (str(project.root),),
    }
    rows = check_dataset(project.dataset, scratch, ExpectedRecords(**(options | changes))).findings
    return [(row["code"], row["shard"], row["member"]) for row in rows if row["code"].endswith(("_record", "_text"))]


@pytest.fixture
def many_kinds(project):
    """Records of all forms, in the dataset or in the rejects of ``prepare`` and ``write``."""
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
    project.add("spoken.wav", voice(1.0, seed=6), text="", normalized_text="spoken")
    project.add("written.wav", voice(1.0, seed=7), text="written", normalized_text="other")
    config = project.configure(match={"min_duration": 0.0}, write={"shard_size": 2, "order": "manifest"})
    manifest = project.folder / "small.json"
    broken = [b"", b"no json", b"3", b'"text"', b'["list"]', b'{"audio_filepath": "\xff.wav"}', b"[" * 200 + b"]" * 200]
    deep = json.dumps({"audio_filepath": "a.wav", "duration": 1.0, "deep": json.loads("[" * 150 + "]" * 150)}).encode()
    good = {"audio_filepath": "spoken.wav", "duration": 1.0, "text": "a", "speaker": "b"}
    nan = [json.dumps(good | {key: float("nan"), "more": [float("inf")]}).encode() for key in ("duration", "offset")]
    manifest.write_bytes(b"\n".join([manifest.read_bytes(), *broken, deep, *nan]) + b"\n")
    project.match_by_hand(config)
    (project.root / "late.wav").write_bytes(b"this became text since it was prepared")

    assert run(stage_of(config, "write")).ok
    return project


def test_all_forms_of_records_are_accounted_for(many_kinds, tmp_path):
    assert len(many_kinds.rejects("prepare")) == 14
    assert len(many_kinds.rejects("write")) == 2  # the record itself, and the record that has it as context
    assert account(many_kinds, tmp_path / "check") == []
    checked = read_report(tmp_path / "check" / "validate" / "report.json").checked
    counts = {name: number for name, number in checked.items() if name.startswith("records")}
    assert counts == {
        "records of the manifests": 23,
        "records found as cuts": checked["cuts"],
        "records found among the rejects": 16,
        "records not found": 0,
    }


def test_a_changed_transcript_is_told_with_both_texts(project, tmp_path):
    project.add_voices([0.5] * 3, "{}.wav")
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


def test_a_record_that_is_in_the_dataset_and_rejected_is_doubled(many_kinds, tmp_path):
    custom = lines(many_kinds.dataset / "cuts/cuts.000000.jsonl.gz")[0]["supervisions"][0]["custom"]
    extra = tmp_path / "more.jsonl"
    write_lines(extra, [{"stage": "match", "reason": "malformed", "detail": "x", "record": custom}])
    rejects = tuple(str(path) for path in many_kinds.run_dir.glob("*/rejects.jsonl"))
    ((code, shard, _),) = account(many_kinds, tmp_path / "check", rejects=(*rejects, str(extra)))
    assert (code, shard) == ("doubled_record", 0)


def test_records_of_a_manifest_not_given_are_only_warnings(many_kinds, tmp_path):
    other = tmp_path / "other.json"
    other.write_text("")
    with raises(ConfigError, "bad_manifest", str(other)):
        account(many_kinds, tmp_path / "check", sources=(NemoSource(manifest=str(other), audio_root="."),))
    record = {"audio_filepath": "x.wav", "duration": 1.0, "speaker": speaker_tag("x"), "text": "x"}
    other.write_text(json.dumps(record) + "\n")
    against = ExpectedRecords(sources=(NemoSource(manifest=str(other), audio_root="."),))
    report = check_dataset(many_kinds.dataset, tmp_path / "check", against)
    counts = {kind.code: (kind.severity, kind.count) for kind in report.kinds}
    num_cuts = sum(1 for path in (many_kinds.dataset / "cuts").iterdir() for _ in read_cuts(path))
    assert counts == {"lost_record": ("error", 1), "unknown_record": ("warning", num_cuts)}


def test_unreadable_account_files_are_configuration_errors(many_kinds, tmp_path):
    for changes, code, name in (
        ({"sources": (NemoSource(manifest="nothing.json", audio_root="."),)}, "missing_input", "nothing.json"),
        ({"rejects": ("nothing.jsonl",)}, "missing_input", "nothing.jsonl"),
        ({"rejects": (str(many_kinds.folder / "small.json"),)}, "bad_manifest", "small.json"),
    ):
        with raises(ConfigError, code, name):
            account(many_kinds, tmp_path / "check", **changes)


@pytest.mark.parametrize("custom", [
    {}, {"audio_filepath": "a"}, {"audio_filepath": "a", "duration": "1"}, {"audio_filepath": "a", "duration": 10**400},
])  # fmt: skip
def test_a_cut_that_does_not_say_where_it_came_from_has_no_key(custom):
    assert row_of_cut({"id": "x", "supervisions": [{"custom": custom}]}) == RecordRow(id="x")


def test_a_full_temporary_folder_is_named_with_the_remedy():
    rows = [RecordRow(id=f"{number:080}") for number in range(50_000)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with raises(FatalError, "disk", "TMPDIR") as caught, open_accounts() as accounts:
            accounts.add("cuts", rows, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)


NUMBERS = st.lists(st.integers(0, 9))


@given(NUMBERS, NUMBERS, NUMBERS)
def test_what_does_not_add_up_is_the_difference_of_multisets(manifests, cuts, rejects):
    rows = {side: [RecordRow(str(number), name=str(number)) for number in numbers]
            for side, numbers in (("manifests", manifests), ("cuts", cuts), ("rejects", rejects))}  # fmt: skip
    expected = SimpleNamespace(manifest_rows=lambda: rows["manifests"], reject_rows=lambda: rows["rejects"])
    with open_accounts() as accounts:
        accounts.add("cuts", rows["cuts"], 3)
        findings, counts = accounts.check(expected, compare_texts=True)
    wanted, ended = Counter(map(str, manifests)), Counter(map(str, cuts + rejects))
    assert {f.member for f in findings if f.code == "lost_record"} == (wanted - ended).keys()
    surplus = {f.member: f.shard for f in findings if f.code != "lost_record"}
    assert surplus == {name: 3 if int(name) in cuts else None for name in ended - wanted}
    assert {f.member for f in findings if f.code == "unknown_record"} == ended.keys() - wanted.keys()
    assert counts.get("records not found", 0) == (wanted - ended).total()
    assert counts.get("records of the manifests", 0) == len(manifests)


@given(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1),
    st.floats(0, 1e6, allow_nan=False),
    st.floats(0, 1e6, allow_nan=False),
)
def test_a_record_has_the_key_of_its_cut(path, offset, duration):
    """The cut has the record as the stage prepare stores it."""
    custom = {"audio_filepath": path.lstrip("/") or "x", "offset": offset, "duration": duration, "text": path}
    cut = {"id": "", "supervisions": [{"custom": custom, "text": path}]}
    assert row_of(custom) == row_of_cut(cut)

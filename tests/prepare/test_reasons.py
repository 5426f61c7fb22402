"""Every reason for which ``prepare`` rejects a record, end to end, with the record and the file that cause it."""

import json
import math
import time

import pytest
from support.project import (
    Project,
    config_for,
    make_record,
    prepared_manifest,
    raises,
    run_prepare,
    stage_of,
    utterances,
    write_lines,
)

from sharmill.engine.executor import Listener
from sharmill.errors import REASONS, FatalError
from sharmill.pipeline import run_dataset

# Reasons of sources and other stages, which have their own tests.
LATER = {
    "unsupported_rate", "non_finite_audio", "silent_audio", "changed_audio", "single_utterance_speaker",
    "no_similar_context", "no_long_context", "only_copies", "unsupported_cut", "overlapped_speech",
    "ambiguous_audio", "bad_context", "too_long_for_device", "bad_codes", "over_full_scale",
    "wrong_voice", "mixed_voices", "no_speech",
}  # fmt: skip
MISSING = ...

CASES = [
    # reason, changes to a good record, options of prepare, part of the detail
    ("skipped", {"_skipme": True}, {}, "_skipme"),
    ("skipped", {"_skipme": "too noisy"}, {}, "_skipme: too noisy"),
    ("skipped", {"_skipme": 1, "duration": MISSING, "audio_filepath": "../x"}, {}, "_skipme"),
    ("skipped", {"custom": {"_skipme": True}}, {}, "_skipme"),
    ("malformed", {"duration": "2.0"}, {}, "duration is '2.0'"),
    ("malformed", {"duration": True}, {}, "duration is 'True'"),
    ("malformed", {"duration": [2.0]}, {}, "duration is '[2.0]'"),
    ("malformed", {"offset": "0"}, {}, "offset is '0'"),
    ("malformed", {"_alignment": {"word": [["good", 1.5, 0.7]]}}, {}, "_alignment must have the form"),
    ("malformed", {"_alignment": "word.ctm"}, {}, "within the segment"),
    ("malformed", {"audio_filepath": 3}, {}, "audio_filepath is '3', a number, not a text"),
    ("malformed", {"audio_filepath": None}, {}, "audio_filepath is null, not a text"),
    ("malformed", {"audio_filepath": ["a.wav"]}, {}, "audio_filepath is \"['a.wav']\", a list, not a text"),
    ("malformed", {"speaker": {"id": 3}}, {}, "speaker is \"{'id': 3}\""),
    ("malformed", {"text": ["a"]}, {}, "text is \"['a']\""),
    ("malformed", {"normalized_text": 3}, {}, "normalized_text is '3'"),
    ("malformed", {"duration": -2.0}, {}, "duration is -2.0"),
    ("malformed", {"offset": -0.5}, {}, "offset is -0.5"),
    ("malformed", {"duration": 10**400}, {}, "duration"),
    ("malformed", {"offset": 1e300}, {}, "offset is 1e+300"),
    ("malformed", {"storage_type": "pickle", "width": 1}, {}, "which is not allowed in a dataset"),
    (
        "malformed",
        {"extra": [{"id": "x", "sources": [], "sampling_rate": 1, "transforms": [{"name": "Speed"}]}]},
        {},
        "which is not allowed in a dataset",
    ),
    (
        "malformed",
        {"id": "x", "sources": [{"type": "command", "source": "true"}], "sampling_rate": 16000},
        {},
        "which is not allowed in a dataset",
    ),
    ("missing_field", {"audio_filepath": MISSING}, {}, "audio_filepath"),
    ("missing_field", {"audio_filepath": ""}, {}, "audio_filepath"),
    ("bad_speaker", {"speaker": MISSING}, {}, "speaker"),
    ("bad_speaker", {"speaker": ""}, {}, "speaker"),
    ("bad_speaker", {"speaker": "N/A"}, {}, "speaker is 'N/A', which is not a name"),
    (
        "bad_speaker",
        {"speaker": "| Language:en Dataset:Tests Speaker:None |"},
        {},
        "Speaker:None |', which is not a name",
    ),
    ("missing_field", {"text": MISSING}, {}, "normalized_text"),
    ("bad_speaker", {"speaker": "| Speaker:anna |"}, {}, "'| Speaker:anna |'"),
    ("bad_speaker", {"speaker": 10**30}, {}, "int"),
    ("empty_text", {"text": " \t"}, {}, "text"),
    ("empty_text", {"text": "", "normalized_text": " "}, {}, "text"),
    ("filtered", {"cer": 0.031}, {"filters": {"cer": "<= 0.03"}}, "0.031"),
    ("filtered", {}, {"filters": {"cer": "<= 0.03"}}, "'None'"),
    ("filtered", {"cer": "0.01"}, {"filters": {"cer": "<= 1"}}, "'0.01'"),
    ("filtered", {"cer": True}, {"filters": {"cer": "<= 1"}}, "'True'"),
    ("filtered", {"cer": 0.01}, {"filters": {"cer": "<= 0.03", "duration": "< 2"}}, "duration is 2"),
    ("filtered", {"cer": 10**400}, {"filters": {"cer": "<= 0.03"}}, "<= 0.03"),
    ("too_short", {"duration": 0.05}, {}, "prepare.min_duration=0.1"),
    ("too_short", {"duration": MISSING, "offset": 1.95}, {}, "prepare.min_duration=0.1"),
    ("too_short", {"duration": 0}, {}, "prepare.min_duration=0.1"),
    ("too_long", {"duration": None}, {"max_duration": 1.9}, "prepare.max_duration=1.9"),
    ("too_long", {}, {"max_duration": 1.9}, "prepare.max_duration=1.9"),
    ("missing_audio", {"audio_filepath": "none.wav"}, {}, "No such file or directory"),
    ("missing_audio", {"audio_filepath": "a.wav/b.wav"}, {}, "Not a directory"),
    ("missing_audio", {"audio_filepath": "link_loop.wav"}, {}, ""),
    ("missing_audio", {"audio_filepath": "x" * 300 + ".wav"}, {}, "File name too long"),
    ("unreadable_audio", {"audio_filepath": "text.wav"}, {}, "Format not recognised"),
    ("unreadable_audio", {"audio_filepath": "folder.wav"}, {}, ""),
    ("unreadable_audio", {"audio_filepath": "."}, {}, ""),
    ("unreadable_audio", {"audio_filepath": "fifo.wav"}, {}, ""),
    ("empty_audio", {"audio_filepath": "no_bytes.wav"}, {}, ""),
    ("empty_audio", {"audio_filepath": "no_samples.wav"}, {}, ""),
    ("duration_mismatch", {"duration": 2.11}, {}, "2.11"),
    ("duration_mismatch", {"duration": 1.8}, {}, "1.8"),
    ("duration_mismatch", {"duration": 1.8, "offset": None}, {}, "1.8"),
    ("duration_mismatch", {"offset": 1.0, "duration": 1.2}, {}, "2.2"),
    ("duration_mismatch", {"offset": 2.0, "duration": None}, {}, "2 s"),
    ("duration_mismatch", {"offset": 2.0, "duration": 0.1}, {}, "2 s"),
    ("unsupported_channels", {"audio_filepath": "stereo.wav"}, {}, "channel"),
    ("unsupported_channels", {"audio_filepath": "stereo.wav", "channel": 2}, {}, "2"),
    ("unsupported_channels", {"audio_filepath": "stereo.wav", "channel": -1}, {}, "-1"),
    ("unsupported_channels", {"audio_filepath": "stereo.wav", "channel": True}, {}, "True"),
    ("unsupported_channels", {"audio_filepath": "stereo.wav", "channel": "left"}, {}, "left"),
    ("unsupported_channels", {"audio_filepath": "stereo.wav", "channel": [0, 1]}, {}, "[0, 1]"),
    ("outside_root", {"audio_filepath": "../outside.wav"}, {}, "'..'"),
    ("outside_root", {"audio_filepath": "http://host/a.wav"}, {}, "URL"),
    ("outside_root", {"audio_filepath": "file:///etc/passwd"}, {}, "URL"),
    ("outside_root", {"audio_filepath": "deep/../../outside.wav"}, {}, "'..'"),
    ("outside_root", {"audio_filepath": "/etc/passwd"}, {}, ""),
    ("outside_root", {"audio_filepath": "link_out.wav"}, {}, ""),
    ("outside_root", {"audio_filepath": "folder_out/outside.wav"}, {}, ""),
    ("outside_root", {"audio_filepath": "pipe:touch marker"}, {}, ""),
    ("outside_root", {"audio_filepath": "touch marker |"}, {}, ""),
    ("outside_root", {"audio_filepath": "touch marker | "}, {}, ""),
    ("outside_root", {"audio_filepath": "a.wav\0"}, {}, ""),
]
NOT_JSON = [
    (b"{", "JSON"),
    (b"no JSON at all", "JSON"),
    (b'{"duration": NaN', "JSON"),
    (b'{"a": NaN, "text": "\\ud800"}', "JSON"),
    (b'{"a": -NaN}', "a is -NaN"),
    (b'{"a": ' + b"[" * 5000 + b"NaN" + b"]" * 5000 + b"}", ""),
    (b'{"duration": 1e999}', "JSON"),
    (b'{"text": "caf\xe9"}', "JSON"),
    (b'{"text": "\\ud800"}', "JSON"),
    (b'{"a": 1} {"a": 2}', "JSON"),
    (b"[1, 2]", "JSON"),
    (b'"text"', "JSON"),
    (b"null", "JSON"),
    (b'{"a": ' * 101 + b"0" + b"}" * 101, "100"),
    (b'{"a": ' + b"[" * 5000 + b"0" + b"]" * 5000 + b"}", ""),
]


@pytest.mark.parametrize(("reason", "changes", "options", "detail"), CASES)
def test_reason(reason, changes, options, detail, prepare_records, tmp_path):
    bad = make_record(**changes)
    prepared = prepare_records(tmp_path, [bad, make_record(audio_filepath="b.wav", cer=0.0, duration=1.9, offset=0.0)],
                               **options)  # fmt: skip
    (reject,) = prepared.rejects
    assert reject["record"] == bad
    assert (reject["stage"], reject["reason"]) == ("prepare", reason)
    assert detail in reject["detail"]
    assert "\n" not in reject["detail"]
    assert [utterance.segment.audio_filepath for utterance in prepared.kept] == ["b.wav"]


def test_hostile_records_of_a_megabyte_take_less_than_a_second(prepare_records, tmp_path):
    paths, tag = ["a/" * 500_000, "_" * 500_000 + "/b/c"], f"| Speaker:a{' ' * 1_000_000}b |"
    started = time.process_time()
    prepared = prepare_records(
        tmp_path, [*(make_record(audio_filepath=path) for path in paths), make_record(speaker=tag)]
    )
    assert time.process_time() - started < 1.0
    assert [reject["reason"] for reject in prepared.rejects] == ["missing_audio", "missing_audio", "bad_speaker"]
    assert max(len(reject["detail"]) for reject in prepared.rejects) < 200


@pytest.mark.parametrize(
    ("reason", "changes", "detail"),
    [
        ("malformed", {"duration": math.nan}, "duration is nan"),
        ("malformed", {"offset": -math.inf}, "offset is -inf"),
        ("malformed", {"text": math.nan}, "text is 'nan', a number, not a text"),
        ("filtered", {"cer": math.nan}, "cer is 'nan', not a number"),
        ("filtered", {"cer": -math.inf}, "cer is '-inf', not a number"),
    ],
)
def test_nan_under_a_key_that_is_used_rejects_a_record(reason, changes, detail, prepare_records, tmp_path):
    line = json.dumps(make_record(cer=0.0) | changes).encode()
    (reject,) = prepare_records(tmp_path, [line], filters={"cer": "<= 0.03"}).rejects
    assert (reject["reason"], reject["record"]["audio_filepath"]) == (reason, "a.wav")
    assert detail in reject["detail"]


def test_nan_under_other_keys_is_kept_as_null_and_counted(prepare_records, tmp_path):
    record = make_record(snr=math.nan, more={"list": [math.inf, 1]}, text='"a": NaN')
    prepared = prepare_records(tmp_path, [json.dumps(record).encode(), make_record(audio_filepath="b.wav")])
    (with_nan, _) = prepared.kept
    assert (with_nan.text, with_nan.custom) == ('"a": NaN', {"snr": None, "more": {"list": [None, 1]}})
    assert prepared.stats["nan_as_null"] == {"snr": 1, "more": 1}


@pytest.mark.parametrize(("line", "detail"), NOT_JSON, ids=[line[:20].decode("latin-1") for line, _ in NOT_JSON])
def test_line_that_is_no_record_is_kept_as_text(line, detail, prepare_records, tmp_path):
    prepared = prepare_records(tmp_path, [make_record(), line])
    (reject,) = prepared.rejects
    text = line.decode("utf-8", "replace")
    assert reject["record"] == (text if len(text) <= 8192 else text[:1024])
    assert (reject["stage"], reject["reason"]) == ("prepare", "malformed")
    assert detail in reject["detail"]
    assert len(prepared.kept) == 1


def test_the_same_segment_again(prepare_records, tmp_path):
    again = make_record(text="Again.", duration=2, offset=0)
    prepared = prepare_records(tmp_path, [make_record(), make_record(offset=0.5, duration=1.0), again, make_record()])
    assert [utterance.text for utterance in prepared.kept] == ["Good day.", "Good day."]
    assert [(reject["reason"], reject["stage"], reject["record"]["text"]) for reject in prepared.rejects] == [
        ("duplicate_id", "prepare", "Again."),
        ("duplicate_id", "prepare", "Good day."),
    ]
    assert "cut-rec-a-0.00-2.00" in prepared.rejects[0]["detail"]


def test_the_same_segment_by_another_name_of_the_path(prepare_records, audio_root, tmp_path):
    paths = ["a.wav", "./a.wav", "deep/../a.wav", ".//a.wav", str(audio_root / "a.wav")]
    prepared = prepare_records(tmp_path, [make_record(audio_filepath=path) for path in paths])
    assert [utterance.segment.audio_filepath for utterance in prepared.kept] == ["a.wav"]
    assert prepared.result.totals.rejects == {"duplicate_id": 4}


def test_the_same_segment_in_two_manifests_of_one_root(audio_root, tmp_path):
    paths = [write_lines(tmp_path / f"{number}.json", [make_record()]) for number in range(2)]
    link = tmp_path / "link"
    link.symlink_to(audio_root)
    prepared = run_prepare(config_for(tmp_path, [(paths[0], audio_root), (paths[1], link)]))
    assert prepared.result.totals.rejects == {"duplicate_id": 1}


def test_every_reason_has_a_test():
    # The last one is tested in tests/grow/test_append.py.
    assert {reason for reason, *_ in CASES} | {"duplicate_id", "already_there"} == REASONS.keys() - LATER


def test_missing_audio_put_in_place_needs_no_restart(tmp_path):
    project = Project(tmp_path).add_voices([1.0, 1.0], "voices/{}.flac")
    (project.root / "voices").rename(project.root / "elsewhere")
    config = project.configure(match=None)
    with raises(FatalError, "too_many_rejects", "missing_audio 2"):
        run_dataset(config, Listener(), stages=["prepare"])
    (project.root / "elsewhere").rename(project.root / "voices")
    assert run_dataset(config, Listener(), stages=["prepare"]).ok
    assert len(utterances(prepared_manifest(config))) == 2


def test_missing_audio_is_looked_for_again_only_if_some_came(tmp_path):
    project = Project(tmp_path).add_voices([1.0, 1.0], "voices/{}.flac")
    (project.root / "voices").rename(project.root / "elsewhere")
    config = project.configure(match=None, max_reject_fraction=1.0)
    plan = stage_of(config, "prepare").dir

    def token_after_run():
        assert run_dataset(config, Listener(), stages=["prepare"]).ok
        return plan.read_token()

    first = token_after_run()
    assert token_after_run() == first
    (project.root / "voices").mkdir()
    (project.root / "elsewhere/1.flac").rename(project.root / "voices/1.flac")
    second = token_after_run()
    assert second != first
    assert len(utterances(prepared_manifest(config))) == 1
    assert token_after_run() == second

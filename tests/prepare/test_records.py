"""What becomes of good records: text, further keys, segments, filters, sources."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
from support.errors import raises
from support.manifests import config_for, make_record, run_prepare, write_manifest, write_tone

from sharmill.errors import ConfigError
from sharmill.prepare.filters import parse_filters
from sharmill.prepare.stage import PrepareStage, prepared_manifest
from sharmill.shar.lhotse_json import cut_json
from sharmill.sources import Source


def only(prepared):
    assert prepared.rejects == []
    (utterance,) = prepared.kept
    return utterance


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"text": "A.", "normalized_text": "B."}, "A."),
        ({"text": "", "normalized_text": "B."}, "B."),
        ({"text": "  ", "normalized_text": "B."}, "B."),
        ({"text": None, "normalized_text": "B."}, "B."),
        ({"text": ..., "normalized_text": "B."}, "B."),
        ({"text": " A. "}, " A. "),
    ],
)
def test_text_falls_back_to_normalized_text(changes, expected, prepare_records, tmp_path):
    assert only(prepare_records(tmp_path, [make_record(**changes)])).text == expected


@pytest.mark.parametrize("changes", [{"text": ...}, {"text": ""}, {"text": None, "normalized_text": " "}])
def test_text_may_be_absent_if_so_configured(changes, prepare_records, tmp_path):
    assert only(prepare_records(tmp_path, [make_record(**changes)], require_text=False)).text == ""


def test_further_keys_are_kept_as_they_came(prepare_records, tmp_path):
    further = {
        "normalized_text": "good day", "cer": 0.0, "big": 10**30, "none": None, "list": [1, {"a": "ü"}], "ключ": True,
        "context_audio_filepath": "x", "index": 5, "custom": {}, "source": "s", "_mine": 1,
    }  # fmt: skip
    utterance = only(prepare_records(tmp_path, [make_record(**further)]))
    assert utterance.custom == further


def test_the_language_of_a_tag_is_written_as_nemo_reads_it(prepare_records, tmp_path):
    tag = "| Language:en-US Dataset:My Data Speaker:a-b |"
    utterance = only(prepare_records(tmp_path, [make_record(speaker=tag)]))
    written = utterance.speaker
    assert written.startswith("| Language:en_US Dataset:My_Data-")
    assert written.endswith(" Speaker:a-b |")
    assert utterance.custom["original_speaker"] == written.replace("en_US", "en-US")
    assert cut_json(utterance, sampling_rate=16000, num_samples=16000)["supervisions"][0]["language"] == "en-US"


def test_keys_of_sharmill_in_the_input_are_not_taken_over(prepare_records, tmp_path):
    utterance = only(prepare_records(tmp_path, [make_record(_source=9, _index=3, _cut_id="x", _skipme=False)]))
    assert (utterance.root, utterance.index, utterance.cut_id) == (0, -1, "cut-rec-a-0.00-2.00")
    assert utterance.custom == {}


def test_without_offset_it_is_the_whole_file(prepare_records, tmp_path):
    utterance = only(prepare_records(tmp_path, [make_record(duration=1.95)]))
    assert (utterance.whole_file, utterance.offset, utterance.duration) == (True, 0.0, 1.95)


def test_with_offset_it_is_exactly_that_segment(prepare_records, tmp_path):
    utterance = only(prepare_records(tmp_path, [make_record(offset=0.123456, duration=1)]))
    assert (utterance.whole_file, utterance.offset, utterance.duration) == (False, 0.123456, 1.0)


@pytest.mark.parametrize(("offset", "zero"), [(0, 0.0), (0.0, 0.0), (-0.0, 0.0)])
def test_offset_of_nothing_is_an_offset(offset, zero, prepare_records, tmp_path):
    utterance = only(prepare_records(tmp_path, [make_record(offset=offset, duration=1.0)]))
    assert (utterance.whole_file, utterance.cut_id) == (False, "cut-rec-a-0.00-1.00")


@pytest.mark.parametrize("duration", [1.91, 2.0, 2.09])
def test_duration_within_the_tolerance(duration, prepare_records, tmp_path):
    assert only(prepare_records(tmp_path, [make_record(duration=duration)])).duration == duration


@pytest.mark.parametrize(
    ("duration", "options"), [(0.1, {}), (0.05, {"min_duration": 0.05}), (1.0, {"max_duration": 1.0})]
)
def test_limits_on_the_duration_are_inclusive(duration, options, prepare_records, tmp_path):
    assert only(prepare_records(tmp_path, [make_record(duration=duration, offset=0.0)], **options)).duration == duration


def test_links_inside_the_root_are_followed(prepare_records, tmp_path):
    assert only(prepare_records(tmp_path, [make_record(audio_filepath="link_in.wav")])).audio_filepath == "link_in.wav"


def test_absolute_path_below_the_root_becomes_relative(prepare_records, audio_root, tmp_path):
    path = audio_root / "deep/c.flac"
    assert only(prepare_records(tmp_path, [make_record(audio_filepath=str(path))])).audio_filepath == "deep/c.flac"


def test_group_key_that_cannot_be_made_is_a_bad_speaker(audio_root, tmp_path):
    path = write_manifest(tmp_path / "m.json", [make_record(), make_record(audio_filepath="deep/c.flac")])
    config = config_for(tmp_path, [(path, audio_root)], speaker_key="(?P<folder>[^/]+)/")
    prepared = run_prepare(config)
    assert [(r["reason"], r["record"]["audio_filepath"]) for r in prepared.rejects] == [("bad_speaker", "a.wav")]


@pytest.mark.parametrize(
    ("comparison", "passing"),
    [
        ("<= 2", {1, 2}),
        ("< 2", {1}),
        (">= 2", {2, 3}),
        ("> 2", {3}),
        ("== 2", {2}),
        ("!= 2", {1, 3}),
        ("  >=2.0 ", {2, 3}),
        ("< 1e3", {1, 2, 3}),
        ("> -1", {1, 2, 3}),
        ("<= inf", {1, 2, 3}),
    ],
)
def test_filter(comparison, passing, prepare_records, tmp_path):
    records = [make_record(offset=0.1 * value, duration=1.0, value=value) for value in (1, 2, 3)]
    prepared = prepare_records(tmp_path, records, filters={"value": comparison})
    assert {utterance.custom["value"] for utterance in prepared.kept} == passing


@pytest.mark.parametrize("value", [None, "0.01", True, [0.01], {}])
def test_filter_on_what_is_no_number(value, prepare_records, tmp_path):
    prepared = prepare_records(tmp_path, [make_record(cer=value)], filters={"cer": "<= 1"})
    assert prepared.result.totals.rejects == {"filtered": 1}


def test_all_filters_must_hold(prepare_records, tmp_path):
    records = [make_record(offset=0.1 * number, duration=1.0, cer=cer, bandwidth=bandwidth)
               for number, (cer, bandwidth) in enumerate([(0.01, 9000), (0.01, 7000), (0.1, 9000)])]  # fmt: skip
    prepared = prepare_records(tmp_path, records, filters={"cer": "<= 0.03", "bandwidth": ">= 8000"})
    assert [utterance.custom["bandwidth"] for utterance in prepared.kept] == [9000]


def test_filter_on_the_duration(prepare_records, tmp_path):
    prepared = prepare_records(tmp_path, [make_record()], filters={"duration": "< 2"})
    assert prepared.result.totals.rejects == {"filtered": 1}


@pytest.mark.parametrize("text", ["", "0.03", "=< 3", "<=", "<= x", "<= nan", "< 1 > 0", "~ 3"])
def test_filter_that_is_no_comparison(text):
    with raises(ConfigError, "bad_config_value", "prepare.filters.cer", repr(text)):
        parse_filters({"cer": text})


def test_output_is_in_the_order_of_the_input_whatever_the_units(prepare_records, tmp_path):
    records = [make_record(offset=round(1 - 0.1 * number, 1), duration=0.5) for number in range(7)]
    outputs = []
    for size in (1, 3, 100):
        prepared = prepare_records(tmp_path / str(size), records, unit_records=size)
        outputs.append(prepared_manifest(prepared.config).read_bytes())
    assert [json.loads(line)["offset"] for line in outputs[0].splitlines()] == [r["offset"] for r in records]
    assert outputs[0] == outputs[1] == outputs[2]


def test_manifest_in_shards(audio_root, tmp_path):
    for number in range(4):
        write_manifest(tmp_path / f"m_{number:02d}.json", [make_record(offset=0.1 * number, duration=1.0, n=number)])
    prepared = run_prepare(config_for(tmp_path, [(tmp_path / "m__OP_00..03_CL_.json", audio_root)]))
    assert [utterance.custom["n"] for utterance in prepared.kept] == [0, 1, 2, 3]
    assert prepared_manifest(prepared.config) == tmp_path / "run/manifests/small_prepared.json"


def test_prepared_manifest_is_named_after_the_only_manifest(prepare_records, tmp_path):
    prepared = prepare_records(tmp_path, [make_record()])
    assert prepared_manifest(prepared.config) == tmp_path / "run/manifests/m_prepared.json"


def test_missing_shard_is_named_before_any_work(audio_root, tmp_path):
    write_manifest(tmp_path / "m_0.json", [make_record()])
    with raises(ConfigError, "missing_input", "m_1.json"):
        run_prepare(config_for(tmp_path, [(tmp_path / "m_{0..1}.json", audio_root)]))
    assert not (tmp_path / "run/prepare").exists()


@pytest.mark.parametrize("root", ["none", "file"])
def test_audio_root_that_is_no_folder(root, tmp_path):
    (tmp_path / "file").touch()
    stage = PrepareStage(
        config_for(tmp_path, [(write_manifest(tmp_path / "m.json", [make_record()]), tmp_path / root)])
    )
    with raises(ConfigError, "missing_input", str(tmp_path / root), "audio_root"):
        stage.identity()


def test_a_relative_audio_root_that_is_not_there_says_what_it_is_relative_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manifest = write_manifest(tmp_path / "m.json", [make_record()])
    with raises(ConfigError, "missing_input", "audio", str(tmp_path)):
        PrepareStage(config_for(tmp_path, [(manifest, "audio")])).identity()


def test_a_renamed_file_of_a_source_is_another_input(tmp_path, audio_root):
    @dataclass(frozen=True, kw_only=True)
    class Folder(Source):
        """A folder of text files; the name of each is a part of its record."""

        audio_root: str
        type: str = "folder"

        def identity(self):
            return {path.name: path.stat().st_size for path in tmp_path.glob("*.txt")}

        def pieces(self, records_per_piece):
            yield from ()

        def read(self, piece):
            yield from ()

    config = replace(config_for(tmp_path, [("m.json", audio_root)]), sources=[Folder(audio_root=str(audio_root))])
    (tmp_path / "one.txt").write_text("Hi.")
    before = PrepareStage(config).identity()
    (tmp_path / "one.txt").rename(tmp_path / "two.txt")
    assert PrepareStage(config).identity()["input"] != before["input"]


def test_a_run_that_died_before_its_last_record_ends_the_same(prepare_records, tmp_path):
    prepared = prepare_records(
        tmp_path,
        [make_record(), make_record(), make_record(audio_filepath="none.wav"), make_record(offset=0.5, duration=1.0)],
    )
    outputs = [prepared.stage.dir.rejects, prepared.stage.run_dir.stats, prepared_manifest(prepared.config)]
    before = [path.read_bytes() for path in outputs]
    prepared.stage.dir.done.unlink()
    assert run_prepare(prepared.config).result.totals == prepared.result.totals
    assert [path.read_bytes() for path in outputs] == before


def test_the_line_that_nemos_documentation_prints(audio_root, tmp_path):
    record = {"audio_filepath": str(audio_root / "deep/c.flac"), "text": "the transcription", "duration": 2.0}
    manifest = write_manifest(tmp_path / "m.json", [record])
    for number, (source, tag, origin) in enumerate(
        [
            ({"speaker": "{path[0]}"}, "| Language:und Dataset:small Speaker:deep |", "template"),
            ({"speaker": "{path[0]}", "language": "en", "dataset": "LS"}, "| Language:en Dataset:LS Speaker:deep |",
             "template"),
            ({}, "| Language:und Dataset:small Speaker:unknown |", "none"),
        ]
    ):  # fmt: skip
        source |= {"manifest": str(manifest), "audio_root": str(audio_root)}
        folder = tmp_path / str(number)
        prepared = run_prepare(config_for(folder, [source], speaker_key="all"))
        utterance = only(prepared)
        assert (utterance.audio_filepath, utterance.text, utterance.speaker) == ("deep/c.flac", record["text"], tag)
        assert prepared.stats["tag_from"] == {origin: 1}


def test_a_duration_that_is_missing_is_that_of_the_header_and_noted(prepare_records, tmp_path):
    records = [make_record(duration=...), make_record(duration=None, offset=0.5)]
    prepared = prepare_records(tmp_path, records)
    assert [(u.duration, u.offset, u.whole_file, u.custom) for u in prepared.kept] == [
        (2.0, 0.0, True, {"duration_from_header": True}),
        (1.5, 0.5, False, {"duration_from_header": True}),
    ]
    assert prepared.stats["duration_from"] == {"header": 2}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"text": ..., "tts_text": "A.", "tts_text_normalized": "a"}, "A."),
        ({"text": "", "tts_text_normalized": "a"}, "a"),
        ({"normalized_text": "B.", "tts_text": "A."}, "Good day."),
        ({"tts_text": 3}, "Good day."),
    ],
)
def test_text_of_tts(changes, text, prepare_records, tmp_path):
    assert only(prepare_records(tmp_path, [make_record(**changes)])).text == text


def test_two_channels_of_a_file_are_two_records(prepare_records, tmp_path):
    records = [make_record(audio_filepath="stereo.wav", channel=channel) for channel in (0, 1, "downmix", 1)]
    prepared = prepare_records(tmp_path, records)
    assert [(u.channel, u.custom, u.cut_id) for u in prepared.kept] == [
        (0, {"channel": 0}, "cut-rec-stereo-ch0-0.00-2.00"),
        (1, {"channel": 1}, "cut-rec-stereo-ch1-0.00-2.00"),
        ("downmix", {"channel": "downmix"}, "cut-rec-stereo-downmix-0.00-2.00"),
    ]
    assert prepared.result.totals.rejects == {"duplicate_id": 1}


def test_the_channel_of_a_source_is_for_audio_that_has_several(audio_root, tmp_path):
    records = [make_record(audio_filepath=name) for name in ("stereo.wav", "a.wav")]
    manifest = write_manifest(tmp_path / "m.json", records)
    source = {"manifest": str(manifest), "audio_root": str(audio_root)}
    kept = run_prepare(config_for(tmp_path / "0", [source | {"channel": 0}])).kept
    assert [(u.channel, u.recording_id) for u in kept] == [(0, "rec-stereo-ch0"), (None, "rec-a")]
    prepared = run_prepare(config_for(tmp_path / "1", [source | {"channel": 1}]))
    assert [u.channel for u in prepared.kept] == [1]
    assert prepared.result.totals.rejects == {"unsupported_channels": 1}


def test_of_mono_audio_the_key_channel_is_a_key_like_any_other(prepare_records, tmp_path):
    utterance = only(prepare_records(tmp_path, [make_record(channel=3)]))
    assert (utterance.channel, utterance.custom, utterance.cut_id) == (None, {"channel": 3}, "cut-rec-a-0.00-2.00")


def test_absolute_paths_anywhere_are_stored_without_the_slash(audio_root, tmp_path):
    paths = [str(audio_root / "a.wav"), "a.wav", str(audio_root / "link_out.wav")]
    manifest = write_manifest(tmp_path / "m.json", [make_record(audio_filepath=path) for path in paths])
    source = {"manifest": str(manifest), "audio_root": None}
    prepared = run_prepare(config_for(tmp_path, [source]))
    assert [u.audio_filepath for u in prepared.kept] == [paths[0][1:], paths[2][1:]]
    assert [reject["reason"] for reject in prepared.rejects] == ["outside_root"]


def test_a_list_of_audio_roots(audio_root, tmp_path):
    records = [make_record(audio_filepath=path)
               for path in ("a.wav", "c.flac", str(audio_root / "deep/c.flac"), str(audio_root / "a.wav"))]  # fmt: skip
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.wav").write_bytes((audio_root / "b.wav").read_bytes())
    manifest = write_manifest(tmp_path / "m.json", records)
    source = {"manifest": str(manifest), "audio_root": [str(other), str(audio_root / "deep")]}
    prepared = run_prepare(config_for(tmp_path, [source]))
    assert [(u.root, u.audio_filepath) for u in prepared.kept] == [(0, "a.wav"), (1, "c.flac")]
    assert sorted(reject["reason"] for reject in prepared.rejects) == ["duplicate_id", "outside_root"]
    assert {reject.get("source") for reject in prepared.rejects} == {0, None}


SPEED = {"name": "Speed", "kwargs": {"factor": "x"}}


@pytest.mark.parametrize(
    "keys",
    [
        {"id": "x", "sources": [{"type": "command", "channels": [0], "source": "true"}], "sampling_rate": 16000},
        {"storage_type": "pickle", "width": 1},
        {"extra": [{"id": "x", "sources": [], "sampling_rate": 10**15, "transforms": [SPEED | {"kwargs": {}}]}]},
        {"extra": [{"id": "x", "sources": [], "sampling_rate": 10**15, "transforms": [SPEED]}]},
        {"extra": [{"id": "x", "sources": [], "sampling_rate": 16000, "transforms": [SPEED]}]},
        {"extra": [{"id": "x", "sources": {"type": "file"}, "sampling_rate": 16000}]},
        {"extra": [{"id": "x", "tracks": [], "transforms": SPEED}]},
    ],
)
def test_keys_side_by_side_that_no_dataset_may_have(prepare_records, tmp_path, keys):
    write_tone(tmp_path / "audio/a.wav")
    prepared = prepare_records(tmp_path / "run", [make_record(**keys)], root=tmp_path / "audio")
    (reject,) = prepared.rejects
    assert (reject["reason"], "which no dataset may have" in reject["detail"]) == ("malformed", True)

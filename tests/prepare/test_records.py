"""Good records: text, further keys, segments, filters and sources."""

import json
import math

import pytest
from support.project import (
    Project,
    config_for,
    make_record,
    prepared_manifest,
    raises,
    run_prepare,
    speaker_tag,
    write_lines,
)

from sharmill.errors import ConfigError
from sharmill.prepare.check import parse_filters
from sharmill.shar.manifests import cut_json


def only(prepared):
    assert prepared.rejects == []
    (utterance,) = prepared.kept
    return utterance


def test_the_language_of_a_tag_is_written_as_nemo_reads_it(prepare_records, tmp_path):
    tag = "| Language:en-US Dataset:My Data Speaker:a-b |"
    utterance = only(prepare_records(tmp_path, [make_record(speaker=tag)]))
    written = utterance.speaker
    assert written.startswith("| Language:en_US Dataset:My_Data-")
    assert written.endswith(" Speaker:a-b |")
    assert utterance.custom["original_speaker"] == written.replace("en_US", "en-US")
    assert cut_json(utterance, sampling_rate=16000, num_samples=16000)["supervisions"][0]["language"] == "en-US"


@pytest.mark.parametrize("speaker", ["N/A", -1, math.nan, "| Language:N/A Dataset:None Speaker:unk |"])
def test_a_placeholder_may_become_an_unknown_speaker(speaker, audio_root, tmp_path):
    line = json.dumps(make_record(speaker=speaker, language="N/A", lang="de")).encode()
    source = {"manifest": str(write_lines(tmp_path / "m.json", [line])), "audio_root": str(audio_root)}
    prepared = run_prepare(config_for(tmp_path, [source], speaker_key="all"))
    utterance = only(prepared)
    assert utterance.speaker == "| Language:de Dataset:small Speaker:unknown |"
    assert utterance.custom == {"lang": "de"}
    assert prepared.stats["tag_from"] == {"none": 1}


FURTHER = {
    "normalized_text": "good day", "cer": 0.0, "big": 10**30, "none": None, "list": [1, {"a": "ü"}], "ключ": True,
    "context_audio_filepath": "x", "index": 5, "custom": {}, "source": "s", "_mine": 1,
}  # fmt: skip
GOOD = [
    # changes to a good record, options of prepare, expected parts of the utterance
    ({"text": "A.", "normalized_text": "B."}, {}, {"text": "A."}),
    ({"text": "  ", "normalized_text": "B."}, {}, {"text": "B."}),
    ({"text": None, "normalized_text": "B."}, {}, {"text": "B."}),
    ({"text": ..., "normalized_text": "B."}, {}, {"text": "B."}),
    ({"text": " A. "}, {}, {"text": " A. "}),
    ({"text": ..., "tts_text": "A.", "tts_text_normalized": "a"}, {}, {"text": "A."}),
    ({"text": "", "tts_text_normalized": "a"}, {}, {"text": "a"}),
    ({"normalized_text": "B.", "tts_text": "A."}, {}, {"text": "Good day."}),
    ({"text": ...}, {"require_text": False}, {"text": ""}),
    ({"text": None, "normalized_text": " "}, {"require_text": False}, {"text": ""}),
    (FURTHER, {}, {"custom": FURTHER}),
    ({"_source": 9, "_index": 3, "_cut_id": "x", "_skipme": False}, {},
     {"root": 0, "index": -1, "cut_id": "cut-rec-a-0.00-2.00", "custom": {}}),
    ({"source_cut_id": "x"}, {}, {"cut_id": "cut-rec-a-0.00-2.00", "custom": {}}),
    ({"duration": 1.91}, {}, {"whole_file": True, "offset": 0.0, "duration": 1.91}),
    ({"duration": 2.09}, {}, {"whole_file": True, "duration": 2.09}),
    ({"offset": 0.123456, "duration": 1}, {}, {"whole_file": False, "offset": 0.123456, "duration": 1.0}),
    ({"offset": -0.0, "duration": 1.0}, {}, {"whole_file": False, "cut_id": "cut-rec-a-0.00-1.00"}),
    ({"duration": 0.1, "offset": 0.0}, {}, {"duration": 0.1}),
    ({"duration": 1.0, "offset": 0.0}, {"max_duration": 1.0}, {"duration": 1.0}),
    ({"audio_filepath": "link_in.wav"}, {}, {"audio_filepath": "link_in.wav"}),
    ({"channel": 3}, {}, {"channel": None, "custom": {"channel": 3}, "cut_id": "cut-rec-a-0.00-2.00"}),
    ({"cer": 0.01, "snr": 30}, {"filters": {"cer": "<= 0.03", "snr": "> 20", "duration": ">= 2"}}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "options", "expected"), GOOD)
def test_what_becomes_of_a_good_record(changes, options, expected, prepare_records, tmp_path):
    utterance = only(prepare_records(tmp_path, [make_record(**changes)], **options))
    found = {name: getattr(utterance if hasattr(utterance, name) else utterance.segment, name) for name in expected}
    assert found == expected


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


@pytest.mark.parametrize("text", ["", "0.03", "=< 3", "<=", "<= x", "<= nan", "< 1 > 0", "~ 3"])
def test_filter_that_is_no_comparison(text):
    with raises(ConfigError, "bad_config_value", "prepare.filters.cer", repr(text)):
        parse_filters({"cer": text})


def test_output_has_the_order_of_the_input_whatever_the_units(prepare_records, tmp_path):
    records = [
        make_record(offset=round(1 - 0.1 * number, 1), duration=0.5, speaker=speaker_tag(number % 3))
        for number in range(7)
    ]
    outputs = []
    for size in (1, 3, 100):
        prepared = prepare_records(tmp_path / str(size), records, unit_records=size)
        outputs.append((prepared_manifest(prepared.config).read_bytes(), prepared.stats))
    assert [json.loads(line)["offset"] for line in outputs[0][0].splitlines()] == [r["offset"] for r in records]
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_missing_relative_audio_root_is_told_with_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manifest = write_lines(tmp_path / "m.json", [make_record()])
    with raises(ConfigError, "missing_input", "audio", str(tmp_path)):
        run_prepare(config_for(tmp_path, [(manifest, "audio")]))


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
    manifest = write_lines(tmp_path / "m.json", [record])
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
        assert (utterance.segment.audio_filepath, utterance.text, utterance.speaker) == (
            "deep/c.flac",
            record["text"],
            tag,
        )
        assert prepared.stats["tag_from"] == {origin: 1}


def test_a_missing_duration_comes_from_the_header(prepare_records, tmp_path):
    records = [make_record(duration=...), make_record(duration=None, offset=0.5)]
    prepared = prepare_records(tmp_path, records)
    assert [(u.segment.duration, u.segment.offset, u.segment.whole_file, u.custom) for u in prepared.kept] == [
        (2.0, 0.0, True, {"duration_from_header": True}),
        (1.5, 0.5, False, {"duration_from_header": True}),
    ]
    assert prepared.stats["duration_from"] == {"header": 2}


def test_two_channels_of_a_file_are_two_records(prepare_records, tmp_path):
    records = [make_record(audio_filepath="stereo.wav", channel=channel) for channel in (0, 1, "downmix", 1)]
    prepared = prepare_records(tmp_path, records)
    assert [(u.segment.channel, u.custom, u.cut_id) for u in prepared.kept] == [
        (0, {"channel": 0}, "cut-rec-stereo-ch0-0.00-2.00"),
        (1, {"channel": 1}, "cut-rec-stereo-ch1-0.00-2.00"),
        ("downmix", {"channel": "downmix"}, "cut-rec-stereo-downmix-0.00-2.00"),
    ]
    assert prepared.result.totals.rejects == {"duplicate_id": 1}


def test_the_channel_of_a_source_is_for_audio_that_has_several(audio_root, tmp_path):
    records = [make_record(audio_filepath=name) for name in ("stereo.wav", "a.wav")]
    manifest = write_lines(tmp_path / "m.json", records)
    source = {"manifest": str(manifest), "audio_root": str(audio_root)}
    kept = run_prepare(config_for(tmp_path / "0", [source | {"channel": 0}])).kept
    assert [(u.segment.channel, u.recording_id) for u in kept] == [(0, "rec-stereo-ch0"), (None, "rec-a")]
    prepared = run_prepare(config_for(tmp_path / "1", [source | {"channel": 1}]))
    assert [u.segment.channel for u in prepared.kept] == [1]
    assert prepared.result.totals.rejects == {"unsupported_channels": 1}


def test_absolute_paths_anywhere_are_stored_without_the_slash(audio_root, tmp_path):
    paths = [str(audio_root / "a.wav"), "a.wav", str(audio_root / "link_out.wav")]
    manifest = write_lines(tmp_path / "m.json", [make_record(audio_filepath=path) for path in paths])
    source = {"manifest": str(manifest), "audio_root": None}
    prepared = run_prepare(config_for(tmp_path, [source]))
    assert [u.segment.audio_filepath for u in prepared.kept] == [paths[0][1:], paths[2][1:]]
    assert [reject["reason"] for reject in prepared.rejects] == ["outside_root"]


def test_a_list_of_audio_roots(audio_root, tmp_path):
    records = [make_record(audio_filepath=path)
               for path in ("a.wav", "c.flac", str(audio_root / "deep/c.flac"), str(audio_root / "a.wav"))]  # fmt: skip
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.wav").write_bytes((audio_root / "b.wav").read_bytes())
    manifest = write_lines(tmp_path / "m.json", records)
    source = {"manifest": str(manifest), "audio_root": [str(other), str(audio_root / "deep")]}
    prepared = run_prepare(config_for(tmp_path, [source]))
    assert [(u.segment.root, u.segment.audio_filepath) for u in prepared.kept] == [(0, "a.wav"), (1, "c.flac")]
    assert sorted(reject["reason"] for reject in prepared.rejects) == ["duplicate_id", "outside_root"]
    assert {reject.get("source") for reject in prepared.rejects} == {0, None}


def test_a_manifest_whose_name_has_what_cannot_be_printed(tmp_path):
    project = Project(tmp_path).add_voices([0.4])
    manifest = write_lines(tmp_path / "my\u00a0recordings\n.json", project.records)
    config = project.configure(sources=[(manifest, project.root)])
    assert len(project.prepare(config)) == 1
    assert prepared_manifest(config).name == "my_recordings__prepared.json"

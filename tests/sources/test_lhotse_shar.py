"""Shars as sources: records for cuts and their audio, and rejects for damaged files."""

import gzip
import json
import math
import shutil

import numpy as np
import pytest
from lhotse import CutSet, MonoCut, MultiCut, Recording, SupervisionSegment
from support.project import (
    DATA,
    config_for,
    lines,
    members_of,
    put,
    raises,
    run_prepare,
    voice,
    write_lines,
    write_members,
)
from support.sources import read, read_raw

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.shar.items import ItemTable
from sharmill.sources import DescribedRecord, UnreadableRecord
from sharmill.sources.lhotse_shar import LhotseSharSource


def source_of(folder, **keys):
    return LhotseSharSource(shar=str(folder), **keys)


@pytest.fixture
def dataset(project):
    """A dataset of four cuts in two shards, the last one from the middle of a file."""
    for number in range(3):
        project.add(f"{number}.flac", voice(1.0 + number / 10, seed=number), cer=number / 100)
    project.add("0.flac", duration=0.5, offset=0.25, speaker="bert")
    project.write(write={"shard_size": 2, "order": "manifest"}, match={"min_duration": 0.0})
    return project.dataset


@pytest.fixture
def lhotse_shar(tmp_path):
    """lhotse's own layout: five cuts in shards of two, the third from the middle of its recording."""
    cuts = []
    for number in range(5):
        recording = Recording.from_file(put(tmp_path / f"audio/{number}.wav", voice(1.0 + number / 10, seed=number)))
        start, duration = (0.25, 0.5) if number == 2 else (0.0, recording.duration)
        supervision = SupervisionSegment(
            f"sup-{number}", recording.id, 0.0, duration, text=f"text {number}", speaker="anna", language="en",
            custom={"cer": 0.5, "nested": [1]},
        )  # fmt: skip
        cut = MonoCut(f"cut.{number}", start, duration, 0, supervisions=[supervision], recording=recording)
        cut.snr = float("nan") if number == 4 else 20.0
        cuts.append(cut)
    (tmp_path / "shar").mkdir()
    CutSet.from_cuts(cuts).to_shar(tmp_path / "shar", {"recording": "flac"}, shard_size=2)
    return tmp_path / "shar"


class TestRecords:
    def test_of_a_dataset_have_manifest_keys_but_no_context(self, dataset):
        found = read(source_of(dataset))
        cuts = list(open_shar(dataset))
        assert found[3] == {
            "audio_filepath": f"target_audio/recording.000001.tar/{cuts[3].id}.flac",
            "duration": 0.5,
            "text": "text of 0.flac",
            "speaker": "| Language:en Dataset:Tests Speaker:bert |",
            "language": "en",
            "source_audio_filepath": "0.flac",
            "source_offset": 0.25,
            "utterance_id": cuts[3].id,
        }
        assert [record.get("cer") for record in found] == [0.0, 0.01, 0.02, None]

    def test_of_lhotses_layout(self, lhotse_shar):
        found = read(source_of(lhotse_shar))
        assert [record["audio_filepath"] for record in found] == [
            f"recording.00000{number // 2}.tar/cut.{number}.flac" for number in range(5)
        ]
        assert found[2] == {
            "audio_filepath": "recording.000001.tar/cut.2.flac", "duration": 0.5, "text": "text 2", "speaker": "anna",
            "language": "en", "cer": 0.5, "nested": [1], "snr": 20.0, "utterance_id": "cut.2",
        }  # fmt: skip
        assert math.isnan(found[4]["snr"])

    def test_are_those_that_lhotse_reads(self, lhotse_shar):
        theirs = list(CutSet.from_shar(in_dir=lhotse_shar))
        prepared = run_prepare(
            config_for(lhotse_shar.parent, [{"type": "lhotse_shar", "shar": str(lhotse_shar)}], speaker_key="speaker")
        )
        reader = SegmentReader(AudioRoots.of([lhotse_shar]), 0.1)
        assert len(prepared.kept) == len(theirs) == 5
        for utterance, cut in zip(prepared.kept, theirs, strict=True):
            np.testing.assert_array_equal(reader.read(utterance.segment).samples, cut.load_audio()[0])
            assert (utterance.text, utterance.segment.duration) == (cut.supervisions[0].text, cut.duration)
            assert utterance.custom["utterance_id"] == cut.id
            assert utterance.speaker == "| Language:en Dataset:small Speaker:anna |"

    def test_of_a_stretch_of_the_stored_audio_have_an_offset(self, lhotse_shar):
        path = lhotse_shar / "cuts.000000.jsonl.gz"
        first, second = lines(path)
        first |= {"start": 0.25, "duration": 0.5}
        second |= {"start": 0.25, "duration": 0.9}
        write_lines(path, [first, second])
        inside, beyond = read_raw(source_of(lhotse_shar))[:2]
        assert (json.loads(inside.record)["offset"], json.loads(inside.record)["duration"]) == (0.25, 0.5)
        assert (beyond.reason, "0.25 to 1.15 s" in beyond.detail) == ("duration_mismatch", True)

    def test_of_several_channels(self, tmp_path):
        stereo = np.stack([voice(1.0, seed=1), voice(1.0, seed=2)], axis=1)
        recording = Recording.from_file(put(tmp_path / "call.wav", stereo))
        whole = MultiCut("both", 0.0, 1.0, [0, 1], recording=recording)
        (tmp_path / "shar").mkdir()
        CutSet.from_cuts([whole]).to_shar(tmp_path / "shar", {"recording": "wav"})
        (record,) = read(source_of(tmp_path / "shar"))
        assert "channel" not in record
        (cut,) = lines(tmp_path / "shar/cuts.000000.jsonl.gz")
        write_lines(tmp_path / "shar/cuts.000000.jsonl.gz", [cut | {"type": "MonoCut", "channel": 1}])
        config = config_for(tmp_path, [{"type": "lhotse_shar", "shar": str(tmp_path / "shar")}], speaker_key="all",
                            prepare={"require_text": False})  # fmt: skip
        (utterance,) = run_prepare(config).kept
        samples = SegmentReader(AudioRoots.of([tmp_path / "shar"]), 0.1).read(utterance.segment).samples
        np.testing.assert_array_equal(samples, stereo[:, 1])


@pytest.mark.skipif(not DATA.is_dir(), reason="needs real speech in ../shared/data, which is not in the repository")
def test_the_published_layout():
    folder = DATA / "published_segments"
    found = read(source_of(folder))
    cuts = list(open_shar(folder, ["target_audio"]))
    manifest = [json.loads(line) for line in (folder / "extended_manifest.json").read_text().splitlines()]
    assert len(found) == len(cuts) == len(manifest) == 24
    offsets = {record["utterance"]: record["offset"] for record in manifest}
    for record, cut in zip(found, cuts, strict=True):
        assert "offset" not in record
        assert record["source_offset"] == offsets[record["utterance"]]
        assert record["source_audio_filepath"] == cut.recording.sources[0].source or cut.target_audio is not None
        assert (record["text"], record["utterance_id"]) == (cut.supervisions[0].text, cut.id)
        assert not any(key.startswith("context_") for key in record)


def reasons(source):
    return [raw.reason if isinstance(raw, UnreadableRecord) else "ok" for raw in read_raw(source)]


class TestDamage:
    def test_of_a_tar_that_is_cut_off_loses_what_is_cut_off(self, lhotse_shar):
        tar = lhotse_shar / "recording.000000.tar"
        tar.write_bytes(tar.read_bytes()[: 512 * 40])
        source = source_of(lhotse_shar)
        source.check()
        assert reasons(source) == ["unreadable_audio", "unreadable_audio", "ok", "ok", "ok"]

    def test_behind_a_member_leaves_that_member(self, lhotse_shar):
        tar = lhotse_shar / "recording.000001.tar"
        start, size = ItemTable(tar).place(2)
        tar.write_bytes(tar.read_bytes()[: start + size // 2])
        found = read_raw(source_of(lhotse_shar))
        assert [isinstance(raw, DescribedRecord) for raw in found] == [True, True, True, False, True]
        assert "cut off" in found[3].detail
        assert json.loads(found[3].record)["audio_filepath"] == "recording.000001.tar/cut.3"

    def test_of_members(self, lhotse_shar):
        tar = lhotse_shar / "recording.000000.tar"
        one, one_json, two, two_json = members_of(tar)
        for members, expected in (
            ([two, two_json], ["missing_audio", "ok"]),
            ([one, one_json, ("cut.1.nodata", b""), ("cut.1.nometa", b"")], ["ok", "missing_audio"]),
            ([one, one_json, two, two_json, one, one_json], ["malformed", "ok"]),
            ([one, two, two_json], ["malformed", "ok"]),
            ([one, (one_json[0], b"[]"), two, two_json], ["malformed", "ok"]),
            ([one, one_json, two, (two_json[0], b'{"shape": [1]}')], ["ok", "malformed"]),
            # Members without a cut are ignored.
            ([one, one_json, two, two_json, ("x.flac", b"1"), ("x.json", b"{}")], ["ok", "ok"]),
        ):
            write_members(tar, members)
            assert reasons(source_of(lhotse_shar))[:2] == expected

    def test_of_cuts_that_are_cut_off_counts_the_rest_as_one(self, lhotse_shar):
        cuts = lhotse_shar / "cuts.000000.jsonl.gz"
        content = gzip.decompress(cuts.read_bytes())
        stored = gzip.compress(content, compresslevel=0)
        cuts.write_bytes(stored[: len(stored) - 300])
        source = source_of(lhotse_shar)
        found = read_raw(source)
        assert reasons(source) == ["ok", "malformed", "ok", "ok", "ok"]
        assert (found[1].record, "cut off" in found[1].detail) == ("cuts.000000.jsonl.gz line 2", True)

    def test_of_cuts_of_a_dataset_counts_all_that_the_index_says(self, dataset):
        cuts = dataset / "cuts/cuts.000001.jsonl.gz"
        cuts.write_bytes(cuts.read_bytes()[:30])
        assert reasons(source_of(dataset)) == ["ok", "ok", "malformed", "malformed"]
        write_lines(cuts, [])
        found = read_raw(source_of(dataset))
        assert "has 0 cuts instead of 2" in found[2].detail
        cuts.unlink()
        assert reasons(source_of(dataset)) == ["ok", "ok", "malformed", "malformed"]


@pytest.mark.parametrize("field", ["cuts", "target_audio"])
def test_a_shard_without_a_field_in_the_index_is_refused(field, dataset):
    shards = lines(dataset / "shards.jsonl")
    shards[1]["fields"].pop(field)
    write_lines(dataset / "shards.jsonl", shards)
    with raises(ConfigError, "bad_manifest", f"shard 1 of {dataset} has no {field}; copy the Shar again"):
        source_of(dataset).identity()


def test_folders_that_are_no_shar(tmp_path, dataset, lhotse_shar):
    def double():
        for path in lhotse_shar.glob("recording*"):
            shutil.copy(path, lhotse_shar / path.name.replace("recording", "target_audio"))

    def rename():
        for path in [*lhotse_shar.glob("recording*"), *lhotse_shar.glob("target_audio*")]:
            path.rename(lhotse_shar / path.name.replace("recording", "speech").replace("target_audio", "answer"))

    for change, folder, code, says in (
        (lambda: None, tmp_path / "nothing", "missing_input", ["nothing"]),
        (lambda: None, tmp_path / "audio", "bad_layout", ["has no cuts"]),
        ((dataset / "dataset.json").unlink, dataset, "no_dataset", ["dataset.json"]),
        ((dataset / "shards.jsonl").unlink, dataset, "no_dataset", ["Finish the run"]),
        (double, lhotse_shar, "unknown_field", ["both", "recording, target_audio"]),
        (rename, lhotse_shar, "unknown_field", ["neither", "answer, speech"]),
    ):
        change()
        with raises(ConfigError, code, *says):
            source_of(folder).check()
    assert len(read_raw(source_of(lhotse_shar, audio="speech"))) == 5

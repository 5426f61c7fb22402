"""Shars as sources: what becomes of cuts and their audio, and of files that are damaged."""

from __future__ import annotations

import gzip
import json
import shutil

import numpy as np
import pytest
from lhotse import CutSet, MonoCut, MultiCut, Recording, SupervisionSegment
from support.errors import raises
from support.manifests import config_for, run_prepare
from support.paths import DATA
from support.shar import lines, members_of, put, rewrite, voice, write_members

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.shar.tar import TarTable
from sharmill.sources import Located, Unreadable
from sharmill.sources.lhotse_shar import LhotseSharSource

SAID = {"id": "s", "recording_id": "r", "start": 0.0, "duration": 1.0}


def source_of(folder, **keys):
    return LhotseSharSource(shar=str(folder), **keys)


def read(source, size=100):
    pieces = list(source.pieces(size))
    found = [list(source.read(piece.params)) for piece in pieces]
    assert [piece.num_records for piece in pieces] == [len(piece) for piece in found]
    return [raw for piece in found for raw in piece]


def records(source, size=100):
    return [json.loads(raw.record) for raw in read(source, size)]


def bytes_of(folder, raw):
    container = (folder / raw.member.container).read_bytes()
    return container[raw.member.start : raw.member.start + raw.member.size]


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
    """lhotse's own layout: five cuts in shards of two, the third one from the middle of its recording."""
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
    def test_of_a_dataset_have_the_keys_of_the_manifest_and_no_context(self, dataset):
        found = records(source_of(dataset))
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

    @pytest.mark.parametrize("size", [1, 3, 100])
    def test_name_the_bytes_in_the_tars(self, size, dataset):
        tars = [dataset / f"target_audio/recording.00000{shard}.tar" for shard in range(2)]
        stored = [data for tar in tars for name, data in members_of(tar) if name.endswith(".flac")]
        assert [bytes_of(dataset, raw) for raw in read(source_of(dataset), size)] == stored

    def test_of_contexts_are_those_of_the_field(self, dataset):
        found = read(source_of(dataset, audio="context_audio"))
        cuts = list(open_shar(dataset))
        assert [len(cut.load_context_audio()[0]) for cut in cuts] == [17600, 19200, 8000, 16000]
        assert bytes_of(dataset, found[0]) == cuts[0].context_audio.sources[0].source

    def test_of_lhotses_layout(self, lhotse_shar):
        found = records(source_of(lhotse_shar))
        assert [record["audio_filepath"] for record in found] == [
            f"recording.00000{number // 2}.tar/cut.{number}.flac" for number in range(5)
        ]
        assert found[2] == {
            "audio_filepath": "recording.000001.tar/cut.2.flac", "duration": 0.5, "text": "text 2", "speaker": "anna",
            "language": "en", "cer": 0.5, "nested": [1], "snr": 20.0, "utterance_id": "cut.2",
        }  # fmt: skip
        assert found[4]["snr"] is None

    def test_are_those_that_lhotse_reads(self, lhotse_shar):
        theirs = list(CutSet.from_shar(in_dir=lhotse_shar))
        prepared = run_prepare(
            config_for(lhotse_shar.parent, [{"type": "lhotse_shar", "shar": str(lhotse_shar)}], speaker_key="speaker")
        )
        reader = SegmentReader(AudioRoots.of([lhotse_shar]), 0.1)
        assert len(prepared.kept) == len(theirs) == 5
        for utterance, cut in zip(prepared.kept, theirs, strict=True):
            np.testing.assert_array_equal(reader.read(utterance.segment).samples, cut.load_audio()[0])
            assert (utterance.text, utterance.duration) == (cut.supervisions[0].text, cut.duration)
            assert utterance.custom["utterance_id"] == cut.id
            assert utterance.speaker == "| Language:en Dataset:small Speaker:anna |"

    def test_of_a_stretch_of_the_stored_audio_have_an_offset(self, lhotse_shar):
        path = lhotse_shar / "cuts.000000.jsonl.gz"
        first, second = lines(path)
        first |= {"start": 0.25, "duration": 0.5}
        second |= {"start": 0.25, "duration": 0.9}
        rewrite(path, [first, second])
        inside, beyond = read(source_of(lhotse_shar))[:2]
        assert (json.loads(inside.record)["offset"], json.loads(inside.record)["duration"]) == (0.25, 0.5)
        assert (beyond.reason, "0.25 to 1.15 s" in beyond.detail) == ("duration_mismatch", True)

    def test_of_several_channels(self, tmp_path):
        stereo = np.stack([voice(1.0, seed=1), voice(1.0, seed=2)], axis=1)
        recording = Recording.from_file(put(tmp_path / "call.wav", stereo))
        whole = MultiCut("both", 0.0, 1.0, [0, 1], recording=recording)
        (tmp_path / "shar").mkdir()
        CutSet.from_cuts([whole]).to_shar(tmp_path / "shar", {"recording": "wav"})
        (record,) = records(source_of(tmp_path / "shar"))
        assert "channel" not in record
        (cut,) = lines(tmp_path / "shar/cuts.000000.jsonl.gz")
        rewrite(tmp_path / "shar/cuts.000000.jsonl.gz", [cut | {"type": "MonoCut", "channel": 1}])
        config = config_for(tmp_path, [{"type": "lhotse_shar", "shar": str(tmp_path / "shar")}], speaker_key="all",
                            prepare={"require_text": False})  # fmt: skip
        (utterance,) = run_prepare(config).kept
        samples = SegmentReader(AudioRoots.of([tmp_path / "shar"]), 0.1).read(utterance.segment).samples
        np.testing.assert_array_equal(samples, stereo[:, 1])


@pytest.mark.skipif(not DATA.is_dir(), reason="needs real speech in ../shared/data, which is not in the repository")
def test_the_published_layout():
    folder = DATA / "published_segments"
    found = records(source_of(folder))
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
    return [raw.reason if isinstance(raw, Unreadable) else "ok" for raw in read(source)]


class TestDamage:
    def test_of_a_tar_that_is_cut_off_loses_what_is_cut_off(self, lhotse_shar):
        tar = lhotse_shar / "recording.000000.tar"
        tar.write_bytes(tar.read_bytes()[: 512 * 40])
        source = source_of(lhotse_shar)
        source.check()
        assert reasons(source) == ["unreadable_audio", "unreadable_audio", "ok", "ok", "ok"]

    def test_behind_a_member_leaves_that_member(self, lhotse_shar):
        tar = lhotse_shar / "recording.000001.tar"
        with TarTable(tar) as table:
            start, size = table.place(2)
        tar.write_bytes(tar.read_bytes()[: start + size // 2])
        found = read(source_of(lhotse_shar))
        assert [isinstance(raw, Located) for raw in found] == [True, True, True, False, True]
        assert "cut off" in found[3].detail
        assert json.loads(found[3].record)["audio_filepath"] == "recording.000001.tar/cut.3"

    def test_of_a_tar_that_is_missing_or_no_tar(self, lhotse_shar):
        source = source_of(lhotse_shar)
        source.identity()
        (lhotse_shar / "recording.000001.tar").unlink()
        (lhotse_shar / "recording.000002.tar").write_bytes(b"no tar")
        assert reasons(source) == ["ok", "ok", "missing_audio", "missing_audio", "unreadable_audio"]

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
            # Members of no cut are left aside.
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
        found = read(source)
        assert reasons(source) == ["ok", "malformed", "ok", "ok", "ok"]
        assert (found[1].record, "cut off" in found[1].detail) == ("cuts.000000.jsonl.gz line 2", True)

    def test_of_cuts_of_a_dataset_counts_all_that_the_index_says(self, dataset):
        cuts = dataset / "cuts/cuts.000001.jsonl.gz"
        cuts.write_bytes(cuts.read_bytes()[:30])
        assert reasons(source_of(dataset)) == ["ok", "ok", "malformed", "malformed"]
        rewrite(cuts, [])
        found = read(source_of(dataset))
        assert "has 0 cuts, and there should be 2" in found[2].detail
        cuts.unlink()
        assert reasons(source_of(dataset)) == ["ok", "ok", "malformed", "malformed"]

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"id": 3}, "malformed"),
            ({"start": "x"}, "malformed"),
            ({"supervisions": [3]}, "malformed"),
            ({"type": "MixedCut"}, "unsupported_cut"),
            ({"supervisions": [SAID | {"speaker": "a"}, SAID | {"speaker": "b"}]}, "unsupported_cut"),
            ({"duration": 9.0}, "duration_mismatch"),
        ],
    )
    def test_of_one_cut_is_one_reject(self, change, reason, lhotse_shar):
        path = lhotse_shar / "cuts.000000.jsonl.gz"
        first, second = lines(path)
        rewrite(path, [first | change, second])
        assert reasons(source_of(lhotse_shar)) == [reason, *["ok"] * 4]

    def test_of_the_json_of_one_cut_is_one_reject(self, lhotse_shar):
        path = lhotse_shar / "cuts.000000.jsonl.gz"
        _, second = lines(path)
        path.write_bytes(gzip.compress(b"[" * 100_000 + b"\n" + json.dumps(second).encode() + b"\n"))
        assert reasons(source_of(lhotse_shar)) == ["malformed", *["ok"] * 4]

    def test_is_noticed_between_two_runs(self, dataset):
        source = source_of(dataset)
        before = source.identity()
        assert before == source_of(dataset).identity()
        tar = dataset / "target_audio/recording.000000.tar"
        tar.write_bytes(tar.read_bytes() + bytes(512))
        assert source_of(dataset).identity() != before


def test_audio_that_transforms_would_change_is_rejected(lhotse_shar):
    tar = lhotse_shar / "recording.000000.tar"
    audio, (name, metadata), *rest = members_of(tar)
    speed = json.loads(metadata) | {"transforms": [{"name": "Speed", "kwargs": {"factor": 1.1}}]}
    write_members(tar, [audio, (name, json.dumps(speed).encode()), *rest])
    found = read(source_of(lhotse_shar))
    assert (found[0].reason, "transforms" in found[0].detail) == ("unsupported_cut", True)


@pytest.mark.parametrize(
    ("keys", "code", "names"),
    [
        ({"audio": "target_adio"}, "unknown_field", ["did you mean 'target_audio'"]),
        ({"audio": "codes_toy/target_codes"}, "bad_config_value", ["not audio"]),
        ({"audio_root": "/elsewhere"}, "bad_config_value", ["audio root"]),
    ],
)
def test_keys_that_make_no_sense(keys, code, names, project):
    for number in range(2):
        project.add(f"{number}.flac", voice(1.0, seed=number))
    project.encode(project.write(match={"min_duration": 0.0}))
    with raises(ConfigError, code, *names):
        source_of(project.dataset, **keys).check()


def test_folders_that_are_no_shar(tmp_path, dataset, lhotse_shar):
    with raises(ConfigError, "missing_input", "nothing"):
        source_of(tmp_path / "nothing").check()
    with raises(ConfigError, "bad_layout", "has no cuts"):
        source_of(tmp_path / "audio").check()
    (dataset / "dataset.json").unlink()
    with raises(ConfigError, "no_dataset", "dataset.json"):
        source_of(dataset).check()
    (dataset / "shards.jsonl").unlink()
    with raises(ConfigError, "no_dataset", "Finish the run"):
        source_of(dataset).check()
    for path in lhotse_shar.glob("recording*"):
        shutil.copy(path, lhotse_shar / path.name.replace("recording", "target_audio"))
    with raises(ConfigError, "unknown_field", "both", "recording, target_audio"):
        source_of(lhotse_shar).check()
    for path in [*lhotse_shar.glob("recording*"), *lhotse_shar.glob("target_audio*")]:
        path.rename(lhotse_shar / path.name.replace("recording", "speech").replace("target_audio", "answer"))
    with raises(ConfigError, "unknown_field", "neither", "answer, speech"):
        source_of(lhotse_shar).check()
    assert len(read(source_of(lhotse_shar, audio="speech"))) == 5


def test_a_template_with_a_key_that_no_cut_has(lhotse_shar):
    with raises(ConfigError, "unknown_key", "utterance_idd", "did you mean 'utterance_id'"):
        source_of(lhotse_shar, speaker="{utterance_idd}").check_speaker()

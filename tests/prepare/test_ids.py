"""Ids are unique, and do not depend on the order of the input."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises
from support.manifests import config_for, make_record, run_prepare, write_manifest, write_tone

from sharmill.errors import ConfigError
from sharmill.manifest import Utterance, canonical_id, recording_id, segment_id
from sharmill.prepare.ids import HASH_FIELDS, IdKeeper, find_suspects, hash_utterance


@pytest.fixture
def ids(prepare_records, tmp_path):
    """Returns a function: (path, offset, duration) of some records -> their (recording id, cut id) by this triple."""

    def prepare(segments, folder="run0"):
        root = tmp_path / "audio"
        for path, _, _ in segments:
            if not (root / path).exists():
                write_tone(root / path)
        records = [
            make_record(audio_filepath=path, offset=offset, duration=seconds) for path, offset, seconds in segments
        ]
        prepared = prepare_records(tmp_path / folder, records, root=root, unit_records=2)
        assert prepared.rejects == []
        return {(u.audio_filepath, u.offset, u.duration): (u.recording_id, u.cut_id) for u in prepared.kept}

    return prepare


def test_ordinary_ids_have_no_suffix(ids):
    assert ids([("x/a.wav", 0.0, 1.0), ("x/b.wav", 0.25, 1.5)]) == {
        ("x/a.wav", 0.0, 1.0): ("rec-x-a", "cut-rec-x-a-0.00-1.00"),
        ("x/b.wav", 0.25, 1.5): ("rec-x-b", "cut-rec-x-b-0.25-1.50"),
    }


@pytest.mark.parametrize(
    "segments",
    [
        [("a.wav", 0.0, 1.0), ("a.flac", 0.0, 1.0), ("c.wav", 0.0, 1.0)],
        [("a/b.wav", 0.0, 1.0), ("a-b.wav", 0.0, 1.0), ("c.wav", 0.0, 1.0)],
        [("a.wav", 0.001, 1.0), ("a.wav", 0.004, 1.0), ("c.wav", 0.0, 1.0)],
        [("a.wav", 0.5, 1.001), ("a.wav", 0.5, 1.004), ("c.wav", 0.0, 1.0)],
        [("a.wav", 0.001, 1.0), ("a.wav", 0.004, 1.0), ("a.flac", 0.004, 1.0), ("c.wav", 0.0, 1.0)],
    ],
    ids=["extension", "slash", "rounded offset", "rounded duration", "both"],
)
def test_ambiguous_ids_are_made_unique_in_any_order(segments, ids):
    forwards, backwards = ids(segments), ids(segments[::-1], "run1")
    assert forwards == backwards
    assert len({cut for _, cut in forwards.values()}) == len(segments)
    assert len({recording for recording, _ in forwards.values()}) == len({path for path, _, _ in segments})
    assert forwards["c.wav", 0.0, 1.0] == ("rec-c", "cut-rec-c-0.00-1.00")


def test_ambiguous_ids_begin_as_they_would_without_a_suffix(ids):
    for recording, cut in ids([("a.wav", 0.0, 1.0), ("a.flac", 0.0, 1.0)]).values():
        assert recording.startswith("rec-a-")
        assert len(recording) == len("rec-a-") + 16
        assert cut == f"cut-{recording}-0.00-1.00"


class TestKeptIds:
    @pytest.fixture
    def kept(self, tmp_path):
        """Returns a function: (id, path, offset) of cuts of a second -> (ids as they were, cut ids), rejects."""

        def prepare(*cuts, folder="run"):
            lines = []
            for own, path, offset in cuts:
                write_tone(tmp_path / "audio" / path, 2.0)
                recording = {"id": path, "sources": [{"type": "file", "channels": [0], "source": path}],
                             "sampling_rate": 16000, "num_samples": 32000, "duration": 2.0}  # fmt: skip
                said = {"id": "s", "recording_id": path, "start": 0.0, "duration": 1.0, "text": "YES", "speaker": "a"}
                lines.append({"id": own, "start": offset, "duration": 1.0, "channel": 0, "supervisions": [said],
                              "recording": recording, "type": "MonoCut"})  # fmt: skip
            path = write_manifest(tmp_path / folder / "cuts.jsonl", lines)
            entry = {"type": "lhotse", "cuts": str(path), "audio_root": str(tmp_path / "audio"), "keep_ids": True}
            prepared = run_prepare(config_for(tmp_path / folder, [entry], prepare={"unit_records": 2}))
            found = [(u.custom["source_cut_id"], u.cut_id) for u in prepared.kept]
            return found, [reject["reason"] for reject in prepared.rejects]

        return prepare

    def test_plain_ids_stay_and_others_are_made_canonical(self, kept):
        found, rejects = kept(("84-1", "x/a.wav", 0.0), ("call 7/a", "x/a.wav", 0.5), ("", "b.wav", 0.0),
                              ("l" * 300, "b.wav", 0.5), ("\u00e4.1", "b.wav", 1.0))  # fmt: skip
        assert rejects == []
        ids = [cut for _, cut in found]
        assert ids[0] == "84-1"
        assert ids[1].startswith("call_7_a-")
        assert ids[4] == "\u00e4.1"
        assert [len(cut) for cut in ids[2:4]] == [17, 67]
        assert len(set(ids)) == 5
        assert [own for own, _ in found] == ["84-1", "call 7/a", "", "l" * 300, "\u00e4.1"]

    def test_equal_ids_are_never_merged_in_any_order(self, kept):
        blank = canonical_id("a b")
        cuts = [("same", "a.wav", 0.0), ("same", "b.wav", 0.0), ("same", "b.wav", 0.5), ("a b", "a.wav", 0.5),
                (blank, "b.wav", 1.0), ("own", "a.wav", 1.0)]  # fmt: skip
        (found, rejects), (backwards, _) = kept(*cuts), kept(*cuts[::-1], folder="other")
        assert rejects == []
        assert sorted(found) == sorted(backwards)
        assert len({cut for _, cut in found}) == 6
        assert [cut.rpartition("-")[0] for _, cut in found[:5]] == ["same"] * 3 + [blank] * 2
        assert found[5] == ("own", "own")

    def test_one_segment_is_a_duplicate_under_any_id(self, kept):
        found, rejects = kept(("x", "a.wav", 0.0), ("y", "a.wav", 0.0), ("x", "a.wav", 0.0))
        assert (found, rejects) == ([("x", "x")], ["duplicate_id"] * 2)

    def test_sources_that_keep_ids_and_others_do_not_mix(self, tmp_path):
        keeps = {"type": "lhotse", "cuts": "c.jsonl", "audio_root": "audio", "keep_ids": True}
        with raises(ConfigError, "bad_config_value", "keep_ids must be the same for all sources"):
            config_for(tmp_path, [keeps, {"manifest": "m.json", "audio_root": "audio"}])


def test_the_key_of_a_kept_id_in_a_manifest_is_not_taken_for_one(prepare_records, tmp_path):
    write_tone(tmp_path / "audio/a.wav")
    (kept,) = prepare_records(tmp_path / "run", [make_record(source_cut_id="x")], root=tmp_path / "audio").kept
    assert (kept.cut_id, "source_cut_id" in kept.custom) == ("cut-rec-a-0.00-2.00", False)


def test_segments_of_an_ambiguous_recording_share_its_id(ids):
    found = ids([("a.wav", 0.0, 1.0), ("a.flac", 0.0, 1.0), ("a.wav", 0.5, 1.0)])
    assert found["a.wav", 0.0, 1.0][0] == found["a.wav", 0.5, 1.0][0]


def test_long_ids(ids):
    path = "/".join(["folder" * 10] * 3) + ".wav"
    ((recording, cut),) = ids([(path, 0.0, 1.0)]).values()
    assert recording == "rec-" + "-".join(["folder" * 10] * 3)
    assert len(cut) > 180


def test_the_same_path_below_two_roots_is_two_recordings(tmp_path):
    sources = []
    for name in ("first", "second"):
        write_tone(tmp_path / name / "a.wav")
        sources.append((write_manifest(tmp_path / f"{name}.json", [make_record()]), tmp_path / name))
    prepared = run_prepare(config_for(tmp_path, sources))
    assert prepared.rejects == []
    assert len({utterance.cut_id for utterance in prepared.kept}) == 2
    assert [utterance.root for utterance in prepared.kept] == [0, 1]


SEGMENTS = st.tuples(
    st.integers(0, 1),
    st.sampled_from(["a.wav", "a.flac", "x/a.wav", "x-a.wav", "b.wav"]),
    st.sampled_from([0.0, 0.001, 0.004, 1.0]),
    st.sampled_from([1.0, 1.001, 2.0]),
)


def settle(segments):
    """What the stage does with the segments of a whole input: the (segment, recording id, cut id) that remain."""
    utterances = []
    for source, path, offset, seconds in segments:
        cut = segment_id(recording_id(path), offset, seconds)
        utterances.append(
            Utterance(path, offset, seconds, "", "", root=source, recording_id=recording_id(path), cut_id=cut)
        )
    suspects = find_suspects(np.array([hash_utterance(utterance) for utterance in utterances], dtype=HASH_FIELDS))
    keeper = IdKeeper(suspects.recordings, suspects.cuts)
    kept = []
    for utterance, segment, suspect, repeated in zip(
        utterances, segments, suspects.records, suspects.repeated, strict=True
    ):
        if suspect:
            if repeated and keeper.is_duplicate(utterance):
                continue
            keeper.make_unique(utterance)
        kept.append((segment, utterance.recording_id, utterance.cut_id))
    return kept


@given(segments=st.lists(SEGMENTS, max_size=30))
def test_each_segment_remains_once(segments):
    assert Counter(segment for segment, _, _ in settle(segments)) == Counter(set(segments))


@given(segments=st.lists(SEGMENTS, max_size=30))
def test_cut_ids_are_unique_and_recording_ids_are_those_of_files(segments):
    kept = settle(segments)
    assert len({cut for _, _, cut in kept}) == len(kept)
    files = {(segment[0], segment[1]) for segment, _, _ in kept}
    assert len({recording for _, recording, _ in kept}) == len(files)


@given(segments=st.lists(SEGMENTS, max_size=15), data=st.data())
def test_ids_do_not_depend_on_the_order(segments, data):
    shuffled = data.draw(st.permutations(segments))
    assert sorted(settle(segments)) == sorted(settle(shuffled))


def test_duplicate_of_a_segment_with_an_ambiguous_id(prepare_records, tmp_path):
    for name in ("a.wav", "a.flac"):
        write_tone(tmp_path / "audio" / name)
    records = [make_record(audio_filepath=name) for name in ("a.wav", "a.flac", "a.wav")]
    prepared = prepare_records(tmp_path, records, root=tmp_path / "audio")
    assert [utterance.audio_filepath for utterance in prepared.kept] == ["a.wav", "a.flac"]
    assert [reject["record"]["audio_filepath"] for reject in prepared.rejects] == ["a.wav"]

"""Ids are unique and independent of the order of the input."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.project import config_for, make_record, run_prepare, write_lines, write_tone

from sharmill.manifest import Segment, Utterance, canonical_id, recording_id, segment_id
from sharmill.prepare.duplicates import HASH_FIELDS, Ids, hash_utterance


@pytest.fixture
def ids(prepare_records, tmp_path):
    """Return a function from (path, offset, duration) of records to {that triple: (recording id, cut id)}."""

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
        return {
            (u.segment.audio_filepath, u.segment.offset, u.segment.duration): (u.recording_id, u.cut_id)
            for u in prepared.kept
        }

    return prepare


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


class TestKeptIds:
    @pytest.fixture
    def kept(self, tmp_path):
        """Return a function from (id, path, offset) of one-second cuts to (original ids, cut ids) and rejects."""

        def prepare(*cuts, folder="run"):
            lines = []
            for own, path, offset in cuts:
                write_tone(tmp_path / "audio" / path, 2.0)
                recording = {"id": path, "sources": [{"type": "file", "channels": [0], "source": path}],
                             "sampling_rate": 16000, "num_samples": 32000, "duration": 2.0}  # fmt: skip
                said = {"id": "s", "recording_id": path, "start": 0.0, "duration": 1.0, "text": "YES", "speaker": "a"}
                lines.append({"id": own, "start": offset, "duration": 1.0, "channel": 0, "supervisions": [said],
                              "recording": recording, "type": "MonoCut"})  # fmt: skip
            path = write_lines(tmp_path / folder / "cuts.jsonl", lines)
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


def test_the_same_path_below_two_roots_is_two_recordings(tmp_path):
    sources = []
    for name in ("first", "second"):
        write_tone(tmp_path / name / "a.wav")
        sources.append((write_lines(tmp_path / f"{name}.json", [make_record()]), tmp_path / name))
    prepared = run_prepare(config_for(tmp_path, sources))
    assert prepared.rejects == []
    assert len({utterance.cut_id for utterance in prepared.kept}) == 2
    assert [utterance.segment.root for utterance in prepared.kept] == [0, 1]


SEGMENTS = st.tuples(
    st.integers(0, 1),
    st.sampled_from(["a.wav", "a.flac", "x/a.wav", "x-a.wav", "b.wav"]),
    st.sampled_from([0.0, 0.001, 0.004, 1.0]),
    st.sampled_from([1.0, 1.001, 2.0]),
)


def kept_of(segments):
    """Return the (segment, recording id, cut id) that the stage keeps from all segments of an input."""
    utterances = []
    for source, path, offset, seconds in segments:
        cut = segment_id(recording_id(path), offset, seconds)
        utterances.append(
            Utterance(
                Segment(source, path, offset, seconds, False), "", "", recording_id=recording_id(path), cut_id=cut
            )
        )
    found = Ids.from_hashes(np.array([hash_utterance(utterance) for utterance in utterances], dtype=HASH_FIELDS))
    kept = []
    for number, (utterance, segment) in enumerate(zip(utterances, segments, strict=True)):
        if not found.duplicates[number]:
            if found.ambiguous[number]:
                found.make_unique(utterance)
            kept.append((segment, utterance.recording_id, utterance.cut_id))
    return kept


@given(segments=st.lists(SEGMENTS, max_size=30), data=st.data())
def test_segments_are_kept_once_with_unique_ids_in_any_order(segments, data):
    kept = kept_of(segments)
    assert Counter(segment for segment, _, _ in kept) == Counter(set(segments))
    assert len({cut for _, _, cut in kept}) == len(kept)
    files = {(segment[0], segment[1]) for segment, _, _ in kept}
    assert len({recording for _, recording, _ in kept}) == len(files)
    assert sorted(kept) == sorted(kept_of(data.draw(st.permutations(segments))))

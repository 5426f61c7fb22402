"""Real speech in the forms of other tools: what ``prepare`` makes of each is what it makes of the plain manifest."""

from __future__ import annotations

import json

import numpy as np
import pytest
import soundfile as sf
from support.manifests import config_for, run_prepare
from support.paths import DATA

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not DATA.is_dir(), reason="needs real speech in ../shared/data, which is not in the repository"),
]
SPEECH = DATA / "librispeech_10x10"
AUDIO = SPEECH / "audio"


@pytest.fixture(scope="module")
def records():
    return [json.loads(line) for line in (SPEECH / "manifest.json").read_text().splitlines()]


@pytest.fixture(scope="module")
def sets(records):
    """A RecordingSet and a SupervisionSet of the records."""
    from lhotse import Recording, RecordingSet, SupervisionSegment, SupervisionSet

    recordings, supervisions = [], []
    for number, record in enumerate(records):
        found = Recording.from_file(AUDIO / record["audio_filepath"])
        recordings.append(found)
        speaker = record["speaker"].split("Speaker:")[1].split()[0]
        supervisions.append(
            SupervisionSegment(
                id=f"utt{number:03d}", recording_id=found.id, start=0.0, duration=found.duration, text=record["text"],
                speaker=speaker, language="en",
            )
        )  # fmt: skip
    return RecordingSet.from_recordings(recordings), SupervisionSet.from_segments(supervisions)


def prepare(folder, source, **changes):
    keys = {"audio_root": str(AUDIO), "dataset": "LibriSpeech"}
    prepared = run_prepare(config_for(folder, [keys | source], prepare={"unit_records": 30}, **changes))
    assert prepared.rejects == []
    return prepared.kept


def facts(utterances):
    """All that datasets are made of, but keys that only one form has; the plain manifest has rounded durations."""
    return [
        (u.cut_id, u.recording_id, u.audio_filepath, u.offset, round(u.duration, 2), u.text, u.speaker, u.whole_file)
        for u in utterances
    ]


def test_lhotse_loads_the_same_samples_texts_and_durations(sets, tmp_path):
    from lhotse import CutSet

    cuts = []
    for number, cut in enumerate(CutSet.from_manifests(*sets)):
        offset = number % 12 / 30
        duration = min(cut.duration - offset, 1.0 + number % 50 / 7)
        cuts.append(cut.truncate(offset=offset, duration=duration, preserve_id=True, keep_excessive_supervisions=True))
    for cut in cuts:
        (said,) = cut.supervisions
        said.start, said.duration = 0.25, 0.5
    CutSet.from_cuts(cuts).to_file(tmp_path / "cuts.jsonl.gz")
    reference = CutSet.from_file(tmp_path / "cuts.jsonl.gz")
    for split in (False, True):
        source = {"type": "lhotse", "cuts": str(tmp_path / "cuts.jsonl.gz"), "split": split}
        found = prepare(tmp_path / str(split), source)
        expected = list(reference.trim_to_supervisions(keep_overlapping=False) if split else reference)
        assert len(found) == len(expected) == 100
        for utterance, cut in zip(found, expected, strict=True):
            assert utterance.text == cut.supervisions[0].text
            assert utterance.duration == pytest.approx(cut.duration, abs=1e-7)
            samples = cut.load_audio()[0]
            begin = round(utterance.offset * 16000)
            own, _ = sf.read(AUDIO / utterance.audio_filepath, start=begin, frames=len(samples), dtype="float32")
            np.testing.assert_array_equal(own, samples)


def test_segments_of_meetings_from_rttm(tmp_path):
    root = DATA / "ami_segments/audio"
    records = [json.loads(line) for line in (DATA / "ami_segments/manifest.json").read_text().splitlines()]
    lines = []
    for record in records:
        speaker = record["speaker"].split("Speaker:")[1].split()[0]
        name = record["audio_filepath"].removesuffix(".wav")
        lines.append(f"SPEAKER {name} 1 {record['offset']} {record['duration']} <NA> <NA> {speaker} <NA> <NA>\n")
    (tmp_path / "all.rttm").write_text("".join(lines))
    sources = {
        "plain": {"manifest": str(DATA / "ami_segments/manifest.json")},
        "rttm": {"type": "annotated", "annotations": "rttm", "annotation_root": str(tmp_path),
                 "audio": "{recording}.wav", "language": "en"},
    }  # fmt: skip
    found = {}
    for name, source in sources.items():
        entry = {"audio_root": str(root), "dataset": "AMI"} | source
        found[name] = run_prepare(config_for(tmp_path / name, [entry], prepare={"require_text": False}))
    assert sorted(facts(found["rttm"].kept)) == sorted(facts(found["plain"].kept))
    assert len(found["rttm"].kept) == len(records) == 44
    dropped = run_prepare(
        config_for(tmp_path / "drop", [entry | {"overlap": "drop"}], prepare={"require_text": False})
    ).result.totals.rejects
    assert set(dropped) == {"overlapped_speech"}

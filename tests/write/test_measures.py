"""Measures of the audio of cuts in the commit records of stage 2, wherever that was decoded."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
from support.shar import Project, run, voice

from sharmill.audio import segments
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan
from sharmill.manifest import Utterance
from sharmill.match.stage import matched_manifest
from sharmill.shar.histograms import CutMeasures
from sharmill.write.stage import WriteStage

SOUND = {"loudness", "speech_level", "peak", "clipped", "silence", "bandwidth", "context_speech_level",
         "loudness_difference"}  # fmt: skip


def prepared(project: Project, **write):
    """Four utterances of 0.5 s, each 12 dB louder than the one before; the next one is the context."""
    for number in range(4):
        project.add(f"{number}.wav", voice(0.5, seed=1) / 4 ** (3 - number))
    config = project.configure(write={"order": "manifest", "shard_size": 2, **write})
    project.match_by_hand(config, [1, 2, 3, 0])
    return config


def note(project: Project, config, *, sound: bool) -> None:
    """Adds to the matched manifest what match notes when it reads the audio, today or before it measured sound."""
    reader = SegmentReader(AudioRoots.of([project.root]))

    def noted(segment):
        notes = reader.read(segment).notes
        return notes if sound else replace(notes, sound="")

    path = matched_manifest(config)
    utterances = [Utterance.from_json(line) for line in path.read_bytes().splitlines()]
    for one in utterances:
        one.notes = noted(one.segment)
        segment = one.context.segment
        one.context = replace(one.context, segment=replace(segment, notes=noted(segment)))
    path.write_bytes(b"".join(one.to_json() + b"\n" for one in utterances))


def measures(config) -> CutMeasures:
    stage = WriteStage(config)
    assert run(stage).ok
    found = CutMeasures()
    for commit in read_ledger(stage.dir, load_plan(stage)).values():
        found.add(CutMeasures.unpack(commit.stats["cuts"]))
    return found


def check(found: CutMeasures) -> None:
    assert found.histograms.keys() >= SOUND
    assert {found.histograms[name].total for name in SOUND} == {4}
    # Shard 1 has the pair of the loudest and the softest, by 36 dB.
    (most, *place), *others = found.extremes["loudest difference"]
    assert most == pytest.approx(36.1, abs=0.2)
    assert place == [1, 1]
    assert [size for size, *_ in others] == pytest.approx([12.0] * 3, abs=0.2)


@pytest.mark.parametrize("write", [{"audio_format": "wav"}, {"audio_format": "flac"}], ids=["copied", "encoded"])
def test_audio_that_write_decodes_first_is_measured_there(project, write):
    check(measures(prepared(project, **write)))


def test_audio_that_match_has_measured_is_copied_unmeasured(project):
    config = prepared(project, audio_format="wav")
    note(project, config, sound=True)
    with mock.patch.object(segments, "measure_sound", side_effect=AssertionError):
        check(measures(config))


def test_copies_that_an_older_match_has_read_have_no_measures_of_audio(project):
    config = prepared(project, audio_format="wav")
    note(project, config, sound=False)
    found = measures(config)
    assert not found.has_sound
    assert found.histograms["duration"].total == 4


def test_measures_are_not_in_the_dataset(tmp_path):
    found = []
    for sound in (True, False):
        project = Project(tmp_path / str(sound))
        project.folder.mkdir()
        config = prepared(project)
        note(project, config, sound=sound)
        assert run(WriteStage(config)).ok
        found.append({path.name: path.read_bytes() for path in sorted(project.dataset.rglob("*")) if path.is_file()})
    assert found[0] == found[1]

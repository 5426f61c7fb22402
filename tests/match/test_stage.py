"""Stage 1 as a whole, on voices whose similarity is known: reasons, limits, choices, units, and what it leaves."""

from __future__ import annotations

import json
from unittest import mock

import numpy as np
import pytest
import soundfile as sf
import torch
from support.shar import Project, lines, run, voice

from sharmill.errors import ConfigError
from sharmill.match.stage import MatchStage, matched_manifest
from sharmill.write.stage import WriteStage


class PitchEncoder:
    """The voice is the loudest frequency: one of 1000 f Hz has the angle f, and silence has none."""

    sampling_rate = 16000
    embedding_size = 2
    checksum = "pitch"

    def __init__(self):
        self.embedded = 0

    def embed(self, audio, num_samples):
        self.embedded += len(audio)
        rows = [self._row(row[:n]) for row, n in zip(audio, num_samples.tolist(), strict=True)]
        return torch.tensor(rows, dtype=torch.float32)

    def _row(self, samples):
        if not bool((samples != 0).any()):
            return [0.0, 0.0]
        # Of the same number of points for all, so that equal pitches are equal.
        angle = float(torch.fft.rfft(samples, 65536).abs().argmax()) * 16000 / 65536 / 1000
        return [np.cos(angle), np.sin(angle)]


def similarity(pitch, other):
    return np.cos((pitch - other) / 1000)


def match(project, encoder=None, *, restart=False, speaker_key="speaker", **options):
    """Runs prepare and match; the records of the matched manifest by file name."""
    config = project.configure(match=options, speaker_key=speaker_key)
    if not (project.run_dir / "prepare").exists():
        project.prepare(config)
    with mock.patch("sharmill.match.stage.load_speaker_encoder", return_value=encoder or PitchEncoder()):
        assert run(MatchStage(config), restart=restart).ok
    return {record["audio_filepath"]: record for record in lines(matched_manifest(config))}


def contexts(records):
    return {name: record["context_audio_filepath"] for name, record in records.items()}


def reasons(project):
    return {reject["record"]["audio_filepath"]: reject["reason"] for reject in project.rejects("match")}


def add(project, name, pitch, seconds=3.5, **keys):
    return project.add(name, voice(seconds, pitch=pitch, seed=len(project.records)), **keys)


def test_the_most_similar_utterance_of_the_group_is_the_context(project):
    for name, pitch in (("a.wav", 200), ("b.wav", 330), ("c.wav", 300), ("d.wav", 1100)):
        add(project, name, pitch)
    add(project, "other.wav", 201, speaker="bob")
    add(project, "other2.wav", 900, speaker="bob")
    records = match(project)
    assert contexts(records) == {
        "a.wav": "c.wav", "b.wav": "c.wav", "c.wav": "b.wav", "d.wav": "b.wav",
        "other.wav": "other2.wav", "other2.wav": "other.wav",
    }  # fmt: skip
    for name, pair in (("a.wav", (200, 300)), ("d.wav", (1100, 330)), ("other.wav", (201, 900))):
        assert records[name]["context_speaker_similarity"] == pytest.approx(similarity(*pair), abs=2e-3)
    assert reasons(project) == {}


def test_the_manifest_is_called_after_the_limits_and_has_the_published_keys(project):
    add(project, "a.wav", 200, text="Hello Dr. B.", normalized_text="hello doctor b", cer=0.01)
    add(project, "b.wav", 210, text="42", normalized_text="forty-two")
    project.add("a.wav", offset=0.0, duration=3.25)
    records = match(project)
    path = project.run_dir / "manifests/small_withContextAudioMinDur3.0MinSSIM0.6.json"
    assert path.exists()
    first = json.loads(path.read_text().splitlines()[0])
    assert {key: value for key, value in first.items() if not key.startswith("_")} == {
        "audio_filepath": "a.wav",
        "offset": 0.0,
        "duration": 3.5,
        "text": "Hello Dr. B.",
        "speaker": "| Language:en Dataset:Tests Speaker:anna |",
        "normalized_text": "hello doctor b",
        "cer": 0.01,
        "context_audio_filepath": "b.wav",
        "context_audio_offset": 0.0,
        "context_audio_duration": 3.5,
        "context_audio_text": "42",
        "context_audio_normalized_text": "forty-two",
        "context_speaker_similarity": first["context_speaker_similarity"],
        "context_recording_id": "rec-b",
    }
    assert records["b.wav"]["context_audio_normalized_text"] == "hello doctor b"


def test_a_context_without_normalized_text_leaves_none(project):
    add(project, "a.wav", 200, context_audio_normalized_text="stale", context_audio_text="stale")
    add(project, "b.wav", 210)
    record = match(project)["a.wav"]
    assert "context_audio_normalized_text" not in record
    assert record["context_audio_text"] == "text of b.wav"


def test_the_stem_and_the_limits_are_in_the_name(project):
    config = project.configure(match={"min_duration": 2, "min_similarity": 0.75})
    assert matched_manifest(config).name == "small_withContextAudioMinDur2.0MinSSIM0.75.json"


def test_an_utterance_alone_in_its_group(project):
    add(project, "a.wav", 200)
    add(project, "b.wav", 200, speaker="bob")
    encoder = PitchEncoder()
    assert match(project, encoder) == {}
    assert set(reasons(project).values()) == {"single_utterance_speaker"}
    assert encoder.embedded == 0
    details = [reject["detail"] for reject in project.rejects("match")]
    assert all("the group" in detail for detail in details)


def test_a_group_without_a_long_utterance_is_not_even_embedded(project):
    for name in ("a.wav", "b.wav"):
        add(project, name, 200, seconds=2.9)
    encoder = PitchEncoder()
    assert match(project, encoder) == {}
    assert set(reasons(project).values()) == {"no_long_context"}
    assert encoder.embedded == 0


def test_the_only_long_utterance_has_no_context_but_is_one(project):
    add(project, "long.wav", 200, seconds=3.0)
    add(project, "short.wav", 200, seconds=1.0)
    assert contexts(match(project)) == {"short.wav": "long.wav"}
    assert reasons(project) == {"long.wav": "no_long_context"}


def test_a_voice_unlike_all_others(project):
    for name, pitch in (("a.wav", 200), ("b.wav", 250), ("far.wav", 1800)):
        add(project, name, pitch)
    assert contexts(match(project)) == {"a.wav": "b.wav", "b.wav": "a.wav"}
    (reject,) = project.rejects("match")
    assert reject["reason"] == "no_similar_context"
    assert f"{similarity(1800, 250):.2f}" in reject["detail"]
    assert "below 0.6" in reject["detail"]


@pytest.mark.parametrize(("limit", "count"), [(0.99, 2), (0.999, 0)])
def test_the_least_similarity_is_the_configurations(project, limit, count):
    add(project, "a.wav", 200)
    add(project, "b.wav", 300)
    assert len(match(project, min_similarity=limit)) == count


def test_silence_is_similar_to_nothing(project):
    add(project, "a.wav", 200)
    add(project, "b.wav", 210)
    for name in ("s1.wav", "s2.wav"):
        project.add(name, np.zeros(56000, np.float32))
    assert contexts(match(project)) == {"a.wav": "b.wav", "b.wav": "a.wav"}
    assert reasons(project) == {"s1.wav": "no_similar_context", "s2.wav": "no_similar_context"}


def test_segments_that_overlap_the_target_are_no_context(project):
    add(project, "long.wav", 200, seconds=10.0, duration=3.5, offset=0.0)
    project.add("long.wav", offset=3.0, duration=3.5)
    project.add("long.wav", offset=6.5, duration=3.5)
    add(project, "far.wav", 600)
    config = project.configure()
    project.prepare(config)
    with mock.patch("sharmill.match.stage.load_speaker_encoder", return_value=PitchEncoder()):
        assert run(MatchStage(config)).ok
    found = {
        r["offset"]: r["context_audio_offset"]
        for r in lines(matched_manifest(config))
        if r["audio_filepath"] == "long.wav"
    }
    assert found == {0.0: 6.5, 3.0: 6.5, 6.5: 0.0} or found == {0.0: 6.5, 3.0: 6.5, 6.5: 3.0}


def test_max_duration_leaves_out_longer_contexts(project):
    add(project, "a.wav", 200, seconds=3.2)
    add(project, "b.wav", 205, seconds=6.0)
    add(project, "c.wav", 400, seconds=3.3)
    assert contexts(match(project)) == {"a.wav": "b.wav", "b.wav": "a.wav", "c.wav": "b.wav"}
    limited = contexts(match(project, max_duration=4.0, restart=True))
    assert limited == {"a.wav": "c.wav", "b.wav": "a.wav", "c.wav": "a.wav"}


def test_exclude_same_text_minds_neither_case_nor_spaces(project):
    add(project, "a.wav", 200, text="Good day")
    add(project, "b.wav", 205, text=" good  DAY")
    add(project, "c.wav", 400, text="Good night")
    assert contexts(match(project))["a.wav"] == "b.wav"
    assert contexts(match(project, exclude_same_text=True, restart=True)) == {
        "a.wav": "c.wav", "b.wav": "c.wav", "c.wav": "b.wav",
    }  # fmt: skip


def test_one_text_only_leaves_no_context(project):
    for name in ("a.wav", "b.wav"):
        add(project, name, 200, text="same")
    assert match(project, exclude_same_text=True) == {}
    assert set(reasons(project).values()) == {"no_long_context"}


def test_max_group_seeks_contexts_within_the_parts(project):
    for number in range(6):
        add(project, f"{number}.wav", 200 + 10 * number)
    whole = contexts(match(project))
    assert whole["2.wav"] in ("1.wav", "3.wav")
    parts = contexts(match(project, max_group=3, restart=True))
    assert len(parts) == 6
    for name, context in parts.items():
        assert int(name[0]) // 3 == int(context[0]) // 3
    assert len(lines(project.run_dir / "match/plan/units.jsonl")) == 2


def test_sampling_draws_among_the_best_and_always_the_same(project):
    for number in range(12):
        add(project, f"{number}.wav", 200 + number, seconds=3.1)
    best = contexts(match(project))
    options = {"choice": "sample", "sample_size": 4}
    drawn = match(project, **options, restart=True)
    assert contexts(drawn) != best
    for name, record in drawn.items():
        own = int(name.removesuffix(".wav"))
        distance = abs(int(record["context_audio_filepath"].removesuffix(".wav")) - own)
        assert 1 <= distance <= 4
    assert match(project, **options, restart=True) == drawn
    assert contexts(match(project, **options, seed=7, restart=True)) != contexts(drawn)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:20000])


def as_nan(path):
    sf.write(path, np.full(56000, np.nan, np.float32), 16000, subtype="FLOAT")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.unlink(), "missing_audio"),
        (lambda path: path.write_text("no audio"), "unreadable_audio"),
        (lambda path: path.write_bytes(b""), "empty_audio"),
        (cut_off, "duration_mismatch"),
        (as_nan, "non_finite_audio"),
    ],
)
def test_a_file_that_broke_after_prepare_is_rejected_and_nobodys_context(project, damage, reason):
    for name, pitch in (("a.wav", 200), ("b.wav", 203), ("c.wav", 300)):
        add(project, name, pitch)
    project.prepare(project.configure())
    damage(project.root / "b.wav")
    assert contexts(match(project)) == {"a.wav": "c.wav", "c.wav": "a.wav"}
    assert reasons(project) == {"b.wav": reason}


def test_who_is_left_alone_by_a_broken_file_says_so(project):
    for name in ("a.wav", "b.wav"):
        add(project, name, 200)
    project.prepare(project.configure())
    (project.root / "b.wav").unlink()
    assert match(project) == {}
    assert reasons(project) == {"a.wav": "single_utterance_speaker", "b.wav": "missing_audio"}


def test_no_long_context_where_the_long_one_broke(project):
    add(project, "long.wav", 200)
    for name in ("a.wav", "b.wav"):
        add(project, name, 200, seconds=1.0)
    project.prepare(project.configure())
    (project.root / "long.wav").unlink()
    assert match(project) == {}
    assert reasons(project) == {"a.wav": "no_long_context", "b.wav": "no_long_context", "long.wav": "missing_audio"}


def test_every_record_ends_once(project):
    for number in range(10):
        add(
            project,
            f"{number}.wav",
            200 + 300 * (number % 4),
            seconds=2.0 + 0.4 * (number % 5),
            speaker=f"s{number % 3}",
        )
    records = match(project)
    names = [*records, *reasons(project)]
    assert sorted(names) == sorted(record["audio_filepath"] for record in project.records)


def test_the_result_does_not_depend_on_the_units(tmp_path):
    """With an encoder whose rows do not depend on their batch, the bytes are the same."""
    found = []
    for unit_seconds in (0.1, 9.0, None):
        project = Project(tmp_path / str(unit_seconds))
        project.folder.mkdir()
        for number in range(12):
            add(project, f"{number}.wav", 200 + 37 * number, speaker=f"s{number % 4}")
        match(project, unit_seconds=unit_seconds, choice="sample")
        found.append(next(project.run_dir.glob("manifests/*withContext*")).read_bytes())
    assert len(set(found)) == 1


def test_resemblyzers_choice_does_not_depend_on_the_units(tmp_path):
    """Their similarities may differ in the last of six decimals."""
    found = []
    for unit_seconds in (0.1, 10.0, 1000.0):
        project = Project(tmp_path / str(unit_seconds))
        project.folder.mkdir()
        for number in range(9):
            pitch, seconds = 100 + 40 * (number % 3) + number, 3.0 + 0.21 * number
            samples = voice(seconds, pitch=pitch, seed=number) + 0.5 * voice(seconds, pitch=3 * pitch)
            project.add(f"{number}.wav", samples, speaker=f"s{number % 3}")
        config = project.configure(match={"unit_seconds": unit_seconds, "min_similarity": 0.0})
        project.prepare(config)
        assert run(MatchStage(config)).ok
        found.append({record["audio_filepath"]: record for record in lines(matched_manifest(config))})
    for other in found[1:]:
        assert contexts(other) == contexts(found[0])
        for name, record in found[0].items():
            assert other[name]["context_speaker_similarity"] == pytest.approx(
                record["context_speaker_similarity"], abs=2e-6
            )


def test_a_restart_leaves_no_manifest_of_other_limits(project):
    """The stage write finds its input by the name, which has the limits."""
    for name in ("a.wav", "b.wav"):
        add(project, name, 200)
    match(project)
    other = project.run_dir / "manifests/small2_withContextAudioMinDur3.0MinSSIM0.6.json"
    other.touch()
    match(project, min_similarity=0.5, restart=True)
    names = {path.name for path in (project.run_dir / "manifests").glob("*withContext*")}
    assert names == {"small_withContextAudioMinDur3.0MinSSIM0.5.json", other.name}
    with pytest.raises(ConfigError, match="run the stage match first"):
        run(WriteStage(project.configure()))


def test_a_lost_matched_manifest_is_merged_again(project):
    for name in ("a.wav", "b.wav"):
        add(project, name, 200)
    match(project)
    path = next(project.run_dir.glob("manifests/*withContext*"))
    before = path.read_bytes()
    path.unlink()
    encoder = PitchEncoder()
    match(project, encoder)
    assert path.read_bytes() == before
    assert encoder.embedded == 0


def test_without_prepare_there_is_nothing_to_match(project):
    add(project, "a.wav", 200)
    with pytest.raises(ConfigError, match="run the stage prepare first"):
        run(MatchStage(project.configure()))


def test_an_empty_manifest_gives_an_empty_one(project):
    project.run_dir.joinpath("manifests").mkdir(parents=True)
    config = project.configure()
    (project.run_dir / "manifests/small_prepared.json").write_bytes(b"")
    result = run(MatchStage(config))
    assert result.totals.num_in == 0
    assert matched_manifest(config).read_bytes() == b""

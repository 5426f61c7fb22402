"""Stage 1 as a whole, on voices whose similarity is known: reasons, limits, choices, units, and what it leaves."""

from __future__ import annotations

import json
import logging
import os
from unittest import mock

import numpy as np
import pytest
import soundfile as sf
from support.errors import raises
from support.shar import PitchEncoder, Project, lines, put, run, voice

from sharmill.audio.sound import Sound
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.manifest import Utterance, records_checksum
from sharmill.match.choose import min_similarity
from sharmill.match.config import MatchConfig
from sharmill.match.stage import MatchStage, matched_manifest
from sharmill.prepare.stage import PrepareStage
from sharmill.validate.stage import ValidateStage
from sharmill.write.stage import WriteStage


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
    assert "0.6" in reject["detail"]


def test_the_threshold_is_the_encoders_own_unless_the_configuration_says_one():
    assert min_similarity(MatchConfig()) == 0.75
    assert min_similarity(MatchConfig(encoder="nemo:titanet_large")) == 0.6
    assert min_similarity(MatchConfig(encoder="nemo:titanet_large", min_similarity=0.7)) == 0.7
    with raises(ConfigError, "missing_key", "nemo:ecapa_tdnn", "match.min_similarity"):
        min_similarity(MatchConfig(encoder="nemo:ecapa_tdnn"))


def test_the_encoders_own_threshold_is_in_the_name_the_limits_and_the_choice(project):
    for name, pitch in (("a.wav", 200), ("b.wav", 980)):  # a similarity of 0.71
        add(project, name, pitch)
    config = project.configure(match={"min_similarity": None})
    assert matched_manifest(config).name.endswith("MinSSIM0.75.json")
    assert match(project, min_similarity=None) == {}
    assert set(reasons(project).values()) == {"no_similar_context"}
    assert WriteStage(config).identity()["limits"]["min_similarity"] == 0.75


@pytest.mark.parametrize(("limit", "count"), [(0.99, 2), (0.999, 0)])
def test_the_least_similarity_is_the_configurations(project, limit, count):
    add(project, "a.wav", 200)
    add(project, "b.wav", 300)
    assert len(match(project, min_similarity=limit)) == count


def test_silence_is_rejected_and_nobodys_context(project):
    add(project, "a.wav", 200)
    add(project, "b.wav", 210)
    project.add("zero.wav", np.zeros(56000, np.float32))
    project.add("hiss.wav", 0.0009 * np.sign(voice(3.5)), subtype="FLOAT")
    assert contexts(match(project)) == {"a.wav": "b.wav", "b.wav": "a.wav"}
    assert reasons(project) == {"zero.wav": "silent_audio", "hiss.wav": "silent_audio"}


def add_copies(project, *names, pitch=200):
    """The same samples under several names, in the format of each."""
    samples = voice(3.5, pitch=pitch, seed=99)
    for name in names:
        project.add(name, samples)


def test_a_copy_is_not_the_context_though_nothing_is_as_similar(project):
    add_copies(project, "a.wav", "copy.wav", "copy.flac")
    add(project, "b.wav", 300)
    assert contexts(match(project)) == {
        "a.wav": "b.wav", "copy.wav": "b.wav", "copy.flac": "b.wav", "b.wav": "a.wav",
    }  # fmt: skip
    assert reasons(project) == {}


@pytest.mark.parametrize("audio_format", ["flac", "wav", "original"])
def test_a_run_with_copies_passes_the_check(project, tmp_path, audio_format):
    add_copies(project, "a.wav", "copy.wav", "copy.flac")
    add_copies(project, "c.wav", "d.flac", pitch=330)
    match(project)
    config = project.configure(match={}, write={"audio_format": audio_format})
    assert run(WriteStage(config)).ok
    check = ValidateStage(project.dataset, RunDir(tmp_path / "check"), deep=True)
    assert run(check).ok
    assert list(check.findings()) == []
    assert len(lines(project.dataset / "cuts/cuts.000000.jsonl.gz")) == 5


def test_a_part_of_a_recording_that_is_a_file_too_is_a_copy(project):
    samples = voice(3.5, pitch=200, seed=99)
    project.add("long.wav", np.concatenate([voice(3.5, pitch=420), samples]), offset=3.5, duration=3.5)
    project.add("part.flac", samples)
    add(project, "b.wav", 300)
    assert contexts(match(project)) == {"long.wav": "b.wav", "part.flac": "b.wav", "b.wav": "long.wav"}


def test_where_only_copies_are_left_the_reason_says_so(project):
    add_copies(project, "a.wav", "copy.flac")
    assert match(project) == {}
    assert reasons(project) == {"a.wav": "only_copies", "copy.flac": "only_copies"}
    assert {"copy.flac" in reject["detail"] for reject in project.rejects("match")} == {True, False}


def test_a_copy_that_could_not_be_the_context_anyway_is_not_the_reason(project):
    add_copies(project, "a.wav", "copy.wav")
    add(project, "far.wav", 1800)
    assert match(project, max_duration=3.2) == {}
    assert set(reasons(project).values()) == {"no_long_context"}


def test_max_similarity_leaves_out_what_is_nearly_a_copy(project):
    for name, pitch in (("a.wav", 200), ("nearly.wav", 203), ("b.wav", 400)):
        add(project, name, pitch)
    assert contexts(match(project))["a.wav"] == "nearly.wav"
    found = contexts(match(project, max_similarity=0.999, restart=True))
    assert found == {"a.wav": "b.wav", "nearly.wav": "b.wav", "b.wav": "nearly.wav"}
    assert match(project, max_similarity=0.9, restart=True) == {}
    assert set(reasons(project).values()) == {"only_copies"}


def test_a_speaker_of_another_case_is_another_speaker(project):
    add(project, "a.wav", 200, speaker="S1")
    add(project, "b.wav", 210, speaker="S1")
    add(project, "c.wav", 201, speaker="s1")
    add(project, "d.wav", 800, speaker="s1")
    assert contexts(match(project)) == {"a.wav": "b.wav", "b.wav": "a.wav", "c.wav": "d.wav", "d.wav": "c.wav"}


def replace_file(path, samples):
    """Other samples, with the size and the time of the file as it was."""
    status = path.stat()
    put(path, samples)
    assert path.stat().st_size == status.st_size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_file_of_another_size_than_prepare_saw_is_rejected(project):
    for name in ("a.wav", "b.wav", "c.wav"):
        add(project, name, 200)
    project.prepare(project.configure())
    put(project.root / "b.wav", voice(3.55))
    assert contexts(match(project)) == {"a.wav": "c.wav", "c.wav": "a.wav"}
    assert reasons(project) == {"b.wav": "changed_audio"}


def test_a_file_of_another_time_only_is_not(project):
    for name in ("a.wav", "b.wav"):
        add(project, name, 200)
    project.prepare(project.configure())
    os.utime(project.root / "b.wav", (1, 1))
    assert len(match(project)) == 2


def test_times_of_files_are_in_no_identity(project):
    """Files copied to another disk must not make a run begin anew."""
    for name in ("a.wav", "b.wav"):
        add(project, name, 200)
    match(project)
    config = project.configure(match={})
    before = [MatchStage(config).identity(), WriteStage(config).identity()]
    for name in ("a.wav", "b.wav"):
        os.utime(project.root / name, (1, 1))
    assert run(PrepareStage(config), restart=True).ok
    match(project)
    assert [MatchStage(config).identity(), WriteStage(config).identity()] == before


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


def test_the_sound_of_targets_and_contexts_is_noted(project):
    for number in range(2):
        project.add(f"{number}.wav", voice(3.5, pitch=200) / 10**number)
    config = project.configure()
    match(project)
    notes = [Utterance.from_json(line) for line in matched_manifest(config).read_bytes().splitlines()]
    levels = [
        [Sound.unpack(segment.notes.sound).speech_level for segment in (one.segment, one.context.segment)]
        for one in notes
    ]
    assert levels[0] == pytest.approx(levels[1][::-1])
    assert levels[0][0] - levels[0][1] == pytest.approx(20, abs=0.1)


def test_the_result_does_not_depend_on_the_units(tmp_path):
    """With an encoder whose rows do not depend on their batch, the bytes are the same."""
    found = []
    for unit_seconds in (0.1, 9.0, None):
        project = Project(tmp_path / str(unit_seconds))
        project.folder.mkdir()
        for number in range(12):
            add(project, f"{number}.wav", 200 + 37 * number, speaker=f"s{number % 4}")
        match(project, unit_seconds=unit_seconds, choice="sample")
        found.append(records_checksum(next(project.run_dir.glob("manifests/*withContext*"))))
    assert len(set(found)) == 1


def test_a_restart_leaves_no_manifest_of_other_limits(project):
    """The stage write finds its input by the name, which has the limits."""
    for name in ("a.wav", "b.wav"):
        add(project, name, 200)
    match(project)
    others = {"small2_withContextAudioMinDur3.0MinSSIM0.6.json", "small_withContextAudioMinDur3.0MinSSIM0.6_mine.json",
              "small_withContextAudioMinDur1.0MinSSIM0.6.json"}  # fmt: skip
    for name in others:
        (project.run_dir / "manifests" / name).touch()
    match(project, min_similarity=0.5, restart=True)
    names = {path.name for path in (project.run_dir / "manifests").glob("*withContext*")}
    assert names == {"small_withContextAudioMinDur3.0MinSSIM0.5.json", *others}
    with raises(ConfigError, "stage_not_run", "match"):
        run(WriteStage(project.configure()))


@pytest.mark.parametrize("data", [b"", b'{"match": 1}', None])
def test_a_restart_needs_no_whole_plan(data, project):
    for name in ("a.wav", "b.wav"):
        add(project, name, 200)
    before = match(project)
    identity = project.run_dir / "match/plan/identity.json"
    identity.unlink() if data is None else identity.write_bytes(data)
    assert match(project, restart=True) == before


def test_a_restart_removes_nothing_that_a_plan_names_elsewhere(project):
    for name in ("a.wav", "b.wav"):
        add(project, name, 200)
    match(project)
    identity = project.run_dir / "match/plan/identity.json"
    plan = json.loads(identity.read_bytes())
    plan["match"]["min_duration"] = "/../../kept"
    identity.write_text(json.dumps(plan))
    # Without the folder of this name the path leads nowhere.
    (project.run_dir / "manifests/small_withContextAudioMinDur").mkdir()
    kept = project.run_dir / f"keptMinSSIM{plan['match']['min_similarity']}.json"
    kept.touch()
    match(project, restart=True)
    assert kept.exists()


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
    with raises(ConfigError, "stage_not_run", "prepare"):
        run(MatchStage(project.configure()))


def test_an_empty_manifest_gives_an_empty_one(project):
    project.run_dir.joinpath("manifests").mkdir(parents=True)
    config = project.configure()
    (project.run_dir / "manifests/small_prepared.json").write_bytes(b"")
    result = run(MatchStage(config))
    assert result.totals.num_in == 0
    assert matched_manifest(config).read_bytes() == b""


def given(name, **keys):
    """The keys by which a record brings a context."""
    return {"context_audio_filepath": name} | {f"context_{key}": value for key, value in keys.items()}


def test_the_contexts_that_records_bring_are_kept_checked_and_filled_in(project):
    add(project, "a.wav", 200, **given("c.wav", audio_offset=0.0, audio_duration=3.5, audio_text="said before"))
    add(project, "b.wav", 205, **given("c.wav", speaker_similarity=0.875))
    add(project, "c.wav", 400)
    project.records[2] |= {"normalized_text": "words of c"}
    put(project.root / "outside/x.wav", voice(4.25, pitch=700))
    add(project, "d.wav", 600, speaker="bob", **given("outside/x.wav", audio_text="of no record"))
    records = match(project, contexts="given")
    assert contexts(records) == {"a.wav": "c.wav", "b.wav": "c.wav", "c.wav": "b.wav", "d.wav": "outside/x.wav"}
    assert records["a.wav"]["context_audio_text"] == "said before"
    assert records["a.wav"]["context_speaker_similarity"] == pytest.approx(similarity(200, 400), abs=2e-3)
    assert records["b.wav"]["context_speaker_similarity"] == 0.875
    assert records["b.wav"]["context_audio_text"] == "text of c.wav"
    assert records["b.wav"]["context_audio_normalized_text"] == "words of c"
    assert records["d.wav"]["context_audio_duration"] == 4.25
    assert records["d.wav"]["context_recording_id"] == "rec-outside-x"
    assert reasons(project) == {}


def test_without_the_option_the_contexts_that_records_bring_are_chosen_anew(project):
    add(project, "a.wav", 200, **given("c.wav"))
    add(project, "b.wav", 205)
    add(project, "c.wav", 400)
    assert contexts(match(project))["a.wav"] == "b.wav"


@pytest.mark.parametrize(
    ("keys", "detail"),
    [
        (given("gone.wav"), "missing_audio"),
        (given("../b.wav"), "outside_root"),
        (given("b.wav", audio_offset=9.0), "duration_mismatch"),
        (given("b.wav", audio_offset="0"), "context_audio_offset"),
        (given("b.wav", audio_duration=9.0), "duration_mismatch"),
        (given("b.wav", audio_offset=1.0, audio_duration=1.0), "match.min_duration"),
        (given("b.wav", audio_text=3), "context_audio_text"),
        (given("b.wav", speaker_similarity=7), "context_speaker_similarity"),
        (given("b.wav", speaker_similarity=0.5), "match.min_similarity"),
        (given(7), "context_audio_filepath"),
        (given("a.wav"), "the utterance itself"),
        (given("copy.wav"), "same samples"),
    ],
)
def test_a_record_whose_own_context_cannot_be_used_is_rejected(project, keys, detail):
    for name, pitch in (("b.wav", 205), ("c.wav", 210)):
        add(project, name, pitch)
    samples = voice(3.5, pitch=200, seed=9)
    put(project.root / "copy.wav", samples)
    project.add("a.wav", samples, **keys)
    assert contexts(match(project, contexts="given")) == {"b.wav": "c.wav", "c.wav": "b.wav"}
    (reject,) = project.rejects("match")
    assert (reject["record"]["audio_filepath"], reject["reason"]) == ("a.wav", "bad_context")
    assert detail in reject["detail"]


def test_given_contexts_pass_the_check_of_the_dataset(project, tmp_path):
    for number in range(4):
        add(project, f"{number}.wav", 200 + 10 * number, **given(f"{(number + 2) % 4}.wav"))
    match(project, contexts="given")
    assert run(WriteStage(project.configure(match={"contexts": "given"}))).ok
    check = ValidateStage(project.dataset, RunDir(tmp_path / "check"), deep=True)
    assert run(check).ok
    assert list(check.findings()) == []


def test_texts_that_share_too_many_words_are_no_contexts_of_each_other(project):
    add(project, "a.wav", 200, text="One two, three four!")
    add(project, "b.wav", 205, text="four THREE nine")
    add(project, "c.wav", 300, text="four five six")
    add(project, "d.wav", 500, text="")
    project.records[3]["text"] = "..."
    assert contexts(match(project))["a.wav"] == "b.wav"
    assert contexts(match(project, max_text_overlap=0.5, restart=True))["a.wav"] == "c.wav"
    assert contexts(match(project, max_text_overlap=2 / 3, restart=True))["a.wav"] == "b.wav"
    assert contexts(match(project, max_text_overlap=0.0, restart=True))["a.wav"] == "d.wav"


def test_contexts_come_from_a_random_pool_of_the_speaker_which_the_seed_draws(project):
    for number in range(12):
        add(project, f"{number}.wav", 200 + number, seconds=3.1, speaker=f"s{number % 2}")
    add(project, "short.wav", 200, seconds=1.0, speaker="s0")
    found = match(project, max_speaker_items=3)
    assert len(found) == 13
    pools = [
        {c for name, c in contexts(found).items() if name != "short.wav" and int(name[:-4]) % 2 == n} for n in (0, 1)
    ]
    assert all(2 <= len(pool) <= 3 for pool in pools)
    assert match(project, max_speaker_items=3, restart=True) == found
    assert contexts(match(project, max_speaker_items=3, seed=7, restart=True)) != contexts(found)


def test_the_padding_of_the_batches_is_in_the_commits_and_in_the_log(project, caplog):
    caplog.set_level(logging.INFO)
    for number, seconds in enumerate((3.0, 4.0)):
        add(project, f"{number}.wav", 200, seconds=seconds)
    match(project)
    (commit,) = lines(next((project.run_dir / "match").glob("**/ledger/*.jsonl")))
    assert (commit["stats"]["embedded_seconds"], commit["stats"]["padded_seconds"]) == (7.0, 8.0)
    assert "7.0 s of audio embedded, 12.50 % of the batches is padding" in caplog.messages


@pytest.mark.parametrize(
    ("kind", "named"), [("cpu", []), ("NVIDIA H200, capability 9.0", ["NVIDIA H200, capability 9.0"])]
)
def test_the_dataset_names_the_devices_that_chose_its_contexts_where_they_are_no_cpus(project, kind, named):
    for name, pitch in (("a.wav", 200), ("b.wav", 330)):
        add(project, name, pitch)
    with mock.patch("sharmill.match.stage.check_device", return_value=kind):
        match(project)
    assert run(WriteStage(project.configure(speaker_key="speaker", match={}))).ok
    record = json.loads((project.dataset / "dataset.json").read_text())
    assert record.get("match_devices", []) == named

"""Tests of the whole stage ``match`` on voices with known similarities: rejects, limits, choices, units and files."""

import json
import os
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from support.pitch_encoder import PitchEncoder
from support.project import Project, check_dataset, lines, matched_manifest, put, raises, run, stage_of, voice

from sharmill.audio.sound import Sound
from sharmill.errors import ConfigError, FatalError
from sharmill.manifest import Utterance, records_checksum
from sharmill.match.choose import min_similarity
from sharmill.match.config import MatchConfig


def similarity(pitch, other):
    return np.cos((pitch - other) / 1000)


def match(project, encoder=None, *, restart=False, speaker_key="speaker", **options):
    """Run prepare and match; return the records of the matched manifest by file name and offset."""
    config = project.configure(match=options, speaker_key=speaker_key)
    if not (project.run_dir / "prepare").exists():
        project.prepare(config)
    with mock.patch("sharmill.match.stage.load_speaker_encoder", return_value=encoder or PitchEncoder()):
        assert run(stage_of(config, "match"), restart=restart).ok
    records = lines(matched_manifest(config))
    return {f"{one['audio_filepath']} {one['offset'] or ''}".strip(): one for one in records}


def contexts(records):
    return {name: record["context_audio_filepath"] for name, record in records.items()}


def reasons(project):
    return {reject["record"]["audio_filepath"]: reject["reason"] for reject in project.rejects("match")}


def add(project, name, pitch, seconds=3.5, **keys):
    return project.add(name, voice(seconds, pitch=pitch, seed=len(project.records)), **keys)


def test_audio_over_full_scale_is_no_context(project):
    """The rejected file would be the best context of every utterance without a given context."""
    for name, pitch, keys in (("a.wav", 200, {}), ("b.wav", 330, {"context_audio_filepath": "huge.wav"})):
        add(project, name, pitch, **keys)
    project.add("huge.wav", voice(3.5, pitch=210) * 32768, subtype="FLOAT")
    add(project, "c.wav", 500)
    assert contexts(match(project, contexts="given")) == {"a.wav": "b.wav", "c.wav": "b.wav"}
    assert reasons(project) == {"b.wav": "bad_context", "huge.wav": "over_full_scale"}


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


def of(name, pitch=200, seconds=3.5, seed=None, **keys):
    """Return an utterance; utterances with the same seed are copies."""
    return name, pitch, seconds, seed, keys


NEAR = [of("a.wav", 200), of("nearly.wav", 203), of("b.wav", 400)]
LONG = [of("a.wav", 200, 3.2), of("b.wav", 205, 6.0), of("c.wav", 400, 3.3)]
TEXTS = [of("a.wav", 200, text="Good day"), of("b.wav", 205, text=" good  DAY"), of("c.wav", 400, text="Good night")]
WORDS = [
    of("a.wav", 200, text="One two, three four!"), of("b.wav", 205, text="four THREE nine"),
    of("c.wav", 300, text="four five six"), of("d.wav", 500, text="..."),
]  # fmt: skip
COPIES = [of("a.wav", seed=99), of("copy.wav", seed=99)]
# Each case has utterances, options, expected contexts, and the reject reasons of the other utterances.
CHOICES = {
    "alone in its group": ([of("a.wav"), of("b.wav", speaker="bob")], {}, {}, ["single_utterance_speaker"] * 2),
    "a speaker of another case": (
        [of("a.wav", speaker="S1"), of("b.wav", 210, speaker="S1"), of("c.wav", 201, speaker="s1"),
         of("d.wav", 800, speaker="s1")],
        {}, {"a.wav": "b.wav", "b.wav": "a.wav", "c.wav": "d.wav", "d.wav": "c.wav"}, [],
    ),
    "none is long": ([of("a.wav", seconds=2.9), of("b.wav", seconds=2.9)], {}, {}, ["no_long_context"] * 2),
    "the only long one": (
        [of("long.wav", seconds=3.0), of("a.wav", seconds=1.0)], {}, {"a.wav": "long.wav"}, ["no_long_context"],
    ),
    "none is too long": (LONG, {}, {"a.wav": "b.wav", "b.wav": "a.wav", "c.wav": "b.wav"}, []),
    "too long": (LONG, {"max_duration": 4.0}, {"a.wav": "c.wav", "b.wav": "a.wav", "c.wav": "a.wav"}, []),
    "a voice unlike all others": (
        [of("a.wav"), of("b.wav", 250), of("far.wav", 1800)], {}, {"a.wav": "b.wav", "b.wav": "a.wav"},
        ["no_similar_context"],
    ),
    "similar enough": (NEAR[::2], {"min_similarity": 0.975}, {"a.wav": "b.wav", "b.wav": "a.wav"}, []),
    "not similar enough": (NEAR[::2], {"min_similarity": 0.985}, {}, ["no_similar_context"] * 2),
    "the encoder's own limit": (
        [of("a.wav", 200), of("b.wav", 980)], {"min_similarity": None}, {}, ["no_similar_context"] * 2,
    ),
    "the most similar": (NEAR, {}, {"a.wav": "nearly.wav", "nearly.wav": "a.wav", "b.wav": "nearly.wav"}, []),
    "nearly a copy": (
        NEAR, {"max_similarity": 0.999}, {"a.wav": "b.wav", "nearly.wav": "b.wav", "b.wav": "nearly.wav"}, [],
    ),
    "all nearly copies": (NEAR, {"max_similarity": 0.9}, {}, ["only_copies"] * 3),
    "copies": ([*COPIES, of("b.wav", 300)], {}, {"a.wav": "b.wav", "copy.wav": "b.wav", "b.wav": "a.wav"}, []),
    "copies alone": (COPIES, {}, {}, ["only_copies"] * 2),
    "copies that are too long": (
        [*COPIES, of("far.wav", 1800)], {"max_duration": 3.2}, {}, ["no_long_context"] * 3,
    ),
    "the same text is allowed": (TEXTS, {}, {"a.wav": "b.wav", "b.wav": "a.wav", "c.wav": "b.wav"}, []),
    "the same text": (
        TEXTS, {"exclude_same_text": True}, {"a.wav": "c.wav", "b.wav": "c.wav", "c.wav": "b.wav"}, [],
    ),
    "one text only": (TEXTS[:2], {"exclude_same_text": True}, {}, ["no_long_context"] * 2),
    "half of the words in common": (
        WORDS, {"max_text_overlap": 0.5}, {"a.wav": "c.wav", "b.wav": "c.wav", "c.wav": "b.wav", "d.wav": "c.wav"}, [],
    ),
    "no words in common": (
        WORDS, {"max_text_overlap": 0.0}, {"a.wav": "d.wav", "b.wav": "d.wav", "c.wav": "d.wav", "d.wav": "c.wav"}, [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
def test_contexts_and_reject_reasons_follow_voices_and_limits(project, case):
    utterances, options, expected, rejected = CHOICES[case]
    for number, (name, pitch, seconds, seed, keys) in enumerate(utterances):
        project.add(name, voice(seconds, pitch=pitch, seed=number if seed is None else seed), **keys)
    encoder = PitchEncoder()
    assert contexts(match(project, encoder, **options)) == expected
    assert list(reasons(project).values()) == rejected
    if case in ("alone in its group", "none is long"):
        assert encoder.embedded == 0


class SmallDevice(PitchEncoder):
    """An encoder with memory for four seconds at once, which raises torch's out-of-memory error for more."""

    def embed(self, audio, num_samples):
        if audio.numel() > 64000:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().embed(audio, num_samples)


def test_segments_too_long_for_a_batch_are_rejected_alone(project):
    for number, seconds in enumerate([3.5, 5.0, 3.25, 6.0]):
        add(project, f"{number}.wav", 200 + number, seconds)
    assert contexts(match(project, SmallDevice(), batch_seconds=3.5)) == {"0.wav": "2.wav", "2.wav": "0.wav"}
    assert reasons(project) == dict.fromkeys(("1.wav", "3.wav"), "too_long_for_device")


def test_the_stage_names_the_setting_if_no_batch_fits(project):
    for number in range(4):
        add(project, f"{number}.wav", 200, speaker=f"s{number // 2}")
    with raises(FatalError, "out_of_memory", "lower match.batch_seconds below 7"):
        match(project, SmallDevice(), unit_seconds=1.0)


@pytest.mark.parametrize(
    ("change", "reason"), [(Path.unlink, "missing_audio"), (partial(os.utime, times=(1, 1)), None)]
)
def test_a_file_that_changed_after_prepare_is_never_a_context(project, change, reason):
    for name, pitch in (("a.wav", 200), ("b.wav", 203), ("c.wav", 300)):
        add(project, name, pitch)
    add(project, "left.wav", 200, speaker="bob")
    project.prepare(project.configure())
    change(project.root / "b.wav")
    found, rejected = contexts(match(project)), reasons(project)
    assert found["a.wav"] == ("c.wav" if reason else "b.wav")
    assert rejected == ({"b.wav": reason} if reason else {}) | {"left.wav": "single_utterance_speaker"}


def test_the_manifest_is_named_by_limits_and_has_published_keys(project):
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


def test_the_threshold_is_the_encoders_own_by_default():
    assert min_similarity(MatchConfig()) == 0.75
    assert min_similarity(MatchConfig(encoder="nemo:titanet_large")) == 0.6
    assert min_similarity(MatchConfig(encoder="nemo:titanet_large", min_similarity=0.7)) == 0.7
    with raises(ConfigError, "missing_key", "nemo:ecapa_tdnn", "match.min_similarity"):
        min_similarity(MatchConfig(encoder="nemo:ecapa_tdnn"))


def passes_the_check(project, tmp_path, config):
    """Write the dataset, and return True if the checker has no findings."""
    assert run(stage_of(config, "write")).ok
    return not check_dataset(project.dataset, tmp_path / "check", deep=True).findings


@pytest.mark.parametrize("audio_format", ["flac", "wav", "original"])
def test_a_run_with_copies_passes_the_check(project, tmp_path, audio_format):
    for name, pitch in (("a.wav", 200), ("copy.wav", 200), ("copy.flac", 200), ("c.wav", 330), ("d.flac", 330)):
        project.add(name, voice(3.5, pitch=pitch, seed=99))
    match(project)
    assert passes_the_check(project, tmp_path, project.configure(match={}, write={"audio_format": audio_format}))
    assert len(lines(project.dataset / "cuts/cuts.000000.jsonl.gz")) == 5


@pytest.fixture
def pair(project):
    """Add two utterances that are each other's contexts."""
    for name in ("a.wav", "b.wav"):
        add(project, name, 200)
    return match(project)


def test_times_of_files_are_in_no_identity(project, pair):
    """Files that were copied to another disk must not make a run start over."""
    config = project.configure(match={})
    assert run(stage_of(config, "write")).ok
    for name in ("a.wav", "b.wav"):
        os.utime(project.root / name, (1, 1))
    assert run(stage_of(config, "prepare"), restart=True).ok
    match(project)
    assert run(stage_of(config, "write")).ok


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


def test_speakers_without_records_do_not_affect_contexts(project, tmp_path):
    found = []
    for name, speakers in (("some", ["anna"]), ("more", ["zoe", "anna", "zoe"])):
        old = Project(tmp_path / name)
        for speaker in speakers:
            old.add_voices([3.5] * 7, speaker + "/{}.wav", speaker=speaker)
        old.write(match=None, write={"order": "manifest"})
        new = Project(tmp_path / f"new_{name}").add_voices([3.5] * 7, "{}.wav", speaker="anna")
        config = new.configure(append_to=str(old.dataset), match={"contexts_from_dataset": True, "max_group": 3})
        new.prepare(config)
        with mock.patch("sharmill.match.stage.load_speaker_encoder", return_value=PitchEncoder()):
            assert run(stage_of(config, "match")).ok
        found.append({one["audio_filepath"]: one["context_audio_filepath"] for one in lines(matched_manifest(config))})
    assert found[0] == found[1] != {}


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
    """The bytes are the same with an encoder whose embeddings do not depend on the batch."""
    found = []
    for unit_seconds in (0.1, 9.0, None):
        project = Project(tmp_path / str(unit_seconds))
        project.folder.mkdir()
        for number in range(12):
            add(project, f"{number}.wav", 200 + 37 * number, speaker=f"s{number % 4}")
        match(project, unit_seconds=unit_seconds, choice="sample")
        found.append(records_checksum(next(project.run_dir.glob("manifests/*withContext*"))))
    assert len(set(found)) == 1


def given(name, **keys):
    """Return the manifest keys of a given context."""
    return {"context_audio_filepath": name} | {f"context_{key}": value for key, value in keys.items()}


def test_given_contexts_are_kept_checked_and_filled_in(project):
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


def test_contexts_of_records_are_chosen_again_without_the_option(project):
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
    assert passes_the_check(project, tmp_path, project.configure(match={"contexts": "given"}))


def test_contexts_come_from_a_pool_that_the_seed_draws(project):
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


@pytest.mark.parametrize(
    ("kind", "named"), [("cpu", []), ("NVIDIA H200, capability 9.0", ["NVIDIA H200, capability 9.0"])]
)
def test_the_dataset_names_gpus_that_chose_its_contexts(project, kind, named):
    for name, pitch in (("a.wav", 200), ("b.wav", 330)):
        add(project, name, pitch)
    with mock.patch("sharmill.match.stage.check_device", return_value=kind):
        match(project)
    assert run(stage_of(project.configure(speaker_key="speaker", match={}), "write")).ok
    record = json.loads((project.dataset / "dataset.json").read_text())
    assert record.get("match_devices", []) == named


def test_segments_that_overlap_the_target_are_no_context(project):
    add(project, "long.wav", 200, seconds=10.0, duration=3.5, offset=0.0)
    project.add("long.wav", offset=3.0, duration=3.5)
    project.add("long.wav", offset=6.5, duration=3.5)
    add(project, "far.wav", 600)
    offsets = {name: record["context_audio_offset"] for name, record in match(project).items()}
    assert (offsets["long.wav"], offsets["long.wav 3.0"]) == (6.5, 6.5)
    assert offsets["long.wav 6.5"] in (0.0, 3.0)


def test_a_lost_matched_manifest_is_merged_again(project, pair):
    path = next(project.run_dir.glob("manifests/*withContext*"))
    before = path.read_bytes()
    path.unlink()
    encoder = PitchEncoder()
    match(project, encoder)
    assert path.read_bytes() == before
    assert encoder.embedded == 0


def test_a_restart_leaves_no_manifest_of_other_limits(project, pair):
    others = {"small2_withContextAudioMinDur3.0MinSSIM0.6.json", "small_withContextAudioMinDur3.0MinSSIM0.6_mine.json"}
    for name in others:
        (project.run_dir / "manifests" / name).touch()
    match(project, min_similarity=0.5, restart=True)
    names = {path.name for path in (project.run_dir / "manifests").glob("*withContext*")}
    assert names == {"small_withContextAudioMinDur3.0MinSSIM0.5.json", *others}

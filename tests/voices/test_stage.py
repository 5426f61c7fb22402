"""Tests of the whole stage ``voices`` on voices with known similarities, and of ``match`` after it."""

import dataclasses
import json
from unittest import mock

import numpy as np
import pytest
import torch
from support.pitch_encoder import PitchEncoder
from support.project import Project, lines, matched_manifest, put, raises, run, stage_of, voice

from sharmill.config import to_yaml
from sharmill.engine.order import choose_stages, make_stages
from sharmill.engine.run_dir import RunDir
from sharmill.errors import ConfigError, DeviceError
from sharmill.manifest import tagged_speaker
from sharmill.pipeline import check_config
from sharmill.report.facts import read_run_facts
from sharmill.report.labels import make_labels
from sharmill.voices import cluster

# Pitches in Hz whose similarities in PitchEncoder are below 0.6: the angles are 0.2, 1.4, 2.6 and 3.8.
PITCHES = {"anna": 200, "bob": 1400, "carl": 2600, "dora": 3800}
LOADED = ("sharmill.match.stage.load_speaker_encoder",)


def add(project, name, who, *, label=None, seconds=3.5, pitch=0, **keys):
    """Add a clip in the voice of ``who``, labelled with this speaker or with ``label``."""
    number = len(project.records)
    samples = voice(seconds, pitch=PITCHES[who] + pitch + number, seed=number)
    project.add(f"{name}.wav", samples, **{"speaker": label or who} | keys)


def fill(project, count=4, people=("anna", "bob", "carl")):
    for who in people:
        for number in range(count):
            add(project, f"{who}{number}", who)


def run_stages(project, encoder=None, *, stages=("prepare", "voices", "match"), restart=False, match=None, **keys):
    """Run stages with an encoder of tones; return the configuration."""
    values = {"speaker_key": "speaker"} | keys
    config = project.configure(match={"min_similarity": 0.75} | (match or {}), **values)
    with mock.patch(LOADED[0], return_value=encoder or PitchEncoder()):
        for stage in make_stages(config, stages):
            assert run(stage, restart=restart).ok
    return config


def findings(project, kind=None):
    found = lines(project.run_dir / "voices/labels.jsonl")
    return found if kind is None else [one for one in found if one["finding"] == kind]


def speakers(config):
    """Return the speaker of each record that ``voices`` kept, by the name of its file."""
    records = lines(stage_of(config, "match").product("voices/manifest"))
    return {one["audio_filepath"].removesuffix(".wav"): tagged_speaker(one["speaker"]) for one in records}


def contexts(config):
    records = lines(matched_manifest(config))
    return {one["audio_filepath"][:-4]: one["context_audio_filepath"][:-4] for one in records}


def test_a_wrong_label_is_found_and_only_reported(project):
    fill(project)
    add(project, "wrong", "bob", label="anna")
    config = run_stages(project, voices={})
    (found,) = findings(project)
    assert (found["finding"], found["audio_filepath"], found["group"]) == ("wrong_voice", "wrong.wav", "anna")
    assert found["other_group"] == "bob"
    assert found["other"] > 0.99 > 0.5 > found["own"]
    assert found["margin"] == pytest.approx(found["own"] - found["other"], abs=1e-3)
    assert len(speakers(config)) == 13
    assert [one["reason"] for one in project.rejects("match")] == ["no_similar_context"]
    notes = stage_of(config, "match").totals_of("voices").notes
    assert notes[0] == "clips that sound like another group than their own (wrong_voice): 1"


def test_match_takes_the_embeddings_and_embeds_nothing(project):
    # The distances of these pitches also differ in float16.
    for who in ("anna", "bob"):
        for number, pitch in enumerate((0, 100, 250, 450)):
            add(project, f"{who}{number}", who, pitch=pitch)
    before = contexts(run_stages(project, stages=("prepare", "match")))
    config = run_stages(project, voices={"window_seconds": None}, restart=True, stages=("voices",))
    encoder = PitchEncoder()
    run_stages(project, encoder, voices={"window_seconds": None}, restart=True, stages=("match",))
    assert encoder.embedded == 0
    assert contexts(config) == before
    sound = [one["_modified"] for one in map(json.loads, matched_manifest(config).read_bytes().splitlines())]
    assert all(len(times) == 4 for times in sound)  # with the measures of the sound


def test_a_given_copy_from_outside_the_records_is_recognized(project):
    fill(project, people=("anna",))
    put(project.root / "copy.wav", voice(3.5, pitch=PITCHES["anna"], seed=0))
    project.records[0] |= {"context_audio_filepath": "copy.wav"}
    config = run_stages(project, voices={}, match={"contexts": "given"})
    assert "anna0" not in contexts(config)
    (reject,) = project.rejects("match")
    assert (reject["reason"], "the same samples" in reject["detail"]) == ("bad_context", True)


def test_wrong_labels_are_rejected_or_corrected(project):
    fill(project)
    add(project, "wrong", "bob", label="anna")
    run_stages(project, voices={"action": "reject"})
    (reject,) = project.rejects("voices")
    assert (reject["reason"], reject["record"]["audio_filepath"]) == ("wrong_voice", "wrong.wav")
    assert "'bob'" in reject["detail"]
    config = run_stages(project, voices={"action": "relabel"}, restart=True)
    assert speakers(config)["wrong"] == "bob"
    assert contexts(config)["wrong"].startswith("bob")
    record = next(one for one in lines(matched_manifest(config)) if one["audio_filepath"] == "wrong.wav")
    assert record["given_speaker"] == "anna"


def test_merged_and_divided_speakers_are_found_and_corrected(project):
    fill(project, people=("anna",))
    for number in range(4):
        add(project, f"bob{number}", "bob", label="anna")
        add(project, f"carl{number}", "carl", label=f"carl{number % 2}")
    config = run_stages(project, voices={"action": "relabel"})
    (several,), (one,) = findings(project, "several_voices"), findings(project, "one_voice")
    assert several["group"] == "anna"
    assert [voice["clips"] for voice in several["voices"]] == [4, 4]
    assert several["num_voices"] == 2
    assert several["similarity"] < 0.6
    assert one["groups"] == ["carl0", "carl1"]
    assert not findings(project, "wrong_voice")
    names = speakers(config)
    assert {names[f"anna{number}"] for number in range(4)} == {"anna"}
    assert {names[f"bob{number}"] for number in range(4)} == {"anna_2"}
    assert {names[f"carl{number}"] for number in range(4)} == {"carl0"}


@pytest.mark.parametrize("within", ["all", "collection", "recording"])
def test_speakers_are_found_without_labels(project, within):
    fill(project, people=("anna", "bob"))
    add(project, "dora", "dora")
    for number, record in enumerate(project.records):
        record["speaker"] = "N/A" if within != "collection" else f"| Language:en Dataset:d Speaker:show{number % 2} |"
    config = run_stages(project, voices={"labels": "find", "within": within})
    names = speakers(config)
    groups = {"all": 3, "collection": 5, "recording": 9}[within]
    assert len(set(names.values())) == groups
    assert all(len(name) == len("voice-") + 16 for name in names.values())
    if within == "all":
        assert all(own[:-1] == other[:-1] for own, other in contexts(config).items())
        assert [one["reason"] for one in project.rejects("match")] == ["single_utterance_speaker"]
    # The names depend neither on the order of the records nor on the sizes of units and blocks.
    project.records = [project.records[number] for number in np.random.default_rng(0).permutation(9)]
    with mock.patch.object(cluster, "BLOCK", 3), mock.patch.object(cluster, "_UNIT_LINES", 4):
        again = run_stages(project, voices={"labels": "find", "within": within}, restart=True)
    if within == "recording":
        assert speakers(again) == names
    if within == "all":
        assert speakers(again) == names


def test_two_voices_in_a_clip_are_found_where_they_change(project):
    fill(project, people=("anna", "bob"))
    parts = [voice(4.0, pitch=200, seed=1), voice(6.0, pitch=1400, seed=2)]
    project.add("both.wav", np.concatenate(parts), speaker="anna")
    run_stages(project, voices={"action": "reject"})
    (found,) = findings(project, "mixed_voices")
    assert (found["audio_filepath"], found["at"]) == ("both.wav", 4.0)
    assert found["similarity"] < 0.6
    assert ("mixed_voices", "both.wav") in {
        (one["reason"], one["record"]["audio_filepath"]) for one in project.rejects("voices")
    }


class BrokenEncoder(PitchEncoder):
    """An encoder whose embeddings of a voice at 1400 Hz are not finite."""

    def embed(self, audio: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        rows = super().embed(audio, num_samples)
        rows[(rows[:, 0] - np.cos(1.4)).abs() < 0.05] = torch.nan
        return rows


def test_clips_without_a_voice_are_compared_with_nothing(project):
    """Silence, embeddings that are not finite, a file that cannot be read, a group of one and two identical clips."""
    fill(project, people=("anna", "bob"))
    project.add("silent0.wav", np.zeros(56000, np.float32), speaker="silent")
    project.add("silent1.wav", np.zeros(60000, np.float32), speaker="silent")
    add(project, "alone", "dora")
    for name in ("same0.wav", "same1.wav"):
        project.add(name, voice(3.5, pitch=2600), speaker="same")
    project.add("broken.wav", voice(3.5), speaker="anna").write_bytes(b"RIFF" + bytes(3000))
    config = run_stages(project, BrokenEncoder(), voices={"action": "reject"}, prepare={"min_duration": 0.0})
    assert not findings(project)
    assert len(speakers(config)) == 11
    facts = stage_of(config, "match").totals_of("voices").facts
    assert facts["compared"] == 6  # the clips of anna and the two identical ones


def test_a_file_that_vanished_is_rejected_with_its_reason(project):
    fill(project, people=("anna",))
    config = run_stages(project, stages=("prepare",), voices={})
    path = project.root / "anna1.wav"
    path.write_bytes(path.read_bytes()[:2000])
    with mock.patch(LOADED[0], return_value=PitchEncoder()):
        for stage in make_stages(config, ["voices"]):
            assert run(stage).ok
    (reject,) = project.rejects("voices")
    assert reject["record"]["audio_filepath"] == "anna1.wav"
    assert len(speakers(config)) == 3


def test_contexts_may_not_sound_like_another_speaker(project):
    """Two clips of anna lie between both voices, and are most similar to each other."""
    fill(project, people=("bob",))
    for number, pitch in enumerate((0, 0, 500, 480)):
        add(project, f"anna{number}", "anna", pitch=pitch)
    keys = {"voices": {"similarity": 0.8, "window_seconds": None}}
    free = contexts(run_stages(project, **keys))
    assert free["anna3"] == "anna2"
    bound = contexts(
        run_stages(project, restart=True, match={"max_other_similarity": 0.6, "min_similarity": 0.5}, **keys)
    )
    assert bound["anna3"] in ("anna0", "anna1")


def test_the_page_shows_the_findings_with_players(project):
    fill(project)
    add(project, "wrong", "bob", label="anna")
    for number in range(4):
        add(project, f"dora{number}", "dora", label="carl")
    stages = ("prepare", "voices", "match", "write")
    config = run_stages(project, voices={}, stages=stages, match={"min_similarity": -1.0})
    RunDir(project.run_dir).config.write_bytes(to_yaml(config))
    shown = make_labels(read_run_facts(config, make_stages(config), {}))
    assert shown is not None
    text = str(shown)
    assert "clips that sound like another group than their own (wrong_voice): 1" in text
    assert "mean similarity of two voices 0.36; 4 clips such as carl0.wav at 0 s, 4 clips such as dora0.wav" in text
    assert "the other group 1.00" in text
    assert text.count("<audio ") == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"voices": {"action": "relabel"}, "speaker_key": "librispeech"}, "speaker_key"),
        ({"voices": {}, "match": None}, "match=null"),
        ({"match": {"max_other_similarity": 0.5}}, "max_other_similarity"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(project, changes, said):
    add(project, "a", "anna")
    config = project.configure(**changes)
    with raises(ConfigError, "bad_config_value", said):
        check_config(config)


@pytest.mark.parametrize(
    "voices",
    [{"labels": "find", "action": "relabel"}, {"within": "recording"}, {"labels": "find", "within": "all", "x": 1}],
)
def test_keys_that_contradict_each_other_are_refused(project, voices):
    with raises(ConfigError, "bad_config_value" if "x" not in voices else "unknown_key"):
        project.configure(voices=voices)


def test_a_corpus_of_which_nothing_is_left_has_no_voices(project):
    project.add("a.wav", voice(3.5), text="")
    config = run_stages(project, voices={})
    assert speakers(config) == {}
    assert findings(project) == []


def test_match_runs_again_if_only_the_similarities_to_voices_change(project):
    fill(project, people=("bob",))
    for number, pitch in enumerate((0, 0, 500, 480)):
        add(project, f"anna{number}", "anna", pitch=pitch)
    match = {"max_other_similarity": 0.6, "min_similarity": 0.5}
    run_stages(project, match=match, voices={"similarity": 0.8})
    config = run_stages(project, match=match, voices={"similarity": 0.99}, stages=("voices",), restart=True)
    with raises(ConfigError, "changed_plan", "similarities"):
        run(stage_of(config, "match"))
    free = {"match": {"min_similarity": 0.5}}
    run_stages(project, **free, voices={"similarity": 0.99}, stages=("match",), restart=True)
    run_stages(project, **free, voices={"similarity": 0.8}, stages=("voices",), restart=True)
    run_stages(project, **free, voices={"similarity": 0.8}, stages=("match",))  # without a limit, nothing has changed


class OtherEncoder(PitchEncoder):
    """An encoder whose distances are slightly smaller."""

    def _row(self, samples: torch.Tensor) -> list[float]:
        cosine, sine = super()._row(samples)
        return [cosine, sine * 0.99]


def test_voices_run_again_if_only_the_embeddings_change(project):
    fill(project, people=("anna", "bob"))
    config = run_stages(project, voices={})
    (voices,) = make_stages(config, ["voices"])[2:]
    before = np.load(voices.product("voices/similarities"))
    run_stages(project, OtherEncoder(), voices={}, stages=("voices.embed", "voices.cluster"), restart=True)
    assert run(voices).ok
    assert not np.array_equal(np.load(voices.product("voices/similarities")), before)


def test_another_action_needs_no_restart_and_no_embeddings(project):
    fill(project)
    add(project, "wrong", "bob", label="anna")
    run_stages(project, voices={})
    encoder = PitchEncoder()
    run_stages(project, encoder, voices={"action": "reject"}, stages=("voices",))
    assert [one["reason"] for one in project.rejects("voices")] == ["wrong_voice"]
    assert encoder.embedded == 0


def test_embeddings_are_not_replaced_without_a_restart(project):
    fill(project, people=("anna",))
    run_stages(project, voices={}, stages=("prepare", "voices"))
    encoder = PitchEncoder()
    with raises(ConfigError, "changed_plan", "window_seconds"):
        run_stages(project, encoder, voices={"window_seconds": 1.0}, stages=("voices",))
    assert encoder.embedded == 0


def test_a_further_voice_gets_a_name_that_no_speaker_has(project):
    fill(project, people=("anna",))
    for number in range(4):
        add(project, f"bob{number}", "bob", label="anna")
        add(project, f"carl{number}", "carl", label="anna_2")
    names = speakers(run_stages(project, voices={"action": "relabel"}))
    assert (names["anna0"], names["bob0"], names["carl0"]) == ("anna", "anna_2_", "anna_2")


def test_a_clip_that_changed_its_group_may_be_a_context_there(project):
    fill(project, people=("anna",))
    for number, pitch in enumerate((0, 60)):
        add(project, f"bob{number}", "bob", pitch=pitch)
    add(project, "wrong", "bob", label="anna", pitch=61)  # the clip most similar to bob1
    keys = {"voices": {"action": "relabel"}, "match": {"max_other_similarity": 0.9}}
    assert contexts(run_stages(project, **keys))["bob1"] == "wrong"


def test_a_records_own_given_speaker_is_kept(project):
    fill(project)
    add(project, "wrong", "bob", label="anna", given_speaker="hers")
    config = run_stages(project, voices={"action": "relabel"})
    record = next(one for one in lines(matched_manifest(config)) if one["audio_filepath"] == "wrong.wav")
    assert (tagged_speaker(record["speaker"]), record["given_speaker"]) == ("bob", "hers")


class OnDevice(torch.Tensor):
    """A tensor that numpy cannot read, like one on a GPU."""

    @property
    def device(self):
        return torch.device("cuda")

    def __array__(self, *args, **keys):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


class DeviceEncoder(PitchEncoder):
    def embed(self, audio: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        return super().embed(audio, num_samples).as_subclass(OnDevice)


@pytest.mark.parametrize("stages", [("prepare", "match"), ("prepare", "voices", "match")])
def test_given_contexts_are_compared_with_records_on_a_gpu(project, stages):
    fill(project, count=3, people=("anna",))
    add(project, "extra", "anna")
    project.records.pop()
    project.records[0]["context_audio_filepath"] = "extra.wav"
    keys = {"voices": {}} if "voices" in stages else {}
    config = run_stages(project, DeviceEncoder(), match={"contexts": "given"}, stages=stages, **keys)
    assert contexts(config)["anna0"] == "extra"


def test_stored_embeddings_are_compared_with_a_datasets_on_a_gpu(project, tmp_path):
    old = Project(tmp_path / "old")
    fill(old, count=3, people=("anna",))
    old.write(match=None, write={"order": "manifest"})
    add(project, "new", "anna", pitch=2)
    match = {"contexts_from_dataset": True}
    config = run_stages(project, DeviceEncoder(), match=match, append_to=str(old.dataset), voices={})
    assert contexts(config) == {"new": "anna2"}


def test_a_node_that_loses_the_audio_rejects_nothing(project):
    fill(project, people=("anna",))
    config = run_stages(project, stages=("prepare",), voices={})
    (embed,) = make_stages(config, ["voices.embed"])

    def lose(*args, **keys):
        project.root.rename(project.root.with_name("elsewhere"))
        return PitchEncoder()

    with mock.patch(LOADED[0], side_effect=lose), raises(DeviceError, "unlike_nodes", "does not see the audio"):
        run(embed)


def test_a_dataset_without_sources_does_not_run_voices(project):
    config = dataclasses.replace(project.configure(voices={}), sources=[])
    assert not [kind for kind in choose_stages(config) if kind.startswith("voices")]


def test_a_voice_keeps_the_name_of_the_speaker_who_has_no_other(project):
    """Half of the clips labelled anna have bob's voice."""
    for number in range(4):
        add(project, f"anna{number}", "anna")
        add(project, f"wrong{number}", "bob", label="anna")
        add(project, f"bob{number}", "bob")
    names = speakers(run_stages(project, voices={"action": "relabel"}))
    assert {name: speaker for name, speaker in names.items() if name[-1] == "0"} == {
        "anna0": "anna", "wrong0": "bob", "bob0": "bob",
    }  # fmt: skip

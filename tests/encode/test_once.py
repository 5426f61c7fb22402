"""Each unique stored segment goes through a codec once; what depends on its codes is assembled again."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from support.errors import raises
from support.manifests import KeepErrors
from support.paths import REPOSITORY
from support.shar import ToyCodec, codec_stages, copy, loading, put, run, run_codec, snapshot, voice

from sharmill.encode import segments
from sharmill.encode.config import EncodeConfig
from sharmill.encode.segments import PLACE, SegmentNumbers
from sharmill.engine.hashes import find_first
from sharmill.engine.ledger import read_ledger, revoke
from sharmill.engine.listener import Listener
from sharmill.engine.plan import load_plan
from sharmill.engine.run import run_stage
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.executors.local import LocalExecutor
from sharmill.pipeline import make_stages, run_dataset
from sharmill.shar import open_shar
from sharmill.shar.index import read_dataset
from sharmill.shar.items import read_field
from sharmill.shar.rebuild import parse_codec_facts, rebuild_index
from sharmill.validate.redo import take_back_commits
from sharmill.validate.stage import ValidateStage

PUBLISHED = REPOSITORY.parent / "shared/data/published_segments"


def passes(config, name="toy"):
    """How many segments went through the codec, by the ledger of the stage."""
    stage = codec_stages(config, name)[1]
    return sum(commit.num_in for commit in read_ledger(stage.dir, load_plan(stage)).values())


def stored(dataset):
    """The bytes of audio at every place of a dataset, with the bytes of the codes there."""
    found = []
    for role in ("target", "context"):
        for path in sorted((dataset / f"{role}_audio").glob("*.tar")):
            codes = dataset / f"codes_toy/{role}_codes" / path.name.replace("recording", "codes")
            for audio, item in zip(read_field(path), read_field(codes), strict=True):
                assert audio.cut_id == item.cut_id
                found.append((audio.data, item.data))
    return found


def check_once(config, dataset):
    """Checks that the ledger has one pass for each segment, whose codes are the same at all places; counts places."""
    places = stored(dataset)
    assert passes(config) == len({audio for audio, _ in places})
    assert len(set(places)) == len({audio for audio, _ in places})
    return len(places)


@pytest.fixture
def speech(project):
    for number in range(12):
        project.add(f"{number}.flac", voice(0.3 + number / 20, seed=number), number=number)
    return project


@pytest.mark.parametrize("order", ["manifest", "speaker", "shuffle"])
def test_in_every_order_there_is_one_pass_for_a_segment(speech, order):
    config = speech.write(write={"shard_size": 2, "order": order}, encode={"unit_seconds": 1.0})
    codec = speech.encode(config)
    assert check_once(config, speech.dataset) == 24
    assert sum(map(len, codec.batches)) == passes(config) == 12
    assert len(load_plan(codec_stages(config)[1])) > 3


def test_contexts_from_the_parts_of_a_large_group(speech, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "tests/support/plugin")
    config = speech.configure(
        match={
            "encoder": "python:tiny_speech:TinyEncoder",
            "min_similarity": -1.0,
            "min_duration": 0.0,
            "max_group": 4,
        },
        write={"shard_size": 5},
        encode={"codecs": [{"name": "toy", "model": "python:tiny_speech:TinyCodec:50"}]},
        executor={"workers": 1},
    )
    result = run_dataset(config, Listener())
    assert result.ok
    assert result.num_errors == 0
    assert check_once(config, speech.dataset) == 24
    assert passes(config) == 12


def test_records_that_write_drops_and_contexts_that_are_no_target(speech):
    config = speech.configure(write={"shard_size": 4, "order": "manifest"})
    speech.match_by_hand(config, contexts=[3, 3, 3, 4, 3, 3, 3, 3, 3, 3, 3, 3])
    # As target it goes with its record; as context its cuts go too. Number 4 is the context of number 3 alone.
    (speech.root / "4.flac").write_bytes(b"no audio")
    assert run(make_stages(config, ["write"])[0]).ok
    speech.encode(config)
    assert len(speech.rejects("write")) == 2
    check_once(config, speech.dataset)
    # Number 3 is no target any more.
    assert passes(config) == 11


def test_the_same_samples_in_other_bytes_are_other_segments(project):
    samples = voice(0.5)
    for name in ("a.flac", "b.wav", "c.flac"):
        project.add(name, samples)
    config = project.write(write={"audio_format": "original", "order": "manifest"}, match={"min_duration": 0.0})
    codec = project.encode(config)
    assert check_once(config, project.dataset) == 6
    assert sum(map(len, codec.batches)) == 2


def test_several_codecs_share_one_survey(speech):
    config = speech.write(write={"shard_size": 5})
    speech.encode(config)
    survey = codec_stages(config)[0]
    before = snapshot(survey.root)
    speech.encode(config, "more", ToyCodec(samples_per_frame=160))
    assert snapshot(survey.root) == before
    assert (passes(config), passes(config, "more")) == (12, 12)


@pytest.mark.slow
def test_a_dataset_of_one_shard_uses_two_ranks(speech):
    config = speech.write(write={"shard_size": 100}, encode={"unit_seconds": 1.0})
    survey, encode, assemble = codec_stages(config)
    assert all(run_stage(stage, LocalExecutor(2), KeepErrors(), max_reject_fraction=1.0).ok
               for stage in (survey, encode, assemble))  # fmt: skip
    # Enough units of about equal cost for both; which rank takes how many is up to the machine.
    costs = [unit.cost for unit in load_plan(encode)]
    assert len(costs) > 4
    assert max(costs) < 1.5 * sum(costs) / len(costs)
    assert len(load_plan(assemble)) == 1
    check_once(config, speech.dataset)
    before = snapshot(speech.dataset)
    run_codec(config, restart=True)
    assert snapshot(speech.dataset) == before


def test_a_codec_is_added_when_the_run_directory_is_gone(speech, tmp_path):
    config = speech.write(write={"shard_size": 5})
    speech.encode(config)
    later = dataclasses.replace(config, run_dir=str(tmp_path / "new"))
    assert sum(map(len, speech.encode(later, "more", ToyCodec(samples_per_frame=160)).batches)) == 12
    assert [codec.name for codec in read_dataset(speech.dataset).codecs] == ["more", "toy"]


def test_without_contexts_targets_alone_are_encoded(speech):
    speech.add("13.flac", voice(0.3 + 3 / 20, seed=3))
    config = speech.write(match=None, write={"shard_size": 5})
    codec = speech.encode(config)
    # The copy of number 3 is the same segment.
    assert sum(map(len, codec.batches)) == passes(config) == 12
    assert sum(1 for _ in open_shar(speech.dataset, ["target_codes"])) == 13


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the Shar in ../shared/data, which is not in the repository")
def test_a_dataset_that_the_published_scripts_wrote(project, tmp_path):
    folder = copy(PUBLISHED, tmp_path / "published")
    (folder / "extended_manifest.json").unlink()
    (folder / "21fpsCausalDecoder").rename(folder / "codes_theirs")
    list(
        rebuild_index(
            folder, [parse_codec_facts("theirs,codebook_size=2016,sampling_rate=22050,samples_per_frame=1024")]
        )
    )
    config = dataclasses.replace(project.configure(), dataset_dir=str(folder))
    codec = project.encode(config)
    places = stored(folder)
    assert len(places) == 48
    assert sum(map(len, codec.batches)) == passes(config) == len({audio for audio, _ in places}) == 24
    assert [record.name for record in read_dataset(folder).codecs] == ["theirs", "toy"]


def test_a_dataset_that_lhotse_wrote(project, tmp_path):
    cuts = []
    for number in range(5):
        path = put(tmp_path / f"audio/{number % 4}.wav", voice(1.0 + number % 4 / 10, seed=number % 4))
        recording = Recording.from_file(path, recording_id=f"rec{number}")
        supervision = SupervisionSegment(f"sup{number}", recording.id, 0.0, recording.duration, text="text")
        cuts.append(MonoCut(f"cut{number}", 0.0, recording.duration, 0, [supervision], recording=recording))
    (tmp_path / "flat").mkdir()
    CutSet(cuts).to_shar(tmp_path / "flat", fields={"recording": "flac"}, shard_size=2)
    list(rebuild_index(tmp_path / "flat"))
    config = dataclasses.replace(project.configure(), dataset_dir=str(tmp_path / "flat"))
    codec = project.encode(config)
    assert sum(map(len, codec.batches)) == passes(config) == 4
    for cut in open_shar(tmp_path / "flat"):
        np.testing.assert_array_equal(cut.target_codes.load(), codec.codes(cut.load_audio()[0]))


class OtherArithmetic(ToyCodec):
    """The same codec, as it comes out on another device."""

    def codes(self, samples):
        return super().codes(samples) + 1


@pytest.fixture
def encoded(speech):
    """A dataset with codes, many blocks of which every shard needs some."""
    write, match = {"shard_size": 3, "order": "shuffle"}, {"min_duration": 0.0}
    config = speech.write(write=write, match=match, encode={"unit_seconds": 1.0})
    speech.encode(config)
    return config


@pytest.mark.parametrize("codec", [ToyCodec, OtherArithmetic])
def test_a_lost_block_is_encoded_again_and_its_codes_reach_all_places(speech, encoded, codec):
    before = dict(stored(speech.dataset))
    bytes_before = snapshot(speech.dataset)
    stage = codec_stages(encoded)[1]
    (stage.root / "parts/000001.codes").unlink()
    again = speech.encode(encoded, codec=codec())
    assert 0 < sum(map(len, again.batches)) < 12
    changed = {audio for audio, codes in stored(speech.dataset) if codes != before[audio]}
    assert len(changed) == (sum(map(len, again.batches)) if codec is OtherArithmetic else 0)
    assert (snapshot(speech.dataset) == bytes_before) == (codec is ToyCodec)
    check_once(encoded, speech.dataset)


def test_a_damaged_block_is_named_and_made_again_once_it_is_removed(speech, encoded):
    before = snapshot(speech.dataset)
    _, stage, assemble = codec_stages(encoded)
    path = stage.root / "parts/000001.codes"
    first_code = int.from_bytes(path.read_bytes()[:8], "little")
    for position in (first_code, 3):
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)
        for lost in (speech.dataset / "codes_toy/target_codes").iterdir():
            lost.unlink()
        result = run(assemble)
        assert result.failures
        assert all(str(path) in error.message for error in result.failures.values())
        path.unlink()
        speech.encode(encoded)
        assert snapshot(speech.dataset) == before


def report_of(config, tmp_path, **options):
    stage = ValidateStage(codec_stages(config)[0].dataset.directory, RunDir(tmp_path), **options)
    with mock.patch("sharmill.validate.recheck.load_recorded_codec", return_value=ToyCodec()):
        assert run(stage).ok
    return stage.report()


def test_codes_of_other_audio_are_encoded_again_by_redo(speech, encoded, tmp_path):
    """Those of one block were made wrongly: the checker names the shards, and every place gets the right codes."""
    before = snapshot(speech.dataset)
    stage = codec_stages(encoded)[1]
    (stage.root / "parts/000001.codes").unlink()

    class Wrong(ToyCodec):
        def codes(self, samples):
            return super().codes(samples)[:, ::-1] + 5

    speech.encode(encoded, codec=Wrong())
    assert snapshot(speech.dataset) != before
    codec = dataclasses.replace(encoded.section(EncodeConfig).codecs[0], name="toy")
    config = encoded.with_section(EncodeConfig(codecs=[codec], unit_seconds=1.0))
    report = report_of(encoded, tmp_path / "check", recheck_codes=1.0, codec_models={"toy": "builtin"})
    assert {unit.stage for unit in report.units_to_repeat} == {"encode/toy"}
    take_back_commits(config, report, ["encode", "assemble"])
    speech.encode(config)
    assert snapshot(speech.dataset) == before
    check_once(config, speech.dataset)


def test_interrupted_between_new_codes_and_their_assembly_it_goes_on(speech, encoded):
    _, encode, assemble = codec_stages(encoded)
    aside = encode.dir.ledger / f".a.jsonl.{'0' * 32}.tmp"  # of a process that was killed
    aside.touch()
    revoke(encode, {0})
    assert not aside.exists()
    encode.dir.done.unlink()
    with loading(OtherArithmetic()):
        assert run(encode).ok
        with mock.patch.object(type(assemble), "plan", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            run(assemble)
    assert read_dataset(speech.dataset).codecs == []
    assert run(assemble).ok
    check_once(encoded, speech.dataset)


def test_a_survey_of_other_audio_is_not_used(speech, encoded):
    changed = speech.configure(write={"shard_size": 4, "order": "manifest"}, match={"min_duration": 0.0})
    survey, encode, _ = codec_stages(changed)
    assert run(make_stages(changed, ["write"])[0], restart=True).ok
    with raises(ConfigError, "stage_not_run", "survey"):
        run(encode)
    assert run(survey).ok
    speech.encode(changed)
    check_once(changed, speech.dataset)


@given(
    keys=st.lists(st.integers(0, 9), max_size=60),
    window=st.integers(1, 20),
    counts=st.lists(st.integers(0, 7), max_size=20),
)
def test_owners_are_first_places_and_numbers_those_of_their_segments(keys, window, counts):
    # Keys that differ in either half of the hash.
    hashes = np.array([[key % 3 * ((1 << 64) // 3), key] for key in keys], "<u8").reshape(-1, 2)
    table = np.zeros(len(keys), PLACE)
    table["hash"], table["num_samples"], table["sampling_rate"] = hashes, [key % 4 for key in keys], 1
    bounds = np.clip(np.cumsum([0, *counts, len(keys)]), 0, len(keys))
    with mock.patch.object(segments, "_WINDOW", window):
        owners = find_first(*hashes.T)
        assert owners.tolist() == [keys.index(key) for key in keys]
        numbers = SegmentNumbers(owners)
        assert numbers.count() == len(set(keys))
        tables = [(shard, 0, table[start:stop]) for shard, (start, stop) in enumerate(pairwise(bounds))]
        listed = [tuple(row["place"]["hash"]) for part in numbers.sort(tables) for row in part]
        found = [listed[number] for number in numbers.of_places().tolist()]
    assert len(listed) == len(set(listed)) == len(set(keys))
    assert found == [tuple(row) for row in hashes]

"""Stage 3: the codes of every audio item, exact frames, several codecs, restarts, damaged shards."""

from __future__ import annotations

import dataclasses
import logging
import math
from unittest import mock

import msgspec
import numpy as np
import pytest
from lhotse import CutSet
from support.errors import raises
from support.manifests import KeepErrors
from support.pipelines import shar_fields
from support.shar import (
    Project,
    ToyCodec,
    codec_stages,
    copy,
    lines,
    loading,
    reindex,
    rewrite,
    run,
    snapshot,
    voice,
)

from sharmill.encode import segment_codes
from sharmill.encode.assemble import AssembleStage
from sharmill.encode.config import EncodeConfig
from sharmill.encode.segment_codes import read_counts
from sharmill.encode.stage import EncodeStage
from sharmill.engine.run import run_stage
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError, DamagedShard, FatalError
from sharmill.executors.local import LocalExecutor
from sharmill.shar import open_shar
from sharmill.shar.index import CodecRecord, read_dataset
from sharmill.shar.items import FieldWriter, Item, read_field
from sharmill.write.stage import WriteStage

SECONDS = [1.0, 0.5, 1.25, 0.31, 2.0]
TOY = CodecRecord(name="toy", model="toy", checksum="toy", trained=False, sampling_rate=16000, samples_per_frame=320,
                  num_codebooks=3, codebook_size=64)  # fmt: skip


@pytest.fixture
def config(project):
    """A dataset of five cuts in two shards, without codes; utterance 0 is everyone's context."""
    for number, seconds in enumerate(SECONDS):
        project.add(f"{number}.flac", voice(seconds, pitch=150 + 30 * number, seed=number), number=number)
    return project.write([1, 0, 0, 0, 0], write={"shard_size": 3, "order": "manifest"})


def encode(config, codec, name="toy", *, restart=False, **options):
    """Brings codes into a dataset, with other ``options`` of the section encode; the result of the last stage."""
    config = config.with_section(dataclasses.replace(config.section(EncodeConfig), **options))
    with loading(codec):
        for stage in codec_stages(config, name):
            result = run(stage, restart=restart and stage.kind != "survey")
            if not result.ok:
                break
    return result


def test_the_codes_are_those_of_the_stored_audio(project, config):
    codec = project.encode(config)
    for cut in open_shar(project.dataset):
        for role in ("target", "context"):
            samples = cut.load_custom(f"{role}_audio")[0]
            np.testing.assert_array_equal(cut.custom[f"{role}_codes"].load(), codec.codes(samples))


def counted(config):
    """How often each code occurs in the segments, according to the run directory."""
    (stage,) = [stage for stage in codec_stages(config, "toy") if stage.kind == "encode"]
    return read_counts(stage.dir)


@pytest.mark.parametrize("unit_seconds", [None, 0.5])
def test_codes_are_counted_once_for_each_segment(project, config, unit_seconds):
    options = dataclasses.replace(config.section(EncodeConfig), unit_seconds=unit_seconds)
    codec = project.encode(config.with_section(options))
    # All contexts are targets too.
    codes = np.concatenate([codec.codes(cut.load_custom("target_audio")[0]) for cut in open_shar(project.dataset)], 1)
    expected = [np.bincount(book, minlength=codec.codebook_size) for book in codes]
    np.testing.assert_array_equal(counted(config), expected)


def test_damaged_counts_are_an_error(project, config):
    project.encode(config)
    paths = RunDir(project.run_dir).stage("encode/toy")
    (path,) = paths.path.glob("parts/*.codes")
    path.write_bytes(path.read_bytes()[:-3] + b"\0\0\0")
    with raises(ConfigError, "damaged_run_dir", path.name):
        segment_codes.add_counts(paths, 1, TOY)
    record = lines(segment_codes.encoded_file(paths))[0]
    segment_codes.encoded_file(paths).write_bytes(msgspec.json.encode(record | {"counts": "AAAA"}))
    with raises(ConfigError, "damaged_run_dir", "codes.json"):
        counted(config)


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 24000, 44100])
@pytest.mark.parametrize("samples_per_frame", [320, 441])
def test_frames_are_the_samples_at_the_codecs_rate_rounded_up(project, config, rate, samples_per_frame):
    codec = project.encode(config, codec=ToyCodec(rate, samples_per_frame))
    for cut in open_shar(project.dataset):
        for codes, recording in ((cut.target_codes, cut.target_audio), (cut.context_codes, cut.context_audio)):
            samples = recording.resample(rate).num_samples
            assert codes.load().shape == tuple(codes.shape) == (3, math.ceil(samples / samples_per_frame))
        assert cut.target_codes.frame_shift == codec.samples_per_frame / codec.sampling_rate


def test_resampled_audio_gives_the_codes_of_lhotses_resampling(project, config):
    codec = project.encode(config, codec=ToyCodec(sampling_rate=24000))
    for cut in open_shar(project.dataset):
        samples = cut.target_audio.resample(24000).load_audio()[0]
        np.testing.assert_array_equal(cut.target_codes.load(), codec.codes(samples))


@pytest.mark.parametrize(("size", "dtype"), [(64, np.int16), (1 << 17, np.int32)])
def test_the_stored_type_follows_the_codebook(project, config, size, dtype):
    project.encode(config, codec=ToyCodec(codebook_size=size))
    for cut in open_shar(project.dataset):
        assert cut.target_codes.load().dtype == cut.context_codes.load().dtype == dtype


def test_each_audio_of_the_dataset_is_encoded_once(project, config):
    codec = project.encode(config)
    assert sorted(length for batch in codec.batches for length in batch) == sorted(round(s * 16000) for s in SECONDS)


def test_batches_are_sorted_by_length_and_bounded_by_padded_seconds(project, config):
    codec = ToyCodec()
    assert encode(config, codec, batch_seconds=2.0).ok
    assert codec.batches == [[32000], [20000], [16000, 8000], [4960]]


def read_stats(config):
    """The stats of the commits of the units that were encoded, in order."""
    ledger = codec_stages(config)[1].dir.path.glob("**/ledger/*.jsonl")
    commits = sorted((commit for path in ledger for commit in lines(path)), key=lambda commit: commit["index"])
    return [commit["stats"] for commit in commits]


# In frames of 20 ms these have 50, 25, 62.5, 15.5 and 100.
@pytest.mark.parametrize(
    ("options", "frames", "share"),
    [
        # Batches of 100, 63, 50 + 25 and 16 frames.
        ({"batch_seconds": 2.0}, 279, "9.32"),
        # On a CPU each alone in its canonical length, which is 64 frames for 63.
        ({"canonical_shapes": True}, 255, "0.78"),
    ],
)
def test_the_padding_of_the_batches_is_in_the_commits_and_in_the_log(config, caplog, options, frames, share):
    caplog.set_level(logging.INFO)
    assert encode(config, ToyCodec(), **options).ok
    (stats,) = read_stats(config)
    assert stats["encoded_seconds"] == pytest.approx(sum(SECONDS), abs=1e-12)
    assert stats["padded_seconds"] == pytest.approx(frames * 0.02, abs=1e-12)
    assert f"5.1 s of audio encoded, {share} % of the batches is padding" in caplog.messages


def test_a_codec_that_minds_padding_gets_equal_lengths_only(project, config):
    codec = project.encode(config, codec=ToyCodec(equal_lengths_only=True))
    assert all(len({-(-length // 320) for length in batch}) == 1 for batch in codec.batches)


@pytest.mark.parametrize("batch_seconds", [0.1, 1.0, 100.0])
def test_the_bytes_do_not_depend_on_how_the_toy_is_batched(project, config, built, batch_seconds):
    assert encode(config, ToyCodec(), batch_seconds=batch_seconds).ok
    found = snapshot(project.dataset / "codes_toy")
    assert encode(config, ToyCodec(), restart=True).ok
    assert snapshot(project.dataset / "codes_toy") == found


def test_the_index_describes_the_codec(project, config):
    codec = project.encode(config)
    dataset = read_dataset(project.dataset)
    assert dataset.fields == [
        "cuts", "target_audio", "context_audio", "codes_toy/context_codes", "codes_toy/target_codes",
    ]  # fmt: skip
    (record,) = dataset.codecs
    assert msgspec.to_builtins(record) == {
        "name": "toy",
        "model": "builtin",
        "checksum": "toy",
        "trained": False,
        "sampling_rate": 16000,
        "samples_per_frame": 320,
        "num_codebooks": 3,
        "codebook_size": codec.codebook_size,
        "devices": ["cpu"],
        "precision": "fp32",
    }
    for shard in lines(project.dataset / "shards.jsonl"):
        assert set(shard["fields"]) == set(dataset.fields)


def test_codecs_lie_side_by_side_and_one_is_added_later(project, config):
    project.encode(config, "zeta", ToyCodec(samples_per_frame=160))
    before = snapshot(project.dataset)
    project.encode(config, "alpha", ToyCodec(samples_per_frame=640))
    after = snapshot(project.dataset)
    assert [codec.name for codec in read_dataset(project.dataset).codecs] == ["alpha", "zeta"]
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"dataset.json", "shards.jsonl"}
    assert {name.split("/")[0] for name in after.keys() - before.keys()} == {"codes_alpha"}
    for name, frames in (("alpha", 25), ("zeta", 100)):
        cuts = list(CutSet.from_shar(fields=shar_fields(project.dataset, name)))
        assert len(cuts) == 5
        assert cuts[0].target_codes.load().shape == (3, frames)


def test_codes_of_another_run_are_left_alone(project, config, tmp_path):
    """Also by a run directory that has a plan for a codec of that name, of another dataset directory."""
    project.encode(config)
    before = snapshot(project.dataset)
    other = Project(tmp_path / "other")
    other.folder.mkdir()
    for number in range(2):
        other.add(f"{number}.flac", voice(0.5, seed=number))
    other.encode(other.write())
    for options in ({}, {"restart": True}):
        for run_dir in (tmp_path / "fresh", other.run_dir):
            intruder = project.configure(run_dir=str(run_dir))
            with raises(ConfigError, "foreign_output", "'toy'"):
                encode(intruder, ToyCodec(), **options)
            assert snapshot(project.dataset) == before


def test_a_restart_replaces_the_codes_and_nothing_else(project, config):
    project.encode(config, "kept", ToyCodec(samples_per_frame=160))
    project.encode(config)
    before = snapshot(project.dataset)
    assert encode(config, ToyCodec(samples_per_frame=640), restart=True).ok
    after = snapshot(project.dataset)
    changed = {name for name in before if before[name] != after[name]}
    assert {name.split("/")[0] for name in changed} == {"dataset.json", "shards.jsonl", "codes_toy"}
    assert encode(config, ToyCodec(), restart=True).ok
    assert snapshot(project.dataset) == before


def but_reservations(dataset):
    """What ``snapshot`` has of a dataset whose run was killed, and has still reserved its codes."""
    return {name: data for name, data in snapshot(dataset).items() if not name.endswith(".reservation")}


def test_a_restart_that_dies_while_it_encodes_leaves_the_old_codes(project, config):
    project.encode(config)
    before = snapshot(project.dataset)
    with mock.patch.object(EncodeStage, "plan", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        encode(config, ToyCodec(), restart=True)
    assert but_reservations(project.dataset) == before
    assert encode(config, ToyCodec(samples_per_frame=640)).ok
    assert read_dataset(project.dataset).codecs[0].samples_per_frame == 640


def test_a_restart_that_dies_while_it_assembles_leaves_a_dataset_without_the_codec(project, config):
    project.encode(config, "kept", ToyCodec(samples_per_frame=160))
    without = snapshot(project.dataset)
    project.encode(config)
    with mock.patch.object(AssembleStage, "plan", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        encode(config, ToyCodec(), restart=True)
    assert but_reservations(project.dataset) == without
    assert encode(config, ToyCodec()).ok


def test_a_second_run_does_nothing(project, config):
    project.encode(config)
    codec = ToyCodec()
    assert encode(config, codec).ok
    assert codec.batches == []


def test_a_lost_codes_file_is_made_again(project, config):
    project.encode(config)
    before = snapshot(project.dataset)
    (project.dataset / "codes_toy/context_codes/codes.000001.tar").unlink()
    codec = project.encode(config)
    assert codec.batches == []
    assert snapshot(project.dataset) == before


def test_ranks_with_different_models_are_found_out(project, config):
    class Changing(ToyCodec):
        @property
        def checksum(self):
            return f"toy{len(self.batches)}"

    with raises(FatalError, "bad_model"):
        encode(config, Changing(), unit_seconds=1.0)
    assert read_dataset(project.dataset).codecs == []


def flip(path):
    data = bytearray(path.read_bytes())
    data[1500] ^= 1
    path.write_bytes(data)


def drop_last(path):
    items = list(read_field(path))
    with FieldWriter(path) as writer:
        for item in items[:-1]:
            writer.add(item)


DAMAGES = {
    "flipped bit in the audio": flip,
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-700]),
    "one item fewer": drop_last,
    "gone": lambda path: path.unlink(),
}


def run_damaged(stage):
    """Runs a stage over a damaged dataset; the result and the errors heard."""
    listener = KeepErrors()
    with loading(ToyCodec()):
        result = run_stage(stage, LocalExecutor(1), listener, max_reject_fraction=1.0)
    return result, listener.errors


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("field", ["target_audio", "context_audio"])
def test_a_damaged_shard_fails_its_unit_before_anything_is_encoded(project, config, damage, field):
    path = project.dataset / f"{field}/recording.000000.tar"
    before = path.read_bytes()
    DAMAGES[damage](path)
    survey, stage, _ = codec_stages(config)
    result, errors = run_damaged(survey)
    assert list(result.failures) == [0]
    assert all(f"{field}/recording.000000.tar" in error for error in errors)
    with raises(ConfigError, "stage_not_run", "survey"):
        run(stage)
    path.write_bytes(before)
    assert encode(config, ToyCodec()).ok
    assert len(list(open_shar(project.dataset))) == 5


@pytest.mark.parametrize("damage", ["flipped bit in the audio", "gone"])
def test_damage_after_the_survey_fails_the_blocks_with_what_lay_there(project, config, damage):
    path = project.dataset / "target_audio/recording.000001.tar"
    survey, stage, _ = codec_stages(config.with_section(EncodeConfig(unit_seconds=0.3)))
    assert run(survey).ok
    before = path.read_bytes()
    DAMAGES[damage](path)
    result, errors = run_damaged(stage)
    assert result.failures
    assert all("target_audio/recording.000001.tar" in error for error in errors)
    assert len(list((stage.root / "parts").iterdir())) >= 3
    assert read_dataset(project.dataset).codecs == []
    path.write_bytes(before)
    with loading(ToyCodec()):
        assert run(stage).ok


@pytest.mark.parametrize("damage", ["flipped bit in the audio", "cut off", "one item fewer"])
def test_damage_that_the_checksums_hide_fails_the_unit_too(project, config, damage):
    DAMAGES[damage](project.dataset / "target_audio/recording.000000.tar")
    reindex(project.dataset)
    survey, stage, _ = codec_stages(config)
    result, errors = run_damaged(survey)
    if damage == "flipped bit in the audio":
        # FLAC has checksums of its own, which libsndfile looks at in part.
        assert result.ok
        result, _ = run_damaged(stage)
        assert result.ok or list(result.failures) == [0]
    else:
        assert list(result.failures) == [0]
        assert errors


@pytest.mark.parametrize("change", [{"num_samples": 15999}, {"sampling_rate": 8000}])
def test_metadata_that_disagree_with_the_audio_fail_the_unit(project, config, change):
    path = project.dataset / "target_audio/recording.000000.tar"
    items = list(read_field(path))
    with FieldWriter(path) as writer:
        for item in items:
            writer.add(Item(item.cut_id, item.extension, item.data, item.metadata | change))
    reindex(project.dataset)
    survey, stage, _ = codec_stages(config)
    assert run(survey).ok
    result, errors = run_damaged(stage)
    assert list(result.failures) == [0]
    assert str(path) in errors[0]


def test_swapped_fields_fail_the_unit(project, config):
    context = project.dataset / "context_audio/recording.000000.tar"
    items = list(read_field(context))
    with FieldWriter(context) as writer:
        for item in reversed(items):
            writer.add(item)
    reindex(project.dataset)
    result, errors = run_damaged(codec_stages(config)[0])
    assert list(result.failures) == [0]
    assert "context_audio/recording.000000.tar" in errors[0]


def test_what_is_no_dataset_is_a_configuration_error(project):
    with raises(ConfigError, "no_dataset"):
        encode(project.configure(), ToyCodec())


def test_codes_of_other_audio_are_not_taken_for_those_of_this(project, config):
    project.encode(config)
    changed = project.configure(write={"shard_size": 3, "order": "manifest", "sampling_rate": 8000})
    assert run(WriteStage(changed), restart=True).ok
    assert encode(changed, ToyCodec()).ok
    assert {cut.target_codes.shape[1] for cut in open_shar(project.dataset)} == {50, 25, 63, 16, 100}


def test_copies_of_a_dataset_can_be_extended_from_a_fresh_run(built, tmp_path):
    directory = copy(built.dataset, tmp_path / "copy")
    config = built.configure(dataset_dir=str(directory), run_dir=str(tmp_path / "run"))
    assert encode(config, ToyCodec(samples_per_frame=160), "more").ok
    assert [codec.name for codec in read_dataset(directory).codecs] == ["more", "toy"]


def test_an_index_without_the_audio_checksums_is_damage(project, config):
    shards = lines(project.dataset / "shards.jsonl")
    del shards[0]["fields"]["context_audio"]
    rewrite(project.dataset / "shards.jsonl", shards)
    with raises(DamagedShard, "damaged_shard", "context_audio", "shard 0"):
        encode(config, ToyCodec())

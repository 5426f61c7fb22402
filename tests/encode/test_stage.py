"""Stage 3: the codes of every audio item, exact frames, several codecs, restarts, damaged shards."""

import dataclasses
import math
from unittest import mock

import numpy as np
import pytest
from lhotse import CutSet
from support import damage as do
from support.audio import container
from support.project import (
    ToyCodec,
    codec_stages,
    loading,
    raises,
    reindex,
    run,
    shar_fields,
    snapshot,
    stage_of,
    voice,
)

from sharmill.audio.files import decode_bytes
from sharmill.encode.codes import read_counts
from sharmill.encode.config import EncodeConfig
from sharmill.encode.stage import EncodeStage, ShardsStage
from sharmill.errors import ConfigError, FatalError
from sharmill.shar import open_shar
from sharmill.shar.index import read_dataset

SECONDS = [1.0, 0.5, 1.25, 0.31, 2.0]


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
            result = run(stage, restart=restart and stage.kind != "encode.segments")
            if not result.ok:
                break
    return result


@pytest.mark.parametrize(("size", "dtype"), [(64, np.int16), (1 << 17, np.int32)])
@pytest.mark.parametrize(
    ("rate", "samples_per_frame"), [(8000, 320), (16000, 441), (22050, 320), (24000, 441), (44100, 320)]
)
def test_codes_match_the_stored_audio_with_frames_rounded_up(project, config, rate, samples_per_frame, size, dtype):
    codec = project.encode(config, codec=ToyCodec(rate, samples_per_frame, size))
    for cut in open_shar(project.dataset):
        for codes, recording in ((cut.target_codes, cut.target_audio), (cut.context_codes, cut.context_audio)):
            stored = recording.resample(rate)
            assert tuple(codes.shape) == (3, math.ceil(stored.num_samples / samples_per_frame))
            assert codes.load().dtype == dtype
            np.testing.assert_array_equal(codes.load(), codec.codes(stored.load_audio()[0]))
        assert cut.target_codes.frame_shift == codec.samples_per_frame / codec.sampling_rate


@pytest.mark.parametrize("unit_seconds", [None, 0.5])
def test_codes_are_counted_once_for_each_segment(project, config, unit_seconds):
    options = dataclasses.replace(config.section(EncodeConfig), unit_seconds=unit_seconds)
    codec = project.encode(config.with_section(options))
    # All contexts are targets too.
    codes = np.concatenate([codec.codes(cut.load_custom("target_audio")[0]) for cut in open_shar(project.dataset)], 1)
    expected = [np.bincount(book, minlength=codec.codebook_size) for book in codes]
    np.testing.assert_array_equal(read_counts(codec_stages(config, "toy")[1]), expected)


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


@pytest.mark.parametrize("dying", [EncodeStage, ShardsStage])
def test_a_restart_that_dies_leaves_the_old_codes_or_none(project, config, dying):
    project.encode(config, "kept", ToyCodec(samples_per_frame=160))
    without = snapshot(project.dataset)
    project.encode(config)
    expected = snapshot(project.dataset) if dying is EncodeStage else without
    with mock.patch.object(dying, "plan", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        encode(config, ToyCodec(), restart=True)
    # The run that was killed has still reserved its codes.
    found = snapshot(project.dataset)
    assert {name: data for name, data in found.items() if not name.endswith(".reservation")} == expected
    other = ToyCodec(samples_per_frame=640) if dying is EncodeStage else ToyCodec()
    assert encode(config, other).ok
    assert read_dataset(project.dataset).codecs[1].samples_per_frame == other.samples_per_frame


def test_ranks_with_different_models_are_found_out(project, config):
    assert encode(config, ToyCodec(), unit_seconds=1.0).ok
    _, stage, _ = codec_stages(config.with_section(EncodeConfig(unit_seconds=1.0)))
    before = read_dataset(project.dataset)
    next((stage.root / "parts").iterdir()).unlink()
    other = ToyCodec()
    other.checksum = "other"
    with raises(FatalError, "bad_model"):
        encode(config, other, unit_seconds=1.0)
    assert read_dataset(project.dataset) == before


# By the name of the file.
DAMAGES = {
    "flipped bit in the audio": lambda name: do.flip_bit(name, 1500),
    "cut off": lambda name: do.change_bytes(name, lambda data: data[:-700]),
    "one item fewer": lambda name: do.change_items(name, lambda items: items[:-1]),
    "gone": do.remove_files,
}


def run_damaged(stage):
    """Run a stage over a damaged dataset; return the result and the messages of its errors."""
    with loading(ToyCodec()):
        result = run(stage)
    return result, [error.message for error in result.failures.values()]


def at_integer_scale(item):
    data = container(32768 * decode_bytes(item.data)[0], 16000, "WAV", "FLOAT")
    return dataclasses.replace(item, extension="wav", data=data)


def with_a_sample_fewer(item):
    return dataclasses.replace(item, metadata=item.metadata | {"num_samples": item.metadata["num_samples"] - 1})


LAST_TARGETS = "target_audio/recording.000001.tar"


@pytest.mark.parametrize(
    ("damage", "is_own"), [("flipped bit in the audio", True), ("gone", True), *((damage, False) for damage in DAMAGES)]
)
def test_damaged_audio_fails_the_units_that_read_it(project, config, tmp_path, damage, is_own):
    """The first units are the codec's if the run wrote the dataset; otherwise the survey reads all files first."""
    config = config.with_section(EncodeConfig(unit_seconds=0.3))
    if not is_own:
        config = dataclasses.replace(config, run_dir=str(tmp_path / "other"))
    survey, stage, _ = codec_stages(config)
    path = project.dataset / LAST_TARGETS
    before = path.read_bytes()
    DAMAGES[damage](LAST_TARGETS)(project.dataset)
    if is_own:
        assert run(survey).ok
    result, errors = run_damaged(stage if is_own else survey)
    assert result.failures
    assert all(LAST_TARGETS in error for error in errors)
    assert len(list((stage.root / "parts").glob("*"))) >= 3 * is_own
    assert read_dataset(project.dataset).codecs == []
    path.write_bytes(before)
    assert encode(config, ToyCodec(), unit_seconds=0.3).ok
    assert len(list(open_shar(project.dataset))) == 5


@pytest.mark.parametrize(
    ("change", "said"), [(at_integer_scale, "over_full_scale"), (with_a_sample_fewer, "samples at 16000 Hz, not")]
)
def test_audio_that_is_not_what_its_metadata_say_is_not_encoded(project, config, change, said):
    """Writing rejects it, but the dataset of another tool may have it."""
    do.change_items(LAST_TARGETS, lambda items: list(map(change, items)))(project.dataset)
    reindex(project.dataset)
    survey, stage, _ = codec_stages(config)
    assert run(survey).ok
    assert [said in error for error in run_damaged(stage)[1]] == [True]


def test_codes_of_other_audio_are_not_taken_for_those_of_this(project, config):
    project.encode(config)
    changed = project.configure(write={"shard_size": 3, "order": "manifest", "sampling_rate": 8000})
    assert run(stage_of(changed, "write"), restart=True).ok
    assert encode(changed, ToyCodec()).ok
    assert {cut.target_codes.shape[1] for cut in open_shar(project.dataset)} == {50, 25, 63, 16, 100}


@pytest.mark.parametrize(
    ("file", "place"), [("parts/000000.npy", 131), ("merged/places.npy", -24), ("merged/places.npy", -1)]
)
def test_damaged_codes_in_the_run_directory_fail_their_shards(project, config, file, place):
    survey, stage, assemble = codec_stages(config)
    with loading(ToyCodec()):
        assert run(survey).ok
        assert run(stage).ok
    codes = stage.root / "parts/000000.npy"
    whole = (stage.root / file).read_bytes()
    do.flip_bit(file, place)(stage.root)
    result, errors = run_damaged(assemble)
    assert result.failures
    assert all(f"{codes} is damaged: delete it and run the stage encode" in error for error in errors)
    (stage.root / file).write_bytes(whole)
    assert run(assemble).ok


@pytest.mark.parametrize(("file", "place"), [("segments.npy", -1), ("numbers.npy", -4)])
def test_a_damaged_list_of_segments_is_refused_before_any_work(project, config, file, place):
    survey, stage, assemble = codec_stages(config)
    with loading(ToyCodec()):
        assert run(survey).ok
        assert run(stage).ok
        list_file = survey.dir.merged / file
        whole = list_file.read_bytes()
        do.flip_bit(file, place)(survey.dir.merged)
        for later in (stage, assemble):
            with raises(ConfigError, "stage_not_run", str(list_file)):
                run(later)
    list_file.write_bytes(whole)
    assert run(assemble).ok

"""Stage 2: shards, stored segments, order of cuts, rejects, empty shards and datasets, restarts."""

import dataclasses
import os
import shutil

import numpy as np
import pytest
import soundfile as sf
from hypothesis import given, strategies as st
from lhotse import CutSet
from support.project import (
    Project,
    check_dataset,
    lines,
    numbers,
    put,
    raises,
    run,
    shar_fields,
    snapshot,
    stage_of,
    voice,
)

from sharmill.audio.files import decode_bytes, probe_bytes
from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.config import to_yaml
from sharmill.engine.run_dir import RunDir
from sharmill.errors import ConfigError, DeviceError, RejectRecord
from sharmill.manifest import Segment
from sharmill.shar import open_shar
from sharmill.shar.index import read_dataset
from sharmill.write.audio import store_segments
from sharmill.write.config import WriteConfig
from sharmill.write.stage import divide_into_shards, order_lines


def fill(project: Project, count: int = 7, suffix: str = "flac") -> None:
    for number in range(count):
        project.add(f"{number}.{suffix}", voice(0.3 + 0.1 * number, seed=number), number=number)


def test_the_index_names_count_seconds_sizes_and_checksums(project):
    fill(project, 4)
    project.write(write={"shard_size": 4, "order": "manifest"})
    (shard,) = lines(project.dataset / "shards.jsonl")
    assert (shard["target_seconds"], shard["context_seconds"]) == (1.8, 1.8)
    assert set(shard["fields"]) == {"cuts", "target_audio", "context_audio"}
    for field in shard["fields"].values():
        assert (project.dataset / field["file"]).stat().st_size == field["size"]
    dataset = read_dataset(project.dataset)
    assert (dataset.num_shards, dataset.num_cuts, dataset.target_seconds) == (1, 4, 1.8)
    assert dataset.limits == {"min_similarity": 0.6, "min_duration": 3.0, "max_duration": None}


@pytest.mark.parametrize("format", ["flac", "wav", "mp3", "opus", "original"])
def test_every_format_is_read_by_lhotse(project, format):
    fill(project, 3, "wav")
    project.write(write={"audio_format": format, "order": "manifest"})
    for number, cut in enumerate(CutSet.from_shar(fields=shar_fields(project.dataset))):
        samples = cut.load_target_audio()
        # lhotse decodes opus as libsndfile does, whose header has the rate of the source.
        assert samples.shape == (1, round((0.3 + 0.1 * number) * 16000))
        assert np.corrcoef(samples[0], voice(0.3 + 0.1 * number, seed=number))[0, 1] > 0.9


@pytest.mark.parametrize(
    ("damage", "reasons"),
    [
        (lambda path: path.unlink(), {"missing_audio"}),
        (lambda path: os.truncate(path, 200), {"unreadable_audio", "duration_mismatch"}),
    ],
)
@pytest.mark.parametrize("suffix", ["flac", "wav"])
def test_a_record_that_fails_is_dropped_from_every_field(project, damage, reasons, suffix):
    fill(project, 6, suffix)
    config = project.configure(write={"order": "manifest", "shard_size": 3})
    project.match_by_hand(config)
    damage(project.root / f"2.{suffix}")
    assert run(stage_of(config, "write")).ok
    rejects = project.rejects("write")
    # 2 is a target, and the context of 1.
    assert [(r["record"]["number"], r["detail"].split(":")[0]) for r in rejects] == [(1, "context"), (2, "target")]
    assert {r["reason"] for r in rejects} <= reasons
    assert [shard["count"] for shard in lines(project.dataset / "shards.jsonl")] == [1, 3]
    assert numbers(CutSet.from_shar(fields=shar_fields(project.dataset))) == [0, 3, 4, 5]
    assert numbers(open_shar(project.dataset)) == [0, 3, 4, 5]


def test_a_shard_without_a_good_record_is_committed_empty(project):
    fill(project, 6)
    config = project.configure(write={"order": "manifest", "shard_size": 2})
    project.match_by_hand(config, [1, 0, 3, 2, 5, 4])
    for number in (2, 3):
        (project.root / f"{number}.flac").unlink()
    assert run(stage_of(config, "write")).ok
    shards = lines(project.dataset / "shards.jsonl")
    assert [(shard["index"], shard["count"]) for shard in shards] == [(0, 2), (1, 0), (2, 2)]
    for reader in (CutSet.from_shar(fields=shar_fields(project.dataset)), open_shar(project.dataset)):
        assert numbers(reader) == [0, 1, 4, 5]
    codec = project.encode(config)
    assert sum(map(len, codec.batches)) == 4
    assert len(list(CutSet.from_shar(fields=shar_fields(project.dataset, "toy")))) == 4


def test_an_empty_input_is_a_valid_empty_dataset(project):
    config = project.configure()
    project.leave_matched(config, [])
    assert run(stage_of(config, "write")).totals.num_in == 0
    assert (project.dataset / "shards.jsonl").read_bytes() == b""
    assert read_dataset(project.dataset).num_cuts == 0
    assert list(open_shar(project.dataset)) == []
    assert len(open_shar(project.dataset)) == 0
    project.encode(config)
    assert list(open_shar(project.dataset)) == []


def test_opus_at_22050_hz_is_rejected_with_what_to_set(project):
    for number in range(2):
        project.add(f"{number}.wav", voice(0.5, 22050), rate=22050)
    config = project.configure(write={"audio_format": "opus"})
    project.match_by_hand(config)
    stage = stage_of(config, "write")
    assert run(stage).totals.rejects == {"unsupported_rate": 2}
    assert "sampling_rate" in stage.dir.rejects.read_text()
    config = project.configure(write={"audio_format": "opus", "sampling_rate": 24000})
    assert run(stage_of(config, "write"), restart=True).ok
    assert {cut.target_audio.sampling_rate for cut in open_shar(project.dataset)} == {24000}


@pytest.mark.parametrize("name", ["dataset.json", "shards.jsonl", "target_audio/recording.000001.tar"])
def test_a_lost_file_is_written_again_without_encoding_its_codes(project, name):
    fill(project, 4)
    config = project.write(write={"shard_size": 2})
    project.encode(config)
    project.encode(config, "second")
    before = snapshot(project.dataset)
    (project.dataset / name).unlink()
    assert run(stage_of(config, "write")).ok
    for codec in ("toy", "second"):
        assert project.encode(config, codec).batches == []
    assert snapshot(project.dataset) == before


@pytest.mark.parametrize("audio_format", ["wav", "flac"])
@pytest.mark.parametrize("same_time", [True, False])
def test_changed_bytes_are_found_despite_equal_size_and_time(project, audio_format, same_time):
    fill(project, 3, "wav")
    config = project.configure(write={"order": "manifest", "audio_format": audio_format})
    project.match_by_hand(config, noted=True)
    path = project.root / "1.wav"
    status = path.stat()
    put(path, voice(0.4, seed=9))
    assert path.stat().st_size == status.st_size
    if same_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run(stage_of(config, "write")).ok
    found = {(r["record"]["number"], r["detail"].split(":")[0], r["reason"]) for r in project.rejects("write")}
    assert found == {(0, "context", "changed_audio"), (1, "target", "changed_audio")}
    assert numbers(open_shar(project.dataset)) == [2]


def test_the_same_input_gives_the_same_bytes_at_any_file_times(tmp_path):
    found = []
    for seconds in (1, 2):
        project = Project(tmp_path / str(seconds))
        project.folder.mkdir()
        fill(project, 5, "wav")
        for path in project.root.iterdir():
            os.utime(path, (seconds, seconds))
        project.write(write={"shard_size": 2, "audio_format": "opus"})
        found.append(snapshot(project.dataset))
    assert found[0] == found[1]
    assert not any(b"modified" in data or b"_checksum" in data for data in found[0].values())


def test_a_rank_that_does_not_see_the_audio_root_rejects_nothing(project):
    """Simulate a node without a disk: all of its records would be rejected, one by one."""
    fill(project, 3)
    config, elsewhere = project.configure(), project.root.with_name("elsewhere")
    project.prepare(config)
    for stage in (stage_of(config, "match"), stage_of(config, "write")):
        project.root.rename(elsewhere)
        with raises(DeviceError, "unlike_nodes", f"the audio root {project.root} does not exist"):
            run(stage)
        assert not stage.dir.rejects.exists()
        elsewhere.rename(project.root)
        project.match_by_hand(config)
    assert run(stage_of(config, "write")).totals.num_out == 3


@pytest.mark.parametrize("format", ["flac", "wav", "original"])
def test_scaled_floats_are_stored_as_the_integers(project, format):
    found = []
    for gain, subtype, scale in ((1, "PCM_16", 1), (32768, "FLOAT", 32768)):
        shutil.rmtree(project.folder, ignore_errors=True)
        project.folder.mkdir()
        project.records.clear()
        for number in range(3):
            project.add(f"{number}.wav", voice(0.5, seed=number) * gain, subtype=subtype)
        source = {"manifest": str(project.folder / "small.json"), "audio_root": str(project.root), "float_scale": scale}
        config = project.write(sources=[source], write={"audio_format": format})
        found.append(snapshot(project.dataset))
    assert found[0] == found[1]
    other = dataclasses.replace(config, sources=[dataclasses.replace(config.sources[0], float_scale=1.0)])
    with raises(ConfigError, "changed_plan", "float_scale"):
        run(stage_of(other, "write"))


LOUD = np.where(np.arange(16000) % 160 < 8, 1.5, voice(1.0)).astype(np.float32)
SQUARE = np.where(np.arange(16000) % 80 < 40, 32767, -32768).astype(np.int16)


@pytest.mark.parametrize(
    ("samples", "subtype", "write", "share"),
    [
        *((LOUD, "FLOAT", {"audio_format": format}, 0.05) for format in ("flac", "mp3", "opus")),
        (np.stack([LOUD, LOUD], axis=1), "DOUBLE", {}, 0.05),
        (SQUARE, "PCM_16", {"sampling_rate": 24000}, None),
        (SQUARE, "PCM_16", {}, 0.0),
        (LOUD.clip(-1, 1), "FLOAT", {}, 0.0),
        (LOUD, "FLOAT", {"audio_format": "original"}, 0.0),
    ],
)
def test_clipped_samples_are_counted(project, call, samples, subtype, write, share, tmp_path):
    project.add("loud.wav", samples, subtype=subtype)
    project.add("good.wav", voice(1.0))
    source = {"manifest": str(project.folder / "small.json"), "audio_root": str(project.root), "channel": "downmix"}
    config = project.write(sources=[source], write={"order": "manifest"} | write, match={"min_duration": 0.0})
    loud, good = (cut["supervisions"][0]["custom"] for cut in lines(project.dataset / "cuts/cuts.000000.jsonl.gz"))
    found = loud.get("clipped_in_writing", 0.0)
    assert found == pytest.approx(share) if share is not None else 0.5 < found < 1
    assert good.get("context_clipped_in_writing", 0.0) == found
    assert not {"context_clipped_in_writing", "clipped_in_writing"} & loud.keys() & good.keys()
    RunDir(project.run_dir).config.write_bytes(to_yaml(config))
    note = f"write: samples that exceed full scale were clipped in 2 cuts, {50 * found:.3g}% of all samples"
    assert (note in call("status", project.run_dir)[1]) == bool(found)
    assert call("report", project.run_dir, "-o", tmp_path / "x.html")[0] == 0
    assert ("Samples were clipped in 1 cuts." in (tmp_path / "x.html").read_text()) == bool(found)
    wanted = [("clipped_audio", "target_audio"), ("clipped_audio", "context_audio")] if found else []
    for deep in (False, True) if found else (False,):
        report = check_dataset(project.dataset, tmp_path / f"check {deep}", deep=deep)
        assert [(row["code"], row["field"]) for row in report.findings] == wanted
        assert report.checked.get("items clipped in writing", 0) == len(wanted)


SAMPLES = voice(1.0)


@pytest.fixture
def root(tmp_path):
    for name in ("a.flac", "a.wav", "a.mp3", "a.aiff", "a.ogg", "a.opus"):
        put(tmp_path / name, SAMPLES)
    put(tmp_path / "float.wav", SAMPLES, subtype="FLOAT")
    put(tmp_path / "fast.flac", voice(1.0, 44100), 44100)
    put(tmp_path / "stereo.flac", np.stack([SAMPLES, SAMPLES], axis=1))
    shutil.copy(tmp_path / "a.flac", tmp_path / "misnamed.wav")
    return tmp_path


def whole(name: str, seconds: float = 1.0) -> Segment:
    return Segment(0, name, 0.0, seconds, whole_file=True)


def part(name: str, offset: float, duration: float) -> Segment:
    return Segment(0, name, offset, duration, whole_file=False)


def store(root, segment, *, format="flac", rate=None):
    config = WriteConfig(audio_format=format, sampling_rate=rate)
    return store_segments(config, SegmentReader(AudioRoots.of([root])), [segment]).get(segment)


@pytest.mark.parametrize(
    ("name", "format", "rate", "extension"),
    [
        ("a.flac", "flac", None, "flac"),
        ("a.flac", "flac", 16000, "flac"),
        ("a.wav", "wav", None, "wav"),
        ("float.wav", "wav", None, "wav"),
        ("misnamed.wav", "flac", None, "flac"),
        ("a.mp3", "mp3", None, "mp3"),
        ("a.opus", "opus", 16000, "opus"),
        ("a.flac", "original", None, "flac"),
        ("a.aiff", "original", None, "aiff"),
        ("a.ogg", "original", 16000, "ogg"),
        ("fast.flac", "original", None, "flac"),
    ],
)
def test_a_file_that_is_what_is_wanted_is_copied(root, name, format, rate, extension):
    data, stored = store(root, whole(name), format=format, rate=rate)
    assert data == (root / name).read_bytes()
    assert stored.extension == extension
    samples, found_rate = decode_bytes(data)
    assert (stored.num_samples, stored.sampling_rate) == (len(samples), found_rate)


@pytest.mark.parametrize(
    ("segment", "format", "rate"),
    [
        (part("a.flac", 0.0, 0.9), "flac", None),
        (part("a.flac", 0.1, 0.9), "flac", None),
        (part("a.flac", 0.0, 15999 / 16000), "original", None),
        (whole("a.flac"), "wav", None),
        (whole("misnamed.wav"), "wav", None),
        (whole("a.wav"), "flac", None),
        (whole("a.flac"), "flac", 8000),
        (whole("fast.flac"), "original", 16000),
    ],
)
def test_anything_else_is_encoded(root, segment, format, rate):
    data, stored = store(root, segment, format=format, rate=rate)
    assert data != (root / segment.audio_filepath).read_bytes()
    info = probe_bytes(data)
    assert (info.num_samples, info.sampling_rate) == (stored.num_samples, stored.sampling_rate)
    assert info.format == ("flac" if format == "original" else format)


@pytest.mark.parametrize(
    ("segment", "rate", "expected"),
    [
        (part("a.mp3", 0.1, 0.5), None, "mp3"),
        (part("a.opus", 0.1, 0.5), None, "opus"),
        (part("a.wav", 0.1, 0.5), None, "wav"),
        (part("a.aiff", 0.1, 0.5), None, "flac"),
        (part("a.ogg", 0.1, 0.5), None, "flac"),
        (whole("a.opus"), 22050, "flac"),
    ],
)
def test_original_keeps_the_format_or_uses_flac(root, segment, rate, expected):
    data, stored = store(root, segment, format="original", rate=rate)
    assert (stored.extension, probe_bytes(data).format) == (expected, expected)


def with_nan(path):
    samples = SAMPLES.copy()
    samples[8000] = np.nan
    sf.write(path, samples, 16000, format="WAV", subtype="FLOAT")


@pytest.mark.parametrize(
    ("damage", "format", "reasons"),
    [
        (lambda path: path.unlink(), "flac", {"missing_audio"}),
        (lambda path: path.write_bytes(b""), "flac", {"empty_audio"}),
        (lambda path: path.write_text("no audio"), "flac", {"unreadable_audio"}),
        (lambda path: os.truncate(path, path.stat().st_size - 4000), "flac", {"unreadable_audio", "duration_mismatch"}),
        (with_nan, "wav", {"non_finite_audio"}),
        (lambda path: put(path, np.stack([SAMPLES] * 2, axis=1)), "flac", {"unsupported_channels"}),
    ],
)
def test_broken_audio_is_rejected_even_where_it_would_be_copied(root, damage, format, reasons):
    damage(root / "a.flac")
    with pytest.raises(RejectRecord) as caught:
        store(root, whole("a.flac"), format=format)
    assert caught.value.reason in reasons


DURATIONS = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=40).map(np.array)


@given(st.permutations(range(20)), st.integers(0, 5))
def test_every_order_is_a_permutation_of_the_input(positions, seed):
    index = np.array(positions)
    for name in ("manifest", "shuffle"):
        found = index[order_lines(index, name, seed)].tolist()
        assert sorted(found) == list(range(20))
        assert found == order_lines(np.arange(20), name, seed).tolist()


def test_the_shuffle_is_the_documented_permutation():
    expected = np.random.Generator(np.random.PCG64(42)).permutation(7).tolist()
    assert order_lines(np.arange(7), "shuffle", 42).tolist() == expected
    assert order_lines(np.arange(7), "shuffle", 43).tolist() != expected


def sizes(bounds):
    return np.diff(bounds).tolist()


@given(DURATIONS, st.integers(1, 50), st.floats(0.01, 500.0))
def test_shards_have_the_requested_size_number_or_seconds(seconds, number, wanted):
    of_size = sizes(divide_into_shards(seconds, WriteConfig(shard_size=number)))
    of_number = sizes(divide_into_shards(seconds, WriteConfig(num_shards=number)))
    of_seconds = sizes(divide_into_shards(seconds, WriteConfig(shard_seconds=wanted)))
    for found in (of_size, of_number, of_seconds):
        assert sum(found) == len(seconds)
        assert min(found) >= 1
    assert set(of_size[:-1]) <= {number}
    assert of_size[-1] <= number
    assert len(of_number) == min(number, len(seconds))
    assert max(of_number) - min(of_number) <= 1
    assert len(of_seconds) == min(len(seconds), max(1, round(float(seconds.sum()) / wanted)))


@given(st.lists(st.floats(1.0, 2.0), min_size=20, max_size=60).map(np.array), st.integers(2, 6))
def test_shards_of_seconds_end_nearest_to_equal_shares(seconds, number):
    total = float(seconds.sum())
    bounds = divide_into_shards(seconds, WriteConfig(shard_seconds=total / number))
    so_far = np.concatenate([[0.0], np.cumsum(seconds)])
    assert len(bounds) == number + 1
    for shard, bound in enumerate(bounds):
        share = total * shard / number
        assert abs(so_far[bound] - share) <= np.abs(so_far - share).min() + 1e-9


@pytest.mark.parametrize(
    ("seconds", "wanted", "bounds"),
    [
        ([4.0, 1.0, 1.0, 1.0, 1.0], 4.0, [0, 1, 5]),
        ([1.0, 1.0, 1.0, 1.0, 4.0], 4.0, [0, 4, 5]),
        ([1.0, 2.0, 1.0], 2.0, [0, 1, 3]),  # the first of two bounds as near
        ([100.0, 1.0, 1.0, 1.0], 25.75, [0, 1, 2, 3, 4]),  # the first is longer than all others together
        ([1.0, 1.0, 1.0, 100.0], 25.75, [0, 1, 2, 3, 4]),
        ([1.0], 1e-9, [0, 1]),
        ([0.0, 0.0], 5.0, [0, 2]),
        ([3.0, 3.0], 1e9, [0, 2]),
    ],
)
def test_bounds_of_shards_of_seconds(seconds, wanted, bounds):
    assert divide_into_shards(np.array(seconds), WriteConfig(shard_seconds=wanted)) == bounds

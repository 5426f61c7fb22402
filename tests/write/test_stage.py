"""Stage 2 as a whole: shards, order, rejects, empty shards and datasets, restarts."""

from __future__ import annotations

import os
import tarfile
from dataclasses import replace

import numpy as np
import pytest
from lhotse import CutSet
from support.audio import read
from support.errors import raises
from support.pipelines import shar_fields
from support.shar import Project, lines, put, run, snapshot, voice

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.errors import ConfigError, DeviceError
from sharmill.manifest import AudioNotes, Utterance
from sharmill.match.stage import MatchStage, matched_manifest
from sharmill.shar import open_shar
from sharmill.shar.index import read_dataset
from sharmill.write.stage import WriteStage


def fill(project: Project, count: int = 7, suffix: str = "flac") -> None:
    for number in range(count):
        project.add(f"{number}.{suffix}", voice(0.3 + 0.1 * number, seed=number), number=number)


def numbers(cuts) -> list[int]:
    return [cut.supervisions[0].custom["number"] for cut in cuts]


def test_a_shard_has_at_most_shard_size_cuts_and_the_last_one_the_rest(project):
    fill(project)
    project.write(write={"shard_size": 3, "order": "manifest"})
    shards = lines(project.dataset / "shards.jsonl")
    assert [(shard["index"], shard["count"]) for shard in shards] == [(0, 3), (1, 3), (2, 1)]
    assert numbers(CutSet.from_shar(fields=shar_fields(project.dataset))) == list(range(7))
    assert sorted(path.name for path in project.dataset.iterdir()) == [
        "context_audio", "cuts", "dataset.json", "shards.jsonl", "target_audio",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("write", "counts"),
    [({"num_shards": 3}, [2, 2, 3]), ({"num_shards": 9}, [1] * 7), ({"shard_seconds": 1.4}, [3, 2, 2])],
)
def test_shards_are_as_many_as_asked_for(project, write, counts):
    """Of 0.3, 0.4 to 0.9 s, 4.2 s in all; by seconds, the bounds are those nearest to 1.4 and 2.8 s."""
    fill(project)
    project.write(write=write | {"order": "manifest"})
    shards = lines(project.dataset / "shards.jsonl")
    assert [shard["count"] for shard in shards] == counts
    assert numbers(open_shar(project.dataset)) == list(range(7))


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


def test_the_nth_member_of_every_field_belongs_to_the_nth_cut(project):
    fill(project)
    project.write(write={"shard_size": 4})
    for index in range(2):
        ids = [cut["id"] for cut in lines(project.dataset / f"cuts/cuts.{index:06d}.jsonl.gz")]
        for field in ("target_audio", "context_audio"):
            with tarfile.open(project.dataset / f"{field}/recording.{index:06d}.tar") as tar:
                assert tar.getnames() == [name for cut_id in ids for name in (f"{cut_id}.flac", f"{cut_id}.json")]


def test_whole_files_are_copied_byte_for_byte_into_the_shards(project):
    fill(project, 3)
    project.write(write={"order": "manifest"})
    for cut in CutSet.from_shar(fields=shar_fields(project.dataset)):
        custom = cut.supervisions[0].custom
        assert cut.target_audio.sources[0].source == (project.root / custom["audio_filepath"]).read_bytes()
        assert cut.context_audio.sources[0].source == (project.root / custom["context_audio_filepath"]).read_bytes()


@pytest.mark.parametrize("format", ["flac", "wav", "mp3", "opus", "original"])
def test_every_format_is_read_by_lhotse(project, format):
    fill(project, 3, "wav")
    project.write(write={"audio_format": format, "order": "manifest"})
    for number, cut in enumerate(CutSet.from_shar(fields=shar_fields(project.dataset))):
        samples = cut.load_target_audio()
        # lhotse decodes opus as libsndfile does, whose header has the rate of the source.
        assert samples.shape == (1, round((0.3 + 0.1 * number) * 16000))
        assert np.corrcoef(samples[0], voice(0.3 + 0.1 * number, seed=number))[0, 1] > 0.9


def test_manifest_and_speaker_order(project):
    for number, speaker in enumerate("abcabca"):
        project.add(f"{number}.wav", voice(0.3, seed=number), number=number, speaker=speaker)
    config = project.configure(write={"order": "manifest", "shard_size": 3})
    project.match_by_hand(config)
    # As stage 1 leaves them: by speaker.
    path = matched_manifest(config)
    utterances = [Utterance.from_json(line) for line in path.read_bytes().splitlines()]
    utterances.sort(key=lambda u: u.speaker)
    path.write_bytes(b"".join(u.to_json() + b"\n" for u in utterances))
    assert run(WriteStage(config)).ok
    assert numbers(open_shar(project.dataset)) == list(range(7))
    for order, expected in (
        ("speaker", [0, 3, 6, 1, 4, 2, 5]),
        ("shuffle", np.random.Generator(np.random.PCG64(42)).permutation(7).tolist()),
    ):
        config = project.configure(write={"order": order, "shard_size": 3})
        assert run(WriteStage(config), restart=True).ok
        assert numbers(open_shar(project.dataset)) == expected


def break_file(path):
    path.write_bytes(path.read_bytes()[:200])


@pytest.mark.parametrize(
    ("damage", "reasons"),
    [(lambda path: path.unlink(), {"missing_audio"}), (break_file, {"unreadable_audio", "duration_mismatch"})],
)
@pytest.mark.parametrize("suffix", ["flac", "wav"])
def test_a_record_that_fails_is_dropped_from_every_field(project, damage, reasons, suffix):
    fill(project, 6, suffix)
    config = project.configure(write={"order": "manifest", "shard_size": 3})
    project.match_by_hand(config)
    damage(project.root / f"2.{suffix}")
    assert run(WriteStage(config)).ok
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
    assert run(WriteStage(config)).ok
    shards = lines(project.dataset / "shards.jsonl")
    assert [(shard["index"], shard["count"]) for shard in shards] == [(0, 2), (1, 0), (2, 2)]
    for reader in (CutSet.from_shar(fields=shar_fields(project.dataset)), open_shar(project.dataset)):
        assert numbers(reader) == [0, 1, 4, 5]
    codec = project.encode(config)
    assert sum(map(len, codec.batches)) == 4
    assert len(list(CutSet.from_shar(fields=shar_fields(project.dataset, "toy")))) == 4


def test_an_empty_input_is_a_valid_empty_dataset(project):
    config = project.configure()
    project.run_dir.joinpath("manifests").mkdir(parents=True)
    matched_manifest(config).write_bytes(b"")
    assert run(WriteStage(config)).totals.num_in == 0
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
    stage = WriteStage(config)
    assert run(stage).totals.rejects == {"unsupported_rate": 2}
    assert "sampling_rate" in stage.dir.rejects.read_text()
    config = project.configure(write={"audio_format": "opus", "sampling_rate": 24000})
    assert run(WriteStage(config), restart=True).ok
    assert {cut.target_audio.sampling_rate for cut in open_shar(project.dataset)} == {24000}


@pytest.mark.parametrize("name", ["dataset.json", "shards.jsonl", "target_audio/recording.000001.tar"])
def test_a_lost_file_is_written_again_and_the_codes_are_listed_without_encoding_them(project, name):
    fill(project, 4)
    config = project.write(write={"shard_size": 2})
    project.encode(config)
    project.encode(config, "second")
    before = snapshot(project.dataset)
    (project.dataset / name).unlink()
    assert run(WriteStage(config)).ok
    for codec in ("toy", "second"):
        assert project.encode(config, codec).batches == []
    assert snapshot(project.dataset) == before


def test_a_restart_leaves_nothing_of_before(project):
    fill(project, 6)
    config = project.write(write={"shard_size": 1})
    project.encode(config)
    config = project.configure(write={"shard_size": 4})
    with raises(ConfigError, "changed_plan", "write.shard_size", "4", "1"):
        run(WriteStage(config))
    assert run(WriteStage(config), restart=True).ok
    assert len(list((project.dataset / "cuts").iterdir())) == 2
    assert not (project.dataset / "codes_toy").exists()
    assert read_dataset(project.dataset).codecs == []


def test_a_missing_matched_manifest_is_named(project):
    fill(project, 2)
    with raises(ConfigError, "stage_not_run", "match"):
        run(WriteStage(project.configure()))


def test_two_sources_may_have_files_of_one_name(tmp_path):
    from sharmill.config import to_config

    projects = []
    for name in ("one", "two"):
        project = Project(tmp_path / name)
        project.folder.mkdir()
        project.add("a.wav", voice(0.5, seed=len(name) + len(projects)), number=len(projects))
        project.configure()
        projects.append(project)
    config = to_config(
        {
            "name": "both",
            "run_dir": str(tmp_path / "run"),
            "dataset_dir": str(tmp_path / "dataset"),
            "sources": [
                {"manifest": str(p.folder / "small.json"), "audio_root": str(p.root)} for p in projects
            ],
        },
        "test",
    )  # fmt: skip
    projects[0].match_by_hand(config)
    assert run(WriteStage(config)).ok
    cuts = {cut.supervisions[0].custom["number"]: cut for cut in open_shar(tmp_path / "dataset")}
    assert cuts[0].id != cuts[1].id
    for number, project in enumerate(projects):
        samples = read(project.root / "a.wav")[0]
        np.testing.assert_array_equal(cuts[number].load_target_audio()[0], samples)
        np.testing.assert_array_equal(cuts[1 - number].load_context_audio()[0], samples)


def written(project, config):
    """Runs write; the numbers written, and role and reason of the rejects."""
    assert run(WriteStage(config)).ok
    rejects = {(r["record"]["number"], r["detail"].split(":")[0], r["reason"]) for r in project.rejects("write")}
    return numbers(open_shar(project.dataset)), rejects


def note_checksums(project, config):
    """Adds to the matched manifest what match notes when it reads the audio."""
    reader = SegmentReader(AudioRoots.of([project.root]))
    path = matched_manifest(config)
    utterances = [Utterance.from_json(line) for line in path.read_bytes().splitlines()]
    for u in utterances:
        u.notes = reader.read(u.segment).notes
        segment = u.context.segment
        u.context = replace(u.context, segment=replace(segment, notes=reader.read(segment).notes))
    path.write_bytes(b"".join(u.to_json() + b"\n" for u in utterances))


CHANGED = {(0, "context", "changed_audio"), (1, "target", "changed_audio")}


def test_a_file_of_another_size_is_changed_audio(project):
    fill(project, 3, "wav")
    config = project.configure(write={"order": "manifest"})
    project.match_by_hand(config)
    put(project.root / "1.wav", voice(0.41, seed=9))
    assert written(project, config) == ([2], CHANGED)


@pytest.mark.parametrize("audio_format", ["wav", "flac"])
@pytest.mark.parametrize("same_time", [True, False])
def test_other_bytes_of_the_same_size_are_changed_audio_whatever_the_time(project, audio_format, same_time):
    fill(project, 3, "wav")
    config = project.configure(write={"order": "manifest", "audio_format": audio_format})
    project.match_by_hand(config)
    note_checksums(project, config)
    path = project.root / "1.wav"
    status = path.stat()
    put(path, voice(0.4, seed=9))
    assert path.stat().st_size == status.st_size
    if same_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert written(project, config) == ([2], CHANGED)


def test_another_time_alone_is_no_change(project):
    fill(project, 3, "wav")
    config = project.configure(write={"order": "manifest"})
    project.match_by_hand(config)
    note_checksums(project, config)
    os.utime(project.root / "1.wav", (1, 1))
    assert written(project, config) == ([0, 1, 2], set())


def fill_up(path):
    """Appends zeros up to 200,000 bytes, so that the size does not tell other samples."""
    path.write_bytes(path.read_bytes().ljust(200_000, b"\0"))


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg"])
def test_a_part_of_a_long_file_that_was_replaced_is_changed_audio(project, suffix):
    """In lossless formats only where its own samples are others; in lossy ones by the bytes of the file."""
    long = np.concatenate([voice(0.5, seed=n) for n in range(4)])
    path = project.add(f"long.{suffix}", long, offset=0.0, duration=0.5, number=0)
    fill_up(path)
    for number in range(1, 4):
        project.add(f"long.{suffix}", offset=0.5 * number, duration=0.5, number=number)
    config = project.configure(write={"order": "manifest"})
    project.match_by_hand(config, [1, 0, 3, 2])
    note_checksums(project, config)
    long[: len(long) // 4] = voice(0.5, seed=9)
    fill_up(put(path, long))
    found, rejects = written(project, config)
    assert {reason for *_, reason in rejects} == {"changed_audio"}
    assert found == ([] if suffix == "ogg" else [2, 3])


def test_the_duration_is_checked_again(project):
    """Where no note tells of a change, as in a manifest that another program has matched."""
    fill(project, 3, "wav")
    config = project.configure(write={"order": "manifest"})
    project.match_by_hand(config)
    path = matched_manifest(config)
    utterances = [Utterance.from_json(line) for line in path.read_bytes().splitlines()]
    for u in utterances:
        u.notes = AudioNotes()
        u.context = replace(u.context, segment=replace(u.context.segment, notes=u.notes))
    path.write_bytes(b"".join(u.to_json() + b"\n" for u in utterances))
    put(project.root / "1.wav", voice(0.55, seed=9))
    assert written(project, config) == (
        [2], {(0, "context", "duration_mismatch"), (1, "target", "duration_mismatch")},
    )  # fmt: skip


@pytest.mark.parametrize("audio_format", ["wav", "flac"])
def test_silence_is_written_neither_as_target_nor_as_context(project, audio_format):
    fill(project, 3, "wav")
    project.add("silent.wav", np.full(8000, 0.0009, np.float32), number=3, subtype="FLOAT")
    config = project.configure(write={"order": "manifest", "audio_format": audio_format})
    project.match_by_hand(config)
    assert written(project, config) == (
        [0, 1], {(2, "context", "silent_audio"), (3, "target", "silent_audio")},
    )  # fmt: skip


def test_the_same_input_gives_the_same_bytes_whatever_the_times_of_its_files(tmp_path):
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
    """As on a node where a disk is not mounted: all of its records would be rejected, one by one."""
    fill(project, 3)
    config = project.configure()
    project.match_by_hand(config)
    project.root.rename(project.root.with_name("elsewhere"))
    for stage in (WriteStage(config), MatchStage(config)):
        with raises(DeviceError, "unlike_nodes", f"the audio root {project.root} does not exist"):
            run(stage)
        assert not stage.dir.rejects.exists()
    project.root.with_name("elsewhere").rename(project.root)
    assert run(WriteStage(config)).totals.num_out == 3

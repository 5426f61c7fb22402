"""Shars of other tools: checked as far as they can be, with what cannot be checked said, and given an index."""

from __future__ import annotations

import json

import numpy as np
import pytest
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from support.errors import raises
from support.shar import copy, lines, put, rewrite, run, snapshot, voice

from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.arrays import array_from_bytes, array_to_bytes
from sharmill.shar.items import FieldWriter, Item, read_field
from sharmill.shar.rebuild import parse_codec_facts, rebuild_index
from sharmill.validate.stage import ValidateStage

TOY = "toy,codebook_size=64"
NO_INDEX = "sizes and checksums of the files: there is no readable shards.jsonl"
NO_CODEC = "the range of codes and their frames to the last one: no codec is recorded"


@pytest.fixture
def flat(tmp_path):
    """What lhotse writes itself: five cuts in shards of two, with audio and codes, all in one folder."""
    cuts = []
    for number in range(5):
        path = put(tmp_path / f"audio/{number}.wav", voice(1.0 + number / 10, seed=number))
        recording = Recording.from_file(path, recording_id=f"rec{number}")
        supervision = SupervisionSegment(f"sup{number}", recording.id, 0.0, recording.duration, text="text")
        cuts.append(MonoCut(f"cut{number}", 0.0, recording.duration, 0, [supervision], recording=recording))

    folder = tmp_path / "flat"
    folder.mkdir()
    CutSet(cuts).to_shar(folder, fields={"recording": "flac"}, shard_size=2)
    for shard, start in enumerate(range(0, 5, 2)):
        with FieldWriter(folder / f"target_codes.{shard:06d}.tar") as writer:
            for cut in cuts[start : start + 2]:
                codes = np.full((3, -(-cut.num_samples // 320)), 7, dtype=np.int16)
                described = {"storage_type": "shar", "storage_path": "", "storage_key": "", "shape": list(codes.shape)}
                array = {"array": described, "temporal_dim": -1, "frame_shift": 0.02, "start": 0}
                writer.add(Item(cut.id, "npy", array_to_bytes(codes), array))
    return folder


@pytest.fixture
def published(built, tmp_path):
    """A folder per field and no index; contexts are TemporalArrays whose offset is left in ``start``."""
    folder = copy(built.dataset, tmp_path / "published")
    for name in ("dataset.json", "shards.jsonl"):
        (folder / name).unlink()
    for path in sorted((folder / "cuts").iterdir()):
        rewrite(path, [cut | {"custom": None} for cut in lines(path)])  # else they are sharmill's own
    for path in sorted((folder / "codes_toy/context_codes").iterdir()):
        change_items(path, lambda item: Item(item.cut_id, "npy", item.data, {
            "array": item.metadata, "temporal_dim": -1, "frame_shift": 0.02, "start": 1.5,
        }))  # fmt: skip
    return folder


def change_items(path, change):
    items = list(read_field(path))
    with FieldWriter(path) as writer:
        for item in items:
            writer.add(change(item))


def validate(directory, scratch, **options):
    stage = ValidateStage(directory, RunDir(scratch), **options)
    assert run(stage).ok
    return stage.report()


def found(report):
    return [(row["code"], row["shard"], row["field"]) for row in report.findings]


@pytest.mark.parametrize("layout", ["flat", "published"])
@pytest.mark.parametrize("deep", [False, True])
def test_a_sound_one_has_no_findings_and_is_told_what_was_not_checked(layout, deep, request, tmp_path):
    folder = request.getfixturevalue(layout)
    before = snapshot(folder)
    report = validate(folder, tmp_path / "run", deep=deep)
    assert report.findings == []
    assert {NO_INDEX, NO_CODEC} <= set(report.unchecked)
    assert report.checked["cuts"] == {"flat": 5, "published": 7}[layout]
    assert snapshot(folder) == before


def test_files_of_which_no_checksum_is_recorded_are_read_for_none(flat, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr("sharmill.validate.shard.checksum_stream", read.append)
    assert validate(flat, tmp_path / "run", deep=True).findings == []
    assert read == []


def cut_off(path):
    path.write_bytes(path.read_bytes()[: -path.stat().st_size // 2])


def rename(path):
    change_items(path, lambda item: Item(f"{item.cut_id}x", item.extension, item.data, item.metadata))


def drop(path):
    items = list(read_field(path))
    with FieldWriter(path) as writer:
        for item in items[:-1]:
            writer.add(item)


def with_metadata(**keys):
    return lambda path: change_items(path, lambda i: Item(i.cut_id, i.extension, i.data, {**i.metadata, **keys}))


def with_array(change):
    def damage(path):
        change_items(path, lambda item: Item(
            item.cut_id, "npy", array_to_bytes(change(array_from_bytes(item.data, "x"))), item.metadata
        ))  # fmt: skip

    return damage


def with_frames(path):
    """Twice the frames, and described so."""

    def change(item):
        codes = np.repeat(array_from_bytes(item.data, "x"), 2, axis=1)
        metadata = json.loads(json.dumps(item.metadata))
        metadata["array"]["shape"] = list(codes.shape)
        return Item(item.cut_id, "npy", array_to_bytes(codes), metadata)

    change_items(path, change)


DAMAGES = {
    "cut off": ("recording.000001.tar", cut_off, "damaged"),
    "gone": ("recording.000001.tar", lambda path: path.unlink(), "missing_field"),
    "last shard of a field gone": ("target_codes.000002.tar", lambda path: path.unlink(), "missing_field"),
    "other ids": ("recording.000001.tar", rename, "wrong_id"),
    "an item less": ("target_codes.000001.tar", drop, "wrong_count"),
    "other samples": ("recording.000001.tar", with_metadata(num_samples=5), "bad_audio"),
    "another rate": ("recording.000001.tar", with_metadata(sampling_rate=8000), "bad_audio"),
    "another duration": ("recording.000001.tar", with_metadata(duration=9.0), "bad_audio"),
    "another shape": ("target_codes.000001.tar", with_array(lambda array: array[:, 1:]), "bad_codes"),
    "too many frames": ("target_codes.000001.tar", with_frames, "bad_codes"),
    "no cuts": ("cuts.000001.jsonl.gz", lambda path: path.unlink(), "missing_field"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_without_an_index(flat, tmp_path, damage):
    name, inflict, code = DAMAGES[damage]
    inflict(flat / name)
    report = validate(flat, tmp_path / "run")
    assert code in {found_code for found_code, _, _ in found(report)}
    assert {shard for _, shard, _ in found(report)} == {int(name.split(".")[1])}


def test_a_gap_between_the_shards_is_found(flat, tmp_path):
    for name in ("cuts.000001.jsonl.gz", "recording.000001.tar", "target_codes.000001.tar"):
        (flat / name).unlink()
    assert found(validate(flat, tmp_path / "run")) == [("index_gap", None, None)]


def test_ids_that_occur_twice_are_found_in_both_shards(flat, tmp_path):
    for field, suffix in (("cuts", "jsonl.gz"), ("recording", "tar"), ("target_codes", "tar")):
        (flat / f"{field}.000001.{suffix}").write_bytes((flat / f"{field}.000000.{suffix}").read_bytes())
    assert found(validate(flat, tmp_path / "run")) == [
        ("duplicate_id", shard, "cuts") for _ in range(2) for shard in (0, 1)
    ]  # fmt: skip


def test_an_index_makes_it_a_dataset_that_opens_and_validates(published, tmp_path):
    # Of a process that was killed.
    (published / f".shards.jsonl.{'0' * 32}.tmp").touch()
    told = list(rebuild_index(published, [parse_codec_facts(TOY)]))
    description = json.loads((published / "dataset.json").read_text())
    assert description["contract"] == "foreign"
    assert description["codecs"] == [{
        "name": "toy", "model": "unknown", "checksum": "unknown", "trained": True, "sampling_rate": 16000,
        "samples_per_frame": 320, "num_codebooks": 3, "codebook_size": 64, "devices": [], "precision": "fp32",
    }]  # fmt: skip
    assert "16000 Hz, the rate of the audio, with 320 samples a frame" in told[-1]
    report = validate(published, tmp_path / "first")
    assert report.findings == []
    assert NO_INDEX not in report.unchecked
    assert [cut.target_codes.shape[0] for cut in open_shar(published, ["target_audio", "target_codes"])] == [3] * 7
    path = published / "target_audio/recording.000001.tar"
    path.write_bytes(path.read_bytes().replace(b"fLaC", b"fLaX", 1))
    assert ("wrong_checksum", 1, "target_audio") in found(validate(published, tmp_path / "second"))
    (published / "x.txt").touch()
    assert ("stray_file", None, None) in found(validate(published, tmp_path / "third"))


def test_the_range_of_codes_is_checked_once_the_codec_is_known(published, tmp_path):
    assert found(validate(published, tmp_path / "before")) == []
    list(rebuild_index(published, [parse_codec_facts("toy,codebook_size=4")]))
    codes = {code for code, _, _ in found(validate(published, tmp_path / "after"))}
    assert codes == {"bad_codes"}


def test_a_flat_one_is_indexed_too(flat, tmp_path):
    list(rebuild_index(flat, name="mine"))
    shards = lines(flat / "shards.jsonl")
    assert [shard["count"] for shard in shards] == [2, 2, 1]
    assert shards[0]["fields"]["recording"]["file"] == "recording.000000.tar"
    assert shards[0]["target_seconds"] == 2.1
    description = json.loads((flat / "dataset.json").read_text())
    assert (description["name"], description["fields"], description["audio_format"], description["sampling_rate"]) == (
        "mine", ["cuts", "recording", "target_codes"], "flac", 16000,
    )  # fmt: skip
    assert validate(flat, tmp_path / "run").findings == []


@pytest.mark.parametrize("lost", ["shards.jsonl", "both"])
def test_an_index_that_was_lost_comes_back(built, tmp_path, lost):
    """To the byte where the description is left, with all its codecs."""
    folder = copy(built.dataset, tmp_path / "dataset")
    before = snapshot(folder)
    (folder / "shards.jsonl").unlink()
    if lost == "both":
        (folder / "dataset.json").unlink()
    told = list(rebuild_index(folder, [parse_codec_facts(TOY)] if lost == "both" else []))
    if lost == "shards.jsonl":
        assert snapshot(folder) == before
    else:
        assert "count as another tool's" in told[1]
        assert (folder / "shards.jsonl").read_bytes() == before["shards.jsonl"]
    assert validate(folder, tmp_path / "run").findings == []


def test_a_stale_index_is_made_again(built, tmp_path):
    folder = copy(built.dataset, tmp_path / "dataset")
    before = snapshot(folder)
    shards = [json.loads(line) for line in (folder / "shards.jsonl").read_bytes().splitlines()]
    shards[0]["fields"]["cuts"]["xxh3"] = "0" * 16
    (folder / "shards.jsonl").write_text("".join(json.dumps(shard) + "\n" for shard in shards[:2]))
    list(rebuild_index(folder))
    assert snapshot(folder) == before


def test_what_the_files_do_not_tell_must_be_given(published, tmp_path):
    with raises(ConfigError, "bad_codec", "codebook_size", "'toy'"):
        list(rebuild_index(published))
    with raises(ConfigError, "unknown_codec", "toy"):
        list(rebuild_index(published, [parse_codec_facts(TOY), parse_codec_facts("other,codebook_size=3")]))
    for path in sorted((published / "codes_toy").rglob("*.tar")):
        change_items(path, lambda item: Item(item.cut_id, "npy", item.data, item.metadata | {"frame_shift": 0.0123}))
    with raises(ConfigError, "bad_codec", "sampling_rate", "samples_per_frame"):
        list(rebuild_index(published, [parse_codec_facts(TOY)]))
    with raises(ConfigError, "bad_codec", "codebook_size, sampling_rate, samples_per_frame"):
        list(rebuild_index(published))  # all at once
    assert not (published / "dataset.json").exists()


def test_gaps_in_the_numbers_of_anothers_shards_are_no_obstacle(flat):
    for name in ("cuts.000001.jsonl.gz", "recording.000001.tar", "target_codes.000001.tar"):
        (flat / name).unlink()
    assert any("gaps" in line for line in rebuild_index(flat))
    assert [cut.id for cut in open_shar(flat)] == ["cut0", "cut1", "cut4"]


def test_gaps_in_our_own_shards_are_shards_that_are_gone(built, tmp_path):
    folder = copy(built.dataset, tmp_path / "own")
    for path in [folder / "dataset.json", folder / "shards.jsonl", *folder.rglob("*.000000.*")]:
        path.unlink()
    with raises(ConfigError, "no_dataset", "some are gone"):
        list(rebuild_index(folder))


def test_nobody_is_told_to_redo_the_shards_of_another_tool(published, tmp_path):
    list(rebuild_index(published, [parse_codec_facts(TOY)]))
    cut_off(published / "target_audio/recording.000001.tar")
    report = validate(published, tmp_path / "run")
    assert report.units_to_repeat == []
    told = " ".join([kind.to_do for kind in report.kinds] + [finding["to_do"] for finding in report.findings])
    assert "the tool that made it" in told
    assert "rebuild the shard" not in told


def test_a_language_that_nemo_does_not_read_is_a_warning(published, tmp_path):
    tag = "| Language:en-US Dataset:X Speaker:1 |"
    for path in sorted((published / "cuts").iterdir()):
        rewrite(path, [cut | {"supervisions": [{**cut["supervisions"][0], "speaker": tag}]} for cut in lines(path)])
    report = validate(published, tmp_path / "run")
    assert {kind.code: kind.severity for kind in report.kinds} == {"foreign_tag": "warning"}
    assert report.errors == 0


@pytest.mark.parametrize("text", ["", "x=1", "toy,size=3", "toy,name=other", "toy,codebook_size=many"])
def test_facts_of_another_form_are_refused(text):
    with raises(ConfigError, "bad_codec", "--codec"):
        parse_codec_facts(text)


def test_a_damaged_shard_gets_no_index(published):
    cut_off(published / "target_audio/recording.000001.tar")
    with raises(DamagedShard, "damaged_shard", "recording.000001.tar"):
        list(rebuild_index(published, [parse_codec_facts(TOY)]))
    assert not (published / "shards.jsonl").exists()


@pytest.mark.parametrize("layout", ["flat", "published"])
def test_an_index_does_not_change_what_a_shar_is_read_as(layout, request):
    folder = request.getfixturevalue(layout)
    before = list(open_shar(folder))
    list(rebuild_index(folder, [parse_codec_facts(TOY)] if layout == "published" else []))
    assert (folder / "dataset.json").exists()
    after = list(open_shar(folder))
    assert [cut.id for cut in after] == [cut.id for cut in before]
    for one, other in zip(after, before, strict=True):
        np.testing.assert_array_equal(one.load_audio(), other.load_audio())
        np.testing.assert_array_equal(one.load_target_codes(), other.load_target_codes())
        if layout == "published":
            np.testing.assert_array_equal(one.load_context_codes(), other.load_context_codes())
            np.testing.assert_array_equal(one.load_context_audio(), other.load_context_audio())

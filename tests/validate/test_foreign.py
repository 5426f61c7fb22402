"""Shars of other tools: checked as far as possible, with a list of what cannot be checked, and given an index."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from support import damage as do
from support.project import check_dataset, copy, lines, put, raises, snapshot, voice, write_lines

from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.shar.arrays import array_to_bytes
from sharmill.shar.items import FieldWriter, Item
from sharmill.shar.rebuild import parse_codec_facts, rebuild_index

TOY = "toy,codebook_size=64"
NO_INDEX = "sizes and checksums of the files: there is no readable shards.jsonl"
NO_CODEC = "the range of codes and the exact number of their frames: no codec is recorded"


@pytest.fixture
def flat(tmp_path):
    """A Shar written by lhotse: five cuts in shards of two, with audio and codes, all in one folder."""
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
    """A folder per field and no index; contexts are TemporalArrays that still have an offset in ``start``."""
    folder = copy(built.dataset, tmp_path / "published")
    for name in ("dataset.json", "shards.jsonl"):
        (folder / name).unlink()
    for path in sorted((folder / "cuts").iterdir()):
        write_lines(
            path, [cut | {"custom": None} for cut in lines(path)]
        )  # otherwise the cuts look like sharmill's own
    described = {"temporal_dim": -1, "frame_shift": 0.02, "start": 1.5}
    for path in (folder / "codes_toy/context_codes").iterdir():
        do.change_items(path, lambda items: [
            replace(item, metadata={"array": item.metadata, **described}) for item in items
        ])(folder)  # fmt: skip
    return folder


def found(report):
    return [(row["code"], row["shard"], row["field"]) for row in report.findings]


@pytest.mark.parametrize("layout", ["flat", "published"])
@pytest.mark.parametrize("deep", [False, True])
def test_an_intact_shar_has_no_findings_but_lists_unchecked(layout, deep, request, tmp_path):
    folder = request.getfixturevalue(layout)
    before = snapshot(folder)
    report = check_dataset(folder, tmp_path / "run", deep=deep)
    assert report.findings == []
    assert {NO_INDEX, NO_CODEC} <= set(report.unchecked)
    assert report.checked["cuts"] == {"flat": 5, "published": 7}[layout]
    assert snapshot(folder) == before


AUDIO, CODES = "recording.000001.tar", "target_codes.000001.tar"
DAMAGES = {
    "cut off": (do.change_bytes(AUDIO, lambda data: data[: -len(data) // 2]), 1, "damaged"),
    "gone": (do.remove_files(AUDIO), 1, "missing_field"),
    "last shard of a field gone": (do.remove_files("target_codes.000002.tar"), 2, "missing_field"),
    "other ids": (do.change_item(AUDIO, cut_id=lambda cut_id: f"{cut_id}x"), 1, "wrong_id"),
    "an item less": (do.change_items(CODES, lambda items: items[:-1]), 1, "wrong_count"),
    "other samples": (do.change_metadata(AUDIO, num_samples=5), 1, "bad_audio"),
    "another rate": (do.change_metadata(AUDIO, sampling_rate=8000), 1, "bad_audio"),
    "another duration": (do.change_metadata(AUDIO, duration=9.0), 1, "bad_audio"),
    "another shape": (do.change_codes(CODES, lambda array: array[:, 1:]), 1, "bad_codes"),
    "too many frames": (do.change_codes(CODES, lambda array: np.repeat(array, 2, axis=1), describe=True), 1,
                        "bad_codes"),
    "no cuts": (do.remove_files("cuts.000001.jsonl.gz"), 1, "missing_field"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_without_an_index(flat, tmp_path, damage):
    inflict, shard, code = DAMAGES[damage]
    inflict(flat)
    report = check_dataset(flat, tmp_path / "run")
    assert code in {found_code for found_code, _, _ in found(report)}
    assert {found_shard for _, found_shard, _ in found(report)} == {shard}


def test_a_gap_between_the_shards_is_found(flat, tmp_path):
    for name in ("cuts.000001.jsonl.gz", "recording.000001.tar", "target_codes.000001.tar"):
        (flat / name).unlink()
    assert found(check_dataset(flat, tmp_path / "run")) == [("index_gap", None, None)]


@pytest.mark.parametrize("is_indexed", [False, True])
def test_shards_that_are_numbered_from_five_have_no_gap(is_indexed, flat, tmp_path):
    for path in list(flat.iterdir()):
        path.rename(flat / re.sub(r"00000(\d)", lambda found: f"{int(found[1]) + 5:06d}", path.name))
    if is_indexed:
        list(rebuild_index(flat, []))
    report = check_dataset(flat, tmp_path / "run")
    assert (report.findings, report.checked["shards"], len(list(open_shar(flat, ["recording"])))) == ([], 3, 5)


def test_an_index_makes_it_a_dataset_that_opens_and_validates(published, tmp_path):
    # A temporary file of a killed process.
    (published / f".shards.jsonl.{'0' * 32}.tmp").touch()
    told = list(rebuild_index(published, [parse_codec_facts(TOY)]))
    description = json.loads((published / "dataset.json").read_text())
    assert description["contract"] == "foreign"
    assert description["codecs"] == [{
        "name": "toy", "model": "unknown", "checksum": "unknown", "trained": True, "sampling_rate": 16000,
        "samples_per_frame": 320, "num_codebooks": 3, "codebook_size": 64, "devices": [], "precision": "fp32",
    }]  # fmt: skip
    assert "16000 Hz, the rate of the audio, with 320 samples per frame" in told[-1]
    report = check_dataset(published, tmp_path / "first")
    assert report.findings == []
    assert NO_INDEX not in report.unchecked
    assert [cut.target_codes.shape[0] for cut in open_shar(published, ["target_audio", "target_codes"])] == [3] * 7
    path = published / "target_audio/recording.000001.tar"
    path.write_bytes(path.read_bytes().replace(b"fLaC", b"fLaX", 1))
    assert ("wrong_checksum", 1, "target_audio") in found(check_dataset(published, tmp_path / "second"))
    (published / "x.txt").touch()
    assert ("stray_file", None, None) in found(check_dataset(published, tmp_path / "third"))


def test_the_range_of_codes_is_checked_once_the_codec_is_known(published, tmp_path):
    assert found(check_dataset(published, tmp_path / "before")) == []
    list(rebuild_index(published, [parse_codec_facts("toy,codebook_size=4")]))
    codes = {code for code, _, _ in found(check_dataset(published, tmp_path / "after"))}
    assert codes == {"bad_codes"}


@pytest.mark.parametrize("lost", ["shards.jsonl", "both"])
def test_an_index_that_was_lost_comes_back(built, tmp_path, lost):
    """If the description still exists, it comes back to the byte, with all its codecs."""
    folder = copy(built.dataset, tmp_path / "dataset")
    before = snapshot(folder)
    (folder / "shards.jsonl").unlink()
    if lost == "both":
        (folder / "dataset.json").unlink()
    told = list(rebuild_index(folder, [parse_codec_facts(TOY)] if lost == "both" else []))
    if lost == "shards.jsonl":
        assert snapshot(folder) == before
    else:
        assert "are treated as another tool's" in told[1]
        assert (folder / "shards.jsonl").read_bytes() == before["shards.jsonl"]
    assert check_dataset(folder, tmp_path / "run").findings == []


def test_what_the_files_do_not_tell_must_be_given(published, tmp_path):
    with raises(ConfigError, "bad_codec", "codebook_size", "'toy'"):
        list(rebuild_index(published))
    with raises(ConfigError, "unknown_codec", "toy"):
        list(rebuild_index(published, [parse_codec_facts(TOY), parse_codec_facts("other,codebook_size=3")]))
    for path in (published / "codes_toy").rglob("*.tar"):
        do.change_items(path, lambda items: [
            replace(item, metadata=item.metadata | {"frame_shift": 0.0123}) for item in items
        ])(published)  # fmt: skip
    with raises(ConfigError, "bad_codec", "sampling_rate", "samples_per_frame"):
        list(rebuild_index(published, [parse_codec_facts(TOY)]))
    with raises(ConfigError, "bad_codec", "codebook_size, sampling_rate, samples_per_frame"):
        list(rebuild_index(published))  # it names all missing facts at once
    assert not (published / "dataset.json").exists()


def test_gaps_in_our_own_shards_are_shards_that_are_gone(built, tmp_path):
    folder = copy(built.dataset, tmp_path / "own")
    for path in [folder / "dataset.json", folder / "shards.jsonl", *folder.rglob("*.000000.*")]:
        path.unlink()
    with raises(ConfigError, "no_dataset", "some are missing"):
        list(rebuild_index(folder))


def test_nobody_is_told_to_redo_the_shards_of_another_tool(published, tmp_path):
    list(rebuild_index(published, [parse_codec_facts(TOY)]))
    do.change_bytes("target_audio/recording.000001.tar", lambda data: data[:999])(published)
    report = check_dataset(published, tmp_path / "run")
    assert report.units_to_repeat == []
    told = " ".join([kind.to_do for kind in report.kinds] + [finding["to_do"] for finding in report.findings])
    assert "the tool that made it" in told
    assert "rebuild the shard" not in told


def test_a_language_that_nemo_does_not_read_is_a_warning(published, tmp_path):
    tag = "| Language:en-US Dataset:X Speaker:1 |"
    for path in sorted((published / "cuts").iterdir()):
        write_lines(path, [cut | {"supervisions": [{**cut["supervisions"][0], "speaker": tag}]} for cut in lines(path)])
    report = check_dataset(published, tmp_path / "run")
    assert {kind.code: kind.severity for kind in report.kinds} == {"foreign_tag": "warning"}
    assert report.errors == 0


@pytest.mark.parametrize("text", ["", "x=1", "toy,size=3", "toy,name=other", "toy,codebook_size=many"])
def test_facts_of_another_form_are_refused(text):
    with raises(ConfigError, "bad_codec", "--codec"):
        parse_codec_facts(text)


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

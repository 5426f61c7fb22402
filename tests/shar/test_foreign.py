"""``find_shards``: which files of a folder are the shards, and what is refused."""

from __future__ import annotations

import pytest
from support.errors import raises

from sharmill.errors import ConfigError
from sharmill.shar.reading.foreign import ForeignShard, find_shards

NESTED = ["cuts/cuts", "target_audio/recording", "codes_x/target_codes/codes"]


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def nested(folder, *indices):
    for index in indices:
        touch(folder, f"cuts/cuts.{index}.jsonl.gz", *(f"{field}.{index}.tar" for field in NESTED[1:]))
    return folder


def test_a_folder_per_field(tmp_path):
    assert find_shards(nested(tmp_path, "000000", "000001")) == [
        ForeignShard(
            index,
            {
                "codes_x/target_codes": tmp_path / f"codes_x/target_codes/codes.00000{index}.tar",
                "cuts": tmp_path / f"cuts/cuts.00000{index}.jsonl.gz",
                "target_audio": tmp_path / f"target_audio/recording.00000{index}.tar",
            },
        )
        for index in (0, 1)
    ]


def test_lhotses_one_folder(tmp_path):
    touch(tmp_path, "cuts.000000.jsonl", "recording.000000.tar", "similarity.000000.jsonl.gz", "README.md")
    assert find_shards(tmp_path) == [
        ForeignShard(
            0,
            {
                "cuts": tmp_path / "cuts.000000.jsonl",
                "recording": tmp_path / "recording.000000.tar",
                "similarity": tmp_path / "similarity.000000.jsonl.gz",
            },
        )
    ]


def test_lhotses_single_shard_without_a_number(tmp_path):
    touch(tmp_path, "cuts.jsonl.gz", "recording.tar")
    (shard,) = find_shards(tmp_path)
    assert shard == ForeignShard(0, {"cuts": tmp_path / "cuts.jsonl.gz", "recording": tmp_path / "recording.tar"})


def test_numbers_are_ordered_as_numbers(tmp_path):
    assert [shard.index for shard in find_shards(nested(tmp_path, "10", "9", "2", "100", "0"))] == [0, 2, 9, 10, 100]


def test_numbers_of_different_width_are_paired(tmp_path):
    touch(tmp_path, "cuts.7.jsonl.gz", "recording.000007.tar")
    (shard,) = find_shards(tmp_path)
    assert (shard.index, shard.files["recording"].name) == (7, "recording.000007.tar")


def test_other_files_are_left_alone(tmp_path):
    nested(tmp_path, "0")
    expected = find_shards(tmp_path)
    touch(
        tmp_path,
        "cuts/cuts.0.jsonl.gz.idx",
        "target_audio/recording.0.tar.idx",
        "target_audio/.recording.0.tar",
        ".cache/x/y.0.tar",
        "shards.jsonl",
        "notes/read.me",
    )
    assert find_shards(tmp_path) == expected


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["recording.000000.tar"], ["cuts"]),
        (["notes.txt"], ["cuts"]),
        (["cuts/notes.txt", "target_audio/recording.000000.tar"], ["cuts"]),
        (["cuts.0.jsonl.gz", "cuts.1.jsonl.gz", "recording.0.tar"], ["cuts", "shard 1", "recording"]),
        (["cuts/cuts.0.jsonl.gz", "a/r.0.tar", "a/r.5.tar"], ["a", "shard 5", "cuts"]),
        (["cuts.0.jsonl", "cuts.000000.jsonl.gz"], ["cuts.0.jsonl", "cuts.000000.jsonl.gz", "shard 0"]),
        (["cuts/cuts.0.jsonl", "a/r.0.tar", "a/s.0.tar"], ["r.0.tar", "s.0.tar", "shard 0"]),
        (["cuts.0.jsonl", "recording.0.tar.gz"], ["recording.0.tar.gz"]),
        (["cuts.0.jsonl", "cuts/cuts.0.jsonl"], ["cuts"]),
        (["cuts.jsonl", "cuts.0.jsonl"], ["cuts"]),
    ],
)
def test_what_is_no_dataset_is_refused(tmp_path, files, names):
    with raises(ConfigError, "bad_layout", *names):
        find_shards(touch(tmp_path, *files))


def test_what_is_no_folder_is_refused(tmp_path):
    with raises(ConfigError, "bad_layout"):
        find_shards(touch(tmp_path, "file") / "file")

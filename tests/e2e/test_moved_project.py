"""A project whose folder is moved, or named by another path, goes on."""

from __future__ import annotations

import pytest
from support.pipelines import run_sharmill


@pytest.mark.slow
def test_a_moved_project_and_another_spelling_of_its_folders_go_on(make_config, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    config = make_config(first, encode={"codecs": []}, run_dir="run", dataset_dir="dataset")
    stages = ("prepare", "match", "write")
    here = run_sharmill("run", config, *stages, cwd=first)
    assert here.returncode == 0, here.stderr
    index = (first / "dataset" / "shards.jsonl").read_bytes()
    (first / "link").symlink_to("dataset")
    for spelling in (str(first / "dataset"), "../first/dataset", "link"):
        again = run_sharmill("run", config, *stages, f"dataset_dir={spelling}", cwd=first)
        assert again.returncode == 0, again.stderr
    first.rename(second)
    moved = run_sharmill("run", second / config.name, *stages, cwd=second)
    assert moved.returncode == 0, moved.stderr
    assert (second / "dataset" / "shards.jsonl").read_bytes() == index
    anew = run_sharmill("run", second / config.name, "write", "write.shard_size=5", "--restart", cwd=second)
    assert anew.returncode == 0, anew.stderr
    assert (second / "dataset" / "shards.jsonl").read_bytes() != index

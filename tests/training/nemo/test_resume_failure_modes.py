"""Ways in which resumable loading goes wrong elsewhere: that they cannot happen here, or are refused in one line.

Rows are those of the table in docs/training.md. What other tests show already is in ``SHOWN_BY``.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

import pytest
from support.errors import raises
from support.training import AsIs, Letters, flat, number, take

from sharmill.errors import ConfigError
from sharmill.shar.layout import DATASET_FILE, SHARDS_FILE
from sharmill.training import get_dataloader
from sharmill.training.nemo.resumable import merge_data_states

ORDER = {"shuffle": True, "shard_seed": "randomized", "seed": 3, "batch_size": 2, "shuffle_buffer_size": 4}


def open_one(entry, rank=0, world_size=1, *, resumable=True, state=None, **settings):
    cfg = {"input_cfg": [entry]} | ORDER | settings
    return get_dataloader(cfg, rank, world_size, Letters(), dataset=AsIs(), resumable=resumable, state=state)


def test_row_1_no_index_is_needed(corpora):
    """Cuts are gzipped JSON lines, and audio and codes are tars: nothing else lies in the dataset."""
    names = {path.name for path in corpora.small.rglob("*") if path.is_file()}
    assert not {name for name in names if name.endswith((".idx", ".index"))}
    loader = open_one(corpora.entry("small"))
    first = flat(take(loader, 2))
    state = json.loads(json.dumps(merge_data_states([loader.state_dict()])))
    rest = flat(take(open_one(corpora.entry("small"), state=state), 2))
    assert sorted(number(cut) for cut in first + rest) == list(range(100, 108))


@pytest.mark.parametrize("dataset", ["s3://bucket/dataset", "https://example.org/dataset"])
def test_row_3_an_address_in_place_of_a_dataset_is_refused(dataset):
    with raises(ConfigError, "no_dataset", "bucket/dataset" if "bucket" in dataset else "example.org/dataset"):
        open_one({"type": "sharmill", "dataset": dataset})


def test_row_5_neither_maps_nor_open_files_grow_with_the_shards(corpora, tmp_path):
    """A dataset of 6 shards and one of 600."""
    found = []
    for count in (6, 600):
        dataset = repeat_shards(corpora.large, tmp_path / str(count), count)
        batches = iter(open_one({"type": "sharmill", "dataset": str(dataset), "fields": []}))
        for _ in range(2 * count):
            next(batches)
        maps = Path("/proc/self/maps").read_text().splitlines()
        opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        found.append([sum(str(dataset) in place for place in places) for places in (maps, opened)])
    assert found[1][0] == 0
    assert found[1][1] <= found[0][1] + 1


def repeat_shards(source, folder, count):
    """Write the cuts of a dataset of 6 shards again and again, as links."""
    (folder / "cuts").mkdir(parents=True)
    lines = [json.loads(line) for line in (source / SHARDS_FILE).read_text().splitlines()]
    made = []
    for index, line in enumerate(islice(cycle(lines), count)):
        name = f"cuts/cuts.{index:06d}.jsonl.gz"
        (folder / name).symlink_to(source / line["fields"]["cuts"]["file"])
        made.append(json.dumps(line | {"index": index, "fields": {"cuts": line["fields"]["cuts"] | {"file": name}}}))
    (folder / SHARDS_FILE).write_text("\n".join(made) + "\n")
    dataset = json.loads((source / DATASET_FILE).read_text())
    dataset |= {"fields": ["cuts"], "codecs": [], "num_shards": count, "num_cuts": 4 * count}
    (folder / DATASET_FILE).write_text(json.dumps(dataset))
    return folder


@pytest.mark.parametrize("map_style", [False, True])
def test_row_18_ranks_of_the_environment_do_not_divide_once_more(corpora, monkeypatch, map_style):
    """The launcher's variables say four ranks, the loader is told of two: the two have every cut, each once."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        loader = open_one(corpora.entry("large"), rank, 2, resumable=False, force_finite=True, batch_size=1,
                          force_map_dataset=map_style)  # fmt: skip
        found += [number(cut) for cut in flat(take(loader)) if not cut.id.endswith("_dup0")]
    assert Counter(found) == Counter(range(23))

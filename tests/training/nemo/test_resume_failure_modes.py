"""Ways in which resumable loading goes wrong elsewhere: that they cannot happen here, or are refused in one line.

Rows are those of the table in docs/training.md. What other tests show already is in ``SHOWN_BY``.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

import pytest
from support.errors import raises
from support.paths import REPOSITORY
from support.training import AsIs, Letters, flat, number, take

from sharmill.errors import ConfigError
from sharmill.shar.layout import DATASET_FILE, SHARDS_FILE
from sharmill.shar.reading.shard import OpenShard
from sharmill.training import get_dataloader
from sharmill.training.nemo.resumable import merge_data_states

ORDER = {"shuffle": True, "shard_seed": "randomized", "seed": 3, "batch_size": 2, "shuffle_buffer_size": 4}

SHOWN_BY = {
    2: [
        "training/nemo/test_resumable.py::test_what_filters_drop_does_not_stay_in_the_state",
        "training/nemo/test_resumable.py::test_what_cannot_be_exact_is_refused",
    ],
    3: ["training/nemo/test_divided.py::test_pipes_and_slices_are_read_but_not_resumed"],
    6: ["training/nemo/test_divided.py::test_each_example_once_per_epoch_on_changing_ranks_and_workers"],
    11: ["jobs/test_train_steps.py::test_a_training_has_one_seed_and_keeps_the_newest_checkpoints"],
    12: ["jobs/test_train_steps.py::test_it_saves_by_time_computes_in_bf16_and_draws_curves"],
    13: ["jobs/test_train.py::test_told_to_leave_it_saves_and_goes_on_with_other_ranks_and_workers"],
    14: [
        "training/nemo/test_resumable.py::test_one_dataset",
        "training/nemo/test_divided.py::test_each_example_once_per_epoch_on_changing_ranks_and_workers",
    ],
    16: [
        "shar/test_global_shuffle.py::test_a_folder_without_index_is_refused_with_what_to_do",
        "shar/test_global_shuffle.py::test_a_lost_index_of_a_later_shard_is_an_error",
    ],
    17: ["training/nemo/test_resumable.py::test_several_datasets_by_weight_beside_text_and_conversations"],
    19: [
        "training/nemo/test_divided.py::test_a_finite_pass_gives_every_example_once",
        "training/nemo/test_loader_settings.py::test_refused",
    ],
    20: ["training/nemo/test_divided.py::test_weights_are_kept_over_many_short_jobs"],
    22: ["training/nemo/test_trial.py::test_the_doctor_names_what_stops_a_resume_and_what_costs"],
    23: ["jobs/test_train.py::test_an_error_ends_it_at_once"],
}
TABLE = re.compile(r"^\| (\d+(?:, \d+)*) \|", re.MULTILINE)


def open_one(entry, rank=0, world_size=1, *, resumable=True, state=None, **settings):
    cfg = {"input_cfg": [entry]} | ORDER | settings
    return get_dataloader(cfg, rank, world_size, Letters(), dataset=AsIs(), resumable=resumable, state=state)


def test_every_row_has_a_test():
    page = (REPOSITORY / "docs/training.md").read_text().partition("How resuming goes wrong elsewhere")[2]
    rows = {int(row) for found in TABLE.findall(page) for row in found.split(", ")}
    assert rows == {*range(1, 24)} - {8, 9, 15}
    functions = {node.name for node in ast.parse(Path(__file__).read_text()).body if isinstance(node, ast.FunctionDef)}
    here = {int(row) for name in functions for row in re.findall(r"_(\d+)(?=_)", name)}
    assert here | set(SHOWN_BY) >= rows - {4, 21}, "4 and 21 are in the rows of 3 and 14"
    for tests in SHOWN_BY.values():
        for path, name in (test.split("::") for test in tests):
            defined = [
                node.name
                for node in ast.parse((REPOSITORY / "tests" / path).read_text()).body
                if isinstance(node, ast.FunctionDef)
            ]
            assert name in defined, f"{path} has no {name}"


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


def test_row_7_a_worker_holds_one_shard_at_a_time(corpora, tmp_path, monkeypatch):
    """Of 60 shards, in order, so many are parsed as their cuts are asked for."""
    parsed, begin = [], OpenShard.__init__
    monkeypatch.setattr(
        OpenShard, "__init__", lambda self, *args, **kwargs: parsed.append(begin(self, *args, **kwargs))
    )
    dataset = repeat_shards(corpora.large, tmp_path / "many", 60)
    entry = {"type": "sharmill", "dataset": str(dataset), "fields": []}
    batches = iter(open_one(entry, shuffle=False, shard_seed=1, batch_size=4))
    for _ in range(5):
        next(batches)
    assert len(parsed) <= 7


def test_row_10_another_seed_than_that_of_the_state_is_refused(corpora):
    loader = open_one(corpora.entry("small"))
    take(loader, 1)
    state = merge_data_states([loader.state_dict()])
    with raises(ConfigError, "wrong_state", "seed", "3", "4"):
        take(open_one(corpora.entry("small"), state=state, seed=4), 1)
    # "randomized" is not drawn anew: the same seed gives the same order in every job.
    orders = [[number(cut) for cut in flat(take(open_one(corpora.entry("small")), 4))] for _ in range(2)]
    assert orders[0] == orders[1]


def test_row_17_a_thread_that_draws_ahead_is_refused(corpora):
    buckets = {"bucket_duration_bins": [1.5], "batch_size": 2, "concurrent_bucketing": True}
    with raises(ConfigError, "inexact_state", "concurrent_bucketing"):
        open_one(corpora.entry("small"), **buckets)


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

"""NeMo's BroadcastingDataLoader over our datasets, on four processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from support.training import Ids

from sharmill.training import get_dataloader

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("mesh_ranks.py")


@pytest.fixture(scope="module")
def found(corpora, tmp_path_factory):
    """The batches that each of the four ranks got, by its coordinates (dp, tp)."""
    folder = tmp_path_factory.mktemp("mesh")
    random = {"shuffle": True, "shuffle_buffer_size": 20, "num_workers": 1}
    settings = {
        "once": {"force_finite": True, "seed": 1},
        "randomized": {"shard_seed": "randomized", "seed": 1},
        "in_epochs": {"shard_seed": "randomized", "seed": 1, "shuffle_buffer_size": 1},
        "trng": {"shard_seed": "trng"},
        "resumable": {"shard_seed": "randomized", "seed": 1, "num_workers": 0, "shuffle_buffer_size": 1},
        "resumable, cp": {"shard_seed": "randomized", "seed": 1, "num_workers": 0, "shuffle_buffer_size": 1},
        "canonical": {
            "shard_seed": "randomized",
            "seed": 1,
            "canonical": 4,
            "num_workers": 0,
            "shuffle_buffer_size": 1,
        },
    }
    shared = {"input_cfg": [corpora.entry("large")], "batch_size": 3}
    (folder / "settings.json").write_text(json.dumps({name: shared | random | own for name, own in settings.items()}))
    ranks = [subprocess.Popen([sys.executable, SCRIPT, str(rank), folder]) for rank in range(4)]
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    return {tuple(result.pop("coordinates")): result for result in results}


@pytest.mark.parametrize("name", ["once", "randomized", "trng", "canonical", "resumable", "resumable, cp"])
def test_tensor_parallel_ranks_see_equal_batches(found, name):
    for dp in (0, 1):
        assert found[dp, 0][name] == found[dp, 1][name]
        assert found[dp, 0][name][0]["shape"][2] == 3
        assert found[dp, 0][name][0]["sum"] > 0


@pytest.mark.parametrize("name", ["resumable", "resumable, cp"])
def test_ranks_of_a_mesh_go_on_where_they_were(found, name):
    """12 batches of three are 36 of 24 cuts, one of which is filtered out: none comes twice in an epoch."""
    resumed = f"{name}, resumed"
    for dp in (0, 1):
        assert found[dp, 0][resumed] == found[dp, 1][resumed]
    before = [[one for batch in found[dp, 0][name] for one in batch["ids"]] for dp in (0, 1)]
    after = [[one for batch in found[dp, 0][resumed] for one in batch] for dp in (0, 1)]
    # Each rank has 11 or 12 cuts of an epoch.
    counts = Counter(before[0] + before[1] + after[0] + after[1])
    assert len(counts) == 23
    assert max(counts.values()) - min(counts.values()) <= 1


def test_data_parallel_ranks_see_everything_once(found):
    ids = [[one for batch in found[dp, 0]["once"] for one in batch["ids"]] for dp in (0, 1)]
    assert min(len(one) for one in ids) >= 11
    assert sorted(ids[0] + ids[1]) == sorted({*ids[0], *ids[1]})
    assert len(ids[0] + ids[1]) == 23


@pytest.mark.parametrize("name", ["randomized", "trng"])
def test_data_parallel_ranks_differ(found, name):
    assert [batch["ids"] for batch in found[0, 0][name]] != [batch["ids"] for batch in found[1, 0][name]]


def test_randomized_ranks_are_disjoint_in_an_epoch(found):
    """Of 24 cuts each rank has 12 in an epoch, the first 9 of which are in 3 batches."""
    first = [{one for batch in found[dp, 0]["in_epochs"][:3] for one in batch["ids"]} for dp in (0, 1)]
    assert [len(one) for one in first] == [9, 9]
    assert not first[0] & first[1]


def test_canonical_batches_are_those_of_one_rank_and_go_on(found, corpora):
    """Of four parts each data-parallel rank has two, and gives out a batch of each in turn."""
    order = {"shuffle": True, "shuffle_buffer_size": 1, "shard_seed": "randomized", "seed": 1, "canonical": 4}
    cfg = {"input_cfg": [corpora.entry("large")], "batch_size": 3} | order
    alone = [list(batch) for batch in islice(get_dataloader(cfg, 0, 1, dataset=Ids()), 12)]
    steps = [[batch["ids"] for batch in found[dp, 0]["canonical"]] for dp in (0, 1)]
    assert [*steps[0][:2], *steps[1][:2], *steps[0][2:4], *steps[1][2:4]] == alone[:8]
    resumed = [found[dp, 0]["canonical, resumed"] for dp in (0, 1)]
    assert resumed == [found[dp, 1]["canonical, resumed"] for dp in (0, 1)]
    # Of 24 cuts one is filtered out. A part has used three batches of three, and goes on with the second epoch.
    second = [one for dp in (0, 1) for batch in [*steps[dp][4:], *resumed[dp][:2]] for one in batch]
    assert (len(second), len(set(second))) == (24, 23)

"""``canonical: N``: the same global batches on any number of ranks and workers, through saves and resumes."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from support.errors import raises
from support.training import AsIs

from sharmill.errors import ConfigError
from sharmill.shar.sidecars import write_sidecars
from sharmill.training import get_dataloader, merge_data_states

ORDER = {"shuffle": True, "shard_seed": "randomized", "seed": 3, "shuffle_buffer_size": 4}
BUCKETS = {"bucket_duration_bins": [1.5], "batch_duration": 4.0, "bucket_buffer_size": 4}


def global_steps(cfg, world_size, num_workers, count, state=None):
    """The ids of the batches of each global step, in the order of the parts, and the state after them."""
    ranks, states = [], []
    for rank in range(world_size):
        loader = get_dataloader(cfg | {"num_workers": num_workers}, rank, world_size, dataset=AsIs(), state=state)
        batches = list(islice(loader, count * cfg["canonical"] // world_size))
        ranks.append([[(cut.id, cut.shar_position[0]) for cut in batch] for batch in batches])
        states.append(loader.state_dict())
    share = cfg["canonical"] // world_size
    steps = [[batch for rank in ranks for batch in rank[n * share : (n + 1) * share]] for n in range(count)]
    return steps, json.loads(json.dumps(merge_data_states(states)))


def check(corpora, batching, layouts, layouts_after):
    entries = [corpora.entry("large", weight=0.7), corpora.entry("small", weight=0.3)]
    cfg = {"input_cfg": entries, "canonical": 4} | ORDER | batching
    expected, state = global_steps(cfg, 1, 0, 5)
    for layout in layouts:
        assert global_steps(cfg, *layout, 5)[0] == expected
    after, _ = global_steps(cfg, 1, 0, 4, state)
    for layout in layouts_after:
        assert global_steps(cfg, *layout, 4, state)[0] == after
    used = [cut for step in expected + after for batch in step for cut in batch]
    assert len(used) == len(set(used))


@pytest.mark.parametrize("batching", [{"batch_size": 2}, BUCKETS])
def test_global_batches_do_not_depend_on_the_number_of_ranks(corpora, batching):
    check(corpora, batching, [(2, 0), (4, 0)], [(4, 0)])


@pytest.mark.slow
def test_global_batches_do_not_depend_on_the_number_of_workers(corpora):
    check(corpora, BUCKETS, [(2, 2)], [(1, 2)])


def test_a_number_of_ranks_that_does_not_divide_is_refused(corpora):
    cfg = {"input_cfg": [corpora.entry("large")], "batch_size": 2, "canonical": 6} | ORDER
    with raises(ConfigError, "split_wrong", "4 readers", "1, 2, 3, 6"):
        get_dataloader(cfg, 0, 4, dataset=AsIs())
    with raises(ConfigError, "split_wrong", "12 readers"):
        get_dataloader(cfg | {"num_workers": 4}, 0, 3, dataset=AsIs())
    with raises(ConfigError, "bad_config_value", "canonical"):
        get_dataloader(cfg | {"canonical": "all"}, 0, 1, dataset=AsIs())


def test_an_entry_may_be_shuffled_as_a_whole(corpora, tmp_path):
    entry = corpora.entry("large") | {"shuffle": "global", "sidecars": str(tmp_path / "index")}
    cfg = {"input_cfg": [entry], "batch_size": 2, "canonical": 2} | ORDER
    with raises(ConfigError, "missing_input", "sharmill sidecars"):
        get_dataloader(cfg, 0, 1, dataset=AsIs())
    write_sidecars(entry["dataset"], tmp_path / "index")
    expected, state = global_steps(cfg, 1, 0, 5)
    assert global_steps(cfg, 2, 0, 5) == (expected, state)

"""The parts that readers get: ranks and workers, finite and endless, map-style and streaming, and the seeds."""

from __future__ import annotations

from collections import Counter

import pytest
from nemo.collections.common.data.lhotse import get_lhotse_dataloader_from_config
from support.errors import raises
from support.shar import copy
from support.training import AsIs, Ids, flat, number, take

import sharmill.training.nemo.input_type  # noqa: F401 - registers the type, as a script of NeMo's does
from sharmill.errors import ConfigError, DamagedShard
from sharmill.training import get_dataloader

ALL = list(range(23))


def read(corpora, rank, world_size, batches=None, name="large", **settings):
    """The numbers of the cuts that one rank gets."""
    cfg = {"input_cfg": [corpora.entry(name)], "batch_size": 4} | settings
    return [number(cut) for cut in flat(take(get_dataloader(cfg, rank, world_size, dataset=AsIs()), batches))]


def read_all(corpora, world_size, **settings):
    return [read(corpora, rank, world_size, **settings) for rank in range(world_size)]


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (1, 3), (2, 0), (3, 2)])
@pytest.mark.parametrize("order", [{}, {"shuffle": True}, {"shuffle": True, "shard_seed": "randomized"}])
@pytest.mark.parametrize("bucketing", [False, True])
def test_a_finite_pass_gives_every_cut_once(corpora, world_size, num_workers, order, bucketing):
    settings = {"force_finite": True, "num_workers": num_workers, "bucket_duration_bins": [1.0, 2.0]}
    if not bucketing:
        del settings["bucket_duration_bins"]
    found = read_all(corpora, world_size, **settings | order)
    assert sorted(flat(found)) == ALL
    assert all(len(one) >= 23 // world_size - num_workers for one in found)


@pytest.mark.parametrize(
    "order", [{}, {"shuffle": True, "shard_seed": "randomized"}, {"shuffle": True, "shard_seed": 7}]
)
@pytest.mark.parametrize("bucketing", [False, True])
def test_map_style_ranks_share_the_batches(corpora, order, bucketing):
    settings = {"force_finite": True, "force_map_dataset": True, "num_workers": 1, "use_bucketing": bucketing}
    found = read_all(corpora, 2, num_buckets=2, **settings | order)
    assert sorted(flat(found)) == ALL
    assert min(len(one) for one in found) >= 8


def test_map_style_ranks_have_as_many_batches_each(corpora):
    """A rank that would be left without a last batch gets a copy from lhotse, with another id."""
    cfg = {"input_cfg": [corpora.entry("small")], "batch_size": 7, "force_finite": True, "force_map_dataset": True}
    found = [take(get_dataloader(cfg, rank, 3, dataset=Ids())) for rank in range(3)]
    assert [len(one) for one in found] == [1, 1, 1]
    ids = flat(flat(found))
    assert len(ids) == len(set(ids)) == 8


def test_map_style_ranks_are_in_step_where_one_cut_is_left(corpora):
    """Streaming, 12 and 11 cuts would be 2 batches and 1. The copy must be known as one, to be left out of scores."""
    cfg = {"input_cfg": [corpora.entry("large")], "batch_size": 11, "force_finite": True, "force_map_dataset": True}
    found = [take(get_dataloader(cfg, rank, 2, dataset=Ids())) for rank in (0, 1)]
    assert [len(one) for one in found] == [2, 2]
    ids = flat(flat(found))
    (copied,) = [one for one in ids if one.endswith("_dup0")]
    assert copied.removesuffix("_dup0") in ids
    assert len(set(ids)) == 23 + 1


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shard_seed", ["randomized", 5])
def test_endless_reading_gives_every_cut_once_per_epoch(corpora, num_workers, shard_seed):
    settings = {"shuffle": True, "shuffle_buffer_size": 1, "num_workers": num_workers, "shard_seed": shard_seed}
    cfg = {"input_cfg": [corpora.entry("small")], "batch_size": 2} | settings
    ranks = [flat(take(get_dataloader(cfg, rank, 2, dataset=AsIs()), 40)) for rank in (0, 1)]
    reached = {
        (rank, cut.dataloading_info["worker_id"]): cut.shar_position[0] for rank in (0, 1) for cut in ranks[rank]
    }
    assert len(reached) == 2 * max(1, num_workers)
    complete = min(reached.values())
    epochs = [[number(cut) for cut in flat(ranks) if cut.shar_position[0] == epoch] for epoch in range(complete)]
    assert len(epochs) > 8
    assert all(sorted(epoch) == list(range(100, 108)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 6


@pytest.mark.parametrize("num_workers", [0, 1])
def test_estimating_buckets_leaves_all_ranks_in_the_first_epoch(corpora, num_workers):
    """Of 24 cuts, the ranks of five have 4 or 5 each, and read 100 of them before."""
    settings = {"use_bucketing": True, "num_buckets": 2, "num_cuts_for_bins_estimate": 100, "bucket_buffer_size": 1}
    settings |= {"shuffle": True, "shuffle_buffer_size": 1, "shard_seed": "randomized", "num_workers": num_workers}
    cfg = {"input_cfg": [corpora.entry("large")], "batch_size": 2, "keep": "fail"} | settings
    ranks = [flat(take(get_dataloader(cfg, rank, 5, dataset=AsIs()), 9)) for rank in range(5)]
    first = [number(cut) for cut in flat(ranks) if cut.shar_position[0] == 0]
    assert len(first) > 20
    assert len(first) == len(set(first))


def test_the_order_is_a_function_of_the_seed(corpora):
    """Also outside worker processes, where lhotse takes ``randomized`` for the same number whatever the seed."""
    for num_workers in (0, 1):
        settings = {"shuffle": True, "shuffle_buffer_size": 20, "num_workers": num_workers, "batches": 10}
        settings["shard_seed"] = "randomized"
        first, again, other = (read(corpora, 0, 2, seed=seed, **settings) for seed in (1, 1, 2))
        assert first == again
        assert first != other


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_fixed_shard_seed_ignores_the_seed(corpora, num_workers):
    settings = {"shuffle": True, "shuffle_buffer_size": 1, "shard_seed": 3, "num_workers": num_workers, "batches": 10}
    assert read(corpora, 0, 2, seed=1, **settings) == read(corpora, 0, 2, seed=2, **settings)


def test_trng_gives_each_rank_an_order_of_its_own(corpora):
    settings = {"shuffle": True, "shard_seed": "trng", "num_workers": 2, "batch_size": 1, "shuffle_buffer_size": 1}
    found = read_all(corpora, 2, batches=24, **settings)
    # All of it, each worker a part.
    assert all(sorted(one) == list(range(24)) for one in (read_all(corpora, 1, batches=24, keep="fail", **settings)))
    assert found[0] != found[1]
    assert read_all(corpora, 2, batches=24, **settings) != found


def test_in_order_without_shuffle(corpora):
    assert read_all(corpora, 2, batches=3) == [[0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22], [*range(1, 23, 2), 1]]


def test_more_readers_than_cuts_is_an_error(corpora):
    with raises(ConfigError, "too_few_cuts", "11", "12"):
        read(corpora, 11, 12, name="small", batches=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_duration": 100},
        {"max_cer": -1, "max_duration": 2.0, "num_workers": 1, "shuffle": True, "shard_seed": "randomized"},
        {"bucket_duration_bins": [0.1], "bucket_batch_size": [2]},
        {"force_map_dataset": True, "min_context_speaker_similarity": 2},
    ],
)
def test_filters_that_nothing_passes_are_an_error(corpora, settings):
    """Rather than a search without end."""
    # torch makes the errors of a worker process anew, from the message alone: without its code.
    with pytest.raises(ConfigError, match="min_duration, max_duration"):
        read(corpora, 0, 1, batches=1, **settings)


def test_filters_that_one_dataset_of_two_does_not_pass_leave_the_other(corpora):
    entries = [corpora.entry("large", weight=0.01), corpora.entry("small", weight=0.99)]
    cfg = {"input_cfg": entries, "batch_size": 4, "max_duration": 0.9, "shard_seed": 1}
    found = flat(take(get_dataloader(cfg, 0, 1, dataset=AsIs()), 3))
    assert {number(cut) for cut in found} <= set(range(5))


def test_damage_is_an_error_also_behind_buckets(corpora, tmp_path):
    damaged = copy(corpora.large, tmp_path / "damaged")
    path = damaged / "codes_toy/target_codes/codes.000003.tar"
    path.write_bytes(path.read_bytes()[:3000])
    entry = corpora.entry("large") | {"dataset": str(damaged)}
    cfg = {"input_cfg": [entry], "force_finite": True, "batch_duration": 5, "bucket_duration_bins": [1.0, 2.0]}
    with raises(DamagedShard, "damaged_shard"):
        take(get_dataloader(cfg, 0, 1, dataset=AsIs()))


def test_nemos_own_loader_with_workers(corpora):
    """As NeMo's training scripts call it: rank and seed reach the workers by their environment."""
    cfg = {"input_cfg": [corpora.entry("large")], "force_finite": True, "batch_size": 2, "num_workers": 2}
    settings = {"shuffle": True, "shard_seed": "randomized", "seed": 4, "concurrent_bucketing": False}
    found = [flat(take(get_lhotse_dataloader_from_config(cfg | settings, rank, 2, AsIs()))) for rank in (0, 1)]
    assert Counter(number(cut) for cut in flat(found)) == Counter(ALL)
    ours = [read(corpora, rank, 2, force_finite=True, num_workers=2, shuffle=True, seed=4) for rank in (0, 1)]
    assert [{number(cut) for cut in one} for one in found] == [set(one) for one in ours]


def test_nemos_own_loader_without_workers_does_not_know_the_rank(corpora, monkeypatch):
    cfg = {"input_cfg": [corpora.entry("large")], "force_finite": True, "batch_size": 4}
    assert [number(cut) for cut in flat(take(get_lhotse_dataloader_from_config(cfg, 0, 1, AsIs())))] == ALL
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with raises(ConfigError, "split_wrong", "get_dataloader"):
        take(get_lhotse_dataloader_from_config(cfg, 0, 2, AsIs()))


def test_an_interrupted_dataset_is_refused_at_once(corpora, tmp_path):
    with raises(ConfigError, "no_dataset"):
        get_dataloader(
            {"input_cfg": [corpora.entry("large") | {"dataset": str(tmp_path)}], "batch_size": 1}, 0, 1, dataset=AsIs()
        )

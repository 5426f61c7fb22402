"""Tests of batching as on NeMo's page on ASR datasets: buckets of tarred sets in turn and upsampled, sorted batches."""

from collections import Counter
from functools import partial
from itertools import groupby, pairwise

import pytest
from omegaconf import OmegaConf
from support.project import put, raises, voice, write_lines
from support.sources import write_tar
from support.training import AsIs, flat, stop_ranks, take

from sharmill.errors import ConfigError
from sharmill.training import get_dataloader

ORDER = {"shuffle": True, "shard_seed": "randomized", "seed": 3, "shuffle_buffer_size": 4}
MAP_STYLE = {"force_map_dataset": True}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return a function from further options to the settings of ``train_ds`` with four buckets, as on the page.

    Each bucket has two tars of four utterances, up to a quarter of a second longer than in the previous bucket.
    """
    folder = tmp_path_factory.mktemp("PATH_TO_TARS")
    for bucket in range(4):
        own, records = folder / f"bucket{bucket + 1}", []
        own.mkdir()
        for n in range(8):
            duration = 0.25 * bucket + 0.03 * (n + 1)
            put(own / f"{n}.wav", voice(duration, seed=8 * bucket + n))
            record = {"audio_filepath": f"{n}.wav", "duration": duration, "text": f"{bucket}{n}", "shard_id": n // 4}
            records.append(record)
        for shard in range(2):
            names = [f"{n}.wav" for n in range(4 * shard, 4 * shard + 4)]
            write_tar(own / f"audio_{shard}.tar", [(name, (own / name).read_bytes()) for name in names])
        write_lines(own / "tarred_audio_manifest.json", records)

    def settings(*options):
        buckets = [f"{folder}/bucket{n}" for n in (1, 2, 3, 4)]
        manifests = ",".join(f"[{bucket}/tarred_audio_manifest.json]" for bucket in buckets)
        tars = ",".join(f"[{bucket}/audio__OP_0..1_CL_.tar]" for bucket in buckets)
        printed = [f"model.train_ds.manifest_filepath=[{manifests}]", f"model.train_ds.tarred_audio_filepaths=[{tars}]"]
        return OmegaConf.from_dotlist([*printed, *options]).model.train_ds

    return settings


def load(settings, rank=0, world_size=1, resumable=False, state=None, **further):
    cfg = OmegaConf.to_container(settings) | ORDER | further
    return get_dataloader(cfg, rank, world_size, dataset=AsIs(), resumable=resumable, state=state)


def texts(batch) -> list[str]:
    return [cut.supervisions[0].text for cut in batch]


def buckets_of(batches) -> list[str]:
    """Return the bucket of each batch; a batch of several buckets has several digits."""
    return ["".join(sorted({text[0] for text in texts(batch)})) for batch in batches]


def test_batches_of_a_fixed_size_do_not_mix_buckets(page):
    settings = page("model.train_ds.batch_size=3", "model.train_ds.max_duration=1.0")
    batches = take(load(settings), 40)
    assert set(buckets_of(batches)) == set("0123")
    assert {len(batch) for batch in batches} == {3}


def test_a_warning_without_max_duration_that_buckets_are_mixed(page, caplog):
    take(load(page("model.train_ds.batch_size=3")), 1)
    assert [record.message for record in caplog.records if "mix the buckets" in record.message] == [
        "batches mix the buckets of manifest_filepath: set max_duration to keep them separate"
    ]


def rounds(batches, length):
    """Return the buckets of the batches in order, in rounds of the given length."""
    visited = [bucket for bucket, _ in groupby(buckets_of(batches))]
    return [visited[start : start + length] for start in range(0, len(visited), length)]


def test_buckets_come_one_after_the_other_in_a_fixed_order(page):
    """Batches of [8, 6, 4, 2], derived from 2 for the longest bucket: 1, 2, 2 and 4 of them per epoch."""
    settings = page("model.train_ds.bucketing_batch_size=2", "model.train_ds.bucketing_strategy=fixed_order")
    batches = take(load(settings, num_workers=1), 27)
    assert buckets_of(batches) == 3 * [*"011223333"]
    assert [len(batch) for batch in batches[:9]] == [8, 6, 2, 4, 4, 2, 2, 2, 2]
    for epoch in range(3):
        assert len(set(flat(map(texts, batches[9 * epoch : 9 * epoch + 9])))) == 32


@pytest.mark.parametrize(
    ("keys", "mixed"),
    [({"batch_duration": 3}, True), ({"batch_size": 3, "use_lhotse": True}, True),
     ({"batch_duration": 3, "use_lhotse": False}, False), ({"batch_size": 3}, False)],
)  # fmt: skip
def test_buckets_come_in_turn_without_lhotse_keys_alone(page, caplog, keys, mixed):
    batches = take(load(page("model.train_ds.bucketing_strategy=fixed_order"), **keys), 40)
    assert (max(map(len, buckets_of(batches))) > 1) == mixed
    told = "fixed_order has no effect, and the manifests" if mixed else "fixed_order reads an epoch of each manifest"
    assert sum(told in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("strategy", ["synced_randomized", "fully_randomized"])
def test_the_order_of_buckets_is_drawn_for_each_epoch(page, strategy):
    """Both ranks draw the same buckets, or each draws its own."""
    settings = page("model.train_ds.batch_size=4", f"model.train_ds.bucketing_strategy={strategy}")
    ranks = [take(load(settings, rank, 2), 24) for rank in (0, 1)]  # one batch of each bucket per epoch, for 6 epochs
    orders = [[buckets_of(batches)[start : start + 4] for start in range(0, 24, 4)] for batches in ranks]
    assert all(sorted(order) == [*"0123"] for order in orders[0] + orders[1])
    assert len(set(map(tuple, orders[0]))) > 1
    assert (orders[0] == orders[1]) == (strategy == "synced_randomized")
    assert Counter(flat(map(texts, ranks[0] + ranks[1]))) == {
        f"{bucket}{n}": 6 for bucket in range(4) for n in range(8)
    }


@pytest.mark.parametrize("strategy", ["fixed_order", "synced_randomized"])
@pytest.mark.parametrize(
    ("size", "world_size", "keys"),
    [
        (2, 3, {}),
        (3, 2, {"max_duration": 0.97}),
        (2, 3, {"bucketing_weights": [2, 1, 1, 3]}),
        (2, 1, {"num_workers": 3}),
    ],
    ids=["uneven shares", "filtered", "upsampled", "workers"],
)
def test_all_readers_are_in_the_same_bucket_at_every_step(page, strategy, size, world_size, keys):
    """Three ranks have 3, 3 and 2 of the 8 utterances of a bucket, and the last rank splits its batch in two."""
    settings = page(f"model.train_ds.batch_size={size}", f"model.train_ds.bucketing_strategy={strategy}")
    ranks = [take(load(settings, rank, world_size, **keys), 90) for rank in range(world_size)]
    buckets = [buckets_of(batches) for batches in ranks]
    if workers := keys.get("num_workers"):
        buckets = [buckets[0][worker::workers] for worker in range(workers)]
    assert all(others == buckets[0] for others in buckets)
    assert max(map(len, flat(ranks))) == size


# Durations of the lines of a manifest, and names and durations of the files of its tar, in order.
REVERSED = {f"{n}.wav": 0.3 if n % 10 == 3 or n > 15 else 0.1 for n in range(20)}
SEGMENTS = {f"long-sub{n}.wav": 0.3 if n % 10 == 3 or n > 15 else 0.1 for n in range(1, 21)}


@pytest.mark.parametrize(
    ("lines", "members"),
    [(REVERSED, [*REVERSED.items()][::-1]), (SEGMENTS, [("long.wav", 9.0)])],
    ids=["reversed", "segments, which NeMo reads by their names"],
)
def test_durations_are_counted_in_the_order_of_the_tars(tmp_path, lines, members):
    keys = {"manifest_filepath": [], "tarred_audio_filepaths": []}
    for bucket in range(2):
        files = [(name, put(tmp_path / "one.wav", voice(seconds)).read_bytes()) for name, seconds in members]
        records = [
            {"audio_filepath": name, "offset": 0.4 * n * ("-" in name), "duration": one, "text": f"{bucket}.{n}"}
            for n, (name, one) in enumerate(lines.items())
        ]
        manifest = write_lines(tmp_path / f"{bucket}" / "manifest_0.json", [one | {"shard_id": 0} for one in records])
        keys["manifest_filepath"].append([str(manifest)])
        keys["tarred_audio_filepaths"].append([str(write_tar(manifest.parent / "audio_0.tar", files))])
    keys |= {"bucketing_strategy": "fixed_order", "is_tarred": True, "force_finite": True}
    keys |= {"max_duration": 0.2, "batch_size": 2}
    ranks = [take(load(OmegaConf.create(keys), rank, 3)) for rank in range(3)]
    short = [n for n, duration in enumerate(lines.values()) if duration < 0.2]
    assert Counter(flat(map(texts, flat(ranks)))) == {f"{bucket}.{n}": 1 for bucket in range(2) for n in short}
    assert len(set(map(len, ranks))) == 1


def test_a_finite_epoch_has_as_many_batches_on_all_ranks(page):
    settings = page("model.train_ds.batch_size=2", "model.train_ds.bucketing_strategy=fixed_order")
    ranks = [take(load(settings, rank, 3, force_finite=True)) for rank in range(3)]
    assert [*map(len, ranks)] == [8, 8, 8]
    assert Counter(flat(map(texts, flat(ranks)))) == {f"{bucket}{n}": 1 for bucket in range(4) for n in range(8)}


@pytest.mark.parametrize("strategy", ["fixed_order", "synced_randomized"])
def test_ranks_stay_in_step_after_a_resume(page, strategy):
    settings = page("model.train_ds.batch_size=2", f"model.train_ds.bucketing_strategy={strategy}")
    state = None
    for counts in ([5, 5, 5], [9, 9], [30, 30, 30]):
        ranks, state = stop_ranks(partial(load, settings, resumable=True), counts, state)
        assert len({tuple(buckets_of(batches)) for batches in ranks}) == 1


@pytest.mark.parametrize("strategy", ["fixed_order", "synced_randomized"])
def test_buckets_in_turn_go_on_where_they_were_on_other_ranks(page, strategy):
    settings = page("model.train_ds.batch_size=2", f"model.train_ds.bucketing_strategy={strategy}")
    seen, state = [], None
    for counts in ([5, 5], [9], [7, 7], [20, 20, 20]):
        ranks, state = stop_ranks(partial(load, settings, resumable=True), counts, state)
        seen += flat(flat(ranks))
    whole = min(reader["epoch"] for reader in state["readers"])
    assert whole >= 2
    places = Counter((cut.shar_position[0], cut.supervisions[0].text) for cut in seen)
    assert {place: count for place, count in places.items() if place[0] < whole} == {
        (epoch, f"{bucket}{n}"): 1 for epoch in range(whole) for bucket in range(4) for n in range(8)
    }


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        (MAP_STYLE, "bad_config_value", ["fixed_order", "force_iterable_dataset: true"]),
        ({"bucketing_batch_size": [1, 2]}, "bad_config_value", ["bucketing_batch_size", "4 numbers, one per manifest"]),
        ({"bucketing_weights": [2, 1, 0.5, 1]}, "bad_config_value", ["bucketing_weights must be positive integers"]),
        ({"drop_last": True}, "inexact_state", ["drop_last"]),
        ({"batch_size": 1, "force_finite": True}, "bad_config_value", ["fixed_order", "batch_size", "at least 2"]),
        (
            {"bucketing_strategy": None, "bucketing_weights": [2, 1, 1, 3], "force_finite": True} | MAP_STYLE,
            "bad_config_value",
            ["bucketing_weights", "force_iterable_dataset: true"],
        ),
    ],
)
def test_refused(page, changes, code, names):
    settings = page("model.train_ds.batch_size=2", "model.train_ds.bucketing_strategy=fixed_order")
    with raises(ConfigError, code, *names):
        load(settings, world_size=2, resumable=True, **changes)


WEIGHTS = "model.train_ds.bucketing_weights=[2,1,1,3]"
UPSAMPLED = {f"{bucket}{n}": passes for bucket, passes in enumerate([2, 1, 1, 3]) for n in range(8)}


@pytest.mark.parametrize("strategy", [None, "fixed_order", "synced_randomized"])
def test_weighted_buckets_are_as_often_in_an_epoch(page, strategy):
    settings = page(WEIGHTS, "model.train_ds.batch_size=2", "model.train_ds.max_duration=1.0")
    found = []
    for rank in (0, 1):
        found += take(load(settings, rank, 2, force_finite=True, bucketing_strategy=strategy))
    assert Counter(flat(map(texts, found))) == UPSAMPLED


def test_instances_of_an_upsampled_bucket_have_its_batch_size(page):
    """The page's second example with batch_size 1 visits the first bucket twice and the last one three times."""
    sizes = "model.train_ds.bucketing_batch_size=[4,4,4,2]"
    settings = page(WEIGHTS, sizes, "model.train_ds.batch_size=1", "model.train_ds.bucketing_strategy=fixed_order")
    batches = take(load(settings), 40)
    assert buckets_of(batches) == 2 * [*"00001122333333333333"]
    assert [len(batch) for batch in batches] == 2 * (8 * [4] + 12 * [2])
    assert Counter(flat(map(texts, batches[20:]))) == UPSAMPLED


@pytest.mark.slow
def test_semi_sorted_batches(tmp_path):
    """In an epoch of 60 utterances, both ranks have similar lengths at each step, except for the noise."""
    put(tmp_path / "a.wav", voice(0.8))
    records = [
        {"audio_filepath": "a.wav", "offset": 0.0, "duration": round(0.1 + 0.01 * n, 2), "text": str(n)}
        for n in range(60)
    ]
    write_lines(tmp_path / "manifest.json", records)
    printed = ["model.train_ds.use_semi_sorted_batching=true", "model.train_ds.randomization_factor=0.1"]
    settings = OmegaConf.from_dotlist(printed).model.train_ds
    data = {"manifest_filepath": str(tmp_path / "manifest.json"), "batch_size": 6}
    ranks = [take(load(settings, rank, 2, **data)) for rank in (0, 1)]
    assert Counter(flat(map(texts, ranks[0] + ranks[1]))) == {str(n): 1 for n in range(60)}
    assert [len(batch) for batch in ranks[0]] == [6] * 5
    steps = [sorted(cut.duration for cut in flat(batches)) for batches in zip(*ranks, strict=True)]
    assert 0.115 < max(step[-1] - step[0] for step in steps) < 0.11 + 2 * 0.059
    assert any(after < before for before, after in pairwise(steps))
    with raises(ConfigError, "bad_config_value", "use_semi_sorted_batching needs batch_size"):
        load(settings, **data | {"batch_size": None, "batch_duration": 9})

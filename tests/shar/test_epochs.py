"""Epochs of finite readers in loaders: each is complete and has its own order, also after an interrupted epoch."""

from itertools import islice

import pytest
from lhotse.dataset import DynamicCutSampler, IterableDatasetWrapper
from support.project import make_bare_dataset, numbers, raises
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.shar.reading.loading import ResumableDataset, merge_loader_states
from sharmill.training import Chain, merge_data_states

COUNTS = [9, 20, 1, 0, 20, 13]
WHOLE = list(range(sum(COUNTS)))


class Numbers(Dataset):
    def __getitem__(self, cuts):
        return numbers(cuts)


def in_threes(cuts):
    return DynamicCutSampler(cuts, max_cuts=3, rank=0, world_size=1)


def but_seven(cuts):
    return in_threes(cuts.filter(lambda cut: numbers([cut]) != [7]))


def resumable(cuts, pipeline=in_threes):
    return ResumableDataset(cuts, pipeline, finish=numbers)


READERS = {
    "dataset": resumable,
    "lhotse": lambda cuts: IterableDatasetWrapper(Numbers(), in_threes(cuts)),
    "chain": lambda cuts: Chain(WHOLE, shuffle=True, seed=1).shuffle(5).batch(3),
}
MERGES = {"dataset": merge_loader_states, "chain": merge_data_states}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_bare_dataset(tmp_path_factory.mktemp("epochs") / "dataset", COUNTS)


def examples(dataset, kind="dataset", **options):
    return READERS[kind](open_shar(dataset, [], shuffle=True, seed=1, block_size=1), **options)


def load(examples, num_workers, *, kind=StatefulDataLoader, **options):
    return kind(examples, batch_size=None, num_workers=num_workers, **options)


def read(loader, count=None):
    return [number for batch in islice(loader, count) for number in batch]


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (3, False), (1, True), (3, True)])
@pytest.mark.parametrize("kind", READERS)
def test_each_epoch_of_a_loader_is_whole_and_another(dataset, kind, num_workers, persistent, loader):
    """Each iteration of a loader also reads the epoch that ``set_epoch`` selects."""
    options = {"kind": loader, "persistent_workers": persistent}
    plain = load(examples(dataset, kind), num_workers, **options)
    epochs = [read(plain) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [WHOLE] * 3
    assert len(set(map(tuple, epochs))) == 3
    options["persistent_workers"] = (
        persistent and kind != "lhotse"
    )  # lhotse's set_epoch does not reach persistent workers
    chosen = load(examples(dataset, kind), num_workers, **options)
    for epoch in (2, 1):
        chosen.dataset.set_epoch(epoch)
        assert read(chosen) == epochs[epoch]


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (3, False), (3, True)])
@pytest.mark.parametrize("kind", MERGES)
def test_the_state_of_a_finished_epoch_begins_the_next(dataset, kind, num_workers, persistent, every):
    options = {"persistent_workers": persistent, "snapshot_every_n_steps": every}
    finished = load(examples(dataset, kind), num_workers, **options)
    read(finished)
    state = finished.state_dict()
    expected = [read(finished) for _ in range(2)]
    merged = examples(dataset, kind)
    merged.load_state_dict(MERGES[kind]([state]))
    own = load(examples(dataset, kind), num_workers, **options)
    own.load_state_dict(state)
    for resumed in (load(merged, num_workers, **options), own):
        assert [read(resumed) for _ in range(2)] == expected
    others = examples(dataset, kind)
    others.load_state_dict(MERGES[kind]([state]))
    assert [sorted(read(load(others, 2))) for _ in range(2)] == [WHOLE] * 2


@pytest.mark.parametrize("stop", [0, 1, 4])
@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (3, False), (3, True)])
@pytest.mark.parametrize("kind", MERGES)
def test_a_later_epoch_goes_on_where_it_was_stopped(dataset, kind, num_workers, persistent, stop):
    """This includes workers that had yielded nothing in that epoch; the following epochs are complete."""
    stopped = load(examples(dataset, kind), num_workers, persistent_workers=persistent)
    read(stopped)
    begun = read(stopped, stop)
    if not stop:
        iter(stopped)
    state = stopped.state_dict()
    merged = examples(dataset, kind)
    merged.load_state_dict(MERGES[kind]([state]))
    own = load(examples(dataset, kind), num_workers)
    own.load_state_dict(state)
    for resumed in (load(merged, 2), own):
        assert sorted(begun + read(resumed)) == WHOLE
        assert sorted(read(resumed)) == WHOLE


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_what_a_pipeline_leaves_out_ends_with_the_epoch(dataset, num_workers):
    finished = load(examples(dataset, pipeline=but_seven), num_workers)
    read(finished)
    resumed = examples(dataset, pipeline=but_seven)
    resumed.load_state_dict(merge_loader_states([finished.state_dict()]))
    assert sorted(read(load(resumed, num_workers))) == sorted({*WHOLE} - {7})


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_left_early_is_followed_by_whole_ones(dataset, persistent):
    """Some workers are then ahead of the loader and have finished the epoch, and others have not."""
    left = load(examples(dataset), 3, persistent_workers=persistent)
    for stop in (1, 19, 20):
        read(left, stop)
        assert sorted(read(left)) == WHOLE
    assert sorted(read(load(left.dataset, 2))) == sorted(read(load(left.dataset, 3))) == WHOLE


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_go_on_to_the_next_epoch(dataset, context):
    loader = load(examples(dataset), 1, multiprocessing_context=context)
    assert len({tuple(read(loader)) for _ in range(2)}) == 2


@pytest.mark.parametrize(("every", "stop", "is_exact"), [(1, 5, True), (4, 8, True), (4, 5, False), (100, 1, False)])
def test_states_between_snapshots_are_refused(dataset, every, stop, is_exact):
    loader = load(examples(dataset), 3, snapshot_every_n_steps=every)
    begun = read(loader, stop)
    if is_exact:
        resumed = examples(dataset)
        resumed.load_state_dict(merge_loader_states([loader.state_dict()]))
        assert sorted(begun + read(load(resumed, 2))) == WHOLE
    else:
        with raises(ConfigError, "inexact_state", "snapshot_every_n_steps=1"):
            merge_loader_states([loader.state_dict()])

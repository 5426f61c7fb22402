"""``ResumableDataset`` in torchdata's StatefulDataLoader, with workers, and resumed with other numbers of ranks.

``tests/jobs/test_train.py`` tests training that is killed and resumed with other numbers of ranks and workers.
"""

import pytest
from lhotse.dataset import DynamicBucketingSampler
from support.project import make_bare_dataset, numbers, raises
from support.shared_memory import run_with_shm
from torchdata.stateful_dataloader import StatefulDataLoader

from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.shar.reading.loading import ResumableDataset, merge_loader_states

COUNTS = [9, 20, 1, 0, 20, 13]
TOTAL = sum(COUNTS)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_bare_dataset(tmp_path_factory.mktemp("loading") / "dataset", COUNTS)


def first_number(made):
    return numbers([made])[0]


def loader(dataset, num_workers, *, state=None, rank=0, world_size=1, pipeline=None, finish=first_number):
    cuts = open_shar(dataset, [], shuffle=True, rank=rank, world_size=world_size, block_size=1)
    resumable = ResumableDataset(cuts, pipeline, finish=finish)
    if state is not None:
        resumable.load_state_dict(state)
    return StatefulDataLoader(resumable, batch_size=None, num_workers=num_workers)


@pytest.mark.parametrize(("before", "after"), [((1, 2), (3, 1)), ((2, 3), (1, 0)), ((3, 0), (2, 2))])
def test_the_rest_is_read_by_other_ranks_and_workers(dataset, before, after):
    used, states = [], []
    for rank in range(before[0]):
        one = loader(dataset, before[1], rank=rank, world_size=before[0])
        stream = iter(one)
        used += [next(stream) for _ in range(5 + rank)]
        states.append(one.state_dict())
    merged = merge_loader_states(states)
    for rank in range(after[0]):
        used += list(loader(dataset, after[1], state=merged, rank=rank, world_size=after[0]))
    assert sorted(used) == list(range(TOTAL))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_estimates_its_buckets_costs_no_cuts(dataset, num_workers):
    def estimating(cuts):
        return DynamicBucketingSampler(cuts, max_cuts=3, num_buckets=2, shuffle=True, world_size=1, rank=0)

    interrupted = loader(dataset, num_workers, pipeline=estimating, finish=epochs_and_numbers)
    stream = iter(interrupted)
    begun = [pair for _ in range(4) for pair in next(stream)]
    resumed = loader(dataset, num_workers, pipeline=estimating, finish=epochs_and_numbers)
    resumed.load_state_dict(interrupted.state_dict())
    rest = [pair for batch in resumed for pair in batch]
    assert sorted(begun + rest) == [[0, number] for number in range(TOTAL)]


def epochs_and_numbers(batch):
    return [[cut.shar_position[0], *numbers([cut])] for cut in batch]


def test_an_epoch_of_which_something_was_used_counts(dataset):
    reader = marking_reader(dataset)
    reader.mark_consumed([next(iter(reader))])
    first = list(reader)
    assert {cut.shar_position[0] for cut in first} == {0}
    reader.mark_consumed(first[-1:])
    state = reader.state_dict()
    assert {cut.shar_position[0] for cut in reader} == {1}
    ended = marking_reader(dataset)
    ended.load_state_dict(state)
    ended.mark_consumed(ended)
    again = marking_reader(dataset)
    again.load_state_dict(ended.state_dict())
    assert [len(list(again)), len(list(again))] == [TOTAL, TOTAL]


def marking_reader(dataset):
    reader = open_shar(dataset, [], shuffle=True).data
    reader.count_only_marked()
    return reader


@pytest.mark.parametrize("state", [{}, {"dataset_state": None}, {"_snapshot": {"_worker_snapshots": {}}}])
def test_what_is_no_state_of_a_loader_is_refused(state):
    with raises(ConfigError, "wrong_state", "StatefulDataLoader"):
        merge_loader_states([state])


LOOP = """
import resource
import sys
import torch
from torch.utils.data import DataLoader
from sharmill.shar import open_shar
from sharmill.shar.reading.loading import ResumableDataset
from sharmill.training import Chain, get_dataloader

class Large(torch.utils.data.Dataset):
    def __getitem__(self, cuts):
        return {"audio": [torch.zeros(1 << 20)]}

class Wrapped:
    def __init__(self, examples):
        self.audio = examples

def limit_files(worker):
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

def nemo(**options):
    entry = {"type": "sharmill", "dataset": sys.argv[1], "fields": []}
    settings = {"input_cfg": [entry], "batch_size": 2, "num_workers": 1, "shard_seed": 0, "shuffle": True}
    return get_dataloader(settings, 0, 1, dataset=Large(), **options)

cuts = open_shar(sys.argv[1], [], infinite=True)
LOADERS = {
    "our reader": lambda: DataLoader(ResumableDataset(cuts, finish=Large().__getitem__), None, num_workers=1),
    "a chain": lambda: DataLoader(Chain(range(9)).map(Large().__getitem__), None, num_workers=1),
    "batches of the user's class": lambda: DataLoader(
        Chain(range(9)).map(Large().__getitem__).batch(1, wrapper_class=Wrapped), None, num_workers=1
    ),
    "many small tensors": lambda: DataLoader(
        Chain(range(9)).map(lambda number: [torch.zeros(1) for _ in range(60)]),
        None, num_workers=1, worker_init_fn=limit_files,
    ),
    "NeMo's loader": nemo,
    "NeMo's loader with states": lambda: nemo(resumable=True),
}
print(len(next(iter(LOADERS[sys.argv[2]]()))))
"""


@pytest.mark.parametrize(
    "loader",
    ["our reader", "a chain", "batches of the user's class",
     *(pytest.param(f"NeMo's loader{more}", marks=pytest.mark.slow) for more in ("", " with states"))],
)  # fmt: skip
def test_a_batch_that_does_not_fit_into_dev_shm_is_an_error(dataset, tmp_path, loader):
    program = tmp_path / "loop.py"
    program.write_text(LOOP)
    done = run_with_shm("size=1m", program, dataset, loader)
    assert done.returncode == 1
    assert "FatalError: /dev/shm has no room for a batch: give the container more" in done.stderr


def test_more_tensors_than_files_may_be_open_are_an_error(dataset, tmp_path):
    program = tmp_path / "loop.py"
    program.write_text(LOOP)
    done = run_with_shm("size=9m", program, dataset, "many small tensors")
    assert done.returncode == 1
    assert "FatalError: the tensors of batches need more open files than the limit: raise it (ulimit -n)" in done.stderr

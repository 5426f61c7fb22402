"""Chains: each step, the division among readers, exact states, and the budget of errors."""

from __future__ import annotations

import json
import logging
import pickle
import random
from collections import Counter

import pytest
import torch
from support.errors import raises
from support.work import half, inverse
from torchdata.stateful_dataloader import StatefulDataLoader

from sharmill.errors import ConfigError, DamagedShard
from sharmill.training import Chain, TextLines, merge_data_states
from sharmill.training.chain.sources import Items


class Countless:
    """Can be read again, and has neither a length nor random access."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def flat(batches):
    return [one for batch in batches for one in batch]


def itself(number):
    return number


def test_steps_follow_each_other():
    chain = Chain([3, 1, 2, 0, 5, 4]).map(half).filter(bool).sort(3, key=itself).batch(2)
    assert list(chain) == [[0.5, 1.0], [1.5, 2.0], [2.5]]


def test_a_chain_is_not_changed_by_a_further_step():
    chain = Chain(range(3))
    chain.map(half)
    assert list(chain) == [0, 1, 2]


def test_a_buffer_shuffles_by_seed_and_epoch():
    def epochs(seed):
        chain = Chain(range(40), seed=seed).shuffle(8)
        return [list(chain), list(chain)]

    first, second = epochs(1)
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    assert epochs(1) == [first, second]
    assert epochs(2)[0] != first
    assert all(place >= number - 8 for place, number in enumerate(first))


def test_the_source_shuffles_all_its_items():
    chain = Chain(range(100), shuffle=True, seed=4)
    first, second = list(chain), list(chain)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second != list(range(100))


def test_dynamic_batches_keep_to_the_padded_length():
    lengths = [3, 4, 2, 9, 30, 1, 1]
    assert list(Chain(lengths).dynamic_batch(12, length=itself)) == [[3, 4, 2], [9], [30], [1, 1]]


def test_buckets_have_a_size_each():
    lengths = [5, 12, 5, 30, 5, 12, 10]
    assert list(Chain(lengths).bucket([10, 20], [2, 3, 1], length=itself)) == [[5, 5], [30], [12, 12, 10], [5]]


def test_zip_gives_pairs_and_the_longer_goes_on():
    chain = Chain(["a", "b", "c"]).zip(Chain(range(5), infinite=True).parallel_map(itself, 2))
    epochs = [list(chain) for _ in range(3)]
    assert [[letter for letter, _ in pairs] for pairs in epochs] == [["a", "b", "c"]] * 3
    assert [number for pairs in epochs for _, number in pairs] == [0, 1, 2, 3, 4, 0, 1, 2, 3]


def test_zip_of_whole_epochs_gives_each_example_once():
    chain = Chain(range(6), shuffle=True).zip(Chain(range(4), shuffle=True))
    pairs = [pair for _ in range(5) for pair in chain]
    for column, size in ((0, 6), (1, 4)):
        found = [pair[column] for pair in pairs]
        assert Counter(found[:size]) == Counter(range(size))


SOURCES = {"items": lambda: range(31), "iterable": lambda: Countless(31)}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("shuffle", "num_workers"), [(False, 0), (True, 2)])
def test_each_example_once_over_ranks_and_workers(source, shuffle, num_workers):
    found = []
    for rank in (0, 1):
        chain = Chain(SOURCES[source](), shuffle=shuffle, rank=rank, world_size=2).shuffle(4).sort(5, itself).batch(3)
        found += flat(torch.utils.data.DataLoader(chain, batch_size=None, num_workers=num_workers))
    assert Counter(found) == Counter(range(31))


def test_by_file_each_file_has_one_reader(tmp_path):
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{n}\n" for n in range(5)))
    lines = TextLines(str(tmp_path / "*.txt"))
    found = [[line["txt"] for line in Chain(lines, divide="file", rank=r, world_size=2)] for r in (0, 1)]
    assert sorted(flat(found)) == sorted(f"{name}{n}" for name in "abcdef" for n in range(5))
    assert not {line[0] for line in found[0]} & {line[0] for line in found[1]}


def resumable(rank=0, world_size=1, **options):
    return Chain(range(50), shuffle=True, seed=7, infinite=True, rank=rank, world_size=world_size, **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_same_layout_goes_on_with_what_would_have_come(num_workers):
    def loader():
        chain = resumable().filter(odd).map(half).dynamic_batch(60, itself)
        return StatefulDataLoader(chain, batch_size=None, num_workers=num_workers)

    whole = iter(loader())
    expected = [next(whole) for _ in range(20)]
    first = loader()
    started = iter(first)
    assert [next(started) for _ in range(9)] == expected[:9]
    second = loader()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())) if not num_workers else first.state_dict())
    again = iter(second)
    assert [next(again) for _ in range(11)] == expected[9:]


def odd(number):
    return number % 2 == 1


@pytest.mark.parametrize("seed", range(2))
def test_each_example_once_per_epoch_on_changing_ranks_and_workers(seed):
    """Through filters, buffers, buckets and threads that hold examples back."""
    rng, used, state = random.Random(seed), [], None
    for _ in range(60):
        if state is not None and state["readers"][0]["epoch"] >= 3:
            break
        world_size, states = rng.randint(1, 3), []
        num_workers = rng.choice([0, 0, 0, 2])
        for rank in range(world_size):
            chain = resumable(rank, world_size).parallel_map(tagged, 2).filter(not_dropped).shuffle(5)
            chain = chain.sort(4, key=first_of).bucket([20], [2, 3], length=first_of)
            if state is not None:
                chain.load_state_dict(state)
            loader = StatefulDataLoader(chain, batch_size=None, num_workers=num_workers)
            batches = iter(loader)
            used += [number for _ in range(rng.randint(0, 4)) for number, _ in next(batches)]
            states.append(loader.state_dict())
        state = json.loads(json.dumps(merge_data_states(states)))
    left = set(range(50)) - {n for n in range(50) if n % 10 == 3}
    counts = Counter(used)
    assert set(counts) == left
    assert min(counts.values()) >= 3
    assert max(counts.values()) <= 4 + 1  # of the present epoch and, on other readers, of the next


def tagged(number):
    return number, str(number)


def not_dropped(pair):
    return pair[0] % 10 != 3


def first_of(pair):
    return pair[0]


def test_zips_are_resumed():
    def chain():
        return resumable().zip(Chain([f"t{n}" for n in range(7)], infinite=True).parallel_map(itself, 2)).batch(3)

    whole = iter(chain())
    expected = [next(whole) for _ in range(12)]
    one = chain()
    pairs = iter(one)
    assert [next(pairs) for _ in range(5)] == expected[:5]
    state = json.loads(json.dumps(one.state_dict()))
    pairs.close()
    two = chain()
    two.load_state_dict(state)
    again = iter(two)
    assert [next(again) for _ in range(7)] == expected[5:]


def test_a_state_of_other_sources_is_refused():
    state = resumable().state_dict()
    with raises(ConfigError, "wrong_state", "50", "51"):
        Chain(range(51), shuffle=True, seed=7, infinite=True).load_state_dict(state)
    with raises(ConfigError, "wrong_state", "2 sources"):
        resumable().zip(Chain([1])).load_state_dict(state)
    other = Chain(range(50), shuffle=True, seed=7, infinite=True, rank=1, world_size=2)
    other.load_state_dict(state)
    with raises(ConfigError, "wrong_state", "part 0 of 1"):
        next(iter(other))


def test_set_epoch():
    chain = Chain(range(20), shuffle=True)
    epochs = [list(chain) for _ in range(3)]
    chain.set_epoch(1)
    assert list(chain) == epochs[1]


@pytest.mark.parametrize("kind", [None, "thread", "process"])
def test_an_error_of_a_function_names_its_example(kind):
    chain = Chain([4, 2, 0, 1])
    results = iter(chain.map(inverse) if kind is None else chain.parallel_map(inverse, 1, kind=kind))
    assert [next(results), next(results)] == [0.25, 0.5]
    with pytest.raises(ZeroDivisionError) as caught:
        next(results)
    assert caught.value.__notes__ == ["at item 2"]


def test_errors_of_steps_before_a_parallel_one_keep_their_place():
    results = iter(Chain([4, 0, 1]).map(inverse).parallel_map(half, 2))
    assert next(results) == 0.125
    with pytest.raises(ZeroDivisionError) as caught:
        next(results)
    assert caught.value.__notes__ == ["at item 1"]


@pytest.mark.parametrize("kind", [None, "thread", "process"])
def test_errors_are_left_out_logged_and_counted(kind, caplog):
    chain = Chain([4, 0, 2, 0, 1], on_error="skip", max_errors=2)
    chain = chain.map(inverse) if kind is None else chain.parallel_map(inverse, 1, kind=kind)
    with caplog.at_level(logging.WARNING):
        assert list(chain) == [0.25, 0.5, 1.0]
    assert [record.message for record in caplog.records] == [
        "an example is left out (1 of at most 2): item 1: ZeroDivisionError: division by zero",
        "an example is left out (2 of at most 2): item 3: ZeroDivisionError: division by zero",
    ]
    assert chain.state_dict()["readers"][0]["num_damaged"] == 2


def test_more_errors_than_allowed_end_it():
    results = iter(Chain([4, 0, 2, 0, 1], on_error="skip", max_errors=1).filter(inverse))
    assert [next(results), next(results)] == [4, 2]
    with raises(DamagedShard, "damaged_shard", "item 3", "ZeroDivisionError", "max_errors=1"):
        next(results)


def test_the_count_of_errors_goes_on_after_a_resume():
    def chain():
        return Chain([0, 1, 0, 2, 0, 4], on_error="skip", max_errors=2).map(inverse)

    first = chain()
    results = iter(first)
    assert [next(results), next(results)] == [1.0, 0.5]
    second = chain()
    second.load_state_dict(first.state_dict())
    with raises(DamagedShard, "damaged_shard", "max_errors=2"):
        list(second)


def no_memory(number):
    raise MemoryError


def not_there(number):
    raise ImportError("no such module")


@pytest.mark.parametrize(("function", "error"), [(no_memory, MemoryError), (not_there, ImportError)])
def test_errors_of_the_program_are_never_left_out(function, error):
    with pytest.raises(error):
        list(Chain([1], on_error="skip").map(function))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Chain("data.list"), "RawList"),
        (lambda: Chain(iter([1])), "iterator"),
        (lambda: Chain([1], divide="day"), "'line' or 'file'"),
        (lambda: Chain([1], on_error="ignore"), "'raise' or 'skip'"),
        (lambda: Chain([1], on_error="skip", max_errors=-1), "max_errors is -1"),
        (lambda: Chain([1], on_error="skip", max_errors="3"), "max_errors is '3'"),
        (lambda: Chain([1], rank=2, world_size=2), "rank is 2"),
        (lambda: Chain([1]).batch(0), "size is 0"),
        (lambda: Chain([1]).batch(2.5), "size is 2.5: it is a whole number"),
        (lambda: Chain([1]).batch("3"), "size is '3'"),
        (lambda: Chain([1]).shuffle(True), "size is True"),
        (lambda: Chain([1]).sort(1.5), "size is 1.5"),
        (lambda: Chain([1]).dynamic_batch("9"), "max_frames is '9'"),
        (lambda: Chain([1]).bucket([5], [2, 1.5]), "a size of bucket is 1.5"),
        (lambda: Chain([1]).bucket(["5"], [2, 1]), "bounds are numbers"),
        (lambda: Chain([1]).parallel_map(half, 1.5), "num_workers is 1.5"),
        (lambda: Chain([1]).dynamic_batch(0), "max_frames is 0"),
        (lambda: Chain([1]).bucket([10], [2]), "one size more"),
        (lambda: Chain([1]).parallel_map(half, 0), "at least 1"),
        (lambda: (lambda chain: chain.zip(chain.map(half)))(Chain([1])), "itself"),
    ],
)
def test_what_cannot_be_is_refused(make, what):
    with raises(ConfigError, "bad_config_value", what):
        make()


def test_chains_of_other_ranks_are_not_zipped():
    with raises(ConfigError, "split_wrong", "world_size"):
        Chain([1]).zip(Chain([1], world_size=2))


def test_a_filter_that_nothing_passes_is_an_error():
    with raises(ConfigError, "too_few_cuts", "none of 1000 examples"):
        next(iter(Chain(range(10), infinite=True).filter(not_dropped_at_all)))
    assert next(iter(Chain(range(1500), infinite=True).filter(last_of_1500))) == 1499
    assert list(Chain(range(1500)).filter(not_dropped_at_all)) == []


def not_dropped_at_all(number):
    return False


def last_of_1500(number):
    return number == 1499


def test_workers_that_stay_read_the_next_epoch():
    loader = torch.utils.data.DataLoader(
        Chain(range(20), shuffle=True), batch_size=None, num_workers=2, persistent_workers=True
    )
    first, second = list(loader), list(loader)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_a_chain_goes_to_workers_that_are_not_forked(tmp_path):
    (tmp_path / "text.txt").write_text("one\ntwo\nthree\n")
    steps = Chain(TextLines(tmp_path / "text.txt"), shuffle=True).parallel_map(key_of).shuffle(2).sort(2, key=str)
    chain = steps.zip(Chain(range(5), infinite=True).filter(odd)).batch(2)
    there = pickle.loads(pickle.dumps(chain))
    assert list(there) == list(chain)


def key_of(example):
    return example["key"]


def test_more_readers_than_items():
    assert flat(Chain([1, 2], rank=rank, world_size=5) for rank in range(5)) in ([1, 2], [2, 1])
    with raises(ConfigError, "too_few_cuts", "part"):
        [next(iter(Chain([1, 2], rank=rank, world_size=5, infinite=True))) for rank in range(5)]


def test_what_changed_its_length_is_read_as_far_as_it_goes():
    changing = Countless(5)
    source = Items(changing)
    assert source.count(0) == 5
    changing.count = 3
    assert list(Chain(source)) == [0, 1, 2]

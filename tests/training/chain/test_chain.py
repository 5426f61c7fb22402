"""Tests of chains: each step, the division among readers, exact states, and the limit of errors."""

import io
import json
import logging
import multiprocessing
import os
import random
from collections import Counter
from functools import partial
from itertools import islice, repeat

import numpy as np
import pytest
import soundfile as sf
import torch
from support.project import raises, voice, write_lines
from support.sources import voice_bytes, write_tar
from support.web import serving
from support.work import half, inverse
from torchdata.stateful_dataloader import StatefulDataLoader

from sharmill.errors import ConfigError, DamagedShard, RejectRecord
from sharmill.training import Chain, RawList, ShardList, TextLines, interleave, merge_data_states
from sharmill.training.chain.features import collate, decode_wav, kaldi_fbank, pad_wav


def itself(number):
    return number


def first_of(pair):
    return pair[0]


def multiple(number, of):
    return number % of == 0


def pairs(numbers):
    return zip(numbers, numbers)  # noqa: B905  the last of an odd number is dropped


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        (Chain([3, 1, 2, 0, 5, 4]).map(half).filter(bool).sort(3, key=itself).batch(2),
         [[0.5, 1.0], [1.5, 2.0], [2.5]]),
        (Chain([3, 4, 2, 9, 30, 1, 1]).dynamic_batch(12, length=itself), [[3, 4, 2], [9], [30], [1, 1]]),
        (Chain([5, 12, 5, 30, 5, 12, 10]).bucket([10, 20], [2, 3, 1], length=itself),
         [[5, 5], [30], [12, 12, 10], [5]]),
        (Chain([3, 1, 2, 0]).sort(itself, reverse=True), [3, 2, 1, 0]),
        (Chain([3, 1, 2]).zip(Chain([9, 8, 7, 6], infinite=True)).sort(key=first_of), [(1, 8), (2, 7), (3, 9)]),
        (Chain(range(5)).apply(pairs).batch(2), [[(0, 1), (2, 3)]]),
        (interleave(Chain([1, 2, 3]), Chain([10, 20]), Chain([100, 200, 300])), [1, 10, 100, 2, 20, 200, 3]),
        (Chain([1, 2, 3]).map(pow, 2).filter(multiple, of=3), [9]),
        (Chain(range(5)).batch(batch_size=2, wrapper_class=sum), [1, 5, 4]),
    ],
    ids=["steps follow each other", "dynamic batches keep to the padded length", "buckets have a size each",
         "all of an epoch is sorted", "a zip with an endless chain is sorted", "a function of the stream is applied",
         "chains take turns", "functions have further arguments", "a batch is what a function makes of it"],
)  # fmt: skip
def test_a_chain_gives(chain, expected):
    assert list(chain) == expected


def generated(numbers):
    yield from numbers


def test_the_chain_that_wenets_page_prints():
    speech = Chain(generated([1, 2, 3, 4, 1])).map(lambda elem: {"speech": elem * 2})
    speech = speech.filter(lambda elem: elem["speech"] >= 2).sort(lambda elem: elem["speech"], buffer_size=2)
    speech = speech.map(lambda elem: {"fbank": elem["speech"] + 1, "speech": elem["speech"]})
    text = Chain(generated([10, 20, 30, 40, 50, 60])).map(lambda elem: {"tokens": elem + 1, "text": elem})
    assert list(speech.zip(text).sort(lambda elem: elem[1]["tokens"])) == [
        ({"fbank": number + 1, "speech": number}, {"tokens": word + 1, "text": word})
        for number, word in zip([2, 4, 6, 8, 2], [10, 20, 30, 40, 50], strict=True)
    ]


@pytest.mark.parametrize(
    "source",
    [iter(range(7)), generated(range(7)), partial(generated, range(7)), lambda: [*range(7)]],
    ids=["iterator", "generator", "generator function", "function"],
)
def test_any_source_is_divided_and_read_in_every_epoch(source):
    chains = [Chain(source, rank=rank, world_size=2) for rank in (0, 1)] if callable(source) else [Chain(source)]
    for _ in range(2):
        numbers = [number for chain in chains for number in torch.utils.data.DataLoader(chain, None, num_workers=2)]
        assert sorted(numbers) == [*range(7)]


def test_a_function_is_called_to_count_and_per_epoch_and_worker(tmp_path):
    def source():
        with (tmp_path / "calls").open("a") as calls:
            calls.write(".")
        return generated(range(7))

    loader = torch.utils.data.DataLoader(Chain(source), None, num_workers=2)
    assert [sorted(loader) for _ in range(3)] == 3 * [[*range(7)]]
    assert (tmp_path / "calls").read_text() == "." * (1 + 3 * 2)


def test_a_list_that_a_function_returns_is_shuffled_as_a_list():
    assert list(Chain(lambda: [*range(12)], shuffle=True, seed=3)) == list(Chain([*range(12)], shuffle=True, seed=3))


@pytest.mark.parametrize("made", [list, generated])
@pytest.mark.parametrize("later", [3, 8])
def test_a_function_with_a_changing_number_of_items_fails(made, later):
    counts = iter([5, 5, later])
    chain = Chain(lambda: made(range(next(counts))))
    assert list(chain) == [*range(5)]
    with pytest.raises(DamagedShard, match="no longer has the 5 items"):
        list(chain)


def test_a_source_that_never_ends_is_an_error():
    with raises(ConfigError, "bad_config_value", "16777216 items"):
        Chain(repeat(None))


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


@pytest.mark.parametrize(
    ("chain", "epochs"),
    [
        (Chain(["a", "b", "c"]).zip(Chain(range(5), infinite=True).parallel_map(itself, 2)),
         [[("a", 0), ("b", 1), ("c", 2)], [("a", 3), ("b", 4), ("c", 0)], [("a", 1), ("b", 2), ("c", 3)]]),
        (Chain([1, 2]).zip(Chain([10, 20])), [[(1, 10), (2, 20)]] * 2),
        (Chain([1, 2]).interleave(Chain([10, 20, 30])),
         [[1, 10, 2, 20], [1, 30, 2], [10, 1, 20, 2, 30], [1, 10, 2, 20]]),
    ],
    ids=["a zip with an endless chain", "a zip of one length", "chains that take turns"],
)  # fmt: skip
def test_joined_chains_end_with_the_first_and_the_longer_goes_on(chain, epochs):
    assert [list(chain) for _ in epochs] == epochs


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_takes_turns(rank):
    part = {"rank": rank, "world_size": 2}
    chain = Chain(range(20), **part).interleave(Chain(range(100, 120), **part))
    assert [number // 100 for number in chain] == [0, 1] * 10


def test_interleave_draws_by_weights_and_seed():
    def drawn(seed, weights=(3, 1)):
        chain = Chain(["a"], infinite=True).interleave(Chain(["b"], infinite=True), weights=weights, seed=seed)
        return "".join(islice(chain, 2000))

    assert 1400 < drawn(1).count("a") < 1600
    assert drawn(1) == drawn(1) != drawn(2)


def resumable(rank=0, world_size=1, **options):
    return Chain(range(50), shuffle=True, seed=7, infinite=True, rank=rank, world_size=world_size, **options)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_each_example_once_per_epoch_on_changing_readers(seed, interleaved):
    """The chain has filters, buffers, buckets and threads that hold examples back."""
    rng, used, state = random.Random(seed), [], None
    for _ in range(60):
        if state is not None and state["readers"][0]["epoch"] >= 3:
            break
        world_size, states = rng.randint(1, 3), []
        num_workers = rng.choice([0, 0, 0, 2])
        for rank in range(world_size):
            chain = resumable(rank, world_size)
            if interleaved:
                other = Chain(range(50, 90), infinite=True, rank=rank, world_size=world_size)
                chain = chain.interleave(other, weights=[1, 2], seed=3)
            chain = chain.parallel_map(tagged, 2).filter(not_dropped).shuffle(5)
            chain = chain.sort(4, key=first_of).bucket([20], [2, 3], length=first_of)
            if state is not None:
                chain.load_state_dict(state)
            loader = StatefulDataLoader(chain, batch_size=None, num_workers=num_workers)
            batches = iter(loader)
            used += [number for _ in range(rng.randint(0, 8 if interleaved else 4)) for number, _ in next(batches)]
            states.append(loader.state_dict())
        state = json.loads(json.dumps(merge_data_states(states)))
    left = {n for n in range(90 if interleaved else 50) if n % 10 != 3}
    counts = Counter(used)
    assert set(counts) == left
    assert min(counts.values()) >= 3
    # Readers may be in different epochs, but none delivers an example twice in an epoch.
    assert all(counts[number] <= 1 + max(map(int, state["readers"][int(number >= 50)]["epochs"])) for number in counts)


def tagged(number):
    return number, str(number)


def not_dropped(pair):
    return pair[0] % 10 != 3


@pytest.mark.parametrize(
    "join",
    [
        lambda speech, text: speech.zip(text).batch(3),
        lambda speech, text: speech.interleave(text).batch(3),
        lambda speech, text: speech.interleave(text, weights=[2, 1], seed=5),
        lambda speech, text: speech.zip(text).apply(pairs, exact=True),
        lambda speech, text: speech.zip(text).sort(lambda pair: pair[0] % 5),
    ],
    ids=["zip", "turns", "weights", "apply", "sorted epoch"],
)
def test_joined_chains_are_resumed(join):
    def chain():
        speech = Chain(range(50), shuffle=True, seed=7)
        return join(speech, Chain([f"t{n}" for n in range(7)], infinite=True).parallel_map(itself, 2))

    whole = iter(chain())
    expected = [next(whole) for _ in range(12)]
    one = chain()
    examples = iter(one)
    assert [next(examples) for _ in range(5)] == expected[:5]
    state = json.loads(json.dumps(one.state_dict()))
    examples.close()
    two = chain()
    two.load_state_dict(state)
    again = iter(two)
    assert [next(again) for _ in range(7)] == expected[5:]


def test_a_function_that_may_hold_examples_back_has_no_state():
    chain = Chain(range(4)).apply(reversed_list)
    assert list(chain.zip(Chain(range(4)))) == [(3, 0), (2, 1), (1, 2), (0, 3)]
    with raises(ConfigError, "inexact_state", "apply", "exact=True"):
        chain.zip(Chain(range(4))).state_dict()
    with raises(ConfigError, "inexact_state", "without taking one"):
        list(Chain(range(4)).apply(reversed_list, exact=True))


def reversed_list(numbers):
    return list(numbers)[::-1]


def test_a_state_of_other_sources_is_refused():
    state = resumable().state_dict()
    with raises(ConfigError, "wrong_state", "50", "51"):
        Chain(range(51), shuffle=True, seed=7, infinite=True).load_state_dict(state)
    with raises(ConfigError, "wrong_state", "1 datasets or sources", "2"):
        resumable().zip(Chain([1])).load_state_dict(state)
    other = Chain(range(50), shuffle=True, seed=7, infinite=True, rank=1, world_size=2)
    other.load_state_dict(state)
    with raises(ConfigError, "wrong_state", "part 0 of 1"):
        next(iter(other))


@pytest.mark.parametrize("kind", [None, "thread", "process"])
def test_an_error_of_a_function_names_its_example(kind):
    chain = Chain([4, 2, 0, 1])
    results = iter(chain.map(inverse) if kind is None else chain.parallel_map(inverse, 1, kind=kind))
    assert [next(results), next(results)] == [0.25, 0.5]
    with pytest.raises(ZeroDivisionError) as caught:
        next(results)
    assert caught.value.__notes__ == ["at item 2"]


@pytest.mark.parametrize("kind", [None, "thread", "process"])
def test_errors_are_left_out_logged_and_counted(kind, caplog):
    chain = Chain([4, 0, 2, 0, 1], on_error="skip", max_errors=2)
    chain = chain.map(inverse) if kind is None else chain.parallel_map(inverse, 1, kind=kind)
    with caplog.at_level(logging.WARNING):
        assert list(chain) == [0.25, 0.5, 1.0]
    assert [record.message for record in caplog.records] == [
        "skipped an example (1 of at most 2): item 1: ZeroDivisionError: division by zero",
        "skipped an example (2 of at most 2): item 3: ZeroDivisionError: division by zero",
    ]
    assert chain.state_dict()["readers"][0]["num_damaged"] == 2


def test_an_error_behind_interleave_counts_for_its_source(caplog):
    chain = Chain([4, 0], on_error="skip", max_errors=1).interleave(Chain([1, 2]))
    assert list(chain.map(inverse)) == [0.25, 1, 0.5]
    assert [record.message for record in caplog.records] == [
        "skipped an example (1 of at most 1): item 1: ZeroDivisionError: division by zero",
    ]


def test_more_errors_than_allowed_end_it():
    results = iter(Chain([4, 0, 2, 0, 1], on_error="skip", max_errors=1).filter(inverse))
    assert [next(results), next(results)] == [4, 2]
    with raises(DamagedShard, "damaged_shard", "item 3", "ZeroDivisionError", "max_errors=1"):
        next(results)


def fail(error, number):
    raise error


@pytest.mark.parametrize("error", [MemoryError, ImportError])
def test_errors_of_the_program_are_never_left_out(error):
    with pytest.raises(error):
        list(Chain([1], on_error="skip").map(partial(fail, error)))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Chain("data.list"), "RawList"),
        (lambda: Chain(5), "a chain cannot begin with 5"),
        (lambda: Chain([1]).sort(itself, 5), "buffer_size=500"),
        (lambda: Chain([1]).sort(2, itself, buffer_size=3), "size and buffer_size"),
        (lambda: interleave(Chain([1]), [2]), "as Chain(source)"),
        (lambda: interleave([1], Chain([2])), "as Chain(source)"),
        (lambda: interleave(), "as Chain(source)"),
        (lambda: Chain([1], divide="day"), "'line' or 'file'"),
        (lambda: Chain([1], on_error="ignore"), "'raise' or 'skip'"),
        (lambda: Chain([1], on_error="skip", max_errors=-1), "max_errors is -1"),
        (lambda: Chain([1], on_error="skip", max_errors="3"), "max_errors is '3'"),
        (lambda: Chain([1], rank=2, world_size=2), "rank is 2"),
        (lambda: Chain([1]).batch(0), "size is 0"),
        (lambda: Chain([1]).batch(2.5), "size is 2.5: it must be an integer"),
        (lambda: Chain([1]).batch("3"), "size is '3'"),
        (lambda: Chain([1]).shuffle(True), "size is True"),
        (lambda: Chain([1]).sort(1.5), "size is 1.5"),
        (lambda: Chain([1], infinite=True).map(half).sort(itself), "sort without a size"),
        (lambda: Chain([1]).interleave(Chain([2]), weights=[1]), "for each of its 2 chains"),
        (lambda: Chain([1]).interleave(Chain([2]), weights=[1, 0]), "a positive number"),
        (lambda: Chain([1]).dynamic_batch("9"), "max_frames is '9'"),
        (lambda: Chain([1]).bucket([5], [2, 1.5]), "a size of bucket is 1.5"),
        (lambda: Chain([1]).bucket(["5"], [2, 1]), "bounds must be increasing numbers"),
        (lambda: Chain([1]).parallel_map(half, 1.5), "num_workers is 1.5"),
        (lambda: Chain([1]).dynamic_batch(0), "max_frames is 0"),
        (lambda: Chain([1]).bucket([10], [2]), "one size more"),
        (lambda: Chain([1]).parallel_map(half, 0), "at least 1"),
        (lambda: (lambda chain: chain.zip(chain.map(half)))(Chain([1])), "itself"),
    ],
)
def test_invalid_options_are_refused(make, what):
    with raises(ConfigError, "bad_config_value", what):
        make()


VOICE, OTHER = voice_bytes(0.2), voice_bytes(0.3)
GOOD = {"key": "a", "wav": "/data/a.wav", "txt": "one"}


def raw(tmp_path, lines, **options):
    return RawList(write_lines(tmp_path / "data.list", lines), **options)


def shards(tmp_path, names, **options):
    path = tmp_path / "data.shards.list"
    path.write_text("".join(f"{name}\n" for name in names))
    return ShardList(path, **{"root": tmp_path} | options)


def test_raw_lines_keep_all_their_keys(tmp_path):
    lines = [GOOD | {"speaker": 7}, b"", {"key": "b", "wav": "/data/x/../b.wav", "start": 1, "end": 2.5}]
    assert list(Chain(raw(tmp_path, lines))) == [
        GOOD | {"speaker": 7},
        {"key": "b", "wav": "/data/b.wav", "start": 1, "end": 2.5},
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"key": "a", "wav"', "not a JSON object"),
        (b'["a"]', "not a JSON object"),
        (b'{"key": "caf\xe9", "wav": "/a.wav"}', "not a JSON object"),
        ({"key": "a", "txt": "no audio"}, "'wav'"),
        ({"wav": "/a.wav", "txt": "no key"}, "'key'"),
        (GOOD | {"txt": None}, "'txt'"),
        (GOOD | {"start": 2, "end": 1}, "start and end"),
        (GOOD | {"start": "0", "end": "1"}, "start and end"),
        (GOOD | {"wav": "pipe:touch marker"}, "command"),
        (GOOD | {"wav": "relative.wav"}, "relative"),
        (GOOD | {"wav": "ftp://host/a.wav"}, "URL"),
        (GOOD | {"wav": "/a\0.wav"}, "null character"),
    ],
)
def test_a_bad_line_is_an_error_or_left_out(line, words, tmp_path):
    source = raw(tmp_path, [GOOD, line, GOOD | {"key": "c"}], cache_dir=tmp_path / "cache")
    with raises(DamagedShard, "damaged_shard", "data.list, record 2", words):
        list(Chain(source))
    chain = Chain(source, on_error="skip")
    assert [example["key"] for example in chain] == ["a", "c"]
    assert chain.state_dict()["readers"][0]["num_damaged"] == 1


def test_paths_stay_below_the_audio_root(tmp_path):
    (tmp_path / "audio").mkdir()
    (tmp_path / "secret.wav").write_bytes(VOICE)
    (tmp_path / "audio/link.wav").symlink_to(tmp_path / "secret.wav")
    names = ["a.wav", "../secret.wav", "link.wav", str(tmp_path / "secret.wav")]
    source = raw(tmp_path, [GOOD | {"wav": name} for name in names], audio_root=tmp_path / "audio")
    assert [example["wav"] for example in Chain(source, on_error="skip")] == [str(tmp_path / "audio/a.wav")]


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "web").mkdir()
    (tmp_path / "web/a.wav").write_bytes(VOICE)
    write_tar(tmp_path / "web/one.tar", [("a.wav", VOICE), ("a.txt", b"text")])
    with serving(tmp_path / "web") as server:
        yield server


def wavs(chain):
    return [example["wav"] for example in chain]


def test_lists_name_urls_and_where_the_call_allows_it_commands(server, tmp_path):
    cache = {"cache_dir": tmp_path / "cache"}
    pipe = f"pipe:cat {tmp_path}/web/"
    lines = [
        GOOD | {"wav": f"{server.url}/a.wav"},
        GOOD | {"wav": f"{pipe}a.wav"},
        GOOD | {"wav": f"cat {tmp_path}/none |"},
    ]
    found = list(Chain(raw(tmp_path, lines, allow_pipe=True, **cache), on_error="skip"))
    assert [example["wav"] for example in found] == [VOICE, VOICE]
    names = [f"{server.url}/one.tar", f"{pipe}one.tar", f"{server.url}/none.tar?secret".replace("//", "//me:secret@")]
    source = shards(tmp_path, names, root=None, allow_pipe=True, **cache)
    assert list(Chain(source, on_error="skip")) == 2 * [{"key": "a", "wav": VOICE, "txt": "text"}]
    with raises(DamagedShard, "damaged_shard", "none.tar", "404") as caught:
        list(Chain(source))
    assert "secret" not in str(caught.value)
    # With a root, other places are not opened, and commands need the caller's permission.
    for options in ({"root": tmp_path / "web"}, {"root": None}):
        chain = Chain(shards(tmp_path, [names[1], tmp_path / "web/one.tar"], **options), on_error="skip")
        assert len(list(chain)) == chain.state_dict()["readers"][0]["num_damaged"] == 1
    below = raw(tmp_path, lines[:1], audio_root=server.url, **cache)
    assert [example["wav"] for example in Chain(below)] == [VOICE]
    # Another process checks the server once more, and runs commands itself.
    (tmp_path / "web/a.wav").write_bytes(OTHER)
    asked, again = server.requests["/a.wav"], Chain(raw(tmp_path, lines[:2], allow_pipe=True, **cache), seed=1)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(wavs, [again, again]) == 2 * [[OTHER, OTHER]]
    assert server.requests["/a.wav"] == asked + 2


def test_members_belong_together_by_the_begin_of_their_names(tmp_path):
    members = [("a/b.1.wav", VOICE), ("a/b.1.txt", " größe\n".encode()), ("a/b.1.lang", b"de"), ("c.FLAC", VOICE)]
    write_tar(tmp_path / "one.tar", members)
    assert list(Chain(shards(tmp_path, ["one.tar"]))) == [
        {"key": "a/b.1", "wav": VOICE, "txt": "größe", "lang": b"de"},
        {"key": "c", "wav": VOICE},
    ]


def test_missing_or_invalid_audio_is_an_error_of_its_example(tmp_path):
    (tmp_path / "text.wav").write_text("no audio\n" * 100)
    os.mkfifo(tmp_path / "fifo.wav")
    (tmp_path / "good.wav").write_bytes(VOICE)
    (tmp_path / "cut.wav").write_bytes(voice_bytes(1.0, format="WAV")[:9000])
    names = ["gone", "text", "fifo", "cut", "good"]
    source = raw(tmp_path, [{"key": name, "wav": f"{name}.wav"} for name in names], audio_root=tmp_path)
    for number, name in enumerate(names[:4], 1):
        with raises(DamagedShard, "damaged_shard", f"data.list, record {number}", f"{name}.wav"):
            list(Chain(source, on_error="skip", max_errors=number - 1).map(decode_wav))
    (good,) = Chain(source, on_error="skip").parallel_map(decode_wav, 2)
    assert (good["key"], good["waveform"].shape) == ("good", (1, 3200))


def test_lines_of_text(tmp_path):
    (tmp_path / "b0.txt").write_bytes(b"one\n\n  two \r\ncaf\xe9\n")
    (tmp_path / "b1.txt").write_bytes("größe".encode())
    chain = Chain(TextLines(tmp_path / "b{0..1}.txt"), on_error="skip")
    assert list(chain) == [
        {"key": "b0.txt:1", "txt": "one"},
        {"key": "b0.txt:2", "txt": "two"},
        {"key": "b1.txt:1", "txt": "größe"},
    ]


def spoken(seconds, rate=16000, key="a", **others):
    wav = torch.from_numpy(voice(seconds, rate)).float()[None]
    return {"key": key, "waveform": wav, "sample_rate": rate, **others}


def test_a_path_is_decoded_between_start_and_end(tmp_path):
    sf.write(tmp_path / "a.wav", voice(1.0), 16000, subtype="FLOAT")
    whole = decode_wav({"key": "a", "wav": str(tmp_path / "a.wav"), "txt": "t"})
    assert whole.keys() == {"key", "txt", "waveform", "sample_rate"}
    part = decode_wav({"key": "a", "wav": str(tmp_path / "a.wav"), "start": 0.25, "end": 0.5})
    assert torch.equal(part["waveform"], whole["waveform"][:, 4000:8000])


def test_one_of_several_channels_is_decoded():
    stream = io.BytesIO()
    left, right = voice(0.2, seed=1), voice(0.2, seed=2)
    sf.write(stream, np.stack([left, right], 1), 16000, format="WAV", subtype="FLOAT")
    example = {"key": "a", "wav": stream.getvalue()}
    with raises(RejectRecord, "unsupported_channels", "2 channels"):
        decode_wav(example)
    assert torch.allclose(decode_wav(example, channel=1)["waveform"][0], torch.from_numpy(right).float())


@pytest.mark.parametrize("num_mel_bins", [23, 80])
def test_fbank_is_that_of_torchaudio(num_mel_bins):
    kaldi = pytest.importorskip("torchaudio.compliance.kaldi")
    example = spoken(1.0)
    feat = kaldi_fbank(example, num_mel_bins)["feat"]
    expected = kaldi.fbank(example["waveform"] * 32768, num_mel_bins=num_mel_bins, dither=0.0, energy_floor=0.0)
    assert feat.shape == (98, num_mel_bins)
    assert torch.equal(feat, expected)


def test_audio_is_padded_to_30_seconds():
    padded = pad_wav(spoken(2.0))
    assert (padded["waveform"].shape, padded["num_samples"]) == ((1, 480000), 32000)
    assert torch.equal(padded["waveform"][:, :32000], spoken(2.0)["waveform"])
    assert not padded["waveform"][:, 32000:].any()
    assert kaldi_fbank(padded)["feat"].shape == (2998, 23)
    with raises(RejectRecord, "too_long", "2.00 s", "1.5 s"):
        pad_wav(spoken(2.0), 1.5)
    trimmed = pad_wav(spoken(2.0), 1.5, trim=True)
    assert (trimmed["waveform"].shape, trimmed["num_samples"]) == ((1, 24000), 24000)


def framed(key, frames, **others):
    return {"key": key, "feat": torch.full((frames, 2), float(frames)), **others}


def test_batches_are_sorted_by_length_and_padded():
    batch = collate([framed("a", 2, label=[5]), framed("b", 4, label=[6, 7, 8]), framed("c", 2, label=[])])
    assert (batch["keys"], batch["feats"].shape) == (["b", "a", "c"], (3, 4, 2))
    assert batch["feats"][1].tolist() == [[2, 2], [2, 2], [0, 0], [0, 0]]
    assert batch["feats_lengths"].tolist() == [4, 2, 2]
    assert batch["target"].tolist() == [[6, 7, 8], [5, -1, -1], [-1, -1, -1]]
    assert batch["target_lengths"].tolist() == [3, 1, 0]


def label(example):
    return example | {"label": [ord(letter) for letter in example["txt"]]}


def longer(example):
    return example["waveform"].shape[1] >= 16000


@pytest.mark.parametrize(("kind", "divide"), [("raw", "line"), ("shard", "line"), ("shard", "file")])
def test_the_whole_chain_gives_each_utterance_once_on_two_ranks(tmp_path, kind, divide):
    """WeNet's chain runs on 16 utterances in 8 archives or in files; the shortest are filtered out."""
    members, lines = {}, []
    for number in range(16):
        wav = voice_bytes(0.8 + 0.05 * number)
        (tmp_path / f"{number}.wav").write_bytes(wav)
        lines.append({"key": str(number), "wav": str(tmp_path / f"{number}.wav"), "txt": "ab"})
        members.setdefault(f"{number % 8}.tar", []).extend([(f"{number}.wav", wav), (f"{number}.txt", b"ab")])
    for name, content in members.items():
        write_tar(tmp_path / name, content)
    found = []
    for rank in (0, 1):
        source = raw(tmp_path, lines) if kind == "raw" else shards(tmp_path, members)
        chain = Chain(source, shuffle=True, seed=5, rank=rank, world_size=2, divide=divide)
        chain = chain.parallel_map(decode_wav, 2).filter(longer).map(label)
        chain = chain.parallel_map(partial(kaldi_fbank, num_mel_bins=80), 2)
        chain = chain.shuffle(20).sort(10).dynamic_batch(300).map(collate)
        for batch in torch.utils.data.DataLoader(chain, None, num_workers=2):
            found += batch["keys"]
            lengths = batch["feats_lengths"].tolist()
            assert batch["feats"].shape == (len(lengths), lengths[0], 80)
            assert lengths == sorted(lengths, reverse=True)
            assert len(lengths) == 1 or lengths[0] * len(lengths) <= 300
            assert batch["target"].shape == (len(lengths), 2)
    assert Counter(found) == Counter(str(number) for number in range(4, 16))


@pytest.mark.parametrize("command", ["pipe:cat a.wav", "cat a.wav |"])
@pytest.mark.parametrize("root", [None, "."])
def test_a_command_that_may_not_run_names_allow_pipe(tmp_path, command, root):
    with raises(DamagedShard, "damaged_shard", "is a command, which runs only with allow_pipe=True"):
        list(Chain(raw(tmp_path, [GOOD | {"wav": command}], audio_root=root)))
    write_tar(tmp_path / "one.tar", [("a.wav", VOICE), ("a.txt", b"text")])
    with raises(DamagedShard, "damaged_shard", "is a command, which runs only with allow_pipe=True"):
        list(Chain(shards(tmp_path, [command, tmp_path / "one.tar"], root=root and tmp_path)))

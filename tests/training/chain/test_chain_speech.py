"""Features and batches of a chain, and the whole of it on real speech with workers and ranks."""

from __future__ import annotations

import io
import json
from collections import Counter
from functools import partial

import numpy as np
import pytest
import soundfile as sf
import torch
from support.errors import raises
from support.paths import DATA
from support.shar import voice
from support.tars import voice_bytes, write_tar
from torchdata.stateful_dataloader import StatefulDataLoader

from sharmill.errors import ConfigError, RejectRecord
from sharmill.training import Chain, RawList, ShardList, TextLines, merge_data_states
from sharmill.training.chain.features import collate, decode_wav, kaldi_fbank, pad_wav, resample_wav


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
    with raises(RejectRecord, "unspecified", "2 channels"):
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


def test_dither_follows_from_the_key():
    one, again, other = (kaldi_fbank(spoken(0.5, key=key), dither=1.0)["feat"] for key in "aab")
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one, kaldi_fbank(spoken(0.5))["feat"])


def test_audio_shorter_than_a_frame_is_an_error():
    with raises(RejectRecord, "unspecified", "399 samples"):
        kaldi_fbank(spoken(399 / 16000))


def test_resampling():
    assert resample_wav(spoken(1.0, 22050), 16000)["waveform"].shape == (1, 16000)


def test_audio_is_padded_to_30_seconds():
    padded = pad_wav(spoken(2.0))
    assert padded["waveform"].shape == (1, 480000)
    assert padded["num_samples"] == 32000
    assert torch.equal(padded["waveform"][:, :32000], spoken(2.0)["waveform"])
    assert not padded["waveform"][:, 32000:].any()
    assert kaldi_fbank(padded)["feat"].shape == (2998, 23)
    with raises(RejectRecord, "unspecified", "2.00 s", "1.5 s"):
        pad_wav(spoken(2.0), 1.5)
    trimmed = pad_wav(spoken(2.0), 1.5, trim=True)
    assert trimmed["waveform"].shape == (1, 24000)
    assert trimmed["num_samples"] == 24000


def framed(key, frames, **others):
    return {"key": key, "feat": torch.full((frames, 2), float(frames)), **others}


def test_batches_are_sorted_by_length_and_padded():
    batch = collate([framed("a", 2, label=[5]), framed("b", 4, label=[6, 7, 8]), framed("c", 2, label=[])])
    assert batch["keys"] == ["b", "a", "c"]
    assert batch["feats"].shape == (3, 4, 2)
    assert batch["feats"][1].tolist() == [[2, 2], [2, 2], [0, 0], [0, 0]]
    assert batch["feats_lengths"].tolist() == [4, 2, 2]
    assert batch["target"].tolist() == [[6, 7, 8], [5, -1, -1], [-1, -1, -1]]
    assert batch["target_lengths"].tolist() == [3, 1, 0]


def test_batches_without_labels_have_no_target():
    assert collate([framed("a", 2)]).keys() == {"keys", "feats", "feats_lengths"}
    with raises(ConfigError, "bad_config_value", "'b'"):
        collate([framed("a", 2, label=[1]), framed("b", 2)])


def test_batches_of_a_fixed_number_of_frames():
    batch = collate([framed("a", 2), framed("b", 4)], num_frames=7)
    assert batch["feats"].shape == (2, 7, 2)
    assert batch["feats_lengths"].tolist() == [4, 2]
    with raises(RejectRecord, "unspecified", "'b'", "4 frames"):
        collate([framed("a", 2), framed("b", 4)], num_frames=3)


def label(example):
    return example | {"label": [ord(letter) for letter in example["txt"]]}


def longer(example):
    return example["waveform"].shape[1] >= 16000


@pytest.fixture(scope="module")
def librispeech(tmp_path_factory):
    """100 utterances of real speech as a raw list and as ten tars, and the keys of those of a second and more."""
    folder = DATA / "librispeech_10x10"
    if not folder.exists():
        pytest.skip(f"there is no real speech in {folder}")
    records = [json.loads(line) for line in (folder / "manifest.json").read_text().splitlines()]
    out = tmp_path_factory.mktemp("librispeech")
    lines, tars = [], []
    for number, record in enumerate(records):
        key, path = record["audio_filepath"].rpartition("/")[2].removesuffix(".flac"), record["audio_filepath"]
        lines.append(json.dumps({"key": key, "wav": str(folder / "audio" / path), "txt": record["text"]}) + "\n")
        members = [(f"{key}.flac", (folder / "audio" / path).read_bytes()), (f"{key}.txt", record["text"].encode())]
        tars += [[]] if number % 10 == 0 else []
        tars[-1] += members
    (out / "data.list").write_text("".join(lines))
    names = [str(write_tar(out / f"shard_{number}.tar", members)) for number, members in enumerate(tars)]
    (out / "data.shards.list").write_text("".join(f"{name}\n" for name in names))
    (out / "text.txt").write_text("".join(f"{record['text']}\n" for record in records))
    keys = [json.loads(line)["key"] for line, r in zip(lines, records, strict=True) if r["duration"] >= 1]
    return out, keys


def features(source, rank, **options):
    """WeNet's chain."""
    chain = Chain(source, shuffle=True, seed=5, rank=rank, world_size=2, **options)
    chain = chain.parallel_map(decode_wav, 2).filter(longer).map(label)
    chain = chain.parallel_map(partial(kaldi_fbank, num_mel_bins=80), 2)
    return chain.shuffle(20).sort(10).dynamic_batch(6000).map(collate)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "divide"), [("raw", "line"), ("shard", "line"), ("shard", "file")])
def test_the_whole_chain_gives_each_utterance_once_on_two_ranks_with_two_workers(librispeech, kind, divide):
    folder, keys = librispeech
    found = []
    for rank in (0, 1):
        source = RawList(folder / "data.list") if kind == "raw" else ShardList(folder / "data.shards.list")
        for batch in torch.utils.data.DataLoader(features(source, rank, divide=divide), None, num_workers=2):
            found += batch["keys"]
            lengths = batch["feats_lengths"].tolist()
            assert batch["feats"].shape == (len(lengths), lengths[0], 80)
            assert lengths == sorted(lengths, reverse=True)
            assert len(lengths) == 1 or lengths[0] * len(lengths) <= 6000
            assert batch["target"].shape[1] == batch["target_lengths"].max()
    assert Counter(found) == Counter(keys)


@pytest.mark.slow
def test_a_killed_training_on_real_speech_goes_on_with_other_workers(librispeech):
    folder, keys = librispeech
    chains = [features(ShardList(folder / "data.shards.list"), rank) for rank in (0, 1)]
    found, states = [], []
    for chain in chains:
        loader = StatefulDataLoader(chain, batch_size=None, num_workers=2)
        batches = iter(loader)
        found += next(batches)["keys"] + next(batches)["keys"]
        states.append(loader.state_dict())
    state = merge_data_states(states)
    for rank in (0, 1):
        chain = features(ShardList(folder / "data.shards.list"), rank)
        chain.load_state_dict(state)
        found += [key for batch in chain for key in batch["keys"]]
    assert Counter(found) == Counter(keys)


def test_speech_without_text_beside_text_without_speech(tmp_path):
    """The split for inference, zipped with another task's text."""
    lines = []
    for number in range(6):
        (tmp_path / f"{number}.flac").write_bytes(voice_bytes(0.2 + 0.1 * number, seed=number))
        lines.append(json.dumps({"key": str(number), "wav": f"{number}.flac"}) + "\n")
    (tmp_path / "infer.list").write_text("".join(lines))
    (tmp_path / "text.txt").write_text("one\ntwo\nthree\nfour\n")
    speech = Chain(RawList(tmp_path / "infer.list", tmp_path)).map(decode_wav).map(kaldi_fbank).batch(2).map(collate)
    text = Chain(TextLines(tmp_path / "text.txt"), infinite=True).batch(2)
    pairs = list(speech.zip(text))
    assert [batch["keys"] for batch, _ in pairs] == [["1", "0"], ["3", "2"], ["5", "4"]]
    assert all("target" not in batch for batch, _ in pairs)
    texts = [[line["txt"] for line in lines] for _, lines in pairs]
    assert texts == [["one", "two"], ["three", "four"], ["one", "two"]]

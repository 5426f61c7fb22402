"""``sharmill inspect`` and ``sharmill decode``."""

import json
from unittest import mock

import msgspec
import numpy as np
import pytest
import soundfile as sf
from support import damage as do
from support.fields import add_fields, score_of, voice_of
from support.project import Project, ToyCodec, copy, raises, voice
from support.reported import DecodingToy

from sharmill.errors import ConfigError, DamagedShard
from sharmill.inspect.cuts import choose_codec, decode_stored_codes, find_cut
from sharmill.models import find_recorded_codec
from sharmill.shar import open_shar
from sharmill.shar.arrays import array_to_bytes
from sharmill.shar.index import CodecRecord, read_dataset

HOSTILE = "\x1b[31mred\x07 <script>alert(1)</script> [bold]x[/bold] \u202eabc\nnew line"


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory):
    """A dataset of five cuts in two shards, with codes of ``toy``; tests must not change it."""
    project = Project(tmp_path_factory.mktemp("looked_at"))
    for number in range(5):
        samples = voice(1.0 + 0.125 * number, pitch=150 + 20 * number, seed=number)
        project.add(f"utt{number}.flac", samples, text=HOSTILE if number == 3 else f"sentence {number}")
    project.encode(project.write(write={"shard_size": 3, "order": "manifest"}, match={"min_duration": 0.0}))
    return project.dataset


@pytest.fixture
def toy():
    """Load the codec that made the codes, whatever name is given."""
    with mock.patch("sharmill.models.load_codec", return_value=DecodingToy()) as load:
        yield load


CUT = "cut-rec-utt1-0.00-1.12"
TARGETS, CODES = "target_audio/recording.000000.tar", "codes_toy/target_codes/codes.000000.tar"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], ["5 cuts in 2 shards", "target_audio, context_audio", "3 codebooks of 64", "50 frames per second",
              "its codes mean nothing", "--shard 0"]),
        ([CUT], ["cut 1 of shard 0", "supervisions.0.custom.context_speaker_similarity", "0.75", "sentence 1",
                 "target_audio: (18000,) at 16000 Hz, 1.125 s of flac", "context_audio: (20000,) at 16000 Hz",
                 "codes_toy/target_codes: (3, 57) int16, codebooks and frames"]),
    ],
)  # fmt: skip
def test_a_dataset_in_a_few_lines_and_a_cut_in_full(looked_at, call, arguments, shown):
    status, out, _ = call("inspect", looked_at, *arguments)
    assert status == 0
    assert [words for words in shown if words not in out] == []


def test_the_table_of_a_shard(looked_at, call):
    status, out, _ = call("inspect", looked_at, "--shard", 0)
    assert status == 0
    (row,) = [line for line in out.splitlines() if line.startswith(CUT)]
    assert row.split() == [CUT, "1.125", "1.250", "0.750", *row.split()[4:]]
    assert row.rstrip().endswith("sentence 1")
    assert "cuts: cuts/cuts.000000.jsonl.gz" in out
    assert "utt3" not in out.split("cuts/cuts")[0].replace("context", "")


def test_hostile_text_is_shown_as_text_on_one_line(looked_at, call):
    for arguments in (("--shard", 1), ("cut-rec-utt3-0.00-1.38",)):
        status, out, _ = call("inspect", looked_at, *arguments)
        assert status == 0
        assert not any(char in out for char in "\x1b\x07\u202e")
        (line,) = [line for line in out.splitlines() if "<script>" in line and "custom" not in line]
        assert "[bold]x[/bold]" in line


def test_what_is_exported_is_what_is_stored(looked_at, call, tmp_path):
    status, out, _ = call("inspect", looked_at, CUT, "--export", tmp_path / "out")
    assert status == 0
    stored = find_cut(looked_at, CUT)
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(found) == [
        "codes_toy_context_codes.npy", "codes_toy_target_codes.npy", "context_audio.flac", "cut.json",
        "target_audio.flac",
    ]  # fmt: skip
    assert found["target_audio.flac"] == stored.items["target_audio"].data
    assert json.loads(found["cut.json"]) == stored.cut
    codes = np.load(tmp_path / "out" / "codes_toy_target_codes.npy")
    assert np.array_equal(codes, ToyCodec().codes(voice(1.125, pitch=170, seed=1)))
    assert str(tmp_path / "out" / "cut.json") in out


@pytest.mark.parametrize(
    ("command", "arguments", "names"),
    [
        ("inspect", ["absent"], ["absent", "--shard"]),
        ("inspect", ["--shard", 2], ["no shard 2", "0 to 1"]),
        ("inspect", ["--shard", "x"], ["--shard"]),
        ("inspect", [CUT, "--shard", 0], ["not both"]),
        ("inspect", ["--export", "out"], ["--export"]),
        ("inspect", [CUT, "--export", "/proc"], ["/proc", "empty"]),
        ("decode", ["--cut", "absent", "-o", "x.wav"], ["absent"]),
        ("decode", ["--cut", CUT, "-o", "x.txt"], ["x.txt", ".wav"]),
        ("decode", ["--cut", CUT, "-o", "x.wav", "--codec", "other"], ["'other'", "toy"]),
        ("decode", ["--cut", CUT, "-o", "x.wav", "--codec-model", "builtin"], ["CODEC=MODEL"]),
        ("decode", ["--cut", CUT, "-o", "x.wav", "--codec-model", "other=builtin"], ["toy=MODEL"]),
        ("decode", ["-o", "x.wav"], ["--cut"]),
        ("decode", ["--cut", CUT], ["--output"]),
    ],
)
def test_wrong_use_is_one_line(looked_at, toy, call, tmp_path, monkeypatch, command, arguments, names):
    monkeypatch.chdir(tmp_path)
    status, out, err = call(command, looked_at, *arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert out in ("", "loading the codec toy\n")
    for name in names:
        assert name in err
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_item_does_not_hide_the_others(looked_at, call, tmp_path):
    dataset = copy(looked_at, tmp_path / "damaged")
    for name in (TARGETS, CODES):
        do.change_item(name, 1, data=b"damaged")(dataset)
    status, out, _ = call("inspect", dataset, CUT)
    assert status == 0
    assert out.count("cannot be decoded") == 2
    assert "context_audio: (20000,) at 16000 Hz" in out


def test_items_of_other_cuts_are_damage(looked_at, call, tmp_path):
    dataset = copy(looked_at, tmp_path / "damaged")
    do.change_items(TARGETS, lambda items: items[::-1])(dataset)
    status, _, err = call("inspect", dataset, "cut-rec-utt0-0.00-1.00")
    assert (status, err.count("\n")) == (1, 1)
    assert "recording.000000.tar" in err


def test_fields_that_a_stage_has_added_are_shown_and_exported(looked_at, call, tmp_path):
    dataset = add_fields(copy(looked_at, tmp_path / "dataset"))
    _, out, _ = call("inspect", dataset)
    shown = dict(line.strip().split(maxsplit=2)[1:] for line in out.splitlines() if line.startswith("field "))
    assert shown == {
        "score": "value of each cut, from 0 to 1, which may be missing, made by scorer",
        "voices/voice": "array, cut.voice, from -1 to 1, made by voices",
    }
    for cut in open_shar(dataset):
        _, out, _ = call("inspect", dataset, cut.id, "--export", tmp_path / cut.id)
        score = score_of(cut.id)
        assert ('score: nothing\n  ""' if score is None else f"score: a value\n  {score}") in out
        assert f"voices/voice: (4,) float32\n  it starts with {voice_of(cut.id)[0]!s}" in out
        np.testing.assert_array_equal(np.load(tmp_path / cut.id / "voices_voice.npy"), voice_of(cut.id))
        if score is not None:
            assert json.loads((tmp_path / cut.id / "score.json").read_text()) == {"score": score}


def levels(samples) -> np.ndarray:
    """Return the toy codec's reconstruction of these samples, cut to their length."""
    return np.repeat(ToyCodec().codes(samples)[0] / 50, 320)[: len(samples)].astype(np.float32)


@pytest.mark.parametrize(
    ("options", "original"),
    [([], voice(1.125, pitch=170, seed=1)), (["--context"], voice(1.25, pitch=190, seed=2))],
)
def test_decoded_audio_matches_the_codes_and_the_length(looked_at, toy, call, tmp_path, options, original):
    status, out, _ = call("decode", looked_at, "--cut", CUT, "-o", tmp_path / "x.wav", *options)
    assert status == 0
    samples, rate = sf.read(tmp_path / "x.wav", dtype="float32")
    assert rate == 16000
    assert np.allclose(samples, levels(original), atol=1e-4)
    assert f"wrote {tmp_path / 'x.wav'}" in out
    assert "untrained" in out


def test_decoding_counts_the_samples_that_it_clips(looked_at, toy, call, tmp_path):
    with mock.patch.object(toy.return_value, "decode", lambda *args: 8 * DecodingToy().decode(*args)):
        _, out, _ = call("decode", looked_at, "--cut", CUT, "-o", tmp_path / "x.wav")
    clipped = np.count_nonzero(8 * levels(voice(1.125, pitch=170, seed=1)) > 1)
    assert clipped > 0
    assert f"{clipped:,} samples exceeded full scale and were clipped" in out


def other_codec():
    codec = DecodingToy()
    codec.checksum = "another"
    return codec


@pytest.mark.parametrize(
    ("make", "words"), [(ToyCodec, "cannot turn codes into audio"), (other_codec, "another")]
)  # fmt: skip
def test_a_codec_that_cannot_decode_or_differs_is_one_line(looked_at, call, tmp_path, toy, make, words):
    toy.return_value = make()
    status, _, err = call("decode", looked_at, "--cut", CUT, "-o", tmp_path / "x.wav")
    assert (status, err.count("\n")) == (2, 1)
    assert words in err
    assert not (tmp_path / "x.wav").exists()


def test_codes_outside_the_codebook_are_damage(looked_at, toy, tmp_path):
    dataset = copy(looked_at, tmp_path / "damaged")
    do.change_item(CODES, 1, data=array_to_bytes(np.zeros(7, np.int16)))(dataset)
    record = read_dataset(dataset)
    with raises(DamagedShard, "damaged_shard", CUT):
        decode_stored_codes(find_cut(dataset, CUT), record, choose_codec(record, None), ToyCodec())


def codec_record(model, trained, name="c"):
    return CodecRecord(name=name, model=model, checksum="x", trained=trained, sampling_rate=16000,
                       samples_per_frame=320, num_codebooks=3, codebook_size=64)  # fmt: skip


def test_several_codecs_must_be_told_apart(looked_at):
    both = [codec_record("builtin", True, "a"), codec_record("builtin", True, "b")]
    record = msgspec.structs.replace(read_dataset(looked_at), codecs=both)
    with raises(ConfigError, "unknown_codec", "a, b"):
        choose_codec(record, None)
    assert choose_codec(record, "b") is both[1]


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("python:evil:Codec", ("untrusted_model", "python:evil:Codec", "--codec-model c=MODEL")),
        # Names that earlier versions recorded.
        ("untrained", ("bad_codec", "'c'", "encode again with the codec builtin")),
    ],
)
def test_other_models_named_by_a_dataset_are_not_loaded(model, error):
    with raises(ConfigError, *error):
        find_recorded_codec(codec_record(model, True), None)
    assert find_recorded_codec(codec_record(model, True), "builtin").name == "builtin"

"""``sharmill decode``."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile as sf
from support.errors import raises
from support.shar import ToyCodec, copy, voice

from sharmill.errors import ConfigError, DamagedShard
from sharmill.inspect.export import choose_codec, decode_stored_codes
from sharmill.inspect.stored import find_cut
from sharmill.models.recorded import recorded_model
from sharmill.shar.arrays import array_to_bytes
from sharmill.shar.index import CodecRecord, read_dataset
from sharmill.shar.items import FieldWriter, Item, read_field

CUT = "cut-rec-utt1-0.00-1.12"


def levels(samples) -> np.ndarray:
    """What the toy codec makes of the codes of these samples, as long as they are."""
    return np.repeat(ToyCodec().codes(samples)[0] / 50, 320)[: len(samples)].astype(np.float32)


@pytest.mark.parametrize(
    ("options", "original"),
    [([], voice(1.125, pitch=170, seed=1)), (["--context"], voice(1.25, pitch=190, seed=2))],
)
def test_the_audio_is_that_of_the_codes_and_as_long_as_the_segment(looked_at, toy, call, tmp_path, options, original):
    status, out, _ = call("decode", looked_at, "--cut", CUT, "-o", tmp_path / "x.wav", *options)
    assert status == 0
    samples, rate = sf.read(tmp_path / "x.wav", dtype="float32")
    assert rate == 16000
    assert np.allclose(samples, levels(original), atol=1e-4)
    assert f"wrote {tmp_path / 'x.wav'}" in out
    assert "untrained" in out


def test_other_formats(looked_at, toy, call, tmp_path):
    for suffix, format in ((".flac", "FLAC"), (".opus", "OGG"), (".mp3", "MP3")):
        assert call("decode", looked_at, "--cut", CUT, "-o", tmp_path / f"x{suffix}")[0] == 0
        assert sf.info(tmp_path / f"x{suffix}").format == format


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--cut", "absent", "-o", "x.wav"], ["absent"]),
        (["--cut", CUT, "-o", "x.txt"], ["x.txt", ".wav"]),
        (["--cut", CUT, "-o", "x.wav", "--codec", "other"], ["'other'", "toy"]),
        (["--cut", CUT, "-o", "x.wav", "--codec-model", "builtin"], ["toy=MODEL"]),
        (["--cut", CUT, "-o", "x.wav", "--codec-model", "other=builtin"], ["toy=MODEL"]),
        (["-o", "x.wav"], ["--cut"]),
        (["--cut", CUT], ["--output"]),
    ],
)
def test_wrong_use_is_one_line(looked_at, toy, call, tmp_path, monkeypatch, options, names):
    monkeypatch.chdir(tmp_path)
    status, out, err = call("decode", looked_at, *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    for name in names:
        assert name in err
    assert list(tmp_path.iterdir()) == []


def test_a_codec_that_cannot_decode_is_one_line(looked_at, call, tmp_path, toy):
    toy.return_value = ToyCodec()
    status, _, err = call("decode", looked_at, "--cut", CUT, "-o", tmp_path / "x.wav")
    assert (status, err.count("\n")) == (2, 1)
    assert "cannot turn codes into audio" in err


def test_codes_outside_the_codebook_are_damage(looked_at, toy, tmp_path):
    dataset = copy(looked_at, tmp_path / "damaged")
    path = dataset / "codes_toy/target_codes/codes.000000.tar"
    items = list(read_field(path))
    items[1] = Item(items[1].cut_id, "npy", array_to_bytes(np.zeros(7, np.int16)), items[1].metadata)
    with FieldWriter(path) as writer:
        for item in items:
            writer.add(item)
    record = read_dataset(dataset)
    with raises(DamagedShard, "damaged_shard", CUT):
        decode_stored_codes(find_cut(dataset, CUT), record, choose_codec(record, None), ToyCodec())


def test_a_dataset_without_codes_has_nothing_to_decode(looked_at):
    import msgspec

    record = msgspec.structs.replace(read_dataset(looked_at), codecs=[])
    with raises(ConfigError, "unknown_codec", "no codes"):
        choose_codec(record, None)


def codec_record(model, trained, name="c"):
    return CodecRecord(name=name, model=model, checksum="x", trained=trained, sampling_rate=16000,
                       samples_per_frame=320, num_codebooks=3, codebook_size=64)  # fmt: skip


def test_several_codecs_must_be_told_apart(looked_at):
    import msgspec

    both = [codec_record("builtin", True, "a"), codec_record("builtin", True, "b")]
    record = msgspec.structs.replace(read_dataset(looked_at), codecs=both)
    with raises(ConfigError, "unknown_codec", "a, b"):
        choose_codec(record, None)
    assert choose_codec(record, "b") is both[1]


@pytest.mark.parametrize(
    ("model", "trained", "given", "loaded"),
    [
        ("builtin", True, None, "builtin"),
        ("builtin", False, "nemo:x.nemo", "nemo:x.nemo"),
        ("nemo:y.nemo", True, "nemo:/models/y.nemo", "nemo:/models/y.nemo"),
    ],
)
def test_the_model_of_a_record(model, trained, given, loaded):
    assert recorded_model(codec_record(model, trained), given) == loaded


def test_codes_of_the_untrained_codec_of_earlier_versions_are_not_decoded():
    with raises(ConfigError, "bad_codec", "'c'", "encode with builtin"):
        recorded_model(codec_record("untrained", False), None)


def test_other_models_are_not_loaded_because_a_dataset_names_them():
    with raises(ConfigError, "untrusted_model", "python:evil:Codec", "--codec-model c=MODEL"):
        recorded_model(codec_record("python:evil:Codec", True), None)


def test_another_model_than_the_recorded_one_is_refused(looked_at, toy, call, tmp_path):
    toy.return_value.checksum = "another"
    status, _, err = call("decode", looked_at, "--cut", CUT, "-o", tmp_path / "x.wav")
    assert (status, err.count("\n")) == (2, 1)
    assert "another" in err
    assert not (tmp_path / "x.wav").exists()

"""Segments that are too long for a device: cut where that gives the same codes, else named."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from support.errors import raises
from support.shar import codec_stages, lines, loading, run, voice

from sharmill.encode.batch_change import may_cut
from sharmill.errors import FatalError
from sharmill.models import load_codec
from sharmill.models.certificate import Certificate, Comparison, ModelCertificate
from sharmill.shar import open_shar

CODEC = {"backend": "nemo", "name": "nemo:x.nemo", "checksum": "1"}
IDENTITY = {"codec": CODEC, "precision": "fp32", "versions": {"torch": "2"}}
H200 = "NVIDIA H200, capability 9.0"


@pytest.fixture
def config(project):
    """Two cuts, one of 70 s."""
    return write(project, [1.0, 70.0])


def write(project, durations):
    for number, seconds in enumerate(durations):
        project.add(f"{number}.flac", voice(seconds, pitch=150 + 30 * number, seed=number), number=number)
    return project.write([1, *[0] * (len(durations) - 1)], write={"shard_size": 2, "order": "manifest"})


@pytest.fixture
def codec(monkeypatch):
    """The builtin codec, on a device that has no memory for more than 31 s at once."""
    codec = load_codec("builtin")
    whole = codec.encode
    lengths = []

    def encode(audio, num_samples):
        lengths.append([round(n / 16000, 1) for n in num_samples.tolist()])
        if audio.numel() > codec.most_seconds * 16000:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return whole(audio, num_samples)

    monkeypatch.setattr(codec, "encode", encode)
    codec.whole, codec.lengths, codec.most_seconds = whole, lengths, 31
    return codec


PARTS = ("its 70 s do not fit", "all other units go on", "where 'sharmill certify CONFIG' finds the same codes")


def encode(config, codec, **options):
    config = dataclasses.replace(config, encode=dataclasses.replace(config.encode, **options))
    with loading(codec):
        survey, stage, assemble = codec_stages(config)
        assert run(survey).ok
        result = run(stage)
        if result.ok:
            assert run(assemble).ok
    return result


def test_a_segment_too_long_for_the_device_is_cut_and_has_the_codes_of_the_whole(project, config, codec):
    assert encode(config, codec).ok
    assert codec.lengths == [[30.0], [30.0], [30.0], [1.0]]
    (commit,) = [one for path in codec_stages(config)[1].dir.path.glob("**/ledger/*.jsonl") for one in lines(path)]
    assert (commit["stats"]["encoded_seconds"], commit["stats"]["padded_seconds"]) == (91.0, 91.0)
    (long,) = [cut for cut in open_shar(project.dataset) if cut.duration > 60]
    audio = torch.from_numpy(long.load_custom("target_audio"))
    assert (long.target_codes.load() == codec.whole(audio, torch.tensor([audio.shape[1]]))[0].numpy()).all()


def test_one_that_would_have_other_codes_in_pieces_is_named_with_what_to_do(config, codec):
    (failure,) = encode(config, codec, precision="bf16").failures.values()
    for part in (
        "its 70 s do not fit",
        "all other units go on",
        "where 'sharmill certify CONFIG' finds the same codes",
    ):
        assert part in failure.message


def test_pieces_that_do_not_fit_are_named_and_end_a_stage_in_which_nothing_fits(project, codec):
    codec.most_seconds = 20
    with raises(FatalError, "out_of_memory", "a piece of 30 s of a longer segment", "a device with more memory") as end:
        encode(write(project, [70.0, 50.0]), codec, unit_seconds=2.0)
    assert "its 30 s" not in str(end.value)


def certificate(**changes):
    pieces = Comparison(way="", compared=9, different=0, items=0, device="cpu", piece_seconds=30.0, batch_seconds=30.0)
    batches = Comparison(way="", compared=9, different=5, items=1, device="cpu", batch_seconds=16.0)
    model = ModelCertificate(
        kind="codec", name="x", model="nemo:x.nemo", identity=changes.pop("identity", CODEC),
        comparisons=[batches, msgspec.structs.replace(pieces, **changes.pop("pieces", {}))],
    )  # fmt: skip
    return Certificate(**{"devices": ["cpu"], "versions": {"torch": "2"}, "models": [model]} | changes)


@pytest.mark.parametrize(
    ("kind", "found", "expected"),
    [
        ("cpu", certificate(), True),
        ("cpu", certificate(pieces={"different": 1}), False),
        ("cpu", certificate(pieces={"piece_seconds": None}), False),
        ("cpu", certificate(pieces={"piece_seconds": 2.0}), False),
        ("cpu", certificate(pieces={"batch_seconds": None}), False),
        ("cpu", certificate(versions={"torch": "1"}), False),
        ("cpu", certificate(identity=CODEC | {"checksum": "2"}), False),
        (H200, certificate(), False),
        (H200, certificate(devices=[f"cuda: {H200}"]), False),
        (H200, certificate(devices=[f"cuda: {H200}"], pieces={"device": "cuda"}), True),
        (H200, certificate(devices=[f"cuda: {H200}"], pieces={"device": "cuda", "batch_seconds": 29.0}), False),
    ],
)
def test_a_codec_of_others_is_cut_where_the_certificate_of_its_device_has_the_same_codes(
    tmp_path, kind, found, expected
):
    (tmp_path / "certificate.json").write_bytes(msgspec.json.encode(found))
    assert may_cut(IDENTITY, kind, 30.0, tmp_path / "certificate.json") is expected
    assert not may_cut(IDENTITY | {"precision": "bf16"}, kind, 30.0, tmp_path / "certificate.json")


def test_larger_batches_of_pieces_than_were_compared_are_not_used(tmp_path):
    path = tmp_path / "certificate.json"
    path.write_bytes(msgspec.json.encode(certificate(devices=[f"cuda: {H200}"], pieces={"device": "cuda"})))
    assert [may_cut(IDENTITY, H200, seconds, path) for seconds in (20.0, 30.0, 600.0)] == [True, True, False]


@pytest.mark.parametrize("data", [b"", b'{"models": 1}', None])
def test_without_a_certificate_that_can_be_read_segments_are_not_cut_and_it_is_said(data, tmp_path, caplog):
    path = tmp_path / "certificate.json"
    path.symlink_to("/etc/passwd") if data is None else path.write_bytes(data)
    assert not may_cut(IDENTITY, "cpu", 30.0, path)
    (warning,) = caplog.messages
    assert str(path) in warning
    assert "sharmill certify CONFIG" in warning


@pytest.mark.parametrize(("backend", "expected"), [("builtin", True), ("untrained", True), ("transformers", False)])
def test_without_a_certificate_codecs_that_sharmill_brings_are_cut_alone(tmp_path, backend, expected):
    identity = IDENTITY | {"codec": {"backend": backend}}
    assert may_cut(identity, H200, 30.0, tmp_path / "certificate.json") is expected

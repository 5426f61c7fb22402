"""Another size of batches under way: what is done stays where codes do not depend on it, else the message says so."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from support.errors import raises
from support.shar import ToyCodec, codec_stages, loading, run, voice

from sharmill.config.references import References
from sharmill.engine.ledger import read_ledger
from sharmill.engine.plan import load_plan
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError, DeviceError
from sharmill.models import describe_codec
from sharmill.models.certificate import Certificate, Comparison, ModelCertificate


class Bounded(ToyCodec):
    """A codec that fails at segments of another length than one second."""

    def encode(self, audio, num_samples):
        if num_samples.max() > 16000:
            raise ValueError("too long")
        return super().encode(audio, num_samples)


@pytest.fixture
def config(project):
    """Four cuts, the last of which is longer than the others."""
    for number, seconds in enumerate([1.0, 1.0, 1.0, 2.0]):
        project.add(f"{number}.flac", voice(seconds, pitch=150 + 30 * number, seed=number), number=number)
    return project.write([1, 0, 0, 0], write={"shard_size": 2, "order": "manifest"})


def encode(config, codec, references=None, **options):
    """The stage that takes segments through the codec, and its result."""
    config = dataclasses.replace(config, encode=dataclasses.replace(config.encode, unit_seconds=1.0, **options))
    with loading(codec):
        survey, stage, _ = codec_stages(config, "toy")
        stage.references = references or References()
        assert run(survey).ok
        return stage, run(stage)


def begin(config, kind="cpu", **options):
    """Have all units done but that of the long segment, on a kind of device."""
    stage, result = encode(config, Bounded(), **options)
    assert len(result.failures) == 1
    if kind != "cpu":
        (path,) = stage.dir.ledger.glob("*.jsonl")
        path.write_bytes(path.read_bytes().replace(b'"device_kind":"cpu"', f'"device_kind":"{kind}"'.encode()))
        stage.dir.device_kind.write_text(kind)
    return stage


def done_units(stage):
    return set(read_ledger(stage.dir.of_present_plan(), load_plan(stage)))


def certify(config, stage, *, different=0, devices=("cpu",), largest=40.0, **changes):
    rows = [
        Comparison(
            way="", compared=100, different=different, items=1, device=device.partition(":")[0], batch_seconds=size
        )
        for device in devices
        for size in (4.0, largest)
    ]
    other = Comparison(way="alone, bf16", compared=100, different=60, items=1, device="cpu")
    pieces = msgspec.structs.replace(other, batch_seconds=600.0, piece_seconds=30.0)
    model = ModelCertificate(
        kind="codec", name="toy", model="builtin", identity=describe_codec("builtin"),
        comparisons=[*rows, other, pieces],
    )  # fmt: skip
    versions = msgspec.json.decode(stage.dir.identity.read_bytes())["versions"]
    values = {"devices": list(devices), "versions": versions, "models": [model]} | changes
    RunDir(stage.run_dir.path).certificate.write_bytes(msgspec.json.encode(Certificate(**values)))


@pytest.mark.parametrize(
    ("before", "now"),
    [({"batch_seconds": 30.0}, {"batch_seconds": 12.0}),
     ({"batch_seconds": 4.0, "canonical_shapes": True}, {"batch_seconds": 2.0, "canonical_shapes": True})],
)  # fmt: skip
def test_on_a_cpu_sizes_that_give_the_same_batches_keep_what_is_done(config, before, now):
    stage = begin(config, **before)
    codec = ToyCodec()
    assert encode(config, codec, **now)[1].ok
    assert codec.batches == [[32000]]
    # The size is that of the stage now: it is no change any more.
    assert encode(config, ToyCodec(), **now)[1].ok
    assert len(done_units(stage)) == 4


def test_a_certificate_without_differences_keeps_what_is_done(config):
    certify(config, begin(config, batch_seconds=4.0))
    codec = ToyCodec()
    assert encode(config, codec, batch_seconds=2.0)[1].ok
    assert codec.batches == [[32000]]


def test_without_a_certificate_the_message_names_the_command(config):
    stage = begin(config, batch_seconds=4.0)
    before = done_units(stage)
    with raises(ConfigError, "changed_plan", "encode.batch_seconds is 2, and was 4", "sharmill certify CONFIG"):
        encode(config, ToyCodec(), batch_seconds=2.0)
    assert done_units(stage) == before


@pytest.mark.parametrize(
    ("changes", "part"),
    [({"different": 3}, "6 of the probe differ on cpu"), ({"versions": {}}, "other versions"),
     ({"models": []}, "no such codec"), ({"devices": ["cuda: X, capability 9.0"]}, "not made on cpu")],
)  # fmt: skip
def test_a_certificate_that_says_otherwise_keeps_nothing(config, changes, part):
    certify(config, begin(config, batch_seconds=4.0), **changes)
    with raises(ConfigError, "changed_plan", part):
        encode(config, ToyCodec(), batch_seconds=2.0)


def test_what_was_made_on_a_gpu_needs_a_certificate_of_that_kind(config):
    kind = "NVIDIA X, capability 9.0"
    stage = begin(config, kind, batch_seconds=40.0)
    with raises(ConfigError, "changed_plan", "sharmill certify CONFIG"):
        encode(config, ToyCodec(), batch_seconds=20.0)
    certify(config, stage)
    with raises(ConfigError, "changed_plan", f"not made on {kind}"):
        encode(config, ToyCodec(), batch_seconds=20.0)
    certify(config, stage, devices=(f"cuda: {kind}",))
    # It goes on, and only a rank on a CPU is refused.
    with raises(DeviceError, "other_device", kind):
        encode(config, ToyCodec(), batch_seconds=20.0)


@pytest.mark.parametrize(
    ("options", "part"), [({"precision": "bf16"}, "in fp32"), ({"canonical_shapes": True}, "as many rows")]
)
def test_what_no_certificate_compares_is_said(config, options, part):
    stage = begin(config, "NVIDIA X, capability 9.0", batch_seconds=4.0, **options)
    certify(config, stage, devices=("cuda: NVIDIA X, capability 9.0",))
    with raises(ConfigError, "changed_plan", part):
        encode(config, ToyCodec(), batch_seconds=2.0, **options)


@pytest.mark.parametrize(("before", "now"), [(20.0, 600.0), (600.0, 20.0)])
def test_a_certificate_says_nothing_of_larger_batches_than_it_compares(config, before, now):
    kind = "NVIDIA X, capability 9.0"
    certify(config, begin(config, kind, batch_seconds=before), devices=(f"cuda: {kind}",))
    with raises(ConfigError, "changed_plan", "batches of 40 s at most", "certify CONFIG encode.batch_seconds=600"):
        encode(config, ToyCodec(), batch_seconds=now)


def test_a_size_from_the_environment_is_not_known_any_more(config):
    """It is not stored: neither what a CPU makes of it nor what a certificate says can be told."""
    written = {("encode", "batch_seconds"): "${oc.env:BATCH}"}
    stage = begin(config, batch_seconds=30.0, references=References(written=written))
    certify(config, stage)
    with raises(ConfigError, "changed_plan", "batch_seconds is ${oc.env:BATCH}#"):
        encode(config, ToyCodec(), batch_seconds=12.0, references=References(written=written))


def test_a_reference_is_not_taken_for_canonical_shapes(config):
    references = References(written={("encode", "canonical_shapes"): "${oc.env:SHAPES}"})
    begin(config, batch_seconds=4.0, references=references)
    with raises(ConfigError, "changed_plan", "encode.batch_seconds is 2, and was 4"):
        encode(config, ToyCodec(), batch_seconds=2.0, references=references)


def test_a_change_of_anything_else_with_it_begins_anew(config):
    begin(config, batch_seconds=30.0)
    with raises(ConfigError, "changed_plan", "precision is bf16"):
        encode(config, ToyCodec(), batch_seconds=12.0, precision="bf16")

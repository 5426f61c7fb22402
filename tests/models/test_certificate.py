"""Certificates: the probe, what is compared with what, and the file in the run directory."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.errors import raises

from sharmill.cli.main import main
from sharmill.models import certificate
from sharmill.models.certificate import Comparison, certify_codec, certify_encoder, make_probe
from sharmill.models.shapes import fill_batch


def by_way(comparisons) -> dict[str, Comparison]:
    return {comparison.way: comparison for comparison in comparisons}


def test_the_probe_is_the_same_everywhere_and_no_silence():
    probe = make_probe(16000)
    assert len(probe) == 24
    assert len({len(item) for item in probe}) == 6
    assert all(item.dtype == np.float32 and 0.05 < np.abs(item).max() < 1 for item in probe)
    for item, again in zip(probe, make_probe(16000), strict=True):
        np.testing.assert_array_equal(item, again)


@pytest.fixture(scope="module")
def of_mimi(checkpoints):
    return by_way(certify_codec(f"transformers:{checkpoints['mimi']}"))


def test_every_way_is_compared_over_all_codes_of_the_probe(of_mimi):
    assert list(of_mimi) == [
        "batches of 4 s beside alone, cpu, fp32",
        "batches of 16 s beside alone, cpu, fp32",
        "canonical shapes, neighbours beside silence, cpu, fp32",
        "alone, cpu, bf16",
    ]
    codes = sum(4 * -(-len(item) // 64) for item in make_probe(16000))
    assert {comparison.compared for comparison in of_mimi.values()} == {codes}


def test_bf16_changes_codes_and_canonical_shapes_take_the_neighbours_out(of_mimi):
    assert of_mimi["alone, cpu, bf16"].share > 0.01
    assert of_mimi["canonical shapes, neighbours beside silence, cpu, fp32"].different == 0


def test_a_codec_that_depends_on_its_neighbours_is_found_out(checkpoints, monkeypatch):
    """As one whose backend does not know that padding, and audio further off, changes its codes."""
    from sharmill.models import nemo_codec

    monkeypatch.setattr(nemo_codec, "right_padding_matters", lambda *arguments: False)
    monkeypatch.setattr(nemo_codec._NemoCodec, "find_reach", lambda self: (0, 0))
    found = by_way(certify_codec(f"nemo:{checkpoints['nemo_codec_noncausal']}"))
    beside = found["batches of 16 s beside alone, cpu, fp32"]
    assert beside.different > 0
    assert 0 < beside.items <= 24
    assert found["pieces of 2 s beside the whole, cpu, fp32"].different > 0


@pytest.mark.parametrize("model", ["nemo_codec_noncausal", "nemo_codec"])
def test_a_batch_of_the_size_of_a_run_is_filled(checkpoints, monkeypatch, model):
    """As on a GPU: a CPU has no larger batches than are compared in any case."""
    monkeypatch.setattr(certificate, "fit_batch_seconds", lambda seconds, device: seconds)
    shapes = []
    monkeypatch.setattr(
        certificate, "fill_batch", lambda batch, *rest: shapes.append(batch) or fill_batch(batch, *rest)
    )
    found = by_way(certify_codec(f"nemo:{checkpoints[model]}", batch_seconds=80.0))
    assert found["batches of 80 s beside alone, cpu, fp32"].batch_seconds == 80.0
    longest = max(batch.num_frames for batch in shapes[:24])
    # 19 of 4.1 s.
    assert max(batch.num_rows for batch in shapes if batch.num_frames == longest) == 19
    pieces = {comparison.piece_seconds: comparison.different for comparison in found.values()}
    assert pieces == {None: pieces[None], 2.0: 0, 30.0: 0}


@pytest.mark.slow
def test_pieces_share_batches_of_the_size_of_a_run(checkpoints, monkeypatch):
    monkeypatch.setattr(certificate, "fit_batch_seconds", lambda seconds, device: seconds)
    rows = []
    load = certificate.load_codec

    def load_noted(*arguments):
        codec = load(*arguments)
        encode = codec.encode
        monkeypatch.setattr(codec, "encode", lambda audio, lengths: rows.append(audio.shape) or encode(audio, lengths))
        return codec

    monkeypatch.setattr(certificate, "load_codec", load_noted)
    found = by_way(certify_codec(f"nemo:{checkpoints['nemo_codec']}", batch_seconds=95.0))
    compared = found["pieces of 30 s beside the whole, cpu, fp32"]
    assert (compared.batch_seconds, compared.piece_seconds, compared.different) == (95.0, 30.0, 0)
    # Three fill a batch, and one is left over.
    longest = max(length for number, length in rows if number == 3)
    assert [number for number, length in rows if length == longest] == [3, 1]


def test_an_encoder_has_its_choices_compared(checkpoints):
    found = by_way(certify_encoder(f"nemo:{checkpoints['nemo_speaker']}"))
    assert found["batches of 16 s beside alone, cpu, fp32"].largest_change < 1e-5
    assert found["alone, cpu, bf16"].largest_change > 1e-5
    assert {comparison.compared for comparison in found.values()} == {24}


def test_the_certificate_lies_in_the_run_directory(tmp_path, checkpoints, capsys):
    model = f"nemo:{checkpoints['nemo_codec']}"
    (tmp_path / "config.yaml").write_text(
        f"name: one\nrun_dir: {tmp_path}/run\ndataset_dir: {tmp_path}/data\n"
        f"sources: [{{type: nemo, manifest: m.json, audio_root: {tmp_path}}}]\n"
        f"match: null\nencode: {{codecs: [{{name: small, model: '{model}'}}]}}\n"
    )
    with pytest.raises(SystemExit) as end:
        main(["certify", str(tmp_path / "config.yaml")])
    assert end.value.code == 0
    stored = json.loads((tmp_path / "run" / "certificate.json").read_text())
    (found,) = stored["models"]
    assert (found["name"], found["model"]) == ("small", "nemo:codec.nemo")
    assert found["identity"]["checksum"]
    assert stored["devices"] == ["cpu"]
    printed = capsys.readouterr().out
    for comparison in found["comparisons"]:
        assert f"{comparison['different'] / comparison['compared']:.3%}" in printed


def test_a_stage_name_is_wrong_use(tmp_path):
    from sharmill.cli.certify import certify
    from sharmill.errors import ConfigError

    with raises(ConfigError, "bad_usage", "no stage names"):
        certify.main([str(tmp_path / "config.yaml"), "encode"], standalone_mode=False)

"""Segments that are too long for a device: cut where that gives the same codes, else named."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.errors import raises
from support.shar import codec_stages, lines, loading, run, voice

from sharmill.encode.config import EncodeConfig
from sharmill.errors import FatalError
from sharmill.models import load_codec
from sharmill.shar import open_shar


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


def encode(config, codec, **options):
    config = config.with_section(dataclasses.replace(config.section(EncodeConfig), **options))
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


def test_it_is_cut_in_every_precision(config, codec):
    assert encode(config, codec, precision="bf16").ok
    assert codec.lengths == [[30.0], [30.0], [30.0], [1.0]]


def test_one_of_a_codec_that_sees_all_of_its_audio_is_named_with_what_to_do(config, codec, monkeypatch):
    monkeypatch.setattr(codec, "find_reach", lambda: None)
    (failure,) = encode(config, codec).failures.values()
    for part in ("its 70 s do not fit", "all other units go on", "a device with more memory"):
        assert part in failure.message


def test_pieces_that_do_not_fit_are_named_and_end_a_stage_in_which_nothing_fits(project, codec):
    codec.most_seconds = 20
    with raises(FatalError, "out_of_memory", "a piece of 30 s of a longer segment", "a device with more memory") as end:
        encode(write(project, [70.0, 50.0]), codec, unit_seconds=2.0)
    assert "its 30 s" not in str(end.value)

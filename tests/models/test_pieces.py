"""Long segments in pieces: what is kept of them, what a codec's codes depend on, and the codes of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile as sf
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.paths import DATA
from support.shar import ToyCodec, voice

from sharmill.models import load_codec
from sharmill.models.codec_backend import CodecBackend
from sharmill.models.pieces import PIECE_SECONDS, Pieces, find_pieces

# What is after the colon, or the fixture's name of a checkpoint.
BOUNDED = {"builtin": (4, 0), "nemo_codec": (4, 0), "nemo_codec_noncausal": (2, 2), "dac": (8, 8)}


def named(kind, checkpoints):
    family = "nemo" if kind.startswith("nemo") else "transformers"
    return f"{family}:{checkpoints[kind]}" if kind in checkpoints else kind


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 50), st.integers(1, 500))
def test_what_is_kept_is_the_segment_and_has_all_that_it_depends_on_beside_it(before, after, own, more):
    pieces = Pieces(length=before + after + own, before=before, after=after)
    num_frames = pieces.length + more
    divided = pieces.divide(num_frames)
    assert [frame for piece in divided for frame in range(piece.first, piece.last)] == list(range(num_frames))
    for piece in divided:
        assert piece.stop - piece.start == pieces.length
        assert piece.start == 0 or piece.first - piece.start >= before
        assert piece.stop == num_frames or piece.stop - piece.last >= after


@pytest.mark.parametrize("kind", BOUNDED)
def test_the_codes_of_pieces_are_those_of_the_whole(kind, checkpoints):
    codec = load_codec(named(kind, checkpoints))
    assert isinstance(codec, CodecBackend)
    assert codec.find_reach() == BOUNDED[kind]
    before, after = BOUNDED[kind]
    # Shorter pieces than those of a run, so that there are many ends.
    pieces = Pieces(length=before + after + 40, before=before, after=after)
    samples = voice(400.4 * codec.samples_per_frame / codec.sampling_rate, codec.sampling_rate)
    whole = codec.encode(torch.from_numpy(samples)[None], torch.tensor([len(samples)]))[0].numpy()
    assert len(np.unique(whole)) > 2
    for max_frames in (1, 3 * pieces.length):
        np.testing.assert_array_equal(pieces.encode(codec, samples, max_frames), whole)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs real speech in ../shared/data, which is not in the repository")
def test_the_builtin_codec_gives_a_minute_of_real_speech_the_same_codes_in_pieces():
    files = sorted((DATA / "librispeech_10x10/audio").rglob("*.flac"))[:10]
    samples = np.concatenate([sf.read(file, dtype="float32")[0] for file in files])
    assert len(samples) > 2 * PIECE_SECONDS * 16000
    codec = load_codec("builtin")
    pieces = find_pieces(codec)
    assert pieces == Pieces(length=750, before=4, after=0)
    whole = codec.encode(torch.from_numpy(samples)[None], torch.tensor([len(samples)]))[0].numpy()
    np.testing.assert_array_equal(pieces.encode(codec, samples, 0), whole)


@pytest.mark.parametrize("kind", ["encodec", "mimi"])
def test_codecs_with_recurrent_layers_or_attention_are_not_cut(kind, checkpoints):
    codec = load_codec(named(kind, checkpoints))
    assert isinstance(codec, CodecBackend)
    assert codec.find_reach() is None
    assert find_pieces(codec) is None


def test_a_codec_of_another_package_that_does_not_say_is_not_cut():
    assert find_pieces(ToyCodec()) is None

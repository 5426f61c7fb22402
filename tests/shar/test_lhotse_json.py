"""Lhotse's manifests as JSON: a cut tells the utterance that it was made of, and is made of it again."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.manifests import speaker_tag

from sharmill.manifest import Utterance, recording_id, segment_id
from sharmill.shar.lhotse_json import cut_json, utterance_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
KEYS = st.sampled_from(["cer", "language", "emotion", "context_audio_filepath", "normalized_text", "shape"])


def utterance(path="a/b.flac", suffixes=("", ""), **custom) -> Utterance:
    made = Utterance(path, 0.5, 1.25, "some text", speaker_tag("anna"), custom)
    made.recording_id = recording_id(path) + suffixes[0]
    made.cut_id = segment_id(made.recording_id, 0.5, 1.25) + suffixes[1]
    return made


def stored(made: Utterance):
    return msgspec.json.decode(msgspec.json.encode(cut_json(made, sampling_rate=16000, num_samples=20000)))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["a.wav", "a/b.c.flac", "größe/日本 1.opus", "no_suffix", ".hidden"]),
    st.dictionaries(KEYS, JSON, max_size=4),
    st.tuples(st.sampled_from(["", "-0123456789abcdef"]), st.sampled_from(["", "-fedcba9876543210"])),
)
def test_a_cut_is_made_again_from_the_record_that_it_carries(path, custom, suffixes):
    cut = stored(utterance(path, suffixes, **custom))
    assert stored(utterance_of(cut)) == cut


@pytest.mark.parametrize("suffix", ["-0123", "x", "-0123456789abcdeg", "-0123456789ABCDEF", "-0123456789abcdef0"])
def test_a_suffix_that_is_no_hash_is_not_taken_over(suffix):
    made = utterance_of(stored(utterance(suffixes=(suffix, ""))))
    assert made.recording_id == "rec-a-b"


def test_objects_that_lhotse_would_load_are_kept_as_text():
    (supervision,) = stored(utterance(shape={"shape": [1], "storage_type": "numpy_files"}))["supervisions"]
    assert supervision["custom"]["shape"] == '{"shape":[1],"storage_type":"numpy_files"}'

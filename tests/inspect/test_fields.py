"""Fields that a stage has added, as ``sharmill inspect`` shows them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.fields import add_fields, score_of, voice_of
from support.shar import copy

from sharmill.shar import open_shar


@pytest.fixture
def dataset(looked_at, tmp_path):
    return add_fields(copy(looked_at, tmp_path / "dataset"))


def test_the_dataset_says_what_they_are(dataset, call):
    status, out, _ = call("inspect", dataset)
    assert status == 0
    shown = dict(line.strip().split(maxsplit=2)[1:] for line in out.splitlines() if line.startswith("field "))
    assert shown == {
        "score": "value of each cut, from 0 to 1, which may be missing, made by scorer",
        "voices/voice": "array, cut.voice, from -1 to 1, made by voices",
    }


def test_a_cut_is_shown_with_its_values(dataset, call):
    shown = set()
    for cut in open_shar(dataset):
        status, out, _ = call("inspect", dataset, cut.id)
        assert status == 0
        score = score_of(cut.id)
        shown.add(score is None)
        assert ('score: nothing\n  ""' if score is None else f"score: a value\n  {score}") in out
        assert f"voices/voice: (4,) float32\n  it begins {voice_of(cut.id)[0]!s}" in out
    assert shown == {True, False}


def test_a_cut_is_exported_with_its_values(dataset, call, tmp_path):
    cut_id = next(cut.id for cut in open_shar(dataset) if score_of(cut.id) is not None)
    status, _, _ = call("inspect", dataset, cut_id, "--export", tmp_path / "cut")
    assert status == 0
    assert json.loads((tmp_path / "cut/score.json").read_text()) == {"score": score_of(cut_id)}
    np.testing.assert_array_equal(np.load(tmp_path / "cut/voices_voice.npy"), voice_of(cut_id))

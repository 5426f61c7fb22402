"""``examples/conversations.py``: what it writes is read by sharmill and by NeMo's dataset; bad lines are named."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from support.errors import raises
from support.paths import REPOSITORY
from support.shar import put, voice
from support.speechlm2 import write_conversations

from sharmill.errors import ConfigError
from sharmill.shar import open_shar

spec = importlib.util.spec_from_file_location("conversations", REPOSITORY / "examples" / "conversations.py")
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)


def test_both_sides_and_the_roles(tmp_path, capsys):
    manifest = write_conversations(tmp_path, 3)
    assert program.main(manifest, tmp_path / "out") == 0
    assert "3 conversations" in capsys.readouterr().out
    cuts = list(open_shar(tmp_path / "out"))
    assert [cut.id for cut in cuts] == ["c0", "c1", "c2"]
    for number, cut in enumerate(cuts):
        user, agent = voice(2 + 0.1 * number, seed=number), voice(2 + 0.1 * number, seed=50 + number)
        assert np.array_equal(cut.load_audio()[0], user)
        assert np.array_equal(cut.load_target_audio()[0], agent)
        turns = [(one.speaker, one.start, one.text) for one in cut.supervisions]
        assert turns == [("user", 0.0, f"question {number}"), ("assistant", 1.0, f"answer {number}")]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"turns": []}, "no turns"),
        ({"turns": [{"role": "robot", "start": 0, "duration": 1, "text": "x"}]}, "robot"),
        ({"turns": [{"role": "user", "start": 1.5, "duration": 1, "text": "x"}]}, "turn 0"),
        ({"turns": [{"role": "user", "start": 0, "duration": 1}]}, "text"),
        ({"agent_audio_filepath": "short.wav"}, "one length"),
        ({"user_audio_filepath": "missing.wav"}, "missing.wav"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left(tmp_path, change, named):
    manifest = write_conversations(tmp_path, 2)
    put(tmp_path / "short.wav", voice(1.0))
    first, second = map(json.loads, manifest.read_text().splitlines())
    manifest.write_text(json.dumps(first) + "\n" + json.dumps(second | change) + "\n")
    before = sorted(tmp_path.iterdir())
    with raises(ConfigError, "bad_manifest", "line 2", named):
        program.main(manifest, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_is_there_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    with raises(ConfigError, "foreign_output", "out"):
        program.main(write_conversations(tmp_path, 1), tmp_path / "out")

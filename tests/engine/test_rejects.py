"""Sentences about rejects: the first of each of the commonest reasons, and a remedy for every reason."""

from __future__ import annotations

import pytest

from sharmill.engine.rejects import describe_rejects
from sharmill.errors import REASONS, REMEDIES
from sharmill.manifest import Reject


@pytest.fixture
def folder(tmp_path):
    """Rejects of two units."""
    write(
        tmp_path / "000001.jsonl",
        [Reject("prepare", "missing_field", "the record has no text", {"audio_filepath": "b.wav"})],
    )
    write(tmp_path / "000000.jsonl", [
        Reject("prepare", "missing_field", "the record has no speaker", {"audio_filepath": "a.wav"}),
        Reject("prepare", "malformed", "the line is not JSON:\nsyntax " + 200 * "x", "a,b,c"),
        Reject("prepare", "missing_audio", "/data/c.wav: No such file or directory", {"audio_filepath": "c.wav"}),
    ])  # fmt: skip
    return tmp_path


def write(path, rejects):
    path.write_bytes(b"".join(reject.to_json() + b"\n" for reject in rejects))


def test_the_first_sentence_of_each_reason_comes_with_its_file_and_its_remedy(folder):
    lines = describe_rejects(folder, {"malformed": 1, "missing_field": 5, "missing_audio": 2})
    assert [line.split()[:2] for line in lines] == [
        ["missing_field", "5,"],
        ["missing_audio", "2,"],
        ["malformed", "1,"],
    ]
    assert lines[0].startswith("missing_field 5, the first: a.wav: the record has no speaker. To do: ")
    assert "prepare.require_text=false" in lines[0]
    assert lines[1].startswith("missing_audio 2, the first: /data/c.wav: No such file or directory. To do: ")
    assert "audio_root" in lines[1]
    assert lines[2].startswith("malformed 1, the first: the line is not JSON: syntax xxx")
    assert max(map(len, lines)) < 300


def test_only_the_three_commonest_reasons_are_named(folder):
    reasons = {"malformed": 1, "missing_field": 5, "missing_audio": 2, "too_short": 3}
    assert [line.split()[0] for line in describe_rejects(folder, reasons)] == [
        "missing_field",
        "too_short",
        "missing_audio",
    ]


def test_rejects_of_which_no_file_is_left_are_counted(tmp_path):
    assert describe_rejects(tmp_path, {"too_short": 3}) == ["too_short 3. To do: lower prepare.min_duration"]


def test_every_reason_has_a_remedy():
    assert REMEDIES.keys() == REASONS.keys()

"""Sentences about rejects: the first of each of the commonest reasons, and a remedy for every reason."""

from __future__ import annotations

from sharmill.engine.rejects import describe_rejects
from sharmill.errors import REASONS, REMEDIES
from sharmill.manifest import Reject


def test_the_commonest_reasons_come_with_their_first_sentence_its_file_and_a_remedy(tmp_path):
    units = [
        [
            Reject("prepare", "missing_field", "the record has no speaker", {"audio_filepath": "a.wav"}),
            Reject("prepare", "malformed", "the line is not JSON:\nsyntax " + 200 * "x", "a,b,c"),
            Reject("prepare", "missing_audio", "/data/c.wav: No such file or directory", {"audio_filepath": "c.wav"}),
        ],
        [Reject("prepare", "missing_field", "the record has no text", {"audio_filepath": "b.wav"})],
    ]
    for index, rejects in enumerate(units):
        lines = b"".join(reject.to_json() + b"\n" for reject in rejects)
        (tmp_path / f"{index:06d}.jsonl").write_bytes(lines)
    reasons = {"malformed": 2, "missing_field": 5, "missing_audio": 3, "too_long": 1}
    first, second, third = describe_rejects(tmp_path, reasons)
    assert first.startswith("missing_field 5, the first: a.wav: the record has no speaker. To do: ")
    assert "prepare.require_text=false" in first
    assert second.startswith("missing_audio 3, the first: /data/c.wav: No such file or directory. To do: ")
    assert "audio_root" in second
    assert third.startswith("malformed 2, the first: the line is not JSON: syntax xxx")
    assert len(third) < 300


def test_rejects_of_which_no_file_is_left_are_counted(tmp_path):
    assert describe_rejects(tmp_path, {"too_short": 3}) == ["too_short 3. To do: lower prepare.min_duration"]


def test_every_reason_has_a_remedy():
    assert REMEDIES.keys() == REASONS.keys()

"""The typed utterance, its JSON line, ids, and random access to lines."""

from __future__ import annotations

import json
import posixpath
from pathlib import PurePosixPath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import raises

from sharmill.errors import FatalError, RejectRecord
from sharmill.manifest import (
    OWN_KEYS,
    AudioNotes,
    Context,
    Reject,
    Segment,
    Utterance,
    iterate_lines,
    read_lines_at,
    recording_id,
    records_checksum,
    segment_id,
    write_lines,
)
from sharmill.speaker_tag import SpeakerTag, parse_speaker_tag

WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@pytest.mark.parametrize(
    ("tag", "parts"),
    [
        ("| Language:en Dataset:HiFiTTS Speaker:9136_other |", ("en", "HiFiTTS", "9136_other")),
        ("|Language:de Dataset:X Speaker:1|", ("de", "X", "1")),
        ("  | Speaker:a:b Dataset:X Language:en Extra:1 | \n", ("en", "X", "a:b", ("Extra:1",))),
    ],
)
def test_speaker_tag(tag, parts):
    assert parse_speaker_tag(tag) == SpeakerTag(*parts)


def test_speaker_tag_is_written_in_the_order_that_nemo_asks_for():
    tag = parse_speaker_tag("|Speaker:1 Emotion:calm Language:en Dataset:X|")
    assert str(tag) == "| Language:en Dataset:X Speaker:1 Emotion:calm |"


@pytest.mark.parametrize(
    "tag",
    [
        "",
        "anna",
        "| Language:en Dataset:X Speaker:John Smith |",
        "Language:en Dataset:X Speaker:1",
        "| Language:en Dataset:X Speaker:1",
        "| Language:en Dataset:X |",
        "| Language:en Dataset:X Speaker: |",
        "||",
    ],
)
def test_bad_speaker_tag(tag):
    with pytest.raises(RejectRecord) as caught:
        parse_speaker_tag(tag)
    assert caught.value.reason == "bad_speaker"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.wav", "rec-a"),
        ("84/121123/84-121123-0000.flac", "rec-84-121123-84-121123-0000"),
        ("v1.2/take.3.wav", "rec-v1.2-take.3"),
        ("v1.2/take", "rec-v1.2-take"),
        (".hidden", "rec-.hidden"),
    ],
)
def test_recording_id(path, expected):
    assert recording_id(path) == expected


@given(st.text("ab./ü ", min_size=1, max_size=12).map(posixpath.normpath).filter(lambda path: path.strip("/.")))
def test_the_extension_is_what_pathlib_takes_for_it(path):
    assert recording_id(path) == "rec-" + str(PurePosixPath(path).with_suffix("")).replace("/", "-")


def test_segment_id_has_two_decimals():
    assert segment_id("rec-a", 1.005, 3) == "cut-rec-a-1.00-3.00"


NOTES = st.builds(AudioNotes, st.integers(-1, 1 << 50), st.integers(-1, 1 << 62), WORDS, WORDS)
SECONDS = st.floats(0, 1e9)
CONTEXTS = st.builds(
    Context,
    st.builds(Segment, st.integers(0, 9), WORDS, SECONDS, SECONDS, st.booleans(), NOTES),
    recording_id=WORDS,
    text=WORDS,
    similarity=st.floats(-1, 1),
    normalized_text=st.none() | WORDS,
)
OTHER_KEYS = WORDS.filter(lambda key: key not in {"audio_filepath", "offset", "duration", "text", "speaker", *OWN_KEYS})
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS


@given(
    text=WORDS,
    custom=st.dictionaries(OTHER_KEYS, VALUES),
    numbers=st.tuples(SECONDS, SECONDS),
    whole_file=st.booleans(),
    notes=NOTES,
    context=st.none() | CONTEXTS,
)
def test_utterance_survives_its_json_line(text, custom, numbers, whole_file, notes, context):
    utterance = Utterance(
        "a/b.wav", *numbers, text, "| x |", custom, 3, whole_file, 7, "rec", "cut", notes=notes, context=context
    )
    line = utterance.to_json()
    assert b"\n" not in line
    again = Utterance.from_json(line)
    assert again == utterance
    assert again.notes == notes
    if context is not None:
        assert again.context.segment.notes == context.segment.notes


def test_a_context_that_the_source_names_is_a_further_key_until_one_is_chosen():
    utterance = Utterance("a.wav", 0.0, 2.0, "Hi.", "| x |", {"context_audio_filepath": "other.wav"})
    again = Utterance.from_json(utterance.to_json())
    assert (again.context, again.custom) == (None, {"context_audio_filepath": "other.wav"})


def test_the_checksum_of_records_sees_everything_but_the_times(tmp_path):
    def checksum(**changes):
        notes = AudioNotes(**{"size": 10, "modified": 1, "checksum": "c"} | changes)
        text = 'a trap: ,"_modified":[1,2]}'
        write_lines(tmp_path / "m", [Utterance("a.wav", 0.0, 2.0, text, "| x |", notes=notes).to_json()] * 2)
        return records_checksum(tmp_path / "m")

    assert checksum() == checksum(modified=2)
    # Of other lengths in decimal digits: the byte offsets in plans must stay right.
    assert checksum() == checksum(modified=-1) == checksum(modified=1_700_000_000_123_456_789)
    # Measures may differ in their last step between kinds of CPU.
    assert checksum(sound="a" * 16) == checksum(sound="b" * 16)
    assert len({checksum(), checksum(size=11), checksum(checksum="d")}) == 3


def test_lines_of_other_lengths_have_another_checksum(tmp_path):
    """Plans have byte offsets of lines; times were once written without a fixed width."""
    line = Utterance("a.wav", 0.0, 2.0, "Hi.", "| x |").to_json()
    found = []
    for times in (b"[1,-1]}", b"[12,-1]}"):
        write_lines(tmp_path / "m", [line[: line.index(b"[", line.index(b"_modified"))] + times])
        assert Utterance.from_json((tmp_path / "m").read_bytes()).notes.modified == int(times[1:].split(b",")[0])
        found.append(records_checksum(tmp_path / "m"))
    assert found[0] != found[1]


def test_public_record_has_no_keys_of_sharmill():
    utterance = Utterance("a.wav", 1.0, 2.0, "Hi.", "| x |", {"cer": 0.01})
    assert utterance.public_record() == {
        "audio_filepath": "a.wav", "offset": 1.0, "duration": 2.0, "text": "Hi.", "speaker": "| x |", "cer": 0.01,
    }  # fmt: skip


def test_reject_is_one_line_of_four_keys():
    line = Reject("prepare", "skipped", "It is\nso.", {"a": "ä"}).to_json()
    assert b"\n" not in line
    assert json.loads(line) == {"stage": "prepare", "reason": "skipped", "detail": "It is\nso.", "record": {"a": "ä"}}


def test_iterate_lines_leaves_out_blank_ones(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"\n a \r\n\t\n\nb")
    assert list(iterate_lines(path)) == [b"a", b"b"]


def test_write_lines_returns_their_number(tmp_path):
    assert write_lines(tmp_path / "lines", iter([b"a", b"bc"])) == 2
    assert (tmp_path / "lines").read_bytes() == b"a\nbc\n"


@given(lines=st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), min_size=1), data=st.data())
def test_lines_are_read_at_offsets_in_the_order_asked_for(lines, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "lines"
    write_lines(path, lines)
    offsets = np.cumsum([0, *(len(line) + 1 for line in lines[:-1])])
    wanted = data.draw(st.lists(st.integers(0, len(lines) - 1)))
    assert read_lines_at(path, offsets[wanted]) == [lines[number] for number in wanted]


@pytest.mark.parametrize("offset", [4, 100])
def test_a_file_that_was_shortened_is_noticed(offset, tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"abc\nde")
    with raises(FatalError, "changed_input", str(path)):
        read_lines_at(path, np.array([0, offset]))

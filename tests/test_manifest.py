"""The typed utterance, its JSON line, ids, and random access to lines."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sharmill.manifest import (
    OWN_KEYS,
    AudioNotes,
    Context,
    Segment,
    SpeakerTag,
    Utterance,
    parse_speaker_tag,
    read_lines_at,
    recording_id,
    records_checksum,
    write_lines,
)

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
SEGMENT = Segment(0, "a.wav", 0.0, 2.0, False)
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
    segment = Segment(3, "a/b.wav", *numbers, whole_file, notes)
    utterance = Utterance(segment, text, "| x |", custom, 7, "rec", "cut", context)
    line = utterance.to_json()
    assert b"\n" not in line
    again = Utterance.from_json(line)
    assert again == utterance
    assert again.segment.notes == notes
    if context is not None:
        assert again.context.segment.notes == context.segment.notes


def test_the_checksum_of_records_sees_everything_but_the_times(tmp_path):
    def checksum(**changes):
        notes = AudioNotes(**{"size": 10, "modified": 1, "checksum": "c"} | changes)
        text = 'a trap: ,"_modified":[1,2]}'
        write_lines(tmp_path / "m", [Utterance(replace(SEGMENT, notes=notes), text, "| x |").to_json()] * 2)
        return records_checksum(tmp_path / "m")

    assert checksum() == checksum(modified=2)
    # Times with other numbers of digits must not change the byte offsets in plans.
    assert checksum() == checksum(modified=-1) == checksum(modified=1_700_000_000_123_456_789)
    # Measures may differ in their last step between kinds of CPU.
    assert checksum(sound="a" * 16) == checksum(sound="b" * 16)
    assert len({checksum(), checksum(size=11), checksum(checksum="d")}) == 3


@given(lines=st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), min_size=1), data=st.data())
def test_lines_are_read_at_offsets_in_the_order_asked_for(lines, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "lines"
    write_lines(path, lines)
    offsets = np.cumsum([0, *(len(line) + 1 for line in lines[:-1])])
    wanted = data.draw(st.lists(st.integers(0, len(lines) - 1)))
    assert read_lines_at(path, offsets[wanted]) == [lines[number] for number in wanted]

"""Long recordings with annotations, in every format, and annotations that cannot be read."""

import json
import time

import pytest
from hypothesis import given, strategies as st
from support.project import raises, write_config, write_tone
from support.sources import read

from sharmill.errors import ConfigError
from sharmill.sources import UnreadableRecord
from sharmill.sources.annotated import AnnotatedSource
from sharmill.sources.stretches import Stretch, find_overlaps
from sharmill.sources.textgrid import parse_textgrid

LONG_TEXTGRID = """File type = "ooTextFile"
Object class = "TextGrid"

xmin = 0
xmax = 4
tiers? <exists>
size = 3
item []:
    item [1]:
        class = "IntervalTier"
        name = "anna - words"
        xmin = 0
        xmax = 4
        intervals: size = 3
        intervals [1]:
            xmin = 0
            xmax = 1.5
            text = "he said ""no"" 5"
        intervals [2]:
            xmin = 1.5
            xmax = 2
            text = ""
        intervals [3]:
            xmin = 2
            xmax = 4
            text = "yes"
    item [2]:
        class = "TextTier"
        name = "clicks"
        xmin = 0
        xmax = 4
        points: size = 1
        points [1]:
            number = 1
            mark = "x"
    item [3]:
        class = "IntervalTier"
        name = "bob - words"
        xmin = 0
        xmax = 4
        intervals: size = 1
        intervals [1]:
            xmin = 1
            xmax = 3
            text = "well"
"""


SHORT_TEXTGRID = (
    'File type = "ooTextFile"\nObject class = "TextGrid"\n\n0\n4\n<exists>\n3\n"IntervalTier"\n"anna - words"\n0\n4\n'
    '3\n0\n1.5\n"he said ""no"" 5"\n1.5\n2\n""\n2\n4\n"yes"\n"TextTier"\n"clicks"\n0\n4\n1\n1\n"x"\n'
    '"IntervalTier"\n"bob - words"\n0\n4\n1\n1\n3\n"well"\n'
)


RTTM = """;; two meetings
SPKR-INFO m1 1 <NA> <NA> <NA> unknown anna <NA> <NA>
SPEAKER m1 1 0.50 2.00 <NA> <NA> anna <NA> <NA>
SPEAKER m1 1 2.00 1.00 <NA> <NA> bob <NA> <NA>
SPEAKER m2 1 0.00 1.25 <NA> <NA> anna <NA> <NA>
"""


@pytest.fixture
def annotated(tmp_path):
    """Return a function from format, files by name (``__`` for ``/``) and keys to the source of the folder."""

    def make(form, files, **keys):
        for name, content in files.items():
            path = tmp_path / "audio" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return AnnotatedSource(annotations=form, audio_root=str(tmp_path / "audio"), **keys)

    return make


def brief(rows):
    return [
        row.reason
        if isinstance(row, UnreadableRecord)
        else (row["audio_filepath"], row["offset"], row["duration"], row.get("speaker"), row.get("text"))
        for row in rows
    ]


def test_words_of_ctm_are_joined_at_short_pauses(annotated):
    words = [("A", 0.0, 0.4, "good"), ("A", 0.8, 0.2, "day"), ("A", 1.75, 0.25, "sir"), ("B", 0.1, 0.5, "yes")]
    text = ";; a comment\n" + "".join(f"call {c} {begin} {length} {word} 0.98\n" for c, begin, length, word in words)
    files = {"call.ctm": text, "call.sph": b""}

    def found(**keys):
        rows = read(annotated("ctm", files, **keys))
        return [(row["channel"], row["offset"], row["duration"], row["text"]) for row in rows]

    assert found() == [(0, 0.0, 1.0, "good day"), (1, 0.1, 0.5, "yes"), (0, 1.75, 0.25, "sir")]
    assert found(max_gap=0.75) == [(0, 0.0, 2.0, "good day sir"), (1, 0.1, 0.5, "yes")]
    assert found(max_gap=0.75, max_duration=1.5)[0] == (0, 0.0, 1.0, "good day")
    assert found(max_gap=0.0)[0] == (0, 0.0, 0.4, "good")
    assert [row[0] for row in found(overlap="drop")] == [0, 1, 0]  # two channels do not overlap


def test_an_only_channel_has_no_number_if_it_is_the_first(annotated):
    for label, number in (("1", None), ("A", None), ("2", 1), ("B", 1)):
        (row,) = read(annotated("ctm", {"a.ctm": f"a {label} 0 1 yes\n"}))
        assert row.get("channel") == number
    assert brief(read(annotated("ctm", {"a.ctm": "a left 0 1 yes\n"}))) == ["malformed"]
    rows = read(annotated("ctm", {"a.ctm": "a 0 0 1 yes\na 1 0 1 no\n"}))
    assert [row["channel"] for row in rows] == [0, 1]


@pytest.mark.parametrize(
    "data",
    [LONG_TEXTGRID, SHORT_TEXTGRID, LONG_TEXTGRID.replace("\n", "\r\n"), LONG_TEXTGRID.encode("utf-16"),
     b"\xef\xbb\xbf" + SHORT_TEXTGRID.encode()],
)  # fmt: skip
def test_textgrid(data, annotated):
    files = {"talk.TextGrid": data, "talk.wav": b""}
    anna = [("talk.wav", 0.0, 1.5, "anna", 'he said "no" 5'), ("talk.wav", 2.0, 2.0, "anna", "yes")]
    bob = [("talk.wav", 1.0, 2.0, "bob", "well")]
    assert brief(read(annotated("textgrid", files, tier="* - words"))) == [anna[0], *bob, anna[1]]
    source = annotated("textgrid", files, tier="bob - words")
    source.check()
    assert brief(read(source)) == [(*bob[0][:3], None, "well")]
    assert [row[3] for row in brief(read(annotated("textgrid", files, tier="*")))] == [
        "anna - words",
        "bob - words",
        "anna - words",
    ]
    (joined, _) = read(annotated("textgrid", files, tier="* - words", max_gap=0.5))
    assert (joined["duration"], joined["text"]) == (4.0, 'he said "no" 5 yes')


def ami(*words):
    begin = '<?xml version="1.0" encoding="ISO-8859-1"?>\n<nite:root nite:id="x" xmlns:nite="http://nite.sourceforge.net/">\n'
    return begin + "\n".join(words) + "\n</nite:root>\n"


def word(said, start, end, *, mark=False):
    punctuation = ' punc="true"' if mark else ""
    return f'<w nite:id="i" starttime="{start}" endtime="{end}"{punctuation}>{said}</w>'


AMI = {
    "words/ES1.A.words.xml": ami(
        word("That&#39;s", 1.0, 1.4), word("it", 1.5, 1.75), word(".", 1.75, 1.75, mark=True),
        '<vocalsound starttime="2" endtime="3" type="laugh"/>', word("Well", 4.0, 4.25), "<w nite:id='j'>,</w>",
        word("bad", "x", 5.0),
    ),
    "words/ES1.B.words.xml": ami(word("Yes", 4.1, 4.5)),
    "words/ES2.A.words.xml": ami(word("No", 0.5, 1.0)),
    "words/ES2.B.words.xml": ami(),
}  # fmt: skip
MIX = {"audio": "{recording}/audio/{recording}.Mix-Headset.wav"}
ONE, TWO = "ES1/audio/ES1.Mix-Headset.wav", "ES2/audio/ES2.Mix-Headset.wav"
SRT = (
    "\ufeff1\r\n00:00:01,500 --> 00:00:03,000\r\n<i>Good</i>\r\nday.\r\n\r\n2\r\n01:00:00.000 --> 01:00:02.5\r\n"
    "{\\an8}Yes\r\n\r\n3\r\nno times\r\n\r\n00:00:09,000 --> 00:00:10,000\r\nWithout number\r\n"
)
RTTM_NAMES = "SPEAKER a 1 0 1 <NA> <NA> anna lee <NA> <NA>\nSPEAKER a 1 1 1 <NA> <NA> b\xa0c <NA> <NA>\n"
ROLLING = """1
00:00:00,480 --> 00:00:02,470
 
there's iron they say

2
00:00:02,470 --> 00:00:02,480
there's iron they say
 

3
00:00:02,480 --> 00:00:04,950
there's iron they say
in all our blood

4
00:00:04,950 --> 00:00:04,960
in all our blood
 

5
00:00:04,960 --> 00:00:07,000
in all our blood
and a grain or two

6
00:00:09,000 --> 00:00:10,000
and a grain or two
"""  # noqa: W293
VTT = """WEBVTT
Kind: captions

STYLE
::cue {color: red}

00:00.480 --> 00:02.470 align:start position:0%
 
R&amp;B<00:00:00.900><c> iron</c><00:00:01.300><c.a> they</c>

NOTE two
lines

name
00:02.470 --> 00:02.480
R&amp;B iron they

00:02.480 --> 00:04.950
R&amp;B iron they
2020

00:04.950 --> 00:04.960
2020

00:05.000 --> 00:06.000
2020
no &lt;i&gt;
"""  # noqa: W293
# Captions that stay while the next line is spoken, so that each line is on the screen three times.
ROLLING_UP = """WEBVTT

00:00:01.000 --> 00:00:05.000
we<00:00:01.500><c> begin</c>

00:00:03.000 --> 00:00:07.000
we begin
and<00:00:03.400><c> go</c><00:00:03.700><c> on</c>

00:00:05.000 --> 00:00:09.000
we begin
and go on
until<00:00:06.000><c> the</c><00:00:07.000><c> end</c>

name
bad --> 00:00:12.000
lost
"""
WHISPER = {
    "text": " Good day. Yes.", "language": "en",
    "segments": [
        {"id": 0, "start": 0.5, "end": 2, "text": " Good day.", "avg_logprob": float("nan"), "tokens": [1]},
        {"start": 2.0, "end": 2.25, "text": "Yes.", "speaker": "SPEAKER_00", "words": [{"word": "Yes.", "start": 2.0}]},
        {"start": float("nan"), "end": 4.0, "text": "no start"}, {"start": 3.0, "end": 4.0}, "no segment",
    ],
}  # fmt: skip
ALIGNED = "".join(
    json.dumps(line) + "\n"
    for line in (
        {"audio_filepath": "talks/a b.wav", "text": "good day | yes",
         "words_level_ctm_filepath": "/elsewhere/ctm/words/a-b.ctm", "segments_level_ctm_filepath": "../a-b.ctm"},
        {"audio_filepath": "b.wav", "text": "not aligned"},
        {"audio_filepath": "c.wav", "words_level_ctm_filepath": "c.ctm", "segments_level_ctm_filepath": "/etc/passwd"},
        ["no object"],
    )
)  # fmt: skip
NFA = {
    "out/m_with_output_file_paths.json": ALIGNED,
    "out/ctm/words/a-b.ctm": "a-b 1 0.50 0.40 good\na-b 1 1.00 0.50 day\nbad\na-b 1 3.00 0.25 yes NA lex unknown\n",
    "out/ctm/segments/a-b.ctm": "a-b 1 0.50 1.00 good<space>day\na-b 1 3.00 0.25 yes\n",
}
# Speakers repeat themselves; captions overlap, come in any order, have numbers as text, and have missing or extra blank
# lines.
SPOKEN_TWICE = (
    "1\n00:00:01,000 --> 00:00:02,000\nNo.\n2\n00:00:02,000 --> 00:00:03,000\nNo.\n\n3\n00:00:05,000 --> 00:00:06,000\n"
    "No.\nWay\x85 \u2028out.\n\n\nin 1984\n\n4\n00:00:05,500 --> 00:00:07\n\n\n1984\n\n5\n\n"
    "00:00:04,000 --> 00:00:03,000\nx\n"
)
# Format, files, keys of the source, and its records.
READ = [
    ("srt", {"a.srt": ROLLING}, {},
     [("a.wav", 0.48, 1.99, None, "there's iron they say"), ("a.wav", 2.48, 2.47, None, "in all our blood"),
      ("a.wav", 4.96, 2.04, None, "and a grain or two"), ("a.wav", 9.0, 1.0, None, "and a grain or two")]),
    ("srt", {"a.vtt": VTT}, {"annotation_suffix": ".vtt"},
     [("a.wav", 0.48, 1.99, None, "R&B iron they"), ("a.wav", 2.48, 2.47, None, "2020"),
      ("a.wav", 5.0, 1.0, None, "no <i>")]),
    ("vtt", {"a.vtt": "WEBVTT\n\n00:01.000 --> 00:02.000\n<v.loud Mary Ann>Hello <v>you</v>\n"}, {},
     [("a.wav", 1.0, 1.0, None, "Hello you")]),
    ("vtt", {"a.vtt": ROLLING_UP}, {},
     ["malformed", ("a.wav", 1.0, 2.0, None, "we begin"), ("a.wav", 3.0, 2.0, None, "and go on"),
      ("a.wav", 5.0, 4.0, None, "until the end")]),
    ("whisper", {"a.json": json.dumps(WHISPER), "a.mp3": b""}, {},
     [*["malformed"] * 3, ("a.mp3", 0.5, 1.5, None, "Good day."), ("a.mp3", 2.0, 0.25, "SPEAKER_00", "Yes.")]),
    ("nfa_words", NFA, {},
     ["malformed", "missing_field", *["malformed"] * 2, ("talks/a b.wav", 0.5, 1.0, None, "good day"),
      ("talks/a b.wav", 3.0, 0.25, None, "yes")]),
    ("nfa_segments", NFA, {"max_gap": 2.0},
     ["missing_field", *["malformed"] * 2, ("talks/a b.wav", 0.5, 2.75, None, "good day yes")]),
    ("srt", {"a.srt": SPOKEN_TWICE}, {},
     [("a.wav", 1.0, 1.0, None, "No."), ("a.wav", 2.0, 1.0, None, "No."), ("a.wav", 4.0, -1.0, None, "x"),
      ("a.wav", 5.0, 1.0, None, "No. Way\x85 \u2028out. in 1984"), ("a.wav", 5.5, 1.5, None, "1984")]),
    ("ctm", {"a.ctm": "a 1 0 1 10\xa0000\x85s 0.9\na 1 2 1 two words 0.9\na 1 4 1 ok NA lex\n"}, {},
     ["malformed", ("a.wav", 0.0, 1.0, None, "10\xa0000\x85s"), ("a.wav", 4.0, 1.0, None, "ok")]),
    ("rttm", {"a.rttm": RTTM_NAMES}, {},
     ["malformed", ("a.wav", 1.0, 1.0, "b\xa0c", None)]),
    ("audacity", {"a.txt": "0\t1\twait\x85 \u2028what\n"}, {}, [("a.wav", 0.0, 1.0, None, "wait\x85 \u2028what")]),
    ("rttm", {"all.rttm": RTTM}, {"overlap": "drop"},
     ["overlapped_speech", "overlapped_speech", ("m2.wav", 0.0, 1.25, "anna", None)]),
    ("rttm", {"a/all.rttm": RTTM.replace("\n", "\r\n"), "a/m2.flac": b"", "b.rttm": RTTM}, {},
     [("m1.wav", 0.5, 2.0, "anna", None), ("m1.wav", 2.0, 1.0, "bob", None), ("m2.wav", 0.0, 1.25, "anna", None),
      ("a/m1.wav", 0.5, 2.0, "anna", None), ("a/m1.wav", 2.0, 1.0, "bob", None),
      ("a/m2.flac", 0.0, 1.25, "anna", None)]),
    ("audacity", {"a.txt": "0.5\t1.25\tgood day\n\\\t100.0\t2000.0\n2\t3\t\n1,5\t2\tx\n"}, {"audio_suffixes": [".mp3"]},
     ["malformed", ("a.mp3", 0.5, 0.75, None, "good day"), ("a.mp3", 2.0, 1.0, None, "")]),
    ("srt", {"film.srt": SRT, "film.m4a": b""}, {},
     ["malformed", ("film.m4a", 1.5, 1.5, None, "Good day."), ("film.m4a", 9.0, 1.0, None, "Without number"),
      ("film.m4a", 3600.0, 2.5, None, "Yes")]),
    ("ami", AMI, MIX,
     ["malformed", (ONE, 1.0, 0.75, "ES1.A", "That's it."), (ONE, 4.0, 0.25, "ES1.A", "Well ,"),
      (ONE, 4.1, 0.4, "ES1.B", "Yes"), (TWO, 0.5, 0.5, "ES2.A", "No")]),
    ("ami", AMI, MIX | {"overlap": "drop"},
     ["malformed", (ONE, 1.0, 0.75, "ES1.A", "That's it."), *["overlapped_speech"] * 2,
      (TWO, 0.5, 0.5, "ES2.A", "No")]),
]  # fmt: skip


def test_captions_that_are_left_out_are_counted(call, tmp_path):
    write_tone(tmp_path / "audio/a.wav", 12.0)
    (tmp_path / "audio/a.srt").write_text(ROLLING)
    source = {"type": "annotated", "annotations": "srt", "audio_root": str(tmp_path / "audio")}
    config = write_config(tmp_path, tmp_path, tmp_path, sources=[source], match=None, encode={"codecs": []})
    status, said, told = call("run", config)
    stats = json.loads((tmp_path / "run/stats.json").read_bytes())
    assert (status, stats["records_in"], stats["records_out"]) == (0, 4, 4)
    assert stats["noted"] == {
        "captions that only repeat the previous one are left out": 2,
        "caption lines that only repeat the previous caption are left out": 2,
    }
    assert "2 captions that only repeat the previous one are left out" in said + told
    assert "2 captions that only repeat the previous one" in (tmp_path / "run/report.html").read_text()


def test_ctm_files_that_a_manifest_names_are_part_of_the_identity(annotated):
    source = annotated("nfa_words", NFA)
    before = source.identity()
    assert annotated("nfa_words", {"out/ctm/words/a-b.ctm": "a-b 1 0.50 0.40 bad\n"}).identity() != before
    with pytest.raises(ValueError, match="audio does not apply"):
        annotated("nfa_words", NFA, audio="{recording}.wav")


@pytest.mark.parametrize("name", ["a\0.ctm", "a" * 300])
def test_a_ctm_file_that_cannot_be_opened_rejects_only_its_line(name, annotated):
    bad = json.dumps({"audio_filepath": "d.wav", "words_level_ctm_filepath": name}) + "\n"
    found = annotated("nfa_words", NFA | {"out/m_with_output_file_paths.json": bad + ALIGNED}).records()
    assert sum(isinstance(record, bytes) for record in found) == 2


FORMS = {"textgrid": "TextGrid", "audacity": "txt", "ami": "A.words.xml", "whisper": "json"}


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(("form", "files", "keys", "expected"), READ)
def test_annotations_become_records(form, files, keys, expected, size, annotated):
    source = annotated(form, files, **keys)
    source.check()
    assert brief(read(source, size)) == expected


@pytest.mark.parametrize(
    ("form", "data", "says"),
    [
        ("rttm", "SPEAKER m 1 x 2.00 <NA> <NA> anna <NA> <NA>\n", "not a SPEAKER"),
        ("rttm", "SPEAKER m 1 nan 2.00 <NA> <NA> anna <NA> <NA>\n", "not a SPEAKER"),
        ("rttm", "SPEAKER m 1\n", "not a SPEAKER"),
        ("ctm", "m 1 0.5\n", "not a CTM entry"),
        ("ctm", "m 1 inf 1 yes\n", "not a CTM entry"),
        ("textgrid", "no grid at all", "truncated"),
        ("textgrid", '"ooTextFile" "Pitch" 0 1', "not a TextGrid"),
        ("textgrid", LONG_TEXTGRID[:-200], "truncated"),
        ("textgrid", SHORT_TEXTGRID.replace("1.5", '"1.5"'), "text in place"),
        ("textgrid", SHORT_TEXTGRID.replace('"TextTier"', '"Tier"'), "'Tier'"),
        (
            "textgrid",
            SHORT_TEXTGRID.encode("latin-1").replace(b"yes", b"s\xed"),
            "not valid utf-8; set the key encoding",
        ),
        ("audacity", "0.5 1.5 with blanks\n", "not a label"),
        ("srt", "WEBVTT\n", "has no times"),
        ("ami", "<root/>", "not an AMI words file"),
        ("whisper", "[]", "not a JSON object"),
        ("whisper", "{}", "no list of segments"),
        ("whisper", '{"segments": ' + 9999 * "[", "not a JSON object"),
        ("vtt", "no captions", "has no times"),
    ],
)
def test_what_cannot_be_read_is_one_reject(form, data, says, annotated):
    (row,) = read(annotated(form, {f"bad.{FORMS.get(form, form)}": data}))
    assert row.reason == "malformed"
    assert says in row.detail


MEGABYTE = 1 << 20
SPOKEN = "1\n00:00:01,000 --> 00:00:02,000\n"


@pytest.mark.parametrize(
    ("form", "begin", "repeated", "reads"),
    [
        ("ami", "<nite:root>", "<w ", []),
        ("ami", "<nite:root><w ", "a", []),
        ("srt", SPOKEN, "<i ", [("a.wav", 1.0, 1.0, None)]),
        ("srt", SPOKEN, "{\\", [("a.wav", 1.0, 1.0, None)]),
        ("srt", SPOKEN, "\n ", [("a.wav", 1.0, 1.0, None)]),
        ("srt", "", "9", ["malformed"]),
        ("srt", f"{'9' * 400}:00:00,000 --> 00:00:01,000\n", "x", ["malformed"]),
        ("textgrid", "", '"', ["malformed"]),
        ("ctm", "a A 0 ", "9", ["malformed"]),
        ("rttm", "SPEAKER " + "a" * 400, " 1 0 1 <NA> <NA> b <NA>", [("a" * 400 + ".wav", 0.0, 1.0, "b")]),
    ],
)
def test_hostile_annotations_are_parsed_in_linear_time(form, begin, repeated, reads, annotated):
    text = begin + repeated * (MEGABYTE // len(repeated))
    source = annotated(form, {f"a.{FORMS.get(form, form)}": text})
    started = time.process_time()
    rows = read(source)
    assert time.process_time() - started < 1.0
    assert [row if isinstance(row, str) else row[:4] for row in brief(rows)] == reads


def test_overlaps_of_many_speakers_are_found_quickly(annotated):
    text = "".join(f"SPEAKER m 1 {start} 9999 <NA> <NA> {start} <NA> <NA>\n" for start in range(6000))
    started = time.process_time()
    rows = read(annotated("rttm", {"a.rttm": text}, overlap="drop"))
    assert time.process_time() - started < 1.0
    assert set(brief(rows)) == {"overlapped_speech"}
    assert rows[0].record.startswith("m 0 9999 0")


def test_annotations_in_another_folder(annotated, tmp_path):
    source = annotated("srt", {"en/a.wav": b""}, annotation_root=str(tmp_path / "notes"), annotation_suffix=".en.srt")
    (tmp_path / "notes/en").mkdir(parents=True)
    (tmp_path / "notes/en/a.en.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nyes\n")
    (tmp_path / "notes/en/a.de.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nja\n")
    assert brief(read(source)) == [("en/a.wav", 1.0, 1.0, None, "yes")]


def test_folders_without_annotations_are_refused(annotated, tmp_path):
    with raises(ConfigError, "missing_input", ".rttm", "annotation_suffix"):
        annotated("rttm", {"a.wav": b""}).check()
    with raises(ConfigError, "missing_input", "annotation_root"):
        annotated("rttm", {}, annotation_root=str(tmp_path / "none")).check()


def test_a_tier_that_is_nowhere_is_refused_before_any_work(annotated):
    files = {"a.TextGrid": SHORT_TEXTGRID, "b.TextGrid": "bad"}
    with raises(ConfigError, "unknown_key", "did you mean 'anna - words'"):
        annotated("textgrid", files, tier="ana - words").check()
    one, other = read(annotated("textgrid", files | {"b.TextGrid": SHORT_TEXTGRID.replace("bob", "eve")}, tier="bob*"))
    assert one["text"] == "well"
    assert "no interval tier 'bob*'" in other.detail


def test_one_of_several_tiers_has_to_be_named(annotated):
    several = annotated("textgrid", {"b.TextGrid": SHORT_TEXTGRID})
    with raises(ConfigError, "missing_key", "b.TextGrid has 2 tiers, 'anna - words', 'bob - words'", "or to '*'"):
        several.check()
    (row,) = read(several)
    assert "2 tiers, 'anna - words', 'bob - words'; set tier to one" in row.detail
    only = annotated("textgrid", {"b.TextGrid": long_form([("words", [(0.0, 1.0, "yes")])])})
    only.check()
    assert brief(read(only)) == [("b.wav", 0.0, 1.0, None, "yes")]


@pytest.mark.parametrize(
    "keys",
    [{"audio_root": None}, {"tier": "words"}, {"max_duration": 0.0},
     {"max_gap": -1.0}, {"encoding": "x"}, {"audio": "{speaker}.wav"}, {"audio": "{"}, {"audio_suffixes": []},
     {"annotations": "textgrid", "tier": "*-*"}],
)  # fmt: skip
def test_keys_that_make_no_sense(keys):
    with pytest.raises(ValueError, match=r"."):
        AnnotatedSource(**{"annotations": "rttm", "audio_root": "a"} | keys)


TIMES = st.integers(0, 12)


@given(st.lists(st.tuples(TIMES, TIMES, st.sampled_from(["a", "b", "c", None])), max_size=8))
def test_overlaps_are_those_of_comparing_all_pairs(items):
    stretches = [Stretch("r", begin, begin + length, None, speaker) for begin, length, speaker in items]

    def overlap(one, other):
        apart = one.speaker is None or one.speaker != other.speaker
        return apart and min(one.end, other.end) > max(one.start, other.start)

    assert find_overlaps(stretches) == [
        any(overlap(one, other) for other in stretches if other is not one) for one in stretches
    ]


GRID_TIMES = st.floats(0, 1e6, allow_nan=False).map(lambda seconds: round(seconds, 6))


TEXTS = st.text(st.sampled_from('ab "\n<>=1[]:!é'), max_size=6)


TIERS = st.lists(st.tuples(TEXTS, st.lists(st.tuples(GRID_TIMES, GRID_TIMES, TEXTS), max_size=3)), max_size=3)


def quoted(text):
    return '"' + text.replace('"', '""') + '"'


def long_form(tiers):
    lines = ['File type = "ooTextFile"', 'Object class = "TextGrid"', "", "xmin = 0", "xmax = 9", "tiers? <exists>"]
    lines += [f"size = {len(tiers)}", "item []:"]
    for number, (name, intervals) in enumerate(tiers, 1):
        lines += [f"    item [{number}]:", '        class = "IntervalTier"', f"        name = {quoted(name)}"]
        lines += ["        xmin = 0", "        xmax = 9", f"        intervals: size = {len(intervals)}"]
        for place, (begin, end, text) in enumerate(intervals, 1):
            lines += [f"        intervals [{place}]:", f"            xmin = {begin}", f"            xmax = {end}"]
            lines += [f"            text = {quoted(text)} "]
    return "\n".join(lines)


def short_form(tiers):
    lines = ['File type = "ooTextFile"', 'Object class = "TextGrid"', "", "0", "9", "<exists>", str(len(tiers))]
    for name, intervals in tiers:
        lines += ['"IntervalTier"', quoted(name), "0", "9", str(len(intervals))]
        lines += [word for begin, end, text in intervals for word in (str(begin), str(end), quoted(text))]
    return "\n".join(lines)


@given(tiers=TIERS, form=st.sampled_from([long_form, short_form]))
def test_both_forms_are_read_back(tiers, form):
    assert parse_textgrid(form(tiers)) == tiers


@pytest.mark.parametrize("form", [long_form, short_form])
def test_a_file_that_is_cut_off_anywhere_is_refused(form):
    text = form(
        [("words", [(0.0, 1.5, "good day 5"), (1.5, 2.0, "")]), ("", []), ("phones", [(0.25, 9.0, "x")])]
    ).strip()
    for end in range(len(text)):
        with pytest.raises(ValueError, match=r"."):
            parse_textgrid(text[:end])
    assert len(parse_textgrid(text)) == 3

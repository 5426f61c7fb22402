"""Speaker tags from plain names and templates."""

import math

import pytest
from hypothesis import given, strategies as st
from support.project import raises

from sharmill.errors import RejectRecord
from sharmill.manifest import parse_speaker_tag
from sharmill.sources.speakers import SpeakerRule, Template, canonical_name, find_tag

PATH = "anna/session 1/1688-142285_0000.flac"
TAG = "| Language:de Dataset:X Speaker:eva Emotion:calm |"


def made(record, template=None, path=PATH):
    rule = SpeakerRule(Template(template) if template else None, "und", "small")
    tag = rule.make_tag(record, path)
    return None if tag is None else str(tag)


@pytest.mark.parametrize(
    ("template", "record", "name"),
    [
        ("{speaker}", {"speaker": "84"}, "84"),
        ("{speaker}", {"speaker": 84}, "84"),
        ("{path[0]}", {}, "anna"),
        ("{path[-1]}", {}, "1688-142285_0000"),
        ("{path[-1]:prefix}", {}, "1688"),
        ("{utt:prefix}", {"utt": "BAC009_S0002"}, "BAC009"),
        ("{utt:prefix}", {"utt": "plain"}, "plain"),
        ("{id[0]}", {"id": "10148_10119_000000"}, "10148"),
        ("{id[0]}-{id[1]}", {"id": "0-1000007_0"}, "0-1000007"),
        ("{id[-1]}", {"id": 84}, "84"),
        ("spk-{path[0]}_{session}", {"session": 0}, "spk-anna_0"),
        ("one", {}, "one"),
    ],
)
def test_template(template, record, name):
    assert Template(template).fill(record, PATH) == name


@pytest.mark.parametrize(
    "template", ["", " ", "{", "a}", "{}", "{path}", "{path[x]}", "{key[x]}", "{key:suffix}", "{{a}}"]
)
def test_what_is_no_template(template):
    with pytest.raises(ValueError, match="template"):
        Template(template)


@pytest.mark.parametrize(
    ("template", "record"),
    [
        ("{spk}", {}),
        ("{spk}", {"spk": None}),
        ("{spk}", {"spk": " "}),
        ("{spk}", {"spk": True}),
        ("{spk}", {"spk": 1.5}),
        ("{spk}", {"spk": 10**5000}),
        ("{spk}", {"spk": ["a"]}),
        ("{spk:prefix}", {"spk": "unknown-0001"}),
        ("{spk:prefix}", {"spk": "-a"}),
        ("{id[3]}", {"id": "10148_10119_000000"}),
        ("{id[1]}", {"id": "a-unknown"}),
        ("{path[3]}", {}),
        ("{path[-4]}", {}),
        ("{speaker}", {"speaker": "| Speaker:x |"}),
        *(
            (None, {"speaker": tag})
            for tag in ("||", "| Language:en Speaker:x |", "| Language:en Dataset: Speaker:x |", "| x |")
        ),
    ],
)
def test_a_field_without_a_value_and_a_bad_tag_are_bad_speakers(template, record):
    with raises(RejectRecord, "bad_speaker"):
        made(record, template)


@pytest.mark.parametrize(
    ("template", "record", "tag"),
    [
        (None, {"speaker": TAG}, TAG),
        (None, {"speaker": f" {TAG}\n", "language": "fr"}, TAG),
        (None, {"speaker": "84"}, "| Language:und Dataset:small Speaker:84 |"),
        (None, {"speaker": 84}, "| Language:und Dataset:small Speaker:84 |"),
        (None, {"speaker": " 84 ", "lang": "fr"}, "| Language:fr Dataset:small Speaker:84 |"),
        (None, {"speaker": "84", "language": "it", "lang": "fr"}, "| Language:it Dataset:small Speaker:84 |"),
        (None, {"speaker": "84", "language": "N/A", "lang": "fr"}, "| Language:fr Dataset:small Speaker:84 |"),
        (None, {"speaker": "84", "language": -1}, "| Language:und Dataset:small Speaker:84 |"),
        (None, {"speaker": "84", "language": "nan"}, "| Language:nan Dataset:small Speaker:84 |"),
        (None, {"speaker": "84", "language": math.nan}, "| Language:und Dataset:small Speaker:84 |"),
        (None, {"speaker": "| Language:None Dataset:N/A Speaker:eva |"}, "| Language:und Dataset:small Speaker:eva |"),
        (None, {"speaker": "| Language:en Dataset:X Speaker:N/A |"}, None),
        (None, {"speaker": "| Language:en Dataset:X Speaker:Unknown Speaker |"}, None),
        (None, {"speaker": ""}, None),
        (None, {"speaker": None}, None),
        (None, {}, None),
        ("{speaker}", {"speaker": TAG}, TAG),
        ("{speaker}_{session}", {"speaker": TAG, "session": 3}, TAG.replace("eva", "eva_3")),
    ],
)
def test_tag_of_a_record(template, record, tag):
    assert made(record, template) == tag


NOBODY = [
    "", " ", "-", "--", "?", "n/a", "N/A", "#N/A", "<NA>", "na", "NA", "None", "none", "NULL", "nan", "NaN", "nil",
    "unknown", "Unknown Speaker", "UNK", "<unk>", "[unknown]", "spk_unknown", "undefined", "anonymous", "-1", "-1.0",
    "\\N", -1, math.nan, None,
]  # fmt: skip


@pytest.mark.parametrize("value", NOBODY)
def test_placeholders_are_no_speaker(value):
    assert made({"speaker": value}) is None
    with pytest.raises(RejectRecord, match="bad_speaker"):
        made({"spk": value}, "{spk}")


@pytest.mark.parametrize(
    "value", ["Na", "Nan", "Nil", "Null", "nana", "Nona", "unknown_1", "speaker", "0", 0, "N", "\u674e"]
)
def test_names_that_are_like_placeholders_are_kept(value):
    assert made({"speaker": value}).endswith(f" Speaker:{value} |")


@pytest.mark.parametrize("record", [{"speaker": "a", "language": value} for value in (4, "4", False, ["en"], 1.5)])
def test_a_language_that_is_no_text_is_malformed(record):
    with pytest.raises(RejectRecord, match="malformed: language is"):
        made(record)


def test_a_tag_with_blanks_in_a_name():
    tag = find_tag("| Language:en Dataset:X Speaker:John  Smith Emotion:very calm |")
    assert (tag.language, tag.dataset) == ("en", "X")
    assert tag.speaker == canonical_name("John  Smith")
    assert tag.further == (f"Emotion:{canonical_name('very calm')}",)


@given(st.lists(st.text(st.sampled_from("ab_-%:|é \t\u3000"), min_size=1), min_size=2, max_size=6))
def test_no_two_names_become_one(names):
    names = {name.strip() for name in names if name.strip()}
    made = {canonical_name(name) for name in names}
    assert len(made) == len(names)
    for name in made:
        assert parse_speaker_tag(f"| Language:en Dataset:X Speaker:{name} |").speaker == name

"""Speaker tags made of plain names and of templates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharmill.errors import RejectRecord
from sharmill.sources.speakers import SpeakerRule, Template, canonical_name, find_tag
from sharmill.speaker_tag import parse_speaker_tag

PATH = "anna/session 1/1688-142285_0000.flac"
TAG = "| Language:de Dataset:X Speaker:eva Emotion:calm |"


def made(record, template=None, path=PATH):
    rule = SpeakerRule(Template.parse(template) if template else None, "und", "small")
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
        ("spk-{path[0]}_{session}", {"session": 0}, "spk-anna_0"),
        ("one", {}, "one"),
    ],
)
def test_template(template, record, name):
    assert Template.parse(template).fill(record, PATH) == name


@pytest.mark.parametrize(
    "template", ["", " ", "{", "a}", "{}", "{path}", "{key[0]}", "{path[x]}", "{key:suffix}", "{{a}}"]
)
def test_what_is_no_template(template):
    with pytest.raises(ValueError, match="template"):
        Template.parse(template)


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
        ("{spk:prefix}", {"spk": "-a"}),
        ("{path[3]}", {}),
        ("{path[-4]}", {}),
        ("{speaker}", {"speaker": "| Speaker:x |"}),
    ],
)
def test_a_field_without_a_value_is_a_bad_speaker(template, record):
    with pytest.raises(RejectRecord) as caught:
        made(record, template)
    assert caught.value.reason == "bad_speaker"


@pytest.mark.parametrize(
    ("record", "tag"),
    [
        ({"speaker": TAG}, TAG),
        ({"speaker": f" {TAG}\n", "language": "fr"}, TAG),
        ({"speaker": "84"}, "| Language:und Dataset:small Speaker:84 |"),
        ({"speaker": 84}, "| Language:und Dataset:small Speaker:84 |"),
        ({"speaker": " 84 ", "lang": "fr"}, "| Language:fr Dataset:small Speaker:84 |"),
        ({"speaker": "84", "language": "it", "lang": "fr"}, "| Language:it Dataset:small Speaker:84 |"),
        ({"speaker": "84", "language": 3}, "| Language:und Dataset:small Speaker:84 |"),
        ({"speaker": ""}, None),
        ({"speaker": None}, None),
        ({}, None),
    ],
)
def test_tag_of_a_record(record, tag):
    assert made(record) == tag


def test_a_template_makes_the_name_only_where_the_record_has_a_tag():
    assert made({"speaker": TAG}, "{speaker}") == TAG
    assert made({"speaker": TAG, "session": 3}, "{speaker}_{session}") == TAG.replace("eva", "eva_3")


@pytest.mark.parametrize("tag", ["||", "| Language:en Speaker:x |", "| Language:en Dataset: Speaker:x |", "| x |"])
def test_a_tag_that_is_none_is_no_name(tag):
    with pytest.raises(RejectRecord) as caught:
        made({"speaker": tag})
    assert caught.value.reason == "bad_speaker"


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


def test_a_name_without_blanks_stays_as_it_is():
    assert canonical_name("a%20b") == "a%20b"


def test_the_nearest_key():
    template = Template.parse("{path[0]}{spk}")
    assert template.find_unknown([{"speaker": 1}, {"spk": 2}]) is None
    assert template.find_unknown([]) is None
    assert template.find_unknown([{"speaker": 1}, {"text": 2}]) == ("spk", ["speaker", "text"])

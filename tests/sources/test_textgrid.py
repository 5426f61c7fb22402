"""TextGrid files in both forms, with any texts and times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharmill.sources.annotations import Tier, parse_textgrid

TIMES = st.floats(0, 1e6, allow_nan=False).map(lambda seconds: round(seconds, 6))
TEXTS = st.text(st.sampled_from('ab "\n<>=1[]:!é'), max_size=6)
TIERS = st.lists(st.tuples(TEXTS, st.lists(st.tuples(TIMES, TIMES, TEXTS), max_size=3)), max_size=3)


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
    assert parse_textgrid(form(tiers)) == [Tier(name, intervals) for name, intervals in tiers]


@pytest.mark.parametrize("form", [long_form, short_form])
def test_a_file_that_is_cut_off_anywhere_is_refused(form):
    text = form(
        [("words", [(0.0, 1.5, "good day 5"), (1.5, 2.0, "")]), ("", []), ("phones", [(0.25, 9.0, "x")])]
    ).strip()
    for end in range(len(text)):
        with pytest.raises(ValueError, match=r"."):
            parse_textgrid(text[:end])
    assert len(parse_textgrid(text)) == 3


@pytest.mark.parametrize("text", ["", '"ooTextFile"', '"ooTextFile" "TextGrid" 0 1 <exists> 1e999', '"ooTextFile" 3'])
def test_no_textgrid(text):
    with pytest.raises(ValueError, match=r"."):
        parse_textgrid(text)

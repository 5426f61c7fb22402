"""Every record of the input has exactly one outcome."""

import json
from collections import Counter

from hypothesis import given, settings, strategies as st
from support.project import examples

from sharmill.errors import REASONS

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**310)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text("ab", max_size=2), children, max_size=3),
    max_leaves=6,
)
PATHS = st.sampled_from([
    "a.wav", "b.wav", "deep/c.flac", "./a.wav", "none.wav", "text.wav", "folder.wav", "fifo.wav", "stereo.wav",
    "no_bytes.wav", "no_samples.wav", "link_out.wav", "link_in.wav", "link_loop.wav", "../outside.wav", "/a.wav",
    "pipe:ls", "ls |", "", "..", ".", "\x00", "x" * 300,
])  # fmt: skip
ODD_VALUES = {
    "audio_filepath": PATHS | VALUES,
    "duration": st.sampled_from([2.0, 2, 0.05, 0, 1.5, 60, 1e308, -1, 10**400]) | VALUES,
    "offset": st.sampled_from([0, 0.5, 0.501, 1.99, 2.0, 1e308, -0.0, -1]) | VALUES,
    "speaker": st.sampled_from(["| Language:de Dataset:X Speaker:eva |", "eva", "||"]) | VALUES,
    "text": VALUES,
    "normalized_text": VALUES,
    "_skipme": VALUES,
    "channel": st.sampled_from([0, 1, 2, "downmix"]) | VALUES,
    "tts_text": VALUES,
    "cer": VALUES,
    "_index": VALUES,
}
LINES = st.sampled_from(
    [b"%d {", b"[%d]", b'"%d"', b"%d", b'{"number": %d, "more": NaN}', b'{"%d": "\xff"}', b"{%d:" + b"[" * 2000]
)


@st.composite
def inputs(draw):
    """Lines of a manifest that contain their numbers; about half of the records are good."""
    lines = []
    for number in range(draw(st.integers(1, 12))):
        if draw(st.integers(0, 5)) == 0:
            lines.append(draw(LINES) % number)
            continue
        good = {
            "audio_filepath": "a.wav", "duration": 2.0, "text": "x", "number": number,
            "speaker": "| Language:en Dataset:Tests Speaker:anna |",
        }  # fmt: skip
        keys = draw(st.sets(st.sampled_from(sorted(ODD_VALUES)), max_size=2))
        odd = {key: draw(ODD_VALUES[key]) for key in sorted(keys)}
        lines.append(json.dumps(good | odd).encode())
    # A manifest must neither end with a partial record nor look like an array.
    return [b'{"number": -1}', *lines, b'{"number": -2}']


def number_of(record):
    """The number in a rejected record: parsed, or the text of the line."""
    if isinstance(record, dict):
        return record["number"]
    return int("".join(character for character in record if character.isdigit()))


@settings(max_examples=examples(150), deadline=None)
@given(lines=inputs(), unit_records=st.integers(1, 5), filtered=st.booleans(), require_text=st.booleans())
def test_in_equals_out_and_rejects(lines, unit_records, filtered, require_text, prepare_records, tmp_path_factory):
    prepared = prepare_records(
        tmp_path_factory.mktemp("accounting"),
        lines,
        unit_records=unit_records,
        filters={"cer": "<= 0.5"} if filtered else {},
        require_text=require_text,
    )
    kept, rejects, totals = prepared.kept, prepared.rejects, prepared.result.totals
    ended = Counter(u.custom["number"] for u in kept) + Counter(number_of(r["record"]) for r in rejects)
    assert ended == Counter(range(-2, len(lines) - 2))
    assert (totals.num_in, totals.num_out, totals.num_rejected) == (len(lines), len(kept), len(rejects))
    assert totals.rejects == Counter(reject["reason"] for reject in rejects)
    assert totals.rejects.keys() <= REASONS.keys()
    assert len({utterance.cut_id for utterance in kept}) == len(kept)
    check_stats(prepared)


def check_stats(prepared):
    stats, totals = prepared.stats, prepared.result.totals
    assert (stats["records_in"], stats["records_out"], stats["rejects"]) == (
        totals.num_in,
        totals.num_out,
        totals.rejects,
    )
    for dimension in ("by_dataset", "by_language", "by_speaker"):
        for key in ("records_in", "records_out"):
            assert sum(cell[key] for cell in stats[dimension].values()) == stats[key]

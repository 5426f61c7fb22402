"""``stats.json``: counts by reason, hours before and after, in all and by dataset, language and speaker."""

import pytest
from support.project import make_record, speaker_tag


def cell(records_in, records_out, hours_in, hours_out):
    return {"records_in": records_in, "records_out": records_out, "hours_in": hours_in, "hours_out": hours_out}


def test_values(prepare_records, tmp_path):
    german = "| Language:de Dataset:Other Speaker:eva |"
    prepared = prepare_records(
        tmp_path,
        [
            make_record(),  # 2 s
            make_record(speaker=speaker_tag("bert"), offset=0.0, duration=1.8),
            make_record(speaker=german, offset=0.2, duration=0.36),
            make_record(speaker=german, audio_filepath="none.wav", duration=36),
            make_record(speaker="| nobody |", duration=3.6),
            make_record(),
            b"no JSON",
            make_record(duration="long"),
        ],
    )
    assert prepared.stats == {
        **cell(8, 3, round((2 + 1.8 + 0.36 + 36 + 3.6 + 2) / 3600, 6), round((2 + 1.8 + 0.36) / 3600, 6)),
        "rejects": {"bad_speaker": 1, "duplicate_id": 1, "malformed": 2, "missing_audio": 1},
        "tag_from": {"tag": 4},
        "duration_from": {"record": 4},
        "nan_as_null": {},
        "by_dataset": {
            "(unknown)": cell(2, 0, 0.001, 0.0),
            "Other": cell(2, 1, 0.0101, 0.0001),
            "Tests": cell(4, 2, round(5.8 / 3600, 6), round(3.8 / 3600, 6)),
        },
        "by_language": {
            "(unknown)": cell(2, 0, 0.001, 0.0),
            "de": cell(2, 1, 0.0101, 0.0001),
            "en": cell(4, 2, round(5.8 / 3600, 6), round(3.8 / 3600, 6)),
        },
        "by_speaker": {
            "(unknown)": cell(2, 0, 0.001, 0.0),
            "anna": cell(3, 1, round(4 / 3600, 6), round(2 / 3600, 6)),
            "bert": cell(1, 1, 0.0005, 0.0005),
            "eva": cell(2, 1, 0.0101, 0.0001),
        },
    }


@pytest.mark.parametrize(
    "duration",
    [1e300, 10**400, -5, True, "9", []],
    ids=["float", "integer", "negative", "bool", "text", "list"],
)
def test_what_is_no_duration_does_not_enter_the_hours(duration, prepare_records, tmp_path):
    bad = make_record(duration=duration)
    prepared = prepare_records(tmp_path, [bad, bad, make_record(duration=3.6, offset=0.0)])
    assert prepared.stats["hours_in"] == 0.001

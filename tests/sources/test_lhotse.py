"""lhotse manifests as records: kinds of cuts and of audio, pieces, and lines and files that cannot be read."""

import gzip
import json
import math

import pytest
from support.sources import read, read_raw

from sharmill.sources import UnreadableRecord, notes_of, record_text
from sharmill.sources.lhotse import LhotseSource


def recording(name="r", path="a.wav", seconds=10.0, **changes):
    """A line of a RecordingSet."""
    sources = [{"type": "file", "channels": [0], "source": path}]
    return {"id": name, "sources": sources, "sampling_rate": 16000, "num_samples": round(seconds * 16000),
            "duration": seconds, "channel_ids": [0]} | changes  # fmt: skip


def supervision(name="s", start=0.0, duration=10.0, **changes):
    """A line of a SupervisionSet, or a supervision of a cut."""
    return {"id": name, "recording_id": "r", "start": start, "duration": duration, "channel": 0, "text": name.upper(),
            "speaker": "anna"} | changes  # fmt: skip


def cut(*supervisions, start=0.0, duration=10.0, **changes):
    """A line of a CutSet."""
    return {"id": "c", "start": start, "duration": duration, "channel": 0, "supervisions": list(supervisions),
            "recording": recording(), "type": "MonoCut"} | changes  # fmt: skip


def stereo(*names):
    """The sources of a two-channel recording: one file with both channels, or a file for each."""
    if len(names) == 1:
        return [{"type": "file", "channels": [0, 1], "source": names[0]}]
    return [{"type": "file", "channels": [channel], "source": name} for channel, name in enumerate(names)]


def write(path, lines, end="\n"):
    data = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + end.encode() for line in lines)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


@pytest.fixture
def cuts(tmp_path):
    """Return a function from lines and keys to the source of a CutSet."""

    def make(*lines, name="cuts.jsonl", end="\n", **keys):
        return LhotseSource(cuts=write(tmp_path / name, lines, end), audio_root="audio", **keys)

    return make


@pytest.fixture
def joined(tmp_path):
    """Return a function from recordings, supervisions and keys to the source of both sets."""

    def make(recordings, supervisions, suffix=".jsonl", **keys):
        files = {
            "recordings": write(tmp_path / f"r{suffix}", recordings),
            "supervisions": write(tmp_path / f"s{suffix}", supervisions),
        }
        return LhotseSource(**files, audio_root="audio", **keys)

    return make


def reason(source):
    (row,) = read(source)
    assert isinstance(row, UnreadableRecord), row
    return row.reason, row.detail


@pytest.mark.parametrize("name", ["cuts.jsonl", "cuts.jsonl.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_a_cut_with_one_supervision(name, end, cuts):
    own = {"snr": 3, "recording": recording(), "codes": {"array": {"storage_type": "lilcom_chunky"}}}
    said = supervision(start=0.5, duration=2.0, gender="f", language="English", custom=own)
    source = cuts(cut(said, start=1.25, duration=3.0, custom={"split": "a", "offset": 7}), name=name, end=end)
    source.check()
    assert read(source) == [
        {"utterance_id": "s", "split": "a", "snr": 3, "speaker": "anna", "language": "English", "gender": "f",
         "text": "S", "source_offset": 7, "audio_filepath": "a.wav", "offset": 1.25, "duration": 3.0}
    ]  # fmt: skip


TWO_SPEAKERS = [supervision("a", 0.5, 1.0), supervision("b", 2.0, 1.5, speaker="bob")]
SLIGHTLY_BEYOND = cut(supervision(start=-0.05, duration=3.1), start=1.0, duration=3.0)
A_SECOND_IN = {"utterance_id": "s", "speaker": "anna", "text": "S", "audio_filepath": "a.wav", "offset": 1.0,
               "duration": 3.0}  # fmt: skip
WHOLE = {"utterance_id": "c", "audio_filepath": "a.wav", "duration": 10.0}
# A line of a CutSet, split, and the records.
GOOD = {
    "the whole recording has no offset": (cut(), False, [WHOLE]),
    "resampling changes no times": (
        cut(recording=recording(transforms=[{"name": "Resample"}], sampling_rate=8000, num_samples=80000)),
        False, [WHOLE],
    ),
    "supervisions of one speaker are joined in the order of time": (
        cut(supervision("b", 2.0, 1.0, custom={"x": 1, "y": 1}), supervision("a", 0.5, 1.0, custom={"x": 1, "y": 2}),
            duration=4.0),
        False,
        [{"utterance_id": "c", "x": 1, "speaker": "anna", "text": "A B", "audio_filepath": "a.wav", "offset": 0.0,
          "duration": 4.0}],
    ),
    "several speakers": (
        cut(*TWO_SPEAKERS, start=3.0, duration=6.0), True,
        [{"utterance_id": "a", "speaker": "anna", "text": "A", "audio_filepath": "a.wav", "offset": 3.5,
          "duration": 1.0},
         {"utterance_id": "b", "speaker": "bob", "text": "B", "audio_filepath": "a.wav", "offset": 5.0,
          "duration": 1.5}],
    ),
    "slightly beyond the cut": (SLIGHTLY_BEYOND, False, [A_SECOND_IN]),
    "slightly beyond the cut, split": (SLIGHTLY_BEYOND, True, [A_SECOND_IN]),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_records_of_a_cut(name, cuts):
    line, split, expected = GOOD[name]
    assert read(cuts(line, split=split)) == expected


MARK = {"_skipme": True}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "line",
    [
        cut(supervision("a", 0.5, 1.0, custom={"_skipme": False}), custom=MARK),
        cut(supervision("a", 0.5, 1.0, custom=MARK), supervision("b", 2.0, 1.0)),
        cut(supervision("a", 0.5, 1.0, custom={"custom": MARK})),
    ],
    ids=["the cut", "one supervision of two", "in custom of custom"],
)
def test_marks_of_cuts_and_supervisions_are_obeyed(line, split, cuts):
    rows = read(cuts(line, split=split))
    assert isinstance(rows[0], UnreadableRecord)
    assert rows[0].reason == "skipped"
    assert [row["utterance_id"] for row in rows[1:]] == ["b"] * (len(rows) - 1)


@pytest.mark.parametrize("name", ["cuts.jsonl", "cuts.jsonl.gz"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
def test_pieces_divide_cuts(size, name, cuts):
    said = [supervision(str(number), number, 1.0) for number in range(5)]
    lines = [cut(*said[:3]), b"{}", cut(), b"no", cut(*said, type="MixedCut"), cut(*said)]
    source = cuts(*lines, name=name, split=True)
    rows = read(source, size)
    assert [row.reason if isinstance(row, UnreadableRecord) else row["utterance_id"] for row in rows] == [
        "0", "1", "2", "malformed", "c", "malformed", *["unsupported_cut"] * 5, "0", "1", "2", "3", "4",
    ]  # fmt: skip
    assert max(piece.num_records for piece in source.pieces(size)) <= size


# Invalid lines of a CutSet, the value of ``split``, and the reject.
BAD = [
        (cut(recording=recording(transforms=[{"name": "Speed", "kwargs": {"factor": 1.1}}])), "unsupported_cut", "Spe"),
        (cut(recording=recording(transforms=[{"name": "Volume", "kwargs": {}}])), "unsupported_cut", "save_audios"),
        ({"id": "c", "tracks": [], "type": "MixedCut"}, "unsupported_cut", "MixedCut"),
        (cut(supervision(start=-0.05, duration=3.35), start=1.0, duration=3.0), "duration_mismatch", "0.3 s beyond"),
        ({"id": "c", "duration": 1.0, "sampling_rate": 16000, "type": "PaddingCut"}, "unsupported_cut", "PaddingCut"),
        (cut(type="DataCut"), "unsupported_cut", "DataCut"),
        (cut(recording=None), "missing_field", "no recording"),
        (cut(recording=recording(sources=[{"type": "command", "channels": [0], "source": "touch x"}])), "outside_root",
         "command"),
        (cut(recording=recording(sources=[{"type": "shar", "channels": [0], "source": ""}])), "unsupported_cut",
         "of a Shar"),
        (cut(recording=recording(sources=[{"type": "memory", "channels": [0], "source": "AAAA"}])),
         "unsupported_cut", "inside the manifest"),
        (cut(recording=recording(sources=[{"type": "tape", "channels": [0], "source": "a"}])), "malformed", "'tape'"),
        (cut(recording=recording(sources=[{"type": "file", "channels": [0], "source": 3}])), "malformed", "no path"),
        (cut(channel=1), "malformed", "channel 1"),
        (cut(recording=recording(sources=[])), "malformed", "channel 0"),
        (b'{"id": 3}', "malformed", "a lhotse cut"),
        (b'{"id": "c", "supervisions": null}', "malformed", "a lhotse cut"),
        (b'{"id": "c", "start": NaN}', "malformed", "a lhotse cut"),
        (cut(recording=recording(sampling_rate=10**400)), "malformed", "a lhotse cut"),
        (json.dumps(cut(supervision(text="\ud800"))).encode(), "malformed", "a lhotse cut"),
        (json.dumps(cut(supervision(text="\ud800"), custom={"snr": math.nan})).encode(), "malformed", "a lhotse cut"),
        (b"[]", "malformed", "a lhotse cut"),
        (b"[" * 5000, "malformed", "a lhotse cut"),
        (json.dumps(cut(supervision(text="gr\u00fcn")), ensure_ascii=False).encode("latin-1"), "malformed", "cut"),
]  # fmt: skip
BAD_CUTS = [
    (cut(*TWO_SPEAKERS), False, "unsupported_cut", "2 speakers; set split: true"),
    *((line, split, *expected) for line, *expected in BAD for split in (False, True)),
]


@pytest.mark.parametrize(("line", "split", "expected", "says"), BAD_CUTS)
def test_cuts_that_are_no_records(line, split, expected, says, cuts):
    found = reason(cuts(line, split=split))
    assert (found[0], says in found[1]) == (expected, True)


def test_nan_of_custom_keys_stays_and_is_none_of_times(cuts, joined):
    lacking = {"custom": {"snr": math.nan}}
    for source in (cuts(cut(**lacking)), joined([recording()], [supervision(**lacking)])):
        (row,) = read(source)
        assert math.isnan(row["snr"])
    assert "start is NaN" in reason(joined([recording()], [supervision(start=math.nan)]))[1]


BOTH = {"recording": recording(sources=stereo("both.wav"), channel_ids=[0, 1])}
EACH = {"recording": recording(sources=stereo("left.wav", "right.wav"), channel_ids=[0, 1])}
OF_TWO = {"type": "MultiCut", "channel": [0, 1]}
TWO_CHANNELS = [supervision("a", channel=[1]), supervision("b", channel=[0, 1])]
# A cut, the channel that the source selects, and for each record the file and channel, or the reason of its reject.
CHANNELS = [
    (cut(**BOTH), None, [("both.wav", 0)]),
    (cut(**BOTH, channel=1), None, [("both.wav", 1)]),
    (cut(**EACH | OF_TWO), None, ["unsupported_channels"]),
    (cut(**EACH | OF_TWO), 0, [("left.wav", None)]),
    (cut(**EACH | OF_TWO), 1, [("right.wav", None)]),
    (cut(**EACH | OF_TWO), 2, ["unsupported_channels"]),
    (cut(**EACH | OF_TWO), "downmix", ["unsupported_channels"]),
    (cut(**BOTH | OF_TWO), "downmix", [("both.wav", "downmix")]),
    (cut(*TWO_CHANNELS, **BOTH | OF_TWO), None, [("both.wav", 1), "unsupported_channels"]),
]


@pytest.mark.parametrize(("line", "chosen", "expected"), CHANNELS)
def test_channels(line, chosen, expected, cuts):
    rows = read(cuts(line, channel=chosen, split=True))
    found = [
        row.reason if isinstance(row, UnreadableRecord) else (row["audio_filepath"], row.get("channel")) for row in rows
    ]
    assert found == expected


@pytest.mark.parametrize(("chosen", "text"), [(0, "A B"), (1, "B C"), ("downmix", "A B C")])
def test_texts_are_those_of_the_chosen_channel(chosen, text, cuts):
    channels = {"a": 0, "b": [0, 1], "c": 1}
    said = [supervision(name, start, 1.0, channel=channels[name]) for start, name in enumerate(channels)]
    (raw,) = read_raw(cuts(cut(*said, **BOTH | OF_TWO), channel=chosen))
    named = (
        [] if chosen == "downmix" else ["records have supervisions of other channels, which the dataset does not store"]
    )
    assert (json.loads(record_text(raw))["text"], list(notes_of(raw))) == (text, named)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_supervisions_with_their_recordings(suffix, joined):
    recordings = [recording(f"r{number}", f"{number}.wav") for number in range(600)]
    said = [supervision(f"s{n}", 1.0, 2.5, recording_id=f"r{n * 7919 % 600}", custom={"n": n}) for n in range(600)]
    source = joined(recordings, said, suffix)
    source.check()
    rows = read(source, 7)
    assert [row["audio_filepath"] for row in rows] == [f"{number * 7919 % 600}.wav" for number in range(600)]
    assert rows[3] == {"utterance_id": "s3", "n": 3, "speaker": "anna", "text": "S3", "audio_filepath": "357.wav",
                       "offset": 1.0, "duration": 2.5}  # fmt: skip


def test_recordings_alone(tmp_path):
    both = recording("two", sources=stereo("left.wav", "right.wav"))
    path = write(tmp_path / "recordings.jsonl.gz", [recording("one", "a.wav", 2.5), both, b"{}"])
    source = LhotseSource(recordings=path, audio_root="audio", channel=1)
    source.check()
    one, two, bad = read(source)
    assert one == {"utterance_id": "one", "audio_filepath": "a.wav", "duration": 2.5}
    assert (two["audio_filepath"], bad.reason) == ("right.wav", "malformed")

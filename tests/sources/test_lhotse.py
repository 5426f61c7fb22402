"""lhotse manifests as records: kinds of cuts and of audio, pieces, and lines and files that cannot be read."""

from __future__ import annotations

import base64
import gzip
import json
import pickle

import pytest
from lhotse import Recording, RecordingSet
from support.errors import raises
from support.manifests import config_for, run_prepare, write_tone
from support.source_rows import read

from sharmill.errors import ConfigError
from sharmill.sources import Unreadable
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
    """The sources of a recording of two channels: one file of both, or a file for each."""
    if len(names) == 1:
        return [{"type": "file", "channels": [0, 1], "source": names[0]}]
    return [{"type": "file", "channels": [channel], "source": name} for channel, name in enumerate(names)]


def write(path, lines, end="\n"):
    data = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + end.encode() for line in lines)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


@pytest.fixture
def cuts(tmp_path):
    """Returns a function: lines, keys -> the source of a CutSet."""

    def make(*lines, name="cuts.jsonl", end="\n", **keys):
        return LhotseSource(cuts=write(tmp_path / name, lines, end), audio_root="audio", **keys)

    return make


@pytest.fixture
def joined(tmp_path):
    """Returns a function: recordings, supervisions, keys -> the source of both sets."""

    def make(recordings, supervisions, suffix=".jsonl", **keys):
        files = {
            "recordings": write(tmp_path / f"r{suffix}", recordings),
            "supervisions": write(tmp_path / f"s{suffix}", supervisions),
        }
        return LhotseSource(**files, audio_root="audio", **keys)

    return make


def reason(source):
    (row,) = read(source)
    assert isinstance(row, Unreadable), row
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
         "text": "S", "audio_filepath": "a.wav", "offset": 1.25, "duration": 3.0}
    ]  # fmt: skip


def test_the_whole_recording_has_no_offset(cuts):
    assert read(cuts(cut())) == [{"utterance_id": "c", "audio_filepath": "a.wav", "duration": 10.0}]


def test_supervisions_of_one_speaker_are_joined_in_the_order_of_time(cuts):
    said = [supervision("b", 2.0, 1.0, custom={"x": 1, "y": 1}), supervision("a", 0.5, 1.0, custom={"x": 1, "y": 2})]
    (record,) = read(cuts(cut(*said, duration=4.0)))
    assert (record["text"], record["speaker"], record["x"]) == ("A B", "anna", 1)
    assert "y" not in record
    assert record["utterance_id"] == "c"


def test_several_speakers_need_split(cuts):
    said = [supervision("a", 0.5, 1.0), supervision("b", 2.0, 1.5, speaker="bob")]
    found = reason(cuts(cut(*said)))
    assert found[0] == "unsupported_cut"
    assert "2 speakers; split: true" in found[1]
    one, other = read(cuts(cut(*said, start=3.0, duration=6.0), split=True))
    assert (one["offset"], one["duration"], one["speaker"], one["utterance_id"]) == (3.5, 1.0, "anna", "a")
    assert (other["offset"], other["duration"], other["speaker"], other["utterance_id"]) == (5.0, 1.5, "bob", "b")


@pytest.mark.parametrize("name", ["cuts.jsonl", "cuts.jsonl.gz"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
def test_pieces_of_equal_size_divide_cuts(size, name, cuts):
    said = [supervision(str(number), number, 1.0) for number in range(5)]
    lines = [cut(*said[:3]), b"{}", cut(), b"no", cut(*said, type="MixedCut"), cut(*said)]
    source = cuts(*lines, name=name, split=True)
    rows = read(source, size)
    assert [row.reason if isinstance(row, Unreadable) else row["utterance_id"] for row in rows] == [
        "0", "1", "2", "malformed", "c", "malformed", *["unsupported_cut"] * 5, "0", "1", "2", "3", "4",
    ]  # fmt: skip
    assert {piece.num_records for piece in list(source.pieces(size))[:-1]} <= {size}


def test_pieces_are_read_in_any_order_and_by_copies_of_the_source(cuts):
    source = cuts(*[cut(supervision(str(number))) for number in range(6)], name="cuts.jsonl.gz")
    pieces = [piece.params for piece in source.pieces(2)]
    first = [list(source.read(piece)) for piece in pieces]
    copy = pickle.loads(pickle.dumps(source))
    assert [list(copy.read(piece)) for piece in reversed(pieces)] == first[::-1]


def test_lhotse_itself_stores_no_recordings_in_memory_as_lines(tmp_path):
    """So there is nothing to read but lines that somebody else made, which are rejected."""
    write_tone(tmp_path / "a.wav")
    held = Recording.from_file(tmp_path / "a.wav").move_to_memory()
    with pytest.raises(TypeError, match="bytes"):
        RecordingSet.from_recordings([held]).to_file(tmp_path / "r.jsonl")
    text = base64.b64encode((tmp_path / "a.wav").read_bytes()).decode()
    made = Recording.from_dict(held.to_dict() | {"sources": [{"type": "memory", "channels": [0], "source": text}]})
    with pytest.raises(Exception, match="memory"):
        made.load_audio()


@pytest.mark.parametrize("end", [0.05, 0.3])
def test_a_supervision_beyond_its_cut(end, cuts):
    said = supervision(start=-0.05, duration=3.05 + end)
    for split in (False, True):
        (row,) = read(cuts(cut(said, start=1.0, duration=3.0), split=split))
        if end > 0.1:
            assert (row.reason, "0.3 s beyond its cut" in row.detail) == ("duration_mismatch", True)
        else:
            assert (row["offset"], row["duration"]) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("line", "expected", "says"),
    [
        (cut(recording=recording(transforms=[{"name": "Speed", "kwargs": {"factor": 1.1}}])), "unsupported_cut", "Spe"),
        (cut(recording=recording(transforms=[{"name": "Volume", "kwargs": {}}])), "unsupported_cut", "save_audios"),
        ({"id": "c", "tracks": [], "type": "MixedCut"}, "unsupported_cut", "MixedCut"),
        ({"id": "c", "duration": 1.0, "sampling_rate": 16000, "type": "PaddingCut"}, "unsupported_cut", "PaddingCut"),
        (cut(type="DataCut"), "unsupported_cut", "DataCut"),
        (cut(recording=None), "missing_field", "no recording"),
        (cut(recording=recording(sources=[{"type": "command", "channels": [0], "source": "touch x"}])), "outside_root",
         "command"),
        (cut(recording=recording(sources=[{"type": "shar", "channels": [0], "source": ""}])), "unsupported_cut",
         "of a Shar"),
        (cut(recording=recording(sources=[{"type": "memory", "channels": [0], "source": "AAAA"}])),
         "unsupported_cut", "in memory"),
        (cut(recording=recording(sources=[{"type": "tape", "channels": [0], "source": "a"}])), "malformed", "'tape'"),
        (cut(recording=recording(sources=[{"type": "file", "channels": [0], "source": 3}])), "malformed", "no path"),
        (cut(channel=1), "malformed", "channel 1"),
        (cut(recording=recording(sources=[])), "malformed", "channel 0"),
        (b'{"id": 3}', "malformed", "no cut"),
        (b'{"id": "c", "supervisions": null}', "malformed", "no cut"),
        (b'{"id": "c", "start": NaN}', "malformed", "no cut"),
        (b"[]", "malformed", "no cut"),
        (b"[" * 5000, "malformed", "no cut"),
        (json.dumps(cut(supervision(text="gr\u00fcn")), ensure_ascii=False).encode("latin-1"), "malformed", "no cut"),
    ],
)  # fmt: skip
def test_cuts_that_are_no_records(line, expected, says, cuts):
    for split in (False, True):
        found = reason(cuts(line, split=split))
        assert found[0] == expected
        assert says in found[1]


def test_resampling_changes_no_times(cuts):
    changed = recording(transforms=[{"name": "Resample", "kwargs": {}}], sampling_rate=8000, num_samples=80000)
    assert read(cuts(cut(recording=changed)))[0]["duration"] == 10.0


def test_channels(cuts):
    both = recording(sources=stereo("both.wav"), channel_ids=[0, 1])
    each = recording(sources=stereo("left.wav", "right.wav"), channel_ids=[0, 1])

    def place(*arguments, channel=None, **keys):
        (row,) = read(cuts(cut(*arguments, **keys), channel=channel))
        return (row["audio_filepath"], row.get("channel")) if isinstance(row, dict) else row.reason

    assert place(recording=both, channel=None) == ("both.wav", 0)
    (row,) = read(cuts(cut(recording=both) | {"channel": 1}))
    assert row["channel"] == 1
    multi = {"recording": each, "type": "MultiCut"}
    rows = {}
    for chosen in (None, 0, 1, 2, "downmix"):
        (row,) = read(cuts(cut(**multi) | {"channel": [0, 1]}, channel=chosen))
        rows[chosen] = row.reason if isinstance(row, Unreadable) else (row["audio_filepath"], "channel" in row)
    assert rows == {None: "unsupported_channels", 0: ("left.wav", False), 1: ("right.wav", False),
                    2: "unsupported_channels", "downmix": "unsupported_channels"}  # fmt: skip
    (row,) = read(cuts(cut(recording=both, type="MultiCut") | {"channel": [0, 1]}, channel="downmix"))
    assert (row["audio_filepath"], row["channel"]) == ("both.wav", "downmix")
    said = [supervision("a", channel=[1]), supervision("b", channel=[0, 1])]
    one, other = read(cuts(cut(*said, recording=both, type="MultiCut") | {"channel": [0, 1]}, split=True))
    assert one["channel"] == 1
    assert other.reason == "unsupported_channels"


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


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_recordings_that_are_not_there_or_there_twice(suffix, joined):
    recordings = [recording("one"), b"no JSON", recording("two"), recording("two", "b.wav"), recording("one"), b"{}"]
    said = [supervision(recording_id=name) for name in ("one", "two", "three")] + [b"{}"]
    rows = read(joined(recordings, said, suffix))
    assert rows[0]["audio_filepath"] == "a.wav"
    assert [(row.reason, row.detail.split(" the ")[0]) for row in rows[1:3]] == [
        ("malformed", "several recordings have"), ("malformed", "no recording has"),
    ]  # fmt: skip
    assert rows[3].reason == "malformed"


def test_bad_records_are_rejected_by_prepare_and_the_rest_goes_on(tmp_path):
    write_tone(tmp_path / "audio/a.wav", 10.0)
    lines = [
        cut(supervision(), start=0.0),
        cut(supervision(duration=1.0), start=-1.0, duration=1.0),
        cut(supervision(duration=-1.0), duration=-1.0),
        cut(supervision(duration=2.0), start=9.0, duration=2.0),
        cut(supervision(), recording=recording(path="../a.wav")),
        cut(supervision(), recording=recording(path="/etc/passwd")),
        cut(supervision(), recording=recording(path="touch x |")),
        cut(supervision(), recording=recording(path=str(tmp_path / "audio/a.wav")), id="again"),
        b"{}",
    ]
    source = {"type": "lhotse", "cuts": write(tmp_path / "cuts.jsonl.gz", lines), "audio_root": str(tmp_path / "audio")}
    prepared = run_prepare(config_for(tmp_path, [source]))
    assert [reject["reason"] for reject in prepared.rejects] == [
        "malformed", "malformed", "duration_mismatch", "outside_root", "outside_root", "outside_root", "malformed",
        "duplicate_id",
    ]  # fmt: skip
    assert [utterance.cut_id for utterance in prepared.kept] == ["cut-rec-a-0.00-10.00"]


def test_custom_keys_never_name_a_command(tmp_path):
    write_tone(tmp_path / "audio/a.wav", 10.0)
    hostile = recording(sources=[{"type": "command", "channels": [0], "source": f"touch {tmp_path}/marker"}])
    lines = [cut(supervision(custom={"other": hostile})), cut(custom={"deep": {"x": [hostile]}})]
    source = {"type": "lhotse", "cuts": write(tmp_path / "cuts.jsonl", lines), "audio_root": str(tmp_path / "audio")}
    prepared = run_prepare(config_for(tmp_path, [source | {"speaker": "x"}], prepare={"require_text": False}))
    assert [list(utterance.custom) for utterance in prepared.kept] == [["utterance_id"]]
    assert [(reject["reason"], "command" in reject["detail"]) for reject in prepared.rejects] == [("malformed", True)]
    assert not (tmp_path / "marker").exists()


def test_speakers_by_template(cuts):
    cuts(cut(supervision("anna-1")), speaker="{utterance_id:prefix}").check_speaker()
    with raises(ConfigError, "unknown_key", "{utteranceid}", "did you mean 'utterance_id'"):
        cuts(cut(supervision()), speaker="{utteranceid}").check_speaker()


GOOD = json.dumps(cut()).encode() + b"\n"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (gzip.compress(GOOD, mtime=0)[:-4], "cut off"),
        (gzip.compress(GOOD, mtime=0)[:20], "cut off"),
        (b"\x1f\x8b\x08 no gzip", "damaged"),
        (GOOD * 3 + GOOD[:40], "cut off"),
        (b"[" + GOOD + b"]", "one JSON array"),
        (b"- id: c\n  start: 0\n", "lhotse copy"),
        (GOOD.decode().encode("utf-16"), "UTF-16"),
        (b"BZh91AY", "bzip2"),
        (json.dumps(recording()).encode(), "has recordings, not cuts"),
        (json.dumps(supervision()).encode(), "has supervisions, not cuts"),
        (b'{"audio_filepath": "a.wav"}\n', "type: nemo"),
    ],
)
def test_files_that_are_refused_before_any_work(data, says, tmp_path):
    (tmp_path / "cuts.jsonl").write_bytes(data)
    source = LhotseSource(cuts=str(tmp_path / "cuts.jsonl"), audio_root="audio")
    with raises(ConfigError, "bad_manifest", str(tmp_path / "cuts.jsonl"), says):
        source.check()
        list(source.pieces(10))


def test_a_file_in_gzip_that_is_cut_off_far_behind_its_begin(tmp_path, joined):
    data = gzip.compress(b"".join(json.dumps(cut(id=str(number))).encode() + b"\n" for number in range(5000)))
    (tmp_path / "cuts.jsonl.gz").write_bytes(data[: len(data) * 9 // 10])
    source = LhotseSource(cuts=str(tmp_path / "cuts.jsonl.gz"), audio_root="audio")
    source.check()
    with raises(ConfigError, "bad_manifest", "cuts.jsonl.gz", "cut off"):
        list(source.pieces(10))
    both = joined([recording(str(number)) for number in range(5000)], [supervision()], ".jsonl.gz")
    (tmp_path / "r.jsonl.gz").write_bytes((tmp_path / "r.jsonl.gz").read_bytes()[:-100])
    with raises(ConfigError, "bad_manifest", "r.jsonl.gz", "cut off"):
        both.identity()


def test_a_missing_file(tmp_path):
    with raises(ConfigError, "missing_input", "none.jsonl"):
        LhotseSource(cuts=str(tmp_path / "none.jsonl"), audio_root="audio").check()


def test_identity_names_files_without_folders(cuts, joined):
    assert list(cuts(cut()).identity()["cuts"]) == ["0 cuts.jsonl"]
    both = joined([recording()], [supervision()])
    assert sorted(both.identity()) == ["recordings", "supervisions"]


@pytest.mark.parametrize(
    "keys",
    [{}, {"supervisions": "s"}, {"cuts": "c", "recordings": "r"}, {"cuts": "c", "recordings": "r", "supervisions": "s"},
     {"cuts": []}, {"cuts": [" "]}, {"recordings": "r", "supervisions": "s", "split": True}],
)  # fmt: skip
def test_keys_that_make_no_sense(keys):
    with pytest.raises(ValueError, match=r"."):
        LhotseSource(audio_root="audio", **keys)

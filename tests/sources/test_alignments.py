"""Word alignments from lhotse's manifests and Shars, and notes about data that datasets do not store."""

import json
import math

import pytest
from lhotse import CutSet, MonoCut, Recording, RecordingSet, SupervisionSegment, SupervisionSet
from lhotse.supervision import AlignmentItem
from support.project import (
    Project,
    check_dataset,
    config_for,
    lines,
    run,
    run_prepare,
    run_sharmill,
    shar_fields,
    stage_of,
    voice,
    write_config,
    write_lines,
)

from sharmill.export.run import export_dataset
from sharmill.grow.split import split_dataset
from sharmill.shar import open_shar

# In seconds of the recording. The first item begins slightly before its supervision, the last one ends after it.
WORDS = [AlignmentItem("good", 1.46, 0.54, 0.9), AlignmentItem("day", 2.1, 0.93)]
# In seconds of the segment from 1.5 to 3.
SHIFTED = {"word": [AlignmentItem("good", 0.0, 0.5, 0.9), AlignmentItem("day", 0.6, 0.9)]}
# If a recording was stored again, its alignment counts from there.
STORED = [AlignmentItem("good", 0.0, 0.5, 0.9), AlignmentItem("day", 0.6, 0.9)]


def spoken(start, words=WORDS, duration=1.5, **changes):
    alignment = {"word": words} if words else None
    return SupervisionSegment(
        "s", "r", start, duration, text="good day", speaker="anna", alignment=alignment, **changes
    )


def sets(folder, recording):
    RecordingSet.from_recordings([recording]).to_file(folder / "r.jsonl")
    SupervisionSet.from_segments([spoken(1.5)]).to_file(folder / "s.jsonl")
    return {"type": "lhotse", "recordings": str(folder / "r.jsonl"), "supervisions": str(folder / "s.jsonl")}


def cuts(folder, recording, *, split=False):
    start, duration = (1.0, 3.0) if split else (1.5, 1.5)
    cut = MonoCut("c", start, duration, 0, supervisions=[spoken(1.5 - start)], recording=recording)
    CutSet.from_cuts([cut]).to_file(folder / "c.jsonl")
    return {"type": "lhotse", "cuts": str(folder / "c.jsonl"), "split": split}


def split_cuts(folder, recording):
    return cuts(folder, recording, split=True)


def shar(folder, recording):
    cut = MonoCut("c", 1.5, 1.5, 0, supervisions=[spoken(0.0, STORED)], recording=recording)
    (folder / "shar").mkdir()
    CutSet.from_cuts([cut]).to_shar(folder / "shar", {"recording": "flac"})
    return {"type": "lhotse_shar", "shar": str(folder / "shar")}


def nemo(folder, recording):
    record = {"audio_filepath": "a.wav", "offset": 1.5, "duration": 1.5, "text": "good day", "speaker": "anna"}
    record["_alignment"] = {"word": [list(item) for item in STORED]}
    return {"manifest": str(write_lines(folder / "m.json", [record]))}


@pytest.fixture
def recording(tmp_path):
    project = Project(tmp_path)
    return Recording.from_file(project.add("a.wav", voice(4.0)), recording_id="r")


@pytest.mark.parametrize("form", [sets, cuts, split_cuts, shar, nemo])
def test_an_alignment_counts_from_its_segment(form, recording, tmp_path):
    source = form(tmp_path, recording)
    source |= {} if form is shar else {"audio_root": str(tmp_path / "audio")}
    config = config_for(tmp_path, [source], match=None)
    assert len(run_prepare(config).kept) == 1
    assert run(stage_of(config, "write")).ok
    for cut in (*open_shar(config.dataset_dir), *CutSet.from_shar(fields=shar_fields(tmp_path / "dataset"))):
        assert cut.supervisions[0].alignment == SHIFTED
    assert not check_dataset(tmp_path / "dataset", tmp_path / "check", deep=True).findings


@pytest.mark.parametrize(
    "words",
    [
        [[*WORDS[0]], ["day", 3.2, 0.1]],
        [["good", 0.1, 0.5]],
        [["good", 1.6, -0.01]],
        [["good", math.nan, 0.1]],
        [["good", 10**400, 0.1]],
        [["good", "1.6", 0.1]],
        [[["good"], 1.6, 0.1]],
        {"good": 1.6},
        [["good", 1.6]],
    ],
    ids=["behind", "before", "negative", "nan", "huge", "text", "no symbol", "mapping", "short"],
)
def test_another_alignment_is_named_at_the_end(words, recording, tmp_path):
    said = [spoken(1.5).to_dict() | {"id": name, "alignment": {"word": words}} for name in ("s", "t")]
    said[1] |= {"duration": 1.0}
    source = sets(tmp_path, recording) | {"audio_root": str(tmp_path / "audio")}
    write_lines(tmp_path / "s.jsonl", said)
    prepared = run_prepare(config_for(tmp_path, [source], match=None))
    assert [(one.text, "_alignment" in one.custom) for one in prepared.kept] == [("good day", False)] * 2
    outside = "an alignment outside its segment or in an unknown format"
    assert prepared.result.totals.notes == [f"2 records have {outside}, which the dataset does not store"]


def test_what_is_not_carried_is_counted_and_named(recording, tmp_path):
    config = write_config(
        tmp_path, tmp_path / "m.json", tmp_path / "audio", match=None, encode={"codecs": []},
        sources=[{"type": "lhotse", "cuts": str(tmp_path / "c.jsonl"), "audio_root": str(tmp_path / "audio")}],
    )  # fmt: skip
    array = {"storage_type": "numpy_files", "storage_path": "x", "storage_key": "y", "shape": [2]}
    cut = MonoCut("c", 0.0, 4.0, 0, supervisions=[spoken(1.5, None)], recording=recording).to_dict()
    several = cut["supervisions"] + [{**cut["supervisions"][0], "id": "t", "start": 3.0, "duration": 1.0}]
    several = [one | {"language": "de", "custom": {"take": number}} for number, one in enumerate(several)]
    video = [{"type": "file", "channels": [0], "source": "a.wav", "video": {"fps": 25.0}}]
    changes = [
        {"features": array | {"type": "fbank"}},
        {
            "custom": {
                "tokens": {"array": array, "temporal_dim": 0, "frame_shift": 0.1, "start": 0},
                "x": 1,
                "offset": 7,
            }
        },
        {"supervisions": several},
        {"recording": cut["recording"] | {"sources": video}, "custom": {"text": "Good day!", "tokens": array}},
    ]
    rows = [cut | {"id": str(n), "start": n / 8, "duration": 3.5} | change for n, change in enumerate(changes)]
    rows[2] |= {"start": 0.0, "duration": 4.0}
    write_lines(tmp_path / "c.jsonl", rows)
    done = run_sharmill("run", config)
    for count, name in ((2, "tokens"), (1, "features"), (1, "several values of take"), (1, "several values of text"),
                        (1, "video")):  # fmt: skip
        assert f"prepare: {count} records have {name}, which the dataset does not store\n" in done.stdout


def test_parts_and_exports_of_a_dataset_keep_alignments(tmp_path):
    project = Project(tmp_path)
    project.add_voices([1.5, 1.5, 1.5], _alignment={"word": [["good", 0.0, 0.5, 0.9], ["day", 0.6, 0.9]]})
    for number, record in enumerate(project.records):
        record["speaker"] = f"speaker{number}"
    project.write(match=None, speaker_key="speaker")
    split_dataset(project.dataset, tmp_path / "parts", {"valid": 0.4}, workers=1)
    for part in ("train", "valid"):
        assert {json.dumps(cut.supervisions[0].alignment) for cut in open_shar(tmp_path / "parts" / part)} == {
            json.dumps(SHIFTED)
        }
    export_dataset(project.dataset, "nemo_tarred", tmp_path / "tars")
    exported = lines(tmp_path / "tars/sharded_manifests/manifest_0.json")
    assert [line["_alignment"] for line in exported] == [{"word": [list(item) for item in SHIFTED["word"]]}] * 3


@pytest.mark.parametrize("words", [[["good", 1.6, 0.5, None]], [["good", "0", 1.0, None]], [["good"]]])
def test_the_checker_finds_a_wrong_alignment(words, tmp_path):
    project = Project(tmp_path)
    project.add_voices([1.5])
    project.write(match=None)
    (path,) = (project.dataset / "cuts").glob("*.gz")
    (cut,) = lines(path)
    cut["supervisions"][0]["alignment"] = {"word": words}
    write_lines(path, [cut])
    codes = {row["code"] for row in check_dataset(project.dataset, tmp_path / "check").findings}
    assert "bad_cut" in codes

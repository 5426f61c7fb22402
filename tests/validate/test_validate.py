"""The checker: a clean dataset has no findings, and every kind of damage is found by the check that can see it."""

from __future__ import annotations

import io
import json
import os

import numpy as np
import pytest
from dummies_shar import Project, ToyCodec, copy, lines, loading, put, reindex, rewrite, run, snapshot, voice

from sharmill.config import CodecConfig
from sharmill.encode.stage import EncodeStage
from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError
from sharmill.shar.fields import FieldWriter, Item, array_from_bytes, array_to_bytes, read_field
from sharmill.validate.stage import ValidateStage
from sharmill.write.stage import WriteStage

TARGETS = "target_audio/recording.000001.tar"
CONTEXTS = "context_audio/recording.000001.tar"
CODES = "codes_toy/target_codes/codes.000001.tar"
CONTEXT_CODES = "codes_toy/context_codes/codes.000001.tar"
CUTS = "cuts/cuts.000001.jsonl.gz"


@pytest.fixture
def dataset(built, tmp_path):
    return copy(built.dataset, tmp_path / "dataset")


def check(directory, scratch, **options):
    """The findings as (code, shard, where)."""
    stage = ValidateStage(directory, RunDir(scratch), **options)
    result = run(stage)
    assert result.ok, result.failures
    return [(finding.code, finding.shard, finding.where) for finding in stage.findings()]


def codes_of(findings):
    return sorted({code for code, _, _ in findings})


def test_a_clean_dataset_has_no_findings_and_stays_as_it_is(dataset, tmp_path):
    before = snapshot(dataset)
    times = {path: path.stat().st_mtime_ns for path in dataset.rglob("*")}
    assert check(dataset, tmp_path / "run") == []
    assert check(dataset, tmp_path / "deep", deep=True) == []
    assert snapshot(dataset) == before
    assert {path: path.stat().st_mtime_ns for path in dataset.rglob("*")} == times


def test_a_dataset_without_codecs_and_one_without_cuts_are_clean(project, tmp_path):
    for number in range(2):
        project.add(f"{number}.wav", voice(0.5, seed=number))
    project.write(match={"min_duration": 0.0})
    assert check(project.dataset, tmp_path / "first") == []
    for number in range(2):
        (project.root / f"{number}.wav").unlink()
    assert run(WriteStage(project.configure(match={"min_duration": 0.0})), restart=True).ok
    assert lines(project.dataset / "shards.jsonl")[0]["count"] == 0
    assert check(project.dataset, tmp_path / "second") == []


def test_what_is_no_dataset_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="not a finished dataset"):
        check(tmp_path, tmp_path / "run")


@pytest.mark.parametrize("name", ["dataset.json", "shards.jsonl"])
@pytest.mark.parametrize(("content", "code"), [(b"{", "damaged"), (None, "missing_file")])
def test_a_damaged_or_lost_index_is_found_and_the_rest_is_checked(dataset, tmp_path, name, content, code):
    (dataset / name).unlink() if content is None else (dataset / name).write_bytes(content)
    assert check(dataset, tmp_path / "run") == [(code, None, name)]
    change_items(dataset / CODES, lambda items: [items[1], items[0], *items[2:]])
    assert "wrong_id" in codes_of(check(dataset, tmp_path / "run"))


def flip(path, position=1500):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def change_items(path, change):
    items = list(read_field(path))
    with FieldWriter(path) as writer:
        for item in change(items):
            writer.add(item)


def change_cuts(change):
    def damage(dataset):
        path = dataset / CUTS
        rewrite(path, change(lines(path)))
        reindex(dataset)

    return damage


def change_field(name, change):
    def damage(dataset):
        change_items(dataset / name, change)
        reindex(dataset)

    return damage


def change_shards(change):
    def damage(dataset):
        rewrite(dataset / "shards.jsonl", change(lines(dataset / "shards.jsonl")))

    return damage


def change_description(change):
    def damage(dataset):
        path = dataset / "dataset.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return damage


def with_metadata(number, **keys):
    """Changes the metadata of one item; a key to ... removes it."""

    def change(items):
        old = items[number]
        metadata = {key: value for key, value in {**old.metadata, **keys}.items() if value is not ...}
        items[number] = Item(old.cut_id, old.extension, old.data, metadata)
        return items

    return change


def with_data(number, data):
    def change(items):
        old = items[number]
        items[number] = Item(old.cut_id, old.extension, data(old.data), old.metadata)
        return items

    return change


def with_array(number, change_array, *, describe=False):
    def change(items):
        old = items[number]
        array = change_array(array_from_bytes(old.data, "x").copy())
        metadata = json.loads(json.dumps(old.metadata))
        if describe:
            (metadata.get("array") or metadata)["shape"] = list(array.shape)
        items[number] = Item(old.cut_id, old.extension, array_to_bytes(array), metadata)
        return items

    return change


def set_first(array):
    array[0, 0] = 64
    return array


def set_negative(array):
    array[0, 0] = -1
    return array


def pickled(data):
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return stream.getvalue()


def swap(items):
    return [items[1], items[0], *items[2:]]


def swap_audio(items):
    """The names stay, the contents change places."""
    first, second = items[:2]
    return [
        Item(first.cut_id, second.extension, second.data, second.metadata),
        Item(second.cut_id, first.extension, first.data, first.metadata),
        *items[2:],
    ]


def cut_key(**keys):
    return lambda cuts: [cuts[0] | keys, *cuts[1:]]


def supervision_key(**keys):
    return lambda cuts: [cuts[0] | {"supervisions": [cuts[0]["supervisions"][0] | keys]}, *cuts[1:]]


def custom_key(**keys):
    def change(cuts):
        custom = {k: v for k, v in {**cuts[0]["supervisions"][0]["custom"], **keys}.items() if v is not ...}
        return supervision_key(custom=custom)(cuts)

    return change


def duplicate(dataset):
    """The first cut of the first shard takes the place of the first of the second, in every field."""
    for field, name in (("cuts", CUTS), *(("", name) for name in (TARGETS, CONTEXTS, CODES, CONTEXT_CODES))):
        other = dataset / name.replace("000001", "000000")
        if field:
            rewrite(dataset / name, [lines(other)[0], *lines(dataset / name)[1:]])
        else:
            first = next(iter(read_field(other)))
            change_items(dataset / name, lambda items, first=first: [first, *items[1:]])
    reindex(dataset)
    shards = lines(dataset / "shards.jsonl")
    description = json.loads((dataset / "dataset.json").read_text())
    for name, field in (("target_seconds", TARGETS), ("context_seconds", CONTEXTS)):
        found = sum(item.metadata["duration"] for item in read_field(dataset / field))
        description[name] += found - shards[1][name]
        shards[1][name] = found
    rewrite(dataset / "shards.jsonl", shards)
    (dataset / "dataset.json").write_text(json.dumps(description))


def exchange_shards(dataset):
    for field in ("target_audio", "context_audio"):
        first, second = (dataset / f"{field}/recording.{index:06d}.tar" for index in (0, 1))
        (first_bytes, second_bytes) = first.read_bytes(), second.read_bytes()
        first.write_bytes(second_bytes)
        second.write_bytes(first_bytes)
    reindex(dataset)


def without_field(shards):
    del shards[1]["fields"]["context_audio"]
    return shards


def rename_field(shards):
    fields = shards[1]["fields"]
    fields["target_audio"], fields["context_audio"] = fields["context_audio"], fields["target_audio"]
    return shards


def reversed_twice(shards):
    return [shards[0], shards[2], shards[1]]


DAMAGES = {
    "a file is gone": (lambda d: (d / TARGETS).unlink(), {"missing_file"}),
    "a folder in its place": (lambda d: ((d / TARGETS).unlink(), (d / TARGETS).mkdir()), {"missing_file"}),
    "another size": (lambda d: (d / TARGETS).write_bytes((d / TARGETS).read_bytes() + b"\0" * 512), {"wrong_size"}),
    "a flipped bit of audio": (lambda d: flip(d / TARGETS), {"wrong_checksum"}),
    "a flipped bit of a header": (lambda d: flip(d / TARGETS, 3), {"wrong_checksum", "damaged"}),
    "cut off": (
        lambda d: (d / TARGETS).write_bytes((d / TARGETS).read_bytes()[:-600]),
        {"wrong_size", "damaged"},
    ),
    "cut off with fresh checksums": (
        lambda d: ((d / TARGETS).write_bytes((d / TARGETS).read_bytes()[:-600]), reindex(d)),
        {"damaged"},
    ),
    "cuts cut off": (lambda d: (d / CUTS).write_bytes((d / CUTS).read_bytes()[:-9]), {"wrong_size", "damaged"}),
    "cuts emptied": (lambda d: ((d / CUTS).write_bytes(b""), reindex(d)), {"damaged"}),
    "a stray file": (lambda d: (d / "cuts/notes.txt").write_text("x"), {"stray_file"}),
    "a leftover of writing": (lambda d: (d / ".shards.jsonl.0123.tmp").write_text("x"), {"stray_file"}),
    "a leftover of staging": (
        lambda d: ((d / ".sharmill-staging/0").mkdir(parents=True), (d / ".sharmill-staging/0/x").touch()),
        {"stray_file"},
    ),
    "a broken link": (lambda d: (d / "link").symlink_to("nowhere"), {"stray_file"}),
    "a link to a folder": (lambda d: (d / "link").symlink_to("/tmp"), {"stray_file"}),
    "the last shard is not listed": (
        change_shards(lambda shards: shards[:-1]),
        {"stray_file", "wrong_totals"},
    ),
    "a shard in the middle is not listed": (
        change_shards(lambda shards: [shards[0], shards[2]]),
        {"stray_file", "wrong_totals", "index_gap"},
    ),
    "shards out of order": (change_shards(reversed_twice), {"index_gap"}),
    "a shard without a field": (change_shards(without_field), {"missing_field", "stray_file"}),
    "fields under each other's names": (
        change_shards(rename_field),
        {"wrong_name", "bad_cut", "bad_codes", "wrong_totals"},
    ),
    "another count": (
        change_shards(lambda shards: [shards[0], shards[1] | {"count": 2}, shards[2]]),
        {"wrong_count", "wrong_totals"},
    ),
    "other seconds": (
        change_shards(lambda shards: [shards[0], shards[1] | {"target_seconds": 9.0}, shards[2]]),
        {"wrong_totals"},
    ),
    "other totals": (change_description(lambda d: d | {"num_cuts": 8}), {"wrong_totals"}),
    "other total seconds": (change_description(lambda d: d | {"context_seconds": 1.0}), {"wrong_totals"}),
    "a codec without fields": (
        change_description(lambda d: d | {"fields": d["fields"][:3]}),
        {"wrong_totals"},
    ),
    "fields without a codec": (change_description(lambda d: d | {"codecs": []}), {"wrong_totals"}),
    "members swapped": (change_field(TARGETS, swap), {"wrong_id", "bad_cut", "bad_codes"}),
    "contents of targets swapped": (change_field(TARGETS, swap_audio), {"bad_cut", "bad_codes"}),
    "contents of contexts swapped": (change_field(CONTEXTS, swap_audio), {"bad_cut", "bad_codes"}),
    "contents of codes swapped": (change_field(CODES, swap_audio), {"bad_codes"}),
    "codes swapped": (change_field(CODES, swap), {"wrong_id", "bad_codes"}),
    "a member dropped": (change_field(TARGETS, lambda items: items[:-1]), {"wrong_count", "wrong_totals"}),
    "a member doubled": (change_field(CONTEXTS, lambda items: [*items, items[-1]]), {"wrong_count", "wrong_totals"}),
    "codes dropped": (change_field(CONTEXT_CODES, lambda items: items[:-1]), {"wrong_count"}),
    "shards exchanged": (exchange_shards, {"wrong_id", "bad_cut", "bad_codes", "wrong_totals"}),
    "a placeholder": (
        change_field(TARGETS, lambda items: [Item(items[0].cut_id, "nodata", None, None), *items[1:]]),
        {"bad_audio", "bad_cut", "bad_codes", "wrong_totals"},
    ),
    "a cut twice": (duplicate, {"duplicate_id"}),
    "a cut dropped": (change_cuts(lambda cuts: cuts[:-1]), {"wrong_count"}),
    "a cut that is no object": (change_cuts(lambda cuts: [3, *cuts[1:]]), {"damaged"}),
    "a cut without start": (
        change_cuts(lambda cuts: [{k: v for k, v in cuts[0].items() if k != "start"}, *cuts[1:]]),
        {"bad_cut"},
    ),
    "a cut that starts later": (change_cuts(cut_key(start=0.5)), {"bad_cut"}),
    "a cut of another duration": (change_cuts(cut_key(duration=9.0)), {"bad_cut"}),
    "a cut whose context lhotse would cut": (
        change_cuts(cut_key(custom={"context_audio_unaligned": False})),
        {"bad_cut"},
    ),
    "a cut without custom": (change_cuts(cut_key(custom=None)), {"bad_cut"}),
    "a cut without supervisions": (change_cuts(cut_key(supervisions=[])), {"bad_cut"}),
    "a cut without recording": (change_cuts(cut_key(recording=None)), {"bad_cut"}),
    "another id": (change_cuts(cut_key(id="cut-x")), {"wrong_id", "bad_cut"}),
    "an id that is a number": (change_cuts(cut_key(id=3)), {"wrong_id", "bad_cut"}),
    "a supervision that starts later": (change_cuts(supervision_key(start=0.5)), {"bad_cut"}),
    "a supervision of another duration": (change_cuts(supervision_key(duration=0.5)), {"bad_cut"}),
    "a supervision of another recording": (change_cuts(supervision_key(recording_id="x")), {"bad_cut"}),
    "no speaker tag": (change_cuts(supervision_key(speaker="anna")), {"bad_cut"}),
    "a context too unlike": (change_cuts(custom_key(context_speaker_similarity=0.59)), {"bad_cut"}),
    "a context without similarity": (change_cuts(custom_key(context_speaker_similarity=...)), {"bad_cut"}),
    "another context": (change_cuts(custom_key(context_recording_id="rec-x")), {"bad_cut"}),
    "another context offset": (change_cuts(custom_key(context_audio_offset=1.0)), {"bad_cut"}),
    "a context too short": (
        change_description(lambda d: d | {"limits": d["limits"] | {"min_duration": 1.0}}),
        {"bad_cut"},
    ),
    "a context too long": (
        change_description(lambda d: d | {"limits": d["limits"] | {"max_duration": 2.0}}),
        {"bad_cut"},
    ),
    "audio that is none": (change_field(TARGETS, with_data(0, lambda data: b"no audio")), {"bad_audio"}),
    "audio without bytes": (change_field(CONTEXTS, with_data(0, lambda data: b"")), {"bad_audio"}),
    "fewer samples promised": (
        change_field(CONTEXTS, with_metadata(0, num_samples=5)),
        {"bad_audio", "bad_codes"},
    ),
    "another rate promised": (change_field(CONTEXTS, with_metadata(0, sampling_rate=8000)), {"bad_audio", "bad_codes"}),
    "a rate of zero": (change_field(CONTEXTS, with_metadata(0, sampling_rate=0)), {"bad_audio", "bad_codes"}),
    "a rate that is text": (
        change_field(TARGETS, with_metadata(0, sampling_rate="x")),
        {"bad_audio", "bad_codes", "bad_cut"},
    ),
    "another duration promised": (change_field(TARGETS, with_metadata(0, duration=1.0)), {"bad_audio", "wrong_totals"}),
    "audio of another id": (change_field(TARGETS, with_metadata(0, id="x")), {"bad_cut"}),
    "codes with a frame more": (
        change_field(CODES, with_array(0, lambda a: np.pad(a, ((0, 0), (0, 1))), describe=True)),
        {"bad_codes"},
    ),
    "codes with a frame less": (
        change_field(CONTEXT_CODES, with_array(0, lambda a: a[:, :-1], describe=True)),
        {"bad_codes"},
    ),
    "codes with a codebook less": (change_field(CODES, with_array(0, lambda a: a[:2], describe=True)), {"bad_codes"}),
    "codes of a shape not described": (change_field(CODES, with_array(0, lambda a: a[:, :-1])), {"bad_codes"}),
    "codes of another type": (change_field(CODES, with_array(0, lambda a: a.astype(np.int32))), {"bad_codes"}),
    "codes with floats": (change_field(CODES, with_array(0, lambda a: a.astype(np.float32))), {"bad_codes"}),
    "codes too large": (change_field(CODES, with_array(0, set_first)), {"bad_codes"}),
    "codes below zero": (change_field(CONTEXT_CODES, with_array(0, set_negative)), {"bad_codes"}),
    "codes pickled": (change_field(CODES, with_data(0, pickled)), {"bad_codes"}),
    "codes cut off": (change_field(CODES, with_data(0, lambda data: data[:-1])), {"bad_codes"}),
    "another frame shift": (change_field(CODES, with_metadata(0, frame_shift=0.021)), {"bad_codes"}),
    "another temporal dimension": (change_field(CODES, with_metadata(0, temporal_dim=0)), {"bad_codes"}),
    "codes that start later": (change_field(CODES, with_metadata(0, start=1.0)), {"bad_codes"}),
    "codes without shape": (change_field(CONTEXT_CODES, with_metadata(0, shape=...)), {"bad_codes"}),
    "context codes that lhotse would cut": (
        change_field(
            CONTEXT_CODES,
            lambda items: [
                Item(
                    i.cut_id,
                    i.extension,
                    i.data,
                    {"array": i.metadata, "temporal_dim": -1, "frame_shift": 0.02, "start": 0},
                )
                for i in items
            ],
        ),
        {"bad_codes"},
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_nothing_else_is(dataset, tmp_path, damage):
    inflict, expected = DAMAGES[damage]
    inflict(dataset)
    before = snapshot(dataset)
    findings = check(dataset, tmp_path / "run")
    assert set(codes_of(findings)) == expected, findings
    assert snapshot(dataset) == before


def test_a_finding_names_shard_and_place(dataset, tmp_path):
    flip(dataset / TARGETS)
    assert check(dataset, tmp_path / "run") == [("wrong_checksum", 1, TARGETS)]
    change_field(CODES, with_array(1, set_first))(dataset)
    (cut_id,) = [lines(dataset / CUTS)[1]["id"]]
    findings = check(dataset, tmp_path / "run")
    assert ("bad_codes", 1, f"codes_toy/target_codes: {cut_id}") in findings


def test_only_the_deep_check_sees_what_only_decoding_tells(project, tmp_path):
    """A NaN in a WAV of floats: header, length and checksums are as they should be."""
    for number in range(2):
        project.add(f"{number}.wav", voice(0.5, seed=number), subtype="FLOAT")
    project.write(write={"audio_format": "wav"}, match={"min_duration": 0.0})
    path = project.dataset / "target_audio/recording.000000.tar"

    def with_nan(data):
        return data[:-4] + np.float32(np.nan).tobytes()

    change_items(path, with_data(0, with_nan))
    reindex(project.dataset)
    assert check(project.dataset, tmp_path / "quick") == []
    assert codes_of(check(project.dataset, tmp_path / "deep", deep=True)) == ["bad_audio"]


def test_a_damage_done_after_a_check_is_found_by_the_next(dataset, tmp_path):
    """Also where it keeps the number of files and their times, as copying an older file does."""
    run_dir = tmp_path / "run"
    assert check(dataset, run_dir) == []
    path = dataset / TARGETS
    status = path.stat()
    flip(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert codes_of(check(dataset, run_dir)) == ["wrong_checksum"]


def test_ids_with_line_breaks_are_no_duplicates(project, tmp_path):
    """Of ids that differ before a line break only, the ends are the same."""
    for name in ("a\nb.wav", "c\nb.wav"):
        project.add(name, voice(0.5, seed=len(name)))
    config = project.write([1, 0], match={"min_duration": 0.0})
    assert {cut["id"] for cut in lines(project.dataset / "cuts/cuts.000000.jsonl.gz")} == {
        "cut-rec-a\nb-0.00-0.50", "cut-rec-c\nb-0.00-0.50",
    }  # fmt: skip
    project.encode(config)
    assert check(project.dataset, tmp_path / "check") == []


def test_a_folder_that_lies_elsewhere_behind_a_link_is_no_stray(dataset, tmp_path):
    (dataset / "target_audio").rename(tmp_path / "elsewhere")
    (dataset / "target_audio").symlink_to(tmp_path / "elsewhere")
    assert check(dataset, tmp_path / "run") == []


def test_two_codecs_are_both_checked(tmp_path):
    project = Project(tmp_path / "two")
    project.folder.mkdir()
    for number in range(3):
        project.add(f"{number}.wav", voice(0.5, seed=number))
    config = project.write(match={"min_duration": 0.0})
    for name, frame in (("a", 320), ("b", 160)):
        with loading(ToyCodec(samples_per_frame=frame)):
            assert run(EncodeStage(config, CodecConfig(name=name, model="builtin"))).ok
    assert check(project.dataset, tmp_path / "first") == []
    change_items(project.dataset / "codes_b/target_codes/codes.000000.tar", with_array(0, set_negative))
    reindex(project.dataset)
    ((code, shard, where),) = check(project.dataset, tmp_path / "second")
    assert (code, shard, where.split(":")[0]) == ("bad_codes", 0, "codes_b/target_codes")


def test_audio_put_in_from_outside_is_found(dataset, tmp_path):
    other = put(tmp_path / "other.flac", voice(0.9)).read_bytes()
    change_field(TARGETS, with_data(1, lambda data: other))(dataset)
    assert codes_of(check(dataset, tmp_path / "run")) == ["bad_audio"]

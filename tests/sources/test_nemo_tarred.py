"""NeMo's tarred manifests: which archive a record names, and where its audio lies in it."""

from __future__ import annotations

import json
import os

import pytest
from support.errors import raises
from support.manifests import config_for, run_prepare, speaker_tag, write_manifest
from support.tars import tar_bytes, voice_bytes, write_tar

from sharmill.config import to_config
from sharmill.errors import ConfigError
from sharmill.sources import Located, Unreadable, record_text
from sharmill.sources.nemo_tarred import NemoTarredSource


def line(name, **keys):
    return {"audio_filepath": name, "duration": 1.0, "text": f"text of {name}"} | keys


@pytest.fixture
def data(tmp_path):
    """Two archives of two members each, with sharded manifests and one for both."""
    lines = []
    for shard in range(2):
        names = [f"{shard}{letter}.flac" for letter in "ab"]
        write_tar(tmp_path / f"audio_{shard}.tar", [(name, f"data of {name}".encode()) for name in names])
        records = [line(name, shard_id=shard) for name in names]
        write_manifest(tmp_path / f"sharded/manifest_{shard}.json", records)
        lines += records
    write_manifest(tmp_path / "manifest.json", lines)
    return tmp_path


def source(folder, manifest="manifest.json", tars="audio__OP_0..1_CL_.tar", **keys):
    def below(value):
        return [f"{folder}/{name}" for name in value] if isinstance(value, list) else f"{folder}/{value}"

    made = NemoTarredSource(manifest=below(manifest), tars=below(tars), **keys)
    made.check()
    return made


def read(made, records_per_piece=3):
    pieces = list(made.pieces(records_per_piece))
    found = [list(made.read(piece.params)) for piece in pieces]
    assert [len(records) for records in found] == [piece.num_records for piece in pieces]
    return [record for records in found for record in records]


def contents(made, folder):
    """(audio_filepath, bytes) of records that are located, (reason, detail) of others."""
    found = []
    for raw in read(made):
        if isinstance(raw, Located):
            data = (folder / raw.member.container).read_bytes()
            record = json.loads(raw.record)
            found.append((record["audio_filepath"], data[raw.member.start : raw.member.start + raw.member.size]))
        else:
            assert isinstance(raw, Unreadable)
            found.append((raw.reason, raw.detail))
    return found


EXPECTED = [(f"audio_{n[0]}.tar/{n}", f"data of {n}".encode()) for n in ("0a.flac", "0b.flac", "1a.flac", "1b.flac")]


@pytest.mark.parametrize("manifest", ["manifest.json", "sharded/manifest__OP_0..1_CL_.json", "sharded/m*.json"])
@pytest.mark.parametrize("tars", ["audio__OP_0..1_CL_.tar", "audio_{0..1}.tar", "audio_*.tar", "audio_[0..1].tar"])
def test_records_are_located_in_their_archives(manifest, tars, data):
    assert contents(source(data, manifest, tars), data) == EXPECTED


def test_shards_pair_by_number_not_by_place(data):
    manifests = ["sharded/manifest_1.json", "sharded/manifest_0.json"]
    assert contents(source(data, manifests), data) == EXPECTED[2:] + EXPECTED[:2]


def test_numbers_are_the_last_ones_of_names_as_in_nemo(data):
    for shard in range(2):
        (data / f"audio_{shard}.tar").rename(data / f"audio_16khz-{shard}_00{shard}.tar")
        (data / f"sharded/manifest_{shard}.json").rename(data / f"manifest_{shard}_normalized.json")
    made = source(data, "manifest_{0..1}_normalized.json", "audio_*.tar")
    assert [path.partition("/")[2] for path, _ in contents(made, data)] == ["0a.flac", "0b.flac", "1a.flac", "1b.flac"]


def test_records_of_one_manifest_may_be_in_any_order(data):
    records = [json.loads(text) for text in (data / "manifest.json").read_text().splitlines()]
    write_manifest(data / "manifest.json", [records[n] for n in (3, 0, 2, 1)])
    assert contents(source(data), data) == [EXPECTED[n] for n in (3, 0, 2, 1)]


def test_one_archive_needs_no_shard_id_and_no_number(data):
    (data / "audio_1.tar").rename(data / "audio.tar")
    records = [line("1b.flac"), line("1a.flac", shard_id=7)]
    write_manifest(data / "manifest.json", records)
    made = source(data, tars="audio.tar")
    assert [path for path, _ in contents(made, data)] == ["audio.tar/1b.flac", "audio.tar/1a.flac"]


def test_buckets_with_the_same_numbers_pair_entry_by_entry(data):
    for bucket in ("b1", "b2"):
        for shard in range(2):
            write_tar(data / f"{bucket}/audio_{shard}.tar", [("x.flac", f"{bucket} {shard}".encode())])
        write_manifest(data / f"{bucket}/manifest.json", [line("x.flac", shard_id=shard) for shard in range(2)])
    made = source(data, ["b1/manifest.json", "b2/manifest.json"], ["b1/audio_{0..1}.tar", "b2/audio_{0..1}.tar"])
    expected = [(f"{b}/audio_{n}.tar/x.flac", f"{b} {n}".encode()) for b in ("b1", "b2") for n in range(2)]
    assert contents(made, data) == expected


def test_values_of_records_stay_as_they_are_written(data):
    written = b'{"duration": 1.10, "audio_filepath": "0a.flac", "shard_id": 0, "n": 123456789012345678901234567890}'
    write_manifest(data / "manifest.json", [written])
    (record,) = read(source(data))
    assert record.record == written.replace(b"0a.flac", b"audio_0.tar/0a.flac").replace(b'": ', b'":').replace(
        b", ", b","
    )


def test_segments_of_a_member_are_named_by_sub_or_by_offset(data):
    records = [line("0a.flac"), line("0a-sub1.flac", offset=1.0), line("0a-sub12.flac", offset=2.0)]
    records += [line("0b.flac", offset=0.5), line("0a-sub3")]
    write_manifest(data / "manifest.json", [record | {"shard_id": 0} for record in records])
    found = contents(source(data), data)
    assert found[:4] == [EXPECTED[0]] * 3 + [EXPECTED[1]]
    assert found[4] == ("missing_audio", "the archive audio_0.tar has no member '0a' that is a file")


def test_a_member_whose_own_name_ends_in_sub_is_found(data):
    write_tar(data / "audio_0.tar", [("0a.flac", b"0"), ("0a-sub1.flac", b"1")])
    write_manifest(data / "manifest.json", [line("0a-sub1.flac", shard_id=0), line("0a-sub2.flac", shard_id=0)])
    assert [content for _, content in contents(source(data), data)] == [b"1", b"0"]


def test_names_with_dots_and_slashes_are_found(data):
    write_tar(data / "audio_0.tar", [("./deep/a.flac", b"1"), ("/abs/b.flac", b"2"), ("../c.flac", b"3")])
    names = ["deep/a.flac", "./deep//a.flac", "abs/b.flac", "/abs/b.flac", "../c.flac"]
    write_manifest(data / "manifest.json", [line(name, shard_id=0) for name in names])
    found = contents(source(data), data)
    assert [content for _, content in found] == [b"1", b"1", b"2", b"2", b"3"]
    # The last one is rejected by prepare as outside_root.
    assert found[-1][0] == "audio_0.tar/../c.flac"


def test_members_without_record_are_left_alone(data):
    write_manifest(data / "manifest.json", [line("1b.flac", shard_id=1)])
    assert contents(source(data), data) == EXPECTED[3:]


BAD = [
    (line("none.flac", shard_id=0), "missing_audio", "audio_0.tar has no member 'none.flac'"),
    (line("0a.flac", shard_id=5), "missing_audio", "shard_id, 5"),
    (line("0a.flac", shard_id="0"), "missing_audio", "shard_id, 0"),
    (line("0a.flac", shard_id=True), "missing_audio", "shard_id, True"),
    (line("0a.flac"), "missing_field", "shard_id"),
    (b'{"audio_filepath": "0a.flac", "shard_id": 0', "malformed", "JSON"),
    (b'{"audio_filepath": "0a.flac", "shard_id": 0, "text": "caf\xe9"}', "malformed", "JSON"),
    (b'"text"', "malformed", "JSON object"),
]


@pytest.mark.parametrize(("bad", "reason", "words"), BAD)
def test_a_bad_record_is_one_reject(bad, reason, words, data):
    write_manifest(data / "manifest.json", [bad, line("1a.flac", shard_id=1)])
    prepared = prepare(data, [{"manifest": f"{data}/manifest.json", "tars": f"{data}/audio_{{0..1}}.tar"}])
    first = prepared.rejects[0]
    assert first["reason"] == reason
    assert words in first["detail"]
    # What stands for audio in the other record is none.
    assert [reject["reason"] for reject in prepared.rejects[1:]] == ["unreadable_audio"]


def prepare(folder, sources, **changes):
    sources = [{"type": "nemo_tarred", "speaker": "anna"} | entry for entry in sources]
    return run_prepare(config_for(folder / "out", sources, **changes))


@pytest.mark.parametrize("keys", [{"_skipme": "noise"}, {"audio_filepath": None}, {"audio_filepath": 3}, {"text": 3}])
def test_what_prepare_rejects_anyway_keeps_its_reason(keys, data):
    write_tar(data / "audio_0.tar", [("0a.flac", voice_bytes())])
    write_manifest(data / "manifest.json", [line("0a.flac", shard_id=0) | keys, line("0a.flac", shard_id=0)])
    prepared = prepare(data, [{"manifest": f"{data}/manifest.json", "tars": f"{data}/audio_{{0..1}}.tar"}])
    (reject,) = prepared.rejects
    expected = {"_skipme": "skipped", "audio_filepath": "missing_field", "text": "malformed"}
    assert reject["reason"] == ("malformed" if 3 in keys.values() else expected[next(iter(keys))])
    assert [utterance.audio_filepath for utterance in prepared.kept] == ["audio_0.tar/0a.flac"]


def test_names_that_lead_out_of_the_archive_are_rejected(data):
    write_tar(data / "audio_0.tar", [("../audio_1.tar/x.flac", voice_bytes()), ("/abs/b.flac", voice_bytes())])
    write_manifest(
        data / "manifest.json",
        [line("../audio_1.tar/x.flac", shard_id=0), line("/abs/b.flac", shard_id=0), line("../../x", shard_id=0)],
    )
    prepared = prepare(data, [{"manifest": f"{data}/manifest.json", "tars": f"{data}/audio_{{0..1}}.tar"}])
    assert [utterance.audio_filepath for utterance in prepared.kept] == ["audio_0.tar/abs/b.flac"]
    assert [reject["reason"] for reject in prepared.rejects] == ["outside_root", "missing_audio"]


def test_two_members_of_one_name_are_told_apart_by_nothing(data):
    write_tar(data / "audio_0.tar", [("0a.flac", b"1"), ("0b.flac", b"2"), ("./0a.flac", b"3")])
    write_manifest(data / "manifest.json", [line(n, shard_id=0) for n in ("0a.flac", "0b.flac", "0a-sub1.flac")])
    found = contents(source(data), data)
    assert found[1] == ("audio_0.tar/0b.flac", b"2")
    assert [found[n] for n in (0, 2)] == [
        ("ambiguous_audio", "the archive audio_0.tar has several members '0a.flac'")
    ] * 2


@pytest.mark.parametrize("cut", [1100, 1800])
def test_of_an_archive_that_is_cut_off_what_comes_before_is_used(cut, data):
    whole = tar_bytes([("0a.flac", b"a" * 400), ("0b.flac", b"b" * 400)])
    (data / "audio_0.tar").write_bytes(whole[:cut])
    found = contents(source(data), data)
    assert found[0] == ("audio_0.tar/0a.flac", b"a" * 400)
    assert found[1][0] == "unreadable_audio"
    assert f"cut off at byte {cut}" in found[1][1]
    assert found[2:] == EXPECTED[2:]


def test_an_archive_that_went_missing_rejects_its_records(data):
    made = source(data)
    (data / "audio_0.tar").unlink()
    found = contents(made, data)
    assert [reason for reason, _ in found[:2]] == ["missing_audio"] * 2
    assert found[2:] == EXPECTED[2:]


def test_no_archive_holds_up_the_planning(data):
    made = source(data)
    for shard in range(2):
        (data / f"audio_{shard}.tar").unlink()
    assert [piece.num_records for piece in made.pieces(3)] == [3, 1]


MISMATCHES = [
    (
        {"manifest": "sharded/manifest_{0..1}.json", "tars": "audio_0.tar"},
        "no archive for the manifests of the numbers 1",
    ),
    ({"manifest": ["sharded/manifest_1.json", "sharded/manifest_0.json"], "tars": "audio_{0..2}.tar"}, "numbers 2"),
    ({"tars": ["audio_0.tar", "audio_0.tar"]}, "has the number 0 as another one has"),
    ({"tars": ["audio_0.tar", "plain.tar"]}, "plain.tar has no number in its name"),
]


@pytest.mark.parametrize(("keys", "words"), MISMATCHES)
def test_manifests_and_archives_that_do_not_pair_are_refused(keys, words, data):
    for name in ("audio_2.tar", "plain.tar"):
        (data / name).write_bytes((data / "audio_0.tar").read_bytes())
    with raises(ConfigError, "bad_config_value", words):
        source(data, **keys)


@pytest.mark.parametrize("spoil", [os.mkfifo, os.mkdir])
def test_what_is_no_archive_is_refused_before_any_work(spoil, data):
    (data / "audio_1.tar").unlink()
    spoil(data / "audio_1.tar")
    with raises(ConfigError, "bad_manifest", "audio_1.tar"):
        source(data)


def test_a_bad_manifest_is_refused_as_that_of_nemo(data):
    (data / "manifest.json").write_bytes(b"")
    with raises(ConfigError, "bad_manifest", "manifest.json", "empty"):
        source(data)


def test_manifest_must_not_be_empty():
    with pytest.raises(ValueError, match="manifest"):
        NemoTarredSource(manifest=" ", tars="a.tar")
    with pytest.raises(ValueError, match="tars"):
        NemoTarredSource(manifest="m.json", tars=[])


def test_an_audio_root_that_holds_not_all_archives_is_refused(data):
    with raises(ConfigError, "bad_config_value", "audio_0.tar", "audio_root"):
        source(data, audio_root=str(data / "sharded"))


def test_a_template_of_an_unknown_key_is_refused_without_a_look_at_archives(data):
    made = source(data, speaker="{shardid}")
    for shard in range(2):
        (data / f"audio_{shard}.tar").unlink()
    with raises(ConfigError, "unknown_key", "'shardid'", "did you mean 'shard_id'?"):
        made.check_speaker()


def test_identity_has_sizes_of_archives_and_checksums_of_manifests_and_outlasts_a_copy(data):
    made = source(data)
    before = made.identity()
    assert before["tars"] == {f"{n} audio_{n}.tar": (data / f"audio_{n}.tar").stat().st_size for n in range(2)}
    assert list(before["manifest"]) == ["0 manifest.json"]
    os.utime(data / "audio_0.tar", (0, 0))
    assert source(data).identity() == before
    with (data / "audio_0.tar").open("ab") as stream:
        stream.write(bytes(512))
    assert source(data).identity() != before


def test_records_are_those_of_all_pieces(data):
    assert [record_text(raw) for raw in source(data).records()] == [record_text(raw) for raw in read(source(data), 1)]


def test_prepare_makes_utterances_of_members(data):
    audio = voice_bytes(2.0)
    write_tar(data / "audio_0.tar", [("0a.flac", audio), ("0b.flac", voice_bytes(1.0, seed=1))])
    records = [line("0a.flac", duration=2.0), line("0a-sub1.flac", duration=0.5, offset=1.0), line("0b.flac")]
    write_manifest(data / "manifest.json", [record | {"shard_id": 0, "lang": "en"} for record in records])
    prepared = prepare(data, [{"manifest": f"{data}/manifest.json", "tars": f"{data}/audio_{{0..1}}.tar"}])
    assert prepared.rejects == []
    first, second, third = prepared.kept
    assert first.recording_id == second.recording_id == "rec-audio_0.tar-0a"
    assert (second.cut_id, third.cut_id) == ("cut-rec-audio_0.tar-0a-1.00-0.50", "cut-rec-audio_0.tar-0b-0.00-1.00")
    assert first.speaker == speaker_tag("anna").replace("Tests", "small")
    assert (first.member.size, first.notes.size) == (len(audio), len(audio))
    assert first.custom["shard_id"] == 0


def test_a_configuration_names_it(data):
    values = {"name": "n", "run_dir": "r", "dataset_dir": "d"}
    entry = {"type": "nemo_tarred", "manifest": f"{data}/manifest.json", "tars": f"{data}/audio_{{0..1}}.tar"}
    (made,) = to_config(values | {"sources": [entry]}, "test").sources
    assert isinstance(made, NemoTarredSource)
    assert made.audio_root == str(data)

"""WebDataset archives: which members make a sample, what its record has, and what becomes of bad ones."""

from __future__ import annotations

import json
import os

import pytest
from support.errors import raises
from support.manifests import config_for, run_prepare
from support.tars import tar_bytes, voice_bytes, write_tar

from sharmill.errors import ConfigError
from sharmill.sources import Located, Unreadable, record_text
from sharmill.sources.webdataset import WebDatasetSource


def as_json(**keys):
    return json.dumps(keys).encode()


def source(tars, **keys):
    made = WebDatasetSource(tars=str(tars), **keys)
    made.check()
    return made


def read(made, records_per_piece=2):
    pieces = list(made.pieces(records_per_piece))
    found = [list(made.read(piece.params)) for piece in pieces]
    assert [len(records) for records in found] == [piece.num_records for piece in pieces]
    assert all(piece.num_records == records_per_piece for piece in pieces[:-1])
    assert [record_text(r) for r in made.records()] == [record_text(r) for records in found for r in records]
    return [record for records in found for record in records]


def records(made, *, folder=None):
    """The records of what is located, with their audio under "audio"; (reason, detail) of the others."""
    found = []
    for raw in read(made):
        if isinstance(raw, Unreadable):
            found.append((raw.reason, raw.detail))
            continue
        assert isinstance(raw, Located)
        record = json.loads(raw.record)
        if folder:
            data = (folder / raw.member.container).read_bytes()
            record["audio"] = data[raw.member.start : raw.member.start + raw.member.size]
        found.append(record)
    return found


SAMPLE = [("deep/a.flac", b"audio a"), ("deep/a.json", as_json(text="text a", speaker="anna", n=1.10))]


def test_members_of_one_name_are_a_record(tmp_path):
    write_tar(tmp_path / "s-000.tar", [*SAMPLE, ("b.WAV", b"audio b"), ("b.txt", b" text b \r\n")])
    write_tar(tmp_path / "s-001.tar", [("c.txt", "größe".encode()), ("c.mp3", b"audio c"), ("c.cls", b"1")])
    assert records(source(tmp_path / "s-{000..001}.tar"), folder=tmp_path) == [
        {"audio_filepath": "s-000.tar/deep/a.flac", "key": "deep/a", "text": "text a", "speaker": "anna", "n": 1.1,
         "audio": b"audio a"},
        {"audio_filepath": "s-000.tar/b.WAV", "key": "b", "text": "text b", "audio": b"audio b"},
        {"audio_filepath": "s-001.tar/c.mp3", "key": "c", "text": "größe", "audio": b"audio c"},
    ]  # fmt: skip


@pytest.mark.parametrize("records_per_piece", [1, 2, 3, 7])
def test_pieces_may_hold_parts_of_several_archives(records_per_piece, tmp_path):
    for number, count in enumerate([3, 0, 1, 4]):
        members = [(f"{number}-{n}.{end}", b"x") for n in range(count) for end in ("flac", "txt")]
        write_tar(tmp_path / f"{number}.tar", members)
    found = [json.loads(raw.record)["key"] for raw in read(source(tmp_path / "*.tar"), records_per_piece)]
    assert found == ["0-0", "0-1", "0-2", "2-0", "3-0", "3-1", "3-2", "3-3"]


def test_the_key_goes_up_to_the_first_dot_as_in_webdataset(tmp_path):
    members = [("v1.0/a.mic1.flac", b"1"), ("v1.0/a.mic2.flac", b"2"), ("v1.0/a.txt", b"t"), (".hidden.flac", b""),
               ("README", b""), ("v1.0/._a.flac", b"")]  # fmt: skip
    write_tar(tmp_path / "a.tar", members)
    (record,) = records(source(tmp_path / "a.tar", audio_suffixes=["mic2.flac"]), folder=tmp_path)
    assert record == {"audio_filepath": "a.tar/v1.0/a.mic2.flac", "key": "v1.0/a", "text": "t", "audio": b"2"}


@pytest.mark.slow
def test_webdataset_itself_sees_the_same_samples(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    members = [("d.d/a.x.flac", b"1"), ("d.d/a.txt", b"t"), ("b.flac", b"2"), ("none", b""), ("c.JSON", b"{}")]
    write_tar(tmp_path / "a.tar", members)
    theirs = [sample["__key__"] for sample in webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)]
    made = source(tmp_path / "a.tar")
    ours = ["d.d/a", "b", "c"]
    assert [sample.key for sample in made._samples.items(0, 0)] == theirs == ours


def test_columns_give_keys_of_the_json_other_names(tmp_path):
    write_tar(tmp_path / "a.tar", [("a.flac", b""), ("a.json", as_json(sentence="s", text="raw", spk=3))])
    (record,) = records(source(tmp_path / "a.tar", columns={"text": "sentence", "speaker": "spk"}))
    assert record == {"audio_filepath": "a.tar/a.flac", "key": "a", "text": "s", "speaker": 3}


@pytest.mark.parametrize("text", [None, ""])
def test_a_text_file_serves_where_the_json_has_no_text(text, tmp_path):
    write_tar(tmp_path / "a.tar", [("a.flac", b""), ("a.json", as_json(text=text)), ("a.txt", b"t")])
    assert records(source(tmp_path / "a.tar"))[0]["text"] == "t"
    write_tar(tmp_path / "a.tar", [("a.flac", b""), ("a.json", as_json(text="j")), ("a.txt", b"t")])
    assert records(source(tmp_path / "a.tar"))[0]["text"] == "j"


BAD = [
    ([("b.txt", b"t"), ("b.json", b"{}")], "missing_audio", "has no audio; its members end in .txt, .json"),
    ([("b.flac", b""), ("b.wav", b"")], "ambiguous_audio", "several audio files, .flac, .wav"),
    ([("b.flac", b"1"), ("b.flac", b"2")], "ambiguous_audio", "two members .flac"),
    ([("b.flac", b""), ("b.json", b"{}"), ("b.json", b"{}")], "ambiguous_audio", "two members .json"),
    ([("b.flac", b""), ("b.json", b"no JSON")], "malformed", "'b.json' is not JSON"),
    ([("b.flac", b""), ("b.json", b"[1]")], "malformed", "'b.json' is not a JSON object"),
    ([("b.flac", b""), ("b.json", b"[" * 100000)], "malformed", "'b.json' is not"),
    ([("b.flac", b""), ("b.json", b"x" * (16 << 20) + b"x")], "malformed", "16 MiB"),
    ([("b.flac", b""), ("b.txt", "größe".encode("latin-1"))], "malformed", "'b.txt' is not utf-8; set encoding"),
    ([(os.fsdecode("b\xe9".encode("latin-1")) + ".flac", b"")], "malformed", "not UTF-8"),
    ([(f"deep/../{SAMPLE[0][0]}", b"again")], None, ""),
]


@pytest.mark.parametrize(("members", "reason", "words"), BAD)
def test_a_bad_sample_is_one_reject(members, reason, words, tmp_path):
    path = tmp_path / "a.tar"
    names = [(name.encode("utf-8", "surrogateescape"), data) for name, data in [*SAMPLE, *members, ("z.flac", b"z")]]
    path.write_bytes(tar_bytes([(name.decode("utf-8", "surrogateescape"), data) for name, data in names]))
    first, bad, last = records(source(path))
    assert (first["key"], last["key"]) == ("deep/a", "z")
    if reason:
        assert bad[0] == reason
        assert words in bad[1]


def test_the_same_key_again_is_rejected(tmp_path):
    again = [("./deep/a.flac", b"other"), ("./deep/a.txt", b"other")]
    write_tar(tmp_path / "a.tar", [*SAMPLE, ("b.flac", b"b"), *again, ("c.flac", b"c")])
    first, second, third, fourth = records(source(tmp_path / "a.tar"), folder=tmp_path)
    assert (first["audio"], second["audio"], fourth["audio"]) == (b"audio a", b"b", b"c")
    assert third == ("ambiguous_audio", "the archive has an earlier sample 'deep/a'")


def test_texts_in_latin_1_are_read_where_it_is_said(tmp_path):
    write_tar(tmp_path / "a.tar", [("b.flac", b""), ("b.txt", "größe".encode("latin-1"))])
    assert records(source(tmp_path / "a.tar", encoding="latin-1"))[0]["text"] == "größe"


WHOLE = tar_bytes([("a.flac", b"a"), ("a.txt", b"t"), ("b.flac", b"b" * 600), ("b.txt", b"t")])


@pytest.mark.parametrize(
    ("cut", "keys"),
    [
        (len(WHOLE), ["a", "b"]),
        (4608, ["a", "b"]),  # before the end marker
        (4096, ["a"]),  # within b.txt
        (3600, ["a", "b"]),  # within the header of b.txt
        (3300, ["a", "b"]),  # within what fills the last block of b.flac
        (2600, ["a"]),  # within b.flac
        (1500, ["a"]),  # within a header
        (100, []),
        (0, []),
    ],
)
def test_of_an_archive_that_is_cut_off_what_comes_before_is_used_and_the_rest_is_said(cut, keys, tmp_path):
    (tmp_path / "0.tar").write_bytes(WHOLE[:cut])
    write_tar(tmp_path / "1.tar", SAMPLE)
    found = records(source(tmp_path / "*.tar"))
    assert [record["key"] for record in found if isinstance(record, dict)] == [*keys, "deep/a"]
    assert [item[0] for item in found if isinstance(item, tuple)] == ["unreadable_audio"] * (cut < len(WHOLE))
    assert all(f"0.tar is cut off at byte {cut}" in item[1] for item in found if isinstance(item, tuple))


def test_an_archive_without_members_has_no_records(tmp_path):
    (tmp_path / "0.tar").write_bytes(bytes(10240))
    assert list(source(tmp_path / "0.tar").pieces(5)) == []


def test_names_that_lead_out_are_rejected_by_prepare(tmp_path):
    audio = voice_bytes()
    members = [("../../x.flac", audio), ("../../x.txt", b"t"), ("/abs/y.flac", audio), ("/abs/y.txt", b"t")]
    write_tar(tmp_path / "data/a.tar", members)
    entry = {"type": "webdataset", "tars": str(tmp_path / "data/a.tar"), "speaker": "{key}"}
    prepared = run_prepare(config_for(tmp_path / "out", [entry]))
    assert [utterance.audio_filepath for utterance in prepared.kept] == ["a.tar/abs/y.flac"]
    assert [reject["reason"] for reject in prepared.rejects] == ["outside_root"]


def test_prepare_makes_utterances_of_samples(tmp_path):
    members = [("84-1.flac", voice_bytes(2.0)), ("84-1.json", as_json(text="Good day.", duration=2.0, cer=0.01))]
    write_tar(tmp_path / "data/a.tar", [*members, ("bad.flac", b"no audio"), ("bad.txt", b"t")])
    entry = {"type": "webdataset", "tars": str(tmp_path / "data/*.tar"), "speaker": "{key:prefix}", "language": "en"}
    prepared = run_prepare(config_for(tmp_path / "out", [entry], prepare={"unit_records": 1}))
    (utterance,) = prepared.kept
    assert utterance.cut_id == "cut-rec-a.tar-84-1-0.00-2.00"
    assert utterance.speaker == "| Language:en Dataset:small Speaker:84 |"
    assert utterance.custom["cer"] == 0.01
    assert [reject["reason"] for reject in prepared.rejects] == ["unreadable_audio"]


def test_a_template_of_an_unknown_key_is_refused_with_the_nearest_one(tmp_path):
    write_tar(tmp_path / "a.tar", [("a.flac", b""), ("a.json", as_json(speaker_id=3))])
    with raises(ConfigError, "unknown_key", "'speakerid'", "did you mean 'speaker_id'?"):
        source(tmp_path / "a.tar", speaker="{speakerid}").check_speaker()


@pytest.mark.parametrize("spoil", [os.mkfifo, os.mkdir])
def test_what_is_no_archive_is_refused_before_any_work(spoil, tmp_path):
    spoil(tmp_path / "a.tar")
    with raises(ConfigError, "bad_manifest", "a.tar"):
        source(tmp_path / "a.tar")


@pytest.mark.parametrize("tars", ["pipe:cat a.tar", "https://host/a.tar", "s3://bucket/{0..9}.tar"])
def test_commands_and_addresses_are_refused(tars):
    with pytest.raises(ValueError, match="is a command or an address"):
        WebDatasetSource(tars=tars)


def test_identity_is_the_sizes_of_the_archives(tmp_path):
    write_tar(tmp_path / "a.tar", SAMPLE)
    made = source(tmp_path / "a.tar")
    assert made.identity() == {"tars": {"0 a.tar": 10240}}

"""NeMo manifests: shards, pieces, files that are not manifests, and members of tar archives."""

import json

import pytest
from hypothesis import given, strategies as st
from support import sources
from support.project import raises, write_lines
from support.sources import PACKED, pack, read_raw, write_tar

from sharmill.errors import ConfigError
from sharmill.sources.nemo import NemoSource
from sharmill.sources.tars import NemoTarredSource

LINE = b'{"audio_filepath": "a.wav"}\n'


@given(
    lines=st.lists(st.sampled_from([b"", b"  ", b"\t\r", b'{"a": 1}', b"x" * 30, b'{"b": "\xc3\xa9"}\r'])),
    size=st.integers(1, 5),
    last_newline=st.booleans(),
    end=st.sampled_from(["", *PACKED]),
)
def test_pieces_hold_every_line_once_and_count_it(lines, size, last_newline, end, tmp_path_factory):
    path = tmp_path_factory.mktemp("pieces") / "m.json"
    data = b"\n".join(lines) + b"\n" * last_newline
    # Compressed files may be concatenated.
    path.write_bytes(pack(end, data[:20]) + pack(end, data[20:]))
    source = NemoSource(manifest=str(path), audio_root="audio")
    assert read_raw(source, size) == [line.strip() for line in lines if line.strip()]
    pieces = list(source.pieces(size))
    assert all(piece.num_records == size for piece in pieces[:-1])
    backwards = [list(source.read(piece.params)) for piece in reversed(pieces)]
    assert [line for piece in reversed(backwards) for line in piece] == read_raw(source, size)


# The message names the format that a file seems to have.
NO_MANIFESTS = {
    "blank": (b" \n\n\t\n", ""),
    "binary": (bytes(range(256)) * 10, "UTF-16"),
    "zip": (b"PK\x03\x04" + LINE, "zip"),
    **{f"a damaged {end}": (pack(end, LINE * 100)[:-12], "damaged or truncated") for end in PACKED},
    "table": (b"audio_filepath,duration,text\na.wav,2.0,Good day.\n", "CSV"),
    "text": (b"a.wav\nb.wav\n", "JSON"),
    "indented": (json.dumps(json.loads(LINE), indent=2).encode() + b"\n", "JSON"),
    "UTF-16": (LINE.decode().encode("utf-16"), "UTF-16"),
    "UTF-16 without mark": (LINE.decode().encode("utf-16-le"), "UTF-16"),
    "mark": (b"\xef\xbb\xbf" + LINE, "UTF-8"),
    "truncated": (LINE * 5 + LINE[:10], "JSON"),
    "truncated in a letter": (LINE * 5 + b'{"text": "\xc3', "JSON"),
    "array": (b"[\n" + LINE.rstrip() + b",\n" + LINE + b"]\n", "JSON"),
}


@pytest.mark.parametrize("kind", NO_MANIFESTS)
def test_what_is_no_manifest_is_refused_in_one_line(kind, tmp_path):
    data, name = NO_MANIFESTS[kind]
    path = tmp_path / "m.json"
    path.write_bytes(data)
    with raises(ConfigError, "bad_manifest", str(path), name):
        NemoSource(manifest=str(path), audio_root="audio").identity()


def test_lists_shards_and_stars_are_read_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("z", "m_0", "m_1", "b.x", "a.x"):
        (tmp_path / f"{name}.json").write_bytes(b'{"n": "%s"}\n' % name.encode())
    manifest = [str(tmp_path / "z.json"), "~/m_[0..1].json", "~/*.x.json"]
    source = NemoSource(manifest=manifest, audio_root="audio")
    source.check()
    found = [json.loads(line)["n"] for line in read_raw(source)]
    assert found == ["z", "m_0", "m_1", "a.x", "b.x"]
    assert [json.loads(line)["n"] for line in source.records()] == found


@pytest.mark.parametrize("name", ["a.json,b.json", "m_{a..c}.json", "m_{0..9..2}.json", "{a,b"])
def test_a_pattern_that_is_not_read_is_told_how_to_name_files(name, tmp_path):
    with raises(ConfigError, "missing_input", name, "a list of paths, or {0..63}, {1,3}"):
        NemoSource(manifest=f"{tmp_path}/{name}", audio_root="audio").check()


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
        write_lines(tmp_path / f"sharded/manifest_{shard}.json", records)
        lines += records
    write_lines(tmp_path / "manifest.json", lines)
    return tmp_path


def source(folder, manifest="manifest.json", tars="audio__OP_0..1_CL_.tar", **keys):
    def below(value):
        return [f"{folder}/{name}" for name in value] if isinstance(value, list) else f"{folder}/{value}"

    made = NemoTarredSource(manifest=below(manifest), tars=below(tars), **keys)
    made.check()
    return made


def contents(made, folder):
    """(audio_filepath, bytes) for records in archives, (reason, detail) for rejects."""
    found = sources.contents(made, folder, 3)
    return [(row["audio_filepath"], row["audio"]) if isinstance(row, dict) else row for row in found]


EXPECTED = [(f"audio_{n[0]}.tar/{n}", f"data of {n}".encode()) for n in ("0a.flac", "0b.flac", "1a.flac", "1b.flac")]


BACKWARDS = ["sharded/manifest_1.json", "sharded/manifest_0.json"]
# Manifests, and their records in order. Shards are paired by number, not by position.
MANIFESTS = [
    *((name, EXPECTED) for name in ("manifest.json", "sharded/manifest__OP_0..1_CL_.json", "sharded/m*.json")),
    (BACKWARDS, EXPECTED[2:] + EXPECTED[:2]),
]


@pytest.mark.parametrize(("manifest", "expected"), MANIFESTS)
@pytest.mark.parametrize("tars", ["audio__OP_0..1_CL_.tar", "audio_{0..1}.tar", "audio_*.tar", "audio_[0..1].tar"])
def test_records_are_located_in_their_archives(manifest, expected, tars, data):
    assert contents(source(data, manifest, tars), data) == expected


def test_numbers_are_the_last_ones_of_names_as_in_nemo(data):
    for shard in range(2):
        (data / f"audio_{shard}.tar").rename(data / f"audio_16khz-{shard}_00{shard}.tar")
        (data / f"sharded/manifest_{shard}.json").rename(data / f"manifest_{shard}_normalized.json")
    made = source(data, "manifest_{0..1}_normalized.json", "audio_*.tar")
    assert [path.partition("/")[2] for path, _ in contents(made, data)] == ["0a.flac", "0b.flac", "1a.flac", "1b.flac"]


def test_records_of_one_manifest_may_be_in_any_order(data):
    records = [json.loads(text) for text in (data / "manifest.json").read_text().splitlines()]
    write_lines(data / "manifest.json", [records[n] for n in (3, 0, 2, 1)])
    assert contents(source(data), data) == [EXPECTED[n] for n in (3, 0, 2, 1)]


def test_one_archive_needs_no_shard_id_and_no_number(data):
    (data / "audio_1.tar").rename(data / "audio.tar")
    records = [line("1b.flac"), line("1a.flac", shard_id=7)]
    write_lines(data / "manifest.json", records)
    made = source(data, tars="audio.tar")
    assert [path for path, _ in contents(made, data)] == ["audio.tar/1b.flac", "audio.tar/1a.flac"]


def test_buckets_with_the_same_numbers_pair_entry_by_entry(data):
    for bucket in ("b1", "b2"):
        for shard in range(2):
            write_tar(data / f"{bucket}/audio_{shard}.tar", [("x.flac", f"{bucket} {shard}".encode())])
        write_lines(data / f"{bucket}/manifest.json", [line("x.flac", shard_id=shard) for shard in range(2)])
    made = source(data, ["b1/manifest.json", "b2/manifest.json"], ["b1/audio_{0..1}.tar", "b2/audio_{0..1}.tar"])
    expected = [(f"{b}/audio_{n}.tar/x.flac", f"{b} {n}".encode()) for b in ("b1", "b2") for n in range(2)]
    assert contents(made, data) == expected


def test_values_of_records_stay_as_they_are_written(data):
    written = b'{"duration":1.1,"audio_filepath":"0a.flac","shard_id":0,"n":123456789012345678901234567890,"x":NaN}'
    write_lines(data / "manifest.json", [written])
    (record,) = read_raw(source(data))
    assert record.record.replace(b": ", b":").replace(b", ", b",") == written.replace(b"0a", b"audio_0.tar/0a")


# Members of an archive, names in records, and the members found.
MEMBERS = [
    # Segments are named by -sub.
    ([("0a.flac", b"0"), ("0b.flac", b"1")], ["0a.flac", "0a-sub1.flac", "0a-sub12.flac", "0b.flac", "0a-sub3"],
     [*[("audio_0.tar/0a.flac", b"0")] * 3, ("audio_0.tar/0b.flac", b"1"),
      ("missing_audio", "the archive audio_0.tar has no file named '0a'")]),
    ([("0a.flac", b"0"), ("0a-sub1.flac", b"1")], ["0a-sub1.flac", "0a-sub2.flac"],
     [("audio_0.tar/0a-sub1.flac", b"1"), ("audio_0.tar/0a.flac", b"0")]),
    # The last one is rejected by prepare as outside_root.
    ([("./deep/a.flac", b"1"), ("/abs/b.flac", b"2"), ("../c.flac", b"3")],
     ["deep/a.flac", "./deep//a.flac", "abs/b.flac", "/abs/b.flac", "../c.flac"],
     [*[("audio_0.tar/deep/a.flac", b"1")] * 2, *[("audio_0.tar/abs/b.flac", b"2")] * 2,
      ("audio_0.tar/../c.flac", b"3")]),
    ([("a.flac", b"1"), ("b.flac", "a.flac"), ("c.flac", "./b.flac"), ("d.flac", "e.flac")], ["c.flac", "d.flac"],
     [("audio_0.tar/c.flac", b"1"),
      ("missing_audio", "the archive audio_0.tar has no file named 'd.flac'")]),
]  # fmt: skip


@pytest.mark.parametrize(("members", "names", "expected"), MEMBERS)
def test_names_of_records_find_members(members, names, expected, data):
    write_tar(data / "audio_0.tar", members)
    write_lines(data / "manifest.json", [line(name, shard_id=0, offset=0.5) for name in names])
    assert contents(source(data), data) == expected


def test_no_archive_holds_up_the_planning(data):
    made = source(data)
    for shard in range(2):
        (data / f"audio_{shard}.tar").unlink()
    assert [piece.num_records for piece in made.pieces(3)] == [3, 1]


MISMATCHES = [
    (
        {"manifest": "sharded/manifest_{0..1}.json", "tars": "audio_0.tar"},
        "with the numbers 1",
    ),
    ({"manifest": BACKWARDS, "tars": "audio_{0..2}.tar"}, "numbers 2"),
    ({"tars": ["audio_0.tar", "audio_0.tar"]}, "has the same number 0 as another file"),
    ({"tars": ["audio_0.tar", "plain.tar"]}, "plain.tar has no number in its name"),
]


@pytest.mark.parametrize(("keys", "words"), MISMATCHES)
def test_manifests_and_archives_that_do_not_pair_are_refused(keys, words, data):
    for name in ("audio_2.tar", "plain.tar"):
        (data / name).write_bytes((data / "audio_0.tar").read_bytes())
    with raises(ConfigError, "bad_config_value", words):
        source(data, **keys)

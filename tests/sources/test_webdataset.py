"""WebDataset archives: the members of a sample, its record, and rejects for bad samples."""

import json
import subprocess

import pytest
from support.sources import contents, read, tar_bytes, write_tar

from sharmill.sources.tars import WebDatasetSource


def as_json(**keys):
    return json.dumps(keys).encode()


def source(tars, **keys):
    made = WebDatasetSource(tars=str(tars), **keys)
    made.check()
    return made


SAMPLE = [("deep/a.flac", b"audio a"), ("deep/a.json", as_json(text="text a", speaker="anna", n=1.10))]


def test_members_of_one_name_are_a_record(tmp_path):
    write_tar(tmp_path / "s-000.tar", [*SAMPLE, ("b.WAV", b"audio b"), ("b.txt", b" text b \r\n")])
    write_tar(tmp_path / "s-001.tar", [("c.txt", "größe".encode()), ("c.mp3", b"audio c"), ("c.cls", b"1")])
    assert contents(source(tmp_path / "s-{000..001}.tar"), tmp_path) == [
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
    found = [record["key"] for record in read(source(tmp_path / "*.tar"), records_per_piece)]
    assert found == ["0-0", "0-1", "0-2", "2-0", "3-0", "3-1", "3-2", "3-3"]


def text_beside(text):
    return [("a.flac", b"1"), ("a.json", as_json(text=text)), ("a.txt", b"t")]


# Members of an archive, keys of the source, and the record. Keys end at the first dot, as in webdataset; a text file is
# used if the JSON has no text.
RECORDS = [
    ([("v1.0/a.mic1.flac", b"2"), ("v1.0/a.mic2.flac", b"1"), ("v1.0/a.txt", b"t"), (".hidden.flac", b""),
      ("README", b""), ("v1.0/._a.flac", b"")], {"audio_suffixes": ["mic2.flac"]},
     {"audio_filepath": "a.tar/v1.0/a.mic2.flac", "key": "v1.0/a", "text": "t"}),
    ([("a.flac", b"1"), ("a.json", as_json(sentence="s", text="raw", spk=3))],
     {"columns": {"text": "sentence", "speaker": "spk"}},
     {"audio_filepath": "a.tar/a.flac", "key": "a", "text": "s", "speaker": 3}),
    ([("a.flac", b"1"), ("a.json", as_json(said=[{"en": "s"}]))], {"columns": {"text": "said.0.en"}},
     {"audio_filepath": "a.tar/a.flac", "key": "a", "text": "s", "said": [{"en": "s"}]}),
    *((text_beside(text), {}, {"audio_filepath": "a.tar/a.flac", "key": "a", "text": text or "t"})
      for text in (None, "", "j")),
]  # fmt: skip


@pytest.mark.parametrize(("members", "keys", "expected"), RECORDS)
def test_records(members, keys, expected, tmp_path):
    write_tar(tmp_path / "a.tar", members)
    assert contents(source(tmp_path / "a.tar", **keys), tmp_path) == [expected | {"audio": b"1"}]


@pytest.mark.parametrize(("format", "deep"), [("ustar", ""), ("gnu", "deep" * 30 + "/"), ("pax", "deep" * 30 + "/")])
def test_hard_links_of_tar_have_the_bytes_of_their_files(format, deep, tmp_path):
    (tmp_path / f"in/{deep}").mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / f"in/{deep}{name}.txt").write_text(f"text {name}")
    (tmp_path / f"in/{deep}a.flac").write_bytes(b"audio")
    (tmp_path / f"in/{deep}b.flac").hardlink_to(tmp_path / f"in/{deep}a.flac")
    command = ["tar", f"--format={format}", "--sort=name", "-C", tmp_path / "in", "-cf", tmp_path / "s.tar", "."]
    subprocess.run(command, check=True)
    for size in (1, 100):
        found = contents(source(tmp_path / "s.tar"), tmp_path, size)
        assert [(one["text"], one["audio"]) for one in found] == [("text a", b"audio"), ("text b", b"audio")]


# Name of a link, its target, and the outcome for its sample.
LINKS = [
    ("b.flac", "a.flac", b"1"), ("b.flac", "./a.flac", b"1"), ("./b.flac", "/a.flac", b"1"),
    ("b.flac", "link.flac", b"1"), ("b.flac", "b.flac", "missing_audio"), ("b.flac", "../../a.flac", "missing_audio"),
    ("b.flac", "lost.flac", "missing_audio"), ("b.txt", "../a.txt", "malformed"),
]  # fmt: skip


@pytest.mark.parametrize("first", ["a.flac", "./a.flac"])
@pytest.mark.parametrize(("name", "target", "expected"), LINKS)
def test_a_hard_link_has_its_bytes_or_its_sample_is_rejected(first, name, target, expected, tmp_path):
    members = [(first, b"1"), ("link.flac", first), ("lost.flac", "none"), (name, target)]
    members += [("b.flac", b"2")] if name == "b.txt" else []
    path = write_tar(tmp_path / "a.tar", members)
    for size in (1, 100):
        found = contents(source(path), tmp_path, size)
        results = [one[0] if isinstance(one, tuple) else one["audio"] for one in found]
        assert results == [b"1", b"1", "missing_audio", expected]


WHOLE = tar_bytes([("a.flac", b"a"), ("a.txt", b"t"), ("b.flac", b"b" * 600), ("b.txt", b"t")])


@pytest.mark.parametrize(
    ("cut", "keys"),
    [
        (len(WHOLE), ["a", "b"]),
        (4608, ["a", "b"]),  # before the end marker
        (4096, ["a"]),  # within b.txt
        (3600, ["a", "b"]),  # within the header of b.txt
        (3300, ["a", "b"]),  # within the padding of b.flac
        (2600, ["a"]),  # within b.flac
        (1500, ["a"]),  # within a header
        (100, []),
        (0, []),
    ],
)
def test_an_archive_that_is_cut_off_is_used_up_to_the_damage(cut, keys, tmp_path):
    (tmp_path / "0.tar").write_bytes(WHOLE[:cut])
    write_tar(tmp_path / "1.tar", SAMPLE)
    found = contents(source(tmp_path / "*.tar"), tmp_path)
    assert [record["key"] for record in found if isinstance(record, dict)] == [*keys, "deep/a"]
    assert [item[0] for item in found if isinstance(item, tuple)] == ["unreadable_audio"] * (cut < len(WHOLE))
    assert all(f"0.tar is cut off at byte {cut}" in item[1] for item in found if isinstance(item, tuple))

"""WeNet's lists: records of data.list and of archives, and rejects for bad lines."""

import os

from support import sources
from support.project import write_lines

from sharmill.sources import UnreadableRecord
from sharmill.sources.tars import WenetSource


def read(made):
    found = sources.read(made, 2)
    return [(row.reason, row.detail) if isinstance(row, UnreadableRecord) else row for row in found]


def raw(tmp_path, lines, **keys):
    path = write_lines(tmp_path / "data.list", lines)
    made = WenetSource(data_list=str(path), audio_root=str(tmp_path / "audio"), **keys)
    made.check()
    return made


def shards(tmp_path, lines, **keys):
    path = tmp_path / "shards.list"
    path.write_text("".join(f"{line}\n" for line in lines))
    made = WenetSource(data_list=str(path), data_type="shard", **{"audio_root": str(tmp_path)} | keys)
    made.check()
    return made


def test_lines_of_raw_lists_become_records(tmp_path):
    lines = [
        {"key": "84-1", "wav": "a.wav", "txt": "text a", "lang": "zh"},
        {"key": "84-1-2", "wav": "/data/b.wav", "txt": "text b", "start": 1.5, "end": 4},
    ]
    assert read(raw(tmp_path, lines)) == [
        {"key": "84-1", "lang": "zh", "audio_filepath": "a.wav", "text": "text a"},
        {"key": "84-1-2", "audio_filepath": "/data/b.wav", "text": "text b", "offset": 1.5, "duration": 2.5},
    ]


def test_the_key_gives_the_speaker_by_a_pattern(tmp_path):
    lines = [{"key": key, "wav": "a.wav", "txt": "t"} for key in ("BAC009S0002W0122", "other", 3)]
    found = read(raw(tmp_path, lines, key_pattern="BAC[0-9]+(?P<speaker>S[0-9]+)W"))
    assert [record.get("speaker") for record in found] == ["S0002", None, None]


SAMPLE = [("a.wav", b"audio"), ("a.txt", " größe\n".encode())]


def test_archives_of_a_list_are_read_in_order(tmp_path):
    sources.write_tar(
        tmp_path / "one/s.tar", [*SAMPLE, ("deep/b.1.flac", b""), ("deep/b.1.txt", b"t"), ("b.2.lang", b"zh")]
    )
    sources.write_tar(tmp_path / "s.tar", SAMPLE)
    found = read(shards(tmp_path, ["one/s.tar\r", "", f"{tmp_path}/./s.tar"]))
    assert found == [
        {"audio_filepath": "one/s.tar/a.wav", "key": "a", "text": "größe"},
        {"audio_filepath": "one/s.tar/deep/b.1.flac", "key": "deep/b.1", "text": "t"},
        ("missing_audio", "the sample has no audio; the suffixes of its members are .lang"),
        {"audio_filepath": "s.tar/a.wav", "key": "a", "text": "größe"},
    ]


def test_bad_archives_are_rejected_and_others_are_read(tmp_path):
    sources.write_tar(tmp_path / "s.tar", SAMPLE)
    (tmp_path / "cut.tar").write_bytes(sources.tar_bytes(SAMPLE)[:1540])
    (tmp_path / "text.tar").write_text("no archive\n" * 100)
    (tmp_path / "folder.tar").mkdir()
    os.mkfifo(tmp_path / "fifo.tar")
    (tmp_path / "out.tar").symlink_to(os.devnull)
    names = ["none.tar", "cut.tar", "text.tar", "folder.tar", "fifo.tar", "out.tar", "../x.tar", "/etc/x.tar",
             "pipe:cat s.tar", "cat s.tar |", "http://host/s.tar", "s.tar"]  # fmt: skip
    found = read(shards(tmp_path, names))
    assert [item[0] for item in found[:-1]] == [
        "missing_audio", "unreadable_audio", "unreadable_audio", "unreadable_audio", "unreadable_audio",
        "outside_root", "outside_root", "outside_root", "outside_root", "outside_root", "outside_root",
    ]  # fmt: skip
    assert "cut.tar is cut off at byte 1540, within its member 'a.txt'" in found[1][1]
    assert "is damaged at byte 0: there is no header" in found[2][1]
    assert "is a URL and not below the audio root" in found[10][1]
    assert found[-1]["key"] == "a"

"""Folders of audio with texts beside them, or at the same place below another folder."""

from __future__ import annotations

import os

import pytest
from support.errors import raises
from support.source_rows import read

from sharmill.errors import ConfigError
from sharmill.sources.folder import FolderSource


@pytest.fixture
def tree(tmp_path):
    """Returns a function: names of files and their bytes -> the folder that has them."""

    def make(**files):
        for name, data in files.items():
            path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return tmp_path

    return make


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_audio_in_the_order_of_names_with_the_text_beside_it(size, tree):
    root = tree(
        b__2_DOT_wav=b"", b__2_DOT_txt=b" two\r\n", b__1_DOT_FLAC=b"", b__1_DOT_lab=b"one", b__notes_DOT_txt=b"x",
        a__x__3_DOT_mp3=b"", c_DOT_wav=b"", c_DOT_normalized_DOT_txt=b"\xef\xbb\xbfsee", a__readme=b"",
        _DOT_hid_DOT_wav=b"",
    )  # fmt: skip
    assert read(FolderSource(audio_root=str(root)), size) == [
        {"audio_filepath": "c.wav", "text": "see"},
        {"audio_filepath": "a/x/3.mp3"},
        {"audio_filepath": "b/1.FLAC", "text": "one"},
        {"audio_filepath": "b/2.wav", "text": "two"},
    ]


def test_vctk(tree):
    root = tree(wav48__p225__p225_001_mic1_DOT_flac=b"", wav48__p225__p225_001_mic2_DOT_flac=b"",
                txt__p225__p225_001_DOT_txt=b"Please call Stella.\n")  # fmt: skip
    keys = {"audio_root": str(root / "wav48"), "text_root": str(root / "txt")}
    source = FolderSource(**keys, audio_suffixes=["_mic1.flac"])
    source.check()
    assert read(source) == [{"audio_filepath": "p225/p225_001_mic1.flac", "text": "Please call Stella."}]


def test_texts_that_cannot_be_read(tree):
    root = tree(a_DOT_wav=b"", a_DOT_txt="grün".encode("latin-1"), b_DOT_wav=b"", b_DOT_txt=b"x" * ((1 << 20) + 1))
    assert [(row.reason, row.record) for row in read(FolderSource(audio_root=str(root)))] == [
        ("malformed", "a.wav"), ("malformed", "b.wav"),
    ]  # fmt: skip
    assert read(FolderSource(audio_root=str(root), encoding="latin-1"))[0] == {
        "audio_filepath": "a.wav",
        "text": "grün",
    }


def test_a_text_that_this_user_may_not_read(tree, monkeypatch):
    root = tree(a_DOT_wav=b"", a_DOT_txt=b"one", b_DOT_wav=b"", b_DOT_txt=b"two")
    open_path = os.open

    def refuse_one(path, *arguments, **options):
        if str(path).endswith("a.txt"):
            raise PermissionError(13, "Permission denied")
        return open_path(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse_one)
    refused, kept = read(FolderSource(audio_root=str(root)))
    assert (refused.reason, refused.record) == ("malformed", "a.wav")
    assert kept == {"audio_filepath": "b.wav", "text": "two"}


def test_names_that_are_not_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    for name in (b"\xfe.wav", b"a.wav"):
        (folder / os.fsdecode(name)).touch()
    assert [row.reason for row in read(FolderSource(audio_root=str(tmp_path)))] == ["malformed"] * 2


def test_identity_tells_other_files_and_texts(tree):
    root = tree(a_DOT_wav=b"1", a_DOT_txt=b"one")
    found = [FolderSource(audio_root=str(root)).identity()]
    for changes in ({"a_DOT_wav": b"22"}, {"a_DOT_txt": b"three"}, {"b_DOT_wav": b"1"}, {"a_DOT_lab": b""}):
        tree(**changes)
        found.append(FolderSource(audio_root=str(root)).identity())
    assert [identity["files"][0] for identity in found] == [1, 1, 1, 2, 2]
    assert len({identity["files"][1] for identity in found}) == 4  # a .lab beside a .txt is not read


def test_links_to_folders_are_not_followed(tree):
    root = tree(a__b_DOT_wav=b"")
    (root / "link").symlink_to(root / "a")
    assert [row["audio_filepath"] for row in read(FolderSource(audio_root=str(root)))] == ["a/b.wav"]


def test_a_folder_without_audio_is_refused(tree):
    root = tree(a_DOT_txt=b"")
    with raises(ConfigError, "missing_input", str(root)):
        FolderSource(audio_root=str(root)).check()


def test_a_missing_folder_of_texts_is_refused(tree):
    root = tree(a_DOT_wav=b"")
    with raises(ConfigError, "missing_input", "text_root"):
        FolderSource(audio_root=str(root), text_root=str(root / "none")).check()


@pytest.mark.parametrize(
    "keys", [{"audio_root": None}, {"audio_root": ["a"]}, {"audio_suffixes": []}, {"encoding": "x"}]
)
def test_keys_that_make_no_sense(keys):
    with pytest.raises(ValueError, match=r"."):
        FolderSource(**{"audio_root": "a"} | keys)


def test_a_template_with_a_key_that_no_file_has(tree):
    root = tree(a_DOT_wav=b"", a_DOT_txt=b"one")
    with raises(ConfigError, "unknown_key", "'txt'"):
        FolderSource(audio_root=str(root), speaker="{txt}").check_speaker()

"""Folders of audio with texts beside it, or in a parallel folder."""

import pytest
from support.sources import read

from sharmill.sources.folder import FolderSource


@pytest.fixture
def tree(tmp_path):
    """Return a function from file names and contents to the folder with them."""

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


def test_links_to_folders_are_not_followed(tree):
    root = tree(a__b_DOT_wav=b"")
    (root / "link").symlink_to(root / "a")
    assert [row["audio_filepath"] for row in read(FolderSource(audio_root=str(root)))] == ["a/b.wav"]

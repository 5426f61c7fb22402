"""Audio roots: one normal form for every spelling of a path, and no way out."""

from __future__ import annotations

import pytest

from sharmill.audio.roots import AudioRoots, normalise_path
from sharmill.errors import RejectRecord
from sharmill.manifest import Segment


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a.wav", "a.wav"), ("./a//b.wav", "a/b.wav"), ("x/../a.wav", "a.wav"), ("/data/a.wav", "a.wav"), ("", "")],
)
def test_every_spelling_has_one_normal_form(path, expected):
    assert normalise_path(path, ["/link", "/data"]) == expected


@pytest.mark.parametrize("path", ["../a.wav", "a/../../b", "/else/a.wav", "/database/a.wav", "pipe:ls", "ls |", "a\0b"])
def test_what_leaves_the_root_or_is_no_path_is_rejected(path):
    with pytest.raises(RejectRecord) as caught:
        normalise_path(path, ["/data"])
    assert caught.value.reason == "outside_root"


def test_a_file_has_one_real_path_by_whatever_root_and_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a.wav").touch()
    (tmp_path / "real/b.wav").symlink_to("a.wav")
    (tmp_path / "link").symlink_to("real")
    roots = AudioRoots.of([tmp_path / "link", tmp_path / "real"])
    paths = {roots.real_path(Segment(source, name, 0.0, 1.0, True)) for source in (0, 1) for name in ("a.wav", "b.wav")}
    assert paths == {str((tmp_path / "real/a.wav").resolve())}
    assert roots.first_equal(1) == 0


def test_a_root_whose_name_begins_like_another_is_another_folder(tmp_path):
    for name in ("data", "database"):
        (tmp_path / name).mkdir()
    (tmp_path / "database/a.wav").touch()
    (tmp_path / "data/a.wav").symlink_to(tmp_path / "database/a.wav")
    with pytest.raises(RejectRecord) as caught:
        AudioRoots.of([tmp_path / "data"]).locate(Segment(0, "a.wav", 0.0, 1.0, True))
    assert caught.value.reason == "outside_root"

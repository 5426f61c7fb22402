"""Audio roots: resolution of paths and URLs, and rejection of paths outside a root."""

import pytest
from support.project import raises

from sharmill.audio.roots import AudioRoots, normalise_path
from sharmill.errors import ConfigError, DeviceError, RejectRecord
from sharmill.files.cache import Cache
from sharmill.manifest import Segment

ROOTS = ("/link", "/data", "https://host/speech")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.wav", "a.wav"),
        ("./a//b.wav", "a/b.wav"),
        ("x/../a.wav", "a.wav"),
        ("", ""),
        ("/data/a.wav", "a.wav"),
        ("/data/./84/a.flac", "84/a.flac"),
        ("https://host/speech/84/a.flac", "84/a.flac"),
        ("https://host/speech/get?id=3&to=../x", "get?id=3&to=../x"),
    ],
)
def test_every_spelling_has_one_normal_form(path, expected):
    assert normalise_path(path, ROOTS) == expected


@pytest.mark.parametrize(
    "path",
    ["https://host/speeches/a.flac", "http://host/speech/a.flac", "https://host/speech/../a.flac", "s3://b/a.flac",
     "https://host/speech/%2e%2e/a.flac", "https://host/speech/x\\..\\a.flac", "file:///data/a.flac",
     "https://host@evil/speech/a.flac", "https://host/speech%2f..%2fa.flac", "https://host/speech/..?x",
     "https://host/speech/..;x/a.flac"],
)  # fmt: skip
def test_paths_outside_are_rejected(path):
    with pytest.raises(RejectRecord, match="outside_root"):
        normalise_path(path, ROOTS)


def test_the_real_name_does_not_depend_on_root_and_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a.wav").touch()
    (tmp_path / "real/b.wav").symlink_to("a.wav")
    (tmp_path / "link").symlink_to("real")
    roots = AudioRoots.of([tmp_path / "link", tmp_path / "real"])
    paths = {roots.real_name(Segment(source, name, 0.0, 1.0, True)) for source in (0, 1) for name in ("a.wav", "b.wav")}
    assert paths == {str((tmp_path / "real/a.wav").resolve())}
    assert roots.place(1, "a.wav") == (0, "a.wav")


def test_roots_with_a_common_name_prefix_are_distinct(tmp_path):
    for name in ("data", "database"):
        (tmp_path / name).mkdir()
    (tmp_path / "database/a.wav").touch()
    (tmp_path / "data/a.wav").symlink_to(tmp_path / "database/a.wav")
    with raises(RejectRecord, "outside_root"):
        AudioRoots.of([tmp_path / "data"]).locate(Segment(0, "a.wav", 0.0, 1.0, True))


def test_roots_are_numbered_over_all_sources(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.wav").touch()
    a, b, c = (str(tmp_path / name) for name in "abc")
    roots = AudioRoots.of([[a, b], c, None, [b, a]])
    roots.check()
    for source, path, place in (
        (0, "a.wav", (0, "a.wav")),
        (0, "b.wav", (1, "b.wav")),
        (0, f"{b}/b.wav", (1, "b.wav")),
        (0, "none.wav", (0, "none.wav")),
        (1, "c.wav", (2, "c.wav")),
        (2, f"{c}/c.wav", (3, f"{c[1:]}/c.wav")),
        (3, "b.wav", (1, "b.wav")),
    ):
        assert roots.place(source, path) == place
    for source, path in ((0, f"{c}/c.wav"), (2, "a.wav"), (1, "../a/a.wav"), (2, "pipe:ls"), (2, "/bin/ls |")):
        with raises(RejectRecord, "outside_root"):
            roots.place(source, path)


@pytest.mark.parametrize(("present", "says"), [(False, "does not exist"), (True, "is empty")])
def test_an_unmounted_root_is_an_error_of_the_node(tmp_path, present, says):
    root = tmp_path / "audio"
    if present:
        root.mkdir()
    roots = AudioRoots.of([str(root), "https://host/audio"])
    with raises(ConfigError, "missing_input", f"{root} {says}"):
        roots.check()
    with raises(DeviceError, "unlike_nodes", f"does not see the audio: the audio root {root} {says}"):
        roots.check_node()
    root.mkdir(exist_ok=True)
    (root / "a.wav").touch()
    roots.check_node()


@pytest.mark.parametrize(
    "path",
    ["%2e%2e/a.flac", "84/..%2F..%2fa.flac", ".%2E", "..\\a.flac", "..%5Ca.flac", "..?x", "84/%2e%2e;x/a.flac"],
)
def test_a_relative_path_cannot_leave_a_url(path, tmp_path):
    # The server does not exist.
    roots = AudioRoots.of(["http://127.0.0.1:9/84", str(tmp_path)], Cache.at(tmp_path / "copies"))
    for way_out in (lambda: roots.place(0, path), lambda: roots.locate(Segment(0, path, 0.0, 1.0, True))):
        with raises(RejectRecord, "outside_root", "leaves the audio root"):
            way_out()
    assert roots.place(1, path) == (1, path)

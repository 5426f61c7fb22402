"""Audio roots: what paths and URLs stand for, what leads out of a root, and what is fetched."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.project import raises
from support.web import serving
from tenacity import wait_none

from sharmill.audio import roots as module
from sharmill.audio.roots import AudioRoots, check_url_root, fetch, normalise_path
from sharmill.errors import ConfigError, DeviceError, RejectRecord
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
def test_what_is_outside(path):
    with pytest.raises(RejectRecord, match="outside_root"):
        normalise_path(path, ROOTS)


def test_a_file_has_one_real_name_by_whatever_root_and_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a.wav").touch()
    (tmp_path / "real/b.wav").symlink_to("a.wav")
    (tmp_path / "link").symlink_to("real")
    roots = AudioRoots.of([tmp_path / "link", tmp_path / "real"])
    paths = {roots.real_name(Segment(source, name, 0.0, 1.0, True)) for source in (0, 1) for name in ("a.wav", "b.wav")}
    assert paths == {str((tmp_path / "real/a.wav").resolve())}
    assert roots.place(1, "a.wav") == (0, "a.wav")


def test_a_root_whose_name_begins_like_another_is_another_folder(tmp_path):
    for name in ("data", "database"):
        (tmp_path / name).mkdir()
    (tmp_path / "database/a.wav").touch()
    (tmp_path / "data/a.wav").symlink_to(tmp_path / "database/a.wav")
    with pytest.raises(RejectRecord) as caught:
        AudioRoots.of([tmp_path / "data"]).locate(Segment(0, "a.wav", 0.0, 1.0, True))
    assert caught.value.reason == "outside_root"


def test_roots_are_numbered_over_all_sources(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.wav").touch()
    a, b, c = (str(tmp_path / name) for name in "abc")
    roots = AudioRoots.of([[a, b], c, None, [b, a]])
    roots.check()
    assert roots.place(0, "a.wav") == (0, "a.wav")
    assert roots.place(0, "b.wav") == (1, "b.wav")
    assert roots.place(0, f"{b}/b.wav") == (1, "b.wav")
    assert roots.place(0, "none.wav") == (0, "none.wav")
    assert roots.place(1, "c.wav") == (2, "c.wav")
    assert roots.place(2, f"{c}/c.wav") == (3, f"{c[1:]}/c.wav")
    assert roots.place(3, "b.wav") == (1, "b.wav")
    for source, path in ((0, f"{c}/c.wav"), (2, "a.wav"), (1, "../a/a.wav"), (2, "pipe:ls"), (2, "/bin/ls |")):
        with pytest.raises(RejectRecord) as caught:
            roots.place(source, path)
        assert caught.value.reason == "outside_root"


@pytest.mark.parametrize(("present", "says"), [(False, "does not exist"), (True, "is empty")])
def test_a_root_that_is_not_mounted_is_an_error_of_the_node_for_a_rank(tmp_path, present, says):
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


DATA = bytes(range(256)) * 64


@pytest.fixture
def web(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(module, "_wait", wait_none())
    (tmp_path / "web/84").mkdir(parents=True)
    (tmp_path / "web/84/a.flac").write_bytes(DATA)
    with serving(tmp_path / "web") as server:
        yield server


def fetched(web, path, copies):
    return fetch(f"{web.url}{path}", copies, {web.url})


def test_threads_that_want_one_file_fetch_it_once(web, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: fetched(web, "/84/a.flac", tmp_path / "copies"), range(32)))
    assert [path.read_bytes() for path in set(paths)] == [DATA]
    assert web.requests == {"/84/a.flac": 1}


@pytest.mark.parametrize(
    ("path", "requests"),
    [
        *((f"/once-{error}/84/a.flac", 2) for error in ("500", "503", "429", "408", "cut")),
        ("/endless/84/a.flac", 1),
        ("/to/x?/84/a.flac", 1),
        # A length that is no number says nothing.
        *((f"/length/84/a.flac?{length}", 1) for length in ("16384,%2016384", "many", "-1", "9" * 5000)),
    ],
)
def test_passing_errors_are_tried_again_and_odd_answers_are_read(path, requests, web, tmp_path):
    assert fetched(web, path, tmp_path / "copies").read_bytes() == DATA
    assert web.requests[path] == requests


@pytest.mark.parametrize(
    ("path", "reason", "said", "requests"),
    [
        ("/84/none.flac", "missing_audio", "404", 1),
        ("/401/84/a.flac", "missing_audio", "401 Unauthorized", 1),
        ("/410/84/a.flac", "missing_audio", "410", 1),
        ("/500/84/a.flac", "missing_audio", "500", 4),
        ("/cut/84/a.flac", "unreadable_audio", "cut off", 4),
        ("/large/84/a.flac", "unreadable_audio", "more than", 1),
        ("/to/x?file:///etc/passwd", "outside_root", "redirects to file://", 1),
        ("/to/x?ftp://127.0.0.1/a.flac", "outside_root", "redirects to ftp://", 1),
        ("/to/x?http://127.0.0.2/a.flac", "outside_root", "redirects to http://127.0.0.2", 1),
        ("/to/x?//other/a.flac", "outside_root", "redirects to http://other", 1),
        ("/to/x?http://%5Bbad", "missing_audio", "redirects to what is no URL", 1),
        ("/length/84/a.flac?16384,5", "missing_audio", "cannot be fetched: .* unmatching", 1),
        ("/length/84/a.flac?99999999999999999999", "unreadable_audio", "more than", 1),
        ("/to/x?/to/y", "missing_audio", "redirects more than 5 times", 1),
    ],
)
def test_what_a_server_says_of_a_file_is_a_reject(path, reason, said, requests, web, tmp_path):
    with pytest.raises(RejectRecord, match=said) as caught:
        fetched(web, path, tmp_path / "copies")
    assert caught.value.reason == reason
    assert web.requests[path] == requests
    assert not [file for file in (tmp_path / "copies").rglob("*") if file.is_file()]


def test_a_busy_server_is_no_reject(web, tmp_path):
    with pytest.raises(ConnectionError, match="503"):
        fetched(web, "/503/84/a.flac", tmp_path)
    assert web.requests == {"/503/84/a.flac": 4}


def test_a_server_out_of_reach_is_no_reject(web, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ConnectionError, match="cannot fetch"):
        fetch(f"{url}/a.flac", tmp_path, {url})


@pytest.mark.parametrize(
    ("root", "said"),
    [
        ("ftp://host/a", "must begin with https"),
        ("file:///etc", "must begin with https"),
        ("https:///a", "needs a host"),
        ("https://me:secret@host/a", "netrc"),
        ("https://host/a?key=1", "before"),
        ("https://[::1/a", "no URL"),
    ],
)
def test_roots_that_cannot_be(root, said):
    with pytest.raises(ValueError, match=said):
        check_url_root(root)


@pytest.mark.parametrize(
    "path",
    ["%2e%2e/a.flac", "84/..%2F..%2fa.flac", ".%2E", "..\\a.flac", "..%5Ca.flac", "..?x", "84/%2e%2e;x/a.flac"],
)
def test_a_relative_path_cannot_leave_a_url(path, web, tmp_path):
    roots = AudioRoots.of([f"{web.url}/84", str(tmp_path)], tmp_path / "copies")
    for way_out in (lambda: roots.place(0, path), lambda: roots.locate(Segment(0, path, 0.0, 1.0, True))):
        with pytest.raises(RejectRecord, match="leaves the audio root") as caught:
            way_out()
        assert caught.value.reason == "outside_root"
    assert not web.requests
    assert roots.place(1, path) == (1, path)

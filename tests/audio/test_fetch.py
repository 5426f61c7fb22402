"""Audio at URLs: fetched once, whole, from the servers that the configuration names only."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.web import serving
from tenacity import wait_none

from sharmill.audio import fetch as module
from sharmill.audio.fetch import check_url_root, copy_of, fetch, is_url, origin, url_below
from sharmill.audio.roots import AudioRoots, normalise_path
from sharmill.errors import RejectRecord
from sharmill.manifest import Segment

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


def test_a_file_is_fetched_once(web, tmp_path):
    paths = {fetched(web, "/84/a.flac", tmp_path / "copies") for _ in range(3)}
    assert [path.read_bytes() for path in paths] == [DATA]
    assert web.requests == {"/84/a.flac": 1}


def test_threads_that_want_one_file_fetch_it_once(web, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: fetched(web, "/84/a.flac", tmp_path / "copies"), range(32)))
    assert len(set(paths)) == 1
    assert web.requests == {"/84/a.flac": 1}


@pytest.mark.parametrize("path", ["/once-500/84/a.flac", "/once-503/84/a.flac", "/once-429/84/a.flac",
                                  "/once-408/84/a.flac", "/once-cut/84/a.flac", "/endless/84/a.flac"])  # fmt: skip
def test_passing_errors_are_tried_again(path, web, tmp_path):
    assert fetched(web, path, tmp_path / "copies").read_bytes() == DATA
    assert web.requests[path] == (2 if "once" in path else 1)


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


@pytest.mark.parametrize("length", ["16384,%2016384", "many", "-1", "9" * 5000])
def test_a_length_that_is_no_number_says_nothing(length, web, tmp_path):
    assert fetched(web, f"/length/84/a.flac?{length}", tmp_path / "copies").read_bytes() == DATA


def test_a_redirect_within_a_root_is_followed(web, tmp_path):
    assert fetched(web, "/to/x?/84/a.flac", tmp_path / "copies").read_bytes() == DATA


def test_a_body_without_a_length_is_bounded(web, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MAX_BYTES", len(DATA) - 1)
    with pytest.raises(RejectRecord, match="has more than 16,383 bytes"):
        fetched(web, "/endless/84/a.flac", tmp_path)
    assert not list(tmp_path.glob("??/*"))


@pytest.mark.parametrize("path", ["/84/a.flac", "/drip/84/a.flac"])
def test_a_slow_body_is_given_up(path, web, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LEAST_BYTES_PER_SECOND", 1 << 40)
    monkeypatch.setattr(module, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(module, "_follow", lambda url, origins: module._session().get(url, stream=True))
    with pytest.raises(ConnectionError, match="comes too slowly"):
        fetched(web, path, tmp_path)
    assert web.requests == {path: 4}


def test_a_busy_server_is_no_reject(web, tmp_path):
    with pytest.raises(ConnectionError, match="503"):
        fetched(web, "/503/84/a.flac", tmp_path)
    assert web.requests == {"/503/84/a.flac": 4}


def test_a_server_out_of_reach_is_no_reject(web, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ConnectionError, match="cannot fetch"):
        fetch(f"{url}/a.flac", tmp_path, {url})


def test_copies_are_called_by_their_url(tmp_path):
    names = {copy_of(f"https://host/{name}", tmp_path) for name in ("a", "a/b", "a?x=1", "A")}
    assert len(names) == 4
    assert all(path.parent.parent == tmp_path and path.name.isalnum() for path in names)


def test_urls():
    assert [is_url(path) for path in ("https://h/a", "S3://b/a", "/a://b", "a:b//c")] == [True, True, False, False]
    assert origin("HTTPS://Host:8/a") == "https://host:8"
    assert url_below("http://h", "a b#1%20.wav?x=1&y=[2]") == "http://h/a%20b%231%20.wav?x=1&y=[2]"


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


class TestRoots:
    ROOTS = ("https://host/speech", "/data")

    @pytest.mark.parametrize(
        ("path", "relative"),
        [
            ("https://host/speech/84/a.flac", "84/a.flac"),
            ("https://host/speech/get?id=3&to=../x", "get?id=3&to=../x"),
            ("/data/./84/a.flac", "84/a.flac"),
        ],
    )
    def test_what_is_below(self, path, relative):
        assert normalise_path(path, self.ROOTS) == relative

    @pytest.mark.parametrize(
        "path",
        ["https://host/speeches/a.flac", "http://host/speech/a.flac", "https://host/speech/../a.flac", "s3://b/a.flac",
         "https://host/speech/%2e%2e/a.flac", "https://host/speech/x\\..\\a.flac", "file:///data/a.flac",
         "https://host@evil/speech/a.flac", "https://host/speech%2f..%2fa.flac", "https://host/speech/..?x", "https://host/speech/..;x/a.flac"],
    )  # fmt: skip
    def test_what_is_outside(self, path):
        with pytest.raises(RejectRecord) as caught:
            normalise_path(path, self.ROOTS)
        assert caught.value.reason == "outside_root"

    @pytest.mark.parametrize(
        "path",
        ["%2e%2e/a.flac", "84/..%2F..%2fa.flac", ".%2E", "..\\a.flac", "..%5Ca.flac", "..?x", "84/%2e%2e;x/a.flac"],
    )
    def test_a_relative_path_cannot_leave_a_url(self, path, web, tmp_path):
        roots = AudioRoots.of([f"{web.url}/84", str(tmp_path)], tmp_path / "copies")
        for way_out in (lambda: roots.place(0, path), lambda: roots.locate(Segment(0, path, 0.0, 1.0, True))):
            with pytest.raises(RejectRecord, match="leaves the audio root") as caught:
                way_out()
            assert caught.value.reason == "outside_root"
        assert not web.requests
        assert roots.place(1, path) == (1, path)

    def test_dots_that_go_nowhere_are_a_name(self, web):
        roots = AudioRoots.of([f"{web.url}/84"])
        for path in ("a%2e.flac", "%252e%252e/a.flac", "...", "get?id=3&to=.."):
            assert roots.place(0, path) == (0, path)

    def test_no_url_without_a_root_that_is_one(self, tmp_path):
        for root in (None, str(tmp_path)):
            with pytest.raises(RejectRecord, match="fetched where audio_root is the begin of it"):
                AudioRoots.of([root]).place(0, "http://host/a.flac")

    def test_a_relative_path_is_below_the_folder_that_has_it(self, tmp_path):
        (tmp_path / "here.flac").touch()
        roots = AudioRoots.of([["https://host/speech", str(tmp_path)]])
        roots.check()
        assert roots.place(0, "here.flac") == (1, "here.flac")
        assert roots.place(0, "there.flac") == (0, "there.flac")
        assert roots.place(0, "https://host/speech/here.flac") == (0, "here.flac")

    def test_segments_are_read_from_the_copy(self, web, tmp_path):
        roots = AudioRoots.of([f"{web.url}/84/"], tmp_path / "copies")
        segment = Segment(0, "a.flac", 0.0, 1.0, True)
        assert roots.locate(segment).read_bytes() == DATA
        assert roots.real_name(segment) == f"{web.url}/84/a.flac"

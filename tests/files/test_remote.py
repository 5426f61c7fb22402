"""Files behind URLs: server responses, copies in a cache of limited size, and URLs as paths."""

import dataclasses
import multiprocessing
import os
import pickle
import re
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support.project import examples, make_bare_dataset, raises
from support.stores import AIStoreStandIn, Fault, GcsStandIn, S3Store
from support.web import serving

from sharmill.errors import ConfigError, RejectRecord
from sharmill.files import pace
from sharmill.files.cache import Cache
from sharmill.files.location import RemoteLocation, check_url
from sharmill.files.remote import request
from sharmill.shar import open_shar

DATA = bytes(range(256)) * 64


@pytest.fixture
def web(tmp_path, monkeypatch, no_waits):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "web/84").mkdir(parents=True)
    (tmp_path / "web/84/a.flac").write_bytes(DATA)
    with serving(tmp_path / "web") as server:
        yield server


def fetched(web, path, copies):
    return Cache(copies, 1 << 40).get(f"{web.url}{path}", max_bytes=4 << 30)


def test_threads_that_want_one_file_fetch_it_once(web, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: fetched(web, "/84/a.flac", tmp_path / "copies"), range(32)))
    assert [(path.read_bytes(), path.stat().st_mode & 0o777) for path in set(paths)] == [(DATA, 0o600)]
    assert web.requests == {"/84/a.flac": 1}


@pytest.mark.parametrize(
    ("path", "requests"),
    [
        *((f"/once-{error}/84/a.flac", 2) for error in ("500", "503", "429", "408", "cut")),
        ("/endless/84/a.flac", 1),
        ("/to/x?/84/a.flac", 1),
        # An invalid length is ignored.
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
        ("/to/x?http://%5Bbad", "missing_audio", "redirects to an invalid URL", 1),
        ("/length/84/a.flac?16384,5", "missing_audio", "cannot be fetched: .* unmatching", 1),
        ("/length/84/a.flac?99999999999999999999", "unreadable_audio", "more than", 1),
        ("/to/x?/to/y", "missing_audio", "redirects more than 5 times", 1),
        ("/to/x?//me:secret@other/a?secret", "outside_root", "redirects to http://other", 1),
        ("/raw/a?HTTP/1.1%20404%20No%0AHost%0A%0A", "missing_audio", r"/raw/a\?\.\.\.: 404", 1),
        ("/raw/a?HTTP/1.1%20206%20Part%0AContent-Range:%20bytes%200-1/2%0A%0Aaa", "missing_audio", "206 Part", 1),
        *(
            (f"/raw/a?HTTP/1.1%20200%20OK%0A{rest}", "unreadable_audio", "does not answer in HTTP", 4)
            for rest in ("X:~%0A%0A", 120 * "X:a%0A" + "%0A")
        ),
        ("/raw/a?HELLO", "unreadable_audio", "does not answer in HTTP", 4),
        ("/raw/a?HTTP/1.1%20200%20OK%0ATransfer-Encoding:chunked%0A%0Azz%0A", "unreadable_audio", "cut off", 4),
    ],
)
def test_what_a_server_says_of_a_file_is_a_reject(path, reason, said, requests, web, tmp_path, caplog):
    with pytest.raises(RejectRecord, match=said) as caught:
        fetched(web, path, tmp_path / "copies")
    assert caught.value.reason == reason
    assert web.requests[path] == requests
    shown = caplog.text + "".join(traceback.format_exception(caught.value))
    assert not [text for text in ("secret", f"{web.url}{path}") if text in shown and (text == "secret" or "?" in path)]
    assert {file.name for file in (tmp_path / "copies").rglob("*") if file.is_file()} == {".lock", ".sharmill-cache"}


@pytest.mark.parametrize(
    "answer",
    [
        "HTTP/1.1 200 OK\nX-Long: " + "a" * 70 + "\n\n",
        "HTTP/1.1 100 Continue\n\n" * 3 + "HTTP/1.1 200 OK\n\n",
        "HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n0000000000000000000000000001\na\n0\n\n",
        "HTTP/1.1 200 OK\nContent-Length: 50\n\n" + "a" * 50,
    ],
    ids=["header", "continue", "chunk", "body"],
)
def test_an_answer_that_trickles_is_no_reject(answer, web, tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "SECONDS", 0.5)
    file = RemoteLocation(f"{web.url}/slow/a?{quote(answer)}", Cache(tmp_path / "copies", 1 << 40))
    for ask in (file.fetch, lambda: file.read_head(50)):
        with pytest.raises(ConnectionError, match="timed out"):
            ask()


# Nothing listens at port 9.
@pytest.mark.parametrize(("url", "said"), [("{}/503/84/a.flac", "503"), ("http://127.0.0.1:9/a.flac", "cannot fetch")])
def test_a_server_that_is_busy_or_out_of_reach_is_no_reject(url, said, web, tmp_path):
    with pytest.raises(ConnectionError, match=said):
        Cache(tmp_path / "copies", 1 << 40).get(url.format(web.url))
    assert set(web.requests.values()) <= {4}


@pytest.mark.parametrize(
    ("root", "said"),
    [
        ("ftp://host/a", "must begin with https"),
        ("file:///etc", "must begin with https"),
        ("https:///a", "needs a host"),
        ("https://me:secret@host/a", "netrc"),
        ("https://host/a?key=1", "must not contain"),
        ("https://[::1/a", "not a valid URL"),
        ("http://host/a", "not encrypted"),
        ("http://127.0.0.1.org/a", "not encrypted"),
    ],
)
def test_urls_that_cannot_be(root, said):
    with pytest.raises(ValueError, match=said):
        check_url(root, "audio_root")


def test_the_least_recently_used_copies_are_evicted(web, tmp_path):
    for number in range(8):
        (tmp_path / f"web/84/{number}.flac").write_bytes(bytes([number]) * 1000)
    cache = Cache(tmp_path / "copies", 4500)
    held = cache.get(f"{web.url}/84/0.flac")
    for number in (1, 2, 3, 4, 5, 6, 7, 0, 7):
        assert cache.get(f"{web.url}/84/{number}.flac").read_bytes() == bytes([number]) * 1000
    size = sum(path.stat().st_size for path in (tmp_path / "copies").rglob("*") if path.name.endswith(".flac"))
    assert size <= 4500
    assert held.exists()
    # All but the first copy, which was in use, were evicted and are fetched again.
    assert cache.get(f"{web.url}/84/1.flac").read_bytes() == b"\1" * 1000
    assert [web.requests[f"/84/{number}.flac"] for number in (0, 1, 7)] == [1, 2, 1]


# Names of a cache's copies and other files; and similar names that are not a cache's.
OWN = r"[0-9a-f]{3}/([0-9a-f]{32}(\.\w{1,8}){0,2}|\.(about-)?[0-9a-f]{32}(\.\w{1,8}){0,2}\.[0-9a-f]{32}\.tmp)"
ALMOST = r"\.?(about-|x)?[0-9a-f]{31,33}(\.[a-z]{1,9}){0,3}(\.[0-9a-f]{31,33})?(\.tmp|\.temp)?"
PLACES = st.builds(
    "{}{}".format,
    st.sampled_from(["", "x/", "0f/", "00f/", "00F/", "00f/00f/", "0000f/"]),
    st.from_regex(ALMOST, fullmatch=True) | st.text("a.0-\n\u00e4 tmp", min_size=4, max_size=50),
).filter(lambda name: not re.fullmatch(OWN, name))


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sets(PLACES, max_size=20))
def test_neighbours_survive_any_sweep_and_leftovers_do_not(web, names):
    with TemporaryDirectory() as folder:
        cache = Cache(Path(folder), 10 * len(DATA))
        cache.get(f"{web.url}/84/a.flac")
        for path in [cache.folder / name for name in (f"00f/.{'0' * 32}.flac.{'1' * 32}.tmp", *names)]:
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(DATA)
            os.utime(path, (0, 0))
        cache.get(f"{web.url}/once-500/84/a.flac")
        found = {path.relative_to(folder).as_posix() for path in cache.folder.rglob("*") if path.stat().st_atime == 0}
    assert found == names


def read(options, seed):
    """Return the number of cuts with the correct codes."""
    cuts = open_shar(**options, seed=seed)
    return sum(int((cut.target_codes.load() == cut.supervisions[0].custom["number"] % 1024).all()) for cut in cuts)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_processes_share_a_cache_that_is_smaller_than_the_data(web, tmp_path):
    """Four processes read for a few seconds; SECONDS=120 makes them read longer."""
    dataset = make_bare_dataset(web.folder / "data", [2] * 150, codes=True)
    gib = 0.75 * sum(path.stat().st_size for path in dataset.rglob("*") if path.is_file()) / 2**30
    options = {"dataset": f"{web.url}/data", "cache_dir": str(tmp_path / "cache"), "cache_gib": gib, "shuffle": True}
    deadline = time.time() + float(os.environ.get("SECONDS", "20"))
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        while time.time() < deadline:
            assert list(pool.map(read, [options] * 16, range(16))) == [300] * 16


@pytest.mark.parametrize(("path", "size"), [("/84/a.flac", "16,384"), ("/endless/84/a.flac", "10,000")])
def test_a_file_larger_than_the_cache_is_not_a_reject(path, size, web, tmp_path):
    with raises(ConfigError, "bad_config_value", "cache_gib", f"at least {size} bytes"):
        Cache(tmp_path / "copies", 10_000).get(f"{web.url}{path}", max_bytes=1 << 30)


def test_a_process_forked_in_mid_copy_holds_nobody_up(tmp_path):
    children = []

    def fork():
        children.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)))
        children[-1].start()

    with S3Store() as store:
        store.put("a", DATA)
        store.faults.append(Fault("a", methods="GET", call=fork, times=1))
        cache, url = Cache(tmp_path / "copies", 1 << 40), store.url("a")
        cache.get(url)
        cache.path_of(url).unlink()
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(cache.get, url)
            try:
                assert again.result(timeout=20).read_bytes() == DATA
            finally:
                children[0].kill()
                children[0].join()


def test_a_url_is_read_as_a_file_is(web, tmp_path):
    file = RemoteLocation(f"{web.url}/84/a.flac", Cache(tmp_path / "copies", 1 << 40))
    assert (file.name, file.suffix, str(file)) == ("a.flac", ".flac", f"{web.url}/84/a.flac")
    assert file.version().size == len(DATA)
    assert file.read_head(5) == DATA[:5]
    assert not (tmp_path / "copies").exists()
    with pickle.loads(pickle.dumps(file)).open("rb") as stream:
        assert stream.read() == DATA
    assert file.read_text("latin-1")[32:127] == DATA[32:127].decode()
    assert not (RemoteLocation(f"{web.url}/84", file.cache) / "none.flac").exists()


@pytest.mark.parametrize("name", ["{}", "about-{}"])
def test_what_a_full_disk_has_left_is_fetched_again(name, web, tmp_path):
    """This includes an old and a new copy that together exceed the limit of the cache."""
    file = RemoteLocation(f"{web.url}/84/a.flac", Cache(tmp_path / "copies", 1.5 * len(DATA)))
    path = file.cache.get(file.url)
    os.truncate(path.with_name(name.format(path.name)), 5)
    assert file.version().size == len(DATA)
    assert file.local().read_bytes() == DATA


@pytest.fixture(params=[S3Store, GcsStandIn, AIStoreStandIn], ids=lambda kind: kind.scheme)
def store(request, no_waits):
    with request.param() as store:
        yield store


def test_a_store_takes_and_gives_files(store, tmp_path):
    url, cache = store.url("folder/a b.bin"), Cache(tmp_path / "copies", 1 << 40)
    (tmp_path / "a b.bin").write_bytes(DATA)
    request(url, lambda client: client.upload(tmp_path / "a b.bin", url, replace=True))
    assert store.get("folder/a b.bin") == DATA
    assert request(url, lambda client: client.read(url, 300, 310)) == DATA[300:310]
    assert request(url, lambda client: client.version(url)).size == len(DATA)
    assert cache.get(url).read_bytes() == DATA
    store.put("folder/a b.bin", b"other")
    assert cache.refresh(url).size == 5
    assert cache.get(url).read_bytes() == b"other"
    with pytest.raises(RejectRecord, match=r"none\.bin does not exist"):
        cache.get(store.url("none.bin"))


@pytest.mark.parametrize(
    "fault",
    [
        Fault("a.bin", status=500, times=1),
        Fault("a.bin", status=503, times=2),
        Fault("a.bin", methods="GET", cut=5000, times=1),
        Fault("a.bin", methods="GET", pause=0.01),
    ],
    ids=["500", "503", "truncated", "slow"],
)
def test_a_store_with_transient_faults_gives_the_same_bytes(fault, store, tmp_path):
    store.put("a.bin", DATA)
    store.faults.append(dataclasses.replace(fault))
    assert Cache(tmp_path / "copies", 1 << 40).get(store.url("a.bin")).read_bytes() == DATA


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nX: " + b"x" * 50, HEAD % 50 + DATA], ids=["head", "body"])
def test_an_answer_of_a_store_that_trickles_is_no_reject(answer, store, tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "SECONDS", 1.0)
    store.put("a.bin", DATA)
    store.faults.append(Fault("a.bin", methods="GET", answer=answer, pause=1))
    file = RemoteLocation(store.url("a.bin"), Cache(tmp_path / "copies", 1 << 40))
    for ask in (file.fetch, lambda: file.read_head(50)):
        with pytest.raises(ConnectionError, match="cannot fetch"):
            ask()


@pytest.mark.parametrize(
    "answer",
    [HEAD % (40 << 20) + bytes(40 << 20), b"HELLO", b"HTTP/1.1 200 OK\r\nX: " + bytes(70_000), HEAD % 1],
    ids=["too large", "status line", "header", "short"],
)
# Google's client tries for a minute.
@pytest.mark.parametrize("store", [S3Store, AIStoreStandIn], ids=["s3", "ais"], indirect=True)
def test_an_odd_answer_of_a_store_is_a_reject(answer, store, tmp_path):
    store.put("a.bin", DATA)
    store.faults.append(Fault("a.bin", methods="GET", answer=answer))
    url, path = store.url("a.bin"), tmp_path / "a.bin"
    with path.open("wb") as stream, pytest.raises(RejectRecord, match=r"more than|in HTTP|cut off|cannot fetch"):
        request(url, lambda client: client.download(url, stream, path, len(DATA)))
    assert path.stat().st_size < 1 << 20


@pytest.mark.parametrize("name", ["a#b", "a?b", "a\nb", "a%41", "a/../b", "./a", "a/", "a?versionId=null", "a//b"])
def test_a_name_in_a_store_is_taken_as_it_stands_or_refused(name, store, tmp_path):
    for key in ("a", "b", "aA", name):
        store.put(key, key.encode())
    with suppress(RejectRecord):
        assert Cache(tmp_path, 1 << 40).get(store.url(name)).read_bytes() == name.encode()


def test_an_object_changed_during_the_copy_is_copied_again(store, tmp_path):
    store.put("a.bin", DATA)
    change = Fault("a.bin", methods="GET", times=1, call=lambda: store.put("a.bin", DATA[::-1]))
    store.faults.append(change)
    assert Cache(tmp_path / "copies", 1 << 40).get(store.url("a.bin")).read_bytes() == DATA[::-1]


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        (Fault("a.bin", status=403), RejectRecord, "credentials do not allow|does not exist"),
        (Fault("a.bin", status=503), ConnectionError, "cannot fetch"),
        (Fault("a.bin", methods="GET", cut=5000), (RejectRecord, ConnectionError), "cut off|cannot fetch"),
    ],
    ids=["credentials", "503", "truncated"],
)
# Google's client tries for a minute, but otherwise behaves like the other clients.
@pytest.mark.parametrize("store", [S3Store, AIStoreStandIn], ids=["s3", "ais"], indirect=True)
def test_what_a_store_does_not_give_is_said_in_a_line(fault, kind, said, store, tmp_path):
    store.put("a.bin", DATA)
    store.faults.append(dataclasses.replace(fault))
    with pytest.raises(kind, match=said) as caught:
        Cache(tmp_path / "copies", 1 << 40).get(store.url("a.bin"))
    assert "\n" not in str(caught.value)
    assert not [path for path in (tmp_path / "copies").rglob("*") if path.is_file() and path.suffix == ".bin"]


@pytest.mark.parametrize(
    ("url", "variables", "module", "code", "said"),
    [
        ("ais://bucket/a", ["AIS_ENDPOINT"], "none", "missing_input", "set AIS_ENDPOINT=http://HOST:PORT"),
        ("s3://bucket/a", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"], "none", "missing_input", "needs credentials"),
        ("ais://bucket/a", [], "aistore", "missing_package", "run pip install 'sharmill[stores]'"),
    ],
)
def test_what_is_missing_on_this_machine_is_said_in_a_line(url, variables, module, code, said, monkeypatch, tmp_path):
    with S3Store(), AIStoreStandIn():
        for name in variables:
            monkeypatch.delenv(name)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(name, "/nothing")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setitem(sys.modules, module, None)
        with raises(ConfigError, code, said):
            Cache(tmp_path, 1 << 40).get(url)

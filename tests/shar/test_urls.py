"""Datasets in stores: read as on disk, through copies in a bounded cache, even if the store changes or fails."""

import json
import multiprocessing
import shutil
import time
from contextlib import nullcontext
from itertools import islice

import pytest
from support.project import check_dataset, raises, run_sharmill, snapshot
from support.stores import AIStoreStandIn, Fault, GcsStandIn, S3Store
from support.web import serving
from torchdata.stateful_dataloader import StatefulDataLoader

from sharmill.errors import ConfigError, DamagedShard, FatalError
from sharmill.shar import merge_states, open_shar
from sharmill.shar.reading.loading import ResumableDataset, merge_loader_states


@pytest.fixture
def store(request, many, no_waits):
    """A store of the requested kind that contains the dataset of ``many`` as ``many``."""
    with getattr(request, "param", AIStoreStandIn)() as store:
        store.upload(many.dataset, "many")
        yield store


@pytest.fixture
def at_url(store, tmp_path):
    """Return a function from options to the cuts of the dataset in the store."""
    return lambda *fields, **options: open_shar(
        store.url("many"), *fields, **{"cache_dir": str(tmp_path / "cache")} | options
    )


def content(cuts):
    return [(cut.id, cut.shar_position, cut.load_audio().tobytes()) for cut in cuts]


@pytest.mark.parametrize("store", [S3Store, GcsStandIn, AIStoreStandIn], ids=lambda kind: kind.scheme, indirect=True)
@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3, "mix_shards": 2, "decode_threads": 2}])
def test_cuts_order_and_states_are_those_on_disk(options, many, at_url):
    disk, remote = open_shar(many.dataset, **options), at_url(**options)
    for _ in range(2):
        assert content(remote) == content(disk)
    streams = iter(remote), iter(disk)
    assert [next(streams[0]).id for _ in range(25)] == [next(streams[1]).id for _ in range(25)]
    state = json.loads(json.dumps(remote.data.state_dict()))
    assert state == disk.data.state_dict()
    # Save on one side and resume on the other, in both directions, with one more reader.
    rest = [cut.id for cut in streams[1]]
    for opened in (lambda **part: open_shar(many.dataset, **options, **part), lambda **part: at_url(**options, **part)):
        parts = [opened(rank=rank, world_size=2) for rank in range(2)]
        for part in parts:
            part.data.load_state_dict(merge_states([state]))
        assert sorted(cut.id for part in parts for cut in part) == sorted(rest)


@pytest.mark.parametrize(
    ("name", "said"),
    [("a.tar", ""), ("a?b#c%41.tar", ""), ("%2e%2e/a.tar", "lies outside"), ("..\\a.tar", "lies outside")],
)
def test_a_dataset_on_a_web_server(name, said, many, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder, tar = shutil.copytree(many.dataset, tmp_path / "web"), "target_audio/recording.000002.tar"
    index = (folder / "shards.jsonl").read_text()
    (folder / "shards.jsonl").write_text(index.replace(tar, json.dumps(f"target_audio/{name}")[1:-1]))
    (folder / tar).rename(folder / "target_audio" / name.rpartition("/")[2])
    with serving(folder) as web, pytest.raises(DamagedShard, match=said) if said else nullcontext():
        assert content(open_shar(web.url, cache_dir=str(tmp_path / "copies"))) == content(open_shar(many.dataset))


@pytest.mark.parametrize("store", [S3Store, AIStoreStandIn], ids=lambda kind: kind.scheme, indirect=True)
def test_workers_share_the_copies(many, store, at_url):
    def loader(dataset, **options):
        return StatefulDataLoader(
            ResumableDataset(dataset, None, finish=lambda cut: cut.id), batch_size=None, **options
        )

    interrupted = loader(at_url(shuffle=True, block_size=1), num_workers=2)
    used = list(islice(interrupted, 20))
    resumed = open_shar(many.dataset, shuffle=True, block_size=1)
    resumed.data.load_state_dict(merge_loader_states([interrupted.state_dict()]))
    used += [cut.id for cut in resumed]
    assert sorted(used) == sorted(cut.id for cut in open_shar(many.dataset, []))
    list(loader(at_url(shuffle=True, block_size=1), num_workers=2))
    assert {count for (method, _), count in store.requests.items() if method == "GET"} == {1}


def test_shards_are_copied_ahead_of_their_use(store, at_url):
    next(iter(at_url(["target_audio"])))
    deadline = time.monotonic() + 30
    while store.requests["GET", "many/target_audio/recording.000002.tar"] != 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.requests["GET", "many/target_audio/recording.000002.tar"] == 1
    # Some shards are copied, but only the fields that are read.
    assert store.requests["GET", "many/cuts/cuts.000005.jsonl.gz"] == 0
    assert not [key for _, key in store.requests if "context" in key]


def test_a_cache_may_be_smaller_than_the_dataset(many, at_url, tmp_path):
    files = {name: len(data) for name, data in snapshot(many.dataset).items()}
    limit = 0.8 * sum(files.values())
    for _ in range(2):
        assert content(at_url(cache_gib=limit / 2**30)) == content(open_shar(many.dataset))
        assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file()) <= limit
    with raises(ConfigError, "bad_config_value", f"{files['dataset.json']:,} bytes", "cache_gib"):
        at_url(cache_gib=100 / 2**30, cache_dir=str(tmp_path / "tiny"))
    with raises(FatalError, "disk", "raise its limit"):
        list(at_url(cache_gib=3 * max(files.values()) / 2**30, cache_dir=str(tmp_path / "tiny"), shuffle=True))


TAR = "many/target_audio/recording.000002.tar"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(TAR, status=500, times=1),
        Fault(TAR, status=503, times=2),
        Fault(TAR, methods="GET", cut=5000, times=1),
    ],
    ids=["500", "503", "truncated"],
)
def test_a_store_that_fails_for_a_moment_changes_nothing(fault, many, store, at_url):
    store.faults.append(fault)
    assert content(at_url()) == content(open_shar(many.dataset))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, f"shard 2: ais://bucket/{TAR} does not exist"),
        (b"other", f"shard 2: ais://bucket/{TAR} does not have the checksum of the dataset's index"),
    ],
)
def test_a_shard_that_is_missing_or_changed_is_damage_as_on_disk(data, said, many, store, at_url):
    del store.objects[TAR]
    if data is not None:
        store.put(TAR, data)
    with pytest.raises(DamagedShard, match=f"^{said}$"):
        list(at_url())
    cuts = at_url(on_damage="skip")
    assert len(list(cuts)) == 50
    assert cuts.data.state_dict()["num_damaged"] == 10


@pytest.mark.parametrize("on_damage", ["raise", "skip"])
def test_a_server_that_cannot_be_reached_is_no_damage(on_damage, store, at_url):
    cuts = at_url(on_damage=on_damage)
    store.faults.append(Fault("many/target_audio", status=503))
    with pytest.raises(ConnectionError, match="cannot fetch ais://bucket/many/target_audio"):
        list(cuts)


def test_what_cannot_be_opened_is_said_in_a_line(store, at_url, monkeypatch, tmp_path):
    with raises(ConfigError, "bad_config_value", "copy the dataset to a disk"):
        at_url(shuffle="global")
    with raises(ConfigError, "bad_config_value", "cache_gib is '1': it must exceed 0"):
        at_url(cache_gib="1")
    with raises(ConfigError, "no_dataset", "none/dataset.json does not exist; a dataset at a URL needs an index"):
        open_shar(store.url("none"))
    with raises(ConfigError, "bad_config_value", "must begin with https://"):
        open_shar("ftp://host/many")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch/mine.tmp").touch()
    for folder, code in (("scratch", "foreign_output"), ("~no-such-user/cache", "bad_config_value")):
        with raises(ConfigError, code, folder, "cache_dir"):
            at_url(cache_dir=folder)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["scratch", "scratch/mine.tmp"]
    store.faults.append(Fault("many", status=403))
    with raises(ConfigError, "no_dataset", "credentials do not allow access"):
        at_url()


def test_a_full_disk_of_the_cache_is_said_in_a_line(at_url, small_disk):
    with raises(FatalError, "disk", "No space left"):
        list(at_url(cache_dir=str(small_disk("300k") / "cache")))


@pytest.mark.parametrize("store", [S3Store], ids=["s3"], indirect=True)
def test_a_reader_killed_while_copying_leaves_no_partial_file(many, store, at_url):
    reader = multiprocessing.get_context("fork").Process(target=lambda: list(at_url()))
    store.faults.append(Fault(TAR, methods="GET", cut=5000, times=1, call=lambda: reader.kill()))
    reader.start()
    reader.join(60)
    assert reader.exitcode == -9
    assert content(at_url()) == content(open_shar(many.dataset))


def test_a_copy_that_is_damaged_is_named(store, at_url, call, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (cut_id,) = [cut.id for cut in islice(at_url(["target_audio"], cache_dir=None), 25, 26)]
    (copy,) = (tmp_path / "sharmill").glob(f"*/{'[0-9a-f]' * 32}.000002.tar")
    copy.write_bytes(bytes(copy.stat().st_size))
    with pytest.raises(DamagedShard, match=f"^{copy}, .* remove it"):
        list(at_url(["target_audio"], cache_dir=None))
    assert f"{copy}, the copy" in call("inspect", store.url("many"), cut_id)[2]


def test_a_new_version_of_a_dataset_is_read_on_reopening(built, store, at_url):
    old = at_url([])
    assert len(list(old)) == 60
    store.upload(built.dataset, "many")
    assert content(at_url(["target_audio"])) == content(open_shar(built.dataset, ["target_audio"]))


def test_a_dataset_at_a_url_is_looked_at(many, store, call, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (cut,) = islice(open_shar(many.dataset), 1)
    for command, *options in (
        ["inspect"],
        ["inspect", cut.id],
        ["inspect", "--shard", 2],
        ["bins", "--buckets", 3],
    ):
        there, here = (call(command, where, *options) for where in (store.url("many"), many.dataset))
        assert there[0] == 0
        assert there[1].replace(store.url("many"), str(many.dataset)).split() == here[1].split()
    store.put(TAR, b"other")
    status, _, err = call("inspect", store.url("many"), list(open_shar(many.dataset))[25].id)
    assert (status, err.count("\n")) == (1, 1)
    assert "does not have the checksum" in err
    store.faults.append(Fault("many", status=503))
    status, _, err = call("inspect", store.url("many"))
    assert (status, err.startswith("Error: cannot fetch ais://bucket/many/dataset.json")) == (1, True)


def test_a_dataset_at_a_url_is_validated(many, store, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def validate(*options, status):
        command = ["validate", store.url("many"), "--json", tmp_path / "report.json", "--workers", 2, *options]
        run_sharmill(*command, status=status)
        return json.loads((tmp_path / "report.json").read_text())

    disk, report = check_dataset(many.dataset, tmp_path / "disk", deep=True), validate("--deep", status=0)
    assert report["dataset"] == store.url("many")
    assert (report["checked"], report["findings"]) == (disk.checked, disk.findings)
    assert set(report["unchecked"]) - set(disk.unchecked) == {"stray files: folders at a URL cannot be listed"}
    # Copies are compared with the store again.
    store.put(TAR, b"x" + store.get(TAR)[1:])
    del store.objects["many/cuts/cuts.000004.jsonl.gz"]
    store.put("many/context_audio/recording.000000.tar", b"x" * 20_000)
    store.faults.append(Fault("context_audio/recording.000000.tar", methods="GET", cut=5000))
    found = {(finding["code"], finding["shard"]): finding for finding in validate(status=3)["findings"]}
    assert found.keys() >= {("damaged", 0), ("wrong_checksum", 2), ("missing_file", 4)}
    assert "remove this copy" in str(found["wrong_checksum", 2])
    store.put("many/shards.jsonl", b"{}\n")
    assert validate(status=3)["findings"][0]["code"] == "damaged"

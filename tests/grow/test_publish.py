"""Datasets that are copied to object stores: the objects, their order, and refusals."""

import signal
import subprocess
import threading
from functools import partial

import msgspec
import pytest
from support import damage as do
from support.project import command, copy, make_voices, raises, snapshot
from support.stores import AIStoreStandIn, Fault, GcsStandIn, S3Store

from sharmill.errors import ConfigError, DamagedShard, FatalError, SharmillError, hide_secrets
from sharmill.grow.join import append_dataset
from sharmill.grow.publish import publish_dataset
from sharmill.shar.index import DatasetRecord, read_dataset

INDEX = ["shards.jsonl", "dataset.json"]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Two datasets with the codec a, of 2 shards each."""
    folder = tmp_path_factory.mktemp("datasets")
    return [make_voices(folder / name, name, voices, codecs="a").dataset for name, voices in (("x", 2), ("y", 3))]


@pytest.fixture
def store():
    with S3Store() as store:
        yield store


def written(store):
    """Return the names of the objects that were written since the last call, in order."""
    names = [key.removeprefix("x/") for method, key in store.requests if method in ("PUT", "POST")]
    store.requests.clear()
    return names


def there(store):
    return {key.removeprefix("x/"): store.get(key) for key in store.objects}


@pytest.mark.parametrize("kind", [S3Store, GcsStandIn, AIStoreStandIn])
def test_a_store_has_the_same_files_and_is_written_once(call, datasets, kind):
    with kind() as store:
        status, out, err = call("publish", datasets[0], store.url("x"))
        assert (status, "10 files copied, 0 already up to date" in out) == (0, True), err
        assert there(store) == snapshot(datasets[0])
        assert written(store)[-2:] == INDEX
        assert "0 files copied, 10 already up to date" in call("publish", datasets[0], f"{store.url('x')}/")[1]
        assert written(store) == []


def test_new_shards_are_copied_and_an_earlier_state_is_refused(datasets, store, tmp_path):
    growing = copy(datasets[0], tmp_path / "growing")
    publish_dataset(growing, store.url("x"))
    old = written(store)
    append_dataset(growing, datasets[1])
    assert publish_dataset(growing, store.url("x")) == {"copied": 10, "there": 10}
    assert not {f"x/{name}" for name in old[:-2]} & {key for method, key in store.requests if method == "GET"}
    new = written(store)
    assert (new[-2:], set(new) & set(old)) == (INDEX, set(INDEX))
    assert there(store) == snapshot(growing)
    with raises(ConfigError, "foreign_output", store.url("x")):
        publish_dataset(datasets[0], store.url("x"))
    assert there(store) == snapshot(growing)


def test_what_another_tool_wrote_is_published_too(datasets, store, tmp_path):
    indexed = copy(datasets[0], tmp_path / "indexed")
    do.change_description(contract="foreign")(indexed)
    publish_dataset(indexed, store.url("x"))
    assert there(store)["dataset.json"] != (datasets[0] / "dataset.json").read_bytes()
    assert read_dataset(indexed) == msgspec.json.decode(there(store)["dataset.json"], type=DatasetRecord)


def test_a_killed_copy_shows_no_dataset_and_goes_on(datasets, store):
    for key, number in (("target_codes", 1), ("shards.jsonl", 0)):
        kept = set(store.objects)
        copying = subprocess.Popen(command("publish", datasets[0], store.url("x")))
        store.faults = [Fault(key, methods="PUT", after=number, times=1, call=copying.kill)]
        assert copying.wait(60) == -signal.SIGKILL
        assert "dataset.json" not in there(store)
        assert there(store).items() <= snapshot(datasets[0]).items()
        assert not {f"x/{name}" for name in written(store)} & kept
    publish_dataset(datasets[0], store.url("x"))
    assert there(store) == snapshot(datasets[0])


# The faults occur after a publisher's checks of existing objects; in AIStore, before the last of these checks.
@pytest.mark.parametrize(
    ("kind", "methods", "after"), [(S3Store, "PUT", 0), (GcsStandIn, "POST", 0), (AIStoreStandIn, "HEAD", 1)]
)
@pytest.mark.parametrize(("key", "number"), [("00000", 8), ("shards.jsonl", 1), ("dataset.json", 1)])
def test_of_two_publishers_at_one_url_one_is_stopped(datasets, tmp_path, kind, methods, after, key, number):
    other = copy(datasets[number == 8], tmp_path / "other")
    if number == 1:
        append_dataset(other, datasets[1])
    with kind() as store:
        finish_other = threading.Barrier(number, action=partial(publish_dataset, other, store.url("x")))
        store.faults = [Fault(key, methods=methods, after=after, times=number, call=finish_other.wait)]
        with pytest.raises(SharmillError, match=r"already exists|has changed since this command"):
            publish_dataset(datasets[0], store.url("x"))
        assert there(store) == snapshot(other)


def test_an_object_replaced_before_the_last_check_is_named(datasets, store):
    store.faults = [Fault("dataset.json", methods="PUT", call=lambda: store.put("x/cuts/cuts.000000.jsonl.gz", b"x"))]
    with raises(FatalError, "disk", "x/cuts/cuts.000000.jsonl.gz has changed since this command"):
        publish_dataset(datasets[0], store.url("x"))


CUTS, TAR = "cuts/cuts.000000.jsonl.gz", "x/target_audio/recording.000000.tar"


def link(store, datasets, mine):
    (mine / "cuts").rename(mine / "../elsewhere")
    (mine / "cuts").symlink_to("../elsewhere")


# Changes to the store, or to the dataset being published.
HAPPENS = {
    "other dataset": lambda store, datasets, mine: store.upload(datasets[1], "x"),
    "other object": lambda store, datasets, mine: store.put(f"x/{CUTS}", (mine / CUTS).read_bytes()[::-1]),
    "foreign index": lambda store, datasets, mine: store.put("x/shards.jsonl", b"{}"),
    "foreign record": lambda store, datasets, mine: store.put("x/dataset.json", b"{}"),
    "damaged file": lambda store, datasets, mine: do.flip_bit("target_audio/recording.000001.tar", 700)(mine),
    "link": link,
    "unfinished": lambda store, datasets, mine: (mine / "dataset.json").unlink(),
    "no permission": lambda store, datasets, mine: store.faults.append(Fault("", methods="PUT", status=403)),
    "no reading": lambda store, datasets, mine: store.faults.append(Fault("", status=403)),
    "altered object": lambda store, datasets, mine: store.faults.append(
        Fault(TAR, methods="GET", call=lambda: store.put(TAR, store.get(TAR)[::-1]))
    ),
}


@pytest.mark.parametrize(
    ("happens", "kind", "code", "said"),
    [
        ("other dataset", ConfigError, "foreign_output", "s3://bucket/x already exists"),
        ("other object", ConfigError, "foreign_output", "x/cuts/cuts.000000.jsonl.gz already exists"),
        ("foreign index", ConfigError, "foreign_output", "x/shards.jsonl already exists"),
        ("foreign record", ConfigError, "foreign_output", "x/dataset.json already exists"),
        ("damaged file", DamagedShard, "damaged_shard", "recording.000001.tar differs from the index"),
        ("link", ConfigError, "foreign_output", "cuts is a link"),
        ("unfinished", ConfigError, "no_dataset", "is not a finished dataset"),
        ("no permission", FatalError, "disk", "credentials do not allow access"),
        ("no reading", FatalError, "disk", "credentials do not allow access"),
        ("altered object", FatalError, "disk", "recording.000000.tar has changed since this command uploaded"),
    ],
)
def test_what_cannot_be_published_is_named_and_shows_no_dataset(datasets, store, tmp_path, happens, kind, code, said):
    mine = copy(datasets[0], tmp_path / "mine")
    HAPPENS[happens](store, datasets, mine)
    before = {name: data for name, data in there(store).items() if name.endswith(("json", "jsonl", "gz"))}
    with raises(kind, code, said) as caught:
        publish_dataset(mine, store.url("x"))
    assert "\n" not in str(caught.value)
    after = there(store)
    assert {name: after.get(name) for name in (*before, *INDEX)} == {**dict.fromkeys(INDEX), **before}


@pytest.mark.parametrize("url", ["https://host/x", "data/x", "s3://bucket/x?versionId=1", "s3:///x"])
def test_what_is_no_place_in_a_store_is_refused(call, datasets, url):
    status, _, err = call("publish", datasets[0], url)
    assert (status, err.count("\n")) == (2, 1)
    assert f"{hide_secrets(url)} is not a place in an object store: use s3://" in err

"""Links and other users' files below run and dataset directories: nothing behind them is read, written or removed."""

import os
import re
import shutil
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.project import (
    REPOSITORY,
    Project,
    copy,
    lines,
    make_voices,
    raises,
    snapshot,
    write_lines,
)
from support.taken import TAKERS, state_of, take
from support.toy_stage import ToyStage, run
from support.web import serving

from sharmill.engine.executor import Listener
from sharmill.engine.run_dir import RunDir
from sharmill.errors import ConfigError, FatalError, SharmillError
from sharmill.executors.supervisor import logging_to
from sharmill.files.cache import Cache
from sharmill.files.output import redirect_output
from sharmill.files.staging import STAGING_NAME, Staging, token_staging
from sharmill.files.stored import open_stored
from sharmill.grow.join import append_dataset, merge_datasets
from sharmill.pipeline import run_dataset
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import codec_fields
from sharmill.shar.index import read_dataset
from sharmill.shar.sidecars import write_sidecars

CODES = "codes_a/target_codes"
TOKEN = "-".join(2 * ["0123456789abcdef"])
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away, and act as another user")


@pytest.fixture
def web(tmp_path, monkeypatch):
    """A server of one file."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "web").mkdir()
    (tmp_path / "web/a.flac").write_bytes(b"audio")
    with serving(tmp_path / "web") as server:
        yield server


def put_elsewhere(path: Path) -> Path:
    """Rename a file or folder, and put a link to it in its place."""
    behind = path.with_name(f"elsewhere-{path.name}")
    path.rename(behind)
    path.symlink_to(behind.name)
    return behind


@pytest.mark.parametrize(
    "name", ["run/toy", "run/toy/plan", "run/toy/logs", "run/toy/ranks", "run/manifests", "out/first",
             f"out/{STAGING_NAME}", "run/toy/logs/rank-000.log", "run/toy/logs/driver.log", "run/jobs/7_0_log.out",
             "run/copies"]
)  # fmt: skip
@pytest.mark.parametrize("restart", [False, True])
def test_links_in_run_directory_and_output_are_refused(tmp_path, name, restart):
    run(ToyStage(tmp_path))
    link = tmp_path / name
    if not link.exists():
        link.mkdir(parents=True)
        (link / "mine").write_text("mine")
    behind = put_elsewhere(link)
    (tmp_path / "out/last/000000.txt").unlink()
    before = snapshot(behind) if behind.is_dir() else behind.read_bytes()
    with raises(ConfigError, "foreign_output", f"{link} is a link"):
        run(ToyStage(tmp_path), restart=restart)
    assert (snapshot(behind) if behind.is_dir() else behind.read_bytes()) == before


@pytest.mark.parametrize(
    ("link", "names", "behind"),
    [("prepare/.sharmill-staging", [f"prepare/ranks/{TOKEN}/x"], f"{TOKEN}/ledger"),
     ("encode.segments/parts", ["encode.segments/plan/token"], "000000.npy")],
)  # fmt: skip
def test_a_restart_removes_nothing_behind_a_link(tmp_path, link, names, behind):
    """The names of the files to remove are in the run directory, which another user may have written."""
    project = Project(tmp_path).add_voices([0.4])
    config = project.configure(match=None, executor={"workers": 1})
    run_dataset(config, Listener(), stages=["prepare", "write"])
    kept = tmp_path / "elsewhere" / behind
    for path in (kept, *(project.run_dir / name for name in names)):
        path.parent.mkdir(parents=True)
        path.touch()
    (project.run_dir / link).symlink_to(tmp_path / "elsewhere")
    with raises(ConfigError, "foreign_output", f"{link} is a link"):
        run_dataset(config, Listener(), stages=["prepare", "write"], restart=True)
    assert kept.exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["link.log", "fifo.log", "hard.log", "folder.log"])
def test_logs_are_appended_to_files_alone(tmp_path, name):
    """The link was created after the folders were checked."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "hard.log").hardlink_to(tmp_path / "mine")
    (tmp_path / "folder.log").mkdir()
    (tmp_path / "link.log").symlink_to("mine")
    os.mkfifo(tmp_path / "fifo.log")
    log = tmp_path / name
    for append in (logging_to(log).__enter__, partial(redirect_output, log), partial(open_stored, log, append=True)):
        with raises(ConfigError, "damaged_run_dir", name):
            append()
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_folder_that_becomes_a_link_while_ranks_are_at_work(tmp_path):
    (tmp_path / "data/cuts").mkdir(parents=True)
    token_staging(tmp_path / "data", "0" * 16).mkdir(parents=True)
    with Staging(tmp_path / "data", "0" * 16) as staging:
        staging.path("cuts/a").write_bytes(b"new")
        behind = put_elsewhere(tmp_path / "data/cuts")
        with raises(ConfigError, "foreign_output", "cuts is a link"):
            staging.publish(["cuts/a"])
    assert list(behind.iterdir()) == []


REFUSED_LOCKS = {kind: "damaged_run_dir" for kind in TAKERS if kind != "a file of another user's"}
# Names in a cache, and the codes of the refusals by what is there. Anything else is replaced, or accepted as it is.
IN_CACHES = {
    "about-{}": {"a folder of another user's": "disk"},
    "{}": {"a folder of another user's": "disk"},
    ".lock": REFUSED_LOCKS,
    "": {**dict.fromkeys(TAKERS, "foreign_output"), "a hard link": "disk", "a file of another user's": "disk"},
}


@is_root
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", TAKERS)
@pytest.mark.parametrize("name", IN_CACHES)
def test_nothing_is_written_through_what_lies_in_a_cache(web, tmp_path, name, kind):
    cache = Cache(tmp_path / "copies", 1 << 20)
    path = cache.get(f"{web.url}/a.flac")
    take(path.parent / name.format(path.name), kind, tmp_path / "elsewhere")
    before = state_of(tmp_path / "elsewhere")
    if code := IN_CACHES[name].get(kind):
        with pytest.raises(SharmillError) as caught:
            cache.get(f"{web.url}/a.flac")
        assert (caught.value.code, "\n" in str(caught.value)) == (code, False)
    else:
        cache.get(f"{web.url}/a.flac")
    assert state_of(tmp_path / "elsewhere") == before


def test_a_cache_as_a_whole_may_be_a_link(web, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "copies").symlink_to("disk")
    assert Cache(tmp_path / "copies", 1 << 20).get(f"{web.url}/a.flac").read_bytes() == b"audio"
    assert list((tmp_path / "disk").glob("*/about-*.flac"))


@is_root
def test_a_cache_that_another_user_keeps_to_himself_is_named():
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        cache = Cache(Path(folder), 1 << 20)
        lock = cache.path_of("http://127.0.0.1/a.flac").with_name(".lock")
        lock.parent.mkdir()
        for file in (lock, cache.folder / ".sharmill-cache"):
            file.touch()
        os.seteuid(65534)
        try:
            with raises(FatalError, "disk", f"{lock}: Permission denied"):
                cache.get("http://127.0.0.1/a.flac")
        finally:
            os.seteuid(0)


# Exceptions: modules that define the safe functions, or that write elsewhere: new corpora, files of the kernel, and
# temporary files.
WRITE_THEMSELVES = ("files/", "demo/corpus.py", "models/memory.py", "training/buckets/")


def test_all_modules_open_files_for_writing_by_those_functions():
    """Opening a name directly would follow a link there; ``sharmill.files.regular`` has functions that do not."""
    found = []
    for path in (REPOSITORY / "src/sharmill").rglob("*.py"):
        text, name = path.read_text(), path.relative_to(REPOSITORY / "src/sharmill").as_posix()
        writes = re.findall(
            r"\.write_(?:bytes|text)\(|open\([^()]*\"(?:[wa]b?\+?|r\+b?)\"|sf\.write\(str|np\.save\(\w*path", text
        )
        found += [f"{name}: {write}" for write in writes if not name.startswith(WRITE_THEMSELVES)]
    assert found == []


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two small datasets with one codec that can be merged."""
    folder = tmp_path_factory.mktemp("links")
    return [make_voices(folder / name, name, codecs="a").dataset for name in "pq"]


@pytest.fixture
def dataset(made, tmp_path):
    """One of the datasets, as a killed append has left it."""
    dataset = copy(made[0], tmp_path / "dataset")
    (dataset / STAGING_NAME).mkdir()
    index = dataset / "shards.jsonl"
    write_lines(index, [*lines(index), *({**line, "index": line["index"] + 2} for line in lines(index))])
    (dataset / "cuts/cuts.000002.jsonl.gz").write_bytes(b"mine")
    (dataset / CODES / "codes.000002.tar").write_bytes(b"mine")
    return dataset


# Commands that change a dataset, and the folders that they must check for links.
CHANGES = [
    *((lambda dataset, other: write_sidecars(dataset), field) for field in ("cuts", "target_audio", CODES, "codes_a")),
    *((append_dataset, field) for field in ("cuts", CODES, "codes_a", STAGING_NAME)),
    *((lambda dataset, other: ShardedDataset(dataset).remove(2), field) for field in ("cuts", "codes_a")),
    (lambda dataset, other: ShardedDataset(dataset).remove_fields(codec_fields("a"), 2), "codes_a"),
]


@pytest.mark.parametrize(("change", "field"), CHANGES)
def test_nothing_changes_behind_a_link_in_a_dataset(made, dataset, change, field):
    behind = put_elsewhere(dataset / field)
    before = snapshot(behind)
    with raises(ConfigError, "foreign_output", f"{dataset / field} is a link"):
        change(dataset, made[1])
    assert snapshot(behind) == before
    assert ShardedDataset(dataset).record().num_shards == 2


@pytest.mark.parametrize(
    "field", ["cuts/cuts.000001.jsonl.gz", f"{CODES}/codes.000000.tar", "target_audio", "dataset.json"]
)
@pytest.mark.parametrize("grow", [append_dataset, lambda one, other: merge_datasets([one, other], one / "../out")])
def test_what_a_link_in_a_dataset_leads_to_is_not_published(made, tmp_path, grow, field):
    growing, other = copy(made[0], tmp_path / "growing"), copy(made[1], tmp_path / "other")
    put_elsewhere(other / field)
    with raises(ConfigError, "foreign_output", f"{other / field} is a link"):
        grow(growing, other)
    assert read_dataset(growing) == read_dataset(made[0])
    assert not (tmp_path / "out").exists()


def test_a_run_directory_as_a_whole_may_be_a_link(tmp_path):
    run(ToyStage(tmp_path))
    shutil.move(tmp_path / "run", tmp_path / "disk")
    (tmp_path / "run").symlink_to("disk")
    assert run(ToyStage(tmp_path))[0].ok
    assert RunDir(tmp_path / "run").stage("toy").done.exists()

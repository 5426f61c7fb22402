"""Index files: for lhotse 2, whose pre-release reads them in a separate process, and for ``shuffle="global"``."""

import json
import os
import subprocess
import sys
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from lhotse import CutSet, MonoCut, Recording
from support.project import copy, make_bare_dataset, numbers, raises, run_sharmill, snapshot, write_tone
from support.sources import read

from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.dataset import ShardedDataset
from sharmill.shar.fields import codec_fields
from sharmill.shar.index import read_dataset
from sharmill.shar.rebuild import rebuild_index
from sharmill.shar.sidecars import indexed_shar, write_sidecars
from sharmill.sources.lhotse_shar import LhotseSharSource
from sharmill.validate.checked_dataset import check_directory, read_checked_dataset

READ = """
import json, sys
import lhotse
from lhotse import CutSet
cuts = CutSet.from_shar(**json.load(sys.stdin), indexed=True)
chosen = [cuts[n] for n in (5, 0, 6, 3)]
found = [[cut.id, cut.target_audio.load_audio().sum().item(), cut.target_codes.load().tolist()] for cut in chosen]
print(json.dumps({"version": lhotse.__version__, "num_cuts": len(cuts), "found": found}))
"""


@pytest.fixture(scope="session")
def lhotse_2(tmp_path_factory):
    """A folder with the pre-release of lhotse 2, to be placed before the installed version in the path."""
    folder = tmp_path_factory.mktemp("lhotse_2")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--pre", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*command, "lhotse>=2.0.0a0"], capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"no package index with lhotse 2 can be reached: {done.stderr.strip().splitlines()[-1:]}")
    return folder


@pytest.fixture
def dataset(built, tmp_path):
    return copy(built.dataset, tmp_path / "dataset")


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_lhotse_2_takes_any_cut_by_its_number(lhotse_2, dataset, tmp_path, apart):
    into = tmp_path / "index" if apart else None
    before = snapshot(dataset)
    write_sidecars(dataset, into)
    assert (snapshot(dataset) == before) == apart
    arguments = json.dumps(indexed_shar(dataset, ["target_audio", "target_codes"], into=into))
    environment = os.environ | {"PYTHONPATH": str(lhotse_2)}
    done = subprocess.run(
        [sys.executable, "-c", READ], input=arguments, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    ours = list(open_shar(dataset))
    assert result["version"].startswith("2.")
    assert result["num_cuts"] == 7
    for number, (cut_id, audio, codes) in zip((5, 0, 6, 3), result["found"], strict=True):
        assert cut_id == ours[number].id
        assert audio == pytest.approx(ours[number].load_audio().sum().item(), rel=1e-3, abs=1e-3)
        assert codes == ours[number].load_target_codes().tolist()


def test_the_checker_knows_them_and_the_reader_does_not_mind(dataset):
    before = [cut.id for cut in open_shar(dataset)]
    # Temporary files of a killed process.
    for name in ("cuts/.cuts.000001.jsonl", "target_audio/.recording.000001.tar.idx"):
        (dataset / f"{name}.{'0' * 32}.tmp").touch()
    write_sidecars(dataset)
    assert not list(dataset.rglob(".*"))
    assert [cut.id for cut in open_shar(dataset)] == before
    (dataset / "cuts/cuts.000009.jsonl.idx").touch()
    findings = check_directory(read_checked_dataset(dataset))
    assert [finding.file for finding in findings] == ["cuts/cuts.000009.jsonl.idx"]


@pytest.mark.parametrize("apart", [False, True])
def test_an_index_pack_finds_the_items_of_all_fields(dataset, tmp_path, monkeypatch, apart):
    index_pack = pytest.importorskip("lhotse.index_pack", reason="index packs came with lhotse 2")
    from lhotse.packed_lazy import LazyPackedManifestIterator

    root = tmp_path / "index" if apart else dataset
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        write_sidecars(dataset.name, root.name)
        # Remains of a killed process.
        (root / ".dataset.idxpack.tmp.1.ab").touch()
    write_sidecars(dataset.name, root.name)
    assert not list(root.glob(".*"))
    assert not list(check_directory(read_checked_dataset(dataset)))
    monkeypatch.chdir("/")

    pack = root / "dataset.idxpack"
    cuts = LazyPackedManifestIterator(pack, index_pack.index_pack_collection_key("cuts", "json-lines", "cuts"))
    ours = list(open_shar(dataset))
    assert [cuts[number].id for number in (5, 0, 6, 3)] == [ours[number].id for number in (5, 0, 6, 3)]
    fields = [field for field in read_dataset(dataset).fields if field != "cuts"]
    assert len(fields) >= 2
    with index_pack.IndexPack(pack) as packed:
        for field in fields:
            items = packed.collection(index_pack.index_pack_collection_key(field, "tar-members", field))
            for number in range(7):
                item = items.locate(number)
                with Path(item.path).open("rb") as archive:
                    archive.seek(item.start)
                    # The header of the first member of an item begins with its name.
                    assert archive.read(item.end - item.start).startswith(ours[number].id.encode())


def test_a_removed_field_takes_the_index_pack_along(dataset):
    (dataset / "dataset.idxpack").touch()
    (codec,) = read_dataset(dataset).codecs
    ShardedDataset(dataset).remove_fields(codec_fields(codec.name), 3)
    assert not (dataset / "dataset.idxpack").exists()


@pytest.mark.parametrize("compressed", [True, False])
def test_index_files_of_lhotse_2_are_no_findings(tmp_path, compressed):
    if "create_index" not in signature(CutSet.to_shar).parameters:
        pytest.skip("this lhotse writes no index files")
    cuts = [
        MonoCut(
            f"cut-{number}", 0.0, 1.0, 0, recording=Recording.from_file(write_tone(tmp_path / f"{number}.wav", 1.0))
        )
        for number in range(5)
    ]
    shar = tmp_path / "shar"
    shar.mkdir()
    CutSet.from_cuts(cuts).to_shar(shar, {"recording": "flac"}, shard_size=2, compress_jsonl=compressed)
    assert len(list(shar.glob("*.idx"))) == (3 if compressed else 6)
    ids = [f"cut-{number}" for number in range(5)]
    assert [cut.id for cut in open_shar(shar)] == ids
    assert [record["utterance_id"] for record in read(LhotseSharSource(shar=str(shar)))] == ids
    assert not list(check_directory(read_checked_dataset(shar)))
    list(rebuild_index(shar))
    assert not list(check_directory(read_checked_dataset(shar)))
    if not compressed:
        assert sorted(cut.id for cut in open_shar(shar, shuffle="global")) == ids


def test_a_damaged_archive_gets_no_index(dataset):
    archive = dataset / "target_audio/recording.000001.tar"
    archive.write_bytes(archive.read_bytes()[:-1024])
    with raises(DamagedShard, "damaged_shard", archive.name):
        write_sidecars(dataset)
    assert not archive.with_name(f"{archive.name}.idx").exists()


@pytest.mark.parametrize("apart", [False, True])
def test_the_command_writes_what_the_function_does(built, dataset, tmp_path, apart):
    again = copy(built.dataset, tmp_path / "again")
    into = tmp_path / "index" if apart else None
    write_sidecars(again, into)
    there = tmp_path / "there"
    result = run_sharmill("sidecars", dataset, *(("--into", there) if apart else ()))
    said = f"wrote index files for 3 shards to {there if apart else dataset}\n"
    assert (result.returncode, result.stdout, result.stderr) == (0, said, "")
    written, expected = snapshot(there if apart else dataset), snapshot(into or again)
    for files in (written, expected):
        files.pop("dataset.idxpack", None)  # only lhotse 2 writes it, with absolute paths
    assert written == expected


def test_the_command_names_what_it_cannot_use(dataset, tmp_path):
    (tmp_path / "file").touch()
    for arguments in ([tmp_path / "nothing"], [dataset, "--into", tmp_path / "file"]):
        result = run_sharmill("sidecars", *arguments, status=2)
        assert result.stderr.startswith("Error: ")
        assert str(arguments[-1]) in result.stderr


COUNTS = [9] * 40


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A dataset of 40 shards."""
    path = make_bare_dataset(tmp_path_factory.mktemp("many") / "dataset", COUNTS, codes=True)
    write_sidecars(path)
    return path


def test_the_cuts_are_those_of_the_reader_without_index_files(dataset):
    write_sidecars(dataset)
    plain = {cut.id: cut for cut in open_shar(dataset)}
    found = list(open_shar(dataset, shuffle="global", seed=1))
    assert sorted(cut.id for cut in found) == sorted(plain)
    assert [cut.id for cut in found] != list(plain)
    for cut in found:
        cut.shar_position = plain[cut.id].shar_position
        assert cut.to_dict() == plain[cut.id].to_dict()
        np.testing.assert_array_equal(cut.load_audio(), plain[cut.id].load_audio())
        np.testing.assert_array_equal(cut.load_context_codes(), plain[cut.id].load_context_codes())


def test_cuts_of_a_shard_are_spread_over_the_whole_epoch(many):
    """Mixing 8 of 40 shards would keep the cuts of one shard within a fifth of the epoch."""
    spread = {}
    for shuffle in (True, "global"):
        places = {number: place for place, number in enumerate(numbers(open_shar(many, shuffle=shuffle, seed=3)))}
        shards = [[places[9 * shard + item] for item in range(9)] for shard in range(40)]
        spread[shuffle] = np.mean([max(shard) - min(shard) for shard in shards])
    assert spread[True] < sum(COUNTS) / 5
    assert spread["global"] > sum(COUNTS) / 2


def test_index_files_may_lie_elsewhere(many, tmp_path):
    into = tmp_path / "index"
    bare = make_bare_dataset(tmp_path / "dataset", COUNTS[:3])
    with raises(ConfigError, "missing_input", "is missing", f"sharmill sidecars {bare}"):
        open_shar(bare, shuffle="global")
    write_sidecars(bare, into)
    assert sorted(numbers(open_shar(bare, shuffle="global", sidecars=into))) == list(range(27))


def test_a_folder_without_index_is_refused_with_what_to_do(dataset):
    for name in ("dataset.json", "shards.jsonl"):
        (dataset / name).unlink()
    with raises(ConfigError, "no_dataset", "sharmill index"):
        open_shar(dataset, shuffle="global")

"""Index files for lhotse 2, read by its pre-release in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from support.errors import raises
from support.pipelines import run_sharmill
from support.shar import copy, snapshot

from sharmill.errors import DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.sidecars import indexed_shar, write_sidecars
from sharmill.validate.checked_dataset import check_strays, read_checked_dataset

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
    """A folder with the pre-release of lhotse 2, to be put before the installed one."""
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


def test_offsets_lead_to_lines_and_headers(dataset):
    write_sidecars(dataset)
    plain = dataset / "cuts/cuts.000001.jsonl"
    offsets = np.fromfile(f"{plain}.idx", "<u8").tolist()
    data = plain.read_bytes()
    lines = [data[start:end] for start, end in pairwise(offsets)]
    assert [json.loads(line)["supervisions"][0]["custom"]["number"] for line in lines] == [3, 4, 5]
    archive = dataset / "target_audio/recording.000001.tar"
    offsets = np.fromfile(f"{archive}.idx", "<u8").tolist()
    assert offsets[-1] == archive.stat().st_size
    for offset, line in zip(offsets, lines, strict=False):
        cut_id = json.loads(line)["id"].encode()
        assert archive.read_bytes()[offset : offset + len(cut_id)] == cut_id


def test_the_checker_knows_them_and_the_reader_does_not_mind(dataset):
    before = [cut.id for cut in open_shar(dataset)]
    # Of a process that was killed.
    for name in (".probe", "cuts/.cuts.000001.jsonl", "target_audio/.recording.000001.tar.idx"):
        (dataset / f"{name}.{'0' * 32}.tmp").touch()
    write_sidecars(dataset)
    assert not list(dataset.rglob(".*"))
    assert [cut.id for cut in open_shar(dataset)] == before
    (dataset / "cuts/cuts.000009.jsonl.idx").touch()
    assert strays(dataset) == ["cuts/cuts.000009.jsonl.idx"]


def strays(dataset):
    return [finding.file for finding in check_strays(read_checked_dataset(dataset))]


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
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert snapshot(there if apart else dataset) == snapshot(into or again)


def test_the_command_names_what_it_cannot_use(dataset, tmp_path):
    result = run_sharmill("sidecars", tmp_path / "nothing")
    assert result.returncode == 2
    assert result.stderr.startswith("Error: ")
    assert str(tmp_path / "nothing") in result.stderr
    (tmp_path / "file").touch()
    result = run_sharmill("sidecars", dataset, "--into", tmp_path / "file")
    assert result.returncode == 2
    assert str(tmp_path / "file") in result.stderr

"""Manifest to dataset on the command line: reading with lhotse, and disturbed runs."""

import json
import math
import os
import signal
import subprocess
import time

import pytest
from support import damage as do, project as projects
from support.project import (
    REPOSITORY,
    TINY_CODEC,
    Project,
    command,
    lines,
    read_with_lhotse,
    run_sharmill,
    snapshot,
    within,
    write_lines,
)
from support.toy_stage import wait_until

from sharmill.shar.index import read_dataset

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(write_config, tmp_path_factory):
    """The folder of a run that two workers have finished."""
    folder = tmp_path_factory.mktemp("built")
    encode = {"codecs": [{"name": "tiny", "model": TINY_CODEC}], "unit_seconds": 40.0}
    run_sharmill("run", write_config(folder, encode=encode, executor={"workers": 2}))
    return folder


def test_every_record_is_in_the_dataset_or_rejected_once(folder, corpus):
    num_cuts = sum(shard["count"] for shard in lines(folder / "dataset/shards.jsonl"))
    records = [line for line in corpus.manifest.read_text().splitlines() if line.strip()]
    assert num_cuts + len(lines(folder / "run/rejects.jsonl")) == len(records)
    assert num_cuts == 40


def test_plain_lhotse_loads_every_audio_and_every_code(folder):
    (codec,) = read_dataset(folder / "dataset").codecs
    count = 0
    for cut in read_with_lhotse(folder / "dataset", "tiny"):
        count += 1
        target, context = cut.load_target_audio(), cut.load_context_audio()
        assert target.shape == (1, cut.target_audio.num_samples)
        assert context.shape == (1, cut.context_audio.num_samples)
        assert cut.duration == cut.target_audio.duration
        for codes, recording in ((cut.target_codes, cut.target_audio), (cut.context_codes, cut.context_audio)):
            array = codes.load()
            samples = round(recording.num_samples / recording.sampling_rate * codec.sampling_rate)
            assert array.shape == (codec.num_codebooks, math.ceil(samples / codec.samples_per_frame))
            assert array.dtype.name == "int16"
            assert 0 <= array.min() <= array.max() < codec.codebook_size
        assert cut.target_codes.frame_shift == codec.samples_per_frame / codec.sampling_rate
    assert count == 40


def test_second_run_does_nothing_and_succeeds(folder):
    before = snapshot(folder / "dataset")
    ledger = sorted((folder / "run/write/ranks").glob("*/ledger/*"))
    assert ledger
    run_sharmill("run", folder / "config.yaml")
    assert snapshot(folder / "dataset") == before
    assert sorted((folder / "run/write/ranks").glob("*/ledger/*")) == ledger


# The files that the units of each stage publish, and how many of them are lost: one unit is done again in the process
# itself, several by worker processes.
LOST = [
    ("run/encode/tiny/parts/*.npy", slice(1, 2)),
    ("run/match/parts/*.jsonl", slice(1, None)),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in (
        ("run/prepare/parts/*.jsonl", slice(1, None)),
        ("dataset/target_audio/*.tar", slice(1, 2)),
        ("dataset/codes_tiny/target_codes/*.tar", slice(1, None)),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("outputs", "lost"), LOST)
def test_units_with_lost_output_are_rebuilt_with_equal_bytes(folder, outputs, lost):
    expected = snapshot(folder / "dataset")
    files = sorted(folder.glob(outputs))
    assert len(files) > 2
    for path in files[lost]:
        path.unlink()
    run_sharmill("run", folder / "config.yaml", "prepare", "match", "write", "encode")
    assert snapshot(folder / "dataset") == expected


@pytest.mark.parametrize(("workers", "level", "count"), [(1, "DEBUG", 1), (2, "DEBUG", 1), (2, "INFO", 0)])
def test_ranks_log_at_the_level_that_is_asked_for_in_any_run(workers, level, count, tmp_path):
    project = Project(tmp_path).add_voices([1.0])
    project.add("gone.flac", duration=1.0)
    config = projects.write_config(tmp_path, write_lines(tmp_path / "m.json", project.records), project.root)
    settings = [f"executor.workers={workers}", f"executor.log_level={level}"]
    run_sharmill("run", config, "prepare", *settings)
    logs = "".join(path.read_text() for path in (tmp_path / "run/prepare/logs").glob("rank-*.log"))
    assert (logs.count("unit 0 starts"), logs.count("missing_audio of ")) == (1, count)
    # The log level is not part of a run's identity.
    run_sharmill("run", config, "prepare", "executor.log_level=ERROR")


@pytest.mark.slow
def test_all_stages_run_without_contexts_and_speakers(tmp_path):
    """On a manifest two of whose records are bad."""
    project = Project(tmp_path).add_voices([0.4 + 0.1 * number for number in range(12)], "call/{}.wav")
    for record in project.records:
        del record["speaker"]
    bad = [{"audio_filepath": "absent.wav", "duration": 1.0, "text": "not there"}, {"text": "no audio at all"}]
    manifest = write_lines(tmp_path / "calls.json", [*bad, *project.records])
    config = projects.write_config(tmp_path, manifest, project.root, match=None, write={"shard_seconds": 2.5})
    printed = run_sharmill("run", config, "validate.deep=true", "validate.against_sources=true").stdout
    for expected in ("prepare", "write", "encode/tiny", "no findings", "missing_audio 1", "missing_field 1"):
        assert expected in printed
    assert "match (stage" not in printed
    assert "accounted for: 14 records of the manifests: 12 found as cuts, 2 found among the rejects, 0 not found" in (
        " ".join(printed.split())
    )
    assert not (tmp_path / "run/match").exists()
    assert sorted(path.name for path in (tmp_path / "dataset").iterdir()) == [
        "codes_tiny", "cuts", "dataset.json", "shards.jsonl", "target_audio",
    ]  # fmt: skip


@pytest.mark.slow
def test_damage_is_found_done_again_and_gone(make_config, corpus, tmp_path):
    dataset, report, rejects = tmp_path / "dataset", tmp_path / "findings.json", tmp_path / "run/rejects.jsonl"
    config = make_config(tmp_path, validate={"against_sources": True})
    printed = run_sharmill("run", config).stdout
    assert "validation: no findings" in printed
    assert "not compared with its manifests" not in printed
    original = snapshot(dataset)
    do.flip_bit(do.CONTEXTS, 2000)(dataset)
    do.flip_bit("codes_tiny/target_codes/codes.000002.tar", 700)(dataset)
    do.change_bytes("shards.jsonl", lambda data: data[:-20])(dataset)
    run_sharmill("validate", dataset, "--json", report, "--against", corpus.manifest, "--rejects", rejects,
                 status=3)  # fmt: skip
    # The index must be rebuilt first, since the checksums of other files are unknown while it is unreadable.
    assert [(unit["stage"], unit["shard"]) for unit in json.loads(report.read_text())["redo"]] == [("index", None)]
    run_sharmill("run", config, "--redo", report, status=3)
    found = run_sharmill("validate", config, "--json", report, status=3)
    assert "wrong_checksum" in found.stdout
    assert "units that --redo would rebuild: 1 of encode/tiny, 1 of write" in found.stdout
    assert "validation: no findings" in run_sharmill("run", config, "--redo", report).stdout
    assert snapshot(dataset) == original


@pytest.mark.slow
def test_another_configuration_is_refused_until_restart(make_config, tmp_path):
    config = make_config(tmp_path, encode={"codecs": []})
    run_sharmill("run", config, "prepare", "match", "write")
    for overrides, words in (
        (["write.shard_size=5"], ("write.shard_size", "sharmill run CONFIG write --restart\n")),
        (["write.shard_size=5", "match.min_duration=0.5"], ("sharmill run CONFIG match write --restart\n",)),
    ):
        changed = run_sharmill("run", config, "prepare", "match", "write", *overrides, status=2)
        assert changed.stderr.count("Error") == 1
        assert "Traceback" not in changed.stderr
        assert all(word in changed.stderr for word in words)
    run_sharmill("run", config, "write", "write.shard_size=5", "--restart")
    assert [shard["count"] for shard in lines(tmp_path / "dataset/shards.jsonl")] == [5] * 8


@pytest.mark.slow
def test_ctrl_c_ends_within_five_seconds_and_a_relaunch_goes_on(make_config, tmp_path):
    config = make_config(tmp_path, executor={"workers": 2})
    process = subprocess.Popen(
        command("run", config, "prepare", "match"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True, cwd=REPOSITORY,
    )  # fmt: skip
    try:
        wait_until(lambda: any((tmp_path / "run/match/ranks").glob("*/ledger/*")))
        pressed = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - pressed < within(5)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    assert process.returncode in (0, 1)
    assert process.returncode == 0 or "Traceback" not in errors
    kept = {path: path.read_bytes() for path in (tmp_path / "run/match/ranks").glob("*/ledger/*")}
    assert kept
    run_sharmill("run", config, "prepare", "match")
    assert {path: path.read_bytes() for path in kept} == kept

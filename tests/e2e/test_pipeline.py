"""Manifest to dataset, and what plain lhotse and the checker say of it."""

from __future__ import annotations

import json
import math

import pytest
from support.pipelines import digest, read_with_lhotse, run_sharmill

pytestmark = pytest.mark.e2e


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def built(tmp_path_factory, request):
    """One dataset that several tests look at; made on first use with the function-scoped helpers given."""
    return {"folder": tmp_path_factory.mktemp("built")}


@pytest.fixture
def dataset(built, make_config):
    if "config" not in built:
        config = make_config(built["folder"])
        outcome = run_sharmill("run", config)
        assert outcome.returncode == 0, outcome.stderr + outcome.stdout
        built["config"], built["stdout"] = config, outcome.stdout
    return built


def test_every_record_is_in_the_dataset_or_rejected_once(dataset, corpus):
    rejects = lines(dataset["folder"] / "run/rejects.jsonl")
    shards = lines(dataset["folder"] / "dataset/shards.jsonl")
    records = [line for line in corpus.manifest.read_text().splitlines() if line.strip()]
    assert sum(shard["count"] for shard in shards) + len(rejects) == len(records)
    assert sum(shard["count"] for shard in shards) == 40


def test_plain_lhotse_loads_every_audio_and_every_code(dataset):
    directory = dataset["folder"] / "dataset"
    codec = json.loads((directory / "dataset.json").read_text())["codecs"][0]
    count = 0
    for cut in read_with_lhotse(directory, "tiny"):
        count += 1
        target, context = cut.load_target_audio(), cut.load_context_audio()
        assert target.shape == (1, cut.target_audio.num_samples)
        assert context.shape == (1, cut.context_audio.num_samples)
        assert cut.duration == cut.target_audio.duration
        for codes, recording in ((cut.target_codes, cut.target_audio), (cut.context_codes, cut.context_audio)):
            array = codes.load()
            samples = round(recording.num_samples / recording.sampling_rate * codec["sampling_rate"])
            assert array.shape == (codec["num_codebooks"], math.ceil(samples / codec["samples_per_frame"]))
            assert array.dtype.name == "int16"
            assert 0 <= array.min() <= array.max() < codec["codebook_size"]
        assert cut.target_codes.frame_shift == codec["samples_per_frame"] / codec["sampling_rate"]
    assert count == 40


def test_context_is_another_utterance_of_the_same_speaker_and_long_enough(dataset):
    for cut in read_with_lhotse(dataset["folder"] / "dataset"):
        custom = cut.supervisions[0].custom
        speaker = custom["speaker"].split("Speaker:")[1].split()[0]
        assert custom["context_audio_filepath"].startswith(f"{speaker}/")
        own = (custom["audio_filepath"], custom["offset"])
        assert (custom["context_audio_filepath"], custom["context_audio_offset"]) != own
        assert custom["context_audio_duration"] >= 3.0
        assert custom["context_speaker_similarity"] >= 0.6


def test_lhotse_never_shortens_a_context(dataset):
    longer = shorter = 0
    for cut in read_with_lhotse(dataset["folder"] / "dataset", "tiny"):
        longer += cut.context_audio.duration > cut.duration
        shorter += cut.context_audio.duration < cut.duration
        codes = cut.context_codes.load()
        for part in (cut, cut.truncate(offset=0.5, duration=0.3)):
            assert part.load_context_audio().shape[1] == cut.context_audio.num_samples
            assert part.load_context_codes().shape == codes.shape
    assert longer
    assert shorter


def test_the_dataset_directory_holds_no_absolute_path(dataset, corpus, encodec):
    import gzip

    directory = dataset["folder"] / "dataset"
    for path in directory.rglob("*"):
        if path.is_dir():
            continue
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for forbidden in (corpus.audio_root, directory, encodec):
            assert str(forbidden).encode() not in data, path


def test_summary_names_stages_and_rejects(dataset):
    for expected in ("prepare", "match", "write", "encode/tiny", "validate", "missing_audio 1", "no findings"):
        assert expected in dataset["stdout"]


def test_second_run_does_nothing_and_succeeds(dataset):
    before = digest(dataset["folder"] / "dataset")
    ledger = sorted((dataset["folder"] / "run/write/ranks").glob("*/ledger/*"))
    assert ledger
    outcome = run_sharmill("run", dataset["config"])
    assert outcome.returncode == 0, outcome.stderr
    assert digest(dataset["folder"] / "dataset") == before
    assert sorted((dataset["folder"] / "run/write/ranks").glob("*/ledger/*")) == ledger


@pytest.mark.slow
def test_a_codec_is_added_to_a_finished_dataset_with_one_command(dataset, make_config, encodec, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(dataset["folder"] / "dataset", copy)
    before = digest(copy)
    second = [{"name": "second", "model": f"transformers:{encodec}"}]
    config = make_config(tmp_path, run_dir=str(tmp_path / "run2"), dataset_dir=str(copy))
    outcome = run_sharmill("run", config, "encode", "validate", f"encode.codecs={json.dumps(second)}")
    assert outcome.returncode == 0, outcome.stderr + outcome.stdout
    after = digest(copy)
    index = ("dataset.json", "shards.jsonl")
    assert {n: d for n, d in before.items() if n not in index} == {
        n: d for n, d in after.items() if n in before and n not in index
    }
    described = json.loads((copy / "dataset.json").read_text())
    assert [codec["name"] for codec in described["codecs"]] == ["second", "tiny"]
    for first, again in zip(read_with_lhotse(copy, "tiny"), read_with_lhotse(copy, "second"), strict=True):
        assert (first.target_codes.load() == again.target_codes.load()).all()

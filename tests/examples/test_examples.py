"""The programs in examples/ and pipelines/ run as their docstrings describe."""

import json
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
from support.models import write_conversations
from support.project import REPOSITORY, put, raises, speaker_tag, voice, write_config, write_lines

from sharmill.errors import ConfigError
from sharmill.shar import open_shar
from sharmill.shar.index import read_dataset


def run(program: str, *arguments, status: int = 0) -> str:
    """Run a program of the repository, and return its output."""
    command = [sys.executable, str(REPOSITORY / program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def speech(tmp_path):
    """Return a folder with ``manifest.json`` and ``audio``: eight utterances of two speakers, of 3 to 4 s."""
    records = []
    for number in range(8):
        speaker, seconds = f"s{number % 2}", 3.0 + 0.125 * number
        name = f"{speaker}/{number}.wav"
        put(tmp_path / "audio" / name, voice(seconds, pitch=100 + 60 * (number % 2), seed=number))
        (tmp_path / "audio" / name).with_suffix(".txt").write_text(f"number {number}\n")
        tag = speaker_tag(speaker)
        records.append({"audio_filepath": name, "duration": seconds, "text": f"number {number}", "speaker": tag})
    write_lines(tmp_path / "manifest.json", records)
    return tmp_path


@pytest.fixture
def config(speech):
    """Return a configuration for ``speech`` with the codec of ``examples/own_codec.py``."""
    codec = {"name": "level", "model": "python:own_codec:LevelCodec"}
    return write_config(
        speech, speech / "manifest.json", speech / "audio", prepare={}, match={}, write={"shard_size": 4},
        encode={"codecs": [codec]},
    )  # fmt: skip


@pytest.mark.slow
def test_a_dataset_is_built_in_python(speech):
    printed = run("examples/build_dataset.py", speech / "manifest.json", speech / "audio", speech / "out")
    assert "write: 8 records in, 8 out" in printed
    assert len(list(open_shar(speech / "out/dataset"))) == 8


def test_the_own_source_prepares_its_records(speech):
    run("examples/own_source.py", speech / "audio", speech / "out")
    lines = (speech / "out/run/manifests/folders_prepared.json").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == [f"number {n}" for n in (0, 2, 4, 6, 1, 3, 5, 7)]


@pytest.mark.slow
def test_the_recipes_run_one_by_one_with_the_own_codec(speech, config, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "examples"), prepend=":")
    for recipe in ("prepare_manifest", "match_context", "write_shar"):
        assert "8 records, rejected: none" in run(f"pipelines/{recipe}.py", config)
    run("examples/own_codec.py", config)
    assert [codec.name for codec in read_dataset(speech / "dataset").codecs] == ["level"]
    for cut in open_shar(speech / "dataset", ["target_audio", "target_codes"]):
        peaks = np.abs(cut.load_audio()[0, : 320 * 100].reshape(-1, 320)).max(axis=1)
        assert (cut.load_target_codes()[0, :100] == (peaks * 63).astype(int)).all()
    assert "encode/level: 8 units" not in run("pipelines/encode_codes.py", config)
    run("pipelines/validate_shards.py", speech / "dataset")
    run("pipelines/build_dataset.py", config)
    (speech / "dataset/cuts/cuts.000000.jsonl.gz").unlink()
    printed = run("pipelines/validate_shards.py", speech / "dataset", status=3)
    assert re.search(r"missing_file: shard 0, cuts/cuts\.000000\.jsonl\.gz.*: ", printed)


def test_a_recipe_names_the_wrong_key_of_the_configuration(config):
    assert "min_duration" in run("pipelines/prepare_manifest.py", config, "prepare.min_duration=-1", status=2)


@pytest.mark.parametrize(
    "name", ["build_dataset", "conversations", "own_codec", "own_source", "read_with_lhotse", "train"]
)
def test_an_example_without_arguments_prints_its_usage(name):
    assert f"\npython examples/{name}.py " in run(f"examples/{name}.py", status=1)


@pytest.mark.slow
def test_training_resumes_with_the_remaining_cuts(built, tmp_path):
    def ids(printed: str) -> list[str]:
        return [cut_id for cut_id in printed.split() if cut_id.startswith("cut-")]

    first = ids(run("examples/train.py", built.dataset, tmp_path / "checkpoint.pt", 1))
    second = ids(run("examples/train.py", built.dataset, tmp_path / "checkpoint.pt", 1))
    assert len(first) == 4
    # An epoch has seven cuts, so the first three after the stop complete it.
    assert sorted(first + second[:3]) == sorted(cut.id for cut in open_shar(built.dataset, ["target_codes"]))


@pytest.mark.slow
def test_lightning_resumes_with_the_remaining_cuts(built, tmp_path):
    def trained_on(*options) -> list[str]:
        printed = run("examples/train_lightning.py", built.dataset, tmp_path, *options)
        assert "stopped: `max_steps=" in printed
        lines = re.findall(r"trains on ((?:cut-\S+ ?){4})", printed)
        return [cut_id for line in lines for cut_id in line.split()]

    first = trained_on("--steps", 1)
    assert len(set(first)) == 4
    second = trained_on("--steps", 2, "--ranks", 2)
    assert len(second) == 8
    # An epoch has seven cuts; the remaining three are among the first cuts of the two ranks.
    assert set(first) | set(second[:2] + second[4:6]) == {cut.id for cut in open_shar(built.dataset, ["target_codes"])}


write_shar = runpy.run_path(str(REPOSITORY / "examples/conversations.py"))["main"]


def test_conversations_have_both_sides_and_the_roles(tmp_path, capsys):
    manifest = write_conversations(tmp_path, 3)
    assert write_shar(manifest, tmp_path / "out") == 0
    assert "3 conversations" in capsys.readouterr().out
    cuts = list(open_shar(tmp_path / "out"))
    assert [cut.id for cut in cuts] == ["c0", "c1", "c2"]
    for number, cut in enumerate(cuts):
        user, agent = voice(2 + 0.1 * number, seed=number), voice(2 + 0.1 * number, seed=50 + number)
        assert np.array_equal(cut.load_audio()[0], user)
        assert np.array_equal(cut.load_target_audio()[0], agent)
        turns = [(one.speaker, one.start, one.text) for one in cut.supervisions]
        assert turns == [("user", 0.0, f"question {number}"), ("assistant", 1.0, f"answer {number}")]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"turns": []}, "no turns"),
        ({"turns": [{"role": "robot", "start": 0, "duration": 1, "text": "x"}]}, "robot"),
        ({"turns": [{"role": "user", "start": 1.5, "duration": 1, "text": "x"}]}, "turn 0"),
        ({"turns": [{"role": "user", "start": 0, "duration": 1}]}, "text"),
        ({"agent_audio_filepath": "short.wav"}, "equal length"),
        ({"user_audio_filepath": "missing.wav"}, "missing.wav"),
    ],
)
def test_a_bad_conversation_is_named_and_leaves_no_files(tmp_path, change, named):
    manifest = write_conversations(tmp_path, 2)
    put(tmp_path / "short.wav", voice(1.0))
    first, second = map(json.loads, manifest.read_text().splitlines())
    manifest.write_text(json.dumps(first) + "\n" + json.dumps(second | change) + "\n")
    before = sorted(tmp_path.iterdir())
    with raises(ConfigError, "bad_manifest", "line 2", named):
        write_shar(manifest, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_conversations_refuse_an_existing_folder(tmp_path):
    (tmp_path / "out").mkdir()
    with raises(ConfigError, "foreign_output", "out"):
        write_shar(write_conversations(tmp_path, 1), tmp_path / "out")

"""Whole pipelines over a small corpus: a codec, a configuration, the command line in a process of its own, digests."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from support.paths import REPOSITORY

if TYPE_CHECKING:
    from lhotse import CutSet

# Real speech, which is not part of the repository.
LIBRISPEECH = REPOSITORY.parent / "shared/data/librispeech_10x10"


def command(*arguments: Any) -> list[str]:
    """``sharmill`` as a command of this interpreter."""
    return [sys.executable, "-m", "sharmill", *map(str, arguments)]


def run_sharmill(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs ``sharmill`` to its end, from the root of the repository unless ``options`` say otherwise."""
    options = {"cwd": REPOSITORY, "timeout": 500} | options
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, **options)


def save_encodec(folder: Path) -> Path:
    """A tiny EnCodec with seeded weights: its classes load faster than NeMo's."""
    import torch
    from transformers import EncodecConfig, EncodecModel

    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = EncodecConfig(
            num_filters=4, hidden_size=16, codebook_size=64, codebook_dim=16, upsampling_ratios=[8, 5, 4, 2],
            target_bandwidths=[1.5], num_lstm_layers=1,
        )  # fmt: skip
        EncodecModel(config).save_pretrained(folder)
    return folder


def write_config(folder: Path, manifest: Path, audio_root: Path, codec: Path, **changes: Any) -> Path:
    """Writes ``folder/config.yaml``, with small units and its directories below ``folder``, and returns its path."""
    values = {
        "name": "small",
        "run_dir": str(folder / "run"),
        "dataset_dir": str(folder / "dataset"),
        "sources": [{"manifest": str(manifest), "audio_root": str(audio_root)}],
        "prepare": {"unit_records": 10},
        "match": {"unit_seconds": 30.0},
        "write": {"shard_size": 8},
        "encode": {"codecs": [{"name": "tiny", "model": f"transformers:{codec}"}]},
        "executor": {"workers": 1},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return path


def digest(directory: Path) -> dict[str, str]:
    """The checksum of every file of a directory, by its relative name."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def read_with_lhotse(directory: Path, *codecs: str) -> CutSet:
    """Return the cuts of a dataset as plain lhotse reads them, with the codes of the codecs named."""
    from lhotse import CutSet

    return CutSet.from_shar(fields=shar_fields(directory, *codecs))


def shar_fields(directory: Path, *codecs: str) -> dict[str, list[str]]:
    """Return the files of a dataset as ``lhotse.CutSet.from_shar`` takes them."""
    folders = {name: name for name in ("cuts", "target_audio", "context_audio")}
    for codec in codecs:
        folders |= {name: f"codes_{codec}/{name}" for name in ("target_codes", "context_codes")}
    there = {name: directory / folder for name, folder in folders.items() if (directory / folder).is_dir()}
    return {name: [str(path) for path in sorted(folder.iterdir())] for name, folder in there.items()}


def outcome(folder: Path) -> tuple[dict[str, str], bytes]:
    """Return what must not depend on the executor: dataset and rejects of a configuration by ``write_config``."""
    return digest(folder / "dataset"), (folder / "run/rejects.jsonl").read_bytes()


def check_page(folder: Path) -> None:
    """Asserts that the page of a whole run of a configuration by ``write_config`` is there, with all that a run has."""
    page = (folder / "run/report.html").read_text()
    name = json.loads((folder / "dataset/dataset.json").read_text())["name"]
    assert f"<title>{name} · sharmill report</title>" in page
    for section in ("funnel", "listening", "contents", "voices", "codes", "work", "card"):
        assert f'<section id="{section}"' in page
    assert "All charts are of all cuts; those in green are of their audio." in page
    assert "each segment once" in page


def damage(folder: Path) -> Path:
    """Damages a shard of the finished dataset of a configuration by ``write_config``; what the checker says of it."""
    shard, report = folder / "dataset/target_audio/recording.000001.tar", folder / "findings.json"
    shard.write_bytes(bytes(shard.stat().st_size))
    assert run_sharmill("validate", folder / "dataset", "--json", report).returncode == 3
    return report


def second_dataset() -> dict[str, Any]:
    """Changes for ``write_config``: without contexts, of real speech or, where there is none, of the same corpus."""
    if not LIBRISPEECH.is_dir():
        return {"name": "other", "write": {"shard_size": 5}, "match": None}
    source = {"manifest": str(LIBRISPEECH / "manifest.json"), "audio_root": str(LIBRISPEECH / "audio")}
    return {
        "name": "librispeech",
        "sources": [source],
        "speaker_key": "librispeech",
        "prepare": {"unit_records": 25},
        "match": None,
        "write": {"shard_size": 10},
    }

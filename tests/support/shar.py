"""Small manufactured corpora, stages run in this process, and a speaker encoder and a codec whose output is known."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import shutil
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import soundfile as sf
import torch

from sharmill.config import Config, to_config
from sharmill.encode.config import CodecConfig, EncodeConfig
from sharmill.encode.stage import EncodeStage
from sharmill.engine.outcomes import StageResult
from sharmill.engine.run import run_stage
from sharmill.engine.stage import Stage
from sharmill.executors.local import LocalExecutor
from sharmill.files.storage import checksum
from sharmill.manifest import Context, Utterance
from sharmill.match.stage import matched_manifest
from sharmill.prepare.stage import PrepareStage, prepared_manifest
from sharmill.shar.tar import TarTable, TarWriter
from sharmill.write.stage import WriteStage
from support.manifests import KeepErrors, speaker_tag


def run(stage: Stage, *, restart: bool = False) -> StageResult:
    """Runs a stage to its end in this process."""
    return run_stage(stage, LocalExecutor(1), KeepErrors(), max_reject_fraction=1.0, restart=restart)


def codec_stages(config: Config, name: str = "toy", model: str = "builtin") -> list[Stage]:
    """The stages that bring the codes of one codec into a dataset."""
    codec = CodecConfig(name=name, model=model)
    if codec not in config.section(EncodeConfig).codecs:
        config = config.with_section(dataclasses.replace(config.section(EncodeConfig), codecs=[codec]))
    encode = EncodeStage(config, codec)
    return [encode.survey, encode, encode.assemble]


def run_codec(config: Config, name: str = "toy", model: str = "builtin", *, restart: bool = False) -> None:
    """Brings the codes of one codec into a dataset."""
    for stage in codec_stages(config, name, model):
        assert run(stage, restart=restart and stage.kind != "survey").ok


def voice(seconds: float, rate: int = 16000, pitch: float = 200.0, seed: int = 0) -> np.ndarray:
    """A tone that glides a little, over quiet noise, rounded to 16 bits."""
    num_samples = round(seconds * rate)
    time = np.arange(num_samples) / rate
    noise = np.random.default_rng(seed).standard_normal(num_samples)
    samples = 0.3 * np.sin(2 * np.pi * pitch * time + np.sin(3 * time)) + 0.01 * noise
    return (np.round(samples * 32767) / 32768).astype(np.float32)


def put(path: Path, samples: np.ndarray, rate: int = 16000, subtype: str | None = None) -> Path:
    """Writes an audio file in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    format = {"opus": "OGG"}.get(path.suffix[1:])
    sf.write(path, samples, rate, format=format, subtype="OPUS" if format else subtype)
    return path


class Project:
    """A folder with audio, a manifest that grows, and a run directory and a dataset directory made from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "audio"
        self.run_dir = folder / "run"
        self.dataset = folder / "dataset"
        self.records: list[dict[str, Any]] = []

    def add(self, name: str, samples: np.ndarray | None = None, rate: int = 16000, **keys: Any) -> Path:
        """A record, and its file if samples are given. ``speaker`` is the name in the tag."""
        path = self.root / name
        if samples is not None:
            put(path, samples, rate, keys.pop("subtype", None))
            keys.setdefault("duration", len(samples) / rate)
        record = {
            "audio_filepath": name,
            "duration": 0.0,
            "speaker": speaker_tag(keys.pop("speaker", "anna")),
            "text": f"text of {name}",
        }
        self.records.append(record | keys)
        return path

    def configure(self, **changes: Any) -> Config:
        manifest = self.folder / "small.json"
        manifest.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        values = {
            "name": "small",
            "run_dir": str(self.run_dir),
            "dataset_dir": str(self.dataset),
            "sources": [{"manifest": str(manifest), "audio_root": str(self.root)}],
            "prepare": {"min_duration": 0.0},
        }
        # Of synthetic voices: nothing that an encoder of speech is made for.
        match = changes.get("match", {})
        changes["match"] = None if match is None else {"min_similarity": 0.6} | match
        return to_config(values | changes, "test")

    def prepare(self, config: Config) -> list[Utterance]:
        """Runs ``prepare``; the utterances that it kept."""
        assert run(PrepareStage(config)).ok
        return [Utterance.from_json(line) for line in prepared_manifest(config).read_bytes().splitlines()]

    def match_by_hand(
        self, config: Config, contexts: list[int] | None = None, similarities: list[float] | None = None
    ) -> list[Utterance]:
        """Runs ``prepare`` and gives utterance n the context ``contexts[n]`` (by default n + 1)."""
        utterances = self.prepare(config)
        for index, utterance in enumerate(utterances):
            context = utterances[contexts[index] if contexts else (index + 1) % len(utterances)]
            utterance.index = index
            utterance.context = Context(
                segment=context.segment,
                recording_id=context.recording_id,
                text=context.text,
                similarity=similarities[index] if similarities else 0.75,
            )
        matched_manifest(config).write_bytes(b"".join(u.to_json() + b"\n" for u in utterances))
        return utterances

    def write(
        self, contexts: list[int] | None = None, similarities: list[float] | None = None, **changes: Any
    ) -> Config:
        """Makes the dataset directory, without codes; ``match=None`` makes one without contexts."""
        config = self.configure(**changes)
        if config.has_contexts:
            self.match_by_hand(config, contexts, similarities)
        else:
            self.prepare(config)
        assert run(WriteStage(config)).ok
        return config

    def encode(self, config: Config, name: str = "toy", codec: ToyCodec | None = None) -> ToyCodec:
        """Adds the codes of a toy codec."""
        codec = codec or ToyCodec()
        with loading(codec):
            run_codec(config, name)
        return codec

    def rejects(self, stage: str) -> list[dict[str, Any]]:
        return lines(self.run_dir / stage / "rejects.jsonl")


class PitchEncoder:
    """The voice is the loudest frequency: one of 1000 f Hz has the angle f, and silence has none."""

    sampling_rate = 16000
    embedding_size = 2
    checksum = "pitch"

    def __init__(self) -> None:
        self.embedded = 0

    def embed(self, audio: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        self.embedded += len(audio)
        rows = [self._row(row[:n]) for row, n in zip(audio, num_samples.tolist(), strict=True)]
        return torch.tensor(rows, dtype=torch.float32)

    def _row(self, samples: torch.Tensor) -> list[float]:
        if not bool((samples != 0).any()):
            return [0.0, 0.0]
        # Of the same number of points for all, so that equal pitches are equal.
        angle = float(torch.fft.rfft(samples, 65536).abs().argmax()) * 16000 / 65536 / 1000
        return [math.cos(angle), math.sin(angle)]


class ToyCodec:
    """The codes of codebook c are the frame's mean magnitude in 50 steps, plus c."""

    checksum = "toy"
    trained = False

    def __init__(
        self,
        sampling_rate: int = 16000,
        samples_per_frame: int = 320,
        codebook_size: int = 64,
        equal_lengths_only: bool = False,
    ) -> None:
        self.sampling_rate = sampling_rate
        self.samples_per_frame = samples_per_frame
        self.num_codebooks = 3
        self.codebook_size = codebook_size
        self.equal_lengths_only = equal_lengths_only
        self.batches: list[list[int]] = []

    def encode(self, audio: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        self.batches.append(num_samples.tolist())
        rows = [self.codes(a[:n].numpy()) for a, n in zip(audio, num_samples.tolist(), strict=True)]
        result = torch.zeros(len(rows), self.num_codebooks, max(row.shape[1] for row in rows), dtype=torch.int64)
        for target, row in zip(result, rows, strict=True):
            target[:, : row.shape[1]] = torch.from_numpy(row)
        return result

    def codes(self, samples: np.ndarray) -> np.ndarray:
        """Codes (codebooks, frames) of samples at the codec's rate."""
        frames = math.ceil(len(samples) / self.samples_per_frame)
        whole = np.pad(samples, (0, frames * self.samples_per_frame - len(samples)))
        level = np.abs(whole.reshape(frames, self.samples_per_frame)).mean(axis=1)
        steps = np.minimum(level * 50, 50).astype(np.int64)
        return np.stack([steps + codebook for codebook in range(self.num_codebooks)])


@contextmanager
def loading(codec: Any):
    """Makes ``codec`` what is loaded, whatever its name."""
    with mock.patch("sharmill.encode.stage.load_codec", return_value=codec):
        yield


def lines(path: Path) -> list[Any]:
    """The JSON lines of a file, compressed or not."""
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix == ".gz" else data
    return [msgspec.json.decode(line) for line in data.splitlines()]


def snapshot(directory: Path) -> dict[str, bytes]:
    """The bytes of every file of a directory."""
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def copy(directory: Path, to: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(directory, to)
    return to


def reindex(directory: Path) -> None:
    """Brings sizes and checksums in ``shards.jsonl`` up to date, so that only deeper checks can see a damage."""
    shards = lines(directory / "shards.jsonl")
    for shard in shards:
        for file in shard["fields"].values():
            path = directory / file["file"]
            if path.exists():
                file.update(size=path.stat().st_size, xxh3=checksum(path))
    rewrite(directory / "shards.jsonl", shards)


def members_of(path: Path) -> list[tuple[str, bytes]]:
    """The names and bytes of the members of an archive."""
    with TarTable(path) as table:
        return [(name, table.read(number)) for number, name in enumerate(table.names)]


def write_members(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Makes an archive of members."""
    with path.open("wb") as stream:
        writer = TarWriter(stream)
        for name, data in members:
            writer.add(name, data)
        writer.finish()


def rewrite(path: Path, records: list[Any]) -> None:
    """JSON lines, compressed if the name says so."""
    data = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)

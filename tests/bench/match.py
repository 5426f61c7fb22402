"""Rows of the stage match, compared with its model alone and the published script, and of context selection."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from support.models import save_titanet
from support.project import Project, prepared_manifest, run, stage_of

from bench.rows import Case, row, with_peak
from bench.speech import in_batches, load, model_seconds, write_corpus
from sharmill.match.select import select_context
from sharmill.models import SpeakerEncoder, load_speaker_encoder, make_deterministic
from sharmill.models.batches import pad

# The fastest of 8, 16, 32, 60 and 600 padded seconds for small encoders on one CPU thread.
BEST_BATCH_SECONDS = 32
PUBLISHED_BATCH = 16
RATE = 22050


Embed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def corpus(folder: Path, tiny: bool) -> tuple[Project, SpeakerEncoder, Embed]:
    """Prepared corpus at 22.05 kHz, with a small TitaNet for sharmill and for NeMo.

    Tests use an encoder without NeMo for both.
    """
    make_deterministic()
    project = Project(folder)
    project.records = write_corpus(folder, 16 if tiny else 96, rate=RATE, speakers=4)
    project.prepare(project.configure())
    if tiny:
        encoder = load_speaker_encoder("resemblyzer")
        return project, encoder, encoder.embed
    from nemo.collections.asr.models import EncDecSpeakerLabelModel

    checkpoint = save_titanet(folder / "titanet.nemo")
    model = EncDecSpeakerLabelModel.restore_from(str(checkpoint), map_location="cpu").eval()

    @torch.no_grad()
    def embed(audio: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        return model(input_signal=audio, input_signal_length=num_samples)[1]

    return project, load_speaker_encoder(f"nemo:{checkpoint}"), embed


def ours(project: Project, encoder: SpeakerEncoder) -> dict[str, float]:
    """Run the stage with a recipe's batches of 600 s and the loaded model."""
    config = project.configure(match={"min_similarity": -1.0, "batch_seconds": 600})
    with mock.patch("sharmill.match.stage.load_speaker_encoder", return_value=encoder):
        assert run(stage_of(config, "match"), restart=True).ok
    embedded, padded = model_seconds(project.run_dir, "match", "embedded")
    return {"padding": 1 - embedded / padded}


@row(
    "match model", baseline="NeMo's model alone on the best batches of the same audio", inverse=True,
    targets={"ratio": "<= 1.15", "system share": "<= 0.05", "padding": "<= 0.04"},
)  # fmt: skip
def match_beside_model(folder: Path, tiny: bool) -> Case:
    """The stage match with a TitaNet of 1.9 M parameters, 22.05 kHz FLAC and one rank."""
    project, encoder, embed = corpus(folder, tiny)
    return beside_batches(project, encoder, embed)


@row(
    "match encoder", baseline="the same model as sharmill runs it, alone, on the best batches of the same audio",
    inverse=True, group="further",
)  # fmt: skip
def match_beside_encoder(folder: Path, tiny: bool) -> Case:
    """The same stage, model and corpus."""
    project, encoder, _ = corpus(folder, tiny)
    return beside_batches(project, encoder, encoder.embed)


def beside_batches(project: Project, encoder: SpeakerEncoder, embed: Embed) -> Case:
    audio = [load(project.root / record["audio_filepath"], 16000) for record in project.records]
    alone = in_batches(embed, audio, BEST_BATCH_SECONDS * 16000)
    return case(project, encoder, alone)


def case(project: Project, encoder: SpeakerEncoder, baseline: Callable[[], None]) -> Case:
    hours = sum(record["duration"] for record in project.records) / 3600
    return Case(amount=hours, unit="hours of audio", ours=lambda: ours(project, encoder), baseline=baseline)


@row(
    "match published",
    baseline="NeMo's model on batches of 16 in file order, N x N, each row sorted",
    targets={"ratio": ">= 3"},
)
def match_beside_published(folder: Path, tiny: bool) -> Case:
    """The stage match with the same model and corpus."""
    project, encoder, embed = corpus(folder, tiny)
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in prepared_manifest(project.configure()).read_text().splitlines():
        record = json.loads(line)
        groups.setdefault(record["speaker"], []).append(record)

    def published() -> None:
        for records in groups.values():
            choose_by_sorting(embed_in_order(project.root, records, embed), records)

    return case(project, encoder, published)


def embed_in_order(root: Path, records: list[dict[str, Any]], embed: Embed) -> torch.Tensor:
    rows = []
    for start in range(0, len(records), PUBLISHED_BATCH):
        batch = records[start : start + PUBLISHED_BATCH]
        rows.append(embed(*pad([load(root / record["audio_filepath"], 16000) for record in batch])))
    return torch.cat(rows)


def choose_by_sorting(embeddings: torch.Tensor, records: list[dict[str, Any]]) -> list[int]:
    similarity = embeddings @ embeddings.T
    order = similarity.argsort(dim=1, descending=True).tolist()
    return [
        next((other for other in row if other != own and records[other]["duration"] >= 3.0), -1)
        for own, row in enumerate(order)
    ]


DIM = 192
LIMITS = {"min_similarity": 0.6, "min_duration": 3.0}
SELECTION_TARGETS = {"ratio": "<= 1.67", "MiB above": "<= 512"}
MATMUL = "`matmul` of the same candidates in float64"


def large_group(num_rows: int) -> dict[str, Any]:
    """Return a large group: 40 voices, recordings of 100 slightly overlapping segments, some repeated texts."""
    rng = np.random.default_rng(7)
    voices = rng.normal(size=(40, DIM))[rng.integers(40, size=num_rows)]
    durations = rng.uniform(1.0, 15.0, num_rows).round(2)
    return {
        "embeddings": (voices + 0.7 * rng.normal(size=(num_rows, DIM))).astype(np.float32),
        "durations": durations,
        "recordings": np.arange(num_rows) // 100,
        "offsets": np.cumsum(durations) - durations - rng.uniform(0, 0.5, num_rows),
        "texts": rng.integers(-1, num_rows, num_rows),
    }


def selection(num_rows: int) -> Case:
    """Select the best context of each utterance of one group, after a small group has started the threads."""
    select_context(**large_group(500), **LIMITS)
    data = large_group(num_rows)
    units = data["embeddings"].astype(np.float64)
    candidates = np.ascontiguousarray(units[data["durations"] >= LIMITS["min_duration"]].T)
    product = np.empty((256, candidates.shape[1]))

    def select() -> dict[str, float]:
        return with_peak(lambda: select_context(**data, **LIMITS))

    def matmul() -> None:
        for start in range(0, len(units), len(product)):
            rows = units[start : start + len(product)]
            np.matmul(rows, candidates, out=product[: len(rows)])

    return Case(amount=num_rows, unit="utterances", ours=select, baseline=matmul)


@row("select", baseline=MATMUL, targets=SELECTION_TARGETS, inverse=True)
def select_beside_matmul(folder: Path, tiny: bool) -> Case:
    """The contexts of 20,000 utterances of one group, 192 dimensions."""
    return selection(400 if tiny else 20_000)


@row("select 100,000", baseline=MATMUL, targets=SELECTION_TARGETS, inverse=True, group="scale")
def select_many(folder: Path, tiny: bool) -> Case:
    """The contexts of 100,000 utterances of one group, 192 dimensions."""
    return selection(400 if tiny else 100_000)

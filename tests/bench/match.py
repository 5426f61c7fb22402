"""Rows of the stage match, beside a loop over the encoder and a full sort of all similarities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile as sf
from support.shar import Project, run

from bench.rows import Case, row
from bench.speech import write_corpus
from sharmill.match.stage import MatchStage


@row("match resemblyzer", baseline="a loop over `embed_utterance`", target="≥ 3")
def resemblyzer(folder: Path, tiny: bool) -> Case:
    """Embed and choose contexts; both ways load the model."""
    project = Project(folder)
    project.records = write_corpus(folder, 8 if tiny else 48)
    config = project.configure(match={"min_duration": 0.0, "min_similarity": -1.0})
    project.prepare(config)

    def ours() -> None:
        assert run(MatchStage(config), restart=True).ok

    def theirs() -> None:
        from resemblyzer import VoiceEncoder

        encoder = VoiceEncoder("cpu", verbose=False)
        waves = [sf.read(project.root / record["audio_filepath"], dtype="float32")[0] for record in project.records]
        voices = np.stack([encoder.embed_utterance(wave) for wave in waves])
        np.argsort(voices @ voices.T, axis=1)

    seconds = sum(record["duration"] for record in project.records)
    return Case(amount=seconds / 3600, unit="hours of audio", ours=ours, baseline=theirs)

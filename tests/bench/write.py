"""Rows of the stage write: a matched manifest to shards, compared with ``CutSet.to_shar`` for the same fields."""

import shutil
from pathlib import Path

import numpy as np
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from support.project import Project, run, stage_of

from bench.rows import Case, row
from bench.speech import write_corpus
from sharmill.manifest import Utterance
from sharmill.write.config import WriteConfig

TO_SHAR = "lhotse's `to_shar`"


def case(folder: Path, tiny: bool, *, suffix: str, near: bool = False) -> Case:
    """Return the case of a corpus in shards of 100, with contexts from any shard, or from the same one if ``near``.

    Contexts are in the same shard in the orders ``speaker`` and ``manifest``.
    """
    project = Project(folder)
    project.records = write_corpus(folder, 8 if tiny else 400, suffix=suffix)
    config = project.configure(
        write={"shard_size": 4 if tiny else 100, "order": "manifest" if near else "shuffle"},
        match={"min_duration": 0.0},
    )
    numbers = np.arange(len(project.records))
    contexts = (numbers ^ 1 if near else np.random.default_rng(2).permutation(numbers)).tolist()
    utterances = project.match_by_hand(config, contexts, noted=True)
    shar = folder / "lhotse"

    def ours() -> None:
        assert run(stage_of(config, "write"), restart=True).ok

    def theirs() -> None:
        shar.mkdir()
        cuts = CutSet.from_cuts(cut_of(utterance, project.root) for utterance in utterances)
        fields = {"target_audio": "flac", "context_audio": "flac"}
        cuts.to_shar(shar, fields=fields, shard_size=config.section(WriteConfig).shard_size, warn_unused_fields=False)

    def before() -> None:
        for made in (project.dataset, shar):
            shutil.rmtree(made, ignore_errors=True)

    seconds = sum(u.segment.duration + u.context.segment.duration for u in utterances if u.context)
    return Case(amount=seconds / 3600, unit="hours of audio", ours=ours, baseline=theirs, before=before)


def cut_of(utterance: Utterance, root: Path) -> MonoCut:
    """Return a cut with target and context attached, as in a plain loop."""
    assert utterance.context is not None
    target, context = (
        Recording.from_file(root / segment.audio_filepath) for segment in (utterance.segment, utterance.context.segment)
    )
    # lhotse would otherwise treat the context as equally long as the target.
    custom = {**utterance.public_record(), "context_audio_unaligned": True}
    custom |= {"target_audio": target, "context_audio": context}
    supervision = SupervisionSegment(
        id=f"sup-{utterance.cut_id}", recording_id=target.id, start=0.0, duration=target.duration,
        text=utterance.text, language="en", speaker=utterance.speaker,
    )  # fmt: skip
    return MonoCut(
        id=utterance.cut_id, start=0.0, duration=target.duration, channel=0, supervisions=[supervision],
        recording=target, custom=custom,
    )  # fmt: skip


@row("write copy", baseline=TO_SHAR, targets={"ratio": ">= 8"})
def copy(folder: Path, tiny: bool) -> Case:
    """FLAC of the wanted rate, whose bytes are copied."""
    return case(folder, tiny, suffix="flac")


@row("write transcode", baseline=TO_SHAR, targets={"ratio": ">= 2"})
def transcode(folder: Path, tiny: bool) -> Case:
    """WAV encoded as FLAC."""
    return case(folder, tiny, suffix="wav")


@row("write transcode, contexts in their shard", baseline=TO_SHAR, targets={"ratio": ">= 2"})
def transcode_near(folder: Path, tiny: bool) -> Case:
    """WAV encoded as FLAC; each segment is a target and a context in one shard."""
    return case(folder, tiny, suffix="wav", near=True)

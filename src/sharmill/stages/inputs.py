"""Inputs of stages that read audio: the roots of a dataset's segments, and the names of its manifests."""

from pathlib import Path
from typing import Any

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.config import Config
from sharmill.engine.stage import StageRun, identify_folder


def stage_before_match(config: Config) -> str:
    """Return the stage whose manifest is the input of ``match``: ``voices`` where it is configured, or ``prepare``."""
    return "prepare" if config.sections.get("voices") is None else "voices"


def segment_roots(config: Config) -> AudioRoots:
    """Return the audio roots of a dataset's segments: the roots of its sources, then the ``append_to`` dataset."""
    roots: list[str | list[str] | None] = [source.audio_root for source in config.sources]
    if config.append_to is not None:
        roots.append(config.append_to)
    return AudioRoots.of(roots, config.cache, [source.float_scale for source in config.sources])


def segment_reader(run: StageRun) -> SegmentReader:
    """Return the reader for the segments that the ``prepare`` stage has accepted."""
    facts = run.totals_of("prepare", duration_tolerance=float).facts
    return SegmentReader(segment_roots(run.config), facts["duration_tolerance"])


def identify_roots(roots: AudioRoots, run_dir: Path) -> list[dict[str, Any]]:
    """Return the part of a plan's identity that stands for audio roots.

    Each root is a URL, or a folder in a form that does not depend on how its path is written. The scale of
    floating-point audio is included if it is not 1.
    """
    return [
        ({"url": root.url} if root.url else identify_folder(root.path, run_dir))
        | ({} if root.float_scale == 1 else {"float_scale": root.float_scale})
        for root in roots.roots
    ]


def manifest_stem(config: Config) -> str:
    """Return the stem for the names of a dataset's manifests: the stem of its only source, or the dataset name."""
    stem = (config.sources[0].stem if len(config.sources) == 1 else None) or config.name
    # File names in run directories must be printable.
    return "".join(letter if letter.isprintable() else "_" for letter in stem)

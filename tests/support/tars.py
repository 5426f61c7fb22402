"""Tar archives made up for the tests, and audio files to put into them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import soundfile as sf

from support.shar import voice


def tar_bytes(members: Iterable[tuple[str, bytes]], format: int = tarfile.GNU_FORMAT, **headers: Any) -> bytes:
    """Return an archive of (name, content) pairs; ``headers`` are further attributes of each header."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in headers.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], **options: Any) -> Path:
    """Write an archive, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(members, **options))
    return path


def voice_bytes(seconds: float = 1.0, seed: int = 0, format: str = "FLAC", rate: int = 16000) -> bytes:
    """Return an audio file of a voice that no other seed has."""
    stream = io.BytesIO()
    sf.write(stream, voice(seconds, rate, pitch=150 + 10 * seed, seed=seed), rate, format=format)
    return stream.getvalue()

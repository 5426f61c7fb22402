"""Rows of ``sharmill manifest``, beside one process for each file, as people do who call a program for each."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import soundfile as sf
from support.audio import speech_like

from bench.rows import Case, row

SAMPLE = 20
ONE_FILE = "import soundfile, sys; info = soundfile.info(sys.argv[1]); print(info.frames / info.samplerate)"


def make_tree(root: Path, num_files: int) -> list[Path]:
    """Write FLAC files of a tenth of a second, 1,000 to a folder, with texts beside them."""
    stream = io.BytesIO()
    sf.write(stream, speech_like(1600, 16000), 16000, format="FLAC")
    files = []
    for number in range(num_files):
        path = root / f"{number // 1000:05d}" / f"{number:08d}.flac"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stream.getvalue())
        path.with_suffix(".txt").write_text("hello there")
        files.append(path)
    return files


@row("manifest", group="further", baseline=f"{SAMPLE} processes that read one header each")
def manifest(folder: Path, tiny: bool) -> Case:
    """``sharmill manifest`` of 4,000 short files with texts, one worker, start included: times as fast, not a file."""
    files = make_tree(folder / "speech", SAMPLE if tiny else 4000)
    output = folder / "m.json"

    def ours() -> dict[str, float]:
        command = [sys.executable, "-m", "sharmill", "manifest", str(folder / "speech"), "-o", str(output)]
        _run(*command, "--speaker", "{path[0]}", "--workers", "1")
        return {"files": float(len(files))}

    def theirs() -> None:
        for path in files[:SAMPLE]:
            _run(sys.executable, "-c", ONE_FILE, str(path))

    return Case(
        amount=len(files), unit="files", by="wall", ours=ours, baseline=theirs,
        before=lambda: output.unlink(missing_ok=True),
    )  # fmt: skip


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

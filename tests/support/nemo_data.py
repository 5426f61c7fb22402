"""Data as NeMo reads them: text, a manifest, and tars with manifests."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from support.shar import put, voice


def make_nemo_data(folder: Path) -> Path:
    """Write nine recordings of half a second, a manifest that skips one, three tars of all, and 12 lines of text."""
    for file in range(3):
        (folder / f"text_{file}.txt").write_text("".join(f"line {4 * file + n}\n" for n in range(4)))
    lines = []
    for n in range(9):
        put(folder / f"{n}.wav", voice(0.5, seed=n))
        record = {"audio_filepath": f"{n}.wav", "duration": 0.5, "text": str(n)}
        lines.append(json.dumps(record | ({"_skipme": "too noisy"} if n == 4 else {})) + "\n")
    (folder / "plain.json").write_text("".join(lines))
    whole = []
    for shard in range(3):
        names = [f"{n}.wav" for n in range(shard, 9, 3)]
        with tarfile.open(folder / f"audio_{shard}.tar", "w") as archive:
            for name in names:
                archive.add(folder / name, name)
        records = [{"audio_filepath": name, "duration": 0.5, "text": name[0], "shard_id": shard} for name in names]
        whole.append("".join(json.dumps(record) + "\n" for record in records))
        (folder / f"manifest_{shard}.json").write_text(whole[-1])
    (folder / "whole.json").write_text("".join(whole))
    return folder

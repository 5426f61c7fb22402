"""Two datasets made by the real stages, text, and a conversation manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.manifests import speaker_tag
from support.shar import Project, put, voice

DURATIONS = [0.5 + 0.1 * number for number in range(24)]
SIMILARITIES = [round(0.5 + 0.02 * number, 2) for number in range(24)]


@dataclass(frozen=True)
class Corpora:
    """``large`` has cuts 0 to 23 in 6 shards, of 0.5 to 2.8 s; ``small`` has cuts 100 to 107, of 1 s, in German."""

    large: Path
    small: Path
    text: Path
    pairs: tuple[Path, Path]
    conversations: Path

    def entry(self, name: str, **options: Any) -> dict[str, Any]:
        """An entry of ``input_cfg`` that reads the codes of one of them."""
        fields = ["target_codes", "context_codes"]
        return {"type": "sharmill", "dataset": str(getattr(self, name)), "fields": fields} | options


def make_corpora(folder: Path) -> Corpora:
    """All of it, below a folder."""
    text = folder / "text.txt"
    text.write_text("".join(f"line {number:02d}\n" for number in range(40)))
    pairs = (folder / "source.txt", folder / "target.txt")
    for path, letter in zip(pairs, "st", strict=True):
        path.write_text("".join(f"{letter * (number + 1)}\n" for number in range(10)))
    return Corpora(_large(folder), _small(folder), text, pairs, _conversations(folder))


def _large(folder: Path) -> Path:
    """The CER of cut n is n hundredths; cuts 20 and 21 have none, 22 has null, and 23 failed some check."""
    project = Project(folder / "large")
    for number, seconds in enumerate(DURATIONS):
        keys = {"number": number, "text": "x" * (number % 6 + 1), "cer": number / 100}
        if number >= 20:
            keys["cer"] = None
        if number in (20, 21):
            del keys["cer"]
        if number == 23:
            keys["validation_status"] = "fail"
        project.add(f"utt{number:02d}.flac", voice(seconds, pitch=150 + 10 * number, seed=number), **keys)
    config = project.write(
        similarities=SIMILARITIES,
        write={"shard_size": 4, "order": "manifest"},
        match={"min_duration": 0.0},
    )
    project.encode(config)
    return project.dataset


def _small(folder: Path) -> Path:
    project = Project(folder / "small")
    for number in range(100, 108):
        project.add(f"klein{number}.flac", voice(1.0, pitch=2 * number, seed=number), number=number, text="y" * 5)
        project.records[-1]["speaker"] = speaker_tag("bert", language="de-DE")
    config = project.write(write={"shard_size": 3, "order": "manifest"}, match={"min_duration": 0.0})
    project.encode(config)
    return project.dataset


def _conversations(folder: Path) -> Path:
    """Six questions in audio of n + 1 tenths of a second, each with an answer in text."""
    manifest = folder / "conversations.jsonl"
    lines = []
    for number in range(6):
        seconds = (number + 1) / 10
        put(folder / f"question{number}.wav", voice(seconds, seed=number))
        turns = [
            {"type": "audio", "from": "User", "value": f"question{number}.wav", "duration": seconds, "offset": 0.0},
            {"type": "text", "from": "Assistant", "value": f"answer {number}"},
        ]
        lines.append(json.dumps({"id": f"conversation{number}", "conversations": turns}) + "\n")
    manifest.write_text("".join(lines))
    return manifest


def link_data(corpora: Corpora, folder: Path) -> None:
    """Make the folder of data that the configurations for training name, of these corpora."""
    (folder / "text").mkdir(parents=True)
    for name, dataset in {"hifitts2": corpora.large, "libritts": corpora.large, "german": corpora.small}.items():
        (folder / name).symlink_to(dataset)
    for name, path in zip(("books", "questions", "answers"), (corpora.text, *corpora.pairs), strict=True):
        (folder / f"text/{name}.txt").symlink_to(path)
    (folder / "dialogs").symlink_to(corpora.conversations.parent)

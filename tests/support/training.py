"""Shared parts of training tests: a letter tokenizer, torch datasets, loader samples, corpora and NeMo data."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from sharmill.training import merge_data_states
from support.project import Project, put, speaker_tag, voice, write_lines
from support.sources import write_tar


class Letters:
    """One token per character; NeMo's prompt formats can use it."""

    bos, eos = 1, 2

    def __call__(self, text: str) -> list[int]:
        return self.text_to_ids(text)

    def text_to_ids(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def ids_to_text(self, ids: list[int]) -> str:
        return "".join(chr(token) for token in ids)


class AsIs(torch.utils.data.Dataset):
    """A batch is its examples."""

    def __getitem__(self, cuts: Any) -> list[Any]:
        return list(cuts)


class Ids(torch.utils.data.Dataset):
    """Dataset whose batches are the ids of cuts, or texts if there are none."""

    def __getitem__(self, cuts: Any) -> list[str]:
        return [getattr(cut, "id", None) or cut.text.strip() for cut in cuts]


def take(loader: Any, batches: int | None = None) -> list[Any]:
    """The first batches of a loader, or all."""
    return list(islice(iter(loader), batches))


def stop_ranks(load: Callable[..., Any], counts: Sequence[int], state: Any = None) -> tuple[list[Any], dict[str, Any]]:
    """Take a number of batches on each rank, starting at ``state``; return them by rank, and the merged state."""
    loaders = [load(rank=rank, world_size=len(counts), state=state) for rank in range(len(counts))]
    batches = [take(loader, count) for loader, count in zip(loaders, counts, strict=True)]
    return batches, json.loads(json.dumps(merge_data_states([loader.state_dict() for loader in loaders])))


def flat(batches: list[list[Any]]) -> list[Any]:
    """The examples of batches."""
    return [example for batch in batches for example in batch]


def number(example: Any) -> int:
    """The number that the manifest has for an utterance of the test corpora."""
    cut = example.list_cuts()[0] if hasattr(example, "list_cuts") else example
    return cut.supervisions[0].custom["number"]


def make_nemo_data(folder: Path) -> Path:
    """Write nine recordings of half a second, a manifest that skips one, three tars of all, and 12 lines of text."""
    for file in range(3):
        (folder / f"text_{file}.txt").write_text("".join(f"line {4 * file + n}\n" for n in range(4)))
    records = []
    for n in range(9):
        put(folder / f"{n}.wav", voice(0.5, seed=n))
        records.append({"audio_filepath": f"{n}.wav", "duration": 0.5, "text": str(n)})
    write_lines(folder / "plain.json", [*records[:4], records[4] | {"_skipme": "too noisy"}, *records[5:]])
    whole = []
    for shard in range(3):
        own = [record | {"shard_id": shard} for record in records[shard::3]]
        names = [record["audio_filepath"] for record in own]
        write_tar(folder / f"audio_{shard}.tar", [(name, (folder / name).read_bytes()) for name in names])
        write_lines(folder / f"manifest_{shard}.json", own)
        whole += own
    write_lines(folder / "whole.json", whole)
    return folder


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
    """All data of the tests, in one folder."""
    text = folder / "text.txt"
    text.write_text("".join(f"line {number:02d}\n" for number in range(40)))
    pairs = (folder / "source.txt", folder / "target.txt")
    for path, letter in zip(pairs, "st", strict=True):
        path.write_text("".join(f"{letter * (number + 1)}\n" for number in range(10)))
    return Corpora(_large(folder), _small(folder), text, pairs, _conversations(folder))


def _large(folder: Path) -> Path:
    """The CER of cut n is n hundredths; cuts 20 and 21 have none, 22 has null, and 23 failed some check."""
    project = Project(folder / "large")
    for number in range(24):
        samples = voice(0.5 + 0.1 * number, pitch=150 + 10 * number, seed=number)
        keys = {} if number in (20, 21) else {"cer": number / 100 if number < 20 else None}
        project.add(f"utt{number:02d}.flac", samples, number=number, text="x" * (number % 6 + 1), **keys)
    project.records[23]["validation_status"] = "fail"
    similarities = [round(0.5 + 0.02 * number, 2) for number in range(24)]
    write = {"shard_size": 4, "order": "manifest"}
    project.encode(project.write(similarities=similarities, write=write, match={"min_duration": 0.0}))
    return project.dataset


def _small(folder: Path) -> Path:
    project = Project(folder / "small")
    for number in range(100, 108):
        project.add(f"klein{number}.flac", voice(1.0, pitch=2 * number, seed=number), number=number, text="y" * 5)
        project.records[-1]["speaker"] = speaker_tag("bert", language="de-DE")
    project.encode(project.write(write={"shard_size": 3, "order": "manifest"}, match={"min_duration": 0.0}))
    return project.dataset


def _conversations(folder: Path) -> Path:
    """Six questions in audio of n + 1 tenths of a second, each with an answer in text."""
    conversations = []
    for number in range(6):
        seconds = (number + 1) / 10
        put(folder / f"question{number}.wav", voice(seconds, seed=number))
        turns = [
            {"type": "audio", "from": "User", "value": f"question{number}.wav", "duration": seconds, "offset": 0.0},
            {"type": "text", "from": "Assistant", "value": f"answer {number}"},
        ]
        conversations.append({"id": f"conversation{number}", "conversations": turns})
    return write_lines(folder / "conversations.jsonl", conversations)


def link_data(corpora: Corpora, folder: Path) -> None:
    """Make the folder of data that the configurations for training name, of these corpora."""
    (folder / "text").mkdir(parents=True)
    for name, dataset in {"hifitts2": corpora.large, "libritts": corpora.large, "german": corpora.small}.items():
        (folder / name).symlink_to(dataset)
    for name, path in zip(("books", "questions", "answers"), (corpora.text, *corpora.pairs), strict=True):
        (folder / f"text/{name}.txt").symlink_to(path)
    (folder / "dialogs").symlink_to(corpora.conversations.parent)

"""A source from an installed package, which sharmill knows only by its entry point."""

import json
import os

import pytest
import yaml
from support.project import add_distribution, put, run_sharmill, voice

ENTRY_POINTS = "[sharmill.sources]\nspoken = spoken_lines:SpokenSource\n"
MODULE = '''
import json
from dataclasses import dataclass
from typing import ClassVar

from sharmill.sources import FileSource, Piece, UnreadableRecord


@dataclass(frozen=True, kw_only=True)
class SpokenSource(FileSource):
    """Lines of a file name, a speaker and a text, with a mark between them."""

    file_keys: ClassVar = ("lines",)
    type: str = "spoken"
    lines: str
    mark: str = ";"

    def pieces(self, records_per_piece):
        for number, file in enumerate(self.files):
            count = len(file.read_text().splitlines())
            for begin in range(0, count, records_per_piece):
                end = min(begin + records_per_piece, count)
                yield Piece(end - begin, {"file": number, "begin": begin, "end": end})

    def read(self, piece):
        for line in self.files[piece["file"]].read_text().splitlines()[piece["begin"] : piece["end"]]:
            try:
                path, speaker, text = line.split(self.mark)
            except ValueError:
                yield UnreadableRecord("malformed", "the line has not three parts", line)
                continue
            yield json.dumps({"audio_filepath": path, "speaker": speaker, "text": text}).encode()
'''


@pytest.fixture
def sharmill(tmp_path):
    """Return a function from the arguments of a command to its output, run with the package installed."""
    packages = tmp_path / "packages"
    add_distribution(packages, "spoken-lines", "1.0", ENTRY_POINTS)
    (packages / "spoken_lines.py").write_text(MODULE)

    def run(*arguments, status=0):
        path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
        done = run_sharmill(*arguments, status=status, env=os.environ | {"PYTHONPATH": path})
        return done.stdout + done.stderr

    return run


@pytest.fixture
def config(tmp_path):
    """A configuration with six recordings in two line-based files, and an invalid line."""
    for number in range(6):
        put(tmp_path / f"speech/{number}.wav", voice(1.0, seed=number), 16000)
    (tmp_path / "lines_0.txt").write_text("".join(f"{n}.wav|anna|text {n}\n" for n in range(4)))
    (tmp_path / "lines_1.txt").write_text("no line\n" + "".join(f"{n}.wav|Ben Li|text {n}\n" for n in (4, 5)))
    source = {"type": "spoken", "lines": str(tmp_path / "lines_{0..1}.txt"), "mark": "|", "language": "en",
              "audio_root": str(tmp_path / "speech"), "dataset": "Mine"}  # fmt: skip
    values = {"name": "spoken", "run_dir": str(tmp_path / "run"), "dataset_dir": str(tmp_path / "dataset"),
              "sources": [source], "prepare": {"unit_records": 2}}  # fmt: skip
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "c.yaml"


def test_its_records_are_prepared_by_the_rules_of_all_sources(sharmill, config, tmp_path):
    sharmill("run", config, "prepare")
    lines = (tmp_path / "run/manifests/spoken_prepared.json").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["text"] for record in records] == [f"text {number}" for number in range(6)]
    assert {record["speaker"] for record in records} == {
        "| Language:en Dataset:Mine Speaker:anna |",
        "| Language:en Dataset:Mine Speaker:Ben_Li-9f7df0951e6954f9 |",
    }
    (reject,) = map(json.loads, (tmp_path / "run/rejects.jsonl").read_text().splitlines())
    assert (reject["reason"], reject["record"], reject["source"]) == ("malformed", "no line", 0)


def test_its_keys_are_checked_and_its_input_may_not_change(sharmill, config, tmp_path):
    assert "sources[0].marc" in sharmill("run", config, "prepare", "sources.0.marc=x", status=2)
    sharmill("run", config, "prepare")
    sharmill("run", config, "prepare")
    with (tmp_path / "lines_1.txt").open("a") as stream:
        stream.write("5.wav|anna|again\n")
    assert "--restart" in sharmill("run", config, "prepare", status=2)

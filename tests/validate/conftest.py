"""The dataset that tests of damage copy, and ``--damage-table FILE``, which writes down what the checker said."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest


def pytest_addoption(parser):
    parser.addoption("--damage-table", metavar="FILE", help="write the kinds of damage and their findings as Markdown")


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A folder with three finished datasets; not to be changed by tests.

    ``dataset`` has 7 cuts in 3 shards, at 16 kHz, with the codes of a toy codec. Cut n has the context n + 1. In shard
    1, the first two targets and the first context are equally long, and the last target has a context of the same
    recording. ``project`` is what it was made from. ``again`` has the same cuts at 8 kHz, with codes of twice as many
    frames; ``foreign`` has other cuts.
    """
    folder = tmp_path_factory.mktemp("finished")
    _build(folder, "dataset", 16000, 320, "spk")
    _build(folder, "again", 8000, 80, "spk")
    _build(folder, "foreign", 16000, 320, "else")
    return folder


def _build(folder: Path, name: str, rate: int, samples_per_frame: int, speaker: str) -> None:
    from support.shar import Project, ToyCodec, voice

    project = Project(folder / ("project" if name == "dataset" else f"{name}.project"))
    project.folder.mkdir()
    project.dataset = folder / name
    for number, seconds in enumerate([1.0, 2.005, 0.5, 1.0, 1.0]):
        loudness = np.float32(0.5 + 0.3 * number)
        samples = loudness * voice(seconds, pitch=150 + 20 * number, seed=number)
        project.add(f"{speaker}/utt{number}.flac", samples, speaker=speaker)
    long = project.add(f"{speaker}/long.flac", voice(4.0, seed=9), speaker=speaker, offset=0.5, duration=0.8)
    project.add(long.relative_to(project.root).as_posix(), speaker=speaker, offset=2.0, duration=1.5)
    project.records[-1]["text"] = "another text of the same recording"
    config = project.write(
        write={"shard_size": 3, "order": "manifest", "sampling_rate": rate},
        match={"min_duration": 0.4, "max_duration": 3.0},
    )
    project.encode(config, codec=ToyCodec(sampling_rate=rate, samples_per_frame=samples_per_frame))


class DamageTable:
    """Gathers what was found of each kind of damage, a row a kind."""

    def __init__(self) -> None:
        self._rows = defaultdict(dict)

    def by_index(self, name, findings):
        self._rows[name]["index"] = _codes(findings)

    def by_content(self, name, level, findings, dataset):
        sentence = findings[0].sentence.replace(f"{dataset}/", "") if findings else "no damage any more"
        self._rows[name].update(level=level, content=_codes(findings), sentence=sentence)

    def by_reader(self, name, error):
        self._rows[name]["reader"] = "refused" if error else "all read rightly"

    def to_markdown(self) -> str:
        columns = ("index", "level", "content", "sentence", "reader")
        titles = "kind", "with the index of before", "level", "with the index of the damage", "first sentence", "reader"
        lines = [titles, ["---"] * len(titles)]
        lines += [[name, *(row.get(column, "") for column in columns)] for name, row in self._rows.items()]
        return "".join(f"| {' | '.join(cell.replace('|', '¦') for cell in line)} |\n" for line in lines)


def _codes(findings) -> str:
    return ", ".join(dict.fromkeys(finding.code for finding in findings)) or "nothing"


@pytest.fixture(scope="session")
def damage_table(request):
    """Takes what the checker said; it is written to the file of ``--damage-table`` when all tests are done."""
    table = DamageTable()
    yield table
    if file := request.config.getoption("--damage-table", None):
        Path(file).write_text(table.to_markdown())

"""The run over all kinds of odd inputs: what became of each record, and the table of it.

PYTHONPATH=tests python -m support.odd_run    # prints the table for the documentation
"""

from __future__ import annotations

import functools
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from support import odd_audio
from support.odd_inputs import KINDS
from support.odd_kinds import OUTPUT, Kind, record
from support.odd_manifests import WholeInput

_STAGES = (["prepare"], ["match"], ["write"], ["encode", "validate"])
_PREFIX = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
# Nothing may hang, and a FIFO would.
_SECONDS = 400


@dataclass(frozen=True)
class Ending:
    """How a record ended: its outcome, and the sentence of its reject or what was stored."""

    outcome: str
    sentence: str
    record: Any


@dataclass(frozen=True)
class OddRun:
    """The finished run. ``absent`` has the kinds that cannot be made here, and why."""

    folder: Path
    absent: dict[str, str]
    endings: dict[str, list[Ending]]
    records: list[dict[str, Any] | bytes]
    processes: list[subprocess.CompletedProcess[str]]


@functools.cache
def without_privileges() -> list[str] | None:
    """What to put before a command so that permissions count for it, for root too; None where that is not allowed."""
    with tempfile.TemporaryDirectory() as folder:
        locked = Path(folder, "locked")
        locked.touch()
        locked.chmod(0)
        for prefix in ([], _PREFIX if shutil.which(_PREFIX[0]) else ["false"]):
            works = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
            reads = subprocess.run([*prefix, "cat", locked], capture_output=True, check=False).returncode == 0
            if works and not reads:
                return prefix
    return None


def run_kinds(folder: Path) -> OddRun:
    """Makes the corpus of all kinds below ``folder`` and runs all stages over it, with the built-in codec."""
    root = folder / "audio"
    (root / "deep").mkdir(parents=True)
    absent: dict[str, str] = {}
    lines: list[dict[str, Any] | bytes] = []
    for kind in KINDS:
        try:
            if "may not be" in kind.name and without_privileges() is None:
                raise PermissionError("root may read everything here")
            lines += kind.make(root, kind.name)
        except PermissionError as error:
            absent[kind.name] = str(error)
    manifest = folder / "odd.json"
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    manifest.write_bytes(b"".join(line + b"\n" for line in encoded))
    config = _write_config(folder, manifest, root)
    processes = []
    for stages in _STAGES:
        processes.append(run_sharmill("run", config, *stages, cwd=folder))
        for kind in KINDS:
            if kind.after == stages[0]:
                kind.spoil(kind.file(root))
    return OddRun(folder, absent, _endings(folder), lines, processes)


def run_whole_input(folder: Path, whole: WholeInput) -> subprocess.CompletedProcess[str]:
    """A run of ``prepare`` over one good record, but for what is wrong with the input as a whole."""
    root, manifest = folder / "audio", folder / "odd.json"
    root.mkdir()
    (root / "good.wav").write_bytes(odd_audio.wav())
    manifest.write_text(json.dumps(record("good")) + "\n")
    config = _write_config(folder, manifest, root)
    whole.make(folder)
    return run_sharmill("run", config, "prepare", cwd=folder)


def run_sharmill(*arguments: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line, for whom permissions count."""
    command = [*(without_privileges() or []), sys.executable, "-m", "sharmill", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_SECONDS, check=False)


def _write_config(folder: Path, manifest: Path, root: Path) -> Path:
    values = {
        "name": "odd",
        "run_dir": str(folder / "run"),
        "dataset_dir": str(folder / "dataset"),
        "sources": [{"manifest": str(manifest), "audio_root": str(root)}],
        "max_reject_fraction": 0.9,
        "prepare": {"min_duration": 0.01, "unit_records": 40},
        "match": {"min_similarity": -1.0},
        "write": {"shard_size": 30},
        "encode": {"codecs": [{"name": "builtin", "model": "builtin"}]},
        "executor": {"workers": 1},
    }
    path = folder / "odd.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def _endings(folder: Path) -> dict[str, list[Ending]]:
    """What became of the records of each kind."""
    endings: dict[str, list[Ending]] = defaultdict(list)
    for cut in read_cuts(folder / "dataset"):
        custom = cut["supervisions"][0]["custom"]
        sentence = f"{cut['duration']:.4g} s at {cut['recording']['sampling_rate']:,} Hz"
        endings[custom["kind"]].append(Ending(OUTPUT, sentence, cut))
    for line in (folder / "run/rejects.jsonl").read_bytes().splitlines():
        reject = msgspec.json.decode(line)
        detail = reject["detail"].replace(f"{folder}/", "")
        ending = Ending(f"{reject['stage']}/{reject['reason']}", detail, reject["record"])
        endings[_kind_of(reject["record"])].append(ending)
    return dict(endings)


def read_cuts(dataset: Path) -> list[dict[str, Any]]:
    """The cuts of a dataset, without the help of sharmill."""
    files = sorted((dataset / "cuts").iterdir())
    return [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]


def _kind_of(record: Any) -> str:
    """The kind of a reject; of a line that is no record, the kind whose name is in it."""
    if isinstance(record, dict):
        return record["kind"]
    names = [kind.name for kind in KINDS if kind.name in record]
    return max(names, key=len)


def describe(kind: Kind, run: OddRun) -> tuple[str, str, str]:
    """A row of the table: kind, outcome, sentence."""
    endings = run.endings.get(kind.name, [])
    outcomes = [ending.outcome for ending in endings] or [run.absent.get(kind.name, "no record")]
    return kind.name, ", ".join(dict.fromkeys(outcomes)), "; ".join(dict.fromkeys(e.sentence for e in endings))


def main() -> None:
    """Prints the table in Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_kinds(Path(folder))
    print("| kind | outcome | what sharmill says, or stored |\n|---|---|---|")
    for kind in KINDS:
        cells = [ascii(cell)[1:-1].replace("|", "\\|")[:200] for cell in describe(kind, run)]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

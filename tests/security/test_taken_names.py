"""Links, FIFOs and other users' files in place of command outputs: nothing elsewhere changes, and nothing blocks.

    SEED=7 ROUNDS=5000 CASES="killed . run" pytest -m slow tests/security/test_taken_names.py

runs until it is interrupted or finished, with the cases that match.
"""

import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.project import command, make_record, put, speaker_tag, voice, write_config, write_lines
from support.stores import S3Store
from support.taken import TAKERS, state_of, take
from support.web import serving

COMMANDS = (
    "run config.yaml", "run config.yaml --restart", "work run", "status run", "cancel run", "report run",
    "submit all config.yaml --profile cluster.yaml --dry-run", "export dataset codes --to nemo_codes",
    "export dataset codes --to nemo_tarred", "merge dataset second/dataset merged", "append dataset second/dataset",
    "publish dataset s3://bucket/x", "sidecars dataset", "index dataset", "split dataset parts --by-speaker --test 50%",
    "calibrate config.yaml", "validate config.yaml", "run config.yaml cache_dir=cache",
)  # fmt: skip
# The state of the run directory at the start: nothing, the files of a finished run, or the files of a killed run.
STATES = ("new", "finished", "killed")


@dataclass(frozen=True)
class Made:
    """A folder with a run on audio at URLs, its dataset, another dataset, and all names that the run has used."""

    folder: Path
    names: list[str]

    def put_back(self, state: str) -> None:
        """Restore the run to a state."""
        for name in ("run", "dataset", "cache", "codes", "merged", "parts"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        if state != "new":
            for name in ("run", "dataset"):
                shutil.copytree(self.folder / "kept" / name, self.folder / name)
        if state == "killed":
            for path in (*self.folder.glob("run/**/done.json"), *self.folder.glob("run/**/ledger/*")):
                path.unlink()
            (self.folder / "dataset/dataset.json").unlink()

    def problem(self, arguments: str, name: str, kind: str) -> str:
        """Return the problem of a command if a thing of a kind is in place of a name; "" if there is none."""
        elsewhere = self.folder / "elsewhere"
        shutil.rmtree(elsewhere, ignore_errors=True)
        take(self.folder / name, kind, elsewhere)
        before = state_of(elsewhere)
        try:
            done = self.call(arguments)
        except subprocess.TimeoutExpired:
            return "it does not end"
        if state_of(elsewhere) != before:
            return "what is elsewhere has changed"
        if done.returncode not in (0, 1, 2, 3) or "Traceback" in done.stderr + done.stdout:
            return f"it ends with {done.returncode}: {done.stdout}{done.stderr}"
        return "" if done.returncode == 0 or done.stdout + done.stderr else "it ends without a word"

    def call(self, arguments: str) -> subprocess.CompletedProcess[str]:
        options = {"cwd": self.folder, "timeout": 120, "stdin": subprocess.DEVNULL}
        return subprocess.run(command(*arguments.split()), capture_output=True, text=True, check=False, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("names")
    match = {"encoder": "python:support.plugin.tiny_speech:TinyEncoder", "min_similarity": -1.0, "min_duration": 0.0}
    executor = {"workers": 1, "seconds_until_seen": 1.0}
    with serving(folder / "audio") as web, S3Store(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("XDG_CACHE_HOME", str(folder / "home"))
        for number in range(8):
            put(folder / f"audio/{number}.wav", voice(1.0, pitch=150 + 60 * (number % 2), seed=number))
        for part, numbers in (("second", range(4, 8)), ("", range(4))):
            records = [
                make_record(audio_filepath=f"{n}.wav", duration=1.0, speaker=speaker_tag(f"{part}{n % 2}"))
                for n in numbers
            ]
            manifest = write_lines(folder / part / "m.json", [*records, make_record(audio_filepath="none.wav")])
            write_config(
                folder / part, manifest, web.url, prepare={"unit_records": 3}, match=match, executor=executor,
                max_reject_fraction=0.9,
            )  # fmt: skip
        yield make(folder)


def names_in(folder: Path) -> Iterator[str]:
    """Yield the names in the run directory and the dataset of a folder."""
    for root in ("run", "dataset"):
        for place, folders, files in os.walk(folder / root):
            yield from ((Path(place) / name).relative_to(folder).as_posix() for name in (*folders, *files))


def make(folder: Path) -> Made:
    """Run both configurations, and record the names that the second run uses during its work and at its end."""
    (folder / "cluster.yaml").write_text("driver_units: 0\n")
    Made(folder, []).call("run second/config.yaml").check_returncode()
    kept, names = folder / "kept", set()
    with subprocess.Popen(command("run", folder / "config.yaml", "--quiet"), cwd=folder) as process:
        while process.poll() is None:
            names |= set(names_in(folder))
    assert process.returncode == 0
    names |= set(names_in(folder))
    for name in ("run", "dataset"):
        shutil.copytree(folder / name, kept / name)
    names |= {name.replace("run/copies", "cache") for name in names if name.startswith("run/copies/")}
    names |= {"run/jobs", "run/jobs/advance.log", "run/prepare/plan/replan", "run/bad_codes.jsonl", "codes/shards"}
    names |= {"codes", "codes/manifest.json", "codes/export.json", "merged", "parts", "run/calibration.json"}
    return Made(folder, sorted(names))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_no_command_changes_anything_behind_what_takes_a_name(made):
    for arguments in COMMANDS:
        made.put_back("finished")
        made.call(arguments).check_returncode()
    seed, wanted = os.environ.get("SEED", "0"), re.compile(os.environ.get("CASES", ""))
    draws, found, number = random.Random(seed), [], 0
    while number < int(os.environ.get("ROUNDS", "40")):
        case = draws.choice(STATES), draws.choice(COMMANDS), draws.choice(made.names), draws.choice(list(TAKERS))
        if not wanted.search(" | ".join(case)):
            continue
        number += 1
        made.put_back(case[0])
        if problem := made.problem(*case[1:]):
            found.append(f"{' | '.join(case)}: {problem}")
    assert not found, "\n".join(found)

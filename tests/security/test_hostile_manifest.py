"""An untrusted manifest executes nothing, cannot leave the audio root, and sends nothing harmful to the terminal.

``tests/e2e/test_input_kinds.py`` runs all kinds of bad input, including commands and paths, through a whole run.
There is no report in HTML; text only goes into JSON and to the terminal.
"""

import json
import os
import tracemalloc
import unicodedata
from dataclasses import replace

import msgspec
import pytest
from support.project import Project, copy, lines, put, run, stage_of, voice, write_lines

from sharmill.config import to_yaml
from sharmill.engine.executor import Listener
from sharmill.engine.unit import FailedAttempt
from sharmill.executors.local import LocalExecutor
from sharmill.pipeline import run_dataset
from sharmill.shar import open_shar

# Clears the screen, sets the title, rings, reverses the line, ends the line; C1 controls; HTML; rich's markup.
NASTY = "\x1b[2J\x1b]0;owned\x07\u202egnp\r\b\x9b31m\x7f\u2066<script>alert(1)</script>[red]x[/red]"


def controls(text: str) -> list[str]:
    return sorted({char for char in text if unicodedata.category(char) in ("Cc", "Cf") and char not in "\n\t"})


@pytest.fixture
def project(tmp_path):
    """Two utterances whose names, texts and further keys contain control characters."""
    project = Project(tmp_path)
    for number in range(2):
        name = f"{number}{NASTY}.wav".replace("/", "|")
        project.add(name, duration=4.0, text=NASTY, speaker="anna", **{NASTY: NASTY})
        # Rename the file afterwards, since libsndfile does not accept such a name.
        put(tmp_path / "audio/plain.wav", voice(4.0, seed=number)).rename(project.root / name)
    return project


def test_no_command_sends_control_characters_to_the_terminal(project, call, tmp_path):
    config = tmp_path / "config.yaml"
    changes = {"executor": {"workers": 1}, "encode": {"codecs": []}, "match": {"min_similarity": -1.0}}
    config.write_bytes(to_yaml(project.configure(**changes)))

    def say(*arguments: object) -> tuple[int, str]:
        status, *streams = call(*arguments)
        said = "".join(streams)
        assert (arguments[0], controls(said)) == (arguments[0], [])
        assert not any(line.strip().startswith("forged") for line in said.splitlines())
        return status or 0, said

    assert len(controls(NASTY)) == 8
    assert say("run", config)[0] == 0
    assert [cut.supervisions[0].text for cut in open_shar(project.dataset)] == [NASTY] * 2
    # Messages about failed units in ``status`` come from a file of the run directory.
    failures = project.run_dir / "prepare/failures.jsonl"
    failures.write_bytes(msgspec.json.encode(FailedAttempt(0, f"OSError: {NASTY}", "")) + b"\n")
    dataset = copy(project.dataset, tmp_path / f"one\n  forged\u2028forged {NASTY}".replace("/", "|"))
    cuts = dataset / "cuts/cuts.000000.jsonl.gz"
    write_lines(
        cuts, [cut | {"duration": 99.0, "id": f"x\n  forged\x85forged{n}"} for n, cut in enumerate(lines(cuts))]
    )
    for arguments, expected in (
        (["status", project.run_dir], 0),
        (["inspect", project.dataset, "--shard", "0", "--json"], 0),
        (["validate", dataset, "--workers", "1"], 3),
        (["bins", dataset], None),
        (["index", dataset], None),
        (["index", dataset / "absent"], 2),
    ):
        assert expected in (say(*arguments)[0], None)
    for path in project.root.iterdir():
        path.write_text("no audio")
    status, said = say("run", config, "--restart")
    assert status == 1
    assert "unreadable_audio 2" in said
    assert [reject["record"]["text"] for reject in lines(project.run_dir / "rejects.jsonl")] == [NASTY] * 2


def test_a_matched_manifest_cannot_leave_the_audio_root(project, tmp_path):
    """Each path is checked when its audio is read."""
    put(tmp_path / "outside.wav", voice(4.0))
    config = project.configure(match={"min_duration": 0.0})
    utterances = project.match_by_hand(config)
    paths = ["../outside.wav", str(tmp_path / "outside.wav")]
    for utterance, path in zip(utterances, paths, strict=True):
        utterance.segment = replace(utterance.segment, audio_filepath=path)
    project.leave_matched(config, utterances)
    assert run(stage_of(config, "write")).ok
    assert [reject["reason"] for reject in project.rejects("write")] == ["outside_root"] * 2
    assert list(open_shar(project.dataset)) == []


LONG = "x" * (1 << 20)
# Rejected records of 10 KiB to 1 MiB.
LARGE = [
    {"audio_filepath": "absent.wav", "duration": 1.0, "more": LONG},
    {"audio_filepath": "y" * 5000, "duration": 1.0, "more": LONG},
    {"audio_filepath": "y" * 5000, "duration": 1.0, "more": "z" * 3000},
    {"audio_filepath": [LONG], "duration": 1.0},
    {"audio_filepath": "absent.wav", "duration": 1e400, "more": LONG},
    {"audio_filepath": "absent.wav", "duration": int("9" * 4000)},
    {"audio_filepath": "absent.wav", "duration": 2.0, "offset": "1" * 9000},
]


def test_rejects_keep_a_part_of_large_records(tmp_path, call):
    """The records are large; there are also lines of 17 MiB, which take almost no space on disk."""
    project = Project(tmp_path).add_voices([4.0] * 2, "{}.wav")
    config = project.configure(match={"min_similarity": -1.0}, encode={"codecs": []}, max_reject_fraction=0.9)
    manifest = project.folder / "small.json"
    with manifest.open("r+b") as stream:
        stream.seek(0, os.SEEK_END)
        for number, record in enumerate(LARGE):
            stream.write(json.dumps(record | {"number": number}).replace("Infinity", "1e400").encode() + b"\n")
        for _ in range(3):
            stream.seek(17 << 20, os.SEEK_CUR)
            stream.write(b"\n")
        stream.write(json.dumps({"text": LONG}).encode() + b"\n" + b"no json" * 9000 + b"\n")
        # The same record with a longer text becomes a cut.
        stream.write(json.dumps(project.records[0] | {"_skipme": "x" * 9000}).encode() + b"\n")
    assert manifest.stat().st_blocks * 512 < manifest.stat().st_size / 5
    tracemalloc.start()
    result = run_dataset(config, Listener(), stages=("prepare", "match", "write"), executor=LocalExecutor(1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.ok
    assert peak < 200 << 20
    rejects = project.run_dir / "rejects.jsonl"
    rows = rejects.read_bytes().splitlines()
    assert len(rows) == 13
    assert max(map(len, rows)) < 20_000
    status, said, _ = call("validate", project.dataset, "--against", manifest, "--rejects", rejects,
                           "--audio-root", project.root)  # fmt: skip
    assert "lost_record" not in said
    assert "doubled_record" not in said
    assert "15 records of the manifests: 2 found as cuts" in " ".join(said.split()), said
    assert not status

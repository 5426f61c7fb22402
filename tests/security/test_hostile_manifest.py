"""A manifest from a stranger: it runs nothing, leaves the audio root by no way, and says nothing to the terminal.

All kinds of bad input, commands and paths among them, go through a whole run in ``tests/e2e/test_input_kinds.py``.
There is no report in HTML; text goes into JSON and to the terminal only.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import tracemalloc
import unicodedata
from unittest import mock

import msgspec
import pytest
from support.shar import Project, copy, lines, put, reindex, rewrite, run, voice

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.cli.console import plain
from sharmill.cli.main import main
from sharmill.config import to_yaml
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import FailedAttempt
from sharmill.errors import FatalError, RejectRecord
from sharmill.executors.local import LocalExecutor
from sharmill.executors.logs import logging_to, printable
from sharmill.manifest import Segment
from sharmill.match.stage import matched_manifest
from sharmill.pipeline import run_dataset
from sharmill.shar import open_shar
from sharmill.write.stage import WriteStage

# Clears the screen, names the window, rings, turns the line around, ends the line; C1 controls; HTML; rich's markup.
NASTY = "\x1b[2J\x1b]0;owned\x07\u202egnp\r\b\x9b31m\x7f\u2066<script>alert(1)</script>[red]x[/red]"


def controls(text: str) -> list[str]:
    return sorted({char for char in text if unicodedata.category(char) in ("Cc", "Cf") and char not in "\n\t"})


def test_the_text_is_nasty():
    assert len(controls(NASTY)) == 8


@pytest.fixture
def project(tmp_path):
    """Two utterances whose names, texts and further keys are nasty."""
    project = Project(tmp_path)
    for number in range(2):
        name = f"{number}{NASTY}".replace("/", "|")
        put(tmp_path / "plain.wav", voice(4.0, seed=number)).rename(_parent(project.root / f"{name}.wav"))
        project.add(f"{name}.wav", duration=4.0, text=NASTY, speaker="anna", **{NASTY: NASTY})
    return project


def _parent(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def command_line(capsys, *arguments) -> tuple[int, str]:
    """Exit status and all that the command says."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return ended.value.code or 0, said.out + said.err


def write_config(project, **changes):
    path = project.folder / "config.yaml"
    changes = {"executor": {"workers": 1}, "encode": {"codecs": []}, "match": {"min_similarity": -1.0}} | changes
    path.write_bytes(to_yaml(project.configure(**changes)))
    return path


def test_run_status_and_validate_say_nothing_to_the_terminal(project, capsys):
    config = write_config(project)
    status, said = command_line(capsys, "run", config)
    assert (status, controls(said)) == (0, [])
    assert [cut.supervisions[0].text for cut in open_shar(project.dataset)] == [NASTY] * 2
    status, said = command_line(capsys, "status", project.run_dir)
    assert (status, controls(said)) == (0, [])
    # A name of the manifest is what the checker names first.
    (project.dataset / "target_audio/recording.000000.tar").write_bytes(b"")
    status, said = command_line(capsys, "validate", project.dataset, "--workers", "1")
    assert (status, controls(said)) == (3, [])


def test_findings_that_name_a_cut_say_nothing_to_the_terminal(project, capsys):
    assert command_line(capsys, "run", write_config(project))[0] == 0
    cuts = project.dataset / "cuts/cuts.000000.jsonl.gz"
    rewrite(cuts, [cut | {"duration": 99.0} for cut in lines(cuts)])
    reindex(project.dataset)
    status, said = command_line(capsys, "validate", project.dataset, "--workers", "1")
    assert (status, controls(said)) == (3, [])
    assert "<script>" in said.replace("\n", "").replace(" ", "")


def test_an_id_makes_up_no_lines_of_a_report(project, capsys):
    assert command_line(capsys, "run", write_config(project))[0] == 0
    cuts = project.dataset / "cuts/cuts.000000.jsonl.gz"
    rewrite(cuts, [cut | {"id": "x\nvalidation: no findings"} for cut in lines(cuts)])
    status, said = command_line(capsys, "validate", project.dataset, "--workers", "1")
    assert status == 3
    assert not any(line.startswith("validation: no findings") for line in said.splitlines())


def test_json_says_nothing_to_the_terminal_and_means_the_same(project, capsys):
    assert command_line(capsys, "run", write_config(project))[0] == 0
    status, said = command_line(capsys, "inspect", project.dataset, "--shard", "0", "--json")
    assert (status, controls(said)) == (0, [])
    assert [cut["supervisions"][0]["text"] for cut in json.loads(said)["cuts"]] == [NASTY] * 2


@pytest.mark.parametrize("command", ["bins", "index"])
def test_bins_and_index_say_nothing_to_the_terminal(project, capsys, tmp_path, command):
    """Of a dataset whose folder, texts and further keys are nasty."""
    assert command_line(capsys, "run", write_config(project))[0] == 0
    dataset = copy(project.dataset, tmp_path / f"one\n  forged {NASTY}".replace("/", "|"))
    if command == "index":
        for name in ("dataset.json", "shards.jsonl"):
            (dataset / name).unlink()
    for arguments in ([dataset], [dataset / "absent"]):
        _, said = command_line(capsys, command, *arguments)
        assert controls(said) == []
        assert not any(line.strip().startswith("forged") for line in said.splitlines())


def test_a_line_break_in_a_message_makes_up_no_line(capsys):
    """Not even an indented one, as the further lines of an error are."""
    forged = "x\n  validation: no findings\nError: y"
    error = FatalError(f"cannot read {forged}", code="disk", details=[f"too_short 2, such as {forged}", "z"])
    with mock.patch("sharmill.cli.main.cli.main", side_effect=pickle.loads(pickle.dumps(error))):
        assert command_line(capsys)[1].splitlines() == [
            "Error: cannot read x\ufffd  validation: no findings\ufffdError: y",
            "  too_short 2, such as x\ufffd  validation: no findings\ufffdError: y",
            "  z",
        ]
    assert len(plain(forged).plain.splitlines()) == 1


def test_rejects_say_nothing_to_the_terminal(project, capsys):
    for path in project.root.iterdir():
        path.write_text("no audio")
    status, said = command_line(capsys, "run", write_config(project))
    assert (status, controls(said)) == (1, [])
    assert "unreadable_audio 2" in said


def test_units_that_fail_say_nothing_to_the_terminal(project, capsys):
    """What ``status`` shows of them comes from a file of the run directory."""
    config = write_config(project)
    assert command_line(capsys, "run", config, "prepare")[0] == 0
    failures = project.run_dir / "prepare/failures.jsonl"
    failures.write_bytes(msgspec.json.encode(FailedAttempt(0, f"OSError: {NASTY}", "")) + b"\n")
    status, said = command_line(capsys, "status", project.run_dir)
    assert (status, controls(said)) == (0, [])
    assert "<script>alert(1)</script>[red]x[/red]" in said


def test_logs_of_ranks_say_nothing_to_the_terminal(tmp_path):
    with logging_to(tmp_path / "rank.log"):
        logging.getLogger("sharmill.test").warning("bad name %s", NASTY)
    said = (tmp_path / "rank.log").read_text()
    assert controls(said) == []
    assert "<script>alert(1)</script>" in said


def test_what_is_printable_stays_as_it_is():
    assert printable("größe 日本 🎤\tx\n") == "größe 日本 🎤\tx\n"
    assert plain("[bold]x[/bold]").plain == "[bold]x[/bold]"


def test_rejects_are_json_whatever_the_text(project, capsys):
    for path in project.root.iterdir():
        path.write_text("no audio")
    assert command_line(capsys, "run", write_config(project, max_reject_fraction=1.0), "prepare")[0] == 0
    rejects = [json.loads(line) for line in (project.run_dir / "rejects.jsonl").read_bytes().splitlines()]
    assert [reject["record"]["text"] for reject in rejects] == [NASTY] * 2


def test_a_matched_manifest_cannot_leave_the_audio_root(project, tmp_path):
    """Nor one that somebody has edited between the stages: each path is looked at where its audio is read."""
    put(tmp_path / "outside.wav", voice(4.0))
    config = project.configure(match={"min_duration": 0.0})
    utterances = project.match_by_hand(config)
    paths = ["../outside.wav", str(tmp_path / "outside.wav")]
    for utterance, path in zip(utterances, paths, strict=True):
        utterance.audio_filepath = path
    matched_manifest(config).write_bytes(b"".join(u.to_json() + b"\n" for u in utterances))
    assert run(WriteStage(config)).ok
    assert [reject["reason"] for reject in project.rejects("write")] == ["outside_root"] * 2
    assert list(open_shar(project.dataset)) == []


def test_a_root_that_begins_like_another_is_another(tmp_path):
    put(tmp_path / "audio2/a.wav", voice(1.0))
    (tmp_path / "audio").mkdir()
    (tmp_path / "audio/a.wav").symlink_to(tmp_path / "audio2/a.wav")
    with pytest.raises(RejectRecord, match="outside_root"):
        SegmentReader(AudioRoots.of([tmp_path / "audio"])).read(Segment(0, "a.wav", 0.0, 1.0, True))


def test_the_speaker_tag_of_a_record_is_text(tmp_path, capsys):
    project = Project(tmp_path)
    for number in range(2):
        project.add(f"{number}.wav", voice(4.0, seed=number), speaker="$(touch${IFS}ran)\x1b[2J")
    status, said = command_line(capsys, "run", write_config(project))
    assert (status, controls(said)) == (0, [])
    assert not list(tmp_path.rglob("ran"))


@pytest.fixture
def sparse(tmp_path):
    """Lines of 17 MiB, of next to nothing on disk, and records of 10 KiB to 1 MiB that are rejected."""
    project = Project(tmp_path)
    for number in range(2):
        project.add(f"{number}.wav", voice(4.0, seed=number), speaker="anna")
    config = project.configure(match={"min_similarity": -1.0}, encode={"codecs": []}, max_reject_fraction=0.9)
    manifest = project.folder / "small.json"
    with manifest.open("r+b") as stream:
        stream.seek(0, os.SEEK_END)
        long = "x" * (1 << 20)
        for number, record in enumerate([
            {"audio_filepath": "absent.wav", "duration": 1.0, "more": long},
            {"audio_filepath": "y" * 5000, "duration": 1.0, "more": long},
            {"audio_filepath": "y" * 5000, "duration": 1.0, "more": "z" * 3000},
            {"audio_filepath": [long], "duration": 1.0},
            {"audio_filepath": "absent.wav", "duration": 1e400, "more": long},
            {"audio_filepath": "absent.wav", "duration": int("9" * 4000)},
            {"audio_filepath": "absent.wav", "duration": 2.0, "offset": "1" * 9000},
        ]):  # fmt: skip
            text = json.dumps(record | {"number": number}).replace("Infinity", "1e400")
            stream.write(text.encode() + b"\n")
        for _ in range(3):
            stream.seek(17 << 20, os.SEEK_CUR)
            stream.write(b"\n")
        stream.write(json.dumps({"text": long}).encode() + b"\n" + b"no json" * 9000 + b"\n")
        # The same record with a longer text is a cut.
        stream.write(json.dumps(project.records[0] | {"_skipme": "x" * 9000}).encode() + b"\n")
    return project, config


@pytest.mark.xdist_group("memory, threads, descriptors")
def test_rejects_keep_a_part_of_large_records_and_are_accounted_for(sparse, capsys):
    project, config = sparse
    manifest = project.folder / "small.json"
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
    status, said = command_line(capsys, "validate", project.dataset, "--against", manifest, "--rejects", rejects,
                                "--audio-root", project.root)  # fmt: skip
    assert "lost_record" not in said
    assert "doubled_record" not in said
    assert "15 records of the manifests: 2 found as cuts" in said, said
    assert status == 0

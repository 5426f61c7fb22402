"""Manifests from folders, tables and manifests, completed from headers, with messages about unusable input."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile as sf
import yaml
from support.project import make_record, raises, run_sharmill, write_lines, write_tone
from support.sources import PACKED, pack

from sharmill.collect.manifest import ManifestOptions, make_manifest
from sharmill.engine.executor import Listener
from sharmill.errors import ConfigError, FatalError
from sharmill.sources import folder as folder_source


def make(*sources, output, workers=1, listener=None, **options):
    """Create a manifest and return its records."""
    make_manifest(list(map(str, sources)), str(output), ManifestOptions(**options), workers=workers, listener=listener)
    return read(output)


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def rejects(output):
    path = output.with_name(f"{output.stem}.rejects.jsonl")
    return [(row["reason"], row["record"]) for row in read(path)] if path.exists() else []


def info(output):
    return yaml.safe_load(output.with_name(f"{output.stem}.info.yaml").read_text())


@pytest.fixture
def speech(tmp_path):
    """A folder with three recordings of two speakers, two of them with text."""
    root = tmp_path / "speech"
    write_tone(root / "anna/one.wav", 1.0)
    write_tone(root / "anna/two.flac", 1.23456)
    write_tone(root / "ben/three.wav", 0.5, rate=8000)
    (root / "anna/one.txt").write_text("Good day.\n")
    (root / "ben/three.lab").write_text("See you.")
    return root


def test_a_folder_with_texts_and_speakers(speech, tmp_path):
    records = make(speech, output=tmp_path / "m.json", keys={"speaker": "{path[0]}", "language": "en"})
    assert records == [
        {"audio_filepath": "anna/one.wav", "duration": 1.0, "text": "Good day.",
         "speaker": "| Language:en Dataset:speech Speaker:anna |"},
        {"audio_filepath": "anna/two.flac", "duration": 19753 / 16000,
         "speaker": "| Language:en Dataset:speech Speaker:anna |"},
        {"audio_filepath": "ben/three.wav", "duration": 0.5, "text": "See you.",
         "speaker": "| Language:en Dataset:speech Speaker:ben |"},
    ]  # fmt: skip
    assert rejects(tmp_path / "m.json") == []
    noted = info(tmp_path / "m.json")
    assert noted["audio_root"] == str(speech)
    assert noted["manifests"]["m.json"] == {
        "records": 3, "hours": round((1.5 + 19753 / 16000) / 3600, 6), "with_text": 2, "with_speaker": 3,
        "of_several_channels": 0,
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"speech", "m.json", "m.info.yaml"}


def test_a_table(speech, tmp_path):
    table = speech / "metadata.csv"
    table.write_text("anna/one|as printed|Good day.\nben/none|missing|x\nanna/one|too few\n")
    keys = {"delimiter": "|", "quotes": False, "header": ["id", "printed", "text"], "audio": "{id}.wav"}
    records = make(table, output=tmp_path / "m.json", keys=keys)
    assert records == [
        {"audio_filepath": "anna/one.wav", "duration": 1.0, "text": "Good day.", "id": "anna/one",
         "printed": "as printed"},
    ]  # fmt: skip
    assert [reason for reason, _ in rejects(tmp_path / "m.json")] == ["missing_audio", "malformed"]


@pytest.mark.parametrize("end", PACKED)
def test_a_compressed_table_with_decimal_commas(end, speech, tmp_path):
    path = tmp_path / f"table.csv{end}"
    path.write_bytes(pack(end, b"sep=;\r\naudio_filepath;duration;\r\nben/three.wav;0,5;\r\n"))
    done = run_sharmill(
        "manifest", path, "-o", tmp_path / "m.json", "--delimiter", ";", "--decimal", ",", "--audio-root", speech
    )
    assert (done.returncode, read(tmp_path / "m.json")) == (0, [{"audio_filepath": "ben/three.wav", "duration": 0.5}])


def test_a_table_with_tabs_has_no_quoting(speech, tmp_path):
    (speech / "v.tsv").write_text(
        'audio_filepath\ttext\nanna/one.wav\t"I go.\nanna/two.flac\tHe said."\nno.wav\t"""x"""\n'
    )
    records = make(speech / "v.tsv", output=tmp_path / "m.json")
    assert [record["text"] for record in records] == ['"I go.', 'He said."']
    assert [reason for reason, _ in rejects(tmp_path / "m.json")] == ["missing_audio"]


def test_a_manifest_is_completed(speech, tmp_path):
    manifest = write_lines(tmp_path / "in.json", [
        make_record(audio_filepath="anna/one.wav", duration=..., cer=0.1),
        make_record(audio_filepath=str(speech / "ben/three.wav"), duration=0.45, speaker=7),
        make_record(audio_filepath="anna/one.wav", offset=0.25, duration=...),
        make_record(audio_filepath="anna/one.wav", offset=0.25, duration=0.5),
        make_record(audio_filepath="anna/one.wav", duration=2.0),
        make_record(audio_filepath="anna/one.wav", offset=0.9, duration=0.5),
        make_record(audio_filepath="anna/one.wav", offset=1.0, duration=...),
        make_record(audio_filepath="anna/one.wav", offset=0.5, duration=0.0),
        make_record(audio_filepath="../out.wav"), b"no json",
    ])  # fmt: skip
    records = make(manifest, output=tmp_path / "m.json", audio_root=str(speech))
    assert [(record.get("offset"), record["duration"]) for record in records] == [
        (None, 1.0), (None, 0.5), (0.25, 0.75), (0.25, 0.5),
    ]  # fmt: skip
    assert (records[0]["cer"], records[1]["audio_filepath"]) == (0.1, "ben/three.wav")
    assert records[1]["speaker"] == "| Language:und Dataset:speech Speaker:7 |"
    assert [reason for reason, _ in rejects(tmp_path / "m.json")] == [
        "duration_mismatch", "duration_mismatch", "duration_mismatch", "empty_audio", "outside_root", "malformed",
    ]  # fmt: skip


def test_what_is_no_audio_is_named_and_the_rest_goes_on(speech, tmp_path):
    (speech / "a.wav").write_bytes(b"")
    (speech / "b.wav").write_bytes(b"no audio at all")
    os.mkfifo(speech / "c.wav")
    sf.write(speech / "d.wav", [], 16000)
    (speech / "e.wav").write_bytes((speech / "anna/one.wav").read_bytes())
    (speech / "e.txt").write_bytes("grün".encode("latin-1"))
    (speech / os.fsdecode(b"\xff.wav")).write_bytes(b"")
    (speech / "g.wav").symlink_to("/etc/passwd")
    (speech / "h.wav").write_bytes((speech / "anna/two.flac").read_bytes()[:20])
    (speech / "i.wav").write_bytes((speech / "anna/one.wav").read_bytes()[:20000])
    assert len(make(speech, output=tmp_path / "m.json")) == 3
    assert rejects(tmp_path / "m.json") == [
        ("empty_audio", {"audio_filepath": "a.wav"}),
        ("unreadable_audio", {"audio_filepath": "b.wav"}),
        ("unreadable_audio", {"audio_filepath": "c.wav"}),
        ("empty_audio", {"audio_filepath": "d.wav"}),
        ("malformed", "e.wav"),
        ("outside_root", {"audio_filepath": "g.wav"}),
        ("unreadable_audio", {"audio_filepath": "h.wav"}),
        ("duration_mismatch", {"audio_filepath": "i.wav"}),
        ("malformed", "\N{REPLACEMENT CHARACTER}.wav"),
    ]
    assert make(speech, output=tmp_path / "l.json", keys={"encoding": "latin-1"})[0]["text"] == "grün"


def test_a_folder_that_may_not_be_listed_is_a_reject(speech, tmp_path, monkeypatch):
    listed = folder_source.list_files

    def refuse_one(folder, suffixes):
        if folder.name == "anna":
            raise PermissionError(13, "Permission denied")
        return listed(folder, suffixes)

    monkeypatch.setattr(folder_source, "list_files", refuse_one)
    assert [r["audio_filepath"] for r in make(speech, output=tmp_path / "m.json")] == ["ben/three.wav"]
    assert rejects(tmp_path / "m.json") == [("unreadable_audio", "anna/")]
    with raises(ConfigError, "missing_input", "anna"):
        make(speech / "anna", output=tmp_path / "n.json")


def test_audio_of_several_channels(tmp_path):
    write_tone(tmp_path / "in/a.wav", channels=2)
    assert "channel" not in make(tmp_path / "in", output=tmp_path / "m.json")[0]
    assert info(tmp_path / "m.json")["manifests"]["m.json"]["of_several_channels"] == 1
    assert make(tmp_path / "in", output=tmp_path / "n.json", keys={"channel": 1})[0]["channel"] == 1
    write_tone(tmp_path / "in/b.wav")
    with raises(FatalError, "too_many_rejects", "unsupported_channels"):
        (tmp_path / "in/b.wav").unlink()
        make(tmp_path / "in", output=tmp_path / "o.json", keys={"channel": 2})


@pytest.fixture
def long_manifest(speech, tmp_path):
    """A manifest with 2,600 records of one file, every 13th of which extends beyond its end."""
    return write_lines(
        tmp_path / "long.json",
        [make_record(audio_filepath="speech/anna/one.wav", offset=i % 13 / 12, duration=..., text=f"text {i}", n=i)
         for i in range(2600)],
    )  # fmt: skip


def test_the_bytes_do_not_depend_on_workers(long_manifest, tmp_path):
    made = []
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        options = {"workers": workers, "vocabulary": str(folder / "words.txt"), "word_vocabulary": True}
        assert len(make(long_manifest, output=folder / "m.json", **options)) == 2400
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert made[0].keys() == {"m.json", "m.info.yaml", "m.rejects.jsonl", "words.txt"}
    assert made[0] == made[1]


class Interrupted(Listener):
    def unit_done(self, unit, commit):
        raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interruption_leaves_nothing(workers, long_manifest, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make(long_manifest, output=tmp_path / "out/m.json", workers=workers, listener=Interrupted())
    assert list((tmp_path / "out").iterdir()) == []


def test_a_killed_run_leaves_no_file_and_the_next_begins_anew(long_manifest, tmp_path):
    script = (
        "import os, sys; from sharmill.collect.manifest import *; "
        "Listener.unit_done = lambda *_: os.kill(os.getpid(), 9); make_manifest(sys.argv[1:2], "
        "sys.argv[2], ManifestOptions(), workers=2)"
    )
    output = tmp_path / "out/m.json"
    # The output ends only when the workers, which share it, have ended.
    killed = subprocess.run([sys.executable, "-c", script, long_manifest, output], capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name.startswith(".") for path in output.parent.iterdir()] == [True]
    assert len(make(long_manifest, output=output)) == 2400
    assert {path.name for path in output.parent.iterdir()} == {"m.json", "m.info.yaml", "m.rejects.jsonl"}


@pytest.mark.parametrize("name", ["m.json", "m.rejects.jsonl", "m.recipe.log", "m.info.yaml", "words.txt"])
def test_what_is_there_is_replaced_only_by_force(name, speech, tmp_path):
    (tmp_path / name).write_text("mine")
    given = {"output": tmp_path / "m.json", "vocabulary": str(tmp_path / "words.txt")}
    with raises(ConfigError, "foreign_output", name, "--force"):
        make(speech, **given)
    assert (tmp_path / name).read_text() == "mine"
    assert len(make(speech, **given, force=True)) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"speech", "m.json", "m.info.yaml", "words.txt"}


def test_where_nothing_can_be_used_there_is_no_manifest(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.wav").write_bytes(b"")
    with raises(FatalError, "too_many_rejects", "empty_audio", "m.rejects.jsonl"):
        make(tmp_path / "in", output=tmp_path / "m.json")
    assert not (tmp_path / "m.json").exists()
    assert rejects(tmp_path / "m.json") == [("empty_audio", {"audio_filepath": "a.wav"})]


@pytest.mark.parametrize(
    ("sources", "options", "code", "names"),
    [
        (["none"], {}, "missing_input", ["none"]),
        (["empty"], {}, "missing_input", [".wav", "--audio-suffix"]),
        (["speech", "speech/anna"], {}, "bad_usage", ["anna"]),
        (["speech"], {"audio_root": "empty"}, "bad_usage", ["empty"]),
        (["speech"], {"audio_root": "none"}, "missing_input", ["none"]),
        (["speech"], {"keys": {"delimiter": "|"}}, "bad_usage", ["delimiter"]),
        (["speech"], {"keys": {"speaker": "{path}"}}, "bad_usage", ["{path[0]}"]),
        (["speech"], {"keys": {"encoding": "x"}}, "bad_usage", ["'x'"]),
        (["speech"], {"keys": {"channel": "left"}}, "bad_usage", ["left"]),
        (["speech"], {"splits": ("train",)}, "bad_usage", ["--from"]),
        (["speech"], {"corpus": "librispeach"}, "unknown_name", ["librispeech"]),
        (["speech", "empty"], {"corpus": "an4"}, "bad_usage", ["--from"]),
        (["no_table.csv"], {}, "unknown_key", ["audio_filepath"]),
        (["array.json"], {}, "bad_manifest", ["array.json"]),
        (["in.json"], {"keys": {"speaker": "{spk}"}}, "unknown_key", ["spk"]),
    ],
)
def test_wrong_arguments_end_before_any_work(sources, options, code, names, speech, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("no_table.csv").write_text("a,b\n1,2\n")
    Path("array.json").write_text("[]")
    write_lines(Path("in.json"), [make_record()])
    with raises(ConfigError, code, *names):
        make(*sources, output=Path("out/m.json"), **options)
    assert not Path("out/m.json").exists()


def test_the_output_is_no_folder_and_no_source(speech, tmp_path):
    with raises(ConfigError, "bad_usage", str(speech)):
        make(speech, output=speech)
    manifest = write_lines(tmp_path / "in.json", [make_record()])
    with raises(ConfigError, "bad_usage", "in.json"):
        make(manifest, output=manifest, force=True)

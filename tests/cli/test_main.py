"""What the command line makes of its arguments, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys

import click
import pytest
import yaml
from support.errors import raises
from support.manifests import make_record, write_manifest, write_tone
from support.paths import REPOSITORY
from support.pipelines import run_sharmill

from sharmill.cli.arguments import split_arguments
from sharmill.cli.exit_status import worst
from sharmill.cli.main import COMMANDS, cli, main
from sharmill.errors import REMEDIES, ConfigError

HEAVY = ("torch", "nemo", "ray", "omegaconf", "lhotse", "numpy", "transformers", "rich")


@pytest.mark.parametrize(
    ("arguments", "paths", "overrides", "names"),
    [
        (["a.yaml"], ["a.yaml"], [], []),
        (["a.yaml", "b.yml", "match", "x.y=1"], ["a.yaml", "b.yml"], ["x.y=1"], ["match"]),
        (["stage1", "write.seed=3", "a.yaml"], ["a.yaml"], ["write.seed=3"], ["stage1"]),
        (["a.yaml", "sources[0].manifest=m.yaml"], ["a.yaml"], ["sources[0].manifest=m.yaml"], []),
        (["data/lang=en/a.yaml"], ["data/lang=en/a.yaml"], [], []),
        (["/lang=en/a.yaml", "run_dir=x=y"], ["/lang=en/a.yaml"], ["run_dir=x=y"], []),
        (["a.yaml", "name="], ["a.yaml"], ["name="], []),
    ],
)
def test_arguments_are_told_apart(arguments, paths, overrides, names):
    assert split_arguments(arguments) == (paths, overrides, names)


@pytest.mark.parametrize("arguments", [["match"], ["x=1"], ["a.json", "match"]])
def test_a_configuration_is_needed(arguments):
    with raises(ConfigError, "bad_usage", *arguments):
        split_arguments(arguments)


@pytest.fixture(autouse=True)
def _own_signals():
    """``main`` sets the handler of SIGTERM for its process, which here is that of the tests."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def ending(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


@pytest.fixture
def config(audio_root, tmp_path):
    """Returns a function: content of the manifest, or a function that makes it -> path of a configuration."""

    def write(content=None, **changes):
        path = tmp_path / "m.json"
        if content is None:
            write_manifest(path, [make_record()])
        elif content is not ...:
            path.write_bytes(content)
        values = {
            "name": "small",
            "run_dir": str(tmp_path / "run"),
            "dataset_dir": str(tmp_path / "dataset"),
            "sources": [{"manifest": str(path), "audio_root": str(audio_root)}],
            "executor": {"workers": 1},
            "encode": {"codecs": []},
        }
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(values | changes))
        return tmp_path / "c.yaml"

    return write


LINE = b'{"audio_filepath": "a.wav", "duration": 2.0}\n'
NO_MANIFESTS = {
    "missing": ...,
    "empty": b"",
    "binary": bytes(range(256)),
    "utf-16": LINE.decode().encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + LINE,
    "truncated": LINE + LINE[:20],
    "array": b"[" + LINE.strip() + b"]\n",
}


def error_line(capsys, status, *arguments) -> str:
    """The single line on stderr of a command that ends with ``status``."""
    assert ending(*map(str, arguments)) == status
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("content", NO_MANIFESTS.values(), ids=NO_MANIFESTS)
def test_what_is_no_manifest_ends_with_one_line(content, config, capsys, tmp_path):
    line = error_line(capsys, 2, "run", config(content))
    assert line.startswith("Error: ")
    assert str(tmp_path / "m.json") in line
    assert not (tmp_path / "dataset").exists()


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("match.min_similarty=1", ["'match.min_similarty'", "'min_similarity'"]),
        ("write.order=foo", ["write.order", "'foo'", "manifest, speaker, shuffle"]),
        ("sources.0.audio_root=/no/such/root", ["/no/such/root"]),
        ("prepare.filters.cer=low", ["prepare.filters.cer", "'low'"]),
        ("speaker_key=librispech", ["librispech", "librispeech"]),
        ("match.encoder=resemblizer", ["resemblizer", "resemblyzer"]),
    ],
)
def test_wrong_configuration_ends_with_one_line_and_writes_nothing(override, names, config, capsys, tmp_path):
    line = error_line(capsys, 2, "run", config(), override)
    assert [name for name in names if name not in line] == []
    assert not (tmp_path / "dataset").exists()
    assert not (tmp_path / "run").exists()


def test_wrong_configuration_of_the_second_dataset_ends_before_the_first_runs(config, capsys, tmp_path):
    good, bad = config(), tmp_path / "bad.yaml"
    bad.write_text("name: bad")
    assert "run_dir" in error_line(capsys, 2, "run", good, bad)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_first_argument_of_the_demo_may_be_an_override(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "match.min_similarty" in error_line(capsys, 2, "demo", "match.min_similarty=1")
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["run", "none.yaml"], ["none.yaml"]),
        (["run", "none.yaml", "wirte"], ["'wirte'", "'write'"]),
        (["run", "prepare"], ["prepare"]),
        (["validate", ".", "--codec-model", "mimi=models/mimi"], ["--codec-model", "--recheck-codes"]),
        *(
            (["validate", ".", "--workers", value], ["--workers", repr(value), "'auto'"])
            for value in ("0", "-1", "many", "1.5")
        ),
        (["run", "c.yaml", "--retsart"], ["'--retsart'", "'--restart'", "sharmill run --help"]),
        (["run"], ["'CONFIG... [STAGE...] [KEY=VALUE...]'", "sharmill run --help"]),
        (["rnu", "c.yaml"], ["'rnu'", "'run'", "sharmill --help"]),
        (["tune-btach"], ["'tune-btach'", "'tune-batch'", "sharmill --help"]),
        (["xyz"], ["'xyz'", "sharmill --help"]),
    ],
)
def test_wrong_use_of_commands_ends_with_one_line(arguments, names, capsys):
    line = error_line(capsys, 2, *arguments)
    assert [name for name in names if name not in line] == []


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (["certify", "x"], "validate --recheck-codes"),
        (["completion"], "_SHARMILL_COMPLETE"),
        (["plan", "c.yaml", "--simulate", "ranks=4"], "executor.workers="),
        (["plan", "{config}", "encode.compile=default"], "leave the key out"),
        (["plan", "{config}", "metrics.tensorboard=true"], "metrics.wandb_project"),
        (["plan", "{config}", "executor.mixed_versions=true"], "--restart"),
        (["manifest", "x", "-o", "y", "--restart"], "--force"),
    ],
)
def test_what_was_removed_says_what_to_use(arguments, instead, capsys):
    arguments = [argument.format(config=REPOSITORY / "configs/demo.yaml") for argument in arguments]
    assert ending(*arguments) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "was removed" in err
    assert instead in err


def test_without_a_command_the_help_is_shown(capsys):
    assert ending() == 2
    assert "Watch:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("name: [x\n", "line 2, column 1"),
        ("name: a\nrun_dir b\nmatch: {}\n", "line 3, column 1"),
        ("name: x\n\t- y\n", "line 2"),
    ],
)
def test_a_typing_error_in_a_configuration_is_named_with_its_place(text, place, capsys, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    line = error_line(capsys, 2, "run", tmp_path / "c.yaml")
    assert str(tmp_path / "c.yaml") in line
    assert place in line


def test_plan_takes_no_stages(capsys, config):
    assert "match" in error_line(capsys, 2, "plan", config(), "match")


@pytest.mark.parametrize("arguments", [["demo", "{}/file"], ["validate", "{}", "--json", "{}/file/findings.json"]])
def test_folder_that_cannot_be_made(arguments, capsys, tmp_path):
    (tmp_path / "file").touch()
    line = error_line(capsys, 2, *(argument.format(tmp_path) for argument in arguments))
    assert str(tmp_path / "file") in line
    assert os.strerror(errno.EEXIST) in line


def test_prepare_alone_ends_well(config, tmp_path, capsys):
    assert ending("run", str(config()), "prepare") == 0
    assert (tmp_path / "run/stats.json").exists()
    assert not (tmp_path / "dataset").exists()


def test_too_many_rejects_end_with_the_first_sentence_and_the_remedy_of_each_reason(config, capsys, tmp_path):
    path = config()
    missing = [make_record(audio_filepath="none.wav")] * 3
    write_manifest(tmp_path / "m.json", [*missing, make_record(text=""), make_record()])
    assert ending("run", str(path), "prepare") == 1
    first, *reasons = capsys.readouterr().err.splitlines()
    assert "4 of 5 records" in first
    assert "raise max_reject_fraction" in first
    assert [line.split()[:2] for line in reasons] == [["missing_audio", "3,"], ["empty_text", "1,"]]
    assert "none.wav" in reasons[0]
    assert REMEDIES["missing_audio"] in reasons[0]
    assert "a.wav: text" in reasons[1]
    assert REMEDIES["empty_text"] in reasons[1]
    assert reasons[1].count("prepare.require_text") == 1
    rejects = [json.loads(line) for line in (tmp_path / "run/rejects.jsonl").read_bytes().splitlines()]
    assert [reject["reason"] for reject in rejects] == ["missing_audio"] * 3 + ["empty_text"]


def test_no_higher_limit_is_advised_where_all_is_rejected(config, capsys, tmp_path):
    path = config()
    write_manifest(tmp_path / "m.json", [make_record(text="")] * 3)
    assert ending("run", str(path), "prepare") == 1
    assert "raise max_reject_fraction" not in capsys.readouterr().err


def test_errors_show_no_traceback_in_a_process_of_its_own(config):
    outcome = run_sharmill("run", config(b""))
    assert outcome.returncode == 2
    assert outcome.stderr.startswith("Error: ")
    assert "m.json" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([0, 0], 0),
        ([0, 3], 3),
        ([3, 0], 3),
        ([1, 3], 1),
        ([3, 1], 1),
        ([2, 0], 2),
        ([0, 2], 2),
        ([2, 3], 2),
        ([1, 2], 1),
    ],
)
def test_the_worst_of_several_datasets_counts(statuses, expected):
    assert worst(statuses) == expected


def test_a_dataset_that_stops_does_not_stop_the_next(config, capsys, tmp_path):
    write_manifest(tmp_path / "m.json", [make_record(text="")])
    first = config(..., name="first").rename(tmp_path / "first.yaml")
    second = config(..., name="second", run_dir=str(tmp_path / "run2"))
    assert ending("run", str(first), str(second), "prepare") == 1
    errors = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert errors == ["first", "second"]


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys; from sharmill.cli.main import main\n"
        f"try: main({arguments!r})\n"
        f"except SystemExit: print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert outcome.stdout.endswith("heavy: []\n")


def test_help_lists_the_commands_in_groups(capsys):
    assert ending("--help") == 0
    lines = capsys.readouterr().out.splitlines()
    found: dict[str, list[str]] = {}
    for line in lines[lines.index("Make:") :]:
        if line.endswith(":"):
            names = found.setdefault(line[:-1], [])
        elif line.strip():
            names.append(line.split()[0])
    assert found == {heading: list(names) for heading, names in COMMANDS.items()}


def test_help_fits_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert ending("--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.endswith("...")] == ["Usage: sharmill [OPTIONS] COMMAND [ARGS]..."]


def test_every_command_can_be_asked_for_help(capsys):
    context = click.Context(cli)
    for name in cli.list_commands(context):
        assert cli.get_command(context, name).name == name
        assert ending(name, "--help") == 0
        assert capsys.readouterr().out.startswith(f"Usage: sharmill {name} ")


def test_a_manifest_of_a_folder(capsys, tmp_path):
    write_tone(tmp_path / "speech/anna/one.wav", 1.0)
    (tmp_path / "speech/anna/bad.wav").write_bytes(b"")
    output = tmp_path / "m.json"
    arguments = ("manifest", str(tmp_path / "speech"), "-o", str(output), "--speaker", "{path[0]}", "--workers", "1")
    assert ending(*arguments) == 0
    printed = capsys.readouterr().out
    expected = (f"{output}: 1 records, 0.000 h", "rejects: 1: empty_audio 1", f"audio root: {tmp_path / 'speech'}")
    assert [text for text in expected if text not in printed] == []
    assert json.loads(output.read_bytes())["speaker"] == "| Language:und Dataset:speech Speaker:anna |"
    assert "--force" in error_line(capsys, 2, *arguments)
    assert "KEY=VALUE" in error_line(capsys, 2, *arguments[:2], "-o", tmp_path / "n.json", "--column", "text")


def test_a_manifest_without_any_record_ends_with_status_1(capsys, tmp_path):
    (tmp_path / "speech").mkdir()
    (tmp_path / "speech/bad.wav").write_bytes(b"")
    assert ending("manifest", str(tmp_path / "speech"), "-o", str(tmp_path / "m.json")) == 1
    assert "empty_audio" in capsys.readouterr().err

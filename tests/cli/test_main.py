"""What the command line makes of its arguments, and how it ends."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import yaml
from support.manifests import make_record, write_manifest
from support.pipelines import run_sharmill

from sharmill import pipeline
from sharmill.cli import run
from sharmill.cli.arguments import split_arguments
from sharmill.cli.main import COMMANDS, cli, main
from sharmill.cli.run import run_configs
from sharmill.errors import ConfigError, FatalError

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
    with pytest.raises(ConfigError, match="no configuration among"):
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
    ("arguments", "message"),
    [
        (["none.yaml"], "Error: there is no configuration file none.yaml"),
        (["none.yaml", "wirte"], "Error: there is no stage 'wirte'; did you mean 'write'?"),
        (["prepare"], "Error: no configuration among prepare: name a .yaml file"),
    ],
)
def test_wrong_use_ends_with_one_line(arguments, message, capsys):
    assert error_line(capsys, 2, "run", *arguments) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("match.min_similarty=1", "unknown key 'match.min_similarty'; did you mean 'min_similarity'?"),
        ("write.order=foo", "write.order: 'foo' is not one of manifest, speaker, shuffle"),
        ("sources.0.audio_root=/no/such/root", "audio root /no/such/root does not exist"),
        ("prepare.filters.cer=low", "prepare.filters.cer: 'low' is not a comparison with a number"),
        ("speaker_key=librispech", "did you mean librispeech?"),
        ("match.encoder=resemblizer", "resemblyzer"),
    ],
)
def test_wrong_configuration_ends_with_one_line_and_writes_nothing(override, message, config, capsys, tmp_path):
    assert message in error_line(capsys, 2, "run", config(), override)
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


def test_models_of_codecs_are_for_rechecking(capsys, tmp_path):
    message = error_line(capsys, 2, "validate", str(tmp_path), "--codec-model", "mimi=models/mimi")
    assert message == "Error: --codec-model goes with --recheck-codes"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["run", "c.yaml", "--retsart"],
            "Error: No such option '--retsart'. Did you mean '--restart'?; see sharmill run --help",
        ),
        (["run"], "Error: Missing argument 'CONFIG... [STAGE...] [KEY=VALUE...]'; see sharmill run --help"),
        (["rnu", "c.yaml"], "Error: there is no command 'rnu', did you mean 'run'?; see sharmill --help"),
        (["tune-btach"], "Error: there is no command 'tune-btach', did you mean 'tune-batch'?; see sharmill --help"),
        (["xyz"], "Error: there is no command 'xyz'; see sharmill --help"),
        (
            ["plan", "c.yaml", "--ranks", "0"],
            "Error: Invalid value for '--ranks': 0 is not in the range x>=1; see sharmill plan --help",
        ),
    ],
)
def test_wrong_use_of_commands_ends_with_one_line(arguments, line, capsys):
    assert error_line(capsys, 2, *arguments) == line


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
    assert line.startswith(f"Error: {tmp_path / 'c.yaml'} is not valid YAML: {place}")


def test_plan_takes_no_stages(capsys, config):
    assert error_line(capsys, 2, "plan", config(), "match") == "Error: 'plan' takes no stage names: match"


@pytest.mark.parametrize("workers", ["0", "-1", "many", "1.5"])
def test_number_of_workers(workers, capsys, tmp_path):
    line = error_line(capsys, 2, "validate", tmp_path, "--workers", workers)
    assert line == f"Error: --workers is {workers!r}; use 'auto' or a number from 1"


@pytest.mark.parametrize("arguments", [["demo", "{}/file"], ["validate", "{}", "--json", "{}/file/findings.json"]])
def test_folder_that_cannot_be_made(arguments, capsys, tmp_path):
    (tmp_path / "file").touch()
    line = error_line(capsys, 2, *(argument.format(tmp_path) for argument in arguments))
    assert line.startswith(f"Error: cannot write to {tmp_path / 'file'}: File exists")


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
    assert "4 of 5 records are rejected, more than max_reject_fraction=0.5 allows" in first
    assert "or raise max_reject_fraction" in first
    assert reasons[0].startswith("  missing_audio 3, the first: ")
    assert "none.wav: No such file" in reasons[0]
    assert "audio_root in sources" in reasons[0]
    assert reasons[1].startswith("  empty_text 1, the first: a.wav: text is empty")
    assert "prepare.require_text=false" in reasons[1]
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
    assert outcome.stderr.startswith("Error: the manifest ")
    assert outcome.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([0, 0], 0),
        ([0, 3], 3),
        ([3, 0], 3),
        ([1, 3], 1),
        ([3, 1], 1),
        ([ConfigError("x"), 0], 2),
        ([0, ConfigError("x")], 2),
        ([ConfigError("x"), 3], 2),
        ([3, ConfigError("x")], 2),
        ([FatalError("x"), ConfigError("x")], 1),
        ([ConfigError("x"), FatalError("x"), 0], 1),
    ],
)
def test_the_worst_of_several_datasets_counts(outcomes, expected, monkeypatch):
    left = iter(outcomes)

    def run_one(config, stages, **options):
        outcome = next(left)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(run, "_run_one", run_one)
    monkeypatch.setattr(pipeline, "check_config", lambda config, stages: None)
    configs = [SimpleNamespace(name=str(number)) for number in range(len(outcomes))]
    assert run_configs(configs, ["prepare"], restart=False) == expected


def test_a_dataset_that_stops_does_not_stop_the_next(monkeypatch, capsys):
    ran = []

    def run_one(config, stages, **options):
        ran.append(config.name)
        raise FatalError("the disk is full")

    monkeypatch.setattr(run, "_run_one", run_one)
    monkeypatch.setattr(pipeline, "check_config", lambda config, stages: None)
    run_configs([SimpleNamespace(name="a"), SimpleNamespace(name="b")], ["prepare"], restart=False)
    assert ran == ["a", "b"]
    assert capsys.readouterr().err == "Error: a: the disk is full\nError: b: the disk is full\n"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys; from sharmill.cli.main import main\n"
        f"try: main({arguments!r})\n"
        f"except SystemExit: print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert outcome.stdout.endswith("heavy: []\n")


def test_importing_the_package_imports_nothing_heavy():
    code = f"import sys, sharmill; print([name for name in {HEAVY!r} if name in sys.modules])"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert outcome.stdout == "[]\n"


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


def test_help_takes_less_than_half_a_second():
    script = Path(sys.executable).with_name("sharmill")
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([script, "--help"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # Seconds of a core, the fewest of five: other processes may hold the cores at any moment.
    assert min(seconds) < 0.5

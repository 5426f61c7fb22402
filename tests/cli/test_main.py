"""The command line: its arguments, help and exit statuses."""

import errno
import json
import os
import resource
import subprocess
import sys
from functools import partial

import click
import pytest
from support.project import (
    Project,
    command,
    make_bare_dataset,
    make_record,
    run_sharmill,
    within,
    write_config,
    write_lines,
)
from support.toy_stage import wait_until

from sharmill.cli.main import COMMANDS, cli
from sharmill.config import to_yaml
from sharmill.errors import REMEDIES

HEAVY = ("torch", "nemo", "ray", "omegaconf", "lhotse", "numpy", "transformers", "rich")


@pytest.fixture
def config(audio_root, tmp_path):
    """Returns a function: content of the manifest, or a function that makes it -> path of a configuration."""

    def write(content=None, **changes):
        path = tmp_path / "m.json"
        if content is None:
            write_lines(path, [make_record()])
        elif content is not ...:
            path.write_bytes(content)
        values = {"prepare": {}, "match": {}, "write": {}, "encode": {"codecs": []}}
        return write_config(tmp_path, path, audio_root, **values | changes)

    return write


@pytest.fixture
def error_line(call):
    """Returns a function: arguments of a command that is wrong -> its single line on stderr."""

    def read(*arguments) -> str:
        status, _, err = call(*arguments)
        assert (status, err.count("\n")) == (2, 1)
        return err

    return read


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["run", "{good}", "match.min_similarty=1"], ["'match.min_similarty'", "'min_similarity'"]),
        (["run", "{good}", "write.order=foo"], ["write.order", "'foo'", "manifest, speaker, shuffle"]),
        (["run", "{good}", "sources.0.audio_root=/no/such/root"], ["/no/such/root"]),
        (["run", "{good}", "sources.0.audio_root=/etc/passwd"], ["/etc/passwd is not a folder"]),
        (["run", "{good}", "match.contexts_from_dataset=true"], ["needs append_to"]),
        (
            ["run", "{good}", "sources=[{{type: lhotse_shar, shar: /no/shar}}]"],
            ["/no/shar is not a folder", "set shar in"],
        ),
        (["run", "{good}", "sources=[]"], ["prepare needs sources", "name a manifest"]),
        (["run", "{good}", "prepare", "sources=[]"], ["prepare needs sources"]),
        (["run", "{good}", "prepare.filters.cer=low"], ["prepare.filters.cer", "'low'"]),
        (["run", "{good}", "speaker_key=librispech"], ["librispech", "librispeech"]),
        (["run", "{good}", "match.encoder=resemblizer"], ["resemblizer", "resemblyzer"]),
        (["run", "{good}", "sources.0.manifest=m\udcff.json"], ["sources.0.manifest=m", "is not UTF-8"]),
        (["run", "none.yaml"], ["none.yaml"]),
        (["run", "none.yaml", "wirte"], ["'wirte'", "'write'"]),
        (["run", "prepare"], ["no configuration in prepare"]),
        (["run", "{good}", "{folder}/bad.yaml"], ["run_dir"]),
        (["run", "{folder}/typo.yaml"], ["typo.yaml", "line 2, column 1"]),
        (["run", "{folder}/empty.yaml"], ["empty.json"]),
        (["run", "{good}", "match", "match=null"], ["match is null", "prepare, write, encode, validate"]),
        (["plan", "{good}", "match"], ["match"]),
        (["demo", "{good}"], ["config.yaml", os.strerror(errno.EEXIST)]),
        (["validate", ".", "--json", "{good}/findings.json"], ["config.yaml", os.strerror(errno.EEXIST)]),
        (["manifest", "{folder}", "-o", "{folder}/n.json", "--column", "text"], ["KEY=COLUMN"]),
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
        (["run", "{good}", "dataset_dir=s3://bucket/data"], ["dataset_dir is a URL", "sharmill publish"]),
        (["run", "{good}", "run_dir=gs://bucket/run"], ["run_dir is a URL"]),
        *(
            ([*command, "s3://bucket/out"], ["s3://bucket/out is a URL"])
            for command in (
                ["split", "a", "--by-speaker"],
                ["merge", "a", "b"],
                ["export", "a", "--to", "nemo_codes"],
                ["demo"],
                ["report", "a", "-o"],
                ["sidecars", "a", "--into"],
                ["validate", ".", "--json"],
            )
        ),
    ],
)
def test_wrong_use_of_commands_ends_with_one_line(arguments, names, config, error_line, tmp_path):
    good = config()
    (tmp_path / "bad.yaml").write_text("name: bad")
    (tmp_path / "typo.yaml").write_text("name: [x\n")
    (tmp_path / "empty.json").touch()
    (tmp_path / "empty.yaml").write_text(good.read_text().replace("m.json", "empty.json"))
    line = error_line(*(argument.format(good=good, folder=tmp_path) for argument in arguments))
    assert [name for name in names if name not in line] == []
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "dataset").exists()


def test_too_many_rejects_show_a_sentence_and_remedy_per_reason(config, call, tmp_path):
    path = config()
    missing = [make_record(audio_filepath="none.wav")] * 3
    write_lines(tmp_path / "m.json", [*missing, make_record(text=""), make_record()])
    status, _, err = call("run", path, "prepare")
    first, *reasons = err.splitlines()
    assert status == 1
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


def test_a_dataset_that_stops_does_not_stop_the_next(config, call, tmp_path):
    write_lines(tmp_path / "m.json", [make_record(text="")])
    first = config(..., name="first").rename(tmp_path / "first.yaml")
    second = config(..., name="second", run_dir=str(tmp_path / "run2"))
    status, _, err = call("run", first, second, "prepare")
    errors = [line.split(": ")[1] for line in err.splitlines() if line.startswith("Error: ")]
    assert (status, errors) == (1, ["first", "second"])


# The list of commands is printed without importing them; a command's own help may import light packages.
LIGHT = ("numpy", "omegaconf", "rich")


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], HEAVY),
        (["--version"], HEAVY),
        (["run", "--help"], [name for name in HEAVY if name not in LIGHT]),
        (["doctor", "--help"], [name for name in HEAVY if name not in LIGHT]),
    ],
)
def test_help_imports_nothing_heavy(arguments, heavy):
    code = (
        "import sys; from sharmill.cli.main import main\n"
        f"try: main({arguments!r})\n"
        f"except SystemExit: print('heavy:', [name for name in {heavy!r} if name in sys.modules])"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert outcome.stdout.endswith("heavy: []\n")


def test_help_lists_the_commands_in_groups_of_80_columns(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = call("--help")
    lines = out.splitlines()
    assert (status, max(map(len, lines)) <= 80) == (0, True)
    assert [line for line in lines if line.endswith("...")] == ["Usage: sharmill [OPTIONS] COMMAND [ARGS]..."]
    found: dict[str, list[str]] = {}
    for line in lines[lines.index("Build datasets:") :]:
        if line.endswith(":"):
            names = found.setdefault(line[:-1], [])
        elif line.strip():
            names.append(line.split()[0])
    assert found == {heading: list(names) for heading, names in COMMANDS.items()}


def options_of(name):
    """Return the options of a command, each as often as it has it."""
    return [option for parameter in cli.get_command(None, name).params for option in parameter.opts]


# Their output is the text that they were called for.
ONLY_LINES = ("bins", "tune-batch", "verify-resume")


def test_every_command_has_help_quiet_and_json(call):
    context = click.Context(cli)
    listed = {name: line for commands in COMMANDS.values() for name, (_, line) in commands.items()}
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert (command.name, command.get_short_help_str(80)) == (name, listed[name])
        assert options_of(name).count("--quiet") == (name not in ONLY_LINES)
        assert ("--json" in options_of(name)) == (name != "sidecars")
        status, out, _ = call(name, "--help")
        assert (status, out.startswith(f"Usage: sharmill {name} ")) == (0, True)


def test_a_run_without_kept_records_accepts_new_settings(config, call):
    path = config(json.dumps(make_record(text="")).encode() + b"\n")
    status, _, err = call("run", path, "prepare")
    assert (status, "prepare.require_text" in err) == (1, True)
    assert call("run", path, "prepare", "prepare.require_text=false")[::2] == (0, "")
    # Kept records are not discarded.
    status, _, err = call("run", path, "prepare")
    assert (status, "was started with other" in err) == (2, True)


@pytest.mark.parametrize(
    ("gibibytes", "arguments"), [(2, ["bins", "dataset"]), (3, ["run", "config.yaml", "prepare", "write", "encode"])]
)
def test_a_memory_limit_too_low_to_load_torch_is_named(tmp_path, gibibytes, arguments):
    """It is not for a missing package, whatever its name."""
    project = Project(tmp_path).add_voices([0.4])
    (tmp_path / "config.yaml").write_bytes(
        to_yaml(
            project.configure(
                match=None, encode={"codecs": [{"name": "a", "model": "builtin"}]}, executor={"workers": 1}
            )
        )
    )
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (gibibytes << 30, gibibytes << 30))
    done = run_sharmill(*arguments, status=1, cwd=tmp_path, preexec_fn=limit)
    assert "ulimit -v" in done.stderr
    assert "Traceback" not in done.stderr


def test_torch_loads_without_path_in_the_environment(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PATH"}
    dataset = make_bare_dataset(tmp_path / "dataset", [4])
    assert "Traceback" not in run_sharmill("bins", dataset, status=None, env=environment).stderr


# Loads as a large model does, and leaves the process as slowly.
_SLOW = """
import atexit, pathlib, time
atexit.register(time.sleep, 120)
pathlib.Path("loads").touch()
time.sleep(120)
"""


@pytest.mark.parametrize("is_closed", [False, True], ids=["", "stderr closed"])
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["decode", "{dataset}", "--cut=cut-rec-3-0.00-0.40", "-o", "a.wav", "--codec-model=toy=python:slow:Codec"],
         "loading the codec toy"),
        pytest.param(
            ["verify-resume", "train.yaml", "--tokenizer=slow:make"], "loading NeMo", marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_model_commands_report_at_once_and_end_after_sigterm(tmp_path, arguments, word, is_closed):
    dataset = make_bare_dataset(tmp_path / "dataset", [4], codes=True)
    entry = {"type": "sharmill", "dataset": str(dataset)}
    settings = {"input_cfg": [entry], "batch_size": 2, "shuffle": True, "shard_seed": "randomized", "seed": 1}
    (tmp_path / "train.yaml").write_text(json.dumps(settings))
    (tmp_path / "slow.py").write_text(_SLOW)
    arguments = [argument.format(dataset=dataset) for argument in arguments]
    with subprocess.Popen(
        command(*arguments), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == f"{word}\n"
            wait_until((tmp_path / "loads").exists)
            if is_closed:
                process.stderr.close()
            process.terminate()
            assert process.wait(within(2.0)) == 1
            assert is_closed or "Interrupted." in process.stderr.read()
        finally:
            process.kill()

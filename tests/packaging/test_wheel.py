"""The built wheel, outside the checkout: its files, the demo, and one-line errors for missing extras."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from support.project import REPOSITORY, Project, lines, write_config, write_lines

EXTRAS = {
    "resemblyzer": ("resemblyzer", "librosa", "webrtcvad", "_webrtcvad"),
    "nemo": ("nemo", "nemo_toolkit", "transformers", "pyarrow"),  # NeMo itself needs the last two
    "speechlm2": ("peft",),
    "transformers": ("transformers",),
    "parquet": ("pyarrow",),
    "slurm": ("submitit",),
    "ray": ("ray",),
    "scores": ("distillmos", "onnxruntime", "speechmos", "xls_r_sqa"),
    "vad": ("silero_vad",),
    "formats": ("av",),
    "demo": ("nemo", "nemo_toolkit", "transformers", "pyarrow", "librosa", "espeakng_loader", "resemblyzer"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from the files of a clone with the setuptools of this environment."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    shutil.copytree(REPOSITORY / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(source)], check=True, capture_output=True)
    (built,) = folder.glob("sharmill-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Return a function: extras -> bin folder of an environment with the wheel and the packages of these extras.

    The environment links to all packages of the present one, except the project and the packages of other extras.
    """

    def make(*extras: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, symlinks=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        wanted = {name for extra in extras for name in EXTRAS[extra]}
        absent = {name for names in EXTRAS.values() for name in names} - wanted | {"sharmill", "__editable__"}
        for package in Path(sysconfig.get_path("purelib")).iterdir():
            name = package.name.removeprefix("__editable___").split("-")[0].split(".")[0].split("_finder")[0]
            if (
                name.lower() not in absent
                and not package.name.startswith("__editable__")
                and not package.name.endswith(".pth")
            ):
                (site / package.name).symlink_to(package)
        command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-deps"]
        subprocess.run([*command, "--quiet", "--no-index", str(wheel)], check=True, capture_output=True)
        return folder / "bin"

    return make


@pytest.fixture(scope="module")
def bare(environment) -> Path:
    """Return the bin folder of an environment without extras."""
    return environment()


@pytest.fixture
def config(tmp_path) -> Path:
    """Return a configuration for two recordings of a speaker."""
    project = Project(tmp_path).add_voices([4.0, 4.0], "{}.wav")
    manifest = write_lines(tmp_path / "m.json", project.records)
    match = {"min_similarity": -1, "encoder": "resemblyzer"}
    return write_config(tmp_path, manifest, project.root, match=match, encode={"codecs": []})


def call(bin_folder: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of an environment without access to the checkout."""
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(bin_folder / arguments[0]), *arguments[1:]], cwd=cwd, env=variables, capture_output=True, text=True
    )


def test_the_wheel_contains_all_files_of_the_package(wheel):
    package = REPOSITORY / "src" / "sharmill"
    wanted = {f"sharmill/{path.relative_to(package).as_posix()}" for path in package.rglob("*")
              if path.is_file() and "__pycache__" not in path.parts}  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any("licenses/" in name and name.endswith("/plotly-basic.txt") for name in names)
    assert "License-Expression: Apache-2.0 AND MIT" in metadata


@pytest.mark.slow
@pytest.mark.parametrize(("extras", "options"), [((), ["match=null"]), (("resemblyzer",), [])])
def test_a_dataset_is_built_and_read_with_few_packages(environment, config, tmp_path, extras, options):
    bare = environment(*extras)
    done = call(bare, "sharmill", "run", str(config), *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = call(bare, "sharmill", "validate", "dataset", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    read = "import sharmill, sharmill.shar as shar; print(sharmill.__file__, len(list(shar.open_shar('dataset'))))"
    done = call(bare, "python", "-c", read, cwd=tmp_path)
    assert done.stdout.split() == [str(next((bare.parent / "lib").glob("*/site-packages/sharmill/__init__.py"))), "2"]


# Arguments of a command, and the extra that its error names.
NEEDS = {
    "the demo": (["demo", "here"], "demo"),
    "a codec of NeMo": (["run", "config.yaml", "match=null", "encode.codecs=[{name: b, model: 'nemo:x/y'}]"], "nemo"),
    "the encoder": (["run", "config.yaml"], "resemblyzer"),
    "an encoder of NeMo": (["run", "config.yaml", "match.encoder=nemo:titanet_large"], "nemo"),
    "a codec of transformers": (
        ["run", "config.yaml", "match=null", "encode.codecs=[{name: b, model: 'transformers:x/y'}]"],
        "transformers",
    ),
    "parquet files": (["run", "config.yaml", "match=null", "sources=[{type: parquet, parquet: x.parquet}]"], "parquet"),
    "a scorer": (["run", "config.yaml", "match=null", "scores={scorers: [text, dnsmos]}"], "scores"),
    "the speech detector": (["run", "config.yaml", "match=null", "scores={scorers: [speech]}"], "vad"),
    "SLURM": (["submit", "prepare", "config.yaml", "--dry-run"], "slurm"),
    "Ray": (["run", "config.yaml", "executor.kind=ray"], "ray"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "extra"), NEEDS.values(), ids=NEEDS.keys())
def test_a_missing_extra_is_named_in_one_line(arguments, extra, bare, config, tmp_path):
    done = call(bare, "sharmill", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert f"pip install 'sharmill[{extra}]'" in line


@pytest.mark.slow
def test_the_training_loader_names_nemo_if_missing(bare, config, tmp_path):
    text = "from sharmill.training import get_dataloader; get_dataloader({}, 0, 1)"
    done = call(bare, "python", "-c", text, cwd=tmp_path)
    assert "pip install 'sharmill[nemo]'" in done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def demo(environment, tmp_path_factory) -> tuple[Path, Path, str]:
    """Return the bin folder of an environment with the extra of the demo, the folder of a demo, and its output."""
    bin_folder, folder = environment("demo"), tmp_path_factory.mktemp("demo")
    done = call(bin_folder, "sharmill", "demo", str(folder / "demo"), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return bin_folder, folder / "demo", done.stdout


@pytest.mark.slow
class TestDemo:
    """The demo as `make demo` runs it, and its status."""

    def test_the_last_step_writes_a_page_with_decoded_audio(self, demo):
        _, folder, output = demo
        page = (folder / "run/report.html").read_text()
        assert f"report: {folder}/run/report.html, " in output.replace("\n", "")
        assert page.count("Play target of ") > page.count("Play target decoded from builtin of ") >= 10
        assert "Map of the voices" in page
        assert re.findall('<tr><th scope="row">([a-z/]+)</th>\n<td class="num">2[45]', page)[:5] == [
            "prepare", "match", "write", "encode/builtin", "validate",
        ]  # fmt: skip
        assert len(page) < 4_000_000

    def test_the_dataset_contains_all_good_records(self, demo):
        _, folder, output = demo
        described = json.loads((folder / "dataset/dataset.json").read_text())
        assert described["num_cuts"] == 240
        assert [(codec["name"], codec["trained"]) for codec in described["codecs"]] == [("builtin", True)]
        # One of each kind; both a file without audio and a truncated one are unreadable.
        assert sorted(reject["reason"] for reject in lines(folder / "run/rejects.jsonl")) == [
            "bad_speaker", "duplicate_id", "duration_mismatch", "empty_text", "malformed", "missing_audio",
            "non_finite_audio", "outside_root", "single_utterance_speaker", "skipped", "too_short", "unreadable_audio",
            "unreadable_audio", "unsupported_channels",
        ]  # fmt: skip
        assert "validation: no findings" in output

    def test_the_printed_program_reads_the_dataset(self, demo):
        bin_folder, folder, output = demo
        printed = output.split("in Python:\n")[1].split("\n- use your own speech")[0].splitlines()
        program = "\n".join(line.removeprefix("    ") for line in printed)
        done = call(bin_folder, "python", "-c", program, cwd=folder)
        assert done.stdout.startswith("cut-"), done.stderr

    def test_status_shows_every_stage_as_done(self, demo):
        bin_folder, folder, _ = demo
        output = call(bin_folder, "sharmill", "status", str(folder / "run"), cwd=folder).stdout
        for stage in ("prepare", "match", "write", "encode/builtin", "validate"):
            (row,) = [line for line in output.splitlines() if line.startswith(f"{stage}  ")]
            assert " done " in row
        assert len(output.splitlines()) <= 24

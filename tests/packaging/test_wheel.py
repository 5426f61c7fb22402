"""The built wheel, outside the checkout: it brings its data, and what lacks an extra says which one in one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from support.paths import REPOSITORY
from support.shar import Project, voice

EXTRAS = {
    "nemo": ("nemo", "nemo_toolkit", "transformers", "pyarrow"),  # NeMo needs the last two itself
    "speechlm2": ("peft",),
    "transformers": ("transformers",),
    "parquet": ("pyarrow",),
    "slurm": ("submitit",),
    "ray": ("ray",),
    "formats": ("av",),
    "demo": ("nemo", "nemo_toolkit", "transformers", "pyarrow", "espeakng_loader"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from what a clone would have, with the setuptools of this environment."""
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
    """Returns a function: extras -> bin folder of an environment with the wheel and what these extras bring.

    It sees the packages of this environment one by one, but for the project and those of the other extras.
    """

    def make(*extras: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, symlinks=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        wanted = {name for extra in extras for name in EXTRAS[extra]}
        absent = {name for names in EXTRAS.values() for name in names} - wanted | {"sharmill", "__editable__"}
        for package in Path(sysconfig.get_path("purelib")).iterdir():
            name = package.name.removeprefix("__editable___").split("-")[0].split(".")[0].split("_finder")[0]
            if name not in absent and not package.name.startswith("__editable__") and not package.name.endswith(".pth"):
                (site / package.name).symlink_to(package)
        command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-deps"]
        subprocess.run([*command, "--quiet", "--no-index", str(wheel)], check=True, capture_output=True)
        return folder / "bin"

    return make


@pytest.fixture(scope="module")
def bare(environment) -> Path:
    """The environment without extras."""
    return environment()


@pytest.fixture
def config(tmp_path) -> Path:
    """A configuration for two recordings of a speaker."""
    project = Project(tmp_path)
    for number in range(2):
        project.add(f"{number}.wav", voice(4.0, seed=number), speaker="anna")
    project.configure()
    path = tmp_path / "c.yaml"
    path.write_text(
        f"name: c\nrun_dir: {tmp_path}/run\ndataset_dir: {tmp_path}/dataset\n"
        f"sources: [{{manifest: '{tmp_path}/small.json', audio_root: '{tmp_path}/audio'}}]\n"
        "match: {min_similarity: -1, encoder: resemblyzer}\nencode: {codecs: []}\n"
    )
    return path


def call(bin_folder: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of an environment, which must not see the checkout."""
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(bin_folder / arguments[0]), *arguments[1:]], cwd=cwd, env=variables, capture_output=True, text=True
    )


def test_the_wheel_has_all_files_of_the_package(wheel):
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
def test_without_extras_a_dataset_without_codes_is_made(bare, config, tmp_path):
    done = call(bare, "sharmill", "run", str(config), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    read = "import sharmill, sharmill.shar as shar; print(sharmill.__file__, len(list(shar.open_shar('dataset'))))"
    done = call(bare, "python", "-c", read, cwd=tmp_path)
    assert done.stdout.split() == [str(next((bare.parent / "lib").glob("*/site-packages/sharmill/__init__.py"))), "2"]


# What is asked for, and the extra that the one line names.
NEEDS = {
    "the demo": (["demo", "here"], "demo"),
    "a codec of NeMo": (["run", "c.yaml", "encode.codecs=[{name: b, model: 'nemo:x/y'}]"], "nemo"),
    "an encoder of NeMo": (["run", "c.yaml", "match.encoder=nemo:titanet_large"], "nemo"),
    "a codec of transformers": (
        ["run", "c.yaml", "encode.codecs=[{name: b, model: 'transformers:x/y'}]"],
        "transformers",
    ),
    "parquet files": (["run", "c.yaml", "sources=[{type: parquet, parquet: x.parquet}]"], "parquet"),
    "SLURM": (["submit", "prepare", "c.yaml", "--dry-run"], "slurm"),
    "Ray": (["run", "c.yaml", "executor.kind=ray"], "ray"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "extra"), NEEDS.values(), ids=NEEDS.keys())
def test_what_lacks_an_extra_says_which_in_one_line(arguments, extra, bare, config, tmp_path):
    done = call(bare, "sharmill", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert f"pip install 'sharmill[{extra}]'" in line


@pytest.mark.slow
def test_the_built_in_codec_needs_no_extra(bare, config, tmp_path):
    done = call(bare, "sharmill", "run", "c.yaml", "encode.codecs=[{name: b, model: builtin}]", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [*(tmp_path / "dataset/codes_b/target_codes").glob("*.tar")]


@pytest.mark.slow
def test_the_training_loader_says_that_it_lacks_nemo(bare, config, tmp_path):
    text = "from sharmill.training import get_dataloader; get_dataloader({}, 0, 1)"
    done = call(bare, "python", "-c", text, cwd=tmp_path)
    assert "pip install 'sharmill[nemo]'" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_help_and_the_package_need_no_extra(bare, tmp_path):
    for arguments in (["--help"], ["--version"], ["run", "--help"], ["demo", "--help"], ["submit", "--help"]):
        done = call(bare, "sharmill", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = call(
        bare,
        "python",
        "-c",
        "import sharmill.shar, sharmill.training, sharmill.models, sharmill.pipeline",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_runs_from_the_wheel_with_its_extra(environment, tmp_path):
    done = call(environment("demo"), "sharmill", "demo", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "here" / "dataset" / "dataset.json").exists()

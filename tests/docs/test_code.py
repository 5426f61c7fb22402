"""README, pages, docstrings and the list of abilities: code runs, and commands, links and names exist.

- ``python`` blocks of a page run in order, in a folder with small datasets under the names of the pages.
- ``sh`` blocks run line by line in the same folder.
- ``yaml`` and ``json`` blocks are parsed.
- Commands in other blocks are not run, but command, options and files must exist.
"""

import ast
import doctest
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from support.project import REPOSITORY, TESTS, Project, voice, write_lines

from sharmill.cli.main import cli

README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Return the blocks of a language without list indentation, each with the number of lines before it."""
    text = page.read_text()
    found = list(_BLOCK.finditer(text))
    assert 2 * len(found) == len(re.findall(r"^ *```", text, re.MULTILINE)), f"{page.name} has an unclosed block"
    return [
        (text[: block.start(3)].count("\n"), re.sub(f"^{block[1]}", "", block[3], flags=re.MULTILINE))
        for block in found
        if block[2] == language
    ]


def pages_with(language: str) -> list[Any]:
    return [pytest.param(page, id=page.name) for page in PAGES if blocks(page, language)]


@pytest.fixture
def folder(built, many, tmp_path, monkeypatch):
    """Enter a folder with the repository's programs, and data under the names that the pages use."""
    for name in ("configs", "examples", "jobs", "pipelines"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    for name, project in (("data/pairs", built), ("data/speech", many), ("demo/dataset", built)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(project.dataset)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def speech(folder):
    """Create ``my/manifest.json`` and ``my/audio``: six utterances of two speakers, named as in LibriSpeech."""
    project = Project(folder / "my")
    for number in range(6):
        speaker, seconds = 80 + number % 2, 3.2 + 0.1 * number
        samples = voice(seconds, pitch=100 + 40 * (number % 2), seed=number)
        name = f"{speaker}/{speaker}-1-{number:02}.flac"
        project.add(name, samples, speaker=speaker, text=f"number {number}")
    write_lines(folder / "my/manifest.json", project.records)


@pytest.fixture
def commands(folder):
    """Return a shell environment in which ``sharmill`` and ``python``, also as .venv/bin/..., use this interpreter."""
    bin_folder = folder / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    python = shlex.quote(sys.executable)
    for name, line in (
        ("python", f'exec {python} "$@"'),
        ("sharmill", f'exec {python} -m sharmill "$@"'),
        # Replaces an installed SLURM without a controller, which `sharmill doctor` would report.
        ("scontrol", "echo 'the controller of the tests is UP'"),
    ):
        (bin_folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (bin_folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}


def run_python(page: Path) -> dict[str, Any]:
    """Run the ``python`` blocks of a page, and return the names that they define."""
    namespace: dict[str, Any] = {"__name__": "page"}
    for line, code in blocks(page, "python"):
        # The offset makes tracebacks point into the page.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
    return namespace


@pytest.mark.usefixtures("folder")
def test_python_of_the_readme_runs():
    names = run_python(README)
    assert names["codes"].shape[0] == names["context"].shape[0] == 3


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("page", [page for page in pages_with("python") if page.id != "README.md"])
def test_python_of_the_pages_runs(page):
    names = run_python(page)
    if page.name == "training.md":
        for batch in (names["batch"], next(iter(names["loader"]))):
            assert batch["target_codes"].shape[1] == 3
            assert batch["ids"]


@pytest.mark.slow
@pytest.mark.usefixtures("speech")
@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_of_the_pages_run(page, commands):
    for line, text in blocks(page, "sh"):
        done = subprocess.run(["sh", "-ec", text], env=commands, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{page.name}, line {line}:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", [*pages_with("yaml"), *pages_with("json")])
def test_yaml_and_json_of_the_pages_are_valid(page):
    for _, text in blocks(page, "yaml"):
        assert yaml.safe_load(text)
    for _, text in blocks(page, "json"):
        assert [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("page", pages_with(""))
def test_commands_that_are_not_run_exist(page):
    for _, text in blocks(page, ""):
        for line in text.replace("\\\n", " ").splitlines():
            check_command(shlex.split(line, comments=True))


def check_command(words: list[str]) -> None:
    """Assert that a command, its options and the files that it names exist."""
    if not words:
        return
    if words[0] == "make":
        makefile = (REPOSITORY / "Makefile").read_text()
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), words
    elif words[0] == "sharmill":
        # click keeps the help option of a command, so its names must be those of the program.
        context = click.Context(cli, **cli.context_settings)
        command = cli.get_command(context, words[1])
        assert command is not None, words
        # This parses the arguments without running the command.
        command.make_context(words[1], words[2:], parent=context)
    for word in words[1:]:
        if re.fullmatch(r"(jobs|pipelines|examples|tests|docs)/[\w./]+\.\w+", word):
            assert (REPOSITORY / word).exists(), word


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings(page):
    for target, heading in _LINK.findall(page.read_text()):
        if target.startswith("http"):
            continue
        linked = (page.parent / target) if target else page
        assert linked.exists(), target
        if heading:
            assert heading in headings(linked), f"{target}#{heading}"


@pytest.mark.parametrize("page", [README, REPOSITORY / "docs/training.md"], ids=lambda page: page.name)
def test_the_small_trainings_are_named_before_those_of_clusters(page):
    places = [page.read_text().find(name) for name in ("examples/train.py", "examples/train_lightning.py", "jobs/")]
    assert -1 < places[0] < places[1] < places[2]


def test_readme_picture_stays_without_a_demo(tmp_path):
    before = (picture := REPOSITORY / "docs/pictures/report.png").read_bytes()
    command = [sys.executable, REPOSITORY / "docs/picture.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "stays as it is" in done.stdout
    assert picture.read_bytes() == before
    assert len(before) < 300_000


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as in GitHub and MkDocs."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


STOPS = sorted(set(re.findall(r"`([\w/]+\.py):([\w.]+)`", (REPOSITORY / "docs/architecture.md").read_text())))


def test_the_architecture_has_walks():
    assert len(STOPS) > 30


@pytest.mark.parametrize(("file", "name"), STOPS, ids=":".join)
def test_the_names_in_the_walks_are_defined(file, name):
    body = ast.parse((REPOSITORY / "src/sharmill" / file).read_text()).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        assert found, f"{file} does not define {name}"
        body = getattr(found[0], "body", [])


ABILITIES = [line for line in (TESTS / "ABILITIES.md").read_text().splitlines() if line.startswith("- ")]


@pytest.mark.parametrize("line", ABILITIES)
def test_the_tests_of_an_ability_exist(line):
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", line)
    assert named
    for path, name in named:
        assert f"def {name or 'test_'}" in (REPOSITORY / path).read_text(), path


SOURCE = REPOSITORY / "src"
# Examples that need a large dataset or a cluster are marked +SKIP; the pages run them on small data.
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if re.search(r"^ *>>> (?!.*SKIP)", path.read_text(), re.MULTILINE)
)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_run(name, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0

"""The README and the pages of docs: their code runs, their commands exist, their links lead somewhere.

- ``python`` blocks run in their order, a page at a time, in a folder with small datasets under the names of the pages.
- ``sh`` blocks run line by line in the same folder.
- ``yaml`` and ``json`` blocks are read.
- Lines of other blocks that begin with a command are not run, but command, options and files must exist.
"""

from __future__ import annotations

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
from support.manifests import speaker_tag
from support.paths import REPOSITORY
from support.shar import put, voice

README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The blocks of a language, each with the number of lines before it, without the indentation of a list item."""
    text = page.read_text()
    found = list(_BLOCK.finditer(text))
    assert 2 * len(found) == len(re.findall(r"^ *```", text, re.MULTILINE)), f"{page.name} has a block without an end"
    return [
        (text[: block.start(3)].count("\n"), re.sub(f"^{block[1]}", "", block[3], flags=re.MULTILINE))
        for block in found
        if block[2] == language
    ]


def pages_with(language: str) -> list[Any]:
    return [pytest.param(page, id=page.name) for page in PAGES if blocks(page, language)]


@pytest.fixture
def folder(built, many, tmp_path, monkeypatch):
    """The current folder: the repository's programs, and data under the names that the pages use."""
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
    """``my/manifest.json`` and ``my/audio``: six utterances of two speakers, in files named as LibriSpeech's are."""
    records = []
    for number in range(6):
        speaker, seconds = 80 + number % 2, 3.2 + 0.1 * number
        name = f"{speaker}/{speaker}-1-{number:02}.flac"
        put(folder / "my/audio" / name, voice(seconds, pitch=100 + 40 * (number % 2), seed=number))
        # The lengths in the file are whole samples.
        duration = round(seconds * 16000) / 16000
        text = f"number {number}"
        records.append({"audio_filepath": name, "duration": duration, "text": text, "speaker": speaker_tag(speaker)})
    (folder / "my/manifest.json").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def commands(folder):
    """The environment of a shell: ``sharmill`` and ``python`` are those of this interpreter, also as .venv/bin/..."""
    bin_folder = folder / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    for name, arguments in (("python", ""), ("sharmill", "-m sharmill")):
        script = bin_folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        script.chmod(0o755)
    # Stands in for SLURM's own, where that is installed and has no controller: `sharmill doctor` would find it so.
    controller = bin_folder / "scontrol"
    controller.write_text("#!/bin/sh\necho 'the controller of the tests is UP'\n")
    controller.chmod(0o755)
    return os.environ | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}


def run_python(page: Path) -> dict[str, Any]:
    """Run the ``python`` blocks of a page, and return the names that they leave."""
    namespace: dict[str, Any] = {"__name__": "page"}
    for line, code in blocks(page, "python"):
        # With its place in the file, so that a failure points into the page.
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
def test_yaml_and_json_of_the_pages_are_read(page):
    for _, text in blocks(page, "yaml"):
        assert yaml.safe_load(text)
    for _, text in blocks(page, "json"):
        assert [json.loads(line) for line in text.splitlines()]


def test_toml_of_the_pages_is_read():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    tables = [tomllib.loads(text) for page in PAGES for _, text in blocks(page, "toml")]
    assert tables[0]["project"]["entry-points"]["sharmill.stages"]


@pytest.mark.parametrize("page", pages_with(""))
def test_commands_that_are_not_run_exist(page):
    for _, text in blocks(page, ""):
        for line in text.replace("\\\n", " ").splitlines():
            check_command(shlex.split(line, comments=True))


def check_command(words: list[str]) -> None:
    """Assert that a command, its options and the files that it names exist."""
    from sharmill.cli.main import cli

    if not words:
        return
    if words[0] == "make":
        makefile = (REPOSITORY / "Makefile").read_text()
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), words
    elif words[0] == "sharmill":
        context = click.Context(cli)
        command = cli.get_command(context, words[1])
        assert command is not None, words
        # Parsed, not run.
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


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_the_readme_is_short():
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 120
    assert "make demo" in README.read_text()
    assert "make test" in README.read_text()

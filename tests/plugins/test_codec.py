"""A codec family of an installed package: nothing of sharmill names it, its package or its option."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from support.errors import raises
from support.shar import Project, voice

from sharmill.engine.listener import Listener
from sharmill.errors import ConfigError
from sharmill.pipeline import run_dataset
from sharmill.shar import open_shar

ENTRY = "[sharmill.codecs]\nstepped = stepped_codec:SteppedCodec\n"


def install(site: Path, name: str, version: str, entry_points: str = "") -> None:
    """Install a distribution in a folder, as pip does, or another version of it."""
    folder = site / f"{name.replace('-', '_')}-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(entry_points)


def configure(project: Project, **options: object) -> partial:
    codec = {"name": "stepped", "model": "stepped", "steps": 8} | options
    return partial(run_dataset, project.configure(match=None, encode={"codecs": [codec]}), Listener())


def test_codes_depend_on_the_option_and_on_the_versions_of_the_packages(tmp_path, monkeypatch):
    for folder in (tmp_path, Path(__file__).parent / "codec"):
        monkeypatch.syspath_prepend(str(folder))
    install(tmp_path, "stepped-codec", "1.0", ENTRY)
    project = Project(tmp_path)
    project.add("a.wav", voice(1.0))
    run = configure(project)
    with raises(ConfigError, "missing_package", "stepped-engine"):
        run()
    install(tmp_path, "stepped-engine", "2.0")
    assert run().ok
    (cut,) = open_shar(project.dataset)
    assert cut.load_target_codes().max() in range(1, 8)
    with raises(ConfigError, "changed_plan", "codec.options.steps is 9, was 8"):
        configure(project, steps=9)()
    install(tmp_path, "stepped-engine", "2.1")
    with raises(ConfigError, "changed_plan", 'versions.stepped-engine is "2.1", was "2.0"'):
        run()
    install(tmp_path, "stepped-engine", "2.0")
    install(tmp_path, "stepped-codec", "1.1", ENTRY)
    with raises(ConfigError, "changed_plan", 'codec.version is "stepped-codec 1.1"'):
        run()
    with raises(ConfigError, "unknown_key", "encode.codecs[0].stesp", "'steps'"):
        configure(project, stesp=8)
    sys.modules.pop("stepped_codec")

"""A codec family of an installed package: nothing of sharmill names it, its package or its option."""

from functools import partial

from support.project import Project, add_distribution, install, raises, voice

from sharmill.engine.executor import Listener
from sharmill.errors import ConfigError
from sharmill.pipeline import run_dataset
from sharmill.shar import open_shar


def configure(project: Project, **options: object) -> partial:
    codec = {"name": "stepped", "model": "stepped", "steps": 8} | options
    return partial(run_dataset, project.configure(match=None, encode={"codecs": [codec]}), Listener())


def test_codes_depend_on_the_option_and_on_the_versions_of_the_packages(tmp_path, monkeypatch):
    install(monkeypatch, tmp_path, "codec")
    project = Project(tmp_path)
    project.add("a.wav", voice(1.0))
    run = configure(project)
    with raises(ConfigError, "missing_package", "stepped-engine"):
        run()
    add_distribution(tmp_path, "stepped-engine", "2.0")
    assert run().ok
    (cut,) = open_shar(project.dataset)
    assert cut.load_target_codes().max() in range(1, 8)
    with raises(ConfigError, "changed_plan", "codec.options.steps is 9, was 8"):
        configure(project, steps=9)()
    add_distribution(tmp_path, "stepped-engine", "2.1")
    with raises(ConfigError, "changed_plan", 'versions.stepped-engine is "2.1", was "2.0"'):
        run()
    add_distribution(tmp_path, "stepped-engine", "2.0")
    install(monkeypatch, tmp_path, "codec", version="1.1")
    with raises(ConfigError, "changed_plan", 'codec.version is "stepped-codec 1.1"'):
        run()
    with raises(ConfigError, "unknown_key", "encode.codecs[0].stesp", "'steps'"):
        configure(project, stesp=8)

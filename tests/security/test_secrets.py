"""Values that a configuration takes from the environment are used but not stored: files contain the variable names."""

import pytest
from support.project import REPOSITORY, raises

from sharmill.config import load_config, to_yaml
from sharmill.demo.corpus import make_corpus
from sharmill.encode.config import EncodeConfig
from sharmill.engine.executor import Listener
from sharmill.errors import ConfigError
from sharmill.executors.local import LocalExecutor
from sharmill.files.trust import make_private_folder
from sharmill.match.config import MatchConfig
from sharmill.pipeline import run_dataset
from sharmill.write.config import WriteConfig

SECRET = "hf-Tr0ub4dor"


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    """A configuration with values of any length and type from the environment."""
    for name, value in {"SECRET": SECRET, "RANKS": "1", "SEED": "739", "LEAST": "0.125", "TO": "set"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    corpus = make_corpus(tmp_path / "corpus", num_voices=2, utterances_per_voice=3)
    path = tmp_path / "config.yaml"
    path.write_text(f"""\
name: demo
run_dir: {tmp_path}/run
dataset_dir: {tmp_path}/${{oc.env:TO}}
sources: [{{manifest: {corpus.manifest}, audio_root: {corpus.audio_root}}}]
prepare: {{filters: {{cer: "<= 1"}}}}
match: {{min_duration: 0.1, min_similarity: '${{oc.env:LEAST}}'}}
write: {{seed: "${{oc.env:SEED}}"}}
encode: {{codecs: [{{name: level, model: "python:own_codec:LevelCodec:${{oc.env:SECRET}}"}}]}}
validate: {{codec_models: {{other: "nemo:/x/${{oc.env:SECRET}}.nemo"}}}}
executor: {{workers: "${{oc.env:RANKS}}"}}
max_reject_fraction: 0.9
""")
    return path


def test_no_file_of_a_run_has_a_value_of_the_environment(config_file, tmp_path):
    config = load_config(config_file)
    assert config.section(EncodeConfig).codecs[0].model.endswith(f":{SECRET}")
    assert (config.section(WriteConfig).seed, config.section(MatchConfig).min_similarity) == (739, 0.125)
    assert config.executor.workers == 1
    assert run_dataset(config, Listener(), executor=LocalExecutor(1)).ok
    files = [path for name in ("run", "set") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    stored = (tmp_path / "run/resolved_config.yaml").read_text()
    assert "workers: ${oc.env:RANKS}" in stored
    assert "nemo:/x/${oc.env:SECRET}.nemo" in stored
    assert '"model": "python:own_codec:LevelCodec:${oc.env:SECRET}"' in (tmp_path / "set/dataset.json").read_text()
    write, match = ((tmp_path / f"run/{stage}/plan/identity.json").read_bytes() for stage in ("write", "match"))
    assert b"739" not in write
    assert b"${oc.env:SEED}#" in write
    assert b"0.125" not in match


def test_the_stored_configuration_is_read_back_as_it_was(config_file, tmp_path):
    config = load_config(config_file, ["match.min_duration=2"])
    (tmp_path / "stored.yaml").write_bytes(to_yaml(config))
    again = load_config(tmp_path / "stored.yaml")
    assert again == config
    assert to_yaml(again) == to_yaml(config)


def test_a_changed_value_is_noticed(config_file, tmp_path, monkeypatch):
    stages = ("prepare", "match", "write", "encode")
    run_dataset(load_config(config_file), Listener(), stages=stages, executor=LocalExecutor(1))
    monkeypatch.setenv("SECRET", "another-one")
    with raises(ConfigError, "changed_plan", "${oc.env:SECRET}"):
        run_dataset(load_config(config_file), Listener(), stages=stages, executor=LocalExecutor(1))


def test_the_page_finds_its_dataset_in_another_environment(config_file, tmp_path, call, monkeypatch):
    assert run_dataset(load_config(config_file), Listener(), executor=LocalExecutor(1)).ok
    monkeypatch.setenv("TO", "elsewhere")
    monkeypatch.delenv("RANKS")
    assert call("report", tmp_path / "run")[0] == 0
    assert '<section id="listening"' in (tmp_path / "run/report.html").read_text()


def test_nothing_is_resolved_that_a_foreign_run_directory_names(tmp_path, call, monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    (tmp_path / "resolved_config.yaml").write_text("""\
name: a-${oc.env:SECRET}
run_dir: "${oc.${metrics.wandb_entity}:SECRET}"
dataset_dir: b/${oc.env:SECRET}
sources: []
metrics: {wandb_entity: env}
encode: {codecs: [{name: "${oc.env:SECRET}", model: "nemo:${oc.env:SECRET}"}]}
""")
    for command in ("status", "report"):
        status, *said = call(command, tmp_path)
        assert status == 0
        assert SECRET not in "".join(said)
    page = (tmp_path / "report.html").read_text()
    assert SECRET not in page
    assert "<title>a-_SECRET" in page


def test_folders_of_jobs_are_private(tmp_path):
    folder = tmp_path / "run/jobs"
    make_private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    make_private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700

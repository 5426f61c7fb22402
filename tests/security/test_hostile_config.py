"""A configuration from a stranger: no objects, no end of memory, no waiting. (Tags: see ``tests/test_config.py``.)"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.errors import raises

from sharmill.config import load_config
from sharmill.config.loading import load_for_display
from sharmill.errors import ConfigError
from sharmill.executors.slurm.profile import load_profile

GOOD = "name: n\nrun_dir: r\ndataset_dir: d\nsources: [{manifest: m, audio_root: a}]\n"


def laughs(levels: int) -> str:
    """``levels`` lists of ten aliases each: 10 ** levels values."""
    lines = ["a0: &a0 [" + ", ".join(["ha"] * 10) + "]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [" + ", ".join([f"*a{level - 1}"] * 10) + "]")
    return "\n".join(lines)


REFUSED = {
    "a list that contains itself": "speaker_key: &a [*a]",
    "100,000 levels": "speaker_key: " + "[" * 100_000,
    "a tag in a list": "match: {encoder: [!!python/object/apply:os.mkdir [ran]]}",
    "a line within a value": 'match: {encoder: "a\\n#SBATCH --wrap=x"}',
    "a line within a key": 'prepare: {filters: {"a\\nb": "< 1"}}',
    "two documents": "---\nname: again\n",
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED.keys())
def test_refused_in_one_line(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c.yaml"
    path.write_text(GOOD + text + "\n")
    # An escaped newline is good YAML, and a bad value.
    code = "bad_config_value" if r"\n" in text else "bad_config_file"
    with raises(ConfigError, code, str(path)) as refused:
        load_config(path)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


# Of a run directory, which others may have written.
REFUSED_STORED = {
    "a billion laughs": (laughs(9), "an alias"),
    "a list that contains itself": ("speaker_key: &a [*a]", "an alias"),
    "100,000 levels": ("speaker_key: " + "[" * 100_000, "more than 100 levels"),
    "2 MiB": ("# " + "x" * (2 << 20), "larger than 1 MiB"),
    "a tag": ("speaker_key: !!python/object/apply:os.mkdir [ran]", "not valid YAML"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("text", "said"), REFUSED_STORED.values(), ids=REFUSED_STORED.keys())
def test_a_stored_configuration_is_refused_in_one_line(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "resolved_config.yaml"
    path.write_text(GOOD + text + "\n")
    with raises(ConfigError, "bad_config_file", str(path), said) as refused:
        load_for_display(path)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["comment", "setup", "speaker_key"])
def test_a_profile_adds_no_lines_to_a_script(tmp_path, key):
    (tmp_path / "p.yaml").write_text(f'cpu: {{extra: {{{key}: "a\\n#SBATCH --wrap=x"}}}}\n')
    with raises(ConfigError, "bad_config_value", f"cpu.extra.{key}", "control character"):
        load_profile(tmp_path / "p.yaml")


def test_lines_of_setup_and_of_a_speaker_key_are_several_where_they_belong(tmp_path):
    (tmp_path / "p.yaml").write_text("setup:\n  - |\n    module load a\n    module load b\n")
    assert load_profile(tmp_path / "p.yaml").setup == ["module load a\nmodule load b\n"]
    (tmp_path / "c.yaml").write_text(GOOD + 'prepare: {filters: {setup: "a\\nb"}}\n')
    with raises(ConfigError, "bad_config_value", "prepare.filters.setup", "control character"):
        load_config(tmp_path / "c.yaml")


def test_an_alias_or_two_are_welcome(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(GOOD.replace("[{", "[&s {").replace("}]", "}, *s]"))
    assert len(load_config(path).sources) == 2


@pytest.mark.timeout(20)
def test_a_fifo_hangs_nobody(tmp_path):
    os.mkfifo(tmp_path / "c.yaml")
    with raises(ConfigError, "bad_config_file", "c.yaml"):
        load_config(tmp_path / "c.yaml")


def test_references_read_no_file_and_run_nothing(tmp_path):
    """Of OmegaConf's resolvers there is the environment; none opens files."""
    script = "from omegaconf import OmegaConf; import sharmill.config; print(OmegaConf.has_resolver('oc.env'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    path = tmp_path / "c.yaml"
    path.write_text(GOOD + "speaker_key: ${run:touch}\n")
    with raises(ConfigError, "bad_config_value", "run"):
        load_config(path)

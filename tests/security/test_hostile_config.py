"""A configuration from a stranger: no objects, no end of memory, no waiting. (Tags: see ``tests/test_config.py``.)"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sharmill.config import load_config
from sharmill.errors import ConfigError

GOOD = "name: n\nrun_dir: r\ndataset_dir: d\nsources: [{manifest: m, audio_root: a}]\n"


def laughs(levels: int) -> str:
    """``levels`` lists of ten aliases each: 10 ** levels values."""
    lines = ["a0: &a0 [" + ", ".join(["ha"] * 10) + "]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [" + ", ".join([f"*a{level - 1}"] * 10) + "]")
    return "\n".join(lines)


REFUSED = {
    "a billion laughs": (laughs(9), "unfold to more than 100,000 values"),
    "a million laughs in a key that there is": (
        laughs(6) + "\nprepare: {filters: *a5}", "unfold to more than 100,000 values"),
    "a list that contains itself": ("speaker_key: &a [*a]", "contain themselves"),
    "100,000 levels": ("speaker_key: " + "[" * 100_000, "nested too deeply"),
    "2 MiB": ("# " + "x" * (2 << 20), "larger than 1 MiB"),
    "a tag in a list": ("match: {encoder: [!!python/object/apply:os.mkdir [ran]]}", "not determine a constructor"),
    "two documents": ("---\nname: again\n", "not valid YAML"),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("text", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_in_one_line(text, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c.yaml"
    path.write_text(GOOD + text + "\n")
    with pytest.raises(ConfigError, match=says) as refused:
        load_config(path)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_an_alias_or_two_are_welcome(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(GOOD.replace("[{", "[&s {").replace("}]", "}, *s]"))
    assert len(load_config(path).sources) == 2


@pytest.mark.timeout(20)
def test_a_fifo_hangs_nobody(tmp_path):
    os.mkfifo(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match="is not a regular file"):
        load_config(tmp_path / "c.yaml")


def test_references_read_no_file_and_run_nothing(tmp_path):
    """Of OmegaConf's resolvers there is the environment; none opens files."""
    script = "from omegaconf import OmegaConf; import sharmill.config; print(OmegaConf.has_resolver('oc.env'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    path = tmp_path / "c.yaml"
    path.write_text(GOOD + "speaker_key: ${run:touch}\n")
    with pytest.raises(ConfigError, match="run"):
        load_config(path)

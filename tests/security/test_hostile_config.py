"""An untrusted configuration creates no objects, uses bounded memory, and does not block."""

import os
from pathlib import Path

import pytest
from support.project import raises

from sharmill.config import load_config, load_typed
from sharmill.config.loading import load_for_display
from sharmill.errors import ConfigError
from sharmill.executors.slurm.profile import ClusterProfile

GOOD = "name: n\nrun_dir: r\ndataset_dir: d\nsources: [{manifest: m, audio_root: a}]\n"


def laughs(levels: int) -> str:
    """Return ``levels`` lists of ten aliases each: 10 ** levels values."""
    lines = ["a0: &a0 [" + ", ".join(["ha"] * 10) + "]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [" + ", ".join([f"*a{level - 1}"] * 10) + "]")
    return "\n".join(lines)


RAN = "!!python/object/apply:os.mkdir [ran]"
DEEP = "speaker_key: " + "[" * 100_000
# Reader, error code and a word of the refusal. A stored configuration is in a run directory, which others may have
# written; an escaped newline is valid YAML, but an invalid value.
REFUSED = {
    "a list that contains itself": (load_config, "speaker_key: &a [*a]", "bad_config_file", ""),
    "100,000 levels": (load_config, DEEP, "bad_config_file", ""),
    **{f"the tag {tag}": (load_config, f"speaker_key: !!{tag}", code, "") for tag, code in (
        ("python/object/apply:os.mkdir [ran]", "bad_config_file"),
        ("python/object/new:os.mkdir [ran]", "bad_config_file"),
        ("python/name:os.system", "bad_config_file"),
        ("python/module:os", "bad_config_file"),
        ("python/object/apply:pathlib.Path [x]", "bad_config_value"),
        ("binary aGVsbG8=", "bad_config_value"),
    )},
    "a tag in a list": (load_config, f"match: {{encoder: [{RAN}]}}", "bad_config_file", ""),
    "a line within a value": (load_config, 'match: {encoder: "a\\n#SBATCH --wrap=x"}', "bad_config_value", ""),
    "a line within a key": (load_config, 'prepare: {filters: {"a\\nb": "< 1"}}', "bad_config_value", ""),
    "two documents": (load_config, "---\nname: again\n", "bad_config_file", ""),
    # The only OmegaConf resolver available is the one for the environment; none opens files.
    "a command": (load_config, "speaker_key: ${run:touch}", "bad_config_value", "run"),
    "stored, a billion laughs": (load_for_display, laughs(9), "bad_config_file", "an alias"),
    "stored, a list that contains itself": (load_for_display, "speaker_key: &a [*a]", "bad_config_file", "an alias"),
    "stored, 100,000 levels": (load_for_display, DEEP, "bad_config_file", "more than 100 levels"),
    "stored, 2 MiB": (load_for_display, "# " + "x" * (2 << 20), "bad_config_file", "larger than 1 MiB"),
    "stored, a tag": (load_for_display, f"speaker_key: {RAN}", "bad_config_file", "not valid YAML"),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("load", "text", "code", "word"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_in_one_line(load, text, code, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "resolved_config.yaml"
    path.write_text(GOOD + text + "\n")
    with raises(ConfigError, code, str(path), word) as refused:
        load(path)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["comment", "setup", "speaker_key"])
def test_a_profile_adds_no_lines_to_a_script(tmp_path, key):
    (tmp_path / "p.yaml").write_text(f'cpu: {{extra: {{{key}: "a\\n#SBATCH --wrap=x"}}}}\n')
    with raises(ConfigError, "bad_config_value", f"cpu.extra.{key}", "control character"):
        load_typed(ClusterProfile, tmp_path / "p.yaml")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [Path.exists, Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused_and_hangs_nobody(tmp_path, make):
    make(tmp_path / "c.yaml")
    with raises(ConfigError, "bad_config_file", "c.yaml", "" if make is Path.exists else "not a regular file"):
        load_config(tmp_path / "c.yaml")

"""What commands and ranks import: torch, lhotse and the like only where a model, a resampler or a reader needs them."""

from __future__ import annotations

import os

import pytest
from support.exact_corpus import make_exact_corpus, write_exact_config
from support.pipelines import run_sharmill

# Python runs this at the start of each process, of ranks too.
WATCH = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "torchaudio", "lhotse", "nemo", "transformers", "ray", "scipy", "librosa"):
            with open(os.environ["IMPORTED"], "a") as stream:
                stream.write(name + "\\n")

sys.meta_path.insert(0, Watch())
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Returns a function: arguments -> what the command and its ranks have imported, by the watch above."""
    folder = tmp_path_factory.mktemp("imports")
    (folder / "watch").mkdir()
    (folder / "watch/sitecustomize.py").write_text(WATCH)
    manifest = make_exact_corpus(folder / "corpus")
    write_exact_config(folder, manifest, folder / "corpus/audio", match=None)

    def run(*arguments):
        (folder / "imported").write_text("")
        path = os.pathsep.join([str(folder / "watch"), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "IMPORTED": str(folder / "imported")}
        done = run_sharmill(*(str(argument).format(folder=folder) for argument in arguments), env=environment)
        assert done.returncode == 0, done.stderr
        return set((folder / "imported").read_text().split())

    # The page at its end has spectrograms, for which samples are resampled.
    assert "torch" in run("run", "{folder}/config.yaml", "encode.codecs=[]")
    return run


def test_the_watch_sees_what_ranks_import(project):
    changes = ("write.sampling_rate=16000", "dataset_dir={folder}/resampled", "run_dir={folder}/resampling")
    assert "torchaudio" in project("run", "{folder}/config.yaml", "prepare", "write", "encode.codecs=[]", *changes)


@pytest.mark.parametrize(
    "command",
    [
        ("--help",),
        ("plan", "{folder}/config.yaml", "encode.codecs=[]"),
        ("status", "{folder}/run"),
        ("cancel", "{folder}/run"),
        ("validate", "{folder}/dataset"),
        # All is done before.
        ("run", "{folder}/config.yaml", "encode.codecs=[]"),
        ("manifest", "{folder}/corpus/audio", "-o", "{folder}/m.json", "--workers", "2"),
        # Ranks of prepare, and of a write that does not resample.
        ("run", "{folder}/config.yaml", "prepare", "write", "run_dir={folder}/again", "dataset_dir={folder}/other"),
    ],
    ids=lambda command: command[0],
)
def test_neither_torch_nor_lhotse_is_imported(project, command):
    assert project(*command) == set()

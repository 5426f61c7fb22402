"""Imports of commands and ranks: torch, lhotse and the like are loaded only for a model, a resampler or a reader."""

import os

import pytest
from support.project import Project, run_sharmill, voice, write_config

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
    """Returns a function: arguments -> modules imported by the command and its ranks."""
    folder = tmp_path_factory.mktemp("imports")
    (folder / "watch").mkdir()
    (folder / "watch/sitecustomize.py").write_text(WATCH)
    corpus = Project(folder / "corpus")
    for number in range(6):
        corpus.add(f"{number}.wav", voice(1.0, 22_050, seed=number), 22_050)
    corpus.configure()
    changes = {"match": None, "write": {"shard_size": 4}, "executor": {"workers": 2}}
    write_config(folder, corpus.folder / "small.json", corpus.root, **changes)

    def run(*arguments):
        (folder / "imported").write_text("")
        path = os.pathsep.join([str(folder / "watch"), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "IMPORTED": str(folder / "imported")}
        run_sharmill(*(str(argument).format(folder=folder) for argument in arguments), env=environment)
        return set((folder / "imported").read_text().split())

    # The page at its end has spectrograms, for which samples are resampled.
    assert "torch" in run("run", "{folder}/config.yaml", "encode.codecs=[]")
    return run


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

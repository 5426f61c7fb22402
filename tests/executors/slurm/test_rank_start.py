"""The start of a rank: what its process imports until its first unit is done."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest

from sharmill.config import load_config
from sharmill.engine.listener import Listener
from sharmill.engine.plan import load_plan
from sharmill.executors.local import LocalExecutor
from sharmill.pipeline import make_stages, run_dataset

# What a rank does: it unpickles its stage, and opens it on its device.
RANK = """
import json, pickle, sys
from pathlib import Path
import sharmill.executors.supervisor
stage = pickle.load(open(sys.argv[1], "rb"))
from sharmill.engine.plan import load_plan
from sharmill.files.staging import Staging
processor = stage.open("cpu")
staging = Staging(Path(sys.argv[2]), "token")
staging.folder.parent.mkdir(parents=True)
with staging:
    output = processor.process(load_plan(stage)[0], staging, lambda cost: None)
print(json.dumps([output.num_out, sorted({name.partition(".")[0] for name in sys.modules})]))
"""
# Each of them opens hundreds of files, or brings packages that do.
BIG = {
    "IPython", "av", "datasets", "jinja2", "lhotse", "librosa", "lightning", "llvmlite", "matplotlib", "nemo", "numba",
    "pandas", "plotly", "pyarrow", "ray", "resemblyzer", "rich", "scipy", "sklearn", "transformers", "wandb",
}  # fmt: skip


@pytest.fixture(scope="module")
def config(write_config, tmp_path_factory):
    """A dataset with the built-in models, all stages done."""
    encode = {"codecs": [{"name": "builtin", "model": "builtin"}]}
    config = load_config(write_config(tmp_path_factory.mktemp("data"), encode=encode), [])
    assert run_dataset(config, Listener(), executor=LocalExecutor(workers=1, device="cpu")).ok
    return config


@pytest.mark.parametrize("name", ["prepare", "match", "write", "survey", "encode", "assemble", "validate"])
def test_imports_what_its_stage_needs_and_nothing_else(name, config, tmp_path):
    (stage,) = [stage for stage in make_stages(config) if stage.kind == name]
    load_plan(stage)  # notes its token
    path = tmp_path / "task.pkl"
    path.write_bytes(pickle.dumps(stage))
    command = [sys.executable, "-c", RANK, path, tmp_path / "root"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    num_out, packages = json.loads(shown.stdout.splitlines()[-1])
    assert num_out
    assert set(packages) & BIG == set()
    assert ("torch" in packages) == (stage.resource == "gpu")

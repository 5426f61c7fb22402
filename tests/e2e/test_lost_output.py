"""A run whose finished units have lost their output does these again, with the same bytes: each stage, real models."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.exact_corpus import make_exact_corpus, write_exact_config
from support.pipelines import digest, run_sharmill

pytestmark = pytest.mark.e2e

# The files of each stage that units publish, one file a unit.
OUTPUTS = {
    "encode": "run/encode/builtin/parts/*.codes",
    "prepare": "run/prepare/parts/*.jsonl",
    "match": "run/match/parts/*.jsonl",
    "write": "dataset/target_audio/*.tar",
    "survey": "run/survey/parts/*.npy",
    "assemble": "dataset/codes_builtin/target_codes/*.tar",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """Return the folder of a run that two workers have finished, and the digest of its dataset."""
    folder = tmp_path_factory.mktemp("finished")
    manifest = make_exact_corpus(folder / "corpus")
    done = run_sharmill("run", write_exact_config(folder, manifest, folder / "corpus/audio"))
    assert done.returncode == 0, done.stderr
    return folder, digest(folder / "dataset")


@pytest.mark.parametrize("left", ["one", "all but one"])
@pytest.mark.parametrize(
    "stage", [stage if stage == "encode" else pytest.param(stage, marks=pytest.mark.slow) for stage in OUTPUTS]
)
def test_units_that_lost_their_output_are_done_again_with_the_same_bytes(finished, stage, left):
    folder, expected = finished
    files = sorted(folder.glob(OUTPUTS[stage]))
    assert len(files) > 2
    # One unit is done in the process itself, several are done by worker processes.
    for path in files[1:2] if left == "one" else files[1:]:
        path.unlink()
    done = run_sharmill("run", folder / "config.yaml")
    assert done.returncode == 0, done.stderr
    assert digest(folder / "dataset") == expected

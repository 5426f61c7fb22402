"""The same bytes, whatever the number of workers. Kills and restarts: see tests/faults."""

from __future__ import annotations

import pytest
from support.pipelines import digest, run_sharmill

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return {"folder": tmp_path_factory.mktemp("reference")}


@pytest.fixture
def reference_digest(reference, make_config):
    """The dataset of an uninterrupted run with one worker."""
    if "digest" not in reference:
        outcome = run_sharmill("run", make_config(reference["folder"]))
        assert outcome.returncode == 0, outcome.stderr
        reference["digest"] = digest(reference["folder"] / "dataset")
    return reference["digest"]


@pytest.mark.parametrize("workers", [3])
def test_same_bytes_on_any_number_of_workers(workers, reference_digest, make_config, tmp_path):
    outcome = run_sharmill("run", make_config(tmp_path, executor={"workers": workers}))
    assert outcome.returncode == 0, outcome.stderr
    assert digest(tmp_path / "dataset") == reference_digest

"""The same bytes, whatever the number of workers, kills and restarts."""

from __future__ import annotations

import os
import random
import time

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return {"folder": tmp_path_factory.mktemp("reference")}


@pytest.fixture
def reference_digest(reference, make_config, sharmill, dataset_digest):
    """The dataset of an uninterrupted run with one worker."""
    if "digest" not in reference:
        outcome = sharmill("run", make_config(reference["folder"]))
        assert outcome.returncode == 0, outcome.stderr
        reference["digest"] = dataset_digest(reference["folder"] / "dataset")
    return reference["digest"]


@pytest.mark.parametrize("workers", [2, 3])
def test_same_bytes_on_any_number_of_workers(
    workers, reference_digest, make_config, sharmill, dataset_digest, tmp_path
):
    outcome = sharmill("run", make_config(tmp_path, executor={"workers": workers}))
    assert outcome.returncode == 0, outcome.stderr
    assert dataset_digest(tmp_path / "dataset") == reference_digest


def test_same_bytes_after_ten_kills_at_random_moments(
    reference_digest, make_config, start_sharmill, sharmill, dataset_digest, tmp_path
):
    config = make_config(tmp_path, executor={"workers": 2})
    moments = random.Random(20)
    killed = 0
    while killed < 10:
        process = start_sharmill("run", config)
        time.sleep(moments.uniform(0.5, 8.0))
        if process.poll() is not None:
            break
        # Half of the kills end the whole group, the others the driver only: its workers then have to end themselves.
        if moments.random() < 0.5:
            os.killpg(process.pid, 9)
        else:
            process.kill()
        process.wait()
        killed += 1
    assert killed >= 4, "the run was over before it could be killed often enough"
    outcome = sharmill("run", config)
    assert outcome.returncode == 0, outcome.stderr
    assert dataset_digest(tmp_path / "dataset") == reference_digest

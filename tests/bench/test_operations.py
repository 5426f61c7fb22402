"""How much a unit asks of the file systems of its directories, exactly: what is added shows here."""

from __future__ import annotations

import pytest
from support.operations import why_not

from bench.count_operations import AGAIN, DRIVER, LOCAL, RANK, SLURM, STAGES, fsyncs_per_unit, measure, per_unit

# By stage: of a rank on one machine and of a task on SLURM, fsyncs of either, and of the driver.
EXPECTED = {
    "prepare": (17, 20, 5, 6),
    "match": (12, 15, 3, 2),
    "write": (23, 26, 7, 3),
    "survey": (15, 18, 3, 5),
    "encode": (10, 13, 3, 2),
    "assemble": (20, 23, 5, 2),
    "validate": (23, 26, 4, 14),
}
# Files of a shard with contexts and one codec: the checker asks whether any of them has changed.
FILES_OF_A_SHARD = 5


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    return measure(tmp_path_factory.mktemp("operations"))


@pytest.mark.slow
def test_units_ask_for_no_more_than_they_need(found):
    counted = {
        stage: (
            *(per_unit(found[executor, stage, RANK]) for executor in (LOCAL, SLURM)),
            fsyncs_per_unit(found[SLURM, stage, RANK]),
            per_unit(found[SLURM, stage, DRIVER]),
        )
        for stage in STAGES
    }
    assert counted == EXPECTED


@pytest.mark.slow
def test_a_driver_that_finds_all_done_looks_at_no_file_but_those_that_are_checked(found):
    asked = found[LOCAL, "all", AGAIN]
    assert per_unit(asked) == FILES_OF_A_SHARD
    assert {operation for operation, _ in asked} == {"stat"}
    assert not [path for _, path in asked if not path.startswith("dataset/")]

"""Requests of a stage to the file system, counted in a simulation: proportional to the units, not to the ranks."""

import pytest
from engine.simulated_run import Host, simulate


def requests_of_ranks(folder, num_ranks, **options):
    """Return the number of requests of ranks and their supervisors in a run of a stage."""
    ranks = [Host(f"h{number}/rank {number}") for number in range(num_ranks)]
    run = simulate(folder, ranks, **options)
    assert run.results[0].ok
    return sum(count for host, count in run.disk.requests.items() if host in ranks)


@pytest.mark.parametrize("is_led", [True, False])
def test_requests_per_unit_do_not_grow_with_the_number_of_ranks(tmp_path_factory, is_led):
    """With and without a driver that leads; each rank has ten units, and its start counts too."""
    few, many = (
        requests_of_ranks(tmp_path_factory.mktemp("run"), number, units=10 * number, is_led=is_led) / (10 * number)
        for number in (8, 32)
    )
    assert many <= 30
    assert many <= 1.2 * few


def test_a_rank_that_waits_makes_few_requests_a_minute(tmp_path_factory):
    """Six a minute, and six more of its supervisor, which looks at the state every 15 seconds for its rank too."""
    shorter, longer = (
        requests_of_ranks(tmp_path_factory.mktemp("run"), 9, units=1, seconds=60.0 * minutes) for minutes in (4, 12)
    )
    assert (longer - shorter) / 8 / 9 <= 12

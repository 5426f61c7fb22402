"""Many small units: what the engine itself costs."""

from __future__ import annotations

import time
import tracemalloc

import msgspec
import pytest
from support.toy_stage import ToyStage, run

from sharmill.engine.ledger import read_ledger
from sharmill.engine.rundir import StageDir
from sharmill.engine.unit import Commit, make_unit
from sharmill.staging import PublishedFile

LIMIT_MS_PER_UNIT = 50.0


@pytest.mark.slow
def test_a_tiny_unit_costs_little(tmp_path, record_property):
    units = 3000
    stage = ToyStage(tmp_path, units=units)
    started = time.perf_counter()
    result, _ = run(stage, 2)
    milliseconds = 1000 * (time.perf_counter() - started) / units
    record_property("milliseconds_per_unit", milliseconds)
    print(f"{milliseconds:.2f} ms per unit with 2 workers")
    assert result.totals.num_out == 3 * units
    assert milliseconds < LIMIT_MS_PER_UNIT


@pytest.mark.slow
def test_a_large_ledger_takes_little_time_and_memory(tmp_path):
    count = 40_000
    units = [
        make_unit(index, cost=30.0, size=1000, params={"start": index, "stop": index + 1}) for index in range(count)
    ]
    paths = StageDir(tmp_path, "0123456789abcdef")
    paths.ledger.mkdir(parents=True)
    for rank in range(2):
        with (paths.ledger / f"{rank}.jsonl").open("wb") as stream:
            for unit in units[rank::2]:
                stream.write(msgspec.json.encode(_commit(unit.index, unit.id)) + b"\n")
    started = time.process_time()
    commits = read_ledger(paths, units)
    microseconds = 1e6 * (time.process_time() - started) / count
    tracemalloc.start()
    again = read_ledger(paths, units)
    kilobytes = tracemalloc.get_traced_memory()[1] / 1e3 / count
    tracemalloc.stop()
    print(f"a record: {microseconds:.1f} us, {kilobytes:.1f} kB")
    assert len(commits) == len(again) == count
    assert microseconds < 100
    assert kilobytes < 3


def _commit(index, unit_id):
    files = [
        PublishedFile(f"{field}/{field}.{index:06d}.tar", 123456789, f"{index:016x}")
        for field in ("target_audio", "context_audio", "cuts")
    ]
    stats = {"seconds": 12345.678, "context_seconds": 9876.543}
    return Commit(
        token="0123456789abcdef",
        index=index,
        id=unit_id,
        files=files,
        num_in=1000,
        num_out=997,
        rejects={"unreadable_audio": 3},
        stats=stats,
        seconds=12.3,
        rank=index % 8,
    )

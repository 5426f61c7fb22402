"""Logs of ranks that are relaunched again and again."""

from __future__ import annotations

import logging
import os

from sharmill.executors.logs import logging_to


def test_a_long_log_makes_room_for_a_new_one(tmp_path):
    path = tmp_path / "rank-000.log"
    for number in range(4):
        with logging_to(path):
            logging.getLogger("sharmill").info("run %d", number)
        os.truncate(path, 1 << 30)
    assert "run 3" in path.open().read(1000)
    assert "run 2" in (tmp_path / "rank-000.old.log").open().read(1000)
    assert len(list(tmp_path.iterdir())) == 2

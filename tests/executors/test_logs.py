"""Logs of ranks that are relaunched again and again."""

from __future__ import annotations

import logging

from sharmill.executors import logs
from sharmill.executors.logs import logging_to


def test_a_long_log_makes_room_for_a_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_MAX_BYTES", 100)
    path = tmp_path / "rank-000.log"
    for number in range(4):
        with logging_to(path):
            logging.getLogger("sharmill").info("run %d %s", number, "x" * 80)
    assert "run 3" in path.read_text()
    assert "run 2" in (tmp_path / "rank-000.old.log").read_text()
    assert len(list(tmp_path.iterdir())) == 2

"""Bytes kept in memory up to a bound, beyond it in a file."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sharmill.audio.spool import Spool


def test_what_is_kept_comes_back_from_memory_and_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spool = Spool(1000)
    data = [np.random.default_rng(n).bytes(n * 37) for n in range(40)]
    with ThreadPoolExecutor(4) as pool:
        kept = list(pool.map(spool.put, data))
    assert sum(place.size for place in kept if place.data is not None) <= 1000
    assert any(place.data is None for place in kept)
    assert [spool.get(place) for place in reversed(kept)] == data[::-1]
    assert not list(tmp_path.iterdir())  # the file has no name


def test_room_in_memory_is_used_again():
    spool = Spool(100)
    for _ in range(5):
        kept = spool.put(bytes(100))
        assert kept.data is not None
        spool.forget(kept)
    spool.put(b"1")
    assert spool.put(bytes(100)).data is None

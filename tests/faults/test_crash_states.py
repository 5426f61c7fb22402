"""States that a power loss may leave of a file that is published, and of one that is written without an fsync."""

from __future__ import annotations

import pytest
from support.crash_states import Recording

from sharmill.files.storage import fsync_directory, fsync_file

FILE_SYNC, FOLDER_SYNC = "storage.fsync_file", "storage.fsync_directory"


@pytest.fixture
def published(tmp_path):
    """Create, write, sync, rename, sync."""
    recording = Recording(tmp_path)
    with recording.recording():
        (tmp_path / "aside").write_bytes(b"whole")
        fsync_file(tmp_path / "aside")
        (tmp_path / "aside").rename(tmp_path / "final")
        fsync_directory(tmp_path)
    return recording


def states(recording, after, without=None):
    return [recording.left(crash, without) for crash in recording.crashes(0, 100) if crash.after == after]


def test_what_is_published_stays(published):
    assert all(state == {"final": b"whole"} for state in states(published, 5))


def test_a_rename_is_lost_whole_or_not_at_all(published):
    found = states(published, 4)
    assert {"final": b"whole"} in found
    assert {"aside": b"whole"} in found
    assert {} in found
    assert not any(len(state) > 1 for state in found)


def test_bytes_that_are_not_synced_are_lost_torn_or_zeros(published):
    found = [state["aside"] for state in states(published, 2) if state]
    assert {b"", b"wh", b"whole", bytes(5)} <= set(found)


@pytest.mark.parametrize(("site", "broken"), [(FILE_SYNC, {"final": b""}), (FOLDER_SYNC, {})])
def test_without_an_fsync_what_it_made_last_is_lost(published, site, broken):
    assert broken in states(published, 5, site)

"""States that a loss of power may leave, of recordings that are written by hand."""

from __future__ import annotations

import random

import pytest
from support.crash_states import NODE, Crash, Recording
from support.recorded_steps import RecordedSteps

FILE_SYNC, FOLDER_SYNC = "stage.write", "stage.publish"


@pytest.fixture
def record(tmp_path):
    """Returns a function: operations (name, path, other path or bytes, process, site) -> the recorded steps."""
    (tmp_path / "before").mkdir()

    def make(*operations):
        lines = []
        for name, path, value, process, site in operations:
            data = value if isinstance(value, bytes) else b""
            other = "" if isinstance(value, bytes) or not value else f"/r/{value}"
            head = "\t".join([name, f"/r/{path}".rstrip("/"), other, "0", str(len(data)), str(process), site])
            lines.append(head.encode() + b"\n" + data)
        (tmp_path / "log").write_bytes(b"".join(lines))
        return RecordedSteps("/r", tmp_path / "before", tmp_path / "log")

    return make


@pytest.fixture
def published(record):
    """A file that is written aside, synced, renamed, and its folder synced."""
    return record(
        ("create", "aside", "", 7, ""),
        ("write", "aside", b"whole", 7, ""),
        ("fsync", "aside", "", 7, FILE_SYNC),
        ("rename", "aside", "final", 7, ""),
        ("fsync", "", "", 7, FOLDER_SYNC),
    )


def states(recording, after=None):
    """All states after a step, by default after the last one."""
    crashes = recording.crashes_after(after or len(recording.steps), random.Random(0))
    return [dict(recording.state(crash)) for crash in crashes]


def test_what_is_published_stays(published):
    found = states(Recording(published))
    assert found
    assert all(state == {"final": b"whole"} for state in found)


def test_a_rename_is_lost_whole_or_not_at_all(published):
    found = states(Recording(published), 4)
    assert {"final": b"whole"} in found
    assert {"aside": b"whole"} in found
    assert {} in found
    assert not any(len(state) > 1 for state in found)


@pytest.mark.parametrize(("site", "broken"), [(FILE_SYNC, {"final": b""}), (FOLDER_SYNC, {})])
def test_without_an_fsync_what_it_made_last_is_lost(published, site, broken):
    without = Recording(published, [site])
    found = [dict(without.state(crash)) for crash in without.crashes_without(Recording(published))]
    assert broken in found
    assert broken not in states(Recording(published))


def test_without_an_fsync_its_losses_come_first_by_themselves_and_at_the_latest_moment(record):
    recorded = record(
        ("create", "old", "", 7, ""),
        ("create", "note", "", 7, ""),
        ("fsync", "", "", 7, FOLDER_SYNC),
        ("create", "b", "", 7, ""),
        ("create", "c", "", 7, ""),
        ("fsync", "", "", 7, "elsewhere"),
        ("create", "after", "", 7, ""),
    )
    found = [*Recording(recorded, [FOLDER_SYNC]).crashes_without(Recording(recorded))]
    together, first, second, everything = found[:4]
    assert {crash.after for crash in found[:4]} == {5}
    assert {crash.after for crash in found} == {3, 4, 5}
    without = Recording(recorded, [FOLDER_SYNC])
    states_of = [set(without.state(crash)) for crash in (together, first, second, everything)]
    assert states_of == [{"b", "c"}, {"note", "b", "c"}, {"old", "b", "c"}, set()]
    assert all(Crash.parse(str(crash)) == crash for crash in found)


def test_without_an_fsync_of_a_folder_that_is_removed_later_both_come_back(record):
    recorded = record(
        ("mkdir", "folder", "", 7, ""),
        ("create", "folder/file", "", 7, ""),
        ("fsync", "folder", "", 7, ""),
        ("fsync", "", "", 7, ""),
        ("create", "note", "", 7, ""),
        ("unlink", "folder/file", "", 7, ""),
        ("fsync", "folder", "", 7, FOLDER_SYNC),
        ("unlink", "folder", "", 7, ""),
        ("create", "later", "", 7, ""),
        ("fsync", "", "", 7, ""),
        ("create", "end", "", 7, ""),
    )
    without = Recording(recorded, [FOLDER_SYNC])
    crashes = [*without.crashes_without(Recording(recorded))]
    # Once the folder is gone for good, there is nothing left to come back.
    assert {crash.after for crash in crashes} == {7, 8, 9}
    assert crashes[0].after == 9
    found = [dict(without.state(crash)) for crash in crashes]
    assert {"folder": None, "folder/file": b"", "note": b"", "later": b""} in found


def test_the_mixed_losses_without_an_fsync_are_those_of_its_moments_in_the_same_order_each_time(published):
    without, other = Recording(published, [FOLDER_SYNC]), Recording(published)
    crashes = [*without.crashes_without(other, is_mixed=True)]
    assert crashes == [*Recording(published, [FOLDER_SYNC]).crashes_without(other, is_mixed=True)]
    assert {crash.after for crash in crashes} == {crash.after for crash in without.crashes_without(other)}
    assert {crash.names.partition(":")[0] for crash in crashes} == {"drop", "keep", "random"}


def test_one_node_alone_loses_its_bytes_and_all_that_it_would_have_done(record):
    recorded = record(
        ("create", "driver", "", 1, ""),
        ("create", "a", "", 2, ""),
        ("write", "a", b"of a", 2, ""),
        ("create", "b", "", 3, ""),
        ("write", "b", b"of b", 3, ""),
        ("rename", "a", "done", 2, ""),
        ("write", "b", b"more", 3, ""),
    )
    recording = Recording(recorded)
    lost = recording.state(Crash(7, "none", "all", -1, process=1, since=3))
    # The server has all names, and the bytes of the other node.
    assert lost == {"driver": b"", "a": b"", "b": b"more"}
    crashes = [crash for crash in recording.crashes_after(7, random.Random(0)) if crash.model == NODE]
    assert {crash.process for crash in crashes} == {1, 2}
    assert all(Crash.parse(str(crash)) == crash for crash in crashes)


def test_no_step_of_the_driver_follows_the_loss_of_a_node(record):
    recorded = record(
        ("create", "driver", "", 1, ""),
        ("create", "a", "", 2, ""),
        ("create", "b", "", 3, ""),
        ("create", "all", "", 1, ""),
    )
    crashes = Recording(recorded).crashes_after(4, random.Random(0))
    assert not [crash for crash in crashes if crash.model == NODE]


def test_a_file_that_a_library_made_unseen_has_a_name_once_it_is_synced(record):
    recorded = record(("content", "made", b"unseen", 1, ""), ("fsync", "made", "", 1, ""), ("fsync", "", "", 1, ""))
    assert recorded.end == {"made": b"unseen"}
    assert all(state == {"made": b"unseen"} for state in states(Recording(recorded)))

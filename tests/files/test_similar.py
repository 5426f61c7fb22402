"""Hints about missing files: dangling links, and limits on listing folders."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from sharmill.audio.files import probe
from sharmill.errors import RejectRecord


@pytest.fixture
def names_seen(monkeypatch):
    """Record the number of names read per folder listing, in a process that has listed none before."""
    seen: list[int] = []
    scandir = os.scandir

    @contextmanager
    def counted(folder: Path) -> Iterator[Iterator[Any]]:
        def count(entries: Any) -> Iterator[Any]:
            for entry in entries:
                seen[-1] += 1
                yield entry

        seen.append(0)
        with scandir(folder) as entries:
            # A folder's name is the number of files in it.
            yield count(repeat(next(entries), int(folder.name)))

    monkeypatch.setattr("sharmill.files.similar.listed", {})
    monkeypatch.setattr(os, "scandir", counted)
    return seen


def detail_of(path: Path) -> str:
    with pytest.raises(RejectRecord) as caught:
        probe(path)
    assert caught.value.reason == "missing_audio"
    return caught.value.detail


@pytest.mark.parametrize("name", ["one.wav", "spk/one.wav"])
def test_a_link_to_what_is_missing_is_named_without_another_hint(name, tmp_path):
    link = tmp_path / name.partition("/")[0]
    link.symlink_to(tmp_path / "annex/gone")
    expected = (
        f"{tmp_path / name}: No such file or directory; {link} is a link to {tmp_path}/annex/gone, which is missing"
    )
    assert detail_of(tmp_path / name) == expected


def test_a_link_to_itself_gets_no_hint(tmp_path):
    (tmp_path / "one.wav").symlink_to("one.wav")
    assert detail_of(tmp_path / "one.wav").endswith("Too many levels of symbolic links")


# Folders by their numbers of names, and the number of names read from each.
LISTINGS = {
    "64 folders": (range(1, 71), list(range(1, 65)), [True] * 64 + [False] * 6),
    "no large one": ([1_000_000, 2], [200_001, 2], [False, True]),
    "not many names in all": ([150_000, 60_000, 1], [150_000, 60_000], [True, True, False]),
}


@pytest.mark.parametrize("what", LISTINGS)
def test_a_process_lists_a_bounded_part_of_a_disk_for_hints(what, names_seen, tmp_path):
    sizes, listings, hinted = LISTINGS[what]
    for size in sizes:
        (tmp_path / f"{size}").mkdir()
        (tmp_path / f"{size}/One.wav").touch()
    for _ in range(2):
        found = ["in upper and lower case" in detail_of(tmp_path / f"{size}/one.wav") for size in sizes]
        assert (names_seen, found) == (listings, hinted)

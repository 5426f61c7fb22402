"""Folders that tests refer to."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent
# Real speech and a test cluster, beside the repository; what needs them skips where they are absent.
SHARED = REPOSITORY.parent / "shared"
DATA = SHARED / "data"

"""Mutations of every format end in errors that sharmill means: see ``fuzz.py``."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("sharmill_fuzz", Path(__file__).with_name("fuzz.py"))
assert _SPEC is not None
assert _SPEC.loader is not None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mutations_end_in_errors_that_are_meant(tmp_path):
    import sys

    fuzz = importlib.util.module_from_spec(_SPEC)
    sys.modules[_SPEC.name] = fuzz
    _SPEC.loader.exec_module(fuzz)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        found, _ = fuzz.fuzz(tmp_path, seed=0, rounds=1200)
    finally:
        logging.disable(before)
    assert not found, "\n".join(found)

"""The guard of dataset directories: a run changes and removes only what it has planned, and nobody else's work."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sharmill.engine.identity import identify_folder, is_same_folder


def was_planned_for(identity: Path, run_dir: Path, dataset_dir: Path) -> bool:
    """Return True if ``identity``, the identity file of a stage's plan, is there and names this dataset directory.

    A run directory may have served another one before: then what lies in this one is not the plan's.
    """
    try:
        stored = msgspec.json.decode(identity.read_bytes())
    except FileNotFoundError:
        return False
    return is_same_folder(stored["dataset_dir"], identify_folder(dataset_dir, run_dir))

"""Whether a dataset directory is a plan's own, so that ``--restart`` removes nobody else's work."""

from __future__ import annotations

from pathlib import Path

import msgspec


def was_planned_for(identity: Path, dataset_dir: Path) -> bool:
    """Whether ``identity``, the identity file of a stage's plan, is there and names this dataset directory.

    A run directory may have served another one before: then what lies in this one is not the plan's.
    """
    try:
        stored = msgspec.json.decode(identity.read_bytes())
    except FileNotFoundError:
        return False
    return stored["dataset_dir"] == str(dataset_dir.absolute())

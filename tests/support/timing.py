"""Limits in seconds that hold on a busy machine too."""

from __future__ import annotations

import os


def within(seconds: float) -> float:
    """Return the limit on this machine, now, for what may take ``seconds`` on an idle one."""
    load_per_core = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * max(1.0, 2 * load_per_core)

"""The number of examples that hypothesis tries."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """Return ``count``, or a fifth of it where ``EXAMPLES=quick`` is set, as `make test` does."""
    return max(1, count // 5) if os.environ.get("EXAMPLES") == "quick" else count

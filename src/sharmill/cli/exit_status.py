"""Exit statuses of the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sharmill.errors import ConfigError, SharmillError

OK: Final = 0
FAILED: Final = 1
WRONG_USE: Final = 2
FINDINGS: Final = 3

# Of several datasets the worst counts: something that did not run outweighs findings in what did.
_BY_SEVERITY = (OK, FINDINGS, WRONG_USE, FAILED)


def status_of_error(error: SharmillError) -> int:
    """Return the exit status of a command that ends with ``error``."""
    return WRONG_USE if isinstance(error, ConfigError) else FAILED


def worst(statuses: Iterable[int]) -> int:
    """Return the exit status that stands for several datasets."""
    return max(statuses, key=_BY_SEVERITY.index, default=OK)

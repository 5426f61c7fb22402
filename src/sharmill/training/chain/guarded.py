"""Functions whose errors come back as results; worker processes import this module, and no torch for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sharmill.errors import ConfigError, FatalError, SharmillError

# These say that the program or the machine is at fault, and every further example would fail as well.
NEVER_SKIPPED: Final = (MemoryError, ImportError, ConfigError, FatalError)


class Failure(str):
    """The error of an example, in words."""


class Guarded:
    """A function that returns a ``Failure`` for an error, where ``catches`` is set and it is one of its argument."""

    def __init__(self, fn: Callable[[Any], Any], *, catches: bool) -> None:
        self._fn, self._catches = fn, catches

    def __call__(self, value: Any) -> Any:
        try:
            return self._fn(value)
        except NEVER_SKIPPED:
            raise
        except Exception as error:
            if not self._catches:
                raise
            return Failure(str(error) if isinstance(error, SharmillError) else f"{type(error).__name__}: {error}")

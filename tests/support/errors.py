"""Assertions about errors by their codes, so that sentences may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sharmill.errors import SharmillError


@contextmanager
def raises(kind: type[SharmillError], code: str, *names: str) -> Iterator[pytest.ExceptionInfo[SharmillError]]:
    """Expect an error of this class and code whose message names each of ``names``: a file, a key, a number."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
    for name in names:
        assert name in str(caught.value)

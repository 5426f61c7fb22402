"""Fixtures for the training example on a small dataset."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.example import Example, make_example, make_speech


@pytest.fixture(scope="session")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the dataset, which tests must not change."""
    return make_speech(tmp_path_factory.mktemp("speech"))


@pytest.fixture
def example(speech: Path, tmp_path: Path) -> Callable[..., Example]:
    """Return ``example(name, **changes)``, which makes an example in its own folder with changed configuration keys."""
    return partial(make_example, tmp_path, dataset=speech)

"""The training example on a small dataset."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.example import Example, make_example, make_speech


@pytest.fixture(scope="session")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset; not to be changed."""
    return make_speech(tmp_path_factory.mktemp("speech"))


@pytest.fixture
def example(speech: Path, tmp_path: Path) -> Callable[..., Example]:
    """``example(name, **changes)``: the example with a folder of its own; changes are keys of its configuration."""
    return partial(make_example, tmp_path, dataset=speech)

"""The codec that the codes of a dataset were made with, loaded again: to check them, or to decode them.

A dataset is data of others: what it names is not loaded because it says so. The codecs that sharmill brings are an
exception, for any other the user names the model. Either must be the one that the dataset records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sharmill.errors import ConfigError
from sharmill.models import find_codec, load_codec

if TYPE_CHECKING:
    from sharmill.config import Precision
    from sharmill.models.protocols import Codec
    from sharmill.shar.index import CodecRecord

# What dataset.json says of a codec, and a codec of itself.
_FACTS: Final = ("sampling_rate", "samples_per_frame", "num_codebooks", "codebook_size")


def recorded_model(record: CodecRecord, given: str | None) -> str:
    """Return the name of the model to load for a codec of a dataset.

    Args:
        given: the model that the user names for it, or None.

    Raises:
        ConfigError: the user names none, and the dataset one that is not sharmill's own, or that was removed.
    """
    if given is not None:
        return given
    if record.model == "untrained":
        raise ConfigError(
            f"the codes called {record.name!r} are of an untrained codec, which was removed: encode with builtin",
            code="bad_codec",
        )
    if record.model != "builtin":
        raise ConfigError(
            f"the dataset names the model {record.model}, which is not loaded because a dataset says so "
            f"{_hint(record)}",
            code="untrusted_model",
        )
    return record.model


def check_recorded_model(record: CodecRecord, given: str | None, options: Mapping[str, Any]) -> None:
    """Raise ConfigError where it can be seen, without loading it, that a codec of a dataset cannot be loaded."""
    name = recorded_model(record, given)
    with _hinting(record):
        find_codec(name, **options).resolve()


def load_recorded_codec(
    record: CodecRecord, given: str | None, options: Mapping[str, Any] | None = None, precision: Precision = "fp32"
) -> Codec:
    """Load the codec that made the codes of a dataset.

    Args:
        given: the model that the user names for it; None for one of sharmill's own.
        options: of its family.
        precision: arithmetic of its encoding.

    Raises:
        ConfigError: it cannot be loaded, or is another model than the one that the dataset records.
    """
    name = recorded_model(record, given)
    with _hinting(record):
        codec = load_codec(name, precision=precision, **(options or {}))
    if codec.checksum != record.checksum:
        raise ConfigError(
            f"{name} has the checksum {codec.checksum}, but the codes called {record.name!r} are of a model with "
            f"{record.checksum}: name that one with --codec-model {record.name}=MODEL",
            code="bad_codec",
        )
    for fact in _FACTS:
        if (made := getattr(codec, fact)) != getattr(record, fact):
            raise ConfigError(
                f"dataset.json says {fact} {getattr(record, fact)} of the codec {record.name!r}, but the model has "
                f"{made}: dataset.json is damaged",
                code="bad_codec",
            )
    return codec


@contextmanager
def _hinting(record: CodecRecord) -> Iterator[None]:
    """Add to an error about a model what to do: a dataset names local models without their folders."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error} {_hint(record)}", code=error.code) from error


def _hint(record: CodecRecord) -> str:
    return f"(say where it is with --codec-model {record.name}=MODEL)"

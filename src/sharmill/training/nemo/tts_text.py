"""Text for hybrid ASR-TTS as a type of NeMo's ``input_cfg``: what is to be recognised, and what is to be spoken.

NeMo's own ``TextToTextDataset`` reads such manifests for its ASRWithTTSModel; this makes them part of a mixture, each
line checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from lhotse import CutSet
from nemo.collections.common.data.lhotse.cutset import data_type_parser
from nemo.collections.common.data.lhotse.nemo_adapters import expand_sharded_filepaths
from nemo.collections.common.data.lhotse.text_adapters import TextExample
from omegaconf import DictConfig

from sharmill.errors import ConfigError
from sharmill.sources.lines import iterate_checked

_SPOKEN: Final = ("tts_text_normalized", "tts_text")


@data_type_parser("tts_text")
def read_tts_text(entry: DictConfig) -> tuple[CutSet, bool]:
    """Return a TextExample of each line, with ``tts_text`` and ``tts_text_normalized`` as attributes where it has them.

    Raises:
        ConfigError: while iterating: a line is no such record; the message names it.
    """
    examples = CutSet(_TtsTexts(expand_sharded_filepaths(entry.manifest_filepath), entry.get("language")))
    return (examples if entry.get("force_finite", False) else examples.repeat(preserve_id=True)), True


class _TtsTexts:
    """The examples of manifests, once through."""

    def __init__(self, paths: list[str], language: str | None) -> None:
        self._paths, self._language = paths, language

    def __iter__(self) -> Iterator[TextExample]:
        for path in self._paths:
            for number, (_, line) in enumerate(iterate_checked(Path(path), "manifest_filepath"), 1):
                try:
                    record = _checked(line)
                except ValueError as error:
                    raise ConfigError(f"{path}, record {number}: {error}", code="bad_manifest") from error
                custom = {key: record[key] for key in _SPOKEN if record.get(key) is not None}
                yield TextExample(record["text"], language=record.get("lang", self._language), custom=custom)


def _checked(line: bytes) -> dict[str, Any]:
    """Return the record of a line; raise ValueError that says what is wrong with it."""
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    if record.get("audio_filepath") is not None:
        raise ValueError("it has audio_filepath, and text alone is spoken by a TTS model: use type nemo")
    for key in ("text", "lang", *_SPOKEN):
        value = record.get(key)
        if value is not None and not (isinstance(value, str) and value.strip()):
            raise ValueError(f"{key} is {value!r}, not a text")
    if record.get("text") is None:
        raise ValueError("it has no text, which the ASR model is to recognise")
    if all(record.get(key) is None for key in _SPOKEN):
        raise ValueError("it has neither tts_text_normalized nor tts_text, which the TTS model is to speak")
    return record

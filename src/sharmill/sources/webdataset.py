"""WebDataset: tar archives in which the audio, a JSON file and a text of one name are a sample."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO, ClassVar, Final

import msgspec

from sharmill.sources import Piece, RawRecord
from sharmill.sources.files import check_encoding
from sharmill.sources.tars import Archive, SampleReader, TarSample, TarSource, read_object, read_text

# As webdataset has it: the key goes up to the first dot of the last part; hidden files belong to no sample.
_NAME: Final = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
_EMPTY: Final = (b"null", b'""')


@dataclass(frozen=True, kw_only=True)
class WebDatasetSource(TarSource):
    """Records of WebDataset archives: samples of audio with a JSON file, a text or both of the same name."""

    file_keys: ClassVar[tuple[str, ...]] = ("tars",)
    type: str = "webdataset"
    tars: str | list[str]
    """Path of the archive, or a list of them, such as ``speech-{000000..000063}.tar``."""
    audio_suffixes: list[str] = field(
        default_factory=lambda: ["flac", "wav", "mp3", "ogg", "opus", "m4a", "aac", "wma", "webm", "aiff", "sph", "au"]
    )
    """Ends of the names of audio behind the first dot: ``flac``, or ``mic1.flac`` where a sample has several."""
    columns: dict[str, str] = field(default_factory=dict)
    """Keys of records and the keys of the JSON files that they come from, ``{text: sentence}``. Others keep their
    names."""
    encoding: str = "utf-8"
    """Encoding of the texts, such as ``latin-1``. A text that cannot be decoded is rejected as ``malformed``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.audio_suffixes or not all(self.audio_suffixes):
            raise ValueError("audio_suffixes must not be empty")
        check_encoding(self.encoding)

    def pieces(self, records_per_piece: int) -> Iterator[Piece]:
        """Yield runs of samples; the headers of all archives are walked to count them."""
        return self._samples.pieces(records_per_piece)

    def read(self, piece: dict[str, Any]) -> Iterator[RawRecord]:
        """Yield the samples of a piece."""
        return self._samples.read(piece)

    @cached_property
    def _samples(self) -> SampleReader:
        archives = [Archive(file, name, name) for file in self.archives for name in [self.container(file)]]
        suffixes = [suffix.lstrip(".").lower() for suffix in self.audio_suffixes]
        return SampleReader(archives, _NAME, self._record_of, suffixes)

    def _record_of(self, stream: BinaryIO, sample: TarSample) -> dict[str, msgspec.Raw]:
        """Return the record of a sample: its key, the keys of its JSON file, and its text where that has none."""
        parts = dict(sample.members)
        values = read_object(stream, parts["json"]) if "json" in parts else {}
        mapped = {*self.columns, *self.columns.values()}
        record = {"key": msgspec.Raw(msgspec.json.encode(sample.key))}
        record |= {key: value for key, value in values.items() if key not in mapped and key != "audio_filepath"}
        record |= {key: values[column] for key, column in self.columns.items() if column in values}
        if "txt" in parts and ("text" not in record or bytes(record["text"]) in _EMPTY):
            record["text"] = read_text(stream, parts["txt"], self.encoding)
        return record

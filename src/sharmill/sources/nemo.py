"""NeMo manifests: JSON lines in one file or in numbered shards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sharmill.sources import ColumnSource, LineSource, RawRecord
from sharmill.sources.files import check_json_lines, decode_object, encode_record


@dataclass(frozen=True, kw_only=True)
class NemoSource(LineSource, ColumnSource):
    """Records of NeMo manifests: JSON lines with one utterance per line."""

    file_keys: ClassVar[tuple[str, ...]] = ("manifest",)
    type: str = "nemo"
    manifest: str | list[str]
    """Path of the manifest, or a list of paths. A path may name shards, ``manifest__OP_0..63_CL_.json`` or
    ``manifest_{0..63}.json``, also with ``()``, ``[]`` or ``<>``, or contain the wildcards ``*`` and ``?``."""

    def check(self) -> None:
        """Raise ConfigError if a file cannot be a manifest.

        Such a file is missing, empty, binary, a zip, one JSON array, a table, truncated, or in another encoding.
        """
        for file in self.files:
            check_json_lines(
                file,
                "manifest",
                "write each record on its own line, as a JSON object with audio_filepath, duration, speaker and text",
            )

    def record(self, entry: Any) -> RawRecord:
        """Return the record of a line, with its keys renamed as in ``columns``."""
        if not self.columns or not isinstance(entry, bytes):
            return entry
        return encode_record(self.name_keys(decode_object(entry, "the line is not a JSON object")), entry)


def skip_mark(record: Mapping[str, Any]) -> Any:
    """Return ``_skipme`` of a record or of its ``custom``, where NeMo looks for it; None if it is not set."""
    custom = record.get("custom")
    return record.get("_skipme") or (custom.get("_skipme") if isinstance(custom, dict) else None)

"""One open shard: its cuts, in any order, each with its item of the chosen fields attached to it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import msgspec
from lhotse import MonoCut, Recording
from lhotse.array import TemporalArray
from lhotse.cut import Cut

from sharmill.errors import DamagedShard
from sharmill.shar.cut_lines import NOT_JSON, read_lines
from sharmill.shar.items import NO_DATA, ItemTable
from sharmill.shar.layout import (
    CONTEXT_AUDIO,
    CONTEXT_CODES,
    CONTEXT_UNALIGNED,
    CUTS,
    RECORDING,
    TARGET_AUDIO,
    TARGET_CODES,
)
from sharmill.shar.reading.cuts import MALFORMED, as_array, is_method_of_cuts, read_cut, read_item, set_field, with_id
from sharmill.shar.reading.random_access import IndexedFile, IndexedItems
from sharmill.shar.reading.safety import find_forbidden
from sharmill.shar.reading.shard_source import ShardFiles

POSITION: Final = "shar_position"

# Of starts that lhotse has rounded.
_START_TOLERANCE: Final = 1e-3

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class OpenShard:
    """A shard whose files are open, with all that can be seen without decoding items looked at already.

    Args:
        files: which to open.
        foreign: not of a dataset by sharmill: its time lines may have to be put right.

    Raises:
        DamagedShard: when it is made, where a file is not as it should be.
    """

    def __init__(self, files: ShardFiles, *, foreign: bool) -> None:
        self.index = files.index
        self._foreign = foreign
        sidecars = files.sidecars
        self._lines = _open_lines(files.cuts, sidecars.get(CUTS)) if files.lines is None else files.lines
        if files.count not in (None, len(self._lines)):
            raise self.damage(f"there are {len(self._lines)} {CUTS} instead of {files.count}")
        self._columns: dict[str, _TarColumn | _LinesColumn] = {}
        column: _TarColumn | _LinesColumn
        try:
            for name, path in files.fields.items():
                if not foreign and is_method_of_cuts(name):
                    raise self.damage(f"the field {name} is called like a method of cuts")
                if path.suffix == ".tar":
                    column = _TarColumn(IndexedItems(path, *sidecars[name]) if sidecars else ItemTable(path))
                else:
                    column = _LinesColumn(path, name, _open_lines(path, sidecars.get(name)))
                self._columns[name] = column
                if len(column) != len(self._lines):
                    raise self.damage(f"{name} ({path}) has {len(column)} items for {len(self._lines)} {CUTS}")
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._lines)

    def close(self) -> None:
        for lines in (self._lines, *self._columns.values()):
            if not isinstance(lines, list):
                lines.close()

    def read(self, number: int, position: tuple[int, ...]) -> Cut:
        """Read a cut with the fields' items for it as its attributes; a placeholder is not attached.

        Args:
            number: of the cut in the shard.
            position: epoch, group, draw, block and item: the place in the order of all epochs, noted in the cut.

        Raises:
            DamagedShard: anything is not as it should be.
        """
        try:
            cut = read_cut(_decode_json(self._lines[number]))
            cut_id = cut.id
        except NOT_JSON as error:
            raise self.damage(f"cut {number} is not JSON: {error}") from error
        except MALFORMED as error:
            raise self.damage(f"cut {number} is not a cut that can be read: {error!r}") from error
        items = {name: column.read(number, cut_id) for name, column in self._columns.items()}
        if type(cut) is MonoCut:
            self._attach(cut, items, position)
        elif self._foreign:
            for name, item in items.items():
                if item is not None:
                    setattr(cut, name, item)
            setattr(cut, POSITION, position)
        else:
            raise self.damage(f"{cut_id!r} is not a MonoCut")
        return cut

    def _attach(self, cut: MonoCut, items: dict[str, Any], position: tuple[int, ...]) -> None:
        if cut.custom is None:
            set_field(cut, "custom", {})
        custom = cut.custom
        custom[POSITION] = position
        for name, item in items.items():
            if item is not None:
                set_field(cut, name, item)
        if self._foreign:
            _align(cut, custom)
        target = items.get(TARGET_AUDIO)
        # Others' Shars for speech-to-speech have a recording of their own beside it: what is answered.
        if target is not None and items.get(RECORDING) is None:
            set_field(cut, RECORDING, with_id(target, cut.recording.id) if cut.recording is not None else target)

    def damage(self, what: str) -> DamagedShard:
        return DamagedShard(f"shard {self.index}: {what}")


class _TarColumn:
    """A field in a tar archive."""

    def __init__(self, table: ItemTable) -> None:
        self._table = table
        self.close = table.close

    def __len__(self) -> int:
        return len(self._table)

    def read(self, number: int, cut_id: str) -> Any:
        table = self._table
        found, extension = table.pair(number)
        if found != cut_id:
            raise table.damage(f"member '{found}.{extension}' is where one for {cut_id!r} should be")
        if extension == NO_DATA:
            return None
        try:
            return read_item(_decode_json(table.metadata(number)), extension, table.data(number))
        except NOT_JSON as error:
            raise table.damage(f"the metadata of '{found}.{extension}' is not JSON: {error}") from error
        except MALFORMED as error:
            raise table.damage(f"the metadata of '{found}.{extension}' cannot be read: {error!r}") from error
        except DamagedShard as error:
            raise table.damage(f"member '{found}.{extension}': {error}") from error


class _LinesColumn:
    """A field in lhotse's JSON lines: an id, and any value."""

    def __init__(self, path: Path, name: str, lines: IndexedFile | list[bytes]) -> None:
        self._path = path
        self._name = name
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def close(self) -> None:
        """Close the file, if it is open."""
        if isinstance(self._lines, IndexedFile):
            self._lines.close()

    def read(self, number: int, cut_id: str) -> Any:
        try:
            values = _decode_json(self._lines[number])
        except NOT_JSON as error:
            raise DamagedShard(f"{self._path}: item {number} is not JSON: {error}") from error
        if values.get("cut_id") != cut_id:
            raise DamagedShard(f"{self._path}: item {number} is that of {values.get('cut_id')!r}, not of {cut_id!r}")
        value = values.get(self._name)
        if found := find_forbidden(value):
            raise DamagedShard(f"{self._path}: item {number} has {found}, which is not loaded")
        return value


def _open_lines(path: Path, sidecars: list[Path] | None) -> IndexedFile | list[bytes]:
    """Return the lines of a file, or open its uncompressed copy by the index beside it."""
    if not sidecars:
        return read_lines(path)
    *plain, index = sidecars
    return IndexedFile(plain[0] if plain else path, index)


def _align(cut: MonoCut, custom: dict[str, Any]) -> None:
    """Undo what the published scripts leave: the offset of the target in the cut, and contexts on its time line.

    Their audio and codes are of the segments alone. lhotse, which takes them for as long as the whole recording, would
    look for them at the offset.
    """
    if isinstance(custom.get(CONTEXT_AUDIO), Recording):
        custom[CONTEXT_UNALIGNED] = True
    context_codes = custom.get(CONTEXT_CODES)
    if isinstance(context_codes, TemporalArray):
        custom[CONTEXT_CODES] = as_array(context_codes)
    target = custom.get(TARGET_AUDIO)
    if isinstance(target, Recording) and _lasts(target.duration, cut.duration):
        for supervision in cut.supervisions:
            # That of the cut itself, where lhotse counts from the beginning of the cut.
            if cut.start > 0 and math.isclose(supervision.start, cut.start, abs_tol=_START_TOLERANCE):
                supervision.start = 0.0
        set_field(cut, "start", 0.0)
    codes = custom.get(TARGET_CODES)
    if isinstance(codes, TemporalArray) and _lasts(codes.duration, cut.duration, 2 * codes.frame_shift):
        codes.start = cut.start
        # The scripts round the frames of a second, so that the last frame of a slice would be left out: the frames
        # there are last as long as the cut.
        codes.frame_shift = min(codes.frame_shift, cut.duration / codes.shape[-1])


def _lasts(found: float, expected: float, tolerance: float = 0.025) -> bool:
    return math.isclose(found, expected, rel_tol=0.0, abs_tol=tolerance)


def _decode_json(line: bytes) -> dict[str, Any]:
    try:
        return _decode(line)
    except msgspec.DecodeError as error:
        # Python writes NaN and Infinity, which are no JSON, and lhotse with it.
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            raise error from None
        if not isinstance(values, dict):
            raise
        return values

"""A shard with open files, which reads each cut with its items, and corrects other tools' time lines."""

import json
import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from lhotse import MonoCut, Recording
from lhotse.array import TemporalArray
from lhotse.cut import Cut

from sharmill.comparisons import Comparison
from sharmill.errors import DamagedShard, RejectRecord
from sharmill.files.location import local
from sharmill.files.stored import NOT_JSON
from sharmill.shar.fields import (
    CONTEXT_AUDIO,
    CONTEXT_CODES,
    CONTEXT_UNALIGNED,
    CUTS,
    DURATION,
    POSITION,
    RECORDING,
    TARGET_AUDIO,
    TARGET_CODES,
)
from sharmill.shar.items import NO_DATA, ItemTable, ValueTable, open_items
from sharmill.shar.offsets import open_indexed_lines
from sharmill.shar.reading.cuts import MALFORMED, as_array, is_method_of_cuts, read_cut, read_item, set_field, with_id
from sharmill.shar.reading.safety import find_forbidden
from sharmill.shar.reading.shard_files import ShardFiles

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class OpenShard:
    """A shard with open files. Opening it checks everything that can be checked without decoding items.

    Args:
        files: the files to open.
        foreign: True if another tool wrote the dataset, so that time lines may have to be corrected.
        needed: fields of which each cut must have an item; cuts without one are left out.
        conditions: conditions that each cut must meet; all other cuts are left out.
        unattached: fields that only conditions need; their items are not attached to cuts.

    Raises:
        DamagedShard: on construction, if a file is damaged.
    """

    def __init__(
        self,
        files: ShardFiles,
        *,
        foreign: bool,
        needed: Sequence[str] = (),
        conditions: Sequence[Comparison] = (),
        unattached: Collection[str] = (),
    ) -> None:
        self.index = files.index
        self._foreign = foreign
        self._needed = needed
        self._conditions = conditions
        self._unattached = unattached
        try:
            # Hold the local copies of remote files, so that they are not evicted while the shard is open.
            self._held = [local(location) for location in files.locations]
        except RejectRecord as reject:
            raise self.damage(reject.detail) from reject
        self._lines = (
            open_indexed_lines(files.cuts, files.sidecars.get(CUTS, ())) if files.lines is None else files.lines
        )
        if files.count not in (None, len(self._lines)):
            raise self.damage(f"there are {len(self._lines)} {CUTS} instead of {files.count}")
        self._tables: dict[str, ItemTable | ValueTable] = {}
        for name, path in files.fields.items():
            if not foreign and is_method_of_cuts(name):
                raise self.damage(f"the field {name} has the name of a method of cuts")
            table = self._tables[name] = open_items(path, sidecars=files.sidecars.get(name, ()))
            if len(table) != len(self._lines):
                raise self.damage(f"{name} ({path}) has {len(table)} items for {len(self._lines)} {CUTS}")

    def read(self, number: int, position: tuple[int, ...]) -> Cut | None:
        """Read a cut, and attach its items as attributes; placeholders are not attached.

        Return None for a cut that has a placeholder in a needed field, or does not meet the conditions.

        Args:
            number: the index of the cut in the shard.
            position: the cut's position in the order of all epochs (epoch, group, draw, block and item), which is
                stored in the cut.

        Raises:
            DamagedShard: the cut or one of its items is damaged.
        """
        try:
            cut = read_cut(_decode_json(self._lines[number]))
            cut_id = cut.id
        except (*NOT_JSON, *MALFORMED) as error:
            raise self.damage(f"cut {number} is not a readable cut: {error!r}") from error
        # Check the conditions first, so that no items are read for a cut that does not meet them.
        if any(one.fault(self._compared(one.key, number, cut)) for one in self._conditions):
            return None
        items = {
            name: _read_item(table, number, cut_id)
            if isinstance(table, ItemTable)
            else _read_value(table, name, number, cut_id)
            for name, table in self._tables.items()
            if name not in self._unattached
        }
        if any(items[name] is None for name in self._needed):
            return None
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

    def _compared(self, name: str, number: int, cut: Cut) -> Any:
        """Return the value of a cut that a condition compares; None if the cut has no value."""
        if name == DURATION:
            return cut.duration
        table = self._tables[name]
        if isinstance(table, ItemTable):
            raise table.damage(f"where compares {name}, which holds no values")
        return _read_value(table, name, number, cut.id)

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
        # In another tool's speech-to-speech Shar, ``recording`` is other audio (the input speech), so keep it.
        if target is not None and items.get(RECORDING) is None:
            set_field(cut, RECORDING, with_id(target, cut.recording.id) if cut.recording is not None else target)

    def damage(self, what: str) -> DamagedShard:
        return DamagedShard(f"shard {self.index}: {what}")


def _read_item(table: ItemTable, number: int, cut_id: str) -> Any:
    """Return a cut's item of a tar field as a lhotse object; None for a placeholder."""
    found, extension, data, metadata = table.raw(number)
    if found != cut_id:
        raise table.damage(f"found member '{found}.{extension}' where one for {cut_id!r} should be")
    if extension == NO_DATA:
        return None
    try:
        return read_item(_decode_json(metadata), extension, data)
    except (*NOT_JSON, *MALFORMED) as error:
        raise table.damage(f"the metadata of '{found}.{extension}' cannot be read: {error!r}") from error
    except DamagedShard as error:
        raise table.damage(f"member '{found}.{extension}': {error}") from error


def _read_value(table: ValueTable, name: str, number: int, cut_id: str) -> Any:
    """Return a cut's value in a field of values; None if the cut has no value."""
    try:
        values = _decode_json(table.line(number))
    except NOT_JSON as error:
        raise table.damage(f"item {number} is not JSON: {error}") from error
    if values.get("cut_id") != cut_id:
        raise table.damage(f"item {number} belongs to {values.get('cut_id')!r}, not to {cut_id!r}")
    value = values.get(name)
    if found := find_forbidden(value):
        raise table.damage(f"item {number} has {found}, which is not loaded")
    return value


def _align(cut: MonoCut, custom: dict[str, Any]) -> None:
    """Correct the time lines of target and context in shards of the published scripts.

    The scripts store only the audio and codes of a segment, but keep its offset in the cut. lhotse assumes that audio
    and codes are as long as the whole recording, and would read them at that offset.
    """
    if isinstance(custom.get(CONTEXT_AUDIO), Recording):
        custom[CONTEXT_UNALIGNED] = True
    context_codes = custom.get(CONTEXT_CODES)
    if isinstance(context_codes, TemporalArray):
        custom[CONTEXT_CODES] = as_array(context_codes)
    target = custom.get(TARGET_AUDIO)
    if isinstance(target, Recording) and _lasts(target.duration, cut.duration):
        for supervision in cut.supervisions:
            # lhotse counts alignment times from the start of the recording, which is now the start of the cut.
            for kind, items in (supervision.alignment or {}).items():
                supervision.alignment[kind] = [item.with_offset(-cut.start) for item in items]
            # The stored time is the (rounded) start of the cut, but lhotse counts the times of supervisions from the
            # start of the cut.
            if cut.start > 0 and math.isclose(supervision.start, cut.start, abs_tol=1e-3):
                supervision.start = 0.0
        set_field(cut, "start", 0.0)
    codes = custom.get(TARGET_CODES)
    if isinstance(codes, TemporalArray) and _lasts(codes.duration, cut.duration, 2 * codes.frame_shift):
        codes.start = cut.start
        # The scripts round the number of frames per second, so that a slice would lose its last frame. Stretch the
        # stored frames over the length of the cut.
        codes.frame_shift = min(codes.frame_shift, cut.duration / codes.shape[-1])


def _lasts(found: float, expected: float, tolerance: float = 0.025) -> bool:
    return math.isclose(found, expected, rel_tol=0.0, abs_tol=tolerance)


def _decode_json(line: bytes) -> dict[str, Any]:
    try:
        return _decode(line)
    except msgspec.DecodeError as error:
        # Python and lhotse write NaN and Infinity, which are not valid JSON.
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            raise error from None
        if not isinstance(values, dict):
            raise
        return values

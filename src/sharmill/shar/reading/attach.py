"""The items of a shard's fields, attached to the cut that they belong to."""

from __future__ import annotations

import math
from typing import Any, Final

from lhotse import MonoCut, Recording
from lhotse.array import TemporalArray
from lhotse.audio import AudioLoadingError, DurationMismatchError
from lhotse.cut import Cut

from sharmill.shar.layout import CONTEXT_AUDIO, CONTEXT_CODES, CONTEXT_UNALIGNED, TARGET_AUDIO, TARGET_CODES
from sharmill.shar.reading.cuts import as_array, with_id
from sharmill.shar.reading.shard import OpenShard

POSITION: Final = "shar_position"

_CUT_FIELDS = frozenset(MonoCut.__dataclass_fields__)
_set = object.__setattr__


def attach(cut: Cut, items: dict[str, Any], position: tuple[int, ...], *, foreign: bool) -> None:
    """Make items attributes of a cut, and note its position.

    Args:
        cut: is changed.
        items: by attribute; None is a placeholder, which is not attached.
        position: epoch, group, draw, block and item: the place in the order of all epochs.
        foreign: not of a dataset by sharmill: its time lines may have to be put right.
    """
    if type(cut) is not MonoCut:
        for name, item in items.items():
            if item is not None:
                setattr(cut, name, item)
        setattr(cut, POSITION, position)
        return
    custom = cut.custom
    if custom is None:
        custom = {}
        _set(cut, "custom", custom)
    custom[POSITION] = position
    for name, item in items.items():
        if item is None:
            continue
        if name in _CUT_FIELDS:
            _set(cut, name, item)
        else:
            custom[name] = item
    if foreign:
        _align(cut, custom)
    target = items.get(TARGET_AUDIO)
    # Others' Shars for speech-to-speech have a recording of their own beside it: what is answered.
    if target is not None and items.get("recording") is None:
        _set(cut, "recording", with_id(target, cut.recording.id) if cut.recording is not None else target)


def decode_audio(cut: Cut, shard: OpenShard) -> Cut:
    """Decode the audio that a cut holds in memory, and return the cut.

    Raises:
        DamagedShard: it cannot be decoded.
    """
    from sharmill.shar.reading.decoding import decode_recording

    decoded: dict[int, Recording] = {}
    for name, recording in list(cut.iter_data()) if hasattr(cut, "iter_data") else ():
        if not isinstance(recording, Recording) or not recording.is_in_memory:
            continue
        source = id(recording.sources[0])
        if source not in decoded:
            try:
                decoded[source] = decode_recording(recording)
            except (AudioLoadingError, DurationMismatchError, RuntimeError, ValueError, OSError) as error:
                reason = str(error).strip().splitlines()
                raise shard.damage(
                    f"{name} of {cut.id!r} cannot be decoded: {reason[0] if reason else error!r}"
                ) from error
        other = with_id(decoded[source], recording.id)
        if name in _CUT_FIELDS:
            _set(cut, name, other)
        else:
            cut.custom[name] = other
    return cut


def positions_of(cut: Cut) -> list[tuple[int, ...]]:
    """Return the positions of the cuts that a cut is made of: several where cuts were mixed or joined."""
    tracks = getattr(cut, "tracks", None)
    if tracks is not None:
        return [position for track in tracks for position in positions_of(track.cut)]
    position = (getattr(cut, "custom", None) or {}).get(POSITION)
    return [] if position is None else [tuple(position)]


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
        _set(cut, "start", 0.0)
    codes = custom.get(TARGET_CODES)
    if isinstance(codes, TemporalArray) and _lasts(codes.duration, cut.duration, 2 * codes.frame_shift):
        codes.start = cut.start


def _lasts(found: float, expected: float, tolerance: float = 0.025) -> bool:
    return math.isclose(found, expected, rel_tol=0.0, abs_tol=tolerance)

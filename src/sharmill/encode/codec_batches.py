"""Codes of stored audio: items decoded ahead of use, put into batches of like length and through a codec."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Final

import numpy as np

from sharmill.audio.files import decode_bytes
from sharmill.audio.resample import resample
from sharmill.engine.delays import spent_on
from sharmill.errors import RejectRecord, UnitFailed
from sharmill.models.arithmetic import fit_batch_seconds
from sharmill.models.measure import require_room
from sharmill.models.memory import ELSEWHERE, MemoryGuard
from sharmill.models.pieces import PIECE_SECONDS, Pieces
from sharmill.models.protocols import Codec
from sharmill.models.shapes import Batch, Padding, fill_batch, plan_batches
from sharmill.prefetch import prefetch
from sharmill.shar.arrays import codes_dtype, num_frames
from sharmill.shar.items import Item

_MOST_NAMED: Final = 3
_BATCHES_AHEAD: Final = 2
# What a user can do with segments that no batch size helps.
TOO_LONG_ADVICE: Final = f"all other units go on, and {ELSEWHERE}"


@dataclass(frozen=True)
class BegunItems:
    """Items whose decoding has begun, in batches; ``loaded`` yields their samples in the order of the batches."""

    items: Sequence[Item]
    batches: list[Batch]
    loaded: Iterator[np.ndarray]


class CodecBatches:
    """A codec that encodes stored audio in batches.

    ``most_seconds`` is the longest segment that the memory of a GPU can hold; ``TOO_LONG_ADVICE`` says what to do with
    longer ones.

    Args:
        batch_seconds: audio of a batch, counting padding.
        device: ``cpu``, or ``cuda``, for which batches may have other sizes and come from pinned memory.
        canonical: batches of few shapes, so that codes do not depend on neighbours; see ``plan_batches``.
        pieces: how long segments are cut; None to encode them whole.
        threads: how many may read and resample audio beside the codec.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        batch_seconds: float,
        device: str,
        canonical: bool = False,
        pieces: Pieces | None = None,
        threads: int,
    ) -> None:
        room = require_room(codec, device, batch_seconds, "encode.batch_seconds")
        self.most_seconds = room if pieces is None else math.inf
        self.codec = codec
        self._pieces = pieces
        self._pinned = device == "cuda"
        self._batch_seconds = batch_seconds
        self._max_frames = fit_batch_seconds(batch_seconds, device) * codec.sampling_rate / codec.samples_per_frame
        self._plan = partial(plan_batches, batch_seconds=batch_seconds, codec=codec, device=device, canonical=canonical)
        self._ahead = _BATCHES_AHEAD * batch_seconds * codec.sampling_rate / codec.samples_per_frame
        self._threads = threads
        self._guard = MemoryGuard("the codec", "encode.batch_seconds")

    def begin(self, items: Sequence[Item]) -> BegunItems:
        """Begin to decode items, and return when the first is decoded; some batches of audio are held.

        Raises:
            UnitFailed: the first item cannot be decoded, or is not what its metadata say.
        """
        batches = self._plan_batches([self.num_frames(item) for item in items])
        loaded = prefetch(
            lambda item: _load(item, self.codec.sampling_rate),
            [items[index] for batch in batches for index in batch.items],
            threads=self._threads,
            ahead=self._ahead,
            weigh=self.num_frames,
        )
        return BegunItems(items, batches, chain(list(islice(loaded, 1)), loaded))

    def finish(
        self,
        begun: BegunItems,
        advance: Callable[[int], None],
        padding: Padding,
        when_all_begun: Callable[[], None],
    ) -> list[np.ndarray]:
        """Return the codes (codebooks, frames) of each item, in the order of the items.

        ``advance`` is called with the number of frames of each batch, what was padded is added to ``padding``, and
        ``when_all_begun`` is called at each of the last batches, which are being decoded by then.

        Raises:
            UnitFailed: an item cannot be decoded, is not what its metadata say, or does not fit in memory.
            FatalError: nothing has fitted in memory yet.
        """
        codec, items = self.codec, begun.items
        frames = [self.num_frames(item) for item in items]
        dtype = codes_dtype(codec.codebook_size)
        results: list[np.ndarray] = [np.empty(0)] * len(items)
        for number, batch in enumerate(begun.batches, start=1):
            if number + _BATCHES_AHEAD > len(begun.batches):
                when_all_begun()
            with spent_on("decoding"):
                samples = [next(begun.loaded) for _ in batch.items]
            try:
                with spent_on("model"):
                    codes = self._encode(batch, samples, padding)
            except RejectRecord as reject:
                # The dataset has its cut already, and every cut has codes: it cannot be left out any more.
                why = f"the segment {items[batch.items[0]].cut_id}: {reject.detail}; {TOO_LONG_ADVICE}"
                raise UnitFailed(why, code="out_of_memory") from reject
            except UnitFailed as error:
                named = ", ".join(items[index].cut_id for index in batch.items[:_MOST_NAMED])
                more = f" and {len(batch.items) - _MOST_NAMED} more" if len(batch.items) > _MOST_NAMED else ""
                raise UnitFailed(f"{error} (segments {named}{more})", code=error.code) from error
            # Rows beyond the items are silence.
            for index, row in zip(batch.items, codes, strict=False):
                results[index] = np.ascontiguousarray(row[:, : frames[index]].astype(dtype))
            advance(sum(frames[index] for index in batch.items))
        self._guard.unit_done()
        return results

    def _plan_batches(self, frames: Sequence[int]) -> list[Batch]:
        """Return the batches of items with these numbers of frames; one that is cut is a batch of its own."""
        cut = [index for index, number in enumerate(frames) if self._is_cut(number)]
        whole = [index for index, number in enumerate(frames) if not self._is_cut(number)]
        planned = self._plan([frames[index] for index in whole])
        return [
            *(Batch([index], frames[index], 1) for index in cut),
            *(dataclasses.replace(batch, items=[whole[index] for index in batch.items]) for batch in planned),
        ]

    def _is_cut(self, num_frames: int) -> bool:
        return self._pieces is not None and num_frames > self._pieces.length

    def _encode(self, batch: Batch, samples: Sequence[np.ndarray], padding: Padding) -> np.ndarray:
        """Return the codes (rows, codebooks, frames) of a batch; raise RejectRecord for one segment that is too long.

        Raises:
            UnitFailed, FatalError: as ``MemoryGuard.batch``.
        """
        codec = self.codec
        if self._pieces is not None and self._is_cut(batch.num_frames):
            rows = self._pieces.rows(self._max_frames)
            with self._guard.batch(rows * PIECE_SECONDS, rows, is_least=rows == 1):
                codes = self._pieces.encode(codec, samples[0], self._max_frames, padding, pinned=self._pinned)
                return codes[None]
        audio, num_samples = fill_batch(batch, samples, codec.samples_per_frame, pinned=self._pinned)
        padding.add(samples, audio, codec.sampling_rate)
        seconds = audio.numel() / codec.sampling_rate
        is_long = len(batch.items) == 1 and seconds > self._batch_seconds
        with self._guard.batch(seconds, batch.num_rows, is_long=is_long):
            return codec.encode(audio, num_samples).numpy()

    def num_frames(self, item: Item) -> int:
        """Return the number of frames that the codes of an item have."""
        assert item.metadata is not None
        return num_frames(item.metadata, self.codec)


def _load(item: Item, sampling_rate: int) -> np.ndarray:
    assert item.data is not None
    assert item.metadata is not None
    try:
        samples, rate = decode_bytes(item.data)
    except RejectRecord as error:
        raise UnitFailed(
            f"the stored audio of {item.cut_id} cannot be decoded: {error}", code="damaged_shard"
        ) from error
    promised = (item.metadata["num_samples"], item.metadata["sampling_rate"])
    if (len(samples), rate) != promised:
        raise UnitFailed(
            f"the stored audio of {item.cut_id} has {len(samples)} samples at {rate} Hz, not {promised}",
            code="damaged_shard",
        )
    return resample(samples, rate, sampling_rate)

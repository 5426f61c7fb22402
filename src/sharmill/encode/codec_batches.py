"""Codes of stored audio: items decoded ahead of use, put into batches of like length and through a codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sharmill.audio.files import decode
from sharmill.audio.resample import resample
from sharmill.errors import RejectRecord, UnitFailed
from sharmill.models.protocols import Codec, pad, padded_batches
from sharmill.prefetch import prefetch
from sharmill.shar.arrays import codes_dtype, num_frames
from sharmill.shar.items import Item


class CodecBatches:
    """A codec that encodes stored audio in batches.

    Args:
        batch_seconds: audio of a batch, counting padding.
        threads: how many may read and resample audio beside the codec.
    """

    def __init__(self, codec: Codec, *, batch_seconds: float, threads: int) -> None:
        self.codec = codec
        self._padded_frames = batch_seconds * codec.sampling_rate / codec.samples_per_frame
        self._threads = threads

    def __call__(self, items: Sequence[Item], advance: Callable[[int], None]) -> list[np.ndarray]:
        """Return the codes (codebooks, frames) of each item, in the order of the items.

        ``advance`` is called with the number of frames of each batch.

        Raises:
            UnitFailed: an item cannot be decoded, or is not what its metadata say.
        """
        codec = self.codec
        frames = [self.num_frames(item) for item in items]
        batches = padded_batches(frames, self._padded_frames, equal_only=codec.equal_lengths_only)
        in_order = [items[index] for batch in batches for index in batch]
        loaded = prefetch(
            lambda item: _load(item, codec.sampling_rate),
            in_order,
            threads=self._threads,
            ahead=2 * self._padded_frames,
            weigh=self.num_frames,
        )
        dtype = codes_dtype(codec.codebook_size)
        results: list[np.ndarray] = [np.empty(0)] * len(items)
        for batch in batches:
            codes = codec.encode(*pad([next(loaded) for _ in batch])).numpy()
            for index, row in zip(batch, codes, strict=True):
                results[index] = np.ascontiguousarray(row[:, : frames[index]].astype(dtype))
            advance(sum(frames[index] for index in batch))
        return results

    def num_frames(self, item: Item) -> int:
        """Return the number of frames that the codes of an item have."""
        assert item.metadata is not None
        return num_frames(item.metadata, self.codec)


def _load(item: Item, sampling_rate: int) -> np.ndarray:
    assert item.data is not None
    assert item.metadata is not None
    try:
        samples, rate = decode(item.data)
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

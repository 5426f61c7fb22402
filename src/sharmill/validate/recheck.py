"""The comparison of stored codes with those that the codec makes of a seeded sample of the stored audio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import xxhash

from sharmill.audio.files import decode_bytes
from sharmill.audio.resample import resample
from sharmill.config import Precision
from sharmill.errors import ConfigError, DamagedShard, RejectRecord
from sharmill.models.protocols import Codec, pad
from sharmill.models.recorded import check_recorded_model, load_recorded_codec
from sharmill.shar.arrays import array_from_bytes
from sharmill.shar.index import CodecRecord
from sharmill.shar.items import Item
from sharmill.validate.checked_dataset import CheckedDataset, Shard
from sharmill.validate.findings import Finding

# The share of a segment's codes that may differ. Batch neighbours and other hardware change the last bits of a codec's
# arithmetic, and with them single codes; the codes of other audio, or of another model, differ in nearly all. The last
# bits of reduced arithmetic are larger, and each wrong code of a residual codec makes those behind it wrong.
MAX_DIFFERENT_CODES: Final = 0.05
_MAX_DIFFERENT_REDUCED: Final = 0.5
_HASHES: Final = 1 << 64


@dataclass
class Rechecker:
    """Check of the codes in shards of a dataset; the models are loaded once.

    Args:
        share: of all segments, targets and contexts alike.
        models: by codec, what to load; see ``models.recorded``.
        options: by codec, those of its model.
    """

    subject: CheckedDataset
    share: float
    models: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seed: int = 42
    _codecs: dict[str, Codec] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ConfigError, before any work, where a codec cannot be the one that made the codes."""
        if not self.subject.codecs:
            raise ConfigError(f"--recheck-codes: {self.subject.directory} records no codec", code="unknown_codec")
        if unknown := sorted(self.models.keys() - {codec.name for codec in self.subject.codecs}):
            raise ConfigError(
                f"--codec-model: {self.subject.directory} has no codec {unknown[0]!r}", code="unknown_codec"
            )
        for codec in self.subject.codecs:
            check_recorded_model(codec, self.models.get(codec.name), self.options.get(codec.name, {}))

    def load(self) -> None:
        """Load the codecs.

        Raises:
            ConfigError: a model is not the one that the dataset was made with.
        """
        for record in self.subject.codecs:
            options = self.options.get(record.name, {})
            given = self.models.get(record.name)
            # The check computes on a CPU, which has no tf32.
            precision: Precision = "bf16" if record.precision == "bf16" else "fp32"
            self._codecs[record.name] = load_recorded_codec(record, given, options, precision)

    def __call__(
        self,
        shard: Shard,
        contents: dict[str, list[Item]],
        stats: dict[str, float],
        finish: Callable[[Item], None] = lambda audio: None,
    ) -> Iterator[Finding]:
        """Yield the items of a shard whose codes are not those of their audio; ``finish`` is called with each audio."""
        assert self.subject.dataset is not None  # that names the codecs
        for record in self.subject.codecs:
            # In a dataset without contexts there are no codes of them either.
            for codes, source in zip(record.fields, self.subject.dataset.audio_fields, strict=False):
                for item, audio in zip(contents.get(codes.name, []), contents.get(source, []), strict=False):
                    # By its bytes, so that a segment is in the sample at all its places, whatever its cuts are called.
                    is_chosen = xxhash.xxh3_64_intdigest(audio.data or b"", self.seed) < self.share * _HASHES
                    if is_chosen and (problem := self._compare(record, item, audio, stats)):
                        yield shard.finding("different_codes", codes.name, problem, member=item.cut_id)
                    finish(audio)

    def _compare(self, record: CodecRecord, item: Item, audio: Item, stats: dict[str, float]) -> str | None:
        """Return what is wrong with the codes of an item; None also where other checks find nothing to compare."""
        if item.data is None or audio.data is None:
            return None
        try:
            stored = array_from_bytes(item.data, item.cut_id)
            samples, rate = decode_bytes(audio.data)
        except (DamagedShard, RejectRecord):
            return None
        codec = self._codecs[record.name]
        made = codec.encode(*pad([resample(samples, rate, codec.sampling_rate)]))[0].numpy()
        stats["segments encoded again"] += 1
        if made.shape != stored.shape:
            return f"the codec gives codes of shape {made.shape}, stored are {stored.shape}"
        different = int(np.count_nonzero(made != stored))
        stats["codes compared"] += made.size
        stats["codes that differ"] += different
        most = MAX_DIFFERENT_CODES if record.precision == "fp32" else _MAX_DIFFERENT_REDUCED
        if made.size and different / made.size > most:
            return f"{different / made.size:.1%} of the codes are others"
        return None

"""Assembly of codes into the shards of a dataset."""

from pathlib import Path

import numpy as np

from sharmill.encode.codes import SegmentCodes
from sharmill.engine.stage import StageRun
from sharmill.engine.unit import Unit
from sharmill.manifest import Reject
from sharmill.shar.arrays import array_to_bytes
from sharmill.shar.index import CodecRecord
from sharmill.shar.items import NO_DATA, FieldWriter, Item
from sharmill.shar.manifests import array_json, temporal_array_json
from sharmill.stages.fields import FieldProcessor


class AssembleProcessor(FieldProcessor):
    """Processor that writes the codes of shards in one rank.

    Args:
        codec: the codec that produced the codes.
        codes: the codes of all segments.
        numbers: segment number of each audio field of each cut, shape (audio fields, cuts).
    """

    def __init__(self, run: StageRun, codec: CodecRecord, codes: SegmentCodes, numbers: np.ndarray) -> None:
        super().__init__(run)
        self._codec = codec
        self._codes = codes
        self._numbers = numbers

    def close(self) -> None:
        self._codes.close()

    def write(self, unit: Unit, ids: list[str], paths: list[Path]) -> list[Reject]:
        start = unit.params["start"]
        numbers = np.array(self._numbers[:, start : start + unit.size])
        codes = dict(self._codes.read(np.unique(numbers)))
        frame_shift = self._codec.samples_per_frame / self._codec.sampling_rate
        lacking: dict[str, list[str]] = {}
        for field, (path, row) in enumerate(zip(paths, numbers.tolist(), strict=True)):
            with FieldWriter(path) as writer:
                for cut_id, number in zip(ids, row, strict=True):
                    shape = codes[number].shape
                    if not shape[1]:
                        writer.add(Item(cut_id, NO_DATA, None, None))
                        lacking.setdefault(cut_id, []).append(self.fields[field].attribute)
                        continue
                    # The codes of a context do not share the cut's time line, so they are stored as an array, not as a
                    # temporal array.
                    metadata = array_json(shape) if field else temporal_array_json(shape, frame_shift)
                    writer.add(Item(cut_id, "npy", array_to_bytes(codes[number]), metadata))
        return [
            Reject(self.run.name, "bad_codes", f"the cut has no {' and no '.join(fields)}", {"cut": cut_id})
            for cut_id, fields in lacking.items()
        ]

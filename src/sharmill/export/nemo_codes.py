"""The export ``nemo_codes``: a manifest with a file of codes per utterance, as NeMo's MagpieTTSDataset reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sharmill.errors import DamagedShard
from sharmill.manifest import CONTEXT_KEYS
from sharmill.shar.index import CodecRecord, DatasetRecord
from sharmill.shar.layout import CONTEXT_CODES, TARGET_CODES
from sharmill.training.cut_data import load_array

if TYPE_CHECKING:
    from lhotse import MonoCut

# NeMo's keys of the manifest, which hold absolute paths.
_PATH_KEYS = {TARGET_CODES: "target_audio_codes_path", CONTEXT_CODES: "context_audio_codes_path"}


class NemoCodes:
    """Codes as int32 tensors (codebooks, frames) in files that ``torch.load`` reads, and a manifest of NeMo's.

    A line has the record of the utterance: its text keys, tag, language, and all other keys. The paths of contexts'
    audio are left out, since NeMo would read such files from their beginning, whatever the context's offset.
    """

    version = 1
    manifest = "manifest.json"

    def __init__(self, record: DatasetRecord, codec: CodecRecord) -> None:
        self.fields = (TARGET_CODES, CONTEXT_CODES) if record.has_contexts else (TARGET_CODES,)

    def write_cut(self, cut: MonoCut, number: int, folder: Path, final: Path) -> dict[str, Any]:
        """Write ``<number>.target.pt`` and ``<number>.context.pt``, and return the line of the manifest.

        A cut without a context has no second file: NeMo takes a text in its place.

        Raises:
            DamagedShard: the cut has no codes, or not one supervision with a text, as NeMo wants of every line.
        """
        if len(cut.supervisions) != 1 or cut.supervisions[0].text is None or not cut.has_custom(TARGET_CODES):
            raise DamagedShard(f"the cut {cut.id} does not have {TARGET_CODES} and one supervision with a text")
        supervision = cut.supervisions[0]
        record = {key: value for key, value in (supervision.custom or {}).items() if key not in CONTEXT_KEYS[:3]}
        paths = {}
        for field in filter(cut.has_custom, self.fields):
            name = f"{number:06d}.{field.removesuffix('_codes')}.pt"
            torch.save(torch.from_numpy(load_array(cut, field).astype(np.int32)), folder / name)
            paths[_PATH_KEYS[field]] = str(final / name)
        return {
            **record,
            "id": cut.id,
            "duration": cut.duration,
            "text": supervision.text,
            "speaker": supervision.speaker,
            "language": supervision.language,
            **paths,
        }

"""The codec that ships with the project, as a family of one model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from sharmill.models.family import ModelFamily
from sharmill.models.protocols import Codec

BUILTIN_FILE: Final = Path(__file__).parent / "builtin_codec.nemo"


@dataclass(frozen=True, kw_only=True)
class BuiltinCodec(ModelFamily):
    """``builtin``: a small codec, for trying out; NeMo is needed only to decode."""

    modules: ClassVar = ("sharmill.models.builtin_codec",)

    def resolve(self) -> Path:
        self.refuse_target()
        return BUILTIN_FILE

    def load(self, device: str) -> Codec:
        self.resolve()
        from sharmill.models.builtin_codec import load_builtin_codec

        return load_builtin_codec(device)

"""A stage as a package of its own brings it: a column with the loudness of each cut, relative to a level."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import soundfile

from sharmill.audio.sound import measure_sound
from sharmill.config import StageSection
from sharmill.engine.unit import Unit
from sharmill.shar.cut_lines import write_values
from sharmill.shar.items import ItemTable
from sharmill.shar.layout import Field
from sharmill.write.fields import FieldProcessor, FieldStage


@dataclass(frozen=True, kw_only=True)
class LoudnessConfig(StageSection):
    """Loudness of the target audio of each cut."""

    name: str = ""
    """Name of the stage and its column, where there are several."""
    level: float = 0.0
    """Level to which the loudness is relative, in dB of full scale."""


class LoudnessStage(FieldStage):
    kind = "loudness"
    section: ClassVar = LoudnessConfig

    def fields(self) -> list[Field]:
        name = self.name.replace("/", "_")
        file = f"{name}/values.{{:06d}}.jsonl.gz"
        return [Field(name=name, file=file, kind="value", attribute=name, limits=(-120.0, 120.0), by=self.name)]

    def open(self, device: str) -> FieldProcessor:
        return LoudnessProcessor(self)


class LoudnessProcessor(FieldProcessor):
    def write(self, unit: Unit, ids: list[str], paths: list[Path]) -> None:
        table = ItemTable(self.stage.dataset.file("target_audio", unit.index))
        loudness = (self.measure(table.data(number)) for number in range(len(ids)))
        write_values(paths[0], self.fields[0].attribute, zip(ids, loudness, strict=True))

    def measure(self, data: bytes) -> float:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
        return measure_sound(samples, rate).loudness - self.stage.settings.level

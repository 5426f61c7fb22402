"""A stage with a column: the loudness of the target audio of each cut, relative to a level."""

from dataclasses import dataclass
from pathlib import Path

from sharmill.audio.files import decode_bytes
from sharmill.audio.sound import measure_sound
from sharmill.config import StageSection
from sharmill.engine.stage import StageRun
from sharmill.engine.unit import Unit
from sharmill.shar.fields import Field
from sharmill.shar.json_lines import write_values
from sharmill.stages.fields import FieldProcessor, FieldStage


@dataclass(frozen=True, kw_only=True)
class LoudnessConfig(StageSection):
    """Keys of the stage."""

    name: str = ""
    """Name of the stage and its column, where there are several."""
    level: float = 0.0
    """Level to which the loudness is relative, in dB of full scale."""


class LoudnessProcessor(FieldProcessor):
    """Measures the cuts of a shard."""

    def write(self, unit: Unit, ids: list[str], paths: list[Path]) -> None:
        sounds = [measure_sound(*decode_bytes(item.data)) for item in self.items("target_audio", unit, ids)]
        values = [(id, sound.loudness - self.run.settings.level) for id, sound in zip(ids, sounds, strict=True)]
        write_values(paths[0], self.fields[0].attribute, values)


class LoudnessStage(FieldStage):
    """The loudness of each cut."""

    kind = "loudness"
    section = LoudnessConfig
    processor = LoudnessProcessor

    def fields(self, run: StageRun) -> list[Field]:
        # The attribute of a cut is a name of Python's.
        name = run.name.replace("/", "_")
        return [
            Field(
                name=name, file=f"{name}/values.{{:06d}}.jsonl.gz", kind="value", attribute=name,
                limits=(-120.0, 120.0),
            )
        ]  # fmt: skip

"""Stage ``scores``, which adds columns of numbers to a dataset. A pass decodes each clip once for all its scorers."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from sharmill.config import Config
from sharmill.engine.delays import spent_on
from sharmill.engine.stage import Advance, Processor, Resource, StageRun, versions
from sharmill.engine.unit import Output, Totals, Unit
from sharmill.errors import (
    ConfigError,
    FatalError,
    RejectRecord,
    SharmillError,
    is_device_error,
    mentions_memory,
    one_line,
    refuse,
)
from sharmill.files.staging import Staging
from sharmill.models import find_model, make_deterministic
from sharmill.models.device import check_device
from sharmill.registry import SCORERS
from sharmill.scores.config import ScorerConfig, ScoresConfig
from sharmill.scores.scorer import Clip, Score, Scorer
from sharmill.shar.fields import TARGET_AUDIO, Field
from sharmill.shar.json_lines import read_cuts, write_values
from sharmill.stages.fields import FieldProcessor, FieldStage

# Significant digits of a stored score.
_DIGITS: Final = 6


@dataclass(frozen=True)
class Scorers:
    """The scorers of a pass with their configurations; no model is loaded yet."""

    chosen: Sequence[tuple[ScorerConfig, Scorer]]

    @classmethod
    def from_config(cls, settings: ScoresConfig) -> "Scorers":
        """Find the scorers of a section.

        Raises:
            ConfigError: a scorer does not exist, or two scorers of the section make the same column.
        """
        found = [(one, find_model(SCORERS, one.scorer, one.options)) for one in settings.scorers]
        made = Counter(f"{one.prefix}{column}" for one, scorer in found for column in scorer.columns)
        twice = [name for name, count in made.items() if count > 1]
        refuse(
            (twice, f"two scorers make the column {' and '.join(twice)}: remove one of them, or give it a prefix"),
            code="bad_config_value",
        )
        return cls(found)

    @property
    def modules(self) -> Sequence[str]:
        return [module for _, one in self.chosen for module in (*one.modules, one.loader.partition(":")[0]) if module]

    def check(self) -> None:
        for _, scorer in self.chosen:
            scorer.check()


class ScoresStage(FieldStage):
    """A pass of scorers over the target audio and the texts of a dataset."""

    kind = "scores"
    section = ScoresConfig
    cost_unit = "seconds of audio"

    def check(self, config: Config) -> None:
        for settings in config.all(ScoresConfig):
            for _, scorer in Scorers.from_config(settings).chosen:
                scorer.resolve()

    def model(self, run: StageRun) -> Scorers:
        return Scorers.from_config(run.settings)

    def resource_of(self, run: StageRun) -> Resource:
        return "gpu" if any(scorer.uses_device for _, scorer in self.model(run).chosen) else "cpu"

    def fields(self, run: StageRun) -> list[Field]:
        return [
            Field(
                name=one.prefix + column, file=f"{one.prefix}{column}/values.{{:06d}}.jsonl.gz", kind="value",
                attribute=one.prefix + column, limits=limits, optional=True,
                settings={"scorer": scorer.published_name, **one.options},
            )
            for one, scorer in self.model(run).chosen
            for column, limits in scorer.columns.items()
        ]  # fmt: skip

    def identity(self, run: StageRun) -> dict[str, Any]:
        scorers = [scorer for _, scorer in self.model(run).chosen]
        packages = {package for scorer in scorers for package in scorer.packages}
        return super().identity(run) | {
            "scorers": [scorer.identity() for scorer in scorers],
            "versions": versions("numpy", "torch", "torchaudio", *sorted(packages)),
        }

    def open(self, run: StageRun, device: str) -> Processor:
        make_deterministic()
        scorers = self.model(run).chosen
        processor = ScoresProcessor(
            run, [(one.label, scorer, scorer.load(device if scorer.uses_device else "cpu")) for one, scorer in scorers]
        )
        processor.device_kind = check_device(device) if run.resource == "gpu" else ""
        return processor

    def finalize(self, run: StageRun) -> Totals:
        notes, num_cuts = [], sum(unit.size for unit in run.units)
        for one, _ in self.model(run).chosen:
            found = [faults for commit in run.commits if (faults := commit.stats["faults"].get(one.label))]
            missing, raised = (sum(faults[key] for faults in found) for key in ("missing", "raised"))
            if not missing:
                continue
            note = f"{one.label} gave no score for {missing:,} of {num_cuts:,} cuts; the first: {found[0]['first']}"
            if raised == num_cuts > 1:
                raise FatalError(f"{run.name}: {note}; correct or remove this scorer", code="bad_plugin")
            notes.append(note)
        return msgspec.structs.replace(super().finalize(run), notes=notes)


class ScoresProcessor(FieldProcessor):
    """Scores the cuts of a shard, in groups of ``batch_seconds``.

    Args:
        scorers: for each scorer, its label, the scorer, and the function that it has loaded.
    """

    def __init__(self, run: StageRun, scorers: Sequence[tuple[str, Scorer, Score]]) -> None:
        super().__init__(run)
        self._scorers = scorers

    def process(self, unit: Unit, staging: Staging, advance: Advance) -> Output:
        self._faults: dict[str, dict[str, Any]] = {}
        self._advance = advance
        output = super().process(unit, staging, advance)
        output.stats["faults"] = self._faults
        return output

    def write(self, unit: Unit, ids: list[str], paths: list[Path]) -> None:
        rows: list[list[float | None]] = []
        for clips in self._groups(unit, ids):
            values = [self._score(name, scorer, score, clips) for name, scorer, score in self._scorers]
            rows += [[value for row in of_clip for value in row] for of_clip in zip(*values, strict=True)]
            self._advance(sum(clip.duration for clip in clips))
        for column, (field, path) in enumerate(zip(self.fields, paths, strict=True)):
            write_values(path, field.attribute, ((id, row[column]) for id, row in zip(ids, rows, strict=True)))

    def _groups(self, unit: Unit, ids: list[str]) -> Iterator[list[Clip]]:
        """Yield the clips of a shard in groups of at most ``batch_seconds``, or of one longer clip."""
        group: list[Clip] = []
        cuts, items = read_cuts(self.run.root / unit.params["cuts"][0]), self.items(TARGET_AUDIO, unit, ids)
        for cut, item in zip(cuts, items, strict=True):
            clip = Clip(cut, item.data)
            if group and sum(one.duration for one in (*group, clip)) > self.run.settings.batch_seconds:
                yield group
                group = []
            group.append(clip)
        if group:
            yield group

    def _score(self, name: str, scorer: Scorer, score: Score, clips: Sequence[Clip]) -> list[list[float | None]]:
        """Return the row of each clip; if the scorer raises an exception for a group, each clip is scored alone."""
        try:
            with spent_on("model"):
                values = np.array(score(clips), np.float64)  # None becomes NaN
        except Exception as error:
            is_of_machine = mentions_memory(str(error)) or is_device_error(error)
            is_of_run = isinstance(error, SharmillError | ImportError | MemoryError)
            if is_of_machine or (is_of_run and not isinstance(error, RejectRecord)):
                raise
            if len(clips) > 1:
                return [row for clip in clips for row in self._score(name, scorer, score, [clip])]
            self._count(name, clips[0], f"{type(error).__name__}: {one_line(error)}", raised=1)
            return [[None] * len(scorer.columns)]
        if values.shape != (len(clips), len(scorer.columns)):
            raise ConfigError(
                f"the scorer {name!r} returned {f'values of shape {values.shape}' if values.shape else 'nothing'} for "
                f"{len(clips)} clips and the columns {', '.join(scorer.columns)}: it must return a row for each clip "
                "with a number for each column",
                code="bad_plugin",
            )
        for number in np.flatnonzero(~np.isfinite(values).all(axis=1)).tolist():
            self._count(name, clips[number], "no finite value")
        return [[float(f"{one:.{_DIGITS}g}") if math.isfinite(one) else None for one in row] for row in values.tolist()]

    def _count(self, name: str, clip: Clip, problem: str, raised: int = 0) -> None:
        faults = self._faults.setdefault(name, {"missing": 0, "raised": 0, "first": f"{clip.id}: {problem}"})
        faults["missing"] += 1
        faults["raised"] += raised

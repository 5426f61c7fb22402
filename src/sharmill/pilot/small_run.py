"""The stages behind match on the records of a pilot, for their rates."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sharmill.config import Config, MetricsConfig
from sharmill.engine.listener import Listener
from sharmill.engine.rundir import RunDir
from sharmill.executors.local import LocalExecutor
from sharmill.manifest import Utterance, write_lines
from sharmill.match.choose import min_similarity
from sharmill.match.config import MatchConfig
from sharmill.match.stage import MatchStage, matched_manifest
from sharmill.pilot.rates import StageRate, measure_rates
from sharmill.pipeline import make_stages, run_dataset, stages_of
from sharmill.prepare.stage import PrepareStage, prepared_manifest
from sharmill.validate.config import ValidateConfig


def run_small(config: Config, utterances: Sequence[Utterance], num_drawn: int) -> list[StageRate]:
    """Write, encode and check a dataset of a pilot's utterances, with their contexts; return the rates of the stages.

    Run directory and dataset lie below the run directory of the configuration, so that the disk is the one that a run
    would use, and are removed at the end.

    Args:
        num_drawn: records of the pilot, rejects included.

    Raises:
        FatalError: a stage stopped.
    """
    if (match := config.find(MatchConfig)) is not None:
        least = min_similarity(match)
        utterances = [one for one in utterances if one.context is not None and one.context.similarity >= least]
    if not utterances:
        return []
    with tempfile.TemporaryDirectory(prefix="pilot-", dir=config.run_dir) as folder:
        small = _configure(config, folder)
        manifest = matched_manifest(small) if config.has_contexts else prepared_manifest(small)
        manifest.parent.mkdir(parents=True)
        if (copies := RunDir(Path(config.run_dir)).copies).is_dir():
            # What the pilot has fetched is not fetched again, but where a disk has no hard links.
            with suppress(shutil.Error):
                shutil.copytree(copies, RunDir(Path(small.run_dir)).copies, copy_function=os.link)
        # Its lines are numbered as those of a manifest are.
        lines = (dataclasses.replace(one, index=number).to_json() for number, one in enumerate(utterances))
        write_lines(manifest, lines)
        stages = [kind for kind in stages_of(config) if kind not in (PrepareStage.kind, MatchStage.kind)]
        result = run_dataset(
            small, Listener(), stages=stages, executor=LocalExecutor(workers=1, device=config.executor.device)
        )
        done = {stage.name for stage, outcome in result.stages if outcome.ok}
        return measure_rates([stage for stage in make_stages(small) if stage.name in done], num_drawn)


def _configure(config: Config, folder: str) -> Config:
    """Return the configuration of a dataset of its own in a folder: no addition to another, and without curves."""
    small = dataclasses.replace(
        config, run_dir=f"{folder}/run", dataset_dir=f"{folder}/dataset", append_to=None, max_reject_fraction=1.0,
        metrics=MetricsConfig(),
    )  # fmt: skip
    if (match := config.find(MatchConfig)) is not None:
        small = small.with_section(dataclasses.replace(match, contexts_from_dataset=False))
    # The sources have more records than the pilot.
    small = small.with_section(dataclasses.replace(config.section(ValidateConfig), against_sources=False))
    # Not a key, so that it is not copied: without it, values of the environment would be stored.
    object.__setattr__(small, "references", config.references)
    return small

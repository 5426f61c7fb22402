"""Take back the commits of units that the checker found damaged, so that the next ordinary run does them again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sharmill.config import Config
from sharmill.encode.config import EncodeConfig
from sharmill.engine.ledger import revoke
from sharmill.engine.plan import load_plan
from sharmill.engine.run import locked
from sharmill.engine.rundir import RunDir
from sharmill.engine.stage import Stage, stage_classes
from sharmill.engine.state import describe_workers, find_workers
from sharmill.errors import ConfigError
from sharmill.files.storage import remove_tree
from sharmill.shar.dataset import ShardedDataset
from sharmill.validate.findings import INDEX, Report


def take_back_commits(config: Config, report: Report, stages: Sequence[str]) -> None:
    """Take back the commits of the units that a report names, so that the next run of ``stages`` does them again.

    Where codes are encoded again, all shards that hold one of these segments get the new codes if they are others. The
    index of the dataset is compared with the ledger again in any case. No ranks may be at work on the dataset.

    Raises:
        ConfigError: the report is of another dataset, names nothing that can be done again, or what it names was not
            made by this configuration, or not by these stages, or another process is at work; nothing has been done
            then.
    """
    _check_report(config, report)
    run_dir = RunDir(Path(config.run_dir))
    with locked(run_dir):
        # Ranks that are at work hold no lock.
        if live := find_workers(run_dir):
            raise ConfigError(
                f"{describe_workers(live)} at work on this run: wait until it ends, or end it by sharmill "
                f"cancel {run_dir.path}",
                code="locked",
            )
        _take_back(config, report, stages)


def _take_back(config: Config, report: Report, stages: Sequence[str]) -> None:
    wanted: dict[str, set[int]] = {}
    for unit in report.units_to_repeat:
        wanted.setdefault(unit.stage, set()).update(() if unit.shard is None else {unit.shard})
    every = [stage for kind in stage_classes(config).values() for stage in kind.of(config)]
    _check_makers(config, wanted, every)
    found = [(stage, stage.redo(wanted, of_index=INDEX in wanted)) for stage in every]
    concerned = {stage: units for stage, units in found if units is not None}
    for stage in concerned:
        if stage.kind not in stages:
            raise ConfigError(
                f"these findings concern the stage {stage.kind}: name it too, or no stage at all", code="bad_findings"
            )
        if not stage.dir.units.exists():
            raise ConfigError(
                f"{config.run_dir} has no plan of {stage.name}: it is not the run that made this dataset",
                code="bad_findings",
            )
    for stage, units in concerned.items():
        remove_tree(stage.dir.done)
        if known := units & {unit.index for unit in load_plan(stage)}:
            revoke(stage, known)


def _check_report(config: Config, report: Report) -> None:
    if Path(report.dataset).resolve() != Path(config.dataset_dir).resolve():
        raise ConfigError(
            f"these findings are of {report.dataset}, and {config.name} is in {config.dataset_dir}", code="bad_findings"
        )
    if not report.units_to_repeat:
        raise ConfigError(
            "these findings name no unit that could be done again"
            + ("; see to_do of each" if report.findings else ": there are none"),
            code="bad_findings",
        )


def _check_makers(config: Config, wanted: dict[str, set[int]], stages: Sequence[Stage]) -> None:
    """Raise ConfigError where fields are concerned that no stage of the configuration makes."""
    missing = {name.partition("/")[2] or name for name in wanted.keys() - {INDEX} - {stage.name for stage in stages}}
    if INDEX in wanted:
        own = {codec.name for codec in config.section(EncodeConfig).codecs}
        missing.update(set(ShardedDataset(Path(config.dataset_dir)).stored_codecs()) - own)
    if missing:
        raise ConfigError(
            f"the codes or fields called {min(missing)!r} are not of this configuration: add that codec to "
            "encode.codecs, or that stage, with the run_dir that they were made from"
            + ("; or make the index with sharmill index" if INDEX in wanted else ""),
            code="bad_findings",
        )

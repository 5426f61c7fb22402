"""The frozen plan of a stage: made once, bound to the identity of its configuration, inputs and versions."""

from __future__ import annotations

import shutil
from typing import Any
from uuid import uuid4

import msgspec

from sharmill.engine.identity import find_changes
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.errors import ConfigError
from sharmill.storage import publish_directory, remove_tree, stopping_errors

_unit_decoder = msgspec.json.Decoder(Unit)


def read_or_make_plan(stage: Stage, *, restart: bool) -> list[Unit]:
    """Return the units of the stage's plan; the plan is made if there is none.

    Raises:
        ConfigError: there is a plan, but of another configuration, input or version.
    """
    identity = _as_stored(stage.identity())
    if restart:
        discard_stage(stage)
    if stage.dir.identity.exists():
        changes = find_changes(_read_identity(stage), identity)
        if not changes:
            return load_plan(stage)
        begun = any(stage.dir.ledger.glob("*.jsonl"))
        if begun and not stage.replan_when_changed:
            raise ConfigError(
                f"{stage.name} was begun differently in {stage.run_dir.path}: {'; '.join(changes[:4])}. "
                "Restore that, choose another run_dir, or begin the stage anew",
                code="changed_plan",
            )
        discard_stage(stage)
    return _freeze(stage, identity)


def _read_identity(stage: Stage) -> Any:
    try:
        return msgspec.json.decode(stage.dir.identity.read_bytes())
    except msgspec.DecodeError as error:
        message = f"{stage.dir.identity} is damaged ({error}); begin this stage anew with --restart"
        raise ConfigError(message, code="damaged_run_dir") from error


def load_plan(stage: Stage) -> list[Unit]:
    """Return the units of a plan that is known to exist."""
    with stage.dir.units.open("rb") as stream:
        return [_unit_decoder.decode(line) for line in stream]


def discard_stage(stage: Stage) -> None:
    """Remove the stage's plan, ledger and output.

    The output goes before the plan, so that a process that dies in between leaves no output that belongs to nothing:
    by the ledger its units are to be done again. The identity goes before the rest of the plan, which is no plan then.
    """
    with stopping_errors(stage.dir.path):
        remove_tree(stage.dir.done)
        # Without a plan, what lies where the stage publishes is not this run's to remove.
        if stage.dir.identity.exists():
            stage.discard()
        remove_tree(stage.dir.identity)
        remove_tree(stage.dir.path)


def _freeze(stage: Stage, identity: dict[str, Any]) -> list[Unit]:
    _refuse_foreign_folder(stage)
    # A process that died while planning leaves its folder aside; whatever else is there belongs to no plan.
    remove_tree(stage.dir.path)
    aside = stage.dir.path / f".plan-{uuid4().hex}"
    with stopping_errors(aside):
        aside.mkdir(parents=True)
        try:
            units = list(stage.plan(aside))
            with (aside / stage.dir.units.name).open("wb") as stream:
                for unit in units:
                    stream.write(msgspec.json.encode(unit) + b"\n")
            (aside / stage.dir.identity.name).write_bytes(msgspec.json.encode(identity))
            publish_directory(aside, stage.dir.plan)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return units


def _as_stored(identity: dict[str, Any]) -> dict[str, Any]:
    """Return an identity as it is read back, to be compared: JSON has no tuples, and the keys are stored in order."""
    return msgspec.json.decode(msgspec.json.encode(identity, order="sorted"))


def _refuse_foreign_folder(stage: Stage) -> None:
    """Raise ConfigError where the stage's folder has files but nothing that a stage leaves there."""
    own = (stage.dir.ledger, stage.dir.logs, stage.dir.progress, stage.dir.rejects, stage.dir.done, stage.dir.plan)
    if not stage.dir.path.exists() or any(path.exists() for path in own):
        return
    foreign = [path.name for path in stage.dir.path.iterdir() if not path.name.startswith(".")]
    if foreign:
        raise ConfigError(
            f"{stage.dir.path} has {foreign[0]!r}, which is not sharmill's: choose another run_dir, or move that away",
            code="foreign_output",
        )

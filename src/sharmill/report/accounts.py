"""Sections of the accounts of a run: the funnel from input to output, and the card of the dataset."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from sharmill.errors import REASONS, REMEDIES
from sharmill.report.facts import Facts
from sharmill.report.section import Section, render

_MOST_ROWS = 12


def make_funnel(facts: Facts) -> Markup | None:
    """Return the accounts of the stages, with examples of what was rejected; None without a run directory."""
    if facts.run is None:
        return None
    stages = [stage for stage in facts.run.stages if stage.counts == "records"]
    num_in = next((stage.totals.num_in for stage in stages if stage.totals), 0)
    rejects = [
        (stage.name, reason, count, stage.examples.get(reason, []))
        for stage in stages if stage.totals
        for reason, count in sorted(stage.totals.rejects.items(), key=lambda one: (-one[1], one[0]))
    ]  # fmt: skip
    sums = [
        (title, *_largest(facts.run.stats[key]))
        for key, title in (("by_dataset", "Sources"), ("by_language", "Languages"), ("by_speaker", "Speakers"))
        if facts.run.stats
    ]
    return render("funnel.html", stages=stages, num_in=num_in, rejects=rejects, reasons=REASONS, remedies=REMEDIES,
                  sums=sums)  # fmt: skip


def _largest(rows: dict[str, dict[str, Any]]) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """Return the rows with the most hours, and how many there are beside them."""
    kept = [(name, row) for name, row in rows.items() if row["records_in"]]
    kept.sort(key=lambda one: (-one[1]["hours_out"], one[0]))
    return kept[:_MOST_ROWS], max(0, len(kept) - _MOST_ROWS)


def make_card(facts: Facts) -> Markup:
    """Return what the dataset is, and what it was made with."""
    versions: dict[str, str] = {}
    devices: set[str] = set()
    models: list[tuple[str, str]] = []
    for stage in facts.run.stages if facts.run else ():
        if isinstance(found := stage.identity.get("versions"), dict):
            versions |= {name: str(version) for name, version in found.items()}
        devices |= set(stage.devices)
        for key in ("encoder", "codec"):
            if key in stage.identity:
                models.append((stage.name, _describe(stage.identity[key])))
    return render(
        "card.html", facts=facts, record=facts.record, versions=sorted(versions.items()), devices=sorted(devices),
        models=models, num_bytes=sum(file.size for shard in facts.shards for file in shard.fields.values()),
        num_files=sum(len(shard.fields) for shard in facts.shards),
    )  # fmt: skip


def _describe(model: Any) -> str:
    """Return what identifies a model, in words."""
    return ", ".join(f"{name} {value}" for name, value in model.items()) if isinstance(model, dict) else str(model)


FUNNEL = Section("funnel", "From input to output", 10, make_funnel)
CARD = Section("card", "Dataset card", 90, make_card)

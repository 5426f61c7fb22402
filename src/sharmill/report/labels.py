"""Section of the report about speaker labels: the clearest findings of the stage ``voices``, with players."""

from typing import Any

from markupsafe import Markup

from sharmill.report.facts import Facts, LabelFinding
from sharmill.report.listening import make_players
from sharmill.report.section import Section, render


def make_labels(facts: Facts) -> Markup | None:
    """Return the section; None if the stage ``voices`` has not run."""
    stages = [stage for stage in facts.run.stages if stage.kind == "voices" and stage.totals] if facts.run else []
    if facts.run is None or not stages or stages[0].totals is None:
        return None
    ids = facts.sample.ids if facts.sample else {}
    places = {ids[one.id]: one.id for one in facts.run.labels if one.id in ids}
    players = {stored.cut.get("id"): clip for stored, clip in make_players(facts, places)} if places else {}
    rows = [(one, _groups(one), _evidence(one), players.get(one.id)) for one in facts.run.labels]
    return render("labels.html", notes=stages[0].totals.notes, rows=rows)


def _groups(finding: LabelFinding) -> list[str]:
    """Return the groups that a finding is about."""
    return finding.groups or [group for group in (finding.group, finding.other_group) if group]


def _evidence(finding: LabelFinding) -> str:
    """Return a text with the similarities on which a finding is based."""
    if finding.finding == "wrong_voice":
        return f"similarity to its group {finding.own:.2f}, to the other group {finding.other:.2f}"
    if finding.finding == "mixed_voices":
        return f"similarity of the voices before and after {finding.at:.1f} s: {finding.similarity:.2f}"
    clips = [_clips_of(voice) for voice in finding.voices]
    return f"mean similarity of two voices {finding.similarity:.2f}" + (f"; {', '.join(clips)}" if clips else "")


def _clips_of(voice: dict[str, Any]) -> str:
    return f"{voice.get('clips')} clips such as {voice.get('example')}"


LABELS = Section("labels", "Labels of speakers", 38, make_labels)

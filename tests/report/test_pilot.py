"""The section of the pilot."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec

from sharmill.engine.rundir import RunDir
from sharmill.pilot.advice import Advice, Threshold
from sharmill.pilot.calibrate import Calibration, SimilarityCounts
from sharmill.registry import SECTIONS
from sharmill.report.pilot import SECTION, make_pilot


def write_calibration(folder: Path, *, advised: bool = True) -> SimpleNamespace:
    thresholds = [
        Threshold(min_similarity=n / 10, context_share=1 - n / 20, wrong_share=0.1 / (1 + n)) for n in range(10)
    ]
    advice = Advice(
        thresholds=thresholds, misplaced=0.1, foreign=0.0, recommended=thresholds[7], reason="<b>because</b>"
    )  # fmt: skip
    similarities = SimilarityCounts(within_groups=[0, 5, 3], across_groups=[7, 2, 0])
    found = Calibration(
        name="small", seed=0, encoder="resemblyzer", device="cpu", num_records=1000, num_drawn=100, num_groups=10,
        num_partial_groups=0, rejects=[], formats=[], durations={}, too_short_for_context=0.0,
        advice=advice if advised else None, similarities=similarities if advised else None,
        audio_seconds=1.0, rates=[],
    )  # fmt: skip
    (folder / "calibration.json").write_bytes(msgspec.json.encode(found))
    return SimpleNamespace(run=SimpleNamespace(run_dir=RunDir(folder)))


def test_the_section_has_the_advice_and_the_counts(tmp_path):
    html = make_pilot(write_calibration(tmp_path))
    assert "match.min_similarity=0.7" in html
    assert "100 of 1,000 records in 10 speaker groups" in html
    assert "8 pairs" in html
    assert "9 pairs" in html


def test_text_of_the_file_stays_text(tmp_path):
    assert "<b>because" not in make_pilot(write_calibration(tmp_path))


def test_without_a_pilot_or_contexts_there_is_no_section(tmp_path):
    assert make_pilot(SimpleNamespace(run=None)) is None
    assert make_pilot(SimpleNamespace(run=SimpleNamespace(run_dir=RunDir(tmp_path)))) is None
    assert make_pilot(write_calibration(tmp_path, advised=False)) is None


def test_it_is_registered():
    assert SECTIONS.load("pilot") is SECTION

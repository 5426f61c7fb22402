"""Every kind of odd or bad input through the real stages in one run: in the dataset, or in the rejects with its reason.

The kinds and their outcomes are the tables of ``odd_inputs`` and ``odd_manifests``.
"""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from support.odd_inputs import KINDS
from support.odd_kinds import OUTPUT, Kind
from support.odd_manifests import WHOLE_INPUTS
from support.odd_run import OddRun, describe, read_cuts, run_kinds, run_sharmill, run_whole_input, without_privileges
from support.pipelines import read_with_lhotse
from support.reported import Elements

from sharmill.config.loading import load_for_display
from sharmill.errors import REASONS
from sharmill.pipeline import make_stages
from sharmill.report.facts import read_run_facts
from sharmill.report.page import make_page
from sharmill.shar import open_shar

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# What has tests of its own, and needs voices that differ, a filter, no companion at all, another source or a device.
ELSEWHERE = {
    "filtered", "no_similar_context", "no_long_context", "only_copies", "unsupported_cut", "overlapped_speech",
    "ambiguous_audio", "already_there", "bad_context", "too_long_for_device",
}  # fmt: skip


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> OddRun:
    return run_kinds(tmp_path_factory.mktemp("odd"))


def by_name(kind):
    return kind.name


@pytest.mark.parametrize("kind", KINDS, ids=by_name)
def test_kind(kind: Kind, odd: OddRun):
    if kind.name in odd.absent:
        pytest.skip(f"cannot be made here: {odd.absent[kind.name]}")
    assert sorted(ending.outcome for ending in odd.endings.get(kind.name, [])) == sorted(kind.outcomes)


def test_the_run_goes_on(odd: OddRun):
    assert [process.returncode for process in odd.processes] == [0] * 4
    assert all("Traceback" not in process.stderr for process in odd.processes)
    assert "validation: no findings" in odd.processes[-1].stdout


def test_the_sums_agree(odd: OddRun):
    """Stage by stage, and with the lines of the manifest."""
    totals = {}
    for stage in ("prepare", "match", "write", "survey", "encode/builtin", "assemble/builtin", "validate"):
        totals[stage] = json.loads((odd.folder / "run" / stage / "done.json").read_bytes())
    rejects = [json.loads(line) for line in (odd.folder / "run/rejects.jsonl").read_bytes().splitlines()]
    came = sum(bool(line.strip()) if isinstance(line, bytes) else 1 for line in odd.records)
    # Of segments, not of records.
    segments = totals.pop("encode/builtin")
    assert segments["num_in"] == segments["num_out"] <= 2 * totals["write"]["num_out"]
    for stage, numbers in totals.items():
        assert numbers["num_in"] == came
        own = Counter(reject["reason"] for reject in rejects if reject["stage"] == stage)
        assert numbers["rejects"] == own
        came -= sum(own.values())
        assert numbers["num_out"] == came
    assert len(read_cuts(odd.folder / "dataset")) == came


def test_rejects_have_their_records_as_they_came(odd: OddRun):
    """Objects as objects, and lines that are none as text; a duplicate is named as its original is.

    Of large ones a part is kept: a text's begin, or what tells an object's audio.
    """
    written = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in odd.records]
    texts = {line.strip().decode("utf-8", "replace") for line in written}
    objects = [record for record in odd.records if isinstance(record, dict)]
    endings = [ending for endings in odd.endings.values() for ending in endings]
    checked = [e.record for e in endings if e.outcome.startswith("prepare/") and "duplicate" not in e.outcome]
    assert len(checked) >= 90
    small = [record for record in checked if record in (texts if isinstance(record, str) else objects)]
    assert len(checked) - 10 <= len(small) < len(checked)
    for record in checked:
        if record in small:
            continue
        if isinstance(record, str):
            assert len(record) == 1024
            assert any(len(text) > 8192 and text.startswith(record) for text in texts)
        else:
            assert any(record.items() <= whole.items() for whole in objects)


def test_no_command_ran(odd: OddRun):
    assert not list(odd.folder.rglob("ran"))


def test_a_report_shows_all_of_it_as_text(odd: OddRun):
    config = load_for_display(odd.folder / "run/resolved_config.yaml")
    page = make_page(read_run_facts(config, make_stages(config), {}, decode=False))
    elements = Elements(page)
    # The scripts are plotly and the page's own.
    assert [len(elements.of(tag)) for tag in ("script", "style", "iframe", "object", "base")] == [2, 1, 0, 0, 0]
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    assert "<script>alert" not in page
    assert len(page) < 15_000_000


def test_every_reason_is_in_the_table():
    reasons = {outcome.split("/")[1] for kind in KINDS for outcome in kind.outcomes if outcome != OUTPUT}
    assert reasons == REASONS.keys() - ELSEWHERE


def test_the_names_of_kinds_are_unique():
    assert max(Counter(kind.name for kind in KINDS).values()) == 1


def test_text_and_names_are_kept_to_the_letter(odd: OddRun):
    cuts = {cut["supervisions"][0]["custom"]["kind"]: cut for cut in read_cuts(odd.folder / "dataset")}
    kept = [record for record in odd.records if isinstance(record, dict) and record["kind"] in cuts]
    texts = {record["kind"]: record["text"] for record in kept}
    for kind in ("text of 100,000 characters", "text with terminal escapes", "text with null characters and newlines"):
        assert cuts[kind]["supervisions"][0]["text"] == texts[kind]
    named = {record["kind"]: record["audio_filepath"] for record in kept if record["kind"].startswith("a name ")}
    assert len(named) >= 12
    for kind, path in named.items():
        assert cuts[kind]["recording"]["sources"][0]["source"] == path


def test_of_a_key_that_comes_twice_the_last_one_counts(odd: OddRun):
    (ending,) = odd.endings["the same key twice: the last one counts"]
    assert ending.record["supervisions"][0]["text"] == "the last one"


def test_own_readers_and_plain_lhotse_read_every_cut(odd: OddRun):
    dataset = odd.folder / "dataset"
    ids = [cut["id"] for cut in read_cuts(dataset)]
    assert len(set(ids)) == len(ids)
    assert [cut.id for cut in open_shar(dataset)] == ids
    for cut, number in zip(read_with_lhotse(dataset, "builtin"), range(len(ids)), strict=True):
        assert cut.id == ids[number]
        for samples in (cut.load_target_audio(), cut.load_context_audio()):
            assert np.isfinite(samples).all()
        assert cut.target_codes.load().shape[1] > 0


def test_the_deep_check_finds_no_errors_but_what_is_loud_or_silent(odd: OddRun, tmp_path):
    found = tmp_path / "found.json"
    checked = run_sharmill(
        "validate", odd.folder / "dataset", "--deep", "--workers", "1", "--json", found, cwd=odd.folder
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    report = json.loads(found.read_text())
    assert report["errors"] == 0
    assert {kind["code"] for kind in report["kinds"]} <= {"silent_audio", "clipped_audio"}


def test_the_table_has_a_row_for_each_kind(odd: OddRun):
    rows = [describe(kind, odd) for kind in KINDS]
    for kind, (name, outcome, sentence) in zip(KINDS, rows, strict=True):
        assert name == kind.name
        if kind.name not in odd.absent:
            assert set(outcome.split(", ")) == set(kind.outcomes or ["no record"])
            assert bool(sentence) == bool(kind.outcomes)


@pytest.mark.parametrize("whole", WHOLE_INPUTS, ids=by_name)
def test_whole_input(whole, tmp_path):
    if "may not be" in whole.name and without_privileges() is None:
        pytest.skip("root may read everything here")
    ended = run_whole_input(tmp_path, whole)
    first, *further = ended.stderr.splitlines()
    assert first.startswith("Error")
    assert whole.says in ended.stderr
    assert ended.returncode == whole.status
    # A stage that stops for its rejects says below which, and what to do.
    assert not further or "max_reject_fraction" in first

"""The charts of a page, the sample of voices, and the page as the last step of a run."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from dataclasses import replace
from unittest import mock

import msgspec
import numpy as np
import pytest
from support.errors import raises
from support.fields import add_fields
from support.paths import REPOSITORY
from support.reported import Elements
from support.shar import Project, copy, run, voice

from sharmill.audio.sound import Sound
from sharmill.config import to_yaml
from sharmill.config.loading import load_for_display
from sharmill.engine.rundir import RunDir
from sharmill.errors import DamagedShard
from sharmill.match.stage import MatchStage
from sharmill.match.voices import pack_voice, sample_voices, unpack_voice
from sharmill.pipeline import make_stages
from sharmill.report.charts import columns, histogram
from sharmill.report.contents import make_contents
from sharmill.report.facts import read_dataset_facts, read_run_facts
from sharmill.report.last_step import report_on_run
from sharmill.report.page import make_headline, make_page
from sharmill.shar.histograms import SCALES, CutMeasures, Histogram, cut_values


def test_histograms_of_parts_add_up_to_that_of_all():
    values = np.random.default_rng(0).normal(10, 30, 5000)
    merged = Histogram()
    for part in np.array_split(values, 7):
        merged.add(Histogram.of(part, SCALES["duration"]))
    assert merged == Histogram.of(values, SCALES["duration"])
    assert merged.total == 5000
    assert merged.quantile(0.5, SCALES["duration"]) == pytest.approx(10, abs=1.5)


@pytest.mark.parametrize("number", [10**400, -(10**400), 1e300], ids=["digits", "negative", "float"])
def test_numbers_beyond_all_measure_do_not_count(number):
    cut = {"duration": number, "supervisions": [{"text": "abc"}]}
    assert cut_values(cut) == {"text_length": 3.0}
    assert "duration" not in CutMeasures.of([cut_values(cut)], 0).histograms


def test_measures_of_shards_merge_in_any_order_and_are_short(reported):
    cuts = [cut_values({"duration": float(n % 17), "supervisions": [{"text": "a" * n}]}) for n in range(1000)]
    parts = [CutMeasures.unpack(CutMeasures.of(cuts[n::4], n).pack()) for n in range(4)]
    one, other = CutMeasures(), CutMeasures()
    for part in parts:
        one.add(part)
    for part in reversed(parts):
        other.add(part)
    assert one == other
    assert one.histograms["duration"].total == 1000
    assert one.extremes["longest"][0][0] == 16.0
    assert len(parts[0].pack()) < 600


def packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


@pytest.mark.parametrize(
    "text",
    ["", "no base 64", packed(b"not msgpack"), packed(bytes(1 << 30)),
     CutMeasures({"duration": Histogram(1 << 40, [1])}).pack(), CutMeasures({"color": Histogram(0, [1])}).pack(),
     CutMeasures({}, {"longest": [(1.0, 3, -1)]}).pack(), CutMeasures({}, {"longest": [(math.nan, 3, 0)]}).pack(),
     CutMeasures({}, {"oldest": [(1.0, 3, 0)]}).pack()],
    ids=["empty", "text", "other content", "a gigabyte", "a bin far away", "unknown", "extreme nowhere", "no number",
         "unknown extreme"],
)  # fmt: skip
def test_damaged_measures_are_an_error_and_cost_no_memory(text):
    with raises(DamagedShard, "damaged_shard", "the measures of a shard are damaged"):
        CutMeasures.unpack(text)


def groups(count: int, size: int):
    rng = np.random.default_rng(1)
    return [(f"g{g}", [(f"{g}-{n}", rng.standard_normal(16)) for n in range(size)]) for g in range(count)]


def test_all_voices_of_a_small_dataset_and_few_of_a_large_one():
    assert len(sample_voices(groups(5, 4), "u", 20, 20)) == 20
    found = [len(sample_voices(groups(10, 20), f"unit {n}", 200, 2_000_000)) for n in range(1000)]
    assert set(found) <= {0, 12}
    assert 60 < sum(found) < 400


def test_the_sample_of_voices_does_not_depend_on_the_order_of_groups():
    assert sample_voices(groups(9, 20), "u", 180, 3000) == sample_voices(groups(9, 20)[::-1], "u", 180, 3000)


def test_a_packed_voice_points_the_same_way():
    vector = np.random.default_rng(2).standard_normal(256).astype(np.float32)
    found = unpack_voice(pack_voice(vector))
    assert float(found @ vector) / float(np.linalg.norm(vector)) > 0.999


def test_a_run_has_all_charts(reported):
    config = reported_config(reported)
    page = make_page(read_run_facts(config, make_stages(config), {}, decode=False))
    for title in (
        "Length of targets", "Similarity of the chosen contexts", "Bandwidth of targets", "How even the speakers are",
        "How often one clip is a context", "toy: entropy", "Size of shards", "Rate of write, by rank",
    ):  # fmt: skip
        assert f"<figcaption>{title}</figcaption>" in page
    assert "All charts are of all cuts; those in green are of their audio. No target has more than 0.02% of its" in page
    assert "Clipping of targets" not in page
    assert "2 clips are contexts, 4.0 times on average, one 7 times" in page
    assert re.search(r"codes that occur in \d+ frames, each segment once", page)
    plots = [place for place in Elements(page).of("div") if place.get("class") == "plot"]
    assert len(plots) == page.count("<figcaption>") == page.count('<details class="values">') > 10
    assert all(place["role"] == "img" and place["aria-label"] for place in plots)


def test_a_chart_has_its_values_as_a_table_too():
    chart = str(histogram([0, 1, 2, 3], [3, 0, 1], label="seconds", unit="s", description="d"))
    cells = re.findall("<t[hd][^>]*>([^<]*)</t[hd]>", chart)
    assert cells == ["seconds", "count", "share", "0 to 1 s", "3", "75.0%", "2 to 3 s", "1", "25.0%"]
    trace = json.loads(Elements(chart).of("div")[0]["data-plot"])["data"][0]
    assert (trace["x"], trace["y"]) == ([0.5, 1.5, 2.5], [3, 0, 1])


def test_names_in_charts_are_short_and_without_control_characters():
    chart = columns(["\x1b[31m\u202e" + "x" * 10_000], [1], label="", description="d", show=str)
    plot = json.loads(Elements(chart).of("div")[0]["data-plot"])
    assert plot["data"][0]["hovertext"] == ["�[31m�" + "x" * 73 + "…"]
    assert plot["layout"]["xaxis"]["ticktext"] == ["�[31m�xx…"]


def facts_of_run(reported, measures=None):
    """Facts of the run, with other measures than those that it has noted."""
    config = reported_config(reported)
    found = read_run_facts(config, make_stages(config), {}, decode=False)
    return found if measures is None else replace(found, run=replace(found.run, measures=measures))


def test_an_extreme_in_no_shard_of_the_dataset_is_left_out_and_named(reported):
    noted = facts_of_run(reported).run.measures
    page = make_page(facts_of_run(reported, CutMeasures(noted.histograms, {"longest": [(9.0, 999, 0)]})))
    assert "1 items could not be read" in page
    assert "has no shard 999, of which the run directory names a cut" in page


def test_the_page_of_a_run_says_that_others_were_appended_to_its_dataset(reported):
    of_run = facts_of_run(reported)
    assert ("80.0%", "of all records kept") in make_headline(of_run)
    grown = replace(of_run, record=msgspec.structs.replace(of_run.record, num_cuts=16))
    assert [what for _, what in make_headline(grown)] == [
        "hours of target audio", "cuts", "shards", "speakers of this run", "language of this run"
    ]  # fmt: skip
    page = make_page(grown)
    assert "All charts are of the cuts of this run, a part of the dataset; those in green are of their audio." in page
    assert "of all cuts" not in page


def test_a_run_of_which_no_audio_is_known_says_so(reported):
    noted = facts_of_run(reported).run.measures
    silent = CutMeasures({name: one for name, one in noted.histograms.items() if name not in Sound._fields})
    alone = replace(facts_of_run(reported, silent), record=None)
    assert alone.sound is None
    assert "All charts are of all cuts; nothing is known of their audio." in str(make_contents(alone))


@pytest.mark.parametrize("values", [[0.97, 0.98, 0.99], [-1.0, -0.99], [*np.linspace(0.5, 1.0, 200)]], ids=len)
def test_axes_end_with_the_scale(reported, values):
    measures = CutMeasures({"similarity": Histogram.of(values, SCALES["similarity"])})
    chart = str(make_contents(facts_of_run(reported, measures)))
    layouts = [json.loads(place["data-plot"])["layout"] for place in Elements(chart).of("div") if "data-plot" in place]
    low, high = layouts[0]["xaxis"]["range"]
    assert -1.0 <= low <= min(values)
    assert max(values) <= high <= 1.0


def reported_config(project):
    return load_for_display(RunDir(project.run_dir).config)


@pytest.mark.slow
def test_match_notes_voices_and_the_page_has_their_map(tmp_path):
    project = Project(tmp_path)
    for number in range(4):
        project.add(f"utt{number}.flac", voice(2.0, pitch=120 + 60 * (number % 2), seed=number),
                    speaker=("anna", "bert")[number % 2])  # fmt: skip
    config = project.configure(match={"min_duration": 0.0, "min_similarity": 0.0})
    project.prepare(config)
    assert run(MatchStage(config)).ok
    RunDir(project.run_dir).config.write_bytes(to_yaml(config))
    page = make_page(read_run_facts(config, make_stages(config), {}))
    assert "4 utterances of 2 groups" in page
    plots = [json.loads(place["data-plot"]) for place in Elements(page).of("div") if "data-plot" in place]
    dots = [trace for plot in plots for trace in plot["data"] if trace.get("mode") == "markers"]
    assert [len(trace["x"]) for trace in dots] == [2, 2]
    assert {tip for trace in dots for tip in trace["hovertext"]} == {"anna", "bert"}
    assert "Similarity within and across groups" in page


def test_the_page_of_a_run_is_its_last_step(reported):
    said = report_on_run(reported_config(reported), make_stages(reported_config(reported)), decode=False)
    path = reported.run_dir / "report.html"
    assert said.startswith(f"report: {path}, ")
    assert "Codes are not decoded in a job of a cluster" in path.read_text()
    path.unlink()


def test_a_page_that_fails_is_a_sentence(reported):
    config = reported_config(reported)
    with mock.patch("sharmill.report.page.write_page", side_effect=ZeroDivisionError("by nothing")):
        said = report_on_run(config, make_stages(config), decode=False)
    assert "ZeroDivisionError: by nothing" in said
    assert f"sharmill report {reported.run_dir}" in said


def test_the_section_in_the_documentation_can_be_used(reported):
    text = (REPOSITORY / "docs/extending.md").read_text().split("## A section of the report")[1].split("```python")[1]
    names: dict = {}
    exec(text.split("```")[0], names)
    content = names["SIZES"].make(read_dataset_facts(reported.dataset, {}))
    assert "<tr><td>0</td><td>5</td></tr>" in content


def test_the_card_names_the_fields_that_a_stage_has_added(reported, tmp_path):
    dataset = add_fields(copy(reported.dataset, tmp_path / "dataset"))
    page = make_page(read_dataset_facts(dataset, {}))
    assert "<dt>Field score</dt><dd>value of each cut, from 0 to 1, which may be missing, made by scorer</dd>" in page

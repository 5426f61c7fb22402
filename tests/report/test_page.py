"""``sharmill report``: the page of a run and of a dataset, without a browser."""

import base64
import hashlib
import io
import json
import os
import re
from importlib.resources import files
from unittest import mock

import numpy as np
import pytest
import soundfile as sf
from support.fields import add_fields
from support.project import REPOSITORY, Project, copy, members_of, run, stage_of, voice
from support.reported import DecodingToy, Elements, make_reported, note_pilot, write_report

from sharmill.config import to_yaml
from sharmill.config.loading import load_for_display
from sharmill.engine.order import make_stages
from sharmill.engine.run_dir import RunDir
from sharmill.match.embed import sample_voices
from sharmill.pilot.advice import Advice, Threshold
from sharmill.pilot.calibration import SimilarityCounts
from sharmill.report.charts import histogram
from sharmill.report.facts import read_dataset_facts
from sharmill.report.page import report_on_run


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A project with run directory and dataset, whose texts are hostile; not to be changed by tests."""
    return make_reported(tmp_path_factory.mktemp("reported"))


@pytest.fixture(autouse=True, scope="module")
def toy():
    """The codec that made the codes is always loaded, whatever its name, so these tests need no model."""
    with mock.patch("sharmill.models.load_codec", return_value=DecodingToy()) as load:
        yield load


@pytest.fixture(scope="module")
def page(reported, tmp_path_factory):
    """The page of the run."""
    from click.testing import CliRunner

    from sharmill.cli.main import cli

    path = tmp_path_factory.mktemp("page") / "x.html"
    result = CliRunner().invoke(cli, ["report", str(reported.run_dir), "-o", str(path)])
    assert result.exception is None, result.output
    return path.read_text()


def test_hostile_text_is_text(page):
    elements = Elements(page)
    assert len(elements.of("script")) == 2
    assert len(elements.of("style")) == 1
    assert not [a for _, attributes in elements.found for a in attributes if a.startswith("on")]
    assert {image["src"].split(",")[0] for image in elements.of("img")} == {"data:image/png;base64"}
    assert "<script>document.title='owned'</script>" in elements.text
    assert "{{ 7 * 7 }} {% raw %} &amp; &lt;b&gt;" in elements.text
    assert "<img src=x onerror=alert(1)>.flac" in elements.text
    assert not re.findall("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)
    assert "שלום עולם" in page
    assert "wort " * 100 not in page
    assert "wort " * 50 in page


def test_plotly_is_in_the_page_once_as_it_was_published(page):
    library = files("sharmill.report").joinpath("templates", "plotly-basic.min.js").read_bytes()
    about = files("sharmill.report").joinpath("templates", "plotly-basic.txt").read_text()
    assert page.count(f"<script>{library.decode()}</script>") == 1
    assert hashlib.sha256(library).hexdigest() in about


def test_nothing_is_asked_for_from_elsewhere(page):
    elements = Elements(page)
    assert "default-src 'none'" in elements.of("meta")[2]["content"]
    addresses = [a[key] for _, a in elements.found for key in ("src", "href", "data", "action") if key in a]
    assert {address.split(":")[0] for address in addresses if not address.startswith("#")} == {"data"}
    of_page = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "http" not in re.sub(r"http-equiv", "", of_page)


def test_accounts_and_rejects_with_examples_are_there(page):
    text = Elements(page).text
    for word in ("missing_audio", "empty_text", "From input to output", "Remedy:", "speaker_key"):
        assert word in text


def test_every_pair_has_players(page):
    elements = Elements(page)
    clips = [audio["src"] for audio in elements.of("audio")]
    assert len(clips) == 32
    samples, rate = sf.read(io.BytesIO(base64.b64decode(clips[0].removeprefix("data:audio/ogg;base64,"))))
    assert rate == 16000
    assert len(samples) >= 16000
    assert sum((button.get("aria-label") or "").startswith("Play ") for button in elements.of("button")) == 32
    assert page.count("Play target decoded from toy of ") == page.count("Play context decoded from toy of ") == 8
    assert all(image["src"].startswith("data:image/png;base64,iVBOR") for image in elements.of("img"))
    reasons = {number: names for names, number in re.findall(r'data-reasons="([^"]*)".*?utt(\d)', page, re.DOTALL)}
    assert {"lowest similarity", "longest", "highest character rate"} <= set(reasons["7"].split("|"))


def test_the_same_run_gives_the_same_page(reported, page, call, tmp_path):
    assert call("report", reported.run_dir, "-o", tmp_path / "x.html")[0] == 0
    assert (tmp_path / "x.html").read_text() == page


def test_a_dataset_alone_is_a_sample_and_says_so(reported, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = call("report", reported.dataset)
    assert status == 0
    assert "wrote report.html" in out
    page = (tmp_path / "report.html").read_text()
    assert "a sample of 8 cuts in 2 shards" in page
    assert str(reported.run_dir) not in page


def test_damaged_items_are_left_out_and_named(reported, call, tmp_path):
    dataset = copy(reported.dataset, tmp_path / "damaged")
    path = dataset / "target_audio/recording.000000.tar"
    data = path.read_bytes()
    flac = next(content for name, content in members_of(path) if name.endswith("flac"))
    path.write_bytes(data.replace(flac, b"x" * len(flac)))
    assert call("report", dataset, "-o", tmp_path / "x.html")[0] == 0
    assert "could not be read" in (tmp_path / "x.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["absent"], "absent"),
        (["{dataset}", "-o", "{dataset}/report.html"], "inside a dataset"),
        (["{dataset}", "-o", "{dataset}/.."], "is a folder"),
        (["{dataset}", "-o", "x.html", "--codec-model", "toy"], "CODEC=MODEL"),
    ],
)
def test_wrong_use_is_one_line(reported, call, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    status, out, err = call("report", *(argument.format(dataset=reported.dataset) for argument in arguments))
    assert status == 2
    assert out == "" or out.startswith("reading ")
    assert err.count("\n") == 1
    assert named in err


def test_a_run_has_all_charts(page):
    for title in (
        "Length of targets", "Similarity of the chosen contexts", "Bandwidth of targets",
        "Distribution of hours over speakers", "Uses of a clip as context", "toy: entropy", "Size of shards",
        "Rate of write, by rank",
    ):  # fmt: skip
        assert f"<figcaption>{title}</figcaption>" in page
    assert page.count("<figcaption>Rate of encode/toy, by rank</figcaption>") == 1
    assert "Blue charts show all cuts; green charts show the audio of 8 cuts." in page
    assert "0.0% of the targets have more than 0.02% of their samples at full scale" in page
    assert "2 clips are used as context, 4.0 times on average and up to 7 times" in page
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


def test_the_page_of_a_run_without_dataset_has_counts_and_pilot(reported, call, tmp_path):
    run_dir = copy(reported.run_dir, tmp_path / "run")
    config = (run_dir / "resolved_config.yaml").read_text()
    (run_dir / "resolved_config.yaml").write_text(config.replace(str(reported.dataset), str(tmp_path / "gone")))
    thresholds = [
        Threshold(min_similarity=n / 10, context_share=1 - n / 20, wrong_share=0.1 / (1 + n)) for n in range(10)
    ]
    advice = Advice(
        thresholds=thresholds, misplaced=0.1, foreign=0.0, recommended=thresholds[7], reason="<b>because</b>"
    )  # fmt: skip
    similarities = SimilarityCounts(within_groups=[0, 5, 3], across_groups=[7, 2, 0])
    note_pilot(run_dir, advice=advice, similarities=similarities)
    status, out, _ = call("report", run_dir)
    assert status == 0
    assert f"wrote {run_dir / 'report.html'}" in out
    page = (run_dir / "report.html").read_text()
    for words in (
        "No finished dataset", "missing_audio", "match.min_similarity=0.7", "8 pairs", "9 pairs",
        "100 of 1,000 records in 10 speaker groups",
    ):  # fmt: skip
        assert words in page
    assert "<b>because" not in page


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("is_its_own", [True, False])
def test_a_page_of_another_users_run_shows_its_own_dataset(reported, call, tmp_path, is_its_own):
    """That user may read the page, and may not read the dataset that the configuration names."""
    run_dir, other = copy(reported.run_dir, tmp_path / "run"), copy(reported.dataset, tmp_path / "other")
    (other / "shards.jsonl").write_text((other / "shards.jsonl").read_text().replace('"xxh3":"', '"xxh3":"other'))
    path = run_dir / "resolved_config.yaml"
    if not is_its_own:
        path.write_text(path.read_text().replace(str(reported.dataset), str(other)))
    os.chown(path, 65534, -1)
    status, out, _ = call("report", run_dir)
    page = (run_dir / "report.html").read_text()
    assert (status, "<audio" in page, "is missing from the report" in " ".join(out.split())) == (
        0,
        is_its_own,
        not is_its_own,
    )


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("dataset.json", lambda text: text.replace('"format_version": 1', '"format_version": 99'), "version 99"),
        ("shards.jsonl", None, "it has no shards.jsonl"),
    ],
)
def test_a_run_page_explains_a_missing_dataset(reported, call, tmp_path, name, change, reason):
    run_dir, dataset = copy(reported.run_dir, tmp_path / "run"), copy(reported.dataset, tmp_path / "dataset")
    config = run_dir / "resolved_config.yaml"
    config.write_text(config.read_text().replace(str(reported.dataset), str(dataset)))
    path = dataset / name
    path.write_text(change(path.read_text())) if change else path.unlink()
    status, out, _ = call("report", run_dir)
    assert status == 0
    assert "is missing from the report" in (said := " ".join(out.split()))
    assert reason in said
    assert "another user" not in said


def test_the_card_names_the_fields_that_a_stage_has_added(reported, call, tmp_path):
    dataset = add_fields(copy(reported.dataset, tmp_path / "dataset"))
    assert call("report", dataset, "-o", tmp_path / "x.html")[0] == 0
    field = "<dt>Field score</dt><dd>value of each cut, from 0 to 1, which may be missing, made by scorer</dd>"
    assert field in (tmp_path / "x.html").read_text()


@pytest.mark.slow
def test_match_notes_voices_and_the_page_has_their_map(tmp_path):
    project = Project(tmp_path)
    for number in range(4):
        project.add(f"utt{number}.flac", voice(2.0, pitch=120 + 60 * (number % 2), seed=number),
                    speaker=("anna", "bert")[number % 2])  # fmt: skip
    config = project.configure(match={"min_duration": 0.0, "min_similarity": 0.0})
    project.prepare(config)
    assert run(stage_of(config, "match")).ok
    RunDir(project.run_dir).config.write_bytes(to_yaml(config))
    page = write_report(project, tmp_path / "x.html", {}).read_text()
    assert "4 utterances of 2 groups" in page
    plots = [json.loads(place["data-plot"]) for place in Elements(page).of("div") if "data-plot" in place]
    dots = [trace for plot in plots for trace in plot["data"] if trace.get("mode") == "markers"]
    assert [len(trace["x"]) for trace in dots] == [2, 2]
    assert {tip for trace in dots for tip in trace["hovertext"]} == {"anna", "bert"}
    assert "Similarity within and across groups" in page


def test_voices_are_recorded_all_or_sampled_by_dataset_size():
    rng = np.random.default_rng(1)
    groups = [(f"g{group}", [(f"{group}-{n}", rng.standard_normal(16)) for n in range(20)]) for group in range(10)]
    assert len(sample_voices([(name, voices[:4]) for name, voices in groups], "u", 40, 40)) == 40
    found = [len(sample_voices(groups, f"unit {n}", 200, 2_000_000)) for n in range(1000)]
    assert set(found) <= {0, 12}
    assert 60 < sum(found) < 400


def test_the_page_of_a_run_is_its_last_step_and_never_fails_it(reported):
    config = load_for_display(RunDir(reported.run_dir).config)
    path = reported.run_dir / "report.html"
    with mock.patch("sharmill.report.page.write_page", side_effect=ZeroDivisionError("by nothing")):
        said = report_on_run(config, make_stages(config), decode=False)
    assert "ZeroDivisionError: by nothing" in said
    assert f"sharmill report {reported.run_dir}" in said
    assert report_on_run(config, make_stages(config), decode=False).startswith(f"report: {path}, ")
    assert "Codes are not decoded in cluster jobs" in path.read_text()


def test_the_section_in_the_documentation_can_be_used(reported):
    text = (REPOSITORY / "docs/extending.md").read_text().split("## A section of the report")[1].split("```python")[1]
    names: dict = {}
    exec(text.split("```")[0], names)
    content = names["SIZES"].make(read_dataset_facts(reported.dataset, {}))
    assert "<tr><td>0</td><td>5</td></tr>" in content

"""``sharmill report``: the page of a run and of a dataset, without a browser."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from importlib.resources import files

import numpy as np
import pytest
import soundfile as sf
from support.reported import Elements
from support.shar import copy, members_of

from sharmill.report.sound import mel_picture, spectrogram


@pytest.fixture(scope="module")
def page(reported, tmp_path_factory):
    """The page of the run."""
    from click.testing import CliRunner

    from sharmill.cli.main import cli

    path = tmp_path_factory.mktemp("page") / "x.html"
    result = CliRunner().invoke(cli, ["report", str(reported.run_dir), "-o", str(path)])
    assert result.exception is None, result.output
    return path.read_text()


def test_the_page_lies_in_the_run_directory_and_says_how_large_it_is(reported, call):
    status, out, _ = call("report", reported.run_dir)
    path = reported.run_dir / "report.html"
    assert status == 0
    assert f"wrote {path}" in out
    path.unlink()


def test_hostile_text_is_text(page):
    elements = Elements(page)
    assert len(elements.of("script")) == 2
    assert len(elements.of("style")) == 1
    assert not [a for _, attributes in elements.found for a in attributes if a.startswith("on")]
    assert {image["src"].split(",")[0] for image in elements.of("img")} == {"data:image/png;base64"}
    assert "<script>document.title='owned'</script>" in elements.text
    assert "{{ 7 * 7 }} {% raw %} &amp; &lt;b&gt;" in elements.text
    assert "<img src=x onerror=alert(1)>.flac" in elements.text


def test_control_characters_and_overrides_of_direction_are_not_in_the_page(page):
    assert not re.findall("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)
    assert "שלום עולם" in page


def test_plotly_is_in_the_page_once_as_it_was_published(page):
    library = files("sharmill.report").joinpath("templates", "plotly-basic.min.js").read_bytes()
    about = files("sharmill.report").joinpath("templates", "plotly-basic.txt").read_text()
    assert page.count(f"<script>{library.decode()}</script>") == 1
    assert hashlib.sha256(library).hexdigest() in about


def test_long_texts_are_cut(page):
    assert "wort " * 100 not in page
    assert "wort " * 50 in page


def test_nothing_is_asked_for_from_elsewhere(page):
    elements = Elements(page)
    assert "default-src 'none'" in elements.of("meta")[2]["content"]
    addresses = [a[key] for _, a in elements.found for key in ("src", "href", "data", "action") if key in a]
    assert {address.split(":")[0] for address in addresses if not address.startswith("#")} == {"data"}
    of_page = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "http" not in re.sub(r"http-equiv", "", of_page)


def test_accounts_and_rejects_with_examples_are_there(page):
    text = Elements(page).text
    for word in ("missing_audio", "empty_text", "From input to output", "To do:", "speaker_key"):
        assert word in text


def test_every_pair_has_players(page):
    elements = Elements(page)
    clips = [audio["src"] for audio in elements.of("audio")]
    assert len(clips) == 32
    samples, rate = sf.read(io.BytesIO(base64.b64decode(clips[0].removeprefix("data:audio/mpeg;base64,"))))
    assert rate == 16000
    assert len(samples) >= 16000
    assert sum((button.get("aria-label") or "").startswith("Play ") for button in elements.of("button")) == 32


def test_codes_are_decoded_where_the_codec_is_trained(page):
    assert page.count("Play target decoded from toy of ") == page.count("Play context decoded from toy of ") == 8


def test_worst_pairs_are_those_of_all_cuts(page):
    rows = {found[0]: found[1] for found in re.findall(r'data-reasons="([^"]*)".*?utt(\d)', page, re.DOTALL)}
    reasons = {number: names.split("|") for names, number in rows.items()}
    assert "lowest similarity" in reasons["7"]
    assert "longest" in reasons["7"]
    assert "highest character rate" in reasons["7"]


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


def test_a_run_without_a_dataset_has_its_accounts(reported, call, tmp_path):
    run_dir = copy(reported.run_dir, tmp_path / "run")
    config = (run_dir / "resolved_config.yaml").read_text()
    (run_dir / "resolved_config.yaml").write_text(config.replace(str(reported.dataset), str(tmp_path / "gone")))
    assert call("report", run_dir)[0] == 0
    page = (run_dir / "report.html").read_text()
    assert "no finished dataset" in page
    assert "missing_audio" in page


def test_damaged_items_are_left_out_and_named(reported, call, tmp_path):
    dataset = copy(reported.dataset, tmp_path / "damaged")
    path = dataset / "target_audio/recording.000000.tar"
    data = path.read_bytes()
    flac = next(content for name, content in members_of(path) if name.endswith("flac"))
    path.write_bytes(data.replace(flac, b"x" * len(flac)))
    assert call("report", dataset, "-o", tmp_path / "x.html")[0] == 0
    assert "could not be read" in (tmp_path / "x.html").read_text()


@pytest.mark.parametrize("fact", ["sampling_rate", "samples_per_frame", "num_codebooks", "codebook_size"])
def test_a_codec_without_a_size_is_one_line(fact, reported, call, tmp_path):
    dataset = copy(reported.dataset, tmp_path / "foreign")
    path = dataset / "dataset.json"
    record = json.loads(path.read_text())
    record["codecs"][0][fact] = 0
    path.unlink()
    path.write_text(json.dumps(record))
    status, _, err = call("report", dataset, "-o", tmp_path / "x.html")
    assert status != 0
    assert err.count("\n") == 1
    assert fact in err


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
    assert out == ""
    assert err.count("\n") == 1
    assert named in err


def test_the_spectrogram_of_silence_is_a_picture():
    assert mel_picture(spectrogram(np.zeros(10, np.float32), 16000), 16000).startswith("data:image/png;base64,iVBOR")

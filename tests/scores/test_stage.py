"""Tests of the stage ``scores``: columns of a dataset, faults of scorers, own scorers, and the report's section."""

from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from lhotse import CutSet
from support.project import Project, raises, stage_of, voice

from sharmill.audio.sound import measure_sound
from sharmill.cli.main import cli
from sharmill.config import load_config
from sharmill.config.loading import to_yaml
from sharmill.engine.executor import Listener
from sharmill.errors import ConfigError
from sharmill.pipeline import run_dataset
from sharmill.shar import open_shar

TOY = "python:support.scorers:ToyScorer"


def configure(folder, scorers, **keys):
    """Configure a dataset of six recordings at 16 kHz in three shards, with these scorers."""
    project = Project(folder)
    for number in range(6):
        project.add(f"{folder.name}{number}.flac", voice(0.5, seed=number) / (number + 1), speaker=f"s{number}")
    values = {"match": None, "write": {"shard_size": 2}, "encode": {"codecs": []}, "executor": {"workers": 1}}
    return project.configure(**values | {"scores": {"scorers": scorers}} | keys)


def sharmill(*arguments):
    """Run a command in this process, and return what it prints."""
    result = CliRunner().invoke(cli, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def files_of(dataset):
    return {path.relative_to(dataset): path.read_bytes() for path in Path(dataset).rglob("*.gz")}


def test_columns_are_read_filtered_merged_split_and_validated(tmp_path):
    one, two = (configure(tmp_path / name, ["signal", "text"]) for name in ("one", "two"))
    for config in (one, two):
        assert run_dataset(config, Listener()).num_errors == 0
    cuts = list(open_shar(one.dataset_dir, ["cuts", "target_audio", "loudness", "bandwidth", "characters_per_second"]))
    sounds = [measure_sound(cut.load_audio()[0], 16000) for cut in cuts]
    assert [(cut.loudness, cut.bandwidth) for cut in cuts] == [(one.loudness, one.bandwidth) for one in sounds]
    assert [cut.characters_per_second for cut in cuts] == [len(cut.supervisions[0].text) / 0.5 for cut in cuts]
    merged, parts = tmp_path / "merged", tmp_path / "parts"
    sharmill("merge", one.dataset_dir, two.dataset_dir, merged)
    sharmill("split", merged, parts, "--by-speaker", "--valid", "30%", "--where", "loudness > -25")
    for dataset in (merged, parts / "train", parts / "valid"):
        sharmill("validate", dataset)
    found = [
        cut.loudness
        for part in ("train", "valid")
        for cut in CutSet.from_shar(
            fields={name: sorted(map(str, (parts / part / name).glob("*.gz"))) for name in ("cuts", "loudness")}
        )
    ]
    expected = [cut.loudness for cut in open_shar(merged, where="loudness > -25 and snr <= 100")]
    assert sorted(found) == sorted(expected)
    assert 0 < len(expected) < 12


def test_bytes_are_equal_for_any_ranks_and_after_a_kill(tmp_path):
    found = []
    for name, workers in (("one", 1), ("two", 2), ("killed", 1)):
        folder = tmp_path / name / "project"
        config = configure(folder, [{"scorer": TOY, "kill": str(tmp_path / "killed/mark")}, "signal"],
                           executor={"workers": workers})  # fmt: skip
        if name == "killed":
            process = get_context("fork").Process(target=run_dataset, args=(config, Listener()))
            process.start()
            process.join()
            assert (tmp_path / "killed/mark").exists()
        else:
            (tmp_path / "killed").mkdir(exist_ok=True)
            (tmp_path / "killed/mark").touch()
        assert run_dataset(config, Listener()).num_errors == 0
        (tmp_path / "killed/mark").unlink()
        found.append(files_of(config.dataset_dir))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 3 * (1 + 2 + 7)


@pytest.mark.parametrize(
    ("fault", "words"), [("raises", "KeyError: 'no such voice'"), ("nan", "no finite value"),
                         ("None", "no finite value"), ("inf", "no finite value")],
)  # fmt: skip
def test_a_clip_without_a_score_has_none_and_is_counted(fault, words, tmp_path):
    config = configure(tmp_path / "one", [{"scorer": TOY, "fault": fault}, "signal"])
    result = run_dataset(config, Listener())
    assert result.num_errors == 0
    (note,) = stage_of(config, "scores").dir.read_totals().notes
    assert note.startswith(f"{TOY} gave no score for 1 of 6 cuts; the first: ")
    assert words in note
    cuts = list(open_shar(config.dataset_dir))
    lacking = [cut for cut in cuts if cut.supervisions[0].text.endswith("1.flac")]
    peaks = {cut.id: (cut.custom or {}).get("toy_peak") for cut in cuts}
    assert [id for id, peak in peaks.items() if peak is None] == [cut.id for cut in lacking]
    assert all(cut.has_custom("loudness") for cut in cuts)
    assert lacking[0].has_custom("toy_length") == (fault != "raises")


def test_clips_that_models_cannot_take_have_no_score(tmp_path):
    project = Project(tmp_path / "two")
    project.add("whole.flac", voice(0.5), speaker="a")
    project.add("one sample.flac", np.full(1, 0.5), rate=48000, speaker="b")
    project.add("odd rate.flac", voice(0.5, 44101), rate=44101, speaker="c")
    config = project.configure(
        match=None, encode={"codecs": []}, executor={"workers": 1}, scores={"scorers": ["speech", "dnsmos", "text"]}
    )
    assert run_dataset(config, Listener()).num_errors == 0
    notes = stage_of(config, "scores").dir.read_totals().notes
    assert [note[:32] for note in notes] == ["speech gave no score for 2 of 3 ", "dnsmos gave no score for 2 of 3 "]
    found = {cut.supervisions[0].text: cut.custom or {} for cut in open_shar(config.dataset_dir)}
    assert [name for name, custom in found.items() if "dnsmos_p808" in custom] == ["text of whole.flac"]
    assert all("characters_per_second" in custom for custom in found.values())


@pytest.mark.parametrize(("fault", "words"), [("nothing", "nothing"), ("short", "(1, 2)"), ("narrow", "(2, 1)"),
                                              ("raises everywhere", "for 6 of 6 cuts")])  # fmt: skip
def test_a_broken_scorer_ends_the_run_with_its_name(fault, words, tmp_path):
    config = configure(tmp_path / "one", [{"scorer": TOY, "fault": fault}])
    with pytest.raises(Exception, match="ToyScorer") as caught:
        run_dataset(config, Listener())
    assert caught.value.code == "bad_plugin"
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("scores", "code", "words"),
    [
        ({"scorers": ["signl"]}, "unknown_name", "did you mean 'signal'"),
        ({"scorers": []}, "bad_config_value", "scorers is empty"),
        ({"scorers": ["signal", {"scorer": "signal"}]}, "bad_config_value", "loudness"),
        ({"scorers": ["python:support.scorers:LacksColumns"]}, "bad_plugin", "sharmill.scores.scorer.Scorer"),
        ({"scorers": [{"scorer": TOY, "option": "nan"}]}, "unknown_key", "option"),
        ([{"name": "a", "scorers": ["text"]}, {"name": "b", "scorers": ["text"]}], "bad_config_value", "scores/a"),
    ],
)
def test_a_wrong_section_is_refused_before_any_work(scores, code, words, tmp_path):
    with raises(ConfigError, code, words):
        run_dataset(configure(tmp_path / "one", [], scores=scores), Listener())
    assert not (tmp_path / "one/run").exists()


def test_a_later_pass_scores_a_finished_dataset_with_a_prefix(tmp_path):
    config = configure(tmp_path / "one", [TOY])
    assert run_dataset(config, Listener()).num_errors == 0
    before = files_of(config.dataset_dir)
    later = configure(tmp_path / "one", [], sources=[], run_dir=str(tmp_path / "later"),
                      scores=[{"name": "again", "scorers": [{"scorer": TOY, "prefix": "later_"}]}])  # fmt: skip
    (tmp_path / "again.yaml").write_bytes(to_yaml(later))
    assert run_dataset(load_config(tmp_path / "again.yaml"), Listener(), stages=["scores"]).num_errors == 0
    cuts = list(open_shar(config.dataset_dir))
    assert [cut.later_toy_peak for cut in cuts] == [cut.toy_peak for cut in cuts]
    assert before.items() <= files_of(config.dataset_dir).items()
    assert "later_toy_peak" in sharmill("inspect", config.dataset_dir)


def test_only_scorers_that_use_a_device_ask_for_one(tmp_path):
    resources = [
        stage_of(configure(tmp_path / "one", scorers), "scores").resource for scorers in (["signal"], ["text", "mos"])
    ]
    assert resources == ["cpu", "gpu"]


def test_the_report_shows_columns_with_thresholds_and_players(tmp_path):
    config = configure(tmp_path / "one", ["signal"])
    assert run_dataset(config, Listener()).num_errors == 0
    sharmill("report", config.run_dir)
    page = Path(config.run_dir, "report.html").read_text()
    section = page[page.index('id="scores"') :]
    section = section[: section.index("</section>")]
    loudest = max(cut.loudness for cut in open_shar(config.dataset_dir))
    assert f"highest loudness: {loudest:.3g}" in section
    assert section.count("<figcaption>") == 7
    assert section.count('<audio controls preload="none" src="data:audio/ogg') >= 2
    assert "≥ keeps 95 %" in section

"""A codec without codes for a segment: rejects, cuts, readers, and the cause of the failure."""

import json
import logging
import os
import socket

import pytest
from click.testing import CliRunner
from nemo.collections.common.data.lhotse import get_lhotse_dataloader_from_config
from support.project import (
    TINY_CODEC,
    Project,
    check_dataset,
    lines,
    numbers,
    raises,
    read_with_lhotse,
    run,
    run_sharmill,
    shar_fields,
    snapshot,
    voice,
)
from support.training import AsIs, flat, number, take

from sharmill.cli.main import cli
from sharmill.config import to_yaml
from sharmill.engine.order import make_stages
from sharmill.errors import ConfigError
from sharmill.grow.join import append_dataset, merge_datasets
from sharmill.grow.split import split_dataset
from sharmill.shar import open_shar
from sharmill.shar.index import read_dataset
from sharmill.shar.items import read_field
from sharmill.shar.sidecars import write_sidecars
from sharmill.training import get_dataloader

MODEL = "python:support.plugin.tiny_speech:{}:{}"
GOOD = {"name": "good", "model": TINY_CODEC}
BAD = {kind: {"name": kind, "model": MODEL.format("BadCodec", kind)} for kind in ("nan", "index", "frames")}
ALL = [0, 1, 2, 3, 4, 5]


def make(folder, seconds, codecs=(GOOD, BAD["nan"]), prefix="", **encode):
    """A dataset of utterances of these lengths in two voices, without codes, and its configuration, also as a file."""
    project = Project(folder)
    for place, duration in enumerate(seconds):
        speaker = f"{prefix}{place in (2, 3, 4)}"
        project.add(f"{prefix}{place}.flac", voice(duration, seed=place), speaker=speaker, number=place)
    config = project.write(
        [5, 0, 3, 2, 2, 0], write={"shard_size": 2, "order": "manifest"}, match={"min_duration": 0.0},
        encode={"codecs": list(codecs), "batch_seconds": 10.0} | encode,
    )  # fmt: skip
    (folder / "config.yaml").write_bytes(to_yaml(config))
    return project, config


def encode(config):
    """The results of the stages that bring the codes of all codecs into a dataset, in this process."""
    return [run(stage) for stage in make_stages(config, ["encode"])]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset in which the target of cut 5 and the context of cut 0 have codes only of ``good``."""
    project, _ = make(tmp_path_factory.mktemp("bad"), [1.0] * 5 + [4.0], unit_seconds=5.0)
    path = project.folder / "config.yaml"
    return (
        project,
        path,
        run_sharmill("run", path, "encode", "validate", "executor.workers=1", "executor.feeders=1").stdout,
    )


def test_the_segment_and_its_cuts_are_noted_for_this_codec_alone(made):
    project, _, said = made
    assert "encode/nan: 1 segments without codes" in said
    assert "encode/nan: 2 cuts without codes" in said
    noted = [(one["stage"], one["reason"], one["record"]) for one in lines(project.run_dir / "bad_codes.jsonl")]
    cuts = {number(cut): cut.id for cut in open_shar(project.dataset, [])}
    place = f"{project.dataset}/target_audio/recording.000002.tar at byte "
    assert noted[0][2].pop("place").startswith(place)
    assert noted == [
        ("encode/nan", "bad_codes", {"segment": 0}),
        *(("encode/nan", "bad_codes", {"cut": cuts[cut]}) for cut in (0, 5)),
    ]
    assert lines(project.run_dir / "rejects.jsonl") == []
    (log,) = (project.run_dir / "encode/nan/logs").glob("rank-*.log")
    words = f"unit 0, rank 0 on {socket.gethostname()}: bad_codes of {{'segment': 0, 'place': '{place}"
    assert words in log.read_text()
    assert "nan to nan" in log.read_text()


@pytest.mark.parametrize("kind", ["index", "frames"])
def test_whatever_was_wrong_the_bytes_are_the_same(made, tmp_path, kind):
    project, config = make(tmp_path, [1.0] * 5 + [4.0], [BAD[kind]], unit_seconds=5.0)
    assert all(result.ok for result in encode(config))
    assert snapshot(project.dataset / f"codes_{kind}") == snapshot(made[0].dataset / "codes_nan")


def test_only_the_codes_of_the_segment_are_missing(made):
    project, _, _ = made
    files = {kind: snapshot(project.dataset / f"codes_{kind}") for kind in ("good", "nan")}
    for shard, field, bad in ((0, "context_codes", 0), (2, "target_codes", 1)):
        good, found = (
            list(read_field(project.dataset / f"codes_{kind}/{field}/codes.{shard:06d}.tar"))
            for kind in ("good", "nan")
        )
        assert [item.extension for item in found] == ["nodata" if place == bad else "npy" for place in (0, 1)]
        assert found[1 - bad] == good[1 - bad]
    assert files["good"]["target_codes/codes.000000.tar"] == files["nan"]["target_codes/codes.000000.tar"]
    may_lack = {field.name for field in read_dataset(project.dataset).layout if field.optional}
    assert may_lack == {"codes_nan/target_codes", "codes_nan/context_codes"}


@pytest.mark.slow
def test_begun_anew_by_three_ranks_all_bytes_are_the_same(made):
    project, config, _ = made
    before = snapshot(project.dataset), (project.run_dir / "bad_codes.jsonl").read_bytes()
    run_sharmill("run", config, "encode", "--restart", "executor.workers=3")
    assert (snapshot(project.dataset), (project.run_dir / "bad_codes.jsonl").read_bytes()) == before


@pytest.mark.parametrize(("fields", "codec", "expected"), [
    (None, "nan", [1, 2, 3, 4]),
    (["target_codes"], "nan", [0, 1, 2, 3, 4]),
    (["codes_nan/context_codes"], None, [1, 2, 3, 4, 5]),
    (["target_audio", "context_audio"], None, ALL),
    (None, "good", ALL),
])  # fmt: skip
def test_the_reader_skips_and_counts_cuts_without_a_field(made, caplog, fields, codec, expected):
    cuts = open_shar(made[0].dataset, fields, codec=codec)
    with caplog.at_level(logging.WARNING):
        assert numbers(cuts) == expected
    assert cuts.data.num_left_out == 6 - len(expected)
    assert (f"{6 - len(expected)} cuts were left out" in caplog.text) == (len(expected) < 6)


def test_random_access_resuming_and_ranks_leave_them_out_too(made, tmp_path):
    dataset = made[0].dataset
    write_sidecars(dataset, tmp_path)
    options = {"codec": "nan", "shuffle": "global", "sidecars": tmp_path}
    parts = [numbers(open_shar(dataset, rank=rank, world_size=2, **options)) for rank in (0, 1)]
    assert sorted(parts[0] + parts[1]) == [1, 2, 3, 4]
    first, rest = open_shar(dataset, **options), open_shar(dataset, **options)
    running = iter(first)
    begun = numbers([next(running)])
    rest.data.load_state_dict(first.data.state_dict())
    assert sorted(begun + numbers(rest)) == [1, 2, 3, 4]
    with raises(ConfigError, "bad_config_value", "tail='drop'", "target_codes"):
        open_shar(dataset, ["target_codes"], codec="nan", tail="drop")


def test_training_gets_batches_of_the_others(made):
    entry = {"type": "sharmill", "dataset": str(made[0].dataset), "codec": "nan"}
    loader = get_dataloader({"input_cfg": [entry], "force_finite": True, "batch_size": 4, "num_workers": 1}, 0, 1)
    (batch,) = take(loader)
    assert batch["target_codes"].shape[0] == batch["context_codes"].shape[0] == 4


def test_readers_of_lhotse_and_nemo_ignore_the_field(made):
    dataset = made[0].dataset
    settings = {"shar_path": shar_fields(dataset, "nan"), "force_finite": True, "batch_size": 4, "sample_rate": 16000}
    of_nemo = flat(take(get_lhotse_dataloader_from_config(settings, 0, 1, AsIs())))
    for cuts in (list(read_with_lhotse(dataset, "nan")), of_nemo):
        assert sorted(numbers(cuts)) == ALL
        for field, bad in (("target_codes", 5), ("context_codes", 0)):
            assert [number(cut) for cut in cuts if not cut.has_custom(field)] == [bad]


def test_the_export_leaves_them_out_also_when_it_goes_on(made, tmp_path):
    for _ in range(2):
        arguments = ["export", str(made[0].dataset), str(tmp_path), "--to", "nemo_codes", "--codec", "nan"]
        done = CliRunner().invoke(cli, arguments)
        assert "4 cuts" in done.output
        assert "left out 2 cuts without codes" in done.output
    assert [line["number"] for line in lines(tmp_path / "manifest.json")] == [1, 2, 3, 4]


def test_the_checker_accepts_and_counts_them_at_every_level(made, tmp_path):
    _, config, said = made
    assert "validation: no findings" in said
    level = ("--deep", "--recheck-codes", "1", "validate.against_sources=true")
    done = run_sharmill("validate", config, *level, "--json", tmp_path / "report.json")
    assert "1 cut without codes_nan/target_codes" in done.stdout
    checked = json.loads((tmp_path / "report.json").read_text())["checked"]
    assert (checked["cuts without codes_nan/context_codes"], checked["records found as cuts"]) == (1, 6)


@pytest.mark.slow
def test_the_page_and_a_look_at_the_cut_say_so(made):
    project, _, _ = made
    bad = next(cut.id for cut in open_shar(project.dataset, []) if number(cut) == 5)
    run_sharmill("report", project.run_dir)
    assert "the cut has no target_codes" in (project.run_dir / "report.html").read_text()
    shown = run_sharmill("inspect", project.dataset, env=os.environ | {"COLUMNS": "300"}).stdout
    assert "which may be missing" in shown
    shown = json.loads(run_sharmill("inspect", project.dataset, bad, "--json").stdout)["fields"]
    assert shown["codes_nan/target_codes"]["shape"] == "nothing"


def test_such_datasets_are_merged_appended_to_and_split(made, tmp_path):
    whole, config = make(tmp_path / "whole", [1.0] * 6, prefix="w", unit_seconds=5.0)
    assert all(result.ok for result in encode(config))
    may_lack = {field.name for field in read_dataset(made[0].dataset).layout if field.optional}
    for sources in ((made[0].dataset, whole.dataset), (whole.dataset, made[0].dataset)):
        grown = tmp_path / f"before {sources[1].parent.name}"
        merge_datasets(sources, grown)
        assert check_dataset(grown, tmp_path / f"check of {grown.name}").findings == []
        assert {field.name for field in read_dataset(grown).layout if field.optional} == may_lack
        assert len(list(open_shar(grown, codec="nan"))) == 10
    append_dataset(whole.dataset, made[0].dataset)
    assert len(list(open_shar(whole.dataset, codec="nan"))) == 10
    split_dataset(made[0].dataset, tmp_path / "split", {"valid": 0.3}, workers=1)
    assert sum(len(list(open_shar(tmp_path / "split" / part, codec="nan"))) for part in ("train", "valid")) == 4


def test_a_unit_without_codes_is_accepted_from_a_sound_rank(tmp_path):
    project, config = make(tmp_path, [1.0] * 5 + [4.0], [BAD["nan"]], unit_seconds=2.0)
    assert all(result.ok for result in encode(config))
    assert numbers(open_shar(project.dataset)) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(("when", "said"), [("speech", "this device is broken"), ("load", "a rank cannot be set up")])
def test_a_rank_without_codes_for_any_unit_is_broken(tmp_path, when, said):
    project, config = make(tmp_path, [1.0] * 6, [GOOD], unit_seconds=1.0)
    assert all(result.ok for result in encode(config))
    good = snapshot(project.dataset / "codes_good")
    codec = {"name": "rank", "model": MODEL.format("BrokenRankCodec", tmp_path / when)}
    path = project.folder / "config.yaml"
    run_sharmill("run", path, "encode", "executor.workers=2", f"encode.codecs=[{json.dumps(codec)}]")
    assert snapshot(project.dataset / "codes_rank") == good
    logs = (project.run_dir / "encode/rank/logs").glob("rank-*.log")
    assert said in "".join(path.read_text() for path in logs)
    assert not (project.run_dir / "bad_codes.jsonl").exists()


def test_a_codec_that_gives_codes_for_nothing_ends_the_run(tmp_path):
    _, config = make(tmp_path, [4.0] * 6, [BAD["nan"]], unit_seconds=8.0)
    survey, stage, _ = make_stages(config, ["encode"])
    assert run(survey).ok
    failures = run(stage).failures
    assert len(failures) == 3
    assert "none of the 2 segments" in failures[0].message

"""The driver reads no archives: what the stages of codes need of them is read by ranks."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.manifests import KeepErrors
from support.shar import ToyCodec, codec_stages, loading, run, voice

from sharmill.engine.run import run_stage
from sharmill.executors.local import LocalExecutor


@contextmanager
def opened_archives() -> Iterator[list[str]]:
    """Notes the archives that this process opens in the meantime."""
    opened: list[str] = []
    noting = True

    def note(event, arguments):
        if noting and event == "open" and str(arguments[0]).endswith((".tar", ".jsonl.gz")):
            opened.append(str(arguments[0]))

    sys.addaudithook(note)  # it stays
    try:
        yield opened
    finally:
        noting = False


@pytest.fixture
def config(project):
    """A dataset of six cuts in three shards whose run directory is gone, as a published one's."""
    for number in range(6):
        project.add(f"{number}.flac", voice(0.3 + number / 20, seed=number), number=number)
    config = project.write([1, 0, 0, 0, 0, 0], write={"shard_size": 2, "order": "shuffle"})
    shutil.rmtree(config.run_dir)
    return config


def test_the_hashes_of_a_dataset_without_a_run_directory_come_from_ranks(config):
    survey, *_ = codec_stages(config)
    with opened_archives() as opened:
        result = run_stage(survey, LocalExecutor(2), KeepErrors(), max_reject_fraction=1.0)
    assert result.ok
    assert len(survey.segments()) == 6
    assert opened == []


def test_in_one_process_the_same_opens_every_archive(config):
    with opened_archives() as opened:
        assert run(codec_stages(config)[0]).ok
    assert len({name for name in opened if name.endswith(".tar")}) == 6


def test_plans_and_ends_of_the_stages_of_codes_open_none(config, tmp_path):
    survey, encode, assemble = codec_stages(config)
    assert run(survey).ok
    with loading(ToyCodec()):
        assert run(encode).ok
    (tmp_path / "plan").mkdir()
    with opened_archives() as opened:
        for stage in (survey, encode, assemble):
            stage.identity()
            assert list(stage.plan(tmp_path / "plan"))
    assert opened == []

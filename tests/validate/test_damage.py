"""Every kind of damage to a finished dataset is found, at the level that can see it, and no reader is fooled by it.

Files are damaged in two ways: alone, as a disk or a copy does it, so that the index tells; and with the index of the
damaged files, as a faulty writer leaves it, so that only the content tells. The kinds are in ``damage_structure`` and
``damage_content``.
"""

from __future__ import annotations

import random
import re

import pytest
from support.damage import FILES, change_codec, change_description, index_as_written
from support.damage_content import CONTENT_DAMAGED, DESCRIPTION_DAMAGED, RECORDS_LOST
from support.damage_structure import DIRECTORY_DAMAGED, FILES_DAMAGED
from support.errors import raises
from support.shar import ToyCodec, copy, run, snapshot

from sharmill.engine.rundir import RunDir
from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.sources.nemo import NemoSource
from sharmill.validate.accounts import ExpectedRecords
from sharmill.validate.stage import ValidateStage

IN_TWO_WAYS = FILES_DAMAGED | CONTENT_DAMAGED
IN_ONE_WAY = DIRECTORY_DAMAGED | DESCRIPTION_DAMAGED
KINDS = IN_TWO_WAYS | IN_ONE_WAY | RECORDS_LOST
STRUCTURE = FILES_DAMAGED | DIRECTORY_DAMAGED

# Options of the checker, by level, for a dataset.
LEVELS = {
    "default": lambda dataset: {},
    "deep": lambda dataset: {"deep": True},
    "recheck-codes": lambda dataset: {"recheck_codes": 1.0},
    "against": lambda dataset: {
        "against": ExpectedRecords(
            sources=(NemoSource(manifest=str(dataset.with_name("project") / "small.json"), audio_root="."),)
        )
    },
}
FIELDS = ["target_audio", "context_audio", "target_codes", "context_codes"]
CHANGED_BYTES = {"wrong_size", "wrong_checksum"}


@pytest.fixture(autouse=True)
def toy_codec(monkeypatch):
    """What made the codes is what is loaded to make them again."""
    monkeypatch.setattr("sharmill.models.recorded.load_codec", lambda model, **trust: ToyCodec())


@pytest.fixture
def dataset(finished, tmp_path):
    for name in ("again", "foreign", "project"):
        (tmp_path / name).symlink_to(finished / name)
    return copy(finished / "dataset", tmp_path / "dataset")


def check(dataset, level="default"):
    stage = ValidateStage(dataset, RunDir(dataset.with_name(f"check-{level}")), **LEVELS[level](dataset))
    result = run(stage)
    assert result.ok, result.failures
    return stage.findings()


def codes_of(findings):
    return {finding.code for finding in findings}


@pytest.mark.parametrize("name", IN_TWO_WAYS)
def test_the_index_tells_every_file_that_has_changed(dataset, name):
    before = snapshot(dataset)
    KINDS[name].do(dataset)
    after = snapshot(dataset)
    changed = {file for file in before if after[file] != before[file]}
    findings = check(dataset)
    assert changed
    assert {finding.where for finding in findings if finding.code in CHANGED_BYTES} == changed


@pytest.mark.parametrize("name", IN_TWO_WAYS | RECORDS_LOST)
def test_the_content_or_the_account_of_the_manifest_tells_where_the_index_cannot(dataset, name):
    kind = KINDS[name]
    kind.do(dataset)
    index_as_written(dataset)
    findings = check(dataset, kind.level)
    assert codes_of(findings) == set(kind.codes.split()), findings


@pytest.mark.parametrize("name", IN_ONE_WAY)
def test_what_is_wrong_with_the_directory_or_the_index_is_found(dataset, name):
    kind = KINDS[name]
    kind.do(dataset)
    findings = check(dataset, kind.level)
    assert codes_of(findings) == set(kind.codes.split()), findings


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.level != "default"])
def test_what_is_found_at_a_further_level_is_not_seen_before(dataset, name):
    KINDS[name].do(dataset)
    index_as_written(dataset)
    assert check(dataset) == []


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_found_where_nothing_is_damaged(dataset, level):
    assert check(dataset, level) == []


@pytest.mark.parametrize("facts", [{"checksum": "other"}, {"sampling_rate": 32000, "samples_per_frame": 640}])
def test_codes_are_not_compared_with_those_of_a_codec_that_is_another(dataset, facts):
    change_codec(**facts)(dataset)
    assert check(dataset) == []
    with raises(ConfigError, "bad_codec", "'toy'"):
        check(dataset, "recheck-codes")


def test_a_dataset_of_another_version_is_refused(dataset):
    change_description(format_version=2)(dataset)
    for use in (check, lambda directory: list(open_shar(directory))):
        with raises(ConfigError, "wrong_version", "2"):
            use(dataset)


@pytest.mark.parametrize("file", FILES)
def test_any_flipped_bit_is_found_and_no_reader_loses_or_moves_a_cut_by_it(dataset, right, file):
    path = dataset / file
    data = path.read_bytes()
    choice = random.Random(file)
    for at in (choice.randrange(len(data)) for _ in range(8)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << choice.randrange(8)
        path.write_bytes(flipped)
        assert (file, "wrong_checksum") in {(finding.where, finding.code) for finding in check(dataset)}, at
        try:
            cuts = [cut.id for cut in open_shar(dataset, FIELDS)]
        except DamagedShard:
            continue
        assert cuts == [cut[0] for cut in right], at


def read(dataset):
    """What a reader gets of each cut, and the error that ends it."""
    cuts = []
    try:
        for cut in open_shar(dataset, FIELDS):
            cuts.append(
                (
                    cut.id,
                    cut.to_dict()["supervisions"],
                    cut.start,
                    cut.duration,
                    [cut.load_target_audio().tobytes(), cut.load_context_audio().tobytes()],
                    [cut.load_target_codes().tobytes(), cut.load_context_codes().tobytes()],
                )
            )
    except (DamagedShard, ConfigError) as error:
        return cuts, error
    return cuts, None


@pytest.fixture(scope="module")
def right(finished):
    cuts, error = read(finished / "dataset")
    assert (len(cuts), error) == (7, None)
    return cuts


@pytest.mark.parametrize(
    ("name", "index"),
    [(name, index) for index in ("stale", "fresh") for name in (STRUCTURE if index == "stale" else FILES_DAMAGED)],
)
def test_a_reader_refuses_damaged_structure_or_reads_all_rightly(dataset, right, name, index):
    KINDS[name].do(dataset)
    if index == "fresh":
        index_as_written(dataset)
    cuts, error = read(dataset)
    assert cuts == right[: len(cuts)]
    assert error is not None or len(cuts) == len(right)


@pytest.mark.parametrize("name", CONTENT_DAMAGED)
def test_a_reader_of_wrong_content_gets_as_many_cuts_or_an_error(dataset, right, name):
    KINDS[name].do(dataset)
    order, ids = [cut[0] for cut in right], []
    try:
        ids.extend(cut.id for cut in open_shar(dataset, FIELDS))
    except DamagedShard:
        assert ids == order[: len(ids)]
    else:
        assert len(ids) == len(order)


@pytest.mark.parametrize(
    "name", [name for name in CONTENT_DAMAGED if re.match("a recording that is|a command in", name)]
)
@pytest.mark.parametrize("fields", [FIELDS, []])
def test_a_reader_never_takes_what_lhotse_would_run_or_fetch(dataset, tmp_path, monkeypatch, name, fields):
    monkeypatch.chdir(tmp_path)
    KINDS[name].do(dataset)
    with raises(DamagedShard, "damaged_shard"):
        list(open_shar(dataset, fields))
    assert not (tmp_path / "ran").exists()

"""``sharmill export --to nemo_codes``: the files it writes, resuming an interrupted export, and refusals."""

import json
import shutil

import pytest
import torch
from support.damage import flip_bit
from support.project import Project, copy, raises, snapshot, voice

from sharmill.errors import ConfigError, DamagedShard
from sharmill.export.run import export_dataset
from sharmill.shar import open_shar


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Seven utterances in three shards, with the codes of the codec toy."""
    project = Project(tmp_path_factory.mktemp("export"))
    for number in range(7):
        keys = {"language": "xx", "ipa": "a" * number, "text": f"number {number}\u2028\r"}
        keys |= {"context_audio_codes_path": "/evil.pt", "audio_codes_path": "/evil.pt", "audio_filepath_of": 1,
                 "feature_file": "/evil.pt"}  # fmt: skip
        project.add(f"{number}.flac", voice(0.5 + 0.1 * number, seed=number), **keys)
    project.encode(project.write(write={"shard_size": 3, "order": "manifest"}, match={"min_duration": 0.0}))
    return project


@pytest.fixture(scope="module")
def exported(project):
    return export_dataset(project.dataset, "nemo_codes", project.folder / "out")


def read_manifest(path):
    """Read the manifest as NeMo does: lines of the file in text mode."""
    with path.open(encoding="utf-8") as stream:
        return [json.loads(line) for line in stream.readlines()]


def test_codes_and_texts_of_every_cut(project, exported):
    cuts = list(open_shar(project.dataset, ["target_codes", "context_codes"]))
    lines = read_manifest(exported.manifest)
    assert [line["id"] for line in lines] == [cut.id for cut in cuts]
    assert (exported.num_cuts, exported.seconds) == (7, pytest.approx(sum(cut.duration for cut in cuts)))
    for line, cut in zip(lines, cuts, strict=True):
        target = torch.load(line["target_audio_codes_path"])
        context = torch.load(line["context_audio_codes_path"])
        assert target.dtype == context.dtype == torch.int32
        assert torch.equal(target, torch.from_numpy(cut.load_target_codes()).int())
        assert torch.equal(context, torch.from_numpy(cut.load_context_codes()).int())
        (said,) = cut.supervisions
        record = {key: said.custom[key] for key in ("ipa", "audio_filepath_of", "context_audio_text")}
        record |= {key: getattr(said, key) for key in ("text", "speaker", "language")} | {"duration": cut.duration}
        assert {key: line[key] for key in record} == record
        names_of_files = {key for key in line if key.endswith(("path", "file"))}
        assert names_of_files == {"target_audio_codes_path", "context_audio_codes_path"}
        assert line["context_audio_codes_path"].startswith(str(exported.manifest.parent))


def test_it_goes_on_where_it_was_interrupted(project, exported):
    out = exported.manifest.parent
    before, first = snapshot(out), next((out / "shards" / "000000").glob("*.pt")).stat().st_mtime_ns
    shutil.rmtree(out / "shards" / "000001")
    exported.manifest.unlink()
    assert export_dataset(project.dataset, "nemo_codes", out) == exported
    assert next((out / "shards" / "000000").glob("*.pt")).stat().st_mtime_ns == first
    assert snapshot(out) == before


@pytest.mark.parametrize(("form", "name"), [
    ("nemo_codes", "shards/000001/000001.target.pt"), ("nemo_codes", "shards/000001/lines.jsonl"),
    ("nemo_tarred", "audio_1.tar"), ("nemo_tarred", "sharded_manifests/manifest_1.json"),
])  # fmt: skip
def test_a_damaged_file_of_a_finished_export_is_found(call, project, tmp_path, form, name):
    command = ("export", project.dataset, tmp_path / "o", "--to", form)
    assert "7 cuts" in call(*command)[1]
    before = snapshot(tmp_path / "o")
    flip_bit(name, 100)(tmp_path / "o")
    assert f"{name} has changed since it was written: remove it" in call(*command)[2]
    (tmp_path / "o" / name).unlink()
    call(*command)
    assert snapshot(tmp_path / "o") == before


def test_foreign_folders_are_refused(project, exported, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for out, code, words in (
        (tmp_path, "foreign_output", "other files"),
        (tmp_path / "notes.txt", "bad_usage", "notes.txt"),
        (project.dataset / "export", "bad_usage", "inside the dataset"),
        # The paths in its manifest are absolute.
        (copy(exported.manifest.parent, tmp_path / "moved"), "foreign_output", "another dataset"),
    ):
        with raises(ConfigError, code, words):
            export_dataset(project.dataset, "nemo_codes", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved", "notes.txt"]


def test_unknown_names_and_damage(project, tmp_path):
    for dataset, form, codec, error in (
        (project.dataset, "nemo_codec", None, ("unknown_name", "nemo_codec", "nemo_codes")),
        (project.dataset, "nemo_codes", "mimi", ("unknown_codec", "mimi")),
        (tmp_path, "nemo_codes", None, ("no_dataset",)),
    ):
        with raises(ConfigError, *error):
            export_dataset(dataset, form, tmp_path / "o", codec=codec)
    damaged = copy(project.dataset, tmp_path / "damaged")
    tar = damaged / "codes_toy" / "target_codes" / "codes.000001.tar"
    tar.write_bytes(tar.read_bytes()[:700])
    with raises(DamagedShard, "damaged_shard", "codes.000001.tar"):
        export_dataset(damaged, "nemo_codes", tmp_path / "o")
    assert [path.name for path in (tmp_path / "o" / "shards").iterdir()] == ["000000"]

"""``sharmill export --to nemo_tarred``: its files, its three readers, resuming after a kill, and refusals."""

import re
import signal
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import yaml
from support.project import (
    Project,
    config_for,
    copy,
    lines,
    make_bare_dataset,
    members_of,
    raises,
    reindex,
    run_prepare,
    run_sharmill,
    snapshot,
    voice,
    write_members,
)
from support.training import AsIs, flat

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader
from sharmill.errors import ConfigError, DamagedShard
from sharmill.export.run import export_dataset
from sharmill.shar import open_shar

KEYS_OF_FILES = {"context_audio_filepath", "context_audio_offset", "context_audio_duration", "evil_filepath",
                 "rttm_file", "audio_filename"}  # fmt: skip
BUCKETS = {"buckets": 2, "min_duration": 0.55, "max_duration": 1.45}
# Names that NeMo would split, or that are equal without dots.
SECONDS = {"a.b.flac": 0.6, "a_b.flac": 0.6, "calls/x-sub1.wav": 0.7, "c.flac": 0.8, "d.wav": 0.9, "e.flac": 0.5,
           "f.flac": 1.1, "g.flac": 1.2, "h.flac": 1.3}  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Ten utterances in four shards, the last one a segment of 1.4 s; there are no codes."""
    project = Project(tmp_path_factory.mktemp("tarred"))
    for number, (name, seconds) in enumerate(SECONDS.items()):
        text = f"utterance {'abcdefghi'[number]}"
        project.add(name, voice(seconds, seed=number), text=text, id=number, lang="xx", note="a\u2028b\r",
                    evil_filepath="/evil", rttm_file="/evil", audio_filename="/evil")  # fmt: skip
    project.add("long.flac", voice(3.0), offset=1.5, duration=1.4, text="a segment")
    project.write(write={"shard_size": 3, "order": "manifest", "audio_format": "original"}, match={"min_duration": 0.0})
    return project


@pytest.fixture(scope="module")
def exported(project):
    """The folder of the export as one tarred set."""
    return export_dataset(project.dataset, "nemo_tarred", project.folder / "one").manifest.parent


@pytest.fixture(scope="module")
def bucketed(project):
    """The folder of the export in two buckets."""
    return export_dataset(project.dataset, "nemo_tarred", project.folder / "two", **BUCKETS).manifest


def cuts_of(project):
    return list(open_shar(project.dataset, ["target_audio"]))


def test_audio_of_every_cut_byte_for_byte_and_all_keys(project, exported):
    shards = sorted((project.dataset / "target_audio").iterdir())
    stored = {name.rpartition(".")[0]: data for path in shards for name, data in members_of(path)[::2]}
    rows = lines(exported / "tarred_audio_manifest.json")
    sharded = [lines(exported / "sharded_manifests" / f"manifest_{number}.json") for number in range(4)]
    assert [len(part) for part in sharded] == [3, 3, 2, 2]
    assert rows == [row for part in sharded for row in part]
    assert len({row["audio_filepath"] for row in rows}) == 10
    assert rows[3]["audio_filepath"] == "cut-rec-c-0_00-0_80.flac"
    for row, cut in zip(rows, cuts_of(project), strict=True):
        name, shard, record = row["audio_filepath"], row["shard_id"], dict(cut.supervisions[0].custom)
        assert re.fullmatch(r"[\w-]+\.(flac|wav)", name)
        with tarfile.open(exported / f"audio_{shard}.tar") as archive:
            assert archive.extractfile(name).read() == stored[cut.id]
        source = {"source_audio_filepath": record.pop("audio_filepath"), "source_audio_offset": record.pop("offset")}
        own = {"audio_filepath": name, "shard_id": shard, "cut_id": cut.id, "duration": cut.duration}
        assert row == {"lang": "en"} | {key: record[key] for key in record.keys() - KEYS_OF_FILES} | source | own


def test_durations_are_filtered_and_nemos_metadata_is_written(project, tmp_path):
    options = ["--to", "nemo_tarred", "--min-duration", "0.55", "--max-duration", "1.35"]
    done = run_sharmill("export", project.dataset, tmp_path / "o", *options)
    assert "8 cuts, 0.00 hours; left out 2 cuts of other durations" in done.stdout
    metadata = yaml.safe_load((tmp_path / "o" / "metadata.yaml").read_text())
    config = metadata.pop("dataset_config")
    assert metadata == {"created_datetime": None, "version": 0, "num_samples_per_shard": 2,
                        "is_concatenated_manifest": False, "history": []}  # fmt: skip
    assert {key: value for key, value in config.items() if value} == {
        "num_shards": 4, "min_duration": 0.55, "max_duration": 1.35, "shard_manifests": True,
    }  # fmt: skip
    assert {key for key, value in config.items() if not value} == {
        "shuffle", "shuffle_seed", "sort_in_shards", "slice_with_offset", "keep_files_together", "force_codec",
        "use_lhotse", "use_bucketing", "num_buckets", "bucket_duration_bins",
    }  # fmt: skip


def test_each_bucket_has_the_cuts_of_its_range(project, bucketed):
    for number, (begin, end) in enumerate([(0.55, 1.0), (1.0, 1.45)], start=1):
        rows = lines(bucketed / f"bucket{number}" / "tarred_audio_manifest.json")
        assert [row["cut_id"] for row in rows] == [cut.id for cut in cuts_of(project) if begin <= cut.duration < end]
        sizes = [sum(row["shard_id"] == shard for row in rows) for shard in range(4)]
        assert max(sizes) - min(sizes) <= 1 <= min(sizes)


def by_nemos_lhotse_loader(sets, folder):
    loading = pytest.importorskip("nemo.collections.common.data.lhotse.dataloader")
    omegaconf = pytest.importorskip("omegaconf")
    settings = {
        "manifest_filepath": [[manifest] for manifest, _ in sets],
        "tarred_audio_filepaths": [[tars] for _, tars in sets], "sample_rate": 16000, "batch_size": 2,
        "num_workers": 0, "shuffle": False, "force_finite": True, "seed": 0, "shard_seed": 0,
    }  # fmt: skip
    loader = loading.get_lhotse_dataloader_from_config(omegaconf.OmegaConf.create(settings), 0, 1, dataset=AsIs())
    for cut in flat(loader):
        assert cut.id.startswith("cut-rec-")
        yield cut.custom["cut_id"], cut.supervisions[0].text, cut.load_audio()[0]


def by_nemos_classic_class(sets, folder):
    reading = pytest.importorskip("nemo.collections.asr.data.audio_to_text")
    for sharded, tars in sets:
        # Pass one manifest of all archives, as NeMo's documentation says.
        manifest = sharded.replace("sharded_manifests/manifest__OP_0..3_CL_", "tarred_audio_manifest")
        names = {row["audio_filepath"]: row["cut_id"] for row in lines(folder / manifest)}
        letters = list("abcdefghijklmnopqrstuvwxyz ")
        data = reading.TarredAudioToCharDataset(tars, manifest, letters, sample_rate=16000, return_sample_id=True)
        for samples, _, tokens, _, number in data:
            text = "".join(letters[token] for token in tokens)
            yield names[data.get_manifest_sample(number).audio_file], text, samples.numpy()


def by_sharmill(sets, folder):
    manifests, tars = zip(*sets, strict=True)
    source = {"type": "nemo_tarred", "manifest": list(manifests), "tars": list(tars), "audio_root": str(folder)}
    config = config_for(folder.parent / f"again_{folder.name}", [source], prepare={"min_duration": 0.0})
    reader = SegmentReader(AudioRoots.of([config.sources[0].audio_root]))
    for utterance in run_prepare(config).kept:
        yield utterance.custom["cut_id"], utterance.text, reader.read(utterance.segment).samples


@pytest.mark.parametrize("form", ["exported", "bucketed"])
@pytest.mark.parametrize("read", [
    pytest.param(by_nemos_lhotse_loader, marks=pytest.mark.slow), by_sharmill,
    pytest.param(by_nemos_classic_class, marks=pytest.mark.slow),
])  # fmt: skip
def test_readers_get_the_same_ids_texts_and_samples(project, read, form, request):
    folder = request.getfixturevalue(form)
    folders = [folder] if form == "exported" else [folder / "bucket1", folder / "bucket2"]
    sets = [(f"{one}/sharded_manifests/manifest__OP_0..3_CL_.json", f"{one}/audio__OP_0..3_CL_.tar") for one in folders]
    found = {cut_id: (text, samples) for cut_id, text, samples in read(sets, folder)}
    cuts = [cut for cut in cuts_of(project) if form == "exported" or 0.55 <= cut.duration < 1.45]
    assert found.keys() == {cut.id for cut in cuts}
    for cut in cuts:
        assert found[cut.id][0] == cut.supervisions[0].text
        np.testing.assert_array_equal(found[cut.id][1], cut.load_audio()[0])


def test_a_killed_export_goes_on_with_the_same_bytes(project, bucketed, tmp_path):
    out = tmp_path / "out"
    code = f"""
import os
from sharmill.export.run import export_dataset
export_dataset({str(project.dataset)!r}, "nemo_tarred", {str(out)!r}, **{BUCKETS!r},
               progress=lambda done, total: done == 5 and os.kill(os.getpid(), 9))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    made = [path.name for path in out.rglob("*.*")]
    assert (made.count("audio_0.tar"), made.count("tarred_audio_manifest.json")) == (2, 0)
    # Imitate an export that was killed within an archive, or between an archive and its manifest.
    (out / "bucket1" / f".audio_3.tar.{'0' * 32}.tmp").write_bytes(b"half")
    (out / "bucket2" / "sharded_manifests" / "manifest_0.json").unlink()
    first = (out / "bucket1" / "audio_0.tar").stat().st_mtime_ns
    export_dataset(project.dataset, "nemo_tarred", out, **BUCKETS)
    assert (out / "bucket1" / "audio_0.tar").stat().st_mtime_ns == first
    assert snapshot(out) == snapshot(bucketed)


@pytest.mark.parametrize(("options", "code", "words"), [
    ({"buckets": 0}, "bad_usage", "at least 1"),
    ({"buckets": 10**9, "max_duration": 2.0}, "bad_usage", "at most the number of cuts, 10"),
    ({"buckets": 2}, "bad_usage", "--max-duration"),
    ({"min_duration": 2.0, "max_duration": 2.0}, "bad_usage", "less than --max-duration 2"),
    ({"min_duration": float("nan")}, "bad_usage", "--min-duration nan"),
    ({"buckets": 3, "max_duration": 1.5}, "too_few_cuts", "less than 0.5 s"),
    ({"min_duration": 7.0}, "too_few_cuts", "at least 7 s"),
    ({"codec": "toy"}, "bad_usage", "nemo_tarred has no option codec"),
])  # fmt: skip
def test_wrong_options_are_refused_before_any_work(project, tmp_path, options, code, words):
    with raises(ConfigError, code, words):
        export_dataset(project.dataset, "nemo_tarred", tmp_path / "o", **options)
    assert not (tmp_path / "o").exists()


def test_other_folders_and_unusable_datasets_are_refused(project, exported, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    bare, other = make_bare_dataset(tmp_path / "bare", [2], codes=True), copy(project.dataset, tmp_path / "other")
    tar = other / "target_audio" / "recording.000000.tar"
    write_members(tar, [(name.replace(".flac", ".m4a"), data) for name, data in members_of(tar)])
    reindex(other)
    for dataset, out, options, code, words in (
        (project.dataset, tmp_path, {}, "foreign_output", "other files"),
        (project.dataset, exported, BUCKETS, "foreign_output", "with other options"),
        (project.dataset, project.dataset / "o", {}, "bad_usage", "inside the dataset"),
        (bare, tmp_path / "o", {}, "bad_usage", "no target_audio"),
        (other, tmp_path / "o", {}, "unsupported_format", "cut-rec-a.b-0.00-0.60 is .m4a"),
    ):
        with raises(ConfigError, code, words):
            export_dataset(dataset, "nemo_tarred", out, **options)


@pytest.mark.parametrize("damage", [lambda data: data[:700], lambda data: data[:2000] + b"\1" + data[2001:]])
def test_damage_ends_it_with_a_line_and_no_manifest(project, tmp_path, damage):
    tar, out = copy(project.dataset, tmp_path / "a") / "target_audio" / "recording.000002.tar", tmp_path / "o"
    tar.write_bytes(damage(tar.read_bytes()))
    with raises(DamagedShard, "damaged_shard", "recording.000002.tar"):
        export_dataset(tmp_path / "a", "nemo_tarred", out)
    assert {path.name for path in out.iterdir() if path.is_file()} == {"audio_0.tar", "audio_1.tar", "export.json"}

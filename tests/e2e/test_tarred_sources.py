"""Speech in tar archives: the dataset of the plain manifest, and the utterances that NeMo's own loader sees."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from support.manifests import config_for, run_prepare, speaker_tag, write_manifest
from support.shar import put, voice
from support.tars import write_tar

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader

STAGES = ["prepare", "match", "write", "validate"]
SECONDS = [2.0, 1.5, 2.5, 1.0, 3.0, 2.0]


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """The sources of the same speech in every form, by the name of the form; segments of one recording included."""
    folder = tmp_path_factory.mktemp("forms")
    records, audio = [], {}
    for number, seconds in enumerate(SECONDS):
        name = f"spk{number % 2}-{number}.{'wav' if number % 3 else 'flac'}"
        path = put(folder / "plain" / name, voice(seconds, pitch=150 + 60 * (number % 2), seed=number))
        audio[name] = path.read_bytes()
        records.append({"audio_filepath": name, "duration": seconds, "text": f"text of {name}",
                        "speaker": speaker_tag(f"spk{number % 2}")})  # fmt: skip
    segment = records[4] | {"offset": 0.5, "duration": 1.25, "text": "a segment"}
    write_manifest(folder / "plain.json", records)
    write_manifest(folder / "segments.json", [*records, segment])
    for shard in range(2):
        part = records[shard * 3 :][:3]
        names = [record["audio_filepath"] for record in part]
        more = [segment | {"audio_filepath": "spk0-4-sub1.wav"}] if shard else []
        write_manifest(folder / f"nemo/manifest_{shard}.json", [record | {"shard_id": shard} for record in part + more])
        write_tar(folder / f"nemo/audio_{shard}.tar", [(name, audio[name]) for name in names])
        members = []
        for name, record in zip(names, part, strict=True):
            stem = name.split(".")[0]
            members.append([(name, audio[name]), (f"{stem}.json", json.dumps(record).encode()),
                            (f"{stem}.txt", record["text"].encode())])  # fmt: skip
        write_tar(folder / f"wds/{shard:06d}.tar", [member for sample in members for member in sample[:2]])
        write_tar(folder / f"wenet/{shard}.tar", [member for sample in members for member in sample[::2]])
    (folder / "shards.list").write_text("wenet/0.tar\nwenet/1.tar\n")
    raw = [{"key": r["audio_filepath"].split(".")[0], "wav": r["audio_filepath"], "txt": r["text"]} for r in records]
    write_manifest(folder / "data.list", raw)
    key = {"speaker": "{key:prefix}", "language": "en", "dataset": "Tests"}
    return {
        "plain": {"manifest": f"{folder}/plain.json", "audio_root": f"{folder}/plain"},
        "segments": {"manifest": f"{folder}/segments.json", "audio_root": f"{folder}/plain"},
        "nemo_tarred": {"type": "nemo_tarred", "manifest": f"{folder}/nemo/manifest__OP_0..1_CL_.json",
                        "tars": f"{folder}/nemo/audio__OP_0..1_CL_.tar"},
        "webdataset": {"type": "webdataset", "tars": f"{folder}/wds/{{000000..000001}}.tar"},
        "wenet_raw": {"type": "wenet", "data_list": f"{folder}/data.list", "audio_root": f"{folder}/plain"} | key,
        "wenet_shard": {"type": "wenet", "data_list": f"{folder}/shards.list", "data_type": "shard",
                        "audio_root": str(folder)} | key,
    }  # fmt: skip


FORMS = [("nemo_tarred", "segments"), ("webdataset", "plain"), ("wenet_raw", "plain"), ("wenet_shard", "plain")]


def utterances(source, folder):
    """(duration, text, speaker, samples) of the utterances that prepare makes of a source."""
    config = config_for(folder, [source], prepare={"unit_records": 2})
    prepared = run_prepare(config)
    assert prepared.rejects == []
    reader = SegmentReader(AudioRoots.of([config.sources[0].audio_root]))
    return [(u.duration, u.text, u.speaker, reader.read(u.segment).samples.tobytes()) for u in prepared.kept]


@pytest.mark.parametrize(("form", "plain"), FORMS)
def test_prepare_gives_the_utterances_of_the_plain_manifest(form, plain, forms, tmp_path):
    expected = utterances(forms[plain], tmp_path / "plain")
    assert len(expected) == len(SECONDS) + (plain == "segments")
    assert utterances(forms[form], tmp_path / form) == expected


@pytest.mark.slow
def test_nemos_own_loader_sees_the_same_utterances(forms, tmp_path):
    adapters = pytest.importorskip("nemo.collections.common.data.lhotse.nemo_adapters")
    source = forms["nemo_tarred"]
    cuts = list(adapters.LazyNeMoTarredIterator(source["manifest"], tar_paths=source["tars"], shard_seed=0))
    theirs = [(round(c.duration, 6), c.supervisions[0].text, c.load_audio()[0]) for c in cuts]
    ours = [(d, text, np.frombuffer(samples, np.float32)) for d, text, _, samples in utterances(source, tmp_path)]
    assert len(theirs) == len(ours) == len(SECONDS) + 1
    order = {text: samples for _, text, samples in ours}
    assert sorted(item[:2] for item in theirs) == sorted(item[:2] for item in ours)
    for _, text, samples in theirs:
        np.testing.assert_array_equal(samples, order[text])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nemo_tarred", "lhotse_shar"])
def test_nemos_data_loader_sees_the_same_utterances(form, forms, tmp_path):
    """Through ``get_lhotse_dataloader_from_config``, with what NeMo's configurations have."""
    loading = pytest.importorskip("nemo.collections.common.data.lhotse.dataloader")
    omegaconf = pytest.importorskip("omegaconf")
    source = forms["nemo_tarred"]
    if form == "nemo_tarred":
        data = {"manifest_filepath": source["manifest"], "tarred_audio_filepaths": source["tars"]}
    else:
        recordings = [Recording.from_file(path) for path in sorted(Path(forms["plain"]["audio_root"]).iterdir())]
        cuts = CutSet.from_cuts(
            MonoCut(one.id, 0.0, one.duration, 0, recording=one, supervisions=[
                SupervisionSegment(one.id, one.id, 0.0, one.duration, text=f"text of {one.id}", speaker="spk")])
            for one in recordings
        )  # fmt: skip
        (tmp_path / "shar").mkdir()
        cuts.to_shar(tmp_path / "shar", {"recording": "wav"}, shard_size=2)
        source = {"type": "lhotse_shar", "shar": str(tmp_path / "shar")}
        data = {"shar_path": str(tmp_path / "shar")}
    settings = {"batch_size": 2, "num_workers": 0, "shuffle": False, "force_finite": True, "seed": 0, "shard_seed": 0}
    loader = loading.get_lhotse_dataloader_from_config(
        omegaconf.OmegaConf.create(data | settings | {"sample_rate": 16000}),
        global_rank=0,
        world_size=1,
        dataset=_Said(),
    )
    theirs = {said: samples for batch in loader for said, samples in batch}
    ours = {text: np.frombuffer(samples, np.float32) for _, text, _, samples in utterances(source, tmp_path)}
    assert theirs.keys() == ours.keys()
    for text, samples in theirs.items():
        np.testing.assert_array_equal(samples, ours[text])


class _Said(torch.utils.data.Dataset):
    """The texts and samples of batches of cuts."""

    def __getitem__(self, cuts):
        return [(cut.supervisions[0].text, cut.load_audio()[0]) for cut in cuts]

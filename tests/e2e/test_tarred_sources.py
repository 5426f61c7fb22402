"""Speech in tar archives: the utterances that NeMo's own loader sees."""

import numpy as np
import pytest
import torch
from support.project import config_for, lines, run_prepare, voice, write_lines
from support.sources import FORMS

from sharmill.audio.roots import AudioRoots
from sharmill.audio.segments import SegmentReader

SECONDS = [2.0, 1.5, 2.5, 1.0, 3.0, 2.0]


@pytest.mark.slow
def test_nemos_data_loader_sees_the_same_utterances(project, tmp_path):
    """Load the dataset with ``get_lhotse_dataloader_from_config``, with keys of NeMo's configurations."""
    loading = pytest.importorskip("nemo.collections.common.data.lhotse.dataloader")
    omegaconf = pytest.importorskip("omegaconf")
    for number, seconds in enumerate(SECONDS):
        samples = voice(seconds, pitch=150 + 60 * (number % 2), seed=number)
        name = f"spk{number % 2}-{number}.{'wav' if number % 3 else 'flac'}"
        project.add(name, samples, speaker=f"spk{number % 2}", shard_id=number % 2)
    source = FORMS["nemo_tarred"](tmp_path, project.records, project.root)
    segment = project.records[5] | {"offset": 0.5, "duration": 1.25, "text": "a segment"}
    segment["audio_filepath"] = segment["audio_filepath"].replace("-5", "-5-sub1")
    write_lines(tmp_path / "manifest_1.json", [*lines(tmp_path / "manifest_1.json"), segment])
    data = {"manifest_filepath": source["manifest"], "tarred_audio_filepaths": source["tars"]}
    settings = {"batch_size": 2, "num_workers": 0, "shuffle": False, "force_finite": True, "seed": 0, "shard_seed": 0}
    loader = loading.get_lhotse_dataloader_from_config(
        omegaconf.OmegaConf.create(data | settings | {"sample_rate": 16000}),
        global_rank=0,
        world_size=1,
        dataset=_Said(),
    )
    theirs = {said: samples for batch in loader for said, samples in batch}
    config = config_for(tmp_path, [source], prepare={"unit_records": 2})
    prepared = run_prepare(config)
    assert prepared.rejects == []
    reader = SegmentReader(AudioRoots.of([config.sources[0].audio_root]))
    ours = {utterance.text: reader.read(utterance.segment).samples for utterance in prepared.kept}
    assert theirs.keys() == ours.keys()
    for text, samples in theirs.items():
        np.testing.assert_array_equal(samples, ours[text])


class _Said(torch.utils.data.Dataset):
    """The texts and samples of batches of cuts."""

    def __getitem__(self, cuts):
        return [(cut.supervisions[0].text, cut.load_audio()[0]) for cut in cuts]

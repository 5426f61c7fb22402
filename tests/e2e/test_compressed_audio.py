"""Audio that FFmpeg decodes through all stages: what is stored has the samples of the files, none is lost."""

from __future__ import annotations

import numpy as np
import pytest
from support.audio import read
from support.compressed import FORMS, encode
from support.manifests import config_for, make_record, write_manifest
from support.paths import TESTS

from sharmill.audio.resample import segment_bounds
from sharmill.engine.listener import Listener
from sharmill.pipeline import run_dataset
from sharmill.shar import open_shar

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SUFFIXES = {"m4a": "m4a", "adts": "aac", "webm": "webm", "amr": "amr", "wma 2": "wma", "alac": "m4a"}


def test_a_dataset_of_compressed_files(tmp_path, monkeypatch):
    pytest.importorskip("av")
    monkeypatch.syspath_prepend(str(TESTS / "support/plugin"))
    audio = tmp_path / "audio"
    audio.mkdir()
    records = []
    for form in FORMS:
        if form.name in SUFFIXES:
            name = f"{form.name.replace(' ', '-')}.{SUFFIXES[form.name]}"
            (audio / name).write_bytes(encode(form))
            records.append(make_record(audio_filepath=name, duration=..., text=name))
            records.append(make_record(audio_filepath=name, offset=0.5, duration=1.25, text=f"part of {name}"))
    assert len(records) == 2 * len(SUFFIXES)
    manifest = write_manifest(tmp_path / "m.json", records)
    config = config_for(
        tmp_path, [(manifest, audio)],
        match={"encoder": "python:tiny_speech:TinyEncoder", "min_similarity": -1.0, "min_duration": 0.0},
        encode={"codecs": [{"name": "tiny", "model": "python:tiny_speech:TinyCodec:50"}]},
        validate={"deep": True, "against_sources": True}, executor={"workers": 1},
    )  # fmt: skip
    result = run_dataset(config, Listener())
    assert result.ok
    assert result.num_errors == 0
    cuts = {cut.supervisions[0].text: cut for cut in open_shar(config.dataset_dir)}
    assert set(cuts) == {record["text"] for record in records}
    for name in {record["audio_filepath"] for record in records}:
        samples, rate = read(audio / name)
        first, count = segment_bounds(0.5, 1.25, rate)
        for text, expected in ((name, samples), (f"part of {name}", samples[first : first + count])):
            stored = cuts[text].load_target_audio()[0]
            assert stored.shape == expected.shape
            # It is stored as FLAC of 16 bits.
            np.testing.assert_allclose(stored, np.clip(expected, -1, 1), atol=1 / 32768)

"""Speech in its original place, through the real stages to a validated dataset."""

import gzip
import json

import numpy as np
from support.project import check_dataset, voice

from sharmill.shar import open_shar
from sharmill.validate.accounts import ExpectedRecords


def check(project, config, folder):
    """The findings of a deep check against the sources of a configuration."""
    against = ExpectedRecords(sources=tuple(config.sources), rejects=(str(project.run_dir / "prepare/rejects.jsonl"),))
    return check_dataset(project.dataset, folder, against, deep=True).findings


def test_channels_of_one_file(project, tmp_path):
    left, right = voice(2.0, pitch=150, seed=1), voice(2.0, pitch=250, seed=2)
    stereo = np.stack([left, right], axis=1)
    for number, channel in enumerate([0, 1, "downmix", None]):
        project.add("call.wav", stereo if number == 0 else None, duration=2.0, channel=channel)
    project.add("call.wav", duration=1.0, offset=0.5, channel=1)
    config = project.write(write={"order": "manifest"}, match={"min_duration": 0.0})
    samples = [cut.load_target_audio()[0] for cut in open_shar(project.dataset)]
    for found, expected in zip(samples, [left, right, stereo.mean(axis=1), right[8000:24000]], strict=True):
        np.testing.assert_allclose(found, expected, atol=2**-15)
    np.testing.assert_array_equal(samples[0], left)
    cuts = list(open_shar(project.dataset, []))
    assert [cut.supervisions[0].custom["context_audio_channel"] for cut in cuts] == [1, "downmix", 1, 0]
    assert len({cut.id for cut in cuts}) == len({cut.supervisions[0].recording_id for cut in cuts}) + 1 == 4
    assert [reject["reason"] for reject in project.rejects("prepare")] == ["unsupported_channels"]
    assert check(project, config, tmp_path / "check") == []


def test_records_without_duration_in_several_trees(project, tmp_path):
    roots = [tmp_path / "one", tmp_path / "two"]
    for number, root in enumerate(roots):
        project.root = root
        project.add(str(root / f"{number}.wav"), voice(1.0 + number, seed=number), duration=None)
    project.add("1.wav", duration=None, offset=0.5)
    project.add("/elsewhere/a.wav", duration=None)
    project.add("none.wav", duration=None)
    source = {"manifest": str(project.folder / "small.json"), "audio_root": [str(root) for root in roots]}
    for name, sources in (("list", [source]), ("null", [source | {"audio_root": None}])):
        project.run_dir, project.dataset = tmp_path / name / "run", tmp_path / name / "dataset"
        config = project.write([1, 0, 0], match={"min_duration": 0.0}, sources=sources)
        assert check(project, config, tmp_path / name / "check") == []
        cuts = list(open_shar(project.dataset, []))
        assert len(cuts) == (3 if name == "list" else 2)
        paths = {cut.supervisions[0].custom["audio_filepath"] for cut in cuts}
        assert not any(path.startswith("/") for path in paths)
        assert paths == (
            {"0.wav", "1.wav"} if name == "list" else {f"{root}/{n}.wav"[1:] for n, root in enumerate(roots)}
        )


def test_lhotse_kaldi_and_annotations_of_one_call(project, tmp_path):
    left, right = voice(4.0, pitch=150, seed=1), voice(4.0, pitch=250, seed=2)
    project.add("call.wav", np.stack([left, right], axis=1))
    said = {"recording_id": "r", "start": 0.5, "duration": 1.0, "speaker": "anna", "channel": 0}
    recording = {"id": "r", "sources": [{"type": "file", "channels": [0, 1], "source": "call.wav"}],
                 "sampling_rate": 16000, "num_samples": 64000, "duration": 4.0}  # fmt: skip
    other = said | {"id": "b", "start": 2.0, "text": "two", "channel": 1, "speaker": "bob"}
    cut = {"id": "c", "start": 0.25, "duration": 3.0, "channel": [0, 1], "recording": recording, "type": "MultiCut",
           "supervisions": [said | {"id": "a", "text": "one"}, other, said | {"id": "far", "start": 2.5}]}  # fmt: skip
    with gzip.open(tmp_path / "cuts.jsonl.gz", "wt") as stream:
        for line in (cut, "no cut", cut | {"recording": recording | {"transforms": [{"name": "Speed"}]}}):
            stream.write(json.dumps(line) + "\n")
    (tmp_path / "train").mkdir()
    for name, text in {"wav.scp": "r call.wav\n", "segments": "u1 r 3 -1 1\nu2 r9 0 1\n", "text": "u1 three\n"}.items():
        (tmp_path / "train" / name).write_text(text)
    (project.root / "call.ctm").write_text("call A 1.0 0.5 four\ncall B 1.5 0.25 five\ncall A 1.75 0.5 six\nbad\n")
    common = {"audio_root": str(project.root), "speaker": "anna"}
    sources = [
        common | {"type": "lhotse", "cuts": str(tmp_path / "cuts.jsonl.gz"), "split": True},
        common | {"type": "kaldi", "data_dir": str(tmp_path / "train")},
        common | {"type": "annotated", "annotations": "ctm"},
    ]
    config = project.write([2, 0, 0, 1, 0], write={"order": "manifest"}, match={"min_duration": 0.0}, sources=sources)
    cuts = list(open_shar(project.dataset))
    assert [cut.supervisions[0].text for cut in cuts] == ["one", "two", "three", "four six", "five"]
    expected = [left[12000:28000], right[36000:52000], right[48000:], left[16000:36000], right[24000:28000]]
    for cut, samples in zip(cuts, expected, strict=True):
        np.testing.assert_array_equal(cut.load_audio()[0], samples)
    assert [reject["reason"] for reject in project.rejects("prepare")] == [
        "duration_mismatch", "malformed", "unsupported_cut", "unsupported_cut", "duration_mismatch", "missing_audio",
        "malformed",
    ]  # fmt: skip
    assert check(project, config, tmp_path / "check") == []

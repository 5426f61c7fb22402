"""A dataset as plain lhotse sees it: every promise of the contract about cuts, recordings and arrays."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
import soundfile as sf
from lhotse import CutSet, MonoCut, compute_num_samples
from lhotse.array import Array, TemporalArray
from lhotse.qa import validate
from support.manifests import speaker_tag
from support.pipelines import shar_fields
from support.shar import lines, voice

from sharmill.shar import open_shar

LONG = "deep/" * 30 + "utterance"


@pytest.fixture(scope="module")
def contract(tmp_path_factory):
    """Six cuts with offsets, further keys, long ids, contexts longer and shorter than their targets, 22.05 kHz."""
    from support.shar import Project

    project = Project(tmp_path_factory.mktemp("contract"))
    long = voice(6.0, rate=22050, seed=1)
    project.add("book/ch.1/long.wav", long, rate=22050, offset=0.5, duration=1.25, speaker="anna")
    project.add("book/ch.1/long.wav", offset=2.0, duration=3.337, speaker="anna", cer=0.01)
    project.add("whole.flac", voice(2.5, seed=2), speaker="Ödön", text="größer 日本", normalized_text="groesser")
    project.add(f"{LONG}.wav", voice(0.8, seed=3), nested={"a": [1, 2.5, None]}, flag=True)
    project.add("a.b.wav", voice(1.0, seed=4))
    project.add("a.b.flac", voice(1.0, seed=5))
    config = project.write([1, 0, 3, 2, 5, 4], write={"shard_size": 4, "order": "manifest"})
    project.encode(config)
    return project


@pytest.fixture(scope="module")
def cuts(contract):
    return list(CutSet.from_shar(fields=shar_fields(contract.dataset, "toy")))


def test_the_cut_has_exactly_the_contracts_keys(contract):
    (cut, *_) = lines(contract.dataset / "cuts/cuts.000000.jsonl.gz")
    num_samples = 27563  # 27562.5, rounded as lhotse rounds
    duration = num_samples / 22050
    recording_id = "rec-book-ch.1-long"
    assert cut == {
        "id": f"cut-{recording_id}-0.50-1.25",
        "start": 0.0,
        "duration": duration,
        "channel": 0,
        "supervisions": [
            {
                "id": f"sup-cut-{recording_id}-0.50-1.25",
                "recording_id": recording_id,
                "start": 0.0,
                "duration": duration,
                "channel": 0,
                "text": "text of book/ch.1/long.wav",
                "language": "en",
                "speaker": speaker_tag("anna"),
                "custom": {
                    "audio_filepath": "book/ch.1/long.wav",
                    "offset": 0.5,
                    "duration": 1.25,
                    "text": "text of book/ch.1/long.wav",
                    "speaker": speaker_tag("anna"),
                    "language": "en",
                    "context_audio_filepath": "book/ch.1/long.wav",
                    "context_audio_offset": 2.0,
                    "context_audio_duration": 3.337,
                    "context_audio_text": "text of book/ch.1/long.wav",
                    "context_speaker_similarity": 0.75,
                    "context_recording_id": recording_id,
                },
            }
        ],
        "recording": {
            "id": recording_id,
            "sources": [{"type": "file", "channels": [0], "source": "book/ch.1/long.wav"}],
            "sampling_rate": 22050,
            "num_samples": num_samples,
            "duration": duration,
            "channel_ids": [0],
        },
        "custom": {"context_audio_unaligned": True},
        "type": "MonoCut",
    }


def test_all_further_manifest_keys_are_kept(cuts):
    custom = cuts[3].supervisions[0].custom
    assert custom["nested"] == {"a": [1, 2.5, None]}
    assert custom["flag"] is True
    assert cuts[1].supervisions[0].custom["cer"] == 0.01
    assert cuts[2].supervisions[0].custom["normalized_text"] == "groesser"


@pytest.mark.parametrize(
    "value",
    [
        {"width": 1920, "height": 1080},
        {"shape": [1, 2]},
        {"array": {}, "temporal_dim": 0},
        {"id": "x", "sources": [], "sampling_rate": 1},
    ],
)
def test_objects_that_lhotse_would_take_for_manifests_are_kept_as_text(project, value):
    for number in range(2):
        project.add(f"{number}.wav", voice(0.3, seed=number), video=value, plain={"height": 1})
    project.write()
    for reader in (open_shar(project.dataset), CutSet.from_shar(fields=shar_fields(project.dataset))):
        for cut in reader:
            custom = cut.supervisions[0].custom
            assert json.loads(custom["video"]) == value
            assert custom["plain"] == {"height": 1}


def test_no_key_of_sharmills_own_is_left(cuts):
    assert not [key for cut in cuts for key in cut.supervisions[0].custom if key.startswith("_")]


def test_text_and_speaker_keep_their_letters(cuts):
    supervision = cuts[2].supervisions[0]
    assert (supervision.text, supervision.speaker) == ("größer 日本", speaker_tag("Ödön"))


def test_ids_are_unique_where_the_paths_collide(cuts):
    ids = [cut.id for cut in cuts]
    assert len(set(ids)) == 6
    assert all(cut_id.startswith("cut-rec-a.b") for cut_id in ids[4:])
    assert cuts[4].recording_id != cuts[5].recording_id
    assert cuts[4].supervisions[0].custom["context_recording_id"] == cuts[5].recording_id


def test_ids_of_over_100_characters_are_whole(cuts):
    assert cuts[3].id == f"cut-rec-{LONG.replace('/', '-')}-0.00-0.80"
    assert len(cuts[3].id) > 160
    assert cuts[3].target_audio.id == cuts[3].id
    assert cuts[2].context_audio.id == f"context_cut-rec-{LONG.replace('/', '-')}-0.00-0.80"


def test_the_recordings_are_called_as_the_contract_says(cuts):
    for cut, context in zip(cuts, [1, 0, 3, 2, 5, 4], strict=True):
        custom = cuts[context].supervisions[0].custom
        assert cut.target_audio.id == cut.id
        expected = f"context_cut-{cuts[context].recording_id}-{custom['offset']:.2f}-{custom['duration']:.2f}"
        assert cut.context_audio.id == expected


def test_every_cut_starts_at_0_and_lasts_as_long_as_its_audio(cuts):
    for cut in cuts:
        (supervision,) = cut.supervisions
        assert (cut.start, supervision.start) == (0.0, 0.0)
        assert cut.duration == supervision.duration == cut.target_audio.duration == cut.recording.duration
        assert cut.num_samples == cut.target_audio.num_samples == cut.load_target_audio().shape[1]


def test_target_and_context_are_the_segments_to_the_sample(cuts, contract):
    for cut in cuts:
        custom = cut.supervisions[0].custom
        for role, prefix in (("target", ""), ("context", "context_audio_")):
            path = contract.root / custom[f"{prefix}filepath" if prefix else "audio_filepath"]
            samples, rate = sf.read(path, dtype="float32")
            start, length = (compute_num_samples(custom[f"{prefix}{key}"], rate) for key in ("offset", "duration"))
            stored = cut.load_custom(f"{role}_audio")
            np.testing.assert_array_equal(stored[0], samples[start : start + length])


def test_lhotse_finds_nothing_wrong_with_the_manifests(contract):
    for cut in CutSet.from_shar(fields=shar_fields(contract.dataset)):
        validate(cut)
        validate(cut.target_audio, read_data=True)
        validate(cut.context_audio, read_data=True)
    for cut in open_shar(contract.dataset, ["target_audio"]):
        validate(cut, read_data=True)


@pytest.mark.parametrize("read", ["lhotse", "sharmill"])
def test_lhotse_never_shortens_a_context(contract, read):
    directory = contract.dataset
    opened = open_shar(directory) if read == "sharmill" else CutSet.from_shar(fields=shar_fields(directory, "toy"))
    longer = shorter = 0
    for cut in opened:
        samples, codes = cut.context_audio.num_samples, cut.context_codes.load()
        longer += cut.context_audio.duration > cut.duration
        shorter += cut.context_audio.duration < cut.duration
        assert codes.shape[1] == math.ceil(round(cut.context_audio.duration * 16000) / 320)
        for part in (cut, cut.truncate(duration=0.3), cut.truncate(offset=0.4, duration=0.2)):
            assert part.load_context_audio().shape == (1, samples)
            np.testing.assert_array_equal(part.load_context_codes(), codes)
    assert longer
    assert shorter


def test_context_codes_are_an_array_and_target_codes_a_temporal_one(cuts):
    for cut in cuts:
        assert type(cut.context_codes) is Array
        assert type(cut.target_codes) is TemporalArray
        assert (cut.target_codes.temporal_dim, cut.target_codes.frame_shift, cut.target_codes.start) == (-1, 0.02, 0)


def test_codes_have_the_frames_of_their_audio(cuts):
    for cut in cuts:
        for codes, recording in ((cut.target_codes, cut.target_audio), (cut.context_codes, cut.context_audio)):
            samples = round(recording.num_samples / recording.sampling_rate * 16000)
            assert codes.load().shape == tuple(codes.shape) == (3, math.ceil(samples / 320))
            assert codes.load().dtype == np.int16


def test_target_codes_of_a_truncated_cut_are_its_frames(contract):
    for cut in open_shar(contract.dataset):
        codes = cut.target_codes.load()
        np.testing.assert_array_equal(cut.load_target_codes(), codes)
        part = cut.truncate(offset=0.2, duration=0.3)
        np.testing.assert_array_equal(part.load_target_codes(), codes[:, 10:25])
        np.testing.assert_array_equal(part.truncate(offset=0.1).load_target_codes(), codes[:, 15:25])


def test_target_codes_of_a_cut_with_fewer_frames_than_codebooks_are_whole(contract):
    for cut in open_shar(contract.dataset, ["target_codes"]):
        part = cut.truncate(duration=0.04)
        assert part.load_target_codes().shape == (3, 2)


@pytest.mark.parametrize("loaded", [False, True])
def test_cuts_survive_lhotses_serialisation(contract, loaded):
    directory = contract.dataset
    fields = shar_fields(directory, "toy") if loaded else {"cuts": shar_fields(directory)["cuts"]}
    for cut in CutSet.from_shar(fields=fields):
        cut.drop_custom("shard_origin")
        again = MonoCut.from_dict(cut.to_dict())
        assert again == cut
        assert again.id == cut.id
        assert json.dumps(MonoCut.from_dict(again.to_dict()).supervisions[0].to_dict()) == json.dumps(
            cut.supervisions[0].to_dict()
        )


def test_the_stored_cut_is_what_lhotse_would_write(contract):
    for values in lines(contract.dataset / "cuts/cuts.000000.jsonl.gz"):
        assert MonoCut.from_dict(json.loads(json.dumps(values))).to_dict() == values


def test_the_members_are_audio_files(cuts):
    for cut in cuts:
        with sf.SoundFile(io.BytesIO(cut.target_audio.sources[0].source)) as sound:
            assert (sound.format, sound.channels, sound.samplerate) == ("FLAC", 1, cut.target_audio.sampling_rate)

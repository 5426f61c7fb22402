"""A dataset as plain lhotse sees it: all guarantees of the contract about cuts, recordings and arrays."""

import json
import math

import msgspec
import numpy as np
import pytest
import soundfile as sf
from hypothesis import HealthCheck, given, settings, strategies as st
from lhotse import CutSet, MonoCut, compute_num_samples
from lhotse.qa import validate
from support.project import Project, lines, shar_fields, speaker_tag, voice

from sharmill.manifest import Segment, Utterance, recording_id, segment_id
from sharmill.shar import open_shar
from sharmill.shar.manifests import cut_json, utterance_of

LONG = "deep/" * 30 + "utterance"


@pytest.fixture(scope="module")
def contract(tmp_path_factory):
    """Six cuts with offsets, further keys, long ids, contexts longer and shorter than their targets, at 22.05 kHz."""
    project = Project(tmp_path_factory.mktemp("contract"))
    long = voice(6.0, rate=22050, seed=1)
    project.add("book/ch.1/long.wav", long, rate=22050, offset=0.5, duration=1.25, speaker="anna")
    project.add("book/ch.1/long.wav", offset=2.0, duration=3.337, speaker="anna", cer=0.01)
    project.add("whole.flac", voice(2.5, seed=2), speaker="Ödön", text="größer 日本", normalized_text="groesser")
    project.add(f"{LONG}.wav", voice(0.8, seed=3), nested={"a": [1, 2.5, None]}, flag=True)
    project.add("a.b.wav", voice(1.0, seed=4))
    project.add("a.b.flac", voice(1.0, seed=5))
    project.encode(project.write([1, 0, 3, 2, 5, 4], write={"shard_size": 4, "order": "manifest"}))
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


@pytest.mark.parametrize(
    "value",
    [
        {"width": 1920, "height": 1080},
        {"shape": [1, 2]},
        {"array": {}, "temporal_dim": 0},
        {"id": "x", "sources": [], "sampling_rate": 1},
    ],
)
def test_objects_like_lhotse_manifests_are_kept_as_text(project, value):
    project.add_voices([0.3] * 2, "{}.wav", video=value, plain={"height": 1})
    project.write()
    for reader in (open_shar(project.dataset), CutSet.from_shar(fields=shar_fields(project.dataset))):
        for cut in reader:
            custom = cut.supervisions[0].custom
            assert json.loads(custom["video"]) == value
            assert custom["plain"] == {"height": 1}


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


def test_target_codes_of_a_truncated_cut_are_its_frames(contract):
    for cut in open_shar(contract.dataset):
        codes = cut.target_codes.load()
        np.testing.assert_array_equal(cut.load_target_codes(), codes)
        part = cut.truncate(offset=0.2, duration=0.3)
        np.testing.assert_array_equal(part.load_target_codes(), codes[:, 10:25])
        np.testing.assert_array_equal(part.truncate(offset=0.1).load_target_codes(), codes[:, 15:25])


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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
KEYS = st.sampled_from(["cer", "language", "emotion", "context_audio_filepath", "normalized_text", "shape"])


def utterance(path="a/b.flac", suffixes=("", ""), **custom) -> Utterance:
    made = Utterance(Segment(0, path, 0.5, 1.25, False), "some text", speaker_tag("anna"), custom)
    made.recording_id = recording_id(path) + suffixes[0]
    made.cut_id = segment_id(made.recording_id, 0.5, 1.25) + suffixes[1]
    return made


def stored(made: Utterance):
    return msgspec.json.decode(msgspec.json.encode(cut_json(made, sampling_rate=16000, num_samples=20000)))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["a.wav", "a/b.c.flac", "größe/日本 1.opus", "no_suffix", ".hidden"]),
    st.dictionaries(KEYS, JSON, max_size=4),
    st.tuples(st.sampled_from(["", "-0123456789abcdef"]), st.sampled_from(["", "-fedcba9876543210"])),
)
def test_a_cut_is_made_again_from_the_record_that_it_carries(path, custom, suffixes):
    cut = stored(utterance(path, suffixes, **custom))
    assert stored(utterance_of(cut)) == cut


@pytest.mark.parametrize("suffix", ["-0123", "x", "-0123456789abcdeg", "-0123456789ABCDEF", "-0123456789abcdef0"])
def test_a_suffix_that_is_no_hash_is_not_taken_over(suffix):
    made = utterance_of(stored(utterance(suffixes=(suffix, ""))))
    assert made.recording_id == "rec-a-b"

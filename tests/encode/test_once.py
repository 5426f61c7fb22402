"""Each unique stored segment is encoded once, and shards are assembled again if its codes change."""

import dataclasses
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from support.project import ToyCodec, check_dataset, codec_stages, loading, put, run, snapshot, voice

from sharmill.encode.config import EncodeConfig
from sharmill.encode.segments import list_segments
from sharmill.encode.stage import ShardsStage
from sharmill.engine.order import choose_stages
from sharmill.engine.plan import read_ledger
from sharmill.shar import open_shar
from sharmill.shar.index import read_dataset
from sharmill.shar.items import read_field
from sharmill.shar.places import PLACE
from sharmill.shar.rebuild import rebuild_index
from sharmill.validate.findings import take_back_commits


def passes(config, name="toy"):
    """How many segments went through the codec, by the ledger of the stage."""
    stage = codec_stages(config, name)[1]
    return sum(commit.num_in for commit in read_ledger(stage.dir, stage.dir.read_units()).values())


def stored(dataset):
    """The bytes of audio at every place of a dataset, with the bytes of the codes there."""
    found = []
    for role in ("target", "context"):
        for path in sorted((dataset / f"{role}_audio").glob("*.tar")):
            codes = dataset / f"codes_toy/{role}_codes" / path.name.replace("recording", "codes")
            for audio, item in zip(read_field(path), read_field(codes), strict=True):
                assert audio.cut_id == item.cut_id
                found.append((audio.data, item.data))
    return found


def check_once(config, dataset):
    """Checks that the ledger has one pass for each segment, whose codes are the same at all places; counts places."""
    places = stored(dataset)
    assert passes(config) == len({audio for audio, _ in places})
    assert len(set(places)) == len({audio for audio, _ in places})
    return len(places)


@pytest.fixture
def speech(project):
    for number in range(12):
        project.add(f"{number}.flac", voice(0.3 + number / 20, seed=number), number=number)
    return project


@pytest.mark.parametrize("order", ["manifest", "speaker", "shuffle"])
def test_each_codec_gets_a_segment_once_in_every_order(speech, order):
    config = speech.write(write={"shard_size": 2, "order": order}, encode={"unit_seconds": 1.0})
    codec = speech.encode(config)
    assert check_once(config, speech.dataset) == 24
    assert sum(map(len, codec.batches)) == passes(config) == 12
    assert len(codec_stages(config)[1].dir.read_units()) > 3
    speech.encode(config, "more", ToyCodec(samples_per_frame=160))
    assert (passes(config), passes(config, "more")) == (12, 12)


def test_segments_stored_by_the_run_are_listed_without_audio(speech, tmp_path):
    config = speech.write(write={"shard_size": 5})
    foreign = dataclasses.replace(config, run_dir=str(tmp_path))
    by_notes, by_reading = codec_stages(config)[0], codec_stages(foreign)[0]
    assert run(by_reading).ok
    for path in speech.dataset.glob("*_audio/*.tar"):
        path.unlink()
    assert run(by_notes).ok
    assert snapshot(by_notes.dir.merged) == snapshot(by_reading.dir.merged)


def test_the_audio_of_shards_with_damaged_notes_is_read(speech, tmp_path):
    config = speech.write(write={"shard_size": 5})
    stages = [codec_stages(one)[0] for one in (config, dataclasses.replace(config, run_dir=str(tmp_path)))]
    short, other, _ = speech.run_dir.glob("write/ranks/*/notes/*.npy")
    short.write_bytes(short.read_bytes()[:-1])
    np.save(other, np.zeros(3))
    assert all(run(stage).ok for stage in stages)
    assert snapshot(stages[0].dir.merged) == snapshot(stages[1].dir.merged)


def test_a_dataset_that_lhotse_wrote(project, tmp_path):
    cuts = []
    for number in range(5):
        path = put(tmp_path / f"audio/{number % 4}.wav", voice(1.0 + number % 4 / 10, seed=number % 4))
        recording = Recording.from_file(path, recording_id=f"rec{number}")
        supervision = SupervisionSegment(f"sup{number}", recording.id, 0.0, recording.duration, text="text")
        cuts.append(MonoCut(f"cut{number}", 0.0, recording.duration, 0, [supervision], recording=recording))
    (tmp_path / "flat").mkdir()
    CutSet(cuts).to_shar(tmp_path / "flat", fields={"recording": "flac"}, shard_size=2)
    list(rebuild_index(tmp_path / "flat"))
    config = dataclasses.replace(project.configure(), dataset_dir=str(tmp_path / "flat"), sources=[])
    codec = project.encode(config)
    assert sum(map(len, codec.batches)) == passes(config) == 4
    for cut in open_shar(tmp_path / "flat"):
        np.testing.assert_array_equal(cut.target_codes.load(), codec.codes(cut.load_audio()[0]))


class OtherArithmetic(ToyCodec):
    """The same codec, as it comes out on another device."""

    def codes(self, samples):
        return super().codes(samples) + 1


@pytest.fixture
def encoded(speech):
    """A dataset with codes, many blocks of which every shard needs some."""
    write, match = {"shard_size": 3, "order": "shuffle"}, {"min_duration": 0.0}
    config = speech.write(write=write, match=match, encode={"unit_seconds": 1.0})
    speech.encode(config)
    return config


@pytest.mark.parametrize("codec", [ToyCodec, OtherArithmetic])
def test_a_lost_block_is_encoded_again_for_all_places(speech, encoded, codec):
    before = dict(stored(speech.dataset))
    bytes_before = snapshot(speech.dataset)
    stage = codec_stages(encoded)[1]
    (stage.root / "parts/000001.npy").unlink()
    again = speech.encode(encoded, codec=codec())
    assert 0 < sum(map(len, again.batches)) < 12
    changed = {audio for audio, codes in stored(speech.dataset) if codes != before[audio]}
    assert len(changed) == (sum(map(len, again.batches)) if codec is OtherArithmetic else 0)
    assert (snapshot(speech.dataset) == bytes_before) == (codec is ToyCodec)
    check_once(encoded, speech.dataset)


def test_codes_of_other_audio_are_encoded_again_by_redo(speech, encoded, tmp_path):
    """The codes of one block are wrong: the checker names the shards, and every place gets the right codes."""
    before = snapshot(speech.dataset)
    stage = codec_stages(encoded)[1]
    (stage.root / "parts/000001.npy").unlink()

    class Wrong(ToyCodec):
        def codes(self, samples):
            return super().codes(samples)[:, ::-1] + 5

    speech.encode(encoded, codec=Wrong())
    assert snapshot(speech.dataset) != before
    codec = dataclasses.replace(encoded.section(EncodeConfig).codecs[0], name="toy")
    config = encoded.with_section(EncodeConfig(codecs=[codec], unit_seconds=1.0))
    with mock.patch("sharmill.validate.stage.load_recorded_codec", return_value=ToyCodec()):
        level = {"recheck_codes": 1.0, "codec_models": {"toy": "builtin"}}
        report = check_dataset(speech.dataset, tmp_path / "check", **level)
    assert {unit.stage for unit in report.units_to_repeat} == {"encode/toy"}
    take_back_commits(config, report, choose_stages(config, ["encode"]))
    speech.encode(config)
    assert snapshot(speech.dataset) == before
    check_once(config, speech.dataset)


def test_a_run_resumes_between_encoding_and_assembly(speech, encoded):
    _, encode, shards = codec_stages(encoded)
    (encode.root / "parts/000000.npy").unlink()
    with loading(OtherArithmetic()):
        assert run(encode).ok
    with mock.patch.object(ShardsStage, "plan", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run(shards)
    assert read_dataset(speech.dataset).codecs == []
    assert run(shards).ok
    check_once(encoded, speech.dataset)


@given(
    keys=st.lists(st.integers(0, 9), max_size=60),
    window=st.integers(1, 20),
    counts=st.lists(st.integers(0, 7), max_size=20),
)
def test_numbers_at_all_places_are_those_of_their_segments(keys, window, counts, tmp_path_factory):
    # Keys that differ in either half of the hash.
    hashes = np.array([[key % 3 * ((1 << 64) // 3), key] for key in keys], "<u8").reshape(-1, 2)
    table = np.zeros(len(keys), PLACE)
    table["hash"], table["num_samples"], table["sampling_rate"] = hashes, [key % 4 for key in keys], 1
    bounds = np.clip(np.cumsum([0, *counts, len(keys)]), 0, len(keys))
    folder = tmp_path_factory.mktemp("tables")
    tables = [(folder / f"{shard}.npy", stop - start) for shard, (start, stop) in enumerate(pairwise(bounds))]
    for (path, count), start in zip(tables, bounds, strict=False):
        np.save(path, table[None, start : start + count])
    list_segments(tables, 1, folder / "segments.npy", folder / "numbers.npy", window)
    segments, numbers = np.load(folder / "segments.npy"), np.load(folder / "numbers.npy")[0]
    assert len(segments) == len(np.unique(segments["place"]["hash"], axis=0)) == len(set(keys))
    assert segments["place"]["hash"][numbers].tolist() == hashes.tolist()
    # The owner is the first place of a segment.
    firsts = [
        shard for key in dict.fromkeys(keys) for shard in [int(np.searchsorted(bounds, keys.index(key), "right")) - 1]
    ]
    assert sorted(segments["shard"].tolist()) == sorted(firsts)

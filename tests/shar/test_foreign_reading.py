"""Shards of lhotse's ``to_shar`` and of the published context-Shar scripts: found, read as by lhotse, or refused."""

import gzip
import json
import random

import numpy as np
import pytest
from lhotse import CutSet, Fbank, MonoCut, MultiCut, Recording, SupervisionSegment
from lhotse.array import Array, TemporalArray
from lhotse.dataset import AudioSamples, K2SpeechRecognitionDataset
from lhotse.features.io import MemoryRawWriter, NumpyFilesWriter
from lhotse.supervision import AlignmentItem
from support.project import DATA, raises, voice, write_tone

from sharmill.audio.encoding import encode
from sharmill.errors import ConfigError, DamagedShard
from sharmill.shar import open_shar
from sharmill.shar.arrays import array_to_bytes
from sharmill.shar.items import FieldWriter, Item
from sharmill.shar.json_lines import write_cuts
from sharmill.shar.manifests import recording_json, temporal_array_json
from sharmill.shar.rebuild import find_shards

KEPT = ("shar_position", "shard_origin", "shar_epoch")


def plain(cut):
    """Return a cut without the attributes that its reader added."""
    for key in KEPT:
        cut.drop_custom(key)
    if cut.custom == {}:
        cut.custom = None
    return cut


def make_cuts(tone, folder, count=7):
    """Yield cuts with everything that lhotse's Shar can hold: channels, features, arrays, alignments, or nothing."""
    for number in range(count):
        path = tone(folder / f"{number}.wav", 0.5 + 0.1 * number, channels=2 if number == 3 else 1)
        recording = Recording.from_file(path)
        supervision = SupervisionSegment(
            f"sup-{number}", recording.id, 0.0, recording.duration, channel=[0, 1] if number == 3 else 0,
            text="größer", language="de", speaker="x" * 130, custom={"number": number, "nested": {"a": [1, None]}},
            alignment={"word": [AlignmentItem("größer", 0.1, 0.2, 0.5)], "phone": []} if number else None,
        )  # fmt: skip
        kind = MultiCut if number == 3 else MonoCut
        cut = kind(
            f"{'long-' * 30 if number % 2 else ''}cut-{number}", 0.0, recording.duration, supervision.channel,
            supervisions=[] if number == 5 else [supervision], recording=recording,
        )  # fmt: skip
        cut.score = float("nan") if number == 4 else number / 7
        if number != 2:
            cut.tokens = TemporalArray(stored(np.arange(number * 5 + 10)), 0, 0.05, 0.0)
            cut.embedding = stored(np.full((3, 4), number, np.float32))
        yield cut


def stored(array):
    return Array("memory_raw", "", MemoryRawWriter().write("", array), list(array.shape))


@pytest.fixture(scope="module")
def lhotse_shar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lhotse")
    cuts = list(make_cuts(write_tone, folder / "audio"))
    (folder / "shar").mkdir()
    CutSet.from_cuts(cuts).to_shar(
        folder / "shar", {"recording": "flac", "tokens": "numpy", "embedding": "numpy"}, shard_size=3
    )
    return folder / "shar"


def test_a_recording_beside_the_target_audio_stays(tmp_path):
    # In speech-to-speech data, the recording is what is heard, and the target audio is the answer.
    heard, answered = (
        Recording.from_file(write_tone(tmp_path / f"{rate}.wav", 0.5, rate=rate)) for rate in (16000, 24000)
    )
    cut = MonoCut("dialogue", 0.0, heard.duration, 0, recording=heard, custom={"target_audio": answered})
    (tmp_path / "shar").mkdir()
    CutSet.from_cuts([cut]).to_shar(tmp_path / "shar", {"recording": "wav", "target_audio": "wav"})
    (read,) = open_shar(tmp_path / "shar")
    np.testing.assert_array_equal(read.load_audio(), heard.load_audio())
    np.testing.assert_array_equal(read.load_target_audio(), answered.load_audio())
    (alone,) = open_shar(tmp_path / "shar", ["target_audio"])
    assert alone.sampling_rate == 24000


def test_lhotses_own_shards_read_as_lhotse_reads_them(lhotse_shar):
    ours = list(open_shar(lhotse_shar))
    theirs = list(CutSet.from_shar(in_dir=lhotse_shar))
    assert len(ours) == 7
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.load_audio(), other.load_audio())
        if one.has_custom("tokens"):
            np.testing.assert_array_equal(one.load_tokens(), other.tokens.load())
            np.testing.assert_array_equal(one.load_embedding(), other.load_embedding())
        assert type(one) is type(other)
        one.score, other.score = str(one.score), str(other.score)
        assert plain(one) == plain(other)
    assert [cut.has_custom("tokens") for cut in ours] == [True, True, False, True, True, True, True]


def test_features_and_json_fields(tmp_path):
    cuts = [cut.drop_supervisions() for cut in make_cuts(write_tone, tmp_path / "audio", 2)]
    for cut in cuts:
        cut.drop_custom("tokens")
        cut.drop_custom("embedding")
    with_features = CutSet.from_cuts(cuts).compute_and_store_features(
        Fbank(), str(tmp_path / "fbank"), storage_type=NumpyFilesWriter
    )
    (tmp_path / "shar").mkdir()
    with_features.to_shar(tmp_path / "shar", {"features": "numpy", "recording": "wav", "score": "jsonl"}, shard_size=1)
    ours = list(open_shar(tmp_path / "shar"))
    assert [cut.score for cut in ours] == [0, 1 / 7]
    for one, other in zip(ours, CutSet.from_shar(in_dir=tmp_path / "shar"), strict=True):
        np.testing.assert_array_equal(one.load_features(), other.load_features())
        assert plain(one) == plain(other)


def test_shuffled_parts_and_states_of_foreign_shards(tmp_path):
    for index in range(6):
        write_cuts(tmp_path / f"cuts.{index}.jsonl.gz", [bare(f"{index}-{n}") for n in range(index + 1)])
    readers = [open_shar(tmp_path, shuffle=True, rank=rank, world_size=2) for rank in range(2)]
    read = [cut.id for reader in readers for cut in reader]
    assert sorted(read) == [f"{index}-{n}" for index in range(6) for n in range(index + 1)]
    stream = iter(readers[0])
    begun = [next(stream).id]
    resumed = open_shar(tmp_path, shuffle=True, rank=0, world_size=2)
    resumed.data.load_state_dict(readers[0].data.state_dict())
    assert begun + [cut.id for cut in resumed] == begun + [cut.id for cut in stream]


def bare(cut_id, **changes):
    return {"id": cut_id, "start": 0.0, "duration": 1.0, "channel": 0, "type": "MonoCut", **changes}


# -- the published layout -------------------------------------------------------------------------------------------

RATE, SHIFT = 16000, 0.02
SOURCE = {"type": "file", "channels": [0], "source": "/audio/a.wav"}


@pytest.fixture
def published(tmp_path):
    """Two shards as the published scripts write them: whole-file recordings, and the offset in ``start``."""
    rng = random.Random(0)
    for index in range(2):
        cuts, audio, contexts, codes, context_codes = [], [], [], [], []
        for number in range(3):
            offset, duration, context = 100.0 + number, 1.0 + 0.5 * number, rng.choice([0.5, 4.0])
            cut_id = f"cut-rec-a-{offset:.2f}-{index}-{duration:.2f}"
            recording = {**recording_json("rec-a", RATE, 3600 * RATE), "sources": [SOURCE]}
            cuts.append(
                bare(cut_id, start=offset, duration=duration, recording=recording, custom={"validation_status": "pass"})
            )
            audio.append(audio_item(cut_id, cut_id, voice(duration, seed=number)))
            contexts.append(audio_item(cut_id, f"context_{cut_id}", voice(context, seed=number + 10)))
            codes.append(codes_item(cut_id, round(duration / SHIFT), start=0))
            context_codes.append(codes_item(cut_id, round(context / SHIFT), start=50.0 + number))
        fields = {
            "target_audio/recording": audio,
            "context_audio/recording": contexts,
            "codes_x/target_codes/codes": codes,
            "codes_x/context_codes/codes": context_codes,
        }
        for stem, items in fields.items():
            path = tmp_path / f"{stem}.{index:06d}.tar"
            path.parent.mkdir(parents=True, exist_ok=True)
            with FieldWriter(path) as writer:
                for item in items:
                    writer.add(item)
        (tmp_path / "cuts").mkdir(exist_ok=True)
        write_cuts(tmp_path / f"cuts/cuts.{index:06d}.jsonl.gz", cuts)
    return tmp_path


def audio_item(cut_id, recording_id, samples):
    metadata = recording_json(recording_id, RATE, len(samples))
    return Item(cut_id, "flac", encode(samples, RATE, "flac"), metadata)


def codes_item(cut_id, frames, start):
    metadata = {**temporal_array_json((2, frames), SHIFT), "start": start}
    return Item(cut_id, "npy", array_to_bytes(np.arange(2 * frames, dtype=np.int16).reshape(2, frames)), metadata)


@pytest.mark.parametrize("decode_threads", [0, 1])
def test_the_published_layout_gives_whole_targets_and_contexts(published, decode_threads):
    cuts = list(open_shar(published, decode_threads=decode_threads))
    assert len(cuts) == 6
    for cut in cuts:
        assert cut.start == 0
        assert cut.load_audio().shape == (1, cut.num_samples)
        np.testing.assert_array_equal(cut.load_target_audio(), cut.load_audio())
        assert cut.load_target_codes().shape == (2, round(cut.duration / SHIFT))
        assert cut.load_context_codes().shape == tuple(cut.context_codes.shape)
        assert cut.load_context_audio().shape == (1, cut.context_audio.num_samples)
        short = cut.truncate(offset=0.5, duration=0.3)
        np.testing.assert_array_equal(short.load_audio(), cut.load_audio()[:, 8000:12800])
        np.testing.assert_array_equal(short.load_target_codes(), cut.load_target_codes()[:, 25:40])
        assert short.load_context_codes().shape == tuple(cut.context_codes.shape)
        assert short.load_context_audio().shape == (1, cut.context_audio.num_samples)


def test_published_supervisions_begin_with_their_cuts(published):
    """The scripts store the offset in the source, but lhotse counts from the beginning of the cut."""
    for path in sorted((published / "cuts").iterdir()):
        lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        for cut in lines:
            keys = {
                "id": f"sup-{cut['id']}",
                "recording_id": "rec-a",
                "start": cut["start"],
                "duration": cut["duration"],
            }
            alignment = {"word": [["x", cut["start"] + 0.1, 0.2, None]]}
            cut["supervisions"] = [{**keys, "channel": 0, "text": "x", "alignment": alignment}]
        path.write_bytes(gzip.compress("".join(json.dumps(cut) + "\n" for cut in lines).encode()))
    cuts = CutSet.from_cuts(open_shar(published))
    assert [cut.supervisions[0].start for cut in cuts] == [0.0] * 6
    assert [cut.supervisions[0].alignment["word"][0].start for cut in cuts] == pytest.approx([0.1] * 6)
    assert all(len(cut.truncate(offset=0.2, duration=0.3).supervisions) == 1 for cut in cuts)
    # Read no codes, since lhotse does not accept their dimension -1.
    audio = CutSet.from_cuts(open_shar(published, ["target_audio"])).drop_alignments()
    batch = K2SpeechRecognitionDataset(input_strategy=AudioSamples())[audio]
    assert batch["supervisions"]["start_sample"].tolist() == [0] * 6


@pytest.mark.skipif(not (DATA / "published_segments").is_dir(), reason="../shared/data is not here")
def test_published_segments_as_the_scripts_left_them():
    """This is real output: the scripts round 21.53 frames per second to 21.5, and leave the offset in supervisions."""
    cuts = CutSet.from_cuts(open_shar(DATA / "published_segments"))
    assert len(cuts) == 24
    for cut in cuts:
        assert cut.supervisions[0].start == 0
        codes = cut.load_target_codes()
        assert codes.shape == tuple(cut.target_codes.shape)
        for parts in (2, 3):
            step = cut.duration / parts
            last = cut.truncate(offset=(parts - 1) * step)
            assert np.array_equal(last.load_target_codes()[:, -1], codes[:, -1])
    audio = CutSet.from_cuts(open_shar(DATA / "published_segments", ["target_audio"]))
    assert len(K2SpeechRecognitionDataset(input_strategy=AudioSamples())[audio]["supervisions"]["text"]) == 24


def test_published_codes_alone_keep_the_time_line_of_the_source(published):
    for cut in open_shar(published, ["target_codes", "context_codes"]):
        assert cut.start >= 100
        assert cut.recording.duration == 3600
        assert cut.load_target_codes().shape == (2, round(cut.duration / SHIFT))
        short = cut.truncate(offset=0.5, duration=0.3)
        np.testing.assert_array_equal(short.load_target_codes(), cut.load_target_codes()[:, 25:40])
        assert cut.load_context_codes().shape == tuple(cut.context_codes.shape)


# -- strictness ------------------------------------------------------------------------------------------------------


def test_an_unfinished_dataset_is_not_read_as_foreign_shards(published):
    (published / "shards.jsonl").touch()
    with raises(ConfigError, "no_dataset"):
        open_shar(published)


def test_json_fields_are_paired_strictly_by_id(lhotse_shar, tmp_path):
    write_cuts(tmp_path / "cuts.0.jsonl", [])
    (tmp_path / "cuts.0.jsonl").write_bytes(b"".join(json.dumps(bare(name)).encode() + b"\n" for name in "ab"))
    (tmp_path / "score.0.jsonl").write_bytes(b'{"cut_id": "a", "score": 1}\n{"cut_id": "c", "score": 2}\n')
    with raises(DamagedShard, "damaged_shard", "'c'", "'b'"):
        list(open_shar(tmp_path))


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def nested(*indices):
    names = "cuts/cuts.{}.jsonl.gz", "target_audio/recording.{}.tar", "codes_x/target_codes/codes.{}.tar"
    return [name.format(index) for index in indices for name in names]


def of_nested(*indices):
    fields = ("cuts", "target_audio", "codes_x/target_codes")
    return [(int(index), dict(zip(fields, nested(index), strict=True))) for index in indices]


# File names, and the shards that they form.
LAYOUTS = {
    "a folder per field": (nested("000000", "000001"), of_nested("000000", "000001")),
    "a single shard without a number": (
        ["cuts.jsonl.gz", "recording.tar"], [(0, {"cuts": "cuts.jsonl.gz", "recording": "recording.tar"})],
    ),
    "numbers that are no words": (nested("10", "9", "2", "100", "0"), of_nested("0", "2", "9", "10", "100")),
    "numbers of different width": (
        ["cuts.7.jsonl.gz", "recording.000007.tar"],
        [(7, {"cuts": "cuts.7.jsonl.gz", "recording": "recording.000007.tar"})],
    ),
    "other files": (
        [*nested("0"), "cuts/cuts.0.jsonl.gz.idx", "target_audio/recording.0.tar.idx", "target_audio/.recording.0.tar",
         ".cache/x/y.0.tar", "shards.jsonl", "notes/read.me"],
        of_nested("0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_found_by_their_names(tmp_path, layout):
    files, expected = LAYOUTS[layout]
    assert [(shard.index, shard.files) for shard in find_shards(touch(tmp_path, *files))] == expected


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["recording.000000.tar"], ["cuts"]),
        (["notes.txt"], ["cuts"]),
        (["cuts/notes.txt", "target_audio/recording.000000.tar"], ["cuts"]),
        (["cuts.0.jsonl.gz", "cuts.1.jsonl.gz", "recording.0.tar"], ["cuts", "shard 1", "recording"]),
        (["cuts/cuts.0.jsonl.gz", "a/r.0.tar", "a/r.5.tar"], ["a", "shard 5", "cuts"]),
        (["cuts.0.jsonl", "cuts.000000.jsonl.gz"], ["cuts.0.jsonl", "cuts.000000.jsonl.gz", "shard 0"]),
        (["cuts/cuts.0.jsonl", "a/r.0.tar", "a/s.0.tar"], ["r.0.tar", "s.0.tar", "shard 0"]),
        (["cuts.0.jsonl", "recording.0.tar.gz"], ["recording.0.tar.gz"]),
        (["cuts.0.jsonl", "cuts/cuts.0.jsonl"], ["cuts"]),
        (["cuts.jsonl", "cuts.0.jsonl"], ["cuts"]),
        ([""], ["is not a folder"]),
    ],
)
def test_what_is_no_dataset_is_refused(tmp_path, files, names):
    with raises(ConfigError, "bad_layout", *names):
        find_shards(touch(tmp_path / "shar", *files))

"""Tests that NeMo's published ``train_ds`` settings, with keys of its Lhotse page, give batches like NeMo's loader."""

from itertools import pairwise
from typing import Any

import pytest
from lhotse import CutSet, Recording, SupervisionSegment
from support.project import put, voice, write_lines
from support.sources import write_tar
from support.training import AsIs, Letters, flat, take

from sharmill.training import get_dataloader
from sharmill.training.nemo.partition import cuts_of

FASTCONFORMER = {
    "sample_rate": 16000, "batch_size": 16, "shuffle": True, "max_duration": 16.7, "min_duration": 0.1,
    "is_tarred": True, "shuffle_n": 2048, "bucketing_strategy": "fully_randomized", "bucketing_batch_size": None,
}  # fmt: skip
PAGE = {"use_lhotse": True, "batch_duration": 1100, "quadratic_duration": 30, "num_buckets": 30}
CANARY = {
    "use_lhotse": True, "sample_rate": 16000, "shuffle": True, "batch_size": None, "batch_duration": 360,
    "quadratic_duration": 15, "use_bucketing": True, "num_buckets": 20, "text_field": "answer",
    "lang_field": "target_lang",
}  # fmt: skip
SALM = {"sample_rate": 16000, "prompt_format": "llama2", "token_equivalent_duration": 0.08, "shuffle": True,
        "batch_size": 4}  # fmt: skip
SALM_BUCKETS = {"use_multimodal_sampling": True, "batch_size": None, "batch_tokens": 400, "use_bucketing": True,
                "bucket_duration_bins": [57, 60]}  # fmt: skip
# The data have a hundredth of the length, and are few.
SMALL = {"seed": 1, "shard_seed": "randomized", "shuffle_buffer_size": 40, "bucket_buffer_size": 60,
         "num_cuts_for_bins_estimate": 60, "concurrent_bucketing": False}  # fmt: skip
BUCKETS = {"num_buckets": 3, "batch_duration": 3.6, "quadratic_duration": 1.5}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return the paths of a set of 24 short utterances and one of 8 long ones, as manifests with tars and as Shar."""
    folder, found = tmp_path_factory.mktemp("published"), {}
    for name, count, shortest in (("a", 24, 0.2), ("b", 8, 0.6)):
        own = folder / name
        own.mkdir()
        records = []
        for n in range(count):
            put(own / f"{name}{n}.wav", voice(shortest + 0.01 * n, seed=n))
            records.append({"audio_filepath": f"{name}{n}.wav", "duration": shortest + 0.01 * n, "text": f"{name}{n}",
                            "answer": f"{name}{n}!", "target_lang": "de", "shard_id": 0})  # fmt: skip
        names = [record["audio_filepath"] for record in records]
        write_tar(own / "audio_0.tar", [(name, (own / name).read_bytes()) for name in names])
        manifest = str(write_lines(own / "manifest.json", records))
        cuts = CutSet.from_cuts(_cut(own, record) for record in records)
        (own / "shar").mkdir()
        cuts.to_shar(own / "shar", fields={"recording": "wav"}, shard_size=8)
        found[name] = (manifest, str(own / "audio_0.tar"), str(own / "shar"))
    return found


def _cut(folder, record):
    recording = Recording.from_file(folder / record["audio_filepath"])
    cut = recording.to_cut()
    cut.supervisions = [SupervisionSegment(recording.id, recording.id, 0.0, recording.duration, text=record["text"])]
    return cut


def tarred(data, *weights):
    """Return the paths of both sets as a list of lists, with weights if given."""
    manifests = [[data[name][0], *weight] for name, weight in zip("ab", weights or ((), ()), strict=True)]
    return {"manifest_filepath": manifests, "tarred_audio_filepaths": [[data[name][1]] for name in "ab"]}


def shar(data):
    return {"shar_path": [[data["a"][2], 0.2], [data["b"][2], 0.8]]}


def group(data, **options):
    lists = {"type": "lhotse_shar", "weight": 0.5} | shar(data)
    return {"input_cfg": [lists, {"type": "lhotse_shar", "weight": 0.5, "shar_path": data["a"][2]}]} | options


def conversations(data):
    tags = {"context": "Say:"}
    entry = {"type": "lhotse_as_conversation", "audio_locator_tag": "[audio]", "tags": tags}
    return {"input_cfg": [entry | shar(data)]}


SCALED = SMALL | BUCKETS
CLASSIC = FASTCONFORMER | SMALL | {"batch_size": 6}
BY_PAGE = FASTCONFORMER | PAGE | SCALED
CASES = {
    "fastconformer": lambda data: BY_PAGE | tarred(data),
    "fastconformer, drawn buckets": lambda data: BY_PAGE | tarred(data) | {"use_bucketing": True},
    "fastconformer, fixed size": lambda data: CLASSIC | tarred(data) | {"use_lhotse": True},
    "fastconformer, Lhotse by its keys": lambda data: CLASSIC | BUCKETS | tarred(data),
    "fastconformer, adaptive size": lambda data: BY_PAGE | tarred(data) | {"bucketing_batch_size": [4, 2]},
    "fastconformer, Shar": lambda data: BY_PAGE | shar(data),
    "fastconformer, Shar of fixed size": lambda data: CLASSIC | shar(data) | {"max_duration": 1.0},
    "fastconformer, section": lambda data: {"multi_config": True, "seed": 1, "shard_seed": "randomized",
                                            "shuffle": True, "speech": CLASSIC | tarred(data)},
    "canary": lambda data: CANARY | SCALED | tarred(data),
    "canary, weighted": lambda data: CANARY | SCALED | tarred(data, [0.3], [0.7]),
    "canary, limits": lambda data: CANARY | SCALED | tarred(data) | {"max_duration": 0.63, "min_duration": 0.25},
    "temperature beside lists": lambda data: CLASSIC | group(data, reweight_temperature=0.1),
    "temperatures beside lists": lambda data: CLASSIC | group(data, reweight_temperature=[0.1]),
    "temperature of a list": lambda data: CLASSIC | shar(data) | {"reweight_temperature": 0.1},
    "SALM": lambda data: SALM | SMALL | conversations(data),
    "SALM in buckets": lambda data: SALM | SALM_BUCKETS | SMALL | conversations(data),
}  # fmt: skip


def facts(batches: list[list[Any]]) -> dict[str, float]:
    """Return the shares of set ``a``, of neighbors from one set, of batches from one set; and mean batch sizes."""
    cuts = [[cut for example in batch for cut in cuts_of(example)] for batch in batches]
    names = [[cut.recording_id[0] for cut in batch] for batch in cuts]
    row = flat(names)
    return {
        "a": row.count("a") / len(row),
        "neighbours": sum(before == after for before, after in pairwise(row)) / len(row),
        "of one set": sum(len(set(batch)) == 1 for batch in names) / len(batches),
        "examples": len(row) / len(batches),
        "seconds": sum(cut.duration for cut in flat(cuts)) / len(batches),
    }


def texts(batches: list[list[Any]]) -> set[tuple[str, str]]:
    supervisions = [cut.supervisions[0] for example in flat(batches) for cut in cuts_of(example)]
    return {(supervision.text, supervision.language) for supervision in supervisions}


@pytest.mark.parametrize("case", CASES)
def test_shares_order_and_batches_are_those_of_nemo(data, case):
    from nemo.collections.common.data.lhotse.dataloader import get_lhotse_dataloader_from_config

    theirs = take(get_lhotse_dataloader_from_config(CASES[case](data), 0, 1, AsIs(), Letters()), 120)
    ours = take(get_dataloader(CASES[case](data), 0, 1, Letters(), dataset=AsIs()), 120)
    assert texts(ours) == texts(theirs)
    assert facts(ours) == pytest.approx(facts(theirs), abs=0.13, rel=0.08)


def test_a_limit_on_open_streams_leaves_no_dataset_out(data):
    """NeMo's loader reads a drawn stream to its end, so with infinite streams it would never switch."""
    loader = get_dataloader(CLASSIC | shar(data) | {"max_open_streams": 1}, 0, 1, dataset=AsIs())
    assert facts(take(loader, 120))["a"] == pytest.approx(0.2, abs=0.05)

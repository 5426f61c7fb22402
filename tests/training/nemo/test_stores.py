"""Tests of NeMo's examples of data in object stores, from its page on ASR datasets, and of faults."""

import json
import os
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from support.example import run_ranks
from support.project import raises, write_lines
from support.stores import AIStoreStandIn, Fault, S3Store
from support.training import AsIs, Letters, flat, stop_ranks, take

from sharmill.errors import ConfigError
from sharmill.training import get_dataloader

TARRED = """\
manifest_filepath='ais://bucket/tarred_audio_manifest.json'
tarred_audio_filepaths='ais://bucket/shard_{1..64}.tar'
"""
NOT_TARRED = "manifest_filepath='ais://bucket/dataset_manifest.json'"
COMPLETE = """\
export AIS_ENDPOINT=http://hostname:port \\
&& export NEMO_DATA_STORE_CACHE_DIR=/tmp \\
&& export NEMO_DATA_STORE_CACHE_SHARED=0 \\
python speech_to_text_bpe.py \\
...
model.train_ds.manifest_filepath=ais://train_bucket/tarred_audio_manifest.json \\
model.train_ds.tarred_audio_filepaths=ais://train_bucket/audio__OP_0..511_CL_.tar \\
++model.train_ds.defer_setup=true \\
mode.validation_ds.manifest_filepath=ais://validation_bucket/validation_manifest.json \\
++model.validation_ds.defer_setup=true
"""


@pytest.fixture(params=[AIStoreStandIn, S3Store], ids=lambda kind: kind.scheme)
def store(request, nemo_data, tmp_path, monkeypatch, no_waits):
    """An object store with all data of the examples, three tars per set, and an empty cache."""
    monkeypatch.setenv("NEMO_DATA_STORE_CACHE_DIR", str(tmp_path / "cache"))
    with request.param() as store:
        fill(store, nemo_data)
        yield store


def fill(store, data):
    lines = [json.loads(line) for line in (data / "whole.json").read_text().splitlines()]
    numbered = [line | {"shard_id": line["shard_id"] + 1} for line in lines]
    for shard in range(3):
        tar = (data / f"audio_{shard}.tar").read_bytes()
        store.put(f"shard_{shard + 1}.tar", tar)
        for form in ("audio_{}.tar", "train_bucket/audio_{}.tar"):
            store.put(form.format(shard), tar)
        store.put(f"manifest_{shard}.json", (data / f"manifest_{shard}.json").read_bytes())
    for name, records in {
        "tarred_audio_manifest.json": numbered,
        "train_bucket/tarred_audio_manifest.json": lines,
        "dataset_manifest.json": [
            line | {"audio_filepath": f"path/to/{name}"} | ({"sampling_rate": 16000} if number % 2 else {})
            for number, (line, name) in enumerate((line, line["audio_filepath"]) for line in lines)
        ],
        "validation_bucket/validation_manifest.json": [
            line | {"audio_filepath": store.url(f"path/to/{line['audio_filepath']}")} for line in lines
        ],
    }.items():
        store.put(name, "".join(json.dumps(record) + "\n" for record in records).encode())
    for number in range(9):
        store.put(f"path/to/{number}.wav", (data / f"{number}.wav").read_bytes())


def settings_of(text, store, section=""):
    """Return the settings of the page for a store with one bucket and three tars per set."""
    for printed, here in {"{1..64}": "{1..3}", "0..511": "0..2", "ais://bucket/": store.url(""), "\\\n": ""}.items():
        text = text.replace(printed, here)
    pairs = [word.lstrip("+").removeprefix(section).split("=", 1) for word in shlex.split(text) if "=" in word]
    urls = {key: value.replace("ais://", store.url("")) if "_bucket/" in value else value for key, value in pairs}
    return {key: value == "true" or value for key, value in urls.items() if "." not in key and key.islower()}


def load(settings, rank=0, world_size=1, **options):
    cfg = {"batch_size": 2, "shard_seed": 1, "seed": 1} | settings
    return get_dataloader(cfg, rank, world_size, dataset=AsIs(), **options)


def heard(examples):
    """Return the texts of examples and the number of their samples."""
    return sorted((cut.supervisions[0].text, cut.load_audio().shape) for cut in examples)


ALL = [(str(n), (1, 8000)) for n in range(9)]


@pytest.mark.parametrize(
    ("text", "section"),
    [(TARRED, ""), (NOT_TARRED, ""), (COMPLETE, "model.train_ds."), (COMPLETE, "mode.validation_ds.")],
    ids=["tarred", "not tarred", "train_ds", "validation_ds"],
)
def test_an_example_of_the_page_runs(text, section, store):
    settings = settings_of(text, store, section)
    assert settings["manifest_filepath"].startswith(store.url(""))
    # Untarred data are read in map style, which ends by itself.
    finite = {"force_finite": True} if "tarred_audio_filepaths" in settings else {}
    assert heard(flat(take(load(settings | finite)))) == ALL


def read_on_a_rank(folder):
    """Run a rank of a job on a shared node or its own; record its examples, and its error for a missing file."""
    dist.init_process_group("gloo")
    rank, options = dist.get_rank(), json.loads((folder / "options.json").read_text())
    os.environ |= options["environment"]
    if options["nodes"] == 2:
        os.environ |= {"NEMO_DATA_STORE_CACHE_DIR": str(folder / f"cache{rank}"), "LOCAL_RANK": "0"}
    cfg = options["settings"] | {"force_iterable_dataset": True, "force_finite": True, "defer_setup": True}
    loader = load(cfg, rank, 2)
    found = {"copies": len([*Path(os.environ["NEMO_DATA_STORE_CACHE_DIR"]).rglob("about-*.wav")])}
    found["heard"] = [text for text, _ in heard(flat(take(loader)))]
    manifest = cfg["manifest_filepath"]
    try:
        load(cfg | {"manifest_filepath": manifest.replace("dataset_", "incomplete_")}, rank, 2)
    except ConfigError as error:
        found["told"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "nodes", "copies"),
    [("1", 1, [9, 9]), ("1", 2, [9, 0]), ("0", 1, [9, 9]), ("0", 2, [9, 9])],
    ids=["shared", "shared, so they say", "one node", "two nodes"],
)
@pytest.mark.parametrize("store", [AIStoreStandIn], indirect=True, ids=["ais"])
def test_one_rank_copies_for_a_shared_cache_or_for_its_node(shared, nodes, copies, store, tmp_path):
    line = {"audio_filepath": "path/to/none.wav", "duration": 0.5, "text": ""}
    store.put("incomplete_manifest.json", json.dumps(line).encode())
    environment = {name: os.environ[name] for name in ("AIS_ENDPOINT", "NEMO_DATA_STORE_CACHE_DIR")}
    environment["NEMO_DATA_STORE_CACHE_SHARED"] = shared
    options = {"settings": settings_of(NOT_TARRED, store), "environment": environment, "nodes": nodes}
    (tmp_path / "options.json").write_text(json.dumps(options))
    run_ranks(read_on_a_rank, 2, tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert sorted(text for one in found for text in one["heard"]) == list("012345678")
    assert [one["told"] for one in found] == [f"{store.url('path/to/none.wav')} does not exist"] * 2
    assert [one["copies"] for one in found] == copies
    if nodes == 1:
        assert [store.requests["GET", f"path/to/{n}.wav"] for n in range(9)] == [1] * 9


@pytest.mark.parametrize("text", [TARRED, NOT_TARRED], ids=["tarred", "not tarred"])
def test_a_state_goes_on_in_the_same_data_alone(text, store):
    cfg = settings_of(text, store) | {"force_iterable_dataset": True, "batch_size": 3}
    ranks, state = stop_ranks(partial(load, cfg, resumable=True), [1])
    rest = take(load(cfg, resumable=True, state=state), 2)
    assert heard(flat([*flat(ranks), *rest])) == ALL
    manifest = cfg["manifest_filepath"].removeprefix(store.url(""))
    store.put(manifest, store.get(manifest).replace(b'"text": "0"', b'"text": "9"'))
    with raises(ConfigError, "wrong_state", "files"):
        load(cfg, resumable=True, state=state)
    assert heard(flat(take(load(cfg | {"force_finite": True})))) == [*ALL[1:], ("9", (1, 8000))]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("tar", status=500, times=1),
        Fault("wav", status=503, times=2),
        Fault("tar", methods="GET", cut=5000, times=1),
        Fault("wav", methods="GET", cut=5000, times=1),
        Fault("manifest", methods="GET", cut=100, times=1),
    ],
    ids=["500", "503", "truncated tar", "truncated audio", "truncated manifest"],
)
def test_a_store_that_fails_for_a_while_gives_the_same_data(fault, store):
    text = TARRED if fault.key == "tar" else NOT_TARRED
    store.faults.append(replace(fault))
    assert heard(flat(take(load(settings_of(text, store) | {"force_finite": True})))) == ALL
    assert store.faults[0].seen > fault.times


@pytest.mark.parametrize(
    ("text", "gone", "fault", "said"),
    [
        (TARRED, "shard_2.tar", None, "shard_2.tar does not exist"),
        (TARRED, "tarred_audio_manifest.json", None, "tarred_audio_manifest.json does not exist"),
        (NOT_TARRED, "path/to/3.wav", None, "path/to/3.wav does not exist"),
        (NOT_TARRED, None, Fault("wav", status=403), "path/to/"),
        (NOT_TARRED, None, Fault("wav", status=503), "cannot fetch"),
        (TARRED, None, Fault("tar", methods="GET", cut=5000), "shard_1.tar"),
    ],
    ids=["tar", "manifest", "audio", "credentials", "503", "truncated"],
)
def test_missing_files_of_a_store_are_named_in_one_line(text, gone, fault, said, store):
    if gone is not None:
        del store.objects[gone]
    store.faults += [replace(fault)] if fault else []
    with raises(ConfigError, "missing_input", said):
        take(load(settings_of(text, store) | {"force_finite": True}))


def test_without_an_endpoint_a_line_says_so(store, monkeypatch):
    """The message also appears for types that NeMo reads itself."""
    monkeypatch.delenv("AIS_ENDPOINT", raising=False)
    sliced = {"type": "nemo_tarred", "slice_length": 2, "manifest_filepath": "ais://bucket/manifest_{0..2}.json",
              "tarred_audio_filepaths": "ais://bucket/audio_{0..2}.tar"}  # fmt: skip
    for cfg in ({"manifest_filepath": "ais://bucket/m.json"}, {"input_cfg": [sliced], "shuffle": True}):
        with raises(ConfigError, "missing_input", "set AIS_ENDPOINT=http://HOST:PORT"):
            load(cfg | {"shard_seed": "trng"})


def test_other_types_are_read_from_a_store(store, corpora):
    """Manifests with one tar each and Shar by fields are read. A folder is refused, because it cannot be listed."""
    store.upload(corpora.small, "small")
    tars = {"type": "nemo_tarred", "tarred_audio_filepaths": store.url("audio_{0..2}.tar"),
            "manifest_filepath": store.url("manifest_{0..2}.json")}  # fmt: skip
    assert heard(flat(take(load({"input_cfg": [tars], "force_finite": True})))) == ALL
    fields = {
        "cuts": store.url("small/cuts/cuts.{000000..000002}.jsonl.gz"),
        "recording": store.url("small/target_audio/recording.{000000..000002}.tar"),
    }
    shar = {"type": "lhotse_shar", "shar_path": fields}
    found = flat(take(load({"input_cfg": [shar], "force_finite": True})))
    assert {cut.supervisions[0].custom["number"]: cut.load_audio().shape for cut in found} == dict.fromkeys(
        range(100, 108), (1, 16000)
    )
    with raises(ConfigError, "missing_input", "give the files of each field"):
        load({"input_cfg": [{"type": "lhotse_shar", "shar_path": store.url("small")}]})


@pytest.mark.parametrize("kind", ["nemo", "nemo in a store", "share_gpt"])
@pytest.mark.parametrize("store", [AIStoreStandIn], indirect=True, ids=["ais"])
def test_a_command_in_a_manifest_is_not_run(kind, store, tmp_path):
    """The command has the form of a URL, so lhotse would run it."""
    command = {"duration": 0.5, "sampling_rate": 16000, "id": "0"}
    for key in ("audio_filepath", "sound"):
        command[key] = f"pipe://x; touch {tmp_path}/run"
    command |= {"text": "", "conversations": [{"from": "human", "value": "<sound>"}, {"from": "gpt", "value": "a"}]}
    path = write_lines(tmp_path / "manifest.json", [command])
    store.put("commands.json", path.read_bytes())
    entry = {"type": kind.split()[0], "manifest_filepath": store.url("commands.json") if "store" in kind else str(path)}
    talk = {"audio_locator_tag": "A", "audio_placeholders": ["<sound>"], "token_equivalent_duration": 0.1}
    plain = {"prompt_format": "plain", "use_multimodal_sampling": True, "force_finite": True, "batch_size": 1}
    cfg = {"input_cfg": [entry | talk]} | plain if kind == "share_gpt" else {"input_cfg": [entry], "batch_size": 1}
    with raises(ConfigError, "bad_manifest", "is a command, which is not run"):
        take(get_dataloader(cfg | {"seed": 1, "shard_seed": 1}, 0, 1, Letters(), dataset=AsIs()))
    assert not (tmp_path / "run").exists()

"""The multimodal loader goes on where it was left: every cut that passes the filters once per epoch."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from support.errors import raises
from support.training import AsIs, Letters, take

from sharmill.errors import ConfigError
from sharmill.training import get_dataloader
from sharmill.training.nemo.resumable import cuts_of, merge_data_states

# Through the filters come 17 of the large dataset's 24 cuts, and all of the small one.
PASS = {"large": set(range(17)), "small": set(range(100, 108))}
ORDER = {"shuffle": True, "shard_seed": "randomized", "seed": 3, "max_duration": 2.15}
BUCKETS = {"bucket_duration_bins": [0.9, 1.5], "batch_duration": 4.0, "bucket_buffer_size": 6, "shuffle_buffer_size": 4}
SAMPLERS = {"by_size": {"batch_size": 3, "shuffle_buffer_size": 5}, "in_buckets": BUCKETS}


def session(cfg, world_size, batches, state, tokenizer=None):
    """Use batches on some ranks, a number for each, and return the cuts in them with the state then."""
    used, states = [], []
    for rank in range(world_size):
        loader = get_dataloader(cfg, rank, world_size, tokenizer, dataset=AsIs(), resumable=True, state=state)
        used += [example for batch in take(loader, batches[rank]) for example in batch]
        states.append(loader.state_dict())
    return used, json.loads(json.dumps(merge_data_states(states)))


def check_once_per_epoch(used, state):
    """Epochs before that of the state are complete, and no cut came twice in any."""
    cuts = [cut for example in used for cut in cuts_of(example) if "shar_position" in (cut.custom or {})]
    seen = Counter((cut.supervisions[0].custom["number"], cut.shar_position[0]) for cut in cuts)
    assert set(seen.values()) == {1}
    for expected, reader in zip(PASS.values(), state["readers"], strict=False):
        assert reader["epoch"] >= 2
        for epoch in range(reader["epoch"]):
            assert {number for number, found in seen if found == epoch} >= expected


def interrupted(cfg, seed, tokenizer=None):
    """Runs in which the numbers of ranks and workers change, until each dataset had two epochs."""
    rng, used, state = random.Random(seed), [], None
    while state is None or min(reader["epoch"] for reader in state["readers"]) < 2:
        world_size = rng.randint(1, 3)
        settings = cfg | {"num_workers": rng.choice([0, 0, 0, 1, 2])}
        more, state = session(settings, world_size, [rng.randint(0, 9) for _ in range(world_size)], state, tokenizer)
        used += more
    return used, state


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_one_dataset(corpora, sampler, seed):
    cfg = {"input_cfg": [corpora.entry("large")]} | ORDER | SAMPLERS[sampler]
    check_once_per_epoch(*interrupted(cfg, seed))


@pytest.mark.parametrize("seed", range(2))
def test_several_datasets_by_weight_beside_text_and_conversations(corpora, seed):
    entries = [
        {"type": "group", "weight": 0.5, "input_cfg": [corpora.entry("large")]},
        {
            "type": "lhotse_as_conversation",
            "audio_locator_tag": "A",
            "token_equivalent_duration": 0.1,
            "input_cfg": [corpora.entry("small")],
            "weight": 0.3,
        },
        {"type": "txt", "paths": str(corpora.text), "language": "en", "weight": 0.1},
        {"type": "multimodal_conversation", "manifest_filepath": str(corpora.conversations), "weight": 0.1},
    ]
    settings = {"use_multimodal_sampling": True, "token_equivalent_duration": 0.1, "audio_locator_tag": "A"}
    settings |= {"prompt_format": "plain", "batch_tokens": 120, "shuffle_buffer_size": 5}
    used, state = interrupted({"input_cfg": entries} | ORDER | settings, seed, Letters())
    check_once_per_epoch(used, state)
    assert any(not cuts_of(example) for example in used)


@pytest.mark.parametrize("fusion", ["round_robin", "randomized_round_robin", "zip"])
def test_fused_samplers(corpora, fusion):
    order = {key: value for key, value in ORDER.items() if key != "max_duration"}
    large = {"input_cfg": [corpora.entry("large")], "max_duration": 2.15} | BUCKETS
    small = {"input_cfg": [corpora.entry("small")], "batch_size": 2, "shuffle_buffer_size": 3}
    cfg = {"multi_config": True, "sampler_fusion": fusion, "a": large, "b": small} | order
    check_once_per_epoch(*interrupted(cfg, 1))


def test_what_filters_drop_does_not_stay_in_the_state(corpora):
    cfg = {"input_cfg": [corpora.entry("large")], "batch_size": 3, "shuffle_buffer_size": 5} | ORDER
    _, state = session(cfg, 1, [200], None)
    (reader,) = state["readers"]
    assert reader["epoch"] > 30
    held_back = [row for known in reader["epochs"].values() for row in known["unused"]]
    assert len(held_back) <= 8


def test_joined_cuts_are_all_used(corpora):
    settings = {"batch_size": 3, "concatenate_samples": True, "shuffle_buffer_size": 5, "db_norm": None}
    settings |= {"concatenate_duration_factor": 3.0}
    cfg = {"input_cfg": [corpora.entry("large")]} | ORDER | settings
    used, state = session(cfg, 1, [40], None)
    assert any(hasattr(cut, "tracks") for cut in used)
    assert state["readers"][0]["epoch"] > 3


def test_the_first_batches_are_those_of_the_loader_without_states(corpora):
    cfg = {"input_cfg": [corpora.entry("large"), corpora.entry("small")], "num_workers": 2} | ORDER | BUCKETS
    plain = take(get_dataloader(cfg, 0, 2, dataset=AsIs()), 6)
    found = take(get_dataloader(cfg, 0, 2, dataset=AsIs(), resumable=True), 6)
    assert [[cut.id for cut in batch] for batch in found] == [[cut.id for cut in batch] for batch in plain]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"force_finite": True}, "resumable=True is for streaming without end"),
        ({"force_map_dataset": True}, "resumable=True is for streaming without end"),
        ({"shard_seed": "trng"}, "resumable=True is for streaming without end"),
        ({"perturb_speed": True}, "resumable=True does not go with perturb_speed"),
        ({"concurrent_bucketing": True}, "resumable=True does not go with concurrent_bucketing"),
    ],
)
def test_what_cannot_be_exact_is_refused(corpora, settings, message):
    cfg = {"input_cfg": [corpora.entry("large")], "batch_size": 3} | ORDER | settings
    with raises(ConfigError, "inexact_state", message):
        get_dataloader(cfg, 0, 1, dataset=AsIs(), resumable=True)


@pytest.mark.slow
def test_a_state_of_other_data_is_refused(corpora):
    cfg = {"input_cfg": [corpora.entry("large")], "batch_size": 3, "shuffle_buffer_size": 20} | ORDER
    _, state = session(cfg, 2, [2, 2], None)
    both = cfg | {"input_cfg": [corpora.entry("large"), corpora.entry("small")]}
    with raises(ConfigError, "wrong_state", "1", "2"):
        session(both, 1, [1], state)
    with raises(ConfigError, "wrong_state", "0"):
        session(both, 1, [1], {"epoch": 1})  # of another reader
    with raises(ConfigError, "wrong_state", "seed", "3", "4"):
        session(cfg | {"seed": 4}, 1, [1], state)
    with raises(ConfigError, "wrong_state"):
        merge_data_states([{}])

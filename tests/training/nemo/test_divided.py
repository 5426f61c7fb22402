"""NeMo's own types of data, divided among all readers: every example once per epoch, also after a resume."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from support.errors import raises
from support.training import AsIs, Letters, flat, take

from sharmill.errors import ConfigError
from sharmill.training import get_dataloader
from sharmill.training.nemo.resumable import merge_data_states

ORDER = {"shuffle": True, "shard_seed": "randomized", "seed": 3, "shuffle_buffer_size": 4, "batch_size": 2}
PLAIN = {
    "use_multimodal_sampling": True,
    "token_equivalent_duration": 0.1,
    "audio_locator_tag": "A",
    "prompt_format": "plain",
}


@pytest.fixture(scope="module")
def data(corpora, nemo_data):
    """An entry of each type, and the names of its examples."""
    texts = str(nemo_data / "text__OP_0..2_CL_.txt")
    tars = {"type": "nemo_tarred", "tarred_audio_filepaths": str(nemo_data / "audio__OP_0..2_CL_.tar")}
    return {
        "txt": ({"type": "txt", "paths": texts, "language": "en"}, {f"line {n}" for n in range(12)}),
        "txt_pair": (
            {"type": "txt_pair", "source_paths": texts, "target_paths": texts},
            {f"line {n}" for n in range(12)},
        ),
        "multimodal_conversation": (
            {"type": "multimodal_conversation", "manifest_filepath": str(corpora.conversations)},
            {f"conversation{n}" for n in range(6)},
        ),
        "nemo": (
            {"type": "nemo", "manifest_filepath": str(nemo_data / "plain.json")},
            {str(n) for n in range(9) if n != 4},
        ),
        "nemo_tarred": (
            tars | {"manifest_filepath": str(nemo_data / "manifest__OP_0..2_CL_.json")},
            {str(n) for n in range(9)},
        ),
        "one manifest of several tars": (
            tars | {"manifest_filepath": str(nemo_data / "whole.json")},
            {str(n) for n in range(9)},
        ),
        "lhotse_shar": (
            {"type": "lhotse_shar", "shar_path": {"cuts": sorted(map(str, (corpora.small / "cuts").iterdir()))}},
            {str(n) for n in range(100, 108)},
        ),
    }


KINDS = [
    "txt",
    "txt_pair",
    "multimodal_conversation",
    "nemo",
    "nemo_tarred",
    "one manifest of several tars",
    "lhotse_shar",
]


def name(example) -> str:
    if hasattr(example, "turns"):
        return example.id
    if hasattr(example, "source"):
        return example.source.text
    if hasattr(example, "supervisions"):
        return str((example.supervisions[0].custom or {}).get("number", example.supervisions[0].text))
    return example.text.strip()


def load(entry, rank=0, world_size=1, *, resumable=False, state=None, **settings):
    cfg = {"input_cfg": [entry], "force_iterable_dataset": True} | ORDER | PLAIN | settings
    return get_dataloader(cfg, rank, world_size, Letters(), dataset=AsIs(), resumable=resumable, state=state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_finite_pass_gives_every_example_once(data, kind):
    entry, names = data[kind]
    found = [
        name(example)
        for rank in (0, 1)
        for example in flat(take(load(entry, rank, 2, force_finite=True, num_workers=2 * (kind == "nemo_tarred"))))
    ]
    assert Counter(found) == Counter(names)


@pytest.mark.parametrize("kind", KINDS)
def test_each_example_once_per_epoch_on_changing_ranks_and_workers(data, kind):
    entry, names = data[kind]
    rng, used, state = random.Random(1), [], None
    while state is None or state["readers"][0]["epoch"] < 3:
        world_size, states = rng.randint(1, 3), []
        num_workers = rng.choice([0, 0, 2]) if kind in ("txt", "nemo_tarred") else 0
        for rank in range(world_size):
            loader = load(entry, rank, world_size, resumable=True, state=state, num_workers=num_workers)
            used += flat(take(loader, rng.randint(0, 4)))
            states.append(loader.state_dict())
        state = json.loads(json.dumps(merge_data_states(states)))
    seen = Counter((example.custom["shar_position"][0], name(example)) for example in used)
    assert set(seen.values()) == {1}
    for epoch in range(state["readers"][0]["epoch"]):
        assert {found for one, found in seen if one == epoch} == names


def test_text_goes_on_beside_speech(corpora, data):
    """Text repeated from its beginning after each stop, so that a short job never came to its end."""
    entries = [corpora.entry("large"), data["txt"][0]]
    cfg = {"input_cfg": entries} | ORDER | PLAIN
    used, state = [], None
    for _ in range(8):
        loader = get_dataloader(cfg, 0, 1, Letters(), dataset=AsIs(), resumable=True, state=state)
        used += flat(take(loader, 3))
        state = merge_data_states([loader.state_dict()])
    texts = [(example.shar_position[0], example.text) for example in used if not hasattr(example, "duration")]
    assert len(texts) == len(set(texts))
    assert {text for epoch, text in texts if epoch == 0} == {f"line {n}\n" for n in range(12)}


def test_a_state_of_other_files_is_refused(data, tmp_path):
    loader = load(data["txt"][0], resumable=True)
    take(loader, 1)
    state = merge_data_states([loader.state_dict()])
    (tmp_path / "other.txt").write_text("one\ntwo\nthree\n")
    with raises(ConfigError, "wrong_state", "files"):
        take(
            load({"type": "txt", "paths": str(tmp_path / "other.txt"), "language": "en"}, resumable=True, state=state),
            1,
        )


@pytest.mark.parametrize("kind", ["txt", "nemo_tarred", "lhotse_shar"])
def test_filters_that_nothing_passes_are_an_error(data, kind):
    settings = {"min_tokens": 1000} if kind == "txt" else {"min_duration": 900}
    with raises(ConfigError, "too_few_cuts", "none of", "examples in a row passes the filters"):
        take(load(data[kind][0], **settings), 1)


def test_pipes_and_slices_are_read_but_not_resumed(data):
    entry = data["nemo_tarred"][0]
    piped = entry | {"tarred_audio_filepaths": "pipe:cat " + entry["tarred_audio_filepaths"]}
    assert len(flat(take(load(piped), 3))) == 6
    for undivided in (piped, entry | {"slice_length": 2}):
        with raises(ConfigError, "inexact_state", "nemo_tarred", "pipes"):
            load(undivided, resumable=True)


def test_conversions_that_lose_the_place_of_a_cut_are_not_resumed(corpora):
    entry = {"type": "lhotse_magpietts_data_as_continuation", "input_cfg": [corpora.entry("small")]}
    with raises(ConfigError, "inexact_state", "lhotse_magpietts_data_as_continuation"):
        load({"type": "group", "input_cfg": [entry]}, resumable=True)


def test_a_last_line_without_an_end_is_read(data, tmp_path):
    entry = data["nemo_tarred"][0]
    for n in range(3):
        text = Path(entry["manifest_filepath"].replace("__OP_0..2_CL_", f"_{n}")).read_text()
        (tmp_path / f"manifest_{n}.json").write_text(text.rstrip())
    entry = entry | {"manifest_filepath": str(tmp_path / "manifest__OP_0..2_CL_.json")}
    assert len(flat(take(load(entry, force_finite=True)))) == 9


def test_map_style_data_are_to_be_read_as_a_stream_to_go_on(data):
    with raises(ConfigError, "inexact_state", "force_iterable_dataset: true"):
        load(data["nemo"][0], resumable=True, force_iterable_dataset=False)


def test_files_that_do_not_go_together_are_named(data, tmp_path):
    entry = data["txt_pair"][0] | {"target_paths": str(tmp_path / "none.txt")}
    with raises(ConfigError, "bad_config_value", "3 files as source_paths", "1 files as target_paths"):
        load(entry)
    with raises(ConfigError, "missing_input", "none.txt"):
        load({"type": "txt", "paths": str(tmp_path / "none.txt"), "language": "en"})


def test_weights_are_kept_over_many_short_jobs(corpora):
    """The first draws were repeated after each stop: ten of them cannot have the shares of 0.75 and 0.25."""
    entries = [corpora.entry("large", weight=3), corpora.entry("small", weight=1)]
    cfg = {"input_cfg": entries} | ORDER | {"batch_size": 5, "shuffle_buffer_size": 1}
    jobs, state = [], None
    for _ in range(40):
        loader = get_dataloader(cfg, 0, 1, dataset=AsIs(), resumable=True, state=state)
        jobs.append(tuple("klein" in cut.id for cut in flat(take(loader, 2))))
        state = json.loads(json.dumps(merge_data_states([loader.state_dict()])))
    assert len(set(jobs)) > 20
    assert sum(map(sum, jobs)) / 400 == pytest.approx(0.25, abs=0.08)

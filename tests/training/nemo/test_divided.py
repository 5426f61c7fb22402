"""Tests that divided data, as a resumed stream or in canonical parts, have every example once per epoch."""

import random
from collections import Counter
from functools import partial

import pytest
from support.project import raises, write_lines
from support.training import AsIs, Letters, flat, number, stop_ranks, take

from sharmill.errors import ConfigError
from sharmill.training import get_dataloader
from sharmill.training.nemo.loader import merge_data_states
from sharmill.training.nemo.partition import place_of

ORDER = {"shuffle": True, "shard_seed": "randomized", "seed": 3, "shuffle_buffer_size": 4, "batch_size": 2}
PLAIN = {
    "use_multimodal_sampling": True,
    "token_equivalent_duration": 0.1,
    "audio_locator_tag": "A",
    "prompt_format": "plain",
}


@pytest.fixture(scope="module")
def data(corpora, nemo_data, tmp_path_factory):
    """Return an entry of each type, and the names of its examples."""
    lines = [{"text": text, "tts_text": text} for text in ("one", "two", "three")]
    spoken = write_lines(tmp_path_factory.mktemp("tts_text") / "spoken.json", lines)
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
        "sharmill": (corpora.entry("large"), {str(n) for n in range(23)}),
        "tts_text": ({"type": "tts_text", "manifest_filepath": str(spoken), "language": "en"}, {"one", "two", "three"}),
        "lhotse_shar": (
            {"type": "lhotse_shar", "shar_path": {"cuts": sorted(map(str, (corpora.small / "cuts").iterdir()))}},
            {str(n) for n in range(100, 108)},
        ),
    }


KINDS = [
    "sharmill",
    "txt",
    "txt_pair",
    "tts_text",
    "multimodal_conversation",
    "nemo",
    "nemo_tarred",
    "one manifest of several tars",
    "lhotse_shar",
]


def name(example) -> str:
    if hasattr(example, "turns"):
        custom = example.list_cuts()[0].supervisions[0].custom or {} if "conversation" not in example.id else {}
        return str(custom.get("number", example.id))
    if hasattr(example, "source"):
        return example.source.text
    if hasattr(example, "supervisions"):
        return str((example.supervisions[0].custom or {}).get("number", example.supervisions[0].text))
    return example.text.strip()


def load(*entries, rank=0, world_size=1, resumable=False, state=None, **settings):
    cfg = {"input_cfg": entries, "force_iterable_dataset": True} | ORDER | PLAIN | settings
    return get_dataloader(cfg, rank, world_size, Letters(), dataset=AsIs(), resumable=resumable, state=state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_finite_pass_gives_every_example_once(data, kind):
    entry, names = data[kind]
    options = {"world_size": 2, "force_finite": True, "num_workers": 2 * (kind == "nemo_tarred")}
    found = [name(example) for rank in (0, 1) for example in flat(take(load(entry, rank=rank, **options)))]
    assert Counter(found) == Counter(names)


@pytest.fixture(scope="module")
def mixed(corpora):
    """Return weighted entries: datasets, one in a group and one as conversations, text and conversations."""
    as_conversation = {"type": "lhotse_as_conversation", "audio_locator_tag": "A", "token_equivalent_duration": 0.1}
    spoken = {"type": "multimodal_conversation", "manifest_filepath": str(corpora.conversations)}
    return [
        ({"type": "group", "weight": 0.5, "input_cfg": [corpora.entry("large")]}, {str(n) for n in range(17)}),
        (as_conversation | {"input_cfg": [corpora.entry("small")], "weight": 0.3}, {str(n) for n in range(100, 108)}),
        ({"type": "txt", "paths": str(corpora.text), "weight": 0.1}, {f"line {n:02d}" for n in range(40)}),
        (spoken | {"weight": 0.1}, {f"conversation{n}" for n in range(6)}),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_each_example_once_per_epoch_on_changing_readers(data, mixed, kind):
    """Each entry is resumed separately, with filters: 2.15 s lets 17 cuts of the large dataset pass."""
    entries, expected = zip(*(mixed if kind == "mixed" else [data[kind]]), strict=True)
    settings = {"max_duration": 2.15} if kind == "mixed" else {}
    rng, used, state = random.Random(1), [], None
    while state is None or min(reader["epoch"] for reader in state["readers"][:2]) < 2:
        settings["num_workers"] = rng.choice([0, 0, 2]) if kind in ("txt", "nemo_tarred", "mixed") else 0
        counts = [rng.randint(0, 9 if kind == "mixed" else 4) for _ in range(rng.randint(1, 3))]
        ranks, state = stop_ranks(partial(load, *entries, resumable=True, **settings), counts, state)
        used += flat(flat(ranks))
    seen = Counter((*place_of(example)[:2], name(example)) for example in used)
    assert set(seen.values()) == {1}
    for reader, names in enumerate(expected):
        for epoch in range(state["readers"][reader]["epoch"]):
            assert {found for *place, found in seen if place == [reader, epoch]} == names


def lengths_entry(folder, durations):
    """Return a manifest of recordings that are never opened."""
    lines = [
        {"audio_filepath": f"{n}.wav", "duration": seconds, "text": f"{n}", "sampling_rate": 16000}
        for n, seconds in enumerate(durations)
    ]
    return {"type": "nemo", "manifest_filepath": str(write_lines(folder / "manifest.json", lines))}


def test_buckets_are_redrawn_after_a_stop_alike_on_all_ranks(tmp_path):
    entry = lengths_entry(tmp_path, random.Random(0).choices([1.0, 2.0, 3.0, 4.0], k=800))
    buckets = {"bucket_duration_bins": [1.5, 2.5, 3.5], "bucket_buffer_size": 80, "shuffle_buffer_size": 0}
    settings = {"use_multimodal_sampling": False, "prompt_format": None, "batch_size": 1}
    drawn, state = [], None
    for _ in range(3):
        ranks, state = stop_ranks(partial(load, entry, resumable=True, **settings, **buckets), [12, 12], state)
        first, second = ([cut.duration for cut in flat(batches)] for batches in ranks)
        assert first == second
        drawn.append(tuple(first))
    assert len(set(drawn)) == 3


def test_buckets_hold_nothing_back_over_many_stops(tmp_path):
    """Three and four readers alternate and stop every 12 batches; their buckets hold most of the 100 examples."""
    lengths = random.Random(0)
    entry = lengths_entry(tmp_path, [lengths.lognormvariate(1.9, 0.6) for _ in range(100)])
    buckets = {"bucket_duration_bins": [4.5, 6.5, 9.0, 13.0], "bucket_buffer_size": 24, "shuffle_buffer_size": 0}
    sizes = {"use_multimodal_sampling": False, "prompt_format": None, "batch_size": None, "batch_duration": 30}
    places, state = [], None
    for stop in range(20):
        counts = [[4, 4, 4], [3, 3, 3, 3]][stop % 2]
        ranks, state = stop_ranks(partial(load, entry, resumable=True, **buckets, **sizes), counts, state)
        places += [(place_of(example), name(example)) for example in flat(flat(ranks))]
    assert len({found for _, found in places}) == 100
    late = [number / 100 - place[1] for number, (place, _) in enumerate(places)]
    assert max(late) < 3
    assert state["readers"][0]["epoch"] >= len(places) // 100 - 2


def test_a_state_of_other_files_is_refused(data, tmp_path):
    _, state = stop_ranks(partial(load, data["txt"][0], resumable=True), [1])
    (tmp_path / "other.txt").write_text("one\ntwo\nthree\n")
    with raises(ConfigError, "wrong_state", "files"):
        other = {"type": "txt", "paths": str(tmp_path / "other.txt"), "language": "en"}
        take(load(other, resumable=True, state=state), 1)
    with raises(ConfigError, "wrong_state", "seed", "3", "4"):
        take(load(data["txt"][0], resumable=True, state=state, seed=4), 1)
    for wrong in (state | {"readers": 2 * state["readers"]}, {"epoch": 1}):
        with raises(ConfigError, "wrong_state", "datasets or sources"):
            load(data["txt"][0], resumable=True, state=wrong)
    with raises(ConfigError, "wrong_state"):
        merge_data_states([{}])


def test_what_has_no_place_to_go_back_to_is_not_resumed(corpora, data):
    entry = {"type": "lhotse_magpietts_data_as_continuation", "input_cfg": [corpora.entry("small")]}
    with raises(ConfigError, "inexact_state", "lhotse_magpietts_data_as_continuation"):
        load({"type": "group", "input_cfg": [entry]}, resumable=True)
    with raises(ConfigError, "inexact_state", "force_iterable_dataset: true"):
        load(data["nemo"][0], resumable=True, force_iterable_dataset=False)


def test_pipes_and_slices_are_read_but_not_resumed(data):
    entry = data["nemo_tarred"][0]
    piped = entry | {"tarred_audio_filepaths": "pipe:cat " + entry["tarred_audio_filepaths"]}
    assert len(flat(take(load(piped), 3))) == 6
    for undivided in (piped, entry | {"slice_length": 2}):
        with raises(ConfigError, "inexact_state", "nemo_tarred", "pipes"):
            load(undivided, resumable=True)


def test_weights_are_kept_over_many_short_jobs(corpora):
    """If the first ten draws were repeated after each stop, the shares could not be 0.75 and 0.25."""
    entries = [corpora.entry("large", weight=3), corpora.entry("small", weight=1)]
    cfg = {"input_cfg": entries} | ORDER | {"batch_size": 5, "shuffle_buffer_size": 1}
    jobs, state = [], None
    for _ in range(40):
        ranks, state = stop_ranks(partial(get_dataloader, cfg, dataset=AsIs(), resumable=True), [2], state)
        jobs.append(tuple("klein" in cut.id for cut in flat(flat(ranks))))
    assert len(set(jobs)) > 20
    assert sum(map(sum, jobs)) / 400 == pytest.approx(0.25, abs=0.08)


@pytest.fixture
def entry(tmp_path):
    """Twelve lines in two manifests. Every third has no normalized text, and every fourth its own language."""
    for file in (0, 1):
        lines = []
        for n in range(6 * file, 6 * file + 6):
            spoken = {"tts_text": f"Line {n}."} | ({} if n % 3 == 0 else {"tts_text_normalized": f"line number {n}"})
            lines.append({"text": f"line {n}"} | spoken | ({"lang": "de"} if n % 4 == 0 else {}))
        write_lines(tmp_path / f"text_{file}.json", lines)
    return {"type": "tts_text", "manifest_filepath": str(tmp_path / "text__OP_0..1_CL_.json"), "language": "en"}


def test_examples_have_both_texts(entry):
    found = {example.text: example for example in flat(take(load(entry, force_finite=True)))}
    assert set(found) == {f"line {n}" for n in range(12)}
    assert found["line 1"].tts_text == "Line 1."
    assert found["line 1"].tts_text_normalized == "line number 1"
    assert not found["line 3"].has_custom("tts_text_normalized")
    assert [found[f"line {n}"].language for n in (3, 4)] == ["en", "de"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"text": "one"', "truncated"),
        ('["one"]', "`object`"),
        ('{"tts_text": "One."}', "`text`"),
        ('{"text": " ", "tts_text": "One."}', "`$.text`"),
        ('{"text": "one", "tts_text": 100}', "`$.tts_text`"),
        ('{"text": "one"}', "neither tts_text_normalized nor tts_text"),
        ('{"text": "one", "tts_text": "One.", "audio_filepath": "a.wav"}', "use type nemo"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, told):
    path = tmp_path / "text.json"
    path.write_text('{"text": "one", "tts_text": "One."}\n' + line + "\n")
    with raises(ConfigError, "bad_manifest", f"{path}, record 2", told):
        take(load({"type": "tts_text", "manifest_filepath": str(path), "language": "en"}, force_finite=True))


IN_PARTS = {"shuffle": True, "shard_seed": "randomized", "seed": 3, "shuffle_buffer_size": 4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"force_finite": True}, "resumable=True needs an infinite stream"),
        ({"force_map_dataset": True}, "resumable=True needs an infinite stream"),
        ({"shard_seed": "trng"}, "resumable=True needs an infinite stream"),
        ({"perturb_speed": True}, "resumable=True cannot be combined with perturb_speed"),
        ({"concurrent_bucketing": True}, "resumable=True cannot be combined with concurrent_bucketing"),
    ],
)
def test_settings_without_an_exact_state_are_refused(corpora, settings, message):
    cfg = {"input_cfg": [corpora.entry("large")], "batch_size": 3} | IN_PARTS | settings
    with raises(ConfigError, "inexact_state", message):
        get_dataloader(cfg, 0, 1, dataset=AsIs(), resumable=True)


BUCKETS = {"bucket_duration_bins": [1.5], "batch_duration": 4.0, "bucket_buffer_size": 4}


def global_steps(cfg, world_size, num_workers, count, state=None):
    """Return the ids of the batches of each global step, in the order of the parts, and the final state."""
    share = cfg["canonical"] // world_size
    make = partial(get_dataloader, cfg | {"num_workers": num_workers}, dataset=AsIs())
    found, state = stop_ranks(make, [count * share] * world_size, state)
    ranks = [[[(cut.id, cut.shar_position[0]) for cut in batch] for batch in batches] for batches in found]
    return [[batch for rank in ranks for batch in rank[n * share : (n + 1) * share]] for n in range(count)], state


def check(corpora, batching, layouts, layouts_after):
    entries = [corpora.entry("large", weight=0.7), corpora.entry("small", weight=0.3)]
    cfg = {"input_cfg": entries, "canonical": 4} | IN_PARTS | batching
    expected, state = global_steps(cfg, 1, 0, 5)
    for layout in layouts:
        assert global_steps(cfg, *layout, 5)[0] == expected
    after, _ = global_steps(cfg, 1, 0, 4, state)
    for layout in layouts_after:
        assert global_steps(cfg, *layout, 4, state)[0] == after
    used = [cut for step in expected + after for batch in step for cut in batch]
    assert len(used) == len(set(used))


@pytest.mark.parametrize("batching", [{"batch_size": 2}, BUCKETS])
def test_global_batches_do_not_depend_on_the_number_of_ranks(corpora, batching):
    check(corpora, batching, [(2, 0), (4, 0)], [(4, 0)])


@pytest.mark.slow
def test_global_batches_do_not_depend_on_the_number_of_workers(corpora):
    check(corpora, BUCKETS, [(2, 2)], [(1, 2)])


def test_a_number_of_ranks_that_does_not_divide_is_refused(corpora):
    cfg = {"input_cfg": [corpora.entry("large")], "batch_size": 2, "canonical": 6} | IN_PARTS
    with raises(ConfigError, "split_wrong", "4 readers", "1, 2, 3, 6"):
        get_dataloader(cfg, 0, 4, dataset=AsIs())
    with raises(ConfigError, "split_wrong", "12 readers"):
        get_dataloader(cfg | {"num_workers": 4}, 0, 3, dataset=AsIs())
    with raises(ConfigError, "bad_config_value", "canonical"):
        get_dataloader(cfg | {"canonical": "all"}, 0, 1, dataset=AsIs())


@pytest.mark.parametrize("map_style", [False, True])
def test_row_18_ranks_of_the_environment_do_not_divide_once_more(corpora, monkeypatch, map_style):
    """The launcher's variables describe four ranks, but the loader's arguments two, which share all cuts."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        cfg = {"input_cfg": [corpora.entry("large")], "batch_size": 1} | IN_PARTS
        cfg |= {"force_finite": True, "force_map_dataset": map_style}
        loader = get_dataloader(cfg, rank, 2, dataset=AsIs())
        found += [number(cut) for cut in flat(take(loader)) if not cut.id.endswith("_dup0")]
    assert Counter(found) == Counter(range(23))

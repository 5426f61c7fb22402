"""The configuration: what is read, what is refused, by code and key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.errors import raises
from support.packages import install
from support.paths import REPOSITORY

from sharmill.config import load_config, resolve_stage, to_yaml
from sharmill.encode.config import CodecConfig, EncodeConfig
from sharmill.errors import ConfigError
from sharmill.pipeline import make_stages, stages_of
from sharmill.registry import STAGES

BASE = "name: n\nrun_dir: r\ndataset_dir: d\nsources: [{manifest: m.json, audio_root: audio}]\n"


@pytest.fixture
def write(tmp_path):
    """Returns a function: YAML text after the required keys -> path of the file."""

    def to_file(text: str = "", base: str = BASE) -> Path:
        path = tmp_path / "c.yaml"
        path.write_text(base + text)
        return path

    return to_file


def refuse(path: Path, code: str, *names: str, overrides: Sequence[str] = ()) -> str:
    """Expect a ConfigError of one line with this code, the path and the names; return its message."""
    with raises(ConfigError, code, str(path), *names) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_those_of_the_contract(write):
    config = load_config(write())
    assert config.max_reject_fraction == 0.5
    prepare, match, write = (config.sections[kind] for kind in ("prepare", "match", "write"))
    assert (prepare.min_duration, prepare.max_duration, prepare.filters) == (0.1, 600.0, {})
    assert (match.encoder, match.min_similarity, match.min_duration) == ("resemblyzer", None, 3.0)
    assert (write.shard_size, write.audio_format, write.order) == (1000, "flac", "shuffle")
    assert config.sections["encode"].codecs == [CodecConfig(name="builtin", model="builtin")]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("speeker_key: x", ["'speeker_key'", "'speaker_key'"]),
        ("match: {min_similarty: 0.7}", ["'match.min_similarty'", "'min_similarity'"]),
        ("executor: {worker: 2}", ["'executor.worker'", "'workers'"]),
        ("executor: {cores: 2}", ["'executor.cores'"]),
        ("encode: {codecs: [{name: a, model: b}, {name: c, mdel: d}]}", ["'encode.codecs[1].mdel'", "'model'"]),
        ("zzz: 1", ["'zzz'", "name, run_dir, dataset_dir, sources, speaker_key"]),
        ("batch_seconds: 9", ["'batch_seconds'", "'match.batch_seconds'", "'encode.batch_seconds'"]),
        ("1: x", ["'1'", "name, run_dir, dataset_dir, sources, speaker_key"]),
    ],
)
def test_unknown_key_is_named_with_the_nearest_valid_one(text, names, write):
    refuse(write(text), "unknown_key", *names)


def test_keys_of_an_executor_go_with_its_kind(write):
    executor = load_config(write("executor: {kind: ray, cores: 2}"), ["executor.workers=3"]).executor
    assert (executor.kind, executor.workers, executor.cores, executor.address) == ("ray", 3, 2, "auto")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("executor: {kind: null}", "executor.kind: expected `str`"),
        ("match: {encoder: 'nemo:titanet_large', allow_targets: [1]}", "match.allow_targets[0]: expected `str`"),
    ],
)
def test_a_value_is_named_by_its_place(text, named, write):
    refuse(write(text), "bad_config_value", named)


def test_a_key_of_another_executor_is_named_with_its_kind(write):
    refuse(write("executor: {kind: local, cores: 2}"), "unknown_key", "'executor.cores'", "a key of the kind ray")


def test_unknown_kind_of_executor_is_named_with_the_valid_ones(write):
    refuse(write(), "unknown_name", "executor.kind", "'cloud'", "local, ray", overrides=["executor.kind=cloud"])


def test_unknown_key_of_a_source_is_named_with_its_place(write):
    base = BASE.replace("audio_root: audio", "audio_dir: audio")
    refuse(write(base=base), "unknown_key", "'sources[0].audio_dir'", "'audio_root'")


def test_a_key_of_a_section_is_not_taken_for_a_section_that_looks_like_it(write):
    message = refuse(write(), "unknown_key", "'type'", "'sources[0].type'", overrides=["type=x"])
    assert "'write'" not in message


def test_unknown_key_of_an_override_is_named(write):
    refuse(write(), "unknown_key", "'match.batch_secs'", "'batch_seconds'", overrides=["match.batch_secs=3"])


@pytest.mark.parametrize(
    ("text", "key", "types"),
    [
        ("match: {min_similarity: high}", "match.min_similarity", "`float | null` `str`"),
        ("match: {max_duration: [1]}", "match.max_duration", "`float | null` `list`"),
        ("match: 5", "match", "`mapping | null` `int`"),
        ("prepare: null", "prepare", "`mapping` `null`"),
        ("write: {shard_size: 1.5}", "write.shard_size", "`int | null` `float`"),
        ("write: {shard_size: true}", "write.shard_size", "`int | null` `bool`"),
        ("prepare: {min_duration: true}", "prepare.min_duration", "`float` `bool`"),
        ("prepare: {require_text: perhaps}", "prepare.require_text", "`bool` `str`"),
        ("prepare: {filters: {cer: 3}}", "prepare.filters", "`str` `int`"),
        ("encode: {codecs: [x]}", "encode.codecs[0]", "`mapping` `str`"),
        ("encode: {codecs: x}", "encode.codecs", "`list` `str`"),
    ],
)
def test_wrong_type_names_the_key_and_both_types(text, key, types, write):
    path = write(text)
    message = refuse(path, "bad_config_value", f"{path}: {key}: ")
    assert " ".join(re.findall("`.*?`", message)) == types


@pytest.mark.parametrize(
    ("override", "choices"),
    [
        ("write.order=random", "manifest, speaker, shuffle"),
        ("write.audio_format=ogg", "flac, mp3, opus, original, wav"),
        ("match.choice=worst", "best, sample"),
        ("executor.workers=many", "auto"),
    ],
)
def test_wrong_choice_names_the_valid_values(override, choices, write):
    key, _, value = override.partition("=")
    refuse(write(), "bad_config_value", key, repr(value), *choices.split(", "), overrides=[override])


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("max_reject_fraction=1.5", "max_reject_fraction must be between 0 and 1"),
        ("name=../up", "name '../up' must be letters"),
        ("run_dir=''", "run_dir must not be empty"),
        ("dataset_dir=' '", "dataset_dir must not be empty"),
        ("sources=[]", "sources must name at least one manifest"),
        ("sources.0.manifest=''", "sources[0]: manifest must not be empty"),
        ("sources.0.audio_root=''", "sources[0]: audio_root must not be empty"),
        ("prepare.min_duration=-1", "prepare: min_duration must not be negative"),
        ("prepare.min_duration=.nan", "prepare: min_duration must not be negative"),
        ("prepare.max_duration=0.05", "prepare: max_duration must be greater than min_duration"),
        ("prepare.duration_tolerance=-1", "prepare: duration_tolerance must not be negative"),
        ("prepare.unit_records=0", "prepare: unit_records must be positive"),
        ("match.min_similarity=2", "match: min_similarity must be between -1 and 1"),
        ("match.max_duration=1", "match: max_duration must not be less than min_duration"),
        ("match.max_group=2", "match: max_group must be at least 3"),
        ("match.sample_size=0", "match: sample_size must be at least 1"),
        ("match.unit_seconds=0", "match: unit_seconds must be positive"),
        ("match.batch_seconds=0", "match: batch_seconds must be positive"),
        ("write.shard_size=0", "write: shard_size must be a positive number"),
        ("write.sampling_rate=0", "write: sampling_rate must be positive"),
        ("write.seed=-1", "write: seed must not be negative"),
        ("encode.batch_seconds=-3", "encode: batch_seconds must be positive"),
        ("encode.codecs=[{name: a, model: x}, {name: a, model: y}]", "encode: two codecs have the same name"),
        ("encode.codecs=[{name: a/b, model: x}]", "encode.codecs[0]: codec name 'a/b' must be letters"),
        ("executor.workers=0", "executor: workers must be 'auto' or a number from 1"),
        ("executor.unit_time_limit=0", "executor: unit_time_limit must be positive, auto or null"),
    ],
)
def test_value_out_of_range(override, names, write):
    refuse(write(), "bad_config_value", *names, overrides=[override])


@pytest.mark.parametrize(
    ("text", "code", "names"),
    [
        ("run_dir: r\ndataset_dir: d\nsources: [{manifest: m, audio_root: a}]", "missing_key", ["'name'"]),
        (
            "name: n\nrun_dir: r\ndataset_dir: d\nsources: [{manifest: m}]",
            "missing_key",
            ["sources[0]", "'audio_root'"],
        ),
        ("", "missing_key", ["'name'"]),
        ("# nothing", "missing_key", ["'name'"]),
        ("[]", "bad_config_file", []),
        ("- name: n", "bad_config_file", []),
    ],
)
def test_incomplete_file(text, code, names, write):
    refuse(write(base=text), code, *names)


@pytest.mark.parametrize(
    "content",
    [b"a: [", b"\0", b"name: \xff\xe9", BASE.encode() + b"name: again", b"a: b: c"],
    ids=["unfinished", "binary", "latin-1", "a key twice", "colons"],
)
def test_what_is_no_yaml_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    refuse(path, "bad_config_file")


def test_missing_file(tmp_path):
    refuse(tmp_path / "none.yaml", "bad_config_file")


def test_folder_instead_of_a_file(tmp_path):
    refuse(tmp_path, "bad_config_file", "not a regular file")


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("!!python/object/apply:os.system [touch {marker}]", "bad_config_file"),
        ("!!python/object/new:os.system [touch {marker}]", "bad_config_file"),
        ("!!python/name:os.system", "bad_config_file"),
        ("!!python/module:os", "bad_config_file"),
        ("!!python/object/apply:pathlib.Path [x]", "bad_config_value"),
        ("!!binary aGVsbG8=", "bad_config_value"),
    ],
)
def test_yaml_tags_that_make_objects_are_refused(value, code, write, tmp_path):
    marker = tmp_path / "marker"
    refuse(write(f"speaker_key: {value.format(marker=marker)}"), code)
    assert not marker.exists()


def test_yaml_tag_in_an_override_is_nothing_but_text(write, tmp_path):
    value = f"!!python/object/apply:os.system [touch {tmp_path / 'marker'}]"
    assert load_config(write(), [f"speaker_key={value}"]).speaker_key == value
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "text", ["speaker_key: ${nowhere}", "speaker_key: ${oc.env:SHARMILL_NONE}", "speaker_key: ???"]
)
def test_unresolved_reference_is_refused(text, write):
    refuse(write(text), "bad_config_value", "speaker_key")


@pytest.mark.parametrize(
    ("override", "get", "expected"),
    [
        ("sources.0.manifest=x.json", lambda c: c.sources[0].manifest, "x.json"),
        ("sources[0].audio_root=y", lambda c: c.sources[0].audio_root, "y"),
        ("sources[0].manifest=m__OP_0..63_CL_.json", lambda c: c.sources[0].manifest, "m__OP_0..63_CL_.json"),
        ("sources[0].manifest=m_{0..63}.json", lambda c: c.sources[0].manifest, "m_{0..63}.json"),
        ("sources=[{manifest: p, audio_root: q}]", lambda c: (c.sources[0].manifest, len(c.sources)), ("p", 1)),
        ("match.min_similarity=0.7", lambda c: c.sections["match"].min_similarity, 0.7),
        ("match.min_similarity=1", lambda c: c.sections["match"].min_similarity, 1.0),
        ("match.max_group=null", lambda c: c.sections["match"].max_group, None),
        ("match.max_group=", lambda c: c.sections["match"].max_group, None),
        ("match.max_group=500", lambda c: c.sections["match"].max_group, 500),
        ("write.shard_size=1e3", lambda c: c.sections["write"].shard_size, 1000),
        ("executor.workers=auto", lambda c: c.executor.workers, "auto"),
        ("executor.workers=3", lambda c: c.executor.workers, 3),
        ("prepare.require_text=false", lambda c: c.sections["prepare"].require_text, False),
        ("encode.codecs=[]", lambda c: c.sections["encode"].codecs, []),
        (
            "encode.codecs.0.name=other",
            lambda c: c.sections["encode"].codecs,
            [CodecConfig(name="other", model="builtin")],
        ),
        ("prepare.filters={cer: '<= 0.03'}", lambda c: c.sections["prepare"].filters, {"cer": "<= 0.03"}),
        ("prepare.filters.cer=<= 0.03", lambda c: c.sections["prepare"].filters, {"cer": "<= 0.03"}),
        ("prepare.filters.bandwidth=>= 8000", lambda c: c.sections["prepare"].filters, {"bandwidth": ">= 8000"}),
        ("prepare.filters.snr=> 3", lambda c: c.sections["prepare"].filters, {"snr": "> 3"}),
        ("prepare.filters.snr=!= 3", lambda c: c.sections["prepare"].filters, {"snr": "!= 3"}),
        ("speaker_key=[^/]+-(?P<a>x): y", lambda c: c.speaker_key, "[^/]+-(?P<a>x): y"),
        ("name=0123", lambda c: c.name, "0123"),
        ("name=1e3", lambda c: c.name, "1e3"),
        ("name=on", lambda c: c.name, "on"),
        ("run_dir=2024-01-01", lambda c: c.run_dir, "2024-01-01"),
        ("run_dir=runs/a=b", lambda c: c.run_dir, "runs/a=b"),
        ("metrics.wandb_project=", lambda c: c.metrics.wandb_project, None),
        ("sources.0.audio_root=null", lambda c: c.sources[0].audio_root, None),
        ("sources.0.audio_root=~", lambda c: c.sources[0].audio_root, "~"),
        ("sources.0.audio_root=2024", lambda c: c.sources[0].audio_root, "2024"),
        ("sources.0.audio_root=[a, b]", lambda c: c.sources[0].audio_root, ["a", "b"]),
        ("sources.0.manifest=m_{0..3}.json", lambda c: c.sources[0].manifest, "m_{0..3}.json"),
        ("sources.0.speaker={spk}", lambda c: c.sources[0].speaker, "{spk}"),
        ("sources.0.speaker={path[0]}", lambda c: c.sources[0].speaker, "{path[0]}"),
        ("sources.0.channel=1", lambda c: c.sources[0].channel, 1),
        ("sources.0.channel=downmix", lambda c: c.sources[0].channel, "downmix"),
    ],
)
def test_override(override, get, expected, write):
    path = write("encode: {codecs: [{name: builtin, model: builtin}]}")
    assert get(load_config(path, [override])) == expected


def test_no_folder_is_opened_by_leaving_audio_root_empty(write):
    for value in ("", "~"):
        base = f"name: n\nrun_dir: r\ndataset_dir: d\nsources:\n  - manifest: m.json\n    audio_root: {value}\n"
        refuse(write(base=base), "bad_config_value", "line 6", "audio_root")
    refuse(write(), "bad_config_value", "audio_root", overrides=["sources.0.audio_root="])
    base = "name: n\nrun_dir: r\ndataset_dir: d\nsources: [{manifest: m.json, audio_root: null}]\n"
    assert load_config(write(base=base)).sources[0].audio_root is None


@pytest.mark.parametrize(
    "entry",
    [
        "speaker: '{path}'",
        "speaker: ''",
        "channel: -1",
        "channel: left",
        "language: a b",
        "dataset: ''",
        "manifest: []",
    ],
)
def test_keys_of_a_source_that_make_no_sense(entry, write):
    source = {"manifest": "m.json", "audio_root": "a"} | dict([entry.split(": ", 1)])
    text = "".join(f", {key}: {value}" for key, value in source.items())[2:]
    base = f"name: n\nrun_dir: r\ndataset_dir: d\nsources: [{{{text}}}]\n"
    refuse(write(base=base), "bad_config_value", "sources[0]")


def test_later_override_wins(write):
    assert load_config(write(), ["write.seed=1", "write.seed=2"]).sections["write"].seed == 2


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("sources.1.manifest=x", "bad_config_value"),
        ("sources.x.manifest=y", "bad_config_value"),
        ("=y", "unknown_key"),
        ("a..b=y", "unknown_key"),
        ("a[=3", "unknown_key"),
    ],
)
def test_override_of_what_is_not_there(override, code, write):
    refuse(write(), code, overrides=[override])


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_configurations_of_the_repository_load(path):
    assert load_config(path).name == path.stem


def test_the_repository_has_the_promised_configurations():
    names = {path.stem for path in (REPOSITORY / "configs").glob("*.yaml")}
    assert {"demo", "librispeech", "hifitts2", "libritts", "nvyt2505"} <= names


@pytest.mark.parametrize("name", ["n", "123", "1e3", "null", "true", "on", "0x1f", "1_0", "2024-01-01"])
def test_yaml_of_a_configuration_reads_back_equal(name, write, tmp_path):
    text = "match: {max_duration: 9}\nprepare: {filters: {cer: '<= 0.03'}}\nspeaker_key: '(?P<a>[^/]+)$'\n"
    config = load_config(write(text), [f"name='{name}'", "executor.workers=2"])
    (tmp_path / "again.yaml").write_bytes(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


def test_options_of_a_model_lie_beside_its_name(write, tmp_path):
    path = write(
        "match: {encoder: 'nemo:titanet_large', allow_targets: [a.B]}\n"
        "encode: {codecs: [{name: c, model: 'nemo:x', allow_targets: [c.D]}]}\n"
    )
    config = load_config(path, ["match.allow_targets=[a.B, a.C]"])
    assert config.sections["match"].options == {"allow_targets": ["a.B", "a.C"]}
    codec = CodecConfig(name="c", model="nemo:x", options={"allow_targets": ["c.D"]})
    assert config.sections["encode"].codecs == [codec]
    (tmp_path / "again.yaml").write_bytes(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("text", "code", "names"),
    [
        ("match: {allow_targets: [a]}", "unknown_key", ["'match.allow_targets'"]),
        ("match: {encoder: 'nemo:x', allow_target: [a]}", "unknown_key", ["'match.allow_target'", "'allow_targets'"]),
        (
            "match: {encoder: 'nemo:x', allow_targets: a}",
            "bad_config_value",
            ["match.allow_targets", "`list`", "`str`"],
        ),
        ("match: {encoder: 'nemo:x', options: {}}", "unknown_key", ["'match.options'"]),
        ("match: {encoder: x, level: 3}", "unknown_name", ["match", "'x'", "resemblyzer"]),
        ("encode: {codecs: [{name: a, model: builtin, level: 3}]}", "unknown_key", ["'encode.codecs[0].level'"]),
    ],
)
def test_options_that_a_model_does_not_have_are_refused(text, code, names, write):
    refuse(write(text), code, *names)


@pytest.mark.parametrize(("alias", "stage"), [("stage1", "match"), ("stage2", "write"), ("stage3", "encode")])
def test_stage_alias(alias, stage):
    assert resolve_stage(alias) == stage


@pytest.mark.parametrize("stage", STAGES.own)
def test_stage_name_is_itself(stage):
    assert resolve_stage(stage) == stage


def test_unknown_stage_names_the_nearest():
    with raises(ConfigError, "unknown_stage", "'valdate'", "'validate'"):
        resolve_stage("valdate")


@pytest.mark.parametrize("overrides", [[], ["match=null"]])
def test_match_null_leaves_the_stage_match_out(overrides, write):
    config = load_config(write("match: {min_duration: 4}" if overrides else "match: null"), overrides)
    assert config.sections["match"] is None
    assert not config.has_contexts
    assert stages_of(config) == ("prepare", "write", "survey", "encode", "assemble", "validate")


def test_match_null_is_stored_and_read_again(write, tmp_path):
    stored = tmp_path / "stored.yaml"
    stored.write_bytes(to_yaml(load_config(write("match: null\nwrite: {num_shards: 3}"))))
    again = load_config(stored)
    assert (again.sections["match"], again.sections["write"].num_shards, again.sections["write"].shard_size) == (
        None,
        3,
        None,
    )


def test_an_empty_mapping_is_the_default_match(write):
    config = load_config(write("match: {}"))
    assert config == load_config(write())
    assert stages_of(config) == tuple(STAGES.own)


@pytest.mark.parametrize(("text", "shown"), [("match:", "empty"), ("match: ~", "~")])
def test_no_contexts_have_to_be_said(text, shown, write):
    refuse(write(text), "bad_config_value", f"match is {shown}", "write null for a dataset without contexts")


@pytest.mark.parametrize("override", ["match=", "match=~"])
def test_no_contexts_have_to_be_said_in_an_override_too(override, write):
    refuse(write(), "bad_config_value", "match", overrides=[override])


@pytest.mark.parametrize("override", ["match=[]", "match=[{}]"])
def test_only_stages_of_other_packages_may_be_several(override, write):
    refuse(write(), "bad_config_value", "match: expected `mapping | null`, got `list`", overrides=[override])


def test_a_key_of_match_does_not_bring_contexts_back(write):
    overrides = ["match.min_similarity=0.7"]
    refuse(write("match: null"), "bad_config_value", *overrides, "match is null", overrides=overrides)
    refuse(write(), "bad_config_value", *overrides, "match is null", overrides=["match=null", *overrides])


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", (1000, None, None)),
        ("write: {shard_size: 7}", (7, None, None)),
        ("write: {num_shards: 7}", (None, 7, None)),
        ("write: {shard_seconds: 3600}", (None, None, 3600.0)),
        ("write: {shard_size: null, num_shards: 7}", (None, 7, None)),
    ],
)
def test_one_key_says_how_large_shards_are(text, size, write):
    found = load_config(write(text)).sections["write"]
    assert (found.shard_size, found.num_shards, found.shard_seconds) == size


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{shard_size: 10, num_shards: 7}", ["shard_size (10)", "num_shards (7)"]),
        ("{shard_size: 10, shard_seconds: 7.5}", ["shard_size (10)", "shard_seconds (7.5)"]),
        ("{num_shards: 10, shard_seconds: 7}", ["num_shards (10)", "shard_seconds (7)"]),
        ("{num_shards: 0}", ["num_shards must be a positive number"]),
        ("{shard_seconds: -1}", ["shard_seconds must be a positive number"]),
        ("{shard_seconds: .inf}", ["shard_seconds must be a positive number"]),
        ("{num_shards: 2.5}", ["write.num_shards"]),
    ],
)
def test_sizes_of_shards_that_exclude_each_other_or_are_none(text, names, write):
    refuse(write(f"write: {text}"), "bad_config_value", *names)


@pytest.fixture
def loudness(monkeypatch, tmp_path) -> str:
    """Has the stage of another package installed; the keys of two of them, as YAML."""
    install(monkeypatch, tmp_path / "site", "loudness")
    return "match: null\nloudness: [{name: plain}, {name: quiet, level: -40}]\n"


@pytest.mark.parametrize(
    ("override", "code", "names"),
    [
        ("loudness.0.levle=1", "unknown_key", ["'loudness[0].levle'", "'level'"]),
        ("loudness.1.level=high", "bad_config_value", ["loudness[1].level", "`float`"]),
        ("loudness.1.name=plain", "bad_config_value", ["loudness[1]", "'plain'"]),
        ("loudness.1.name=../up", "bad_config_value", ["loudness[1]", "'../up'"]),
    ],
)
def test_keys_of_a_stage_of_another_package_are_checked(override, code, names, loudness, write):
    refuse(write(loudness), code, *names, overrides=[override])


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("name=m", ["loudness/plain", "loudness/quiet"]),
        ("loudness=null", []),
        ("loudness={level: 3}", ["loudness"]),
        ("loudness=[{name: other}]", ["loudness/other"]),
    ],
)
def test_there_is_a_stage_for_each_section_of_its_own(override, names, loudness, write):
    config = load_config(write(loudness), [override])
    assert [stage.name for stage in make_stages(config) if stage.kind == "loudness"] == names
    stored = write(to_yaml(config).decode(), base="")
    assert load_config(stored) == config


def test_keys_of_an_executor_of_another_package_are_checked(monkeypatch, tmp_path, write):
    install(monkeypatch, tmp_path / "site", "executor")
    path = write("executor: {kind: apart, python: /usr/bin/python3}")
    refuse(path, "unknown_key", "'executor.pyhton'", "'python'", overrides=["executor.pyhton=x"])
    refuse(path, "bad_config_value", "executor: workers", overrides=["executor.workers=0"])


FAMILY = """
from dataclasses import dataclass
from sharmill.models import ModelFamily

@dataclass(frozen=True, kw_only=True)
class Voiced(ModelFamily):
    voice: str = ""
"""


def test_an_option_of_a_model_that_is_text_takes_any_text(monkeypatch, tmp_path, write):
    (tmp_path / "voiced.py").write_text(FAMILY)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write("encode: {codecs: [{name: x, model: 'python:voiced:Voiced'}]}")
    config = load_config(path, ["encode.codecs.0.voice=0123"])
    assert config.section(EncodeConfig).codecs[0].options == {"voice": "0123"}

"""The configuration: what is read, what is refused and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paths import REPOSITORY

from sharmill.config import STAGES, CodecConfig, load_config, resolve_stage, to_yaml
from sharmill.errors import ConfigError

BASE = "name: n\nrun_dir: r\ndataset_dir: d\nsources: [{manifest: m.json, audio_root: audio}]\n"


@pytest.fixture
def write(tmp_path):
    """Returns a function: YAML text after the required keys -> path of the file."""

    def to_file(text: str = "", base: str = BASE) -> Path:
        path = tmp_path / "c.yaml"
        path.write_text(base + text)
        return path

    return to_file


def refusal(path: Path, *overrides: str) -> str:
    """The message of the ConfigError, which is one line and begins with the file."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message.removeprefix(f"{path}: ")


def test_defaults_are_those_of_the_contract(write):
    config = load_config(write())
    assert config.max_reject_fraction == 0.5
    assert (config.prepare.min_duration, config.prepare.max_duration, config.prepare.filters) == (0.1, 600.0, {})
    assert (config.match.encoder, config.match.min_similarity, config.match.min_duration) == ("resemblyzer", None, 3.0)
    assert (config.write.shard_size, config.write.audio_format, config.write.order) == (1000, "flac", "shuffle")
    assert config.encode.codecs == [CodecConfig(name="builtin", model="builtin")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speeker_key: x", "unknown key 'speeker_key'; did you mean 'speaker_key'?"),
        ("match: {min_similarty: 0.7}", "unknown key 'match.min_similarty'; did you mean 'min_similarity'?"),
        ("executor: {worker: 2}", "unknown key 'executor.worker'; did you mean 'workers'?"),
        (
            "encode: {codecs: [{name: a, model: b}, {name: c, mdel: d}]}",
            "unknown key 'encode.codecs[1].mdel'; did you mean 'model'?",
        ),
        ("zzz: 1", "unknown key 'zzz'; the valid names are name, run_dir, dataset_dir, sources, speaker_key"),
        ("1: x", "unknown key '1'; the valid names are"),
    ],
)
def test_unknown_key_is_named_with_the_nearest_valid_one(text, message, write):
    assert refusal(write(text)).startswith(message)


def test_unknown_key_of_a_source_is_named_with_its_place(write):
    base = BASE.replace("audio_root: audio", "audio_dir: audio")
    assert refusal(write(base=base)) == "unknown key 'sources[0].audio_dir'; did you mean 'audio_root'?"


def test_unknown_key_of_an_override_is_named(write):
    assert refusal(write(), "match.batch_secs=3") == "unknown key 'match.batch_secs'; did you mean 'batch_seconds'?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "match: {min_similarity: 0.7, max_similarity: 0.5}",
            "match: max_similarity must not be less than min_similarity",
        ),
        ("match: {min_similarity: high}", "match.min_similarity: expected `float | null`, got `str`"),
        ("match: {max_duration: [1]}", "match.max_duration: expected `float | null`, got `list`"),
        ("match: 5", "match: expected `mapping`, got `int`"),
        ("match: null", "match: expected `mapping`, got `null`"),
        ("write: {shard_size: 1.5}", "write.shard_size: expected `int`, got `float`"),
        ("write: {shard_size: true}", "write.shard_size: expected `int`, got `bool`"),
        ("prepare: {min_duration: true}", "prepare.min_duration: expected `float`, got `bool`"),
        ("prepare: {require_text: perhaps}", "prepare.require_text: expected `bool`, got `str`"),
        ("prepare: {filters: {cer: 3}}", "prepare.filters: expected `str`, got `int`"),
        ("encode: {codecs: [x]}", "encode.codecs[0]: expected `mapping`, got `str`"),
        ("encode: {codecs: x}", "encode.codecs: expected `list`, got `str`"),
    ],
)
def test_wrong_type_names_the_key_and_both_types(text, message, write):
    assert refusal(write(text)) == message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("write.order=random", "write.order: 'random' is not one of manifest, speaker, shuffle"),
        ("write.audio_format=ogg", "write.audio_format: 'ogg' is not one of flac, mp3, opus, original, wav"),
        ("match.choice=worst", "match.choice: 'worst' is not one of best, sample"),
        ("executor.kind=cloud", "executor.kind: 'cloud' is not one of local, ray"),
        ("executor.workers=many", "executor.workers: 'many' is not one of a whole number, auto"),
    ],
)
def test_wrong_choice_names_the_valid_values(override, message, write):
    found, _, values = refusal(write(), override).partition(" is not one of ")
    expected, _, valid = message.partition(" is not one of ")
    assert found == expected
    assert sorted(values.split(", ")) == sorted(valid.split(", "))


@pytest.mark.parametrize(
    ("override", "message"),
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
        ("write.shard_size=0", "write: shard_size must be positive"),
        ("write.sampling_rate=0", "write: sampling_rate must be positive"),
        ("write.seed=-1", "write: seed must not be negative"),
        ("encode.batch_seconds=-3", "encode: batch_seconds must be positive"),
        ("encode.codecs=[{name: a, model: x}, {name: a, model: y}]", "encode: two codecs have the same name"),
        ("encode.codecs=[{name: a/b, model: x}]", "encode.codecs[0]: codec name 'a/b' must be letters"),
        ("executor.workers=0", "executor: workers must be 'auto' or a number from 1"),
    ],
)
def test_value_out_of_range(override, message, write):
    assert refusal(write(), override).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run_dir: r\ndataset_dir: d\nsources: [{manifest: m, audio_root: a}]", "the key 'name' is missing"),
        (
            "name: n\nrun_dir: r\ndataset_dir: d\nsources: [{manifest: m}]",
            "sources[0]: the key 'audio_root' is missing",
        ),
        ("", "the key 'name' is missing"),
        ("# nothing", "the key 'name' is missing"),
        ("[]", "a configuration is a mapping of keys to values"),
        ("- name: n", "a configuration is a mapping of keys to values"),
    ],
)
def test_incomplete_file(text, message, write):
    assert refusal(write(base=text)) == message


@pytest.mark.parametrize(
    "content",
    [b"a: [", b"\0", "name: x".encode("utf-16"), b"name: \xff\xe9", BASE.encode() + b"name: again", b"a: b: c"],
    ids=["unfinished", "binary", "utf-16", "latin-1", "a key twice", "colons"],
)
def test_what_is_no_yaml_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    refusal(path)


def test_missing_file(tmp_path):
    assert refusal(tmp_path / "none.yaml") == f"there is no configuration file {tmp_path / 'none.yaml'}"


def test_folder_instead_of_a_file(tmp_path):
    assert "Is a directory" in refusal(tmp_path)


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system [touch {marker}]",
        "!!python/object/new:os.system [touch {marker}]",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/object/apply:pathlib.Path [x]",
        "!!binary aGVsbG8=",
    ],
)
def test_yaml_tags_that_make_objects_are_refused(value, write, tmp_path):
    marker = tmp_path / "marker"
    refusal(write(f"speaker_key: {value.format(marker=marker)}"))
    assert not marker.exists()


def test_yaml_tag_in_an_override_is_nothing_but_text(write, tmp_path):
    value = f"!!python/object/apply:os.system [touch {tmp_path / 'marker'}]"
    assert load_config(write(), [f"speaker_key={value}"]).speaker_key == value
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "text", ["speaker_key: ${nowhere}", "speaker_key: ${oc.env:SHARMILL_NONE}", "speaker_key: ???"]
)
def test_unresolved_reference_is_refused(text, write):
    assert "speaker_key" in refusal(write(text))


@pytest.mark.parametrize(
    ("override", "get", "expected"),
    [
        ("sources.0.manifest=x.json", lambda c: c.sources[0].manifest, "x.json"),
        ("sources[0].audio_root=y", lambda c: c.sources[0].audio_root, "y"),
        ("sources[0].manifest=m__OP_0..63_CL_.json", lambda c: c.sources[0].manifest, "m__OP_0..63_CL_.json"),
        ("sources[0].manifest=m_{0..63}.json", lambda c: c.sources[0].manifest, "m_{0..63}.json"),
        ("sources=[{manifest: p, audio_root: q}]", lambda c: (c.sources[0].manifest, len(c.sources)), ("p", 1)),
        ("match.min_similarity=0.7", lambda c: c.match.min_similarity, 0.7),
        ("match.min_similarity=1", lambda c: c.match.min_similarity, 1.0),
        ("match.max_group=null", lambda c: c.match.max_group, None),
        ("match.max_group=", lambda c: c.match.max_group, None),
        ("match.max_group=500", lambda c: c.match.max_group, 500),
        ("write.shard_size=1e3", lambda c: c.write.shard_size, 1000),
        ("executor.workers=auto", lambda c: c.executor.workers, "auto"),
        ("executor.workers=3", lambda c: c.executor.workers, 3),
        ("prepare.require_text=false", lambda c: c.prepare.require_text, False),
        ("encode.codecs=[]", lambda c: c.encode.codecs, []),
        ("encode.codecs.0.name=other", lambda c: c.encode.codecs, [CodecConfig(name="other", model="builtin")]),
        ("prepare.filters={cer: '<= 0.03'}", lambda c: c.prepare.filters, {"cer": "<= 0.03"}),
        ("prepare.filters.cer=<= 0.03", lambda c: c.prepare.filters, {"cer": "<= 0.03"}),
        ("prepare.filters.bandwidth=>= 8000", lambda c: c.prepare.filters, {"bandwidth": ">= 8000"}),
        ("prepare.filters.snr=> 3", lambda c: c.prepare.filters, {"snr": "> 3"}),
        ("prepare.filters.snr=!= 3", lambda c: c.prepare.filters, {"snr": "!= 3"}),
        ("speaker_key=[^/]+-(?P<a>x): y", lambda c: c.speaker_key, "[^/]+-(?P<a>x): y"),
        ("name=0123", lambda c: c.name, "0123"),
        ("name=1e3", lambda c: c.name, "1e3"),
        ("name=on", lambda c: c.name, "on"),
        ("run_dir=2024-01-01", lambda c: c.run_dir, "2024-01-01"),
        ("run_dir=runs/a=b", lambda c: c.run_dir, "runs/a=b"),
    ],
)
def test_override(override, get, expected, write):
    path = write("encode: {codecs: [{name: builtin, model: builtin}]}")
    assert get(load_config(path, [override])) == expected


def test_later_override_wins(write):
    assert load_config(write(), ["write.seed=1", "write.seed=2"]).write.seed == 2


@pytest.mark.parametrize("override", ["sources.1.manifest=x", "sources.x.manifest=y", "=y", "a..b=y", "a[=3"])
def test_override_of_what_is_not_there(override, write):
    refusal(write(), override)


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


@pytest.mark.parametrize(("alias", "stage"), [("stage1", "match"), ("stage2", "write"), ("stage3", "encode")])
def test_stage_alias(alias, stage):
    assert resolve_stage(alias) == stage


@pytest.mark.parametrize("stage", STAGES)
def test_stage_name_is_itself(stage):
    assert resolve_stage(stage) == stage


def test_unknown_stage_names_the_nearest():
    with pytest.raises(ConfigError, match=r"there is no stage 'valdate'; did you mean 'validate'\?"):
        resolve_stage("valdate")

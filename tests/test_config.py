"""Configuration files: accepted and refused values, by code and key. Untrusted files are tested in ``security``."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.project import REPOSITORY, install, raises

from sharmill.config import load_config, resolve_stage, to_yaml
from sharmill.encode.config import EncodeConfig
from sharmill.engine.order import choose_stages, make_stages
from sharmill.errors import ConfigError
from sharmill.models.config import CodecConfig
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
    return str(caught.value)


@pytest.mark.parametrize("text", ["", "match: {}"])
def test_defaults_are_those_of_the_contract(text, write):
    config = load_config(write(text))
    assert config.max_reject_fraction == 0.5
    prepare, match, write = (config.sections[kind] for kind in ("prepare", "match", "write"))
    assert (prepare.min_duration, prepare.max_duration, prepare.filters) == (0.1, 600.0, {})
    assert (match.encoder, match.min_similarity, match.min_duration) == ("resemblyzer", None, 3.0)
    assert (write.shard_size, write.audio_format, write.order) == (1000, "flac", "shuffle")
    assert config.sections["encode"].codecs == [CodecConfig(name="builtin", model="builtin")]
    rounds = ("encode.segments", "encode", "encode.shards")
    assert choose_stages(config) == ("prepare", "match", "write", *rounds, "validate")


# Lines added to the required keys, with code and words of the refusal.
REFUSED_TEXTS = [
    ("speeker_key: x", "unknown_key", ["'speeker_key'", "'speaker_key'"]),
    ("match: {min_similarty: 0.7}", "unknown_key", ["'match.min_similarty'", "'min_similarity'"]),
    ("executor: {worker: 2}", "unknown_key", ["'executor.worker'", "'workers'"]),
    ("executor: {cores: 2}", "unknown_key", ["'executor.cores'"]),
    (
        "encode: {codecs: [{name: a, model: b}, {name: c, mdel: d}]}",
        "unknown_key",
        ["'encode.codecs[1].mdel'", "'model'"],
    ),
    ("zzz: 1", "unknown_key", ["'zzz'", "name, run_dir, dataset_dir, sources, speaker_key"]),
    ("batch_seconds: 9", "unknown_key", ["'batch_seconds'", "'match.batch_seconds'", "'encode.batch_seconds'"]),
    ("1: x", "unknown_key", ["'1'", "name, run_dir, dataset_dir, sources, speaker_key"]),
    ("executor: {kind: local, cores: 2}", "unknown_key", ["'executor.cores'", "a key of executor.kind ray"]),
    ("executor: {kind: null}", "bad_config_value", ["executor.kind is ", "allowed: text"]),
    (
        "match: {encoder: 'nemo:titanet_large', allow_targets: [1]}",
        "bad_config_value",
        ["match.allow_targets[0] is ", "allowed: text"],
    ),
    (
        "match: {min_similarity: high}",
        "bad_config_value",
        ["c.yaml: match.min_similarity is ", "allowed: a finite number"],
    ),
    ("match: {max_duration: [1]}", "bad_config_value", ["c.yaml: match.max_duration is ", "allowed: a finite number"]),
    ("match: 5", "bad_config_value", ["c.yaml: match is ", "a mapping of keys to values, null"]),
    ("prepare: null", "bad_config_value", ["c.yaml: prepare is ", "allowed: a mapping of keys to values"]),
    (
        "write: {shard_size: 1.5}",
        "bad_config_value",
        ["c.yaml: write.shard_size is ", "allowed: a whole number of at least 1, null"],
    ),
    (
        "write: {shard_size: true}",
        "bad_config_value",
        ["c.yaml: write.shard_size is ", "allowed: a whole number of at least 1, null"],
    ),
    (
        "prepare: {min_duration: true}",
        "bad_config_value",
        ["c.yaml: prepare.min_duration is ", "allowed: a finite number of at least 0"],
    ),
    (
        "prepare: {require_text: perhaps}",
        "bad_config_value",
        ["c.yaml: prepare.require_text is ", "allowed: true or false"],
    ),
    ("prepare: {filters: {cer: 3}}", "bad_config_value", ["c.yaml: prepare.filters is ", "`str`, got `int`"]),
    (
        "encode: {codecs: [x]}",
        "bad_config_value",
        ["c.yaml: encode.codecs[0] is ", "allowed: a mapping of keys to values"],
    ),
    ("encode: {codecs: x}", "bad_config_value", ["c.yaml: encode.codecs is ", "allowed: a list"]),
    ("match: {allow_targets: [a]}", "unknown_key", ["'match.allow_targets'"]),
    ("match: {encoder: 'nemo:x', allow_target: [a]}", "unknown_key", ["'match.allow_target'", "'allow_targets'"]),
    (
        "match: {encoder: 'nemo:x', allow_targets: a}",
        "bad_config_value",
        ["match.allow_targets is 'a'", "allowed: a list"],
    ),
    ("match: {encoder: 'nemo:x', options: {}}", "unknown_key", ["'match.options'"]),
    ("match: {encoder: x, level: 3}", "unknown_name", ["match", "'x'", "resemblyzer"]),
    ("encode: {codecs: [{name: a, model: builtin, level: 3}]}", "unknown_key", ["'encode.codecs[0].level'"]),
    ("write: {shard_size: 10, num_shards: 7}", "bad_config_value", ["shard_size (10)", "num_shards (7)"]),
    ("write: {shard_size: 10, shard_seconds: 7.5}", "bad_config_value", ["shard_size (10)", "shard_seconds (7.5)"]),
    ("write: {num_shards: 10, shard_seconds: 7}", "bad_config_value", ["num_shards (10)", "shard_seconds (7)"]),
    ("write: {num_shards: 0}", "bad_config_value", ["write.num_shards is ", "a whole number of at least 1"]),
    ("write: {shard_seconds: -1}", "bad_config_value", ["shard_seconds must be a positive number"]),
    ("write: {shard_seconds: 0}", "bad_config_value", ["shard_seconds must be a positive number"]),
    ("write: {shard_seconds: .inf}", "bad_config_value", ["write.shard_seconds is inf; allowed: a finite number"]),
    ("write: {num_shards: 2.5}", "bad_config_value", ["write.num_shards"]),
    ("match:", "bad_config_value", ["match is empty", "write null for a dataset without contexts"]),
    ("match: ~", "bad_config_value", ["match is ~", "write null for a dataset without contexts"]),
    ("speaker_key: ${nowhere}", "bad_config_value", ["speaker_key"]),
    (
        "speaker_key: ${oc.env:SHARMILL_NONE}",
        "bad_config_value",
        ["speaker_key: the environment variable SHARMILL_NONE is"],
    ),
    ("speaker_key: ???", "bad_config_value", ["speaker_key"]),
]
# Keys by type of number, with words of the allowed values.
NUMBERS = {
    "prepare.min_duration": "a finite number of at least 0", "prepare.max_duration": "a finite number, null",
    "match.batch_seconds": "a finite number above 0", "max_reject_fraction": "a finite number of at least 0 and of",
    "executor.unit_time_limit": "a finite number above 0, auto, null", "executor.workers": "a whole number of at",
    "write.shard_size": "a whole number of at least 1, null", "write.seed": "a whole number of at least 0",
}  # fmt: skip
REFUSED_OVERRIDES = [
    ("write.order=random", "bad_config_value", ["write.order", "'random'", "manifest", "speaker", "shuffle"]),
    (
        "write.audio_format=ogg",
        "bad_config_value",
        ["write.audio_format", "'ogg'", "flac", "mp3", "opus", "original", "wav"],
    ),
    ("match.choice=worst", "bad_config_value", ["match.choice", "'worst'", "best", "sample"]),
    ("executor.workers=many", "bad_config_value", ["executor.workers", "'many'", "auto"]),
    ("prepare.require_text=[1]", "bad_config_value", ["prepare.require_text is ", "allowed: true or false"]),
    ("max_reject_fraction=1.5", "bad_config_value", ["max_reject_fraction is ", "of at most 1"]),
    ("name=../up", "bad_config_value", ["name '../up' must start with a letter or digit"]),
    ("name=-x", "bad_config_value", ["name '-x' must start with a letter or digit"]),
    ("run_dir=''", "bad_config_value", ["run_dir must not be empty"]),
    ("dataset_dir=' '", "bad_config_value", ["dataset_dir must not be empty"]),
    ("write.num_shards=4; write.shard_size=9", "bad_config_value", ["shard_size (9)", "num_shards (4)"]),
    ("sources.0.manifest=''", "bad_config_value", ["sources[0]: manifest must not be empty"]),
    ("sources.0.audio_root=''", "bad_config_value", ["sources[0]: audio_root must not be empty"]),
    ("prepare.min_duration=-1", "bad_config_value", ["prepare.min_duration is ", "a finite number of at least 0"]),
    ("prepare.min_duration=nan", "bad_config_value", ["prepare.min_duration is ", "a finite number of at least 0"]),
    ("prepare.max_duration=0.05", "bad_config_value", ["prepare: max_duration must be greater than min_duration"]),
    (
        "prepare.duration_tolerance=-1",
        "bad_config_value",
        ["prepare.duration_tolerance is ", "a finite number of at least 0"],
    ),
    ("prepare.unit_records=0", "bad_config_value", ["prepare.unit_records is ", "a whole number of at least 1"]),
    ("match.min_similarity=2", "bad_config_value", ["match.min_similarity is ", "of at most 1"]),
    ("match.max_duration=1", "bad_config_value", ["match: max_duration must not be less than min_duration"]),
    ("match.max_group=2", "bad_config_value", ["match.max_group is ", "a whole number of at least 3"]),
    ("match.sample_size=0", "bad_config_value", ["match.sample_size is ", "a whole number of at least 1"]),
    ("match.unit_seconds=0", "bad_config_value", ["match.unit_seconds is ", "a finite number above 0"]),
    ("match.batch_seconds=0", "bad_config_value", ["match.batch_seconds is ", "a finite number above 0"]),
    ("write.shard_size=0", "bad_config_value", ["write.shard_size is ", "a whole number of at least 1"]),
    ("write.sampling_rate=0", "bad_config_value", ["write.sampling_rate is ", "a whole number of at least 1"]),
    ("write.seed=-1", "bad_config_value", ["write.seed is ", "a whole number of at least 0"]),
    ("encode.batch_seconds=-3", "bad_config_value", ["encode.batch_seconds is ", "a finite number above 0"]),
    (
        "encode.codecs=[{name: a, model: x}, {name: a, model: y}]",
        "bad_config_value",
        ["encode: two codecs have the same name"],
    ),
    (
        "encode.codecs=[{name: a/b, model: x}]",
        "bad_config_value",
        ["encode.codecs[0]: codec name 'a/b' must start with a letter or digit and contain only letters"],
    ),
    ("executor.workers=0", "bad_config_value", ["executor.workers is ", "a whole number of at least 1"]),
    ("executor.unit_time_limit=0", "bad_config_value", ["executor.unit_time_limit is ", "a finite number above 0"]),
    *(
        (f"sources.{entry}=x", "unknown_key", [f"sources.{entry}=x: sources is a list of length 1: ", "with sources.0"])
        for entry in ("1.manifest", "x.manifest", "-1.manifest", "foo")
    ),
    ("prepare=[]", "bad_config_value", ["prepare is []; allowed: a mapping of keys to values"]),
    *(
        (f"{key}={number}", "bad_config_value", [f"{key} is '{number}'; allowed: ", words])
        for number in ("nan", ".nan", "inf", "-inf")
        for key, words in NUMBERS.items()
    ),
    ("=y", "unknown_key", []),
    ("a..b=y", "unknown_key", []),
    ("a[=3", "unknown_key", []),
    ("executor.kind=cloud", "unknown_name", ["executor.kind", "'cloud'", "local, ray"]),
    ("sources.0.type=nemoo", "unknown_name", ["sources[0].type", "'nemoo'", "'nemo'"]),
    ("type=x", "unknown_key", ["'type'", "'sources[0].type'"]),
    ("match.batch_secs=3", "unknown_key", ["'match.batch_secs'", "'batch_seconds'"]),
    ("match=", "bad_config_value", ["match"]),
    ("match=~", "bad_config_value", ["match"]),
    ("match=[]", "bad_config_value", ["match is ", "a mapping of keys to values, null"]),
    ("match=[{}]", "bad_config_value", ["match is ", "a mapping of keys to values, null"]),
    ("match=null; match.min_similarity=0.7", "bad_config_value", ["match.min_similarity=0.7", "match is null"]),
]
REFUSED_FILES = [
    (BASE.replace("audio_root: audio", "audio_dir: audio"), "unknown_key", ["'sources[0].audio_dir'", "'audio_root'"]),
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
    (BASE.replace("audio}", "audio, speaker: '{path}'}"), "bad_config_value", ["sources[0]"]),
    (BASE.replace("audio}", "audio, speaker: ''}"), "bad_config_value", ["sources[0]"]),
    (BASE.replace("audio}", "audio, channel: -1}"), "bad_config_value", ["sources[0]"]),
    (BASE.replace("audio}", "audio, channel: left}"), "bad_config_value", ["sources[0]"]),
    (BASE.replace("audio}", "audio, language: a b}"), "bad_config_value", ["sources[0]"]),
    (BASE.replace("audio}", "audio, dataset: ''}"), "bad_config_value", ["sources[0]"]),
    (BASE.replace("m.json", "[]"), "bad_config_value", ["sources[0]"]),
    ("a: [", "bad_config_file", []),
    ("\0", "bad_config_file", []),
    (b"name: \xff\xe9", "bad_config_file", []),
    (BASE + "name: again", "bad_config_file", []),
    ("a: b: c", "bad_config_file", []),
]


REFUSED = [
    *((BASE + text, [], *refusal) for text, *refusal in REFUSED_TEXTS),
    *((BASE, overrides.split("; "), *refusal) for overrides, *refusal in REFUSED_OVERRIDES),
    *((content, [], *refusal) for content, *refusal in REFUSED_FILES),
]


@pytest.mark.parametrize(("content", "overrides", "code", "names"), REFUSED)
def test_what_is_wrong_is_refused(content, overrides, code, names, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refuse(path, code, *names, overrides=overrides)


def test_keys_of_an_executor_go_with_its_kind(write):
    executor = load_config(
        write("executor: {kind: ray, cores: 2}"), ["executor.workers=2", "executor.workers=3"]
    ).executor
    assert (executor.kind, executor.workers, executor.cores, executor.address) == ("ray", 3, 2, "auto")


def test_yaml_tag_in_an_override_is_nothing_but_text(write, tmp_path):
    value = f"!!python/object/apply:os.system [touch {tmp_path / 'marker'}]"
    assert load_config(write(), [f"speaker_key={value}"]).speaker_key == value
    assert not (tmp_path / "marker").exists()


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
        ("prepare.require_text=no", lambda c: c.sections["prepare"].require_text, False),
        ("sources.0.language=no", lambda c: c.sources[0].language, "no"),
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


def test_configurations_of_the_repository_load():
    names = {path.stem: load_config(path).name for path in (REPOSITORY / "configs").glob("*.yaml")}
    assert all(name == stem for stem, name in names.items())
    assert {"demo", "librispeech", "hifitts2", "libritts", "nvyt2505"} <= names.keys()


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


ALIASES = {"stage1": "match", "stage2": "write", "stage3": "encode"}


@pytest.mark.parametrize(("name", "stage"), [*ALIASES.items(), *((name, name) for name in STAGES.own)])
def test_stages_have_names_and_aliases(name, stage):
    assert resolve_stage(name) == stage


@pytest.mark.parametrize("overrides", [[], ["match=null"]])
def test_match_null_leaves_the_stage_match_out(overrides, write):
    config = load_config(write("match: {min_duration: 4}" if overrides else "match: null"), overrides)
    assert config.sections["match"] is None
    assert not config.has_contexts
    assert choose_stages(config) == ("prepare", "write", "encode.segments", "encode", "encode.shards", "validate")
    assert load_config(write(to_yaml(config).decode(), base="")) == config


def test_without_sources_only_stages_of_a_dataset_are_chosen(write):
    config = load_config(write(""), ["sources=[]"])
    assert choose_stages(config) == ("encode.segments", "encode", "encode.shards", "validate")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", (1000, None, None)),
        ("write: {shard_size: 7}", (7, None, None)),
        ("write: {num_shards: 7}", (None, 7, None)),
        ("write: {shard_seconds: 3600}", (None, None, 3600.0)),
        ("write: {shard_size: null, num_shards: 7}", (None, 7, None)),
        # A key on the command line replaces the key of the file.
        ("write: {shard_size: 7} write.num_shards=4", (None, 4, None)),
        ("write: {num_shards: 7} write.shard_seconds=4", (None, None, 4.0)),
        ("write: {num_shards: 7} write.shard_size=~", (None, 7, None)),
        ("write: {shard_size: 7} write={num_shards: 4}", (None, 4, None)),
        ("write: {shard_size: 7} write={shard_size: 4}", (4, None, None)),
        ("write: {shard_size: 7} write={num_shards: null}", (7, None, None)),
    ],
)
def test_one_key_says_how_large_shards_are(text, size, write):
    text, *overrides = re.split(" (?=write[.=])", text)
    found = load_config(write(text), overrides).sections["write"]
    assert (found.shard_size, found.num_shards, found.shard_seconds) == size


@pytest.fixture
def loudness(monkeypatch, tmp_path) -> str:
    """Has the stage of another package installed; the keys of two of them, as YAML."""
    install(monkeypatch, tmp_path / "site", "loudness")
    return "match: null\nloudness: [{name: plain}, {name: quiet, level: -40}]\n"


@pytest.mark.parametrize(
    ("override", "code", "names"),
    [
        ("loudness.0.levle=1", "unknown_key", ["'loudness[0].levle'", "'level'"]),
        ("loudness.1.level=high", "bad_config_value", ["loudness[1].level is 'high'"]),
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

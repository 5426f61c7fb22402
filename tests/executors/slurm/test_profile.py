"""Cluster profiles: what is wrong in one, and what a stage gets of it."""

from __future__ import annotations

import pytest
from support.errors import raises

from sharmill.errors import ConfigError
from sharmill.executors.slurm.profile import load_profile


@pytest.mark.parametrize(
    ("text", "code", "names"),
    [
        ("max_paralel: 3", "unknown_key", ["'max_paralel'", "'max_parallel'"]),
        ("submit_ahead: true", "unknown_key", ["'submit_ahead' was removed", "leave the key out"]),
        ("gpu: {partitoin: gpu}", "unknown_key", ["'gpu.partitoin'", "'partition'"]),
        ("cpu: {cores: many}", "bad_config_value", ["cpu.cores"]),
        ("cpu: {cores: 0}", "bad_config_value", ["cores"]),
        ("gpu: {device: tpu}", "bad_config_value", ["device", "tpu"]),
        ("max_parallel: 0", "bad_config_value", ["max_parallel"]),
        ("cpu: {extra: {array: 0-9}}", "bad_config_value", ["extra", "array"]),
        ("cpu: {extra: {time: 10}}", "bad_config_value", ["extra", "time", "timeout_min"]),
        ("cpu: {extra: {mem: 4G}}", "bad_config_value", ["extra", "mem", "memory_gb"]),
        ("cpu: {extra: {ntasks: 2}}", "bad_config_value", ["extra", "ntasks", "one task"]),
        ("stages: {wirte: {cores: 2}}", "bad_config_value", ["'wirte'", "'write'"]),
        ("stages: {write: {core: 2}}", "bad_config_value", ["stages.write", "'core'", "'cores'"]),
        ("stages: {write: {cores: 0}}", "bad_config_value", ["stages.write", "cores"]),
        ("stages: {match: {extra: {array: 1}}}", "bad_config_value", ["extra", "array"]),
        ("{signal_s: 120, stages: {driver: {timeout_min: 2}}}", "bad_config_value", ["120", "stages.driver.timeout"]),
        ("{signal_s: 120, gpu: {timeout_min: 2}}", "bad_config_value", ["signal_s", "120", "gpu.timeout_min"]),
        ("gpu: {gpus: 8}", "bad_config_value", ["gpu.gpus"]),
        ("- a list", "bad_config_file", []),
    ],
)
def test_what_is_wrong_in_a_profile_is_named(tmp_path, text, code, names):
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with raises(ConfigError, code, str(path), *names):
        load_profile(path)


def test_a_stage_has_its_own_values_and_else_those_of_gpu_or_cpu(tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text(
        "gpu: {partition: gpu, gpus: 1, cores: 8, extra: {constraint: a100, comment: ours}}\n"
        "stages: {encode: {partition: h200, timeout_min: 30, extra: {constraint: h200}}, driver: {account: free}}\n"
    )
    profile = load_profile(path)
    encode, match = profile.for_stage("encode/builtin", "gpu"), profile.for_stage("match", "gpu")
    assert (encode.partition, encode.cores, encode.gpus, encode.timeout_min) == ("h200", 8, 1, 30)
    assert encode.extra == {"constraint": "h200", "comment": "ours"}
    assert (match.partition, match.timeout_min, match.extra["constraint"]) == ("gpu", 240, "a100")
    assert profile.driver.account == "free"
    assert profile.for_stage("write", "cpu") == profile.cpu

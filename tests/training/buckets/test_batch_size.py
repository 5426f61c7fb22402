"""Tests of the search for the largest batch, with real memory limits, and of its errors."""

import itertools
import signal

import pytest
import torch
import yaml
from hypothesis import given, settings, strategies as st
from support.project import examples, raises, run_sharmill

from sharmill.cli.main import main
from sharmill.errors import ConfigError, FatalError
from sharmill.training.buckets.batch_size import (
    Bucket,
    Budget,
    StepProcess,
    available_memory,
    make_budget,
    read_bins,
    search,
    tune_batch_sizes,
)

SMALL = Budget("cpu", 512 * 2**20, 2**34)


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=8, unique=True),
    st.integers(80, 5000),
)
def test_the_search_finds_the_largest_of_every_bucket(bins, memory):
    buckets = [Bucket(length, tokens) for length, tokens in sorted(bins)]

    def fits(size, bucket):
        return size * (bucket.length + bucket.num_tokens) <= memory

    found = search(fits, buckets, max_batch_size=1000)
    for bucket, size in zip(buckets, found, strict=True):
        assert size == 1000 or not fits(size + 1, bucket)
        assert fits(size, bucket)


def test_a_bucket_of_which_nothing_fits_is_named():
    with raises(FatalError, "out_of_memory", "30", "200"):
        search(lambda size, bucket: bucket.length < 30, [Bucket(10.0, 100), Bucket(30.0, 200)], max_batch_size=8)


def test_a_process_that_dies_for_memory_is_replaced():
    assert tune_batch_sizes("support.work:killed", [Bucket(1.0), Bucket(2.0)], SMALL) == [5, 5]
    assert tune_batch_sizes("support.work:aborts_for_memory", [Bucket(1.0)], SMALL) == [6]


@pytest.mark.parametrize(
    ("step", "names"),
    [
        ("is_wrong", ["a batch of 4 of 2, 0.50 GiB of cpu", "Traceback", "ValueError: the shapes do not match"]),
        ("aborts", ["a batch of 1 of 2", "SIGABRT", "\n  the assertion that failed"]),
        ("gets_a_real_time_signal", [f"signal {signal.SIGRTMIN + 3}"]),
        ("exits", ["exit status 3"]),
        ("tells_its_device", ["called with 1 2.0 None cpu"]),
    ],
)
def test_other_errors_end_the_search(step, names):
    with raises(FatalError, "step_failed", f"support.work:{step}", *names):
        tune_batch_sizes(f"support.work:{step}", [Bucket(2.0)], SMALL)


@pytest.mark.gpu
def test_a_real_model_on_a_gpu():
    """The search stays within a share of the GPU, survives out-of-memory errors, and finds the largest batches."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    budget = make_budget("cuda:0", 0.9, 2**31)
    buckets = [Bucket(2.0), Bucket(8.0), Bucket(32.0)]
    found = tune_batch_sizes("support.work:Tiny", buckets, budget)
    assert found == sorted(found, reverse=True)
    with StepProcess("support.work:Tiny", budget) as process:
        assert process.fits(found[2], buckets[2])
        assert not process.fits(2 * found[2], buckets[2])
        assert process.fits(found[2], buckets[2])


def test_available_memory_is_what_control_groups_leave(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   8000 kB\n")
    (proc / "self/cgroup").write_text("0::/job/step\n")
    (groups / "job/step").mkdir(parents=True)
    assert available_memory(proc, groups) == 8000 * 1024
    (groups / "job/step/memory.max").write_text("max\n")
    (groups / "job/memory.max").write_text("5000000\n")
    (groups / "job/memory.current").write_text("1000000\n")
    assert available_memory(proc, groups) == 4000000
    (groups / "job/memory.current").write_text("6000000\n")
    assert available_memory(proc, groups) == 0


def test_a_step_that_takes_too_long_is_an_error():
    with raises(FatalError, "step_failed", "of 1, 0.50 GiB", "more than 9 seconds", "--timeout"):
        tune_batch_sizes("support.work:hangs", [Bucket(1.0)], SMALL, timeout=9.0)


def test_bins_are_read_from_the_file_of_the_other_command(tmp_path):
    path = tmp_path / "bins.yaml"
    path.write_text(
        "# 60 cuts\nuse_bucketing: true\nbucket_duration_bins: [[1.5, 20], [3.0, 30]]\nmax_tps: [3.0, 4.0]\n"
    )
    assert read_bins(str(path)) == ([Bucket(1.5, 20), Bucket(3.0, 30)], {"max_tps": [3.0, 4.0]})


@pytest.mark.parametrize(
    ("text", "code", "names"),
    [
        ("num_buckets: 3\nbucket_duration_bins: [1.5, 3.0]\n", "bad_config_value", ["--closed"]),
        ("a: 1\n", "missing_key", ["bucket_duration_bins", "sharmill bins DATASET --closed"]),
        ("a: [\n", "bad_config_file", ["bins.yaml"]),
    ],
)
def test_a_file_without_closed_bins_is_refused(tmp_path, text, code, names):
    (tmp_path / "bins.yaml").write_text(text)
    with raises(ConfigError, code, *names):
        read_bins(str(tmp_path / "bins.yaml"))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--bins", "[]"], ["bucket_duration_bins must be an ascending list"]),
        (["--buckets", "[3.0, 1.5]"], ["an ascending list"]),
        (["--bins", "[0.0, 1.5]"], ["positive numbers"]),
        (["--bins", "[1.5, [3.0, 4]]"], ["[length, tokens]"]),
        (["--bins", "no/such.yaml"], ["no/such.yaml"]),
        (["--memory", "8 apples"], ["8 apples"]),
        (["--memory", "0GiB"], ["must be above 0"]),
        (["--memory", "2"], ["'2' is only 2 bytes", "2GiB"]),
        (["--memory", "900TiB"], ["available"]),
        (["--memory-share", "0"], ["--memory-share"]),
        (["--memory-share", "1.0"], ["--memory-share", "0<x<1"]),
        (["--memory-fraction", "1.0"], ["--memory-fraction", "0<x<1"]),
        (["--device", "tpu"], ["tpu"]),
        (["--step", "mine:nothing"], ["mine:nothing"]),
        (["--step", "mine:step", "--module-name", "a.Model"], ["--step"]),
    ],
)
def test_invalid_options_are_refused_in_one_line(tmp_path, monkeypatch, capsys, options, names):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def step(*_):\n    pass\n")
    usual = {"--step": "mine:step", "--bins": "[1.0]", "--device": "cpu", "--memory": "400MiB"}
    given = usual | dict(zip(options[::2], options[1::2], strict=True))
    with pytest.raises(SystemExit) as ended:
        main(["tune-batch", *itertools.chain(*given.items())])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert all(name in told for name in names), told


@pytest.mark.slow
def test_the_command(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def step(batch_size, length, num_tokens, device):\n"
        "    print('noise')\n"
        "    bytearray(int(batch_size * length * 2**20))\n"
    )
    arguments = ["tune-batch", "--step", "mine:step", "--device", "cpu", "--memory", "400MiB", "--tolerance", "0.2"]
    result = run_sharmill(*arguments, "--bins", "[5.0, 40.0]", cwd=tmp_path)
    values = yaml.safe_load(result.stdout)
    assert values["bucket_duration_bins"] == [5.0, 40.0]
    short, long = values["bucket_batch_size"]
    assert 20 <= short <= 72
    assert 2 <= long <= 9
    said = result.stderr.splitlines()
    assert said[:3] == ["loading the training step", "searching within 0.35 GiB of cpu", "  1 fits"]
    assert [line for line in said[2:] if not line.startswith("  ")] == [f"40: {long}", f"5: {short}"]
    assert f"  {short} fits" in said
    result = run_sharmill(*arguments, "--bins", "[1000.0]", cwd=tmp_path, status=1)
    assert result.stdout == ""
    assert "Error: " in result.stderr
    assert "1000" in result.stderr
    result = run_sharmill(*arguments, "--bins", "[]", cwd=tmp_path, status=2)

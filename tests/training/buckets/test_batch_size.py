"""The largest batch that fits: the search, real limits of memory, and what is an error instead."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import raises
from support.pipelines import run_sharmill
from support.properties import examples

from sharmill.errors import ConfigError, FatalError
from sharmill.models.memory import is_out_of_memory
from sharmill.training.buckets.batch_size import (
    NothingFits,
    batch_sizes_to_yaml,
    make_budget,
    read_buckets,
    search,
    tune_batch_sizes,
)
from sharmill.training.buckets.step_process import (
    Bucket,
    Budget,
    StepProcess,
    available_memory,
    parse_memory,
)

SMALL = Budget("cpu", 512 * 2**20, 2**34)
MIB = 2**20


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


def test_a_longer_bucket_has_no_larger_batch_and_gives_the_next_its_start():
    asked = []

    def fits(size, bucket):
        asked.append((bucket.length, size))
        return size * bucket.length <= 100

    told = []
    found = search(
        fits, [Bucket(1.0), Bucket(2.0), Bucket(10.0)], max_batch_size=64, tell=lambda *one: told.append(one)
    )
    assert found == [64, 50, 10]
    assert told == [(Bucket(10.0), 10), (Bucket(2.0), 50), (Bucket(1.0), 64)]
    assert asked[:8] == [(10.0, size) for size in (1, 2, 4, 8, 16, 12, 10, 11)]
    assert min(size for length, size in asked if length == 2.0) == 20


def test_a_tolerance_saves_probes():
    def count(tolerance):
        asked = []
        found = search(
            lambda size, bucket: asked.append(size) or size <= 1000, [Bucket(1.0)], max_batch_size=4096,
            tolerance=tolerance,
        )  # fmt: skip
        return found[0], len(asked)

    exact, probes = count(0.0)
    near, fewer = count(0.1)
    assert exact == 1000
    assert 900 <= near <= 1000
    assert fewer < probes


def test_a_bucket_of_which_nothing_fits_is_named():
    with raises(NothingFits, "out_of_memory", "30", "200"):
        search(lambda size, bucket: bucket.length < 30, [Bucket(10.0, 100), Bucket(30.0, 200)], max_batch_size=8)


@pytest.mark.slow
def test_memory_decides():
    buckets = [Bucket(8.0), Bucket(32.0)]
    found = tune_batch_sizes("support.steps:arrays", buckets, SMALL)
    assert found == sorted(found, reverse=True)
    for bucket, size in zip(buckets, found, strict=True):
        # Python and numpy are in the budget as well.
        assert 256 <= size * bucket.length <= 512
        with StepProcess("support.steps:arrays", SMALL) as process:
            assert process.fits(size, bucket)
            assert not process.fits(size + 1, bucket)
            assert process.last_lack.startswith("Unable to allocate")


@pytest.mark.slow
def test_tokens_count_too():
    buckets = [Bucket(4.0, 0), Bucket(4.0, 100), Bucket(8.0, 50)]
    none, many, some = tune_batch_sizes("support.steps:arrays", buckets, SMALL)
    assert none > many
    assert none > some
    with StepProcess("support.steps:arrays", SMALL) as process:
        assert process.fits(many, buckets[1])
        assert not process.fits(many + 1, buckets[1])


def test_state_of_the_optimizer_counts_though_it_comes_after_the_first_step():
    plain, with_state = (
        tune_batch_sizes(f"support.steps:{step}", [Bucket(1.0)], SMALL)[0] for step in ("arrays", "Optimizer")
    )
    assert 195 <= plain - with_state <= 205


def test_a_process_that_dies_for_memory_is_replaced():
    assert tune_batch_sizes("support.steps:killed", [Bucket(1.0), Bucket(2.0)], SMALL) == [5, 5]
    assert tune_batch_sizes("support.steps:aborts_for_memory", [Bucket(1.0)], SMALL) == [6]


def test_an_error_caused_by_lack_of_memory_is_one():
    assert tune_batch_sizes("support.steps:wraps", [Bucket(1.0)], SMALL) == [9]


@pytest.mark.parametrize(
    ("step", "names"),
    [
        ("is_wrong", ["a batch of 4 of 2, 0.50 GiB of cpu", "Traceback", "ValueError: the shapes do not match"]),
        ("aborts", ["a batch of 1 of 2", "SIGABRT\nthe assertion that failed"]),
        ("gets_a_real_time_signal", [f"signal {signal.SIGRTMIN + 3}"]),
        ("exits", ["exit status 3"]),
        ("tells_its_device", ["called with 1 2.0 None cpu"]),
    ],
)
def test_other_errors_end_the_search(step, names):
    with raises(FatalError, "step_failed", f"support.steps:{step}", *names):
        tune_batch_sizes(f"support.steps:{step}", [Bucket(2.0)], SMALL)


@pytest.mark.parametrize("step", ["support.steps:missing", "no_such_module:step", "support.steps"])
def test_a_step_that_is_not_there_is_wrong_use(step):
    with raises(ConfigError, "bad_callable", repr(step)):
        tune_batch_sizes(step, [Bucket(2.0)], SMALL)


def test_a_library_without_room_is_a_lack_of_memory():
    assert is_out_of_memory(ImportError("_ctypes.so: failed to map segment from shared object"))
    assert is_out_of_memory(ImportError("libtorch_cpu.so: cannot map zero-fill pages"))
    assert not is_out_of_memory(ImportError("No module named 'torch'"))


def test_a_step_that_does_not_even_load_in_the_budget_is_named():
    tiny = Budget("cpu", 60 * MIB, 2**34)
    with raises(FatalError, "step_failed", "support.steps:Tiny", "0.06 GiB", "cpu"):
        tune_batch_sizes("support.steps:Tiny", [Bucket(1.0)], tiny)


@pytest.mark.slow
def test_a_real_model_on_the_cpu():
    budget = Budget("cpu", 1200 * MIB, 2**34)
    buckets = [Bucket(20.0), Bucket(80.0)]
    found = tune_batch_sizes("support.steps:Tiny", buckets, budget, tolerance=0.3)
    # Two layers of 64 channels and their gradients take at least 1 KiB for each of 100 frames a second.
    assert 1 <= found[1] < found[0] < 1200 * 1024 / (20.0 * 100)


@pytest.mark.gpu
def test_a_real_model_on_a_gpu():
    """The limit is a share of the GPU, errors of its memory are survived, and the results are the largest."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    budget = make_budget("cuda:0", 0.9, 2**31)
    buckets = [Bucket(2.0), Bucket(8.0), Bucket(32.0)]
    found = tune_batch_sizes("support.steps:Tiny", buckets, budget)
    assert found == sorted(found, reverse=True)
    with StepProcess("support.steps:Tiny", budget) as process:
        assert process.fits(found[2], buckets[2])
        assert not process.fits(2 * found[2], buckets[2])
        assert process.fits(found[2], buckets[2])


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 2**33), ("1.5 gib", 3 * 2**29), ("500MB", 500 * 10**6), ("1000", 1000)]
)
def test_sizes_of_memory_are_read(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "8 gibi", "GiB", "-1GiB", "0GiB", "1e3"])
def test_other_sizes_are_refused(text):
    with raises(ConfigError, "bad_config_value", repr(text)):
        parse_memory(text)


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
    (groups / "memory/old").mkdir(parents=True)
    (groups / "memory/old/memory.limit_in_bytes").write_text("3000\n")
    (groups / "memory/old/memory.usage_in_bytes").write_text("4000\n")
    (proc / "self/cgroup").write_text("4:cpu,memory:/old\n3:pids:/\n")
    assert available_memory(proc, groups) == 0


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "HIP out of memory. Tried to allocate",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "cuFFT error: CUFFT_INTERNAL_ERROR",
        "GET was unable to find an engine to execute this computation",
    ],
)
def test_libraries_of_gpus_say_it_each_in_its_way(message):
    assert is_out_of_memory(RuntimeError(message))


@pytest.mark.parametrize(
    "message",
    ["CUDA error: device-side assert triggered", "CUDA error: an illegal memory access was encountered",
     "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"],
)  # fmt: skip
def test_other_errors_of_gpus_are_not_about_memory(message):
    assert not is_out_of_memory(RuntimeError(message))


def test_the_error_of_the_allocator_of_cuda_is_about_memory():
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("Allocation on device 0 would exceed allowed memory."))


class FakeCuda:
    """Two GPUs of 80 GiB, and what torch.cuda was asked to do."""

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=80 * 2**30)
        )
        for name in ("set_device", "set_per_process_memory_fraction", "synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: self.calls.append((name, *args)))


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def test_the_budget_of_a_gpu_is_a_share_of_all_that_it_has(cuda):
    assert make_budget("auto", 0.5, None) == Budget("cuda:0", 40 * 2**30, 80 * 2**30)
    assert make_budget("cuda:1", 0.9, 10 * 2**30) == Budget("cuda:1", 9 * 2**30, 80 * 2**30)
    with raises(ConfigError, "bad_config_value", "81.00 GiB", "cuda:0", "80.00 GiB"):
        make_budget("cuda", 0.9, 81 * 2**30)
    with raises(ConfigError, "bad_config_value", "cuda:2", "2"):
        make_budget("cuda:2", 0.9, None)


def test_a_step_that_takes_too_long_is_an_error():
    with raises(FatalError, "step_failed", "2", "1", "--timeout"):
        tune_batch_sizes("support.steps:hangs", [Bucket(1.0)], SMALL, timeout=2.0)


def test_every_try_is_told():
    tries = []
    tune_batch_sizes("support.steps:killed", [Bucket(1.0)], SMALL, tell_try=lambda *one: tries.append(one[1:]))
    assert tries == [(1, True), (2, True), (4, True), (8, False), (6, False), (5, True)]


def test_what_is_about_memory():
    caused = RuntimeError("x")
    caused.__cause__ = MemoryError()
    assert all(is_out_of_memory(error) for error in (MemoryError(), caused, RuntimeError("... std::bad_alloc")))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not any(is_out_of_memory(error) for error in (RuntimeError("memory"), ValueError("std::bad_alloc"), None))


@pytest.mark.parametrize(
    ("text", "buckets"),
    [
        ("[1.5, 3]", [Bucket(1.5), Bucket(3)]),
        (" [[1.5, 20], [1.5, 40], [3, 30]]", [Bucket(1.5, 20), Bucket(1.5, 40), Bucket(3, 30)]),
        ("[(1.5, 20)]", [Bucket(1.5, 20)]),
    ],
)
def test_bins_are_read_from_a_list(text, buckets):
    assert read_buckets(text) == buckets


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[]", "a list of bins, not"),
        ("[1.0, [2.0, 3]]", "numbers above 0, or pairs"),
        ("[0.0, 1.0]", "numbers above 0"),
        ("[[1.0, 2.5]]", "or pairs of them"),
        ("[[1.0, 2, 3]]", "or pairs of them"),
        ("['a']", "numbers above 0"),
        ("[True]", "numbers above 0"),
        ("[3.0, 1.0]", "ascending"),
        ("[1.0", "not a list of bins"),
    ],
)
def test_other_bins_are_refused(text, what):
    with raises(ConfigError, "bad_config_value", text, what):
        read_buckets(text)


def test_bins_of_a_file_that_is_not_there_are_refused():
    with raises(ConfigError, "missing_input", "nowhere.yaml"):
        read_buckets("nowhere.yaml")


def test_bins_are_read_from_the_file_of_the_other_command(tmp_path):
    path = tmp_path / "bins.yaml"
    path.write_text(
        "# 60 cuts\nuse_bucketing: true\nbucket_duration_bins: [[1.5, 20], [3.0, 30]]\nmax_tps: [3.0, 4.0]\n"
    )
    assert read_buckets(str(path)) == [Bucket(1.5, 20), Bucket(3.0, 30)]
    path.write_text("num_buckets: 3\nbucket_duration_bins: [1.5, 3.0]\n")
    with raises(ConfigError, "bad_config_value", "--closed"):
        read_buckets(str(path))
    path.write_text("a: 1\n")
    with raises(ConfigError, "missing_key", "bucket_duration_bins", "sharmill bins DATASET --closed"):
        read_buckets(str(path))
    path.write_text("a: [\n")
    with raises(ConfigError, "bad_config_file", "bins.yaml"):
        read_buckets(str(path))


@pytest.mark.parametrize(
    ("device", "share", "memory", "what"),
    [
        ("cpu", 0.0, None, "--memory-share is 0; it must be above 0"),
        ("cpu", 1.5, None, "at most 1"),
        ("tpu:x", 0.9, None, "--device is 'tpu:x'; use cpu, cuda or cuda:0"),
        ("cuda:77", 0.9, None, "there is no device 'cuda:77' here"),
        ("cpu", 0.9, 2**60, "--memory is 1073741824.00 GiB"),
        ("mps", 0.9, None, "there is no device 'mps' here"),
    ],
)
def test_budgets_that_cannot_be_are_refused(device, share, memory, what):
    with raises(ConfigError, "bad_config_value", what):
        make_budget(device, share, memory)


def test_the_budget_of_the_cpu_is_a_share_of_what_is_available():
    assert make_budget("cpu", 0.5, 1000).size == 500
    assert make_budget("cpu", 0.5, None).size == pytest.approx(available_memory() / 2, rel=0.2)


def test_results_are_yaml():
    values = yaml.safe_load(batch_sizes_to_yaml("my:step", [Bucket(1.5, 20), Bucket(3.0, 30)], [8, 4], SMALL))
    assert values == {
        "use_bucketing": True, "bucket_duration_bins": [[1.5, 20], [3.0, 30]], "bucket_batch_size": [8, 4]
    }  # fmt: skip


@pytest.mark.slow
def test_the_command(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def step(batch_size, length, num_tokens, device):\n"
        "    print('noise')\n"
        "    bytearray(int(batch_size * length * 2**20))\n"
    )
    arguments = ["tune-batch", "--step", "mine:step", "--device", "cpu", "--memory", "400MiB", "--tolerance", "0.2"]
    result = run_sharmill(*arguments, "--bins", "[5.0, 40.0]", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    values = yaml.safe_load(result.stdout)
    assert values["bucket_duration_bins"] == [5.0, 40.0]
    short, long = values["bucket_batch_size"]
    assert 20 <= short <= 72
    assert 2 <= long <= 9
    said = result.stderr.splitlines()
    assert said[:2] == ["searching within 0.35 GiB of cpu", "  1 fits"]
    assert [line for line in said[1:] if not line.startswith("  ")] == [f"40: {long}", f"5: {short}"]
    assert f"  {short} fits" in said
    result = run_sharmill(*arguments, "--bins", "[1000.0]", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert "Error: " in result.stderr
    assert "1000" in result.stderr
    result = run_sharmill(*arguments, "--bins", "[]", cwd=tmp_path)
    assert result.returncode == 2

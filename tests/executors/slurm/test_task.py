"""A rank's task without a cluster, and the values that profiles allow."""

from __future__ import annotations

import multiprocessing
import signal

import pytest
from support import gpu_faults
from support.errors import raises
from support.full_scratch import WatchedStage
from support.gpu_faults import BreakingStage
from support.paths import REPOSITORY
from support.toy_cluster import SleepyStage
from support.toy_stage import GoesBlind

from sharmill import processes
from sharmill.engine.attempts import AttemptLog, Attempts
from sharmill.engine.fence import make_fence
from sharmill.engine.plan import load_plan, read_or_make_plan
from sharmill.engine.rejects import RejectLimit
from sharmill.errors import ConfigError, DeviceError, FatalError
from sharmill.executors.slurm.profile import load_profile
from sharmill.executors.slurm.task import RankTask
from sharmill.ports import clock, process

CLUSTERS = REPOSITORY / "configs" / "clusters"


@pytest.fixture
def stage(tmp_path):
    stage = SleepyStage(tmp_path, units=2)
    read_or_make_plan(stage, restart=False)
    make_fence(stage)
    return stage


def make_task(stage, rank, units, device="cpu", *, max_reject_fraction=1.0, **options):
    expected_in = sum(unit.size for unit in load_plan(stage))
    rejects = RejectLimit(stage.name, stage.dir.path / "rejects", expected_in, max_reject_fraction)
    return RankTask(stage, rank, units, device, rejects, **options)


def test_a_rank_on_a_gpu_that_is_not_there_is_an_error(stage, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with raises(DeviceError, "device_failed", "driver"):
        make_task(stage, 0, [0, 1], "cuda")()
    attempts = Attempts(stage.dir.attempts)
    assert "torch cannot use the GPU" in attempts.setup_error
    assert not attempts.stopped


@pytest.mark.parametrize(
    ("limit", "loading", "seconds", "count"),
    [
        (1000.0, 0, 700, 0),
        (1000.0, 0, 800, 1),
        # Five minutes less 90 s: the unit began after a minute of loading, and the signal came a minute early.
        (210.0, 60, 90, 1),
        (210.0, 60, 30, 0),
        # A limit of a minute: loading leaves next to nothing.
        (100.0, 90, 10, 0),
        (100.0, 90, 90, 1),
    ],
)
def test_a_unit_that_had_most_of_the_time_there_is_for_one_is_not_excused(
    stage, monkeypatch, limit, loading, seconds, count
):
    now, fresh = [0.0], []
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    monkeypatch.setattr(process, "seconds_since_start", lambda: loading)

    def be_told_to_leave(unit, staging, advance):
        now[0] += seconds
        fresh.append(task.checkpoint().function)
        raise SystemExit

    task = make_task(stage, 0, [1], limit=limit)
    stage.work = be_told_to_leave
    with pytest.raises(SystemExit):
        task()
    assert Attempts(stage.dir.attempts).counts[1] == count
    assert fresh == [RankTask(stage, 0, [1], "cpu", task.rejects, limit)]


@pytest.fixture
def requeued():
    """The numbers of the signals by which a rank asks to be requeued; submitit's handler ends the process like this."""
    arrived = []

    def leave(number, frame):
        arrived.append(number)
        raise SystemExit(255)

    previous = signal.signal(signal.SIGUSR2, leave)
    yield arrived
    signal.signal(signal.SIGUSR2, previous)
    gpu_faults.broken.clear()


def test_a_rank_whose_device_breaks_is_requeued_and_its_unit_excused_three_times(tmp_path, requeued):
    stage = BreakingStage(tmp_path, units=2, always=(1,))
    read_or_make_plan(stage, restart=False)
    make_fence(stage)
    counts = []
    for _ in range(6):
        with pytest.raises(SystemExit):
            make_task(stage, 0, [0, 1])()
        gpu_faults.broken.clear()  # a process of its own
        counts.append(Attempts(stage.dir.attempts).counts[1])
    assert counts == [0, 0, 0, 1, 2, 3]
    assert requeued == [signal.SIGUSR2] * 6
    assert make_task(stage, 0, [0, 1])() == 1
    assert stage.attempts() == {0: 1, 1: 6}
    assert "device-side assert" in Attempts(stage.dir.attempts).errors[1].message
    assert not Attempts(stage.dir.attempts).stopped


@pytest.mark.slow
def test_a_rank_that_sees_its_input_no_more_leaves_its_units_to_others(tmp_path):
    stage = GoesBlind(tmp_path, units=4)
    read_or_make_plan(stage, restart=False)
    make_fence(stage)
    with raises(DeviceError, "unlike_nodes", "does not see the audio"):
        make_task(stage, 0, [0, 1, 2, 3])()
    attempts = Attempts(stage.dir.attempts)
    assert (attempts.counts[2], attempts.interruptions[2], attempts.stopped) == (0, 1, "")
    assert "does not see the audio" in attempts.setup_error
    (stage.marks / "blind").write_text("another process")
    assert make_task(stage, 1, [0, 1, 2, 3])() == 4


def test_a_rank_whose_scratch_is_full_leaves_its_units_to_others(tmp_path):
    stage = WatchedStage(tmp_path, units=4)
    stage.scratch, stage.full, stage.once = str(tmp_path), 2, True
    read_or_make_plan(stage, restart=False)
    make_fence(stage)
    with raises(DeviceError, "disk", f"cannot write {tmp_path}/", "No space left on device"):
        make_task(stage, 0, [0, 1, 2, 3])()
    attempts = Attempts(stage.dir.attempts)
    assert (attempts.counts[2], attempts.broken_nodes, attempts.stopped) == (0, 1, "")
    assert "No space left on device" in attempts.setup_error


def test_units_that_may_have_ended_a_rank_come_last(stage):
    AttemptLog(stage.dir.attempts).begin(0)
    make_task(stage, 0, [0, 1])()
    assert list(stage.begun()) == [1, 0]


def test_units_that_were_excused_come_last_too(stage):
    log = AttemptLog(stage.dir.attempts)
    log.begin(0)
    log.give_up(0)
    make_task(stage, 0, [0, 1])()
    assert list(stage.begun()) == [1, 0]


def test_a_unit_is_excused_ten_times(stage):
    log = AttemptLog(stage.dir.attempts)
    for _ in range(12):
        log.begin(0)
        log.give_up(0)
    found = Attempts(stage.dir.attempts)
    assert (found.counts[0], found.interruptions[0]) == (2, 12)
    log.begin(0)
    assert make_task(stage, 0, [0, 1])() == 1
    assert list(stage.begun()) == [1]


@pytest.mark.slow
def test_a_unit_that_takes_longer_than_its_limit_ends_the_rank_and_counts(tmp_path):
    stage = SleepyStage(tmp_path, units=2, behaviour={0: "hold_gil"})
    stage.unit_time_limit = 2.0
    read_or_make_plan(stage, restart=False)
    make_fence(stage)
    for count in (1, 2, 3):
        process = multiprocessing.get_context("spawn").Process(target=make_task(stage, 0, [0, 1]))
        process.start()
        process.join(120)
        assert process.exitcode == 1
        assert Attempts(stage.dir.attempts).counts[0] == count
    # Given up, and the other unit was done meanwhile.
    assert make_task(stage, 0, [0, 1])() == 1


def test_a_rank_leaves_when_another_has_stopped_the_stage(stage):
    AttemptLog(stage.dir.attempts).stop(FatalError("full", code="disk"))
    assert make_task(stage, 0, [0, 1])() == 0
    attempts = Attempts(stage.dir.attempts)
    assert (attempts.stopped, attempts.stopped_code) == ("full", "disk")


def test_the_rejects_of_other_ranks_count(tmp_path):
    stage = SleepyStage(tmp_path, units=4, everywhere="reject:too_short,too_short")
    read_or_make_plan(stage, restart=False)
    make_fence(stage)
    for taken in ("1", "2", "3", "watch"):
        (stage.dir.taken / taken).write_text("1")
    make_task(stage, 0, [0], max_reject_fraction=0.4)()
    with raises(FatalError, "too_many_rejects", "4", "12"):
        make_task(stage, 1, [1, 2, 3], max_reject_fraction=0.3)()
    assert sum(stage.begun().values()) == 2


def test_a_damaged_note_does_not_count(stage, caplog):
    log = AttemptLog(stage.dir.attempts)
    log.begin(0)
    with next(stage.dir.attempts.glob("*.jsonl")).open("ab") as stream:
        stream.write(b'\x00\x00\n{"unit":1')
    assert Attempts(stage.dir.attempts).counts == {0: 1}
    assert "is no note" in caplog.text


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
        ("stages: {wirte: {cores: 2}}", "unknown_key", ["'stages.wirte'", "'write'"]),
        ("stages: {write: {core: 2}}", "unknown_key", ["'stages.write.core'", "'cores'"]),
        ("stages: {write: {cores: 0}}", "bad_config_value", ["stages.write", "cores"]),
        ("stages: {match: {extra: {array: 1}}}", "bad_config_value", ["extra", "array"]),
        ("{signal_s: 120, stages: {driver: {timeout_min: 2}}}", "bad_config_value", ["120", "stages.driver.timeout"]),
        ("{signal_s: 120, gpu: {timeout_min: 2}}", "bad_config_value", ["signal_s", "120", "gpu.timeout_min"]),
        ("- a list", "bad_config_file", []),
    ],
)
def test_what_is_wrong_in_a_profile_is_named(tmp_path, text, code, names):
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with raises(ConfigError, code, str(path), *names):
        load_profile(path)


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_profiles_of_the_repository_are_valid(path):
    assert load_profile(path).max_parallel >= 1


def test_a_stage_has_its_own_values_and_else_those_of_gpu_or_cpu(tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text(
        "gpu: {partition: gpu, gpus: 1, cores: 8, extra: {constraint: a100, comment: ours}}\n"
        "stages: {encode: {partition: h200, timeout_min: 30, extra: {constraint: h200}}, driver: {account: free}}\n"
    )
    profile = load_profile(path)
    encode, match = profile.for_stage("encode/builtin", True), profile.for_stage("match", True)
    assert (encode.partition, encode.cores, encode.gpus, encode.timeout_min) == ("h200", 8, 1, 30)
    assert encode.extra == {"constraint": "h200", "comment": "ours"}
    assert (match.partition, match.timeout_min, match.extra["constraint"]) == ("gpu", 240, "a100")
    assert profile.for_stage("driver", False).account == "free"
    assert profile.for_stage("write", False) == profile.cpu


def test_several_gpus_of_a_rank_are_refused(tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text("gpu: {gpus: 8}\n")
    with raises(ConfigError, "bad_config_value", "gpus is 8", "max_ranks"):
        load_profile(path)


def test_a_task_knows_its_next_unit_and_has_the_cores_that_it_asked_for(tmp_path, monkeypatch):
    stage = gpu_faults.LookingAhead(tmp_path, units=3)
    read_or_make_plan(stage, restart=False)
    make_fence(stage)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    monkeypatch.setattr(processes, "_own_cores", None)
    assert make_task(stage, 0, [0, 1, 2])() == 3
    assert stage.marked("cores") == ["1"]
    assert stage.marked("expected") == ["1", "2", "none"]

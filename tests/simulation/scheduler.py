"""A simulated SLURM: what ``sharmill.executors.slurm.scheduler`` asks for, with the faults that a real one has.

Jobs wait in the queue, begin on a node, and run what submitit would run in them, with its handlers of signals. They are
preempted, reach their time limits, lose their nodes, are requeued and cancelled as SLURM 22.05 and submitit 1.5 do it.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from submitit.core.utils import FailedJobError, UncompletedJobError

from sharmill.executors.slurm.chain_state import ChainState
from sharmill.executors.slurm.scheduler import JobRequest
from simulation.jobs import SimJob, State
from simulation.kernel import Kernel
from simulation.tasks import SimProcess

_KILL_WAIT = 30.0
_MAX_ARRAY_SIZE = 1001


def shell_notes(status: int, *, is_told: bool) -> bool:
    """Return True if the shell of a watcher job notes the failure of its Python.

    SIGTERM reaches the shell too, which ends at once: with the status of the line before, that was well.
    """
    return status not in (0, 255) and not is_told


@dataclass
class Scheduler:
    """The controller and the nodes.

    Attributes:
        name: of the cluster.
        away_until: nobody answers before.
        answers_lost: so many of the next orders are carried out and not answered.
        max_jobs: most jobs in the queue, as MaxSubmitJobs.
        queue_seconds: mean wait of a job that may begin.
        lost_nodes: nodes that the controller takes for dead.
        broken: roles of jobs that do not get as far as their work.
        next_lives_for: so many file operations the next job lives for; None for no limit.
        on_watcher_killed: called when a signal has ended a watcher job.
        on_submit: called with the comment of jobs before they are taken into the queue.
    """

    kernel: Kernel
    name: str
    nodes: Sequence[str] = ("n1", "n2", "n3")
    away_until: float = 0.0
    answers_lost: int = 0
    max_jobs: int = 100
    queue_seconds: float = 20.0
    jobs: dict[str, SimJob] = field(default_factory=dict)
    lost_nodes: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    next_lives_for: int | None = None
    on_submit: Callable[[str], None] = lambda comment: None
    on_watcher_killed: Callable[[], None] = lambda: None
    last_number: int = 100

    # What ``sharmill.executors.slurm.scheduler`` has.

    def is_here(self, command: str) -> bool:
        return True

    def failed_job_error(self) -> type[Exception]:
        return FailedJobError

    def submit(self, request: JobRequest, tasks: Sequence[Callable[[], Any]]) -> list[str]:
        """Take a job or an array into the queue."""
        payloads = [pickle.dumps(task) for task in tasks]
        self.kernel.wait(self.kernel.random.uniform(0.05, 1.0))
        if self.kernel.now < self.away_until:
            self.kernel.wait(10.0)
            raise FailedJobError("sbatch: error: Batch job submission failed: Unable to contact slurm controller")
        if len(self.queue()) + len(tasks) > self.max_jobs:
            raise FailedJobError("sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed")
        self.on_submit(request.parameters["additional_parameters"]["comment"])
        self.last_number += 1
        array = self.last_number
        ids = [f"{array}_{index}" for index in range(len(tasks))] if len(tasks) > 1 else [str(array)]
        for job_id, payload in zip(ids, payloads, strict=True):
            number = array if job_id == ids[-1] else self._next_number()
            dependency = request.parameters.get("dependency", "")
            job = SimJob(job_id, number, request, payload, countdown=request.max_requeues, dependency=dependency)
            self.jobs[job_id] = job
        self.kernel.note(
            f"submitted {', '.join(ids)}: {self.jobs[ids[0]].role} {request.parameters.get('dependency', '')}"
        )
        self._begin_soon()
        if self._loses_answer():
            self.kernel.wait(10.0)
            raise FailedJobError("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
        return ids

    def run(self, command: Sequence[str], timeout: float) -> str:
        """Answer squeue, scancel and scontrol."""
        self.kernel.wait(self.kernel.random.uniform(0.02, 0.5))
        if self.kernel.now < self.away_until:
            self.kernel.wait(min(10.0, timeout))
            says = f"{command[0]}: error: Unable to contact slurm controller (connect failure)"
            raise subprocess.CalledProcessError(1, list(command), stderr=says)
        printed = self._carry_out(command)
        if command[0] == "scancel" and self._loses_answer():
            self.kernel.wait(timeout)
            raise subprocess.TimeoutExpired(list(command), timeout)
        return printed

    def _carry_out(self, command: Sequence[str]) -> str:
        match list(command):
            case ["squeue", "--noheader", "--me", *_]:
                waiting = [job for job in self.queue() if job.state == "PENDING"]
                return "".join(f"{job.id}|{job.request.folder}/script.sh|{job.comment}\n" for job in waiting)
            case ["squeue", *_]:
                return "".join(f"{job.id}|{job.state}|{self._reason(job)}|bob|{job.comment}\n" for job in self.queue())
            case ["scancel", "--state=PENDING", array]:
                for job in self._tasks_of([array]):
                    if job.state == "PENDING":
                        self._finish(job, "CANCELLED")
            case ["scancel", *ids]:
                for job in self._tasks_of(ids):
                    self.cancel(job)
            case ["scontrol", "requeue", job_id]:
                self.requeue(self.jobs[job_id])
            case ["scontrol", "show", "config"]:
                return f"ClusterName             = {self.name}\nMaxArraySize            = {_MAX_ARRAY_SIZE}\n"
            case _:
                raise AssertionError(f"unknown command: {command}")
        return ""

    def _loses_answer(self) -> bool:
        if not self.answers_lost:
            return False
        self.answers_lost -= 1
        self.kernel.note("the answer is lost")
        return True

    # The queue.

    def queue(self) -> list[SimJob]:
        """Return the jobs that are not over."""
        return [job for job in self.jobs.values() if not job.is_over]

    def _next_number(self) -> int:
        self.last_number += 1
        return self.last_number

    def _tasks_of(self, ids: Sequence[str]) -> list[SimJob]:
        return [job for job in self.queue() if job.id in ids or job.id.split("_")[0] in ids]

    def _reason(self, job: SimJob) -> str:
        if job.state != "PENDING":
            return "None"
        return "Priority" if self._may_begin(job) else "Dependency"

    def _may_begin(self, job: SimJob) -> bool | None:
        """Return None where it never will."""
        kind, *ids = job.dependency.split(":")
        if not kind:
            return True
        before = [other for other in self.jobs.values() if other.id.split("_")[0] in ids]
        if kind == "afterok" and any(other.is_over and other.state != "COMPLETED" for other in before):
            return None
        if not all(other.is_over for other in before):
            return False
        if kind == "afternotok" and all(other.state == "COMPLETED" for other in before):
            return None
        return True

    def _begin_soon(self) -> None:
        for job in self.queue():
            if job.state != "PENDING" or job.is_scheduled:
                continue
            may = self._may_begin(job)
            if may is None:
                self._finish(job, "CANCELLED")
            elif may:
                job.turn += 1
                job.is_scheduled = True
                delay = self.kernel.random.expovariate(1.0 / self.queue_seconds)
                self.kernel.at(delay, partial(self._begin, job, job.turn))

    def _begin(self, job: SimJob, turn: int) -> None:
        if job.state != "PENDING" or job.turn != turn:
            return
        if self.kernel.now < self.away_until:
            self.kernel.at(self.away_until - self.kernel.now + 1.0, partial(self._begin, job, turn))
            return
        up = [node for node in self.nodes if node not in self.lost_nodes]
        job.node, job.state = self.kernel.random.choice(up), "RUNNING"
        self.start_process(job)
        self.kernel.at(job.limit, partial(self._time_out, job, turn))
        if job.role == "rank":
            # It comes up to a minute early.
            early = float(job.parameters["signal_delay_s"]) + self.kernel.random.uniform(0.0, 60.0)
            self.kernel.at(max(job.limit - early, 1.0), partial(self._warn, job, turn))

    def start_process(self, job: SimJob) -> None:
        """Start what a job runs; for a second time where a node starts it twice."""
        environ = {
            "SLURM_JOB_ID": str(job.number),
            "SLURM_JOB_NAME": job.role,
            "SLURM_RESTART_COUNT": str(job.restarts),
            "SLURM_MEM_PER_NODE": "4096",
        }
        if "_" in job.id:
            array, task = job.id.split("_")
            environ |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task}
        job.process = self.kernel.spawn(
            f"{job.role} {job.id}", job.node, partial(self._submitit, job, job.turn), environ=environ,
            on_end=partial(self._process_ended, job, job.turn),
        )  # fmt: skip
        job.process.operations_left, self.next_lives_for = self.next_lives_for, None

    # What runs in a job.

    def _submitit(self, job: SimJob, turn: int) -> None:
        """Do what submitit does in a job's process."""
        kernel = self.kernel
        kernel.sleep(kernel.random.uniform(0.5, 8.0))
        if job.role in self.broken:
            sys.exit(1)
        with kernel.outside():
            function = pickle.loads(job.payload)
        began, owner = kernel.now, kernel.running
        # Driver jobs run without srun: no step of theirs gets a signal but those that all processes get.
        owner.handlers[signal.SIGTERM] = lambda number, frame: None

        def leave(number: int, frame: Any) -> None:
            timed_out = kernel.now - began >= min(job.limit * 0.8, job.limit - 600.0)
            countdown = job.countdown - timed_out
            if hasattr(function, "checkpoint"):
                job.payload = pickle.dumps(function.checkpoint().function)
            elif timed_out:
                raise UncompletedJobError("timed-out and not checkpointable")
            if countdown < 0:
                raise UncompletedJobError("timed-out too many times")
            job.countdown = countdown
            self.requeue(job)
            sys.exit(-1)

        owner.handlers[signal.SIGUSR2] = leave
        function()

    # The end of jobs.

    def cancel(self, job: SimJob) -> None:
        """End a job as scancel does."""
        if job.state == "PENDING":
            self._finish(job, "CANCELLED")
        elif job.state == "RUNNING":
            self._end_processes(job, "CANCELLED")

    def requeue(self, job: SimJob) -> None:
        """End a job, and put it back into the queue."""
        if job.state == "RUNNING":
            self.kernel.note(f"{job.id} is requeued")
            job.is_requeued = True
            self._end_processes(job, "CANCELLED")

    def preempt(self, job: SimJob, *, with_warning: bool) -> None:
        """Take a running job's node away."""
        if job.state == "RUNNING" and job.process is not None:
            self.kernel.note(f"{job.id} is preempted {'with' if with_warning else 'without'} a warning")
            if with_warning and job.role == "rank":
                self.kernel.send(job.process, signal.SIGUSR2)
                self.kernel.at(_KILL_WAIT, partial(self._preempt_now, job, job.turn))
            else:
                self.requeue(job)

    def _preempt_now(self, job: SimJob, turn: int) -> None:
        if job.turn == turn:
            self.requeue(job)

    def _warn(self, job: SimJob, turn: int) -> None:
        if job.turn == turn and job.state == "RUNNING" and job.process is not None:
            self.kernel.note(f"{job.id} is near its time limit")
            self.kernel.send(job.process, signal.SIGUSR2)

    def _time_out(self, job: SimJob, turn: int) -> None:
        if job.turn == turn and job.state == "RUNNING":
            self.kernel.note(f"{job.id} has reached its time limit")
            self._end_processes(job, "TIMEOUT")

    def _end_processes(self, job: SimJob, state: State) -> None:
        job.state = "COMPLETING"
        running = job.process
        assert running is not None
        running.on_end = lambda ended: None
        job.turn += 1
        self.kernel.note(f"{job.id} is to end")
        for one in (running, *running.children):
            self.kernel.send(one, signal.SIGTERM)
        if not running.is_dead:
            self.kernel.at(_KILL_WAIT, partial(self.kernel.kill, running))

        def look() -> None:
            if running.is_dead:
                self._after_processes(job, state, running)
            else:
                self.kernel.at(1.0, look)

        self.kernel.at(self.kernel.random.uniform(0.1, 2.0), look)

    def lose_node(self, node: str, *, is_dead: bool) -> None:
        """Lose a node: it is dead, or only out of reach, and what runs there goes on while its jobs begin elsewhere."""
        if len(self.nodes) - len(self.lost_nodes) < 2 or node in self.lost_nodes:
            return
        self.kernel.note(f"node {node} is {'dead' if is_dead else 'out of reach'}")
        self.lost_nodes.add(node)
        lost = [job for job in self.queue() if job.node == node and job.state in ("RUNNING", "COMPLETING")]
        on_node = [one for one in self.kernel.alive() if one.host == node]
        for one in on_node:
            one.on_end = lambda ended: None
        if is_dead:
            for one in on_node:
                self.kernel.kill(one)
        for job in lost:
            job.turn += 1
            job.state = "COMPLETING"
            self.kernel.at(30.0, partial(self.back_in_queue, job))
        # What still runs is ended when the node comes back.
        self.kernel.at(self.kernel.random.uniform(60.0, 900.0), partial(self._node_is_back, node, on_node))

    def _node_is_back(self, node: str, before: Sequence[SimProcess]) -> None:
        self.kernel.note(f"node {node} is back")
        for one in before:
            self.kernel.kill(one)
        self.lost_nodes.discard(node)

    def _process_ended(self, job: SimJob, turn: int, ended: SimProcess) -> None:
        if job.turn == turn and job.state == "RUNNING" and job.process is ended:
            self._after_processes(job, "COMPLETED" if ended.status == 0 else "FAILED", ended)

    def _after_processes(self, job: SimJob, state: State, ended: SimProcess) -> None:
        assert ended.status is not None
        if job.second is not None:
            self.kernel.at(4 * _KILL_WAIT, partial(self.kernel.kill, job.second))
        if job.role == "watcher" and (ended.status < 0 or ended.told_at <= self.kernel.now) and not job.is_requeued:
            self.on_watcher_killed()
        if job.role == "watcher" and shell_notes(ended.status, is_told=ended.told_at <= self.kernel.now):
            self._note_failure(job)
        if job.is_requeued:
            self.back_in_queue(job)
        else:
            self._finish(job, state)

    def back_in_queue(self, job: SimJob) -> None:
        """Put a job whose processes are gone, or out of reach, back into the queue."""
        job.is_requeued, job.is_scheduled, job.state = False, False, "PENDING"
        job.restarts += 1
        self._begin_soon()

    def _finish(self, job: SimJob, state: State) -> None:
        job.state = state
        self.kernel.note(f"{job.id} ({job.role}) is {state}")
        self._begin_soon()

    def _note_failure(self, job: SimJob) -> None:
        """Do what the shell of a watcher job does where its Python ended badly."""
        path = Path(job.request.folder).parent / "chain.json"
        with self.kernel.outside():
            if b'"state":"waiting"' in path.read_bytes():
                state = ChainState(state="failed", message="the watcher job ended badly")
                path.write_bytes(msgspec.json.encode(state))
                self.kernel.note("the shell of the watcher job notes its failure")

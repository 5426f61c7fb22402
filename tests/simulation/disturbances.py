"""Disturbances of a simulated SLURM, by name: what becomes of jobs, nodes and the controller, and what people do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from simulation.invariants import planned_option

if TYPE_CHECKING:
    from simulation.world import World


def _preempt(world: World) -> None:
    if (job := world.choose_job()) is not None:
        world.excuses += 1
        world.cluster.preempt(job, with_warning=world.kernel.random.random() < 0.5)


def _lose_node(world: World) -> None:
    world.excuses += 3
    world.may_double = world.may_go_on = True
    draw = world.kernel.random
    world.cluster.lose_node(draw.choice(list(world.cluster.nodes)), is_dead=draw.random() < 0.5)


def _kill(world: World) -> None:
    if (job := world.choose_job()) is not None and job.process is not None:
        world.excuses += 1
        world.kernel.kill(job.process)


def _kill_at_operation(world: World) -> None:
    if (job := world.choose_job()) is not None and job.process is not None:
        world.excuses += 1
        job.process.operations_left = world.kernel.random.randrange(60)


def _kill_next(world: World) -> None:
    """Kill the job that begins next, at one of its file operations."""
    world.excuses += 1
    world.cluster.next_lives_for = world.kernel.random.randrange(300)


def _controller_away(world: World) -> None:
    world.cluster.away_until = world.kernel.now + world.kernel.random.choice([20.0, 200.0, 4000.0])


def _lose_answers(world: World) -> None:
    world.may_double = True
    world.cluster.answers_lost += world.kernel.random.choice([1, 1, 2])


def _few_jobs(world: World) -> None:
    world.cluster.max_jobs = world.kernel.random.choice([1, 3])

    def allow() -> None:
        world.cluster.max_jobs = 100

    world.kernel.at(world.kernel.random.choice([60.0, 2000.0]), allow)


def _start_twice(world: World) -> None:
    if (job := world.choose_job()) is not None and job.second is None:
        world.excuses += 1
        world.may_double = world.may_go_on = True
        first = job.process
        world.cluster.start_process(job)
        job.process, job.second = first, job.process


def _kill_worker(world: World) -> None:
    """Kill a worker of a driver job, or of a run without a cluster, as the kernel does when memory runs out."""
    workers = [one for one in world.kernel.alive() if one.dies_with_parent]
    if workers:
        world.kernel.kill(world.kernel.random.choice(workers))


def _requeue(world: World) -> None:
    if (job := world.choose_job()) is not None:
        world.excuses += 1
        world.cluster.requeue(job)


def _cancel_job(world: World) -> None:
    if (job := world.choose_job()) is not None:
        world.excuses += 1
        # Nobody goes on in the place of a watcher job.
        world.is_gentle &= job.role != "watcher"
        world.cluster.cancel(job)


def _cancel_ranks(world: World) -> None:
    for job in world.running_jobs():
        if job.role == "rank":
            world.excuses += 1
            world.cluster.cancel(job)


def _jobs_cannot_start(world: World) -> None:
    """Break the environment of jobs: none gets as far as the work.

    All may have ended before a slow submission notes that it waits for them; ``status`` says that they are gone.
    """
    world.is_gentle, world.is_deserted = False, True
    world.cluster.broken |= {"rank", "driver", "watcher"}


def _ranks_cannot_start(world: World) -> None:
    """Break that of ranks, as a container that is gone does: their stage ends after some rounds."""
    world.is_gentle = False
    world.cluster.broken.add("rank")


def _submit_again(world: World) -> None:
    world.start("second submission", "login2", partial(world.submit, world.dataset))


def _submit_restart(world: World) -> None:
    """Submit with ``--restart``, which begins anew where no jobs are left, by another configuration as often as not."""
    option = world.kernel.random.choice([planned_option(world.dataset), world.dataset.option + 7])
    dataset = replace(world.dataset, option=option)
    world.start("submission --restart", "login2", partial(world.submit, dataset, restart=True))


def _submit_other_run(world: World) -> None:
    """Submit another run with the same dataset directory, whatever this one has come to."""
    other = replace(world.dataset, run_name="other_run", option=3, behaviour="")
    if len(world.runs) == 1:
        world.runs.append(other)
    world.start("submission of another run", "login2", partial(world.submit, other))


def _submit_on_another_cluster(world: World) -> None:
    world.start("submission elsewhere", "login elsewhere", partial(world.submit, world.dataset))


def _restart_here(world: World) -> None:
    run = partial(world.run_here, world.dataset.option, take_over=False)
    world.start("sharmill run --restart", "login2", run)


def _take_over(world: World) -> None:
    """Restart with another configuration where the controller does not answer, so that nobody can be asked."""
    world.is_gentle = False
    world.may_double = world.may_go_on = True
    world.cluster.away_until = max(world.cluster.away_until, world.kernel.now + 200.0)
    world.start("sharmill run --restart --take-over", "login2", partial(world.run_here, 2, take_over=True))


def _cancel(world: World) -> None:
    world.is_gentle = False
    world.start("sharmill cancel", world.kernel.random.choice(["login", "login2"]), world.cancel)


def _cancel_out_of_reach(world: World) -> None:
    """Cancel soon after the controller has lost sight of the node of a job, which goes on."""
    if (job := world.choose_job()) is not None:
        world.excuses += 3
        world.may_double = world.may_go_on = True
        (world.cluster if job in world.cluster.queue() else world.elsewhere).lose_node(job.node, is_dead=False)
        world.kernel.at(world.kernel.random.uniform(0.0, 30.0), partial(_cancel, world))


DISTURBANCES: dict[str, Callable[[World], None]] = {
    "preemption": _preempt,
    "node lost": _lose_node,
    "kill -9": _kill,
    "kill -9 at an operation": _kill_at_operation,
    "kill -9 of the next job": _kill_next,
    "controller away": _controller_away,
    "answers lost": _lose_answers,
    "MaxSubmitJobs": _few_jobs,
    "started twice": _start_twice,
    "worker killed": _kill_worker,
    "requeue": _requeue,
    "scancel of a job": _cancel_job,
    "ranks cancelled": _cancel_ranks,
    "jobs cannot start": _jobs_cannot_start,
    "ranks cannot start": _ranks_cannot_start,
    "second submission": _submit_again,
    "submission --restart": _submit_restart,
    "submission of another run": _submit_other_run,
    "submission on another cluster": _submit_on_another_cluster,
    "run --restart": _restart_here,
    "run --restart --take-over": _take_over,
    "cancel": _cancel,
    "cancel of what cannot be reached": _cancel_out_of_reach,
}

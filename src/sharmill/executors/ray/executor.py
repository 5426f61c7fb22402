"""The Ray executor: ranks are actors on the nodes of a cluster.

Units are handed out one by one to whichever actor is free. An actor or a node that dies costs only the attempt at the
unit that it had: Ray restarts nothing, the driver asks for a fresh actor. An actor whose GPU cannot be used is kept
idle, so that Ray gives that GPU to no other, and so is one on a node that does not see the shared disk. As long as
units wait it asks for more actors than there is room for, so that nodes that join later are used and an autoscaler sees
the demand.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import sharmill
from sharmill.config import Config
from sharmill.engine.attempts import MAX_ATTEMPTS
from sharmill.engine.fence import require_current
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import Finished
from sharmill.engine.progress import INTERVAL_SECONDS, mark_ended, read_progress
from sharmill.engine.rejects import RejectLimit
from sharmill.engine.stage import Stage
from sharmill.engine.unit import Unit
from sharmill.errors import DeviceError, FatalError
from sharmill.executors.driven_rank import FINAL_CODES, Answer, DrivenRank, FailedStarts, Ready
from sharmill.executors.logs import logging_to
from sharmill.executors.ray import actors
from sharmill.executors.ray.actor import ActorStart, RankActor
from sharmill.executors.ray.actors import ActorLost, ActorUnreachable
from sharmill.executors.ray.cluster import RankNeeds, check_paths, connect, in_working_dir_copy
from sharmill.executors.unit_queue import UnitQueue
from sharmill.ports import clock
from sharmill.staging import remove_dead_attempts, token_staging

log = logging.getLogger(__name__)

_SECONDS_TO_LEAVE = 10.0
_SECONDS_BETWEEN_LOOKS = 2.0
# A node on which actors cannot start would otherwise be tried without a pause.
_SECONDS_BETWEEN_BAD_STARTS = 30.0
_SECONDS_UNTIL_WARNING = 60.0
_SECONDS_FOR_OTHER_NODES = 600.0


@dataclass(frozen=True)
class RayExecutor:
    """Runs a stage on at most ``workers`` actors of a Ray cluster (``auto``: as many as there is room for).

    ``cores`` are set aside for each; a stage that uses GPUs gets one GPU as well, where the cluster has any (``device:
    auto``) or in any case (``cuda``, for clusters whose GPU nodes come only when they are asked for).
    """

    workers: int | str = "auto"
    address: str = "auto"
    cores: int = 1
    device: str = "auto"

    @classmethod
    def from_config(cls, config: Config) -> RayExecutor:
        """Return the executor that a configuration asks for.

        Raises:
            ConfigError: relative paths would lead into a folder that Ray removes, or Ray is not installed.
        """
        actors.import_ray()
        check_paths(config)
        wanted = config.executor
        return cls(workers=wanted.workers, address=wanted.address, cores=wanted.cores, device=wanted.device)

    def run(self, stage: Stage, units: Sequence[Unit], rejects: RejectLimit, listener: Listener) -> Finished:
        """Do the units; see ``engine.run.Executor``."""
        connect(self.address)
        queue = UnitQueue(units, rejects, listener)
        try:
            with logging_to(stage.dir.driver_log):
                pool = _Pool(stage, self._needs(stage), self.workers, queue, listener)
                pool.run()
        finally:
            # No actor is left that could do it for itself.
            remove_dead_attempts(stage.root, stage.token)
            mark_ended(stage.dir.progress)
        return Finished(queue.failures, [str(error) for error in pool.given_up.values()], on_other_nodes=True)

    def _needs(self, stage: Stage) -> RankNeeds:
        if stage.uses_gpu and self.device != "cpu":
            on_gpu = RankNeeds(self.cores, gpus=1)
            if self.device == "cuda" or on_gpu.capacity() > 0:
                return on_gpu
        return RankNeeds(self.cores, gpus=0)


@dataclass(kw_only=True)
class _Rank(DrivenRank):
    """An actor. ``call`` is the reference of what it does: its set-up or a unit.

    ``out_of_reach`` is the error that came instead of its answer; ``call`` then asks whether it still is there.
    """

    actor: Any
    call: Any
    out_of_reach: ActorUnreachable | None = None


@dataclass
class _Pool:
    """The driver's side: asks for actors, hands out units, handles the answers.

    Attributes:
        given_up: by place, why a GPU or a node is given up.
        holding: the actors that keep these GPUs, and the cores of these nodes, from others.
    """

    stage: Stage
    needs: RankNeeds
    workers: int | str
    queue: UnitQueue
    listener: Listener
    num_loading: int = 0
    ranks: dict[int, _Rank] = field(default_factory=dict)
    leaving: list[_Rank] = field(default_factory=list)
    given_up: dict[str, DeviceError] = field(default_factory=dict)
    holding: list[_Rank] = field(default_factory=list)
    failed_starts: FailedStarts = field(default_factory=FailedStarts)
    next_start: float = 0.0
    next_progress: float = 0.0
    was_ready: bool = False
    all_held_since: float = float("inf")

    def __post_init__(self) -> None:
        self._pickled = pickle.dumps(self.stage)
        self._began = clock.monotonic()
        self._capacity_as_of = (float("-inf"), 0)

    def run(self) -> None:
        try:
            while self.queue or any(rank.unit or rank.following for rank in self.ranks.values()):
                self._ask_for_ranks()
                self._require_usable_nodes()
                self._report_progress()
                self._hand_out()
                self._dismiss_idle()
                self._poll_all()
            self._dismiss(self.ranks.values())
            if farewells := [rank.call for rank in self.leaving]:
                actors.wait(farewells, len(farewells), _SECONDS_TO_LEAVE)
        finally:
            for rank in [*self.ranks.values(), *self.leaving, *self.holding]:
                actors.kill(rank.actor)

    def _limit(self) -> int:
        """Return how many actors there may be: one more than there is room for where the configuration has no number.

        That one waits for nodes that join, and for others on the cluster to end.
        """
        return self._capacity() + 1 if self.workers == "auto" else int(self.workers)

    def _capacity(self) -> int:
        """Return how many actors have room on the present nodes, as it was some seconds ago."""
        as_of, capacity = self._capacity_as_of
        if clock.monotonic() - as_of > _SECONDS_BETWEEN_LOOKS:
            capacity = self.needs.capacity()
            self._capacity_as_of = (clock.monotonic(), capacity)
        return capacity

    def _ask_for_ranks(self) -> None:
        if clock.monotonic() < self.next_start:
            return
        useful = len(self.queue) + sum(rank.unit is not None for rank in self.ranks.values())
        for _ in range(min(useful, self._limit()) - len(self.ranks)):
            self._start(next(number for number in count() if number not in self.ranks))

    def _start(self, number: int) -> None:
        start = ActorStart(
            stage=self._pickled,
            number=number,
            device=self.needs.device,
            cores=self.needs.cores,
            folder=None if in_working_dir_copy() else Path.cwd(),
            must_exist=(self.stage.dir.ranks, token_staging(self.stage.root, self.stage.token)),
            log=self.stage.dir.rank_log(number),
            version=sharmill.__version__,
            given_up=frozenset(self.given_up),
        )
        actor = actors.start(RankActor, start, cores=self.needs.cores, gpus=self.needs.gpus)
        self.ranks[number] = _Rank(number=number, actor=actor, call=actors.call(actor, "set_up"))

    def _report_progress(self) -> None:
        """Tell the listener what the progress records say; an actor that does a unit cannot be asked."""
        # One that waits for room is no news where others are at work.
        loading = 0 if any(rank.ready for rank in self.ranks.values()) else len(self.ranks)
        if loading != self.num_loading:
            self.num_loading = loading
            self.listener.loading(loading)
        if clock.monotonic() < self.next_progress:
            return
        self.next_progress = clock.monotonic() + INTERVAL_SECONDS
        for record in read_progress(self.stage.dir.progress):
            rank = self.ranks.get(record.rank)
            if rank is not None and rank.unit is not None and record.unit == rank.unit.index:
                self.queue.advanced(rank.unit, record.unit_cost_done)

    def _hand_out(self) -> None:
        set_aside_beyond = len(self.ranks) if self.stage.looks_ahead else None
        for rank in self.ranks.values():
            if rank.ready and rank.unit is None and rank.take_unit(self.queue, set_aside_beyond) is not None:
                rank.call = actors.call(rank.actor, "run", rank.unit, rank.following)

    def _dismiss_idle(self) -> None:
        """End the actors without a unit when none waits, but the first, which stays in case a unit fails."""
        if not self.queue:
            idle = sorted((rank for rank in self.ranks.values() if rank.unit is None), key=lambda rank: not rank.ready)
            self._dismiss(idle[1:])

    def _poll_all(self) -> None:
        calls = {rank.call: rank for rank in self.ranks.values() if rank.unit or not rank.ready}
        if not calls:
            clock.sleep(_SECONDS_BETWEEN_LOOKS)  # until the next start
            return
        answered = actors.wait(list(calls), 1, _SECONDS_BETWEEN_LOOKS)
        if answered:
            answered = actors.wait(list(calls), len(calls), 0.0)
        elif not any(rank.ready for rank in self.ranks.values()):
            self._warn_of_no_room()
        for call in answered:
            self._poll(calls[call], call)

    def _poll(self, rank: _Rank, call: Any) -> None:
        try:
            answer: Answer = actors.answer(call)
        except ActorUnreachable as error:
            self._ask_again(rank, error)
            return
        except ActorLost as error:
            self._remove_dead(rank, error)
            return
        if rank.out_of_reach is not None:
            # It is there again; its answer is lost.
            self._remove_dead(rank, rank.out_of_reach)
            return
        try:
            rank.handle_answer(answer, self.queue)
        except DeviceError as error:
            self._remove_unusable(rank, error)
            return
        if isinstance(answer, Ready):
            self.failed_starts.reset()
            self.was_ready = True
        if rank.needs_replacing():
            rank.give_back(self.queue)
            if rank.is_broken:
                # It would perhaps never end by itself, and keep its GPU.
                actors.kill(rank.actor)
                del self.ranks[rank.number]
            else:
                self._dismiss([rank])

    def _remove_unusable(self, rank: _Rank, error: DeviceError) -> None:
        """Take away an actor that cannot use its GPU or node; after some of them, the last keeps its place."""
        # To a rank, a plan that has been replaced and a disk that has gone from its node look the same.
        require_current(self.stage)
        log.warning("rank %d: %s", rank.number, error)
        rank.give_back(self.queue)
        del self.ranks[rank.number]
        rank.report_lost_unit(self.queue, str(error), self.stage, excused=True)
        self.failed_starts.add(str(error), error.place, final=error.code in FINAL_CODES)
        if not self.failed_starts.too_many(error.place):
            actors.kill(rank.actor)
            return
        self.holding.append(rank)
        if error.place not in self.given_up:
            self.given_up[error.place] = error
            log.error("%s is given up", error.place)

    def _require_usable_nodes(self) -> None:
        """Raise the reason of the last that was given up where nothing else is left, and nothing comes in its place."""
        if not self._nothing_is_usable():
            self.all_held_since = float("inf")
            return
        now = clock.monotonic()
        self.all_held_since = min(self.all_held_since, now)
        # Where ranks have worked, the nodes that are lost may be replaced, as spot instances are.
        patience = _SECONDS_FOR_OTHER_NODES if self.was_ready else 0.0
        if now - self.all_held_since >= patience:
            self._forget_lost_holders()
            self._capacity_as_of = (float("-inf"), 0)
            if self._nothing_is_usable():
                raise list(self.given_up.values())[-1]

    def _nothing_is_usable(self) -> bool:
        if not self.holding or any(rank.ready for rank in self.ranks.values()):
            return False
        return len(self.holding) >= self._capacity()

    def _forget_lost_holders(self) -> None:
        """Forget actors that kept GPUs or nodes which are gone by now."""
        calls = {actors.call(rank.actor, "answer"): rank for rank in self.holding}
        for call in actors.wait(list(calls), len(calls), _SECONDS_TO_LEAVE):
            try:
                actors.answer(call)
            except ActorLost:
                self.holding.remove(calls[call])

    def _ask_again(self, rank: _Rank, error: ActorUnreachable) -> None:
        """Ask an actor out of reach for an answer: Ray does not know yet whether it or its node has died."""
        if rank.out_of_reach is not None:
            self._remove_dead(rank, error)
            return
        rank.out_of_reach = error
        rank.call = actors.call(rank.actor, "answer")

    def _remove_dead(self, rank: _Rank, error: ActorLost) -> None:
        # An actor that cannot be reached may still run. It must not go on beside the one that takes its place.
        actors.kill(rank.actor)
        rank.give_back(self.queue)
        del self.ranks[rank.number]
        how = str(error)
        log.warning("rank %d: %s", rank.number, how, exc_info=error)
        # Ray goes on placing actors on a node for some seconds after it has died.
        if not rank.ready and not error.excused:
            self._count_failed_start(how)
        rank.report_lost_unit(self.queue, how, self.stage, error.details, excused=error.excused)

    def _count_failed_start(self, how: str) -> None:
        """Count it, and give up only when no actor is left: one node may be broken, while others are loading."""
        failed_starts = self.failed_starts.add(how)
        if not self.failed_starts.too_many():
            return
        self.next_start = clock.monotonic() + _SECONDS_BETWEEN_BAD_STARTS
        all_failed = not self.ranks or failed_starts >= MAX_ATTEMPTS * self._limit()
        if all_failed and not any(rank.ready for rank in self.ranks.values()):
            raise FatalError(
                f"{self.stage.name}: actors cannot start: {how}; see {self.stage.dir.logs}. "
                "Every node needs sharmill and what the stage imports",
                code="no_ranks",
            )

    def _dismiss(self, ranks: Iterable[_Rank]) -> None:
        """Let actors that wait leave by themselves; those that are loading or wait for room are not waited for."""
        for rank in list(ranks):
            del self.ranks[rank.number]
            if rank.ready:
                rank.call = actors.call(rank.actor, "close")
                self.leaving.append(rank)
            else:
                actors.kill(rank.actor)

    def _warn_of_no_room(self) -> None:
        if clock.monotonic() - self._began > _SECONDS_UNTIL_WARNING:
            self._began = float("inf")
            log.error("%s: no actor is ready after %.0f s: they are loading (see %s), or the cluster has no room for "
                      "them; each needs %d cores and %d GPUs, and there is room for %d; waiting", self.stage.name,
                      _SECONDS_UNTIL_WARNING, self.stage.dir.logs, self.needs.cores, self.needs.gpus,
                      self.needs.capacity())  # fmt: skip

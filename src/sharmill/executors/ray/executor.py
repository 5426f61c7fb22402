"""The Ray executor: ranks are actors on the nodes of a cluster.

Each is a supervisor of one rank, which takes its units itself. An actor or a node that dies costs only the attempt at
the unit that it had: Ray restarts nothing, the driver asks for a fresh actor. An actor whose GPU cannot be used is kept
idle, so that Ray gives that GPU to no other, and so is one on a node that does not see the shared disk. As long as
units are missing it asks for one more actor than there is room for, so that nodes that join later are used and an
autoscaler sees the demand.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import sharmill
from sharmill.config import Config
from sharmill.engine.attempts import MAX_FAILURES
from sharmill.engine.fence import is_current, require_current
from sharmill.engine.follow import Follower
from sharmill.engine.listener import Listener
from sharmill.engine.outcomes import Finished
from sharmill.engine.progress import mark_ended, read_progress
from sharmill.engine.run import Unlocked
from sharmill.engine.stage import Stage
from sharmill.engine.state import begin_round, end_round
from sharmill.engine.unit import Unit
from sharmill.errors import DeviceError, FatalError
from sharmill.executors.logs import logging_to
from sharmill.executors.ray import actors
from sharmill.executors.ray.actor import ActorStart, RankActor
from sharmill.executors.ray.actors import ActorLost, ActorUnreachable
from sharmill.executors.ray.cluster import RankNeeds, check_paths, connect, in_working_dir_copy
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
    waits: ClassVar[bool] = True

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

    def run(
        self, stage: Stage, units: Sequence[Unit], listener: Listener,
        unlocked: Unlocked = nullcontext,
    ) -> Finished:  # fmt: skip
        """Do the units; see ``engine.run.Executor``."""
        connect(self.address)
        needs = self._needs(stage)
        most = needs.capacity() or len(units) if self.workers == "auto" else int(self.workers)
        numbers = begin_round(stage, units, most)
        follower = Follower(stage, units, listener, join_seconds=stage.lease_seconds)
        pool = _Pool(stage, needs, self.workers, follower, numbers.start)
        try:
            with unlocked(), logging_to(stage.dir.driver_log):
                pool.run()
        except (FatalError, FileNotFoundError):
            # Another process may have finished the stage, or begun it anew.
            if is_current(stage):
                raise
        finally:
            end_round(stage)
            # No actor is left that could do it for itself.
            remove_dead_attempts(stage.root, stage.token)
            mark_ended(stage.dir.progress, pool.owners())
        outcome = pool.follower.outcome()
        given_up = [str(error) for error in pool.given_up.values()]
        return replace(outcome, given_up=given_up or outcome.given_up, on_other_nodes=True)

    def _needs(self, stage: Stage) -> RankNeeds:
        if stage.uses_gpu and self.device != "cpu":
            on_gpu = RankNeeds(self.cores, gpus=1)
            if self.device == "cuda" or on_gpu.capacity() > 0:
                return on_gpu
        return RankNeeds(self.cores, gpus=0)


@dataclass(kw_only=True)
class _Rank:
    """An actor. ``call`` is the reference of its work.

    ``out_of_reach`` is the error that came instead of its answer; ``call`` then asks whether it still is there.
    """

    number: int
    actor: Any
    call: Any
    out_of_reach: ActorUnreachable | None = None


@dataclass
class _Pool:
    """The driver's side: asks for actors as long as there is work, and keeps places that cannot be used from others.

    Attributes:
        given_up: by place, why a GPU or a node is given up.
        holding: the actors that keep these GPUs, and the cores of these nodes, from others.
    """

    stage: Stage
    needs: RankNeeds
    workers: int | str
    follower: Follower
    first_number: int = 0
    ranks: dict[int, _Rank] = field(default_factory=dict)
    given_up: dict[str, FatalError] = field(default_factory=dict)
    holding: list[_Rank] = field(default_factory=list)
    started: set[int] = field(default_factory=set)
    failed_starts: int = 0
    next_start: float = 0.0
    all_held_since: float = float("inf")

    def __post_init__(self) -> None:
        self._pickled = pickle.dumps(self.stage)
        self._began = time.monotonic()
        self._capacity_as_of = (float("-inf"), 0)

    def run(self) -> None:
        try:
            while not self.follower.look():
                self._ask_for_ranks()
                self._require_usable_nodes()
                self._poll_all()
            if calls := [rank.call for rank in self.ranks.values()]:
                actors.wait(calls, len(calls), _SECONDS_TO_LEAVE)
        finally:
            for rank in [*self.ranks.values(), *self.holding]:
                actors.kill(rank.actor)

    def owners(self, numbers: Iterable[int] | None = None) -> set[str]:
        """Return the owners of the records of ranks, by default of all that were started here."""
        among = {*self.started} if numbers is None else {*numbers}
        return {record.owner for record in read_progress(self.stage.dir.progress) if record.rank in among}

    def _limit(self) -> int:
        """Return how many actors there may be: one more than there is room for where the configuration has no number.

        That one waits for nodes that join, and for others on the cluster to end.
        """
        return self._capacity() + 1 if self.workers == "auto" else int(self.workers)

    def _capacity(self) -> int:
        """Return how many actors have room on the present nodes, as it was some seconds ago."""
        as_of, capacity = self._capacity_as_of
        if time.monotonic() - as_of > _SECONDS_BETWEEN_LOOKS:
            capacity = self.needs.capacity()
            self._capacity_as_of = (time.monotonic(), capacity)
        return capacity

    def _ask_for_ranks(self) -> None:
        if time.monotonic() < self.next_start:
            return
        for _ in range(min(self.follower.num_missing, self._limit()) - len(self.ranks)):
            # The slots of those that are held are out.
            taken = {*self.ranks, *(rank.number for rank in self.holding)}
            self._start(next(number for number in count(self.first_number) if number not in taken))

    def _start(self, number: int) -> None:
        start = ActorStart(
            stage=self._pickled,
            number=number,
            device=self.needs.device,
            cores=self.needs.cores,
            folder=None if in_working_dir_copy() else Path.cwd(),
            must_exist=(self.stage.dir.ranks, token_staging(self.stage.root, self.stage.token)),
            log=self.stage.dir.driver_log,
            version=sharmill.__version__,
            given_up=frozenset(self.given_up),
        )
        actor = actors.start(RankActor, start, cores=self.needs.cores, gpus=self.needs.gpus)
        self.started.add(number)
        self.ranks[number] = _Rank(number=number, actor=actor, call=actors.call(actor, "run"))

    def _poll_all(self) -> None:
        calls = {rank.call: rank for rank in self.ranks.values()}
        if not calls:
            time.sleep(_SECONDS_BETWEEN_LOOKS)  # until the next start
            return
        if answered := actors.wait(list(calls), 1, _SECONDS_BETWEEN_LOOKS):
            answered = actors.wait(list(calls), len(calls), 0.0)
        elif not self.follower.num_ready:
            self._warn_of_no_room()
        for call in answered:
            self._poll(calls[call], call)

    def _poll(self, rank: _Rank, call: Any) -> None:
        try:
            answer: FatalError | None = actors.answer(call)
        except ActorUnreachable as error:
            self._ask_again(rank, error)
        except ActorLost as error:
            self._remove_dead(rank, error)
        else:
            if rank.out_of_reach is not None:
                # It is there again; its answer is lost.
                self._remove_dead(rank, rank.out_of_reach)
            elif answer is not None:
                self._hold(rank, answer)
            else:
                actors.kill(rank.actor)
                del self.ranks[rank.number]

    def _hold(self, rank: _Rank, error: FatalError) -> None:
        """Keep an actor whose GPU or node cannot be used in its place."""
        # To a rank, a plan that has been replaced and a disk that has gone from its node look the same.
        require_current(self.stage)
        log.warning("rank %d: %s", rank.number, error)
        del self.ranks[rank.number]
        self.holding.append(rank)
        place = error.place if isinstance(error, DeviceError) else f"rank {rank.number}"
        if place not in self.given_up:
            self.given_up[place] = error
            log.error("%s is given up", place)

    def _require_usable_nodes(self) -> None:
        """Raise the reason of the last that was given up where nothing else is left, and nothing comes in its place."""
        if not self._nothing_is_usable():
            self.all_held_since = float("inf")
            return
        now = time.monotonic()
        self.all_held_since = min(self.all_held_since, now)
        # Where ranks have worked, the nodes that are lost may be replaced, as spot instances are.
        of_nodes = all(isinstance(error, DeviceError) for error in self.given_up.values())
        patience = _SECONDS_FOR_OTHER_NODES if self.follower.num_done and of_nodes else 0.0
        if now - self.all_held_since >= patience:
            self._forget_lost_holders()
            self._capacity_as_of = (float("-inf"), 0)
            if self._nothing_is_usable():
                raise list(self.given_up.values())[-1]

    def _nothing_is_usable(self) -> bool:
        return bool(self.holding) and not self.follower.num_ready and len(self.holding) >= self._capacity()

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
        del self.ranks[rank.number]
        log.warning("rank %d: %s", rank.number, error, exc_info=error)
        # Its unit is free at once, without a lease.
        mark_ended(self.stage.dir.progress, self.owners([rank.number]))
        # Ray goes on placing actors on a node for some seconds after it has died.
        if not error.excused:
            self._count_failed_start(str(error))

    def _count_failed_start(self, how: str) -> None:
        """Count it, and give up only when no actor is left: one node may be broken, while others are loading."""
        self.failed_starts = 0 if self.follower.num_ready else self.failed_starts + 1
        if self.failed_starts < MAX_FAILURES:
            return
        self.next_start = time.monotonic() + _SECONDS_BETWEEN_BAD_STARTS
        if not self.ranks or self.failed_starts >= MAX_FAILURES * self._limit():
            raise FatalError(
                f"{self.stage.name}: actors cannot start: {how}; see {self.stage.dir.logs}. "
                "Every node needs the same Python, Ray and sharmill as the driver",
                code="no_ranks",
            )

    def _warn_of_no_room(self) -> None:
        if time.monotonic() - self._began > _SECONDS_UNTIL_WARNING:
            self._began = float("inf")
            log.error("%s: no actor is ready after %.0f s: they are loading (see %s), or the cluster has no room for "
                      "them; each needs %d cores and %d GPUs, and there is room for %d; waiting", self.stage.name,
                      _SECONDS_UNTIL_WARNING, self.stage.dir.logs, self.needs.cores, self.needs.gpus,
                      self.needs.capacity())  # fmt: skip

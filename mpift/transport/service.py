"""The service thread: the only one in MPI.

One loop over the lanes' collectives, the parts (control messages, heartbeats) and a wake-up. While
a collective is in flight it polls; otherwise it sleeps on an event and looks at MPI now and then,
so that a revocation by another rank is noticed. It never makes a blocking call but in a rebuild and
at start. Other threads talk to it through ``call``. If the loop fails, the process ends loudly: a
rank without service would make all others wait.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from mpift.config import Config
from mpift.core import lockstep, rounds
from mpift.core.membership import Outcome, View, judge
from mpift.errors import ExitCode
from mpift.transport.alarm import Alarm
from mpift.transport.closings import Closings
from mpift.transport.farewells import Farewells
from mpift.transport.fencing import Fencing
from mpift.transport.lane import Lane, Workload
from mpift.transport.liveness import Slot
from mpift.transport.mailbox import Mailbox
from mpift.transport.pace import Pace
from mpift.transport.parcels import Parcels
from mpift.transport.part import Part, Post
from mpift.transport.world import MAX_LANES, Rebuilt, Report, World

# Rebuilds in a row that lost nobody and saw no round complete, before MPI is declared broken.
_FRUITLESS_REBUILDS = 5
REBUILDING = "rebuilding"


@dataclass(slots=True)
class Hooks:
    """What the service tells the runtime. All are called on the service thread."""

    # (what was agreed, last words by member): a new view is in force
    view_changed: Callable[[Rebuilt, dict[int, str]], None]
    # (exit code, reason, whether others have to notice the end): give up; must not return
    give_up: Callable[[int, str, bool], NoReturn]
    # (step, point): the fault schedule may strike here
    strike: Callable[[int, str], object]


@dataclass(frozen=True, slots=True)
class Blocked:
    """A blocking call into MPI: what for, which setting limits it, and since when it runs."""

    what: str
    limit: str
    since: float


class Service:
    """Runs ``world`` and its lanes on a thread of its own."""

    def __init__(self, make_world: Callable[[], World], config: Config, hooks: Hooks) -> None:
        self._make_world = make_world
        self._config = config
        self._hooks = hooks
        self.world: World
        self.views: dict[int, View] = {}
        self.lanes: list[Lane] = []
        # For the monitor: the call that the loop is in and that may not come back.
        self.blocked: Blocked | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._ready = threading.Event()
        self._start_error: BaseException | None = None
        self._fault: BaseException | None = None
        self._rebuild_wanted = False  # without a fault, for more communicators
        self._fruitless = 0
        self._progress = 0
        self.joined = self._released = self.away = False
        self.waited = False  # the script waits for the other ranks, and computes nothing
        self._all_through = False  # nobody needs this rank any more
        self._leave_deadline: float | None = None
        self.mailbox = Mailbox()
        self.farewells = Farewells(self.mailbox, self.call)
        self.closings = Closings(
            self.mailbox,
            config.sync_timeout or 0.0,
            self._feed_lane,
            lambda lane: self.lanes[lane].rounds.completed,
            lambda lane, round_, late: self.lanes[lane].workload.note_late(round_, late),
        )
        self.parcels = Parcels(self.mailbox)
        self.post = Post(self.mailbox, self.parcels, self.call, self.hurry)
        self._parts: list[Part] = [
            Alarm(),
            self.mailbox,
            self.parcels,
            self.farewells,
            self.closings,
        ]
        self._slot: Slot | None = None
        self.fencing: Fencing
        self._pace = Pace(config.idle_poll_seconds)
        self.thread = threading.Thread(target=self._run, name="mpift-service", daemon=True)

    # -- for other threads -----------------------------------------------------------------------

    def start(self) -> None:
        """Start MPI and the loop; returns when the first view is in force, or raises."""
        self.thread.start()
        self._ready.wait()
        if self._start_error is not None:
            raise self._start_error

    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the service thread, soon."""
        self._calls.append(function)
        self._wake.set()

    def feed(self, lane: int, event: Any) -> None:
        """Give an event to a lane."""
        self.call(lambda: self._feed_lane(lane, event))

    def _feed_lane(self, lane: int, event: Any) -> None:
        self.lanes[lane].feed(self.world, event)

    def set_away(self, away: bool) -> None:
        """On the service thread: this rank waits, or no longer waits, in an operation, so others
        need not wait for its gradients."""
        if away != self.away:
            self.away = away
            for lane in self._lanes_of_gradients:
                lane.feed(self.world, rounds.WentAway() if away else rounds.CameBack())

    @property
    def _lanes_of_gradients(self) -> list[Lane]:
        """Those whose rounds may do without a rank."""
        return [lane for lane in self.lanes if lane.workload.rules is not None]

    def join_all(self) -> None:
        """This rank has left its loops: zeros from now on, and the end once all have joined."""

        def join() -> None:
            self.joined = True
            for lane in range(len(self.lanes)):
                # A call each: a fault in one lane's start must not keep the others from joining.
                self.feed(lane, lockstep.Joined())

        self.call(join)

    def release(self) -> None:
        """This rank has all that it needs of the others."""
        self._released = True
        self._wake.set()

    def attach(self, part: Part) -> None:
        """On the service thread: keep ``part`` going too."""
        part.install(self.world)
        self._parts.append(part)

    def show_life(self, slot: Slot) -> None:
        """On the service thread: give the node's watchdog a sign of life in every turn."""
        self._slot = slot
        slot.run()

    def hurry(self) -> None:
        """On the service thread: another rank may wait for this one's answers for a while."""
        self._pace.hurry(time.monotonic())

    def block(self, function: Callable[[Any], object], what: str) -> None:
        """On the service thread: ``function`` calls MPI and may not come back."""
        with self._blocking(what, "rebuild_timeout"):
            function(self.world.control)

    def leave_behind(self, gone: BaseException) -> None:
        """On the service thread: members are gone for certain, whatever MPI says: rebuild."""
        self._fault = self._fault or gone

    def add_lane(self, workload: Workload) -> int:
        """On the service thread: give the next lane its workload. If its communicator does not
        exist yet, all communicators are made anew."""
        index = len(self.lanes)
        rules = workload.rules
        strike = self._hooks.strike if rules is not None else (lambda _round, _point: None)
        lane = Lane(
            index,
            workload,
            self.world.view.epoch,
            lambda round_, bucket: strike(round_, f"bucket{bucket}"),
            self.closings.announce,
        )
        self.lanes.append(lane)
        if rules is not None:
            self.closings.open(index, rules)
        self._rebuild_wanted = index >= len(self.world.lane_comms)
        return index

    @property
    def running(self) -> bool:
        """Whether there is a world, and a loop that serves it (not in a forked child)."""
        return self._ready.is_set() and self._start_error is None and self.thread.is_alive()

    @property
    def step(self) -> int:
        """The round that this rank is in: the furthest of its optimizers'."""
        return max((lane.rounds.completed for lane in self._lanes_of_gradients), default=0)

    @property
    def progress(self) -> int:
        """Rounds that this rank has completed in all lanes."""
        return sum(lane.rounds.completed for lane in self.lanes)

    @property
    def lanes_left(self) -> int:
        return MAX_LANES - len(self.lanes)

    # -- the loop ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._blocking("starting MPI", "start_timeout"):
                self.world = self._make_world()
            self.views[self.world.view.epoch] = self.world.view
            here = self.world.identities[self.world.member]
            self.fencing = Fencing(here, self._config.fence_timeout)
            self._enter_view()
        except BaseException as error:  # noqa: BLE001, it is raised again by start()
            self._start_error = error
            return
        finally:
            self._ready.set()
        try:
            while not self._may_leave():
                self._turn()
            if self._slot is not None:
                self._slot.left()
            with self._blocking("ending MPI", "leave_timeout"):
                self.world.finalize()
        except BaseException as error:  # noqa: BLE001, no way out of this thread may be silent
            # The error first: long texts are cut.
            words = f"the service thread failed: {error!r}\n{traceback.format_exc()}"
            self._hooks.give_up(ExitCode.SCRIPT_FAILED, words, True)

    def _enter_view(self) -> None:
        for part in self._parts:
            part.install(self.world)

    @contextlib.contextmanager
    def _blocking(self, what: str, limit: str) -> Iterator[None]:
        """Around calls that MPI may not come back from: the monitor and the watchdog see to it."""
        self.blocked = Blocked(what, limit, time.monotonic())
        if self._slot is not None:
            self._slot.enter(getattr(self._config, limit), self.blocked.since)
        try:
            yield
        finally:
            self.blocked = None
            if self._slot is not None:
                self._slot.leave()

    def _turn(self) -> None:
        if self._slot is not None:
            self._slot.beat()
        try:
            if self._fault is not None or self._rebuild_wanted:
                self._recover()
            self._wake.clear()
            while self._calls:
                self._calls.popleft()()
            now = time.monotonic()
            for part in self._parts:
                part.turn(now)
            if not self._rebuild_wanted and not self._poll():
                self._pause()
        except self.world.errors as error:
            self._fault = error

    def _poll(self) -> bool:
        """One look at MPI; whether anything completed."""
        requests: list[Any] = []
        counts = []  # now: what one part does may give another one more requests
        for part in self._parts:
            requests += part.requests
            counts.append(len(part.requests))
        first_of_lanes = len(requests)
        counts_of_lanes = []
        for lane in self.lanes:
            requests += lane.requests
            counts_of_lanes.append(len(lane.requests))
        done = set(self.world.test_some(requests))
        if not done:
            return False
        if max(done) >= first_of_lanes:
            self._pace.progressed()
        # Lanes last: one may hit a fault, and what has arrived otherwise must not be lost by it.
        start = 0
        for part, count in zip(self._parts, counts, strict=True):
            start, mine = _share(done, start, count)
            if mine:
                part.complete(mine)
        start = first_of_lanes
        for lane, count in zip(self.lanes, counts_of_lanes, strict=False):
            start, mine = _share(done, start, count)
            if mine:
                lane.complete(self.world, mine)
        return True

    def _pause(self) -> None:
        words = any(lane.requests for lane in self.lanes)
        moves = self._leave_deadline is not None or any(lane.moves for lane in self.lanes)
        if moves or (words and self.waited):
            self._pace.nap(self.waited)
        else:
            now, urgent = time.monotonic(), self.closings.urgent
            self._wake.wait(self._pace.rest_seconds(now, urgent, words))

    # -- faults ------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """One fault: a new view, then every lane goes on in it."""
        planned = self._fault is None
        for lane in self.lanes:
            lane.fault(self.world)
        for part in self._parts:
            part.fault()
        old, step = self.world.view, self.step
        reports = tuple(lane.report() for lane in self.lanes)
        report = Report(self.world.member, old.epoch, reports)
        gone, strike = frozenset(self.farewells.heard), self._hooks.strike
        with self._blocking(REBUILDING, "rebuild_timeout"):
            rebuilt = self.world.rebuild(report, gone, self.fencing, lambda at: strike(step, at))
        if rebuilt is None:
            self._all_through = True
            return
        self._judge(old, rebuilt, planned)
        self._fault, self._rebuild_wanted = None, False
        self.views[rebuilt.view.epoch] = rebuilt.view
        if not self.finished:
            self._hooks.view_changed(rebuilt, dict(self.farewells.heard))
        self._enter_view()
        for lane in self.lanes:
            lane.reconcile(self.world, rebuilt.reports)

    def _judge(self, old: View, rebuilt: Rebuilt, planned: bool) -> None:
        """Stop if too few are left, or if MPI fails again and again without a loss."""
        if self.finished:
            return  # this rank has all its results; those who left first are no loss
        verdict = judge(old, rebuilt.view.members, rebuilt.confirmed, self._config.min_size)
        if verdict.outcome is not Outcome.GO_ON:
            # All that are left here decide the same, so nobody has to notice.
            self._hooks.give_up(ExitCode.QUORUM_LOST, verdict.reason, False)
        if rebuilt.lost or planned or self.progress > self._progress:
            self._fruitless = 0
        else:
            self._fruitless += 1
        self._progress = self.progress
        if self._fruitless >= _FRUITLESS_REBUILDS:
            self._hooks.give_up(
                ExitCode.SCRIPT_FAILED,
                f"MPI failed {self._fruitless} times in a row although no rank was lost;"
                f" its last error: {self._fault}",
                False,
            )

    @property
    def finished(self) -> bool:
        """Whether all have left their loops, and nothing more comes of any lane."""
        return self.joined and all(lane.rounds.finished for lane in self.lanes)

    def _may_leave(self) -> bool:
        """Finished ranks agree to leave, so that nobody does while others need its results."""
        if self._all_through:
            return True
        if not (self.finished and self._released) or self._fault is not None:
            return False
        if self._leave_deadline is None:
            self._leave_deadline = time.monotonic() + self._config.leave_timeout
        try:
            self._all_through = self.world.all_through()
        except self.world.errors as error:
            self._fault = error
        return self._all_through or time.monotonic() >= self._leave_deadline


def _share(done: set[int], start: int, count: int) -> tuple[int, list[int]]:
    """Of ``count`` requests from ``start`` on: where they end, and which of them are done."""
    stop = start + count
    return stop, [position - start for position in range(start, stop) if position in done]

"""Gradient rounds: the workload of a lane that reduces one optimizer's buckets.

The main thread fills contributions, waits for the round that they count in, and applies results in
order; the service thread starts collectives and delivers. A gradient is *under way* from
``contribute`` on until all of it was counted, dropped as too late, or given back.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpift.core import lockstep, rounds
from mpift.core.closing import Quorum
from mpift.core.sharing import Kind
from mpift.errors import GradientError
from mpift.reduction.arena import Arena
from mpift.reduction.buckets import Contributions, Layout
from mpift.reduction.codecs import Compressor
from mpift.reduction.compressed import GRADIENT_TAG, GRADIENT_TAGS_A_LANE
from mpift.reduction.results import Results, Summed
from mpift.reduction.summing import Sums
from mpift.reduction.sums import Claim
from mpift.transport.lane import Started
from mpift.transport.world import LaneReport, World

# In a wait for a round, how often to look after the other optimizers' rounds.
_IDLE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class RoundRules:
    """How one optimizer's rounds treat late ranks; the same on every rank.

    ``quorum`` is "majority", "all", a number of ranks or a fraction of the view; ``patience`` is in
    seconds or "adaptive"; ``max_lag`` is in rounds."""

    quorum: Quorum
    patience: float | str
    carry: bool
    max_lag: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """A completed round, as this rank saw it. ``participants`` counts the ranks in its fullest and
    ``least`` those in its emptiest bucket; ``stale`` counts those whose gradients were meant for an
    earlier round; ``late`` are members that it did not wait for. ``alarm``: somebody wants all
    states to be examined after it, which all ranks see alike. ``sums`` are those of its
    buckets that were summed here."""

    round: int
    epoch: int
    participants: int
    least: int
    stale: int
    late: tuple[int, ...]
    alarm: bool = False
    sums: frozenset[Summed] = frozenset()


class GradientRounds:
    """A ``Workload`` over the buckets of ``layout``, whose values travel as ``compressor`` says.
    They are summed through MPI, until ``move_in`` or ``relayout`` gives them an arena."""

    def __init__(
        self, layout: Layout, rules: RoundRules, compressor: Compressor | None = None
    ) -> None:
        self.rules = rules
        self._carries = rules.carry
        self._compressor = compressor or Compressor()
        self._open = 0  # number of the open round, on the service thread
        self._feed: Callable[[Any], None]
        self._tag = GRADIENT_TAG
        self._ranks = 0  # in the view of the open round
        self._news = threading.Condition()
        self._delivered: dict[int, Delivered] = {}  # completed and not applied
        self.completed = 0
        self._under_way: set[int] = set()
        self._whole = False  # all buckets of the main thread's gradient were contributed
        self._own: int | None = None  # the round in which the last of it was counted
        self._ours: int | None = None  # the last such round that the main thread took as its own
        self._declined = False
        self._late: dict[int, tuple[int, ...]] = {}
        self._summed: dict[int, Summed] = {}  # buckets of the open round
        self._wants_alarm = False
        self._alarmed = -1  # the last round with an alarm
        self.results = Results(layout)
        self._lay(layout, None)

    def _lay(self, layout: Layout, arena: Arena | None) -> None:
        self.contributions = Contributions(layout, () if arena is None else arena.homes)
        self._sums = Sums(layout, self._compressor, self.results, arena)
        # Contributions that MPI may still read: replaced before the next round fills them.
        self._read_on: set[int] = set()

    def move_in(self, arena: Arena) -> None:
        """Contributions and results lie in ``arena``; before the first of them."""
        self.results = Results(arena.layout, shared=arena.results)
        self._lay(arena.layout, arena)

    @property
    def buckets(self) -> int:
        return len(self.contributions.layout.buckets)

    @property
    def shares(self) -> bool:
        """Whether gradients are summed in the node's shared memory, rather than through MPI."""
        return self._sums.shares

    def machine(self, epoch: int) -> rounds.Rounds:
        return rounds.Rounds(
            self.buckets, epoch=epoch, max_lag=self.rules.max_lag, carry=self.rules.carry
        )

    def bind(
        self,
        lane: int,
        feed: Callable[[Any], None],
        incomplete: Callable[[], None] = lambda: None,
    ) -> None:
        """``feed`` takes events to this workload's ``lane``, from any thread; ``incomplete`` is
        called after a round that somebody was missing in, and may soon ask about."""
        self._feed = feed
        self._incomplete = incomplete
        self._tag = GRADIENT_TAG + lane * GRADIENT_TAGS_A_LANE

    def relayout(self, layout: Layout, arena: Arena | None) -> None:
        """Another layout from the open round on; on the service thread, between rounds."""
        self.results = self.results.relayout(layout, () if arena is None else arena.results)
        self._lay(layout, arena)

    # -- for the main thread -----------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether an earlier gradient is under way, or was counted in a round yet to be applied as
        its own: then no other is contributed."""
        with self._news:
            return bool(self._under_way) or self._own is not None

    @property
    def foreign(self) -> int:
        """Rounds below this are complete, and none that isn't applied is this rank's own."""
        with self._news:
            return self.completed if self._own is None else self._own

    def contribute(self, bucket: int, whole: bool) -> None:
        """This rank's part of a bucket is in place; ``whole`` if it is the last of its gradient."""
        with self._news:
            self._under_way.add(bucket)
            self._whole = whole
        self._feed(lockstep.Contributed(bucket))

    def contribute_carried(self) -> None:
        """Let what is carried count in the open round, as there is no gradient to add it to."""
        carried = self.contributions.carries
        for bucket in carried:
            self.contributions.target(bucket, withheld=False)
            self.contribute(bucket, whole=bucket == carried[-1])

    def settle(
        self,
        replay: Callable[[int], None],
        idle: Callable[[], None] = lambda: None,
        early: Callable[[Summed], None] | None = None,
    ) -> int | None:
        """Wait until the gradient that is under way is not any more. Returns the round in which the
        last of it was counted; None if there is none: it was dropped as too late, or the others
        are away and this rank has to go on.

        ``replay(n)`` has to apply all rounds below n, which hold no more of this rank's gradient
        than a part; ``idle`` is called now and then, and ``early`` with what is summed of the open
        round. The wait has no limit of its own: a hung rank is the watchdog's affair.
        """
        with self._news:
            self._declined = False
            applied = min(self._delivered, default=self.completed)
        self._feed(rounds.Awaited())
        seen: set[Summed] = set()
        while True:
            with self._news:
                news = functools.partial(self._has_news, applied, None if early is None else seen)
                told = self._news.wait_for(news, _IDLE_SECONDS)
                if self._declined or not self._under_way:
                    own = self._ours = self._own
                    self._own = None
                    break
                behind, applied = self.completed > applied, self.completed
                summed = [each for each in self._summed.values() if each not in seen]
            if behind:
                replay(applied)  # or this rank runs out of room, and its gradient waits for ever
            elif early is not None and summed:
                early(summed[0])
                seen.add(summed[0])
            elif not told:
                idle()
        if not self._carries:
            self.contributions.forget_carried()
        return own

    def _has_news(self, applied: int, seen: set[Summed] | None) -> bool:
        if self._declined or not self._under_way or self.completed > applied:
            return True
        return seen is not None and not seen.issuperset(self._summed.values())

    @contextlib.contextmanager
    def holding(self, summed: Summed) -> Iterator[bool]:
        """Whether the round of ``summed`` is still open; if so, it stays readable inside."""
        with self.results.held():
            with self._news:
                is_open = self._summed.get(summed.bucket) is summed
            yield is_open

    def is_own(self, round_: int) -> bool | None:
        """Whether this rank's script deals with ``round_`` itself; None if that is open."""
        with self._news:
            return None if round_ >= self.completed else round_ in (self._own, self._ours)

    def target(self) -> int:
        """On the service thread: the first round that this rank has nothing claimed in."""
        with self._news:
            return self.completed + bool(self._under_way)

    def flush(self, rounds_: int) -> None:
        """All ranks have agreed to complete that many rounds, with what is in place."""
        self._feed(rounds.Flushed(rounds_))

    def carry_nothing(self) -> None:
        """From now on late gradients are dropped, whatever the rules say."""
        if self._carries:
            self._carries = False
            self._feed(rounds.CarryNothing())

    def give_up(self) -> None:
        """The main thread goes on without the round that it was about to take as its own."""
        with self._news:
            self._ours = None

    def disown(self) -> None:
        """A round in which a gradient was counted that nobody waited for is applied like any other
        that this rank took no part in."""
        with self._news:
            self._own = None

    def request_examination(self, after: int = -1) -> None:
        """Let all ranks examine their states after a round to come, the same one everywhere, unless
        they were or will be examined after a round that is complete and not before ``after``. From
        any thread."""
        if after < 0 or after > self._alarmed:
            self._wants_alarm = True

    def delivered(self, round_: int) -> Delivered | None:
        """What ``round_`` was, once it is complete here and until it was applied."""
        with self._news:
            return self._delivered.get(round_)

    def wait(self, rounds_: int, timeout: float | None = None) -> bool:
        """Wait until that many rounds are complete here."""
        with self._news:
            return self._news.wait_for(lambda: self.completed >= rounds_, timeout)

    def applied(self, round_: int) -> None:
        """The main thread is through with ``round_``."""
        with self._news:
            del self._delivered[round_]
        self.results.release(round_)
        self._feed(rounds.Applied(round_ + 1))

    # -- for the lane ------------------------------------------------------------------------------

    def start(self, world: World, comm: Any, start: lockstep.Start) -> Sequence[Started]:
        bucket, self._ranks = start.bucket, world.view.size
        self._sums.enter(world, start.round)
        mine = self.contributions.buffers[bucket]
        places = self.contributions.layout.buckets[bucket]
        # Not where a request of an older epoch may still read it: what it says was true then.
        if start.real and bucket not in self._read_on:
            mine[places.late] = start.late
            mine[places.alarm] = self._wants_alarm
        empty = Kind.ALARM if self._wants_alarm else Kind.NOTHING
        kind = Kind.REAL if start.real else empty
        self.results.vacate(bucket)
        receive = self.results.receive(bucket)
        claim = Claim(start.round, kind, mine, receive, self._tag + bucket)
        with self._news:
            self._summed.pop(bucket, None)
        return self._or_summed(bucket, self._sums[bucket].start(world, comm, claim))

    def proceed(self, world: World, comm: Any, bucket: int) -> Sequence[Started]:
        return self._or_summed(bucket, self._sums[bucket].proceed(world))

    def _or_summed(self, bucket: int, started: Sequence[Started]) -> Sequence[Started]:
        if not started:
            with self._news:
                self._summed[bucket] = Summed(bucket, self.results.receive(bucket))
                self._news.notify_all()
        return started

    def participants(self, bucket: int) -> int:
        return self._count(bucket, self.contributions.layout.buckets[bucket].participation)

    def _count(self, bucket: int, place: int) -> int:
        return round(float(self.results.receive(bucket)[place]))

    def deliver(self, deliver: lockstep.Deliver) -> None:
        for bucket in self._read_on & deliver.counted:
            self.contributions.replace(bucket)
        self._read_on -= deliver.counted
        self._sums.settle()
        counts = [self.participants(bucket) for bucket in range(self.buckets)]
        numbered = list(enumerate(self.contributions.layout.buckets))
        stale = max(self._count(number, bucket.late) for number, bucket in numbered)
        alarm = any(self._count(number, bucket.alarm) for number, bucket in numbered)
        if alarm:
            self._wants_alarm, self._alarmed = False, deliver.round
        late = self._late.pop(deliver.round, ())
        self.results.complete(deliver.round)
        self._open = deliver.round + 1
        if stale or min(counts) < self._ranks:
            self._incomplete()
        with self._news:
            sums = frozenset(self._summed.values())
            self._summed = {}
            self._delivered[deliver.round] = Delivered(
                deliver.round,
                deliver.reduced_in,
                max(counts),
                min(counts),
                stale,
                late,
                alarm,
                sums,
            )
            self.completed = self._open
            self._under_way -= deliver.counted
            if deliver.counted and self._whole and not self._under_way:
                self._own, self._whole = deliver.round, False
            self._news.notify_all()

    def drop(self, buckets: frozenset[int]) -> None:
        with self._news:
            self._under_way -= buckets
            self._news.notify_all()

    def give_back(self, buckets: frozenset[int]) -> None:
        for bucket in buckets:
            self.contributions.carry(bucket)
        with self._news:
            self._under_way -= buckets
            self._whole = self._whole and bool(self._under_way)
            self._declined = True
            self._news.notify_all()

    def note_late(self, round_: int, late: Sequence[int]) -> None:
        """The coordinator has closed ``round_`` without waiting for these members."""
        if round_ >= self._open:
            self._late[round_] = tuple(late)

    def report(self) -> tuple[int, int, int]:
        return sum(result.nbytes for result in self.results.last), 0, 0

    def result_to_give(self) -> Sequence[np.ndarray]:
        return self.results.last

    def result_to_take(self, giver: LaneReport, wanted: bool) -> Sequence[np.ndarray]:
        if not wanted:
            return [np.empty_like(result) for result in self.results.last]
        fresh = [self.results.renew(bucket) for bucket in range(self.buckets)]
        expected = sum(result.nbytes for result in fresh)
        if giver.result_bytes != expected:
            raise GradientError(
                f"a result of {giver.result_bytes} bytes is handed over, {expected} are expected:"
                " ranks have different parameters"
            )
        return fresh

    def abandon(self, buckets: Sequence[int]) -> None:
        with self._news:
            self._summed = {}
        for bucket in buckets:
            if self._sums[bucket].lends:
                self._read_on.add(bucket)
            self.results.forget(bucket)
            self._sums[bucket].abandon()

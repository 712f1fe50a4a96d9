"""The words between ranks and coordinator about rounds that somebody is late for.

A part of the service's loop. Each rank's lanes say where they stand; the coordinator gives that to
``core.closing``, holds the clock for its patience, and tells ranks what was decided. Nothing here
is waited for: a round without late ranks is complete before anybody asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from mpift.core import closing, rounds
from mpift.core.closing import Closing, Quorum, Told
from mpift.core.patience import Patience
from mpift.core.rounds import Announce, Standing
from mpift.transport.lane import Rules
from mpift.transport.mailbox import Mailbox
from mpift.transport.messages import Kind, Message
from mpift.transport.world import World

OPERATIONS = 0  # the lane of named operations
# With fixed patience there is time, and most rounds are over before anybody needs to know.
_HELD_BACK_SECONDS_MAX = 0.05
_HELD_BACK_SHARE = 0.25


class Closings:
    """See the module's docstring. ``feed`` takes an event to a lane; ``completed`` is how many
    rounds a lane has completed here; ``late`` hears who was late for a lane's round."""

    requests: Sequence[Any] = ()

    def __init__(
        self,
        mailbox: Mailbox,
        limit: float,
        feed: Callable[[int, Any], None],
        completed: Callable[[int], int],
        late: Callable[[int, int, Sequence[int]], None],
    ) -> None:
        self._mailbox = mailbox
        self._limit = limit
        self._feed = feed
        self._completed = completed
        self._late = late
        self._world: World
        self._lanes: dict[int, _Lane] = {}
        # Of lanes that aren't open here yet: what ranks say, and what the coordinator wants.
        self._early: list[tuple[int, Told, float]] = []
        self._orders: list[Message] = []
        mailbox.register(Kind.STANDING, self._take_standing)
        for kind in (Kind.NUDGE, Kind.DECLINE, Kind.LANE_END):
            mailbox.register(kind, self._take_order)

    def open(self, lane: int, rules: Rules) -> None:
        """Look after ``lane`` too."""
        self._lanes[lane] = _Lane(rules, self._limit)
        self._lanes[lane].install(self._world)
        if len(self._lanes) > 1:
            # A rank that is left behind in one optimizer's rounds may wait for another that is left
            # behind in another's: for ever, if both are needed.
            for state in self._lanes.values():
                state.need_all()
        early, self._early = self._early, []
        for word in early:
            self._hear(*word)
        orders, self._orders = self._orders, []
        for message in orders:
            self._mailbox.deliver(message)

    def announce(self, lane: int, word: Announce) -> None:
        """This rank's lane says where it stands."""
        state = self._lanes[lane]
        state.word, state.since = word, time.monotonic()
        if self._is_coordinator or word.standing is not Standing.ARRIVED or state.wait == 0:
            self._tell(lane, state)

    # -- the service's loop ------------------------------------------------------------------------

    def install(self, world: World) -> None:
        self._world = world
        self._early, self._orders = [], []
        for state in self._lanes.values():
            state.install(world)

    def fault(self) -> None:
        pass

    def complete(self, positions: Sequence[int]) -> None:
        pass

    def turn(self, now: float) -> None:
        for lane, state in self._lanes.items():
            word = state.word
            if word is not None and self._completed(lane) > word.round:
                state.word = None
            elif word is not None and now - state.since >= state.wait:
                self._tell(lane, state)
            if self._is_coordinator and state.patience_over(now):
                self._decide(lane, closing.PatienceOver(state.closing.round))

    @property
    def urgent(self) -> bool:
        """Whether a word or a deadline is pending, so that the loop should come round soon."""
        return any(s.word is not None or s.deadline is not None for s in self._lanes.values())

    # -- as a rank ---------------------------------------------------------------------------------

    def _tell(self, lane: int, state: _Lane) -> None:
        word, state.word = state.word, None
        assert word is not None
        waited = time.monotonic() - state.since
        if self._is_coordinator:
            told = Told(self._world.member, word.standing, word.round, self._completed(OPERATIONS))
            self._hear(lane, told, time.monotonic())
            return
        text = (
            f"{lane} {int(word.standing)} {word.round} {self._completed(OPERATIONS)} {waited:.6f}"
        )
        self._mailbox.send(Kind.STANDING, text, [self._world.view.coordinator])

    def _take_order(self, message: Message) -> None:
        """The coordinator's word on a lane; this rank may be the last to open it."""
        lane, round_, *late = map(int, message.text.split())
        if lane not in self._lanes:
            self._orders.append(message)
            return
        match message.kind:
            case Kind.NUDGE:
                self._late(lane, round_, late)
                self._feed(lane, rounds.Nudged(message.epoch, round_))
            case Kind.DECLINE:
                self._feed(lane, rounds.Declined(message.epoch, round_))
            case Kind.LANE_END:
                self._feed(lane, rounds.Ended(message.epoch, round_))

    # -- as the coordinator ------------------------------------------------------------------------

    @property
    def _is_coordinator(self) -> bool:
        return self._world.view.coordinator == self._world.member

    def _take_standing(self, message: Message) -> None:
        lane, standing, round_, turn, waited = message.text.split()
        told = Told(message.sender, Standing(int(standing)), int(round_), int(turn))
        self._hear(int(lane), told, time.monotonic() - float(waited))

    def _hear(self, lane: int, told: Told, at: float) -> None:
        if lane not in self._lanes:
            self._early.append((lane, told, at))
            return
        self._lanes[lane].note(told, at)
        self._decide(lane, told)

    def _decide(self, lane: int, event: Told | closing.PatienceOver) -> None:
        state = self._lanes[lane]
        state.closing, instructions = state.closing.handle(event)
        state.set_deadline()
        for instruction in instructions:
            match instruction:
                case closing.Nudge(round_, members, late):
                    # Late ranks are everybody's news; those that are away are nobody's.
                    to = self._world.view.members if late else members
                    self._say(Kind.NUDGE, to, lane, round_, *late)
                case closing.Decline(round_, members):
                    self._say(Kind.DECLINE, members, lane, round_)
                case closing.End(last):
                    self._say(Kind.LANE_END, self._world.view.members, lane, last)

    def _say(self, kind: Kind, members: Iterable[int], *numbers: int) -> None:
        """To ``members``; what this rank says to itself comes last, for it may lead to a fault."""
        members = tuple(members)
        text = " ".join(map(str, numbers))
        self._mailbox.send(kind, text, members)
        if self._world.member in members:
            self._mailbox.deliver(Message(kind, self._world.view.epoch, self._world.member, text))


class _Lane:
    """What is known of one lane: this rank's word, and the coordinator's state."""

    def __init__(self, rules: Rules, limit: float) -> None:
        self._quorum: Quorum = rules.quorum
        self.patience = Patience(rules.patience, limit)
        share = 0.0 if isinstance(rules.patience, str) else rules.patience * _HELD_BACK_SHARE
        self.wait = min(_HELD_BACK_SECONDS_MAX, share)
        self.word: Announce | None = None
        self.since = 0.0
        self.closing: Closing
        self.deadline: float | None = None
        self._round = -1
        self._arrivals: dict[int, float] = {}  # in the open round, by member
        self._in_time: frozenset[int] = frozenset()  # who had arrived in the round before

    def need_all(self) -> None:
        """From now on the rounds wait for all ranks that aren't away."""
        self._quorum = "all"
        self.closing = replace(self.closing, needed=len(self.closing.members))

    def install(self, world: World) -> None:
        self.closing = Closing.of(world.view.members, self._quorum)
        self.deadline, self._arrivals, self._round = None, {}, -1
        self.patience.forget_time()

    def note(self, told: Told, at: float) -> None:
        """When ranks arrive, for the patience."""
        if told.standing is not Standing.ARRIVED:
            return
        if told.round > self._round:
            if told.round != self._round + 1:
                self.patience.forget_time()
            self._in_time = frozenset(self._arrivals)
            self._round, self._arrivals = told.round, {}
        if told.round == self._round and told.member not in self._arrivals:
            self._arrivals[told.member] = at
            if len(self._arrivals) == self.closing.needed:
                in_time = [t for m, t in self._arrivals.items() if m in self._in_time]
                self.patience.quorum_arrived(max(self._arrivals.values()), in_time)

    def set_deadline(self) -> None:
        """Begin to wait, or not any more, after something has changed."""
        missing = self.closing.missing
        if not missing:
            self.deadline = None
        elif self.deadline is None:
            size, hopeful = len(self.closing.members), bool(missing & self.closing.before)
            self.deadline = max(self._arrivals.values()) + self.patience.seconds(size, hopeful)

    def patience_over(self, now: float) -> bool:
        """Whether the open round has waited long enough."""
        return self.deadline is not None and now >= self.deadline

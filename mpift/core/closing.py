"""Closing rounds: what the coordinator of a view does about ranks that are late or away.

It hears where everybody stands (``Told``) and decides for the furthest round that anybody has
arrived in:

* All others arrived or away: those who are away are nudged, so that they contribute zeros.
* A quorum arrived: the rest is nudged once patience is over. How long that is, is not decided here:
  ``missing`` says whom the round waits for, and ``PatienceOver`` comes from whoever has a clock.
* More than half away: nobody opens a round. Whoever has arrived is told to go on, unless somebody
  is past that round, or will have something in it: then it is complete, or has to become so.
* All left: the lane ends, after the last round that anybody had something in.

Being away is to wait in an operation that others have yet to call. Operations are numbered, so a
word "away" is void once anybody is known to have done that operation.

A quorum is counted in ranks of the present view. The machine is a frozen value; a new view gets a
new one, and all ranks say again where they stand.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

from mpift.core.rounds import Standing
from mpift.errors import ConfigError

Quorum = str | int | float


def parse_quorum(given: Quorum) -> Quorum:
    """A quorum as a setting or an argument gives it: "majority", "all", a number of ranks (at least
    1) or a fraction of the view (with a point, above 0, at most 1). Raises ``ConfigError``."""
    quorum: Quorum = given
    if isinstance(given, str) and given not in ("majority", "all"):
        with contextlib.suppress(ValueError):
            quorum = float(given) if "." in given else int(given)
    if quorum in ("majority", "all"):
        return quorum
    if isinstance(quorum, int) and not isinstance(quorum, bool) and quorum >= 1:
        return quorum
    if isinstance(quorum, float) and 0 < quorum <= 1:
        return quorum
    raise ConfigError(
        'a quorum must be "majority", "all", a number of ranks (1 or more) or a fraction of them'
        f" (with a point, above 0, at most 1), not {given!r}"
    )


def ranks_needed(quorum: Quorum, size: int) -> int:
    """How many ranks of a view of ``size`` have to arrive before the others may be late."""
    if quorum == "majority":
        return size // 2 + 1
    if quorum == "all":
        return size
    if isinstance(quorum, float):
        return math.ceil(quorum * size)
    return min(int(quorum), size)


# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Told:
    """Where a member stands; ``turn`` is the number of operations that it has done."""

    member: int
    standing: Standing
    round: int
    turn: int


@dataclass(frozen=True, slots=True)
class PatienceOver:
    """``round`` has waited long enough since its quorum arrived."""

    round: int


# -- instructions ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Nudge:
    """Tell ``members`` to contribute what they have to ``round``; ``late`` are those of them that
    weren't away."""

    round: int
    members: tuple[int, ...]
    late: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decline:
    """Tell ``members`` that nobody opens ``round`` now."""

    round: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Tell everybody that ``last`` is the last round of the lane."""

    last: int


Instruction = Nudge | Decline | End

# -- the machine -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Closing:
    """The coordinator's state for one lane in one view. ``words`` has one entry a member."""

    members: tuple[int, ...]
    needed: int
    words: tuple[Told, ...]
    turn: int = 0  # operations that somebody is known to have done
    round: int = -1  # the furthest that anybody has arrived in
    before: frozenset[int] = frozenset()  # who had arrived in the round before
    closed: bool = False  # ``round`` was nudged
    declined: frozenset[int] = frozenset()  # members, in ``round``
    ended: bool = False

    @classmethod
    def of(cls, members: tuple[int, ...], quorum: Quorum) -> Closing:
        """The state at the beginning of a view: nobody has said anything."""
        words = tuple(Told(member, Standing.COMPUTING, -1, 0) for member in members)
        return cls(members, ranks_needed(quorum, len(members)), words)

    def handle(self, event: Told | PatienceOver) -> tuple[Closing, tuple[Instruction, ...]]:
        """The state after ``event``, and what to tell whom."""
        match event:
            case Told():
                return self._hear(event)._decide(over=False)
            case PatienceOver(round_):
                return self._decide(over=round_ == self.round)

    @property
    def arrived(self) -> frozenset[int]:
        """Who has arrived in the open round."""
        return self._standing(Standing.ARRIVED)

    @property
    def missing(self) -> frozenset[int]:
        """Whom the open round waits for although its quorum has arrived; empty if it doesn't."""
        if self.closed or len(self.arrived) < self.needed:
            return frozenset()
        return frozenset(self.members) - self.arrived - self._away

    def _standing(self, standing: Standing) -> frozenset[int]:
        return frozenset(
            word.member
            for word in self.words
            if word.standing is standing
            and (standing is not Standing.ARRIVED or word.round == self.round)
            and (standing is not Standing.AWAY or word.turn >= self.turn)
        )

    @property
    def _away(self) -> frozenset[int]:
        return self._standing(Standing.AWAY) | self._standing(Standing.LEFT)

    def _hear(self, word: Told) -> Closing:
        words = tuple(word if old.member == word.member else old for old in self.words)
        state = replace(self, words=words, turn=max(self.turn, word.turn))
        if word.standing is not Standing.ARRIVED:
            return state
        if word.round > self.round:
            before = self.arrived if word.round == self.round + 1 else frozenset()
            return replace(
                state, round=word.round, before=before, closed=False, declined=frozenset()
            )
        if word.round == self.round:
            return replace(state, declined=self.declined - {word.member})
        return state

    def _decide(self, over: bool) -> tuple[Closing, tuple[Instruction, ...]]:
        left = self._standing(Standing.LEFT)
        if len(left) == len(self.members):
            if self.ended:
                return self, ()
            last = max(word.round for word in self.words)
            return replace(self, ended=True), (End(last),)
        arrived, away = self.arrived, self._away
        if not arrived or self.closed:
            return self, ()
        destined = any(word.round > self.round for word in self.words)
        if 2 * len(away) > len(self.members) and not destined:
            members = arrived - self.declined
            told = replace(self, declined=self.declined | members)
            return told, (Decline(self.round, tuple(sorted(members))),) if members else ()
        late = frozenset(self.members) - arrived - away
        if late and not (over and len(arrived) >= self.needed):
            return self, ()
        nudged = tuple(sorted(late | away))
        words = (Nudge(self.round, nudged, tuple(sorted(late))),) if nudged else ()
        return replace(self, closed=True), words

"""The grammar of fault schedules, as given to ``--chaos`` or ``MPIFT_CHAOS``.

    SCHEDULE = ITEM ("," ITEM)*
    ITEM     = VERB ":" MEMBER "@" STEP [":" POINT]

``kill:2@50`` lets member 2 (its rank at launch, for life) kill itself with SIGKILL at step 50,
before it computes anything of that step's reduction. A POINT names a finer place:

    step        on entering ``step()``, before its reduction is waited for (the default)
    bucketK     right after bucket K of that step's round was handed to MPI
    shrink      inside the first rebuild at or after that step, before the survivors' communicator
    split       inside that rebuild, after it, before the working communicators
    agree       inside that rebuild, before the agreement

Parsing only: who acts on a fault is the room where its point lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mpift.errors import ChaosError

VERBS = ("kill",)
REBUILD_POINTS = ("shrink", "split", "agree")

_ITEM = re.compile(r"(?P<verb>[a-z]+):(?P<member>\d+)@(?P<step>\d+)(?::(?P<point>[a-z]+\d*))?")
_POINT = re.compile(r"step|bucket\d+|shrink|split|agree")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: ``verb`` befalls ``member`` at ``step``, at the named point of it."""

    verb: str
    member: int
    step: int
    point: str = "step"

    def __str__(self) -> str:
        suffix = "" if self.point == "step" else f":{self.point}"
        return f"{self.verb}:{self.member}@{self.step}{suffix}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """All faults of a run; immutable, so that every rank holds the same one."""

    faults: tuple[Fault, ...] = ()

    def due(self, member: int, step: int, point: str) -> Fault | None:
        """The fault that strikes ``member`` at this place, or None.

        A rebuild has no step of its own: a fault inside one is due in the first rebuild
        at or after its step.
        """
        late = point in REBUILD_POINTS
        for fault in self.faults:
            now = fault.step == step or (late and step >= fault.step)
            if now and fault.member == member and fault.point == point:
                return fault
        return None

    def __str__(self) -> str:
        return ",".join(map(str, self.faults))


def parse(text: str, world_size: int | None = None) -> Schedule:
    """Read a schedule; an empty text is an empty schedule.

    Raises ``ChaosError`` naming the item that is wrong, and what would be right.
    """
    items: Iterable[str] = (item.strip() for item in text.split(",")) if text.strip() else ()
    faults = tuple(_parse_item(item, world_size) for item in items)
    for index, fault in enumerate(faults):
        if any(fault.member == earlier.member for earlier in faults[:index]):
            raise ChaosError(f"chaos item {str(fault)!r}: member {fault.member} is killed already")
    return Schedule(faults)


def _parse_item(item: str, world_size: int | None) -> Fault:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ChaosError(
            f"chaos item {item!r} is not VERB:MEMBER@STEP[:POINT], for example kill:2@50"
        )
    verb, point = match["verb"], match["point"] or "step"
    if verb not in VERBS:
        raise ChaosError(f"chaos item {item!r}: unknown verb {verb!r}, known: {', '.join(VERBS)}")
    if not _POINT.fullmatch(point):
        raise ChaosError(
            f"chaos item {item!r}: unknown point {point!r},"
            " known: step, bucketK (K a number), shrink, split, agree"
        )
    member = int(match["member"])
    if world_size is not None and member >= world_size:
        raise ChaosError(
            f"chaos item {item!r}: there is no member {member} in a world of {world_size}"
            f" (0 to {world_size - 1})"
        )
    return Fault(verb, member, int(match["step"]), point)

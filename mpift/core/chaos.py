"""The grammar of fault schedules, as given to ``--chaos`` or ``MPIFT_CHAOS``.

    SCHEDULE = ITEM ("," ITEM)*
    ITEM     = VERB ":" MEMBER "@" STEP ["-" STEP] [":" ARGUMENT]

MEMBER is a rank at launch, for life; STEP counts the steps of its optimizer from 0. The verbs:

    kill:2@50           SIGKILL at step 50; a point as ARGUMENT names a finer place
    stop:2@50           SIGSTOP there, and nothing more: it hangs; also at a point
    slow:2@50-60:0.5    each of steps 50 to 60 takes 0.5 s longer
    gil:2@50:2          a C call holds the interpreter's lock for 2 s
    drop:2@50-60:0.3    three of ten heartbeats that it sends meanwhile are lost
    corrupt:2@50-60:1   all heartbeats that it sends meanwhile have a flipped bit
    reset:2@50          one of its TCP connections to another rank is reset
    device:2@50:507053  its simulated NPU fails with this error code of the Ascend runtime
    flip:2@50           one bit of one of its parameters flips: in the mantissa, so that training
                        goes on and nothing is seen of it

The points:

    step        on entering ``step()``, before its reduction is waited for (the default)
    bucketK     right after bucket K of that step's round was handed to MPI
    shrink      inside the first rebuild at or after that step, before the survivors' communicator
    split       inside that rebuild, after it, before the working communicators
    agree       inside that rebuild, before the agreement
    snapshot    before the snapshot of a checkpoint of that step is taken
    captured    right after it, before anybody has heard of it
    announced   on the coordinator, when all parts are there, before the others hear of it
    voting      when the checkpoint has been read back, before this rank votes for it
    published   on the coordinator, when it is committed, before the others hear of it

Parsing only: who acts on a fault is the room where its point lies.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mpift.errors import ChaosError

REBUILD_POINTS = ("shrink", "split", "agree")


class Takes(enum.Enum):
    """What a verb has behind its step."""

    POINT = "an optional point"
    SECONDS = "seconds, above 0 and at most 1000000"
    PROBABILITY = "a probability above 0, at most 1"
    CODE = "an error code, a whole number of six digits"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Verb:
    """What belongs to a verb; ``lasts``: it may be given a range of steps."""

    takes: Takes
    lasts: bool
    example: str


VERBS: Mapping[str, Verb] = {
    "kill": Verb(Takes.POINT, lasts=False, example="kill:2@50"),
    "stop": Verb(Takes.POINT, lasts=False, example="stop:2@50"),
    "slow": Verb(Takes.SECONDS, lasts=True, example="slow:2@50-60:0.5"),
    "gil": Verb(Takes.SECONDS, lasts=False, example="gil:2@50:2"),
    "drop": Verb(Takes.PROBABILITY, lasts=True, example="drop:2@50-60:0.3"),
    "corrupt": Verb(Takes.PROBABILITY, lasts=True, example="corrupt:2@50-60:1"),
    "reset": Verb(Takes.NOTHING, lasts=False, example="reset:2@50"),
    "device": Verb(Takes.CODE, lasts=False, example="device:2@50:507053"),
    "flip": Verb(Takes.NOTHING, lasts=False, example="flip:2@50"),
}
# After these a member does nothing more.
FATAL = ("kill", "stop")
# These befall the heartbeats that a member sends, as long as they last.
ON_HEARTBEATS = ("drop", "corrupt")
# These befall what a member trains, and are carried out by whoever holds it.
ON_STATE = ("flip", "device")

# Above the first number, at most the second.
_RANGES = {
    Takes.SECONDS: (0.0, 1e6),
    Takes.PROBABILITY: (0.0, 1.0),
    Takes.CODE: (99_999.0, 999_999.0),
}

_ITEM = re.compile(
    r"(?P<verb>[a-z]+):(?P<member>\d+)@(?P<step>\d+)(?:-(?P<last>\d+))?(?::(?P<argument>[\w.+-]+))?"
)
_POINT = re.compile(
    r"step|bucket\d+|shrink|split|agree|snapshot|captured|announced|voting|published"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: ``verb`` befalls ``member`` from ``step`` to ``last_step``, at the named point.

    ``amount`` is in seconds, a probability or a code, as the verb takes it; 0 for others."""

    verb: str
    member: int
    step: int
    point: str = "step"
    last_step: int = -1
    amount: float = 0.0

    @property
    def fatal(self) -> bool:
        return self.verb in FATAL

    def lasts_at(self, step: int) -> bool:
        """Whether it is at work in this step."""
        return self.step <= step <= max(self.step, self.last_step)

    def __str__(self) -> str:
        steps = f"{self.step}-{self.last_step}" if self.last_step >= 0 else f"{self.step}"
        whole = VERBS[self.verb].takes is Takes.CODE
        amount = int(self.amount) if whole else self.amount
        argument = f":{amount!r}" if self.amount else ""
        if self.point != "step":
            argument = f":{self.point}"
        return f"{self.verb}:{self.member}@{steps}{argument}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """All faults of a run; immutable, so that every rank holds the same one."""

    faults: tuple[Fault, ...] = ()

    def due(self, member: int, step: int, point: str) -> tuple[Fault, ...]:
        """The faults that strike ``member`` at this place, fatal ones last.

        A rebuild has no step of its own: a fault inside one is due in the first rebuild
        at or after its step.
        """
        late = point in REBUILD_POINTS
        found = [
            fault
            for fault in self.faults
            if fault.member == member
            and fault.point == point
            and (fault.lasts_at(step) or (late and step >= fault.step))
        ]
        return tuple(sorted(found, key=lambda fault: fault.fatal))

    def __str__(self) -> str:
        return ",".join(map(str, self.faults))


def parse(text: str, world_size: int | None = None) -> Schedule:
    """Read a schedule; an empty text is an empty schedule.

    Raises ``ChaosError`` naming the item that is wrong, and what would be right.
    """
    items: Iterable[str] = (item.strip() for item in text.split(",")) if text.strip() else ()
    faults = tuple(_parse_item(item, world_size) for item in items)
    for index, fault in enumerate(faults):
        for earlier in faults[:index]:
            if fault.fatal and earlier.fatal and fault.member == earlier.member:
                done = "killed" if earlier.verb == "kill" else "stopped"
                raise ChaosError(
                    f"chaos item {str(fault)!r}: member {fault.member} is {done} already"
                )
    return Schedule(faults)


def _parse_item(item: str, world_size: int | None) -> Fault:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ChaosError(
            f"chaos item {item!r} is not VERB:MEMBER@STEP[:ARGUMENT], for example kill:2@50"
        )
    name, member, step = match["verb"], int(match["member"]), int(match["step"])
    verb = VERBS.get(name)
    if verb is None:
        raise ChaosError(f"chaos item {item!r}: unknown verb {name!r}, known: {', '.join(VERBS)}")
    if world_size is not None and member >= world_size:
        raise ChaosError(
            f"chaos item {item!r}: there is no member {member} in a world of {world_size}"
            f" (0 to {world_size - 1})"
        )
    last = -1
    if match["last"] is not None:
        last = int(match["last"])
        if not verb.lasts or last < step:
            what = "ends before it begins" if verb.lasts else "has one step only"
            raise ChaosError(f"chaos item {item!r}: {name} {what}, as in {verb.example}")
    return _with_argument(item, name, Fault(name, member, step, "step", last), match["argument"])


def _with_argument(item: str, name: str, fault: Fault, argument: str | None) -> Fault:
    verb = VERBS[name]
    if verb.takes is Takes.POINT:
        point = argument or "step"
        if not _POINT.fullmatch(point):
            raise ChaosError(
                f"chaos item {item!r}: unknown point {point!r},"
                " known: step, bucketK (K a number), shrink, split, agree"
            )
        return Fault(fault.verb, fault.member, fault.step, point)
    if verb.takes is Takes.NOTHING and argument is None:
        return fault
    try:
        amount = float(argument or "")
    except ValueError:
        amount = 0.0
    least, largest = _RANGES.get(verb.takes, (0.0, 0.0))
    exact = verb.takes is not Takes.CODE or amount.is_integer()
    if not (least < amount <= largest and exact):
        raise ChaosError(
            f"chaos item {item!r}: {name} takes {verb.takes.value}, not {argument!r},"
            f" as in {verb.example}"
        )
    return Fault(fault.verb, fault.member, fault.step, "step", fault.last_step, amount)

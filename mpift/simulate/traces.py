"""Heartbeat traces: what one observer hears of one peer, and when the peer really hung.

The sender beats in a fixed interval by its own clock, skips the beats that it slept through, and
hangs now and then until its process is replaced. Two scenarios, both of the preset "small" (a beat
in 3 s, a static timeout of 15 s):

``CALM``: a quiet network of sub-millisecond delays, short pauses of both sides, one message lost in
100,000.

``JITTER``: a shared cluster. Storms come in about every half hour and last 5 minutes on average;
each has a severity of its own, 2 s at the median, by which messages are late on average, and loses
2 % of them. Order is kept, as TCP does, so that one late message holds up those behind it. Both
sides pause about once in ten minutes, mostly for tenths of a second, with a heavy tail up to 10 s.

``HANG_SEPARATION_SECONDS`` is so chosen that about 30 % of the static timeout's alarms on
``JITTER`` are false. That is far more of everything than a real cluster has, so that a million
periods show enough of it; what counts is the proportion of storms to hangs.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from mpift.config import PRESETS
from mpift.simulate.network import (
    Constant,
    Distribution,
    Episodes,
    Exponential,
    Link,
    LinkModel,
    LogNormal,
    NodeModel,
    Pareto,
    Pauses,
    Storms,
    random_of,
)

INTERVAL_SECONDS: float = PRESETS["small"]["heartbeat_interval"]
TIMEOUT_SECONDS: float = PRESETS["small"]["heartbeat_timeout"]
HANG_SEPARATION_SECONDS = 3000.0
HANGS = Exponential(HANG_SEPARATION_SECONDS)
HANG_DURATION = Constant(120.0)  # longer than any detector waits


@dataclass(frozen=True, slots=True)
class Scenario:
    """A link, the two nodes at its ends, and how often the sender hangs."""

    link: LinkModel
    node: NodeModel
    hang_separation: Distribution
    hang_duration: Distribution
    interval_seconds: float = INTERVAL_SECONDS
    timeout_seconds: float = TIMEOUT_SECONDS


CALM = Scenario(
    LinkModel(LogNormal(0.0003, 0.5), loss=1e-5),
    NodeModel(Pauses(Exponential(60.0), Exponential(0.02)), drift=5e-5),
    HANGS,
    HANG_DURATION,
)
JITTER = Scenario(
    LinkModel(
        LogNormal(0.0003, 0.5),
        loss=1e-5,
        storms=Storms(
            separation=Exponential(1800.0),
            duration=Exponential(300.0),
            severity=LogNormal(2.0, 0.3),
            loss=0.02,
        ),
    ),
    NodeModel(Pauses(Exponential(600.0), Pareto(0.1, 1.2, 10.0)), drift=5e-5),
    HANGS,
    HANG_DURATION,
)


class Kind(enum.IntEnum):
    """What happens at the observer; of what happens at once, the first is listed first."""

    DOZED = 0
    WOKE = 1
    HEARD = 2
    HUNG = 3
    REPLACED = 4


# (time, what, number): the sequence number heard, or the seconds slept.
Moment = tuple[float, Kind, float]


def moments(scenario: Scenario, periods: int, seed: int) -> Iterator[Moment]:
    """All that the observer lives through, in order of time, for so many beats of the sender."""
    link = Link(scenario.link, random_of(seed, "link"))
    random = random_of(seed, "sender")
    drift = scenario.node.drift
    interval = scenario.interval_seconds * (1.0 + drift * random.uniform(-1.0, 1.0))
    hangs = Episodes(scenario.hang_separation, scenario.hang_duration, random_of(seed, "hangs"))
    sender = _pauses(scenario, seed, "sender pauses")
    observer = _pauses(scenario, seed, "observer pauses")
    ahead: list[Moment] = []
    asleep_until = due = 0.0
    sequence = 0
    while sequence < periods:
        if due < hangs.start:
            # What was due in a pause is sent once, at its end.
            sent = sender.end if sender.covers(due) else due
            for arrival in link.transmit(sent):
                heapq.heappush(ahead, (arrival, Kind.HEARD, sequence))
            sequence += 1
            due += interval * max(1, math.ceil((sent - due) / interval))
        else:
            heapq.heappush(ahead, (hangs.start, Kind.HUNG, 0))
            heapq.heappush(ahead, (hangs.end, Kind.REPLACED, 0))
            due = hangs.end
            hangs.advance()
        while observer.start < due:
            heapq.heappush(ahead, (observer.start, Kind.DOZED, observer.end))
            observer.advance()
        while ahead and ahead[0][0] < due:
            time, kind, number = heapq.heappop(ahead)
            if kind is Kind.DOZED:
                asleep_until = number
                heapq.heappush(ahead, (number, Kind.WOKE, number - time))
            elif kind is Kind.HEARD and time < asleep_until:
                heapq.heappush(ahead, (asleep_until, kind, number))
            else:
                yield time, kind, number


def _pauses(scenario: Scenario, seed: int, name: str) -> Episodes:
    pauses = scenario.node.pauses or Pauses(Constant(math.inf), Constant(0.0))
    return Episodes(pauses.separation, pauses.duration, random_of(seed, name))

"""Failure detectors: how long a peer may be silent before it is overdue.

One detector listens to one peer. All share the bookkeeping of ``_Listener``: which packets are new,
how many were lost, how long the silence has lasted. They differ in ``timeout_seconds``, the silence
that they bear, which changes only when something is heard. The rules:

* Only a packet newer than all before ends a silence: one that was duplicated or overtaken was sent
  earlier, and says nothing about now.
* Gaps in the sequence count as losses; what comes late after all is taken off again.
* Time in which the observer itself slept is not the peer's silence, and what had piled up meanwhile
  teaches nothing.
* Nothing is overdue before ``watch``, which also begins anew after a rebuild, or when the peer's
  process was replaced: that silence is no lesson, what was learned before stays.

No detector decides anything: being overdue is a suspicion of one observer.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Protocol

from mpift.errors import ConfigError

# RFC 6298 section 2: smoothing of mean and deviation, and the deviations that a timeout adds.
MEAN_GAIN = 1 / 8
DEVIATION_GAIN = 1 / 4
DEVIATIONS = 4
FLOOR_INTERVALS = 2
CAP_TIMEOUTS = 4
# Tuned on seeds 1 to 5 of `mpift simulate detector`, judged on others: how often the longest delay
# is borne, for how many arrivals it is remembered, and how many make a start.
DELAY_FACTOR = 2.5
WINDOW_ARRIVALS = 4000
START_ARRIVALS = 100

PHI_THRESHOLD = 8.0
PHI_WINDOW_ARRIVALS = 1000
# Akka's: a tenth of the interval is the least deviation, a quarter is assumed at the start.
PHI_LEAST_DEVIATION_INTERVALS = 0.1
PHI_START_DEVIATION_INTERVALS = 0.25

# How far behind the newest packet an overtaken one is still told from a duplicate.
_REORDER_PACKETS = 64
_REORDER_MASK = (1 << _REORDER_PACKETS) - 1


class Detector(Protocol):
    """What listens to one peer. Times are seconds of one clock that never runs backwards."""

    @property
    def timeout_seconds(self) -> float:
        """The silence after which the peer is overdue, as of the last arrival."""

    @property
    def losses(self) -> int:
        """Packets that the sequence numbers show as lost, and that did not come later either."""

    def watch(self, now: float) -> None:
        """The silence counts from ``now``, and any sequence number may come next."""

    def heard(self, now: float, sequence: int) -> None:
        """A packet with this number arrived."""

    def slept(self, seconds: float) -> None:
        """The observer woke that much too late: this part of the silence is its own."""

    def silence(self, now: float) -> float:
        """Seconds since the last new packet, without what the observer slept; 0 unwatched."""

    def overdue(self, now: float) -> bool:
        """Whether the silence is longer than the timeout."""


class _Listener:
    """What all detectors know of their peer; ``_learn`` is where they differ."""

    __slots__ = (
        "_catching_up",
        "_forgiven_seconds",
        "_heard_at",
        "_interval_seconds",
        "_missing",
        "_newest",
        "losses",
        "timeout_seconds",
    )

    def __init__(self, interval_seconds: float, timeout_seconds: float) -> None:
        if not 0 < interval_seconds < timeout_seconds:
            raise ConfigError(
                f"a heartbeat timeout of {timeout_seconds} s does not go with an interval of"
                f" {interval_seconds} s: the interval is more than 0, and less than the timeout"
            )
        self._interval_seconds = interval_seconds
        self.timeout_seconds = timeout_seconds
        self.losses = 0
        self._heard_at: float | None = None
        self._forgiven_seconds = 0.0
        self._catching_up = False
        self._newest: int | None = None
        self._missing = 0  # bit i: the packet i + 1 before the newest has not come

    def watch(self, now: float) -> None:
        self._heard_at = now
        self._forgiven_seconds = 0.0
        self._catching_up = False
        self._newest = None
        self._missing = 0

    def heard(self, now: float, sequence: int) -> None:
        if self._newest is None:
            self._newest = sequence
        else:
            ahead = sequence - self._newest
            if ahead <= 0:
                self._came_late(-ahead)
                return
            lost = ahead - 1
            if lost:
                self.losses += lost
            if ahead < _REORDER_PACKETS:
                self._missing = (self._missing << ahead | (1 << lost) - 1) & _REORDER_MASK
            else:
                self._missing = _REORDER_MASK
            self._newest = sequence
            gap_seconds = self.silence(now)
            if self._catching_up and gap_seconds < self._interval_seconds / 2:
                pass  # it had waited while the observer slept
            else:
                self._catching_up = self._forgiven_seconds > 0
                self._learn(gap_seconds, lost)
        self._heard_at = now
        self._forgiven_seconds = 0.0

    def slept(self, seconds: float) -> None:
        self._forgiven_seconds += seconds
        self._catching_up = True

    def silence(self, now: float) -> float:
        if self._heard_at is None:
            return 0.0
        return max(0.0, now - self._heard_at - self._forgiven_seconds)

    def overdue(self, now: float) -> bool:
        return self.silence(now) > self.timeout_seconds

    def _came_late(self, behind: int) -> None:
        bit = 1 << behind - 1 if 0 < behind <= _REORDER_PACKETS else 0
        if self._missing & bit:
            self._missing ^= bit
            self.losses -= 1

    def _learn(self, gap_seconds: float, lost: int) -> None:
        """A silence of ``gap_seconds`` has ended, in which ``lost`` packets did not arrive."""


class StaticTimeout(_Listener):
    """A timeout that never changes."""

    __slots__ = ()


class AdaptiveTimeout(_Listener):
    """A timeout that follows the gaps between arrivals: Jacobson and Karels, as in RFC 6298.

    After each arrival the estimate is mean + 4 deviations of the gaps, smoothed with 1/8 and 1/4.
    It differs from the RFC where a heartbeat does from a round trip:

    * The timeout is the largest estimate of the last ``window`` arrivals. The smoothed deviation
      has forgotten a stall after some ten arrivals, and storms come in bouts further apart.
    * An estimate is at least one interval + 2.5 times what this gap was longer than that. The RFC
      doubles a timeout after it was too short; here any delay is borne more than twice over the
      next time, whether it raised a false alarm or not.
    * A lost packet lengthens a gap by an interval, which is taken out before the gap counts as
      jitter; the timeout has room for one packet more than were lately lost in a row.
    * ``timeout_seconds``, the preset's, is the least until ``START_ARRIVALS`` gaps are known; 2
      intervals afterwards. Four times the preset's is the most.

    So in calm it is little more than 2 intervals, and bears the loss of one packet.
    """

    __slots__ = ("_cap_seconds", "_deviation", "_gaps", "_mean", "_peaks", "_runs", "_start")

    def __init__(
        self, interval_seconds: float, timeout_seconds: float, window: int = WINDOW_ARRIVALS
    ) -> None:
        super().__init__(interval_seconds, timeout_seconds)
        self._start = timeout_seconds
        self._cap_seconds = CAP_TIMEOUTS * timeout_seconds
        self._mean = interval_seconds
        self._deviation = 0.0
        self._gaps = 0
        self._peaks = _WindowMaximum(window)
        self._runs = _WindowMaximum(window)

    def _learn(self, gap_seconds: float, lost: int) -> None:
        gap_seconds = max(0.0, gap_seconds - lost * self._interval_seconds)
        error = gap_seconds - self._mean
        self._deviation += DEVIATION_GAIN * (abs(error) - self._deviation)
        self._mean += MEAN_GAIN * error
        self._gaps += 1
        interval = self._interval_seconds
        estimate = max(
            self._mean + DEVIATIONS * self._deviation,
            interval + DELAY_FACTOR * (gap_seconds - interval),
        )
        room = (1 + self._runs.add(lost)) * interval
        floor = FLOOR_INTERVALS * interval if self._gaps >= START_ARRIVALS else self._start
        wanted = max(floor, self._peaks.add(estimate) + room)
        self.timeout_seconds = min(wanted, self._cap_seconds)


class PhiAccrual(_Listener):
    """The accrual detector of Hayashibara et al. (SRDS 2004), with a normal tail as there.

    ``phi(now)`` is -log10 of the probability that an arrival is still to come after the present
    silence, for normally distributed gaps with the mean and deviation of the last ``window`` ones;
    the peer is overdue once it passes ``threshold``. As the quantile of the tail is fixed, that is
    a timeout of mean + z deviations, with z = 5.6 for a threshold of 8. The deviation has Akka's
    floor, 0.1 intervals; without one, perfectly regular arrivals would allow no delay at all.
    """

    __slots__ = ("_deviation", "_gaps", "_mean", "_quantile", "_squares", "_sum", "_window")

    def __init__(
        self,
        interval_seconds: float,
        threshold: float = PHI_THRESHOLD,
        window: int = PHI_WINDOW_ARRIVALS,
    ) -> None:
        self._quantile = -statistics.NormalDist().inv_cdf(10**-threshold)
        self._mean = interval_seconds
        self._deviation = PHI_START_DEVIATION_INTERVALS * interval_seconds
        super().__init__(interval_seconds, self._mean + self._quantile * self._deviation)
        self._window = window
        self._gaps: deque[float] = deque()  # minus the interval, so that the sums stay exact
        self._sum = 0.0
        self._squares = 0.0
        for sign in (-1, 1):
            self._learn(interval_seconds + sign * self._deviation, 0)

    def phi(self, now: float) -> float:
        """Suspicion level of the present silence."""
        z = (self.silence(now) - self._mean) / self._deviation
        later = math.erfc(z / math.sqrt(2)) / 2
        return -math.log10(later) if later > 0 else math.inf

    def _learn(self, gap_seconds: float, lost: int) -> None:
        value = gap_seconds - self._interval_seconds
        self._gaps.append(value)
        self._sum += value
        self._squares += value * value
        if len(self._gaps) > self._window:
            oldest = self._gaps.popleft()
            self._sum -= oldest
            self._squares -= oldest * oldest
        mean = self._sum / len(self._gaps)
        variance = max(0.0, self._squares / len(self._gaps) - mean * mean)
        floor = PHI_LEAST_DEVIATION_INTERVALS * self._interval_seconds
        self._mean = self._interval_seconds + mean
        self._deviation = max(floor, math.sqrt(variance))
        self.timeout_seconds = self._mean + self._quantile * self._deviation


class _WindowMaximum:
    """The largest of the last ``window`` values."""

    __slots__ = ("_added", "_falling", "_window")

    def __init__(self, window: int) -> None:
        self._window = window
        self._added = 0
        # Only values that nothing later reaches can become the largest: (number, value), falling.
        self._falling: deque[tuple[int, float]] = deque()

    def add(self, value: float) -> float:
        """Take in ``value``; the largest now."""
        falling = self._falling
        while falling and falling[-1][1] <= value:
            falling.pop()
        falling.append((self._added, value))
        self._added += 1
        if falling[0][0] + self._window < self._added:
            falling.popleft()
        return falling[0][1]


KINDS = ("static", "adaptive", "phi")


def make_detector(kind: str, interval_seconds: float, timeout_seconds: float) -> Detector:
    """A detector of one of ``KINDS``. ``timeout_seconds`` is the preset's; phi has none.

    Raises ``ConfigError`` for any other kind.
    """
    if kind == "static":
        return StaticTimeout(interval_seconds, timeout_seconds)
    if kind == "adaptive":
        return AdaptiveTimeout(interval_seconds, timeout_seconds)
    if kind == "phi":
        return PhiAccrual(interval_seconds)
    raise ConfigError(f"{kind!r} is not a kind of detector; there are {', '.join(KINDS)}")

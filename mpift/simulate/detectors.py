"""Failure detectors compared: the real ones of ``mpift.core``, side by side on the same traces.

An *alarm* is a silence that outlasts a detector's timeout; it is false if the sender had not hung
by then. A false alarm's *mistake* lasts until a new packet takes the suspicion back. Detection
counts from the hang itself, not from the last beat before it. All that a detector can learn from it
is told: its own observer's late awakenings, and when the sender's process was replaced.

What the comparison does not show: the adaptive detector bears what it was warned of. Where storms
come every four hours, longer apart than it remembers, or where long pauses come out of a calm, it
was mistaken as often as the static one (42 and 35 times, 52 and 37 times in a million heartbeats).
Its patience has a price too, seen here: in jitter a hang lasts three times as long.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpift.core.detector import KINDS, Detector, make_detector
from mpift.simulate import traces
from mpift.simulate.network import described
from mpift.simulate.traces import CALM, JITTER, Kind, Scenario, moments

SCENARIOS: Mapping[str, Scenario] = {"jitter": JITTER, "calm": CALM}
# The adaptive detector's constants were chosen on these; only others show what it is worth.
TUNING_SEEDS = (1, 2, 3, 4, 5)
# A week. A longer trace is a row of such stretches, each with detectors that know nothing yet.
STRETCH_PERIODS = 200_000


@dataclass(slots=True)
class Tally:
    """What a detector did on a trace."""

    periods: int = 0
    hangs: int = 0
    detection_seconds: list[float] = field(default_factory=list)
    mistake_seconds: list[float] = field(default_factory=list)
    false_alarms: int = 0

    def add(self, other: Tally) -> None:
        """Take in another trace."""
        self.periods += other.periods
        self.hangs += other.hangs
        self.detection_seconds += other.detection_seconds
        self.mistake_seconds += other.mistake_seconds
        self.false_alarms += other.false_alarms

    def as_json(self) -> dict[str, Any]:
        """Shares, rates and seconds; None where nothing was counted."""
        true, false = len(self.detection_seconds), self.false_alarms
        mistakes = self.mistake_seconds
        return {
            "false_alarm_share": false / (false + true) if false + true else None,
            "false_alarms_per_million": 1e6 * false / self.periods if self.periods else None,
            "detection_seconds_p50": quantile(self.detection_seconds, 0.50),
            "detection_seconds_p99": quantile(self.detection_seconds, 0.99),
            "mistake_seconds_mean": sum(mistakes) / len(mistakes) if mistakes else None,
            "periods": self.periods,
            "hangs": self.hangs,
            "hangs_detected": true,
            "false_alarms": false,
        }


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of them do not exceed; None if there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


class Judge:
    """Follows one detector through a trace, and knows when the sender really hung."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self._hung_at: float | None = None
        self._suspected_at: float | None = None
        self._detected = False
        self.tally = Tally()
        detector.watch(0.0)

    def live_through(self, time: float, kind: Kind, number: float) -> None:
        """The next moment of the trace."""
        detector = self._detector
        if kind is Kind.HEARD:
            if detector.overdue(time):
                self._look(time)
            detector.heard(time, int(number))
            if self._suspected_at is not None and not detector.overdue(time):
                self._take_back(time)
            return
        if kind is Kind.WOKE:
            self._look(time - number)
            detector.slept(number)
            return
        self._look(time)
        if kind is Kind.HUNG:
            self.tally.hangs += 1
            self._hung_at = time
            if self._suspected_at is not None:
                self.tally.mistake_seconds.append(time - self._suspected_at)
                self._detect(0.0)
        else:
            self._hung_at = self._suspected_at = None
            self._detected = False
            detector.watch(time)

    def _look(self, time: float) -> None:
        """Whether an alarm was due by ``time``, and since when."""
        detector = self._detector
        if self._suspected_at is not None or not detector.overdue(time):
            return
        alarm = time - (detector.silence(time) - detector.timeout_seconds)
        self._suspected_at = alarm
        if self._hung_at is None or alarm < self._hung_at:
            self.tally.false_alarms += 1
        else:
            self._detect(alarm - self._hung_at)

    def _detect(self, seconds: float) -> None:
        # One that arrives late can take back a right suspicion, which then counts only once.
        if not self._detected:
            self.tally.detection_seconds.append(seconds)
        self._detected = True

    def _take_back(self, time: float) -> None:
        if self._suspected_at is not None and not self._detected:
            self.tally.mistake_seconds.append(time - self._suspected_at)
        self._suspected_at = None


def compare(scenario: Scenario, periods: int, seed: int) -> dict[str, Tally]:
    """Each kind of detector on the same trace of ``periods`` beats."""
    total = {kind: Tally() for kind in KINDS}
    for stretch, start in enumerate(range(0, periods, STRETCH_PERIODS)):
        part = min(STRETCH_PERIODS, periods - start)
        judges = {
            kind: Judge(make_detector(kind, scenario.interval_seconds, scenario.timeout_seconds))
            for kind in KINDS
        }
        for moment in moments(scenario, part, seed * 1_000_003 + stretch):
            for judge in judges.values():
                judge.live_through(*moment)
        for kind, judge in judges.items():
            judge.tally.periods = part
            total[kind].add(judge.tally)
    return total


def report(periods: int, seed: int) -> dict[str, Any]:
    """All detectors on all scenarios, and what the scenarios are."""
    result: dict[str, Any] = {kind: {} for kind in KINDS}
    for name, scenario in SCENARIOS.items():
        for kind, tally in compare(scenario, periods, seed).items():
            result[kind][name] = tally.as_json()
    return {
        **result,
        "seed": seed,
        "tuning_seeds": list(TUNING_SEEDS),
        "stretch_periods": STRETCH_PERIODS,
        "model": {
            "words": inspect.getdoc(traces),
            **{name: described(scenario) for name, scenario in SCENARIOS.items()},
        },
    }

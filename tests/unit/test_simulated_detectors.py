"""Simulated heartbeats, and what each kind of detector makes of them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.core.detector import StaticTimeout
from mpift.simulate.detectors import TUNING_SEEDS, Judge, Tally, compare, quantile
from mpift.simulate.traces import CALM, JITTER, Kind, Moment, moments

FRESH_SEED = max(TUNING_SEEDS) + 96


@pytest.mark.parametrize("scenario", [CALM, JITTER])
def test_a_trace_is_in_order_of_time_and_repeats_with_its_seed(scenario: Any) -> None:
    trace = list(moments(scenario, 20_000, 4))
    assert trace == list(moments(scenario, 20_000, 4))
    assert trace != list(moments(scenario, 20_000, 5))
    assert all(one[0] <= other[0] for one, other in itertools.pairwise(trace))
    hung = [m for m in trace if m[1] in {Kind.HUNG, Kind.REPLACED}]
    assert [m[1] for m in hung[:4]] == [Kind.HUNG, Kind.REPLACED] * 2


def test_nobody_beats_while_it_hangs_and_nobody_hears_while_it_sleeps() -> None:
    hung_at = woke_at = -math.inf
    for time, kind, number in moments(CALM, 20_000, 8):
        if kind is Kind.HUNG:
            hung_at = time
        elif kind is Kind.REPLACED:
            hung_at = math.inf
        elif kind is Kind.WOKE:
            assert time - number > woke_at
            woke_at = time
        elif hung_at > 0 and hung_at != math.inf:
            assert time < hung_at + 0.1  # only what was under way


def judged(*trace: Moment) -> Tally:
    """What the static detector (3 s, 15 s) did on a trace."""
    judge = Judge(StaticTimeout(3.0, 15.0))
    for moment in trace:
        judge.live_through(*moment)
    return judge.tally


def test_an_alarm_before_a_hang_is_false_and_one_after_it_is_true() -> None:
    tally = judged(
        (3.0, Kind.HEARD, 0),
        (23.0, Kind.HEARD, 1),  # silent for 20 s: a mistake of 5
        (24.0, Kind.HUNG, 0),
        (144.0, Kind.REPLACED, 0),
    )
    assert (tally.false_alarms, tally.mistake_seconds) == (1, [5.0])
    assert (tally.hangs, tally.detection_seconds) == (1, [14.0])


def test_an_alarm_is_counted_once_however_long_it_lasts() -> None:
    tally = judged(
        (3.0, Kind.HEARD, 0),
        (20.0, Kind.WOKE, 0.0),
        (30.0, Kind.WOKE, 0.0),
        (40.0, Kind.HEARD, 0),  # a duplicate takes nothing back
        (50.0, Kind.HEARD, 1),
    )
    assert (tally.false_alarms, tally.mistake_seconds) == (1, [32.0])


def test_the_sleep_of_the_observer_raises_no_alarm() -> None:
    tally = judged((3.0, Kind.HEARD, 0), (30.0, Kind.WOKE, 20.0), (30.0, Kind.HEARD, 1))
    assert tally.false_alarms == 0


def test_who_is_suspected_already_when_it_hangs_counts_as_both() -> None:
    tally = judged((3.0, Kind.HEARD, 0), (20.0, Kind.HUNG, 0), (140.0, Kind.REPLACED, 0))
    assert (tally.false_alarms, tally.detection_seconds) == (1, [0.0])


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_the_smallest_value_that_covers_its_share(
    values: list[float], share: float
) -> None:
    found = quantile(values, share)
    assert found in values
    assert found is not None
    assert sum(v <= found for v in values) >= share * len(values) - 1e-9
    assert sum(v < found for v in values) < share * len(values) + 1e-9


def conclusions_hold(periods: int, seed: int) -> None:
    """What the adaptive detector is for; the trace must be one that fools the static one."""
    jitter = {kind: tally.as_json() for kind, tally in compare(JITTER, periods, seed).items()}
    calm = {kind: tally.as_json() for kind, tally in compare(CALM, periods, seed).items()}
    assert 0.2 < jitter["static"]["false_alarm_share"] < 0.4
    assert jitter["adaptive"]["false_alarm_share"] < 0.01
    assert jitter["adaptive"]["false_alarms_per_million"] < 10
    assert calm["adaptive"]["false_alarms_per_million"] < 10
    fast, slow = calm["adaptive"]["detection_seconds_p50"], calm["static"]["detection_seconds_p50"]
    assert fast < slow / 2
    for row in (*jitter.values(), *calm.values()):
        assert row["hangs_detected"] == row["hangs"] > 0


def test_jitter_that_fools_a_static_timeout_does_not_fool_the_adaptive_one() -> None:
    conclusions_hold(120_000, FRESH_SEED + 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", [FRESH_SEED, 2025])
def test_nor_does_it_over_a_million_periods(seed: int) -> None:
    conclusions_hold(1_000_000, seed)

"""Failure detectors: what counts as hearing a peer, and what each kind learns from it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.core.detector import (
    KINDS,
    START_ARRIVALS,
    WINDOW_ARRIVALS,
    AdaptiveTimeout,
    Detector,
    PhiAccrual,
    StaticTimeout,
    make_detector,
)
from mpift.errors import ConfigError

INTERVAL, TIMEOUT = 3.0, 15.0
CAP = 4 * TIMEOUT


def watched(kind: str) -> Detector:
    detector = make_detector(kind, INTERVAL, TIMEOUT)
    detector.watch(0.0)
    return detector


def beat(detector: Detector, gaps: list[float], start: float = 0.0, sequence: int = 0) -> float:
    """Let packets arrive with these gaps, none lost; the time of the last."""
    now = start
    for number, gap in enumerate(gaps, sequence):
        now += gap
        detector.heard(now, number)
    return now


def settled() -> tuple[AdaptiveTimeout, float, int]:
    """An adaptive detector after a calm start, the time, and the next sequence number."""
    detector = AdaptiveTimeout(INTERVAL, TIMEOUT)
    detector.watch(0.0)
    calm = [INTERVAL + 0.01 * (-1) ** i for i in range(START_ARRIVALS + 2)]
    return detector, beat(detector, calm), len(calm)


each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_nobody_is_overdue_before_it_is_watched(kind: str) -> None:
    detector = make_detector(kind, INTERVAL, TIMEOUT)
    assert not detector.overdue(1e9)
    assert detector.silence(1e9) == 0


@each_kind
def test_one_that_never_says_anything_is_overdue_after_the_first_timeout(kind: str) -> None:
    detector = watched(kind)
    assert not detector.overdue(detector.timeout_seconds)
    assert detector.overdue(detector.timeout_seconds + 0.001)


@each_kind
def test_an_arrival_ends_the_silence(kind: str) -> None:
    detector = watched(kind)
    detector.heard(1000.0, 0)
    assert not detector.overdue(1000.0)
    assert detector.silence(1002.0) == 2.0


@each_kind
def test_a_duplicate_is_no_sign_of_life_and_no_loss(kind: str) -> None:
    detector = watched(kind)
    now = beat(detector, [INTERVAL] * 5)
    before = detector.timeout_seconds
    for late in range(1, 20):
        detector.heard(now + late, 4)
    assert detector.silence(now + 20) == 20
    assert detector.timeout_seconds == before
    assert detector.losses == 0


@each_kind
def test_a_packet_that_was_overtaken_is_no_loss_for_ever(kind: str) -> None:
    detector = watched(kind)
    for now, sequence in ((3.0, 0), (9.0, 2)):
        detector.heard(now, sequence)
    assert detector.losses == 1
    detector.heard(9.5, 1)
    assert detector.losses == 0
    detector.heard(9.6, 1)  # and its duplicate is only that
    assert detector.losses == 0
    assert detector.silence(10.0) == 1.0


@each_kind
@given(st.lists(st.integers(0, 40), min_size=1, max_size=60))
def test_losses_are_the_numbers_that_never_came(kind: str, sequences: list[int]) -> None:
    # All within the window in which order is remembered; what precedes the first is unknown.
    detector = watched(kind)
    for now, sequence in enumerate(sequences):
        detector.heard(float(now), sequence)
    first, newest = sequences[0], max(sequences)
    expected = set(range(first, newest + 1)) - set(sequences)
    assert detector.losses == len(expected)


@each_kind
@given(st.lists(st.tuples(st.floats(-10, 1e6), st.integers(0, 2**64 - 1)), max_size=20))
def test_no_order_of_numbers_and_times_breaks_a_detector(
    kind: str, arrivals: list[tuple[float, int]]
) -> None:
    detector = watched(kind)
    for now, sequence in arrivals:
        detector.heard(now, sequence)
        assert detector.silence(now) >= 0
        assert detector.losses >= 0
        assert detector.timeout_seconds > 0


@each_kind
def test_a_late_beat_is_forgiven_when_the_observer_slept(kind: str) -> None:
    detector = watched(kind)
    now = beat(detector, [INTERVAL] * 20)
    woke = now + 1 + 600.0
    detector.slept(600.0)
    assert not detector.overdue(woke)
    assert detector.silence(woke) == pytest.approx(1.0)
    # What follows is the peer's own silence again.
    assert detector.overdue(woke + TIMEOUT + 1)


@each_kind
def test_what_piled_up_while_the_observer_slept_teaches_nothing(kind: str) -> None:
    detector = watched(kind)
    now = beat(detector, [INTERVAL] * 200)
    before = detector.timeout_seconds
    detector.slept(30.0)
    woke = now + 30.0
    for sequence in range(200, 210):
        detector.heard(woke, sequence)
    beat(detector, [INTERVAL] * 5, woke, 210)
    assert detector.timeout_seconds == pytest.approx(before, rel=0.02)


@each_kind
def test_a_replaced_process_starts_anew_and_its_silence_is_no_lesson(kind: str) -> None:
    detector = watched(kind)
    now = beat(detector, [INTERVAL] * 200)
    before = detector.timeout_seconds
    detector.watch(now + 500.0)
    assert not detector.overdue(now + 500.0)
    beat(detector, [INTERVAL] * 3, now + 500.0, 0)
    assert detector.timeout_seconds == pytest.approx(before, rel=0.02)
    assert detector.losses == 0


def test_a_static_timeout_never_changes() -> None:
    detector = watched("static")
    beat(detector, [1.0, 14.0, 40.0, 3.0])
    assert detector.timeout_seconds == TIMEOUT


def test_the_adaptive_one_starts_as_the_preset_says() -> None:
    detector = watched("adaptive")
    assert detector.timeout_seconds == TIMEOUT
    beat(detector, [INTERVAL] * START_ARRIVALS)
    assert detector.timeout_seconds == TIMEOUT


def test_in_calm_the_adaptive_one_waits_for_two_intervals_and_bears_one_loss() -> None:
    detector, now, sequence = settled()
    assert 2 * INTERVAL <= detector.timeout_seconds < 2.1 * INTERVAL
    assert not detector.overdue(now + 2 * INTERVAL + 0.02)
    detector.heard(now + 2 * INTERVAL + 0.02, sequence + 1)
    assert detector.losses == 1
    # The lost packet is not taken for jitter; two in a row may be lost from now on.
    assert detector.timeout_seconds == pytest.approx(3 * INTERVAL, rel=0.05)


def test_jitter_behind_a_lost_packet_is_still_seen() -> None:
    detector, now, sequence = settled()
    detector.heard(now + 2 * INTERVAL + 4.0, sequence + 1)
    assert detector.timeout_seconds >= 2 * INTERVAL + 2 * 4.0


def test_a_silence_that_ended_is_borne_twice_over_the_next_time() -> None:
    detector, now, sequence = settled()
    late = 7.0
    now += INTERVAL + late
    assert detector.overdue(now)  # a false alarm
    detector.heard(now, sequence)
    assert not detector.overdue(now + INTERVAL + 2 * late)


def test_a_stall_is_remembered_for_the_window_and_not_for_ever() -> None:
    detector, now, sequence = settled()
    now = beat(detector, [12.0], now, sequence)
    now = beat(detector, [INTERVAL] * (WINDOW_ARRIVALS - 1), now, sequence + 1)
    assert detector.timeout_seconds > 12.0
    # The smoothed deviation takes some arrivals more to forget it.
    beat(detector, [INTERVAL] * 60, now, sequence + WINDOW_ARRIVALS)
    assert detector.timeout_seconds < 2.1 * INTERVAL


@given(st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=200))
def test_the_adaptive_timeout_stays_between_floor_and_cap(gaps: list[float]) -> None:
    detector = watched("adaptive")
    beat(detector, gaps)
    assert TIMEOUT <= detector.timeout_seconds <= CAP  # these are still the start
    detector, now, sequence = settled()
    beat(detector, gaps, now, sequence)
    assert 2 * INTERVAL <= detector.timeout_seconds <= CAP


@given(st.lists(st.floats(0.0, 20.0), min_size=START_ARRIVALS, max_size=150), st.integers(1, 40))
def test_the_adaptive_timeout_is_that_of_a_dumb_second_implementation(
    gaps: list[float], window: int
) -> None:
    detector = AdaptiveTimeout(INTERVAL, TIMEOUT, window)
    detector.watch(0.0)
    beat(detector, [INTERVAL, *gaps])  # the first arrival ends no gap
    mean, deviation, estimates = INTERVAL, 0.0, []
    times = list(itertools.accumulate([INTERVAL, *gaps]))
    for earlier, later in itertools.pairwise(times):
        gap = later - earlier
        deviation = 0.75 * deviation + 0.25 * abs(gap - mean)
        mean = 0.875 * mean + 0.125 * gap
        estimates.append(max(mean + 4 * deviation, 2.5 * gap - 1.5 * INTERVAL))
    expected = min(CAP, max(2 * INTERVAL, max(estimates[-window:]) + INTERVAL))
    assert detector.timeout_seconds == pytest.approx(expected)


def test_phi_passes_its_threshold_when_its_timeout_is_over() -> None:
    detector = PhiAccrual(INTERVAL, threshold=8.0)
    detector.watch(0.0)
    now = beat(detector, [2.5, 3.5, 3.0, 2.0, 4.0] * 40)
    assert detector.phi(now + detector.timeout_seconds) == pytest.approx(8.0, abs=1e-6)
    assert detector.phi(now) < 0.01 < detector.phi(now + INTERVAL)
    assert detector.phi(now + 1e6) == float("inf")


def test_phi_forgets_what_left_its_window() -> None:
    detector = PhiAccrual(INTERVAL, window=50)
    detector.watch(0.0)
    now = beat(detector, [INTERVAL] * 60)
    calm = detector.timeout_seconds
    now = beat(detector, [30.0], now, 60)
    assert detector.timeout_seconds > 2 * calm
    beat(detector, [INTERVAL] * 50, now, 61)
    assert detector.timeout_seconds == pytest.approx(calm)


def test_a_detector_that_cannot_work_is_refused_with_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="static, adaptive, phi"):
        make_detector("psychic", INTERVAL, TIMEOUT)
    with pytest.raises(ConfigError, match="less than the timeout"):
        StaticTimeout(3.0, 3.0)

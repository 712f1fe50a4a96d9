"""What a device tells of itself, and what its node's health makes of it: errors, heat, links."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.core.health import (
    CORRECTED_DEGRADED,
    CORRECTED_NEAR,
    MARGIN,
    SAMPLES_TO_FALL,
    WINDOW_SECONDS,
    Band,
    Device,
    Health,
    Metrics,
)
from tests.unit.health_samples import ALL_OVER, CALM, observed, settled


def on(device: Device, calm: Metrics = CALM) -> Metrics:
    """A calm node with that device."""
    return replace(calm, device=device)


def corrected(*counts: int | None) -> list[Metrics]:
    return [on(Device(name="NPU 3", corrected_errors=count)) for count in counts]


def hot(celsius: float | None, limit: float | None = 100.0) -> Metrics:
    return on(Device(name="NPU 3", temperature_celsius=celsius, temperature_limit_celsius=limit))


def link(up: bool | None) -> Metrics:
    return on(Device(name="NPU 3", link_up=up))


def test_errors_that_are_corrected_ever_more_often_degrade_a_node_before_its_device_fails() -> None:
    story = observed(corrected(40, 41, 42, 46, 52))
    assert [health.band for health in story] == [
        Band.HEALTHY,
        Band.HEALTHY,
        Band.NEAR,
        Band.NEAR,
        Band.DEGRADED,
    ]
    assert story[2].reason == "NPU 3: 2 corrected memory errors in the last 10 min"
    assert story[-1].reason == "NPU 3: 12 corrected memory errors in the last 10 min"
    assert [health.is_serious for health in story] == [False, False, True, True, True]


def test_a_burst_of_corrected_errors_climbs_one_band_a_sample_and_never_to_critical() -> None:
    bands = [health.band for health in observed(corrected(0, *[5000] * 5))]
    assert bands == [Band.HEALTHY, Band.NEAR, *[Band.DEGRADED] * 4]


def test_errors_from_before_the_job_are_no_reason() -> None:
    story = observed(corrected(*[100_000] * 20))
    assert {(health.band, health.reason) for health in story} == {(Band.HEALTHY, "")}
    assert observed(corrected(None, None, 700, 700, None, 700))[-1].band is Band.HEALTHY


def test_a_count_that_falls_was_reset_and_goes_on_from_there() -> None:
    story = observed(corrected(500, 3, 3, 4))
    assert {health.band for health in story} == {Band.HEALTHY}
    health = observed(corrected(4 + CORRECTED_NEAR), story[-1])[-1]
    assert health.reason == "NPU 3: 3 corrected memory errors in the last 10 min"


def test_corrected_errors_are_forgotten_after_their_window() -> None:
    health = observed(corrected(0, *[CORRECTED_DEGRADED] * 3))[-1]
    assert health.band is Band.DEGRADED
    quiet = corrected(CORRECTED_DEGRADED)[0]
    for seconds in (0.5, 0.9):
        health = health.observe(seconds * WINDOW_SECONDS, quiet)
    assert health.band is Band.DEGRADED
    for second in range(SAMPLES_TO_FALL):
        health = health.observe(1.1 * WINDOW_SECONDS + second, quiet)
    assert (health.band, health.reason) == (Band.HEALTHY, "")


@given(st.lists(st.sampled_from([(1, 0, 0), (0, 0, 1), (2, 1, 1)]), min_size=20, max_size=40))
def test_errors_that_come_at_about_one_rate_do_not_make_the_band_flap(
    parts: list[tuple[int, int, int]],
) -> None:
    """Of three samples, 30 s apart, at least one has an error: six or more in the window."""
    rises = [0, CORRECTED_DEGRADED, 0, *itertools.chain.from_iterable(parts)]
    health, bands = Health(), []
    for index, count in enumerate(itertools.accumulate(rises)):
        health = health.observe(30.0 * index, corrected(count)[0])
        bands.append(health.band)
    assert set(bands[2:]) == {Band.DEGRADED}


def test_a_device_near_its_temperature_limit_is_told_and_one_at_its_limit_degrades() -> None:
    story = observed([hot(60), hot(89), hot(92), hot(99), hot(101), hot(250)])
    assert [health.band for health in story] == [
        Band.HEALTHY,
        Band.HEALTHY,
        Band.NEAR,
        Band.NEAR,
        Band.DEGRADED,
        Band.DEGRADED,
    ]
    assert story[2].reason == "NPU 3: 92 C of 100 C"
    assert settled(hot(40), story[-1]).band is Band.HEALTHY


@given(
    st.lists(st.sampled_from([0.0, 0.5 * MARGIN, 0.99 * MARGIN]), max_size=40),
    st.sampled_from([86.0, 90.0, 96.0, 100.0]),  # below a band's border, and at it
)
def test_a_temperature_that_wavers_changes_the_band_at_most_once(
    noise: list[float], base: float
) -> None:
    start = settled(hot(base))
    story = observed((hot(base * (1 + by)) for by in noise), start)
    bands = [start.band, *(health.band for health in story)]
    changes = [a != b for a, b in itertools.pairwise(bands)]
    assert sum(changes) <= 1


@pytest.mark.parametrize("sample", [hot(None), hot(500, None), hot(500, 0.0), link(None)])
def test_what_a_device_does_not_tell_is_not_held_against_it(sample: Metrics) -> None:
    assert settled(sample).band is Band.HEALTHY


def test_a_link_that_is_lost_degrades_a_node_and_is_remembered_for_a_while() -> None:
    story = observed([link(True), link(False), link(False), link(True), *[link(None)] * 10])
    assert [health.band for health in story[:3]] == [Band.HEALTHY, Band.NEAR, Band.DEGRADED]
    assert story[2].reason == "NPU 3: its link to other devices is down"
    assert {health.band for health in story[2:]} == {Band.DEGRADED}  # a loose plug does not flap
    assert story[-1].reason == "NPU 3: its link to other devices was down in the last 10 min"
    health = story[-1]
    for second in range(SAMPLES_TO_FALL):
        health = health.observe(WINDOW_SECONDS + 100 + second, link(True))
    assert health.band is Band.HEALTHY


def test_a_link_that_nobody_has_connected_is_no_reason() -> None:
    assert {health.band for health in observed([link(False)] * 9)} == {Band.HEALTHY}


def test_a_warning_of_the_driver_degrades_and_a_fault_stands_before_it() -> None:
    warned = on(Device(name="NPU 3", warning="it reports Warning"))
    health = settled(warned)
    assert (health.band, health.reason) == (Band.DEGRADED, "NPU 3: it reports Warning")
    broken = settled(replace(warned, accelerator_fault="NPU 3: it reports Alarm"), health)
    assert broken.band is Band.CRITICAL
    assert broken.reason.split("; ") == [
        "accelerator fault: NPU 3: it reports Alarm",
        "NPU 3: it reports Warning",
    ]


def test_a_device_never_changes_the_score() -> None:
    worst = Device(
        name="NPU 3",
        warning="bad",
        temperature_celsius=200.0,
        temperature_limit_celsius=100.0,
    )
    assert settled(on(worst)).score == settled(CALM).score
    assert settled(on(worst, ALL_OVER)).band is settled(ALL_OVER).band is Band.CRITICAL


def test_a_device_counts_where_nothing_else_is_known_of_the_node() -> None:
    sick = Metrics(device=Device(name="NPU 3", warning="bad"))
    health = settled(sick)
    assert (health.band, health.score) == (Band.DEGRADED, None)
    well = Metrics(device=Device(name="NPU 3"))
    assert settled(well, health).band is Band.HEALTHY


def test_a_device_that_is_not_read_for_a_while_keeps_its_history() -> None:
    health = observed([*corrected(0, 0), *[CALM] * 5, *corrected(CORRECTED_DEGRADED)])[-1]
    assert health.reason.startswith(f"NPU 3: {CORRECTED_DEGRADED} corrected")
    health = observed(corrected(0, None, CORRECTED_DEGRADED))[-1]
    assert health.reason.startswith(f"NPU 3: {CORRECTED_DEGRADED} corrected")

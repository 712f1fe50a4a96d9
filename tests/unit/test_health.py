"""The score, its bands, and what never happens: flapping, and a busy node called critical."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mpift.core.health import (
    HEALTHY_BELOW,
    LIMITS,
    MARGIN,
    SAMPLES_TO_FALL,
    Band,
    Health,
    Limit,
    Metrics,
)
from mpift.errors import MpiftError
from tests.unit.health_samples import ALL_OVER, CALM, observed, settled

IDLE = dict.fromkeys(LIMITS, 0.0)

shares = st.floats(0, 1)
uses = st.fixed_dictionaries(dict.fromkeys(LIMITS, st.none() | shares))


def metrics(use: Mapping[str, float | None]) -> Metrics:
    """Metrics of these uses, by name."""
    return Metrics(
        cpu=use.get("cpu"),
        memory=use.get("memory"),
        disk=use.get("disk"),
        network=use.get("network"),
    )


def test_the_limits_are_the_published_ones() -> None:
    table = {name: (limit.threshold, limit.weight) for name, limit in LIMITS.items()}
    assert table == {
        "cpu": (0.9, 0.4),
        "memory": (0.85, 0.3),
        "disk": (0.8, 0.2),
        "network": (0.95, 0.1),
    }


@pytest.mark.parametrize("name", LIMITS)
def test_a_single_metric_over_its_threshold_is_abnormal_but_never_critical(name: str) -> None:
    at_threshold = settled(metrics({**IDLE, name: LIMITS[name].threshold}))
    used_up = settled(metrics({**IDLE, name: 1.0}))
    assert at_threshold.band is used_up.band is Band.DEGRADED
    assert at_threshold.score == pytest.approx(HEALTHY_BELOW)


@pytest.mark.parametrize("name", LIMITS)
def test_a_metric_that_is_the_only_one_known_is_never_critical(name: str) -> None:
    assert settled(metrics({name: 1.0})).band is Band.DEGRADED


@given(memory=st.none() | st.floats(0, 0.849), disk=st.none() | st.floats(0, 0.799))
def test_busy_is_not_dead(memory: float | None, disk: float | None) -> None:
    busy = Metrics(cpu=1.0, network=1.0, accelerator=1.0, memory=memory, disk=disk)
    assert settled(busy).band is Band.DEGRADED


def test_one_metric_used_up_is_not_critical_though_the_rest_is_just_below_its_thresholds() -> None:
    health = settled(Metrics(cpu=0.89, memory=1.0, disk=0.79, network=0.94))
    assert health.score is not None
    assert health.score > 1
    assert health.band is Band.DEGRADED


def test_busy_rates_alone_are_not_critical_whatever_their_limits() -> None:
    low = Limit(threshold=0.5, weight=0.5, is_capacity=False)
    strict = Health(limits={"cpu": low, "network": low})
    assert settled(Metrics(cpu=1.0, network=1.0), strict).band is Band.DEGRADED


def test_a_busy_accelerator_is_healthy() -> None:
    busy = Metrics(cpu=0.3, memory=0.3, disk=0.3, network=0.1, accelerator=1.0)
    assert settled(busy) == settled(CALM)


@given(uses)
def test_below_0_8_is_healthy_and_nothing_else_is(use: dict[str, float | None]) -> None:
    assume(any(value is not None for value in use.values()))
    health = settled(metrics(use))
    assert health.score is not None
    assert (health.band <= Band.NEAR) == (health.score < HEALTHY_BELOW)
    assert bool(health.reason) == (health.band is not Band.HEALTHY)


def test_a_node_with_everything_at_its_threshold_scores_1_and_is_critical() -> None:
    health = settled(metrics({name: limit.threshold for name, limit in LIMITS.items()}))
    assert (health.score, health.band) == (1.0, Band.CRITICAL)


def test_many_metrics_close_to_their_limits_degrade_a_node_that_breaches_none() -> None:
    health = settled(Metrics(cpu=0.8, memory=0.75, disk=0.7, network=0.3))
    assert health.band is Band.DEGRADED
    assert "weighted score 0.83, healthy below 0.8" in health.reason


@given(uses, st.sampled_from(sorted(LIMITS)))
def test_what_is_unknown_is_not_held_against_a_node(
    use: dict[str, float | None], name: str
) -> None:
    known, unknown = settled(metrics(use)), settled(metrics({**use, name: None}))
    assert unknown.band <= known.band
    assert (unknown.score or 0.0) <= (known.score or 0.0)


@given(uses, uses)
def test_more_use_never_looks_healthier(
    use: dict[str, float | None], more: dict[str, float | None]
) -> None:
    higher = {
        name: None if value is None else max(value, more[name] or 0.0)
        for name, value in use.items()
    }
    low, high = settled(metrics(use)), settled(metrics(higher))
    assert low.band <= high.band
    assert (low.score or 0.0) <= (high.score or 0.0) + 1e-9


def test_a_filling_disk_is_warned_about_before_it_is_over_its_threshold() -> None:
    story = observed(Metrics(cpu=0.3, disk=(percent + 0.5) / 100) for percent in range(50, 95))
    bands = [health.band for health in story]
    assert bands == sorted(bands)
    reason = {health.band: health.reason for health in reversed(story)}
    assert reason == {
        Band.HEALTHY: "",
        Band.NEAR: "disk 72.5 % near its threshold 80 %",
        Band.DEGRADED: "disk 80.5 % over its threshold 80 %",
    }


def test_a_sudden_overload_climbs_one_band_a_sample() -> None:
    bands = [health.band for health in observed([CALM, *[ALL_OVER] * 4])]
    assert bands == [Band.HEALTHY, Band.NEAR, Band.DEGRADED, Band.CRITICAL, Band.CRITICAL]


def test_the_reason_names_every_metric_at_its_limit_the_gravest_first() -> None:
    assert settled(Metrics(cpu=0.95, memory=0.8, disk=0.91, network=0.2)).reason.split("; ") == [
        "disk 91 % over its threshold 80 %",
        "cpu 95 % over its threshold 90 %",
        "memory 80 % near its threshold 85 %",
        "weighted score 0.95, healthy below 0.8",
    ]


def test_a_band_is_left_only_after_several_samples_below_its_margin() -> None:
    over, under = Metrics(disk=0.85), Metrics(disk=0.1)
    just_under = Metrics(disk=0.8 / (1 + MARGIN) + 0.001)
    degraded = settled(over)
    assert settled(just_under, degraded).band is Band.DEGRADED
    story = observed([*[under] * (SAMPLES_TO_FALL - 1), over, *[under] * SAMPLES_TO_FALL], degraded)
    assert [health.band for health in story[:-1]] == [Band.DEGRADED] * (len(story) - 1)
    assert story[0].reason == "recovering from degraded"
    assert (story[-1].band, story[-1].reason) == (Band.HEALTHY, "")


@given(
    base=st.fixed_dictionaries(dict.fromkeys(LIMITS, st.none() | st.floats(0, 1 / (1 + MARGIN)))),
    start=st.sampled_from([CALM, ALL_OVER, Metrics(disk=0.85), Metrics(disk=0.74)]),
    noise=st.lists(
        st.fixed_dictionaries(dict.fromkeys(LIMITS, st.floats(0, 0.99 * MARGIN))), max_size=40
    ),
)
def test_noise_below_the_margin_changes_the_band_at_most_once(
    base: dict[str, float | None], start: Metrics, noise: list[dict[str, float]]
) -> None:
    def wavering(by: dict[str, float]) -> Metrics:
        return metrics({n: None if u is None else u * (1 + by[n]) for n, u in base.items()})

    lowest = metrics(base)
    story = observed(map(wavering, noise), settled(lowest, settled(start)))
    bands = [settled(lowest, settled(start)).band, *(health.band for health in story)]
    assert sum(a != b for a, b in itertools.pairwise(bands)) <= 1


def test_the_noise_test_can_fail_noise_above_the_margin_does_change_the_band_back() -> None:
    above, below = Metrics(disk=0.8), Metrics(disk=0.8 / (1 + 1.1 * MARGIN))
    bands = [health.band for health in observed(([above] * 2 + [below] * SAMPLES_TO_FALL) * 3)]
    assert bands.count(Band.DEGRADED) >= 3
    assert Band.NEAR in bands[bands.index(Band.DEGRADED) :]


def test_a_metric_that_comes_and_goes_does_not_make_the_band_flap() -> None:
    gone = Metrics(cpu=0.3)
    story = observed([Metrics(cpu=0.3, disk=0.9), gone] * 10, settled(Metrics(disk=0.9)))
    assert {health.band for health in story} == {Band.DEGRADED}


def test_a_node_of_which_nothing_is_known_keeps_its_band_and_has_no_score() -> None:
    assert settled(Metrics(accelerator=0.5)).band is Band.HEALTHY
    unknown = settled(Metrics(), settled(ALL_OVER))
    assert (unknown.band, unknown.score) == (Band.CRITICAL, None)


def test_an_accelerator_fault_is_critical_at_once_and_named() -> None:
    broken = Metrics(cpu=0.1, accelerator_fault="device 3: uncorrectable memory error")
    story = observed([CALM, broken])
    assert story[-1].band is Band.CRITICAL
    assert story[-1].reason == "accelerator fault: device 3: uncorrectable memory error"
    assert settled(Metrics(accelerator_fault="device 3: lost")).band is Band.CRITICAL


def test_a_fault_that_is_gone_is_forgotten_after_several_samples() -> None:
    story = observed([CALM] * SAMPLES_TO_FALL, settled(Metrics(accelerator_fault="lost")))
    assert [health.band for health in story] == [Band.CRITICAL, Band.CRITICAL, Band.HEALTHY]
    assert story[0].reason == "recovering from critical"


def test_health_alone_never_evicts_unless_configured() -> None:
    story = observed([ALL_OVER] * 100)
    assert not any(health.evict_due(None) or health.evict_due(0) for health in story)
    due = [health.evict_due(30) for health in story]
    assert due.index(True) == 32  # critical with the third sample, at second 2
    assert not any(health.evict_due(30) for health in observed([Metrics(disk=0.99)] * 100))


def test_only_an_unbroken_critical_time_counts_and_the_unknown_does_not_lengthen_it() -> None:
    critical = observed([ALL_OVER] * 11)[-1]
    assert critical.critical_seconds == 8
    assert observed([Metrics()] * 100, critical)[-1].critical_seconds == 8
    assert settled(CALM, critical).critical_seconds == 0
    again = observed([ALL_OVER] * 4, settled(CALM, critical))[-1]
    assert again.critical_seconds == 1


@pytest.mark.parametrize("share", [-0.01, 1.01, math.nan, math.inf])
def test_a_use_that_is_no_share_is_refused_by_name(share: float) -> None:
    with pytest.raises(MpiftError, match=f"disk use is {share}, not a share"):
        Metrics(disk=share)


@pytest.mark.parametrize(
    ("threshold", "weight"), [(0, 0.1), (1.1, 0.1), (math.nan, 0.1), (0.5, 0), (0.5, math.inf)]
)
def test_a_limit_that_makes_no_sense_is_refused(threshold: float, weight: float) -> None:
    with pytest.raises(MpiftError):
        Limit(threshold, weight, is_capacity=True)


def test_limits_of_ones_own_replace_the_published_ones() -> None:
    own = Health(limits={"disk": Limit(threshold=0.5, weight=1.0, is_capacity=True)})
    assert settled(Metrics(cpu=1.0, disk=0.3), own).band is Band.HEALTHY
    assert settled(Metrics(cpu=1.0, disk=0.6), own).reason.startswith("disk 60 % over")


def test_people_are_told_of_a_capacity_near_its_limit_and_not_of_a_busy_node() -> None:
    busy = Health().observe(0.0, Metrics(cpu=1.0, memory=0.3, network=1.0))
    assert busy.band > Band.HEALTHY
    assert not busy.is_serious
    full = Health().observe(0.0, Metrics(cpu=1.0, memory=0.94))
    assert full.is_serious
    assert Health().observe(0.0, Metrics(accelerator_fault="lost")).is_serious

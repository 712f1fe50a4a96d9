"""Who is alive and makes no progress while others wait."""

from __future__ import annotations

from mpift.core.stalls import Stalled, StallInspector, Standing


def observe(
    inspector: StallInspector, now: float, steps: list[int], waiting: list[bool]
) -> list[Stalled]:
    ranks = {m: Standing(*pair) for m, pair in enumerate(zip(steps, waiting, strict=True))}
    return inspector.observe(now, ranks)


def test_the_one_that_all_others_wait_for_is_named_once() -> None:
    inspector = StallInspector(60.0, 0.0)
    waiting = [True, False, True]
    assert observe(inspector, 0.0, [7, 7, 7], waiting) == []
    assert observe(inspector, 59.0, [7, 7, 7], waiting) == []
    assert observe(inspector, 61.0, [7, 7, 7], waiting) == [Stalled(1, 7, 61.0, evict=False)]
    assert observe(inspector, 500.0, [7, 7, 7], waiting) == []


def test_progress_and_a_time_without_anybody_waiting_start_the_time_anew() -> None:
    inspector = StallInspector(60.0, 0.0)
    observe(inspector, 0.0, [7, 7], [True, False])
    observe(inspector, 50.0, [8, 8], [True, False])
    assert observe(inspector, 70.0, [8, 8], [True, False]) == []
    observe(inspector, 80.0, [8, 8], [False, False])
    observe(inspector, 90.0, [8, 8], [True, False])
    assert observe(inspector, 149.0, [8, 8], [True, False]) == []
    assert [s.member for s in observe(inspector, 151.0, [8, 8], [True, False])] == [1]


def test_a_long_step_of_all_is_no_stall() -> None:
    inspector = StallInspector(60.0, 90.0)
    for now in range(0, 1000, 10):
        assert observe(inspector, now, [7, 7], [False, False]) == []


def test_only_a_configured_limit_evicts() -> None:
    inspector = StallInspector(60.0, 90.0)
    observe(inspector, 0.0, [7, 7], [True, False])
    assert [s.evict for s in observe(inspector, 61.0, [7, 7], [True, False])] == [False]
    assert [s.evict for s in observe(inspector, 91.0, [7, 7], [True, False])] == [True]


def test_ranks_that_all_wait_for_each_other_are_all_named_and_nobody_is_evicted() -> None:
    inspector = StallInspector(60.0, 90.0)
    observe(inspector, 0.0, [7, 7], [True, True])
    found = observe(inspector, 61.0, [7, 7], [True, True])
    assert [(s.member, s.evict) for s in found] == [(0, False), (1, False)]
    assert observe(inspector, 100.0, [7, 7], [True, True]) == []


def test_a_new_view_starts_everything_afresh() -> None:
    inspector = StallInspector(60.0, 0.0)
    observe(inspector, 0.0, [7, 7], [True, False])
    inspector.forget()
    assert observe(inspector, 61.0, [7, 7], [True, False]) == []

"""The watchdog's judgement, rule by rule, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.core.hangs import Judge, Kill, Limits, Observation, Phase

TICK = 0.1
LIMITS = Limits(
    hang_timeout_seconds=5.0,
    stop_timeout_seconds=1.0,
    busy_hang_factor=4.0,
    blocked_grace_seconds=2.0,
    orphan_timeout_seconds=10.0,
    tick_seconds=TICK,
)

# What a rank looks like at a time; its beats go on by themselves unless they are given.
Script = Callable[[float], Mapping[str, object]]


def healthy(_: float) -> Mapping[str, object]:
    return {}


def still(_: float) -> Mapping[str, object]:
    return {"beats": 7}


def judge(
    *ranks: Script, seconds: float = 100.0, tick: float = TICK
) -> list[tuple[float, int, str]]:
    """(time, member, reason) of all kills; a killed rank is no longer there afterwards."""
    watchdog, killed, found = Judge(LIMITS), set[int](), []
    for index in range(round(seconds / tick)):
        now = index * tick
        live = []
        for member, script in enumerate(ranks):
            if member not in killed:
                seen = {"phase": Phase.RUNNING, "beats": 1000 + index, **script(now)}
                live.append(Observation(member=member, **seen))  # type: ignore[arg-type]
        for kill in watchdog.tick(now, live):
            killed.add(kill.member)
            found.append((now, kill.member, kill.reason))
    return found


def only(found: list[tuple[float, int, str]], member: int, earliest: float, latest: float) -> str:
    """The reason of the only kill, which is of this member and at such a time."""
    assert [(m, earliest <= at <= latest) for at, m, _ in found] == [(member, True)], found
    return found[0][2]


def test_healthy_ranks_are_left_alone() -> None:
    assert judge(healthy, healthy) == []


def test_a_rank_stopped_while_another_runs_is_killed_after_the_stop_timeout() -> None:
    def stops(now: float) -> Mapping[str, object]:
        return {"state": "T", "beats": 7} if now >= 3 else {}

    reason = only(judge(healthy, stops), 1, 4.0, 4.4)
    assert "stopped" in reason
    assert "stop_timeout=1 s" in reason


def test_a_rank_stopped_for_less_than_the_limit_goes_on() -> None:
    def stops(now: float) -> Mapping[str, object]:
        return {"state": "T", "beats": 7} if now % 5 < 0.8 else {}

    assert judge(healthy, stops) == []


def test_when_all_are_stopped_nobody_is_killed_however_long() -> None:
    def stops(now: float) -> Mapping[str, object]:
        return {"state": "T", "beats": 7} if 3 <= now < 90 else {}

    assert judge(stops, stops) == []


def test_a_lone_rank_that_is_stopped_is_waited_for() -> None:
    assert judge(lambda now: {"state": "T", "beats": 7} if now >= 3 else {}) == []


def test_ranks_that_stop_and_continue_one_by_one_are_not_killed() -> None:
    def stopped(start: float, end: float) -> Script:
        return lambda now: {"state": "T", "beats": 7} if start <= now < end else {}

    ranks = [stopped(3 + 0.4 * i, 30 + 0.4 * i) for i in range(8)]  # 2.8 s from first to last
    assert judge(*ranks) == []


def test_one_that_stays_stopped_when_the_others_have_continued_is_killed() -> None:
    def stopped(end: float) -> Script:
        return lambda now: {"state": "T", "beats": 7} if 3 <= now < end else {}

    only(judge(stopped(30), stopped(30.4), stopped(1000)), 2, 31.4, 31.8)


def test_others_that_stop_and_continue_without_end_save_a_stopped_one_only_for_a_while() -> None:
    def flickers(now: float) -> Mapping[str, object]:
        return {"state": "T"} if round(now / TICK) % 8 < 4 else {}

    found = judge(flickers, healthy, lambda now: {"state": "T", "beats": 7})
    only(found, 2, 5.0, 5.4)


def test_a_rank_in_a_debugger_is_no_sign_that_others_should_run() -> None:
    traced = lambda now: {"state": "t", "traced": True, "beats": 7}  # noqa: E731
    assert judge(traced, lambda now: {"state": "T", "beats": 7}) == []


def test_one_that_waits_for_a_disk_is_no_sign_that_others_should_run() -> None:
    stopped = lambda now: {"state": "T", "beats": 7} if now < 4.5 else {}  # noqa: E731
    waits = lambda now: {"state": "D", "beats": 7} if now < 4.5 else {}  # noqa: E731
    assert judge(stopped, waits) == []


@pytest.mark.parametrize("state", ["S", "D", "R"])
def test_a_counter_that_stands_still_without_cpu_time_ends_the_rank_after_the_hang_timeout(
    state: str,
) -> None:
    found = judge(healthy, lambda now: {"state": state, "beats": 7, "cpu_seconds": 3.0})
    reason = only(found, 1, 5.0, 5.4)
    assert "without using the CPU" in reason
    assert "hang_timeout=5 s" in reason


def test_a_lone_rank_that_hangs_is_killed_too() -> None:
    only(judge(still), 0, 5.0, 5.4)


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_one_that_uses_the_cpu_gets_the_busy_factor_and_no_more(share: float) -> None:
    found = judge(healthy, lambda now: {"beats": 7, "cpu_seconds": 100 + share * now})
    reason = only(found, 1, 20.0, 20.4)
    assert "4 x hang_timeout=5 s" in reason


def test_threads_that_only_wait_for_the_interpreters_lock_are_not_work() -> None:
    only(judge(lambda now: {"beats": 7, "cpu_seconds": 100 + 0.02 * now}), 0, 5.0, 5.4)


def test_cpu_time_from_before_the_silence_does_not_count() -> None:
    def works_then_hangs(now: float) -> Mapping[str, object]:
        if 1 <= now < 2:
            return {"beats": 5, "cpu_seconds": 1}  # an earlier, short silence
        return {"cpu_seconds": now} if now < 30 else {"beats": 7, "cpu_seconds": 30}

    only(judge(works_then_hangs), 0, 35.0, 35.4)


def test_a_rank_in_a_blocking_call_is_judged_by_that_calls_limit() -> None:
    def blocked(limit: float) -> Script:
        return lambda now: (
            {}
            if now < 1
            else {"beats": 7, "blocked_since_seconds": 1.0, "blocked_limit_seconds": limit}
        )

    reason = only(judge(blocked(30.0), healthy), 0, 33.0, 33.4)
    assert "blocking MPI call" in reason
    assert "its limit is 30 s" in reason
    only(judge(blocked(1.0), healthy), 0, 4.0, 4.4)


def test_one_blocking_call_after_another_is_not_one_long_one() -> None:
    def rebuilds(now: float) -> Mapping[str, object]:
        return {"beats": 7, "blocked_since_seconds": 1 + now // 2.5, "blocked_limit_seconds": 1.0}

    assert judge(rebuilds) == []


def test_after_a_blocking_call_the_silence_starts_anew() -> None:
    def returns(now: float) -> Mapping[str, object]:
        if now < 4:
            return {"beats": 7, "blocked_since_seconds": 0.5, "blocked_limit_seconds": 30.0}
        return {"beats": 7} if now < 8.5 else {}

    assert judge(returns) == []


@pytest.mark.parametrize("what", [{"traced": True}, {"dumping_core": True}, {"state": "t"}])
def test_who_is_debugged_or_dumps_core_is_never_killed(what: dict[str, object]) -> None:
    def looked_into(now: float) -> Mapping[str, object]:
        return {"beats": 7, "orphaned": True, **what}

    assert judge(healthy, looked_into) == []


def test_a_debugger_that_goes_leaves_the_whole_time_again() -> None:
    found = judge(healthy, lambda now: {"beats": 7, "traced": now < 20})
    only(found, 1, 24.9, 25.4)


def test_one_that_has_left_is_never_judged_and_does_not_count_as_running() -> None:
    def left(now: float) -> Mapping[str, object]:
        return {"phase": Phase.LEFT, "beats": 7, "orphaned": True}

    assert judge(left, lambda now: {"state": "T", "beats": 7}) == []


def test_one_that_is_still_starting_may_stand_still_but_not_be_stopped() -> None:
    starting = {"phase": Phase.STARTING, "beats": 0}
    assert judge(healthy, lambda now: starting) == []
    only(judge(healthy, lambda now: {**starting, "state": "T"}), 1, 1.0, 1.4)


def test_an_orphan_has_time_to_save_and_is_then_killed_even_if_all_are_stopped() -> None:
    reason = only(judge(lambda now: {"orphaned": now >= 5}), 0, 15.0, 15.4)
    assert "launcher" in reason
    assert "orphan_timeout=10 s" in reason
    only(judge(lambda now: {"orphaned": now >= 5, "state": "T", "beats": 7}), 0, 15.0, 15.4)


def test_a_watchdog_that_woke_late_counts_none_of_the_time_that_it_slept() -> None:
    watchdog = Judge(LIMITS)
    silent = Observation(0, Phase.RUNNING, 7)
    stopped = Observation(1, Phase.RUNNING, 7, state="T")
    for now in (0.0, 0.1, 1000.0, 1000.1):
        assert watchdog.tick(now, [silent, stopped]) == []
    assert watchdog.silent_seconds(0) == pytest.approx(0.4)  # two ticks, and one capped gap


def test_a_watchdog_that_is_always_late_still_finds_a_hang() -> None:
    only(judge(still, tick=1.0, seconds=200), 0, 25.0, 27.0)


def test_a_clock_that_stands_or_goes_back_counts_nothing() -> None:
    watchdog = Judge(LIMITS)
    for now in [5.0, 4.0, 4.0] * 100:
        watchdog.tick(now, [Observation(0, Phase.RUNNING, 7)])
    assert watchdog.silent_seconds(0) <= 100 * 2 * TICK
    assert watchdog.silent_seconds(5) == 0


def test_a_rank_is_named_once() -> None:
    watchdog = Judge(LIMITS)
    hung = Observation(0, Phase.RUNNING, 7)
    kills = [kill for i in range(300) for kill in watchdog.tick(i * TICK, [hung])]
    assert [kill.member for kill in kills] == [0]


gaps = st.one_of(st.floats(0.01, 0.3), st.floats(0.01, 2.0), st.floats(2.0, 1e6))


@given(st.lists(st.tuples(gaps, st.sampled_from("RSD"), st.floats(0, 1)), max_size=200))
def test_no_rank_whose_counter_moves_each_half_of_the_timeout_is_ever_killed(
    ticks: list[tuple[float, str, float]],
) -> None:
    """However late the watchdog wakes, whatever else it sees."""
    watchdog, now = Judge(LIMITS), 0.0
    for gap, state, cpu_seconds in ticks:
        now += gap
        beats = int(now / (LIMITS.hang_timeout_seconds / 2))
        live = [
            Observation(0, Phase.RUNNING, beats, state=state, cpu_seconds=cpu_seconds),
            Observation(1, Phase.RUNNING, 7, state="D"),  # hangs, and its end disturbs nobody
        ]
        assert all(kill.member == 1 for kill in watchdog.tick(now, live))


@given(st.data())
def test_a_silent_rank_is_killed_within_the_limit_and_a_tick_whatever_others_do(
    data: st.DataObject,
) -> None:
    watchdog = Judge(LIMITS)
    states = st.sampled_from("RSDT")
    hung = Observation(0, Phase.RUNNING, 7)
    kills: list[Kill] = []
    for index in range(round((LIMITS.hang_timeout_seconds + 3 * TICK) / TICK)):
        other = Observation(1, Phase.RUNNING, index, state=data.draw(states))
        kills += watchdog.tick(index * TICK, [hung, other])
    assert 0 in [kill.member for kill in kills]

"""Majority rounds on real ranks: some are late, some leave early, some die meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpift.core import chaos
from mpift.testing.ranks import Outcome, run_ranks
from tests.mpi import majority_counting as counting
from tests.mpi import majority_deaths as deaths
from tests.mpi import majority_mixture as mixture
from tests.mpi import majority_scenarios as scenarios

STRAGGLER = scenarios.STRAGGLER

# Scenarios without deaths, all on one start of three ranks.
SHARED = [
    counting.carried,
    counting.dropped,
    scenarios.five_behind_in_rounds,
    scenarios.five_behind_in_a_plain_loop,
    scenarios.everybody_needed,
    scenarios.evaluation,
    scenarios.operation_a_step_in_rounds,
    scenarios.operation_a_step_in_a_plain_loop,
    scenarios.uneven_loops,
    scenarios.steps_alone,
    scenarios.skipped_steps,
    scenarios.unequal_optimizers,
    scenarios.scaled_alone,
    scenarios.straggler,
    scenarios.averaged,
    scenarios.operation_before_step,
    scenarios.scheduler_kept,
]


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Any]]:
    """By scenario, what the three ranks returned."""
    outcome = run_ranks(3, SHARED, timeout_seconds=120)
    assert sorted(outcome.results) == [0, 1, 2], str(outcome)
    return {
        scenario.__name__: [outcome.results[member][index] for member in (0, 1, 2)]
        for index, scenario in enumerate(SHARED)
    }


def all_equal(values: list[Any]) -> bool:
    return all(value == values[0] for value in values)


def of_survivors(outcome: Outcome, members: set[int]) -> list[Any]:
    """Their results, in order of rank; they all have to be there, and nobody else's."""
    assert set(outcome.results) == members, str(outcome)
    return list(outcome.results.values())


def test_with_carry_every_gradient_counts_once_and_none_is_lost(seen: dict[str, Any]) -> None:
    for found in seen["carried"]:
        assert all(each["conserved"] for each in found), found
        assert all(each["participations"] for each in found), found


def test_with_drop_late_gradients_never_count_and_others_once(seen: dict[str, Any]) -> None:
    for found in seen["dropped"]:
        assert found == {
            "alike": True,
            "once": True,
            "participations": True,
            "some_dropped": True,
        }


@pytest.mark.parametrize("loop", ["rounds", "a_plain_loop"])
def test_a_rank_five_rounds_behind_ends_with_the_same_bits_and_learning_rate(
    seen: dict[str, Any], loop: str
) -> None:
    found = seen[f"five_behind_in_{loop}"]
    for what in ("digest", "at_the_end", "lr", "applied"):
        assert all_equal([each[what] for each in found]), what
    replayed = [report["replayed"] for report in found[STRAGGLER]["reports"]]
    assert replayed[:5] == [True] * 5
    # Its gradient counts in a round of its own, after all the others have had theirs.
    participants = [report["participants"] for report in found[0]["reports"]]
    assert participants == [2, 2, 2, 2, 2, 1]
    assert found[0]["lr"][2] == 6  # the scheduler's count


def test_a_quorum_of_all_never_leaves_a_rank_out(seen: dict[str, Any]) -> None:
    assert all_equal([each["digest"] for each in seen["everybody_needed"]])
    for found in seen["everybody_needed"]:
        assert found["reports"] == [
            {"participants": 3, "size": 3, "late": [], "replayed": False}
        ] * len(found["reports"])


def test_an_evaluation_on_one_rank_holds_nobody_up(seen: dict[str, Any]) -> None:
    found = seen["evaluation"]
    assert all_equal([each["at_the_end"] for each in found])
    replayed = [report["replayed"] for report in found[0]["reports"]]
    assert replayed[:3] == [True] * 3  # of the second epoch


@pytest.mark.parametrize("loop", ["rounds", "a_plain_loop"])
def test_with_an_operation_a_step_a_rank_that_was_late_is_in_step_again(
    seen: dict[str, Any], loop: str
) -> None:
    found = seen[f"operation_a_step_in_{loop}"]
    assert all_equal([each["digest"] for each in found])
    assert all_equal([each["losses"] for each in found])
    assert found[STRAGGLER]["reports"][4]["replayed"]
    for each in found:
        assert len(each["losses"]) == 12
        assert all(report["participants"] == 3 for report in each["reports"][6:12])
        assert not any(report["replayed"] for report in each["reports"][5:12])


def test_uneven_loops_end_with_the_same_bits(seen: dict[str, Any]) -> None:
    assert all_equal(seen["uneven_loops"])
    assert len(set(seen["uneven_loops"][0])) > 1  # clipping makes a difference


def test_a_step_that_was_declined_and_counts_later_holds_nobody_up(seen: dict[str, Any]) -> None:
    assert all_equal(seen["steps_alone"])


def test_a_step_that_the_script_leaves_out_after_synchronize_changes_nothing(
    seen: dict[str, Any],
) -> None:
    assert all_equal(seen["skipped_steps"])
    for changed, applied, _ in seen["skipped_steps"][0].values():
        assert changed == [False, False, False, True, False]
        assert applied in (4, 5)  # the last one is skipped at the latest by the next call


def test_optimizers_that_step_unequally_often_wait_for_no_rank_for_ever(
    seen: dict[str, Any],
) -> None:
    assert all_equal(seen["unequal_optimizers"])


def test_no_scaled_gradient_is_applied_as_it_is(seen: dict[str, Any]) -> None:
    found = seen["scaled_alone"]
    assert all_equal([each["digest"] for each in found])
    assert found[0]["moved"] < 10.0  # a step with the scaled one goes over thousands


def test_rounds_tell_who_was_late_and_how_many_took_part(seen: dict[str, Any]) -> None:
    found = seen["straggler"]
    reports = [each["reports"] for each in found]
    assert all_equal([[report["participants"] for report in each] for each in reports])
    assert found[0]["late_for"]
    for number in found[0]["late_for"]:
        seen_by_coordinator = reports[0][number]
        assert seen_by_coordinator["participants"] == 2
        assert seen_by_coordinator["late"] == [STRAGGLER]
        assert reports[STRAGGLER][number]["replayed"]


def test_an_average_is_over_those_who_took_part(seen: dict[str, Any]) -> None:
    for weight, expected in seen["averaged"]:
        assert weight == expected
        assert weight % 2  # a round without the straggler is in it


def test_a_round_that_the_script_has_yet_to_deal_with_is_not_taken_from_it(
    seen: dict[str, Any],
) -> None:
    assert all_equal(seen["operation_before_step"])
    assert seen["operation_before_step"][0][1] == [False, False]


def test_a_registered_scheduler_can_be_saved_and_loaded(seen: dict[str, Any]) -> None:
    for found in seen["scheduler_kept"]:
        assert found == {"epochs": 4, "lr": 0.025}


def test_two_ranks_need_each_other_until_one_is_dead() -> None:
    outcome = run_ranks(2, deaths.two_and_then_one)
    (found,) = of_survivors(outcome, {0})
    rounds = [(report["participants"], report["size"]) for report in found["reports"]]
    # Twelve steps of both; the thirteenth may have had the dead one's gradient no more.
    assert rounds[:12] == [(2, 2)] * 12
    assert rounds[12:] == [(1, 1)] * 8


@pytest.mark.parametrize(
    ("ranks", "scenario", "dead"),
    [
        (3, deaths.giver_dies_in_the_transfer, 0),
        (3, deaths.taker_dies_in_the_transfer, 2),
        (3, deaths.late_rank_dies_in_its_replay, 2),
        (4, deaths.coordinator_dies_before_its_nudge, 0),
    ],
)
def test_a_death_while_a_rank_catches_up_leaves_the_others_alike(
    ranks: int, scenario: Any, dead: int
) -> None:
    outcome = run_ranks(ranks, scenario)
    found = of_survivors(outcome, set(range(ranks)) - {dead})
    assert all_equal([each["digest"] for each in found])


def test_what_one_rank_has_learned_of_a_round_the_next_one_learns_from_it(tmp_path: Path) -> None:
    outcome = run_ranks(3, deaths.giver_dies_between_two, str(tmp_path))
    found = of_survivors(outcome, {1, 2})
    assert all_equal([each["digest"] for each in found])


def check_mixture(seed: int) -> None:
    ranks = 3 + seed % 2
    way = mixture.draw(seed, ranks)
    dead = {fault.member for fault in chaos.parse(way.chaos).faults if fault.fatal}
    reduction = "mpi" if seed % 4 > 1 else "node"
    outcome = run_ranks(
        ranks, mixture.train, seed, ranks, environment={"MPIFT_REDUCTION": reduction}
    )
    told = f"seed {seed}: {way}\n{outcome}"
    assert not outcome.timed_out, told
    # Who is to die at a certain time may have ended before.
    assert set(range(ranks)) - dead - set(way.kills) <= set(outcome.results), told
    assert not dead & set(outcome.results), told
    assert all_equal([each["digests"] for each in outcome.results.values()]), told
    for each in outcome.results.values():
        assert each["alike"], told
        assert each["finite"], told


@pytest.mark.parametrize("seed", [1, 3, pytest.param(211, marks=pytest.mark.long)])
def test_all_live_ranks_are_bit_identical_after_delays_stalls_and_deaths(seed: int) -> None:
    check_mixture(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 130))
def test_bit_identity_over_many_seeds(seed: int) -> None:
    check_mixture(seed)

"""State from peers on real ranks, while they die."""

from __future__ import annotations

from mpift.testing.ranks import TCP, run_ranks
from tests.mpi import recovery_scenarios as scenarios


def test_a_state_is_fetched_whole_although_one_of_two_donors_dies_in_the_middle() -> None:
    outcome = run_ranks(3, scenarios.fetch_while_a_donor_dies, 20, 1, mpi_arguments=TCP)
    assert sorted(outcome.results) == [0, 2], str(outcome)
    found = outcome.results[0]
    assert found["members"] == [0, 2]
    assert found["same"]
    assert "array 'bias' of state 'state' could not be fetched" in found["error"]
    assert "member 1 has left the view; member 2 gave bytes with digest" in found["error"]

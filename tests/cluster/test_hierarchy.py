"""Sums within nodes and between them, on three virtual nodes."""

from __future__ import annotations

from typing import Any

import pytest

from mpift.testing.cluster import VirtualCluster
from tests.cluster import hierarchy_scenarios as scenarios
from tests.cluster.clusters import require_clusters

EVERYBODY = [0, 1, 2, 3, 4, 5]


def run(ways: list[str], chaos: str, members: list[int]) -> dict[int, Any]:
    require_clusters()
    with VirtualCluster(3) as cluster:
        outcome = cluster.run_ranks(
            scenarios.sums_in,
            ways,
            slots_a_node=2,
            timeout_seconds=90,
            environment={"MPIFT_CHAOS": chaos},
        )
    assert sorted(outcome.results) == members, str(outcome)
    return outcome.results


def only(found: list[Any]) -> Any:
    """What all say."""
    assert all(each == found[0] for each in found), found
    return found[0]


def test_sums_within_nodes_and_between_them_equal_those_over_all_ranks_to_rounding() -> None:
    results = run(["node", "mpi"], "", EVERYBODY)
    for result in results.values():
        assert result["node"]["shares"]
        assert not result["mpi"]["shares"]
        assert max(result["node"]["furthest"], result["mpi"]["furthest"]) < 1e-6
    for way in ("node", "mpi"):
        only([result[way]["digest"] for result in results.values()])
        took_part = only([result[way]["participants"] for result in results.values()])
        assert took_part == [EVERYBODY] * scenarios.ROUNDS


@pytest.mark.parametrize("point", ["bucket1", pytest.param("step", marks=pytest.mark.long)])
def test_nodes_with_different_numbers_of_ranks_agree_after_a_death(point: str) -> None:
    survivors = [0, 1, 3, 4, 5]
    results = run(["node"], f"kill:2@3:{point}", survivors)
    for result in results.values():
        assert result["view"] == survivors
        assert result["node"]["furthest"] < 1e-6
    only([result["node"]["digest"] for result in results.values()])
    took_part = only([result["node"]["participants"] for result in results.values()])
    assert took_part[:2] == [EVERYBODY] * 2
    assert took_part[4:] == [survivors] * (scenarios.ROUNDS - 4)

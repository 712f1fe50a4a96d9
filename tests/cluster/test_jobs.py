"""A job on a virtual cluster: ranks that die or stop, links that are cut, nodes that are lost."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest

from mpift.testing.cluster import VirtualCluster
from tests.cluster import scenarios
from tests.cluster.clusters import cluster, wait_until

__all__ = ["cluster"]  # a fixture for these tests


def test_ranks_of_three_nodes_meet(cluster: VirtualCluster) -> None:
    outcome = cluster.run_ranks(scenarios.meet, environment={"MPIFT_GATHER_SECONDS": "0.03"})
    assert sorted(outcome.results) == [0, 1, 2, 3, 4, 5], str(outcome)
    assert outcome.exit_code == 0
    for member, result in outcome.results.items():
        assert result["sum"] == [111111.0]
        assert result["host"] == f"node{member // 2 + 1}"
        assert result["nodes"] == 3
        assert result["neighbours"] == [member // 2 * 2, member // 2 * 2 + 1]
        assert result["setting"] == "0.03"
    assert outcome.left_running == ()


def test_five_go_on_when_a_rank_of_the_third_node_dies(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    killed_at: list[float] = []

    def kill_one(ranks: list[psutil.Process]) -> None:
        wait_until((tmp_path / "size-6").exists)
        assert ranks[5] in cluster.processes("node3")
        ranks[5].kill()
        killed_at.append(time.monotonic())
        wait_until((tmp_path / "size-5").exists)
        (tmp_path / "stop").touch()

    outcome = cluster.run_ranks(scenarios.reduce_until_told, str(tmp_path), during=kill_one)
    assert sorted(outcome.results) == [0, 1, 2, 3, 4], str(outcome)
    for result in outcome.results.values():
        assert result["sizes"] == [6, 5]
        assert result["alike"]
        assert 0 < result["seen_at"][1] - killed_at[0] < 10
    assert outcome.left_running == ()


def test_a_cut_of_half_a_second_is_waited_out_by_all(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    def cut_and_heal(_: list[psutil.Process]) -> None:
        wait_until((tmp_path / "size-6").exists)
        cluster.cut("node3")
        time.sleep(0.5)
        cluster.heal("node3")
        (tmp_path / "stop").touch()

    outcome = cluster.run_ranks(scenarios.reduce_and_keep_words, str(tmp_path), during=cut_and_heal)
    assert sorted(outcome.results) == [0, 1, 2, 3, 4, 5], str(outcome)
    for member, result in outcome.results.items():
        assert result["sizes"] == [6]
        assert result["longest_seconds"] > 0.4
        assert (tmp_path / f"words-{member}").read_text() == ""


# Beats so often that a test needs no minute; the proportions are those of the presets.
QUICK = {
    "MPIFT_HEARTBEAT_INTERVAL": "0.3",
    "MPIFT_HEARTBEAT_TIMEOUT": "2",
    "MPIFT_FENCE_TIMEOUT": "1",
}


def words_of(folder: Path) -> dict[int, str]:
    """What each rank said."""
    return {int(p.name.removeprefix("words-")): p.read_text() for p in folder.glob("words-*")}


@pytest.mark.parametrize(
    ("node", "watchdog"),
    [
        ("node3", "1"),
        ("node1", "0"),
        pytest.param("node1", "1", marks=pytest.mark.long),
        pytest.param("node3", "0", marks=pytest.mark.long),
    ],
)
def test_a_cut_ends_both_sides_and_the_minority_says_that_it_is_one(
    cluster: VirtualCluster, tmp_path: Path, node: str, watchdog: str
) -> None:
    minority = (4, 5) if node == "node3" else (0, 1)

    def cut_for_good(ranks: list[psutil.Process]) -> None:
        wait_until((tmp_path / "size-6").exists)
        cluster.cut(node)
        wait_until(lambda: all("gives up with code" in w for w in words_of(tmp_path).values()))
        wait_until(lambda: not any(rank.is_running() for rank in ranks), 10)
        cluster.heal(node)  # mpirun would wait for ever

    outcome = cluster.run_ranks(
        scenarios.reduce_and_keep_words,
        str(tmp_path),
        environment=QUICK | {"MPIFT_WATCHDOG": watchdog},
        during=cut_for_good,
        timeout_seconds=60,
    )
    assert outcome.results == {}, str(outcome)
    for member, words in words_of(tmp_path).items():
        assert "gives up with code 3: nobody answers on the nodes" in words, words
        assert ("start the job again" in words) == (member not in minority)
        assert "lost member" not in words


def test_a_rank_stopped_alone_on_its_node_is_fenced_from_another_one(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    def stop_one(ranks: list[psutil.Process]) -> None:
        wait_until((tmp_path / "size-3").exists)
        ranks[2].suspend()
        wait_until((tmp_path / "size-2").exists)
        (tmp_path / "stop").touch()

    outcome = cluster.run_ranks(
        scenarios.reduce_until_told,
        str(tmp_path),
        slots_a_node=1,
        environment=QUICK,
        during=stop_one,
    )
    assert sorted(outcome.results) == [0, 1], str(outcome)
    assert "rank 2 on node3 has not been heard" in outcome.stderr


def test_a_suspect_that_wakes_after_the_others_have_given_up_does_not_go_on_alone(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    def stop_and_wake(ranks: list[psutil.Process]) -> None:
        wait_until((tmp_path / "size-3").exists)
        ranks[2].suspend()
        wait_until(lambda: not any(rank.is_running() for rank in ranks[:2]))
        ranks[2].resume()
        wait_until(lambda: not ranks[2].is_running(), 15)

    outcome = cluster.run_ranks(
        scenarios.reduce_and_keep_words,
        str(tmp_path),
        slots_a_node=1,
        environment=QUICK | {"MPIFT_WATCHDOG": "0"},
        during=stop_and_wake,
    )
    assert outcome.results == {}, str(outcome)
    words = words_of(tmp_path)
    assert "start the job again without those nodes" in words[0]
    assert "gives up with code 3" in words[2], words[2]
    assert not (tmp_path / "size-1").exists()


def test_two_ranks_that_stop_one_after_the_other_are_both_left_out(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    def stop_two(ranks: list[psutil.Process]) -> None:
        wait_until((tmp_path / "size-3").exists)
        ranks[2].suspend()
        time.sleep(0.05)
        ranks[1].kill()
        wait_until((tmp_path / "size-1").exists)
        (tmp_path / "stop").touch()

    outcome = cluster.run_ranks(
        scenarios.reduce_until_told,
        str(tmp_path),
        slots_a_node=1,
        environment=QUICK,
        during=stop_two,
    )
    assert sorted(outcome.results) == [0], str(outcome)


def test_the_launcher_s_verdict_on_a_cut_is_that_the_job_has_to_be_started_again(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    def cut_for_good(_: list[psutil.Process]) -> None:
        wait_until((tmp_path / "size-6").exists)
        cluster.cut("node3")

    outcome = cluster.launch(
        *(scenarios.__file__, str(tmp_path)),
        during=cut_for_good,
        environment=QUICK,
        timeout_seconds=60,
    )
    assert outcome.exit_code == 3, str(outcome)
    assert "start the job again without those nodes" in outcome.stderr


@pytest.mark.long
def test_a_lost_node_ends_the_job_on_all_nodes(cluster: VirtualCluster, tmp_path: Path) -> None:
    def kill_the_third(_: list[psutil.Process]) -> None:
        wait_until((tmp_path / "size-6").exists)
        cluster.kill_node("node3")
        wait_until(lambda: not cluster.processes(), 15)

    outcome = cluster.run_ranks(scenarios.reduce_until_told, str(tmp_path), during=kill_the_third)
    assert outcome.results == {}, str(outcome)
    assert not outcome.timed_out


def test_the_launcher_s_verdict_on_a_lost_node_is_a_failure(
    cluster: VirtualCluster, tmp_path: Path
) -> None:
    def kill_the_third(_: list[psutil.Process]) -> None:
        wait_until((tmp_path / "size-6").exists)
        cluster.kill_node("node3")

    outcome = cluster.launch(
        *("--summary", str(tmp_path / "summary.json")),
        *(scenarios.__file__, str(tmp_path)),
        during=kill_the_third,
    )
    assert outcome.exit_code == 1, str(outcome)
    assert "no rank ended normally" in outcome.stderr
    assert outcome.left_running == ()
    assert cluster.processes() == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["world_start"], summary["world_end"]) == (6, 0)
    assert {rank["host"] for rank in summary["failed_ranks"]} == {"node1", "node2", "node3"}

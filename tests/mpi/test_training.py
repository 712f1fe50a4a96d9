"""``import mpift.torch as hvd`` on real ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpift.testing.ranks import TCP, run_ranks
from tests.mpi import fault_scenarios as faults
from tests.mpi import training_scenarios as scenarios

# Scenarios without deaths, all on one start of two ranks.
SHARED = [
    scenarios.distributed_run,
    scenarios.sizes_and_places,
    scenarios.tensors,
    scenarios.stays_what_it_was,
    scenarios.accumulation,
    scenarios.closure_and_scaler,
    scenarios.unused_and_mixed,
    scenarios.changing_parameters,
    scenarios.two_optimizers,
    scenarios.sums_and_factors,
    scenarios.mistakes,
    scenarios.hooks_and_broadcast_state,
]


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Any]]:
    """By scenario, what the two ranks returned."""
    outcome = run_ranks(2, SHARED, timeout_seconds=100)
    assert sorted(outcome.results) == [0, 1], str(outcome)
    return {
        scenario.__name__: [outcome.results[member][index] for member in (0, 1)]
        for index, scenario in enumerate(SHARED)
    }


def test_two_ranks_train_like_one_process_on_the_same_batches(seen: dict[str, Any]) -> None:
    plain = scenarios.plain_run(ranks=2)
    for result in seen["distributed_run"]:
        assert result["alike"]
        np.testing.assert_allclose(result["parameters"], plain, rtol=1e-4, atol=1e-6)


def test_one_rank_trains_like_a_plain_process_bit_for_bit() -> None:
    plain = scenarios.plain_run(ranks=1)
    under_mpi = run_ranks(1, scenarios.distributed_run)
    assert under_mpi.results[0]["parameters"] == plain, str(under_mpi)


def test_without_mpirun_it_is_size_one_bit_for_bit(tmp_path: Any) -> None:
    import subprocess
    import sys

    code = (
        "import sys, json; from tests.mpi import training_scenarios as s;"
        "a = s.distributed_run(); import mpift.torch as hvd;"
        "assert 'mpi4py.MPI' not in sys.modules and hvd.size() == 1;"
        "assert a['parameters'] == s.plain_run(1); print('equal')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "equal\n", done.stderr
    assert done.returncode == 0


def test_every_rank_knows_its_place(seen: dict[str, Any]) -> None:
    for rank, place in enumerate(seen["sizes_and_places"]):
        assert place == {
            "rank": rank,
            "size": 2,
            "local": [rank, 2],
            "cross": [0, 1],
            "homogeneous": True,
        }


def test_collectives_on_tensors(seen: dict[str, Any]) -> None:
    for result in seen["tensors"]:
        assert result == {
            "average": [0.5, 1.0],
            "integers": [-3],  # -3.5, truncated
            "half": "torch.bfloat16[2.0, 2.0, 2.0]",
            "scaled": [4],
            "scalar": 1.0,
            "in_place": [1.0, 1.0],
            "broadcast": [2.5, 2.5, 2.5],
            "gather": [0.0, 1.0, 1.0],
            "objects": [{"rank": 0}, {"rank": 1}],
            "object": 1,
            "nothing": "",
        }


def test_the_optimizer_stays_what_it_was(seen: dict[str, Any]) -> None:
    for result in seen["stays_what_it_was"]:
        assert result["same"]
        assert result["instance"]
        assert result["name"] == "Adam"
        assert result["keys"]
        assert result["lr"] == 0.025
        assert result["warnings"] == []
        assert result["copied"]
        assert result["pickled"]
        assert "distributed already" in result["twice"]


def test_backward_passes_accumulate(seen: dict[str, Any]) -> None:
    for result in seen["accumulation"]:
        assert result["close"]
        assert "backward_passes_per_step is 2" in result["third"]


def test_closures_and_mixed_precision(seen: dict[str, Any]) -> None:
    for result in seen["closure_and_scaler"]:
        assert result["loss"]
        assert result["with_closure"]
        assert result["with_scaler"]
        assert result["finite"]
        # The overflow of one rank halves the scale on both.
        assert result["scales"] == [1024.0, 1024.0, 1024.0, 512.0, 512.0, 512.0]


def test_unused_parameters_and_mixed_types(seen: dict[str, Any]) -> None:
    first, second = seen["unused_and_mixed"]
    assert first == second
    assert first["alike"]
    grads = first["grads"]
    assert grads["all_left"]["right.weight"] is None
    assert grads["all_left"]["wide"] is None
    assert grads["all_left"]["left.bias"] == [3.0]
    assert grads["differs"]["left.bias"] == [1.5]  # one of two ranks used it
    assert grads["differs"]["right.bias"] == [1.5]
    assert {key for key, grad in grads["nobody"].items() if grad is not None} == {"scalar"}
    assert all(grad is not None for grad in grads["both"].values())


def test_parameters_may_be_frozen_unfrozen_and_added(seen: dict[str, Any]) -> None:
    for result in seen["changing_parameters"]:
        assert result == {"was_frozen": True, "moved": True, "alike": True, "head_alike": True}


def test_two_optimizers_have_rounds_of_their_own(seen: dict[str, Any]) -> None:
    for result in seen["two_optimizers"]:
        assert result["alike"]


def test_sums_averages_and_factors(seen: dict[str, Any]) -> None:
    for result in seen["sums_and_factors"]:
        assert result == {
            "average": [[-3.0] * 3, True],
            "sum": [[-6.0] * 3, True],
            "predivided": [[-3.0] * 3, True],
        }


def test_mistakes_are_refused_with_the_thing_named(seen: dict[str, Any]) -> None:
    for rank, refused in enumerate(seen["mistakes"]):
        assert "these names twice: 0.weight" in refused["doubled"]
        assert "lacks 1 of the optimizer's parameters" in refused["missing"]
        assert "pairs" in refused["pairs"]
        assert "use Average or Sum" in refused["op"]
        assert "Compression.none" in refused["compression"]
        assert "of at least 1, not 0" in refused["passes"]
        assert "zero_grad() was called after backward()" in refused["zero_grad"]
        assert "sparse_as_dense=True" in refused["sparse"]
        assert refused["as_dense"] == str([[0.5] * 3, [0.5] * 3, [0.0] * 3])
        assert "rank 1 has other parameters than rank 0" in refused["differs"], rank


def test_step_hooks_run_once_and_what_is_not_there_says_so(seen: dict[str, Any]) -> None:
    first, second = seen["hooks_and_broadcast_state"]
    assert first["calls"] == second["calls"] == ["before", "after", "before", "after"]
    assert "other names, shapes, dtypes or order" in second["order"]
    assert "topk" in first["topk"]
    assert "hvd.Adasum is not available" in first["adasum"]


def test_a_rank_that_has_left_dilutes_nothing_and_fixes_the_parameters() -> None:
    outcome = run_ranks(3, faults.after_one_has_left)
    assert sorted(outcome.results) == [0, 1, 2], str(outcome)
    for rank in (0, 2):
        result = outcome.results[rank]
        assert result["average"] == 4.0
        assert result["alike"]
        assert "ranks [1] have left already" in result["refused"]


def test_a_sample_counts_once_when_its_rank_dies_after_the_step() -> None:
    outcome = run_ranks(3, faults.sampled_with_a_metric, 60)
    assert sorted(outcome.results) == [0, 2], str(outcome)
    for result in outcome.results.values():
        assert set(result["counts"]) == {1.0}
        assert result["length"] > 0


@pytest.mark.parametrize(
    ("chaos", "kind", "way"),
    [
        pytest.param("kill:2@12", "sgd", (), marks=pytest.mark.long),
        pytest.param("kill:0@7:bucket1", "adam", TCP, marks=pytest.mark.long),
        pytest.param("kill:1@9:bucket1,kill:3@9:bucket0", "adam", (), marks=pytest.mark.long),
        ("kill:0@5,kill:2@5:split,kill:3@20", "sgd", TCP),
    ],
)
def test_all_live_ranks_are_bit_identical_after_faults(
    chaos: str, kind: str, way: tuple[str, ...]
) -> None:
    environment = {"MPIFT_CHAOS": chaos, "MPIFT_REDUCTION": "mpi" if way == TCP else "node"}
    outcome = run_ranks(4, faults.train_with, kind, 30, environment=environment, mpi_arguments=way)
    dead = {int(item[5]) for item in chaos.split(",")}
    assert set(outcome.results) == {0, 1, 2, 3} - dead, str(outcome)
    for result in outcome.results.values():
        assert result["alike"]
        assert result["sizes"][-1] == 4 - len(dead)
    assert len({str(result["sizes"]) for result in outcome.results.values()}) == 1


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        pytest.param(1, "before the optimizer", marks=pytest.mark.long),
        pytest.param(0, "before the second optimizer", marks=pytest.mark.long),
        (0, "before the broadcast"),
    ],
)
def test_a_death_before_the_training_begins_is_survived_too(victim: int, moment: str) -> None:
    outcome = run_ranks(3, faults.die_before_training, victim, moment)
    assert sorted(outcome.results) == sorted({0, 1, 2} - {victim}), str(outcome)
    for result in outcome.results.values():
        assert result == {"size": 2, "alike": True}


def test_a_broadcast_object_comes_from_its_root_or_from_whoever_is_left() -> None:
    outcome = run_ranks(4, faults.objects_without_their_roots)
    assert sorted(outcome.results) == [1, 2], str(outcome)
    first, second = outcome.results[1], outcome.results[2]
    assert first["found"] == ["xxxx", "of 1"]
    assert second["found"] == ["xxxx", "of 1", "of 2", [2.0, 2.0]]
    assert len(first["said"]) == 1
    assert "member 3, is gone and nobody has its data; going on with rank 0" in first["said"][0]
    assert "member 1, is gone" in second["said"][1]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_bit_identity_over_seeds_steps_and_victims(seed: int) -> None:
    rng = np.random.default_rng(seed)
    victims = rng.permutation(4)[: rng.integers(1, 4)]
    points = ["step", "bucket0", "bucket1", "shrink", "split", "agree"]
    chaos = ",".join(f"kill:{v}@{rng.integers(1, 25)}:{rng.choice(points)}" for v in victims)
    way = TCP if seed % 2 else ()
    kind = "adam" if seed % 3 else "sgd"
    outcome = run_ranks(
        4, faults.train_with, kind, 30, environment={"MPIFT_CHAOS": chaos}, mpi_arguments=way
    )
    assert not outcome.timed_out, f"{chaos}\n{outcome}"
    assert outcome.results, f"{chaos}\n{outcome}"
    assert all(result["alike"] for result in outcome.results.values()), chaos


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_no_sample_is_trained_twice_or_never_when_a_rank_dies(workers: int) -> None:
    samples, batch_size = 301, 4
    outcome = run_ranks(
        3, faults.sampled, samples, batch_size, workers, environment={"MPIFT_CHAOS": "kill:1@3"}
    )
    assert sorted(outcome.results) == [0, 2], str(outcome)
    counted: list[int] = []
    for result in outcome.results.values():
        assert len(set(result["lengths"])) == 1
        counted += [number for numbers in result["trained"] for number in numbers]
    # The dead rank's finished steps were its own; it is gone, and cannot tell of them. It had
    # finished three, and its part of the fourth counts if the others had it before it died.
    missing = set(range(samples)) - set(counted)
    assert len(missing) in (3 * batch_size, 4 * batch_size)
    assert len(counted) - len(set(counted)) <= 2  # the last turn is filled up

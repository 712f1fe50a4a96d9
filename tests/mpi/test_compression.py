"""Compressed sums on real ranks, and with real kills."""

from __future__ import annotations

import numpy as np
import pytest

from mpift.testing.ranks import TCP, run_ranks
from tests.mpi import compression_scenarios as scenarios

THIRD = {"fp16": float(np.float16(1 / 3)), "bf16": 0.333984375}


@pytest.mark.parametrize(
    ("type_", "threshold", "loss"), [("fp16", 0, 2e-3), ("bf16", 0, 3e-2), ("threshold", 0.3, 1.3)]
)
def test_sums_of_each_kind_on_three_ranks(type_: str, threshold: float, loss: float) -> None:
    outcome = run_ranks(3, scenarios.sums, type_, threshold)
    assert set(outcome.results) == {0, 1, 2}, str(outcome)
    for seen in outcome.results.values():
        assert 1e-4 < seen["large"] < loss  # that it is not exact shows that it was compressed
        assert seen["alike"]
        third = THIRD.get(type_, 1 / 3)
        assert np.allclose(seen["third"], 3 * third, rtol=2**-8)
        assert seen["small"] == [0 if type_ == "threshold" else 0.75, 3]
        assert seen["overflow"] == (np.inf if type_ == "fp16" else pytest.approx(180000, rel=4e-3))
        assert seen["integers"] == [3 * (2**40 + 1)]
        assert seen["maximum"] == [2 + 1 / 3]
        assert seen["empty"] == [0, 2]


def test_a_process_on_its_own_compresses_too() -> None:
    outcome = run_ranks(1, scenarios.sums, "bf16", 0)
    assert outcome.results[0]["third"] == [[THIRD["bf16"]] * 2] * 2, str(outcome)


@pytest.mark.parametrize("way", [(), TCP], ids=["shared-memory", "tcp"])
@pytest.mark.parametrize(
    ("type_", "threshold", "kills", "delay"),
    [
        pytest.param("bf16", 0, {"2": 10}, 0.0, marks=pytest.mark.long),
        ("fp16", 0, {"0": 10}, 0.002),
        ("threshold", 1.0, {"1": 5, "2": 15}, 0.001),
    ],
)
def test_survivors_of_kills_in_compressed_sums_have_the_same_results(
    type_: str, threshold: float, kills: dict[str, int], delay: float, way: tuple[str, ...]
) -> None:
    outcome = run_ranks(3, scenarios.survive, type_, threshold, kills, delay, mpi_arguments=way)
    survivors = {0, 1, 2} - {int(member) for member in kills}
    assert set(outcome.results) == survivors, str(outcome)
    for result in outcome.results.values():
        assert result["alike"]
        assert result["sizes"][-1] == len(survivors)
        assert result["found"][-1] == sum(1 << member for member in survivors)
        # The size changes at the sum that lacks the dead, at no other.
        assert [found.bit_count() for found in result["found"]] == result["sizes"]


def test_different_compressors_are_an_error_on_every_rank_and_the_job_goes_on() -> None:
    outcome = run_ranks(3, scenarios.disagree)
    assert set(outcome.results) == {0, 1, 2}, str(outcome)
    for seen in outcome.results.values():
        assert "rank 0 allreduce (sum, bf16) of float64 (20,), rank 1" in seen["type"]
        assert "rank 1 allreduce (sum, threshold 0.5) of" in seen["threshold"]
        assert "rank 0 allreduce (sum, fp16 from 10 elements) of" in seen["none"]
        assert "rank 1 allreduce (sum) of" in seen["none"]
        # Sums of integers are exact with any compressor, so there is nothing to agree on.
        assert [seen[f"{name}, integers"] for name in ("type", "threshold", "none")] == [[3]] * 3
        assert seen["afterwards"] == [3, 3, 3]


def test_ranks_that_have_left_add_nothing_to_compressed_sums() -> None:
    outcome = run_ranks(3, scenarios.leave_early)
    assert set(outcome.results) == {0, 1, 2}, str(outcome)
    everybody = [3.0] * 3 + [2.0] * 5 + [1.0] * 5
    for member, result in outcome.results.items():
        assert result["found"] == everybody[: 3 + 5 * member]


def test_tensors_are_averaged_through_what_was_given_as_compression() -> None:
    outcome = run_ranks(2, scenarios.tensors)
    assert set(outcome.results) == {0, 1}, str(outcome)
    for seen in outcome.results.values():
        exact = float(np.float32(1 / 3))
        assert (seen["none"], seen["from 10"], seen["threshold"]) == (exact, exact, 0)
        assert (seen["fp16"], seen["bf16"]) == (THIRD["fp16"], THIRD["bf16"])
        assert seen["integers"] == [2**41 + 6] * 2
        assert seen["half"] == "torch.float16"

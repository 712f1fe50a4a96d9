"""The benchmark as a user starts it; what it measures is not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mpift.bench import verify
from mpift.bench.straggler import Plan, measure


def bench(words: str) -> subprocess.CompletedProcess[str]:
    """``mpift bench`` as a user starts it, with the JSON on standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "mpift", "bench", *words.split(), "--json", "-"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.long
def test_a_small_benchmark_gives_figures_for_all_contenders() -> None:
    done = bench("step -np 2 --model mlp30k --rounds 2 --steps 2")
    figures = json.loads(done.stdout)
    for name in ("local", "mpift", "ddp_gloo", "mpi"):
        assert figures[f"{name}_seconds"] > 0
    assert figures["ratio_to_ddp"] > 0
    assert (figures["ranks"], figures["rounds"]) == (2, 2)
    assert "torch DDP over gloo" in done.stderr


@pytest.mark.long
def test_sums_are_measured_in_all_ways_and_come_to_the_same() -> None:
    # The second size has several buckets, and a parameter that is smaller than the others.
    done = bench("allreduce -np 2 --quick --mib 1,18")
    figures = json.loads(done.stdout)
    assert (figures["ranks"], figures["rounds"]) == (2, 2)
    assert figures["reduction"] == "node"
    assert [row["bytes"] for row in figures["rows"]] == [1 << 20, 18 << 20]
    for row in figures["rows"]:
        for name in ("mpift", "mpi", "gloo", "memcpy", "with_copies"):
            assert row[f"{name}_seconds"] > 0
        assert row["ratio_to_mpi"] > 0
        assert row["ratio_to_gloo"] > 0
    assert set(figures["rows"][1]["targets"]) == {"ratio_to_mpi", "ratio_to_gloo"}
    assert "all_reduce over gloo" in done.stderr


@pytest.mark.long
def test_late_ranks_are_measured_and_all_end_with_the_same_bits() -> None:
    plan = Plan(
        ranks=3,
        delays=(1.5,),
        step_seconds=0.05,
        alternations=2,
        even_rounds=4,
        synchronous_rounds=4,
        majority_rounds=20,
        persistent_rounds=20,
        slowdown=6.0,
    )
    report = measure(plan)
    assert report.identical
    assert report.even.runs == report.even_ratios.runs == 2
    assert report.bytes == 4 << 20
    row = report.headline
    # Somebody was left out, and never more than a minority.
    assert 0.66 < row.participation < 1
    assert min(row.majority, row.synchronous, report.persistent) > 0
    assert report.named == report.slow_member == 2


@pytest.mark.long
def test_verification_is_measured_on_both_models_with_all_its_checks() -> None:
    report = verify.measure(verify.make_plan(2, every=2, rounds=1, steps=2))
    assert [row.cost.checks for row in report.rows] == [10, 1]
    for row in report.rows:
        assert row.cost.step > 0
        assert row.cost.cpu > 0
        assert row.cost.ratio > 1
    # Parameters and momentum; parameters, two moments and what counts their steps.
    assert [row.state_bytes // row.parameters for row in report.rows] == [8, 12]

"""The ways in which a rank can end, under plain ``mpirun``."""

from __future__ import annotations

import pytest

from mpift.testing.ranks import run_ranks
from tests.mpi import protocol_scenarios as scenarios


@pytest.mark.parametrize("how", ["raise", "sys.exit", "os._exit", "SystemExit", "zero"])
def test_the_others_go_on_when_one_rank_ends(how: str) -> None:
    outcome = run_ranks(3, scenarios.leave, how, 1)
    assert sorted(outcome.results) == [0, 2], str(outcome)
    if how in ("raise", "sys.exit", "os._exit"):
        assert all(result["size"] == 2 for result in outcome.results.values())
        assert outcome.stderr.count("mpift: member 1 (") == 1
    if how == "raise":
        assert outcome.stderr.count("ValueError: a fault of the script") == 3
        assert "Traceback" in outcome.stderr


def test_an_exit_from_c_code_ends_the_job_with_a_named_reason() -> None:
    outcome = run_ranks(3, scenarios.leave, "C", 1)
    assert not outcome.timed_out, str(outcome)
    assert outcome.results == {}
    assert outcome.exit_code != 0
    assert "member 1 on" in outcome.stderr
    assert "left with a failure that MPI does not report" in outcome.stderr


def test_an_exception_on_all_ranks_ends_the_job() -> None:
    outcome = run_ranks(3, scenarios.leave, "raise", -1, timeout_seconds=20)
    assert not outcome.timed_out, str(outcome)
    assert outcome.results == {}
    assert outcome.exit_code != 0
    assert "ValueError: a fault of the script" in outcome.stderr

"""``mpift bench allreduce``: what is made of the ranks' figures, its targets and its words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpift.bench import allreduce
from mpift.bench.allreduce import CONTENDERS, AllreduceReport, Plan
from mpift.bench.machine import results_of
from mpift.bench.spread import Spread
from mpift.config import Config
from mpift.errors import ConfigError, MpiftError
from mpift.testing.ranks import Outcome
from tests.unit.bench_calls import call_bench

MIB = 1 << 20


def rows_of_a_rank(*changed: dict[str, Any]) -> dict[str, Any]:
    """Two sizes and three rounds in which all takes 1, 2 and 4 seconds, but what is given, a size
    each."""
    rows = []
    for number in range(2):
        of_this = changed[number] if number < len(changed) else {}
        seconds = {name: of_this.get(name, [1.0, 2.0, 4.0]) for name in CONTENDERS}
        rows.append(
            {
                "seconds": seconds,
                "reduction": of_this.get("reduction", "node"),
                "wrong": of_this.get("wrong", []),
            }
        )
    return {"rows": rows}


def report_of(
    *by_rank: dict[str, Any], sizes: tuple[int, int] = (MIB, 16 * MIB)
) -> AllreduceReport:
    plan = Plan(len(by_rank), sizes, rounds=3)
    return allreduce.report(plan, 1, by_rank, 0.25)


def test_a_sum_takes_as_long_as_its_slowest_rank() -> None:
    first = rows_of_a_rank({"mpift": [1.0, 3.0, 1.0]})
    second = rows_of_a_rank({"mpift": [2.0, 1.0, 1.0]})
    row = report_of(first, second).rows[0]
    assert row.seconds["mpift"] == Spread(2.0, 1.5, 2.5, 3)
    assert row.ratio_to("mpi") == 1.0
    # 2/1, 3/2 and 1/4: neighbours in time are compared.
    assert row.round_ratios["mpi"] == Spread(1.5, 0.875, 1.75, 3)


def test_the_json_has_a_row_a_size_with_each_median_by_name_and_its_spread() -> None:
    rank = rows_of_a_rank({}, {"gloo": [5.0, 8.0, 5.0]})
    figures = json.loads(json.dumps(report_of(rank, rank).as_json()))
    assert (figures["ranks"], figures["rounds"], figures["threads"]) == (2, 3, 1)
    assert (figures["reduction"], figures["others_share"]) == ("node", 0.25)
    assert [row["bytes"] for row in figures["rows"]] == [MIB, 16 * MIB]
    for row in figures["rows"]:
        names = {f"{name}_seconds" for name in CONTENDERS}
        assert set(row["spread"]) == {*names, "ratio_to_mpi", "ratio_to_gloo"}
        for name in names:
            assert row[name] == row["spread"][name]["median"]
    large = figures["rows"][1]
    assert (large["gloo_seconds"], large["mpift_seconds"]) == (5.0, 2.0)
    # Of the medians; its spread is that of 1/5, 2/8 and 4/5.
    assert (large["ratio_to_gloo"], large["ratio_to_mpi"]) == (0.4, 1.0)
    assert large["spread"]["ratio_to_gloo"]["median"] == 0.25


@pytest.mark.parametrize(("ranks", "met"), [(2, True), (3, True), (4, False), (8, False)])
def test_more_is_wanted_of_four_ranks_than_of_two(ranks: int, met: bool) -> None:
    rank = rows_of_a_rank({}, {"mpift": [7.0] * 3, "mpi": [10.0] * 3, "gloo": [17.5] * 3})
    targets = {target.name: target for target in report_of(*[rank] * ranks).rows[1].targets(ranks)}
    # 0.7 and 0.4: the bounds themselves are good enough.
    assert targets["ratio_to_mpi"].met is met
    assert targets["ratio_to_gloo"].met
    worse = rows_of_a_rank({}, {"mpift": [7.1] * 3, "mpi": [10.0] * 3, "gloo": [10.0] * 3})
    assert not any(t.met for t in report_of(*[worse] * ranks).rows[1].targets(ranks))


def test_small_arrays_have_no_targets() -> None:
    rank = rows_of_a_rank()
    small, large = report_of(rank, rank, sizes=(16 * MIB - 1, 16 * MIB)).as_json()["rows"]
    assert small["targets"] == {}
    assert large["targets"]["ratio_to_mpi"] == {"measured": 1.0, "bound": 0.7, "met": False}


def test_mpift_has_summed_in_the_node_only_if_it_has_at_every_size() -> None:
    rank = rows_of_a_rank({"reduction": "mpi"})
    report = report_of(rank, rank)
    assert report.reduction == "mpi"
    assert [row["reduction"] for row in report.as_json()["rows"]] == ["mpi", "node"]


def test_a_wrong_sum_of_any_rank_at_any_size_leaves_no_figures() -> None:
    rank = rows_of_a_rank()
    with pytest.raises(MpiftError, match="gloo has summed 1 of 2"):
        report_of(rank, rows_of_a_rank({}, {"wrong": ["gloo has summed 1 of 2 elements wrongly"]}))


def test_the_quick_plan_has_smaller_arrays_and_shorter_turns() -> None:
    usual, quick = allreduce.make_plan(4), allreduce.make_plan(4, quick=True)
    assert usual.sizes == (MIB, 16 * MIB, 100 * MIB)
    assert max(quick.sizes) < max(usual.sizes)
    assert (quick.rounds < usual.rounds, usual.rounds) == (True, 7)
    assert quick.repetitions(16 * MIB) < usual.repetitions(16 * MIB)
    assert quick.seconds_max < usual.seconds_max
    asked = allreduce.make_plan(4, [100, 2, 2], rounds=5, quick=True)
    assert (asked.sizes, asked.rounds) == ((2 * MIB, 100 * MIB), 5)


def test_small_arrays_are_summed_more_often_and_none_only_once() -> None:
    plan = Plan()
    assert [plan.repetitions(mib * MIB) for mib in (1, 16, 1000)] == [20, 8, 3]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((1,), "at least 2"),
        ((2, []), "at least 1"),
        ((2, [16, 0]), "at least 1"),
        ((2, None, 0), "at least 1"),
    ],
)
def test_a_plan_without_peers_arrays_or_rounds_is_refused(
    arguments: tuple[Any, ...], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        allreduce.make_plan(*arguments)


def test_figures_of_some_ranks_are_none() -> None:
    outcome = Outcome({0: {"rows": []}}, 1, "", "it said why", 1.0, False)
    with pytest.raises(MpiftError, match="1 of 2 ranks failed"):
        results_of(outcome, 2)
    assert results_of(outcome, 1) == [{"rows": []}]


# -- on a rank -------------------------------------------------------------------------------------


def test_arrays_are_laid_out_as_parameters_of_four_mebibytes() -> None:
    from mpift.bench.allreduce_ranks import layout_of

    config = Config()

    def elements(mib: int) -> list[list[int]]:
        layout = layout_of(mib * MIB // 4, config)
        return [[slot.stop - slot.start for slot in b.slots] for b in layout.buckets]

    assert elements(1) == [[MIB // 4]]
    # The last one first; then buckets of 32 MiB, and what is left.
    assert elements(16) == [[MIB], [MIB] * 3]
    assert elements(42) == [[MIB // 2], [MIB] * 8, [MIB] * 2]


def test_a_wrong_sum_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import mpift.torch as hvd
    from mpift.bench.allreduce_ranks import faults

    monkeypatch.setattr(hvd, "rank", lambda: 3)
    expected = np.arange(5, dtype=np.float32)
    assert faults("mpift", expected.copy(), expected) == []
    wrong = expected.copy()
    wrong[[2, 4]] = np.nan
    words = "mpift has summed 2 of 5 elements wrongly on rank 3: element 2 is nan, not 2.0"
    assert faults("mpift", wrong, expected) == [words]


# -- the command -----------------------------------------------------------------------------------


def test_the_command_measures_what_was_asked_and_writes_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "allreduce.json"
    words = f"-np 3 --mib 2,16 --rounds 5 --quick --json {file}".split()
    rank = rows_of_a_rank({}, {"gloo": [9.0, 9.0, 9.0]})
    monkeypatch.setenv("COLUMNS", "120")
    # A target that is missed does not fail the command.
    code, asked = call_bench(
        monkeypatch, allreduce, "allreduce", *words, report=report_of(rank, rank)
    )
    assert (code, asked) == (0, [allreduce.make_plan(3, [2, 16], 5, quick=True)])
    assert json.loads(file.read_text())["rows"][1]["targets"]["ratio_to_mpi"]["met"] is False
    shown = capsys.readouterr().out
    for words_of_one in CONTENDERS.values():
        assert words_of_one in shown
    assert shown.count("missed") == shown.count(" met ") == 1
    assert "mpift has summed in the node's shared memory" in " ".join(shown.split())


def test_standard_output_holds_nothing_but_the_json_if_it_goes_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(rows_of_a_rank(), rows_of_a_rank())
    assert call_bench(monkeypatch, allreduce, "allreduce", "--json", "-", report=report)[0] == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 2


def test_ranks_that_fail_are_told_and_give_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_bench(monkeypatch, allreduce, "allreduce")[0] == 1
    assert "1 of 2 ranks failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--mib", "1,x"), "--mib takes numbers of MiB"),
        (("--mib", "1.5"), "--mib takes numbers of MiB"),
        (("--mib", "0"), "at least 1"),
        (("-np", "1"), "greater than or equal to"),
        (("--rounds", "0"), "greater than or equal to"),
        (("--json", "nowhere/at/all.json"), "no folder"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    complaint: str,
) -> None:
    report = report_of(rows_of_a_rank(), rows_of_a_rank())
    monkeypatch.setenv("COLUMNS", "200")
    assert call_bench(monkeypatch, allreduce, "allreduce", *words, report=report) == (2, [])
    assert complaint in " ".join(capsys.readouterr().err.split())

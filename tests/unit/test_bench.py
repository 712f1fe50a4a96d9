"""Benchmarks: statistics, what is made of the ranks' figures, and the shape of the JSON."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.bench import step, straggler, verify
from mpift.bench.models import MODELS
from mpift.bench.spread import Spread, ratios, spread_of
from mpift.cli import main
from mpift.errors import ConfigError, MpiftError
from tests.unit.bench_calls import call_bench

SECONDS = st.floats(1e-6, 1e3)


def test_the_spread_of_five_runs_is_their_second_third_and_fourth() -> None:
    assert spread_of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)


def test_one_run_has_no_spread() -> None:
    assert spread_of([2.5]) == Spread(2.5, 2.5, 2.5, 1)


def test_no_runs_have_no_median() -> None:
    with pytest.raises(ValueError, match="no runs"):
        spread_of([])


@given(st.lists(SECONDS, min_size=1))
def test_quartiles_surround_the_median_within_what_was_measured(values: list[float]) -> None:
    spread = spread_of(values)
    ordered = (min(values), spread.lower, spread.median, spread.upper, max(values))
    # Interpolation may round by one digit.
    assert all(a <= b or a == pytest.approx(b) for a, b in itertools.pairwise(ordered))
    assert spread.runs == len(values)


def test_ratios_are_taken_run_by_run() -> None:
    assert ratios([1.0, 6.0], [2.0, 3.0]) == [0.5, 2.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 6.0], [2.0])


def test_the_benchmark_model_has_about_twelve_million_parameters() -> None:
    model = MODELS["mlp12m"]
    assert model.parameters == 12_070_400
    assert model.gradient_bytes == 4 * 12_070_400


def test_a_model_has_the_parameters_that_it_says() -> None:
    model = MODELS["mlp30k"]
    assert sum(p.numel() for p in model.build().parameters()) == model.parameters
    inputs, labels = model.make_batch(seed=3)
    assert model.build()(inputs).shape == (model.batch, model.widths[-1])
    assert labels.shape == (model.batch,)


@pytest.mark.parametrize(
    ("ranks", "cores", "threads"), [(2, 2, 1), (4, 2, 1), (2, 8, 4), (3, 8, 2)]
)
def test_ranks_share_the_cores(ranks: int, cores: int, threads: int) -> None:
    assert step.threads_a_rank(ranks, cores) == threads


def two_ranks() -> step.StepReport:
    """Three rounds, in which now one rank and now the other is slower."""
    first = {"local": [1.0, 1.0, 1.0], "mpift": [3.0, 2.0, 4.0], "ddp_gloo": [4.0, 4.0, 4.0]}
    second = {"local": [1.0, 2.0, 1.0], "mpift": [2.0, 3.0, 5.0], "ddp_gloo": [6.0, 4.0, 5.0]}
    by_rank = [{**rank, "mpi": [0.5, 0.5, 0.25]} for rank in (first, second)]
    return step.report(2, MODELS["mlp30k"], 15, 1, by_rank, 0.125)


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    report = two_ranks()
    assert report.seconds["mpift"] == Spread(3.0, 3.0, 4.0, 3)
    assert report.seconds["ddp_gloo"] == Spread(5.0, 4.5, 5.5, 3)
    assert report.ratio_to_ddp == 0.6
    # 3/6, 3/4 and 5/5
    assert report.round_ratios == Spread(0.75, 0.625, 0.875, 3)


def test_the_json_has_each_median_by_name_and_its_spread() -> None:
    figures = json.loads(json.dumps(two_ranks().as_json()))
    seconds = {"local_seconds", "mpift_seconds", "ddp_gloo_seconds", "mpi_seconds"}
    assert set(figures["spread"]) == {*seconds, "ratio_to_ddp"}
    assert figures["ratio_to_ddp"] == 0.6
    for name in seconds:
        assert figures[name] == figures["spread"][name]["median"]
    assert figures["ranks"] == 2
    assert (figures["model"], figures["parameters"], figures["bytes"]) == ("mlp30k", 30160, 120640)
    assert (figures["rounds"], figures["steps"], figures["threads"]) == (3, 15, 1)
    assert figures["others_share"] == 0.125


def test_an_unknown_model_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="no model 'resnet'; there are: mlp12m"):
        step.measure(2, "resnet", 1, 1)


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, list[tuple[object, ...]]]:
    """The exit code of ``mpift bench step``, and what it would have measured."""
    asked: list[tuple[object, ...]] = []

    def measure(*arguments: object) -> step.StepReport:
        asked.append(arguments)
        return two_ranks()

    monkeypatch.setattr(step, "measure", measure)
    with pytest.raises(SystemExit) as left:
        main(["bench", "step", *words])
    assert isinstance(left.value.code, int)
    return left.value.code, asked


def test_the_command_measures_what_was_asked_and_writes_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "step.json"
    words = ("-np", "4", "--model", "mlp30k", "--rounds", "3", "--steps", "9", "--json", str(file))
    assert call(monkeypatch, *words) == (0, [(4, "mlp30k", 3, 9)])
    assert json.loads(file.read_text())["ratio_to_ddp"] == 0.6
    shown = capsys.readouterr().out
    assert "torch DDP over gloo" in shown
    assert "3 rounds" in shown


def test_standard_output_holds_nothing_but_the_json_if_it_goes_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--json", "-")[0] == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 2


def test_ranks_that_fail_are_told_and_give_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: object) -> step.StepReport:
        raise MpiftError("1 of 2 ranks failed")

    monkeypatch.setattr(step, "measure", measure)
    with pytest.raises(SystemExit) as left:
        main(["bench", "step"])
    assert left.value.code == 1
    assert "1 of 2 ranks failed" in capsys.readouterr().err


# -- late ranks ------------------------------------------------------------------------------------


def four_ranks(**changed: object) -> straggler.StragglerReport:
    """Two delays and three turns without one; the last rank may differ in what is given."""
    plan = straggler.make_plan(4, [3.0])
    found: dict[str, object] = {
        "even": [4.0, 5.0, 4.0],
        "even_all": [4.0, 4.0, 5.0],
        "synchronous": [1.5, 1.0],
        "majority": [3.0, 2.0],
        "participation": [0.75, 0.8],
        "persistent": 3.6,
        "late_rounds": {"1": 2, "3": 20},
        "bytes": 1 << 22,
        "digests": ["a", "b"],
    }
    return straggler.report(plan, [found, found, found, {**found, **changed}])


def test_the_figures_at_one_and_a_half_steps_stand_for_all() -> None:
    figures = json.loads(json.dumps(four_ranks().as_json()))
    assert (figures["ranks"], figures["bytes"], figures["delay_steps"]) == (4, 1 << 22, 1.5)
    assert figures["even_steps_per_s"] == 4.0
    assert figures["synchronous_steps_per_s"] == 1.5
    assert figures["majority_steps_per_s"] == 3.0
    assert (figures["speedup"], figures["fraction_of_even"]) == (2.0, 0.75)
    assert figures["identical"] is True
    # 4/4, 5/4 and 4/5: neighbours in time are compared.
    assert figures["even_ratio_to_all"] == 1.0
    assert figures["spread"]["even_ratio_to_all"]["upper"] == 1.125


def test_the_curve_has_a_row_a_delay_with_its_bound() -> None:
    rows = four_ranks().as_json()["curve"]
    assert [row["delay_steps"] for row in rows] == [1.5, 3.0]
    assert [row["speedup"] for row in rows] == [2.0, 2.0]
    assert [row["fraction_of_even"] for row in rows] == [0.75, 0.5]
    for row in rows:
        assert row["bound_speedup"] == row["bound_fraction"] * (1 + row["delay_steps"])


def test_the_usual_late_ranks_are_those_of_a_long_run() -> None:
    row = four_ranks().headline
    assert row.bound_speedup == pytest.approx(2.14, rel=0.02)
    assert row.bound_fraction == pytest.approx(0.86, rel=0.02)


def test_the_rank_that_is_always_slow_is_named_with_what_the_others_keep() -> None:
    report = four_ranks()
    assert (report.named, report.slow_member) == (3, 3)
    assert report.others_fraction == 0.9
    assert report.as_json()["persistent"]["late_rounds"] == {1: 2, 3: 20}


def test_one_rank_with_another_digest_makes_the_ranks_not_identical() -> None:
    assert not four_ranks(digests=["a", "c"]).identical


def test_the_pace_is_counted_in_rounds_after_the_warm_up() -> None:
    # This rank replayed two rounds with its fourth step.
    marks = [(1, 10.0), (2, 20.0), (3, 21.0), (6, 22.0), (7, 23.0)]
    assert straggler.rounds_per_second(marks, warm_up=2) == pytest.approx(5 / 3)
    with pytest.raises(MpiftError, match="run more rounds"):
        straggler.rounds_per_second(marks, warm_up=7)


def test_the_delay_that_stands_for_all_is_always_run() -> None:
    assert straggler.make_plan(4).delays == straggler.DELAYS
    assert straggler.make_plan(4, [5.0, 2.0, 5.0]).delays == (1.5, 2.0, 5.0)
    assert straggler.make_plan(4, quick=True).delays == (1.5,)
    assert straggler.make_plan(4, quick=True).seconds < straggler.make_plan(4, [1.5]).seconds


@pytest.mark.parametrize("delay", [0.0, -1.0, float("nan"), float("inf")])
def test_a_delay_that_is_none_is_refused(delay: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        straggler.make_plan(4, [delay])


def test_one_rank_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        straggler.make_plan(1)


def test_the_straggler_command_shows_the_curve_and_writes_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "straggler.json"
    words = ("-np", "3", "--delays", "1.5,4", "--json", str(file))
    code, asked = call_bench(monkeypatch, straggler, "straggler", *words, report=four_ranks())
    assert (code, asked) == (0, [straggler.make_plan(3, [1.5, 4.0])])
    assert json.loads(file.read_text())["speedup"] == 2.0
    shown = " ".join(capsys.readouterr().out.split())
    assert "late most often: rank 3, 20 rounds" in shown
    assert "speed-up" in shown
    assert "2.00 (2.1" in shown


def test_ranks_that_end_apart_fail_the_straggler_command_but_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apart = four_ranks(digests=["a", "c"])
    assert call_bench(monkeypatch, straggler, "straggler", "--json", "-", report=apart)[0] == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["identical"] is False
    assert "different parameters" in captured.err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--delays", "1,x"), "numbers of step times"),
        (("--delays", "-1"), "above 0"),
        (("--json", "nowhere/at/all.json"), "no folder"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    complaint: str,
) -> None:
    assert call_bench(monkeypatch, straggler, "straggler", *words, report=four_ranks()) == (2, [])
    assert complaint in " ".join(capsys.readouterr().err.split())


# -- verification ----------------------------------------------------------------------------------


def two_verified_ranks() -> verify.VerifyReport:
    """Two turns of 20 steps of the GPT and 200 of the CNN, with a check every 10."""
    first = {
        "parameters": 10,
        "state_bytes": 80,
        "checks": 40,
        "waited_seconds": 4.0,
        "cpu_seconds": 8.0,
        "on_seconds": [1.0, 3.0],
        "off_seconds": [1.0, 2.0],
    }
    second = {**first, "waited_seconds": 0.0, "on_seconds": [2.0, 2.0], "off_seconds": [2.0, 1.0]}
    cheap = {**first, "waited_seconds": 0.0, "cpu_seconds": 0.0, "checks": 4}
    by_rank = [
        {"models": {"digits": first, "chargpt": cheap}, "message_cpu_seconds": 0.0},
        {"models": {"digits": second, "chargpt": cheap}, "message_cpu_seconds": 0.2},
    ]
    return verify.report(verify.make_plan(2, 10, 2, 20), 1, by_rank)


def test_what_verification_costs_is_its_wait_and_its_processor_time_over_the_step() -> None:
    digits, chargpt = two_verified_ranks().rows
    # Rank 0: 4 s and 8 s in 400 steps of 2 s. Rank 1: no wait, and 40 messages of 0.2 s more.
    assert digits.cost.ratio == pytest.approx(1 + 0.04 / 2)
    assert (digits.cost.cpu, digits.cost.message) == pytest.approx((0.04, 0.02))
    assert (digits.cost.waited, digits.cost.checks) == (0.0, 40)
    # Nothing but messages.
    assert chargpt.cost.ratio == pytest.approx(1 + 0.02 / 2)


def test_the_dearest_model_and_rank_stand_for_all_in_the_json() -> None:
    figures = json.loads(json.dumps(two_verified_ranks().as_json()))
    assert figures["ranks"] == 2
    assert figures["ratio"] == pytest.approx(1.02)
    digits, chargpt = figures["models"]
    assert (digits["model"], chargpt["model"]) == ("digits", "chargpt")
    assert digits["ratio"] == figures["ratio"]
    assert digits["step_seconds"] == 2.0
    # The slowest rank in each turn: 2/2 and 3/2.
    assert (digits["on_seconds"], digits["off_seconds"]) == (2.5, 2.0)
    assert digits["spread"]["on_to_off"]["median"] == 1.25
    assert (figures["verify_every"], figures["rounds"], figures["steps"]) == (10, 2, 20)


@pytest.mark.parametrize(
    ("words", "complaint"), [((1,), "at least 2"), ((2, 10, 1, 15), "a multiple")]
)
def test_a_plan_without_whole_checks_or_others_is_refused(
    words: tuple[int, ...], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        verify.make_plan(*words)


def test_the_verify_command_shows_a_row_a_model_and_writes_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[verify.Plan] = []

    def measure(plan: verify.Plan) -> verify.VerifyReport:
        asked.append(plan)
        return two_verified_ranks()

    monkeypatch.setattr(verify, "measure", measure)
    file = tmp_path / "verify.json"
    with pytest.raises(SystemExit) as left:
        main(["bench", "verify", "-np", "3", "--steps", "30", "--json", str(file)])
    assert (left.value.code, asked) == (0, [verify.make_plan(3, steps=30)])
    assert json.loads(file.read_text())["ratio"] == pytest.approx(1.02)
    shown = " ".join(capsys.readouterr().out.split())
    assert "1.0200 times the step without" in shown
    assert "digits 1.250" in shown

"""Benchmarks: statistics, what is made of the ranks' figures, and the shape of the JSON."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.bench import step
from mpift.bench.models import MODELS
from mpift.bench.spread import Spread, ratios, spread_of
from mpift.cli import main
from mpift.errors import ConfigError, MpiftError

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

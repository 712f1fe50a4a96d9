"""``mpift bench checkpoint``: what is made of the ranks' figures, its targets and its words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mpift.torch as hvd
from mpift.bench import checkpoint
from mpift.bench.checkpoint import READS, TARGETS, WRITES, CheckpointReport, Plan
from mpift.bench.checkpoint_state import State
from mpift.bench.checkpoint_turns import Figures
from mpift.bench.spread import Spread
from mpift.bench.targets import Target
from mpift.checkpoint.blocks import BLOCK_BYTES, SPARSE_BLOCK_BYTES, cut, digest
from mpift.checkpoint.state import as_bytes, flatten
from mpift.errors import ConfigError
from tests.unit.bench_calls import call_bench

MIB = 1 << 20


def figures_of_a_rank(**changed: Any) -> dict[str, Any]:
    """Three rounds in which all takes 1, 2 and 3 seconds, but what is given."""
    seconds = {name: [1.0, 2.0, 3.0] for name in (*WRITES, *READS)}
    seconds |= {name: value for name, value in changed.items() if name in seconds}
    return {
        "seconds": seconds,
        "sizes": {
            "full_bytes": [100, 300, 200],
            "incremental_bytes": [20, 20, 21],
            "encoded_bytes": [90, 90, 90],
        },
        "storage_bytes": {name: changed.get("from_storage", 0) for name in READS},
        "first_stall_seconds": changed.get("first_stall_seconds", 0.5),
        "grown_bytes": changed.get("grown_bytes", 1000),
        "state_bytes": 1000,
        "tensors": 12,
    }


def report_of(*by_rank: dict[str, Any]) -> CheckpointReport:
    plan = Plan(ranks=len(by_rank), mib=64, rounds=3)
    return checkpoint.report(plan, 1, "/somewhere/mpift-bench-x", 0.25, by_rank)


def target(report: CheckpointReport, name: str) -> Target:
    return next(found for found in report.targets() if found.name == name)


def test_a_save_takes_as_long_as_its_slowest_rank() -> None:
    first = figures_of_a_rank(full=[1.0, 5.0, 2.0], first_stall_seconds=0.25)
    second = figures_of_a_rank(full=[4.0, 1.0, 1.0], first_stall_seconds=0.75)
    report = report_of(first, second)
    assert report.seconds["full"] == Spread(4.0, 3.0, 4.5, 3)
    assert report.first_stall_seconds == 0.75
    # 4/1, 5/2 and 2/3: neighbours in time are compared.
    assert report.round_ratios["full_to_raw_write"].median == 2.5


def test_the_json_has_each_median_by_name_its_spread_and_each_target() -> None:
    figures = json.loads(json.dumps(report_of(figures_of_a_rank(), figures_of_a_rank()).as_json()))
    for name in (*WRITES, *READS):
        assert figures[f"{name}_seconds"] == figures["spread"][f"{name}_seconds"]["median"] == 2.0
    assert {name: figures[f"{name}_page_cache"] for name in READS} == dict.fromkeys(READS, "warm")
    assert (figures["ranks"], figures["rounds"], figures["state_bytes"]) == (2, 3, 1000)
    assert (figures["full_bytes"], figures["incremental_bytes"]) == (200, 20)
    assert figures["encoded_bytes"] == 90
    assert set(figures["targets"]) == {name for name, *_ in TARGETS}
    incremental = figures["targets"]["incremental_to_full_bytes"]
    assert incremental == {"measured": 0.1, "bound": 0.12, "met": True}


def test_the_peak_is_the_state_on_all_ranks_and_what_memory_grew_by() -> None:
    report = report_of(figures_of_a_rank(grown_bytes=1300), figures_of_a_rank(grown_bytes=0))
    assert (report.peak_bytes, report.memory_limit_bytes) == (3300, 3000)
    assert target(report, "peak_to_limit").met  # exactly a tenth more
    worse = report_of(figures_of_a_rank(grown_bytes=1301), figures_of_a_rank())
    assert not target(worse, "peak_to_limit").met


def test_a_stall_as_long_as_that_of_others_is_not_shorter() -> None:
    same = figures_of_a_rank()
    assert not target(report_of(same), "stall_to_dcp_async").met
    shorter = figures_of_a_rank(stall=[1.0, 1.9, 3.0])
    assert target(report_of(shorter), "stall_to_dcp_async").met
    # A restore may be as slow as torch.load.
    assert target(report_of(same), "restore_to_torch_load").met


@pytest.mark.parametrize(
    ("from_storage", "word"), [(0, "warm"), (30, "warm"), (31, "not warm"), (None, "unknown")]
)
def test_a_read_is_warm_if_hardly_anything_came_from_storage(
    from_storage: int | None, word: str
) -> None:
    # A hundredth of 1000 bytes in each of three rounds.
    report = report_of(figures_of_a_rank(), figures_of_a_rank(from_storage=from_storage))
    assert set(report.page_cache.values()) == {word}


def test_the_quick_plan_has_less_state_and_fewer_rounds(tmp_path: Path) -> None:
    usual = checkpoint.make_plan(2, directory=tmp_path)
    quick = checkpoint.make_plan(2, directory=tmp_path, quick=True)
    assert (usual.mib, quick.mib) == (500, 64)
    assert quick.rounds < usual.rounds
    assert checkpoint.make_plan(2, 100, tmp_path, quick=True).mib == 100
    assert checkpoint.make_plan(2).directory == str(Path.cwd())


def test_too_little_state_and_a_missing_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 16"):
        checkpoint.make_plan(2, 15)
    with pytest.raises(ConfigError, match="no directory"):
        checkpoint.make_plan(2, directory=tmp_path / "nowhere")


def test_a_directory_without_enough_space_is_refused_before_anything_is_run(
    tmp_path: Path,
) -> None:
    plan = Plan(mib=1 << 40, directory=str(tmp_path))
    with pytest.raises(ConfigError, match="choose another with --directory"):
        checkpoint.measure(plan)
    assert not list(tmp_path.iterdir())


# -- the state -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state() -> State:
    """40 MiB, whose values any test may change."""
    with torch.random.fork_rng(devices=[]):
        return State(40 * MIB)


def digests(state: State) -> list[tuple[str, int]]:
    """Digest and size of all blocks, as checkpoints cut them."""
    flat = flatten(state.objects, rng=False)
    found = []
    for name in flat.shared_tensors:
        data, spec = as_bytes(flat.shared_tensors[name]), flat.specs[name]
        found += [(digest(data[a:b], spec.dtype), b - a) for a, b in spec.blocks()]
    return found


def changed_bytes(before: list[tuple[str, int]], after: list[tuple[str, int]]) -> list[int]:
    pairs = zip(before, after, strict=True)
    return [size if old != new else 0 for (old, size), (new, _) in pairs]


def test_the_state_has_about_the_size_that_was_asked_for(state: State) -> None:
    assert state.size_bytes == pytest.approx(40 * MIB, rel=0.02)
    assert sum(size for _, size in digests(state)) == state.size_bytes
    assert {spec.block_bytes for spec in flatten(state.objects).specs.values()} >= {
        BLOCK_BYTES,
        SPARSE_BLOCK_BYTES,
    }


def test_a_change_alters_every_block(state: State) -> None:
    seen = [digests(state)]
    for _ in range(3):
        state.change()
        seen.append(digests(state))
    # Of no block there is anything that was there before.
    for number in range(len(seen[0])):
        assert len({found[number] for found in seen}) == len(seen)


def test_a_tenth_is_another_tenth_each_time_and_lies_in_all_shares(
    state: State,
) -> None:
    parts = []
    for which in range(10):
        before = digests(state)
        state.change_tenth(which)
        parts.append(changed_bytes(before, digests(state)))
    assert sum(map(sum, parts)) == state.size_bytes
    for part in parts:
        assert sum(part) == pytest.approx(state.size_bytes / 10, rel=0.3)
        shares = [sum(part[first:last]) for first, last in cut([s for _, s in digests(state)], 2)]
        assert min(shares) > 0


def test_the_shares_of_all_ranks_are_the_state(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hvd, "size", lambda: 2)
    monkeypatch.setattr(hvd, "rank", lambda: 0)
    pieces = list(state.share())
    monkeypatch.setattr(hvd, "rank", lambda: 1)
    pieces += state.share()
    whole = np.concatenate([as_bytes(tensor) for tensor in state.tensors()])
    assert np.array_equal(np.concatenate(pieces), whole)


def test_a_loaded_state_is_that_of_the_dictionaries(state: State) -> None:
    state.change()
    saved = {name: _copied(values) for name, values in state.dicts().items()}
    wanted = digests(state)
    state.change()
    assert digests(state) != wanted
    state.load_dicts(saved)
    assert digests(state) == wanted


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value


def test_the_turns_rotate_and_the_first_of_each_does_not_count() -> None:
    figures = Figures(turn_bytes=0)
    order: list[str] = []

    def make(name: str) -> Any:
        def turn() -> None:
            order.append(name)
            figures.note(name, float(len(order)))

        return turn

    figures.take_turns({name: make(name) for name in "abc"}, 3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert figures.seconds == {"a": [4.0, 9.0, 11.0], "b": [5.0, 7.0, 12.0], "c": [6.0, 8.0, 10.0]}


# -- the command -----------------------------------------------------------------------------------


def test_the_command_measures_what_was_asked_and_writes_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "checkpoint.json"
    words = f"-np 3 --mib 80 --directory {tmp_path} --keep-directory --quick --json {file}".split()
    # A target that is missed does not fail the command.
    report = report_of(figures_of_a_rank(grown_bytes=5000), figures_of_a_rank())
    wanted = checkpoint.make_plan(3, 80, tmp_path, keep=True, quick=True)
    monkeypatch.setenv("COLUMNS", "120")
    assert call_bench(monkeypatch, checkpoint, "checkpoint", *words, report=report) == (0, [wanted])
    assert json.loads(file.read_text())["targets"]["peak_to_limit"]["met"] is False
    shown = capsys.readouterr()
    for words_of_one in (*WRITES.values(), *READS.values()):
        assert words_of_one in shown.out
    assert "missed" in shown.out
    assert "/somewhere/mpift-bench-x" in shown.err


def test_standard_output_holds_nothing_but_the_json_if_it_goes_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(figures_of_a_rank(), figures_of_a_rank())
    assert call_bench(monkeypatch, checkpoint, "checkpoint", "--json", "-", report=report)[0] == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 2


def test_ranks_that_fail_are_told_and_give_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_bench(monkeypatch, checkpoint, "checkpoint")[0] == 1
    assert "1 of 2 ranks failed" in capsys.readouterr().err


def test_wrong_words_are_refused_before_anything_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_bench(monkeypatch, checkpoint, "checkpoint", "--mib", "1") == (2, [])
    assert "at least 16" in capsys.readouterr().err

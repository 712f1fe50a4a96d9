"""What the simulations say about scale, and the command that runs them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from mpift.cli import main
from mpift.core.packet import PACKET_BYTES
from mpift.errors import ConfigError
from mpift.simulate.decision import Setting, decide
from mpift.simulate.scale import REBUILD_POINTS, Costs, measure, queue_seconds, rebuild_model
from mpift.simulate.traces import CALM

# -- scale -----------------------------------------------------------------------------------------

SETTING = Setting(3.0, 15.0, 3, CALM.link, CALM.node)


def test_a_hang_is_decided_soon_after_two_observers_found_it() -> None:
    decision = decide(SETTING, 1)
    assert decision is not None
    assert 3.0 < decision.suspected_seconds <= decision.decided_seconds < 7.0
    assert decision == decide(SETTING, 1)


def test_without_a_second_observer_nothing_is_decided() -> None:
    # The coordinator alone hears the one that hangs.
    assert decide(Setting(3.0, 15.0, 0, CALM.link, CALM.node), 1) is None


def test_a_coordinator_with_a_queue_decides_later() -> None:
    loaded = Setting(3.0, 15.0, 3, CALM.link, CALM.node, coordinator_wait_seconds=2.0)
    idle, busy = decide(SETTING, 3), decide(loaded, 3)
    assert idle is not None
    assert busy is not None
    assert busy.decided_seconds > idle.decided_seconds + 1.9


def test_only_the_coordinators_load_grows_with_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpift.simulate.scale.measure_costs", lambda: Costs(1e-5, 2e-7))
    report = measure(8, ranks_per_node=4, observers=3, seed=1, trials=1)
    by_nodes = {point.nodes: point for point in report.points}
    assert list(by_nodes) == [8, 10, 100, 1_000, 10_000, 100_000]
    assert by_nodes[8].preset == "small"
    assert by_nodes[10].preset == "large"
    for point in by_nodes.values():
        assert point.messages_per_rank_second == 4 / point.interval_seconds
        assert point.bytes_per_rank_second == PACKET_BYTES * point.messages_per_rank_second
        expected = 2 * (4 * point.nodes - 1) / point.interval_seconds
        assert point.coordinator.messages_per_second == pytest.approx(expected)
        assert point.decision_seconds_p50 is not None
        assert point.told_per_node is (point.nodes == 100_000)
    assert json.loads(json.dumps(report.as_json()))["notes"]["rebuild_model"].startswith("a cost")


def test_listening_costs_what_each_message_and_each_look_cost() -> None:
    costs = Costs(packet_seconds=1e-5, look_seconds=0.0)
    assert costs.core_share(1000, 5.0) == pytest.approx(0.002)


def test_a_queue_takes_the_service_time_when_idle_and_ever_longer_when_loaded() -> None:
    assert queue_seconds(0.0, 2.0) == 2.0
    assert queue_seconds(0.5, 2.0) == 3.0
    assert queue_seconds(0.99, 2.0) > 100.0


def test_the_rebuild_model_goes_through_what_was_measured() -> None:
    for point in REBUILD_POINTS:
        model = rebuild_model(point.nodes, point.ranks)
        assert model.fastest_seconds == pytest.approx(point.fastest_seconds)
        assert model.middle_seconds == pytest.approx(point.middle_seconds)
        assert model.slowest_seconds == pytest.approx(point.slowest_seconds)


def test_one_node_has_nobody_elsewhere_to_watch_it() -> None:
    with pytest.raises(ConfigError, match="1 nodes"):
        measure(1, 8, 3, 1, 1)


# -- the command -----------------------------------------------------------------------------------


def command(*words: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(["simulate", *words])
    assert left.value.code == 0


def test_the_comparison_is_written_for_people_and_for_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "detector.json"
    command("detector", "--periods", "3000", "--json", str(file))
    figures = json.loads(file.read_text())
    for kind, name in itertools.product(("static", "adaptive", "phi"), ("jitter", "calm")):
        assert {
            "false_alarm_share",
            "false_alarms_per_million",
            "detection_seconds_p50",
            "detection_seconds_p99",
            "mistake_seconds_mean",
        } <= set(figures[kind][name])
    assert "Storms come" in figures["model"]["words"]
    assert "adaptive" in capsys.readouterr().out


def test_standard_output_is_left_to_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    command("scale", "-n", "10", "--trials", "1", "--json", "-")
    output = capsys.readouterr()
    assert json.loads(output.out)["points"][0]["nodes"] == 10
    assert "coordinator" in output.err


def test_a_plot_is_drawn_or_says_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    command("scale", "-n", "10", "--trials", "1", "--plot", str(tmp_path / "scale.png"))
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["detector", "--json"], ["scale", "--plot"]):
        with pytest.raises(SystemExit) as left:
            main(["simulate", *words, str(tmp_path / "nowhere" / "file")])
        assert left.value.code == 2
        assert "there is no folder" in capsys.readouterr().err

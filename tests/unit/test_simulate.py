"""The simulated network, and what the simulations say about detectors and scale."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.cli import main
from mpift.core.detector import StaticTimeout
from mpift.core.packet import PACKET_BYTES
from mpift.errors import ConfigError, MpiftError
from mpift.simulate.decision import Setting, decide
from mpift.simulate.detectors import TUNING_SEEDS, Judge, Tally, compare, quantile
from mpift.simulate.network import (
    Constant,
    Exponential,
    Link,
    LinkModel,
    LogNormal,
    Network,
    NodeModel,
    Pareto,
    Pauses,
    Storms,
    described,
    random_of,
)
from mpift.simulate.scale import (
    REBUILD_POINTS,
    Costs,
    measure,
    queue_seconds,
    rebuild_model,
)
from mpift.simulate.traces import CALM, JITTER, Kind, Moment, moments

FAST = LinkModel(Constant(0.001))
STORMY = LinkModel(
    LogNormal(0.01, 1.0),
    loss=0.1,
    duplication=0.1,
    ordered=False,
    storms=Storms(Exponential(20.0), Exponential(5.0), LogNormal(1.0, 0.5), loss=0.3),
)
PAUSING = NodeModel(Pauses(Exponential(10.0), Pareto(0.1, 1.5, 5.0)), drift=1e-4)
FRESH_SEED = max(TUNING_SEEDS) + 96


class Recorder:
    """A process that notes what it hears, and when it is woken."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, int, Any]] = []
        self.sleeps: list[tuple[float, float]] = []

    def received(self, now: float, source: int, message: Any) -> None:
        self.heard.append((now, source, message))

    def woke(self, now: float, slept_seconds: float) -> None:
        self.sleeps.append((now, slept_seconds))


def pair(
    seed: int, link: LinkModel, node: NodeModel | None = None
) -> tuple[Network, Recorder, Recorder]:
    network = Network(seed, link, node)
    left, right = Recorder(), Recorder()
    network.add(0, left)
    network.add(1, right)
    return network, left, right


def stream(network: Network, count: int, interval_seconds: float = 0.1) -> None:
    """Let node 0 send ``count`` numbers to node 1."""
    for number in range(count):
        network.at(number * interval_seconds, lambda n=number: network.send(0, 1, n))
    network.run(count * interval_seconds + 1000.0)


# -- the network -----------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
def test_the_same_seed_tells_the_same_story(seed: int) -> None:
    stories = []
    for _ in range(2):
        network, _, right = pair(seed, STORMY, PAUSING)
        stream(network, 50)
        stories.append((right.heard, right.sleeps))
    assert stories[0] == stories[1]


def test_another_seed_tells_another_story() -> None:
    stories = []
    for seed in (1, 2):
        network, _, right = pair(seed, STORMY)
        stream(network, 50)
        stories.append(right.heard)
    assert stories[0] != stories[1]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.9])
def test_as_many_are_lost_as_the_model_says(share: float) -> None:
    link = Link(LinkModel(Constant(0.1), loss=share), Random(7))
    count = 20_000
    lost = sum(not link.transmit(float(i)) for i in range(count))
    # Five deviations of a binomial distribution.
    assert abs(lost - share * count) <= 5 * math.sqrt(count * share * (1 - share))


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_as_many_are_repeated_as_the_model_says(share: float) -> None:
    link = Link(LinkModel(Constant(0.1), duplication=share), Random(7))
    count = 20_000
    twice = sum(len(link.transmit(float(i))) == 2 for i in range(count))
    assert abs(twice - share * count) <= 5 * math.sqrt(count * share * (1 - share))


@given(st.integers(0, 2**32))
def test_an_ordered_link_keeps_the_order_and_another_one_may_not(seed: int) -> None:
    delay = Exponential(1.0)
    for ordered in (True, False):
        network, _, right = pair(seed, LinkModel(delay, ordered=ordered))
        stream(network, 100)
        numbers = [message for _, _, message in right.heard]
        assert sorted(numbers) == list(range(100))
        assert (numbers == sorted(numbers)) is ordered


@given(st.integers(0, 2**32))
def test_nothing_arrives_before_it_was_sent_or_out_of_time(seed: int) -> None:
    network, _, right = pair(seed, STORMY)
    stream(network, 50)
    times = [time for time, _, _ in right.heard]
    assert times == sorted(times)
    assert all(time >= 0.1 * message for time, _, message in right.heard)


def test_a_storm_delays_and_loses_more_than_the_quiet_before_it() -> None:
    storms = Storms(Constant(100.0), Constant(100.0), Constant(2.0), loss=0.5)
    link = Link(LinkModel(Constant(0.001), ordered=False, storms=storms), Random(3))
    sent = [i / 10 for i in range(2000)]
    arrivals = [link.transmit(now) for now in sent]
    quiet, storm = arrivals[:1000], arrivals[1000:]
    assert all(a == [pytest.approx(now + 0.001)] for a, now in zip(quiet, sent, strict=False))
    assert 400 < sum(not a for a in storm) < 600
    delays = [a[0] - now for a, now in zip(storm, sent[1000:], strict=True) if a]
    assert 1.7 < sum(delays) / len(delays) < 2.3


@given(st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=30))
def test_a_cut_stops_everything_between_its_sides_until_it_is_healed(
    sends: list[tuple[float, bool]],
) -> None:
    network, left, right = pair(1, LinkModel(Constant(1.0)))
    network.at(10.0, lambda: network.cut([0], [1]))
    network.at(30.0, network.heal)
    for time, forth in sends:
        source, target = (0, 1) if forth else (1, 0)
        network.at(time, lambda s=source, t=target, m=time: network.send(s, t, m))
    network.run(100.0)
    got = sorted(message for _, _, message in left.heard + right.heard)
    # Sent or arriving meanwhile is lost. At the very moment of an end, either is right.
    for time, _ in sends:
        if time + 1.0 < 10.0 or (time > 30.0):
            assert time in got
        elif 10.0 < time < 30.0 or 10.0 < time + 1.0 < 30.0:
            assert time not in got


def test_a_cut_leaves_others_alone() -> None:
    network, _, right = pair(1, FAST)
    third = Recorder()
    network.add(2, third)
    network.cut([0], [2])
    network.send(0, 1, "through")
    network.send(0, 2, "lost")
    network.run(1.0)
    assert [m for _, _, m in right.heard] == ["through"]
    assert third.heard == []


def test_a_paused_node_learns_how_long_it_slept_before_it_hears_what_came() -> None:
    network, _, right = pair(1, FAST)
    fired: list[float] = []
    network.after(1, 3.0, lambda: fired.append(network.now))
    network.at(2.0, lambda: network.pause(1, 5.0))
    network.at(4.0, lambda: network.pause(1, 1.0))  # shorter than what is left: no change
    for time in (3.0, 4.0, 8.0):
        network.at(time, lambda t=time: network.send(0, 1, t))
    network.run(20.0)
    assert right.sleeps == [(7.0, 5.0)]
    assert [(round(now, 3), m) for now, _, m in right.heard] == [(7.0, 3.0), (7.0, 4.0), (8.001, 8)]
    assert fired == [7.0]


def test_a_hung_node_does_nothing_more_and_what_it_sent_still_arrives() -> None:
    network, left, right = pair(1, LinkModel(Constant(1.0)))
    network.after(0, 5.0, lambda: network.send(0, 1, "never"))
    network.send(0, 1, "sent before")
    network.at(0.5, lambda: network.halt(0))
    network.at(0.5, lambda: network.send(1, 0, "unheard"))
    network.run(10.0)
    assert [m for _, _, m in right.heard] == ["sent before"]
    assert left.heard == []


def test_a_fast_clock_shows_more_and_its_timers_fire_early() -> None:
    network, _, _ = pair(5, FAST, NodeModel(drift=0.1))
    fired: list[tuple[float, float]] = []
    for node in (0, 1):
        network.after(node, 100.0, lambda n=node: fired.append((network.now, network.clock(n))))
    network.run(200.0)
    assert len({time for time, _ in fired}) == 2
    assert all(90 < time < 112 for time, _ in fired)
    assert all(clock == pytest.approx(100.0) for _, clock in fired)


def test_one_more_node_changes_nothing_for_the_others() -> None:
    stories = []
    for third in (False, True):
        network, _, right = pair(9, STORMY, PAUSING)
        if third:
            network.add(2, Recorder())
            for time in range(40):
                network.at(float(time), lambda n=network: n.send(2, 0, "noise"))
        stream(network, 50)
        stories.append(right.heard)
    assert stories[0] == stories[1]


def test_an_event_in_the_past_is_refused() -> None:
    network, _, _ = pair(1, FAST)
    network.run(5.0)
    with pytest.raises(MpiftError, match="before the present"):
        network.at(4.0, lambda: None)


@pytest.mark.parametrize(
    ("distribution", "mean_seconds"),
    [
        (Constant(2.0), 2.0),
        (Exponential(2.0), 2.0),
        (LogNormal(2.0, 0.5), 2.0 * math.exp(0.125)),
        (Pareto(1.0, 3.0), 1.5),
    ],
)
def test_a_distribution_has_the_mean_that_its_formula_gives(
    distribution: Constant | Exponential | LogNormal | Pareto, mean_seconds: float
) -> None:
    random = Random(11)
    draws = [distribution.draw(random) for _ in range(50_000)]
    assert min(draws) >= 0
    assert sum(draws) / len(draws) == pytest.approx(mean_seconds, rel=0.03)


def test_a_model_is_described_with_the_names_of_its_parts() -> None:
    text = described(FAST)
    assert text["delay"] == {"kind": "Constant", "seconds": 0.001}
    assert json.loads(json.dumps(described(JITTER)))["link"]["storms"]["kind"] == "Storms"


# -- traces and detectors --------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", [CALM, JITTER])
def test_a_trace_is_in_order_of_time_and_repeats_with_its_seed(scenario: Any) -> None:
    trace = list(moments(scenario, 20_000, 4))
    assert trace == list(moments(scenario, 20_000, 4))
    assert trace != list(moments(scenario, 20_000, 5))
    assert all(one[0] <= other[0] for one, other in itertools.pairwise(trace))
    hung = [m for m in trace if m[1] in {Kind.HUNG, Kind.REPLACED}]
    assert [m[1] for m in hung[:4]] == [Kind.HUNG, Kind.REPLACED] * 2


def test_nobody_beats_while_it_hangs_and_nobody_hears_while_it_sleeps() -> None:
    hung_at = woke_at = -math.inf
    for time, kind, number in moments(CALM, 20_000, 8):
        if kind is Kind.HUNG:
            hung_at = time
        elif kind is Kind.REPLACED:
            hung_at = math.inf
        elif kind is Kind.WOKE:
            assert time - number > woke_at
            woke_at = time
        elif hung_at > 0 and hung_at != math.inf:
            assert time < hung_at + 0.1  # only what was under way


def judged(*trace: Moment) -> Tally:
    """What the static detector (3 s, 15 s) did on a trace."""
    judge = Judge(StaticTimeout(3.0, 15.0))
    for moment in trace:
        judge.live_through(*moment)
    return judge.tally


def test_an_alarm_before_a_hang_is_false_and_one_after_it_is_true() -> None:
    tally = judged(
        (3.0, Kind.HEARD, 0),
        (23.0, Kind.HEARD, 1),  # silent for 20 s: a mistake of 5
        (24.0, Kind.HUNG, 0),
        (144.0, Kind.REPLACED, 0),
    )
    assert (tally.false_alarms, tally.mistake_seconds) == (1, [5.0])
    assert (tally.hangs, tally.detection_seconds) == (1, [14.0])


def test_an_alarm_is_counted_once_however_long_it_lasts() -> None:
    tally = judged(
        (3.0, Kind.HEARD, 0),
        (20.0, Kind.WOKE, 0.0),
        (30.0, Kind.WOKE, 0.0),
        (40.0, Kind.HEARD, 0),  # a duplicate takes nothing back
        (50.0, Kind.HEARD, 1),
    )
    assert (tally.false_alarms, tally.mistake_seconds) == (1, [32.0])


def test_the_sleep_of_the_observer_raises_no_alarm() -> None:
    tally = judged((3.0, Kind.HEARD, 0), (30.0, Kind.WOKE, 20.0), (30.0, Kind.HEARD, 1))
    assert tally.false_alarms == 0


def test_who_is_suspected_already_when_it_hangs_counts_as_both() -> None:
    tally = judged((3.0, Kind.HEARD, 0), (20.0, Kind.HUNG, 0), (140.0, Kind.REPLACED, 0))
    assert (tally.false_alarms, tally.detection_seconds) == (1, [0.0])


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_the_smallest_value_that_covers_its_share(
    values: list[float], share: float
) -> None:
    found = quantile(values, share)
    assert found in values
    assert found is not None
    assert sum(v <= found for v in values) >= share * len(values) - 1e-9
    assert sum(v < found for v in values) < share * len(values) + 1e-9


def conclusions_hold(periods: int, seed: int) -> None:
    """What the adaptive detector is for; the trace must be one that fools the static one."""
    jitter = {kind: tally.as_json() for kind, tally in compare(JITTER, periods, seed).items()}
    calm = {kind: tally.as_json() for kind, tally in compare(CALM, periods, seed).items()}
    assert 0.2 < jitter["static"]["false_alarm_share"] < 0.4
    assert jitter["adaptive"]["false_alarm_share"] < 0.01
    assert jitter["adaptive"]["false_alarms_per_million"] < 10
    assert calm["adaptive"]["false_alarms_per_million"] < 10
    fast, slow = calm["adaptive"]["detection_seconds_p50"], calm["static"]["detection_seconds_p50"]
    assert fast < slow / 2
    for row in (*jitter.values(), *calm.values()):
        assert row["hangs_detected"] == row["hangs"] > 0


def test_jitter_that_fools_a_static_timeout_does_not_fool_the_adaptive_one() -> None:
    conclusions_hold(120_000, FRESH_SEED + 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", [FRESH_SEED, 2025])
def test_nor_does_it_over_a_million_periods(seed: int) -> None:
    conclusions_hold(1_000_000, seed)


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


def test_the_streams_of_two_parts_are_independent() -> None:
    assert random_of(1, "a").random() != random_of(1, "b").random()
    assert random_of(1, "a").random() == random_of(1, "a").random()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["detector", "--json"], ["scale", "--plot"]):
        with pytest.raises(SystemExit) as left:
            main(["simulate", *words, str(tmp_path / "nowhere" / "file")])
        assert left.value.code == 2
        assert "there is no folder" in capsys.readouterr().err

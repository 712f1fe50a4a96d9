"""The simulated network: it loses, repeats and delays as its model says, and the same each time."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.errors import MpiftError
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
from mpift.simulate.traces import JITTER

FAST = LinkModel(Constant(0.001))
STORMY = LinkModel(
    LogNormal(0.01, 1.0),
    loss=0.1,
    duplication=0.1,
    ordered=False,
    storms=Storms(Exponential(20.0), Exponential(5.0), LogNormal(1.0, 0.5), loss=0.3),
)
PAUSING = NodeModel(Pauses(Exponential(10.0), Pareto(0.1, 1.5, 5.0)), drift=1e-4)


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


def test_the_streams_of_two_parts_are_independent() -> None:
    assert random_of(1, "a").random() != random_of(1, "b").random()
    assert random_of(1, "a").random() == random_of(1, "a").random()

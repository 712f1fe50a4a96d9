"""Every order of events of 2 to 4 ranks around ``core.suspicion``; broken variants are caught.

A world is named by what it asks about. Those of four members are mostly *patient*: their detectors
never give up for good, which only matters where a watchdog vouches for a rank that hangs, and the
worlds of three members cover that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpift.core.suspicion import Finding, Suspicion, Tick
from mpift.testing.explorer import Report, explore
from tests.model.suspicion_model import SuspicionModel
from tests.model.suspicion_world import World

ONE_NODE_OF_2, ONE_NODE_OF_3, ONE_NODE_OF_4 = (0, 0), (0, 0, 0), (0, 0, 0, 0)
TWO_NODES_OF_1, THREE_NODES_OF_1, FOUR_NODES_OF_1 = (0, 1), (0, 1, 2), (0, 1, 2, 3)
TWO_NODES, TWO_NODES_OF_2, THREE_NODES = (0, 0, 1), (0, 0, 1, 1), (0, 0, 1, 2)
long = pytest.mark.long


def world(name: str, *marks: pytest.MarkDecorator, **given: Any) -> Any:
    return pytest.param(given, id=name.replace(" ", "_"), marks=marks)


def side(*members: int) -> dict[str, Any]:
    return {"side": frozenset(members), "cuts": 1}


def walked(given: dict[str, Any], machine: type[Suspicion] = Suspicion) -> Report[World]:
    return explore(SuspicionModel(machine=machine, **given), must_end=True)


@pytest.mark.parametrize(
    "given",
    [
        world("a neighbour", nodes=ONE_NODE_OF_3, hangs=1, mistakes=1, patient=True),
        world("words get lost", nodes=ONE_NODE_OF_3, hangs=1, losses=1, watchdogs="on"),
        world("nobody can look", nodes=THREE_NODES_OF_1, hangs=1, losses=1),
        world("a watchdog errs", nodes=THREE_NODES_OF_1, hangs=1, watchdogs="blind"),
        world("two of three", nodes=THREE_NODES_OF_1, hangs=2, watchdogs="on"),
        world("two of three on two nodes", nodes=TWO_NODES, hangs=2),
        world("two of three on one node", nodes=ONE_NODE_OF_3, hangs=2),
        world("one of four", nodes=ONE_NODE_OF_4, hangs=1, patient=True),
        world("one of two and two", nodes=TWO_NODES_OF_2, hangs=1, watchdogs="on"),
        world("one of two", nodes=ONE_NODE_OF_2, hangs=1, mistakes=1),
        world("one of two and deaths", nodes=ONE_NODE_OF_3, hangs=1, deaths=1, patient=True),
        world("a neighbour, impatient", long, nodes=ONE_NODE_OF_3, hangs=1, mistakes=1),
        world("one of four, impatient", long, nodes=ONE_NODE_OF_4, hangs=1),
        world("two of four", long, nodes=ONE_NODE_OF_4, hangs=2, patient=True),
        world("two of two and two", long, nodes=TWO_NODES_OF_2, hangs=2, patient=True),
        world("four err", long, nodes=ONE_NODE_OF_4, hangs=1, mistakes=1, patient=True),
        world("two and two err", long, nodes=TWO_NODES_OF_2, hangs=1, mistakes=1, patient=True),
    ],
)
def test_what_hangs_is_left_out_once_it_is_gone(given: dict[str, Any]) -> None:
    report = walked(given)
    assert report.violation is None, str(report)
    assert report.states > 50


@pytest.mark.parametrize(
    "given",
    [
        world("one of two", nodes=TWO_NODES_OF_1, **side(1), mistakes=2, heals=1),
        world("the last of three", nodes=THREE_NODES_OF_1, **side(2)),
        world("words get lost", nodes=THREE_NODES_OF_1, **side(0), losses=1),
        world("detectors err", nodes=THREE_NODES_OF_1, **side(1), mistakes=1, patient=True),
        world("two nodes", nodes=TWO_NODES, **side(2), mistakes=1, patient=True),
        world("two and two", nodes=TWO_NODES_OF_2, **side(2, 3), patient=True),
        world("the first of four", nodes=FOUR_NODES_OF_1, **side(0), patient=True),
        world("the last of four", long, nodes=FOUR_NODES_OF_1, **side(3), patient=True),
        world("half of four", long, nodes=FOUR_NODES_OF_1, **side(2, 3), patient=True),
        world("half of three nodes", long, nodes=THREE_NODES, **side(0, 1), patient=True),
        world("it heals", long, nodes=THREE_NODES_OF_1, **side(2), heals=1, patient=True),
        world(
            "answers are late",
            long,
            nodes=THREE_NODES_OF_1,
            **side(0),
            mistakes=1,
            slow_answers=True,
            patient=True,
        ),
        world(
            "two and two, words get lost",
            long,
            nodes=TWO_NODES_OF_2,
            **side(2, 3),
            losses=1,
            patient=True,
        ),
    ],
)
def test_both_parts_of_a_cut_end_and_at_most_one_calls_itself_the_larger(
    given: dict[str, Any],
) -> None:
    report = walked(given)
    assert report.violation is None, str(report)
    assert report.states > 50


@pytest.mark.parametrize(
    "given",
    [
        world("any two", nodes=THREE_NODES_OF_1, mistakes=2),
        world("on one node", nodes=ONE_NODE_OF_3, mistakes=2),
        world("the coordinator", nodes=THREE_NODES_OF_1, mistakes=6, deceived=frozenset({0})),
        world("the next in line", nodes=THREE_NODES_OF_1, mistakes=6, deceived=frozenset({1})),
        world("beside a death", nodes=THREE_NODES_OF_1, mistakes=1, deaths=1, patient=True),
        world("it pauses", nodes=ONE_NODE_OF_3, hangs=1, wakings=1, slow_answers=True),
        world("it pauses elsewhere", nodes=THREE_NODES_OF_1, hangs=1, wakings=1, watchdogs="on"),
        world(
            "of two it pauses",
            nodes=ONE_NODE_OF_2,
            hangs=1,
            wakings=1,
            mistakes=2,
            slow_answers=True,
        ),
        world("any three on one node", long, nodes=ONE_NODE_OF_3, mistakes=3),
        world("any three", long, nodes=THREE_NODES_OF_1, mistakes=3),
        world("it pauses and they err", long, nodes=ONE_NODE_OF_3, hangs=1, wakings=1, mistakes=1),
    ],
)
def test_nobody_healthy_is_killed_on_the_word_of_one_observer(given: dict[str, Any]) -> None:
    report = walked(given)
    assert report.violation is None, str(report)
    assert report.states > 50


@pytest.mark.parametrize(
    "given",
    [
        world("though it lives", nodes=THREE_NODES_OF_1, condemnations=1, mistakes=1),
        world("while another hangs", nodes=THREE_NODES_OF_1, condemnations=1, hangs=1),
    ],
)
def test_whom_the_settings_condemn_is_left_out(given: dict[str, Any]) -> None:
    report = walked(given)
    assert report.violation is None, str(report)
    assert report.states > 50


class _OneObserverIsEnough(Suspicion):
    """Broken: whom the coordinator finds silent is evicted, whatever the others hear."""

    @property
    def _counted(self):  # type: ignore[no-untyped-def]
        return self.suspects


class _EpochsDoNotMatter(Suspicion):
    """Broken: what was said in another view counts in this one."""

    def _is_stale(self, event):  # type: ignore[no-untyped-def]
        same = replace(event, epoch=self.view.epoch) if hasattr(event, "epoch") else event
        return super()._is_stale(same)


class _WordsNeverExpire(Suspicion):
    """Broken: what an observer has said once counts until it says something else."""

    def handle(self, event):  # type: ignore[no-untyped-def]
        state, instructions = super().handle(event)
        kept = replace(state, told=self.told) if isinstance(event, Tick) else state
        return kept, instructions


class _CutOffMeansDead(Suspicion):
    """Broken: a node that does not answer is taken for a dead one."""

    def _learn(self, member, finding):  # type: ignore[no-untyped-def]
        dead = finding is Finding.UNREACHABLE
        return super()._learn(member, Finding.GONE if dead else finding)


class _OneNodeIsTheWholeCut(Suspicion):
    """Broken: whoever is not on the node that does not answer is taken to be on this side."""

    def _cut_off(self, member):  # type: ignore[no-untyped-def]
        return replace(super()._cut_off(member), unasked=frozenset())


class _NobodyIsEverAlone(Suspicion):
    """Broken: one that finds all others silent waits for somebody who finds so too."""

    def _is_alone_with(self, member):  # type: ignore[no-untyped-def]
        return False


class _NobodyStandsIn(Suspicion):
    """Broken: the first of the view decides, even when it is silent itself."""

    @property
    def coordinator(self):  # type: ignore[no-untyped-def]
        return self.view.members[0]


class _SaysItOnce(Suspicion):
    """Broken: a suspicion is told when it arises, and never again."""

    def handle(self, event):  # type: ignore[no-untyped-def]
        return (self, ()) if isinstance(event, Tick) else super().handle(event)


class _WatchdogExcusesForEver(Suspicion):
    """Broken: whom a watchdog calls alive is never asked about again."""

    def _learn(self, member, finding):  # type: ignore[no-untyped-def]
        if finding is Finding.ALIVE:
            return self, ()
        return super()._learn(member, finding)


class _OldStillnessCounts(Suspicion):
    """Broken: one that was seen to stand still counts as such after it was heard again."""

    def _learn(self, member, finding):  # type: ignore[no-untyped-def]
        state, instructions = super()._learn(member, finding)
        if finding is Finding.STANDS_STILL:
            state = replace(state, still=state.still | {member})
        return state, instructions


FROM_ANOTHER_VIEW = {
    "nodes": FOUR_NODES_OF_1,
    "deaths": 1,
    "mistakes": 2,
    "deceived": frozenset({0, 3}),
    "patient": True,
}
STALE_STILLNESS = {"hangs": 1, "wakings": 1, "mistakes": 2, "slow_answers": True}


@pytest.mark.parametrize(
    ("machine", "given", "expected"),
    [
        (
            _OneObserverIsEnough,
            {"nodes": THREE_NODES_OF_1, "mistakes": 1},
            "on the word of 0 alone",
        ),
        (_EpochsDoNotMatter, FROM_ANOTHER_VIEW, "1 is killed on the word of 0 alone"),
        (_WordsNeverExpire, {"nodes": THREE_NODES_OF_1, "mistakes": 2}, "on the word of 0 alone"),
        (_CutOffMeansDead, {"nodes": THREE_NODES_OF_1, **side(2)}, "left out alive"),
        (_OneNodeIsTheWholeCut, {"nodes": FOUR_NODES_OF_1, **side(2, 3)}, "with 2 against 2"),
        (_NobodyIsEverAlone, {"nodes": THREE_NODES_OF_1, **side(2)}, "deadlock"),
        (_NobodyStandsIn, {"nodes": ONE_NODE_OF_3, "hangs": 1}, "trap"),
        (_SaysItOnce, {"nodes": THREE_NODES_OF_1, "hangs": 1, "losses": 1}, "deadlock"),
        (
            _WatchdogExcusesForEver,
            {"nodes": THREE_NODES_OF_1, "hangs": 1, "watchdogs": "blind"},
            "trap",
        ),
        (_OldStillnessCounts, {"nodes": ONE_NODE_OF_2, **STALE_STILLNESS}, "of 0 alone"),
    ],
)
def test_a_broken_variant_is_caught_with_a_counter_example(
    machine: type[Suspicion], given: dict[str, Any], expected: str
) -> None:
    report = walked(given, machine)
    print(f"{machine.__name__}: {machine.__doc__}\n{report}")
    assert report.violation is not None
    assert expected in report.violation
    assert report.trace

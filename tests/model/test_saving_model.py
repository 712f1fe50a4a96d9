"""Gathering the parts of a checkpoint, in every order; and machines that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mpift.core.saving import Gathering, Instructions, Offered, Refused
from mpift.testing.explorer import explore
from tests.model.saving_model import Job

LARGE = {"one node, a failure to write"}
WORLDS = {
    "one node, a death": Job(deaths=1, failures=0),
    "one node, a failure to write": Job(deaths=0),
    "two nodes": Job(nodes=("a", "a", "b"), failures=0),
    "each on its own node": Job(nodes=("a", "b", "c"), deaths=1),
    "one of another history": Job(diverged=frozenset({2}), deaths=0, failures=0),
    "one may skip": Job(skipping=frozenset({1}), deaths=1, failures=0),
}


@pytest.mark.parametrize(
    "world",
    [
        *(
            pytest.param(world, id=name, marks=[pytest.mark.long] if name in LARGE else [])
            for name, world in WORLDS.items()
        ),
        pytest.param(Job(), marks=pytest.mark.long, id="one node, two deaths and a failure"),
    ],
)
def test_parts_of_one_snapshot_are_assembled_or_it_is_given_up(
    world: Job, walked: Callable[[object], None]
) -> None:
    report = explore(world, must_end=True)
    walked(report)
    assert report.violation is None, str(report)


def outcomes(job: Job) -> set[str]:
    """All ends that a job can come to."""
    seen, todo, found = set(), [job.initial()], set()
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        found.add(state.outcome)
        todo += [after for _, after in job.actions(state)]
    return found - {""}


def test_a_neighbour_writes_the_share_of_a_rank_that_died_with_its_snapshot_whole() -> None:
    machine = Gathering(frozenset({0, 1}), ((0, "a"), (1, "a"), (2, "a")))
    job = Job(deaths=0, failures=0)
    state = replace(
        job.initial(), living=frozenset({0, 1}), held=frozenset({0, 1, 2}), machine=machine
    )

    class Later(Job):
        def initial(self):  # type: ignore[no-untyped-def]
            return state

    assert "assembled" in outcomes(Later(deaths=0, failures=0))
    assert "assembled" not in outcomes(Later(nodes=("a", "a", "b"), deaths=0, failures=0))


class MixesHistories(Gathering):
    """Counts shares whatever they are of."""

    def handle(self, event):  # type: ignore[no-untyped-def]
        if isinstance(event, Offered) and self.origin is not None:
            event = replace(event, origin=self.origin)
        return super().handle(event)


class AsksTheDead(Gathering):
    """Forgets nobody who was asked."""

    def handle(self, event):  # type: ignore[no-untyped-def]
        after, instructions = super().handle(event)
        return replace(after, asked=after.asked | self.asked, living=self.living), instructions


class AsksAnybody(Gathering):
    """Looks for snapshots on other nodes too."""

    def _candidates(self, share, owner):  # type: ignore[no-untyped-def]
        return (m for m in sorted(self.living) if m != owner and (share, m) not in self.refused)


class TakesRefusalsForParts(Gathering):
    """Whoever answers has written."""

    def handle(self, event) -> tuple[Gathering, Instructions]:  # type: ignore[no-untyped-def]
        if isinstance(event, Refused) and self.origin is not None:
            event = Offered(event.member, event.share, self.origin)
        return super().handle(event)


@pytest.mark.parametrize(
    ("machine", "world"),
    [
        (MixesHistories, WORLDS["one of another history"]),
        (AsksTheDead, WORLDS["one node, a death"]),
        (AsksAnybody, WORLDS["two nodes"]),
        (TakesRefusalsForParts, WORLDS["one node, a failure to write"]),
    ],
)
def test_a_machine_that_is_wrong_on_purpose_is_caught(machine: type[Gathering], world: Job) -> None:
    report = explore(replace(world, machine=machine))
    assert report.violation is not None

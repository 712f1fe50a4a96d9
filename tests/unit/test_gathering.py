"""What the coordinator does with parts, by its clock, and with views."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from mpift.checkpoint.gathering import Gatherings
from mpift.checkpoint.group import Body
from tests.unit.fake_savers import ROOT, Crew, FakeGroup, FakeScribe, version

PATIENCE_SECONDS = FakeGroup.config.sync_timeout or 0.0


class Coordinator:
    """Rank 0 of a view of four, with what it says taken down."""

    def __init__(self, timeout_seconds: float = 600.0) -> None:
        self.crew = Crew(4)
        self.scribe = FakeScribe()
        self.said: list[tuple[str, Body, tuple[int, ...] | None]] = []
        self.gatherings = Gatherings(
            FakeGroup(self.crew, 0),
            self.scribe,  # type: ignore[arg-type]
            ROOT,
            timeout_seconds,
            lambda word, body, members: self.said.append((word, body, members)),
        )
        self.gatherings.install((0, 1, 2, 3))

    def part(self, member: int, share: int | None = None, **changes: Any) -> None:
        """``member`` offers its own share, or another one."""
        origin = {"history": "h", "layout": "l", "owners": (0, 1, 2, 3)} | changes
        share = member if share is None else share
        body = {"share": share, "origin": list(origin.values())}
        self.gatherings.take(version(1), "part", member, body, f"{share} by {member}".encode())

    def words(self) -> list[str]:
        return [word for word, *_ in self.said]

    def asked(self) -> list[tuple[int, int]]:
        """(member, share) of those that were asked to write another's share."""
        return [
            (members[0], body["share"])
            for word, body, members in self.said
            if word == "write" and members
        ]


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


def test_a_slow_owner_has_as_long_as_the_timeout_and_then_a_neighbour_is_asked(
    coordinator: Coordinator,
) -> None:
    begin = time.monotonic()
    for member in (0, 2, 3):
        coordinator.part(member)
    coordinator.gatherings.turn(begin)
    coordinator.gatherings.turn(begin + PATIENCE_SECONDS - 1)
    assert coordinator.said == []
    coordinator.gatherings.turn(begin + PATIENCE_SECONDS + 1)
    coordinator.gatherings.turn(begin + PATIENCE_SECONDS + 2)
    assert coordinator.asked() == [(0, 1)]


def test_where_the_first_half_took_long_slow_owners_have_as_long_again(
    coordinator: Coordinator,
) -> None:
    begin = time.monotonic()
    coordinator.part(0)
    coordinator.part(1)
    coordinator.part(2)
    half = begin + 4 * PATIENCE_SECONDS
    coordinator.gatherings.turn(half)  # the first look at which so many are there
    coordinator.gatherings.turn(half + 3 * PATIENCE_SECONDS)
    assert coordinator.asked() == []
    coordinator.gatherings.turn(half + 4 * PATIENCE_SECONDS + 1)
    assert coordinator.asked() == [(0, 3)]


def test_as_long_as_only_half_of_the_parts_are_there_nobody_is_slow(
    coordinator: Coordinator,
) -> None:
    coordinator.part(0)
    coordinator.part(1)
    coordinator.gatherings.turn(time.monotonic() + 20 * PATIENCE_SECONDS)
    assert coordinator.said == []


def test_the_part_that_comes_first_counts_whoever_wrote_it(coordinator: Coordinator) -> None:
    for member in (0, 2, 3):
        coordinator.part(member)
    begin = time.monotonic()
    coordinator.gatherings.turn(begin)
    coordinator.gatherings.turn(begin + PATIENCE_SECONDS + 1)
    coordinator.part(0, share=1)
    coordinator.part(1)
    parts = coordinator.scribe.take("assemble").arguments["parts"]
    assert parts == [b"0 by 0", b"1 by 0", b"2 by 2", b"3 by 3"]


def test_a_save_that_stands_still_is_given_up_with_the_missing_ranks_named() -> None:
    coordinator = Coordinator(timeout_seconds=30.0)
    coordinator.part(0)
    coordinator.part(3)
    coordinator.gatherings.turn(time.monotonic() + 29)
    assert coordinator.said == []
    coordinator.gatherings.turn(time.monotonic() + 31)
    ((word, body, members),) = coordinator.said
    assert (word, members) == ("abandon", None)
    assert body["reason"] == "nothing came for 30 s; missing are the shares of ranks 1, 2"
    assert not body["skipped"]
    assert coordinator.gatherings.idle


def test_a_writer_that_never_puts_the_parts_together_ends_the_save_as_well() -> None:
    coordinator = Coordinator(timeout_seconds=30.0)
    for member in range(4):
        coordinator.part(member)
    assert coordinator.scribe.names() == ["assemble"]
    coordinator.gatherings.turn(time.monotonic() + 31)
    assert coordinator.words() == ["abandon"]
    assert coordinator.gatherings.idle


def test_what_is_assembled_is_announced_with_its_history(coordinator: Coordinator) -> None:
    for member in range(4):
        coordinator.part(member)
    assert not coordinator.gatherings.idle
    coordinator.scribe.take("assemble").end(("0000000001", "digest"))
    coordinator.crew.run_calls()
    body = {"version": version(1), "folder": "0000000001", "digest": "digest", "history": "h"}
    assert coordinator.said == [("manifest", body, None)]
    assert coordinator.crew.struck == [(0, 1, "announced")]
    assert coordinator.gatherings.idle


def test_what_was_given_up_while_it_was_assembled_is_not_announced(
    coordinator: Coordinator,
) -> None:
    for member in range(4):
        coordinator.part(member)
    job = coordinator.scribe.take("assemble")
    coordinator.gatherings.install((1, 2, 3))  # there is a new coordinator
    job.end(("0000000001", "digest"))
    coordinator.crew.run_calls()
    assert coordinator.said == []


def test_under_the_same_coordinator_a_view_change_keeps_what_is_there(
    coordinator: Coordinator,
) -> None:
    coordinator.part(1)
    coordinator.part(0)
    coordinator.gatherings.install((0, 1, 2))
    assert coordinator.asked() == [(0, 3)]
    coordinator.part(2)
    coordinator.part(0, share=3)
    assert coordinator.scribe.names() == ["assemble"]


def test_under_a_new_coordinator_gathering_begins_anew(coordinator: Coordinator) -> None:
    coordinator.part(1)
    coordinator.gatherings.install((1, 2, 3))
    assert coordinator.gatherings.idle


def test_parts_of_another_layout_are_not_put_together(coordinator: Coordinator) -> None:
    coordinator.part(0)
    coordinator.part(1)
    coordinator.part(2)
    coordinator.part(3, layout="another")
    assert coordinator.scribe.names() == []
    coordinator.part(3)
    parts = coordinator.scribe.take("assemble").arguments["parts"]
    assert len(parts) == 4


def test_the_reasons_why_ranks_could_not_write_are_told_with_the_end(
    coordinator: Coordinator,
) -> None:
    for member in (0, 2, 3):
        coordinator.part(member)
    for member in (1, 0, 2, 3):
        refusal = {"share": 1, "reason": f"disk {member} is full", "origin": None}
        coordinator.gatherings.take(version(1), "refused", member, refusal, b"")
    word, body, _ = coordinator.said[-1]
    assert word == "abandon"
    assert "rank 1 can't write its share, and nobody else holds it or can" in body["reason"]
    for member in range(4):
        assert f"rank {member}: disk {member} is full" in body["reason"]


def test_a_folder_of_checkpoints_is_named_in_every_job(coordinator: Coordinator) -> None:
    for member in range(4):
        coordinator.part(member)
    arguments = coordinator.scribe.take("assemble").arguments
    assert arguments["root"] == Path(ROOT)
    assert arguments["job_name"] == "job"

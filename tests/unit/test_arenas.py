"""Arenas are opened by all ranks together: every rank of the job gets one, or none does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpift import memory
from mpift.config import Config
from mpift.core import events
from mpift.core.membership import View, initial_view
from mpift.core.sharing import Kind, Stamp
from mpift.errors import GradientError
from mpift.reduction import arena
from mpift.reduction.arena import Arena
from mpift.reduction.arenas import Arenas
from mpift.reduction.buckets import Layout, ParameterSpec, lay_out

LIMIT_SECONDS = 10.0


def layout_of(*sizes: int) -> Layout:
    return lay_out([ParameterSpec(f"p{n}", size, "float32") for n, size in enumerate(sizes)], 1, 1)


LAYOUT = layout_of(5, 3000)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's shared memory lies."""
    monkeypatch.setattr(memory, "_SHARED_MEMORY", tmp_path)
    return tmp_path


class Vanished(Exception):
    """This rank is no more."""


class Table:
    """Around which all ranks say something. It is said once all in the view have; whoever vanishes
    is waited for no more."""

    def __init__(self, size: int) -> None:
        self.view = initial_view(size)
        self._said: dict[int, Any] = {}
        self._outcomes: list[tuple[list[Any], View]] = []
        self._news = threading.Condition()

    def exchange(self, member: int, words: Any) -> tuple[list[Any], View]:
        with self._news:
            number = len(self._outcomes)
            self._said[member] = words
            self._conclude()
            heard = self._news.wait_for(lambda: len(self._outcomes) > number, LIMIT_SECONDS)
            assert heard, f"member {member} waits for others"
            return self._outcomes[number]

    def vanish(self, member: int) -> None:
        with self._news:
            rest = [m for m in self.view.members if m != member]
            self.view = self.view.successor(self.view.epoch + 1, rest)
            self._conclude()
        raise Vanished

    def _conclude(self) -> None:
        members = self.view.members
        if set(members) <= set(self._said):
            self._outcomes.append(([self._said[m] for m in members], self.view))
            self._said = {}
            self._news.notify_all()


class Job:
    """One rank's. ``before`` is called with the number of an exchange before it is begun."""

    def __init__(self, table: Table, member: int, nodes: Sequence[str], config: Config) -> None:
        self.config, self.member, self.view = config, member, table.view
        self.identities: Any = {
            m: SimpleNamespace(node=node, host=f"host-{node}") for m, node in enumerate(nodes)
        }
        self.node_name = memory.job_name("token", nodes[member])
        self.exchanges = 0
        self.before: Callable[[int], object] = lambda number: None
        self.told: list[tuple[str, str]] = []
        self._table = table

    def exchange(self, words: Any) -> list[Any]:
        self.before(self.exchanges)
        self.exchanges += 1
        said, self.view = self._table.exchange(self.member, words)
        return said

    def emit(self, kind: type, way: str, words: str) -> None:
        assert kind is events.ReductionChosen
        self.told.append((way, words))


class Ranks:
    """All of a job; ``nodes[m]`` is the node of member m."""

    def __init__(self, nodes: str, reduction: str = "auto") -> None:
        self.table = Table(len(nodes))
        config = Config(reduction=reduction)
        self.jobs = [Job(self.table, member, nodes, config) for member in range(len(nodes))]
        self.arenas = [Arenas(job) for job in self.jobs]

    def open(self, *layouts: Layout) -> list[Any]:
        """What each gets or raises; with one layout for all, or one for each."""
        each = layouts if len(layouts) > 1 else layouts * len(self.jobs)
        with ThreadPoolExecutor(len(self.jobs)) as pool:
            calls = [
                pool.submit(arenas.open, layout)
                for arenas, layout in zip(self.arenas, each, strict=True)
            ]
            return [call.exception(2 * LIMIT_SECONDS) or call.result() for call in calls]

    @property
    def told(self) -> list[list[tuple[str, str]]]:
        return [job.told for job in self.jobs]


def check_shared(found: Sequence[Arena]) -> None:
    """These ranks of one node read what the others write."""
    assert len({each.members for each in found}) == 1
    for each in found:
        for home in each.homes:
            home[:] = each.member + 1
        each.put(1, Stamp(4, Kind.REAL))
    found[-1].result(3, 1)[:] = 77
    for each in found:
        for other in found:
            assert (each.contribution(other.member, 1) == other.member + 1).all()
            assert each.stamp(other.member, 1) == Stamp(4, Kind.REAL)
        assert (each.result(3, 1) == 77).all()
        assert (each.result(2, 1) == 0).all()


def test_all_ranks_get_an_arena_shared_with_their_node_whose_files_have_no_names_any_more(
    folder: Path,
) -> None:
    ranks = Ranks("aabab")
    found = ranks.open(LAYOUT)
    assert [each.members for each in found] == [(0, 1, 3), (0, 1, 3), (2, 4), (0, 1, 3), (2, 4)]
    assert all(each.everybody == set(range(5)) for each in found)
    check_shared([found[m] for m in (0, 1, 3)])
    check_shared([found[m] for m in (2, 4)])
    assert (found[2].contribution(4, 1) == 5).all()
    assert list(folder.iterdir()) == []
    assert [len(told) for told in ranks.told] == [1, 0, 0, 0, 0]
    way, words = ranks.jobs[0].told[0]
    assert way == "node"
    assert "5 ranks on 2 nodes" in words


def test_each_layout_gets_an_arena_of_its_own_and_the_choice_is_told_once(folder: Path) -> None:
    ranks = Ranks("aa")
    first, second = ranks.open(LAYOUT), ranks.open(LAYOUT)
    check_shared(first)
    for each in second:
        assert not each.homes[1].any()
    check_shared(second)
    assert [len(told) for told in ranks.told] == [1, 0]
    assert list(folder.iterdir()) == []


# -- where there is none ---------------------------------------------------------------------------


def test_what_was_chosen_is_said_once() -> None:
    ranks = Ranks("aab", "mpi")
    assert ranks.open(LAYOUT) == [None] * 3
    ranks.open(LAYOUT)
    assert ranks.told == [[("mpi", "as the setting reduction asks")], [], []]
    assert [job.exchanges for job in ranks.jobs] == [0, 0, 0]


@pytest.mark.parametrize(
    ("nodes", "reason"), [("abc", "no two ranks share a node"), ("a", "there is one rank")]
)
def test_where_no_ranks_share_a_node_there_is_none(nodes: str, reason: str) -> None:
    ranks = Ranks(nodes)
    assert ranks.open(LAYOUT) == [None] * len(nodes)
    assert ranks.told == [[("mpi", reason)], *[[]] * (len(nodes) - 1)]
    ranks.open(LAYOUT)
    assert len(ranks.jobs[0].told) == 1
    for raised in Ranks(nodes, "node").open(LAYOUT) if len(nodes) > 1 else ():
        assert isinstance(raised, GradientError)
        assert reason in str(raised)


def test_what_was_asked_for_and_is_lost_later_ends_no_training(folder: Path) -> None:
    ranks = Ranks("aab", "node")
    assert all(ranks.open(LAYOUT))
    in_the_way(ranks, 1, folder, opened=2)
    again = [arenas.open for arenas in ranks.arenas]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda open_: open_(LAYOUT, anew=False), again))
    assert found == [None] * 3
    for job in ranks.jobs:  # rank 1 has died
        job.view = job.view.successor(1, [0, 2])
    assert ranks.arenas[0].open(LAYOUT) is ranks.arenas[2].open(LAYOUT) is None


def in_the_way(ranks: Ranks, member: int, folder: Path, opened: int = 1) -> Path:
    path = memory.region_path(
        folder, ranks.jobs[member].node_name, f"gradients{opened}-rank{member}"
    )
    path.write_bytes(b"somebody's")
    return path


@pytest.mark.parametrize("member", [0, 1, 3])
def test_if_one_rank_can_make_no_region_none_has_an_arena_and_all_know_why(
    member: int, folder: Path
) -> None:
    ranks = Ranks("aabb")
    in_the_way(ranks, member, folder)
    assert ranks.open(LAYOUT) == [None] * 4
    way, words = ranks.jobs[0].told[0]
    host = ranks.jobs[member].identities[member].host
    assert way == "mpi"
    assert words.startswith(f"rank {member} on {host}: ")
    assert "File exists" in words
    assert ranks.told[1:] == [[], [], []]
    assert list(folder.iterdir()) == []
    # Another time there may be one, which is news.
    check_shared(ranks.open(LAYOUT)[:2])
    assert [told[0] for told in ranks.jobs[0].told] == ["mpi", "node"]


def test_where_it_has_to_be_memory_all_ranks_raise_the_reason(folder: Path) -> None:
    ranks = Ranks("aab", "node")
    in_the_way(ranks, 1, folder)
    found = ranks.open(LAYOUT)
    assert all(isinstance(each, GradientError) for each in found)
    (words,) = {str(each) for each in found}
    assert "reduction = 'node' (MPIFT_REDUCTION) can't be: rank 1 on host-a: " in words
    assert list(folder.iterdir()) == []


def test_ranks_with_different_parameters_have_no_arena(folder: Path) -> None:
    ranks = Ranks("aab")
    assert ranks.open(LAYOUT, layout_of(5, 3001), LAYOUT) == [None] * 3
    _, words = ranks.jobs[0].told[0]
    assert words.startswith("rank 0 on host-a: ")
    assert "ranks have different parameters" in words
    assert list(folder.iterdir()) == []


def test_a_full_folder_is_a_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the node's first rank, which has room for its own region, but not for the results."""
    ranks = Ranks("baa")
    room = arena.contributions_bytes(LAYOUT)
    monkeypatch.setattr(memory, "_free_bytes", lambda _: room)
    assert ranks.open(LAYOUT) == [None] * 3
    _, words = ranks.jobs[0].told[0]
    assert words.startswith("rank 0 on host-b: ")
    assert f"needs {arena.results_bytes(LAYOUT)} bytes of shared memory" in words
    assert list(folder.iterdir()) == []


# -- deaths meanwhile ------------------------------------------------------------------------------


@pytest.mark.parametrize("member", [0, 1, 4])
def test_whoever_dies_before_its_region_is_made_costs_the_others_an_attempt(
    member: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks("aaabb")
    create = arena.create

    def die(path: Path, layout: Layout, size_bytes: int) -> Any:
        if path.name.endswith(f"rank{member}"):
            ranks.table.vanish(member)
        return create(path, layout, size_bytes)

    monkeypatch.setattr(arena, "create", die)
    found = ranks.open(LAYOUT)
    assert isinstance(found.pop(member), Vanished)
    left = [m for m in range(5) if m != member]
    assert all(each.everybody == set(left) for each in found)
    assert [job.exchanges for job in ranks.jobs if job.member != member] == [4] * 4
    for node in "ab":
        check_shared([each for each in found if "aaabb"[each.member] == node])
    assert list(folder.iterdir()) == []
    assert [len(told) for told in ranks.told] == [int(m == left[0]) for m in range(5)]


@pytest.mark.parametrize("member", [0, 1, 4])
@pytest.mark.parametrize("number", [0, 1])
def test_whoever_dies_with_its_region_made_is_in_the_arena_of_the_others(
    member: int, number: int, folder: Path
) -> None:
    """Which is told what view it was opened in, and so knows that it is missing."""
    ranks = Ranks("aaabb")
    job = ranks.jobs[member]
    job.before = lambda at: ranks.table.vanish(member) if at == number else None
    found = ranks.open(LAYOUT)
    assert isinstance(found.pop(member), Vanished)
    assert all(each.everybody == set(range(5)) for each in found)
    for node in "ab":
        check_shared([each for each in found if "aaabb"[each.member] == node])
    assert all(member in each.members for each in found if "aaabb"[each.member] == "aaabb"[member])
    assert list(folder.iterdir()) == []


def test_a_problem_that_nobodys_death_explains_is_not_tried_again(folder: Path) -> None:
    ranks = Ranks("aa")
    in_the_way(ranks, 0, folder)
    ranks.open(LAYOUT)
    assert [job.exchanges for job in ranks.jobs] == [1, 1]


def test_a_death_that_leaves_no_two_ranks_on_a_node_leaves_no_arena(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks("aab")
    create = arena.create

    def die(path: Path, *arguments: Any) -> Any:
        if path.name.endswith("rank1"):
            ranks.table.vanish(1)
        return create(path, *arguments)

    monkeypatch.setattr(arena, "create", die)
    opened = ranks.open(LAYOUT)
    assert opened[0] is opened[2] is None
    assert ranks.told == [[("mpi", "no two ranks share a node")], [], []]

"""A job of several nodes in one process, whose ranks sum in shared memory; no test in itself.

Every rank has maps of its own of real regions. Words, exchanges and the ranks' own moves come in
any order, by seed. Ranks die, and the others go on as after a rebuild.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpift.core.membership import View, initial_view
from mpift.core.sharing import Kind
from mpift.reduction import arena
from mpift.reduction.arena import Arena
from mpift.reduction.buckets import Bucket, Contributions, Layout, ParameterSpec, lay_out
from mpift.reduction.codecs import Compressor
from mpift.reduction.results import Results
from mpift.reduction.summing import Sums
from mpift.reduction.sums import Claim
from mpift.transport.lane import Started
from tests.unit.any_order import Comm, network_of

NOBODYS = 666.0  # what lies where nothing was contributed: it must not be seen in any sum


def layout_of(sizes: Sequence[int], dtype: str = "float32", pinned: bool = False) -> Layout:
    specs = [ParameterSpec(f"p{n}", size, dtype) for n, size in enumerate(sizes)]
    return lay_out(specs, 1, 200, pinned=(0,) if pinned else ())


def arenas_of(layout: Layout, nodes: Sequence[int]) -> list[Arena]:
    """One a member; member m is on node ``nodes[m]``."""
    found = []
    size_bytes, results_bytes = arena.contributions_bytes(layout), arena.results_bytes(layout)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = [arena.create(folder / f"rank{m}", layout, size_bytes) for m in range(len(nodes))]
        results = {n: arena.create(folder / f"node{n}", layout, results_bytes) for n in set(nodes)}
        for member, node in enumerate(nodes):
            others = {
                m: arena.attach(folder / f"rank{m}", layout, size_bytes)
                for m, n in enumerate(nodes)
                if n == node and m != member
            }
            everybody = range(len(nodes))
            found.append(Arena(layout, member, everybody, own[member], others, results[node]))
    return found


class Lane:
    """A collective of all ranks that adds up once all have called it, in order of their buckets."""

    def __init__(self, size: int) -> None:
        self.size, self.calls = size, 0
        self._waiting: list[list[tuple[np.ndarray, np.ndarray, Any]]] = [[] for _ in range(size)]

    def of(self, rank: int) -> Any:
        def start(send: np.ndarray, receive: np.ndarray, operator: str) -> Any:
            assert operator == "sum"
            request = SimpleNamespace(done=False)
            self.calls += 1
            receive[:] = send  # as real ones do, which work in it
            self._waiting[rank].append((send, receive, request))
            if all(self._waiting):
                calls = [waiting.pop(0) for waiting in self._waiting]
                total = np.sum([out for _, out, _ in calls], axis=0)
                for _, out, one_of_them in calls:
                    out[:] = total
                    one_of_them.done = True
            return request

        return SimpleNamespace(Iallreduce=start)


@dataclass
class World:
    """What a sum asks of the world."""

    member: int
    view: View
    identities: dict[int, Any]
    control: Comm
    gone: frozenset[int] = frozenset()

    def operator(self, name: str) -> str:
        return name


Gift = tuple[Kind, np.ndarray]
Give = Callable[[int, int, Bucket], Gift]  # of a member, in a round, for a bucket


class Rank:
    """One rank, which goes through rounds like ``GradientRounds`` does."""

    def __init__(self, world: World, own: Arena, compressor: Compressor, give: Give) -> None:
        self.world, self.arena, self.give = world, own, give
        self.layout = own.layout
        self.contributions = Contributions(self.layout, own.homes)
        self.results = Results(self.layout, shared=own.results)
        self.sums = Sums(self.layout, compressor, self.results, own)
        self.lane: Any = None
        self.round = 0
        self.gifts: list[Gift] = []  # what it claims in the open round, by bucket
        self.claimed: dict[int, list[Gift]] = {}  # by round
        self.running: dict[int, Sequence[Started]] = {}
        self.unread: list[int] = []
        self.delivered: list[list[np.ndarray]] = []

    def moves(self, rounds: int) -> list[Callable[[], None]]:
        """What this rank can do next."""
        found: list[Callable[[], None]] = []
        if self.unread:
            found.append(self._read)
        if self.round == rounds:
            return found
        if len(self.running) < len(self.layout.buckets):
            found.append(self.start)
        elif not any(self.running.values()):
            found.append(self._complete)
        ready = [b for b, s in self.running.items() if s and all(e.request.done for e in s)]
        return found + [lambda b=b: self.proceed(b) for b in ready]  # type: ignore[misc]

    def start(self) -> None:
        number = len(self.running)
        if not self.gifts:
            self._fill()
        self.sums.enter(self.world, self.round)
        self.results.vacate(number)
        claim = Claim(
            self.round,
            self.gifts[number][0],
            self.contributions.buffers[number],
            self.results.receive(number),
            16 + number,
        )
        self.running[number] = self.sums[number].start(self.world, self.lane, claim)

    def _fill(self) -> None:
        self.claimed[self.round] = self.gifts = []
        for number, bucket in enumerate(self.layout.buckets):
            kind, values = self.give(self.world.member, self.round, bucket)
            self.gifts.append((kind, values))
            self.contributions.buffers[number][:] = values if kind is Kind.REAL else NOBODYS

    def arrive(self, bucket: int) -> None:
        """What was late in a round comes before it is begun again."""
        if self.gifts and self.gifts[bucket][0] is Kind.NOTHING:
            values = self.gifts[bucket][1]
            self.gifts[bucket] = (Kind.REAL, values)
            self.contributions.buffers[bucket][:] = values

    def proceed(self, bucket: int) -> None:
        self.running[bucket] = self.sums[bucket].proceed(self.world)

    def _complete(self) -> None:
        self.sums.settle()
        self.results.complete(self.round)
        self.unread.append(self.round)
        self.round += 1
        self.gifts, self.running = [], {}

    def _read(self) -> None:
        round_ = self.unread.pop(0)
        with self.results.reading(round_) as arrays:
            self.delivered.append([array.copy() for array in arrays])
        self.results.release(round_)

    def take(self, given: Sequence[np.ndarray]) -> None:
        """The open round's result, from a rank that has it."""
        for bucket, array in enumerate(given):
            self.results.renew(bucket)[:] = array
        self._complete()

    def abandon(self) -> None:
        for bucket in self.running:
            self.results.forget(bucket)
            self.sums[bucket].abandon()
        self.running = {}


class Cluster:
    """Ranks of a job in one process. ``expected`` is what rounds have to add up to."""

    def __init__(
        self,
        nodes: Sequence[int],
        layout: Layout,
        give: Give,
        compressor: Compressor | None = None,
        seed: int = 0,
    ) -> None:
        size = len(nodes)
        self.chance = random.Random(seed)
        self.layout, self.seed = layout, seed
        self.identities = {m: SimpleNamespace(node=f"node{n}") for m, n in enumerate(nodes)}
        self.network, comms = network_of(size, seed)
        self.lane = Lane(size)
        self.ranks = []
        for own, comm in zip(arenas_of(layout, nodes), comms, strict=True):
            world = World(own.member, initial_view(size), self.identities, comm)
            self.ranks.append(Rank(world, own, compressor or Compressor(), give))
            self.ranks[-1].lane = self.lane.of(comm.rank)
        self.living = list(self.ranks)
        # By round and bucket, what dead members had in place.
        self.left: dict[tuple[int, int], dict[int, Gift]] = {}
        self.members_in: dict[int, tuple[int, ...]] = {}  # who lived when a round was complete

    def run(self, rounds: int, moves: int | None = None) -> None:
        """Until all have read that many rounds, or for so many moves."""
        while moves is None or moves:
            moves = None if moves is None else moves - 1
            can = [move for rank in self.living for move in rank.moves(rounds)]
            if can and self.chance.random() < 0.5:
                self.chance.choice(can)()
            elif not self.network.deliver_one():
                if not can:
                    break
                self.chance.choice(can)()
            for rank in self.living:
                members = tuple(r.world.member for r in self.living)
                self.members_in.setdefault(rank.round - 1, members)
        if moves is None:
            assert [len(r.delivered) for r in self.living] == [rounds] * len(self.living), "stuck"

    def lose(self, members: Sequence[int], gone: bool = True) -> None:
        """These die, or vanish; the others see the fault, and go on in a new view."""
        lost = [rank for rank in self.living if rank.world.member in members]
        self.living = [rank for rank in self.living if rank not in lost]
        for rank in self.living:
            rank.abandon()
        ahead = max(self.living, key=lambda rank: rank.round)
        self.members_in = {n: who for n, who in self.members_in.items() if n < ahead.round}
        for rank in self.living:
            if rank.round < ahead.round:
                rank.take([array.copy() for array in ahead.results.last])
        for rank in self.living:
            for bucket in range(len(self.layout.buckets)):
                if self.chance.random() < 0.5:
                    rank.arrive(bucket)
        self._inherit(lost, ahead.round)
        old = self.living[0].world
        view = old.view.successor(old.view.epoch + 1, [r.world.member for r in self.living])
        self.network, comms = network_of(view.size, self.seed + view.epoch)
        self.lane = Lane(view.size)
        for rank, comm in zip(self.living, comms, strict=True):
            rank.world.view, rank.world.control = view, comm
            rank.world.gone |= frozenset(members if gone else ())
            rank.lane = self.lane.of(comm.rank)

    def _inherit(self, lost: Sequence[Rank], round_: int) -> None:
        """What the dead had in place of ``round_`` counts, unless nobody is left on their node."""
        for rank in lost:
            for number in range(len(self.layout.buckets)):
                stamp = rank.arena.stamp(rank.world.member, number)
                if stamp.round == round_:
                    gift = (stamp.kind, rank.gifts[number][1])
                    self.left.setdefault((round_, number), {})[rank.world.member] = gift
        inhabited = {self.identities[rank.world.member].node for rank in self.living}
        for (open_, _), gifts in self.left.items():
            for member in list(gifts):
                if open_ == round_ and self.identities[member].node not in inhabited:
                    del gifts[member]

    def results(self, round_: int) -> list[np.ndarray]:
        """A round's by bucket, which have to have the same bits everywhere."""
        for number in range(len(self.layout.buckets)):
            bits = {rank.delivered[round_][number].tobytes() for rank in self.living}
            assert len(bits) == 1, f"ranks hold different bits of round {round_}"
        return self.living[0].delivered[round_]

    def expected(self, round_: int) -> list[np.ndarray]:
        """The dumb way."""
        sums = []
        for number, bucket in enumerate(self.layout.buckets):
            gifts = [self.ranks[m].claimed[round_][number] for m in self.members_in[round_]]
            total = np.zeros(bucket.length)
            for kind, values in [*gifts, *self.left.get((round_, number), {}).values()]:
                if kind is Kind.REAL:
                    total += values
                total[bucket.alarm] += kind is Kind.ALARM
            sums.append(total)
        return sums


def gifts_of(seed: int, kinds: Sequence[Kind], whole: bool) -> Give:
    """Random values, all of them small whole numbers or not, with counts."""

    def give(member: int, round_: int, bucket: Bucket) -> Gift:
        values = np.random.default_rng([seed, member, round_, bucket.slots[0].parameter])
        drawn = values.standard_normal(bucket.length)
        if whole:
            drawn = np.rint(9 * drawn)
        drawn[bucket.elements :] = values.integers(0, 2, bucket.length - bucket.elements)
        drawn[bucket.participation] = 1
        return Kind(values.choice(kinds)), drawn.astype(bucket.dtype)

    return give


def constant(member: int, round_: int, bucket: Bucket) -> Gift:
    """The same in each round, and nothing that a half has."""
    values = (np.arange(bucket.length) % 7 + member + 1) * 0.1002
    values[bucket.elements :] = 1
    return Kind.REAL, values.astype(bucket.dtype)

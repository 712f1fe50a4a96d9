"""The sums of all buckets of a layout: in a node's shared memory as long as that can be trusted,
otherwise through MPI.
"""

from __future__ import annotations

from mpift.reduction.arena import Arena
from mpift.reduction.buckets import Layout
from mpift.reduction.codecs import Compressor
from mpift.reduction.node import Node, NodeSum
from mpift.reduction.results import Results
from mpift.reduction.sums import BucketSum, sum_through_mpi
from mpift.transport.world import World


class Sums:
    """One ``BucketSum`` a bucket, and ``results``, where they go. Used on the service thread."""

    def __init__(
        self, layout: Layout, compressor: Compressor, results: Results, arena: Arena | None = None
    ) -> None:
        self._layout = layout
        self._compressor = compressor
        self._results = results
        self._node = None if arena is None else Node(arena)
        self._sums: list[BucketSum] = []
        if self._node is None:
            self._go_through_mpi()
        else:
            numbers = range(len(layout.buckets))
            self._sums += [NodeSum(self._node, number, compressor) for number in numbers]

    @property
    def shares(self) -> bool:
        """Whether they are made in shared memory."""
        return self._node is not None

    def _go_through_mpi(self) -> None:
        self._sums = [sum_through_mpi(each, self._compressor) for each in self._layout.buckets]

    def __getitem__(self, bucket: int) -> BucketSum:
        return self._sums[bucket]

    def enter(self, world: World, round_: int) -> None:
        """Before anything is done in a view; ``round_`` is the open one. If somebody may still
        write into shared memory, nothing that counts is left there."""
        if self._node is None:
            return
        self._node.enter(world, round_)
        if not self._node.intact:
            self._node = None
            self._results.leave_shared()
            self._go_through_mpi()

    def settle(self) -> None:
        """A round is complete, and its result holds what this rank gave."""
        for each in self._sums:
            each.settle()
        if self._node is not None:
            self._node.arena.clear()

"""How a bucket is summed over all ranks: what the ways of doing it have in common, and those that
go through MPI alone. ``node`` is the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpift.core.sharing import Kind
from mpift.reduction.buckets import Bucket, empty_bucket
from mpift.reduction.codecs import Compressor
from mpift.reduction.compressed import CompressedSum, is_compressed, sum_of_slice
from mpift.transport.lane import Started
from mpift.transport.world import World


@dataclass(frozen=True, slots=True)
class Claim:
    """What this rank puts into a bucket of ``round``: ``contribution``, dtype[length], if ``kind``
    is REAL. ``receive``, dtype[length], is where the sum of all ranks is wanted. ``tag`` is the
    bucket's own among messages."""

    round: int
    kind: Kind
    contribution: np.ndarray
    receive: np.ndarray
    tag: int


class BucketSum(Protocol):
    """The sums of one bucket, round after round. Called on the service thread only.

    A round is ``start``, then ``proceed`` each time that all it was given has completed, until that
    is nothing: then the sum is in place. ``settle`` follows once all buckets of the round are.
    After a fault ``abandon``; then ``start`` again for a redo, or ``settle`` where the round's
    result came from another rank.
    """

    @property
    def lends(self) -> bool:
        """Whether MPI itself reads the contribution of the sum under way, and may go on with it
        after a fault."""

    def start(self, world: World, comm: Any, claim: Claim) -> Sequence[Started]:
        """Begin a sum; ``comm`` is the lane's."""

    def proceed(self, world: World) -> Sequence[Started]:
        """All that was started has completed: what follows."""

    def settle(self) -> None:
        """The round is over, and its result holds what this rank gave."""

    def abandon(self) -> None:
        """What is under way will never complete: its buffers are not used again."""


class FlatSum:
    """MPI's own sum, over all ranks at once."""

    lends = True

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._zeros: np.ndarray | None = None

    def start(self, world: World, comm: Any, claim: Claim) -> Sequence[Started]:
        send = claim.contribution if claim.kind is Kind.REAL else self._nothing(claim.kind)
        request = comm.Iallreduce(send, claim.receive, world.operator("sum"))
        return [Started(request, (send, claim.receive))]

    def _nothing(self, kind: Kind) -> np.ndarray:
        """A contribution of zeros; a rank that has left or is late can still give the alarm."""
        if kind is Kind.ALARM:
            fresh = empty_bucket(self._bucket)
            fresh[self._bucket.alarm] = 1
            return fresh
        if self._zeros is None:
            self._zeros = empty_bucket(self._bucket)
        return self._zeros

    def proceed(self, world: World) -> Sequence[Started]:
        return []

    def settle(self) -> None:
        pass

    def abandon(self) -> None:
        self._zeros = None  # whoever still reads them keeps them


class MessageSum:
    """A sum whose values travel compressed, over all ranks at once."""

    lends = False

    def __init__(self, sum_: CompressedSum) -> None:
        self._sum = sum_
        self._receive = np.empty(0)

    def start(self, world: World, comm: Any, claim: Claim) -> Sequence[Started]:
        self._receive = claim.receive
        real = claim.kind is Kind.REAL
        started = self._sum.start(world.control, claim.tag, claim.contribution if real else None)
        return self._or_result(started)

    def proceed(self, world: World) -> Sequence[Started]:
        return self._or_result(self._sum.proceed(world.control))

    def _or_result(self, started: Sequence[Started]) -> Sequence[Started]:
        if not started:
            self._sum.result(self._receive)
        return started

    def settle(self) -> None:
        self._sum.settle()

    def abandon(self) -> None:
        self._sum.abandon()


def sum_through_mpi(bucket: Bucket, compressor: Compressor) -> BucketSum:
    """What sums ``bucket`` over all ranks without shared memory: by messages if anything in it is
    compressed, since MPI has no sum of what a codec makes."""
    if not is_compressed(bucket, compressor):
        return FlatSum(bucket)
    counts = bucket.length - bucket.elements
    return MessageSum(sum_of_slice(bucket, 0, bucket.elements, counts, compressor))

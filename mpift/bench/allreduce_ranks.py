"""One rank of ``mpift bench allreduce``: the contenders, and what they are checked against.

mpift's rounds are driven as an optimizer drives them, on one lane whose layout changes with the
size of the arrays. Where raw MPI has its send buffer filled, mpift has its contributions in place;
``with_copies`` also brings them there from arrays of the rank's own, and the sums back, as training
does with ``p.grad``. Blocks and turns are those of ``contenders``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import distributed

import mpift.torch as hvd
from mpift import runtime
from mpift.bench.allreduce import Plan
from mpift.bench.contenders import Block, raw_allreduce, take_turns
from mpift.config import Config
from mpift.core import history
from mpift.core.closing import parse_quorum
from mpift.errors import MpiftError
from mpift.reduction.buckets import Layout, ParameterSpec, lay_out
from mpift.reduction.gradients import GradientRounds, RoundRules

# Like the layers of the model that ``mpift bench step`` trains.
_PARAMETER_ELEMENTS = 1 << 20
_ITEM_BYTES = 4  # of a float32
# Small enough that sums over some hundred ranks are exact in float32, prime so that no array or
# slice of it looks like another.
_PATTERN = 251


def contend(given: Mapping[str, Any], rendezvous: str) -> dict[str, Any]:
    """Run on every rank: what ``given``, a ``Plan`` as a mapping, asks for.

    Returns for each size this rank's seconds of one sum by contender, a number a round, how mpift
    summed, and what was wrong with sums. ``rendezvous`` is a file for gloo that does not exist yet.
    Raises ``MpiftError`` if this rank was left out of a round.
    """
    plan = Plan(**given)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    hvd.init()
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=hvd.rank(), world_size=hvd.size()
    )
    config = runtime.current().config
    lane: Lane | None = None
    rows = []
    for size in plan.sizes:
        layout = layout_of(size // _ITEM_BYTES, config)
        if lane is None:
            lane = Lane(layout, config)
        else:
            lane.relayout(layout)
        rows.append(_measure(lane, size // _ITEM_BYTES, plan.rounds, plan.repetitions(size)))
    distributed.destroy_process_group()
    hvd.shutdown()
    return {"rows": rows}


def layout_of(elements: int, config: Config) -> Layout:
    """Buckets as an optimizer has them for parameters of 4 MiB, the last one smaller if need be."""
    specs = [
        ParameterSpec(f"p{start}", min(_PARAMETER_ELEMENTS, elements - start), "float32")
        for start in range(0, elements, _PARAMETER_ELEMENTS)
    ]
    return lay_out(specs, config.first_bucket_bytes, config.bucket_bytes)


def _measure(lane: Lane, elements: int, rounds: int, repetitions: int) -> dict[str, Any]:
    """All contenders on arrays of one size: first their times, then their sums."""
    pattern = np.resize(np.arange(_PATTERN, dtype=np.float32), elements)
    send = pattern * (hvd.rank() + 1)
    receive = np.ones_like(send)
    in_place = np.ones_like(send)
    lane.fill(send)
    blocks: dict[str, Block] = {
        "mpift": _repeated(lane.sum),
        "mpi": raw_allreduce(send, receive),
        "gloo": _gloo(send, in_place),
        "memcpy": _repeated(lambda: np.copyto(receive, send)),
        "with_copies": _repeated(lambda: lane.sum(send, receive)),
    }
    seconds = take_turns(blocks, rounds, repetitions)

    ranks = hvd.size()
    send += 1  # a sum that was left from before is none
    expected = pattern * (ranks * (ranks + 1) // 2) + ranks
    lane.fill(send)
    sums: dict[str, tuple[Callable[[], object], np.ndarray]] = {
        "mpift": (lambda: lane.sum(out=receive), receive),
        "mpi": (lambda: blocks["mpi"](1), receive),
        "gloo": (lambda: blocks["gloo"](1), in_place),
        "with_copies": (lambda: lane.sum(send, receive), receive),
    }
    wrong: list[str] = []
    for name, (sum_once, found) in sums.items():
        found.fill(np.nan)
        sum_once()
        wrong += faults(name, found, expected)
    return {"seconds": seconds, "reduction": lane.reduction, "wrong": wrong}


def faults(name: str, found: np.ndarray, expected: np.ndarray) -> list[str]:
    """What is wrong with a contender's sum, in a sentence; none if it is right everywhere."""
    wrong = np.flatnonzero(found != expected)
    if not wrong.size:
        return []
    first = int(wrong[0])
    words = f"{name} has summed {wrong.size} of {expected.size} elements wrongly on rank"
    return [f"{words} {hvd.rank()}: element {first} is {found[first]}, not {expected[first]}"]


def _repeated(once: Callable[[], object]) -> Block:
    def block(steps: int) -> list[float]:
        times = [time.perf_counter()]
        for _ in range(steps):
            once()
            times.append(time.perf_counter())
        return np.diff(times).tolist()

    return block


def _gloo(send: np.ndarray, in_place: np.ndarray) -> Block:
    """Sums in place, each of the one before. The ranks meet again in a block's first steps, which
    are not timed."""
    tensor = torch.from_numpy(in_place)
    repeated = _repeated(lambda: distributed.all_reduce(tensor))

    def block(steps: int) -> list[float]:
        np.copyto(in_place, send)
        return repeated(steps)

    return block


class Lane:
    """A lane of gradient rounds and who applies them (``reduction.lanes.Follower``), without a
    model. Flat arrays stand for all its parameters, one after the other."""

    touches = False
    history = history.NO_HISTORY

    def __init__(self, layout: Layout, config: Config) -> None:
        self._runtime = runtime.current()
        # The usual rules; a patience that learns would leave ranks out on a busy machine.
        rules = RoundRules(
            parse_quorum(config.quorum), config.sync_timeout, config.late == "carry", config.max_lag
        )
        self.workload = GradientRounds(layout, rules)
        self._lane = self._runtime.gradients.open(self.workload, self)
        self._applied = 0

    def relayout(self, layout: Layout) -> None:
        """Sum arrays of another size from now on; all ranks call this."""
        self._runtime.gradients.relayout(self._lane, self.workload, layout)

    @property
    def reduction(self) -> str:
        """How it sums: "node" or "mpi"."""
        return "node" if self.workload.shares else "mpi"

    def fill(self, array: np.ndarray) -> None:
        """Let ``array`` be what this rank contributes from now on."""
        for number in range(self.workload.buckets):
            self._copy_in(number, array)

    def sum(self, array: np.ndarray | None = None, out: np.ndarray | None = None) -> None:
        """One round of ``array``, or of what was contributed last; its result goes to ``out`` if
        that is given."""
        workload = self.workload
        last = workload.buckets - 1
        for number in range(workload.buckets):
            if array is not None:
                self._copy_in(number, array)
            workload.contribute(number, whole=number == last)
        with self._runtime.waiting():
            own = workload.settle(self._apply, self._runtime.gradients.make_room)
        if own != self._applied:
            raise MpiftError(
                f"rank {hvd.rank()} was left out of round {self._applied}: this machine is too busy"
                " to measure on"
            )
        if out is not None:
            self._copy_out(own, out)
        self._apply(own + 1)

    def _places(self, number: int) -> Iterator[tuple[slice, slice]]:
        """Of each parameter in a bucket: its place there, and in a flat array."""
        for slot in self.workload.contributions.layout.buckets[number].slots:
            start = slot.parameter * _PARAMETER_ELEMENTS
            yield slice(slot.start, slot.stop), slice(start, start + slot.stop - slot.start)

    def _copy_in(self, number: int, array: np.ndarray) -> None:
        bucket = self.workload.contributions.layout.buckets[number]
        buffer = self.workload.contributions.buffers[number]
        for there, here in self._places(number):
            np.copyto(buffer[there], array[here])
        buffer[bucket.elements :] = 0
        buffer[bucket.elements : bucket.late] = 1  # all parameters are used
        buffer[bucket.participation] = 1

    def _copy_out(self, round_: int, out: np.ndarray) -> None:
        with self.workload.results.reading(round_) as results:
            for number, result in enumerate(results):
                for there, here in self._places(number):
                    np.copyto(out[here], result[there])

    def _apply(self, rounds: int) -> None:
        """There is no model to apply rounds to."""
        for round_ in range(self._applied, rounds):
            delivered = self.workload.delivered(round_)
            assert delivered is not None
            if delivered.least < hvd.size():
                raise MpiftError(
                    f"{delivered.least} of {hvd.size()} ranks took part in round {round_}: this"
                    " machine is too busy to measure on"
                )
            self._runtime.see_round(delivered.epoch)
            self.workload.applied(round_)
            self._applied = round_ + 1

    # -- for ranks that are late, or leave ---------------------------------------------------------

    def catch_up(self) -> None:
        self._apply(self.workload.completed)

    def make_room(self) -> None:
        self._apply(self.workload.foreign)

    def flush(self, rounds: int) -> None:
        raise AssertionError(f"nobody asks to complete {rounds} rounds here")

    def step_skipped(self) -> None:
        pass

"""A lane and its buffers: what MPI may still touch is never used again."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpift.core import lockstep
from mpift.core.membership import View
from mpift.reduction.buckets import ParameterSpec, lay_out
from mpift.reduction.gradients import GradientRounds, RoundRules
from mpift.transport.lane import Lane
from mpift.transport.solo import SoloWorld
from mpift.transport.world import LaneReport, Report


class SlowComm:
    """Collectives that begin and never complete; it remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[np.ndarray, np.ndarray]] = []
        self.taken: list[np.ndarray] = []

    def Iallreduce(self, send: np.ndarray, receive: np.ndarray, _operator: Any) -> object:
        self.given.append((send, receive))
        return object()

    def Ibcast(self, buffer: np.ndarray, root: int) -> object:
        self.taken.append(buffer)
        return object()


def lane_of(buckets: int = 2) -> tuple[SoloWorld, SlowComm, Lane, GradientRounds]:
    specs = [ParameterSpec(f"p{i}", 10, "float32") for i in range(buckets)]
    workload = GradientRounds(lay_out(specs, 40, 40), RoundRules("majority", 10.0, True, 2))
    workload.bind(0, lambda event: lane.feed(world, event))
    world = SoloWorld()
    comm = SlowComm()
    world.lane_comms = [comm]
    lane = Lane(0, workload, 0, lambda _round, _bucket: None, lambda _lane, _word: None)
    return world, comm, lane, workload


def in_epoch(world: SoloWorld, lane: Lane, epoch: int) -> None:
    world.view = world.view.successor(epoch, world.view.members)
    lane.reconcile(world, (Report(0, epoch - 1, (lane.report(),)),))


def complete_all(world: SoloWorld, comm: SlowComm, lane: Lane) -> None:
    while lane.requests:
        for send, receive in comm.given:
            np.copyto(receive, send)
        lane.complete(world, [0])


def test_a_redo_receives_into_fresh_buffers() -> None:
    world, comm, lane, workload = lane_of()
    for bucket in range(2):
        workload.contributions.buffers[bucket][:] = 1
        lane.feed(world, lockstep.Contributed(bucket))
    before = list(comm.given)
    comm.given.clear()
    lane.fault(world)
    in_epoch(world, lane, 1)
    for (_, old), (_, new) in zip(before, comm.given, strict=True):
        assert not np.shares_memory(old, new)
    # The stopped sender of the old epoch goes on, and writes where it was told to.
    for _, old in before:
        old[:] = 666
    complete_all(world, comm, lane)
    with workload.results.reading(0) as results:
        assert all((result[:10] == 1).all() for result in results)


def test_a_contribution_that_may_still_be_read_is_not_written_by_the_next_round() -> None:
    world, comm, lane, workload = lane_of(1)
    first = workload.contributions.buffers[0]
    first[:] = 1
    lane.feed(world, lockstep.Contributed(0))
    lane.fault(world)
    comm.given.clear()
    in_epoch(world, lane, 1)
    complete_all(world, comm, lane)
    workload.contributions.buffers[0][:] = 2
    assert (first[:10] == 1).all()


def test_what_never_completed_stays_referenced_for_life() -> None:
    world, comm, lane, workload = lane_of(1)
    workload.contributions.buffers[0][:] = 1
    lane.feed(world, lockstep.Contributed(0))
    lane.fault(world)
    (kept,) = lane.quarantine
    assert [id(buffer) for buffer in kept.buffers] == [id(buffer) for buffer in comm.given[0]]


def test_a_result_is_handed_over_even_after_the_layout_changed() -> None:
    world, comm, lane, workload = lane_of(2)
    for bucket in range(2):
        workload.contributions.buffers[bucket][:] = 5
        lane.feed(world, lockstep.Contributed(bucket))
    complete_all(world, comm, lane)
    workload.relayout(lay_out([ParameterSpec("q", 3, "float32")], 40, 40), None)
    lane.set_buckets(1)
    assert lane.report() == LaneReport(1, 0, 0, 2 * 14 * 4, 0, 0)
    assert all((result[:10] == 5).all() for result in workload.result_to_give())


def test_a_hand_over_that_breaks_off_leaves_no_buffer_behind() -> None:
    world, comm, lane, workload = lane_of(1)
    workload.contributions.buffers[0][:] = 1
    lane.feed(world, lockstep.Contributed(0))
    lane.fault(world)
    world.view = View(1, (0, 1))
    giver = Report(1, 0, (LaneReport(1, 0, 0, 14 * 4, 0, 0),))
    lane.reconcile(world, (Report(0, 0, (lane.report(),)), giver))
    (taken,) = comm.taken
    lane.fault(world)  # the giver dies in the middle of it
    comm.given.clear()
    world.view = View(1, (0,))
    in_epoch(world, lane, 2)
    ((_, receive),) = comm.given
    assert not np.shares_memory(taken, receive)


def test_what_was_summed_before_a_fault_is_no_part_of_the_round_that_is_summed_again() -> None:
    world, comm, lane, workload = lane_of(2)
    for bucket in range(2):
        workload.contributions.buffers[bucket][:] = 1
        lane.feed(world, lockstep.Contributed(bucket))
    lane.complete(world, [0])
    (first,) = workload._summed.values()
    with workload.holding(first) as is_open:
        assert is_open
    lane.fault(world)
    with workload.holding(first) as is_open:
        assert not is_open
    comm.given.clear()
    in_epoch(world, lane, 1)
    complete_all(world, comm, lane)
    delivered = workload.delivered(0)
    assert delivered is not None
    assert len(delivered.sums) == 2
    assert first not in delivered.sums

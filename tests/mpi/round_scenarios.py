"""What ranks do in the tests of rounds: they train on integers, so that who is in a sum is known.

No torch here, so that they start fast.
"""

from __future__ import annotations

import threading
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import mpift
from mpift import runtime
from mpift.reduction.buckets import Layout, ParameterSpec, lay_out
from mpift.reduction.gradients import GradientRounds, RoundRules
from tests.mpi.protocol_scenarios import die


class Trainer:
    """Trains on integers: the gradient of a member in a step is known, so every sum can be
    accounted for. Drives the same lanes and buckets as the optimizer does."""

    touches = False

    def __init__(self, elements: int = 50_000, parameters: int = 6) -> None:
        runtime.start()
        self.runtime = runtime.current()
        specs = [ParameterSpec(f"p{i}", elements, "float32") for i in range(parameters)]
        self.layout: Layout = lay_out(specs, elements * 4, elements * 8)
        self.workload = GradientRounds(self.layout, RoundRules("all", 10.0, True, 4))
        self.lane = self.runtime.gradients.open(self.workload, self)
        self.round = 0

    def fill(self, array: np.ndarray) -> None:
        """This rank's gradient of the round."""
        array[:] = gradient(self.runtime.member, self.round)

    def reduce(self) -> int | None:
        """One round; returns its number, and None if none came of it."""
        self.runtime.strike(self.round, "step")
        contributes = not self.workload.busy
        for number, bucket in enumerate(self.layout.buckets if contributes else ()):
            array = self.workload.contributions.buffers[number]
            self.fill(array)
            array[bucket.participation] = 1
            self.workload.contribute(number, whole=number + 1 == len(self.layout.buckets))
        return self.workload.settle(self.replay)

    def step(self) -> list[float]:
        """One round; returns each bucket's value and participation."""
        own = self.reduce()
        if own is None:
            return []
        assert own == self.round
        found: list[float] = []
        with self.workload.results.reading(own) as results:
            for bucket, result in zip(self.layout.buckets, results, strict=True):
                values = result[: bucket.late]
                assert (values == values[0]).all(), "a result is torn"
                found += [float(values[0]), float(result[bucket.participation])]
        self.replay(own + 1)
        return found

    def replay(self, rounds: int) -> None:
        """There is nothing to apply rounds to."""
        for round_ in range(self.round, rounds):
            delivered = self.workload.delivered(round_)
            assert delivered is not None
            self.runtime.see(delivered.epoch)
            self.workload.applied(round_)
            self.round = round_ + 1

    def catch_up(self) -> None:
        self.replay(self.workload.completed)

    def make_room(self) -> None:
        self.catch_up()

    def flush(self, rounds: int) -> None:
        raise AssertionError("nobody asks for that here")

    def step_skipped(self) -> None:
        pass


def gradient(member: int, step: int) -> int:
    """A bit a member, so that a sum names its participants; below 2**24, exact in float32."""
    return (1 << member) * 16 + (step % 3 if member == 0 else 0)


def train(steps: int, elements: int, started: str = "") -> dict[str, Any]:
    """Rounds of integer gradients under a fault schedule; returns who took part in each. The file
    ``started`` is made once all ranks are at work."""
    trainer = Trainer(elements)
    participants: list[list[int]] = []
    for step in range(steps):
        if started and step == 3:
            Path(started).touch()
        found = trainer.step()
        values, counts = found[0::2], found[1::2]
        took_part = []
        for value, count in zip(values, counts, strict=True):
            members = [m for m in range(8) if int(value) & (16 << m)]
            expected = sum(gradient(m, step) for m in members)
            assert value == expected, (value, expected)
            assert count == len(members)
            took_part.append(members)
        # Buckets differ by what the dead had finished of their gradient; they begin with the first.
        fewest = took_part[-1]
        assert all(set(more) >= set(less) for more, less in pairwise(took_part)), took_part
        dead = set(took_part[0]) - set(fewest)
        assert not dead & set(trainer.runtime.view.members), took_part
        participants.append(fewest)
    member = trainer.runtime.member
    everybody = mpift.Communicator().allgather([zlib.crc32(str(participants).encode())]).tolist()
    view = list(trainer.runtime.view.members)
    lane = trainer.runtime._service.lanes[trainer.lane]
    quarantined = sum(b.nbytes for item in lane.quarantine for b in item.buffers)
    mpift.shutdown()
    return {
        "participants": participants,
        "member": member,
        "view": view,
        "alike": len(set(everybody)) == 1,
        "quarantined": quarantined,
    }


def uneven(loops: dict[str, int]) -> dict[str, Any]:
    """Members leave their loops after different numbers of steps."""
    trainer = Trainer(100)
    member = trainer.runtime.member
    found = [trainer.step() for _ in range(loops[str(member)])]
    counts = [values[1] for values in found if values]
    mpift.shutdown()
    return {"counts": counts}


def death_in_shutdown(victim: int, delay: float) -> dict[str, Any]:
    """A member dies while all are leaving."""
    trainer = Trainer(1000)
    for _ in range(3):
        trainer.step()
    if trainer.runtime.member == victim:
        threading.Timer(delay, die).start()
    mpift.shutdown()
    if trainer.runtime.member == victim:
        die()
    return {}

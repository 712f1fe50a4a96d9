"""Sums over nodes and within them, of gradients that everybody can compute again."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

import mpift
from mpift import runtime
from mpift.config import Config
from tests.mpi.round_scenarios import Trainer

ROUNDS = 8


class RandomTrainer(Trainer):
    """Its gradients are random, so that their sum depends on the order of summation."""

    def fill(self, array: np.ndarray) -> None:
        array[:] = gradient_of(self.runtime.member, self.round, array.size)

    def sums(self) -> dict[str, Any]:
        """Rounds under the fault schedule: who took part in each, how far their results are from
        the sums in float64, and their digest."""
        participants, digest, furthest = [], 0, 0.0
        for number in range(ROUNDS):
            reduced = self.reduce()
            assert reduced == number, (reduced, number, self.workload.completed)
            with self.workload.results.reading(number) as results:
                for bucket, result in zip(self.layout.buckets, results, strict=True):
                    digest = zlib.crc32(result.tobytes(), digest)
                    count = round(float(result[bucket.participation]))
                    values = result[: bucket.elements]
                    members, away = closest(values, count, number, bucket.length)
                    furthest = max(furthest, away)
            participants.append(members)
            self.replay(number + 1)
        return {"participants": participants, "digest": digest, "furthest": furthest}


def gradient_of(member: int, round_: int, length: int) -> np.ndarray:
    return np.random.default_rng([member, round_, length]).standard_normal(length, np.float32)


def closest(values: np.ndarray, count: int, round_: int, length: int) -> tuple[list[int], float]:
    """Who of the view, perhaps without one of those at launch, adds up to ``values``, and how far
    away from it the exact sum is, relative to the largest of it."""
    everybody = range(runtime.current()._service.world.launch_size)
    gradients = {m: gradient_of(m, round_, length)[: values.size].astype(float) for m in everybody}
    total = sum(gradients.values())
    candidates = {tuple(everybody): total}
    if count < len(everybody):
        candidates = {
            tuple(m for m in everybody if m != left): total - gradients[left] for left in everybody
        }
    away = {
        members: float(np.abs(values - exact).max() / np.abs(exact).max())
        for members, exact in candidates.items()
    }
    best = min(away, key=lambda members: away[members])
    assert len(best) == count
    return list(best), away[best]


def sums_in(ways: list[str]) -> dict[str, Any]:
    """The same rounds, by the values of ``reduction`` one after the other."""
    found: dict[str, Any] = {}
    for way in ways:
        runtime.start(config=Config.load(reduction=way))
        trainer = RandomTrainer(elements=10_001)
        found[way] = trainer.sums()
        found[way]["shares"] = trainer.workload.shares
        found["view"] = list(runtime.current().view.members)
        mpift.shutdown()
    return found

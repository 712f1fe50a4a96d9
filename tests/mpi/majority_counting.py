"""What ranks do in the tests of which gradients count in majority rounds, and how often.

Every gradient has an element of its own that it adds 1 to, so the parameters say it.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from torch import nn

import mpift.torch as hvd
from tests.mpi.majority_scenarios import STRAGGLER, fall_behind


class Counted:
    """A parameter with an element a rank and batch, to which that rank's gradient adds 1."""

    def __init__(self, batches: int, **options: Any) -> None:
        self.counts = nn.Parameter(torch.zeros(hvd.size(), batches))
        plain = torch.optim.SGD([self.counts], lr=1.0)
        self.optimizer = hvd.DistributedOptimizer(plain, op=hvd.Sum, patience=0.0, **options)
        self.computed: list[int] = []

    def backward(self, batch: int) -> None:
        (-self.counts[hvd.rank(), batch]).backward()
        self.computed.append(batch)

    def step(self) -> None:
        self.optimizer.step()
        if self.counts.grad is not None:  # it is the script's own now
            self.counts.grad.fill_(float("nan"))

    def expected(self) -> torch.Tensor:
        """1 for each batch that its rank has computed."""
        counts = torch.zeros_like(self.counts)
        for rank, batches in enumerate(hvd.allgather_object(self.computed)):
            counts[rank, batches] = 1.0
        return counts


def carried() -> list[dict[str, Any]]:
    """Loops of ``hvd.rounds`` in which ranks are late at random, and by all they may at the end."""
    found = []
    for max_lag, passes, operation in ((2, 1, False), (4, 2, False), (3, 1, True)):
        hvd.init()
        rng = random.Random(10 * max_lag + hvd.rank())
        epochs, batches = 2, 12 * passes
        run = Counted(epochs * batches, max_lag=max_lag, backward_passes_per_step=passes)
        for epoch in range(epochs):
            run.optimizer.zero_grad()
            first, last = epoch * batches, (epoch + 1) * batches
            for batch in hvd.rounds(range(first, last), run.optimizer):
                time.sleep(rng.choice([0.0, 0.0, 0.0, 0.004, 0.012]))
                run.backward(batch)
                if batch % passes < passes - 1:
                    continue
                if hvd.rank() == STRAGGLER and batch == last - 1 - passes:
                    # With an operation a step, the others come no further than that.
                    fall_behind(run.optimizer, 1 if operation else 2)
                    time.sleep(0.1)  # they wait at the end of the loop meanwhile
                run.step()
                run.optimizer.zero_grad()
                if operation:
                    hvd.allreduce(torch.zeros(1))
            conserved = torch.equal(run.counts, run.expected())
            gradients = sum(map(len, hvd.allgather_object(run.computed))) // passes
            took_part = sum(report.participants for report in run.optimizer.rounds)
            # A gradient that waited and went together with the next is one participation.
            matches = took_part <= gradients if operation else took_part == gradients
            found.append({"conserved": conserved, "participations": matches})
        hvd.shutdown()
    return found


def dropped() -> dict[str, Any]:
    """Late gradients don't count, and others count once."""
    hvd.init()
    batches = 60
    run = Counted(batches, late="drop", max_lag=2)
    for batch in hvd.rounds(range(batches)):
        run.optimizer.zero_grad()
        if hvd.rank() == STRAGGLER and batch < 45 and batch % 3 == 0:
            fall_behind(run.optimizer, 1 + batch % 2)
        run.backward(batch)
        run.step()
    counts = run.counts.detach()
    took_part = sum(report.participants for report in run.optimizer.rounds)
    alike = len(set(hvd.allgather_object(hvd.digest(counts)))) == 1
    unlucky = bool((counts[STRAGGLER] < run.expected()[STRAGGLER]).any())
    hvd.shutdown()
    return {
        "alike": alike,
        "once": bool(((counts == 0) | (counts == 1)).all()),
        "participations": took_part == int(counts.sum()),
        "some_dropped": unlucky,
    }

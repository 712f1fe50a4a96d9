"""What ranks do in the tests of checkpoints in which something dies, stops or is late."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import mpift.torch as hvd
from mpift.checkpoint import CheckpointManager
from tests.mpi.checkpoint_scenarios import Training

# Where a job goes on though something is stuck: what the tests wait for at most.
STUCK_SECONDS = 60.0


def train_through_kills(folder: str, steps: int, every: int) -> dict[str, Any]:
    """Train and save under a fault schedule; what the shared state was after each step."""
    training = Training(bucket_bytes=1024, first_bucket_bytes=1024)
    digests: dict[int, str] = {}
    training.optimizer.after_round(lambda step: digests.update({step: training.shared()}))
    with CheckpointManager(folder, every=every, keep=100, when_busy="wait") as manager:
        manager.follow(training.optimizer, training.state)
        for _ in range(steps):
            training.step()
        through = manager.wait(STUCK_SECONDS)
        reported = manager.committed_step
        if not through:  # closing would wait for ever
            os.kill(os.getpid(), signal.SIGKILL)
    alike = len(set(hvd.allgather_object(training.everything_shared()))) == 1
    size = hvd.size()
    hvd.shutdown()
    return {"digests": digests, "reported": reported, "alike": alike, "size": size}


def writers_fail(folder: str) -> dict[str, Any]:
    """Three ranks, whose writer processes are killed and stopped in the middle of saves."""
    training = Training(sync_timeout=1.0)
    committed: list[int | None] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = CheckpointManager(folder, keep=100, full_every=1)

        def save(step: int) -> None:
            training.step()
            manager.save(step, training.state)
            if not manager.wait(STUCK_SECONDS):
                raise TimeoutError(f"step {step} came to no end")
            committed.append(manager.committed_step)
            hvd.barrier()

        def save_while(member: int, step: int, *signals: int) -> None:
            """The writer stands still before the save begins, so that this comes in between."""
            if training.member == member:
                pid = manager._scribe.pid
                os.kill(pid, signal.SIGSTOP)
                training.step()
                manager.save(step, training.state)
                for number in signals:
                    os.kill(pid, number)
                if not manager.wait(STUCK_SECONDS):
                    raise TimeoutError(f"step {step} came to no end")
                committed.append(manager.committed_step)
                hvd.barrier()
            else:
                save(step)

        save(1)
        save_while(2, 2, signal.SIGKILL)
        save_while(0, 3, signal.SIGKILL)  # the coordinator
        save_while(1, 4)  # it stays stopped
        save(5)
        if training.member == 1:
            os.kill(manager._scribe.pid, signal.SIGCONT)
        save(6)
        manager.close()
    steps = manager.steps()
    hvd.shutdown()
    said = [str(warning.message) for warning in caught]
    return {"committed": committed, "steps": steps, "said": said}


def one_is_late(folder: str, steps: int, every: int) -> dict[str, Any]:
    """The others don't wait for one rank's gradients, but all save the same steps."""
    training = Training(patience="adaptive", max_lag=6)
    saved: list[int] = []
    with CheckpointManager(folder, every=every, keep=100, when_busy="wait") as manager:
        take = manager._slots.take

        def spy(*arguments: Any) -> None:
            saved.append(training.optimizer.rounds_applied)
            take(*arguments)

        manager._slots.take = spy  # type: ignore[method-assign, assignment]
        manager.follow(training.optimizer, training.state)
        for _ in hvd.rounds(range(steps), training.optimizer):
            training.step()
        manager.wait(STUCK_SECONDS)
        committed = manager.steps()
    missed = sum(report.replayed for report in training.optimizer.rounds)
    applied = training.optimizer.rounds_applied
    alike = len(set(hvd.allgather_object(training.everything_shared()))) == 1
    hvd.shutdown()
    return {
        "saved": saved,
        "committed": committed,
        "missed": missed,
        "applied": applied,
        "alike": alike,
    }

"""The communicator by itself, without torch: estimate pi on all ranks, whoever dies on the way.

mpift run -np 4 --chaos kill:1@20 python examples/communicator.py
mpirun --with-ft ulfm --oversubscribe -np 4 python examples/communicator.py --victim 1
"""

from __future__ import annotations

import argparse
import os
import signal

import numpy as np

import mpift


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--darts", type=int, default=200_000, help="darts a rank and round")
    parser.add_argument("--victim", type=int, help="this member kills itself in round 20")
    arguments = parser.parse_args()

    with mpift.Communicator() as comm:
        member = comm.members[comm.rank]
        random = np.random.default_rng(member)
        hits = darts = 0
        for number in range(arguments.rounds):
            if number == 20 and member == arguments.victim:
                os.kill(os.getpid(), signal.SIGKILL)
            points = random.random((arguments.darts, 2))
            inside = np.count_nonzero((points**2).sum(axis=1) < 1)
            size = comm.size
            # A rank that dies in here is left out of the sum; nobody else notices.
            total = comm.allreduce(np.array([inside, arguments.darts]))
            hits, darts = hits + int(total[0]), darts + int(total[1])
            if comm.size != size and comm.rank == 0:
                print(f"round {number}: {size} ranks became {comm.size} (epoch {comm.epoch})")
        if comm.rank == 0:
            print(f"pi is about {4 * hits / darts:.5f}, from {darts:,} darts of {comm.size} ranks")


if __name__ == "__main__":
    main()

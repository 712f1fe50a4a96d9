"""What ranks do in the protocol tests but rounds; no torch here, so that they start fast."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

import mpift
from mpift import runtime
from mpift.transport import processes
from mpift.transport.mpi_world import MpiWorld
from mpift.transport.service import Service

STEPS = 40


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def collectives() -> dict[str, Any]:
    """Every operation once, mistakes included; all on one start."""
    comm = mpift.Communicator()
    rank = comm.rank
    seen: dict[str, Any] = {
        "sum": comm.allreduce(np.arange(5) + rank).tolist(),
        "min": comm.allreduce(np.float32(rank), "min").tolist(),
        "max": comm.allreduce(np.array([[rank]], np.int8), "max").tolist(),
        "product": comm.allreduce(np.full(2, rank + 1.0), "product").tolist(),
        "empty": comm.allreduce(np.zeros((0, 3))).shape,
        "any": comm.allreduce(np.array([rank == 1]), "max").tolist(),
        "broadcast": comm.broadcast(np.full(3, rank), root=1).tolist(),
        "gather": comm.allgather(np.full((rank, 2), rank)).tolist(),
        "gather_scalars": comm.allgather(rank).tolist(),
        "strided": comm.allreduce(np.arange(6).reshape(2, 3).T).tolist(),
    }
    for name, call in {
        "mismatch": lambda: comm.allreduce(np.zeros(2 + (rank == 1))),
        "other_call": lambda: comm.barrier() if rank == 1 else comm.allgather([1]),
        "bad_operator": lambda: comm.allreduce([1], "xor"),
        "bad_dtype": lambda: comm.allreduce(np.zeros(1, "datetime64[s]")),
        "bad_root": lambda: comm.broadcast([1], root=9),
    }.items():
        try:
            call()
            seen[name] = "no error"
        except mpift.MismatchError as error:
            seen[name] = str(error)
    seen["still_works"] = comm.allreduce([1]).tolist()
    comm.free()
    return seen


def survive(kills: dict[str, int]) -> dict[str, Any]:
    """Operations one after the other while members die at given ones."""
    comm = mpift.Communicator()
    member = comm.members[comm.rank]
    sizes, sums = [], []
    for step in range(STEPS):
        if kills.get(str(member)) == step:
            die()
        sums.append(float(comm.allreduce(np.full(3, 10.0**member))[0]))
        sizes.append(comm.size)
    digests = comm.allgather([hash(tuple(sums))])
    comm.free()
    return {"sizes": sizes, "sums": sums, "alike": len(set(digests.tolist())) == 1}


def random_deaths(seed: int) -> dict[str, Any]:
    """Members die at random moments, in the middle of operations of random size too."""
    chance = random.Random(seed)
    size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    victims = chance.sample(range(size), chance.randint(1, size - 1))
    together = chance.randrange(STEPS)
    when = {v: together if chance.random() < 0.5 else chance.randrange(STEPS) for v in victims}
    elements = chance.choice([1, 1000, 300_000])
    delays = {v: chance.random() * 0.004 for v in victims}
    comm = mpift.Communicator()
    member = comm.members[comm.rank]
    total = 0
    for step in range(STEPS):
        if when.get(member) == step:
            threading.Timer(delays[member], die).start()
        result = comm.allreduce(np.full(elements, 1 << member))
        assert (result == result[0]).all()
        total = (total * 31 + int(result[0])) % 1_000_003
    totals = comm.allgather([total]).tolist()
    comm.free()
    return {"alike": len(set(totals)) == 1}


def leave(how: str, leaver: int) -> dict[str, Any]:
    """One member ends in a given way in the middle of its loop; the others finish."""
    comm = mpift.Communicator()
    member = comm.members[comm.rank]
    for step in range(STEPS):
        if step == 10 and leaver in (member, -1):
            end(how)
        comm.allreduce([step])
    size = comm.size
    comm.free()
    return {"size": size}


def end(how: str) -> None:
    if how == "raise":
        raise ValueError("a fault of the script")
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(3)
    if how == "C":
        ctypes.CDLL(None)._exit(3)
    if how == "zero":
        sys.exit(0)
    raise SystemExit(3)


def leave_without_goodbye() -> dict[str, Any]:
    """The script just ends: no shutdown, no free."""
    comm = mpift.Communicator()
    return {"sum": comm.allreduce([1]).tolist()}


def mpi4py_first() -> dict[str, Any]:
    """The script has loaded MPI itself, and uses it before."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    before = world.allreduce(1)
    comm = mpift.Communicator(world)
    after = comm.allreduce([1]).tolist()
    comm.free()
    return {"before": before, "after": after}


def sub_communicator() -> dict[str, Any]:
    """A communicator of half of the processes; the other half ends at once."""
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2, MPI.COMM_WORLD.rank)
    comm = mpift.Communicator(half)
    found = comm.allgather([MPI.COMM_WORLD.rank]).tolist()
    comm.free()
    return {"found": found}


def again_and_again(victim: int, looks_late: int | None = None) -> dict[str, Any]:
    """Start and stop three times; ``victim`` dies between the first two, and the one who
    ``looks_late`` hears of that before it knows that all others were through.
    """
    sums = []
    for turn in range(3):
        comm = mpift.Communicator()
        member = comm.members[comm.rank]
        if turn == 0 and member == looks_late:
            look_late(runtime.current()._service)
        sums.append(comm.allreduce([1 << member]).tolist()[0])
        comm.free()
        if turn == 0 and member == victim:
            die()
    try:
        comm.barrier()
    except mpift.NotInitializedError as error:
        return {"sums": sums, "after": str(error)}
    return {"sums": sums, "after": "no error"}


def look_late(service: Service) -> None:
    """Once this rank has told the others that it is through, it looks away for a while, and hears
    of a death before it looks whether they were."""
    may_leave, rested = service._may_leave, False

    def late() -> bool:
        nonlocal rested
        found = may_leave()
        if service._leave_deadline is not None and not rested:
            rested = True
            time.sleep(0.5)
            service.leave_behind(RuntimeError("somebody is gone"))
            return False
        return found

    service._may_leave = late


def one_never_comes(how: str) -> dict[str, Any]:
    """Member 1 ends before it starts mpift."""
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        end(how) if how != "kill" else die()
    mpift.Communicator()
    return {}


def stumbles_in_the_start(victim: int, dies: bool) -> dict[str, Any]:
    """One rank has met the others, and dies before it has made its communicators, or MPI fails it
    there once."""
    if os.environ["OMPI_COMM_WORLD_RANK"] == str(victim):
        make = MpiWorld._copies

        def stumble(world: MpiWorld, control: Any, count: int) -> list[Any]:
            if dies:
                die()
            MpiWorld._copies = make
            raise world._mpi.Exception(world._mpi.ERR_OTHER)

        MpiWorld._copies = stumble
    comm = mpift.Communicator()
    found = comm.allreduce([1 << comm.members[comm.rank]]).tolist()
    comm.free()
    return {"sum": found[0]}


def on_separate_nodes(
    kills: dict[str, int], farewell: bool = False, asleep: bool = False
) -> dict[str, Any]:
    """As ``survive``, but every rank takes itself for alone on its node: no kernel can confirm
    the death of another. ``asleep``: the others' loops look away while one says farewell and dies.
    """
    processes._kernel = lambda: f"kernel of process {os.getpid()}"
    if not farewell:
        return survive(kills)
    comm = mpift.Communicator()
    member = comm.members[comm.rank]
    for step in range(STEPS):
        if asleep and step in kills.values():
            if str(member) in kills:
                time.sleep(0.3)
            else:
                runtime.current().on_service(lambda: time.sleep(1.0))
        if kills.get(str(member)) == step:
            raise ValueError("a fault of the script")
        comm.allreduce([step])
    size = comm.size
    comm.free()
    return {"size": size}


def mpi4py_first_and_a_death() -> dict[str, Any]:
    """The script loaded MPI itself, so mpi4py wants to finalize it, and one member is dead."""
    import atexit

    from mpi4py import MPI

    comm = mpift.Communicator(MPI.COMM_WORLD)
    atexit.register(print, "exit handlers run", flush=True)
    if comm.rank == 1:
        die()
    comm.barrier()
    size = comm.size
    comm.free()
    return {"size": size}


def two_threads_and_an_interrupt() -> dict[str, Any]:
    """Two threads of each rank operate, and an interrupt is caught in the middle of one call."""
    comm = mpift.Communicator()
    found: list[int] = []

    def work() -> None:
        found.extend(int(comm.allreduce([1])[0]) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    comm.barrier()
    interrupted = False
    if comm.rank == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    else:
        threading.Event().wait(1.0)
    try:
        comm.allreduce([5])
    except KeyboardInterrupt:
        interrupted = True
    after = comm.allreduce([7]).tolist()
    comm.free()
    return {"found": sorted(set(found)), "interrupted": interrupted, "after": after}


def other_communicator() -> dict[str, Any]:
    from mpi4py import MPI

    comm = mpift.Communicator(MPI.COMM_WORLD)
    half = MPI.COMM_WORLD.Split(comm.rank % 2, comm.rank)
    same = mpift.Communicator(MPI.COMM_WORLD).size
    try:
        mpift.Communicator(half)
        error = "no error"
    except mpift.ConfigError as caught:
        error = str(caught)
    comm.free()
    return {"same": same, "error": error}

"""Carries out the faults of a schedule on this rank, on purpose and for real."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence

import psutil

from mpift.core.chaos import ON_HEARTBEATS, ON_STATE, VERBS, Fault, Schedule
from mpift.transport.heartbeat import Impairment


class Injector:
    """The faults that ``schedule`` has for ``member``; ``report`` is told of each, with its step,
    before it first strikes. ``peers`` gives the process ids of the other ranks of this node,
    ``warn`` tells people of a fault that found nothing to strike."""

    def __init__(
        self,
        schedule: Schedule,
        member: int,
        report: Callable[[Fault, int], None],
        peers: Callable[[], Collection[int]],
        warn: Callable[[str], None],
    ) -> None:
        self._schedule = Schedule(tuple(f for f in schedule.faults if f.member == member))
        self._member = member
        self._report = report
        self._peers = peers
        self._warn = warn
        self._reported: set[Fault] = set()

    def strike(self, step: int, point: str) -> Sequence[Fault]:
        """This rank is at this place: whatever is due happens now. Returns what the caller has to
        carry out: faults of the state that it trains, which can't be reached from here."""
        if not self._schedule.faults:
            return ()
        for_caller = []
        for fault in self._schedule.due(self._member, step, point):
            if fault not in self._reported:
                self._reported.add(fault)
                self._report(fault, step)
            elif not VERBS[fault.verb].lasts:
                continue  # the same place once more, as after a closure's second evaluation
            if fault.verb in ON_STATE:
                for_caller.append(fault)
            else:
                self._carry_out(fault)
        return for_caller

    def impairment(self, step: int) -> Impairment:
        """What befalls the heartbeats that are sent in this step."""
        found = Impairment()
        for fault in self._schedule.faults:
            if fault.verb in ON_HEARTBEATS and fault.lasts_at(step):
                setattr(found, fault.verb, fault.amount)
        return found

    def _carry_out(self, fault: Fault) -> None:
        match fault.verb:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                time.sleep(fault.amount)
            case "gil":
                hold_interpreter_lock(fault.amount)
            case "reset":
                if not reset_connection(self._peers()):
                    self._warn(
                        f"{fault}: no TCP connection to a rank of this node, nothing is reset"
                    )


def hold_interpreter_lock(seconds: float) -> None:
    """Sleep inside a C call that keeps the interpreter's lock: no thread of Python runs."""
    library = ctypes.PyDLL(None)  # unlike CDLL, keeps the lock
    library.sleep(ctypes.c_uint(int(seconds)))
    library.usleep(ctypes.c_uint(int(seconds % 1 * 1e6)))


def reset_connection(peers: Collection[int]) -> bool:
    """Shut down one TCP connection of this process to one of the processes ``peers`` of this
    machine, as a network that resets it would; False if there is none."""
    remote = {
        c.laddr: c.pid
        for c in psutil.net_connections("tcp")
        if c.pid in peers and c.status == psutil.CONN_ESTABLISHED
    }
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr in remote:
            ours = socket.socket(fileno=os.dup(connection.fd))
            ours.shutdown(socket.SHUT_RDWR)
            ours.close()
            return True
    return False

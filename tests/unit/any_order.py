"""Messages between ranks of one process, which arrive in any order; no test in itself."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class Request:
    """One end of a message; an eager send is done before it has arrived."""

    buffer: np.ndarray
    done: bool = False


@dataclass
class Network:
    """Messages between ranks: in order between two ranks and of one tag, otherwise in any."""

    chance: random.Random
    sends: dict[tuple[int, int, int], deque[Request]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    receives: dict[tuple[int, int, int], deque[Request]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    sent: int = 0

    def deliver_one(self) -> bool:
        """Move one message that both sides have posted; whether there was one."""
        ready = [way for way, posted in self.receives.items() if posted and self.sends[way]]
        if not ready:
            return False
        way = self.chance.choice(ready)
        send, receive = self.sends[way].popleft(), self.receives[way].popleft()
        assert send.buffer.size <= receive.buffer.size, "a message is longer than its buffer"
        receive.buffer[: send.buffer.size] = send.buffer
        send.done = receive.done = True
        return True


@dataclass
class Comm:
    """One rank's end of a network."""

    network: Network
    rank: int
    size: int

    def Isend(self, buffer: np.ndarray, dest: int, tag: int) -> Request:
        eager = self.network.chance.random() < 0.5
        request = Request(buffer.copy() if eager else buffer, done=eager)
        self.network.sends[self.rank, dest, tag].append(request)
        self.network.sent += 1
        return request

    def Irecv(self, buffer: np.ndarray, source: int, tag: int) -> Request:
        request = Request(buffer)
        self.network.receives[source, self.rank, tag].append(request)
        return request


def network_of(size: int, seed: int) -> tuple[Network, list[Comm]]:
    network = Network(random.Random(seed))
    return network, [Comm(network, rank, size) for rank in range(size)]

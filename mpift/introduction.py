"""What the ranks tell each other at the start: their settings, the job's token, where the nodes'
watchdogs listen. Deaths meanwhile only make it fewer who tell.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from mpift.config import Config
from mpift.errors import ConfigError
from mpift.reduction.operations import Kind, Operation
from mpift.settings import differences

_TOKEN_BYTES = 16

# Tells all others what this rank says; returns what everybody said, in rank order.
Exchange = Callable[[Any], list[Any]]


def exchange_through(operate: Callable[[Operation], np.ndarray]) -> Exchange:
    """Exchanges of plain values, carried out by ``operate``, which survives deaths."""

    def exchange(value: Any) -> list[Any]:
        line = json.dumps(value).encode() + b"\n"  # JSON has no line ends of its own
        joined = operate(Operation(Kind.ALLGATHER, np.frombuffer(line, np.uint8)))
        return [json.loads(row) for row in joined.tobytes().splitlines()]

    return exchange


def agree_on_settings(config: Config, exchange: Exchange) -> str:
    """The job's token, a random text that its ranks alone know.

    Raises ``ConfigError`` on all ranks, with keys and ranks, where settings or versions differ.
    """
    rows = exchange([config.digest(), secrets.token_hex(_TOKEN_BYTES)])
    if len({digest for digest, _ in rows}) > 1:
        problem = differences(exchange(config.as_text()))
        if problem is not None:
            raise ConfigError(problem)
    return str(rows[0][1])


def watchdog_addresses(
    node: str, address: tuple[str, int], exchange: Exchange
) -> dict[str, tuple[str, int]]:
    """Address and port of each node's watchdog, as far as one of its ranks knows it."""
    rows = exchange([node, *address])
    return {name: (host, port) for name, host, port in rows if port}

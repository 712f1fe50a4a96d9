"""What ranks tell each other at the start, with an exchange among threads instead of MPI."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from mpift.config import Config
from mpift.errors import ConfigError
from mpift.introduction import Exchange, agree_on_settings, watchdog_addresses


def together(ranks: int, act: Any) -> list[Any]:
    """What ``act(rank, exchange)`` returns or raises on each of a few ranks."""
    barrier = threading.Barrier(ranks)
    said: dict[tuple[int, int], str] = {}
    results: list[Any] = [None] * ranks

    def exchange_of(rank: int) -> Exchange:
        turn = iter(range(100))

        def exchange(value: Any) -> list[Any]:
            number = next(turn)
            said[number, rank] = json.dumps(value)
            barrier.wait(10)
            return [json.loads(said[number, other]) for other in range(ranks)]

        return exchange

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank, exchange_of(rank))
        except ConfigError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_ranks_with_equal_settings_get_one_secret_token() -> None:
    first = together(3, lambda _, exchange: agree_on_settings(Config(), exchange))
    second = together(3, lambda _, exchange: agree_on_settings(Config(), exchange))
    assert len(set(first)) == 1
    assert len(first[0]) == 32
    assert first[0] != second[0]


def test_all_ranks_refuse_settings_that_differ_with_the_key_and_the_ranks() -> None:
    def act(rank: int, exchange: Exchange) -> str:
        config = Config(observers=5) if rank == 2 else Config()
        return agree_on_settings(config, exchange)

    errors = together(3, act)
    assert all(isinstance(error, ConfigError) for error in errors)
    for part in ("observers", "3 on ranks 0-1", "5 on rank 2"):
        assert part in str(errors[0]), errors[0]
    assert len({str(error) for error in errors}) == 1


def test_watchdogs_are_found_by_node_as_far_as_anybody_knows_them() -> None:
    known = {0: ("a", "10.0.0.1", 71), 1: ("a", "", 0), 2: ("b", "", 0), 3: ("c", "10.0.0.3", 73)}

    def act(rank: int, exchange: Exchange) -> dict[str, tuple[str, int]]:
        node, host, port = known[rank]
        return watchdog_addresses(node, (host, port), exchange)

    assert together(4, act) == [{"a": ("10.0.0.1", 71), "c": ("10.0.0.3", 73)}] * 4


@pytest.mark.parametrize("ranks", [1, 4])
def test_one_rank_alone_agrees_with_itself(ranks: int) -> None:
    found = together(ranks, lambda _, exchange: agree_on_settings(Config(), exchange))
    assert all(isinstance(token, str) for token in found)

"""The checker of recorded histories: right ones pass, each kind of wrong one is caught."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mpift.testing.histories import Operation, Recorder, load, violations


def push(
    version: int | None, value: int, start: int, end: int | None, client: int = 0
) -> Operation:
    return Operation(client, "push", "k", version, value, start, end)


def pull(
    version: int | None, value: int, start: int, end: int | None, client: int = 1
) -> Operation:
    return Operation(client, "pull", "k", version, value, start, end)


def wrong(history: list[Operation]) -> list[str]:
    """Pushes are added up, from 0."""
    return violations(history, lambda _: 0, lambda value, update: value + update)  # type: ignore[operator]


def test_operations_at_the_same_time_may_go_either_way() -> None:
    for version, value in ((0, 0), (1, 5)):
        assert wrong([push(1, 5, 0, 10), pull(version, value, 1, 9)]) == []


def test_operations_without_an_answer_may_have_happened_or_not() -> None:
    for version, value in ((0, 0), (1, 5)):
        assert wrong([push(None, 5, 0, None), pull(version, value, 20, 30)]) == []


def test_a_version_in_between_may_have_been_made_by_any_open_push() -> None:
    open_ = [push(None, 1, 0, None), push(None, 2, 0, None), push(None, 4, 0, None)]
    assert wrong([*open_, pull(2, 5, 10, 20), pull(3, 7, 30, 40)]) == []


def test_a_refused_push_never_counts() -> None:
    refused = Operation(0, "refused", "k", 0, 5, 0, 10)
    assert wrong([refused, pull(0, 0, 20, 30)]) == []
    assert wrong([refused, pull(1, 5, 20, 30)])


WRONG = {
    "a stale read": (
        "stale",
        [push(1, 5, 0, 10), push(2, 5, 11, 20), pull(1, 5, 21, 30)],
    ),
    "a read of a past that a reader has left behind": (
        "stale",
        [push(1, 5, 0, 100), pull(1, 5, 10, 20), pull(0, 0, 30, 40, client=2)],
    ),
    "a lost update": (
        "does not follow",
        [push(1, 5, 0, 10), push(2, 7, 11, 20), pull(2, 7, 21, 30)],
    ),
    "an acknowledged update that is gone": (
        "out of order",
        [push(1, 5, 0, 10), push(1, 7, 11, 20, client=1)],
    ),
    "two orders": (
        "two values",
        [
            push(None, 5, 0, None),
            push(None, 7, 0, None),
            pull(1, 5, 10, 20),
            pull(1, 7, 10, 20, client=2),
        ],
    ),
    "an update that was applied twice": (
        "does not follow",
        [push(1, 5, 0, 10), pull(1, 5, 11, 20), pull(2, 10, 21, 30)],
    ),
    "an open update that was applied twice": (
        "does not follow",
        [push(None, 5, 0, None), pull(1, 5, 11, 20), pull(2, 10, 21, 30)],
    ),
    "a read of what was pushed only later": (
        "out of order",
        [pull(1, 5, 0, 10), push(1, 5, 20, 30)],
    ),
    "a version that an open push made before it began": (
        "does not follow",
        [pull(1, 5, 0, 10), push(None, 5, 20, None)],
    ),
    "pushes against real time": (
        "out of order",
        [push(2, 5, 0, 10), push(1, 7, 11, 20)],
    ),
    "another value to begin with": ("two values", [pull(0, 1, 0, 10)]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_caught(name: str) -> None:
    words, history = WRONG[name]
    found = wrong(history)
    assert found
    assert words in found[0], found


def test_random_histories_of_a_real_register_pass_and_with_one_change_mostly_fail() -> None:
    caught = 0
    for seed in range(200):
        history = simulated(random.Random(seed))
        assert wrong(history) == [], (seed, wrong(history))
        chance = random.Random(seed)
        index = chance.choice([i for i, o in enumerate(history) if o.kind == "pull"])
        spoilt = history[index]
        assert spoilt.value is not None
        history[index] = pull(
            spoilt.version, int(spoilt.value) + 1, spoilt.invoked, spoilt.answered
        )
        caught += bool(wrong(history))
    assert caught == 200


def simulated(chance: random.Random) -> list[Operation]:
    """Operations that take effect at a moment between their beginning and end; some clients die in
    the middle of one."""
    history, clocks, version, value = [], [0] * 4, 0, 0
    moments = sorted((chance.randrange(1000), chance.randrange(4)) for _ in range(40))
    for moment, client in moments:
        start = max(clocks[client], moment - chance.randrange(20))
        if moment < start or clocks[client] == 10_000:
            continue
        end: int | None = moment + chance.randrange(1, 20)
        dies = chance.random() < 0.05
        clocks[client] = 10_000 if dies else (end or 0) + 1
        if chance.random() < 0.5:
            update = chance.randrange(1, 1000)
            if not (dies and chance.random() < 0.5):
                version, value = version + 1, value + update
            known = None if dies else version
            history.append(push(known, update, start, None if dies else end, client))
        elif not dies:
            history.append(pull(version, value, start, end, client))
    history.append(pull(version, value, 2000, 2001))
    return history


def test_what_a_client_recorded_is_there_without_its_end(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 3)
    with recorder.record("push", "a", 7) as answer:
        answer["version"] = 1
    with recorder.record("pull", "a") as answer:
        answer |= {"version": 1, "value": 7}
    with pytest.raises(KeyError), recorder.record("push", "b", 8):
        raise KeyError
    found = load(tmp_path)
    assert [(o.client, o.kind, o.key, o.version, o.value) for o in found] == [
        (3, "push", "a", 1, 7),
        (3, "pull", "a", 1, 7),
        (3, "push", "b", None, 8),
    ]
    assert found[0].invoked <= (found[0].answered or 0) <= found[1].invoked
    assert found[2].answered is None

"""Walks every order of events of a pure state machine, and prints the shortest way to a fault.

A *model* gives an initial state, the actions possible in a state, and checks. States must be
hashable values. The walk is breadth first, so the first violation found has a shortest trace.
Deadlocks are violations too: a state without actions must be one that the model calls final. With
``must_end`` so is a trap: a state from which no final one can be reached any more.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

State = TypeVar("State", bound=Hashable)


class Model(Protocol[State]):
    """What the explorer needs to know of a machine and its surroundings."""

    def initial(self) -> State:
        """Where the walk starts."""

    def actions(self, state: State) -> Iterable[tuple[str, State]]:
        """All that can happen in ``state``: a label in words, and the state after it."""

    def violation(self, state: State) -> str | None:
        """What is wrong with ``state``, in words, or None."""

    def final(self, state: State) -> bool:
        """Whether the system may rest in ``state`` for ever."""


@dataclass(frozen=True, slots=True)
class Report(Generic[State]):
    """Result of a walk: how much was seen, and the first violation with its trace of labels."""

    states: int
    transitions: int
    violation: str | None = None
    trace: tuple[str, ...] = ()
    state: State | None = None

    def __str__(self) -> str:
        seen = f"{self.states} states, {self.transitions} transitions"
        if self.violation is None:
            return f"{seen}: no violation"
        steps = "\n".join(f"  {number}. {label}" for number, label in enumerate(self.trace, 1))
        return f"{seen}: {self.violation}\n{steps}\n  in {self.state}"


def explore(
    model: Model[State], max_states: int = 2_000_000, must_end: bool = False
) -> Report[State]:
    """Visit every reachable state of ``model`` once; with ``must_end`` look for traps after that.

    Stops at the first violation. Raises ``OverflowError`` when more than ``max_states`` states
    are reachable: an exploration that was cut short proves nothing and must not look green.
    """
    start = model.initial()
    parents: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    transitions = 0
    before: dict[State, list[State]] = {}  # filled only for must_end
    ends: list[State] = []
    while queue:
        state = queue.popleft()
        problem = model.violation(state)
        after = () if problem else tuple(model.actions(state))
        if not problem and not after and not model.final(state):
            problem = "deadlock: nothing can happen, and this is not an end"
        if problem:
            return Report(len(parents), transitions, problem, _trace(parents, state), state)
        if must_end and model.final(state):
            ends.append(state)
        for label, successor in after:
            transitions += 1
            if must_end:
                before.setdefault(successor, []).append(state)
            if successor not in parents:
                parents[successor] = (state, label)
                queue.append(successor)
        if len(parents) > max_states:
            raise OverflowError(f"more than {max_states} states are reachable")
    trap = _first_trap(parents, before, ends) if must_end else None
    if trap is not None:
        problem = "trap: no end can be reached any more"
        return Report(len(parents), transitions, problem, _trace(parents, trap), trap)
    return Report(len(parents), transitions)


def _first_trap(
    visited: Iterable[State], before: dict[State, list[State]], ends: list[State]
) -> State | None:
    """The first visited state from which none of ``ends`` can be reached."""
    good = set(ends)
    queue = deque(ends)
    while queue:
        for state in before.get(queue.popleft(), ()):
            if state not in good:
                good.add(state)
                queue.append(state)
    return next((state for state in visited if state not in good), None)


def _trace(parents: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    labels: list[str] = []
    step = parents[state]
    while step is not None:
        state, label = step
        labels.append(label)
        step = parents[state]
    return tuple(reversed(labels))


def wander(model: Model[State], walks: int, seed: int, max_steps: int = 2000) -> Report[State]:
    """Walk at random, ``walks`` times from the beginning to an end: for what has more states than
    ``explore`` can visit. The same seed takes the same ways. Stops at the first violation, or where
    a walk doesn't come to an end in ``max_steps``.
    """
    chance = random.Random(seed)
    seen: set[State] = set()
    transitions = 0
    for _ in range(walks):
        state, trace = model.initial(), list[str]()
        for _ in range(max_steps):
            seen.add(state)
            problem = model.violation(state)
            after = () if problem else tuple(model.actions(state))
            if not problem and not after and not model.final(state):
                problem = "deadlock: nothing can happen, and this is not an end"
            if problem:
                return Report(len(seen), transitions, problem, tuple(trace), state)
            if not after:
                break
            label, state = chance.choice(after)
            trace.append(label)
            transitions += 1
        else:
            problem = f"no end after {max_steps} steps"
            return Report(len(seen), transitions, problem, tuple(trace), state)
    return Report(len(seen), transitions)

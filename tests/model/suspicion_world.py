"""The world of the suspicion model as values: what has happened to ranks, and what is under way."""

from __future__ import annotations

from typing import NamedTuple

from mpift.core.membership import View
from mpift.core.suspicion import Finding

# How a member has ended: whether it said that its part of the job may be started again.
NO_RESTART, RESTART = 1, 2

Word = tuple[int, int, int, frozenset[int]]  # epoch, from, to, suspects
Answer = tuple[int, int, int, Finding]  # epoch, by, about, finding


class Faults(NamedTuple):
    """How many of each may still happen."""

    hangs: int = 0
    wakings: int = 0  # of one that hung
    deaths: int = 0
    mistakes: int = 0  # of detectors, either way
    losses: int = 0  # of messages that no cut swallows
    cuts: int = 0
    heals: int = 0  # of the cut
    condemnations: int = 0


class World(NamedTuple):
    machines: tuple[int, ...]  # numbers of states, see SuspicionModel.states
    faults: Faults
    codes: tuple[int, ...]  # how a member has ended; 0: it has not
    hung: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    known: frozenset[int] = frozenset()  # whose end MPI has told to everybody
    cut: bool = False
    told: frozenset[Word] = frozenset()
    ended: frozenset[tuple[int, int]] = frozenset()  # to, code
    asked: frozenset[tuple[int, int, int, bool]] = frozenset()  # epoch, by, about, kill
    answers: frozenset[Answer] = frozenset()
    installing: frozenset[tuple[int, View]] = frozenset()
    # What justifies a killing: words received in this view (by, from, suspects, ticks since), and
    # who was seen to stand still (by, about) since it was last heard.
    words: frozenset[tuple[int, int, frozenset[int], int]] = frozenset()
    still: frozenset[tuple[int, int]] = frozenset()
    wrong: str = ""

"""Repeated measurements as a median and its quartiles: the form in which benchmarks report."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, the quartiles around it, and how many runs they come from; in the runs' unit."""

    median: float
    lower: float
    upper: float
    runs: int


def spread_of(values: Sequence[float]) -> Spread:
    """The spread of ``values``; quartiles interpolate, and lie within what was measured.

    Raises ``ValueError`` if there are none.
    """
    if not values:
        raise ValueError("there are no runs to take a median of")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, lower, upper, len(values))


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Run by run: neighbours in time saw the same machine, so their ratio varies least."""
    return [a / b for a, b in zip(above, below, strict=True)]

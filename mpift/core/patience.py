"""Patience: how long a round waits for late ranks once its quorum has arrived.

Fixed, or adaptive. The adaptive rule weighs the two costs of a late rank. To wait x seconds costs
everybody x of a round's time T. Not to wait costs one gradient of n now, and the rank idles until
the round closes in which its gradient counts: about one n-th of a round's work. As in the
ski-rental problem (Karlin et al. 1988) one waits no longer than what the alternative costs, and
here for half of it, because late ranks mostly come much later than that. Where arrivals spread more
by themselves than T/2n, the spread of the quorum's own arrivals rules instead; counted are those
who were in time for the round before as well.

    patience = max(T / 2n, 3 * spread, 10 ms)        T, spread: medians of the last rounds

Under 10 ms it is the operating system that is late, and no rank.

A rank that was missing in the round before already is not waited for: it is busy with an older
gradient, and nobody knows for how long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from mpift.errors import ConfigError

ADAPTIVE = "adaptive"
TIMEOUT = "timeout"
_ROUNDS = 32
_ROUNDS_MIN = 5  # fewer say nothing: the first rounds are slow for reasons of their own
_SPREADS = 3.0
_LEAST_SECONDS = 0.01


def parse_patience(given: str | float) -> str | float:
    """A patience as it is given in a setting or an argument: "timeout", "adaptive" or a number of
    seconds of at least 0. Raises ``ConfigError``."""
    if given in (TIMEOUT, ADAPTIVE):
        return given
    try:
        seconds = float("nan") if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        seconds = float("nan")
    if not 0 <= seconds < float("inf"):
        raise ConfigError(
            'patience must be "timeout", "adaptive" or a number of seconds (0 or more), not'
            f" {given!r}"
        )
    return seconds


class Patience:
    """For one lane, on the coordinator. ``setting`` is a number of seconds or "adaptive"; ``limit``
    is the longest that the adaptive one waits, and how long it waits as long as it knows nothing.
    """

    def __init__(self, setting: float | str, limit: float) -> None:
        self.adaptive = setting == ADAPTIVE
        self._limit = limit if isinstance(setting, str) else float(setting)
        self._rounds: deque[float] = deque(maxlen=_ROUNDS)
        self._spreads: deque[float] = deque(maxlen=_ROUNDS)
        self._quorum_at: float | None = None

    def quorum_arrived(self, at: float, in_time: Sequence[float]) -> None:
        """A round's quorum was complete ``at`` this time, in seconds. ``in_time`` are the arrivals
        of those of it that were there in the round before too: a rank that was late for that comes
        early now, and its way ahead says nothing of how ranks spread."""
        if self._quorum_at is not None:
            self._rounds.append(at - self._quorum_at)
            if len(in_time) > 1:
                self._spreads.append(max(in_time) - min(in_time))
        self._quorum_at = at

    def forget_time(self) -> None:
        """Time passed that belongs to no round: a rebuild, an evaluation."""
        self._quorum_at = None

    def seconds(self, size: int, hopeful: bool) -> float:
        """How long to wait from now in a view of ``size`` ranks; ``hopeful`` if somebody is missing
        who was there in the round before."""
        if not self.adaptive or len(self._rounds) < _ROUNDS_MIN:
            return self._limit
        if not hopeful:
            return 0.0
        cost = median(self._rounds) / (2 * size)
        spread = median(self._spreads) if self._spreads else 0.0
        return min(self._limit, max(cost, _SPREADS * spread, _LEAST_SECONDS))

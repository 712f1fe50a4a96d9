"""Which stripe of which array is asked of which donor.

The bookkeeping of one fetch, without messages or clock: time is an argument. A stripe waits, or a
donor was asked for it, or it is here. All donors that hold an array share its stripes; where the
whole turns out wrong, nobody can tell whose stripes were, and the array is fetched anew from one
donor alone, then from the next, until one's bytes are right or none is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpift.errors import TransferError

STRIPE_BYTES = 4 << 20
# Of one donor at a time: two stripes, so that the next is under way while one is written down; many
# of small arrays, which would cost a round trip each.
_BYTES_AT_ONCE = 2 * STRIPE_BYTES
_REQUESTS_AT_ONCE = 32
# Between two requests to a donor that has no offer yet; doubled each time.
_AGAIN_SECONDS = 0.002
_AGAIN_SECONDS_MAX = 0.05


@dataclass(slots=True, eq=False)
class Array:
    """One array that is fetched: ``data`` is uint8[n], written as stripes arrive."""

    name: str
    data: np.ndarray
    expected: bytes
    waiting: deque[int] = field(default_factory=deque)  # offsets of stripes to ask for
    missing: int = 0  # stripes that are not here
    givers: set[int] = field(default_factory=set)  # whose stripes are in it
    only: int | None = None  # the donor that has to give all of it
    unfit: dict[int, str] = field(default_factory=dict)  # donors that don't count, and why

    def restart(self) -> None:
        """Nothing of it is here."""
        self.waiting = deque(range(0, self.data.nbytes, STRIPE_BYTES))
        self.missing = len(self.waiting)
        self.givers.clear()

    def length(self, offset: int) -> int:
        """Bytes of the stripe that begins at ``offset``."""
        return min(STRIPE_BYTES, self.data.nbytes - offset)


@dataclass(slots=True, eq=False)
class _Donor:
    member: int
    known: bool = False  # it has the offer
    again_at: float = 0.0
    pause: float = _AGAIN_SECONDS
    bytes: int = 0  # asked of it and not here
    requests: int = 0

    def takes(self, length: int) -> bool:
        """Whether it may be asked for so much more now."""
        if not self.known:
            return self.requests == 0
        fits = self.bytes + length <= _BYTES_AT_ONCE
        return self.requests < _REQUESTS_AT_ONCE and (fits or self.requests == 0)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A stripe that ``donor`` was asked for under ``serial``."""

    serial: int
    donor: int
    array: Array
    offset: int
    length: int


class Plan:
    """See the module's docstring. ``key`` names the state in errors, ``serials`` the requests."""

    def __init__(
        self, key: str, arrays: Sequence[Array], donors: Sequence[int], serials: Iterator[int]
    ) -> None:
        self._key = key
        self._named = tuple(donors)
        self._donors = {member: _Donor(member) for member in donors}
        self._serials = serials
        self.asked: dict[int, Asked] = {}
        self._open = {array.name: array for array in arrays}  # those with stripes that wait
        self.arrays = tuple(arrays)
        for array in arrays:
            array.restart()

    def keep(self, members: Sequence[int]) -> None:
        """A new view: what was asked is lost, and so are donors that are not in it.
        ``TransferError`` if an array has no donor left."""
        for asked in tuple(self.asked.values()):
            self.answered(asked.serial)
            self._wait(asked)
        for member in set(self._donors) - set(members):
            del self._donors[member]
        for array in self.arrays:
            self._see_to(array)

    def next(self, now: float) -> Iterator[Asked]:
        """Stripes to ask for now; each counts as asked for once it is given out."""
        for donor in self._donors.values():
            if now >= donor.again_at:
                donor.again_at = 0.0
                yield from self._of(donor)

    def _of(self, donor: _Donor) -> Iterator[Asked]:
        for array in tuple(self._open.values()):
            if donor.member in array.unfit or array.only not in {None, donor.member}:
                continue
            while array.waiting and donor.takes(array.length(array.waiting[0])):
                offset = array.waiting.popleft()
                asked = Asked(
                    next(self._serials), donor.member, array, offset, array.length(offset)
                )
                self.asked[asked.serial] = asked
                donor.requests += 1
                donor.bytes += asked.length
                yield asked
            if array.waiting:
                return
            del self._open[array.name]

    def due(self, now: float) -> bool:
        """Whether a donor that had no offer may be asked again."""
        return any(0.0 < donor.again_at <= now for donor in self._donors.values())

    # -- answers -----------------------------------------------------------------------------------

    def answered(self, serial: int) -> Asked | None:
        """What was asked under ``serial``; None if that has been given up since."""
        asked = self.asked.pop(serial, None)
        if asked is not None and asked.donor in self._donors:
            donor = self._donors[asked.donor]
            donor.requests -= 1
            donor.bytes -= asked.length
        return asked

    def here(self, asked: Asked) -> bool:
        """The stripe is in its array; whether the array is whole now."""
        donor = self._donors[asked.donor]
        donor.known, donor.pause = True, _AGAIN_SECONDS
        asked.array.givers.add(asked.donor)
        asked.array.missing -= 1
        return asked.array.missing == 0

    def not_yet(self, asked: Asked, now: float) -> None:
        """The donor has no such offer: it is asked again a little later."""
        donor = self._donors[asked.donor]
        donor.known = False
        donor.again_at = now + donor.pause
        donor.pause = min(2 * donor.pause, _AGAIN_SECONDS_MAX)
        self._wait(asked)

    def unfit(self, asked: Asked, why: str) -> None:
        """The donor's offer does not have the array. ``TransferError`` if nobody's has."""
        asked.array.unfit[asked.donor] = why
        self._wait(asked)
        self._see_to(asked.array)

    def wrong(self, array: Array, why: str) -> None:
        """The whole array is not what was expected: fetch it from one donor alone.
        ``TransferError`` if no donor is left for it."""
        if len(array.givers) == 1:
            array.unfit |= dict.fromkeys(array.givers, why)
        # Rather one that had no part in it.
        fit = sorted(self._fit(array), key=lambda member: member in array.givers)
        array.only = fit[0] if fit else None
        self._restart(array)
        self._see_to(array)

    # -- helpers -----------------------------------------------------------------------------------

    def _fit(self, array: Array) -> list[int]:
        return [member for member in self._donors if member not in array.unfit]

    def _see_to(self, array: Array) -> None:
        """An array that lacks something needs a donor."""
        if not array.missing:
            return
        fit = self._fit(array)
        if not fit:
            raise TransferError(self._why_nobody(array))
        if array.only is not None and array.only not in fit:
            array.only = fit[0]
            self._restart(array)

    def _restart(self, array: Array) -> None:
        for asked in [asked for asked in self.asked.values() if asked.array is array]:
            self.answered(asked.serial)
        array.restart()
        self._open[array.name] = array

    def _wait(self, asked: Asked) -> None:
        asked.array.waiting.appendleft(asked.offset)
        self._open[asked.array.name] = asked.array

    def _why_nobody(self, array: Array) -> str:
        reasons = [
            f"member {member} {array.unfit.get(member, 'has left the view')}"
            for member in self._named
        ]
        return (
            f"array '{array.name}' of state '{self._key}' could not be fetched:"
            f" {'; '.join(reasons) or 'no other member was named as a donor'}. Name other donors,"
            " or restore a checkpoint"
        )

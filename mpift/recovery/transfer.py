"""Arrays of a named state from peers: what a rank fetches that joins, or whose copy is damaged.

Donors offer arrays under a key. Whoever fetches asks several donors at once, a stripe at a time, so
that memory is bounded and the quicker donor gives more; ``stripes.Plan`` says what is asked of
whom.

- An offer may come later than the first request for it: a donor without it is asked again, for as
  long as it lives.
- A donor copies each stripe before it is sent: MPI may read what a failed send had much later, and
  the arrays are the script's again once the offer is withdrawn.
- What has arrived survives a change of view; what was under way is asked for again.
- Nothing is believed without the digest that the caller expects. The main thread checks an array
  as soon as it is whole, while others are on their way.
"""

from __future__ import annotations

import enum
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from mpift.errors import TransferError
from mpift.recovery.stripes import Array, Plan
from mpift.transport.messages import Kind, Message
from mpift.transport.parcels import Parcel
from mpift.transport.part import Post
from mpift.transport.world import World

_NOTHING = np.empty(0, np.uint8)


class Answer(enum.IntEnum):
    """What a donor says when it is asked for a stripe."""

    HERE = 0
    NOT_YET = 1  # it has no offer under this key
    UNFIT = 2  # it has, but no such array, or one of another size


def digest(array: np.ndarray) -> bytes:
    """XXH3-128 of a contiguous array's bytes."""
    return xxhash.xxh3_128_digest(_bytes_of(array).data)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _code(name: str) -> str:
    # Names may be long, and the text of a message is not.
    return xxhash.xxh3_128_hexdigest(name.encode())


class _Fetch:
    """``news`` are arrays that are whole, and an error that ends it."""

    def __init__(
        self, key: str, arrays: Sequence[Array], donors: Sequence[int], serials: Iterator[int]
    ) -> None:
        self.code = _code(key)
        self.plan = Plan(key, arrays, donors, serials)
        self.news: queue.SimpleQueue[Array | TransferError] = queue.SimpleQueue()
        self.names = {array.name: _code(array.name) for array in arrays}


class Transfer:
    """See the module's docstring. A part of the service's loop."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._world: World
        self._lock = threading.Lock()
        self._offers: dict[str, dict[str, np.ndarray]] = {}  # codes of keys and names
        self._fetch: _Fetch | None = None
        self._serials = itertools.count()
        post.mailbox.register(Kind.STRIPE_WANTED, self._give)
        post.parcels.register(Kind.STRIPE, self._take)

    # -- for the main thread -----------------------------------------------------------------------

    def offer(self, key: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Give ``arrays`` (contiguous, any dtype and shape) to whoever asks for ``key``. They must
        stay as they are until ``withdraw``. Another offer under the same key takes its place."""
        offer = {}
        for name, array in arrays.items():
            _require_contiguous(key, name, array)
            offer[_code(name)] = _bytes_of(array)
        with self._lock:
            self._offers[_code(key)] = offer

    def withdraw(self, key: str) -> None:
        """The arrays of ``key`` may change again. Whoever still fetches them waits for another
        offer, so withdraw what all that were told of it have."""
        with self._lock:
            self._offers.pop(_code(key), None)

    def fetch(
        self,
        key: str,
        into: Mapping[str, np.ndarray],
        digests: Mapping[str, bytes],
        donors: Sequence[int],
    ) -> None:
        """Fill ``into`` (contiguous arrays; names and sizes as offered, all of them or some) with
        the state ``key`` of ``donors`` (member ids; this rank and those not in the view don't
        count). ``digests`` are those of the whole arrays, see ``digest``. One fetch at a time.

        Returns when all is here and right, and waits for donors that have no such offer yet.
        Raises ``TransferError`` if an array has no donor left: they have left the view, don't have
        it, or gave bytes of another digest. What is in ``into`` then is undefined.
        """
        arrays = []
        for name, array in into.items():
            _require_contiguous(key, name, array)
            if not array.flags.writeable:
                raise ValueError(f"array '{name}' of state '{key}' cannot be written to")
            arrays.append(Array(name, _bytes_of(array), digests[name]))
        others = [member for member in donors if member != self._world.member]
        fetch = _Fetch(key, arrays, others, self._serials)
        self._post.call(lambda: self._begin(fetch))
        try:
            unchecked = len(arrays)
            while unchecked:
                news = fetch.news.get()
                if isinstance(news, TransferError):
                    raise news
                found = digest(news.data)
                if found == news.expected:
                    unchecked -= 1
                else:
                    why = f"gave bytes with digest {found.hex()}, not {news.expected.hex()}"
                    self._post.call(functools.partial(self._wrong, fetch, news, why))
        finally:
            self._post.call(lambda: self._end(fetch))

    # -- asking ------------------------------------------------------------------------------------

    def _begin(self, fetch: _Fetch) -> None:
        self._fetch = fetch
        for array in fetch.plan.arrays:
            if not array.missing:
                fetch.news.put(array)  # empty
        self._restart()

    def _end(self, fetch: _Fetch) -> None:
        if self._fetch is fetch:
            self._fetch = None

    def _restart(self) -> None:
        fetch, view = self._fetch, self._world.view
        if fetch is not None:
            self._change(fetch, lambda: fetch.plan.keep(view.members))

    def _wrong(self, fetch: _Fetch, array: Array, why: str) -> None:
        if self._fetch is fetch:
            self._change(fetch, lambda: fetch.plan.wrong(array, why))

    def _change(self, fetch: _Fetch, change: Callable[[], None]) -> None:
        """Change the plan, and ask for what is to be asked for then."""
        try:
            change()
        except TransferError as error:
            self._fetch = None
            fetch.news.put(error)
        else:
            self._ask(fetch)

    def _ask(self, fetch: _Fetch) -> None:
        for asked in fetch.plan.next(time.monotonic()):
            array = asked.array
            what = f"{asked.serial} {fetch.code} {fetch.names[array.name]}"
            where = f"{array.data.nbytes} {asked.offset} {asked.length}"
            self._post.mailbox.send(Kind.STRIPE_WANTED, f"{what} {where}", [asked.donor])

    def _take(self, parcel: Parcel) -> None:
        fetch = self._fetch
        serial, answer, detail = parcel.text.split(" ", 2)
        asked = fetch.plan.answered(int(serial)) if fetch is not None else None
        if fetch is None or asked is None:
            return  # given up since
        if int(answer) == Answer.UNFIT:
            self._change(fetch, lambda: fetch.plan.unfit(asked, detail))
            return
        if int(answer) == Answer.NOT_YET:
            fetch.plan.not_yet(asked, time.monotonic())
        else:
            asked.array.data[asked.offset : asked.offset + asked.length] = parcel.data
            if fetch.plan.here(asked):
                fetch.news.put(asked.array)
        self._ask(fetch)

    # -- answering ---------------------------------------------------------------------------------

    def _give(self, message: Message) -> None:
        self._post.hurry()
        serial, key, name, size, offset, length = message.text.split()
        answer, detail, data = self._look_up(key, name, int(size), int(offset), int(length))
        text = f"{serial} {int(answer)} {detail}"
        self._post.parcels.send(Kind.STRIPE, message.sender, text, data)

    def _look_up(
        self, key: str, name: str, size: int, offset: int, length: int
    ) -> tuple[Answer, str, np.ndarray]:
        with self._lock:  # until the stripe is copied, the offer stands
            offer = self._offers.get(key)
            if offer is None:
                return Answer.NOT_YET, "", _NOTHING
            if name not in offer:
                return Answer.UNFIT, "offers no such array", _NOTHING
            array = offer[name]
            if array.nbytes != size:
                return Answer.UNFIT, f"offers {array.nbytes} bytes, not {size}", _NOTHING
            return Answer.HERE, "", array[offset : offset + length].copy()

    # -- the service's loop ------------------------------------------------------------------------

    @property
    def requests(self) -> Sequence[Any]:
        return ()

    def complete(self, positions: Sequence[int]) -> None:
        pass

    def turn(self, now: float) -> None:
        fetch = self._fetch
        if fetch is None:
            return
        if fetch.plan.asked:
            self._post.hurry()
        if fetch.plan.due(now):
            self._ask(fetch)

    def fault(self) -> None:
        pass

    def install(self, world: World) -> None:
        self._world = world
        self._restart()


def _require_contiguous(key: str, name: str, array: np.ndarray) -> None:
    if not array.flags.c_contiguous:
        raise ValueError(
            f"array '{name}' of state '{key}' is not contiguous: hand in"
            " numpy.ascontiguousarray(...) of it"
        )

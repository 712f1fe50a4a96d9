"""Arrays from peers: who is asked for which stripe, and what becomes of faults."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from mpift.core.membership import View
from mpift.errors import TransferError
from mpift.recovery import stripes
from mpift.recovery.transfer import Transfer, digest
from mpift.transport.messages import Kind, Message
from mpift.transport.parcels import Parcel
from mpift.transport.part import Post
from mpift.transport.solo import SoloWorld

STRIPE = 64


@pytest.fixture(autouse=True)
def _small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripes, "STRIPE_BYTES", STRIPE)
    monkeypatch.setattr(stripes, "_BYTES_AT_ONCE", 2 * STRIPE)


class Member:
    """A rank's mailbox, parcels and transfer; what it sends goes to the network."""

    def __init__(self, network: Network, member: int) -> None:
        self.network, self.member = network, member
        self.handlers: dict[Kind, Callable[[Any], None]] = {}
        self.calls: deque[Callable[[], None]] = deque()
        self.world: Any = SoloWorld()
        self.world.member = member
        post: Any = Post(self, _Parcels(self), self.calls.append, lambda: None)  # type: ignore[arg-type]
        self.transfer = Transfer(post)

    def register(self, kind: Kind, handler: Callable[[Any], None]) -> None:
        self.handlers[kind] = handler

    def send(self, kind: Kind, text: str, members: Iterable[int]) -> None:
        for to in members:
            assert len(text.encode()) <= 900
            self.network.messages.append((self.member, to, kind, text, None))


class _Parcels:
    def __init__(self, member: Member) -> None:
        self.register = member.register
        self._member = member

    def send(self, kind: Kind, member: int, text: str, data: np.ndarray) -> None:
        self._member.network.messages.append((self._member.member, member, kind, text, data))


class Network:
    """Members 0 to 3 in one process; the test's thread is the service thread of all of them."""

    def __init__(self) -> None:
        self.messages: deque[tuple[int, int, Kind, str, np.ndarray | None]] = deque()
        self.epoch = 0
        self.members = {member: Member(self, member) for member in range(4)}
        self.given: list[int] = []  # who gave stripes
        self.view((0, 1, 2, 3))

    def view(self, members: tuple[int, ...]) -> None:
        """What is under way is lost, and a new view holds."""
        self.messages.clear()
        self.members = {m: self.members[m] for m in members}
        for member in self.members.values():
            member.transfer.fault()
            member.world.view = View(self.epoch, members)
            member.transfer.install(member.world)
        self.epoch += 1

    def fetch(
        self, into: dict[str, np.ndarray], donors: tuple[int, ...], **digests: bytes
    ) -> Fetch:
        return Fetch(self, into, donors, digests)

    def step(self) -> None:
        """One message is delivered, or a little time passes."""
        for member in self.members.values():
            while member.calls:
                member.calls.popleft()()
        if not self.messages:
            for member in self.members.values():
                member.transfer.turn(float("inf"))
            return
        sender, to, kind, text, data = self.messages.popleft()
        if data is None:
            self.members[to].handlers[kind](Message(kind, 0, sender, text))
        else:
            self.given += [sender] if data.nbytes else []
            self.members[to].handlers[kind](Parcel(kind, sender, text, data))


class Fetch:
    """Member 0 fetches state "s" on a thread of its own."""

    def __init__(self, network: Network, into: Any, donors: Any, digests: Any) -> None:
        self.network = network
        self.error: Exception | None = None

        def fetch() -> None:
            try:
                network.members[0].transfer.fetch("s", into, digests, donors)
            except TransferError as error:
                self.error = error

        self.thread = threading.Thread(target=fetch, daemon=True)
        self.thread.start()

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let things happen until the fetch ends, or ``until``."""
        while self.thread.is_alive() and not until():
            self.network.step()


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def test_all_donors_share_the_stripes_of_every_kind_of_array() -> None:
    network = Network()
    state: dict[str, np.ndarray] = {
        "w" * 2000: random_bytes(800).view(np.float64).reshape(10, 10),
        "half": random_bytes(2 * STRIPE).view(np.float16),
        "scalar": np.array(7, np.int32),
        "empty": np.zeros((0, 3)),
        "flags": np.array([True, False]),
        "not asked for": random_bytes(100),
    }
    for member in (1, 2, 3):
        network.members[member].transfer.offer("s", state)
    into = {name: np.empty_like(array) for name, array in list(state.items())[:-1]}
    fetch = network.fetch(into, (1, 2, 3), **{name: digest(state[name]) for name in into})
    fetch.run()
    assert fetch.error is None
    for name, array in into.items():
        assert array.tobytes() == state[name].tobytes()
    assert set(network.given) == {1, 2, 3}
    assert len(network.given) == 13 + 2 + 1 + 1  # every stripe once


def test_no_more_is_under_way_than_two_stripes_of_a_donor() -> None:
    network = Network()
    data = random_bytes(20 * STRIPE)
    for member in (1, 2):
        network.members[member].transfer.offer("s", {"a": data})
    into = {"a": np.empty_like(data)}
    fetch = network.fetch(into, (1, 2), a=digest(data))
    most = 0

    def watch() -> bool:
        nonlocal most
        most = max(most, len(network.messages))
        return False

    fetch.run(watch)
    assert fetch.error is None
    assert most == 4


def test_many_small_arrays_are_asked_for_together() -> None:
    network = Network()
    state = {f"a{i}": np.array([i], np.uint8) for i in range(100)}
    network.members[1].transfer.offer("s", state)
    into = {name: np.empty_like(array) for name, array in state.items()}
    fetch = network.fetch(into, (1,), **{name: digest(a) for name, a in state.items()})
    fetch.run(lambda: len(network.messages) > 20)
    assert fetch.thread.is_alive()
    fetch.run()
    assert [array[0] for array in into.values()] == list(range(100))


@pytest.mark.parametrize("given", [0, 1, 5, 13])
def test_a_donor_that_leaves_the_view_is_replaced_by_the_others(given: int) -> None:
    network = Network()
    data = random_bytes(20 * STRIPE)
    for member in (1, 2):
        network.members[member].transfer.offer("s", {"a": data})
    into = {"a": np.empty_like(data)}
    fetch = network.fetch(into, (1, 2), a=digest(data))
    fetch.run(lambda: len(network.given) >= given and bool(network.messages))
    network.view((0, 2, 3))
    fetch.run()
    assert fetch.error is None
    assert into["a"].tobytes() == data.tobytes()
    # What had arrived was not fetched again.
    assert len(network.given) <= 20 + 4


def test_a_view_change_that_takes_no_donor_only_asks_again() -> None:
    network = Network()
    data = random_bytes(8 * STRIPE)
    network.members[1].transfer.offer("s", {"a": data})
    into = {"a": np.empty_like(data)}
    fetch = network.fetch(into, (1,), a=digest(data))
    fetch.run(lambda: len(network.given) == 3)
    network.view((0, 1))
    fetch.run()
    assert fetch.error is None
    assert into["a"].tobytes() == data.tobytes()


def test_a_donor_without_the_offer_is_asked_again_until_it_has_it() -> None:
    network = Network()
    data = random_bytes(100)
    into = {"a": np.empty_like(data)}
    fetch = network.fetch(into, (1,), a=digest(data))
    asked = 0

    def count() -> bool:
        nonlocal asked
        asked += bool(network.messages) and network.messages[0][2] is Kind.STRIPE_WANTED
        return asked == 20

    fetch.run(count)
    assert fetch.thread.is_alive()
    network.members[1].transfer.offer("s", {"a": data})
    fetch.run()
    assert fetch.error is None
    assert into["a"].tobytes() == data.tobytes()


def test_a_donor_that_never_offers_is_waited_for_while_it_lives_and_no_longer() -> None:
    network = Network()
    fetch = network.fetch({"a": np.zeros(4)}, (1,), a=digest(np.ones(4)))
    fetch.run(lambda: bool(network.messages))
    network.view((0, 2, 3))
    fetch.run()
    assert "array 'a' of state 's'" in str(fetch.error)
    assert "member 1 has left the view" in str(fetch.error)


def test_a_slower_offer_leaves_the_stripes_to_the_others() -> None:
    network = Network()
    data = random_bytes(8 * STRIPE)
    network.members[2].transfer.offer("s", {"a": data})
    into = {"a": np.empty_like(data)}
    fetch = network.fetch(into, (1, 2, 3), a=digest(data))
    fetch.run()
    assert fetch.error is None
    assert set(network.given) == {2}


@pytest.mark.parametrize("bad", [{1}, {2}, {1, 3}, {2, 3}])
def test_wrong_bytes_are_fetched_again_from_one_donor_after_the_other(bad: set[int]) -> None:
    network = Network()
    data, other = random_bytes(9 * STRIPE), random_bytes(9 * STRIPE)
    other[::STRIPE] ^= 1
    for member in (1, 2, 3):
        given = other if member in bad else data
        network.members[member].transfer.offer("s", {"a": given, "b": data})
    into = {"a": np.empty_like(data), "b": np.empty_like(data)}
    fetch = network.fetch(into, (1, 2, 3), a=digest(data), b=digest(data))
    fetch.run()
    assert fetch.error is None
    assert into["a"].tobytes() == into["b"].tobytes() == data.tobytes()


def test_where_all_give_wrong_bytes_array_state_and_donors_are_named() -> None:
    network = Network()
    data = random_bytes(9 * STRIPE)
    for member in (1, 2):
        network.members[member].transfer.offer("s", {"a": data})
    fetch = network.fetch({"a": np.empty_like(data)}, (1, 2), a=b"\1" * 16)
    fetch.run()
    said = str(fetch.error)
    assert "array 'a' of state 's'" in said
    for member in (1, 2):
        assert f"member {member} gave bytes with digest {digest(data).hex()}, not 0101" in said
    # It is over: what still comes is written nowhere.
    network.members[0].transfer.install(network.members[0].world)
    assert not network.messages


def test_the_death_of_the_last_donor_with_right_bytes_ends_it() -> None:
    network = Network()
    data = random_bytes(9 * STRIPE)
    network.members[1].transfer.offer("s", {"a": data ^ 1})
    network.members[2].transfer.offer("s", {"a": data})
    fetch = network.fetch({"a": np.empty_like(data)}, (1, 2), a=digest(data))
    fetch.run(lambda: len(network.given) == 9 + 2)  # the second time, of one alone
    network.view((0, 1, 3))
    fetch.run()
    assert "member 1 gave bytes with digest" in str(fetch.error)
    assert "member 2 has left the view" in str(fetch.error)


def test_a_donor_with_another_array_of_that_name_is_left_out() -> None:
    network = Network()
    data = random_bytes(9 * STRIPE)
    network.members[1].transfer.offer("s", {"a": data[:-1]})
    network.members[2].transfer.offer("s", {"b": data})
    network.members[3].transfer.offer("s", {"a": data})
    into = {"a": np.empty_like(data)}
    fetch = network.fetch(into, (1, 2, 3), a=digest(data))
    fetch.run()
    assert fetch.error is None
    assert set(network.given) == {3}
    fetch = network.fetch(into, (0, 1, 2), a=digest(data))
    fetch.run()
    assert f"member 1 offers {data.nbytes - 1} bytes, not {data.nbytes}" in str(fetch.error)
    assert "member 2 offers no such array" in str(fetch.error)
    assert "member 0" not in str(fetch.error)


def test_answers_to_an_earlier_fetch_are_not_taken_for_those_of_a_later() -> None:
    network = Network()
    old, new = random_bytes(2 * STRIPE, 1), random_bytes(2 * STRIPE, 2)
    network.members[1].transfer.offer("s", {"a": old, "b": old})
    network.members[2].transfer.offer("s", {"b": old[1:]})
    fetch = network.fetch({"a": np.empty_like(old), "b": np.empty_like(old)}, (2,), a=b"", b=b"")
    fetch.run()  # fails
    assert fetch.error is not None
    held: list[Any] = []
    fetch = network.fetch({"a": np.empty_like(old)}, (1,), a=digest(old))
    fetch.run(lambda: bool(network.messages) and network.messages[0][2] is Kind.STRIPE)
    held.append(network.messages[0])
    fetch.run()
    network.members[1].transfer.offer("s", {"a": new})
    into = {"a": np.empty_like(new)}
    fetch = network.fetch(into, (1,), a=digest(new))
    fetch.run(lambda: bool(network.messages))
    network.messages.appendleft(held[0])
    fetch.run()
    assert fetch.error is None
    assert into["a"].tobytes() == new.tobytes()


def test_what_is_sent_is_a_copy_and_a_withdrawn_offer_is_free() -> None:
    network = Network()
    data = random_bytes(2 * STRIPE)
    expected = data.copy()
    network.members[1].transfer.offer("s", {"a": data})
    into = {"a": np.empty_like(data)}
    fetch = network.fetch(into, (1,), a=digest(data))

    def last_is_sent() -> bool:
        return len(network.given) == 1 and network.messages[0][2] is Kind.STRIPE

    fetch.run(last_is_sent)
    network.members[1].transfer.withdraw("s")
    data[:] = 0
    fetch.run()
    assert fetch.error is None
    assert into["a"].tobytes() == expected.tobytes()


def test_arrays_that_cannot_be_moved_as_they_are_are_refused_by_name() -> None:
    transfer = Network().members[0].transfer
    strided = np.zeros((4, 4)).T[:2]
    with pytest.raises(ValueError, match=r"'a' of state 's' is not contiguous"):
        transfer.offer("s", {"a": strided})
    with pytest.raises(ValueError, match=r"'a' of state 's' is not contiguous"):
        transfer.fetch("s", {"a": strided}, {"a": b""}, [1])
    constant = np.zeros(4)
    constant.setflags(write=False)
    with pytest.raises(ValueError, match=r"'a' of state 's' cannot be written to"):
        transfer.fetch("s", {"a": constant}, {"a": b""}, [1])

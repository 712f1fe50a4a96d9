"""The parameter server without MPI: placement, formulas, letters, and ranks in one process."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpift.core import events
from mpift.core.membership import View
from mpift.errors import KeyLostError, StalePushError
from mpift.launch.story import Story
from mpift.launch.verdict import Ending, judge
from mpift.parameter_server import SGD, ParameterServer
from mpift.parameter_server.client import _Call
from mpift.parameter_server.hub import Hub
from mpift.parameter_server.letters import Letter, Letters
from mpift.parameter_server.optimizers import Assign, ServerOptimizer
from mpift.parameter_server.placement import holders
from mpift.parameter_server.server import Surroundings
from mpift.parameter_server.tables import Key, Table, Verb
from mpift.transport.messages import Kind
from mpift.transport.parcels import Parcel
from mpift.transport.part import Post
from mpift.transport.solo import SoloWorld

# -- placement -------------------------------------------------------------------------------------


def test_a_death_moves_only_what_the_dead_one_held_and_its_backups_take_over() -> None:
    for key in map("layer{}.weight".format, range(200)):
        primary, backup = holders(key, range(5))
        for dead in range(5):
            after = holders(key, [m for m in range(5) if m != dead])
            if dead == primary:
                assert after[0] == backup
            elif dead == backup:
                assert after[0] == primary
            else:
                assert after == (primary, backup)


def test_keys_spread_evenly_over_members() -> None:
    held = [holders(f"layer{number}", range(8)) for number in range(4000)]
    for place in (0, 1):
        counts = Counter(pair[place] for pair in held)
        assert all(400 < counts[member] < 600 for member in range(8)), counts


def test_a_member_alone_holds_everything_without_a_backup() -> None:
    assert holders("a", [3]) == (3, None)


# -- letters ---------------------------------------------------------------------------------------


class Wire:
    """Parcels that come to the other end when they are let."""

    def __init__(self) -> None:
        self.handlers: dict[Kind, Callable[[Parcel], None]] = {}
        self.under_way: deque[Parcel] = deque()

    def register(self, kind: Kind, handler: Callable[[Parcel], None]) -> None:
        self.handlers[kind] = handler

    def send(self, kind: Kind, member: int, text: str, data: np.ndarray) -> None:
        assert data.flags.c_contiguous
        self.under_way.append(Parcel(kind, 7, text, data.view(np.uint8).reshape(-1).copy()))

    def deliver(self) -> None:
        while self.under_way:
            parcel = self.under_way.popleft()
            self.handlers[parcel.kind](parcel)


def test_a_letter_comes_as_it_was_sent_whatever_its_arrays_are() -> None:
    wire, arrived = Wire(), list[Letter]()
    letters = Letters(wire, arrived.append)  # type: ignore[arg-type]
    large = np.arange(100_000, dtype=np.float32)
    arrays = [np.arange(3.0), large, np.empty(0, np.int8), np.array([True]), large[::-1].copy()]
    for numbers in ([5, -1, 1 << 60], []):
        letters.send(1, Letter(7, 3, 2, numbers, arrays))
    wire.deliver()
    assert [list(letter.numbers) for letter in arrived] == [[5, -1, 1 << 60], []]
    for letter in arrived:
        assert (letter.sender, letter.server, letter.verb) == (7, 3, 2)
        for found, sent in zip(letter.arrays, arrays, strict=True):
            np.testing.assert_array_equal(found.view(sent.dtype), sent)
            assert not found.flags.writeable


def test_what_is_left_of_a_letter_in_a_new_view_is_no_part_of_another() -> None:
    wire, arrived = Wire(), list[Letter]()
    letters = Letters(wire, arrived.append)  # type: ignore[arg-type]
    large = np.zeros(100_000, np.float32)
    letters.send(1, Letter(7, 0, 1, [1], [large]))
    wire.handlers[Kind.PARAMETERS](wire.under_way.popleft())
    letters.forget()
    letters.send(1, Letter(7, 0, 1, [2], []))
    wire.deliver()
    assert [letter.numbers for letter in arrived] == [[2]]


# -- what the launcher is told ---------------------------------------------------------------------


def test_lost_keys_are_told_in_words_and_kept_for_the_summary() -> None:
    story = Story(4)
    for member, keys in ((0, ("b", "a")), (3, ("a",))):
        event = events.decode(events.encode(events.KeysLost(1.5, member, keys)))
        assert event == events.KeysLost(1.5, member, keys)
        (notice,) = story.handle(event)
        assert notice.warning
        assert "a" in notice.text
    assert judge(story, Ending(0)).summary["keys_lost"] == ["a", "b"]


# -- ranks in one process --------------------------------------------------------------------------


class Cluster:
    """Hubs of several members. Nothing happens by itself: ``run`` does all that is queued, in an
    order that is the same each time. Updates are applied when ``works``."""

    def __init__(self, size: int, optimizer: ServerOptimizer, keys: dict[str, Any], **more: Any):
        self.works = True
        self.view = View(0, tuple(range(size)))
        self.calls: deque[Callable[[], None]] = deque()
        self.jobs: deque[Callable[[], None]] = deque()
        self.mail: deque[tuple[int, int, Parcel]] = deque()
        self.lost: list[tuple[str, ...]] = []
        self.hubs: dict[int, Hub] = {}
        self.servers: dict[int, ParameterServer] = {}
        arrays = {name: np.array(value) for name, value in keys.items()}
        table = Table(
            0,
            tuple(Key(name, array.shape, array.dtype) for name, array in arrays.items()),
            optimizer,
            more.get("staleness"),
        )
        for member in self.view.members:
            self.hubs[member] = self.hub(member)
            first = [array.reshape(-1) for array in arrays.values()]
            surroundings = Surroundings(
                self.hubs[member], member, self.lost.append, lambda: Waiting(self)
            )
            self.servers[member] = ParameterServer(table, first, self.view, surroundings)
        self.run()

    def hub(self, member: int) -> Hub:
        parcels = MemberParcels(self, member)
        hub = Hub(Post(None, parcels, self.calls.append, lambda: None))  # type: ignore[arg-type]
        hub.work = lambda batch, then: self.jobs.append(lambda: then(batch()))  # type: ignore[method-assign]
        self.parcels = getattr(self, "parcels", {}) | {member: parcels}
        hub.install(self.world(member))
        return hub

    def world(self, member: int) -> Any:
        world = SoloWorld()
        world.member, world.view = member, self.view
        return world

    def run(self) -> None:
        while self.calls or self.mail or (self.jobs and self.works):
            if self.calls:
                self.calls.popleft()()
            elif self.mail:
                _, receiver, parcel = self.mail.popleft()
                if receiver in self.view.members:
                    self.parcels[receiver].handlers[parcel.kind](parcel)
            else:
                self.jobs.popleft()()

    def die(self, *members: int) -> None:
        """These are gone, and so is what is under way."""
        left = [m for m in self.view.members if m not in members]
        self.view = self.view.successor(self.view.epoch + 1, left)
        self.mail.clear()
        for member in left:
            self.hubs[member].fault()
        for member in left:
            self.hubs[member].install(self.world(member))
        self.run()


class MemberParcels(Wire):
    """The parcels of one member of a cluster."""

    def __init__(self, cluster: Cluster, member: int) -> None:
        super().__init__()
        self._cluster, self._member = cluster, member

    def send(self, kind: Kind, member: int, text: str, data: np.ndarray) -> None:
        parcel = Parcel(kind, self._member, text, data.reshape(-1).view(np.uint8).copy())
        self._cluster.mail.append((self._member, member, parcel))


class Waiting:
    """Instead of a wait, everything that is queued is done."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __enter__(self) -> None:
        self._cluster.run()

    def __exit__(self, *_: object) -> None:
        pass


def names_held_by(size: int, *held: int) -> str:
    """A key that these members hold, primary first."""
    names = (f"key{number}" for number in range(10_000))
    return next(n for n in names if holders(n, range(size))[: len(held)] == held)


def test_a_pull_is_answered_while_updates_wait_to_be_applied() -> None:
    key = names_held_by(3, 1, 2)
    cluster = Cluster(3, SGD(1.0), {key: np.zeros(2)})
    cluster.servers[0].push(key, np.ones(2), 0)
    cluster.works = False  # from now on every push waits for ever
    calls = [_open_push(cluster, writer, base=1) for writer in (0, 2)]
    assert len(cluster.jobs) == 1  # one is being applied, the other one is queued
    for reader in (0, 1, 2):
        value, version = cluster.servers[reader].pull(key)
        assert (value.tolist(), version) == ([-1.0, -1.0], 1)
    assert not any(call.done.is_set() for call in calls)
    cluster.works = True
    cluster.run()
    assert all(call.done.is_set() for call in calls)
    assert cluster.servers[0].pull(key).version == 3


def _open_push(cluster: Cluster, member: int, base: int = 0) -> Any:
    """A push to the only key that nobody waits for."""
    client = cluster.servers[member]._client
    row = np.array(cluster.servers[member].table.optimizer.settings)
    call = _Call(Verb.PUSH, next(client._numbers), {0: base}, {0: (row, np.ones(2))})
    client._calls[call.number] = call
    client._ask(call, call.asks)
    cluster.run()
    return call


def test_an_update_is_not_visible_before_the_backup_has_it() -> None:
    key = names_held_by(3, 1, 2)
    cluster = Cluster(3, SGD(1.0), {key: np.zeros(2)})
    taken = cluster.parcels[2].handlers[Kind.PARAMETERS]
    cluster.parcels[2].handlers[Kind.PARAMETERS] = lambda _: None  # the backup hears nothing
    call = _open_push(cluster, 0)
    assert not call.done.is_set()
    assert cluster.servers[0].pull(key).version == 0
    cluster.parcels[2].handlers[Kind.PARAMETERS] = taken
    cluster.die()  # a new view of the same members: it's sent again
    assert call.done.is_set()
    value, version = cluster.servers[0].pull(key)
    assert (value.tolist(), version) == ([-1.0, -1.0], 1)


@pytest.mark.parametrize("dead", [1, 2])
def test_a_push_under_way_when_a_holder_dies_counts_once(dead: int) -> None:
    key = names_held_by(4, 1, 2)
    for moment in range(1, 12):
        cluster = Cluster(4, SGD(1.0), {key: np.zeros(2)})
        run, cluster.run = cluster.run, lambda: None  # type: ignore[method-assign]
        call = _open_push(cluster, 0)
        cluster.run = run  # type: ignore[method-assign]
        for _ in range(moment):  # so many things happen before the death
            if cluster.mail:
                _, receiver, parcel = cluster.mail.popleft()
                cluster.parcels[receiver].handlers[parcel.kind](parcel)
            elif cluster.jobs:
                cluster.jobs.popleft()()
        cluster.jobs.clear() if dead == 1 else None
        cluster.die(dead)
        assert call.done.is_set(), moment
        for member in (0, 3):
            value, version = cluster.servers[member].pull(key)
            assert (value.tolist(), version) == ([-1.0, -1.0], 1), moment
        # The copy on the new backup is whole: it survives the next death too.
        cluster.die(*(m for m in holders(key, cluster.view.members)[:1] if m != 0))
        assert cluster.servers[0].pull(key).version == 1


def test_a_key_is_lost_only_if_both_holders_die_before_there_is_a_copy() -> None:
    key, other = names_held_by(4, 1, 2), names_held_by(4, 0, 3)
    cluster = Cluster(4, SGD(1.0), {key: np.zeros(2), other: np.zeros(2)})
    cluster.die(1, 2)
    assert cluster.lost == [(key,)]
    for member in (0, 3):
        server = cluster.servers[member]
        for call in (
            lambda: server.pull(key),  # noqa: B023, called at once
            lambda: server.push(key, np.ones(2), 0),  # noqa: B023
            lambda: server.pull_many([key, other]),  # noqa: B023
        ):
            with pytest.raises(KeyLostError, match=f"'{key}'") as caught:
                call()
            assert caught.value.keys == (key,)
        assert server.push(other, np.ones(2), server.pull(other).version) > 0
    cluster.die(holders(key, cluster.view.members)[0])
    with pytest.raises(KeyLostError):
        next(cluster.servers[m] for m in cluster.view.members).pull(key)


def test_down_to_one_member_nothing_is_lost_if_they_die_one_by_one() -> None:
    keys = {f"key{number}": np.zeros(2) for number in range(20)}
    cluster = Cluster(5, SGD(1.0, momentum=0.5), keys)
    for version, dead in enumerate((4, 0, 2, 1)):
        server = cluster.servers[3]
        for key in keys:
            server.push(key, np.ones(2), version)
        cluster.die(dead)
    found = cluster.servers[3].pull_many(list(keys))
    assert {version for _, version in found.values()} == {4}
    assert len({value.tobytes() for value, _ in found.values()}) == 1
    assert cluster.lost == []


def test_a_stale_push_in_a_batch_is_refused_and_the_others_count() -> None:
    cluster = Cluster(2, SGD(1.0), {"a": np.zeros(1), "b": np.zeros(1)}, staleness=0)
    server = cluster.servers[0]
    server.push("a", np.ones(1), 0)
    pushed = server.push_many({"a": (np.ones(1), 0), "b": (np.ones(1), 0)})
    assert pushed.versions == {"b": 1}
    with pytest.raises(StalePushError, match=r"'a' .*version 0, 1 behind the newest, 1; stal.*=0"):
        raise pushed.stale["a"]


def test_settings_travel_with_a_push() -> None:
    cluster = Cluster(3, SGD(1.0), {"a": np.zeros(1)})
    server = cluster.servers[1]
    server.push("a", np.ones(1), 0, settings=SGD(0.25).settings)
    assert server.pull("a").value.tolist() == [-0.25]
    with pytest.raises(ValueError, match="1 settings for 'a', not 6"):
        server.push("a", np.ones(1), 1, settings=[0.1])


def test_letters_that_come_before_a_server_is_open_are_kept_for_it() -> None:
    cluster = Cluster(2, Assign(), {"a": np.zeros(1)})
    hub, handled = cluster.hubs[0], list[Letter]()

    class Served:
        busy = False

        def change(self, view: View) -> None:
            pass

        def handle(self, letter: Letter) -> None:
            handled.append(letter)

        def turn(self, now: float) -> None:
            pass

    for number in (1, 0, 2):
        hub._deliver(Letter(1, number, 3, [number]))
    cluster.run()
    hub.open(1, Served())
    assert [letter.server for letter in handled] == [1]
    hub.fault()
    hub.open(2, Served())
    assert [letter.server for letter in handled] == [1]
    hub.close(1)
    hub._deliver(Letter(1, 1, 3, [1]))  # a late one to a closed server is dropped
    assert len(handled) == 1

"""The server's side: the shards that this rank holds, and what it tells clients and other holders.

A thin shell around ``core.versions``, on the service thread. A pull is answered from the committed
version in the turn in which it comes: it waits for no update, applied or queued. Updates are
applied by a thread of their own (``hub.Worker``), since a large array takes longer than the loop
may stand still. Answers and copies are gathered, and leave as one letter a receiver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from mpift.core import versions
from mpift.core.membership import View
from mpift.core.versions import Done, Shard, Update, Version
from mpift.parameter_server.letters import Letter
from mpift.parameter_server.optimizers import State
from mpift.parameter_server.placement import holders
from mpift.parameter_server.tables import Found, Table, Verb, grouped

# (key, new state) of each update that the worker has applied
Results = list[tuple[int, State]]


@dataclass(slots=True)
class _Outgoing:
    """What is to be sent once all events of a turn are handled."""

    jobs: list[tuple[int, versions.Apply]] = field(default_factory=list)
    # By client and serial.
    answers: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    copies: dict[int, list[tuple[int, Version]]] = field(default_factory=lambda: defaultdict(list))
    receipts: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    lost: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Links:
    """What the server's side needs of its surroundings; all are used on the service thread."""

    send: Callable[[int, Letter], None]  # to a member; letters to those who are gone are dropped
    # (on another thread, then with its result on the service thread); batches keep their order
    work: Callable[[Callable[[], Results], Callable[[Results], None]], None]
    lost: Callable[[tuple[str, ...]], None]  # these keys are lost


class Shards:
    """All keys of one parameter server, as member ``member`` sees them."""

    def __init__(
        self,
        table: Table,
        member: int,
        first: Iterable[np.ndarray],
        founding: View,
        links: Links,
    ) -> None:
        """``first`` has the values of version 0, dtype[n] each; ``founding`` is the view in which
        all ranks knew them."""
        self._table = table
        self._member = member
        self._links = links
        self._outgoing = _Outgoing()
        self._moving: set[int] = set()  # keys with an update or a copy under way
        self._shards: list[Shard] = []
        for key, value in zip(table.keys, first, strict=True):
            primary, backup = holders(key.name, founding.members)
            state = table.optimizer.first(value) if member in (primary, backup) else None
            version = Version(0, state)
            shard = Shard.founded(member, primary, backup, version, table.staleness)
            self._shards.append(shard)

    @property
    def busy(self) -> bool:
        """Whether an update or a copy is under way, so that others wait for this rank."""
        return bool(self._moving)

    def change(self, view: View) -> None:
        """A new view is in force."""
        for index, key in enumerate(self._table.keys):
            self._feed(index, versions.ViewChanged(*holders(key.name, view.members)))
        self._flush()

    def handle(self, letter: Letter) -> None:
        """Take in a letter of a client or another holder."""
        match letter.verb:
            case Verb.PUSH:
                self._push(letter)
            case Verb.PULL:
                self._pull(letter)
            case Verb.COPY:
                self._take(letter)
            case Verb.COPIED:
                for index, number in grouped(letter.numbers, 2):
                    self._feed(index, versions.Acknowledged(number))
        self._flush()

    # -- in ----------------------------------------------------------------------------------------

    def _push(self, letter: Letter) -> None:
        serial, *rest = letter.numbers
        items = grouped(rest, 2)
        settings = self._table.settings_of(letter.arrays[0], len(items))
        for (index, base), row, array in zip(items, settings, letter.arrays[1:], strict=True):
            payload = (array.view(self._table.keys[index].dtype), row.tolist())
            update = Update(letter.sender, serial, base, payload)
            self._feed(index, versions.Pushed(update))

    def _pull(self, letter: Letter) -> None:
        """Answered at once, whatever else is under way."""
        call, *rest = letter.numbers
        numbers, arrays = [call], []
        for index, least in grouped(rest, 2):
            shard = self._shards[index]
            committed = shard.committed
            if shard.lost or committed is None:
                numbers += [index, Found.LOST, -1]
            elif committed.number < least:
                numbers += [index, Found.NOT_YET, committed.number]
            else:
                numbers += [index, Found.HERE, committed.number]
                arrays.append(committed.value.value)
        self._send(letter.sender, Verb.PULLED, numbers, arrays)

    def _take(self, letter: Letter) -> None:
        numbers = list(letter.numbers)
        for array in letter.arrays:
            index, number, steps, clients = numbers[:4]
            stop = 4 + 3 * clients
            done = tuple(Done(*entry) for entry in grouped(numbers[4:stop], 3))
            numbers = numbers[stop:]
            key = self._table.keys[index]
            rows = array.view(key.dtype).reshape(1 + self._table.optimizer.slots, key.size)
            version = Version(number, State(rows, steps), done)
            self._feed(index, versions.Received(version))

    def _applied(self, results: Results) -> None:
        """The worker is through with a batch."""
        for index, state in results:
            self._feed(index, versions.Applied(state))
        self._flush()

    # -- out ---------------------------------------------------------------------------------------

    def _feed(self, index: int, event: versions.Event) -> None:
        """Nothing is sent here: a send may fail, and what follows must be taken in all the same."""
        shard, instructions = self._shards[index].handle(event)
        self._shards[index] = shard
        if shard.applying is not None or shard.flying is not None:
            self._moving.add(index)
        else:
            self._moving.discard(index)
        out = self._outgoing
        for instruction in instructions:
            match instruction:
                case versions.Apply():
                    out.jobs.append((index, instruction))
                case versions.Replicate(backup, version):
                    out.copies[backup].append((index, version))
                case versions.Acknowledge(primary, number):
                    out.receipts[primary] += [index, number]
                case versions.Answer():
                    asked = (instruction.client, instruction.serial)
                    out.answers[asked] += [index, instruction.outcome, instruction.number]
                case versions.Lost():
                    out.lost.append(index)

    def _flush(self) -> None:
        """Send what has been gathered; jobs first, since a send may fail."""
        out, self._outgoing = self._outgoing, _Outgoing()
        if out.jobs:
            jobs, apply = out.jobs, self._table.optimizer.apply
            self._links.work(
                lambda: [(i, apply(job.version.value, *job.update.payload)) for i, job in jobs],
                self._applied,
            )
        if out.lost:
            self._links.lost(tuple(self._table.keys[index].name for index in out.lost))
        for backup, copies in out.copies.items():
            self._send_copies(backup, copies)
        for primary, numbers in out.receipts.items():
            self._send(primary, Verb.COPIED, numbers)
        for (client, serial), numbers in out.answers.items():
            self._send(client, Verb.PUSHED, [serial, *numbers])

    def _send_copies(self, backup: int, copies: list[tuple[int, Version]]) -> None:
        numbers: list[int] = []
        for index, version in copies:
            numbers += [index, version.number, version.value.steps, len(version.done)]
            for done in version.done:
                numbers += [done.client, done.serial, done.number]
        arrays = [version.value.rows for _, version in copies]
        self._send(backup, Verb.COPY, numbers, arrays)

    def _send(
        self, member: int, verb: Verb, numbers: list[int], arrays: list[np.ndarray] | None = None
    ) -> None:
        letter = Letter(self._member, self._table.number, verb, numbers, arrays or ())
        self._links.send(member, letter)

"""Parcels: headers and bytes that belong together, their order, and what a fault leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpift.core.membership import View
from mpift.transport.mailbox import Mailbox
from mpift.transport.messages import MESSAGE_TAG, Kind, Message, decode
from mpift.transport.parcels import Parcel, Parcels
from mpift.transport.solo import SoloWorld

KIND = Kind.RECORD


class Wire:
    """The control communicator of member 1 of three: what is sent and awaited, by hand."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, Any]] = []  # (rank, tag, buffer)
        self.awaited: list[tuple[int, int, Any]] = []
        self.requests: list[object] = []  # of parcels, sends and receives as they were started

    def Isend(self, buffer: Any, dest: int, tag: int) -> object:
        self.sent.append((dest, tag, buffer))
        return self._request(tag)

    def Irecv(self, buffer: Any, source: int, tag: int) -> object:
        self.awaited.append((source, tag, buffer))
        return self._request(tag)

    def _request(self, tag: int) -> object:
        request = object()
        if tag != MESSAGE_TAG:
            self.requests.append(request)
        return request


class Rank:
    """Mailbox and parcels of member 1."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.world: Any = SoloWorld()
        self.world.member, self.world.control = 1, self.wire
        self.mailbox = Mailbox()
        self.parcels = Parcels(self.mailbox)
        self.got: list[Parcel] = []
        self.parcels.register(KIND, self.got.append)
        self.enter(View(0, (0, 1, 2)))

    def enter(self, view: View) -> None:
        self.world.view = view
        self.mailbox.install(self.world)
        self.parcels.install(self.world)

    def hear(self, sender: int, size: int, tag: int, text: str, epoch: int = 0) -> None:
        self.mailbox.deliver(Message(KIND, epoch, sender, f"{size} {tag} {text}"))

    def arrive(self, tag: int, *values: int) -> None:
        """The bytes that were last awaited with this tag are here."""
        buffer = next(b for _, t, b in reversed(self.wire.awaited) if t == tag)
        buffer[:] = values
        moving = self.parcels._moving
        self.parcels.complete([i for i, s in enumerate(moving) if s.buffers[0] is buffer])

    @property
    def texts(self) -> list[str]:
        return [parcel.text for parcel in self.got]


def headers(rank: Rank) -> list[str]:
    found = [decode(bytes(buffer)) for _, tag, buffer in rank.wire.sent if tag == MESSAGE_TAG]
    return [message.text for message in found if message is not None]


def test_a_parcel_that_is_sent_has_a_header_with_its_size_and_tag_and_then_its_bytes() -> None:
    rank = Rank()
    data = np.arange(6, dtype=np.int16).reshape(2, 3)
    rank.parcels.send(KIND, 2, "two words", data)
    (_, header_tag, _), (to, tag, sent) = rank.wire.sent
    assert (header_tag, to) == (MESSAGE_TAG, 2)
    assert headers(rank) == [f"12 {tag} two words"]
    assert sent.tobytes() == data.tobytes()
    with pytest.raises(ValueError, match="contiguous"):
        rank.parcels.send(KIND, 2, "", data.T)


def test_what_arrives_is_handed_on_whole_with_its_text_and_sender() -> None:
    rank = Rank()
    rank.hear(2, 3, 70, "two words")
    assert rank.wire.awaited[-1][:2] == (2, 70)
    assert not rank.got
    rank.arrive(70, 1, 2, 3)
    (parcel,) = rank.got
    assert (parcel.kind, parcel.sender, parcel.text) == (KIND, 2, "two words")
    assert parcel.data.tolist() == [1, 2, 3]


def test_parcels_of_one_sender_keep_their_order_and_those_of_others_pass() -> None:
    rank = Rank()
    rank.hear(0, 1, 70, "first")
    rank.hear(0, 1, 71, "second")
    rank.hear(0, 0, 72, "third, of no bytes")
    rank.hear(2, 1, 73, "another's")
    rank.arrive(71, 1)
    assert rank.texts == []
    rank.arrive(73, 1)
    assert rank.texts == ["another's"]
    rank.arrive(70, 0)
    assert rank.texts == ["another's", "first", "second", "third, of no bytes"]


def test_a_parcel_of_no_bytes_needs_no_second_message() -> None:
    rank = Rank()
    rank.parcels.send(KIND, 2, "", np.empty((0, 4)))
    assert len(rank.wire.sent) == 1
    assert not rank.parcels.requests
    rank.hear(2, 0, 70, "")
    assert rank.texts == [""]
    assert rank.got[0].data.shape == (0,)


def test_a_header_that_comes_while_requests_are_looked_at_moves_none_of_them() -> None:
    rank = Rank()
    rank.parcels.send(KIND, 0, "", np.ones(1, np.uint8))
    rank.parcels.send(KIND, 2, "", np.ones(1, np.uint8))
    second = rank.parcels.requests[1].request
    # The loop has gathered the requests, the mailbox hears of a parcel, and only then is told
    # that the first send has left.
    rank.hear(2, 4, 70, "not here yet")
    rank.parcels.complete([0])
    assert rank.texts == []
    assert rank.parcels.requests[0].request is second
    rank.arrive(70, 1, 2, 3, 4)
    assert rank.texts == ["not here yet"]


def test_what_a_handler_sends_is_watched_too() -> None:
    rank = Rank()
    rank.parcels.register(
        KIND, lambda parcel: rank.parcels.send(KIND, parcel.sender, "", parcel.data)
    )
    rank.hear(2, 1, 70, "")
    rank.arrive(70, 5)
    assert [request.request for request in rank.parcels.requests] == rank.wire.requests[-1:]


def test_bytes_whose_header_nobody_took_are_not_taken_for_a_later_parcels() -> None:
    sender, receiver = Rank(), Rank()
    for _ in range(2):
        sender.parcels.send(KIND, 0, "", np.ones(1, np.uint8))
    first, second = (tag for _, tag, _ in sender.wire.sent if tag != MESSAGE_TAG)
    assert first != second
    receiver.hear(2, 1, second, "")  # the first came when there was no handler
    assert receiver.wire.awaited[-1][:2] == (2, second)


def test_after_many_parcels_tags_begin_anew_within_what_mpi_promises() -> None:
    rank = Rank()
    for _ in range(33_000):
        rank.parcels.send(KIND, 0, "", np.ones(1, np.uint8))
    tags = [tag for _, tag, _ in rank.wire.sent if tag != MESSAGE_TAG]
    assert min(tags) > 3
    assert max(tags) == 32767
    assert tags[0] in tags[1:]


def test_a_fault_keeps_every_buffer_that_mpi_may_still_use_and_loses_what_is_under_way() -> None:
    rank = Rank()
    kept = np.ones(8)
    rank.parcels.send(KIND, 0, "", kept)
    rank.hear(0, 1, 70, "lost")
    rank.hear(0, 1, 71, "here, but after the lost one")
    rank.arrive(71, 1)
    moving = [started.buffers[0] for started in rank.parcels._moving]
    assert len(moving) == 2
    assert np.shares_memory(moving[0], kept)
    rank.parcels.fault()
    assert not rank.parcels.requests
    assert [started.buffers[0] for started in rank.parcels._quarantine] == moving
    rank.enter(View(1, (0, 1)))
    rank.hear(0, 1, 70, "of the new view", epoch=1)
    assert rank.wire.awaited[-1][2] is not moving[1]
    rank.arrive(70, 9)
    assert rank.texts == ["of the new view"]


def test_a_header_of_another_epoch_is_no_parcel() -> None:
    rank = Rank()
    rank.hear(2, 0, 70, "old", epoch=7)
    assert rank.texts == []


def test_a_member_is_found_by_its_rank_in_the_present_view() -> None:
    rank = Rank()
    rank.enter(View(1, (1, 2)))
    rank.parcels.send(KIND, 2, "", np.ones(1, np.uint8))
    rank.hear(2, 1, 70, "", epoch=1)
    assert {to for to, _, _ in rank.wire.sent} == {1}
    assert rank.wire.awaited[-1][0] == 1


def test_a_handler_that_fails_does_not_get_the_parcel_again() -> None:
    rank = Rank()

    def fail(parcel: Parcel) -> None:
        rank.got.append(parcel)
        raise OSError("MPI is gone")

    rank.parcels.register(KIND, fail)
    with pytest.raises(OSError, match="gone"):
        rank.hear(2, 0, 70, "once")
    rank.parcels.register(KIND, rank.got.append)
    rank.hear(2, 0, 71, "the next")
    assert rank.texts == ["once", "the next"]

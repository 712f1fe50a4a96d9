"""What a watchdog is asked: how a rank is, or to fence it; who is answered, and who believed."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

from mpift.transport import processes
from mpift.transport.inquiries import Answer, Fence, Inquire, State, ask
from tests.unit.watched_nodes import TOKEN, Node, node_of, pair, until

__all__ = ["node_of", "pair"]  # fixtures for these tests


def test_a_fence_kills_and_answers_once_the_rank_is_gone(pair: Node) -> None:
    answer = pair.ask(Fence(1, 3, "suspected by 0\nand 2"))
    assert answer == Answer(State.GONE, "fenced in epoch 3: suspected by 0 and 2")
    process = pair.liveness.slot(1).registered
    assert process is not None
    assert processes.has_ended(process.pid, process.start_time)
    assert pair.verdict(1) == answer.detail
    assert pair.alive() == [0]


def test_a_fence_of_an_older_view_is_refused(pair: Node) -> None:
    pair.tell(1, "epoch 4")
    until(lambda: pair.liveness.slot(1).epoch == 4, "the rank is in a newer view")
    answer = pair.ask(Fence(1, 3, "late"))
    assert answer == Answer(State.REFUSED, "it is in epoch 4, newer than 3")
    assert pair.state(1) == State.ALIVE


def test_members_of_other_nodes_are_unknown(pair: Node) -> None:
    assert pair.state(77) == State.UNKNOWN
    assert pair.ask(Fence(77, 1, "")) == pair.ask(Inquire(77))


def test_who_does_not_know_the_token_is_not_answered_and_fences_nobody(pair: Node) -> None:
    assert pair.ask(Inquire(0), token="guess") is None
    assert pair.ask(Fence(0, 9, "guess"), token="guess") is None
    pair.ticks(3)
    assert (pair.alive(), pair.state(0)) == ([0, 1], State.ALIVE)


def test_garbage_slow_and_many_connections_do_not_disturb(pair: Node) -> None:
    address = ("127.0.0.1", pair.liveness.watchdog.port)
    held = []
    try:
        for junk in (b"\0" * 100_000, b"\n" * 10, os.urandom(600), "é FENCE 0 1 x\n".encode()):
            with (
                socket.create_connection(address, 5) as connection,
                contextlib.suppress(ConnectionError),
            ):
                connection.sendall(junk)
                assert connection.recv(100) == b""  # closed without an answer
        for _ in range(150):  # more than are kept
            connection = socket.create_connection(address, 5)
            connection.send(b"abc")
            held.append(connection)
        assert pair.state(0) == State.ALIVE
        for connection in held:  # whoever says too little for too long is closed too
            connection.settimeout(5)
            with contextlib.suppress(ConnectionError):
                assert connection.recv(100) == b""
    finally:
        for connection in held:
            connection.close()
    pair.ticks(3)
    assert pair.alive() == [0, 1]


def test_the_asker_waits_no_longer_than_its_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        assert ask(mute.getsockname(), TOKEN, Inquire(0), 0.2) is None
        assert 0.15 < time.monotonic() - began < 1.0
        port = mute.getsockname()[1]
    assert ask(("127.0.0.1", port), TOKEN, Inquire(0), 0.2) is None


def test_an_answer_to_another_question_is_not_believed() -> None:
    """Whoever got the watchdog's port may replay what it once heard."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        answers = [b"0" * 64 + b" gone \n", b"gone\n", b"\xff" * 3000, b""]

        def reply() -> None:
            for answer in answers:
                connection, _ = impostor.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer)

        replies = threading.Thread(target=reply)
        replies.start()
        for _ in answers:
            assert ask(impostor.getsockname(), TOKEN, Inquire(0), 5.0) is None
        replies.join(10)

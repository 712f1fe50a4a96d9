"""Questions to a node's watchdog over TCP: is that process gone, and: see to it that it is.

One line in, one line out, then the connection is closed::

    MAC NONCE STATE MEMBER            MAC WORD DETAIL
    MAC NONCE FENCE MEMBER EPOCH REASON

The MAC is an HMAC-SHA256 keyed by the job's token, which itself never crosses this connection; that
of the answer covers the request's nonce, so that neither an older answer nor whoever else got the
port can declare a live rank gone. A request with a wrong MAC is closed without an answer.

Bounds: a request has ``REQUEST_BYTES_MAX`` bytes and ``_REQUEST_SECONDS``; ``_CONNECTIONS_MAX``
connections at a time, of which the oldest without a whole request yields to a new one. The server
never blocks; the client never waits beyond its timeout.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

REQUEST_BYTES_MAX = 512

_REASON_CHARS_MAX = 60  # 240 bytes at most, and the rest of the line needs under 200
_REQUEST_SECONDS = 1.0
_CONNECTIONS_MAX = 64
_BACKLOG = 128


class State(enum.Enum):
    """What a watchdog answers."""

    GONE = "gone"  # the kernel says so
    STOOD_DOWN = "stood-down"  # gone, since its part of the job ended: no death
    ALIVE = "alive"
    SILENT = "silent"  # alive, but its counter stands still
    STOPPED = "stopped"
    UNKNOWN = "unknown"  # no rank of this node, or it has not registered
    REFUSED = "refused"  # the fence is of an older view than the rank's own


_WORDS = frozenset(state.value for state in State)


@dataclass(frozen=True, slots=True)
class Inquire:
    """How is this member?"""

    member: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Kill this member, and answer once it is gone; asked in the view of ``epoch``."""

    member: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """``detail`` is for people: the verdict on one that is gone, else what is seen of it."""

    state: State
    detail: str = ""


Request = Inquire | Fence


def ask(
    address: tuple[str, int], token: str, request: Request, timeout_seconds: float
) -> Answer | None:
    """Ask the watchdog at this numeric address and port; None if it can't be reached in time, or
    what answered doesn't know the token."""
    deadline = time.monotonic() + timeout_seconds
    nonce = secrets.token_hex(16)
    text = f"{nonce} {_written(request)}"
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    received = b""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(_left(deadline))
            connection.connect(address)
            connection.settimeout(_left(deadline))
            connection.sendall(f"{_mac(token, 'ask', text)} {text}\n".encode())
            while b"\n" not in received and len(received) <= 2 * REQUEST_BYTES_MAX:
                connection.settimeout(_left(deadline))
                more = connection.recv(REQUEST_BYTES_MAX)
                if not more:
                    break
                received += more
    except OSError:
        return None
    return _read_answer(received, token, nonce)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _written(request: Request) -> str:
    if isinstance(request, Inquire):
        return f"STATE {request.member}"
    reason = " ".join(request.reason.split())[:_REASON_CHARS_MAX]
    return f"FENCE {request.member} {request.epoch} {reason}"


def _mac(token: str, purpose: str, text: str) -> str:
    return hmac.new(token.encode(), f"{purpose} {text}".encode(), hashlib.sha256).hexdigest()


def _read_answer(line: bytes, token: str, nonce: str) -> Answer | None:
    mac, _, text = line.decode(errors="replace").partition("\n")[0].partition(" ")
    if not hmac.compare_digest(mac.encode(), _mac(token, "answer", f"{nonce} {text}").encode()):
        return None
    word, _, detail = text.partition(" ")
    return Answer(State(word), detail) if word in _WORDS else None


def read_request(line: bytes, token: str) -> tuple[str, Request] | None:
    """(nonce, request) of a received line; None unless it is whole and of this job."""
    mac, _, text = line.decode(errors="replace").rstrip("\n").partition(" ")
    if not hmac.compare_digest(mac.encode(), _mac(token, "ask", text).encode()):
        return None
    # Whoever knows the token writes requests as ``_written`` does, unless of another version.
    with contextlib.suppress(ValueError, IndexError):
        nonce, verb, *rest = text.split(" ", 4)
        if verb == "STATE":
            return nonce, Inquire(int(rest[0]))
        if verb == "FENCE":
            member, epoch, reason = rest
            return nonce, Fence(int(member), int(epoch), reason)
    return None


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    deadline: float
    received: bytes = b""
    asked: tuple[str, Request] | None = field(default=None)


# (request, whether it is the last chance): an answer, or None for: not yet.
Answering = Callable[[Request, bool], Answer | None]


class Server:
    """The watchdog's side. ``answer`` is asked again until it answers or ``wait_seconds`` are over.

    Whoever owns the selector calls ``handle`` with each key whose data is this server or one of its
    connections, and ``attend`` several times a second.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        token: str,
        answer: Answering,
        wait_seconds: float,
    ) -> None:
        self._selector = selector
        self._token = token
        self._answer = answer
        self._wait_seconds = wait_seconds
        self._connections: list[_Connection] = []  # oldest first
        self._listener = listener
        self.port: int = listener.getsockname()[1]
        selector.register(listener, selectors.EVENT_READ, self)

    def handle(self, data: object, now: float) -> None:
        """Something came in for the server itself or for a connection."""
        if data is self:
            self._accept(now)
        elif isinstance(data, _Connection) and data in self._connections:
            self._receive(data, now)

    def attend(self, now: float) -> None:
        """Answer who waits for a rank's end, close who took too long."""
        for connection in list(self._connections):
            late = now >= connection.deadline
            if connection.asked is not None:
                self._try_to_answer(connection, last=late)
            elif late:
                self._close(connection)

    def close(self) -> None:
        for connection in list(self._connections):
            self._close(connection)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self, now: float) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # it went away again, or there are no more descriptors
            return
        if len(self._connections) >= _CONNECTIONS_MAX:
            silent = (c for c in self._connections if c.asked is None)
            self._close(next(silent, self._connections[0]))
        accepted.setblocking(False)
        connection = _Connection(accepted, now + _REQUEST_SECONDS)
        self._connections.append(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _receive(self, connection: _Connection, now: float) -> None:
        try:
            more = connection.socket.recv(REQUEST_BYTES_MAX + 1)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        connection.received += more
        if not more or connection.asked or len(connection.received) > REQUEST_BYTES_MAX:
            self._close(connection)  # it went away, or says more than it may
        elif connection.received.endswith(b"\n"):
            connection.asked = read_request(connection.received, self._token)
            connection.deadline = now + self._wait_seconds
            if connection.asked is None:
                self._close(connection)
            else:
                self._try_to_answer(connection, last=False)

    def _try_to_answer(self, connection: _Connection, last: bool) -> None:
        assert connection.asked is not None
        nonce, request = connection.asked
        answer = self._answer(request, last)
        if answer is None and not last:
            return
        if answer is not None:
            text = f"{answer.state.value} {answer.detail}"
            line = f"{_mac(self._token, 'answer', f'{nonce} {text}')} {text}\n"
            # One that doesn't fit an empty send buffer is lost; the client asks again.
            with contextlib.suppress(OSError):
                connection.socket.send(line.encode())
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()


def listen(address: str, port: int) -> socket.socket:
    """A listening socket at this numeric address and port, so that a restarted watchdog is found
    where the first one was; else at another port, and if need be for this node alone."""
    places = [(address, port), (address, 0), ("127.0.0.1", 0)]
    for host, number in places[:-1]:
        with contextlib.suppress(OSError):
            return _listening(host, number)
    return _listening(*places[-1])


def _listening(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener

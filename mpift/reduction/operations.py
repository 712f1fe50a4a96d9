"""Collectives on numpy arrays that survive faults: the workload of lane 0.

Every operation has two parts in turn. A small all-gather of headers tells each rank what the others
called: a mismatch is an error on every rank and the job goes on, and ranks that have left count as
neutral. Then the payload moves. After a fault the survivors redo the operation among themselves,
unless one of them has its result already and hands it over.

Sums of float32 and float64 may travel compressed; everything else is exact whatever was asked for.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpift.core.lockstep import Deliver, Start
from mpift.core.turns import Turns
from mpift.errors import MismatchError, MpiftError, RootLostError
from mpift.reduction import codecs
from mpift.reduction.codecs import Compressor
from mpift.reduction.compressed_arrays import CompressedArray
from mpift.transport.lane import Started
from mpift.transport.world import LaneReport, World

OPERATORS = ("sum", "min", "max", "product")
MAX_DIMENSIONS = 8

_DTYPES = tuple(
    np.dtype(name)
    for name in ("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64".split())
)


class Kind(enum.IntEnum):
    """What an operation does; JOINED stands for a rank that has left its loop."""

    JOINED = 0
    BARRIER = 1
    ALLREDUCE = 2
    BROADCAST = 3
    ALLGATHER = 4
    OPEN_LANE = 5
    CHANGE_LAYOUT = 6


class _Field(enum.IntEnum):
    """Where a header, int64[16], says what."""

    MEMBER = 0
    KIND = 1
    DTYPE = 2
    OPERATOR = 3
    ROOT = 4  # a member id
    COMPRESSOR = 5  # its type
    THRESHOLD = 6  # its threshold, as the bits of a float64
    DIMENSIONS = 7
    SHAPE = 8


_HEADER_FIELDS = _Field.SHAPE + MAX_DIMENSIONS


class _Status(enum.IntEnum):
    """How an operation ended, carried along in a hand-over."""

    DONE = 0
    MISMATCH = 1
    ROOT_LOST = 2


_ERRORS: dict[_Status, type[MpiftError]] = {
    _Status.MISMATCH: MismatchError,
    _Status.ROOT_LOST: RootLostError,
}


@dataclass(slots=True)
class Operation:
    """One call on this rank. ``root`` is a member id. The array is never written to."""

    kind: Kind
    array: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    operator: str = "sum"
    root: int = -1
    compressor: Compressor = Compressor()  # noqa: RUF009, it is frozen
    result: np.ndarray | None = None
    error: MpiftError | None = None
    reduced_in: int = -1  # epoch of the view that carried it out
    participants: int = 0  # ranks that called it; those that had left are not counted
    done: threading.Event = field(default_factory=threading.Event)

    def header(self, member: int) -> np.ndarray:
        """int64[16]: what this rank says it calls; see ``_Field``."""
        shape, compressor = self.array.shape, self._compressor_in_use()
        row = np.zeros(_HEADER_FIELDS, np.int64)
        row[: _Field.SHAPE] = (
            member,
            self.kind,
            _DTYPES.index(self.array.dtype),
            OPERATORS.index(self.operator),
            self.root,
            codecs.TYPES.index(compressor.type),
            np.float64(compressor.threshold).view(np.int64),
            len(shape),
        )
        row[_Field.SHAPE : _Field.SHAPE + len(shape)] = shape
        return row

    def _compressor_in_use(self) -> Compressor:
        """What is given counts for sums of floating-point numbers; all others are exact."""
        summed = self.kind is Kind.ALLREDUCE and self.operator == "sum"
        return self.compressor if summed and self.array.dtype.kind == "f" else Compressor()

    def check(self) -> None:
        """Raise ``MismatchError`` for what no header can carry."""
        if self.array.dtype not in _DTYPES:
            names = ", ".join(map(str, _DTYPES))
            raise MismatchError(f"arrays of dtype {self.array.dtype} are not supported: {names}")
        if self.array.ndim > MAX_DIMENSIONS:
            raise MismatchError(
                f"an array of {self.array.ndim} dimensions is not supported, at most"
                f" {MAX_DIMENSIONS}"
            )


class Operations:
    """See the module's docstring; a ``Workload`` of two buckets in turn: headers, payload."""

    buckets = 2

    rules = None  # everybody is waited for

    def __init__(self, member: int, done: Callable[[], None]) -> None:
        """``done`` is called on the service thread whenever an operation of this rank is over."""
        self._member = member
        self._done = done
        self._joined = Operation(Kind.JOINED)
        self._current: Operation | None = None
        self._headers = np.zeros((0, _HEADER_FIELDS), np.int64)
        self._received = np.zeros(0, np.uint8)
        self._compressed: CompressedArray | None = None  # the payload's way, if it is compressed
        self._status = _Status.DONE
        self._participants = 0

    def begin(self, operation: Operation) -> None:
        """The operation of the open round; called once its predecessor is done."""
        self._current = operation

    # -- the two parts -----------------------------------------------------------------------------

    def start(self, world: World, comm: Any, start: Start) -> Sequence[Started]:
        operation = (self._current or self._joined) if start.real else self._joined
        self._compressed = None
        if start.bucket == 0:
            mine = operation.header(self._member)
            self._headers = np.empty((comm.size, _HEADER_FIELDS), np.int64)
            request = comm.Iallgather(mine, self._headers)
            return [Started(request, (mine, self._headers))]
        self._participants = self.participants(0)
        self._status, error = _inspect(self._headers, world.view.members)
        if self._status is not _Status.DONE:
            self._received = np.frombuffer(error.encode(), np.uint8).copy()
            return []
        return self._move(world, comm, operation)

    def proceed(self, world: World, comm: Any, bucket: int) -> Sequence[Started]:
        return [] if self._compressed is None else self._compressed.proceed(world.control)

    def participants(self, bucket: int) -> int:
        return int(np.count_nonzero(self._headers[:, _Field.KIND] != Kind.JOINED))

    def _move(self, world: World, comm: Any, operation: Operation) -> Sequence[Started]:
        """The payload; ranks that have left take their part's shape from the others' headers."""
        first = self._headers[self._headers[:, _Field.KIND] != Kind.JOINED][0]
        kind, dtype, shape = _described(first)
        if kind is Kind.ALLREDUCE:
            self._received = np.empty(shape, dtype)
            return self._reduce(world, comm, operation, first)
        if kind is Kind.BROADCAST:
            root = int(first[_Field.ROOT])
            self._received = (
                operation.array.copy() if root == self._member else np.empty(shape, dtype)
            )
            request = comm.Ibcast(self._received, root=world.view.rank_of(root))
            return [Started(request, (self._received,))]
        if kind is Kind.ALLGATHER:
            return self._gather(comm, operation, shape[1:], dtype)
        self._received = np.zeros(0, np.uint8)
        return []

    def _reduce(
        self, world: World, comm: Any, operation: Operation, header: np.ndarray
    ) -> Sequence[Started]:
        """Combine all ranks' arrays into ``_received``."""
        joined = operation.kind is Kind.JOINED
        name, compressor = OPERATORS[int(header[_Field.OPERATOR])], _compressor_of(header)
        receive = self._received
        if compressor.compresses(receive.size):
            send = None if joined else operation.array
            self._compressed = CompressedArray(compressor.codec, send, receive)
            return self._compressed.start(world.control)
        neutral = _neutral(name, receive.dtype) if joined else 0
        send = np.full_like(receive, neutral) if joined else operation.array
        wire = (send, receive)
        if receive.dtype == np.bool_:  # MPI has no arithmetic on booleans: any and all, as in numpy
            wire = (_bytes(send), _bytes(receive))
            name = {"sum": "max", "product": "min"}.get(name, name)
        request = comm.Iallreduce(*wire, world.operator(name))
        return [Started(request, wire)]

    def _gather(
        self, comm: Any, operation: Operation, tail: tuple[int, ...], dtype: np.dtype
    ) -> Sequence[Started]:
        """All-gather along the first dimension, as bytes: any dtype, any length a rank."""
        active = self._headers[:, _Field.KIND] != Kind.JOINED
        lengths = np.where(active, self._headers[:, _Field.SHAPE], 0)
        row = int(np.prod(tail, dtype=np.int64)) * dtype.itemsize
        counts = (lengths * row).tolist()
        starts = np.concatenate(([0], np.cumsum(counts)[:-1])).tolist()
        joined = operation.kind is Kind.JOINED
        send = np.zeros(0, np.uint8) if joined else _bytes(operation.array)
        self._received = np.empty((int(lengths.sum()), *tail), dtype)
        receive = [_bytes(self._received), counts, starts, "B"]
        request = comm.Iallgatherv(send, receive)
        return [Started(request, (send, self._received, receive))]

    # -- results -----------------------------------------------------------------------------------

    def machine(self, epoch: int) -> Turns:
        return Turns(self.buckets, epoch=epoch)

    def note_late(self, round_: int, late: Sequence[int]) -> None:
        """Never: an operation waits for everybody."""

    def drop(self, buckets: frozenset[int]) -> None:
        """Never: an operation waits for everybody."""

    def give_back(self, buckets: frozenset[int]) -> None:
        """Never: an operation waits for everybody."""

    def deliver(self, deliver: Deliver) -> None:
        operation, self._current = self._current, None
        if operation is None:
            return  # this rank has left; the others' operation was theirs alone
        if self._status is _Status.DONE:
            operation.result = self._received
        else:
            operation.error = _ERRORS[self._status](self._received.tobytes().decode())
        operation.reduced_in = deliver.reduced_in
        operation.participants = self._participants
        self._done()
        operation.done.set()

    def report(self) -> tuple[int, int, int]:
        return self._received.nbytes, int(self._status), self._participants

    def result_to_give(self) -> Sequence[np.ndarray]:
        return [_bytes(self._received)] if self._received.nbytes else []

    def result_to_take(self, giver: LaneReport, wanted: bool) -> Sequence[np.ndarray]:
        data = np.empty(giver.result_bytes, np.uint8)
        if wanted:
            self._status, self._participants = _Status(giver.status), giver.participants
            self._received = self._shaped(data)
        return [data] if giver.result_bytes else []

    def _shaped(self, data: np.ndarray) -> np.ndarray:
        """``data``, still being received, seen as this rank's operation sees its result."""
        operation = self._current
        if operation is None or self._status is not _Status.DONE:
            return data
        array = operation.array
        if operation.kind is Kind.ALLGATHER:
            return data.view(array.dtype).reshape(-1, *array.shape[1:])
        if operation.kind in (Kind.ALLREDUCE, Kind.BROADCAST):
            return data.view(array.dtype).reshape(array.shape)
        return data

    def abandon(self, buckets: Sequence[int]) -> None:
        """Nothing more to do: every start makes fresh buffers."""
        self._compressed = None


def _bytes(array: np.ndarray) -> np.ndarray:
    """The same memory as a flat array of bytes."""
    return array.reshape(-1).view(np.uint8)


def _neutral(operator: str, dtype: np.dtype) -> Any:
    """The element that changes nothing under ``operator``."""
    if operator == "sum":
        return dtype.type(0)
    if operator == "product" or dtype == np.bool_:
        return dtype.type(operator != "max")
    bounds = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    if dtype.kind == "f":
        return dtype.type(np.inf if operator == "min" else -np.inf)
    return bounds.max if operator == "min" else bounds.min


def _described(row: np.ndarray) -> tuple[Kind, np.dtype, tuple[int, ...]]:
    shape = row[_Field.SHAPE : _Field.SHAPE + int(row[_Field.DIMENSIONS])]
    dtype = _DTYPES[int(row[_Field.DTYPE])]
    return Kind(int(row[_Field.KIND])), dtype, tuple(int(size) for size in shape)


def _compressor_of(row: np.ndarray) -> Compressor:
    threshold = float(row[_Field.THRESHOLD].view(np.float64))
    return Compressor(codecs.TYPES[int(row[_Field.COMPRESSOR])], threshold)


def _inspect(headers: np.ndarray, members: Sequence[int]) -> tuple[_Status, str]:
    """Whether all active ranks called the same, with the same result on every rank."""
    active = [row for row in headers if row[_Field.KIND] != Kind.JOINED]
    first = active[0]
    kind = Kind(int(first[_Field.KIND]))
    compared = [field for field in range(_HEADER_FIELDS) if field != _Field.MEMBER]
    if kind is Kind.ALLGATHER:
        compared.remove(_Field.SHAPE)  # the first dimension may differ
    for row in active[1:]:
        if not np.array_equal(row[compared], first[compared]):
            return _Status.MISMATCH, (
                f"ranks called different operations: rank {_rank(first, members)}"
                f" {_in_words(first)}, rank {_rank(row, members)} {_in_words(row)}"
            )
    if kind is Kind.BROADCAST:
        root = int(first[_Field.ROOT])
        if root not in [int(row[_Field.MEMBER]) for row in active]:
            return _Status.ROOT_LOST, (
                f"broadcast: its root, member {root}, is gone and nobody has its data;"
                " choose a root of the present view"
            )
    if kind in (Kind.OPEN_LANE, Kind.CHANGE_LAYOUT) and len(active) < len(headers):
        left = [_rank(row, members) for row in headers if row[_Field.KIND] == Kind.JOINED]
        what = "make a new optimizer" if kind is Kind.OPEN_LANE else "add, freeze or unfreeze"
        return _Status.MISMATCH, (
            f"ranks {left} have left already, so it is too late to {what} parameters:"
            " what they add to the others' rounds would no longer fit"
        )
    return _Status.DONE, ""


def _rank(row: np.ndarray, members: Sequence[int]) -> int:
    return members.index(int(row[_Field.MEMBER]))


def _in_words(row: np.ndarray) -> str:
    kind, dtype, shape = _described(row)
    words = kind.name.lower()
    if kind is Kind.ALLREDUCE:
        compressor = _compressor_of(row)
        way = "" if compressor == Compressor() else f", {compressor}"
        words += f" ({OPERATORS[int(row[_Field.OPERATOR])]}{way})"
    if kind is Kind.BROADCAST:
        words += f" from member {int(row[_Field.ROOT])}"
    return f"{words} of {dtype} {shape}"

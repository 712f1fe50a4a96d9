"""The heartbeat packet: what a member tells its observers in every interval, and how it is read.

A packet is one fixed little-endian record of ``PACKET_BYTES``. Nothing in it is believed before its
checksum is right, and reading never raises: what is no valid packet comes back as the ``Defect``
that it has. Of all versions, present and future, four things are the same, so that packets of
another version are told from damaged ones:

* bytes 0 to 3 are ``MAGIC``, bytes 4 and 5 the version;
* the last two bytes are the CRC-16/CCITT of everything before them;
* a packet has at most ``RECEIVE_BYTES``, the size of the buffer that a receiver provides.

They are looked at in this order: length within those bounds, magic, checksum, version, the exact
length of this version, values. So a flipped bit in the version field is a damaged packet and not a
newer one. Whether a packet is recent, or of this view, is for the caller to say.
"""

from __future__ import annotations

import binascii
import enum
import math
import struct
from dataclasses import dataclass

from mpift.errors import MpiftError

MAGIC = b"mpHB"
VERSION = 1

# Magic, version, status, member, incarnation, epoch, sequence, step, rounds, timestamp, the five
# shares of use, health.
_BODY = struct.Struct("<4sHHIIIQQQd5ff")
_VERSION = struct.Struct("<H")
# Big-endian, unlike the rest: only behind its data with the high byte first does the remainder
# catch every burst of up to 16 bits that reaches across the seam.
_CRC = struct.Struct(">H")
_HEAD_BYTES = len(MAGIC) + _VERSION.size

PACKET_BYTES = _BODY.size + _CRC.size
RECEIVE_BYTES = 256


class Status(enum.IntFlag):
    """What a member says about itself; any combination."""

    STARTING = 1
    TRAINING = 2
    CHECKPOINTING = 4
    DEGRADED = 8
    CRITICAL = 16
    STALLED = 32
    REBUILDING = 64
    LEAVING = 128
    DEVICE_FAULT = 256
    WAITING = 512  # its script waits for other ranks


_ALL_STATUS_BITS = sum(Status)


class Defect(enum.Enum):
    """Why bytes are no packet that can be believed."""

    SIZE = "its length is that of no packet"
    FOREIGN = "it does not begin as a heartbeat does"
    CORRUPT = "its checksum is wrong"
    OLDER = "it is of an older version of the format"
    NEWER = "it is of a newer version of the format"
    MALFORMED = "its checksum is right and its values are impossible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """One heartbeat. Raises ``MpiftError`` for values that a packet cannot carry.

    ``incarnation`` tells processes of the same member apart; ``sequence`` counts the packets of an
    incarnation from 0. ``timestamp`` is the sender's clock in Unix seconds, for people: no decision
    may rest on it. ``epoch`` is that of the sender's view; ``rounds`` counts what it has completed,
    gradients and other operations alike. The five uses are shares from 0 to 1,
    ``health_score`` is not negative; each is None where unknown. They travel in single precision.
    """

    member: int
    incarnation: int
    epoch: int
    sequence: int
    step: int
    timestamp: float
    status: Status
    rounds: int = 0
    cpu: float | None = None
    memory: float | None = None
    disk: float | None = None
    network: float | None = None
    accelerator: float | None = None
    health_score: float | None = None

    def __post_init__(self) -> None:
        for name, limit in _INTEGERS:
            value = getattr(self, name)
            if not 0 <= value < limit:
                raise MpiftError(f"heartbeat packet: {name} is {value}, not in 0 to {limit - 1}")
        if not 0.0 <= self.timestamp < math.inf:
            raise MpiftError(
                f"heartbeat packet: timestamp is {self.timestamp}, not a finite number from 0"
            )
        if self.status & ~_ALL_STATUS_BITS:
            raise MpiftError(f"heartbeat packet: status {int(self.status):#x} has unknown bits")
        for name, largest in _FRACTIONS:
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= largest:
                raise MpiftError(f"heartbeat packet: {name} is {value}, not in 0 to {largest:.3g}")


_INTEGERS = (
    ("member", 1 << 31),  # what MPI can number
    ("incarnation", 1 << 32),
    ("epoch", 1 << 32),
    ("sequence", 1 << 64),
    ("step", 1 << 64),
    ("rounds", 1 << 64),
)
_FLOAT32_MAX = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
_FRACTIONS = (
    ("cpu", 1.0),
    ("memory", 1.0),
    ("disk", 1.0),
    ("network", 1.0),
    ("accelerator", 1.0),
    ("health_score", _FLOAT32_MAX),
)


def encode_into(packet: Packet, buffer: bytearray) -> None:
    """Write ``packet`` to the first ``PACKET_BYTES`` of ``buffer``, which must hold as many."""
    _BODY.pack_into(
        buffer,
        0,
        MAGIC,
        VERSION,
        packet.status,
        packet.member,
        packet.incarnation,
        packet.epoch,
        packet.sequence,
        packet.step,
        packet.rounds,
        packet.timestamp,
        _on_wire(packet.cpu),
        _on_wire(packet.memory),
        _on_wire(packet.disk),
        _on_wire(packet.network),
        _on_wire(packet.accelerator),
        _on_wire(packet.health_score),
    )
    _CRC.pack_into(buffer, _BODY.size, checksum(memoryview(buffer)[: _BODY.size]))


def encode(packet: Packet) -> bytes:
    """The ``PACKET_BYTES`` of ``packet``."""
    buffer = bytearray(PACKET_BYTES)
    encode_into(packet, buffer)
    return bytes(buffer)


def decode(data: bytes | bytearray | memoryview) -> Packet | Defect:
    """The packet that ``data`` holds, all of it, or what is wrong with it. Never raises."""
    view = memoryview(data)
    if not _HEAD_BYTES + _CRC.size <= len(view) <= RECEIVE_BYTES:
        return Defect.SIZE
    if view[: len(MAGIC)] != MAGIC:
        return Defect.FOREIGN
    if _CRC.unpack(view[-_CRC.size :])[0] != checksum(view[: -_CRC.size]):
        return Defect.CORRUPT
    version = _VERSION.unpack_from(view, len(MAGIC))[0]
    if version != VERSION:
        return Defect.OLDER if version < VERSION else Defect.NEWER
    if len(view) != PACKET_BYTES:
        return Defect.SIZE
    _, _, status, member, incarnation, epoch, sequence, step, rounds, timestamp, *shares = (
        _BODY.unpack_from(view)
    )
    cpu, memory, disk, network, accelerator, health_score = map(_from_wire, shares)
    try:
        return Packet(
            member=member,
            incarnation=incarnation,
            epoch=epoch,
            sequence=sequence,
            step=step,
            rounds=rounds,
            timestamp=timestamp,
            status=Status(status),
            cpu=cpu,
            memory=memory,
            disk=disk,
            network=network,
            accelerator=accelerator,
            health_score=health_score,
        )
    except MpiftError:
        return Defect.MALFORMED


def checksum(data: bytes | bytearray | memoryview) -> int:
    """CRC-16/CCITT with all ones at the start (polynomial 0x1021, high bit first, not inverted)."""
    return binascii.crc_hqx(data, 0xFFFF)


def _on_wire(value: float | None) -> float:
    return math.nan if value is None else value


def _from_wire(value: float) -> float | None:
    return None if math.isnan(value) else value

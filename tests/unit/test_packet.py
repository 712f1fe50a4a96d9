"""Heartbeat packets: what is written is read, and nothing else ever is."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.core.packet import (
    MAGIC,
    PACKET_BYTES,
    RECEIVE_BYTES,
    VERSION,
    Defect,
    Packet,
    Status,
    checksum,
    decode,
    encode,
    encode_into,
)
from mpift.errors import MpiftError

shares = st.none() | st.floats(0.0, 1.0, width=32)
packets = st.builds(
    Packet,
    member=st.integers(0, 2**31 - 1),
    incarnation=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 2**32 - 1),
    sequence=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**64 - 1),
    timestamp=st.floats(0.0, allow_infinity=False),
    status=st.integers(0, sum(Status)).map(Status),
    cpu=shares,
    memory=shares,
    disk=shares,
    network=shares,
    accelerator=shares,
    health_score=st.none() | st.floats(0.0, width=32, allow_infinity=False),
)

PLAIN = Packet(
    member=3,
    incarnation=1,
    epoch=2,
    sequence=1234,
    step=567,
    rounds=890,
    timestamp=1.75e9,
    status=Status.TRAINING | Status.DEGRADED,
    cpu=0.5,
    memory=0.25,
)


def sealed(body: bytes) -> bytes:
    """``body`` with the checksum that belongs to it."""
    return body + struct.pack(">H", checksum(body))


def replaced(offset: int, part: bytes) -> bytes:
    """The plain packet with ``part`` at ``offset``, and a right checksum."""
    body = bytearray(encode(PLAIN)[:-2])
    body[offset : offset + len(part)] = part
    return sealed(bytes(body))


def flipped(data: bytes, mask: int) -> bytes:
    """``data`` with the bits of ``mask`` flipped; its lowest bit is the last one that is sent."""
    return (int.from_bytes(data, "big") ^ mask).to_bytes(len(data), "big")


@given(packets)
def test_what_is_written_is_read(packet: Packet) -> None:
    assert decode(encode(packet)) == packet


def test_the_layout_stays_what_it_is() -> None:
    # Members of one job may run different releases; a new layout needs a new version.
    assert encode(PLAIN) == bytes.fromhex(
        """
        6d704842 0100 0a00 03000000 01000000 02000000 d204000000000000 3702000000000000
        7a03000000000000 00000060b813da41 0000003f 0000803e 0000c07f 0000c07f 0000c07f 0000c07f
        838d
        """
    )


def test_the_checksum_is_the_one_that_catalogues_call_ccitt_false() -> None:
    assert checksum(b"123456789") == 0x29B1


def test_a_packet_is_written_into_a_buffer_that_exists() -> None:
    buffer = bytearray(PACKET_BYTES + 8)
    encode_into(PLAIN, buffer)
    assert buffer == encode(PLAIN) + bytes(8)
    with pytest.raises(struct.error):
        encode_into(PLAIN, bytearray(PACKET_BYTES - 1))


@given(st.binary(max_size=2 * RECEIVE_BYTES))
def test_no_byte_string_crashes_the_reader_or_passes_without_its_checksum(data: bytes) -> None:
    result = decode(data)
    if data[-2:] != struct.pack(">H", checksum(data[:-2])):
        assert isinstance(result, Defect)


@given(st.binary(min_size=PACKET_BYTES - 8, max_size=PACKET_BYTES - 8))
def test_any_body_with_a_right_checksum_is_a_packet_or_malformed(body: bytes) -> None:
    result = decode(sealed(MAGIC + struct.pack("<H", VERSION) + body))
    assert isinstance(result, Packet) or result is Defect.MALFORMED


def test_every_flip_of_one_or_two_bits_is_noticed() -> None:
    valid = encode(PLAIN)
    bits = [1 << i for i in range(8 * PACKET_BYTES)]
    for i, first in enumerate(bits):
        assert isinstance(decode(flipped(valid, first)), Defect)
        for second in bits[:i]:
            assert isinstance(decode(flipped(valid, first | second)), Defect)


def test_every_place_of_a_burst_is_noticed() -> None:
    valid = encode(PLAIN)
    for pattern in (0b11, 0b101, 0x8001, 0xFFFF, 0xA5A5, 0x8811):
        for place in range(8 * PACKET_BYTES - 16):
            assert isinstance(decode(flipped(valid, pattern << place)), Defect)


@given(packets, st.integers(1, 2**16 - 1), st.integers(0, 8 * PACKET_BYTES - 16))
def test_a_burst_of_up_to_sixteen_bits_is_noticed(packet: Packet, burst: int, place: int) -> None:
    assert isinstance(decode(flipped(encode(packet), burst << place)), Defect)


@given(packets, st.integers(0, PACKET_BYTES - 1))
def test_a_packet_that_was_cut_short_is_no_packet(packet: Packet, length: int) -> None:
    assert isinstance(decode(encode(packet)[:length]), Defect)


@pytest.mark.parametrize("extra_bytes", [-20, 0, 40, RECEIVE_BYTES - PACKET_BYTES])
def test_other_versions_are_told_apart_whatever_their_length(extra_bytes: int) -> None:
    body = bytes(PACKET_BYTES - 8 + extra_bytes)
    newer = sealed(MAGIC + struct.pack("<H", VERSION + 1) + body)
    older = sealed(MAGIC + struct.pack("<H", VERSION - 1) + body)
    assert decode(newer) is Defect.NEWER
    assert decode(older) is Defect.OLDER


@pytest.mark.parametrize(
    ("data", "defect"),
    [
        (b"", Defect.SIZE),
        (MAGIC, Defect.SIZE),
        (bytes(RECEIVE_BYTES + 1), Defect.SIZE),
        (sealed(encode(PLAIN)[:-2] + b"x"), Defect.SIZE),
        (replaced(0, b"MPHB"), Defect.FOREIGN),
        (bytes(PACKET_BYTES), Defect.FOREIGN),
        (flipped(encode(PLAIN), 1 << 8 * (PACKET_BYTES - 5)), Defect.CORRUPT),  # the version
        (replaced(6, struct.pack("<H", 0x8000)), Defect.MALFORMED),  # a status that there is not
        (replaced(8, struct.pack("<i", -1)), Defect.MALFORMED),  # member
        (replaced(44, struct.pack("<d", float("inf"))), Defect.MALFORMED),  # timestamp
        (replaced(44, struct.pack("<d", -1.0)), Defect.MALFORMED),
        (replaced(52, struct.pack("<f", 1.001)), Defect.MALFORMED),  # CPU use
        (replaced(68, struct.pack("<f", -0.5)), Defect.MALFORMED),  # accelerator use
        (replaced(72, struct.pack("<f", float("inf"))), Defect.MALFORMED),  # health
    ],
)
def test_each_defect_is_called_by_its_name(data: bytes, defect: Defect) -> None:
    assert decode(data) is defect


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("member", -1),
        ("sequence", 2**64),
        ("timestamp", float("nan")),
        ("cpu", 1.5),
        ("health_score", float("nan")),
        ("status", 1 << 15),
    ],
)
def test_a_packet_that_nobody_could_read_cannot_be_made(field: str, value: float) -> None:
    with pytest.raises(MpiftError, match=field):
        dataclasses.replace(PLAIN, **{field: value})

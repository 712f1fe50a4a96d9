"""Control messages as bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpift.transport.messages import MESSAGE_BYTES, Kind, Message, decode, encode


@given(st.integers(0, 2**62), st.integers(0, 2**31), st.text(max_size=300))
def test_a_message_survives_its_bytes(epoch: int, sender: int, text: str) -> None:
    message = Message(Kind.FAREWELL, epoch, sender, text)
    data = encode(message)
    assert len(data) == MESSAGE_BYTES
    decoded = decode(data)
    assert decoded is not None
    assert (decoded.kind, decoded.epoch, decoded.sender) == (Kind.FAREWELL, epoch, sender)
    assert text.startswith(decoded.text)
    assert len(text.encode()) > 900 or decoded.text == text


@given(st.binary(max_size=MESSAGE_BYTES + 8))
def test_no_bytes_raise(data: bytes) -> None:
    decode(data)
    decode(data.ljust(MESSAGE_BYTES, b"\0"))


def test_an_unknown_kind_is_no_message() -> None:
    data = bytearray(encode(Message(Kind.FAREWELL, 1, 2, "x")))
    data[2] = 99
    assert decode(bytes(data)) is None

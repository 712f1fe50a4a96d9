"""Control messages between ranks: typed, stamped with epoch and sender, of one fixed size.

A message is a struct header and a short UTF-8 text. One size means one receive posted for all;
a text that does not fit is cut. Bytes that are no message decode to None, never to an error.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

MESSAGE_BYTES = 1024
MESSAGE_TAG = 1

# magic, kind, epoch, sender's member id, length of the text in bytes
_HEADER = struct.Struct("<HHqqI")
_MAGIC = 0x4D46
_TEXT_BYTES = MESSAGE_BYTES - _HEADER.size


class Kind(enum.IntEnum):
    """What a message says."""

    # "I am about to end with a failure": the text says why. Confirms the death that follows.
    FAREWELL = 1
    # The sender's suspects, all of them: member ids.
    SUSPECTS = 2
    # "Look at this member of your node": its id and whether to kill it (0 or 1).
    EXAMINE = 3
    # The answer: member id and what was found.
    FINDING = 4
    # "This part of the job ends": whether it may be started again (0 or 1), and the reason.
    END = 5
    # "All others wait for you": for how many seconds they have.
    STALLED = 6
    # Where the sender stands in a lane's rounds: lane, standing, round, operations done, for how
    # many seconds already.
    STANDING = 7
    # "Contribute what you have to this round": lane, round, and the members that are late for it.
    NUDGE = 8
    # "Nobody opens this round now": lane, round.
    DECLINE = 9
    # "All have left": lane, its last round.
    LANE_END = 10
    # "Give me your record of this round": lane, round.
    RECORD_WANTED = 11
    # The answer: lane, round, what it is, and the record with it.
    RECORD = 12
    # A word of the three-phase commit.
    COMMIT = 13
    # What the sender holds after a round: lane, round, 64 bits of a hash.
    DIGEST = 15
    # "Give me these bytes of an array": request, state, array, its size, offset, length.
    STRIPE_WANTED = 16
    # The answer: request, what it is, and the bytes with it.
    STRIPE = 17
    # "I wait for you, to compare our states": lane, round.
    EXAMINATION = 18
    # A letter between clients and holders of a parameter server, or a part of one.
    PARAMETERS = 20
    # A word between the ranks that save a checkpoint, with what belongs to it.
    CHECKPOINT = 21


# Kinds that are true whatever the view is.
LASTING = frozenset({Kind.FAREWELL, Kind.END})


@dataclass(frozen=True, slots=True)
class Message:
    """One control message; ``epoch`` is the sender's when it was sent."""

    kind: Kind
    epoch: int
    sender: int
    text: str = ""


def encode(message: Message) -> bytes:
    """``MESSAGE_BYTES`` bytes."""
    # Cut on a character's border: half a character would not decode.
    text = message.text.encode()[:_TEXT_BYTES].decode(errors="ignore").encode()
    header = _HEADER.pack(_MAGIC, message.kind, message.epoch, message.sender, len(text))
    return (header + text).ljust(MESSAGE_BYTES, b"\0")


def decode(data: bytes) -> Message | None:
    """The message in ``data``, or None if there is none."""
    if len(data) != MESSAGE_BYTES:
        return None
    magic, kind, epoch, sender, length = _HEADER.unpack_from(data)
    if magic != _MAGIC or length > _TEXT_BYTES:
        return None
    try:
        text = data[_HEADER.size : _HEADER.size + length].decode()
        return Message(Kind(kind), epoch, sender, text)
    except ValueError:
        return None

"""A replica's history: a running hash of which epoch reduced each of the rounds that it applied.

Two replicas with the same history have applied the same rounds, so what they hold may be mixed;
ranks that went separate ways have different ones from there on.
"""

from __future__ import annotations

import hashlib

NO_HISTORY = "0" * 16


def extended(history: str, round_: int, epoch: int) -> str:
    """The history after one more round: 16 hexadecimal digits."""
    return hashlib.blake2b(f"{history} {round_} {epoch}".encode(), digest_size=8).hexdigest()

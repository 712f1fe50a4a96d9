"""A replica's history: a running hash of which epoch reduced each of the rounds that it applied.

Two replicas with the same history have applied the same rounds, so what they hold may be mixed;
ranks that went separate ways have different ones from there on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

NO_HISTORY = "0" * 16


def extended(history: str, round_: int, epoch: int) -> str:
    """The history after one more round: 16 hexadecimal digits."""
    return hashlib.blake2b(f"{history} {round_} {epoch}".encode(), digest_size=8).hexdigest()


def joined(histories: Sequence[str]) -> str:
    """One history for several optimizers' rounds."""
    if len(histories) == 1:
        return histories[0]
    if not histories:
        return NO_HISTORY
    return hashlib.blake2b(" ".join(histories).encode(), digest_size=8).hexdigest()

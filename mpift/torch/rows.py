"""What ranks lay side by side in an examination, and how it is said what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from mpift.core.verification import Judgement
from mpift.torch.state import differences

# The first pieces of a row: what tensors there are, and the plain values. Tensors follow.
STRUCTURE, PLAIN, TENSORS = 0, 1, 2
TRAIL_BYTES = 8
SCHEDULERS = (
    "give a scheduler that steps once a step to optimizer.register_scheduler, or that of a late"
    " rank falls behind; change other settings on all ranks after the same round"
)
_DIGEST_BYTES = 16
_NAMES_SHOWN = 5


class Row:
    """What one rank holds: digests of its pieces, the plain values themselves, and, not compared,
    the trail of its settings, and whether it knows of itself that it is ``damaged``."""

    def __init__(
        self,
        structure: bytes,
        trail: bytes,
        plain: bytes,
        digests: Sequence[bytes],
        damaged: bool = False,
    ) -> None:
        self.structure, self.trail, self.plain, self.digests = structure, trail, plain, digests
        self.damaged = damaged

    @property
    def pieces(self) -> tuple[bytes, ...]:
        return (self.structure, xxhash.xxh3_128_digest(self.plain), *self.digests)

    def encode(self) -> np.ndarray:
        """uint8[n]."""
        count = 2 * len(self.digests) + self.damaged
        head = count.to_bytes(8, "little") + self.trail + self.structure
        return np.frombuffer(b"".join([head, *self.digests, self.plain]), np.uint8)

    @classmethod
    def decode(cls, data: np.ndarray) -> Row:
        raw = data.tobytes()
        (count, damaged), begin = divmod(int.from_bytes(raw[:8], "little"), 2), 8 + TRAIL_BYTES
        start = begin + _DIGEST_BYTES
        stop = start + count * _DIGEST_BYTES
        digests = [raw[i : i + _DIGEST_BYTES] for i in range(start, stop, _DIGEST_BYTES)]
        return cls(raw[begin:start], raw[8:begin], raw[stop:], digests, bool(damaged))


def beyond_repair(judgement: Judgement, rows: Mapping[int, Row], before: Mapping[int, Row]) -> bool:
    """Whether nothing but settings differs any more, and a repair has left them as they were. The
    same on all ranks, since it follows from the rows."""
    return all(
        wrong == (PLAIN,) and who in before and rows[who].plain == before[who].plain
        for who, wrong in judgement.deviating.items()
    )


def bytes_differing(old: bytes, new: bytes) -> int:
    """How many bytes of the longer one are others in the other, or not there."""
    return sum(a != b for a, b in zip(old, new, strict=False)) + abs(len(old) - len(new))


def shown(names: Sequence[str], separator: str = ", ") -> str:
    """The first few of them, and how many there are more."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return separator.join(names[:_NAMES_SHOWN]) + more


def no_majority(
    round_: int, judgement: Judgement, names: Sequence[str], rows: Mapping[int, Row]
) -> str:
    """What an examination in which no state has a majority says of the rows, and what to do.
    ``names`` are those of the tensors here."""
    known = {STRUCTURE: "what tensors there are", PLAIN: "settings"}
    pieces = [
        known.get(piece) or (names[piece - TENSORS] if piece - TENSORS < len(names) else "more")
        for piece in judgement.pieces
    ]
    groups = " | ".join(", ".join(map(str, group)) for group in judgement.groups)
    hint = ""
    if PLAIN in judgement.pieces:
        texts = list(dict.fromkeys(rows[group[0]].plain.decode() for group in judgement.groups))
        hint = f". Settings that differ: {shown(list(differences(*texts[:2])))}; {SCHEDULERS}"
    elif len({row.trail for row in rows.values()}) > 1:
        hint = f". Settings have differed in a round before; {SCHEDULERS}"
    return (
        f"the replicas differ after round {round_}, and no state is held by more than half of the"
        f" members: {groups} differ in {shown(pieces)}. Go on from a checkpoint; if they differ"
        " from the start on, call broadcast_parameters and broadcast_optimizer_state first."
        f" verify_every=0 lets them differ{hint}"
    )

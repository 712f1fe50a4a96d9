"""Who holds a key: rendezvous hashing (Thaler and Ravishankar 1998).

Each pair of key and member has a score, and the two members of the view with the highest ones hold
the key. So ranks need no table, keys spread evenly, and a death moves only what the dead one held:
its backups become primaries, and the next in line gets a copy.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def score(key: str, member: int) -> int:
    """XXH3-64 of the member id and the key."""
    return xxhash.xxh3_64_intdigest(f"{member}/{key}".encode())


def holders(key: str, members: Iterable[int]) -> tuple[int, int | None]:
    """Primary and backup among ``members``; no backup where there is only one."""
    line = sorted(members, key=lambda member: (score(key, member), member), reverse=True)
    return line[0], line[1] if len(line) > 1 else None

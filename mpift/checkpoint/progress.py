"""A reader that tells how far it is, for those who wait at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mpift.checkpoint.damage import Advance
from mpift.checkpoint.reading import Job, Reader


class CountingReader(Reader):
    """``advance`` is told of the raw bytes of every block that arrived, in any thread."""

    def __init__(self, root: Path, advance: Advance) -> None:
        super().__init__(root)
        self._advance = advance

    def read_many(self, jobs: Iterable[Job], threads: int) -> None:
        super().read_many(self._counted(jobs), threads)

    def _counted(self, jobs: Iterable[Job]) -> Iterator[Job]:
        for stored, spec, index, out, after in jobs:
            yield stored, spec, index, out, self._told(out.nbytes, after)

    def _told(self, size: int, after: Callable[[], None] | None) -> Callable[[], None]:
        def told() -> None:
            self._advance(size)
            if after is not None:
                after()

        return told

"""One file that all ranks write at once, instead of one a writer: training waits for it."""

from __future__ import annotations

from pathlib import Path

from mpift.checkpoint import shared_file
from mpift.checkpoint.directory import block_name
from mpift.checkpoint.durable import Disk
from mpift.checkpoint.group import Group
from mpift.checkpoint.manifest import order_of
from mpift.checkpoint.orders import Written
from mpift.checkpoint.saves import Capture
from mpift.errors import CheckpointError


class Together:
    """Raises ``CheckpointError`` where h5py has no MPI."""

    def __init__(self, group: Group, disk: Disk, root: Path) -> None:
        shared_file.require()
        self._group = group
        self._disk = disk
        self._root = root

    def ready(self, here: bool) -> bool:
        """Whether all ranks have their snapshots' arenas free; all call this. Else some would wait
        for the others in MPI, in vain."""
        return all(self._group.gather(here))

    def write(self, capture: Capture) -> tuple[Written | None, str]:
        """Write this rank's share together with all others': the part, or why there is none."""
        generation, step = order_of(capture.version)
        name = block_name(step, capture.origin.owners[0], self._group.epoch, 0, generation)
        try:
            part = self._group.collectively(
                lambda comm: shared_file.write_shared(
                    comm, self._disk, self._root, name, capture.arena
                )
            )
        except (CheckpointError, OSError) as error:
            return None, str(error)
        return Written(part.origin, part.encode()), ""

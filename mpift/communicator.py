"""``Communicator``: the MPI communicator wrapper, on numpy arrays, without torch.

Its operations are collective: all ranks call the same ones in the same order. A rank's death inside
one is no error: the survivors redo it among themselves, and ``size``, ``rank`` and ``epoch`` change
inside that call, at the same operation on every rank.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from mpift import runtime
from mpift.config import Config
from mpift.errors import MismatchError
from mpift.reduction.codecs import Compressor
from mpift.reduction.operations import OPERATORS, Kind, Operation

__all__ = ["Communicator", "Compressor"]


class Communicator:
    """All processes of the launch, or those of ``comm`` (an mpi4py communicator).

    Started without ``mpirun``, it has size 1 and loads no MPI. A context manager; at its end, or
    with ``free``, this rank leaves. ``compressor`` says how its sums of floating-point numbers
    travel, and is the same on all ranks: see ``allreduce``. Raises ``ValueError`` for anything else
    as a compressor.
    """

    def __init__(
        self,
        comm: Any = None,
        config: Config | None = None,
        compressor: Compressor | None = None,
    ) -> None:
        given: object = compressor
        if given is not None and not isinstance(given, Compressor):
            raise ValueError(
                "compressor must be None or a Compressor, such as Compressor('fp16'), not"
                f" {given!r}"
            )
        self._compressor = compressor or Compressor()
        self._runtime = runtime.start(comm, config)

    @property
    def rank(self) -> int:
        """This process's position in the present view."""
        return self._runtime.rank

    @property
    def size(self) -> int:
        """Live processes in the present view."""
        return self._runtime.view.size

    @property
    def epoch(self) -> int:
        """Number of the present view: 0 at the start, greater after each fault."""
        return self._runtime.view.epoch

    @property
    def members(self) -> tuple[int, ...]:
        """Member ids of the view in rank order: a member id is the rank at launch, for life."""
        return self._runtime.view.members

    def allreduce(self, array: ArrayLike, op: str = "sum") -> np.ndarray:
        """Combine ``array`` over all ranks.

        ``op`` is "sum", "min", "max" or "product". Shape and dtype must be the same everywhere;
        the result is a new array of that shape and dtype, with the same bits on every rank. Raises
        ``MismatchError`` on every rank if they differ; the job can go on.

        Sums of float32 and float64 go through the communicator's compressor, if it has one: each
        rank's values and the sum are rounded to its type (float64 to float32 first; with fp16 what
        is beyond 65504 becomes infinite), and added up in float32. Each call stands alone: what the
        compressor leaves out is lost. Integers, booleans, minima, maxima and products stay exact.
        """
        if op not in OPERATORS:
            raise MismatchError(f"unknown operator {op!r}, known: {', '.join(OPERATORS)}")
        operation = Operation(Kind.ALLREDUCE, _contiguous(array), op, compressor=self._compressor)
        return self._runtime.operate(operation)

    def broadcast(self, array: ArrayLike, root: int = 0) -> np.ndarray:
        """The array of rank ``root``, as a new array on every rank.

        Shape and dtype must be the same everywhere. Raises ``RootLostError`` on every rank if the
        root died before anybody had its data.
        """
        members = self._runtime.view.members
        if not 0 <= root < len(members):
            raise MismatchError(f"root {root} is not a rank of 0 to {len(members) - 1}")
        operation = Operation(Kind.BROADCAST, _contiguous(array), root=members[root])
        return self._runtime.operate(operation)

    def allgather(self, array: ArrayLike) -> np.ndarray:
        """All ranks' arrays, joined along the first dimension in rank order.

        Only the first dimension may differ between ranks; a scalar counts as one row. After a fault
        the result holds the survivors' rows.
        """
        rows = np.atleast_1d(_contiguous(array))
        return self._runtime.operate(Operation(Kind.ALLGATHER, rows))

    def barrier(self) -> None:
        """Wait until every live rank has called this."""
        self._runtime.operate(Operation(Kind.BARRIER))

    def free(self) -> None:
        """Leave: this rank takes no part any more, and waits until all others have left too."""
        runtime.shutdown()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error the others may be anywhere; the way out of the interpreter tells them.
        if kind is None:
            self.free()


def _contiguous(array: ArrayLike) -> np.ndarray:
    """C order; a copy only if needed."""
    given = np.asarray(array)
    return given if given.flags.c_contiguous else np.ascontiguousarray(given)

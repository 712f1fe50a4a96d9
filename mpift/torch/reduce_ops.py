"""The reduction operators of Horovod's API, by their names there."""

from __future__ import annotations

import enum


class ReduceOp(enum.Enum):
    """How values of all ranks are combined; the value is the operator that MPI carries out."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

"""The Horovod-compatible face for PyTorch: ``import mpift.torch as hvd``."""

import sys

if "torch" not in sys.modules:
    # torch must not fail over a torch_npu that can't be loaded; all below loads torch.
    from mpift.devices import cann

    cann.let_torch_load()
    del cann

from mpift import init, is_initialized, rank, report, shutdown, size
from mpift.checkpoint import CheckpointManager
from mpift.errors import (
    CheckpointDamagedError,
    CheckpointError,
    DeviceError,
    KeyLostError,
    MpiftError,
    StalePushError,
    StaleVersionError,
    VersionTimeoutError,
)
from mpift.parameter_server import SGD, Adagrad
from mpift.torch import elastic
from mpift.torch.async_optimizer import AsyncDistributedOptimizer
from mpift.torch.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    device,
    epoch,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from mpift.torch.compression import Compression, Compressor
from mpift.torch.device_faults import retry_on_device_fault
from mpift.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    digest,
)
from mpift.torch.loop import rounds
from mpift.torch.operations import (
    allgather,
    allreduce,
    allreduce_,
    barrier,
    broadcast,
    broadcast_,
)
from mpift.torch.optimizer import DistributedOptimizer
from mpift.torch.parameter_server import ParameterServer
from mpift.torch.reduce_ops import Average, Max, Min, Product, ReduceOp, Sum
from mpift.torch.sampler import ElasticSampler

# What scripts catch as HorovodInternalError is any error of ours.
HorovodInternalError = MpiftError

__all__ = [
    "SGD",
    "Adagrad",
    "AsyncDistributedOptimizer",
    "Average",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointManager",
    "Compression",
    "Compressor",
    "DeviceError",
    "DistributedOptimizer",
    "ElasticSampler",
    "HorovodInternalError",
    "KeyLostError",
    "Max",
    "Min",
    "MpiftError",
    "ParameterServer",
    "Product",
    "ReduceOp",
    "StalePushError",
    "StaleVersionError",
    "Sum",
    "VersionTimeoutError",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "device",
    "digest",
    "elastic",
    "epoch",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "report",
    "retry_on_device_fault",
    "rocm_built",
    "rounds",
    "shutdown",
    "size",
]

# Names of Horovod's API that scripts may ask for, so that the answer is better than Python's own.
_NOT_YET = {
    **dict.fromkeys(
        (
            "allreduce_async",
            "allreduce_async_",
            "allgather_async",
            "broadcast_async",
            "broadcast_async_",
            "alltoall_async",
            "synchronize",
            "poll",
        ),
        "use the calls without _async, which return the result",
    ),
    **dict.fromkeys(
        ("grouped_allreduce", "grouped_allgather", "alltoall", "reducescatter"),
        "use allreduce or allgather",
    ),
    **dict.fromkeys(
        ("ProcessSet", "add_process_set", "remove_process_set"),
        "use mpift.Communicator on a part of the launch",
    ),
    **dict.fromkeys(("start_timeline", "stop_timeline"), "leave it out, or use torch.profiler"),
    "sparse_allreduce_async": "use DistributedOptimizer(sparse_as_dense=True)",
    "check_extension": "leave it out: nothing is built",
    "num_rank_is_power_2": "leave it out",
    "Adasum": "use Average",
    "join": "a rank that leaves its loop counts as joined by itself",
    "SyncBatchNorm": "use torch.nn.BatchNorm2d and its like, whose statistics are each rank's own",
    "global_process_set": "leave it out",
}


def __getattr__(name: str) -> None:
    if name in _NOT_YET:
        raise AttributeError(f"hvd.{name} is not available in this version: {_NOT_YET[name]}")
    raise AttributeError(f"module 'mpift.torch' has no attribute {name!r}")

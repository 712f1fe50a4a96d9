"""A simulated NPU: a device of torch that runs on the CPU and behaves to the host as an NPU does.

``import mpift.testing.npu`` registers it as ``torch.npu`` and as the device type ``npu``, so that
what is written for torch_npu can be tested on any machine. Set ``MPIFT_NPU_BACKEND`` to
``mpift.testing.npu`` and mpift itself uses it where it would import torch_npu. The first import on
a machine builds it, which takes about a minute and needs g++ and ninja; ``python -m
mpift.testing.npu`` does that beforehand.

What is as on the device:

- Its memory can't be touched by the host: reading a device pointer crashes.
- Streams run beside the host and beside each other, and only events order them. Copies from and to
  pinned memory are asynchronous; those of pageable memory wait, whatever ``non_blocking`` says.
- A kernel sees what its own stream did before it and nothing else; its results appear on its
  stream. A forgotten ``wait_event``, ``wait_stream`` or ``record_stream`` gives wrong numbers:
  surely, if copies and kernels are told to take time (``set_copy_seconds``,
  ``set_kernel_seconds``). Freed memory that another stream still works on is filled with NaN.
- Errors are worded as torch_npu words them: ``inject``, ``stop_device``, ``restart_device``,
  ``check_uce_in_memory``. Memory runs out (``set_capacity``). The device hangs (``hang``). A forked
  child of a process that used the device can't use it.
- Each device has random numbers of its own: those of a CPU generator with the same seed.

What is not:

- Numbers are computed by the CPU's kernels, so they are equal to those of the CPU to the last bit,
  which no NPU's are. Operators that draw random numbers without taking a generator
  (``rrelu`` in training) draw from the CPU's; dropout draws from the device's.
- A kernel is computed by the thread that launches it, after what its stream still has to do. So the
  host runs ahead of a stream by one kernel, not by thousands.
- Attention is computed by torch's plain formula, not by a fused kernel, and so rounds otherwise.
- No kernel fusion, graphs, HCCL, formats of tensors, profiler; operators that torch_npu lacks work.
- Speed: every operator copies its arguments. It is for tests of small models.

At the end of the process what is enqueued is carried out at once. It is written for torch 2.13; the
interfaces that it implements change with torch.

Environment: ``MPIFT_SIMULATED_NPUS`` is the number of devices (2; at most 16), ``MPIFT_CACHE`` the
folder to build in (``~/.cache/mpift``).
"""

from __future__ import annotations

from mpift.testing.npu.control import (
    clear_faults,
    hang,
    inject,
    reset,
    set_capacity,
    set_copy_seconds,
    set_kernel_seconds,
    set_uce,
)
from mpift.testing.npu.registration import register

SIMULATED = True

__all__ = [
    "SIMULATED",
    "clear_faults",
    "hang",
    "inject",
    "reset",
    "set_capacity",
    "set_copy_seconds",
    "set_kernel_seconds",
    "set_uce",
]

register()

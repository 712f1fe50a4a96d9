"""The simulated NPU is there before any test of this folder runs.

Torch's autograd counts the devices at the first ``backward`` of a process, so a device that is
registered later can't be trained on.
"""

from __future__ import annotations

import contextlib

from mpift.errors import DeviceError

with contextlib.suppress(DeviceError, ImportError):  # tests that need it say what it lacks
    import mpift.testing.npu  # noqa: F401

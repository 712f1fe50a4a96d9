"""``python -m mpift.testing.npu``: builds the simulated NPU beforehand, and says where it is."""

import torch

from mpift.testing.npu import build

print(f"the simulated NPU is built: {build.place()}")
print(f"{torch.accelerator.device_count()} devices, the first is {torch.device('npu', 0)}")

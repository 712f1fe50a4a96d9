"""Lets the CPU compute what the fake CANN does not: its kernels do nothing.

Tensors stay on the device, memory and copies are torch_npu's own; only the operations between them
are done on copies of their memory in the host. It never touches a copy between host and device that
is a plain one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Operations without a kernel: they make memory, or another view of it.
_VIEWS = frozenset(
    """empty empty_strided empty_like new_empty new_empty_strided view as_strided t transpose
    permute detach alias expand unsqueeze squeeze select slice _reshape_alias _unsafe_view
    record_stream is_pinned _pin_memory set_ resize_ unbind split split_with_sizes""".split()
)
_COPIES = frozenset({"_to_copy", "copy_", "_copy_from"})


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


class _Host:
    """Copies in the host of the memory of an operation's arguments, shared as they share it."""

    def __init__(self) -> None:
        self._memories: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.originals: dict[int, torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        """What stands for an argument."""
        if isinstance(value, torch.device) and value.type == "npu":
            return torch.device("cpu")
        if not _is_on_device(value):
            return value
        memory = self._memories.setdefault(_place(value), _memory(value).cpu())
        copy = torch.as_strided(memory, value.size(), value.stride(), value.storage_offset())
        self.originals[id(copy)] = value
        return copy

    def write_back(self, tensor: torch.Tensor) -> None:
        """The device's memory becomes what it is here."""
        _memory(tensor).copy_(self._memories[_place(tensor)])


def _place(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's memory, flat."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.as_strided(tensor.detach(), (length,), (1,), 0)


class ComputeOnCpu(TorchDispatchMode):
    """A context in which operations on the device are computed by the CPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [tensor for tensor in tensors if _is_on_device(tensor)]
        target = kwargs.get("device") or (on_device[0].device if on_device else None)
        name = func._schema.name.partition("::")[2]
        if target is None or not (on_device or torch.device(target).type == "npu"):
            return func(*args, **kwargs)
        if name in _VIEWS or (name in _COPIES and _is_plain(tensors, on_device, kwargs)):
            return func(*args, **kwargs)
        host = _Host()
        copies, options = tree_map(host.of, (args, kwargs))
        result = func(*copies, **options)
        given = [*zip(func._schema.arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        for argument, value in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in filter(_is_on_device, tree_leaves(value)):
                    host.write_back(tensor)

        def back(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            original = host.originals.get(id(value))
            return original if original is not None else value.contiguous().to(target)

        return tree_map(back, result)


def _is_plain(tensors: list[Any], on_device: list[Any], kwargs: Any) -> bool:
    """Whether bytes are copied between host and device as they are."""
    dtypes = {tensor.dtype for tensor in tensors} | {kwargs.get("dtype") or tensors[0].dtype}
    across = len(tensors) == 1 or len(on_device) < len(tensors)
    return across and len(dtypes) == 1 and all(tensor.is_contiguous() for tensor in on_device)

"""Checkpoints in the formats of others: a ``.pt`` file of torch, and safetensors.

A ``.pt`` file holds one ``state_dict`` an object, so that any script loads it with
``weights_only=True``; it is read that way too, since a pickle that may do more runs anything.
Buffers and other values of each rank's own are rank 0's; random number generators are left out. A
file is there whole under its name, or not at all.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpift.checkpoint.adopt import load
from mpift.checkpoint.durable import Disk, temporary
from mpift.checkpoint.manifest import Manifest
from mpift.checkpoint.placing import BlockReader
from mpift.checkpoint.trees import component
from mpift.errors import CheckpointError

# What else torch unpickles with weights_only=True.
_LOADABLE = (str, bytes, bytearray, complex, torch.Size, torch.dtype, torch.device, torch.Tensor)


def export_pt(manifest: Manifest, reader: BlockReader, path: Path) -> None:
    """Write ``{"model": state_dict, "optimizer": state_dict, ...}``, a module's with its parameters
    and buffers together. Arrays become tensors, frozen sets and deques plain ones.

    Raises ``CheckpointDamagedError`` for blocks that are not what was saved.
    """
    content = {name: _plain(value) for name, value in load(manifest, reader).items()}
    with _replacing(path) as unfinished:
        torch.save(content, unfinished)


def export_safetensors(manifest: Manifest, reader: BlockReader, path: Path) -> None:
    """Write all tensors, by flat names ("model/fc.weight"), with step and version as metadata. A
    tensor that has two names stands there twice.

    Raises ``CheckpointError`` if safetensors is not installed or has no such dtype,
    ``CheckpointDamagedError`` for blocks that are not what was saved.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise CheckpointError(
            "safetensors is not installed: pip install 'mpift[safetensors]'"
        ) from None
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in _tensors(load(manifest, reader), ""):
        # The format has no two names for the same bytes.
        found[name] = tensor.clone() if id(tensor) in seen else tensor
        seen.add(id(tensor))
    metadata = {"format": "pt", "step": str(manifest.step), "mpift": manifest.version}
    with _replacing(path) as unfinished:
        try:
            save_file(found, unfinished, metadata)
        except (SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"safetensors can't hold the tensors of step {manifest.step} ({error}): export to"
                " a .pt file instead"
            ) from error


def import_pt(path: Path) -> dict[str, Any]:
    """What a ``.pt`` file holds, by name, to be saved as a checkpoint. The tensors are on the CPU,
    and mapped from the file where it allows that. A bare ``state_dict`` comes back as "model".

    Raises ``CheckpointError`` if the file is no such file, or could run code when unpickled.
    """
    try:
        # Only the zip format, torch's since 1.6, can be mapped.
        found = torch.load(
            path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path)
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{path} can't be read as tensors and plain values, and anything else is refused, since"
            f" it could run code: {lines[0]} Save state_dicts into it instead of objects"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise CheckpointError(
            f"{path} holds a {type(found).__name__}, and a dictionary was expected whose keys are"
            ' names: save {"model": model.state_dict(), ...}'
        )
    if found and all(isinstance(value, torch.Tensor) for value in found.values()):
        return {"model": dict(found)}
    return dict(found)


def _plain(value: Any) -> Any:
    """As torch loads it with ``weights_only=True``."""
    if value is None or isinstance(value, (bool, int, float, *_LOADABLE)):
        # Of numpy's numbers some are Python's too.
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, (OrderedDict, Counter)):
        return type(value)({_plain(key): _plain(item) for key, item in value.items()})
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, (set, frozenset)):
        # Sets of sets are not loaded back: their members become tuples.
        return {_plain(tuple(v) if isinstance(v, frozenset) else v) for v in value}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return [_plain(item) for item in value]  # lists and deques


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    rows: Any = ()
    if isinstance(value, dict):
        rows = ((component(str(key)), item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        rows = enumerate(value)
    for part, item in rows:
        yield from _tensors(item, f"{path}/{part}" if path else str(part))


def _umask() -> int:
    """It can only be asked for by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of ``path`` once it is whole."""
    disk = Disk()
    unfinished = temporary(path)
    try:
        yield unfinished
        unfinished.chmod(0o666 & ~_umask())  # some formats' writers let nobody else read
        disk.sync(unfinished)
        disk.rename(unfinished, path)
        disk.sync_folder(path.parent)
    finally:
        disk.unlink(unfinished)

"""The index of a checkpoint: every tensor whole under its name, for any program that reads HDF5.

Each tensor is a virtual dataset that leads straight to the files of blocks, by paths relative to
the index: the checkpoint can be copied anywhere as a whole. mpift itself reads by the manifest,
which is checked; what goes through the index is not. HDF5 reads a missing file as fill values and
says nothing: so these are NaN, or the largest value of an integer.

It is made from the manifest alone, after the COMMIT file: a checkpoint counts without it, and can
get it at any time.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpift.checkpoint.blockfile import LIBVER
from mpift.checkpoint.blocks import hyperslabs, storage_dtype
from mpift.checkpoint.directory import INDEX, Directory
from mpift.checkpoint.durable import Disk, publish
from mpift.checkpoint.manifest import Manifest, TensorEntry
from mpift.errors import CheckpointDamagedError

# An attribute is for small things: many tools print them all.
ATTRIBUTE_BYTES_MAX = 60_000
TREES = "_trees"


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Elements ``start`` to ``stop`` of a tensor lie in one dataset from ``place`` on."""

    file: str
    dataset: str
    place: int
    start: int
    stop: int


def write_missing(directory: Directory, at_most: int | None = None) -> tuple[list[Path], list[str]]:
    """Write the index of each committed checkpoint that has none, the newest first: which were
    written, and what is wrong with those that can get none. Raises ``OSError`` if the disk refuses.
    """
    written: list[Path] = []
    problems = []
    for committed in reversed(directory.committed()):
        path = committed.folder / INDEX
        if len(written) == at_most:
            break
        if not path.exists():
            try:
                write_index(directory.disk, path, directory.manifest(committed), "../..")
                written.append(path)
            except CheckpointDamagedError as error:
                problems.append(str(error))
    return written, problems


def write_index(disk: Disk, path: Path, manifest: Manifest, up: str) -> None:
    """Write the index of ``manifest`` to ``path``, replacing what is there.

    ``up`` leads from the folder of ``path`` to the checkpoint directory ("../.."). The root's
    attributes are ``step``, ``mpift_version``, ``history``, and as JSON the trees ``shared`` and
    ``own``; a tree of more than 60,000 bytes is the dataset ``/_trees/shared`` or ``/_trees/own``
    instead. Raises ``OSError`` if the disk refuses.
    """
    publish(disk, path, _image(manifest, up))
    disk.reached("index_written")


def _image(manifest: Manifest, up: str) -> bytes:
    """The file, made in memory: HDF5 would write it in thousands of small pieces."""
    with h5py.File(
        INDEX,
        "w",
        libver=("earliest", LIBVER[1]),
        driver="core",
        backing_store=False,
        block_size=1 << 20,
    ) as file:
        _write(file, manifest, up)
        file.flush()
        return bytes(file.id.get_file_image())


def _write(file: Any, manifest: Manifest, up: str) -> None:
    file.attrs["step"] = manifest.step
    file.attrs["mpift_version"] = manifest.version
    file.attrs["history"] = manifest.history
    for name, tree in (("shared", manifest.shared), ("own", list(manifest.own))):
        text = json.dumps(tree)
        if len(text) < ATTRIBUTE_BYTES_MAX:
            file.attrs[name] = text
        else:
            file[f"{TREES}/{name}"] = text
    parents = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    parents.set_create_intermediate_group(True)
    parents.set_char_encoding(h5py.h5t.CSET_UTF8)
    text = h5py.h5t.py_create(h5py.string_dtype(), logical=True)
    scalar = h5py.h5s.create(h5py.h5s.SCALAR)
    for entry in manifest.tensors:
        made = _dataset(file, entry, up, parents)
        # By HDF5's own functions: h5py's ``attrs`` take longer than all the rest.
        attribute = h5py.h5a.create(made, b"torch_dtype", text, scalar)
        attribute.write(np.array(entry.spec.dtype, h5py.string_dtype()))


def _dataset(file: Any, entry: TensorEntry, up: str, parents: Any) -> Any:
    spec = entry.spec
    dtype = storage_dtype(spec.dtype)
    space = _space(spec.shape)
    settings = None
    if entry.blocks:
        settings = _virtual(dtype).copy()
        for stretch in _stretches(entry):
            _map(settings, space, spec.shape, stretch, up)
    return h5py.h5d.create(
        file.id,
        spec.name.encode(),
        h5py.h5t.py_create(dtype, logical=True),
        space,
        settings,
        parents,
    )


def _space(shape: tuple[int, ...]) -> Any:
    return h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)


@functools.cache
def _virtual(dtype: np.dtype[Any]) -> Any:
    """The settings of a virtual dataset without sources: to be copied, which is quicker."""
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.VIRTUAL)
    settings.set_fill_value(_fill(dtype))
    return settings


def _fill(dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "fc":
        return np.array(math.nan, dtype)
    # As bits of a bfloat16, or of most types of 8 bits, this is not a number either.
    return np.array(True if dtype.kind == "b" else np.iinfo(dtype).max, dtype)


def _stretches(entry: TensorEntry) -> Iterator[_Stretch]:
    """The blocks of a tensor, as few stretches as there can be."""
    itemsize = entry.spec.itemsize
    last: _Stretch | None = None
    for block, (low, high) in zip(entry.blocks, entry.spec.blocks(), strict=True):
        start, stop = low // itemsize, high // itemsize
        if last is None:
            last = _Stretch(block.file, block.dataset, block.place, start, stop)
        elif (block.file, block.dataset, block.place) == (
            last.file,
            last.dataset,
            last.place + start - last.start,
        ):
            last = _Stretch(last.file, last.dataset, last.place, last.start, stop)
        else:
            yield last
            last = _Stretch(block.file, block.dataset, block.place, start, stop)
    if last is not None:
        yield last


def _map(settings: Any, space: Any, shape: tuple[int, ...], stretch: _Stretch, up: str) -> None:
    file = f"{up}/{stretch.file}".encode()
    for box, low, high in hyperslabs(shape, stretch.start, stretch.stop):
        if box:
            space.select_hyperslab(
                tuple(side.start for side in box), tuple(side.stop - side.start for side in box)
            )
        place = stretch.place + low - stretch.start
        # HDF5 takes the real length from the dataset itself, once it opens that.
        source = h5py.h5s.create_simple((place + high - low,))
        source.select_hyperslab((place,), (high - low,))
        settings.set_virtual(space, file, stretch.dataset.encode(), source)

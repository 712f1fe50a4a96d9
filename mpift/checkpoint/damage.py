"""What is wrong with the files of a checkpoint: every damage, one by one, by the manifest alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from mpift.checkpoint.manifest import BlockFile, Manifest, TensorEntry
from mpift.checkpoint.reading import Reader, verify_file
from mpift.errors import CheckpointDamagedError

Advance = Callable[[int], None]


def work_bytes(manifest: Manifest) -> int:
    """What a thorough look goes through: files as they are, then block by block."""
    blocks = sum(stored.stored_bytes for entry in manifest.tensors for stored in entry.blocks)
    return sum(file.size_bytes for file in manifest.files) + blocks


def file_damage(
    root: Path, manifest: Manifest, thorough: bool = False, advance: Advance | None = None
) -> Iterator[str]:
    """Everything that is wrong with the block files below ``root``; nothing if all is well.

    Missing files and wrong sizes; ``thorough`` also compares the digests of whole files and of
    every block. ``advance`` is told of the bytes gone through, ``work_bytes`` in all.
    Raises ``OSError`` where storage can't be reached, or permission is lacking: that is no damage.
    """
    lost = set()
    for file in manifest.files:
        yield from _of_file(root, file, thorough)
        if advance is not None:
            advance(file.size_bytes)
        if not (root / file.name).is_file():
            lost.add(file.name)  # told once, not for each of its blocks
    if thorough:
        with Reader(root) as reader:
            for entry in manifest.tensors:
                yield from _of_tensor(reader, entry, lost, advance)


def _of_file(root: Path, file: BlockFile, thorough: bool) -> Iterator[str]:
    path = root / file.name
    try:
        size = path.stat().st_size
        if size != file.size_bytes:
            yield f"{path} has {size} bytes instead of {file.size_bytes}"
        elif thorough and file.digest:
            verify_file(root, file)
    except (FileNotFoundError, NotADirectoryError):
        yield f"{path} is missing"
    except CheckpointDamagedError as error:
        yield str(error)


def _of_tensor(
    reader: Reader, entry: TensorEntry, lost: set[str], advance: Advance | None
) -> Iterator[str]:
    for index, stored in enumerate(entry.blocks):
        if stored.file not in lost:
            try:
                reader.read(stored, entry.spec, index)
            except CheckpointDamagedError as error:
                yield str(error)
        if advance is not None:
            advance(stored.stored_bytes)

"""Change detection: what is on storage already, as a committed checkpoint's manifest has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpift.checkpoint import retention
from mpift.checkpoint.blocks import TensorSpec
from mpift.checkpoint.manifest import BlockFile, Manifest, Stored


def is_there(root: Path, file: BlockFile) -> bool:
    """Whether a block file exists and has the size that it had."""
    try:
        return (root / file.name).stat().st_size == file.size_bytes
    except OSError:
        return False


class Committed:
    """The blocks of a committed checkpoint whose files are there, and worth keeping."""

    def __init__(self, base: Manifest, root: Path, compact_below: float) -> None:
        self._named = base.named()
        little = retention.files_to_compact([base], compact_below)
        self._files = {
            file.name: file
            for file in base.files
            if file.name not in little and is_there(root, file)
        }

    def same(self, name: str, spec: TensorSpec, index: int, found: str) -> Stored | None:
        """Where this block of the tensor that a manifest calls ``name`` is already, if it is."""
        entry = self._named.get(name)
        if entry is None or _kind(entry.spec) != _kind(spec):
            return None
        block = entry.blocks[index]
        return block if block.digest == found and block.file in self._files else None

    def used(self, blocks: Sequence[Stored | None]) -> list[BlockFile]:
        names = {block.file for block in blocks if block is not None}
        return [self._files[name] for name in sorted(names)]


def _kind(spec: TensorSpec) -> tuple[str, tuple[int, ...], int]:
    return spec.dtype, spec.shape, spec.block_bytes

"""File operations whose order decides what a crash leaves behind.

A file counts once it was written under a temporary name, fsynced, renamed (or linked) and its
folder fsynced. After a failed fsync the data may be lost whatever a second one says: the file is
abandoned, never tried again. Everything that the checkpoints write goes through a ``Disk``, so
that tests can stop at any operation and drop what was not synced.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from pathlib import Path

_SYNC_FILE_RANGE_WRITE = 2  # of Linux: sync_file_range(2)


class Disk:
    """The real one. Errors are ``OSError`` with the path in them."""

    def create(self, path: Path, data: bytes) -> None:
        """A new file with these bytes, synced; ``FileExistsError`` if there is one."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            self._fsync(descriptor, path)
        finally:
            os.close(descriptor)

    def mark(self, path: Path, data: bytes) -> None:
        """A file that says something of a process while that lives: a crash of the machine may take
        it."""
        path.write_bytes(data)

    def begin(self, path: Path, start: int, size_bytes: int) -> None:
        """Let storage begin with what was written to a stretch of a file. Promises nothing: then
        ``sync`` has less to wait for."""
        call = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if call is None:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            offset, size = ctypes.c_int64(start), ctypes.c_int64(size_bytes)
            call(descriptor, offset, size, _SYNC_FILE_RANGE_WRITE)
        finally:
            os.close(descriptor)

    def sync(self, path: Path) -> None:
        """Let the contents of a file last."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._fsync(descriptor, path)
        finally:
            os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Let the names in a folder last."""
        self.sync(path)

    def make_folder(self, path: Path) -> None:
        """A folder and those above it, as far as there are none, and their names in their
        parents."""
        if not path.is_dir():
            self.make_folder(path.parent)
            path.mkdir(exist_ok=True)
            self.sync_folder(path.parent)

    def rename(self, old: Path, new: Path) -> None:
        """Replaces what is there."""
        old.replace(new)

    def link(self, old: Path, new: Path) -> None:
        """A second name; ``FileExistsError`` if it is taken: never replaced."""
        os.link(old, new)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def reached(self, point: str) -> None:
        """A named point of the protocol: here a test may end the process."""

    def _fsync(self, descriptor: int, path: Path) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None


class MemoryDisk(Disk):
    """For memory-backed folders, which no crash of the machine leaves anything of."""

    def begin(self, path: Path, start: int, size_bytes: int) -> None:
        pass

    def sync(self, path: Path) -> None:
        pass

    def _fsync(self, descriptor: int, path: Path) -> None:
        pass


def temporary(path: Path) -> Path:
    """A name beside ``path`` for what is not finished; sweeping knows it by its ending."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")


def publish(disk: Disk, path: Path, data: bytes) -> None:
    """A whole file under its name at once, replacing an older one."""
    unfinished = temporary(path)
    try:
        disk.create(unfinished, data)
        disk.rename(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            disk.unlink(unfinished)
        raise
    disk.sync_folder(path.parent)


def publish_once(disk: Disk, path: Path, data: bytes) -> None:
    """The same by ``link()``: ``FileExistsError`` if it is there already."""
    unfinished = temporary(path)
    try:
        disk.create(unfinished, data)
        disk.link(unfinished, path)
        disk.sync_folder(path.parent)
    finally:
        disk.unlink(unfinished)

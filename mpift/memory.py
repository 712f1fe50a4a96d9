"""Memory that the processes of a node share: files in a memory-backed folder, mapped.

A region is created whole (under another name, then linked), so nobody ever maps half of one. It is
private to the user: mode 0600, never through a symbolic link, refused if somebody else owns it. Its
space is reserved when it is created: a full folder is an error then, not a SIGBUS later.

Names are ``mpift-JOB-WHAT``, with JOB a digest of the job's token (names are public, the token is
a secret), so that what a crash leaves behind can be told from other jobs' and removed. Nothing here
removes anything but that.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import secrets
import stat
import tempfile
from pathlib import Path

from mpift.errors import MpiftError

PREFIX = "mpift-"

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux mounts the memory-backed file system
_ATTEMPTS = 10


def default_folder() -> Path:
    """``/dev/shm`` where it can be written to, else the folder for temporary files."""
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        return _SHARED_MEMORY
    return Path(tempfile.gettempdir())


def require_shared_memory() -> None:
    """Raises ``MpiftError`` if what lies in the default folder is not in memory."""
    if default_folder() != _SHARED_MEMORY:
        raise MpiftError(f"{_SHARED_MEMORY} cannot be written to, so there is no shared memory")


def job_name(token: str, node: str) -> str:
    """What the region names of a job on a node, and of this user, have in common: 16 hex digits."""
    text = f"{token}\0{node}\0{os.geteuid()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def region_path(folder: Path, job: str, what: str) -> Path:
    """Where the region ``what`` of a job lies."""
    return folder / f"{PREFIX}{job}-{what}"


class Region:
    """A mapped file; ``view`` is its memory, as bytes."""

    __slots__ = ("_identity", "_map", "path", "view")

    def __init__(self, path: Path, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self.path = path
        self._identity = (status.st_dev, status.st_ino)
        self._map = mmap.mmap(descriptor, status.st_size)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmap it. Views that were made of ``view`` must have been released."""
        self.view.release()
        self._map.close()

    def is_in_place(self) -> bool:
        """Whether the path still leads to this region."""
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def unlink(self) -> None:
        """Remove the file, unless another one has taken its place; those who map it keep it."""
        if self.is_in_place():
            self.path.unlink(missing_ok=True)


def create(path: Path, size_bytes: int, contents: bytes = b"") -> Region:
    """A new region that starts with ``contents``, the rest zero.

    Raises ``FileExistsError`` if there is one of that name, ``MpiftError`` if there is no space.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        _reserve(descriptor, path, size_bytes)
        os.pwrite(descriptor, contents, 0)
        os.link(temporary, path)
        return Region(path, descriptor)
    finally:
        os.close(descriptor)  # the map has a descriptor of its own
        temporary.unlink(missing_ok=True)


def open_existing(path: Path) -> Region:
    """The region of that name.

    Raises ``FileNotFoundError`` if there is none, ``MpiftError`` if it isn't this user's own.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (PermissionError, IsADirectoryError) as error:
        raise _not_ours(path, error.strerror or "no access") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_ours(path, "a symbolic link") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
            raise _not_ours(path, "not a file with contents")
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            found = f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
            raise _not_ours(path, found)
        return Region(path, descriptor)
    finally:
        os.close(descriptor)


def create_or_open(path: Path, size_bytes: int, contents: bytes = b"") -> Region:
    """The region of that name, made by whichever process comes first."""
    for _ in range(_ATTEMPTS):  # somebody may remove it between the two calls
        with contextlib.suppress(FileNotFoundError):
            return open_existing(path)
        with contextlib.suppress(FileExistsError):
            return create(path, size_bytes, contents)
    raise MpiftError(f"{path} appears and disappears: another job uses the same name; start again")


def remove_job_of(path: Path) -> None:
    """Remove the region at ``path`` and all others of its job, half-made ones included."""
    job = path.name.removeprefix(PREFIX).partition("-")[0]
    for each in path.parent.glob(f"{PREFIX}{job}-*"):
        each.unlink(missing_ok=True)


def _reserve(descriptor: int, path: Path, size_bytes: int) -> None:
    try:
        if _free_bytes(path.parent) < size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise _too_small(path, size_bytes) from None


def _free_bytes(folder: Path) -> int:
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def _too_small(path: Path, size_bytes: int) -> MpiftError:
    return MpiftError(
        f"{path} needs {size_bytes} bytes of shared memory, but {path.parent} has only"
        f" {_free_bytes(path.parent)} free: remove what other jobs left there, or enlarge it (in a"
        " container: --shm-size)"
    )


def _not_ours(path: Path, found: str) -> MpiftError:
    return MpiftError(
        f"{path}: expected a file of user {os.geteuid()} with mode 0600, found: {found};"
        " remove it, and start again"
    )

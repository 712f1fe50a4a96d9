"""The exceptions that mpift raises, and the exit codes that it leaves with.

One small tree: everything a caller may want to catch is a ``MpiftError``. A message names the rank,
host, tensor, path or setting, what was found, what was expected, and what to do next.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """What ``mpift run`` and a rank that gives up leave with; 128 + N means signal N."""

    OK = 0
    SCRIPT_FAILED = 1
    USAGE = 2
    QUORUM_LOST = 3
    RESTARTS_EXHAUSTED = 4
    CHECKPOINT_DAMAGED = 5


class MpiftError(Exception):
    """Base of all errors of mpift."""


class ConfigError(MpiftError, ValueError):
    """A setting is unknown, malformed or out of range; the message names key, value and source."""


class HostfileError(MpiftError, ValueError):
    """A hostfile or host list cannot be read; the message gives file, line and column."""


class ChaosError(MpiftError, ValueError):
    """A fault schedule cannot be parsed; the message points at the offending item."""


class NotInitializedError(MpiftError, RuntimeError):
    """An operation was called before ``init()`` or after ``shutdown()``."""


class MismatchError(MpiftError, RuntimeError):
    """Ranks called a collective with different kind, dtype, shape, root or operator."""


class RootLostError(MpiftError, RuntimeError):
    """The root of a broadcast died before anybody had its data."""


class GradientError(MpiftError, RuntimeError):
    """Gradients were produced or consumed in an order that cannot be reduced."""


class DeviceError(MpiftError, RuntimeError):
    """A device that was asked for is not there, can't be used as it is set up, or has failed."""


class TransportError(MpiftError, RuntimeError):
    """MPI cannot be used, or keeps failing although nobody died."""


class TransferError(MpiftError, RuntimeError):
    """No donor is left that could give a state, or all gave other bytes than the digest says."""


class CheckpointError(MpiftError, RuntimeError):
    """A checkpoint can't be saved, or there is none that could be restored."""


class CheckpointDamagedError(CheckpointError):
    """A file of a checkpoint is missing, cut short, changed, or not what the manifest says."""


class StaleVersionError(MpiftError, RuntimeError):
    """A version of a state was to be committed although a newer one, or this one, was before."""


class InconsistentError(MpiftError, RuntimeError):
    """Ranks hold different parameters or optimizer state, and no majority holds the same."""


class StalePushError(MpiftError, RuntimeError):
    """A push to a parameter server was computed at a version that is too far behind."""


class KeyLostError(MpiftError, RuntimeError):
    """Both ranks that held ``keys`` of a parameter server died before there was a new copy."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        super().__init__(keys)
        self.keys = keys

    def __str__(self) -> str:
        return (
            f"lost in the parameter server: {', '.join(map(repr, self.keys))}; both ranks that held"
            " each of them died before there was a new copy: go on from a checkpoint"
        )


class VersionTimeoutError(MpiftError, TimeoutError):
    """A version that a pull asked for was not there in time."""

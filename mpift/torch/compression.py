"""Gradient compression, by Horovod's names. This version has ``none`` only."""

from __future__ import annotations


class NoneCompressor:
    """Gradients travel as they are."""


class _Compression:
    """What may be given as ``compression=``."""

    none = NoneCompressor

    def __getattr__(self, name: str) -> None:
        raise AttributeError(
            f"Compression.{name} is not available in this version: use Compression.none"
        )


Compression = _Compression()


def require_none(compression: object) -> None:
    """Refuse what this version cannot do, rather than ignore it."""
    if compression is not Compression.none:
        raise ValueError(
            f"compression {compression!r} is not available in this version: use Compression.none"
        )

"""Gradient compression, by Horovod's names.

``Compression.none``, ``.fp16``, ``.bf16``, ``.threshold(value)`` and a ``Compressor`` may be given
as ``compression=``. They say what travels between ranks; sums are made in float32, and what an
optimizer's gradients lose is added to the next round's (``reduction.compressed``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpift.reduction import codecs
from mpift.reduction.codecs import Compressor

__all__ = ["Compression", "Compressor", "compressor_of"]


class NoneCompressor:
    """Gradients travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor, and what ``decompress`` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ARG004, it is Horovod's
        """The tensor again."""
        return tensor


class _HalfCompressor:
    """Floating-point gradients travel in sixteen bits."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """The tensor as it travels, and the dtype that it had; others than floats stay as is."""
        narrow = tensor.dtype.is_floating_point
        return tensor.to(cls.dtype) if narrow else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """The tensor in the dtype that it had."""
        return tensor.to(ctx)


class FP16Compressor(_HalfCompressor):
    """In float16: 11 bits of precision, infinite beyond 65504.

    The sum over all ranks has to stay below that too: for an optimizer's gradients, that is what
    ``gradient_predivide_factor`` is for.
    """

    dtype = torch.float16


class BF16Compressor(_HalfCompressor):
    """In bfloat16: 8 bits of precision, float32's range."""

    dtype = torch.bfloat16


class _Compression:
    """What may be given as ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

    @staticmethod
    def threshold(value: float) -> Compressor:
        """Gradients of magnitude ``value`` and more travel, exactly; the others wait for a round in
        which they have added up to it."""
        return Compressor("threshold", value)

    def __getattr__(self, name: str) -> None:
        raise AttributeError(
            f"Compression.{name} is not available: use none, fp16, bf16 or threshold(value)"
        )


Compression = _Compression()

_COMPRESSORS: dict[Any, Compressor] = {
    NoneCompressor: Compressor("none"),
    FP16Compressor: Compressor("fp16"),
    BF16Compressor: Compressor("bf16"),
}


def compressor_of(compression: Any) -> Compressor:
    """The ``Compressor`` meant by what was given as ``compression=``; None means none.

    Raises ``ValueError`` for anything that is not one.
    """
    if compression is None:
        return Compressor("none")
    if isinstance(compression, Compressor):
        return compression
    if compression is Compression.threshold:
        raise ValueError(
            "compression=Compression.threshold needs the magnitude from which on values travel:"
            " write Compression.threshold(1e-3), say"
        )
    for known, compressor in _COMPRESSORS.items():
        if compression is known:
            return compressor
    raise ValueError(
        f"compression {compression!r} is not available: use Compression.none, .fp16, .bf16 or"
        " .threshold(value), or a Compressor"
    )


# -- casts -----------------------------------------------------------------------------------------


def _narrow(dtype: torch.dtype) -> codecs.Cast:
    def narrow(values: np.ndarray, out: np.ndarray) -> None:
        # torch would warn of every array that is not to be written to.
        given = values if values.flags.writeable else values.copy()
        torch.from_numpy(out.view(np.int16)).view(dtype).copy_(torch.from_numpy(given))

    return narrow


def _widen(dtype: torch.dtype) -> codecs.Cast:
    def widen(codes: np.ndarray, out: np.ndarray) -> None:
        given = codes if codes.flags.writeable else codes.copy()
        torch.from_numpy(out).copy_(torch.from_numpy(given.view(np.int16)).view(dtype))

    return widen


# torch uses the processor's own instructions, which numpy does not: over ten times as fast.
for _name, _dtype in {"fp16": torch.float16, "bf16": torch.bfloat16}.items():
    codecs.use_casts(_name, _narrow(_dtype), _widen(_dtype))

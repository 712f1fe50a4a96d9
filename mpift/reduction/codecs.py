"""Codecs: how float32 values travel in fewer bytes. Pure: no MPI, no threads, no torch.

========== ================ ============================================================
codec      bytes an element what is lost
========== ================ ============================================================
none       4                nothing
fp16       2                all but 11 bits of precision; beyond 65504 it is infinite
bf16       2                all but 8 bits of precision; the range is float32's
threshold  1/8 + 4 a value  values below the threshold, which count as zero; others are
           at or above it   exact
========== ================ ============================================================

NaN and infinities survive all of them, so that overflows are still noticed. A code tells its own
length: whoever has room for ``max_bytes`` can decode a shorter one. Every length is a multiple of 4
bytes, so that float32 in a row of codes lie aligned. What an encoding loses is for the caller to
keep (``compressed``).
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Range = tuple[int, int]
# (from, to): float32[n] to uint16[n], or the other way; both are views that must not be kept.
Cast = Callable[[np.ndarray, np.ndarray], None]

FLOAT32 = np.dtype(np.float32)
_ALIGNMENT_BYTES = 4
_FLOAT_BYTES = 4
_MAGNITUDE = 0x7FFF_FFFF  # a float32 without its sign bit; its order is that of the magnitudes


class Codec(Protocol):
    """How one run of float32 values is written as bytes."""

    @property
    def name(self) -> str:
        """As ``Compressor.type``."""

    @property
    def lossy(self) -> bool:
        """Whether values may come out changed."""

    @property
    def of_sums(self) -> Codec:
        """The codec for sums of what this one decodes."""

    def max_bytes(self, elements: int) -> int:
        """Room that the code of this many values needs at most."""

    def encode(self, values: np.ndarray, out: np.ndarray) -> int:
        """Write float32[n] into uint8[at least ``max_bytes(n)``]; returns the bytes used."""

    def decode(self, data: np.ndarray, out: np.ndarray) -> int:
        """Read float32[n] from the code at the start of uint8[...]; returns the bytes read."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Values as they are; the only codec that takes other floats than float32."""

    dtype: np.dtype = FLOAT32
    name = "none"
    lossy = False

    @property
    def of_sums(self) -> Codec:
        return self

    def max_bytes(self, elements: int) -> int:
        return self.dtype.itemsize * elements

    def encode(self, values: np.ndarray, out: np.ndarray) -> int:
        size_bytes = self.max_bytes(values.size)
        out[:size_bytes].view(self.dtype)[:] = values
        return size_bytes

    def decode(self, data: np.ndarray, out: np.ndarray) -> int:
        size_bytes = self.max_bytes(out.size)
        out[:] = data[:size_bytes].view(self.dtype)
        return size_bytes


@dataclass(frozen=True, slots=True)
class Half:
    """Sixteen bits a value, rounded to nearest even: ``name`` is "fp16" or "bf16"."""

    name: str
    lossy = True

    @property
    def of_sums(self) -> Codec:
        return self

    def max_bytes(self, elements: int) -> int:
        return _padded(2 * elements)

    def encode(self, values: np.ndarray, out: np.ndarray) -> int:
        if values.size:
            narrow, _ = _casts[self.name]
            narrow(values, out[: 2 * values.size].view(np.uint16))
        return self.max_bytes(values.size)

    def decode(self, data: np.ndarray, out: np.ndarray) -> int:
        if out.size:
            _, widen = _casts[self.name]
            widen(data[: 2 * out.size].view(np.uint16), out)
        return self.max_bytes(out.size)


@dataclass(frozen=True, slots=True)
class Threshold:
    """A bitmap of the values of magnitude ``value`` and more, then these. Of 0: all but zeros."""

    value: float
    name = "threshold"

    @property
    def lossy(self) -> bool:
        return self.value > 0

    @property
    def of_sums(self) -> Codec:
        # A sum below the threshold is no reason to withhold what its ranks chose to send.
        return Threshold(0.0)

    def max_bytes(self, elements: int) -> int:
        return _bitmap_bytes(elements) + _FLOAT_BYTES * elements

    def encode(self, values: np.ndarray, out: np.ndarray) -> int:
        magnitudes = values.view(np.uint32) & np.uint32(_MAGNITUDE)
        # As integers, so NaN and infinity are above every threshold; zeros never travel.
        least = max(1, int(np.float32(self.value).view(np.uint32)))
        travels = magnitudes >= np.uint32(least)
        bitmap_bytes = _bitmap_bytes(values.size)
        packed = np.packbits(travels)
        out[: packed.size] = packed
        out[packed.size : bitmap_bytes] = 0
        kept = values[np.flatnonzero(travels)]
        end = bitmap_bytes + _FLOAT_BYTES * kept.size
        out[bitmap_bytes:end].view(np.float32)[:] = kept
        return end

    def decode(self, data: np.ndarray, out: np.ndarray) -> int:
        bitmap_bytes = _bitmap_bytes(out.size)
        travels = np.unpackbits(data[:bitmap_bytes], count=out.size).view(np.bool_)
        positions = np.flatnonzero(travels)
        end = bitmap_bytes + _FLOAT_BYTES * positions.size
        out.fill(0)
        out[positions] = data[bitmap_bytes:end].view(np.float32)
        return end


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _bitmap_bytes(elements: int) -> int:
    return _padded(-(-elements // 8))


# -- casts -----------------------------------------------------------------------------------------
# Of numpy's own casts the one to float16 makes 0.5 GB/s and there is none to bfloat16. These are
# three times as fast, with the same bits, because each line is one loop that the compiler made
# vector instructions of. None of them meets a subnormal float32, so a processor that is set to
# flush those changes nothing.

_LEAST_NORMAL = np.float32(2.0**-14)  # of float16
_PAST_RANGE = np.float32(65536)  # rounds to float16's infinity
_HALF = np.float32(0.5)  # in [0.5, 1) float32 is as fine as float16's subnormals: 2**-24


@np.errstate(all="ignore")  # signalling NaN
def narrow_to_fp16(values: np.ndarray, out: np.ndarray) -> None:
    """Round float32[n] to the bits of float16, uint16[n]."""
    bits = values.view(np.uint32)
    whole = bits & np.uint32(_MAGNITUDE)
    floats = whole.view(np.float32)
    # The subnormal part, up to 0x400 at the least normal: an addition that rounds to 2**-24.
    small = np.minimum(floats, _LEAST_NORMAL)
    small += _HALF
    # The normal part, 0 up to the least normal: to nearest even by adding just under a half, and
    # the last bit that stays; 113 is the least normal's exponent.
    np.clip(floats, _LEAST_NORMAL, _PAST_RANGE, out=floats)
    odd = whole >> np.uint32(13)
    odd &= np.uint32(1)
    whole += odd
    whole -= np.uint32((113 << 23) - 0xFFF)
    whole >>= np.uint32(13)
    whole += small.view(np.uint32)  # whose upper half, that of 0.5, is cut off below
    np.right_shift(bits, np.uint32(16), out=odd)
    odd &= np.uint32(0x8000)
    whole |= odd
    np.copyto(out, whole, casting="unsafe")
    _restore_nan(values, out, 0x7E00)


@np.errstate(all="ignore")  # signalling NaN
def widen_fp16(codes: np.ndarray, out: np.ndarray) -> None:
    """The float32[n] that float16 of these bits, uint16[n], stand for."""
    bits = out.view(np.uint32)
    np.copyto(bits, codes & np.uint16(0x7FFF))
    bits <<= np.uint32(13)
    # Exponents 224 too large, so that 31, of infinity and NaN, becomes 255.
    bits |= np.uint32(0x7000_0000)
    out *= np.float32(2.0**-112)
    # Right now, but subnormals: m / 1024 came out as (1 + m / 1024) / 2 of the least normal.
    correction = out - _LEAST_NORMAL
    np.minimum(correction, np.float32(0), out=correction)
    out += correction
    signs = correction.view(np.uint32)
    np.copyto(signs, codes & np.uint16(0x8000))
    signs <<= np.uint32(16)
    bits |= signs


def narrow_to_bf16(values: np.ndarray, out: np.ndarray) -> None:
    """Round float32[n] to the bits of bfloat16, uint16[n]."""
    bits = values.view(np.uint32)
    whole = bits >> np.uint32(16)
    whole &= np.uint32(1)
    whole += bits
    whole += np.uint32(0x7FFF)
    whole >>= np.uint32(16)
    np.copyto(out, whole, casting="unsafe")
    _restore_nan(values, out, 0x7FC0)


def widen_bf16(codes: np.ndarray, out: np.ndarray) -> None:
    """The float32[n] whose upper halves are these bits, uint16[n]."""
    bits = out.view(np.uint32)
    np.copyto(bits, codes)
    bits <<= np.uint32(16)


def _restore_nan(values: np.ndarray, out: np.ndarray, nan: int) -> None:
    """Rounding may have carried a NaN's bits into its exponent or its sign."""
    if np.isnan(values.max()):
        out[np.isnan(values)] = nan


_casts: dict[str, tuple[Cast, Cast]] = {
    "fp16": (narrow_to_fp16, widen_fp16),
    "bf16": (narrow_to_bf16, widen_bf16),
}


def use_casts(name: str, narrow: Cast, widen: Cast) -> None:
    """Cast to and from "fp16" or "bf16" with these from now on: for faces whose framework has
    faster ones. Widening must be exact; narrowing rounds to nearest even and keeps NaN."""
    if name not in _casts:
        raise ValueError(f"casts for {name!r}: known are {', '.join(_casts)}")
    _casts[name] = narrow, widen


# -- what users give -------------------------------------------------------------------------------

TYPES = ("none", "fp16", "bf16", "threshold")


@dataclass(frozen=True, slots=True)
class Compressor:
    """How sums over ranks are compressed on their way; the same on all ranks.

    ``type`` is "none", "fp16", "bf16" or "threshold". For fp16 and bf16, tensors of fewer than
    ``threshold`` elements travel as float32: biases and norms are small, and sensitive. For
    "threshold" it is the magnitude from which on a value travels; what is below stays at home, and
    gradients' is added to the next round's. Raises ``ValueError`` for anything else.
    """

    type: str = "none"
    threshold: float = 0

    def __post_init__(self) -> None:
        given: object = self.threshold
        if self.type not in TYPES:
            raise ValueError(f"compressor type {self.type!r} is not one of {', '.join(TYPES)}")
        if isinstance(given, bool) or not isinstance(given, numbers.Real):
            raise ValueError(f"a compressor's threshold must be a number, not {given!r}")
        threshold = float(given)
        if self.type == "none" and threshold != 0:
            raise ValueError(f"a compressor of type 'none' has no threshold: {threshold!r}")
        if self.type == "threshold":
            floats = np.finfo(np.float32)
            if not float(floats.tiny) <= threshold <= float(floats.max):
                raise ValueError(
                    "a compressor of type 'threshold' needs as threshold= the magnitude from which"
                    f" on values travel, a positive float32 such as 1e-3, not {threshold!r}"
                )
        elif not (threshold >= 0 and threshold.is_integer()):
            raise ValueError(
                f"the threshold of a {self.type} compressor is the number of elements from which"
                f" on a tensor is compressed, a whole number of at least 0, not {threshold!r}"
            )

    @property
    def codec(self) -> Codec:
        """The codec of what is compressed."""
        if self.type == "none":
            return Plain()
        return Threshold(float(self.threshold)) if self.type == "threshold" else Half(self.type)

    def compresses(self, elements: int) -> bool:
        """Whether a tensor of this many elements is compressed."""
        if self.type in ("none", "threshold"):
            return self.type == "threshold"
        return elements >= self.threshold

    def plain_ranges(self, tensors: Iterable[Range]) -> tuple[Range, ...]:
        """Those of these tensors, by [start, stop) in a bucket and in its order, that travel
        uncompressed; neighbours as one range."""
        joined: list[Range] = []
        for start, stop in tensors:
            if self.compresses(stop - start):
                continue
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]  # noqa: PLW2901, the range grows to the left
            joined.append((start, stop))
        return tuple(joined)

    def __str__(self) -> str:
        """Equal on ranks that compress equally."""
        if self.type == "threshold":
            return f"threshold {float(self.threshold)!r}"
        return f"{self.type} from {int(self.threshold)} elements" if self.threshold else self.type

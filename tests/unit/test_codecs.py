"""Codecs: what comes out of an encoding, and what users may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.communicator import Communicator
from mpift.reduction import codecs
from mpift.reduction.codecs import Codec, Compressor, Half, Plain, Threshold

NUMPY_CASTS = {
    "fp16": (codecs.narrow_to_fp16, codecs.widen_fp16),
    "bf16": (codecs.narrow_to_bf16, codecs.widen_bf16),
}
CODECS = [Plain(), Half("fp16"), Half("bf16"), Threshold(0.0), Threshold(0.25), Threshold(1e-20)]
ALL_CODES = np.arange(1 << 16).astype(np.uint16)

# Any bits: NaN of both kinds, infinities, subnormals, both zeros.
any_floats = st.lists(st.integers(0, 2**32 - 1), max_size=100).map(
    lambda bits: np.array(bits, np.uint32).view(np.float32)
)


@pytest.fixture(autouse=True)
def numpy_casts() -> Iterator[None]:
    """The casts of this module's own, whatever face was imported before."""
    kept = dict(codecs._casts)
    codecs._casts.update(NUMPY_CASTS)
    yield
    codecs._casts.update(kept)


def code_of(codec: Codec, values: np.ndarray) -> np.ndarray:
    """The code of ``values``, cut to its length, from memory that was something else before."""
    out = np.full(codec.max_bytes(values.size), 0xAB, np.uint8)
    return out[: codec.encode(values, out)]


def through(codec: Codec, values: np.ndarray) -> np.ndarray:
    code = code_of(codec, values)
    out = np.full(values.size, 666, np.float32)
    with_more_behind = np.concatenate([code, np.full(64, 0xCD, np.uint8)])
    assert codec.decode(with_more_behind, out) == code.size
    return out


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal, signs of zeros included; any NaN equals any other."""
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


@given(any_floats, st.sampled_from(CODECS))
def test_what_is_not_finite_survives_every_codec(values: np.ndarray, codec: Codec) -> None:
    found = through(codec, values)
    assert (np.isnan(found) == np.isnan(values)).all()
    infinite = np.isinf(values)
    assert (found[infinite] == values[infinite]).all()


@given(any_floats, st.sampled_from(CODECS))
def test_codes_fit_their_bound_and_leave_floats_behind_them_aligned(
    values: np.ndarray, codec: Codec
) -> None:
    code = code_of(codec, values)
    assert code.size <= codec.max_bytes(values.size)
    assert code.size % 4 == codec.max_bytes(values.size) % 4 == 0


@given(any_floats, st.sampled_from(CODECS))
def test_what_was_decoded_comes_through_again_unchanged(values: np.ndarray, codec: Codec) -> None:
    once = through(codec, values)
    assert same_bits(through(codec, once), once)


@given(any_floats)
def test_fp16_rounds_as_ieee_754_says(values: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
    assert same_bits(through(Half("fp16"), values), expected)


def test_fp16_rounds_ties_to_even_between_all_neighbours() -> None:
    halves = ALL_CODES.view(np.float16).astype(np.float32)
    ordered = np.unique(halves[np.isfinite(halves)])
    ties = (ordered[1:] + ordered[:-1]) / 2
    infinity = np.float32(np.inf)
    for values in (ties, np.nextafter(ties, infinity), np.nextafter(ties, -infinity)):
        assert same_bits(
            through(Half("fp16"), values), values.astype(np.float16).astype(np.float32)
        )
    beyond = np.array([65519.996, 65520.0, -65520.0], np.float32)
    assert through(Half("fp16"), beyond).tolist() == [65504.0, np.inf, -np.inf]


@given(any_floats)
def test_bf16_rounds_to_nearest_even(values: np.ndarray) -> None:
    found = through(Half("bf16"), values)
    finite = np.isfinite(values)
    for value, got in zip(values[finite].tolist(), found[finite], strict=True):
        code = int(np.float32(value).view(np.uint32)) & 0xFFFF_0000
        # The two bfloat16 around the value; past the largest there is infinity at 2**128.
        toward_zero = float(np.uint32(code).view(np.float32))
        beyond = np.uint32(code + 0x1_0000).view(np.float32)
        away = float(beyond) if np.isfinite(beyond) else float(np.copysign(2.0**128, value))
        near, far = abs(value - toward_zero), abs(away - value)
        goes_away = far < near or (far == near and code & 0x1_0000)
        assert got == (beyond if goes_away else np.float32(toward_zero))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_every_code_stands_for_its_number(name: str) -> None:
    wide = np.empty(ALL_CODES.size, np.float32)
    NUMPY_CASTS[name][1](ALL_CODES, wide)
    if name == "fp16":
        expected = ALL_CODES.view(np.float16).astype(np.float32)
    else:
        expected = (ALL_CODES.astype(np.uint32) << 16).view(np.float32)
    assert same_bits(wide, expected)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_torch_casts_to_the_same_bits_as_ours(name: str) -> None:
    import mpift.torch.compression as face

    dtype = {"fp16": face.FP16Compressor.dtype, "bf16": face.BF16Compressor.dtype}[name]
    narrow, widen = NUMPY_CASTS[name]
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32)
    values = bits.view(np.float32)
    values.flags.writeable = False
    ours, theirs = np.empty((2, values.size), np.uint16)
    narrow(values, ours)
    face._narrow(dtype)(values, theirs)
    numbers = ~np.isnan(values)
    assert (ours[numbers] == theirs[numbers]).all()
    assert np.isnan(wide_of(widen, theirs)[~numbers]).all()
    assert same_bits(wide_of(widen, ALL_CODES), wide_of(face._widen(dtype), ALL_CODES))


def wide_of(widen: codecs.Cast, codes: np.ndarray) -> np.ndarray:
    out = np.empty(codes.size, np.float32)
    widen(codes, out)
    return out


@given(any_floats, st.floats(min_value=2.0**-100, max_value=2.0**100, width=32))
def test_a_threshold_keeps_values_at_and_above_it_and_no_others(
    values: np.ndarray, threshold: float
) -> None:
    values = np.append(values, np.array([threshold, -threshold], np.float32))
    codec = Threshold(threshold)
    stays = np.abs(values) < np.float32(threshold)
    expected = np.where(stays, np.float32(0), values)
    assert same_bits(through(codec, values), expected)
    bitmap_bytes = -(-values.size // 32) * 4
    assert code_of(codec, values).size == bitmap_bytes + 4 * np.count_nonzero(~stays)


@given(any_floats)
def test_sums_of_what_passed_a_threshold_are_exact(values: np.ndarray) -> None:
    codec = Threshold(1e6).of_sums
    assert not codec.lossy
    # Equal in value: a negative zero comes out as a zero.
    assert np.array_equal(through(codec, values), values, equal_nan=True)


@pytest.mark.parametrize(
    ("type_", "threshold", "complaint"),
    [
        ("int8", 0, "'int8' is not one of none, fp16, bf16, threshold"),
        ("fp16", "many", "must be a number, not 'many'"),
        ("fp16", True, "must be a number, not True"),
        ("none", 3, "has no threshold: 3"),
        ("threshold", 0, "a positive float32 such as 1e-3, not 0"),
        ("threshold", -1.0, "not -1.0"),
        ("threshold", float("nan"), "not nan"),
        ("threshold", 1e300, "not 1e"),
        ("fp16", 0.5, "a whole number of at least 0, not 0.5"),
        ("bf16", -1, "the number of elements from which on a tensor is compressed"),
        ("bf16", float("inf"), "not inf"),
    ],
)
def test_a_compressor_that_makes_no_sense_is_refused(
    type_: str, threshold: float, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        Compressor(type_, threshold)


def test_a_compressor_says_what_it_does_and_is_equal_to_one_that_does_the_same() -> None:
    assert str(Compressor()) == "none"
    assert str(Compressor("fp16")) == "fp16"
    assert str(Compressor("bf16", 1024)) == str(Compressor("bf16", 1024.0))
    assert str(Compressor("bf16", 1024)) == "bf16 from 1024 elements"
    assert str(Compressor("threshold", 1e-3)) == "threshold 0.001"
    assert Compressor("threshold", np.float32(0.5)) == Compressor("threshold", 0.5)


def test_small_tensors_travel_as_they_are_where_half_types_are_asked_for() -> None:
    tensors = [(0, 5), (5, 7), (7, 107), (107, 110), (110, 200), (200, 201)]
    assert Compressor("fp16", 10).plain_ranges(tensors) == ((0, 7), (107, 110), (200, 201))
    assert Compressor("fp16").plain_ranges(tensors) == ()
    assert Compressor("threshold", 10).plain_ranges(tensors) == ()
    assert Compressor().plain_ranges(tensors) == ((0, 201),)


def test_what_is_given_as_compression_means_a_compressor() -> None:
    from mpift.torch.compression import Compression, compressor_of

    compressor = Compressor("bf16", 1024)
    assert compressor_of(compressor) is compressor
    assert compressor_of(None) == compressor_of(Compression.none) == Compressor("none")
    assert compressor_of(Compression.fp16) == Compressor("fp16")
    assert compressor_of(Compression.bf16) == Compressor("bf16")
    assert compressor_of(Compression.threshold(0.1)) == Compressor("threshold", 0.1)


def test_what_is_no_compression_is_refused() -> None:
    from mpift.torch.compression import Compression, compressor_of

    class OfTheUser:
        pass

    for wrong in ("fp16", OfTheUser, OfTheUser(), 16, [], Compression):
        with pytest.raises(ValueError, match=r"is not available: use Compression\.none, \.fp16"):
            compressor_of(wrong)
    with pytest.raises(ValueError, match=r"write Compression.threshold\(1e-3\)"):
        compressor_of(Compression.threshold)
    with pytest.raises(AttributeError, match=r"Compression\.fp8 is not available: use none"):
        Compression.fp8  # noqa: B018
    with pytest.raises(ValueError, match=r"such as Compressor\('fp16'\), not 'fp16'"):
        Communicator(compressor="fp16")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_a_compression_narrows_and_restores_tensors_as_horovods_does(name: str) -> None:
    import torch

    from mpift.torch.compression import Compression

    compression = getattr(Compression, name)
    values, integers = torch.tensor([1.5, -2.0], dtype=torch.float64), torch.tensor([7])
    narrow, context = compression.compress(values)
    assert narrow.element_size() == (8 if name == "none" else 2)
    again = compression.decompress(narrow, context)
    assert again.dtype == torch.float64
    assert again.equal(values)
    assert compression.decompress(*compression.compress(integers)).equal(integers)


def test_casts_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="'fp8': known are fp16, bf16"):
        codecs.use_casts("fp8", codecs.narrow_to_fp16, codecs.widen_fp16)

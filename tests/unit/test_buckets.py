"""The layout of gradients in buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpift.errors import GradientError
from mpift.reduction.buckets import Contributions, Layout, ParameterSpec, lay_out

DTYPES = ["float16", "bfloat16", "float32", "float64"]
SPECS = st.lists(
    st.builds(ParameterSpec, st.text(), st.integers(0, 50), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=20,
)


@given(SPECS, st.integers(1, 200), st.integers(1, 400))
def test_every_parameter_has_one_place_of_its_own_and_counts_besides(
    specs: list[ParameterSpec], first: int, rest: int
) -> None:
    layout = lay_out(specs, first, rest)
    placed = [slot.parameter for bucket in layout.buckets for slot in bucket.slots]
    assert sorted(placed) == list(range(len(specs)))
    for bucket in layout.buckets:
        assert len({specs[slot.parameter].dtype for slot in bucket.slots}) == 1
        taken: list[int] = [bucket.late, bucket.alarm, bucket.participation]
        for slot in bucket.slots:
            assert slot.stop - slot.start == specs[slot.parameter].elements
            taken += [*range(slot.start, slot.stop), slot.used]
        assert sorted(taken) == list(range(bucket.length))


def test_buckets_begin_with_the_last_parameters_and_the_first_bucket_is_small() -> None:
    specs = [ParameterSpec(f"p{i}", 100, "float32") for i in range(6)]
    layout = lay_out(specs, first_bytes=400, bucket_bytes=800)
    order = [[slot.parameter for slot in bucket.slots] for bucket in layout.buckets]
    assert order == [[5], [4, 3], [2, 1], [0]]


def test_half_types_are_summed_in_single_precision() -> None:
    specs = [ParameterSpec("a", 3, "float16"), ParameterSpec("b", 3, "bfloat16")]
    layout = lay_out(specs, 1 << 20, 1 << 20)
    assert [bucket.dtype.name for bucket in layout.buckets] == ["float32", "float32"]


def test_a_dtype_without_a_sum_is_refused_by_name() -> None:
    with pytest.raises(GradientError, match=r"'layer\.weight' has dtype complex64"):
        lay_out([ParameterSpec("layer.weight", 3, "complex64")], 1, 1)


def one_bucket() -> Layout:
    return lay_out([ParameterSpec("a", 3, "float32")], 1, 1)


def test_what_found_no_round_is_added_to_the_next_gradient() -> None:
    contributions = Contributions(one_bucket())
    home = contributions.buffers[0]
    home[:] = 2, 2, 2, 1, 0, 0, 1
    contributions.carry(0)
    home[:] = 9  # by the next gradient, which is dropped
    target, add = contributions.target(0, withheld=False)
    assert add
    assert target is home
    assert target.tolist() == [2, 2, 2, 1, 0, 0, 1]
    assert contributions.target(0, withheld=False) == (target, False)  # once


def test_a_gradient_that_is_withheld_is_carried_with_counts_of_one() -> None:
    contributions = Contributions(one_bucket())
    target, add = contributions.target(0, withheld=True)
    assert not add
    assert target is not contributions.buffers[0]
    target[:] = 1, 2, 3, 1, 0, 1, 1
    assert contributions.target(0, withheld=True) == (target, True)
    contributions.buffers[0][:] = 4, 4, 4, 1, 1, 1, 1
    contributions.carry(0)
    assert contributions.target(0, withheld=False)[0].tolist() == [5, 6, 7, 1, 1, 1, 1]


def test_what_is_carried_can_be_forgotten() -> None:
    contributions = Contributions(one_bucket())
    contributions.target(0, withheld=True)
    contributions.forget_carried()
    assert contributions.target(0, withheld=False) == (contributions.buffers[0], False)

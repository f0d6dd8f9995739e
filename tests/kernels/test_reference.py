"""The grid: clipped edges, wrong rounding and NaN groups are the classic faults."""

from __future__ import annotations

import kernel_truth as truth
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit_kernels import layout
from lowbit_kernels.layout import pack_words
from lowbit_kernels.reference import dequantize, matmul_reference, quantize_groups

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def one_group(values, bits=4, symmetric=True, dtype=torch.float32):
    """Codes, scale, zero-point and dequantized weights of one group."""
    weight = torch.tensor([values], dtype=torch.float32)
    codes, scale, zero = quantize_groups(weight, bits, len(values), symmetric, dtype)
    restored = dequantize(codes, scale, zero, bits)[0].tolist()
    return codes[0].tolist(), scale.item(), None if zero is None else zero.item(), restored


# Worked by hand with scale 1: halves go to the even neighbour, both edges are reached, none clips.
GOLDEN = {
    "sym 4": (4, True, [-8, -7.5, -0.5, 0.5, 1.5, 2.5, 7, 6.6], 1.0, None, [0, 0, 8, 8, 10, 10, 15, 15]),
    "sym 4, positive side decides": (4, True, [-1, 0, 14], 2.0, None, [8, 8, 15]),
    "sym 4, negative side decides": (4, True, [-16, 6, 5], 2.0, None, [0, 11, 10]),
    "sym 2": (2, True, [-2, -1, 1, 0.5], 1.0, None, [0, 1, 3, 2]),
    "sym 3": (3, True, [-4, 3, 1, -2.5], 1.0, None, [0, 7, 5, 2]),
    "sym 8": (8, True, [-128, 127, 0.5, -1.5], 1.0, None, [0, 255, 128, 126]),
    "asym 4": (4, False, [-1, 0, 2, 14], 1.0, 1, [0, 1, 3, 15]),
    "asym 4, all positive": (4, False, [3, 6.5, 15], 1.0, 0, [3, 6, 15]),
    "asym 4, all negative": (4, False, [-15, -3.5, -2], 1.0, 15, [0, 11, 13]),
    "asym 8": (8, False, [-55, 200, 0.5], 1.0, 55, [0, 255, 55]),
    "asym 2": (2, False, [-1, 2, 1], 1.0, 1, [0, 3, 2]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_groups(name):
    bits, symmetric, values, scale, zero, codes = GOLDEN[name]
    got_codes, got_scale, got_zero, _ = one_group(values, bits, symmetric)
    assert (got_codes, got_scale, got_zero) == (codes, scale, zero)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_matches_the_definition_group_by_group(bits, symmetric, dtype):
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn(9, 192, generator=generator) * torch.logspace(-4, 2, 9)[:, None]
    weight[1].abs_()
    weight[2].abs_().neg_()
    codes, scale, zero = quantize_groups(weight, bits, 64, symmetric, dtype)
    want_codes, want_scale, want_zero = truth.quantize(weight, bits, 64, symmetric, dtype)
    assert scale.dtype == dtype
    assert torch.equal(scale.float(), want_scale)
    assert torch.equal(codes, want_codes)
    assert zero is None if symmetric else torch.equal(zero, want_zero)


@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=24),
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
)
def test_any_finite_group_is_within_half_a_step(values, bits, symmetric):
    codes, scale, _, restored = one_group(values, bits, symmetric)
    want = truth.quantize_group(np.array(values, dtype=np.float32), bits, symmetric, torch.float32)
    assert (codes, scale) == (want[0], float(want[1]))
    # an asymmetric zero-point is itself rounded: half a step more
    bound = (0.5 if symmetric else 1.0) * scale * (1 + 1e-5)
    assert max(abs(a - b) for a, b in zip(values, restored, strict=True)) <= bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_positive_symmetric_group_does_not_clip(dtype):
    values = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8] * 4
    _, scale, _, restored = one_group(values, dtype=dtype)
    # half a step, and the scale's own rounding (2^-9 for bfloat16) at code 7
    assert max(abs(a - b) for a, b in zip(values, restored, strict=True)) <= scale * (0.5 + 7 * 2**-9)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("value", [0.25, 0.0, -3.0, 1.0009765625])
def test_constant_groups_are_exact(value, bits, symmetric):
    codes, scale, zero, restored = one_group([value] * 32, bits, symmetric, torch.float16)
    assert restored == [value] * 32
    assert scale > 0
    assert all(0 <= code < 2**bits for code in codes)
    assert zero is None or 0 <= zero < 2**bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [1e-40, 6e-8, 1e-45, 1.2e-38, 1e-30])
def test_tiny_groups_stay_finite(size, symmetric, dtype):
    values = [size * step / 16 for step in range(-16, 16)]
    _, scale, _, restored = one_group(values, 4, symmetric, dtype)
    assert np.isfinite(scale)
    assert scale > 0
    # "0 or tiny": the grid never makes a weight more than a step larger than the group
    assert max(map(abs, restored)) <= 2 * size


@pytest.mark.parametrize("symmetric", [True, False])
def test_overflowing_scale_is_refused_not_written(symmetric):
    weight = torch.zeros(3, 64)
    weight[1, 40] = 1e6
    with pytest.raises(ValueError, match="row 1, group 1: the scale is not finite in float16"):
        quantize_groups(weight, 4, 32, symmetric, torch.float16)
    quantize_groups(weight, 4, 32, symmetric, torch.bfloat16)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(bad):
    weight = torch.ones(2, 32)
    weight[0, 3] = bad
    with pytest.raises(ValueError, match="row 0, group 0"):
        quantize_groups(weight, 4, 32, True, torch.float32)


def test_ragged_groups_are_refused():
    with pytest.raises(ValueError, match="in_features 320 is not a multiple of group_size 128"):
        quantize_groups(torch.zeros(2, 320), 4, 128, True, torch.float16)
    with pytest.raises(ValueError, match="in_features 9 is not a multiple of 2 groups"):
        dequantize(torch.zeros(2, 9, dtype=torch.uint8), torch.ones(2, 2), None, 4)


def test_transposed_and_half_weights_quantize_like_their_float_copy():
    weight = torch.randn(128, 33).bfloat16()
    got = quantize_groups(weight.T, 4, 32, False, torch.float16)
    want = quantize_groups(weight.T.float().contiguous(), 4, 32, False, torch.float16)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_chunks_do_not_show(monkeypatch):
    monkeypatch.setattr(layout, "_CPU_CHUNK", 640 // torch.get_num_threads())
    weight = torch.randn(101, 64)
    codes, scale, zero = quantize_groups(weight, 4, 32, False, torch.float16)
    want_codes, want_scale, want_zero = truth.quantize(weight, 4, 32, False, torch.float16)
    assert torch.equal(codes, want_codes)
    assert torch.equal(scale.float(), want_scale)
    assert torch.equal(zero, want_zero)
    assert torch.equal(dequantize(codes, scale, zero, 4), truth.dequantize(codes, scale, zero, 4).float())


@pytest.mark.parametrize("zero_dtype", [None, torch.uint8, torch.float32])
def test_dequantize_and_matmul_match_float64(zero_dtype):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 8, (7, 96), dtype=torch.uint8, generator=generator)
    scale = torch.rand(7, 3, generator=generator).half()
    zero = None if zero_dtype is None else (torch.rand(7, 3, generator=generator) * 7).to(zero_dtype)
    bias = torch.randn(7, generator=generator).half()
    x = torch.randn(2, 5, 96, generator=generator).half()
    words = pack_words(codes, 3)
    got = matmul_reference(x, words, scale, zero, 3, 32, bias)
    want = truth.matmul(x.view(10, 96), codes, scale, zero, 3, bias).view(2, 5, 7)
    assert got.dtype == x.dtype
    # one rounding of the output to fp16, and fp32 sums of 96 terms
    torch.testing.assert_close(got.double(), want, rtol=2**-10, atol=1e-4)
    neighbour = scale.roll(1, dims=1)
    assert not torch.allclose(
        matmul_reference(x, words, neighbour, zero, 3, 32, bias).double(), want, rtol=0.05
    )

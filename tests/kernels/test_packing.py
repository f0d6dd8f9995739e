"""Quantize and pack in one launch: a checkpoint must not depend on where it was made.

The truth is the group-by-group NumPy definition and one Python integer per row, neither of which shares code
with the kernel; equality is bit for bit.
"""

from __future__ import annotations

import kernel_truth as truth
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit_kernels.layout import pack_words
from lowbit_kernels.packing import quantize_pack
from lowbit_kernels.reference import quantize_groups

# N, K, group size: ragged N, one group, a row that ends within a word, groups that are no power of two
SHAPES = [(5, 96, 32), (1, 64, 64), (3, 200, 200), (4, 256, 128), (33, 192, 96), (3, 2080, 2080)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def hard_weight(n: int, k: int, group_size: int) -> torch.Tensor:
    """Normal rows of every size, and groups that are constant, zero, of one sign, on ties, or tiny."""
    generator = torch.Generator().manual_seed(k)
    weight = torch.randn(n, k, generator=generator) * torch.logspace(-3, 2, n)[:, None]
    groups = weight.view(-1, group_size)
    special = [
        torch.full((group_size,), 0.25),
        torch.zeros(group_size),
        torch.full((group_size,), -3.0),
        groups[0].abs(),
        -groups[0].abs(),
        # -8, -7.5, ... 7: every other weight on a tie of the 4-bit grid
        (torch.arange(group_size) % 31 - 16) * 0.5,
        torch.linspace(-1e-40, 1e-40, group_size),
        torch.linspace(-1e-37, 1e-37, group_size),
        torch.linspace(-6e-8, 6e-8, group_size),
    ]
    for index, values in zip(range(1, groups.shape[0]), special, strict=False):
        groups[index] = values
    return weight


def same(got, want):
    return all(a is b is None or torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bits_as_the_definition(shape, bits, symmetric, device):
    n, k, group_size = shape
    dtype, scale_dtype = DTYPES[bits % 3], DTYPES[(n + bits) % 3]
    weight = hard_weight(n, k, group_size).to(dtype)
    words, scale, zero = quantize_pack(weight.to(device), bits, group_size, symmetric, scale_dtype)
    codes, want_scale, want_zero = truth.quantize(weight, bits, group_size, symmetric, scale_dtype)
    assert torch.equal(scale.cpu().float(), want_scale)
    assert scale.dtype == scale_dtype
    assert zero is None if symmetric else torch.equal(zero.cpu(), want_zero)
    assert torch.equal(words.cpu(), truth.pack(codes, bits))


@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_same_bits_as_the_torch_path_for_every_dtype(symmetric, dtype, scale_dtype, device):
    weight = hard_weight(16, 256, 64).to(dtype)
    codes, scale, zero = quantize_groups(weight, 4, 64, symmetric, scale_dtype)
    got = quantize_pack(weight.to(device), 4, 64, symmetric, scale_dtype)
    assert same(got, (pack_words(codes, 4), scale, zero))


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32),
    bits=st.sampled_from([2, 3, 4, 8]),
    symmetric=st.booleans(),
    scale_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_any_finite_group_gets_the_bits_of_the_definition(values, bits, symmetric, scale_dtype):
    weight = torch.tensor([values], dtype=torch.float32)
    words, scale, zero = quantize_pack(weight, bits, 32, symmetric, scale_dtype)
    codes, want_scale, want_zero = truth.quantize(weight, bits, 32, symmetric, scale_dtype)
    assert torch.equal(scale.float(), want_scale)
    assert zero is None or torch.equal(zero, want_zero)
    assert torch.equal(words, truth.pack(codes, bits))


def test_torch_path_gives_the_same_bits_on_the_device(device):
    weight = hard_weight(16, 256, 64)
    for symmetric in (True, False):
        want = quantize_groups(weight, 3, 64, symmetric, torch.float16)
        got = quantize_groups(weight.to(device), 3, 64, symmetric, torch.float16)
        assert same(got, want)
        assert torch.equal(pack_words(got[0], 3).cpu(), pack_words(want[0], 3))


def test_strided_weight_and_given_output(device):
    weight = torch.randn(96, 7).to(device)
    want = quantize_pack(weight.T.contiguous(), 4, 32, False, torch.float32)
    out = (
        torch.full((7, 12), -1, dtype=torch.int32, device=device),
        torch.full((7, 3), float("nan"), device=device),
        torch.full((7, 3), 99, dtype=torch.uint8, device=device),
    )
    got = quantize_pack(weight.T, 4, 32, False, torch.float32, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert same(got, [t.cpu() for t in want])


def test_faults_are_caught():
    """Rounding half up, a neighbour's scale and swapped codes all show in the compared bits."""
    weight = hard_weight(16, 256, 64)
    codes, scale, _ = truth.quantize(weight, 4, 64, True, torch.float32)
    got = quantize_pack(weight, 4, 64, True, torch.float32)[0]
    steps = weight / scale.repeat_interleave(64, dim=1)
    half_up = (torch.floor(steps + 0.5) + 8).clamp(0, 15).to(torch.uint8)
    wrong_group = torch.round(weight / scale.roll(1, dims=1).repeat_interleave(64, dim=1) + 8)
    swapped = codes.view(-1, 2).flip(1).view(16, 256)
    assert torch.equal(got, truth.pack(codes, 4))
    for fault in (half_up, wrong_group.clamp(0, 15).to(torch.uint8), swapped):
        assert not torch.equal(got, truth.pack(fault, 4))


# NumPy's remarks on the conversions that make the scale NaN or inf
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_scales_that_are_not_finite_are_refused(bad, device):
    weight = torch.zeros(3, 64)
    weight[1, 40] = bad
    with pytest.raises(ValueError, match="row 1, group 1: the scale is not finite in float16"):
        quantize_pack(weight.to(device), 4, 32, True, torch.float16)


def test_group_sizes_the_words_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="group_size 24 must divide in_features 96"):
        quantize_pack(torch.zeros(2, 96), 4, 24, True, torch.float16)
    with pytest.raises(ValueError, match="out does not fit"):
        quantize_pack(
            torch.zeros(2, 96),
            4,
            32,
            True,
            torch.float16,
            out=(torch.empty(2, 11, dtype=torch.int32), torch.empty(2, 3, dtype=torch.float16), None),
        )


@pytest.mark.gpu
def test_offsets_past_two_billion_elements():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    n, k = 131073, 16512
    weight = torch.zeros((n, k), dtype=torch.float16, device="cuda")
    weight[-1] = torch.randn(k)
    words, scale, _ = quantize_pack(weight, 4, 128, True, torch.float16)
    codes, want_scale, _ = truth.quantize(weight[-1:].cpu(), 4, 128, True, torch.float16)
    assert torch.equal(words[-1:].cpu(), truth.pack(codes, 4))
    assert torch.equal(scale[-1:].cpu().float(), want_scale)

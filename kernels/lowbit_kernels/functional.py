"""Quantize and multiply as functions of plain tensors, on any device.

    packed, scales, zeros = quantize_weight_int4_grouped(weight, group_size=128)
    y = w4a16_gemm(x, packed, scales, zeros, group_size=128)

A GPU runs the Triton kernels; elsewhere the same numbers come from reference.py, since the interpreter that
dispatch.matmul uses for CPU tensors only bears small tiles.

The product is a torch operator with a fake kernel: torch.compile traces through it without a break, and
nothing but launches happens in it, so that CUDA graphs capture it. Its namespace is the name of this package,
which the Kernel Hub changes, so that two copies may live in one process.
"""

import torch
from torch import Tensor

from . import dispatch, fragment
from .dispatch import GemmWeight
from .fragment import FragmentWeight, expert_slots
from .layout import FragmentLayout, pack_words, unfragment_words
from .packing import quantize_pack
from .reference import gated, matmul_reference, quantize_groups, route_reference

_NAMESPACE = __name__.partition(".")[0]


def quantize_weight_int4_grouped(weight: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight to 4 bits with one scale and one zero-point for each group of inputs.

    weight: [N, K] float16, bfloat16 or float32.
    Returns packed [N, ceil(K / 8)] int32, lowest bits first, scales [N, K / group_size] of weight's dtype and
    zeros [N, K / group_size] uint8: weight ≈ (code - zero) · scale.
    Raises ValueError if groups do not fill the row or a scale is not finite in weight's dtype.
    """
    packed, scales, zeros = quantize(weight, 4, group_size, symmetric=False, scale_dtype=weight.dtype)
    assert zeros is not None
    return packed, scales, zeros


def w4a16_gemm(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int = 128
) -> Tensor:
    """Return x @ ((code - zero) · scale).T, accumulated in fp32, in x's dtype.

    x: [..., K].  packed: [N, ceil(K / 8)] int32.  scales: [N, K / group_size].  zeros: of the same shape, or
    None for the symmetric grid, whose zero-point is 8.
    Raises ValueError for shapes or dtypes that do not fit.
    """
    return linear(x, packed, scales, zeros, None, 4, group_size, packed.shape[0])


def quantize(
    weight: Tensor, bits: int, group_size: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return words, scale and zero_point (None when symmetric) of a weight [N, K], as quantize_pack does."""
    if weight.is_cuda:
        return quantize_pack(weight, bits, group_size, symmetric, scale_dtype)
    codes, scale, zero_point = quantize_groups(weight, bits, group_size, symmetric, scale_dtype)
    return pack_words(codes, bits), scale, zero_point


def restore(weight: FragmentWeight) -> GemmWeight:
    """Undo dispatch.prepare: the words, scales and zero-points in the order of files."""
    n, groups = weight.out_features, weight.in_features // weight.group_size
    words = pack_words(unfragment_words(weight.words, weight.layout), weight.bits)
    scale, zero_point = (
        None if t is None else t[:groups, :n].t().contiguous() for t in (weight.scale, weight.zero_point)
    )
    assert scale is not None
    return GemmWeight(words, scale, zero_point, weight.bits, weight.group_size, weight.in_features)


@torch.library.custom_op(f"{_NAMESPACE}::linear", mutates_args=())
def linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    out_features: int,
    gate: bool = False,
) -> Tensor:
    """Return x @ dequantized.T + bias: the kernel on a GPU, the reference elsewhere.

    x: [..., K].  words, scale, zero_point: as in GemmWeight, or as in the FragmentWeight of dispatch.prepare,
    whose words have four dimensions.  bias: [N].  group_size: K for one group a row.  out_features: N.
    gate: rows are in the order of reference.interleave, and of the product only silu(gate) · up is returned.
    Returns [..., N], with gate [..., N / 2], in x's dtype.
    Raises ValueError for shapes or dtypes that do not fit.
    """
    weight = as_weight(words, scale, zero_point, bits, group_size, x.shape[-1], out_features)
    if x.is_cuda:
        return (dispatch.gated_matmul if gate else dispatch.matmul)(x, weight, bias)
    if isinstance(weight, FragmentWeight):
        weight = restore(weight)
    y = matmul_reference(x, weight.words, weight.scale, weight.zero_point, bits, group_size, bias)
    return gated(y) if gate else y


@linear.register_fake
def _(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    out_features: int,
    gate: bool = False,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features // 2 if gate else out_features))


@torch.library.custom_op(f"{_NAMESPACE}::route", mutates_args=())
def route(index: Tensor, experts: int) -> Tensor:
    """Return which tokens each expert gets, for expert_linear; nothing waits for a GPU.

    index: [T, experts per token] integer, the experts of every token, all below `experts`.
    Returns int32, as fragment.route_kernel says.
    """
    return fragment.route(index, experts) if index.is_cuda else route_reference(index, experts)


@route.register_fake
def _(index: Tensor, experts: int) -> Tensor:
    return index.new_empty(4 * expert_slots(index.numel(), experts) + index.numel(), dtype=torch.int32)


@torch.library.custom_op(f"{_NAMESPACE}::expert_linear", mutates_args=())
def expert_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    routes: Tensor,
    bits: int,
    group_size: int,
    out_features: int,
    pairs: int,
) -> Tensor:
    """Return x @ dequantized.T by the expert of every (token, place) pair: one launch on a GPU.

    x: [T, K], row i for all pairs of token i, or [pairs, K].  words, scale, zero_point: as in linear, of all
    experts, stacked; in fragment order on a GPU.  routes: from route().
    Returns [pairs, N] in x's dtype, pairs in the order of the index that route() had.
    """
    if x.is_cuda:
        weight = as_weight(words, scale, zero_point, bits, group_size, x.shape[-1], out_features)
        assert isinstance(weight, FragmentWeight)
        return dispatch.expert_matmul(x, weight, routes, pairs)
    y = x.new_empty(pairs, out_features)
    tiles, order = routes[:-pairs].view(-1, 4).tolist(), routes[-pairs:].long()
    for expert, first, count, _ in tiles:
        if count:
            rows = order[first : first + count]
            zero = None if zero_point is None else zero_point[expert]
            given = x[rows // (pairs // x.shape[0])]
            y[rows] = linear(given, words[expert], scale[expert], zero, None, bits, group_size, out_features)
    return y


@expert_linear.register_fake
def _(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    routes: Tensor,
    bits: int,
    group_size: int,
    out_features: int,
    pairs: int,
) -> Tensor:
    return x.new_empty((pairs, out_features))


def as_weight(
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bits: int,
    group_size: int,
    in_features: int,
    out_features: int,
) -> GemmWeight | FragmentWeight:
    """The weight that linear's arguments describe, or expert_linear's in fragment order."""
    if words.dim() >= 4:
        layout = FragmentLayout(bits, out_features, in_features)
        return FragmentWeight(layout, words, scale, zero_point, group_size)
    return GemmWeight(words, scale, zero_point, bits, group_size, in_features)

"""The grid and its inverse in plain PyTorch: what every kernel must reproduce.

    sym    s = max(max w / (2^(b-1) - 1), -min w / 2^(b-1)),   z = 2^(b-1)
    asym   s = (hi - lo) / (2^b - 1),   z = clamp(round(-lo / s)),   lo = min(w, 0), hi = max(w, 0)
    q = clamp(round(w / s) + z, 0, 2^b - 1),   w ≈ (q - z) · s

per group of consecutive inputs, in fp32, round half to even, with s already rounded to its stored dtype.
Neither edge of a symmetric group clips, groups of one sign included. A constant group takes s = |w|, which
stores it exactly; a group whose scale vanishes in the stored dtype takes s = 1 and dequantizes to 0.

Only division, rounding and comparison are used, all correctly rounded everywhere, so that a CPU, a GPU and
the Triton kernel in packing.py choose the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import EXPERT_TOKENS, expert_slots, row_chunks, unpack_words

# Scales below this count as zero. Above it, weights that are subnormal in fp32 (which some hardware flushes
# to zero) are under 2^-6 of a step and round to 0 either way.
TINY_SCALE = 2.0**-120


class ScaleError(ValueError):
    """A scale that is not finite in the dtype that stores it."""


def quantize_groups(
    weight: Tensor, bits: int, group_size: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round a weight to the nearest points of the grid above.

    weight: [N, K] of any float dtype and strides.  group_size: inputs per group, a divisor of K.
    Returns codes [N, K] uint8, scale [N, K / group_size] in scale_dtype, and zero_point [N, K / group_size]
    uint8, which is None when symmetric.
    Raises ValueError if groups do not fill the row, ScaleError if a scale is not finite in scale_dtype (the
    weight is not finite, or needs a wider scale_dtype); the message names the first such row and group.
    """
    n, k = weight.shape
    if group_size < 1 or k % group_size:
        raise ValueError(f"in_features {k} is not a multiple of group_size {group_size}")
    groups = k // group_size
    codes = torch.empty((n, k), dtype=torch.uint8, device=weight.device)
    scale = torch.empty((n, groups), dtype=scale_dtype, device=weight.device)
    zero = torch.empty((n, groups), dtype=torch.uint8, device=weight.device)
    # codes move through int8, which PyTorch converts from float eight times faster than uint8
    shifted = codes.view(torch.int8)
    for rows in row_chunks(n, k, weight.device):
        w = torch.empty((rows.stop - rows.start, groups, group_size), device=weight.device)
        w.view(-1, k).copy_(weight[rows])
        s, z = group_grid(w.amin(-1), w.amax(-1), bits, symmetric, scale_dtype)
        scale[rows], zero[rows] = s, z
        w.div_(s[..., None].float()).round_().add_((z - 128.0)[..., None]).clamp_(-128, 2**bits - 129)
        shifted[rows] = w.view(-1, k)
        codes[rows] ^= 128
    require_finite(scale)
    return codes, scale, None if symmetric else zero


def group_grid(
    lo: Tensor, hi: Tensor, bits: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale and zero-point of groups from their extremes.

    lo, hi: fp32, any shape, the smallest and largest weight of each group.
    Returns scale in scale_dtype (not finite where it overflows) and zero_point fp32, whole numbers in
    0 .. 2^bits - 1; both of that shape.
    """
    # Divisors are tensors: CUDA multiplies by the reciprocal when dividing by a Python number.
    if symmetric:
        above, below = _steps(2 ** (bits - 1) - 1, lo), _steps(2 ** (bits - 1), lo)
        s = torch.maximum(hi / above, -lo / below)
    else:
        s = (hi.clamp(min=0) - lo.clamp(max=0)) / _steps(2**bits - 1, lo)
    s = torch.where(lo == hi, hi.abs(), s).to(scale_dtype)
    # compared in fp32: the bound itself vanishes in fp16
    s = torch.where(s.float() < TINY_SCALE, torch.ones_like(s), s)
    if symmetric:
        return s, torch.full_like(lo, 2 ** (bits - 1))
    return s, (-lo.clamp(max=0) / s.float()).round_().clamp_(0, 2**bits - 1)


def require_finite(scale: Tensor) -> None:
    """Raise ScaleError naming the first row and group of scale [N, G] that is not finite."""
    finite = torch.isfinite(scale)
    if not finite.all():
        row, group = (~finite).nonzero()[0].tolist()
        dtype = str(scale.dtype).removeprefix("torch.")
        raise ScaleError(
            f"row {row}, group {group}: the scale is not finite in {dtype}: "
            "the weight is not finite, or needs a wider scale dtype"
        )


def dequantize(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return (codes - zero_point) · scale, computed in fp32 and rounded once to dtype.

    codes: [N, K] uint8.  scale: [N, G] float, G a divisor of K.  zero_point: [N, G] integer or float; None
    means 2^(bits-1).  Returns [N, K].
    Raises ValueError if the groups do not fill the row.
    """
    n, k = codes.shape
    groups = scale.shape[1]
    if groups == 0 or k % groups:
        raise ValueError(f"in_features {k} is not a multiple of {groups} groups")
    weight = torch.empty((n, k), dtype=dtype, device=codes.device)
    for rows in row_chunks(n, k, codes.device):
        w = codes[rows].float().view(-1, groups, k // groups)
        w.sub_(2.0 ** (bits - 1) if zero_point is None else zero_point[rows].float()[..., None])
        weight[rows] = w.mul_(scale[rows].float()[..., None]).view(-1, k)
    return weight


def matmul_reference(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bits: int,
    group_size: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Return x @ dequantized.T + bias, accumulated in fp32 and rounded once to x's dtype.

    x: [..., K].  words: [N, ceil(K · bits / 32)] int32.  scale, zero_point: [N, K / group_size].
    bias: [N].  Returns [..., N].
    Raises ValueError where unpack_words and dequantize do, or if scale does not have K / group_size columns.
    """
    k = x.shape[-1]
    if scale.shape[1] * group_size != k:
        raise ValueError(f"{scale.shape[1]} groups of {group_size} do not make {k} inputs")
    weight = dequantize(unpack_words(words, bits, k), scale, zero_point, bits)
    y = x.float() @ weight.T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _steps(count: int, like: Tensor) -> Tensor:
    return torch.full((1,), float(count), device=like.device)


def route_reference(index: Tensor, experts: int) -> Tensor:
    """What fragment.route_kernel writes, from a stable sort."""
    flat = index.flatten()
    pairs, slots = flat.numel(), expert_slots(flat.numel(), experts)
    tiles = torch.zeros(slots, 4, dtype=torch.int32)
    first = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=experts).tolist()):
        for at in range(0, count, EXPERT_TOKENS):
            slot = first + at if slots == pairs else first // EXPERT_TOKENS + expert + at // EXPERT_TOKENS
            how_many = min(EXPERT_TOKENS, count - at)
            tiles[slot] = torch.tensor([expert, first + at, how_many, 0], dtype=torch.int32)
        first += count
    return torch.cat((tiles.flatten(), flat.argsort(stable=True).int()))


def gated(y: Tensor) -> Tensor:
    """silu(gate) · up of a product [..., N] whose rows are 8 of gate and 8 of up, in turn.

    Returns [..., N / 2].  See interleave().
    """
    gate, up = y.unflatten(-1, (-1, 2, 8)).unbind(-2)
    return (torch.nn.functional.silu(gate) * up).flatten(-2)


def interleave(rows: Tensor) -> Tensor:
    """Rows [N, ...] of gate and then of up, N / 2 each, in the order that gated() takes."""
    return rows.unflatten(0, (2, -1, 8)).transpose(0, 1).flatten(0, 2).contiguous()

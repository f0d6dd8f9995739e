"""Slow, obvious versions of packing, grid and GEMM, sharing no code with the package.

Packing is one Python integer per row, or for whole weights a row of bits; the grid is a loop over groups in
NumPy; the GEMM is float64.
"""

from __future__ import annotations

import numpy as np
import torch


def pack_row(codes: list[int], bits: int) -> list[int]:
    """The stored words of one row, as unsigned numbers."""
    stream = sum(code << (bits * k) for k, code in enumerate(codes))
    count = -(-len(codes) * bits // 32)
    return [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(count)]


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[N, K] codes to [N, W] int32 words."""
    stream = np.unpackbits(codes.numpy()[..., None], axis=2, count=bits, bitorder="little")
    stream = stream.reshape(codes.shape[0], -1)
    filled = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(filled, axis=1, bitorder="little").view(np.int32))


def round_to(value: np.float32, dtype: torch.dtype) -> np.float32:
    """Round one fp32 number to dtype, half to even, and return it as fp32."""
    if dtype == torch.float16:
        return np.float32(np.float16(value))
    if dtype == torch.bfloat16:
        bits = int(np.float32(value).view(np.uint32))
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return np.uint32(bits).view(np.float32)
    return value


def quantize_group(
    group: np.ndarray, bits: int, symmetric: bool, dtype: torch.dtype
) -> tuple[list[int], np.float32, int]:
    """Codes, scale and zero-point of one group of fp32 weights, written from the definition."""
    f32 = np.float32
    lo, hi, top = group.min(), group.max(), 2**bits - 1
    if lo == hi:
        scale = abs(hi)
    elif symmetric:
        scale = max(hi / f32(2 ** (bits - 1) - 1), -lo / f32(2 ** (bits - 1)))
    else:
        scale = (max(hi, f32(0)) - min(lo, f32(0))) / f32(top)
    scale = round_to(f32(scale), dtype)
    if scale < f32(2.0**-120):
        scale = f32(1)
    zero = 2 ** (bits - 1) if symmetric else int(np.clip(np.rint(-min(lo, f32(0)) / scale), 0, top))
    codes = [int(np.clip(np.rint(w / scale) + zero, 0, top)) for w in group]
    return codes, scale, zero


def quantize(
    weight: torch.Tensor, bits: int, group_size: int, symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K] uint8, scale [N, G] fp32 holding values of dtype, zero-points [N, G] uint8."""
    n, k = weight.shape
    groups = weight.float().numpy().reshape(-1, group_size)
    results = [quantize_group(group, bits, symmetric, dtype) for group in groups]
    codes, scale, zero = zip(*results, strict=True)
    return (
        torch.tensor(codes, dtype=torch.uint8).reshape(n, k),
        torch.tensor(np.array(scale, dtype=np.float32)).reshape(n, -1),
        torch.tensor(zero, dtype=torch.uint8).reshape(n, -1),
    )


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, bits: int
) -> torch.Tensor:
    """(codes - zero) · scale, [N, K] in float64."""
    group_size = codes.shape[1] // scale.shape[1]
    z = 2.0 ** (bits - 1) if zero is None else zero.double().repeat_interleave(group_size, dim=1)
    return (codes.double() - z) * scale.double().repeat_interleave(group_size, dim=1)


def matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bits: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ dequantized.T + bias in float64."""
    y = x.double() @ dequantize(codes, scale, zero, bits).T
    return y if bias is None else y + bias.double()

"""Prove one packed layer against the weight it came from.

The words are read back by `lowbit.decode`, which shares nothing with the packer; the decoded weight is
multiplied with random tokens and compared with the source weight (what quantization costs) and with the W4A16
kernel on the stored words (which may differ from it by rounding only).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lowbit.decode import LayerCodes, codes_of, decode_packed, dequantize
from lowbit.errors import GateError
from lowbit.scheme import PackedTensor
from lowbit_kernels.device import HAS_TRITON
from lowbit_kernels.dispatch import GemmWeight, matmul
from lowbit_kernels.reference import matmul_reference

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = 8
# Weights decoded at a time: their float32 copies stay in cache on a CPU.
CHUNK_WEIGHTS = {"cpu": 1 << 19, "cuda": 1 << 26}
# Outputs that random tokens are tried on, evenly spaced: their error is that of all weights, up to chance.
OUTPUT_ROWS = 1024
# Output rows that the torch reference of the kernel is tried on when there is no GPU.
SAMPLED_ROWS = 128

# Output rows of the corner that the interpreted kernel multiplies.
TILE_ROWS = 16

# Largest scales of a layer with which no product or square comes near what float16 activations and float32
# sums can hold, on either side.
SCALE_RANGE = (2.0**-16, 2.0)

# The kernel sums K products in fp32, an error of about sqrt(K) · 2^-24, and rounds once to the activations'
# dtype (relative error up to 2^-11 in fp16). Twice that is a fault, not rounding.
KERNEL_TOLERANCE = {"cpu": 2e-5, "cuda": 1e-3}
# Rounding to nearest errs by half a step at most; calibrated methods trade weight error for output error.
STEP_TOLERANCE = {"rtn": 0.501, "hqq": 1.0, "gptq": 1.5}
# A calibrated target may lie many small steps (8 bits) from its source; no packing fault is as small as this.
WEIGHT_TOLERANCE = {"rtn": 0.0, "hqq": 0.0, "gptq": 0.05}
# Rounding and error feedback average out over a layer; a code or zero-point off by one does not.
BIAS_TOLERANCE = 0.5


@dataclass(frozen=True)
class LayerErrors:
    """How far a packed layer is from its source; all but snr_db and step_error are relative Frobenius norms.

    kernel_error: kernel output against the decoded weight's output.  weight_error: decoded against source
    weight.  output_error: decoded weight's output against the source's, on random tokens; snr_db is
    -20 log10 of it.  step_error: root mean square weight error in units of the root mean square scale.
    step_bias: mean of (decoded - source) / scale, which a code or zero-point off by one moves by 1.
    """

    kernel_error: float
    weight_error: float
    output_error: float
    snr_db: float
    step_error: float
    step_bias: float


def measure(packed: PackedTensor, weight: Tensor, *, tile: bool = False) -> LayerErrors:
    """Errors of a packed layer against its source weight [N, K]; both on one device, any float dtype.

    tile: without a GPU, run the kernel itself too, interpreted on one corner of the layer.
    """
    return compare(codes_of(packed), lambda rows: weight[rows], kernel_error(packed, tile=tile))


def compare(
    layer: LayerCodes,
    weight: Callable[[slice], Tensor],
    kernel_error: float,
    see: Callable[[Tensor], None] = lambda codes: None,
) -> LayerErrors:
    """Errors of a layer against its source, in one pass over both that holds a few rows at a time.

    weight: rows -> the source's [R, K] on the layer's device.  kernel_error: becomes part of the result.
    see: is given the codes of the rows, in order.
    """
    scale, factor = _in_range(layer.scale)
    n, k = layer.shape
    device, groups = scale.device, scale.shape[1]
    x = random_tokens(k, device)
    every = -(-n // OUTPUT_ROWS)
    y, want = torch.empty(2, TOKENS, -(-n // every), device=device)
    # float64: sums of squares of millions of weights
    difference, size, bias = torch.zeros(3, dtype=torch.float64, device=device)
    chunks = list(layer.chunks(CHUNK_WEIGHTS[device.type]))
    # used again by every chunk, so that they stay in cache
    decoded, source = torch.empty(2, chunks[0].stop, k, device=device)
    for rows in chunks:
        part = layer.rows(rows)
        see(part.codes)
        error, original = decoded[: len(part.codes)], source[: len(part.codes)]
        dequantize(replace(part, scale=scale[rows]), out=error)
        original.copy_(weight(rows))
        if factor != 1:
            original *= factor
        error -= original
        sampled = slice(-rows.start % every, None, every)
        outputs = slice(-(-rows.start // every), -(-rows.stop // every))
        torch.matmul(x, error[sampled].T, out=y[:, outputs])
        torch.matmul(x, original[sampled].T, out=want[:, outputs])
        size += torch.dot(original.view(-1), original.view(-1))
        difference += torch.dot(error.view(-1), error.view(-1))
        bias += (error.view(-1, groups, k // groups).sum(-1) / scale[rows].float()).sum()
    step = scale.double().square().mean()
    output_error = _ratio(y.norm(), want.norm())
    return LayerErrors(
        kernel_error=kernel_error,
        weight_error=math.sqrt(_ratio(difference, size)),
        output_error=output_error,
        snr_db=-20 * math.log10(max(output_error, 1e-10)),
        step_error=math.sqrt(_ratio(difference / (n * k), step)),
        step_bias=float(bias) / (n * k),
    )


def _in_range(scale: Tensor) -> tuple[Tensor, float]:
    """The scales of a layer times a power of two that brings them near 1 if they are far from it, and it.

    Ratios of errors do not depend on it.
    """
    peak = float(scale.max())
    if SCALE_RANGE[0] < peak < SCALE_RANGE[1]:
        return scale, 1.0
    # 2^-127 is subnormal
    factor = 2.0 ** -min(math.frexp(peak)[1], 126)
    return scale.float() * factor, factor


def check_layer(name: str, method: str, errors: LayerErrors) -> None:
    """Raise GateError, naming the layer, for errors that no correct packer and kernel can make."""
    for complaint in complaints(method, errors):
        raise GateError(f"{name}: {complaint}")


def complaints(method: str, errors: LayerErrors) -> Iterator[str]:
    """What is wrong with the errors of a layer, whatever its weights."""
    if not errors.kernel_error <= max(KERNEL_TOLERANCE.values()):
        yield f"the kernel's output is off by {errors.kernel_error:.1e}, more than rounding"
    far = not errors.step_error <= STEP_TOLERANCE[method]
    if far and not errors.weight_error <= WEIGHT_TOLERANCE[method]:
        yield (
            f"the packed weight is {errors.step_error:.2f} steps from its source, "
            f"{method} stays under {STEP_TOLERANCE[method]}"
        )
    if not abs(errors.step_bias) <= BIAS_TOLERANCE:
        yield f"the packed weight is {errors.step_bias:+.2f} steps off on average, as if all codes were"


def random_tokens(in_features: int, device: torch.device) -> Tensor:
    """Always the same [TOKENS, K] standard normal tokens; the caller's generator is left alone."""
    generator = torch.Generator().manual_seed(in_features)
    return torch.randn(TOKENS, in_features, generator=generator).to(device)


def decode_rows(packed: PackedTensor, rows: slice) -> Tensor:
    """The rows of a packed layer as float32, by the route that shares nothing with the packer."""
    return dequantize(decode_packed(_take(packed, rows)))


def gemm_weight(packed: PackedTensor) -> GemmWeight:
    """The packed layer as the kernels take it."""
    scheme = packed.scheme
    return GemmWeight(
        packed.words,
        packed.scale,
        packed.zero_point,
        bits=scheme.bits,
        group_size=scheme.width(packed.in_features),
        in_features=packed.in_features,
    )


def kernel_error(packed: PackedTensor, *, tile: bool = False) -> float:
    """Relative error of the W4A16 kernel on random tokens against the decoded weight's product.

    Without a GPU it is that of the kernel's torch reference on sampled rows, and with `tile` also that of the
    kernel itself, interpreted on one corner of the layer, if Triton is installed.
    """
    scale, factor = _in_range(packed.scale)
    if factor != 1:
        packed = replace(packed, scale=scale, scheme=replace(packed.scheme, scale_dtype="float32"))
    x = random_tokens(packed.in_features, packed.words.device)
    if x.is_cuda:
        x = x.half()
        y = x.float() @ decode_rows(packed, slice(None)).T
        return _kernel_ratio(matmul(x, gemm_weight(packed)).float(), y, x, scale)
    part = _take(packed, kernel_rows(packed.shape[0], x.device))
    y = x @ decode_rows(part, slice(None)).T
    width = packed.scheme.width(packed.in_features)
    product = matmul_reference(x, part.words, part.scale, part.zero_point, packed.scheme.bits, width)
    error = _kernel_ratio(product, y, x, part.scale)
    return max(error, tile_error(packed)) if tile and HAS_TRITON else error


def kernel_rows(n: int, device: torch.device) -> slice:
    """The output rows of a layer that kernel_error looks at: all on a GPU, elsewhere a sample."""
    return slice(None) if device.type == "cuda" else slice(0, None, -(-n // SAMPLED_ROWS))


def tile_error(packed: PackedTensor) -> float:
    """Relative error of the W4A16 kernel itself on one corner of a packed layer that lies on the CPU.

    Triton's interpreter runs it on a few rows, two groups and two tokens: slow, but the real kernel.
    """
    corner = _take(packed, slice(TILE_ROWS), groups=2)
    x = random_tokens(corner.in_features, corner.words.device)[:2]
    y = x @ decode_rows(corner, slice(None)).T
    return _kernel_ratio(matmul(x, gemm_weight(corner)), y, x, corner.scale)


def _kernel_ratio(product: Tensor, y: Tensor, x: Tensor, scale: Tensor) -> float:
    """Error of a kernel's product relative to y, or to what half a step in every weight would give if that is
    more: of weights that cancel out, or of zeros, only the rounding would be left to compare with."""
    half_step = 0.5 * x.float().norm() * scale.float().square().sum(0).mean().sqrt()
    return _ratio((product - y).norm(), torch.maximum(y.norm(), half_step))


def _take(packed: PackedTensor, rows: slice, groups: int | None = None) -> PackedTensor:
    """Some rows of a packed layer, and of them the first groups, or all."""
    scale = packed.scale[rows, :groups].contiguous()
    width = scale.shape[1] * packed.scheme.width(packed.in_features)
    return replace(
        packed,
        # groups of 32, 64, ... codes end at word boundaries whatever the bits
        words=packed.words[rows, : -(-width * packed.scheme.bits // 32)].contiguous(),
        scale=scale,
        zero_point=None if packed.zero_point is None else packed.zero_point[rows, :groups].contiguous(),
        in_features=width,
    )


def _ratio(part: Tensor, whole: Tensor) -> float:
    """part / whole, and 0 where both vanish."""
    return 0.0 if part == 0 else (part / whole).item()

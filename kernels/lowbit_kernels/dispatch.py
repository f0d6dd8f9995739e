"""Which kernel multiplies by a quantized weight, and how it is launched.

    matmul(x, weight) -> problem_of(x, weight) -> choose(problem) -> VARIANTS[config.variant].launch(...)

VARIANTS is the plug point: a variant says why it cannot take a problem (`accepts` returns the reason), which
config it would use untuned and which ones are worth measuring. The first variant that accepts is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import wna16
from .layout import BITS, PackLayout

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class GemmWeight:
    """A packed weight as kernels take it.

    words: [N, ceil(K · bits / 32)] int32.  scale: [N, G] float.  zero_point: [N, G] uint8 or float, None for
    the symmetric grid.  group_size: inputs per group, K for one group per row.  in_features: K.
    Raises ValueError when the shapes or dtypes do not fit each other.
    """

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bits: int
    group_size: int
    in_features: int

    def __post_init__(self) -> None:
        n, k = self.words.shape[0], self.in_features
        if self.bits not in BITS:
            raise ValueError(f"bits {self.bits} is not supported; use one of {', '.join(map(str, BITS))}")
        if self.group_size < 1 or k % self.group_size:
            raise ValueError(f"in_features {k} is not a multiple of group_size {self.group_size}")
        _require("words", self.words, (n, PackLayout(self.bits).width(k)), (torch.int32,))
        _require("scale", self.scale, (n, k // self.group_size), FLOATS)
        if self.zero_point is not None:
            _require("zero_point", self.zero_point, (n, k // self.group_size), (torch.uint8, *FLOATS))
        if any(t is not None and not t.is_contiguous() for t in (self.words, self.scale, self.zero_point)):
            raise ValueError("words, scale and zero_point must be contiguous")

    @property
    def out_features(self) -> int:
        return self.words.shape[0]


@dataclass(frozen=True)
class Problem:
    """What the choice of a kernel may depend on.

    group_size: inputs per group, equal to k for one group per row.  has_zero: asymmetric.
    act_dtype: "float16", "bfloat16" or "float32".  m_bucket: tokens, rounded up to a power of two.
    arch: "sm_90", "gfx942", ..., or "cpu" for the interpreter.
    """

    bits: int
    group_size: int
    has_zero: bool
    act_dtype: str
    m_bucket: int
    n: int
    k: int
    arch: str


@dataclass(frozen=True)
class KernelConfig:
    """How one variant is launched: its tile, the split of K and the compiler's two knobs."""

    variant: str
    block_m: int
    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Variant:
    """One way to compute the product.

    accepts: None if it can take the problem, otherwise the reason, which the user sees.
    default: the config it uses untuned.  candidates: the configs worth measuring, default among them.
    launch: (x [M, K], weight, bias, out [M, N], config), all checked before.
    """

    accepts: Callable[[Problem], str | None]
    default: Callable[[Problem], KernelConfig]
    candidates: Callable[[Problem], tuple[KernelConfig, ...]]
    launch: Callable[[Tensor, GemmWeight, Tensor | None, Tensor, KernelConfig], None]


def matmul(
    x: Tensor,
    weight: GemmWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    config: KernelConfig | None = None,
) -> Tensor:
    """Return x @ dequantized.T + bias, accumulated in fp32.

    x: [..., K] float16, bfloat16 or float32, any strides.  bias: [N] float.  out: [..., N] of x's dtype,
    every element of which is written.  config: None lets choose() decide.
    CPU tensors run in Triton's interpreter: right, and only for small tiles bearable.
    Raises ValueError for shapes, dtypes or devices that do not fit, or a config whose variant refuses.
    """
    n, k = weight.out_features, weight.in_features
    if x.dtype not in FLOATS:
        raise ValueError(f"x is {_name(x.dtype)}; use float16, bfloat16 or float32")
    _require("x", x, (*x.shape[:-1], k), (x.dtype,))
    if out is None:
        out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    _require("out", out, (*x.shape[:-1], n), (x.dtype,))
    if bias is not None:
        _require("bias", bias, (n,), FLOATS)
    for name, tensor in (("weight", weight.words), ("out", out), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}")
    if x.numel() == 0:
        return out
    problem = problem_of(x, weight)
    if config is None:
        config = choose(problem)
    elif (reason := VARIANTS[config.variant].accepts(problem)) is not None:
        raise ValueError(f"{config.variant} cannot run this problem: {reason}")
    flat = out.view(-1, n)
    VARIANTS[config.variant].launch(x.reshape(-1, k), weight, bias, flat, config)
    return out


def problem_of(x: Tensor, weight: GemmWeight) -> Problem:
    """The problem that x [..., K] and weight pose."""
    return Problem(
        bits=weight.bits,
        group_size=weight.group_size,
        has_zero=weight.zero_point is not None,
        act_dtype=_name(x.dtype),
        m_bucket=bucket(x.numel() // weight.in_features),
        n=weight.out_features,
        k=weight.in_features,
        arch=arch_of(x.device),
    )


def bucket(tokens: int) -> int:
    """tokens rounded up to a power of two; configs are chosen per bucket."""
    return 1 << max(tokens - 1, 0).bit_length()


def arch_of(device: torch.device) -> str:
    """Architecture name of a device: sm_90, gfx942, or cpu."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def refusals(problem: Problem) -> dict[str, str | None]:
    """For every variant, why it cannot take the problem; None where it can."""
    return {name: variant.accepts(problem) for name, variant in VARIANTS.items()}


def choose(problem: Problem) -> KernelConfig:
    """The untuned config of the first variant that accepts; ValueError with every reason if none does."""
    reasons = refusals(problem)
    for name, reason in reasons.items():
        if reason is None:
            return VARIANTS[name].default(problem)
    raise ValueError("no kernel takes this problem: " + "; ".join(f"{n}: {r}" for n, r in reasons.items()))


def _accepts_plain(problem: Problem) -> str | None:
    if problem.group_size != problem.k and problem.group_size % 32:
        return f"group size {problem.group_size} is neither a multiple of 32 nor the whole row"
    return None


def _default_plain(problem: Problem) -> KernelConfig:
    """Tiles of 64 outputs; K is split until about 512 programs run, each with 4 blocks or more."""
    block_m = min(max(problem.m_bucket, 16), 64)
    if problem.arch == "cpu":
        # the interpreter's time goes by operations, whatever their size
        return KernelConfig(
            "plain", block_m, 64, wna16.block_within_group(problem.group_size, problem.k, 512), split_k=2
        )
    block_k = wna16.block_within_group(problem.group_size, problem.k, 64)
    tiles = -(-problem.m_bucket // block_m) * -(-problem.n // 64)
    split_k = max(1, min(512 // tiles, -(-problem.k // block_k) // 4, 16))
    return KernelConfig("plain", block_m, 64, block_k, split_k)


def _plain_candidates(problem: Problem) -> tuple[KernelConfig, ...]:
    default = _default_plain(problem)
    deep = wna16.block_within_group(problem.group_size, problem.k, 128)
    return (
        default,
        *(
            KernelConfig("plain", default.block_m, block_n, block_k, split_k)
            for block_n in (32, 64, 128)
            for block_k in sorted({default.block_k, deep})
            for split_k in (1, 4, 8)
        ),
    )


def _launch_plain(
    x: Tensor, weight: GemmWeight, bias: Tensor | None, out: Tensor, config: KernelConfig
) -> None:
    wna16.wna16(
        x,
        weight.words,
        weight.scale,
        weight.zero_point,
        bias,
        out,
        bits=weight.bits,
        group_size=weight.group_size,
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        split_k=config.split_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


VARIANTS: dict[str, Variant] = {
    "plain": Variant(_accepts_plain, _default_plain, _plain_candidates, _launch_plain),
}


def _require(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        wanted = " or ".join(map(_name, dtypes))
        raise ValueError(
            f"{name} is {list(tensor.shape)} {_name(tensor.dtype)}, wanted {list(shape)} {wanted}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""What a choice of kernel is about: the problem, and the config that answers it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """What the choice of a kernel may depend on.

    group_size: inputs per group, equal to k for one group per row.  has_zero: asymmetric.
    act_dtype: "float16", "bfloat16" or "float32".  m_bucket: tokens, rounded up to a power of two.
    arch: "sm_90", "gfx942", ..., or "cpu" for the interpreter.
    order: of the words: "row" as stored, or "fragment" as prepare() made them.
    """

    bits: int
    group_size: int
    has_zero: bool
    act_dtype: str
    m_bucket: int
    n: int
    k: int
    arch: str
    order: str = "row"


@dataclass(frozen=True)
class KernelConfig:
    """How one variant is launched: its tile, the split of K and the compiler's two knobs.

    The rest is read by the variants of fragment order: slices of K within a program, steps that weights are
    loaded ahead, x loaded by whole sectors, scales on the weights instead of the product, x by TMA
    descriptor, programmatic dependent launch, and how many programs run at once: hopper divides tiles beyond
    their multiple (hopper.share_out), resident launches no more.
    """

    variant: str
    block_m: int
    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3
    slices: int = 1
    depth: int = 0
    x_wide: bool = False
    scale_weights: bool = False
    descriptor: bool = False
    dependent: bool = False
    at_once: int = 0

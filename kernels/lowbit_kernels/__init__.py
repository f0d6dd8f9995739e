"""Kernels for low-bit weights: quantize and pack, WnA16 GEMM, and their truth in plain PyTorch.

Importing needs neither a GPU nor Triton, and changes nothing. Knows nothing of `lowbit`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .functional import quantize_weight_int4_grouped, w4a16_gemm

__all__ = ["quantize_weight_int4_grouped", "w4a16_gemm"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # on first use: the module imports Triton
    from . import functional

    return getattr(functional, name)

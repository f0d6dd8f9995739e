"""Checks of tensors that came from a file, with messages that name them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.errors import SourceError
from lowbit.scheme import QuantScheme, ScaleDtype

SCALE_DTYPES: dict[torch.dtype, ScaleDtype] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Return tensor; SourceError if it has another shape, or another dtype than the one asked for."""
    if tuple(tensor.shape) != shape:
        raise SourceError(f"{name}: shape {list(tensor.shape)}, config and layer ask for {list(shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise SourceError(f"{name}: dtype {tensor.dtype}, wanted {dtype}")
    return tensor


def with_scale_dtype(scheme: QuantScheme, name: str, scale: Tensor) -> QuantScheme:
    """The scheme with the dtype that scales are stored in, which no config tells."""
    if scale.dtype not in SCALE_DTYPES:
        raise SourceError(f"{name}: dtype {scale.dtype}; quantize the model again")
    return replace(scheme, scale_dtype=SCALE_DTYPES[scale.dtype])

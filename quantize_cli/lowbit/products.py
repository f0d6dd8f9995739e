"""Watching the matrix products of a model: which weight, which input, which output.

A linear layer is whatever multiplies by its weight: nn.Linear, GPT-2's Conv1D, `x @ w.T`, one expert of a
fused 3-D parameter. All of them end in a handful of torch functions, so a torch function mode sees them all
and can tell the parameter by its storage, whatever view of it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Product:
    """One product with a watched parameter.

    param: its name.  expert: index in a 3-D parameter, None in a matrix.  x: [..., K].  y: [..., N], with the
    bias if the function adds it.
    """

    param: str
    expert: int | None
    x: Tensor
    y: Tensor


# where the input and the weight stand among a function's arguments
_OPERANDS = {
    F.linear: (0, 1),
    torch.matmul: (0, 1),
    torch.mm: (0, 1),
    Tensor.matmul: (0, 1),
    Tensor.__matmul__: (0, 1),
    Tensor.mm: (0, 1),
    torch.addmm: (1, 2),
    Tensor.addmm: (1, 2),
    torch.bmm: (0, 1),
    Tensor.bmm: (0, 1),
}


class Products(TorchFunctionMode):
    """Calls `seen` with every product that uses one of `params`, and computes in `dtype`: weights and
    embeddings may be stored narrower and are widened for one product at a time."""

    def __init__(
        self, params: Mapping[str, Tensor], dtype: torch.dtype, seen: Callable[[Product], None] | None = None
    ) -> None:
        super().__init__()
        self.owners = {p.untyped_storage().data_ptr(): (name, p) for name, p in params.items()}
        self.dtype, self.seen = dtype, seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            return func(*args, **kwargs).to(self.dtype)
        if func not in _OPERANDS:
            return func(*args, **kwargs)
        at_x, at_weight = _OPERANDS[func]
        weight = args[at_weight] if len(args) > at_weight else None
        owner = None if weight is None else self.owners.get(weight.untyped_storage().data_ptr())
        if owner is None:
            return func(*args, **kwargs)
        name, param = owner
        y = func(*(a.to(self.dtype) if isinstance(a, Tensor) else a for a in args), **kwargs)
        if self.seen is None:
            return y
        x = args[at_x]
        if weight.dim() == 3:
            for expert in range(len(weight)):
                # batched experts are given zeros for the tokens that are not theirs
                routed = x[expert].any(-1)
                self.seen(Product(name, expert, x[expert][routed], y[expert][routed]))
        elif param.dim() == 3:
            expert = (weight.storage_offset() - param.storage_offset()) // param.stride(0)
            self.seen(Product(name, expert, x, y))
        else:
            self.seen(Product(name, None, x, y))
        return y

"""Watching the matrix products of a model: which weight, which input, which output.

A linear layer is whatever multiplies by its weight: nn.Linear, GPT-2's Conv1D, `x @ w.T`, one expert of a
fused 3-D parameter. All of them end in a handful of torch functions, so a torch function mode sees them all
and can tell the parameter by its storage, whatever view of it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Product:
    """One product with a watched parameter.

    param: its name.  expert: index in a 3-D parameter, None in a matrix.  x: [..., K].
    """

    param: str
    expert: int | None
    x: Tensor


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
    """Calls `before` with every product that uses one of `params`, and `after` with its result [..., N] too.

    Computes in `dtype`: weights and embeddings may be stored narrower and are widened for one product each.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        dtype: torch.dtype,
        before: Callable[[Product], None] | None = None,
        after: Callable[[Product, Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self.owners = {p.untyped_storage().data_ptr(): (name, p) for name, p in params.items()}
        self.dtype, self.before, self.after = dtype, before, after

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
        if weight is None or owner is None:
            return func(*args, **kwargs)
        name, param = owner
        products = list(_products(name, param, weight, args[at_x]))
        if self.before:
            for product in products:
                self.before(product)
        y = func(*(a.to(self.dtype) if isinstance(a, Tensor) else a for a in args), **kwargs)
        if self.after and len(products) == 1:
            self.after(products[0], y)
        return y


def _products(name: str, param: Tensor, weight: Tensor, x: Tensor) -> Iterator[Product]:
    """What a view of the parameter that is multiplied with x stands for."""
    if weight.dim() == 3:
        for expert in range(len(weight)):
            # batched experts are given zeros for the tokens that are not theirs
            yield Product(name, expert, x[expert][x[expert].any(-1)])
    elif param.dim() == 3:
        yield Product(name, (weight.storage_offset() - param.storage_offset()) // param.stride(0), x)
    else:
        yield Product(name, None, x)

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


class Kept:
    """Results of a module for one input, so that running it again goes on where weights may still change.

    The costly calls of a run, products and attention, come in the same order in every run. Their results are
    kept from the start of the run up to the first product with a weight that is not `settled`, as long as
    `take` grants their bytes.
    """

    def __init__(self, settled: Callable[[str], bool], take: Callable[[int], bool]) -> None:
        self.settled, self.take = settled, take
        self.results: list[tuple[Tensor, int]] = []
        self.limit: int | None = None
        self.start()

    def start(self) -> None:
        """Begin a run."""
        self.at, self.following = 0, True

    def result(self, param: str | None, compute: Callable[[], Any]) -> Any:
        """What compute returns, from an earlier run if that is known.

        param: the weight that it uses, None for none.
        """
        self.following = self.following and (param is None or self.settled(param)) and self.at != self.limit
        if not self.following:
            return compute()
        if self.at < len(self.results):
            y, version = self.results[self.at]
            if y._version == version:
                self.at += 1
                return y
            # the module writes into it: from here on nothing can be kept
            self.limit = self.at
            del self.results[self.at :]
            self.following = False
            return compute()
        y = compute()
        if self.take(y.nbytes):
            self.results.append((y, y._version))
            self.at += 1
        else:
            self.following = False
        return y


class Products(TorchFunctionMode):
    """Calls `before` with every product that uses one of `params`, and `after` with its result [..., N] too.

    Computes in `dtype`: weights and embeddings may be stored narrower and are widened for one product each.
    kept: results of earlier runs on the same input, and of this one for later runs.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        dtype: torch.dtype,
        before: Callable[[Product], None] | None = None,
        after: Callable[[Product, Tensor], None] | None = None,
        kept: Kept | None = None,
    ) -> None:
        super().__init__()
        self.owners = {p.untyped_storage().data_ptr(): (name, p) for name, p in params.items()}
        self.dtype, self.before, self.after, self.kept = dtype, before, after, kept
        if kept is not None:
            kept.start()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            return func(*args, **kwargs).to(self.dtype)
        if func is F.scaled_dot_product_attention and self.kept is not None:
            return self.kept.result(None, lambda: func(*args, **kwargs))
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

        def compute() -> Any:
            return func(*(a.to(self.dtype) if isinstance(a, Tensor) else a for a in args), **kwargs)

        y = compute() if self.kept is None else self.kept.result(name, compute)
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

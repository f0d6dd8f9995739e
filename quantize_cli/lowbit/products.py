"""Watching the matrix products of a model: which weight, which input, which output.

A linear layer is whatever multiplies by its weight: nn.Linear, GPT-2's Conv1D, `x @ w.T`, one expert of a
fused 3-D parameter. All of them end in a handful of torch functions, so a torch function mode sees them all
and can tell the parameter by its storage, whatever view of it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Product:
    """One product with a watched parameter.

    param: its name.  expert: index in a 3-D parameter, None in a matrix.  x: [..., K].
    """

    param: str
    expert: int | None
    x: Tensor


# what `x.data` calls: another object each time, equal to this one
_DATA = vars(torch._C.TensorBase)["data"].__get__

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


@dataclass(frozen=True)
class _Result:
    """What a call gave. module: its name if it was a module's, None for a product or attention.

    tensors: those in value.  versions: how often each had been written into.
    """

    module: str | None
    value: Any
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum({t.untyped_storage().data_ptr(): t.nbytes for t in self.tensors}.values())

    def untouched(self) -> bool:
        return _versions(self.tensors) == self.versions


class Kept:
    """Results of a module for one input, so that running it again goes on where weights may still change.

    Products, attention and whole submodules come in the same order in every run. Their results are kept from
    the start of the run up to the first use of a weight that is not `settled`, whatever function uses it, and
    the first submodule that changes more than what it returns; as long as `take` grants their bytes (a
    negative number gives some back). A submodule's result stands for all inside it.
    """

    def __init__(self, settled: Callable[[str], bool], take: Callable[[int], bool]) -> None:
        self.settled, self.take = settled, take
        self.results: list[_Result] = []
        self.limit: int | None = None
        # submodules whose results are written into afterwards
        self.passed_on: set[str] = set()
        self.start()

    def start(self) -> None:
        """Begin a run."""
        self.at, self.following = 0, True

    def use(self, param: str) -> None:
        """What comes now depends on the weight."""
        self.following = self.following and self.settled(param)

    def result(self, param: str | None, compute: Callable[[], Any]) -> Any:
        """What compute returns, a tensor, from an earlier run if that is known.

        param: the weight that it uses, None for none.
        """
        if param is not None:
            self.use(param)
        self.following = self.following and self.at != self.limit
        if not self.following:
            return compute()
        if self.at < len(self.results):
            known = self.results[self.at]
            if known.untouched():
                self.at += 1
                return known.value
            # the module writes into it: from here on nothing can be kept
            self._forget(self.at)
            self.limit = self.at
            self.following = False
            return compute()
        y = compute()
        self.following = self._keep(_Result(None, y, (y,), (y._version,)))
        return y

    @contextmanager
    def submodules(self, module: nn.Module) -> Iterator[None]:
        """Inside, calls of the modules in `module` are answered from earlier runs where that is possible."""
        parts = [(name, part) for name, part in module.named_modules() if name]
        own = {name: part.__dict__["forward"] for name, part in parts if "forward" in part.__dict__}
        for name, part in parts:
            # on the instance: a module's hooks are called by its class, before and after
            part.__dict__["forward"] = partial(self._submodule, name, part, part.forward)
        try:
            yield
        finally:
            for name, part in parts:
                del part.__dict__["forward"]
                if name in own:
                    part.__dict__["forward"] = own[name]

    def _submodule(
        self, name: str, part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        first = self.at
        if not self.following:
            return forward(*args, **kwargs)
        known = self.results[first] if first < len(self.results) else None
        if known is not None and known.module == name:
            if known.untouched():
                self.at += 1
                return known.value
            self.passed_on.add(name)
            self._forget(first)
        given = list(_tensors([args, kwargs]))
        before, state = _versions(given), list(_state(part))
        value = forward(*args, **kwargs)
        if not all(map(_is_plain, (*args, *kwargs.values()))) or not _same_state(state, list(_state(part))):
            # what it leaves there is not in its result, and may be what others go by
            self.following = False
        parts = value if isinstance(value, tuple) else (value,)
        found = tuple(_tensors(parts))
        if (
            self.following
            and name not in self.passed_on
            # anything else may hold more than is seen here
            and all(part is None or isinstance(part, Tensor) for part in parts)
            # a module that writes into what it is given, or hands it on, has to be run
            and before == _versions(given)
            and not _storages(given) & _storages(found)
        ):
            inside = self.results[first : self.at]
            self._forget(first)
            if not self._keep(_Result(name, value, found, _versions(found))):
                for result in inside:
                    self._keep(result)
        return value

    def _keep(self, result: _Result) -> bool:
        granted = self.take(result.nbytes)
        if granted:
            self.results.append(result)
            self.at = len(self.results)
        return granted

    def _forget(self, first: int) -> None:
        """Drop the results from `first` on."""
        self.take(-sum(result.nbytes for result in self.results[first:]))
        del self.results[first:]
        self.limit = None if self.limit is not None and self.limit > first else self.limit
        self.at = first


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _is_plain(value: Any) -> bool:
    """A tensor, or nothing that could be written into."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(
        value, Tensor | bool | int | float | complex | str | torch.dtype | torch.device
    )


def _state(module: nn.Module) -> Iterator[tuple[Any, int]]:
    """What the attributes of a module and those in it hold, also one level into containers: each object, and
    how often it had been written into if it is a tensor."""
    for part in module.modules():
        for value in vars(part).values():
            inside = value.values() if isinstance(value, dict) else value
            for held in inside if isinstance(value, dict | list | tuple | set) else (value,):
                yield held, held._version if isinstance(held, Tensor) else 0


def _same_state(before: list[tuple[Any, int]], after: list[tuple[Any, int]]) -> bool:
    return len(before) == len(after) and all(
        a is b and old == new for (a, old), (b, new) in zip(before, after, strict=True)
    )


def _versions(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(t._version for t in tensors)


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


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
        if func == _DATA:
            # the same, but for counting what is written into it
            return args[0].detach()
        if func not in _OPERANDS:
            return self._unwatched(func, args, kwargs)
        at_x, at_weight = _OPERANDS[func]
        weight = args[at_weight] if len(args) > at_weight else None
        owner = None if weight is None else self._owner(weight)
        if weight is None or owner is None:
            return self._unwatched(func, args, kwargs)
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

    def _owner(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        """The watched parameter that holds a tensor, and its name."""
        return self.owners.get(tensor.untyped_storage().data_ptr())

    def _unwatched(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that is no product of a watched parameter, though it may use one."""
        y = func(*args, **kwargs)
        if self.kept is not None and self.kept.following and any(True for _ in _tensors(y)):
            for tensor in _tensors([args, kwargs]):
                owner = self._owner(tensor)
                if owner is not None:
                    self.kept.use(owner[0])
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

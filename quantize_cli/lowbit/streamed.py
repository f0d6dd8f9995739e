"""Matrices that stay in their files while a model runs: a few tokens go through a model of any size in the
memory of a few rows, and nothing is decoded that is not multiplied."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.checkpoint.header import Rows
from lowbit.errors import SourceError
from lowbit.skeleton import Skeleton, WeightSource
from lowbit.validate import CHUNK_WEIGHTS


class StreamedLinear(nn.Module):
    """y = x @ W.T + bias for x [..., K]; W [N, K] is opened, read and decoded in every call.

    weight: the parameter of the module that this one replaces, on the meta device.
    """

    def __init__(self, module: nn.Linear, open_rows: Callable[[], Rows], pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self.weight, self.bias = module.weight, module.bias
        self.open_rows, self.pool = open_rows, pool

    def forward(self, x: Tensor) -> Tensor:
        rows, (n, k) = self.open_rows(), self.weight.shape
        y = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
        step = max(8, CHUNK_WEIGHTS[x.device.type] // k // 8 * 8)

        def product(start: int) -> None:
            part = slice(start, min(start + step, n))
            y[..., part] = x @ rows.read(part).to(x.device, x.dtype).T

        list(self.pool.map(product, range(0, n, step)))
        return y if self.bias is None else y + self.bias


class StreamedEmbedding(nn.Module):
    """Rows of a table [V, H] for token ids, each read from the file."""

    def __init__(self, module: nn.Embedding, open_rows: Callable[[], Rows]) -> None:
        super().__init__()
        self.weight, self.open_rows = module.weight, open_rows

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.open_rows()
        found, place = ids.unique(return_inverse=True)
        table = torch.cat([rows.read(slice(row, row + 1)) for row in found.tolist()])
        return table.to(ids.device, self.weight.dtype)[place]


def stream_matrices(skeleton: Skeleton, weights: WeightSource, pool: ThreadPoolExecutor) -> set[str]:
    """Replace the plain linears and embeddings of a model by streamed ones; return their weights' names.

    What is stacked or turned on loading, and modules of a kind of their own, are left to be loaded.
    """
    model: Any = skeleton.model
    streamed = set()
    for path, module in list(model.named_modules()):
        name = f"{path}.weight"
        origin = skeleton.origins.get(name) or skeleton.origins.get(model.all_tied_weights_keys.get(name))
        if type(module) not in (nn.Linear, nn.Embedding) or origin is None or origin.converter is not None:
            continue
        open_rows = partial(_open_rows, weights, origin.sources[0], name, tuple(module.weight.shape))
        if isinstance(module, nn.Linear):
            model.set_submodule(path, StreamedLinear(module, open_rows, pool))
        else:
            model.set_submodule(path, StreamedEmbedding(module, open_rows))
        streamed.add(name)
    return streamed


def _open_rows(weights: WeightSource, source: str, name: str, shape: tuple[int, ...]) -> Rows:
    rows = weights.rows_of(source)
    if rows.shape != shape:
        raise SourceError(f"{weights.name}: {name} is {list(rows.shape)}, config.json asks for {list(shape)}")
    return rows

"""Attention of decode.py: all that happens to one token between its projections, in one launch a layer.

attend      rotates query and key, appends key and value to the cache, and attends to all tokens so far
install     lets the attention modules of a Llama do that in place of transformers' own
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels.device import jit, launch, tl
from lowbit_kernels.fragment import _issue, _let_next_start, _wait_for_previous


@jit()
def _rotated(x_ptr, cos_ptr, sin_ptr, D: tl.constexpr):
    """x [D] turned by its position, in fp32: the halves are the coordinates of D / 2 points."""
    d = tl.arange(0, D)
    x = tl.load(x_ptr + d).to(tl.float32)
    other = tl.load(x_ptr + (d + D // 2) % D).to(tl.float32)
    other = tl.where(d < D // 2, -other, other)
    return x * tl.load(cos_ptr + d).to(tl.float32) + other * tl.load(sin_ptr + d).to(tl.float32)


@jit()
def _see(query, k, v, seen, total, acc, peak):
    """Add keys k and values v [BLOCK, D] to a softmax in progress: total and acc [D], over exp(peak)."""
    scores = tl.where(seen, tl.sum(k.to(tl.float32) * query[None, :], axis=1), float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, axis=0))
    weights = tl.exp(scores - highest)
    kept = tl.exp(peak - highest)
    acc = acc * kept + tl.sum(weights[:, None] * v.to(tl.float32), axis=0)
    return total * kept + tl.sum(weights, axis=0), acc, highest


@jit()
def attend_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    before_ptr,
    out_ptr,
    length,
    scaling,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One head of out [heads, D] = softmax(scaling · query keysᵀ) values.

    query: [heads, D].  key, value: [heads / SHARE, D].  cos, sin: [D].  cache: [2, heads / SHARE, length, D],
    keys and values.  before: int64, the tokens in the cache, where this one is appended.
    DEPENDENT: launched while the kernel before still runs. What earlier tokens left, the cache and `before`,
    is read before that has ended.
    """
    head = tl.program_id(0)
    shared = head // SHARE
    d = tl.arange(0, D)
    before = tl.load(before_ptr).to(tl.int32)
    keys = cache_ptr + shared.to(tl.int64) * length * D
    values = keys + (tl.num_programs(0) // SHARE).to(tl.int64) * length * D
    token = tl.arange(0, BLOCK)
    cells = token[:, None] * D + d[None, :]
    k = tl.load(keys + cells, mask=(token < before)[:, None], other=0.0)
    v = tl.load(values + cells, mask=(token < before)[:, None], other=0.0)
    if DEPENDENT:
        _wait_for_previous()
        _let_next_start()
    query = _rotated(query_ptr + head * D, cos_ptr, sin_ptr, D).to(k.dtype).to(tl.float32) * scaling
    key = _rotated(key_ptr + shared * D, cos_ptr, sin_ptr, D).to(k.dtype)
    value = tl.load(value_ptr + shared * D + d)
    if head % SHARE == 0:
        tl.store(keys + before * D + d, key)
        tl.store(values + before * D + d, value)
    # the token sees itself
    peak = tl.sum(query * key.to(tl.float32), axis=0)
    total = 1.0
    acc = value.to(tl.float32)
    for start in range(0, before, BLOCK):
        later = start + BLOCK + token < before
        next_k = tl.load(keys + cells + (start + BLOCK) * D, mask=later[:, None], other=0.0)
        next_v = tl.load(values + cells + (start + BLOCK) * D, mask=later[:, None], other=0.0)
        if DEPENDENT:
            _issue()
        total, acc, peak = _see(query, k, v, start + token < before, total, acc, peak)
        k, v = next_k, next_v
    tl.store(out_ptr + head * D + d, (acc / total).to(out_ptr.dtype.element_ty))


@torch.library.custom_op("lowbit_benchmarks::attend", mutates_args={"cache"})
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    before: Tensor,
    scaling: float,
) -> Tensor:
    """Attention of one token to itself and the ones in the cache, to which it is added.

    query: [1, 1, heads · D].  key, value: [1, 1, kv heads · D].  cos, sin: [1, 1, D].
    cache: [2, kv heads, length, D], keys and values.  before: int64 of one element, tokens in the cache.
    """
    _, shared, length, d = cache.shape
    heads = query.shape[-1] // d
    out = torch.empty_like(query)
    dependent = query.is_cuda and torch.cuda.get_device_capability()[0] >= 9
    launch(
        attend_kernel,
        (heads,),
        query,
        key,
        value,
        cos,
        sin,
        cache,
        before,
        out,
        length,
        scaling,
        SHARE=heads // shared,
        D=d,
        BLOCK=128,
        DEPENDENT=dependent,
        num_warps=8,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out


@attend.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query)


def _forward(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> tuple[Tensor, None]:
    query, key, value = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
    y = attend(query, key, value, *position_embeddings, self.cache, self.before, self.scaling)
    return self.o_proj(y), None


def install(model: Any, length: int, before: Tensor) -> None:
    """Let a Llama take one token at a time, with a cache of `length` tokens in each layer.

    before: int64 of one element, tokens in the cache, which the caller advances.
    """
    heads = model.config.num_key_value_heads
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.cache = torch.zeros(
            2, heads, length, attention.head_dim, dtype=model.dtype, device=before.device
        )
        attention.before = before
        attention.forward = MethodType(_forward, attention)


def release(model: Any) -> None:
    """Undo install()."""
    for layer in model.model.layers:
        del layer.self_attn.forward, layer.self_attn.cache, layer.self_attn.before

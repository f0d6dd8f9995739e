"""The experts of one layer for a batch of decoding: one launch a product, against loops and 16 bits.

    python benchmarks/moe.py benchmarks/results/moe-h200.json

Microseconds for route, gate_up product, gated activation, down product and weighted sum, medians. Every call
draws its experts anew, so that their weights come from memory, not from L2. Columns, all bf16, the first two
4 bits in groups of 128:

    routed       route, then one launch a product for all experts, in a CUDA graph; `eager_us` without one
    loop         expert by expert, as for many tokens; the host waits for the list of experts, so no graph
    dense_loop   the same loop over 16-bit weights
    grouped      16-bit torch.nn.functional.grouped_mm over sorted tokens, in a CUDA graph
    floor        reading the packed weights of the experts drawn, on average over the calls

--compile only fills Triton's cache.

Before it is timed, every column is compared with float64 products of the same dequantized weights; the
activation between them is rounded to bf16 by all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from lowbit_kernels.fragment import FragmentWeight, dequantize
from lowbit_kernels.functional import expert_linear, linear, route
from lowbit_kernels.measure import random_weight, read_floor, relative_error, time_graph
from lowbit_kernels.tuning import stamp


@dataclass(frozen=True)
class Model:
    """hidden: of the layer.  inner: of one expert.  top: experts a token."""

    name: str
    experts: int
    top: int
    hidden: int
    inner: int


MODELS = [Model("Mixtral 8x7B", 8, 2, 4096, 14336), Model("Qwen3-30B-A3B", 128, 8, 2048, 768)]
TOKENS = (1, 4, 16)
CALLS = 24

# Two products and an activation, each rounded to bf16.
TOLERANCE = 8e-3


@dataclass(frozen=True)
class Layer:
    gate_up: FragmentWeight
    down: FragmentWeight
    dense_gate_up: Tensor
    dense_down: Tensor


@dataclass(frozen=True)
class Batch:
    """x: [T, hidden].  index: [T, top].  weights: [T, top], of the router."""

    x: Tensor
    index: Tensor
    weights: Tensor


def stacked(n: int, k: int, experts: int) -> tuple[FragmentWeight, Tensor]:
    """Random weights of all experts, and the same in bf16 [experts, n, k]."""
    first = random_weight(n, k, scale_dtype=torch.bfloat16)
    words = torch.stack([first.words.roll(e, 0).bitwise_xor_(e) for e in range(experts)])
    scale = torch.stack([first.scale.roll(e, 1) for e in range(experts)])
    weight = replace(first, words=words, scale=scale)
    dense = [dequantize(of(weight, e), torch.bfloat16) for e in range(experts)]
    return weight, torch.stack(dense)


def of(weight: FragmentWeight, expert: int) -> FragmentWeight:
    return replace(weight, words=weight.words[expert], scale=weight.scale[expert])


def product(weight: FragmentWeight, x: Tensor, routes: Tensor, pairs: int) -> Tensor:
    grid = weight.bits, weight.group_size, weight.out_features
    return expert_linear(x, weight.words, weight.scale, None, routes, *grid, pairs)


def routed(layer: Layer, batch: Batch) -> Tensor:
    pairs = batch.index.numel()
    routes = route(batch.index, layer.gate_up.words.shape[0])
    gate, up = product(layer.gate_up, batch.x, routes, pairs).chunk(2, dim=-1)
    y = product(layer.down, silu(gate) * up, routes, pairs)
    return weighted(y, batch)


def weighted(y: Tensor, batch: Batch) -> Tensor:
    return (y.view(*batch.index.shape, -1) * batch.weights[..., None]).sum(1).to(y.dtype)


def looped(layer: Layer, batch: Batch, call: Callable[[Tensor, Layer, int, bool], Tensor]) -> Tensor:
    out = torch.zeros_like(batch.x)
    for expert in batch.index.unique().tolist():
        token, place = torch.where(batch.index == expert)
        gate, up = call(batch.x[token], layer, expert, False).chunk(2, dim=-1)
        y = call(silu(gate) * up, layer, expert, True) * batch.weights[token, place, None]
        out.index_add_(0, token, y.to(out.dtype))
    return out


def packed_linear(x: Tensor, layer: Layer, expert: int, down: bool) -> Tensor:
    weight = of(layer.down if down else layer.gate_up, expert)
    grid = weight.bits, weight.group_size, weight.out_features
    return linear(x, weight.words, weight.scale, None, None, *grid)


def dense_linear(x: Tensor, layer: Layer, expert: int, down: bool) -> Tensor:
    return x @ (layer.dense_down if down else layer.dense_gate_up)[expert].t()


def grouped(layer: Layer, batch: Batch) -> Tensor:
    flat = batch.index.flatten()
    order = flat.argsort()
    numbers = torch.arange(layer.dense_down.shape[0], device=flat.device)
    ends = torch.searchsorted(flat[order], numbers, right=True, out_int32=True)
    x = batch.x[order // batch.index.shape[1]]
    gate, up = grouped_mm(x, layer.dense_gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    y = torch.empty(flat.numel(), batch.x.shape[1], dtype=batch.x.dtype, device=flat.device)
    y[order] = grouped_mm(silu(gate) * up, layer.dense_down.transpose(1, 2), offs=ends)
    return weighted(y, batch)


def truth(layer: Layer, batch: Batch) -> Tensor:
    """In float64, pair by pair, from codes and scales."""
    y = torch.zeros(batch.x.shape, dtype=torch.float64, device=batch.x.device)
    for expert in set(batch.index.flatten().tolist()):
        gate_up = dequantize(of(layer.gate_up, expert), torch.float32).double()
        down = dequantize(of(layer.down, expert), torch.float32).double()
        for token, place in (batch.index == expert).nonzero().tolist():
            gate, up = (gate_up @ batch.x[token].double()).chunk(2)
            h = (silu(gate) * up).bfloat16().double()
            y[token] += (down @ h) * batch.weights[token, place].double()
    return y


def draw(model: Model, tokens: int, seed: int) -> Batch:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(tokens, model.hidden, device="cuda", generator=generator).bfloat16()
    scores = torch.randn(tokens, model.experts, device="cuda", generator=generator)
    weights, index = scores.softmax(-1).topk(model.top)
    return Batch(x, index, (weights / weights.sum(-1, keepdim=True)).bfloat16())


def eager(call: Callable[[int], Tensor], seconds: float = 0.15) -> float:
    """Median microseconds of a call from the host's start until the device is done."""
    call(0)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 8 or time.perf_counter() - begin < seconds:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(len(times) % CALLS)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def make(model: Model) -> Layer:
    gate_up, dense_gate_up = stacked(2 * model.inner, model.hidden, model.experts)
    down, dense_down = stacked(model.hidden, model.inner, model.experts)
    return Layer(gate_up, down, dense_gate_up, dense_down)


def compile_for(model: Model, tokens: int) -> None:
    """Launch what rows_of launches for so many tokens."""
    layer = make(model)
    for seed in range(CALLS):
        batch = draw(model, tokens, seed)
        routed(layer, batch)
        looped(layer, batch, packed_linear)
    torch.cuda.synchronize()


def rows_of(model: Model) -> list[dict[str, object]]:
    layer = make(model)
    expert_bytes = (layer.gate_up.nbytes + layer.down.nbytes) / model.experts
    rows: list[dict[str, object]] = []
    for tokens in TOKENS:
        batches = [draw(model, tokens, seed) for seed in range(CALLS)]
        drawn = sum(batch.index.unique().numel() for batch in batches) / CALLS
        columns: dict[str, Callable[[int], Tensor]] = {
            "routed": lambda i, b=batches: routed(layer, b[i]),
            "loop": lambda i, b=batches: looped(layer, b[i], packed_linear),
            "dense_loop": lambda i, b=batches: looped(layer, b[i], dense_linear),
            "grouped": lambda i, b=batches: grouped(layer, b[i]),
        }
        row: dict[str, object] = {"model": model.name, "tokens": tokens, "experts": round(drawn, 2)}
        row["floor_us"] = round(read_floor(int(drawn * expert_bytes)), 1)
        expected = truth(layer, batches[0])
        for name, call in columns.items():
            error = relative_error(call(0), expected)
            if not error < TOLERANCE:
                print(f"{name} is wrong: {error}")
                continue
            row[f"{name}_rel_err"] = float(f"{error:.2g}")
            graph = name in ("routed", "grouped")
            row[f"{name}_us"] = round(time_graph(call, CALLS) if graph else eager(call), 1)
        row["eager_us"] = round(eager(columns["routed"]), 1)
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    if arguments.compile:
        jobs = [(model, tokens) for model in MODELS for tokens in TOKENS]
        with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
            pool.starmap(compile_for, jobs, chunksize=1)
        return
    rows = [row for model in MODELS for row in rows_of(model)]
    header = {**stamp(), "triton": triton.__version__}
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    parts = [f' "{key}": {json.dumps(value)}' for key, value in header.items()]
    arguments.results.write_text("{\n" + ",\n".join(parts) + f',\n "rows": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()

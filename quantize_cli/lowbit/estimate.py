"""How long each method would take on this machine, and in how much memory: an estimate, not a promise.

Work is counted from shapes: P weights, n calibration tokens, and for each layer [N, K]

    rtn, hqq   P weights at a rate
    gptq       forwards 5 · P n     (one in full precision, parts of three in the quantized stream)
               sums     2 · K² n    for each input that layers share
               solving  14 · N K²   (feeding errors forward, and refining the codes six times)

and divided by rates measured on the spot, in a fraction of a second: of a matrix product, of rounding and of
a half-quadratic solve. Reading and writing are not counted: on a slow disk they are what takes the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbit.plan import LayerPlan, Plan
from lowbit.scheme import QuantScheme

if TYPE_CHECKING:
    import torch

# the column loops of gptq run on one thread (or a fraction of a GPU), and memory holds them up
_SOLVE_SHARE = {"cpu": 0.25, "cuda": 0.1}
# interpreter, torch and transformers
_BASE_BYTES = 600 << 20
# float32 copies of a layer and of its Hessian while it is solved
_LAYER_COPIES, _HESSIAN_COPIES = 6, 5


@dataclass(frozen=True)
class Estimate:
    """What a method would take. device_bytes: on the GPU, 0 without one."""

    method: str
    seconds: float
    host_bytes: int
    device_bytes: int = 0


@dataclass(frozen=True)
class Rates:
    """What one thread of this machine (or its GPU) does in a second, and how many threads there are."""

    product_flops: float
    rtn_weights: float
    hqq_weights: float
    threads: int


def estimate(plan: Plan, device: torch.device, tokens: int, rates: Rates | None = None) -> list[Estimate]:
    """Figures for every method on the layers of the plan, whatever method it has.

    tokens: of calibration text.  rates: measured on `device` if None.
    """
    rates = rates or measure_rates(device)
    weights = sum(n * k for n, k in (layer.shape for layer in plan.layers))
    in_flight = min(plan.source_bytes, 768 << 20)
    on_gpu = device.type == "cuda"
    streamed = (_BASE_BYTES + in_flight, in_flight if on_gpu else 0)
    calibrated = _calibrated_bytes(plan, tokens)
    return [
        Estimate("rtn", weights / (rates.rtn_weights * rates.threads), *streamed),
        Estimate("hqq", weights / (rates.hqq_weights * rates.threads), *streamed),
        Estimate(
            "gptq",
            _calibrated_seconds(plan, device, tokens, rates),
            _BASE_BYTES + (_block_bytes(plan) if on_gpu else calibrated),
            calibrated if on_gpu else 0,
        ),
    ]


def _calibrated_seconds(plan: Plan, device: torch.device, tokens: int, rates: Rates) -> float:
    forwards = sum(5 * n * k * tokens for n, k in (layer.shape for layer in plan.layers))
    # layers of one parent and width mostly read one input
    inputs = {(layer.name.rpartition(".")[0], layer.shape[1]) for layer in plan.layers}
    sums = sum(2 * k * k * tokens for _, k in inputs)
    solving = sum(14 * n * k * k for n, k in (layer.shape for layer in plan.layers))
    solve_flops = rates.product_flops * _SOLVE_SHARE[device.type]
    return (forwards + sums) / (rates.product_flops * rates.threads) + solving / solve_flops


def _block_of(layer: LayerPlan) -> str:
    parts = layer.name.split(".")
    return ".".join(parts[: 1 + next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))])


def _block_bytes(plan: Plan) -> int:
    """Source bytes of the largest block, or of the embeddings if they are larger."""
    blocks: dict[str, int] = {}
    for layer in plan.layers:
        blocks[_block_of(layer)] = blocks.get(_block_of(layer), 0) + layer.source_bytes
    return max([*blocks.values(), *(copy.nbytes for copy in plan.copies)])


def _calibrated_bytes(plan: Plan, tokens: int) -> int:
    """A block, two streams and what the layers of a block held in full precision, and one layer's solve."""
    widest = max(max(layer.shape) for layer in plan.layers)
    hidden = min(min(layer.shape[1] for layer in plan.layers), widest)
    activations = 4 * tokens * (5 * hidden + widest)
    solve = max(
        4 * (_LAYER_COPIES * n * k + _HESSIAN_COPIES * k * k)
        for n, k in (layer.shape for layer in plan.layers)
    )
    return _block_bytes(plan) + activations + solve


def measure_rates(device: torch.device) -> Rates:
    """Time a product, a rounding and a solve of a small random weight."""
    import torch

    from lowbit.solvers import SOLVERS

    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 768
    dtype = torch.bfloat16 if on_gpu else torch.float32
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(size, size, generator=generator).to(device, dtype)
    many = torch.randn(4096 if on_gpu else 1024, 2048, generator=generator).to(device)
    few = many if on_gpu else many[:64]
    scheme = QuantScheme(symmetric=False)

    def solve(method: str, weight: torch.Tensor) -> Callable[[], object]:
        solver = SOLVERS[method]
        return lambda: solver.solve(weight, scheme, None, solver.options())

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Rates(
            product_flops=2 * size**3 / _seconds(lambda: a @ a, device),
            rtn_weights=many.numel() / _seconds(solve("rtn", many), device),
            hqq_weights=few.numel() / _seconds(solve("hqq", few), device),
            threads=1 if on_gpu else threads,
        )
    finally:
        torch.set_num_threads(threads)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The best of three runs after one that warms up."""
    import torch

    times = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])

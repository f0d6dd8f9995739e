"""Timing on a GPU: cold L2, CUDA graphs, medians; and the time that reading the weight alone takes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from .device import jit, launch, tl
from .fragment import FragmentWeight, lent_counters
from .layout import FragmentLayout


def time_graph(
    call: Callable[[int], object], copies: int, milliseconds: float = 8.0, settle: float = 0.0
) -> float:
    """Median microseconds of call(i), i running over `copies` sets of inputs, in replays of a CUDA graph.

    The copies together should exceed three times the L2 cache (see copies_for), so that calls find it cold.
    settle: milliseconds of replays that are not counted, in which a card at its power limit slows down.
    """
    for i in (0, copies - 1):
        call(i)
    torch.cuda.synchronize()
    once = _elapsed(lambda: call(0))
    rounds = max(1, min(math.ceil(24 / copies), int(4.0 / (once * copies))))
    # many measurements would use them up, and launches then clear counters of their own
    with lent_counters():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for i in range(copies):
                    call(i)
        graph.replay()
        spent = 0.0
        while spent < settle:
            spent += _elapsed(graph.replay)
        times: list[float] = []
        while len(times) < 5 or (sum(times) < milliseconds and len(times) < 15):
            times.append(_elapsed(graph.replay))
    return statistics.median(times) * 1000 / (rounds * copies)


def copies_for(nbytes: int) -> int:
    """How many copies of so many bytes are three times the L2 cache of the current GPU; two at least."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, math.ceil(3 * cache / nbytes))


def random_weight(
    n: int,
    k: int,
    bits: int = 4,
    group_size: int = 128,
    zero: torch.dtype | None = None,
    scale_dtype: torch.dtype = torch.float16,
) -> FragmentWeight:
    """A weight on the GPU: random codes, scales of a typical layer, zero-points when zero is a dtype."""
    generator = torch.Generator(device="cuda").manual_seed(n + k)
    layout = FragmentLayout(bits, n, k)
    codes = torch.randint(
        -(2**31), 2**31 - 1, layout.shape, dtype=torch.int32, device="cuda", generator=generator
    )
    groups = max(1, layout.padded_k // group_size) if group_size != k else 1
    spread = torch.rand(groups, layout.padded_n, device="cuda", generator=generator)
    scale = ((spread + 0.5) * (2 / math.sqrt(k) / 2 ** (bits - 1))).to(scale_dtype)
    points = None
    if zero is not None:
        points = (torch.rand(scale.shape, device="cuda", generator=generator) * (2**bits - 1)).to(zero)
    return FragmentWeight(layout, codes, scale, points, group_size)


def clone(weight: FragmentWeight) -> FragmentWeight:
    points = None if weight.zero_point is None else weight.zero_point.clone()
    return FragmentWeight(
        weight.layout, weight.words.clone(), weight.scale.clone(), points, weight.group_size
    )


def relative_error(y: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of expected, in float64."""
    difference, norm = 0.0, 0.0
    for rows in range(0, y.shape[0], 512):
        part = expected[rows : rows + 512].double()
        difference += float((y[rows : rows + 512].double() - part).square().sum())
        norm += float(part.square().sum())
    return math.sqrt(difference / norm)


@jit()
def read_kernel(source_ptr, sums_ptr, per_program, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """Fold per_program int32 of source into one, with UNROLL loads in flight."""
    program = tl.program_id(0)
    base = source_ptr + program.to(tl.int64) * per_program
    fold = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, per_program, BLOCK * UNROLL):
        for u in tl.static_range(UNROLL):
            fold ^= tl.load(base + start + u * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + program, tl.sum(fold, axis=0))


def read_floor(nbytes: int) -> float:
    """Microseconds that the fastest of a few kernels takes which do nothing but read so many bytes, cold."""
    words = max(nbytes // 4 // 16384, 1) * 16384
    copies = copies_for(4 * words)
    source = torch.randint(1, 100, (copies, words), dtype=torch.int32, device="cuda")
    sums = torch.empty(words // 2048, dtype=torch.int32, device="cuda")
    best = math.inf
    for per_program, block, unroll, warps in (
        (2048, 512, 4, 4),
        (4096, 1024, 4, 8),
        (4096, 512, 8, 4),
        (8192, 1024, 8, 8),
        (16384, 2048, 4, 8),
    ):

        def call(i: int, shape: tuple[int, int, int, int] = (per_program, block, unroll, warps)) -> None:
            launch(
                read_kernel,
                (words // shape[0],),
                source[i],
                sums,
                shape[0],
                BLOCK=shape[1],
                UNROLL=shape[2],
                num_warps=shape[3],
            )

        best = min(best, time_graph(call, copies) * nbytes / (4 * words))
    return best


def _elapsed(call: Callable[[], object]) -> float:
    """Milliseconds on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)

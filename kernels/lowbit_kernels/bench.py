"""Quantized products against dense ones of the same GPU, layer shape by layer shape.

    for row in bench([Shape(4096, 14336)], tokens=(1, 16)): ...

Every product is checked before it is timed; one that is wrong has no time. Times are medians of CUDA graphs
over copies of the weight that together exceed three times the L2 cache. Benchmarks against other packages'
kernels are in benchmarks/w4a16.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import VARIANTS, GemmWeight, choose, problem_of, refusals
from .fragment import FragmentWeight, dequantize
from .functional import restore
from .measure import copies_for, read_floor, relative_error, time_graph
from .problem import KernelConfig
from .tuning import TOLERANCE, Shape, copies_of

TOKENS = (1, 8, 16, 64, 256, 1024)


@dataclass(frozen=True)
class BenchRow:
    """One product y [m, n] = x [m, k] Wᵀ, in microseconds.

    dense_us: torch.mm, the weight in x's dtype.  us: the config that choose() takes.  plain_us: the simple
    kernel on stored words.  floor_us: reading the packed weight and nothing else.  None: wrong or refused.
    """

    n: int
    k: int
    m: int
    dense_us: float
    us: float | None
    plain_us: float | None
    floor_us: float
    nbytes: int
    rel_err: float
    config: KernelConfig

    @property
    def speedup(self) -> float | None:
        """Over the dense product."""
        return None if self.us is None else self.dense_us / self.us

    @property
    def gb_per_second(self) -> float | None:
        """Bytes of the packed weight over the time."""
        return None if self.us is None else self.nbytes / self.us / 1e3

    @property
    def share_of_floor(self) -> float | None:
        """1 where the product takes no longer than reading the weight."""
        return None if self.us is None else self.floor_us / self.us


def bench(
    shapes: Iterable[Shape],
    tokens: Iterable[int] = TOKENS,
    on_row: Callable[[BenchRow], None] = lambda row: None,
) -> list[BenchRow]:
    """Measure every shape at every number of tokens on the current GPU.

    Raises RuntimeError without a GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the benchmark measures on a GPU, and there is none")
    tokens = list(tokens)
    rows = []
    for shape in shapes:
        weights = copies_of(shape.weight())
        for m in tokens:
            row = _measure(shape, m, weights)
            rows.append(row)
            on_row(row)
    return rows


def _measure(shape: Shape, m: int, weights: list[FragmentWeight]) -> BenchRow:
    dense = dequantize(weights[0], shape.act)
    generator = torch.Generator(device="cuda").manual_seed(m)
    x = torch.randn(m, shape.k, device="cuda", generator=generator).to(shape.act)
    expected = x.float() @ dequantize(weights[0], torch.float32).t()
    config = choose(problem_of(x, weights[0]))
    us, error = _time(x, weights, expected, config)
    dense_us = _dense_time(x, dense)
    stored = [restore(weight) for weight in weights]
    posed = problem_of(x, stored[0])
    plain_us = None
    if refusals(posed)["plain"] is None:
        plain_us, _ = _time(x, stored, expected, VARIANTS["plain"].default(posed))
    nbytes = weights[0].nbytes
    floor = _floor(nbytes)
    return BenchRow(shape.n, shape.k, m, dense_us, us, plain_us, floor, nbytes, error, config)


def _dense_time(x: Tensor, weight: Tensor) -> float:
    copies = [weight, *(weight.clone() for _ in range(copies_for(weight.nbytes) - 1))]
    return time_graph(lambda i: x @ copies[i].t(), len(copies))


def _time(
    x: Tensor, weights: list[FragmentWeight] | list[GemmWeight], expected: Tensor, config: KernelConfig
) -> tuple[float | None, float]:
    """Microseconds, None if the third of three launches in a row is wrong; and its relative error."""
    out = torch.empty(expected.shape, dtype=x.dtype, device=x.device)

    def run(i: int) -> None:
        VARIANTS[config.variant].launch(x, weights[i], None, out, config)

    for _ in range(3):
        out.fill_(float("nan"))
        run(0)
    error = relative_error(out, expected)
    # NaN is not below the tolerance
    return (time_graph(run, len(weights)) if error < TOLERANCE[x.dtype] else None), error


@functools.cache
def _floor(nbytes: int) -> float:
    return read_floor(nbytes)

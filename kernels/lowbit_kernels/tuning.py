"""Measure a few configs for each layer shape and number of tokens, and keep the fastest that is right.

    rows = tune([Shape(4096, 14336), ...])      seconds a shape; every candidate is checked before it is timed
    write_table(path, stamp(), rows)            what dispatch.choose() reads

Kernels are compiled beforehand by several processes, into Triton's cache. Candidates with the same compiled
code are counted once.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .device import triton
from .dispatch import VARIANTS, Problem, arch_of, bucket, refusals
from .fragment import FragmentWeight, dequantize
from .measure import clone, copies_for, random_weight, relative_error, time_graph
from .problem import KernelConfig
from .tables import write_table

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)

# Largest relative error against fp32 of a config that may win: rounding y, and weights where they are scaled.
TOLERANCE = {torch.float16: 5e-4, torch.bfloat16: 4e-3}

# What a launch raises that does not fit the device, besides CUDA's own errors.
FAILURES = (RuntimeError,) if triton is None else (RuntimeError, triton.errors.TritonError)


@dataclass(frozen=True)
class Shape:
    """One kind of layer.  zero: dtype of its zero-points, None for the symmetric grid."""

    n: int
    k: int
    bits: int = 4
    group_size: int = 128
    zero: torch.dtype | None = None
    act: torch.dtype = torch.float16

    def problem(self, tokens: int) -> Problem:
        act = str(self.act).removeprefix("torch.")
        arch = arch_of(torch.device("cuda"))
        has_zero = self.zero is not None
        return Problem(
            self.bits, self.group_size, has_zero, act, bucket(tokens), self.n, self.k, arch, "fragment"
        )

    def weight(self) -> FragmentWeight:
        return random_weight(self.n, self.k, self.bits, self.group_size, self.zero, self.act)


@dataclass(frozen=True)
class Measured:
    """The fastest right config of a problem, and how many others were wrong or failed."""

    problem: Problem
    config: KernelConfig
    us: float
    rel_err: float
    rejected: int


def tune(
    shapes: Iterable[Shape],
    tokens: Iterable[int] = TOKENS,
    on_row: Callable[[Measured], None] = lambda row: None,
    processes: int | None = None,
) -> list[Measured]:
    """Return the best config for every shape and number of tokens on the current GPU.

    processes: how many compile beforehand; None for one a core, 0 to compile on the way.
    Raises RuntimeError without a GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tuning measures on a GPU, and there is none")
    shapes, tokens = list(shapes), sorted(set(map(bucket, tokens)))
    jobs = [(shape, m, config) for shape in shapes for m in tokens for config in candidates(shape.problem(m))]
    count = min(os.cpu_count() or 1, 16) if processes is None else processes
    if count > 1:
        precompile(jobs, count)
    rows = []
    for shape in shapes:
        weights = copies_of(shape.weight())
        dense = dequantize(weights[0], torch.float32)
        for m in tokens:
            row = measure(shape, m, weights, dense, candidates(shape.problem(m)))
            rows.append(row)
            on_row(row)
    return rows


def tune_to(
    path: Path, shapes: Iterable[Shape], tokens: Iterable[int] = TOKENS, **options: Any
) -> list[Measured]:
    """tune(), written to path as a table for dispatch."""
    rows = tune(shapes, tokens, **options)
    write_table(path, stamp(), ((row.problem, row.config, row.us, row.rel_err) for row in rows))
    return rows


def candidates(problem: Problem) -> list[KernelConfig]:
    """Configs worth measuring: of every variant that accepts, the one that choose() would take first."""
    found = [
        config
        for name, reason in refusals(problem).items()
        if reason is None and (name != "dense" or problem.m_bucket >= 128)
        for config in VARIANTS[name].candidates(problem)
    ]
    return list(dict.fromkeys(found))


def measure(
    shape: Shape,
    m: int,
    weights: list[FragmentWeight],
    dense: torch.Tensor,
    configs: list[KernelConfig],
    milliseconds: float = 4.0,
) -> Measured:
    """The fastest of the configs whose third of three launches in a row into a poisoned output is right.

    weights: copies of one weight, cold in L2 when used in turn.  dense: the same weight in fp32.
    """
    generator = torch.Generator(device="cuda").manual_seed(m)
    x = torch.randn(m, shape.k, device="cuda", generator=generator).to(shape.act)
    expected = x.float() @ dense.t()
    out = torch.empty(m, shape.n, dtype=shape.act, device="cuda")
    best: tuple[float, float, KernelConfig] | None = None
    rejected = 0
    for config in configs:
        run = VARIANTS[config.variant].launch
        try:
            for _ in range(3):
                out.fill_(float("nan"))
                run(x, weights[0], None, out, config)
            error = relative_error(out, expected)
            # NaN is not below the tolerance
            if not error < TOLERANCE[shape.act]:
                rejected += 1
                continue
            us = time_graph(lambda i: run(x, weights[i], None, out, config), len(weights), milliseconds)  # noqa: B023
        except FAILURES:
            rejected += 1
            continue
        if best is None or us < best[0]:
            best = us, error, config
    if best is None:
        raise RuntimeError(f"no config is right for {shape.problem(m)}")
    return Measured(shape.problem(m), best[2], best[0], best[1], rejected)


def precompile(jobs: list[tuple[Shape, int, KernelConfig]], processes: int) -> None:
    """Compile what the jobs launch, in processes of their own that fill Triton's cache."""
    distinct = list({_compiled_as(shape, config): (shape, m, config) for shape, m, config in jobs}.values())
    # a process takes neighbours, which mostly share a weight
    shares = [distinct[i::processes] for i in range(processes)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(_compile, shares, chunksize=1)


def stamp() -> dict[str, Any]:
    """What a table says about where it was measured."""
    device = torch.device("cuda")
    return {
        "device": torch.cuda.get_device_name(device),
        "arch": arch_of(device),
        "driver": _driver(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _driver() -> str | None:
    """Version of the GPU's driver, from the tool that comes with it; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip()


def _compiled_as(shape: Shape, config: KernelConfig) -> tuple[Any, ...]:
    """Equal for launches that run the same machine code: K only matters by how evenly it is split."""
    tiles = -(-shape.k // 128)
    steps = -(-tiles // (config.slices * config.split_k))
    even = tiles == steps * config.slices * config.split_k
    aligned = shape.n % 16 == 0, tiles % 16 == 0
    return config, steps == 1, even, aligned, shape.bits, shape.group_size, shape.zero, shape.act


def _compile(jobs: list[tuple[Shape, int, KernelConfig]]) -> None:
    weights: dict[Shape, FragmentWeight] = {}
    for shape, m, config in sorted(jobs, key=lambda job: (job[0].n, job[0].k)):
        if shape not in weights:
            weights = {shape: shape.weight()}
        x = torch.zeros(m, shape.k, dtype=shape.act, device="cuda")
        out = torch.empty(m, shape.n, dtype=shape.act, device="cuda")
        try:
            VARIANTS[config.variant].launch(x, weights[shape], None, out, config)
        except FAILURES:
            # measure() meets it again and counts it
            continue
    torch.cuda.synchronize()


def copies_of(weight: FragmentWeight) -> list[FragmentWeight]:
    """As many copies as keep L2 cold when they are used in turn, weight first."""
    return [weight, *(clone(weight) for _ in range(copies_for(weight.nbytes) - 1))]

"""W4A16 products side by side: cuBLAS fp16, lowbit tuned and untuned, Marlin, GemLite, tinygemm.

    python benchmarks/w4a16.py benchmarks/results/w4a16-h200.json [--table kernels/.../tuned/h200.json]

Every column multiplies the same random 4-bit weights (symmetric, group 128) by the same fp16 activations, is
checked against float64 (rel_err is ours), and is timed as a CUDA graph over copies of its weight that
together exceed three times the L2 cache: microseconds, medians. `lowbit` is the fastest config that tuning
finds, measured anew with fp16 and with `untuned`, dispatch's rule, or the latter if that is then faster; the
rivals follow in the same process. Up to 32 tokens fp16 and ours are timed turn about. From 64 on products
reach the card's power limit, and each column is timed at the clock it settles to by itself, after replays of
SETTLE milliseconds, first and last in turn; turn_us has fp16 and ours turn about, where the thriftier kernel
lends power to the other. Rows for other grids and bf16 come last. --compile only fills Triton's cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton
from rivals import GEMLITE_SHAPES, RIVALS, Codes

from lowbit_kernels.dispatch import VARIANTS, rule
from lowbit_kernels.fragment import FragmentWeight, dequantize
from lowbit_kernels.layout import unfragment_words
from lowbit_kernels.measure import copies_for, read_floor, relative_error, time_graph
from lowbit_kernels.problem import KernelConfig
from lowbit_kernels.tables import write_table
from lowbit_kernels.tuning import TOKENS, Measured, Shape, candidates, copies_of, measure, precompile, stamp

SHAPES = [
    Shape(57344, 8192),
    Shape(8192, 28672),
    Shape(10240, 8192),
    Shape(28672, 4096),
    Shape(14336, 4096),
    Shape(4096, 14336),
    Shape(6144, 4096),
    Shape(4096, 4096),
    Shape(2048, 2048),
]

# What may cost more than the first: zero-points, bf16, smaller groups, other widths.
VARIATIONS = {
    "fp16": {},
    "zero": {"zero": torch.uint8},
    "float zero": {"zero": torch.float16},
    "bf16": {"act": torch.bfloat16},
    "group 64": {"group_size": 64},
    "group 32": {"group_size": 32},
    "2 bits": {"bits": 2},
    "8 bits": {"bits": 8},
}
VARIED_SHAPES = [Shape(28672, 4096), Shape(4096, 4096)]
VARIED_TOKENS = (1, 8, 16, 256)

# Milliseconds; clocks were seen to fall for 100 to 200.
SETTLE = 200.0

# Looser than ours: some accumulate in fp16.
RIVAL_TOLERANCE = 2e-2


def jobs() -> list[tuple[Shape, int, Any]]:
    """Everything of ours that is launched, for compiling beforehand."""
    found = [(s, m, config) for s in SHAPES for m in TOKENS for config in candidates(s.problem(m))]
    for shape in VARIED_SHAPES:
        for changes in VARIATIONS.values():
            varied = replace(shape, **changes)
            found += [(varied, m, rule(varied.problem(m))) for m in VARIED_TOKENS]
    return found


def compile_gemlite(share: list[tuple[int, int, int]]) -> None:
    for n, k, m in share:
        rival = RIVALS["gemlite"]()
        rival.make(plain(Shape(n, k).weight()))
        rival.call(torch.zeros(m, k, dtype=torch.float16, device="cuda"), 0)
    torch.cuda.synchronize()


def plain(weight: FragmentWeight) -> Codes:
    """The same weight as codes and [N, G] scales."""
    scale = weight.scale[:, : weight.out_features].t().contiguous()
    return Codes(unfragment_words(weight.words, weight.layout), scale)


def rival_times(
    weight: FragmentWeight, xs: dict[int, torch.Tensor], truth: dict[int, torch.Tensor]
) -> dict[str, dict[int, float | None]]:
    """Microseconds by rival and tokens; None where it cannot run or is wrong."""
    times: dict[str, dict[int, float | None]] = {}
    for name, rival in RIVALS.items():
        times[name] = dict.fromkeys(xs)
        try:
            column = rival()
            column.make(plain(weight))
        except (RuntimeError, ImportError, OSError) as e:
            print(f"  {name}: {e}")
            continue
        for m, x in xs.items():
            if m <= column.largest_m:
                times[name][m] = rival_time(column, x.bfloat16() if name == "tinygemm" else x, truth[m])
        torch.cuda.empty_cache()
    return times


def rival_time(column: Any, x: torch.Tensor, expected: torch.Tensor) -> float | None:
    try:
        column.call(x, 0)
        if not relative_error(column.call(x, 0), expected) < RIVAL_TOLERANCE:
            return None
        return time_graph(lambda i: column.call(x, i), column.copies, 4.0, settle_for(x))
    except RuntimeError as e:
        print(f"  {column}: {e}")
        return None


def compare(
    configs: dict[str, KernelConfig],
    x: torch.Tensor,
    weights: list[FragmentWeight],
    halves: list[torch.Tensor],
    out: torch.Tensor,
    rounds: int,
    settle: float,
) -> dict[str, float]:
    """Microseconds of each config and of fp16: medians of rounds, of which every other one runs backwards."""

    def timed(config: KernelConfig | None) -> float:
        if config is None:
            return time_graph(lambda i: torch.mm(x, halves[i].t(), out=out), len(halves), 1.5, settle)
        run = VARIANTS[config.variant].launch
        return time_graph(lambda i: run(x, weights[i], None, out, config), len(weights), 1.5, settle)

    named: dict[str, KernelConfig | None] = {"fp16_us": None} | configs
    order = list(dict.fromkeys(named.values()))
    found: dict[KernelConfig | None, list[float]] = {config: [] for config in order}
    for _ in range(rounds):
        for config in order:
            found[config].append(timed(config))
        order.reverse()
    return {name: statistics.median(found[config]) for name, config in named.items()}


def settle_for(x: torch.Tensor) -> float:
    return SETTLE if len(x) >= 64 else 0.0


def rows_of(shape: Shape, deadline: float) -> tuple[list[dict[str, Any]], list[Any]]:
    """Rows of the results file for one shape, and of the table."""
    weight = shape.weight()
    weights = copies_of(weight)
    dense32 = dequantize(weight, torch.float32)
    floor = read_floor(weight.nbytes)
    half = dense32.half()
    halves = [half, *(half.clone() for _ in range(copies_for(half.nbytes) - 1))]
    rows, tuned, xs, truth = [], [], {}, {}
    for m in TOKENS:
        if time.monotonic() > deadline:
            break
        generator = torch.Generator(device="cuda").manual_seed(m)
        x = torch.randn(m, shape.k, device="cuda", generator=generator).half()
        # fp32 beyond 64 tokens: its error is a thousandth of what is measured
        truth[m] = x.double() @ dense32.double().t() if m <= 64 else x.float() @ dense32.t()
        xs[m] = x
        problem = shape.problem(m)
        best = measure(shape, m, weights, dense32, candidates(problem))
        out = torch.empty(m, shape.n, dtype=torch.float16, device="cuda")
        configs = {"lowbit_us": best.config, "untuned_us": rule(problem)}
        times = turn = compare(configs, x, weights, halves, out, 3, 0.0)
        if settle_for(x):
            times = compare(configs, x, weights, halves, out, 2, settle_for(x))
        # the rule's is a candidate too: on a hot card it may be the faster of the two
        chosen = min(configs, key=lambda name: times[name])
        config = configs[chosen]
        times["lowbit_us"] = times[chosen]
        out.fill_(float("nan"))
        VARIANTS[config.variant].launch(x, weight, None, out, config)
        error = relative_error(out, truth[m])
        tuned.append((problem, config, times[chosen], error))
        row = {"n": shape.n, "k": shape.k, "m": m, "floor_us": floor} | times
        row |= {"rel_err": error, "turn_us": [round(turn[name], 2) for name in ("fp16_us", chosen)]}
        rows.append(row | {"config": asdict(config), "rejected": best.rejected})
    del half, halves
    torch.cuda.empty_cache()
    for name, by_tokens in rival_times(weight, xs, truth).items():
        for row in rows:
            row[f"{name}_us"] = by_tokens[row["m"]]
    return rows, tuned


def varied_rows() -> list[dict[str, Any]]:
    """By the rule's configs, medians of three rounds, turn about."""
    rows = []
    for shape in VARIED_SHAPES:
        kinds = {name: replace(shape, **changes) for name, changes in VARIATIONS.items()}
        weights = {name: copies_of(kind.weight()) for name, kind in kinds.items()}
        dense = {name: dequantize(copies[0], torch.float32) for name, copies in weights.items()}
        for m in VARIED_TOKENS:
            found: dict[str, list[Measured]] = {name: [] for name in kinds}
            for _ in range(3):
                for name, kind in kinds.items():
                    configs = [rule(kind.problem(m))]
                    found[name].append(measure(kind, m, weights[name], dense[name], configs))
            for name, measured in found.items():
                us = statistics.median(one.us for one in measured)
                row = {"n": shape.n, "k": shape.k, "m": m, "what": name, "us": us}
                rows.append(row | {"rel_err": measured[0].rel_err})
    return rows


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    digits = {key: round(value, 2) for key, value in row.items() if isinstance(value, float)}
    return row | digits | {"rel_err": float(f"{row['rel_err']:.3g}")}


def save(
    path: Path, header: dict[str, Any], rows: list[dict[str, Any]], varied: list[dict[str, Any]]
) -> None:
    parts = [f' "{key}": {json.dumps(value)}' for key, value in header.items()]
    for key, listed in (("rows", rows), ("variations", varied)):
        lines = ",\n  ".join(json.dumps(rounded(row)) for row in listed)
        parts.append(f' "{key}": [\n  {lines}\n ]')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seconds", type=float, default=600, help="shapes not begun by then are left out")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    start = time.monotonic()
    if arguments.compile:
        processes = min(os.cpu_count() or 1, 16)
        gemlite = [(n, k, m) for n, k in sorted(GEMLITE_SHAPES) for m in TOKENS if m <= 64]
        with multiprocessing.get_context("spawn").Pool(processes // 2) as pool:
            waiting = pool.map_async(
                compile_gemlite, [gemlite[i :: processes // 2] for i in range(processes // 2)]
            )
            precompile(jobs(), processes)
            try:
                waiting.get()
            except Exception as e:
                print(f"gemlite: {e!r}")
        print(f"compiled in {time.monotonic() - start:.1f} s")
        return
    rows, tuned = [], []
    header = stamp() | {"triton": triton.__version__, "read_gb_s": 2**30 / read_floor(2**30) / 1e3}
    for shape in SHAPES:
        if time.monotonic() - start > arguments.seconds:
            print(f"no time for {shape.n} x {shape.k}")
            continue
        found, configs = rows_of(shape, start + arguments.seconds)
        rows += found
        tuned += configs
        for row in found:
            times = {
                key[:-3]: round(v, 1)
                for key, v in row.items()
                if key.endswith("_us") and isinstance(v, float)
            }
            print(shape.n, shape.k, row["m"], times, f"{row['fp16_us'] / row['lowbit_us']:.2f}x", flush=True)
        save(arguments.results, header, rows, [])
        if arguments.table:
            write_table(arguments.table, stamp(), tuned)
        torch.cuda.empty_cache()
        print(f"  {time.monotonic() - start:.0f} s", flush=True)
    varied = varied_rows()
    for row in varied:
        print(row)
    save(arguments.results, header, rows, varied)
    print(f"done in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()

"""Time the solvers on Llama-8B shapes: HQQ beside the hqq package, GPTQ a decoder block at a time.

    python benchmarks/solvers.py hqq --rival-path HQQ_SOURCE --device cuda --json results/solvers-h200.json
    python benchmarks/solvers.py gptq SYNTHETIC_MODEL --device cuda --json results/solvers-h200.json

hqq: 4 bits, group 128, fractional zero-points on bf16 weights, the same tensors for both, turn about,
medians; the codes of the first rows are compared with the CPU's before any time is taken. gptq: blocks of
benchmarks/synthetic.py through the calibration engine, 128 rows of 2048 random tokens; the time of a block is
that of the middle ones (forwards, Hessians, solves, replay), with the solves apart. Floors beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.blocks import Following, open_engine
from lowbit.checkpoint.source import open_source
from lowbit.hessian import LayerStats
from lowbit.plan import make_plan
from lowbit.recipe import Recipe
from lowbit.scheme import QuantScheme
from lowbit.solvers import gptq, half_quadratic, hqq
from lowbit_kernels.reference import dequantize

# q, k, v, o, gate, up, down
BLOCK_8B = [
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
]


def timed(device: torch.device, work: Callable[[], Any]) -> float:
    """Seconds of work, with what it launched finished; CPU seconds on a CPU."""
    if device.type == "cpu":
        started = time.process_time()
        work()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def bench_hqq(device: torch.device, shapes: list[tuple[int, int]], rival: Path | None, rounds: int) -> Any:
    scheme, options = QuantScheme(4, 128, symmetric=False), hqq.Options(fractional_zero=True)
    generator = torch.Generator(device).manual_seed(0)
    weights = [
        torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
        for shape in shapes
    ]
    ours: dict[str, Callable[[Tensor], Any]] = {
        "lowbit, fractional zero": lambda w: hqq.solve(w, scheme, None, options),
        "lowbit, whole zero": lambda w: hqq.solve(w, scheme, None, hqq.Options()),
    }
    for fractional in (True, False):
        w = weights[0][:256]
        here = half_quadratic.fit(w, scheme, fractional, 20)
        there = half_quadratic.fit(w.cpu(), scheme, fractional, 20)
        same = [torch.equal(a.cpu(), b) for a, b in zip(here, there, strict=True)]
        assert all(same), f"codes, scales, zero-points equal to the CPU's: {same}"
    candidates = dict(ours)
    if rival is not None:
        sys.path.insert(0, str(rival))
        from hqq.core.quantize import Quantizer

        def package(w: Tensor) -> Any:
            return Quantizer.quantize(
                w, nbits=4, group_size=128, axis=1, optimize=True, bitpack=False, device=str(device)
            )

        candidates["hqq package"] = package
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run(weights[-1][:128])
    for _ in range(rounds):
        for name, run in candidates.items():
            seconds[name].append(timed(device, lambda run=run: [run(w) for w in weights] and None))
    count = sum(w.numel() for w in weights)
    result: dict[str, Any] = {
        "weights": count,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "all_seconds": seconds,
        "bytes": {"read": 2 * count, "written": count + count // 128 * 6},
    }
    w = weights[-1][:512]
    errors = {}
    q = hqq.solve(w, scheme, None, options)
    errors["lowbit, fractional zero"] = dequantize(q.codes, q.scale, q.zero_point, 4) - w.float()
    if rival is not None:
        codes, meta = candidates["hqq package"](w)
        zero, scale = meta["zero"].float(), meta["scale"].float()
        theirs = ((codes.float().view(-1, 128) - zero) * scale).view(w.shape)
        errors["hqq package"] = theirs - w.float()
    result["mean_absolute_error"] = {name: e.abs().mean().item() for name, e in errors.items()}
    return result


def bench_gptq(model: str, device: torch.device, samples: int, length: int) -> Any:
    result: dict[str, Any] = {"tokens": samples * length}
    with open_source(model) as source:
        plan = make_plan(source, Recipe(method="rtn", bits=4, group=128))
        rows = torch.randint(
            0, source.config["vocab_size"], (samples, length), generator=torch.Generator().manual_seed(0)
        )
        for name, options, following in (
            ("plain", gptq.PLAIN, Following(target=False, residual=False)),
            ("full", gptq.Options(), Following()),
        ):
            blocks: list[dict[str, float]] = []
            started = time.perf_counter()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with open_engine(source, plan.layers, rows, device, following=following) as engine:
                for block in engine.blocks():
                    solving = 0.0
                    for stage in block.stages():
                        works = list(stage.work())
                        solving += timed(device, partial(solve, stage, works, options))
                    now = time.perf_counter()
                    blocks.append({"solve": solving, "since_last": now - started})
                    started = now
            result[name] = {"blocks": blocks}
            if device.type == "cuda":
                result[name]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def solve(stage: Any, works: list[Any], options: gptq.Options) -> None:
    """Solve the layers of a stage, which read one input, together, and put their weights in place."""
    stats = works[0].stats
    cross = None if stats.cross is None else torch.cat([work.stats.cross for work in works])
    q = gptq.solve(
        torch.cat([work.weight for work in works]),
        works[0].layer.scheme,
        LayerStats(stats.hessian, stats.tokens, cross),
        options,
    )
    weights = dequantize(q.codes, q.scale, q.zero_point, q.scheme.bits)
    for work, weight in zip(works, weights.split([len(work.weight) for work in works]), strict=True):
        stage.replace(work.layer, weight)


def projections(result: dict[str, Any], rates: dict[str, float]) -> dict[str, Any]:
    """Seconds for the solves and forwards of whole models, from the last measured block, and floors.

    A block of 8192 x 28672 has 3.92 times the weights (forwards), 4.0 times Σ K² (Hessians) and 7.8 times
    Σ N K² (solves) of one of 4096 x 14336. Floors: forwards and Hessians (half of each, they are symmetric)
    at the measured bf16 rate; products of the solve, 2 N K² each, at the float32 rate.
    """
    tokens, projected = result["tokens"], {}
    for name, blocks, hidden, inner, kv in (("8B", 32, 4096, 14336, 1024), ("70B", 80, 8192, 28672, 1024)):
        shapes = [(2 * hidden + 2 * kv, hidden), (2 * inner, hidden), (hidden, inner)]
        weights = sum(n * k for n, k in shapes)
        products = sum(n * k * k for n, k in shapes)
        squares = sum(k * k for k in (hidden, hidden, hidden, inner))
        base = result.setdefault("base", {"weights": weights, "products": products})
        for method, streams, solves in (("plain", 1, 1), ("full", 2, 8)):
            last = result[method]["blocks"][-1]
            around = (last["since_last"] - last["solve"]) * weights / base["weights"]
            solving = last["solve"] * products / base["products"]
            work = streams * (2 * tokens * weights + tokens * squares) / rates["bfloat16_tflops"]
            floor = (work + solves * 2 * products / rates["float32_tflops"]) / 1e12
            projected[f"{name} {method}"] = {"seconds": blocks * (around + solving), "floor": blocks * floor}
    return projected


def ceilings(device: torch.device) -> dict[str, float]:
    """Measured rates of this GPU: copies, bf16 and float32 products."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    rates = {"copy_gb_s": 2 * x.numel() / min(timed(device, lambda: y.copy_(x)) for _ in range(5)) / 1e9}
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(8192, 8192, device=device).to(dtype)
        seconds = min(timed(device, lambda a=a: a @ a) for _ in range(5))
        rates[f"{dtype}_tflops".removeprefix("torch.")] = 2 * 8192**3 / seconds / 1e12
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["hqq", "gptq"])
    parser.add_argument("model", nargs="?", help="gptq: a folder written by benchmarks/synthetic.py")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rival-path", type=Path, help="folder that holds the hqq package")
    parser.add_argument("--rows", type=int, help="hqq: only so many rows of one [*, 4096] weight")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.what == "hqq":
        shapes = [(args.rows, 4096)] if args.rows else BLOCK_8B
        result = bench_hqq(device, shapes, args.rival_path, args.rounds)
    else:
        result = bench_gptq(args.model, device, args.samples, args.length)
    report = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    report["device"] = (
        torch.cuda.get_device_name() if device.type == "cuda" else "CPU, seconds are CPU seconds"
    )
    report["torch"] = torch.__version__
    if device.type == "cuda":
        report["ceilings"] = ceilings(device)
        if args.what == "gptq":
            report["projections"] = projections(result, report["ceilings"])
    report[args.what] = result
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

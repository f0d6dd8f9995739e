"""Peak memory of a calibrated run on blocks of an 8B model, over what the process holds before it.

    python benchmarks/synthetic.py build/eight --blocks 4
    cp TOKENIZER_FOLDER/tokenizer* build/eight
    python benchmarks/memory.py build/eight --samples 2 --seqlen 64 --json results/memory-gptq.json
    python benchmarks/memory.py build/eight --device cuda --json results/memory-gptq-h200.json

The weights are random, a tokenizer of at most 32,000 tokens does. The host's peak (VmHWM), the GPU's and the
time are read when a block is done; peaks are set back, so that what grows with the number of blocks shows.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from pathlib import Path

import torch

import lowbit
from lowbit import events
from lowbit.pipeline import quantize
from lowbit.recipe import Recipe

STATUS = Path("/proc/self/status")


def memory_mib(key: str) -> float:
    """VmHWM or VmRSS of this process."""
    found = re.search(rf"{key}:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--seqlen", type=int)
    parser.add_argument("--solver", type=json.loads, default={}, help='JSON, e.g. {"rounds": 1}')
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    recipe = Recipe(samples=args.samples, seqlen=args.seqlen, solver=args.solver, device=args.device)
    cuda = args.device == "cuda"
    block_bytes, peaks, gpu_peaks, seconds = 0, [], [], []
    started = time.perf_counter()

    def seen(event: events.Event) -> None:
        nonlocal block_bytes
        if isinstance(event, events.PlanReady):
            sizes = [x.source_bytes for x in event.plan.layers if x.name.startswith("model.layers.0.")]
            block_bytes = sum(sizes)
        if isinstance(event, events.LayerDone) and event.name.endswith("mlp.down_proj.weight"):
            peaks.append(round(memory_mib("VmHWM")))
            seconds.append(round(time.perf_counter() - started, 2))
            Path("/proc/self/clear_refs").write_text("5")
            if cuda:
                gpu_peaks.append(round(torch.cuda.max_memory_allocated() / 2**20))
                torch.cuda.reset_peak_memory_stats()
            print(event.name, peaks[-1], f"{seconds[-1]:.1f} s", flush=True)

    baseline = memory_mib("VmRSS")
    with tempfile.TemporaryDirectory(dir=args.model.parent) as folder:
        summary = quantize(args.model, Path(folder) / "out", recipe, on_event=seen)
        calibration = json.loads((Path(folder) / "out" / "lowbit.json").read_text())["calibration"]
        shutil.rmtree(Path(folder) / "out")
    report = {
        "model": f"{len(peaks)} random blocks of Llama-3.1-8B's shapes",
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": {"lowbit": lowbit.__version__, "torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "calibration": calibration,
        "solver": args.solver,
        "threads": torch.get_num_threads(),
        "block_mib": round(block_bytes / 2**20),
        "baseline_mib": round(baseline),
        "peak_mib_by_block": peaks,
        "peak_over_baseline_mib": round(max(peaks) - baseline),
        "gpu_peak_mib_by_block": gpu_peaks or None,
        "seconds_at_end_of_block": seconds,
        "seconds": round(summary["seconds"], 1),
    }
    print(json.dumps(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

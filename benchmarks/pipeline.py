"""Time `lowbit quantize` against its floor and against llm-compressor's model_free_ptq, turn about.

    python benchmarks/pipeline.py MODEL --rounds 3 --rival-python VENV/bin/python --json results/cpu.json

Each run is a process of its own, since that is what a user waits for; the seconds inside the work (imports
excluded) and the peak RSS come from the process itself. Columns: floor (read every source byte, write as many
bytes as the output holds, fsync), lowbit with and without validation, and the rival, which reads, quantizes,
packs and writes. All run RTN, 4 bits, symmetric; group 128 where it divides, else 64, for both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import lowbit

FLOOR = """
import os, sys, glob, pathlib
source, out, share = sys.argv[1], sys.argv[2], float(sys.argv[3])
def work():
    pathlib.Path(out).mkdir()
    for path in sorted(glob.glob(source + "/*.safetensors")):
        with open(path, "rb", buffering=0) as f, open(out + "/" + os.path.basename(path), "wb") as g:
            block = bytearray(8 << 20)
            while n := f.readinto(block):
                g.write(memoryview(block)[: int(n * share)])
            g.flush()
            os.fsync(g.fileno())
"""
LOWBIT = """
import sys
from lowbit.pipeline import quantize
from lowbit.recipe import Recipe
def work():
    recipe = Recipe(method="rtn", device=sys.argv[4], validate_layers=sys.argv[3] == "1")
    quantize(sys.argv[1], sys.argv[2], recipe)
"""
RIVAL = """
import sys, json
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationArgs
from llmcompressor import model_free_ptq
hidden = json.load(open(sys.argv[1] + "/config.json"))["hidden_size"]
group = 128 if hidden % 128 == 0 else 64
weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
scheme = QuantizationScheme(targets=["Linear"], weights=weights)
def work():
    model_free_ptq(sys.argv[1], sys.argv[2], scheme=scheme, max_workers=2, device="cpu",
                   ignore=["lm_head", "re:.*embed_tokens.*"])
"""
REPORT = """
import json, resource, time
base = resource.getrusage(resource.RUSAGE_SELF)
wall = time.monotonic()
work()
wall = time.monotonic() - wall
after = resource.getrusage(resource.RUSAGE_SELF)
cpu = after.ru_utime + after.ru_stime - base.ru_utime - base.ru_stime
rss = {"base_rss_kib": base.ru_maxrss, "rss_kib": after.ru_maxrss}
print(json.dumps({"seconds": wall, "cpu_seconds": cpu, **rss}))
"""


def run(python: str, script: str, source: Path, *extra: str) -> dict[str, float]:
    """Run one column in a process of its own, into a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        out = str(Path(folder) / "out")
        started = time.monotonic()
        done = subprocess.run(
            [python, "-c", script + REPORT, str(source), out, *extra],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return json.loads(done.stdout.splitlines()[-1]) | {"process_seconds": time.monotonic() - started}


def machine(device: str) -> dict[str, object]:
    """Processor, cores and, for cuda, the GPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine()
    )
    found: dict[str, object] = {"cpu": cpu, "cores": len(os.sched_getaffinity(0))}
    return found | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {})


def medians(runs: dict[str, list[dict[str, float]]], nbytes: int) -> dict[str, dict[str, float]]:
    """The median of every figure over the runs of a column, and GiB/s of nbytes by the median of seconds."""
    rows = {}
    for name, results in runs.items():
        row = {key: statistics.median(result[key] for result in results) for key in results[0]}
        rows[name] = row | {"gib_per_second": nbytes / 2**30 / row["seconds"]}
    return rows


def publish(result: dict[str, object], file: Path | None) -> None:
    """Print the result, and write it where a file is named."""
    text = json.dumps(result, indent=1)
    print(text)
    if file:
        file.write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="where lowbit runs: cpu or cuda")
    parser.add_argument("--rival-python", help="python of an environment that has llmcompressor")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    source = args.model.resolve()
    source_bytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    columns = {
        "floor": (sys.executable, FLOOR, "0.3"),
        "lowbit": (sys.executable, LOWBIT, "1", args.device),
        "lowbit_no_validation": (sys.executable, LOWBIT, "0", args.device),
    }
    if args.rival_python:
        columns["model_free_ptq"] = (args.rival_python, RIVAL)
    for path in source.glob("*.safetensors"):  # a warm page cache for everyone
        shutil.copyfile(path, "/dev/null")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in columns}
    for _ in range(args.rounds):
        for name, (python, script, *extra) in columns.items():
            runs[name].append(run(python, script, source, *extra))
            print(name, runs[name][-1], file=sys.stderr)
    rows = medians(runs, source_bytes)
    result = {
        "benchmark": "pipeline",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(args.device),
        "versions": {"lowbit": lowbit.__version__, "torch": torch.__version__},
        "model": {"name": source.name, "bytes": source_bytes},
        "rounds": args.rounds,
        "columns": rows,
        "ratios": {
            f"{rival}/{ours}": rows[rival]["seconds"] / rows[ours]["seconds"]
            for rival in ("floor", "model_free_ptq")
            for ours in ("lowbit", "lowbit_no_validation")
            if rival in rows
        },
    }
    publish(result, args.json)


if __name__ == "__main__":
    main()

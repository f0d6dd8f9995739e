"""Time `lowbit verify` against reading source and output once, from the disk and from the page cache.

    python benchmarks/verify.py OUTPUT SOURCE --rounds 3 --json results/verify-cpu.json

OUTPUT is what `lowbit quantize SOURCE` wrote. Each run is a process of its own; seconds, CPU seconds and peak
memory are of the work inside, imports of lowbit and torch left out. The floor reads every byte in as many
threads as verify has workers, into one buffer each. "disk" drops the files from the page cache first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from pipeline import REPORT, machine, medians, publish

import lowbit

FLOOR = """
import os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from lowbit.ahead import WORKERS
files = [file for folder in sys.argv[1:3] for file in sorted(Path(folder).glob("*.safetensors"))]
step, own = 8 << 20, threading.local()
def read(place):
    file, offset = place
    own.buffer = getattr(own, "buffer", None) or bytearray(step)
    descriptor = os.open(file, os.O_RDONLY)
    os.preadv(descriptor, [own.buffer], offset)
    os.close(descriptor)
def work():
    places = [(file, offset) for file in files for offset in range(0, file.stat().st_size, step)]
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(read, places))
"""
VERIFY = """
import json, sys
from lowbit.verify import verify
def work():
    report = verify(sys.argv[1], sys.argv[2], device="cpu", **json.loads(sys.argv[3]))
    assert report.ok, report.failures
"""
COLUMNS = {
    "floor": (FLOOR, {}),
    "verify": (VERIFY, {}),
    "verify --no-forward": (VERIFY, {"forward": False}),
    "verify --no-forward --no-hash": (VERIFY, {"forward": False, "hash": False}),
}


def drop(folders: list[Path]) -> None:
    """Take the files of the folders out of the page cache."""
    for file in (file for folder in folders for file in folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(script: str, folders: list[Path], options: dict[str, bool]) -> dict[str, float]:
    command = [sys.executable, "-c", script + REPORT, *map(str, folders), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folders = [args.output.resolve(), args.source.resolve()]
    size = sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors"))
    places = ("disk", "page cache")
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        place: {name: [] for name in COLUMNS} for place in places
    }
    load = []
    for _ in range(args.rounds):
        for place in places:
            for name, (script, options) in COLUMNS.items():
                if place == "disk":
                    drop(folders)
                load.append(os.getloadavg()[0])
                runs[place][name].append(run(script, folders, options))
                print(place, name, runs[place][name][-1], file=sys.stderr)
    columns = {place: medians(found, size) for place, found in runs.items()}
    for found in columns.values():
        for row in found.values():
            row["times_the_floor"] = row["seconds"] / found["floor"]["seconds"]
    result = {
        "benchmark": "verify",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine("cpu") | {"load_average": round(statistics.median(load), 1)},
        "versions": {"lowbit": lowbit.__version__, "torch": torch.__version__},
        "bytes": size,
        "rounds": args.rounds,
        "columns": columns,
    }
    publish(result, args.json)


if __name__ == "__main__":
    main()

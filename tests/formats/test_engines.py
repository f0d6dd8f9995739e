"""What `lowbit inspect` says of engines, against what they did: benchmarks/results/loaders.json."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from lowbit.inspection import inspect
from lowbit.pipeline import quantize
from lowbit.recipe import make_recipe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEASURED = {r["engine"]: r["rows"] for r in json.loads((BENCHMARKS / "results/loaders.json").read_text())}
# the runs that answer for each engine of inspect
RUNS = {
    "transformers": ("transformers", "transformers, dequantize=True", "transformers, gptqmodel"),
    "vLLM, CPU": ("vllm",),
}


def variants():
    spec = importlib.util.spec_from_file_location("loaders", BENCHMARKS / "loaders.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.VARIANTS


@pytest.mark.parametrize(("variant", "recipe"), variants().items(), ids=str)
def test_engines_load_what_inspect_says(variant, recipe, build_llama, tmp_path):
    quantize(build_llama(), tmp_path / "out", make_recipe(method="rtn", device="cpu", **recipe))
    said = {engine.name: engine for engine in inspect(tmp_path / "out").engines}
    for name, runs in RUNS.items():
        rows = [MEASURED[run][f"llama {variant}"] for run in runs if f"llama {variant}" in MEASURED[run]]
        assert rows, "not measured: run benchmarks/loaders.py"
        loaded = any("error" not in row and row["kl"] < row["quantization_kl"] for row in rows)
        assert said[name].loads == loaded, (name, said[name].note, rows)

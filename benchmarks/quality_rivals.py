"""Quantize a model with another library on given tokens, for quality.py to evaluate.

    python benchmarks/quality.py MODEL --calib calib.txt --eval eval.txt --prepare build/rivals
    RIVALS_PYTHON benchmarks/quality_rivals.py llm-compressor-gptq-sym build/rivals/model \\
        build/rivals/tokens.safetensors build/rivals/llm-compressor-gptq-sym.safetensors
    python benchmarks/quality.py MODEL ... --weights build/rivals/llm-compressor-*.safetensors

Runs in the library's own environment and needs nothing of lowbit. What is written are the parameters that
differ from the model's, dequantized to float32, with time, memory and versions in the metadata. All models
are loaded in float32: CPUs have no fast half precision, and lowbit calibrates in float32 there too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import zlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]
GROUP = 64


def load_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def llm_compressor(folder: Path, rows: Tensor, modifiers: list[Any]) -> Weights:
    """The parameters after oneshot over rows with the sequential pipeline, its default."""
    from compressed_tensors.quantization.lifecycle import fake_quantize
    from datasets import Dataset
    from llmcompressor import oneshot

    model = load_model(folder)
    data = Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()})
    oneshot(
        model=model,
        dataset=data,
        recipe=modifiers,
        max_seq_length=rows.shape[1],
        num_calibration_samples=len(rows),
    )
    weights = dict(model.named_parameters())
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and scheme.weights is not None:
            zero = getattr(module, "weight_zero_point", None)
            weights[f"{name}.weight"] = fake_quantize(
                module.weight,
                module.weight_scale,
                zero,
                scheme.weights,
                getattr(module, "weight_g_idx", None),
            )
    return {name: w for name, w in weights.items() if not name.endswith(("_scale", "_zero_point", "_g_idx"))}


def llm_compressor_scheme(*, symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP}
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


def llm_compressor_gptq(folder: Path, rows: Tensor, *, symmetric: bool) -> Weights:
    from llmcompressor.modifiers.gptq import GPTQModifier

    groups = llm_compressor_scheme(symmetric=symmetric)
    return llm_compressor(folder, rows, [GPTQModifier(config_groups=groups, ignore=["lm_head"])])


def llm_compressor_awq(folder: Path, rows: Tensor) -> Weights:
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    # without a GPU this call raises, and AWQ makes it unconditionally
    Tensor.pin_memory = lambda self, *args: self
    groups = llm_compressor_scheme(symmetric=False)
    modifiers = [AWQModifier(), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]
    return llm_compressor(folder, rows, modifiers)


def gptqmodel(folder: Path, rows: Tensor) -> Weights:
    """GPTQModel's defaults; the weights are decoded from what it saves."""
    # it asks for more workers than two cores have
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import GPTQModel, QuantizeConfig

    saved = folder.parent / "gptqmodel"
    model = GPTQModel.load(str(folder), QuantizeConfig(bits=4, group_size=GROUP, sym=True))
    model.quantize([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows], batch_size=1)
    model.save(str(saved))
    stored = load_file(saved / "model.safetensors")
    weights = {}
    for name in [key.removesuffix(".qweight") for key in stored if key.endswith(".qweight")]:
        words, scale, group = (stored[f"{name}.{part}"] for part in ("qweight", "scales", "g_idx"))
        # eight 4-bit codes of one output in a word, the lowest bits first; the symmetric zero-point is 8
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        codes = (words[:, None, :] >> shifts[:, None] & 15).reshape(-1, words.shape[1])
        weights[f"{name}.weight"] = ((codes - 8) * scale.float()[group.long()]).T
    return weights


def auto_round_rtn(folder: Path, rows: Tensor) -> Weights:
    """opt-RTN: scales searched under the weights of activations, no learning (iters=0)."""
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    model = load_model(folder)
    loader = torch.utils.data.DataLoader([{"input_ids": row} for row in rows], batch_size=1)
    quantizer = AutoRound(
        model,
        AutoTokenizer.from_pretrained(folder),
        bits=4,
        group_size=GROUP,
        sym=True,
        iters=0,
        dataset=loader,
        nsamples=len(rows),
        seqlen=rows.shape[1],
        batch_size=1,
        device_map="cpu",
        # otherwise everything is cast to bfloat16
        amp=False,
    )
    quantized, _ = quantizer.quantize()
    return dict(quantized.named_parameters())


RIVALS: dict[str, tuple[str, Callable[[Path, Tensor], Weights]]] = {
    "llm-compressor-gptq-sym": ("llmcompressor", lambda m, t: llm_compressor_gptq(m, t, symmetric=True)),
    "llm-compressor-gptq-asym": ("llmcompressor", lambda m, t: llm_compressor_gptq(m, t, symmetric=False)),
    "llm-compressor-awq-asym": ("llmcompressor", llm_compressor_awq),
    "gptqmodel-sym": ("gptqmodel", gptqmodel),
    "auto-round-rtn-sym": ("auto-round", auto_round_rtn),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rival", choices=RIVALS)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=Path, help="safetensors with rows [R, T] int64")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    package, quantize = RIVALS[args.rival]
    rows = load_file(args.tokens)["rows"]
    before, started = time.process_time(), time.perf_counter()
    weights = quantize(args.model, rows)
    info = {
        "rival": args.rival.rpartition("-")[0],
        "grid": f"4:{GROUP}:{args.rival.rpartition('-')[2]}",
        "tokens": zlib.crc32(rows.numpy().tobytes()),
        "versions": {name: metadata.version(name) for name in (package, "torch", "transformers")},
        "threads": torch.get_num_threads(),
        "cpu_seconds": round(time.process_time() - before, 1),
        "seconds": round(time.perf_counter() - started, 1),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    changed = {}
    with safe_open(args.model / "model.safetensors", "pt") as source:
        for name in source.keys():  # noqa: SIM118
            if name in weights and not torch.equal(weights[name].float(), source.get_tensor(name).float()):
                changed[name] = weights[name].detach().float().contiguous()
    save_file(changed, args.out, metadata={"info": json.dumps(info)})
    print(json.dumps(info | {"changed": len(changed)}), file=sys.stderr)


if __name__ == "__main__":
    main()

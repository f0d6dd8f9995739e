"""What each step of the solvers is worth: KL, perplexity and top-1 agreement of a model's variants.

    python benchmarks/quality.py MODEL --calib calib.txt --eval eval.txt --second other.txt \\
        --grids 4:64:sym,4:64:asym --variants rtn,plain,full --json results/quality-smollm2.json

Every variant is calibrated on the same tokens (rows spread evenly over the text) and evaluated in float32 on
the dequantized weights, rounded to the source's dtype as engines hold them. KL is the mean over tokens of
KL(source || quantized) in nats, with the standard error of that mean. Only what the plan quantizes changes.
`--delattice` first adds uniform noise of half a Q4_1 step to every planned weight and takes the noised model
for the source: weights that were 4-bit once flatter some methods.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.blocks import Following, open_engine
from lowbit.checkpoint.source import Source, open_source
from lowbit.hessian import LayerStats
from lowbit.plan import LayerPlan, Plan, make_plan
from lowbit.recipe import Recipe
from lowbit.scheme import QuantizedTensor
from lowbit.solvers import SOLVERS, gptq, hqq
from lowbit_kernels.reference import dequantize


@dataclass(frozen=True)
class Variant:
    """A method, its options, and what of the full-precision model calibration follows."""

    method: str
    options: Any = None
    following: Following = field(default_factory=lambda: Following(target=False, residual=False))


# what is quantized: all linears of the decoder
RTN = Recipe(method="rtn", group=64)

FULL = gptq.Options()
VARIANTS = {
    "rtn": Variant("rtn", SOLVERS["rtn"].options()),
    "hqq": Variant("hqq", hqq.Options()),
    "hqq-fractional": Variant("hqq", hqq.Options(fractional_zero=True)),
    "plain": Variant("gptq", gptq.PLAIN),
    "uncorrected": Variant("gptq", replace(FULL, correction=False)),
    "no-residual": Variant("gptq", FULL, Following(target=True, residual=False)),
    "full": Variant("gptq", FULL, Following()),
}


def make_variant(text: str) -> Variant:
    """A name of VARIANTS, with other options of its solver behind it: full:rounds=1:search=norm."""
    name, *changes = text.split(":")
    variant = VARIANTS[name]
    given = {key: yaml.safe_load(value) for key, value in (change.split("=") for change in changes)}
    return replace(variant, options=replace(variant.options, **given))


def token_rows(tokenizer: Any, text: Path, count: int, length: int) -> Tensor:
    """[count, length] tokens of text, rows spread evenly."""
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False).input_ids)
    starts = torch.linspace(0, len(ids) - length, count).long()
    return torch.stack([ids[start : start + length] for start in starts])


def off_the_lattice(source: Source, layers: tuple[LayerPlan, ...]) -> Source:
    """source whose planned weights carry uniform noise of ± half a Q4_1 step, the same on every call."""
    planned = {layer.source for layer in layers}

    def read(name: str) -> Tensor:
        weight = source.read(name)
        if name not in planned:
            return weight
        grouped = weight.float().unflatten(1, (-1, 32))
        step = (grouped.amax(-1, keepdim=True) - grouped.amin(-1, keepdim=True)) / 15
        noise = torch.rand(grouped.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        return (grouped + (noise - 0.5) * step).flatten(1).to(weight.dtype)

    noised = object.__new__(type(source))
    noised.__dict__.update(source.__dict__, read=read)
    return noised


def prepare(folder: Path, source: Source, calibration: Tensor) -> None:
    """Write the model and the calibration rows for quality_rivals.py."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    for path in source.side_files:
        shutil.copy(path, model)
    (model / "config.json").write_text(json.dumps(source.config))
    save_file(
        {name: source.read(name) for name in source.tensors}, model / "model.safetensors", {"format": "pt"}
    )
    save_file({"rows": calibration}, folder / "tokens.safetensors")


def quantize_all(
    source: Source, layers: tuple[LayerPlan, ...], variant: Variant, rows: Tensor, device: torch.device
) -> Iterator[tuple[LayerPlan, Tensor]]:
    """Yield each layer's dequantized weight [N, K] in float32."""
    solver = SOLVERS[variant.method]
    if not solver.needs_data:
        for layer in layers:
            weight = source.read(layer.source).to(device)
            yield layer, weight_of(solver.solve(weight, layer.scheme, None, variant.options))
        return
    with open_engine(source, layers, rows, device, following=variant.following) as engine:
        for block in engine.blocks():
            for stage in block.stages():
                alike: dict[Any, list[Any]] = {}
                for work in stage.work():
                    alike.setdefault((id(work.stats.hessian), work.layer.scheme), []).append(work)
                for works in alike.values():
                    stats = works[0].stats
                    cross = None if stats.cross is None else torch.cat([w.stats.cross for w in works])
                    q = solver.solve(
                        torch.cat([work.weight for work in works]),
                        works[0].layer.scheme,
                        LayerStats(stats.hessian, stats.tokens, cross),
                        variant.options,
                    )
                    parts = weight_of(q).split([len(work.weight) for work in works])
                    for work, weight in zip(works, parts, strict=True):
                        stage.replace(work.layer, weight)
                        yield work.layer, weight


def weight_of(q: QuantizedTensor) -> Tensor:
    return dequantize(q.codes, q.scale, q.zero_point, q.scheme.bits)


@torch.no_grad()
def log_probabilities(model: Any, rows: Tensor) -> list[Tensor]:
    """[length - 1, vocabulary] float32 for every row."""
    return [model(row[None]).logits[0, :-1].float().log_softmax(-1) for row in rows]


@torch.no_grad()
def compare(model: Any, rows: Tensor, reference: list[Tensor]) -> dict[str, float]:
    """KL to the reference with its standard error, perplexity, and how often the likeliest token agrees."""
    divergence, surprise, agree = [], [], []
    for row, p in zip(rows, reference, strict=True):
        (q,) = log_probabilities(model, row[None])
        divergence.append((p.exp() * (p - q)).sum(-1))
        surprise.append(-q.gather(1, row[1:, None])[:, 0])
        agree.append((p.argmax(-1) == q.argmax(-1)).float())
    kl = torch.cat(divergence).double()
    return {
        "kl": kl.mean().item(),
        "kl_error": (kl.std() / len(kl) ** 0.5).item(),
        "perplexity": torch.cat(surprise).double().mean().exp().item(),
        "top1": torch.cat(agree).double().mean().item(),
    }


def perplexity(rows: Tensor, reference: list[Tensor]) -> float:
    surprise = [-p.gather(1, row[1:, None])[:, 0] for row, p in zip(rows, reference, strict=True)]
    return torch.cat(surprise).double().mean().exp().item()


@dataclass(frozen=True)
class Evaluator:
    """The model with the source's weights, and what it says of the texts.

    rows: [R, T] tokens of each text.  reference: log-probabilities of each row.  dtype: of the source.
    """

    source: Source
    model: Any
    rows: dict[str, Tensor]
    reference: dict[str, list[Tensor]]
    dtype: torch.dtype

    def compare(self, weights: dict[str, Tensor]) -> dict[str, dict[str, float]]:
        """What the texts say of the model with these parameters, rounded to the source's dtype."""
        load(self.model, weights, self.dtype)
        found = {name: compare(self.model, self.rows[name], self.reference[name]) for name in self.rows}
        load(self.model, {name: self.source.read(name) for name in weights}, self.dtype)
        return found


def load(model: Any, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, weight in weights.items():
        model.get_parameter(name).data.copy_(weight.to(dtype))


def make_evaluator(
    source: Source, rows: dict[str, Tensor], device: torch.device, *, noised: bool
) -> Evaluator:
    model = (
        transformers.AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).to(device).eval()
    )
    dtype = source.read(next(iter(source.tensors))).dtype
    if noised:
        names = [layer.source for layer in make_plan(source, RTN).layers]
        load(model, {name: source.read(name) for name in names}, dtype)
    reference = {name: log_probabilities(model, tokens) for name, tokens in rows.items()}
    return Evaluator(source, model, rows, reference, dtype)


def read_rival(path: Path, calibration: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What quality_rivals.py says of a run, and the weights that it wrote."""
    with safe_open(path, "pt") as file:
        info = json.loads(file.metadata()["info"])
    assert info["tokens"] == zlib.crc32(calibration.numpy().tobytes()), f"{path}: calibrated on other tokens"
    return info, load_file(path)


def make_grid(source: Source, grid: str) -> Plan:
    """The plan for bits:group:sym|asym; the format holds all of them."""
    bits, group, kind = grid.split(":")
    keys = {"bits": int(bits), "group": int(group), "sym": kind == "sym", "format": "gptq-v2"}
    return make_plan(source, RTN.model_copy(update=keys))


def markdown(report: dict[str, Any]) -> str:
    """The report as one table per grid."""
    texts = list(report["texts"])
    lines = [f"# {report['model']}: what each step is worth", "", report["note"], ""]
    for grid in dict.fromkeys(row["grid"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["grid"] == grid]
        lines += [f"## {grid}, {rows[0]['bits_per_weight']:.2f} bits per weight", ""]
        head = ["variant", *(f"{t}: {c}" for t in texts for c in ("KL", "perplexity", "top-1")), "seconds"]
        lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        for row in rows:
            cells = [row["variant"]]
            for text in texts:
                result = row[text]
                cells.append(f"{result['kl']:.4f} ± {result['kl_error']:.4f}")
                cells += [f"{result['perplexity']:.2f}", f"{100 * result['top1']:.1f}%"]
            lines.append("| " + " | ".join([*cells, f"{row['seconds']:.0f}"]) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--second", type=Path, help="a text of another domain than the calibration")
    parser.add_argument("--grids", default="4:64:sym,4:64:asym", help="bits:group:sym|asym, ...")
    parser.add_argument(
        "--variants",
        default="rtn,hqq,plain,full",
        help=", ".join(VARIANTS) + "; with options as full:rounds=1",
    )
    parser.add_argument("--delattice", action="store_true")
    parser.add_argument("--prepare", type=Path, help="only write what quality_rivals.py needs to this folder")
    parser.add_argument("--weights", type=Path, nargs="*", default=[], help="what quality_rivals.py wrote")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    source = open_source(args.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.path)
    calibration = token_rows(tokenizer, args.calib, args.samples, args.length)
    if args.delattice:
        source = off_the_lattice(source, make_plan(source, RTN).layers)
    if args.prepare:
        prepare(args.prepare, source, calibration)
        return
    texts = {"eval": args.eval} | ({"second": args.second} if args.second else {})
    rows = {
        name: token_rows(tokenizer, path, args.rows, args.length).to(device) for name, path in texts.items()
    }
    evaluator = make_evaluator(source, rows, device, noised=args.delattice)
    variants = {name: make_variant(name) for name in args.variants.split(",") if name}
    report: dict[str, Any] = {
        "model": source.path.name + (", off the 4-bit lattice" if args.delattice else ""),
        "note": f"Calibrated on {args.samples} rows of {args.length} tokens, evaluated on {args.rows}.",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "texts": {
            name: {"file": path.name, "source_perplexity": perplexity(rows[name], evaluator.reference[name])}
            for name, path in texts.items()
        },
        "variants": {name: asdict(variant) for name, variant in variants.items()},
        "rows": [],
    }
    print(json.dumps(report["texts"]), flush=True)

    def keep(grid: str, variant: str, weights: dict[str, Tensor], info: dict[str, Any]) -> None:
        bits, group, kind = grid.split(":")
        row = {
            "grid": f"int{bits} {kind} group {group}",
            "variant": variant,
            "bits_per_weight": make_grid(source, grid).bits_per_weight,
        }
        report["rows"].append(row | info | evaluator.compare(weights))
        print(json.dumps(report["rows"][-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
            args.json.with_suffix(".md").write_text(markdown(report))

    for path in args.weights:
        info, weights = read_rival(path, calibration)
        keep(info.pop("grid"), info.pop("rival"), weights, info)
    for grid in args.grids.split(","):
        plan = make_grid(source, grid)
        for name, variant in variants.items():
            if SOLVERS[variant.method].accepts(plan.layers[0].scheme):
                continue
            started, cpu_started = time.perf_counter(), time.process_time()
            weights = {
                layer.source: weight
                for layer, weight in quantize_all(source, plan.layers, variant, calibration, device)
            }
            spent = {
                "seconds": round(time.perf_counter() - started, 1),
                "cpu_seconds": round(time.process_time() - cpu_started, 1),
            }
            keep(grid, name, weights, spent)


def processor() -> str:
    """The CPU's name, which platform does not always know."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return f"{names[0]}, {len(names)} threads" if names else platform.processor()


if __name__ == "__main__":
    main()

"""What is in a checkpoint folder, which engines load it and with which kernels, from headers and config.

The engine rules were read from vLLM 0.32, SGLang main and transformers 5.24 in November 2026; where an engine
was run, on a CPU, its row says so. Kernels are named for the layers of this checkpoint, not for the format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowbit.errors import RecipeError, SourceError
from lowbit.folder import Folder, StoredLayer, open_quantized
from lowbit.plan import FUSED
from lowbit.scheme import QuantScheme

# linears that engines split along their inputs, each rank holding whole groups
ROW_PARALLEL = {
    "o_proj", "out_proj", "down_proj", "w2", "wo", "dense", "dense_4h_to_h", "c_proj", "fc2",
}  # fmt: skip
HIGHEST_DEGREE = 64
ARCH = re.compile(r"cpu|sm_\d{2,3}|gfx[0-9a-f]{3,4}")


@dataclass(frozen=True)
class SchemeSummary:
    """Layers that share a scheme. weights: how many they hold; packed_bytes: what those take on disk."""

    scheme: str
    layers: int
    weights: int
    packed_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.packed_bytes / self.weights


@dataclass(frozen=True)
class Engine:
    """Whether one engine takes the checkpoint. kernels: what its layers would use.  note: why not, or how."""

    name: str
    loads: bool
    kernels: tuple[str, ...]
    note: str


@dataclass(frozen=True)
class KernelRow:
    """One shape in the dispatch table of lowbit_kernels.

    tokens: rows of activations.  chosen: the variant that runs, None if all refuse.  refusals: by variant.
    """

    n: int
    k: int
    scheme: str
    layers: int
    tokens: int
    chosen: str | None
    config: dict[str, Any] | None
    refusals: dict[str, str]


@dataclass(frozen=True)
class Inspection:
    """What inspect found. faults: contradictions in the files, see lowbit verify."""

    path: str
    architecture: str
    format: str | None
    lowbit_version: str | None
    files: int
    total_bytes: int
    dense_bytes: int
    original_bytes: int
    schemes: tuple[SchemeSummary, ...]
    engines: tuple[Engine, ...]
    tensor_parallel: int
    tensor_parallel_limit: str
    kernels: tuple[KernelRow, ...]
    faults: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect(path: str | Path, *, kernels: bool = False, arch: str | None = None) -> Inspection:
    """Describe a quantized checkpoint folder.

    kernels: also list the dispatch table of lowbit_kernels for its layers, for `arch` (sm_90, gfx942, ...) or
    the device at hand; an arch asks for it too.
    Raises SourceError if path is not a checkpoint folder or is not quantized, RecipeError for an arch that
    is none.
    """
    if arch is not None and not ARCH.fullmatch(arch):
        raise RecipeError(f"--arch {arch}: not an architecture; sm_90, gfx942 and cpu are")
    folder = open_quantized(path, "inspect")
    if folder.format is None:
        raise SourceError(f"{path}: config.json has no quantization_config; run `lowbit verify {path}`")
    degree, limit = tensor_parallel(folder)
    packed = sum(layer.nbytes for layer in folder.layers.values())
    total = sum(info.nbytes for info in folder.entries.values())
    weights = sum(math.prod(layer.shape) for layer in folder.layers.values())
    return Inspection(
        path=str(path),
        architecture=(folder.config.get("architectures") or [folder.config.get("model_type", "unknown")])[0],
        format=folder.format,
        lowbit_version=(folder.manifest or {}).get("lowbit"),
        files=len(folder.shards),
        total_bytes=total,
        dense_bytes=total - packed,
        original_bytes=total - packed + 2 * weights,
        schemes=summarize(folder),
        engines=tuple(Engine(name, *rule(folder)) for name, rule in ENGINES.items()),
        tensor_parallel=degree,
        tensor_parallel_limit=limit,
        kernels=tuple(kernel_rows(folder, arch)) if kernels or arch else (),
        faults=tuple(map(str, folder.faults)),
    )


def summarize(folder: Folder) -> tuple[SchemeSummary, ...]:
    """One row per scheme, the largest first."""
    by_scheme: dict[QuantScheme, list[StoredLayer]] = {}
    for layer in folder.layers.values():
        by_scheme.setdefault(layer.scheme, []).append(layer)
    rows = [
        SchemeSummary(
            str(scheme),
            len(layers),
            sum(math.prod(layer.shape) for layer in layers),
            sum(layer.nbytes for layer in layers),
        )
        for scheme, layers in by_scheme.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.weights))


def tensor_parallel(folder: Folder) -> tuple[int, str]:
    """Return the highest power of two of ranks that can share the layers, and what stops the next one."""
    degree = 1
    while degree < HIGHEST_DEGREE:
        reason = _splits(folder, 2 * degree)
        if reason is not None:
            return degree, reason
        degree *= 2
    return degree, f"nothing up to {HIGHEST_DEGREE}"


def _splits(folder: Folder, ranks: int) -> str | None:
    """Why the checkpoint cannot be split over so many ranks, None if it can."""
    text = folder.config.get("text_config") or folder.config
    heads = text.get("num_attention_heads", text.get("n_head"))
    kv_heads = text.get("num_key_value_heads", heads)
    # some models have a list of them, one number a block
    heads, kv_heads = (count if type(count) is int else None for count in (heads, kv_heads))
    if heads and heads % ranks:
        return f"{heads} attention heads do not divide by {ranks}"
    if kv_heads and kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} key/value heads do not divide by {ranks}"
    for layer in folder.layers.values():
        (n, k), width = layer.shape, layer.scheme.width(layer.shape[1])
        kind = layer.name.rpartition(".")[2]
        if kind in ROW_PARALLEL:
            if k % ranks or (layer.scheme.group_size != -1 and k % (ranks * width)):
                return f"{layer.name}: {k} inputs in groups of {width} do not divide by {ranks}"
        elif n % ranks and not (kv_heads and kind in {"k_proj", "v_proj"} and ranks > kv_heads):
            return f"{layer.name}: {n} outputs do not divide by {ranks}"
    return None


# ---- engines: each rule returns (loads, kernels, note)

Rule = Callable[[Folder], tuple[bool, tuple[str, ...], str]]


def _transformers(folder: Folder) -> tuple[bool, tuple[str, ...], str]:
    mixed = len({(layer.scheme.bits, layer.scheme.group_size) for layer in folder.layers.values()}) > 1
    if folder.format == "compressed-tensors":
        if _symmetric(folder):
            return True, ("dense after load",), "unpacks to dense weights; exact ones in docs/loaders.md"
        if _experts(folder):
            return False, (), "zero-points of experts are not passed on"
        if mixed:
            return False, (), "decodes zero-points of one scheme only"
        return True, ("dense after load",), "only with CompressedTensorsConfig(dequantize=True)"
    if _experts(folder):
        return False, (), "loads random experts without an error"
    if "dynamic" in folder.config["quantization_config"]:
        return False, (), "does not read the per-layer rules; GPTQModel.load does"
    return True, ("gptqmodel",), "needs optimum and gptqmodel"


def _vllm_cuda(folder: Folder) -> tuple[bool, tuple[str, ...], str]:
    if _is_gptq(folder) and not _symmetric(folder):
        return False, (), "refuses GPTQ with zero-points: write compressed-tensors or awq"
    return _each_layer(folder, _vllm_kernel)


def _vllm_kernel(layer: StoredLayer) -> str | None:
    """The first kernel of vLLM on Hopper that takes a layer; on Ampere and Ada the first after Machete."""
    (n, k), scheme = layer.shape, layer.scheme
    if scheme.bits in (4, 8) and scheme.group_size in (-1, 64, 128) and k % 64 == 0 and n % 128 == 0:
        return "Machete (Hopper), else Marlin" if _marlin(scheme) else "Machete (Hopper only)"
    if _marlin(scheme):
        return "Marlin"
    if scheme.bits == 4 and scheme.group_size in (-1, 32, 64, 128, 256):
        return "Triton"
    if scheme.bits == 3 and layer.format == "compressed-tensors":
        return "Humming"
    return None


def _marlin(scheme: QuantScheme) -> bool:
    types = scheme.bits in (4, 8) if scheme.symmetric else scheme.bits == 4
    return types and scheme.group_size in (-1, 32, 64, 128)


def _vllm_cpu(folder: Folder) -> tuple[bool, tuple[str, ...], str]:
    if _experts(folder):
        return False, (), "experts need AMX"
    if _is_gptq(folder) and not _symmetric(folder):
        return False, (), "refuses GPTQ with zero-points"

    def kernel(layer: StoredLayer) -> str | None:
        fits = layer.scheme.bits == 4 and layer.shape[0] % 32 == 0 and layer.shape[1] % 32 == 0
        return "CPUWNA16" if fits else None

    return _each_layer(folder, kernel)


def _sglang(folder: Folder) -> tuple[bool, tuple[str, ...], str]:
    if _experts(folder) and not _symmetric(folder):
        return False, (), "experts must be symmetric"

    def kernel(layer: StoredLayer) -> str | None:
        (n, k), scheme = layer.shape, layer.scheme
        if _marlin(scheme) and n % 64 == 0 and k % 128 == 0:
            return "Marlin"
        return "gptq (fp16 only)" if layer.format.startswith("gptq") else None

    return _each_layer(folder, kernel)


ENGINES: dict[str, Rule] = {
    "transformers": _transformers,
    "vLLM, CUDA": _vllm_cuda,
    "vLLM, CPU": _vllm_cpu,
    "SGLang, CUDA": _sglang,
}


def _each_layer(
    folder: Folder, kernel: Callable[[StoredLayer], str | None]
) -> tuple[bool, tuple[str, ...], str]:
    mixed = _mixed_fused(folder)
    if mixed is not None:
        return False, (), mixed
    names: dict[str, int] = {}
    for layer in folder.layers.values():
        name = kernel(layer)
        if name is None:
            return False, (), f"no kernel for {layer.name}: {layer.scheme}, {list(layer.shape)}"
        names[name] = names.get(name, 0) + 1
    note = "" if len(names) == 1 else ", ".join(f"{name}: {count} layers" for name, count in names.items())
    return True, tuple(names), note


def _mixed_fused(folder: Folder) -> str | None:
    """Why engines that fuse q/k/v and gate/up cannot: unlike schemes, or one of them dense."""
    dense = {name.removesuffix(".weight") for name in folder.dense if name.endswith(".weight")}
    for layer in folder.layers.values():
        parent, _, kind = layer.name.rpartition(".")
        for members in FUSED:
            for other in set(members) - {kind} if kind in members else ():
                sibling = f"{parent}.{other}"
                if sibling in dense:
                    return f"{layer.name} is packed and {sibling} is not: they must share a scheme"
                if sibling in folder.layers and folder.layers[sibling].scheme != layer.scheme:
                    return f"{layer.name} and {sibling} must share a scheme"
    return None


def _symmetric(folder: Folder) -> bool:
    return all(layer.scheme.symmetric for layer in folder.layers.values())


def _is_gptq(folder: Folder) -> bool:
    return folder.format in ("gptq", "gptq-v2")


def _experts(folder: Folder) -> bool:
    return any(".experts." in name for name in folder.layers)


# ---- our own kernels


def kernel_rows(
    folder: Folder, arch: str | None, tokens: tuple[int, ...] = (1, 16, 256)
) -> Iterator[KernelRow]:
    """Ask lowbit_kernels.dispatch about every distinct shape and scheme, for a few numbers of tokens."""
    import torch

    from lowbit_kernels import dispatch

    arch = arch or dispatch.arch_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    shapes: dict[tuple[tuple[int, int], QuantScheme], int] = {}
    for layer in folder.layers.values():
        key = (layer.shape, layer.scheme)
        shapes[key] = shapes.get(key, 0) + 1
    for ((n, k), scheme), count in shapes.items():
        # a GPU reorders the words once, when it loads them
        order = "row" if arch == "cpu" else dispatch.order_of(scheme.width(k), k)
        for m in tokens:
            problem = dispatch.Problem(
                bits=scheme.bits,
                group_size=scheme.width(k),
                has_zero=not scheme.symmetric,
                act_dtype=scheme.scale_dtype,
                m_bucket=dispatch.bucket(m),
                n=n,
                k=k,
                arch=arch,
                order=order,
            )
            refused = {name: why for name, why in dispatch.refusals(problem).items() if why is not None}
            if arch == "cpu":
                refused = dict.fromkeys(refused, "needs a GPU; --arch sm_90 shows what one would run")
            config = dispatch.choose(problem) if len(refused) < len(dispatch.VARIANTS) else None
            yield KernelRow(
                n,
                k,
                str(scheme),
                count,
                m,
                config.variant if config else None,
                asdict(config) if config else None,
                refused,
            )

"""GPTQ files, versions 1 and 2, as AutoGPTQ and GPTQModel define them.

    qweight  int32 [K · bits / 32, N]   code k of output n at bit k · bits of column n
    qzeros   int32 [G, N · bits / 32]   zero-point of output n at bit n · bits of row g
    scales   [G, N]
    g_idx    int32 [K]                  group of each input, here k // group_size

Version 1 ("gptq") stores every zero-point less one, modulo 2^bits. A zero-point of 0 becomes 2^bits - 1,
which readers that add one without the modulo take for 2^bits; so version 1 is only written for the symmetric
grid, and an asymmetric one goes to version 2 ("gptq_v2"), which stores zero-points as they are.
qweight is the transpose of the stored words in layout.py, for every width.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lowbit.checkpoint.formats.patterns import patterns
from lowbit.checkpoint.formats.stored import expect, with_scale_dtype
from lowbit.errors import LowbitError, SourceError
from lowbit.scheme import PackedTensor, QuantScheme
from lowbit_kernels.layout import pack_words, unpack_words

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.plan import LayerPlan

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")

# what engines fuse into one module: rules must match its name too
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def accepts_v1(scheme: QuantScheme) -> str | None:
    if not scheme.symmetric:
        return "version 1 of GPTQ cannot hold a zero-point of 0; use gptq-v2, awq or compressed-tensors"
    return None


def accepts_v2(scheme: QuantScheme) -> str | None:
    return None


def accepts_layer(scheme: QuantScheme, n: int, k: int) -> str | None:
    """Whole words along both axes, and the multiples of 8 that the engines' kernels ask for."""
    step = max(8, 32 if scheme.bits == 3 else 32 // scheme.bits)
    for axis, size in (("out_features", n), ("in_features", k)):
        if size % step:
            return f"gptq with {scheme.bits} bits needs {axis} to be a multiple of {step}, it is {size}"
    return None


def encode(prefix: str, packed: PackedTensor, less: int) -> dict[str, Tensor]:
    """The four tensors of one layer, on its device. less: what stored zero-points lack, 1 in version 1."""
    scheme, k, zero_point = packed.scheme, packed.in_features, packed.zero_point
    if zero_point is None:
        zero_point = torch.full_like(packed.scale, scheme.symmetric_zero, dtype=torch.uint8)
    assert zero_point.dtype == torch.uint8, "solvers for this format return whole zero-points"
    stored = (zero_point.T - less) & scheme.max_code
    return {
        f"{prefix}.qweight": packed.words.T.contiguous(),
        f"{prefix}.qzeros": pack_words(stored.contiguous(), scheme.bits),
        f"{prefix}.scales": packed.scale.T.contiguous(),
        f"{prefix}.g_idx": torch.arange(k, dtype=torch.int32, device=packed.words.device) // scheme.width(k),
    }


def decode(
    prefix: str, get: Callable[[str], Tensor], scheme: QuantScheme, shape: tuple[int, int], less: int
) -> PackedTensor:
    """One layer from its tensors; shape is (N, K).

    Raises SourceError for an activation order (g_idx that is not k // group_size), which no other format
    holds, and for zero-points that contradict a symmetric scheme.
    """
    (n, k), bits, groups = shape, scheme.bits, scheme.groups(shape[1])

    def part(suffix: str, *size: int, dtype: torch.dtype | None = torch.int32) -> Tensor:
        return expect(f"{prefix}.{suffix}", get(f"{prefix}.{suffix}"), size, dtype)

    words = part("qweight", k * bits // 32, n).T.contiguous()
    scale = part("scales", groups, n, dtype=None).T.contiguous()
    stored = unpack_words(part("qzeros", groups, n * bits // 32), bits, n)
    zero_point = ((stored + less) & scheme.max_code).T.contiguous()
    in_order = torch.arange(k, dtype=torch.int32, device=words.device) // scheme.width(k)
    if not torch.equal(part("g_idx", k), in_order):
        raise SourceError(f"{prefix}.g_idx: the columns are reordered (desc_act); quantize without it")
    if scheme.symmetric and not bool((zero_point == scheme.symmetric_zero).all()):
        raise SourceError(f"{prefix}.qzeros: not all {scheme.symmetric_zero}, but the config says sym")
    return PackedTensor(
        words,
        scale,
        None if scheme.symmetric else zero_point,
        with_scale_dtype(scheme, f"{prefix}.scales", scale),
        k,
    )


def quantization_config(layers: Sequence[LayerPlan], dense: Sequence[str], version: str) -> dict[str, Any]:
    """The scheme that most layers have; `dynamic` holds the layers of other schemes and the dense linears.

    version: "gptq" or "gptq_v2". A `dynamic` key is a regular expression for the start of a module's name,
    "-:" in front for modules that are not quantized; the first that matches counts.
    """
    base = Counter(layer.scheme for layer in layers).most_common(1)[0][0]
    dynamic: dict[str, dict[str, Any]] = {f"-:{rule}": {} for rule in _rules(dense)}
    for scheme in dict.fromkeys(layer.scheme for layer in layers if layer.scheme != base):
        names = [layer.name for layer in layers if layer.scheme == scheme]
        dynamic |= {f"+:{rule}": _fields(scheme) for rule in _rules(names)}
    config = {
        "quant_method": "gptq",
        **_fields(base),
        "desc_act": False,
        "lm_head": any(layer.name == "lm_head" for layer in layers),
        "checkpoint_format": version,
        "pack_dtype": "int32",
        "true_sequential": True,
        "damp_percent": 0.01,
    }
    return config | ({"dynamic": dynamic} if dynamic else {})


def read_config(config: dict[str, Any]) -> Callable[[str, str], QuantScheme | None]:
    """Return (module name, class name) -> its scheme, None for a module that is not quantized.

    SourceError if malformed.
    """
    try:
        base = _scheme(config)
        rules = [
            (re.compile(key[2:]), None if key.startswith("-:") else _scheme(config | fields))
            for key, fields in (config.get("dynamic") or {}).items()
        ]
    except (KeyError, TypeError, AttributeError, re.error) as e:
        raise SourceError(f"quantization_config: malformed ({type(e).__name__}: {e})") from None

    def scheme_of(name: str, kind: str) -> QuantScheme | None:
        for rule, scheme in rules:
            if rule.match(name):
                return scheme
        return None if name == "lm_head" and not config.get("lm_head") else base

    return scheme_of


def extra_files(config: dict[str, Any]) -> dict[str, str]:
    """Older tools read the config from a file of its own."""
    return {"quantize_config.json": json.dumps(config, indent=2) + "\n"}


def _fields(scheme: QuantScheme) -> dict[str, Any]:
    return {"bits": scheme.bits, "group_size": scheme.group_size, "sym": scheme.symmetric}


def _scheme(fields: dict[str, Any]) -> QuantScheme:
    try:
        return QuantScheme(fields["bits"], fields["group_size"], fields["sym"])
    except LowbitError as e:
        raise SourceError(f"quantization_config: {e}") from None


def _rules(names: Sequence[str]) -> list[str]:
    """Expressions for names and for the modules that engines fuse them into."""
    known = dict.fromkeys(name for name in names if name != "lm_head")
    for name in list(known):
        parent, _, leaf = name.rpartition(".")
        if leaf in FUSED:
            known[f"{parent}.{FUSED[leaf]}"] = None
        if ".experts." in name:
            known[name.split(".experts.")[0] + ".experts"] = None
    return [f"{pattern}$" for pattern in patterns(known)]

"""compressed-tensors, "pack-quantized": what vLLM, SGLang and transformers load fastest.

    weight_packed      int32 [N, ceil(K · bits / 32)]   code k of a row at bit k · bits, as in layout.py
    weight_scale       [N, G]
    weight_zero_point  int32 [ceil(N · bits / 32), G]   packed along N; only for the asymmetric grid
    weight_shape       int64 [2]                        N, K

Files hold signed values plus 2^(bits-1), for codes and zero-points alike: that is our unsigned code, so
nothing is added or taken away. (compressed_tensors.compressors.pack_quantized, 0.20.1.)
"""

from __future__ import annotations

import re
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

SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
# the release whose files these are
VERSION = "0.20.1"


def accepts(scheme: QuantScheme) -> str | None:
    if scheme.bits not in (4, 8):
        return (
            f"compressed-tensors with {scheme.bits} bits is laid out differently by its releases; "
            "use --bits 4 or 8, or --format gptq"
        )
    return None


def caution(scheme: QuantScheme) -> str | None:
    """Stored zero-points: transformers 5.24 with compressed-tensors 0.20 does not expect them by default."""
    if scheme.symmetric:
        return None
    return "transformers loads zero-points in this format only with dequantize=True; awq it takes as it is"


def accepts_layer(scheme: QuantScheme, n: int, k: int) -> str | None:
    """Every shape: words at the end of a row, or of a column of zero-points, are filled up."""
    return None


def encode(prefix: str, packed: PackedTensor) -> dict[str, Tensor]:
    """The tensors of one layer, on the device of the packed one; weight_shape is on the CPU."""
    tensors = {
        f"{prefix}.weight_packed": packed.words,
        f"{prefix}.weight_scale": packed.scale,
        f"{prefix}.weight_shape": torch.tensor(packed.shape, dtype=torch.int64),
    }
    if packed.zero_point is not None:
        assert packed.zero_point.dtype == torch.uint8, "solvers for this format return whole zero-points"
        columns = pack_words(packed.zero_point.T.contiguous(), packed.scheme.bits)
        tensors[f"{prefix}.weight_zero_point"] = columns.T.contiguous()
    return tensors


def decode(
    prefix: str, get: Callable[[str], Tensor], scheme: QuantScheme, shape: tuple[int, int]
) -> PackedTensor:
    """One layer from its tensors; its scheme has the dtype that the scales are stored in."""
    n, k = shape
    groups, bits = scheme.groups(k), scheme.bits

    def part(suffix: str, *size: int, dtype: torch.dtype | None = torch.int32) -> Tensor:
        return expect(f"{prefix}.{suffix}", get(f"{prefix}.{suffix}"), size, dtype)

    words = part("weight_packed", n, -(-k * bits // 32))
    scale = part("weight_scale", n, groups, dtype=None)
    stated = get(f"{prefix}.weight_shape").tolist()
    if stated != [n, k]:
        raise SourceError(f"{prefix}.weight_shape: holds {stated}, the layer is {[n, k]}")
    zero_point = None
    if not scheme.symmetric:
        zero_point = unpack_words(
            part("weight_zero_point", -(-n * bits // 32), groups).T, bits, n
        ).T.contiguous()
    return PackedTensor(
        words, scale, zero_point, with_scale_dtype(scheme, f"{prefix}.weight_scale", scale), k
    )


def quantization_config(layers: Sequence[LayerPlan], dense: Sequence[str]) -> dict[str, Any]:
    """The entry of config.json for these layers; dense: names of the linears that stay as they are.

    One scheme is aimed at the class Linear, and the dense linears are ignored by name. Engines do not count
    an output layer as Linear, so a quantized one is named too. Several schemes are aimed at names alone.
    """
    schemes = list(dict.fromkeys(layer.scheme for layer in layers))
    groups = {}
    for i, scheme in enumerate(schemes):
        names = [layer.name for layer in layers if layer.scheme == scheme]
        heads = [name for name in names if name.rpartition(".")[2] == "lm_head"]
        targets = ["Linear", *heads] if len(schemes) == 1 else _rules(names)
        groups[f"group_{i}"] = {
            "targets": targets,
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "weights": _fields(scheme),
        }
    quantized = {layer.name for layer in layers}
    # a tied output layer is no tensor of the files but is a Linear of the model
    ignored = list(dense) if "lm_head" in {*dense, *quantized} else [*dense, "lm_head"]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "version": VERSION,
        "config_groups": groups,
        "ignore": _rules(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _rules(names: Sequence[str]) -> list[str]:
    """Targets that select exactly these modules: names as they are, or one expression for many."""
    rules = []
    for pattern in patterns(names):
        plain = pattern.replace("\\", "")
        rules.append(plain if plain in names else f"re:{pattern}$")
    return rules


def _fields(scheme: QuantScheme) -> dict[str, Any]:
    whole_row = scheme.group_size == -1
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if whole_row else "group",
        "group_size": None if whole_row else scheme.group_size,
        "dynamic": False,
    }


def read_config(config: dict[str, Any]) -> Callable[[str, str], QuantScheme | None]:
    """Return (module name, class name) -> its scheme, None for a module that is not quantized.

    config: the object that quantization_config returns. A name counts before an expression, that before a
    class. Raises SourceError if the weights are in another layout than this module writes.
    """
    try:
        stored = {config.get("format"), *(group.get("format") for group in config["config_groups"].values())}
        ignore = list(config.get("ignore") or [])
        groups = [
            (list(group["targets"]), _scheme(group["weights"])) for group in config["config_groups"].values()
        ]
    except (KeyError, TypeError, AttributeError) as e:
        raise SourceError(f"quantization_config: malformed ({type(e).__name__}: {e})") from None
    for rule in (*ignore, *(rule for rules, _ in groups for rule in rules)):
        if not isinstance(rule, str):
            raise SourceError(f"quantization_config: malformed (target {rule!r} is not text)")
        try:
            re.compile(rule.removeprefix("re:"))
        except re.error as e:
            raise SourceError(f"quantization_config: malformed (target {rule!r}: {e})") from None
    if other := sorted(map(str, stored - {None, "pack-quantized"})):
        raise SourceError(f"quantization_config: format {other[0]!r} is not known; only pack-quantized is")

    def scheme_of(name: str, kind: str) -> QuantScheme | None:
        if any(_rank(rule, name, kind) for rule in ignore):
            return None
        best = max(
            ((_rank(rule, name, kind), -i) for i, (rules, _) in enumerate(groups) for rule in rules),
            default=(0, 0),
        )
        return groups[-best[1]][1] if best[0] else None

    return scheme_of


def _rank(rule: str, name: str, kind: str) -> int:
    """How strongly a target selects a module: 3 by name, 2 by expression, 1 by class, 0 not at all."""
    if rule.startswith("re:"):
        return 2 if re.match(rule[3:], name) else 0
    return 3 if rule == name else int(rule == kind)


def _scheme(weights: dict[str, Any]) -> QuantScheme:
    strategy, order = weights["strategy"], weights.get("actorder")
    if weights.get("type", "int") != "int" or strategy not in ("group", "channel"):
        raise SourceError(f"quantization_config: {weights.get('type')} weights by {strategy} are not known")
    if order not in (None, False, "weight", "static"):
        raise SourceError(f"quantization_config: actorder {order!r} moves columns between groups; not known")
    group_size = -1 if strategy == "channel" else weights["group_size"]
    try:
        return QuantScheme(weights["num_bits"], group_size, weights.get("symmetric", True))
    except LowbitError as e:
        raise SourceError(f"quantization_config: {e}") from None

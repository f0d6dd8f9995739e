"""AWQ files of version "gemm": 4 bits with zero-points, as AutoAWQ defines them.

    qweight  int32 [K, N / 8]   qzeros  int32 [G, N / 8]   scales [G, N]

Words run along N, and nibble i of a word holds column ORDER[i] of its eight. Zero-points are stored as they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lowbit.checkpoint.formats.stored import expect, with_scale_dtype
from lowbit.errors import LowbitError, PlanError, SourceError
from lowbit.scheme import PackedTensor, QuantScheme
from lowbit_kernels.layout import pack_words, unpack_words

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.plan import LayerPlan

SUFFIXES = ("qweight", "qzeros", "scales")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def accepts(scheme: QuantScheme) -> str | None:
    if scheme.bits != 4:
        return f"awq holds 4 bits, not {scheme.bits}; use compressed-tensors or gptq"
    if scheme.symmetric:
        return "awq is for zero-points: quantize with --asym, or use compressed-tensors or gptq"
    return None


def accepts_layer(scheme: QuantScheme, n: int, k: int) -> str | None:
    return f"awq needs out_features to be a multiple of 8, it is {n}" if n % 8 else None


def encode(prefix: str, packed: PackedTensor) -> dict[str, Tensor]:
    """The three tensors of one layer."""
    assert packed.zero_point is not None, "accepts() admits only the asymmetric grid"
    assert packed.zero_point.dtype == torch.uint8, "solvers for this format return whole zero-points"
    return {
        f"{prefix}.qweight": _pack_columns(unpack_words(packed.words, 4, packed.in_features)),
        f"{prefix}.qzeros": _pack_columns(packed.zero_point),
        f"{prefix}.scales": packed.scale.T.contiguous(),
    }


def decode(
    prefix: str, get: Callable[[str], Tensor], scheme: QuantScheme, shape: tuple[int, int]
) -> PackedTensor:
    """One layer from its tensors; shape is (N, K)."""
    (n, k), groups = shape, scheme.groups(shape[1])

    def part(suffix: str, *size: int, dtype: torch.dtype | None = torch.int32) -> Tensor:
        return expect(f"{prefix}.{suffix}", get(f"{prefix}.{suffix}"), size, dtype)

    words = pack_words(_unpack_columns(part("qweight", k, n // 8), n), 4)
    zero_point = _unpack_columns(part("qzeros", groups, n // 8), n)
    scale = part("scales", groups, n, dtype=None).T.contiguous()
    return PackedTensor(words, scale, zero_point, with_scale_dtype(scheme, f"{prefix}.scales", scale), k)


def quantization_config(layers: Sequence[LayerPlan], dense: Sequence[str]) -> dict[str, Any]:
    """One scheme for all layers; PlanError if there are more, or if a name cannot be told apart.

    Engines look for the entries of modules_to_not_convert anywhere in a module's name: they are whole names.
    """
    schemes = {layer.scheme for layer in layers}
    if len(schemes) > 1:
        found = ", ".join(sorted(map(str, schemes)))
        raise PlanError(
            f"awq holds one scheme for the whole model, not {found}; use --group 64 or another format"
        )
    for name in dense:
        if hit := next((layer.name for layer in layers if name in layer.name), None):
            raise PlanError(
                f"awq cannot keep {name} and quantize {hit}: it matches parts of names; exclude both"
            )
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": layers[0].scheme.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(dense),
    }


def read_config(config: dict[str, Any]) -> Callable[[str, str], QuantScheme | None]:
    """Return (module name, class name) -> its scheme, None for a module that is not quantized.

    SourceError if malformed, or of another version than "gemm".
    """
    try:
        if type(config["zero_point"]) is not bool:
            raise SourceError(
                f"quantization_config: zero_point is {config['zero_point']!r}, not true or false"
            )
        scheme = QuantScheme(config["bits"], config["group_size"], symmetric=not config["zero_point"])
    except SourceError:
        raise
    except (KeyError, TypeError, LowbitError) as e:
        raise SourceError(f"quantization_config: malformed ({type(e).__name__}: {e})") from None
    if scheme.bits != 4:
        raise SourceError(f"quantization_config: awq holds 4 bits, not {scheme.bits}")
    if config.get("version", "gemm") != "gemm":
        raise SourceError(
            f"quantization_config: awq version {config['version']!r} is not known; only 'gemm' is"
        )
    kept = config.get("modules_to_not_convert") or []
    if not isinstance(kept, list) or not all(isinstance(part, str) for part in kept):
        raise SourceError("quantization_config: malformed (modules_to_not_convert is no list of names)")
    return lambda name, kind: None if any(part in name for part in kept) else scheme


def _pack_columns(values: Tensor) -> Tensor:
    """[N, R] uint8 to [R, N / 8] int32 in AWQ's order."""
    n, rows = values.shape
    eights = values.T.reshape(rows, n // 8, 8)
    return pack_words(eights[:, :, list(ORDER)].reshape(rows, n), 4)


def _unpack_columns(words: Tensor, n: int) -> Tensor:
    """[R, N / 8] int32 to [N, R] uint8."""
    eights = unpack_words(words, 4, n).view(words.shape[0], n // 8, 8)
    columns = eights[:, :, [ORDER.index(i) for i in range(8)]]
    return columns.reshape(words.shape[0], n).T.contiguous()

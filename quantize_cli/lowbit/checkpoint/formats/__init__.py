"""How quantized layers look in files: the table of formats.

To add one, write a module with these functions and an entry in FORMATS. `quantize` calls accepts and
accepts_layer in the plan, encode for each layer and quantization_config at the end; `verify` and `convert` go
the other way with read_config and decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lowbit.checkpoint.formats import awq, compressed_tensors, gptq
from lowbit.errors import SourceError

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.plan import LayerPlan
    from lowbit.scheme import PackedTensor, QuantScheme


def no_caution(scheme: QuantScheme) -> str | None:
    """What formats say of schemes that every loader takes."""
    return None


def no_files(config: dict[str, Any]) -> dict[str, str]:
    """The extra files of formats that need none."""
    return {}


@dataclass(frozen=True)
class Format:
    """One way to store quantized layers.

    suffixes: what follows `PREFIX.` in the names of the tensors that stand in place of PREFIX.weight.
    accepts(scheme), accepts_layer(scheme, N, K): None, or why not, in words for the user.
    encode(PREFIX, packed): the tensors of one layer by full name.
    decode(PREFIX, get, scheme, (N, K)): the layer again, through get(full name); SourceError if a tensor has
    not the shape or dtype it must have.
    quantization_config(layers, dense linears): the entry of config.json.  read_config(that entry): its
    reverse, a function of (module name, class name) to the scheme, or None if the module is not quantized;
    SourceError if malformed.
    caution(scheme): None, or what the user should know about who loads it.
    extra_files(quantization_config): files that loaders want beside config.json, name -> text.
    """

    name: str
    suffixes: tuple[str, ...]
    accepts: Callable[[QuantScheme], str | None]
    accepts_layer: Callable[[QuantScheme, int, int], str | None]
    encode: Callable[[str, PackedTensor], dict[str, Tensor]]
    decode: Callable[[str, Callable[[str], Tensor], QuantScheme, tuple[int, int]], PackedTensor]
    quantization_config: Callable[[Sequence[LayerPlan], Sequence[str]], dict[str, Any]]
    read_config: Callable[[dict[str, Any]], Callable[[str, str], QuantScheme | None]]
    extra_files: Callable[[dict[str, Any]], dict[str, str]] = no_files
    caution: Callable[[QuantScheme], str | None] = no_caution


FORMATS = {
    "compressed-tensors": Format(
        name="compressed-tensors",
        suffixes=compressed_tensors.SUFFIXES,
        accepts=compressed_tensors.accepts,
        accepts_layer=compressed_tensors.accepts_layer,
        encode=compressed_tensors.encode,
        decode=compressed_tensors.decode,
        quantization_config=compressed_tensors.quantization_config,
        read_config=compressed_tensors.read_config,
        caution=compressed_tensors.caution,
    ),
    "gptq": Format(
        name="gptq",
        suffixes=gptq.SUFFIXES,
        accepts=gptq.accepts_v1,
        accepts_layer=gptq.accepts_layer,
        encode=partial(gptq.encode, less=1),
        decode=partial(gptq.decode, less=1),
        quantization_config=partial(gptq.quantization_config, version="gptq"),
        read_config=gptq.read_config,
        extra_files=gptq.extra_files,
    ),
    "gptq-v2": Format(
        name="gptq-v2",
        suffixes=gptq.SUFFIXES,
        accepts=gptq.accepts_v2,
        accepts_layer=gptq.accepts_layer,
        encode=partial(gptq.encode, less=0),
        decode=partial(gptq.decode, less=0),
        quantization_config=partial(gptq.quantization_config, version="gptq_v2"),
        read_config=gptq.read_config,
        extra_files=gptq.extra_files,
    ),
    "awq": Format(
        name="awq",
        suffixes=awq.SUFFIXES,
        accepts=awq.accepts,
        accepts_layer=awq.accepts_layer,
        encode=awq.encode,
        decode=awq.decode,
        quantization_config=awq.quantization_config,
        read_config=awq.read_config,
    ),
}


def format_of(config: dict[str, Any]) -> Format:
    """The format that a quantization_config states; SourceError if it is none of the table."""
    name = str(config.get("quant_method"))
    if name == "gptq":
        stored = config.get("checkpoint_format") or "gptq"
        if stored not in ("gptq", "gptq_v2"):
            raise SourceError(f"quantization_config: checkpoint_format {stored!r} is not gptq or gptq_v2")
        name = "gptq-v2" if stored == "gptq_v2" else name
    if name not in FORMATS:
        raise SourceError(f"quant_method {name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[name]

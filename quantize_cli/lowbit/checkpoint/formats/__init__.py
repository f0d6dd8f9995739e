"""How quantized layers look in files: the table of formats.

To add one, write a module with these functions and an entry in FORMATS. `quantize` calls accepts and
accepts_layer in the plan, encode for each layer and quantization_config at the end; `verify` and `convert` go
the other way with read_config and decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowbit.checkpoint.formats import compressed_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.plan import LayerPlan
    from lowbit.scheme import PackedTensor, QuantScheme


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
    ),
}

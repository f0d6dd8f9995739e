"""The decoder as transformers builds it, without weights, and the way from a checkpoint's tensors into it.

Parameters stay on the meta device until a block is loaded; what transformers computes instead of storing
(rotary frequencies, masks) is real from the start. Checkpoint names are translated with transformers' own
table (`block_sparse_moe.experts.3.w1` to row block 3 of `mlp.experts.gate_up_proj`), so that whatever
`from_pretrained` loads is loaded here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowbit.checkpoint.header import Rows
from lowbit.errors import PlanError, SourceError, one_line
from lowbit.plan import LayerPlan


class WeightSource(Protocol):
    """What is needed of lowbit.checkpoint.source.Source."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...
    def read(self, name: str) -> Tensor: ...
    def rows_of(self, name: str) -> Rows: ...


@dataclass(frozen=True)
class Origin:
    """How parameters of the model come out of the checkpoint.

    keys: (pattern, source tensor) in the order in which transformers collects them.
    converter: transformers' WeightConverter, None where a tensor is loaded as it is.
    """

    target: str
    keys: tuple[tuple[str, str], ...]
    converter: Any = None

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(key for _, key in self.keys)


@dataclass(frozen=True)
class Slot:
    """Where the weight [N, K] of one layer sits in a parameter of the model.

    expert: index in a 3-D parameter.  rows: rows of the matrix that belong to the layer, all if None.
    transposed: the parameter holds [K, N].
    """

    param: str
    expert: int | None
    rows: tuple[int, int] | None
    transposed: bool

    def view(self, param: Tensor) -> Tensor:
        """The layer's weight [N, K] as a view of the parameter."""
        matrix = param if self.expert is None else param[self.expert]
        matrix = matrix.T if self.transposed else matrix
        return matrix if self.rows is None else matrix[self.rows[0] : self.rows[1]]


@dataclass(frozen=True)
class Skeleton:
    """A causal language model whose parameters are on the meta device until they are loaded.

    decoder: the part that turns token ids into hidden states.  blocks: its decoder blocks by their names.
    origins: by the name of the (first) parameter they fill.  width: of the hidden states.
    """

    model: nn.Module
    decoder: nn.Module
    blocks: dict[str, nn.Module]
    origins: dict[str, Origin]
    width: int


def build_skeleton(
    source: WeightSource, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
) -> Skeleton:
    """Build the model of source.config on the meta device; buffers that are not stored go to `device`.

    Raises PlanError for a model that transformers does not know or whose blocks cannot be found.
    """
    from transformers import AutoModelForCausalLM

    config = _load_config(source, trust_remote_code)
    # the caller's random state is his own
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, trust_remote_code=trust_remote_code, experts_implementation="eager"
                )
        # whatever a model's code makes of the config that it is given
        except Exception as e:
            reason = one_line(e)
            raise PlanError(
                f"{source.name}: transformers builds no causal language model of it ({reason}); "
                "--method rtn and hqq need no model code"
            ) from None
        model.eval().requires_grad_(False)
        _compute_buffers(model, device)
    text = config.get_text_config()
    decoder = model.get_decoder()
    blocks = _find_blocks(source.name, model, text.num_hidden_layers)
    return Skeleton(model, decoder, blocks, _find_origins(model, source.tensors), text.hidden_size)


def _load_config(source: WeightSource, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        if (source.path / "config.json").is_file():
            config = AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code)
            # the model gets decoded weights or our own modules: nobody shall quantize it by its config
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            return config
        return AutoConfig.for_model(**source.config)
    # whatever the checks of a config raise
    except Exception as e:
        reason = one_line(e)
        raise PlanError(
            f"{source.name}: transformers does not know this model ({reason}); "
            "--method rtn and hqq need no model code"
        ) from None


def _compute_buffers(model: Any, device: torch.device) -> None:
    """Give every buffer that checkpoints do not hold its value, by the model's own initialisation."""
    from transformers import PreTrainedModel

    submodels = [m for m in model.named_modules() if isinstance(m[1], PreTrainedModel)]
    owners = {}
    for name, buffer in list(model.named_buffers()):
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        if leaf in module._non_persistent_buffers_set and buffer.is_meta:
            module._buffers[leaf] = torch.zeros_like(buffer, device=device)
            owners[parent] = module
    for name, module in owners.items():
        # a submodel initialises the modules under it
        _, submodel = max(
            ((prefix, m) for prefix, m in submodels if not prefix or f"{name}.".startswith(f"{prefix}.")),
            key=lambda pair: len(pair[0]),
        )
        submodel._init_weights(module)


def _find_blocks(name: str, model: nn.Module, count: int) -> dict[str, nn.Module]:
    """The decoder blocks in order: the outermost list of `count` modules of one kind."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return {f"{path}.{i}": block for i, block in enumerate(module)}
    raise PlanError(
        f"{name}: found no list of {count} decoder blocks; --method rtn and hqq need no model code"
    )


def _find_origins(model: Any, tensors: Iterable[str]) -> dict[str, Origin]:
    """Which checkpoint tensors fill which parameters, by transformers' renaming and conversion tables."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    keys: dict[str, list[tuple[str, str]]] = defaultdict(list)
    converter_of: dict[str, Any] = {}
    for key in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if target not in state and key in state:
            target, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
        if target not in state:
            # what the model has no place for (a multi-token-prediction head, say) takes no part
            continue
        keys[target].append((pattern or key, key))
        converter_of[target] = by_pattern[pattern] if pattern is not None else None
    return {
        target: Origin(target, tuple(collected), converter_of[target]) for target, collected in keys.items()
    }


def load(
    skeleton: Skeleton,
    source: WeightSource,
    names: Iterable[str],
    dtype_of: Callable[[str, torch.dtype], torch.dtype],
    device: torch.device,
    check: Callable[[str, Tensor], None] | None = None,
) -> None:
    """Load the parameters and stored buffers `names` of the model.

    dtype_of: (parameter, stored dtype) -> the dtype to keep it in.  check: called with each source tensor.
    Raises SourceError if the checkpoint has no tensor for one of the names, or one of another shape.
    """
    wanted = set(names)
    for target in [name for name in skeleton.origins if name in wanted]:
        for name, value in _realize(skeleton, skeleton.origins[target], source, check).items():
            shape = held(skeleton.model, name).shape
            if value.shape != shape:
                raise SourceError(
                    f"{source.name}: {name} is {list(value.shape)}, config.json asks for {list(shape)}"
                )
            dtype = dtype_of(name, value.dtype) if value.is_floating_point() else value.dtype
            _place(skeleton.model, name, value.to(device, dtype))
            wanted.discard(name)
    if wanted:
        missing = sorted(wanted)[0]
        raise SourceError(f"{source.name}: missing tensor for {missing}; the checkpoint is not complete")


def _realize(
    skeleton: Skeleton, origin: Origin, source: WeightSource, check: Callable[[str, Tensor], None] | None
) -> dict[str, Tensor]:
    """Parameters by name, as the checkpoint's tensors give them."""
    tensors = {}
    for key in origin.sources:
        tensors[key] = source.read(key)
        if check is not None:
            check(key, tensors[key])
    if origin.converter is None:
        return {origin.target: tensors[origin.sources[0]]}
    converter = deepcopy(origin.converter)
    for pattern, key in origin.keys:
        converter.add_tensor(origin.target, key, pattern, tensors[key])
    try:
        made = converter.convert(origin.target, model=skeleton.model, config=skeleton.model.config)
    # what PyTorch says of shapes that do not go together
    except (RuntimeError, ValueError, IndexError) as e:
        reason = one_line(e)
        raise SourceError(
            f"{source.name}: {origin.sources[0]} and its siblings are not as config.json says ({reason})"
        ) from None
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def held(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of that name."""
    parent, _, leaf = name.rpartition(".")
    value: Tensor = getattr(model.get_submodule(parent), leaf)
    return value


def _place(model: nn.Module, name: str, value: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if leaf in module._buffers:
        module._buffers[leaf] = value
    else:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def unload(model: nn.Module, names: Iterable[str]) -> None:
    """Put parameters and stored buffers back on the meta device."""
    for name in names:
        _place(model, name, torch.empty_like(held(model, name), device="meta"))


def stored_names(module: nn.Module, prefix: str) -> Iterator[str]:
    """Names in the model of what a checkpoint holds for the module called prefix."""
    for name in module.state_dict():
        yield f"{prefix}.{name}"


def find_slots(skeleton: Skeleton, layers: Iterable[LayerPlan]) -> dict[str, Slot]:
    """Where the weights of the layers should sit in the model, by layer name; layers whose tensor has no
    place in it are absent.

    For tensors that transformers stacks and concatenates this is what doing so in order gives: compare the
    slot with the source before relying on it.
    """
    origin_of = {key: origin for origin in skeleton.origins.values() for key in origin.sources}
    return {
        layer.name: _slot(origin_of[layer.source], layer) for layer in layers if layer.source in origin_of
    }


def _slot(origin: Origin, layer: LayerPlan) -> Slot:
    if origin.converter is None:
        return Slot(origin.target, layer.expert, layer.rows, layer.transposed)
    pattern = next(p for p, key in origin.keys if key == layer.source)
    siblings = [key for p, key in origin.keys if p == pattern]
    patterns = [p for p in origin.converter.source_patterns if p in dict(origin.keys)]
    n = layer.shape[0]
    part = patterns.index(pattern)
    expert = siblings.index(layer.source) if layer.expert is None else layer.expert
    rows = (part * n, (part + 1) * n) if layer.rows is None else layer.rows
    return Slot(origin.target, expert, rows, layer.transposed)

"""Quantized models that run: a transformers model whose linears multiply by packed weights.

    model = lowbit.load("smollm2-int4-g128")         a folder that lowbit wrote, in any of its formats
    lowbit.patch_model(model, QuantScheme())         a live model, in place
    lowbit.use_in_transformers()                     from_pretrained, from then on

On a GPU the product is the W4A16 kernel of lowbit_kernels, elsewhere the plain-torch reference, which is
right and slow. Weights stay packed on both. Linears that read the same input (q/k/v, gate/up) are one product
over all their outputs, and the gate of an MLP is a part of it.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from lowbit.checkpoint.download import download
from lowbit.checkpoint.formats import FORMATS, compressed_tensors, format_of
from lowbit.device import pick_device
from lowbit.errors import OutputError, PlanError, SourceError, one_line
from lowbit.folder import KERNELS, DenseView, Folder, open_folder
from lowbit.plan import LayerPlan, stacks
from lowbit.scheme import PackedTensor, QuantScheme
from lowbit.skeleton import Skeleton, Slot, build_skeleton, find_slots
from lowbit.skeleton import load as load_tensors
from lowbit.validate import gemm_weight
from lowbit_kernels.dispatch import GemmWeight, concatenate, install, prepare
from lowbit_kernels.fragment import FragmentWeight
from lowbit_kernels.functional import as_weight, expert_linear, linear, quantize, restore, route
from lowbit_kernels.reference import gated, interleave
from lowbit_kernels.tables import read_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class QuantLinear(nn.Module):
    """y = x @ dequantized.T + bias for x [..., K]."""

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, weight: GemmWeight | FragmentWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.bits, self.group_size = weight.bits, weight.group_size
        self.register_parameter("bias", bias)
        for name in ("words", "scale", "zero_point"):
            value = getattr(weight, name)
            # accelerate's hooks move every buffer that is not persistent, even one that is None
            self.register_buffer(name, value, persistent=value is None)
        self._arrange()

    def stored(self) -> GemmWeight:
        """The weight in the order of files."""
        weight = self.weight_now()
        return weight if isinstance(weight, GemmWeight) else restore(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x, gate=False)

    def _product(self, x: Tensor, gate: bool) -> Tensor:
        return linear(
            x,
            self.words,
            self.scale,
            self.zero_point,
            self.bias,
            self.bits,
            self.group_size,
            self.out_features,
            gate,
        )

    def weight_now(self) -> GemmWeight | FragmentWeight:
        """The weight in the order of its device."""
        return as_weight(
            self.words,
            self.scale,
            self.zero_point,
            self.bits,
            self.group_size,
            self.in_features,
            self.out_features,
        )

    def _arrange(self) -> None:
        """Put the words in the order of their device: the fast kernels' on a GPU, that of files elsewhere."""
        weight = self.weight_now()
        if isinstance(weight, GemmWeight) and self.words.is_cuda:
            weight = prepare(weight)
        elif isinstance(weight, FragmentWeight) and not self.words.is_cuda:
            weight = restore(weight)
        self.words, self.scale, self.zero_point = weight.words, weight.scale, weight.zero_point

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        # what .to and .cuda go through
        super()._apply(fn, recurse)
        self._arrange()
        _settle(self.words)
        return self

    def extra_repr(self) -> str:
        grid = "symmetric" if self.zero_point is None else "asymmetric"
        return f"{self.in_features}, {self.out_features}, int{self.bits} {grid} g{self.group_size}"


# Tokens up to which the kernel applies the gate; beyond, torch.compile fuses it as well.
GATED_TOKENS = 8


class GatedProduct(QuantLinear):
    """silu(gate) · up, where gate and up alternate among the rows of one weight, see reference.interleave."""

    @classmethod
    def of(cls, stacked: QuantLinear) -> GatedProduct:
        """From the rows of gate and, below them, those of up."""
        stored = stacked.stored()
        zero_point = None if stored.zero_point is None else interleave(stored.zero_point)
        weight = replace(
            stored, words=interleave(stored.words), scale=interleave(stored.scale), zero_point=zero_point
        )
        return cls(weight, None if stacked.bias is None else nn.Parameter(interleave(stacked.bias.data)))

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > GATED_TOKENS * self.in_features:
            return gated(self._product(x, gate=False))
        return self._product(x, gate=True)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) in two products."""

    def __init__(self, gate_up_proj: GatedProduct, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.gate_up_proj(x))
        return y


class SharedProduct(nn.Module):
    """One product for the linears of several names that read the same x.

    Whichever is asked first computes it; it is let go when each has taken its rows.  starts: of those rows.
    """

    def __init__(self, linear: QuantLinear, starts: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = linear
        self.starts = starts
        # x, its product and the rows that were not taken yet. Read and written as one, since threads may run
        # the same model.
        self.pending: tuple[Tensor | None, Tensor | None, tuple[int, ...]] = (None, None, ())

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        last, y, left = self.pending
        # rows that were taken are wanted again: x may have been changed in place since
        if y is None or last is not x or start not in left:
            y, left = self.linear(x), self.starts
        left = tuple(other for other in left if other != start)
        self.pending = (x, y, left) if left else (None, None, ())
        return y[..., start:stop]


class LinearRows(nn.Module):
    """A linear that is rows start to stop of a shared product, which is a submodule of the first."""

    def __init__(self, product: SharedProduct, start: int, stop: int) -> None:
        super().__init__()
        if start == 0:
            self.product = product
        # a module with several parents would be moved and offloaded by each
        self._shared = (product,)
        self.start, self.stop = start, stop
        self.in_features, self.out_features = product.linear.in_features, stop - start

    def forward(self, x: Tensor) -> Tensor:
        return self._shared[0].rows(x, self.start, self.stop)

    def extra_repr(self) -> str:
        return f"rows {self.start} to {self.stop} of {self._shared[0].linear.out_features}"


def _settle(words: Tensor) -> None:
    """Wait for a weight to be written: products may read it before the kernels ahead of them have ended."""
    if words.is_cuda:
        torch.cuda.current_stream(words.device).synchronize()


@dataclass(frozen=True)
class Stack:
    """The same linear of every expert: words, scale and zero_point of QuantLinear with experts first."""

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bits: int
    group_size: int
    out_features: int

    def __call__(self, x: Tensor, routes: Tensor, pairs: int) -> Tensor:
        """x: [pairs, K], or [T, K] for all pairs of T tokens.  Returns [pairs, N], see expert_linear."""
        grid = self.bits, self.group_size, self.out_features
        return expert_linear(x, self.words, self.scale, self.zero_point, routes, *grid, pairs)


# (token, expert) pairs up to which one launch for all experts is the faster way.
ROUTED_PAIRS = 512


class QuantExperts(nn.Module):
    """The experts of one layer as transformers calls them: two products around a gated activation, for the
    tokens that the router sent to each expert."""

    def __init__(
        self, gate_up: list[QuantLinear], down: list[QuantLinear], act_fn: Callable[[Tensor], Tensor]
    ):
        super().__init__()
        self.gate_up, self.down = nn.ModuleList(gate_up), nn.ModuleList(down)
        self.act_fn = act_fn
        self._stack()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: [T, H].  top_k_index, top_k_weights: [T, experts per token].  Returns [T, H].

        Few tokens take one launch for a product of all experts, so that CUDA graphs and torch.compile capture
        it; many tokens, and experts that differ in scheme, go expert by expert.
        """
        pairs = top_k_index.numel()
        few = 0 < pairs <= ROUTED_PAIRS and hidden_states.element_size() == 2
        # accelerate moves the linears, of whose weights the stacks are then no longer the memory
        if few and self.stacks is not None and self.stacks[0].words.device == hidden_states.device:
            gate_up, down = self.stacks
            routes = route(top_k_index, len(self.down))
            gate, up = gate_up(hidden_states, routes, pairs).chunk(2, dim=-1)
            y = down(self.act_fn(gate) * up, routes, pairs).view(*top_k_index.shape, -1)
            return (y * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == expert)
            gate, up = self.gate_up[expert](hidden_states[token]).chunk(2, dim=-1)
            y = self.down[expert](self.act_fn(gate) * up) * top_k_weights[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out

    def _stack(self) -> None:
        gate_up, down = _stacked(self.gate_up), _stacked(self.down)
        self.stacks = None if gate_up is None or down is None else (gate_up, down)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantExperts:
        # what .to and .cuda go through
        super()._apply(fn, recurse)
        self._stack()
        return self


def _stacked(linears: Iterable[nn.Module]) -> Stack | None:
    """Put the weights of all experts in one tensor each, which the linears then share; None if they differ.

    None as well where a GPU keeps words in stored order, which the product of all experts does not read.
    """
    layers = [layer for layer in linears if isinstance(layer, QuantLinear)]
    first = layers[0]
    kinds = {(layer.bits, layer.group_size, layer.zero_point is None, layer.words.shape) for layer in layers}
    if len(kinds) > 1 or (first.words.is_cuda and first.words.dim() == 2):
        return None
    stacks: dict[str, Any] = {}
    for name in ("words", "scale", "zero_point"):
        parts = [getattr(layer, name) for layer in layers]
        stacks[name] = None if parts[0] is None else torch.stack(parts)
        for expert, layer in enumerate(layers):
            setattr(layer, name, None if parts[0] is None else stacks[name][expert])
    _settle(stacks["words"])
    return Stack(**stacks, bits=first.bits, group_size=first.group_size, out_features=first.out_features)


def load(
    model: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Return the transformers model of a folder that lowbit wrote, in any of its formats, ready to generate.

    model: the folder, or a repository of the Hub that lowbit pushed; a local folder wins.
    device: as in `--device`.  dtype: of activations and unquantized weights; None takes the checkpoint's.
    Raises SourceError for a folder that is damaged or not quantized, PlanError for a model that transformers
    does not know or a layer that it keeps in a form this runtime does not know.
    """
    folder = open_folder(_local_folder(str(model), revision))
    if folder.faults:
        raise SourceError(f"{folder.path}: {folder.faults[0]}; run `lowbit verify {folder.path}`")
    if not folder.layers:
        raise SourceError(f"{folder.path}: not quantized; transformers loads it")
    device = pick_device(device) if isinstance(device, str) else device
    dtype = dtype or getattr(torch, folder.config.get("dtype") or folder.config["torch_dtype"])
    if device.type == "cuda":
        use_tuned(folder.path / KERNELS, device)
    view = DenseView(folder, dtype)
    skeleton = build_skeleton(view, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    _place_quantized(skeleton, view, device)
    built: Any = skeleton.model
    tied = built.all_tied_weights_keys
    names = [name for name in built.state_dict() if name in skeleton.origins or name not in tied]
    load_tensors(skeleton, view, names, lambda name, stored: dtype, device)
    built.tie_weights()
    share_products(built)
    built.save_pretrained = _cannot_save
    if (generation := read_generation(folder.path)) is not None:
        built.generation_config = generation
    return built


def read_generation(folder: Path) -> Any:
    """The GenerationConfig of a folder, None without one; SourceError if it cannot be one."""
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    if not file.is_file():
        return None
    try:
        found = GenerationConfig.from_pretrained(folder)
    # whatever its checks raise
    except Exception as e:
        reason = one_line(e)
        raise SourceError(f"{file}: not a generation config ({reason}); copy the original's") from None
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(found, key)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and type(token) is not int:
                raise SourceError(f"{file}: {key} is {str(value)[:40]!r}, not a token; copy the original's")
    return found


def _cannot_save(*args: Any, **kwargs: Any) -> None:
    """In place of save_pretrained, which would leave the packed weights out and say nothing."""
    raise OutputError("packed weights are not saved from memory; `lowbit quantize` writes a checkpoint")


def _local_folder(model: str, revision: str | None) -> Path:
    """The folder itself, or that of a Hub repository in the local cache."""
    path = Path(model).expanduser()
    if path.exists() or re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) is None:
        return path
    return download(model, revision)


def use_tuned(file: Path, device: torch.device) -> None:
    """Let the kernels take the configs that `lowbit tune` left beside the checkpoint, or say why not."""
    if file.is_file():
        configs, reason = read_table(file, torch.cuda.get_device_name(device))
        install(configs)
        if reason is not None:
            warnings.warn(f"{reason}; using the shipped configs", stacklevel=3)


def _place_quantized(skeleton: Skeleton, view: DenseView, device: torch.device) -> None:
    """Put a QuantLinear or QuantExperts in place of every module that holds quantized layers."""
    folder = view.folder
    layers = [_plan_of(folder, source, row) for source, rows in view.origins.items() for row in rows]
    slots = find_slots(skeleton, layers)
    by_module: dict[str, dict[str, list[tuple[Slot, str]]]] = defaultdict(lambda: defaultdict(list))
    for name in folder.layers:
        if name not in slots:
            raise PlanError(
                f"{name}: transformers has no place for this layer in {type(skeleton.model).__name__}"
            )
        path, _, leaf = slots[name].param.rpartition(".")
        by_module[path][leaf].append((slots[name], name))
    for path, params in by_module.items():
        module: Any = skeleton.model.get_submodule(path)
        replacement: nn.Module
        if set(params) == {"weight"} and all(slot.expert is None for slot, _ in params["weight"]):
            replacement = _read_linear(folder, params["weight"], device, getattr(module, "bias", None))
        elif set(params) == {"gate_up_proj", "down_proj"} == {name for name, _ in module.named_parameters()}:
            gate_up, down = (
                _read_experts(folder, params[leaf], device) for leaf in ("gate_up_proj", "down_proj")
            )
            replacement = QuantExperts(gate_up, down, module.act_fn)
        else:
            raise PlanError(
                f"{path}: a {type(module).__name__} with {', '.join(params)} is not known to lowbit.load"
            )
        skeleton.model.set_submodule(path, replacement)


def _plan_of(folder: Folder, source: str, row: dict[str, Any]) -> LayerPlan:
    """Where the original model held a quantized layer, as find_slots wants to know it."""
    stored = folder.layers[row["name"]]
    return LayerPlan(
        stored.name,
        stored.shape,
        stored.scheme,
        method="",
        source=source,
        source_bytes=stored.nbytes,
        expert=row.get("expert"),
        rows=tuple(row["rows"]) if row.get("rows") else None,
        transposed=bool(row.get("transposed")),
    )


def _read_experts(
    folder: Folder, parts: Iterable[tuple[Slot, str]], device: torch.device
) -> list[QuantLinear]:
    by_expert: dict[int, list[tuple[Slot, str]]] = defaultdict(list)
    for slot, name in parts:
        assert slot.expert is not None
        by_expert[slot.expert].append((slot, name))
    return [_read_linear(folder, by_expert[expert], device, None) for expert in sorted(by_expert)]


def _read_linear(
    folder: Folder, parts: list[tuple[Slot, str]], device: torch.device, bias: nn.Parameter | None
) -> QuantLinear:
    """One QuantLinear from the layers that transformers stacks into it, in the order of their rows."""
    parts = sorted(parts, key=lambda part: part[0].rows or (0, 0))
    pieces = [_read_layer(folder, name) for _, name in parts]
    if len({piece.scheme for piece in pieces}) > 1:
        raise PlanError(f"{parts[0][1]}: stacked with {parts[1][1]}, which has another scheme")
    scheme, k = pieces[0].scheme, pieces[0].in_features
    zeros = [piece.zero_point for piece in pieces if piece.zero_point is not None]
    packed = PackedTensor(
        torch.cat([piece.words for piece in pieces]).to(device),
        torch.cat([piece.scale for piece in pieces]).to(device),
        torch.cat(zeros).to(device) if zeros else None,
        scheme,
        k,
    )
    return QuantLinear(gemm_weight(packed), bias)


def _read_layer(folder: Folder, name: str) -> PackedTensor:
    format, layer = format_of(folder.config["quantization_config"]), folder.layers[name]
    return format.decode(name, folder.read, layer.scheme, layer.shape)


def share_products(model: nn.Module) -> None:
    """Make one product of the QuantLinear modules that read the same input and have one scheme; in place.

    lowbit.load does it; after patch_model, call it when the model is where it will run.
    """
    for name in [name for name, module in model.named_modules() if _is_gated(module)]:
        _gate(model, name)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    for names in stacks(linears):
        # not kept in the dict, which would hold every weight a second time
        parts = [linears.pop(name) for name in names]
        if len(parts) == 1 or (stacked := _stack(parts)) is None:
            continue
        stops = tuple(accumulate(part.out_features for part in parts))
        starts = (0, *stops[:-1])
        product = SharedProduct(stacked, starts)
        for name, start, stop in zip(names, starts, stops, strict=True):
            model.set_submodule(name, LinearRows(product, start, stop))


def _gate(model: nn.Module, name: str) -> None:
    """Let gate and up of the MLP of that name be one product with the gate in it, if they are of one kind."""
    mlp: Any = model.get_submodule(name)
    parts = [mlp.gate_proj, mlp.up_proj]
    if not all(type(part) is QuantLinear for part in parts) or parts[0].out_features % 8:
        return
    if (stacked := _stack(parts)) is not None:
        model.set_submodule(name, GatedMLP(GatedProduct.of(stacked), mlp.down_proj))


class _Whole(fx.Tracer):
    """Records which submodules a module calls, and not what they do."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _is_gated(module: Any) -> bool:
    """Whether a module does down(silu(gate(x)) · up(x)) and no more, by transformers' names for its parts."""
    if {name for name, _ in module.named_children()} != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    # what others have put around it would be lost with it
    if module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module):
        return False
    try:
        nodes = list(_Whole().trace(module).nodes)
    except (fx.proxy.TraceError, TypeError, AttributeError):
        return False
    output = nodes[-1]

    def spelled(node: fx.Node) -> str:
        if node.op == "placeholder":
            return "x"
        name = "mul" if node.target is operator.mul else str(node.target)
        return f"{name}({', '.join(map(spelled, node.all_input_nodes))})"

    done = [spelled(node) for node in output.all_input_nodes]
    grid = torch.linspace(-8, 8, 33)
    # x, four modules, a product and the output; a write in place would be one more, which nothing reads
    return (
        len(nodes) == 7
        and done == ["down_proj(mul(act_fn(gate_proj(x)), up_proj(x)))"]
        and torch.equal(module.act_fn(grid), nn.functional.silu(grid))
    )


def _stack(parts: list[QuantLinear]) -> QuantLinear | None:
    """The rows of all parts below each other; None where they are of unlike kinds."""
    biases = [part.bias.data for part in parts if part.bias is not None]
    if len(biases) not in (0, len(parts)) or len({part.words.device for part in parts}) > 1:
        return None
    try:
        weight = concatenate([part.weight_now() for part in parts])
    except ValueError:
        return None
    return QuantLinear(weight, nn.Parameter(torch.cat(biases)) if biases else None)


def use_in_transformers() -> None:
    """From now on, from_pretrained puts a QuantLinear in place of every packed linear of compressed-tensors
    checkpoints, whoever wrote them. Experts are decoded by transformers; lowbit.load keeps them packed too.

    A call and not an import, which changes nothing.
    """
    from transformers.quantizers import auto
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

    class PackedQuantizer(CompressedTensorsHfQuantizer):
        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            super()._process_model_after_weight_loading(model, **kwargs)
            for name, module in list(model.named_modules()):
                if hasattr(module, "weight_packed"):
                    model.set_submodule(name, _from_compressed(name, module))
            share_products(model)
            return model

    auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"] = PackedQuantizer


def _from_compressed(name: str, module: Any) -> QuantLinear:
    """The linear of a module in compressed-tensors' own packed state."""
    given = module.quantization_scheme.weights
    group_size = -1 if given.group_size is None else given.group_size
    scheme = QuantScheme(given.num_bits, group_size, given.symmetric)
    parts: dict[str, Any] = {
        f"{name}.{suffix}": getattr(module, suffix, None) for suffix in compressed_tensors.SUFFIXES
    }
    n, k = module.weight_shape.tolist()
    packed = FORMATS["compressed-tensors"].decode(name, lambda part: parts[part].data, scheme, (n, k))
    return QuantLinear(gemm_weight(packed), module.bias)


def patch_model(
    model: nn.Module, scheme: QuantScheme, *, skip: Callable[[str], bool] = lambda name: False
) -> dict[str, str | None]:
    """Replace the nn.Linear modules of a live model by QuantLinear, rounded to nearest; in place.

    The output layer, and whatever `skip` says True to by name, stays. Weights are quantized where they are,
    one at a time; model.to(device) afterwards moves the packed ones.
    Returns every linear's name and None, or the reason why it was left as it is.
    """
    from transformers import PreTrainedModel

    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    outcome: dict[str, str | None] = {}
    for name, module in linears.items():
        outcome[name] = _reason_to_leave(module, scheme, is_head=module is head, skipped=skip(name))
        if outcome[name] is None:
            dtype = module.weight.dtype
            width = scheme.width(module.in_features)
            words, scale, zero = quantize(module.weight.data, scheme.bits, width, scheme.symmetric, dtype)
            weight = GemmWeight(words, scale, zero, scheme.bits, width, module.in_features)
            model.set_submodule(name, QuantLinear(weight, module.bias))
    if isinstance(model, PreTrainedModel) and None in outcome.values():
        model.save_pretrained = _cannot_save  # type: ignore[method-assign]
    return outcome


def _reason_to_leave(module: nn.Linear, scheme: QuantScheme, is_head: bool, skipped: bool) -> str | None:
    if is_head:
        return "the output layer"
    if skipped:
        return "skipped"
    try:
        scheme.width(module.in_features)
    except PlanError as e:
        return str(e)
    return None

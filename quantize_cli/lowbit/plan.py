"""What quantize will do, decided from headers and config alone, before a weight is read.

Roles come from tensor names and shapes, so that the data-free methods work on architectures that no library
knows yet. A tensor is quantized when it is the 2-D weight of a module inside a numbered decoder block (or an
expert slice of a known 3-D layout) and not a router, norm, embedding or part of another tower.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from lowbit.checkpoint.formats import FORMATS
from lowbit.errors import PlanError, RecipeError
from lowbit.recipe import Recipe, Rule, matches
from lowbit.scheme import QuantScheme, ScaleDtype
from lowbit.solvers import SOLVERS, make_options

if TYPE_CHECKING:
    from lowbit.checkpoint.source import Source, TensorInfo

# safetensors dtype -> the dtype in which its scales are stored; what is not here cannot be quantized
FLOATS: dict[str, ScaleDtype] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}

ENCODERS = {
    "albert", "bert", "clip", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet",
    "nomic_bert", "roberta", "vit", "wav2vec2", "xlm-roberta",
}  # fmt: skip
TOWER = re.compile(r"vision|visual|image|audio|speech|video|multi_modal|multimodal|mm_projector")
EMBEDDING = re.compile(r"embed(?!_out$)|^wte$|^wpe$|^shared$|^tok_|_bias$")
HEAD = re.compile(r"^(lm_head|embed_out|output|score|classifier)$")
ROUTER = re.compile(r"^(gate|router|wg|shared_expert_gate|shared_experts_gate)$")
NORM = re.compile(r"norm|^ln(_|\d|$)|layernorm")

# modules of transformers' Conv1D class, whose weight is stored [in_features, out_features]
CONV1D_MODELS = {"gpt2", "openai-gpt", "imagegpt"}
CONV1D = {"c_attn", "c_proj", "c_fc"}

# linears that read the same input: engines fuse them into one launch, so they must share a scheme
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)

# how transformers stores the experts of a block in one tensor: [E, out, in] unless listed here
EXPERTS_IN_OUT = {"llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"}
EXPERTS_KNOWN = EXPERTS_IN_OUT | {"mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"}
EXPERTS_INTERLEAVED = {"gpt_oss"}
FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer of the output that will be quantized.

    name: module name in the output, without `.weight`.  shape: (out_features, in_features).
    source: tensor in the source that holds it; source_bytes: its bytes, or those of the slice.
    expert, rows: for a fused expert tensor, its first index and the rows (after any transpose) that belong
    to this layer.  transposed: the source stores [in, out].
    fallback: why the scheme is not the one asked for, None if it is.
    """

    name: str
    shape: tuple[int, int]
    scheme: QuantScheme
    method: str
    source: str
    source_bytes: int
    expert: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False
    fallback: str | None = None

    @property
    def packed_bytes(self) -> int:
        """Bytes of words, scales and zero-points in the output."""
        n, k = self.shape
        groups = self.scheme.groups(k)
        words = 4 * n * -(-k * self.scheme.bits // 32)
        scales = n * groups * (4 if self.scheme.scale_dtype == "float32" else 2)
        zeros = 0 if self.scheme.symmetric else 4 * groups * -(-n * self.scheme.bits // 32)
        return words + scales + zeros


@dataclass(frozen=True)
class CopyPlan:
    """One source tensor that is copied as it is, and why. linear: engines see a dense linear layer in it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    reason: str
    linear: bool = False


@dataclass(frozen=True)
class Plan:
    """Every source tensor is in exactly one of layers, copies, dropped (name -> reason)."""

    model: str
    recipe: Recipe
    layers: tuple[LayerPlan, ...]
    copies: tuple[CopyPlan, ...]
    dropped: dict[str, str]
    notes: tuple[str, ...]

    @property
    def source_bytes(self) -> int:
        return sum(layer.source_bytes for layer in self.layers) + sum(copy.nbytes for copy in self.copies)

    @property
    def output_bytes(self) -> int:
        return sum(layer.packed_bytes for layer in self.layers) + sum(copy.nbytes for copy in self.copies)

    @property
    def coverage(self) -> float:
        """Share of the source's bytes that is quantized."""
        return sum(layer.source_bytes for layer in self.layers) / max(1, self.source_bytes)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per quantized weight, scales and zero-points included."""
        weights = sum(layer.shape[0] * layer.shape[1] for layer in self.layers)
        return 8 * sum(layer.packed_bytes for layer in self.layers) / weights

    @property
    def dense_linears(self) -> tuple[str, ...]:
        """Module names that engines would take for linear layers and that stay dense."""
        return tuple(copy.name.removesuffix(".weight") for copy in self.copies if copy.linear)

    def to_json(self) -> dict[str, Any]:
        """The plan as `lowbit plan --json` prints it: one row per layer and per copied tensor."""
        return {
            "model": self.model,
            "recipe": self.recipe.model_dump(mode="json"),
            "source_bytes": self.source_bytes,
            "output_bytes": self.output_bytes,
            "coverage": round(self.coverage, 4),
            "bits_per_weight": round(self.bits_per_weight, 4),
            "layers": [asdict(layer) | {"packed_bytes": layer.packed_bytes} for layer in self.layers],
            "copied": [asdict(copy) for copy in self.copies],
            "dropped": self.dropped,
            "notes": list(self.notes),
        }


def make_plan(source: Source, recipe: Recipe) -> Plan:
    """Decide what happens to every tensor of the source.

    Raises PlanError for a model, tensor or scheme that cannot be quantized as asked, and RecipeError for a
    pattern that matches nothing.
    """
    _check_model(source)
    _check_patterns(source, recipe)
    candidates: list[_Candidate] = []
    copies: list[CopyPlan] = []
    for info in source.tensors.values():
        role = _select(info, _role(info, source.config), recipe)
        if role.kind == "unknown":
            raise PlanError(f"{info.name}: {role.reason}; keep it dense with --exclude {_module(info.name)}")
        if role.kind == "dense":
            copies.append(CopyPlan(info.name, info.shape, info.dtype, info.nbytes, role.reason, role.linear))
        elif info.dtype not in FLOATS:
            raise PlanError(
                f"{info.name}: dtype {info.dtype} cannot be quantized; use a BF16, F16 or F32 model"
            )
        else:
            candidates += _candidates(info, role, source.config)
    layers, skipped = _choose_schemes(candidates, recipe)
    for name, reason in skipped.items():
        info = source.tensors[name]
        copies.append(CopyPlan(name, info.shape, info.dtype, info.nbytes, reason, linear=True))
    if not layers:
        raise PlanError(f"{source.name}: {_nothing_left(copies)}")
    if not recipe.allow_mixed_fused:
        _check_fused(layers, copies)
    _check_supported(layers, recipe)
    _check_names(layers, copies, recipe)
    order = {name: i for i, name in enumerate(source.tensors)}
    copies.sort(key=lambda copy: order[copy.name])
    plan = Plan(source.name, recipe, tuple(layers), tuple(copies), {}, source.notes + _notes(layers, recipe))
    # raises for a combination of layers that the format's config cannot state
    FORMATS[recipe.format].quantization_config(plan.layers, plan.dense_linears)
    return plan


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json that describes the language model."""
    return config.get("text_config") or config.get("llm_config") or config


# ---- roles: what a tensor is


@dataclass(frozen=True)
class _Role:
    kind: Literal["linear", "experts", "dense", "unknown"]
    reason: str = ""
    linear: bool = False


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _role(info: TensorInfo, config: dict[str, Any]) -> _Role:
    """What a tensor is by its name and shape; linear: a dense one that engines take for a linear layer."""
    *parents, last = _module(info.name).split(".")
    matrix = info.name.endswith(".weight") and len(info.shape) == 2
    if 0 in info.shape:
        return _Role("dense", "empty")
    if any(TOWER.search(part) for part in [*parents, last]):
        return _Role("dense", "part of a vision or audio tower", linear=matrix)
    if len(info.shape) == 3 and last in FUSED_EXPERTS and "experts" in parents:
        return _Role("experts")
    if not matrix:
        if len(info.shape) == 3 and "conv" not in info.name and min(info.shape) > 1:
            return _Role("unknown", f"3-D weight {list(info.shape)} of an unknown layout")
        return _Role("dense", "not a matrix")
    block = next((int(part) for part in parents if part.isdigit()), None)
    if block is None and HEAD.match(last):
        return _Role("dense", "output head", linear=True)
    if EMBEDDING.search(last):
        return _Role("dense", "embedding")
    if NORM.search(last):
        return _Role("dense", "norm")
    if ROUTER.match(last):
        return _Role("dense", "router", linear=True)
    if block is None:
        return _Role("dense", "outside the decoder blocks", linear=True)
    text = text_config(config)
    blocks = next((text[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in text), None)
    if blocks is not None and block >= blocks:
        return _Role("dense", f"not one of the {blocks} decoder blocks", linear=True)
    return _Role("linear")


def _select(info: TensorInfo, role: _Role, recipe: Recipe) -> _Role:
    """The role after --include and --exclude: include names all that is quantized, exclude takes away."""
    matrix = role.kind in ("linear", "experts") or role.linear
    if _any_matches(recipe.exclude, info.name) and role.kind != "dense":
        return _Role("dense", "excluded", linear=matrix)
    if recipe.include and (matrix or role.kind == "unknown"):
        if not _any_matches(recipe.include, info.name):
            return role if role.kind == "dense" else _Role("dense", "not included", linear=matrix)
        if role.kind == "dense":
            return _Role("linear")
    return role


def _any_matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


# ---- candidates: the linear layers in a tensor


@dataclass(frozen=True)
class _Candidate:
    name: str
    shape: tuple[int, int]
    dtype: str
    source: str
    nbytes: int
    expert: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False


def _candidates(info: TensorInfo, role: _Role, config: dict[str, Any]) -> list[_Candidate]:
    if role.kind == "experts":
        return _expert_candidates(info, config)
    n, k = info.shape
    name = _module(info.name)
    transposed = config.get("model_type") in CONV1D_MODELS and name.rpartition(".")[2] in CONV1D
    shape = (k, n) if transposed else (n, k)
    return [_Candidate(name, shape, info.dtype, info.name, info.nbytes, transposed=transposed)]


def _expert_candidates(info: TensorInfo, config: dict[str, Any]) -> list[_Candidate]:
    """Experts fused in one tensor, as 2-D layers with the names that per-expert checkpoints use."""
    text = text_config(config)
    parent, _, last = _module(info.name).rpartition(".")
    parts = FUSED_EXPERTS[last]
    experts, a, b = info.shape
    hidden = text.get("hidden_size", 0)
    if text.get("model_type") in EXPERTS_INTERLEAVED:
        raise PlanError(
            f"{info.name}: interleaved experts of {text['model_type']} are not supported; --exclude {last}"
        )
    hidden_axis = {a: 1, b: 2}.get(hidden) if a != b else None
    if hidden_axis is None and text.get("model_type") not in EXPERTS_KNOWN:
        raise PlanError(
            f"{info.name}: cannot tell inputs from outputs in {list(info.shape)}; --exclude {last}"
        )
    hidden_is_input = len(parts) == 2
    transposed = (
        text.get("model_type") in EXPERTS_IN_OUT
        if hidden_axis is None
        else (hidden_axis == 2) != hidden_is_input
    )
    n, k = (b, a) if transposed else (a, b)
    if n % len(parts):
        raise PlanError(
            f"{info.name}: {n} rows are not {' and '.join(parts)} of one size; use --exclude {last}"
        )
    step = n // len(parts)
    return [
        _Candidate(
            name=f"{parent}.{expert}.{part}",
            shape=(step, k),
            dtype=info.dtype,
            source=info.name,
            nbytes=info.nbytes // experts // len(parts),
            expert=expert,
            rows=(i * step, (i + 1) * step),
            transposed=transposed,
        )
        for expert in range(experts)
        for i, part in enumerate(parts)
    ]


# ---- schemes: which grid each layer gets


def _choose_schemes(candidates: list[_Candidate], recipe: Recipe) -> tuple[list[LayerPlan], dict[str, str]]:
    """Layers with their schemes, and the source tensors that stay dense with the reason."""
    layers: list[LayerPlan] = []
    skipped: dict[str, str] = {}
    for siblings in _by_fused_group(candidates).values():
        chosen = [_choose_scheme(candidate, recipe) for candidate in siblings]
        reasons = [choice for choice in chosen if isinstance(choice, str)]
        indivisible = [reason for reason in reasons if reason != RULE_SKIP]
        if indivisible:
            # engines run fused siblings as one layer: either all are packed or none is
            skipped |= {candidate.source: indivisible[0] for candidate in siblings}
            continue
        skipped |= {
            c.source: RULE_SKIP for c, choice in zip(siblings, chosen, strict=True) if choice == RULE_SKIP
        }
        layers += _share_group([choice for choice in chosen if isinstance(choice, LayerPlan)])
    order = {candidate.name: i for i, candidate in enumerate(candidates)}
    return sorted(layers, key=lambda layer: order[layer.name]), skipped


RULE_SKIP = "skipped by a rule"


def _choose_scheme(layer: _Candidate, recipe: Recipe) -> LayerPlan | str:
    """The plan of one layer, or why it stays dense."""
    rule = next((rule for rule in recipe.rules if matches(rule.match, layer.source)), Rule(match=""))
    if rule.skip:
        return RULE_SKIP
    method = rule.method or recipe.method
    group = recipe.group if rule.group is None else rule.group
    k = layer.shape[1]
    fallback = None
    if group > 0 and k % group:
        why = f"in_features {k} is not a multiple of {group}"
        if recipe.on_indivisible == "error":
            raise PlanError(f"{layer.name}: {why}; use a smaller --group or --on-indivisible smaller-group")
        smaller = [g for g in (128, 64, 32) if g < group and k % g == 0]
        if recipe.on_indivisible == "skip" or not smaller:
            return why if recipe.on_indivisible == "skip" else f"in_features {k} is not a multiple of 32"
        group, fallback = smaller[0], f"{why}: group {smaller[0]}"
    scheme = QuantScheme(
        bits=rule.bits or recipe.bits,
        group_size=group,
        symmetric=recipe.symmetric if rule.sym is None else rule.sym,
        scale_dtype=FLOATS[layer.dtype],
    )
    return LayerPlan(
        layer.name, layer.shape, scheme, method, layer.source, layer.nbytes,
        layer.expert, layer.rows, layer.transposed, fallback,
    )  # fmt: skip


def _fused_group(name: str) -> str | None:
    """The key that all layers of one fused launch share; None for a layer that stands alone."""
    if ".experts." in name:
        return name.partition(".experts.")[0] + ".experts"
    parent, _, last = name.rpartition(".")
    family = next((i for i, family in enumerate(FUSED) if last in family), None)
    return None if family is None else f"{parent}:{family}"


def stacks(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names of linears with those that read the same input together, in the order of FUSED, once each.

    A linear whose siblings are not all among the names stands alone.
    """
    given = dict.fromkeys(names)
    found: dict[tuple[str, ...], None] = {}
    for name in given:
        parent, dot, last = name.rpartition(".")
        family = next((family for family in FUSED if last in family), ())
        members = tuple(f"{parent}{dot}{sibling}" for sibling in family)
        whole = len(members) > 1 and all(member in given for member in members)
        found[members if whole else (name,)] = None
    return list(found)


def _by_fused_group(candidates: list[_Candidate]) -> dict[str, list[_Candidate]]:
    groups = defaultdict(list)
    for candidate in candidates:
        groups[_fused_group(candidate.name) or candidate.name].append(candidate)
    return groups


def _share_group(siblings: list[LayerPlan]) -> list[LayerPlan]:
    """Fused siblings that had to take a smaller group take the smallest of them together."""
    if not any(layer.fallback for layer in siblings):
        return siblings
    group = min(layer.scheme.group_size for layer in siblings if layer.fallback)
    return [
        layer
        if layer.scheme.group_size == group
        else replace(
            layer,
            scheme=replace(layer.scheme, group_size=group),
            fallback=f"fused with a layer of group {group}",
        )
        for layer in siblings
    ]


# ---- checks


def _check_model(source: Source) -> None:
    model_type = source.config.get("model_type")
    if model_type in ENCODERS:
        kind = ", ".join(source.config.get("architectures") or [model_type])
        raise PlanError(f"{source.name}: {kind} is not a causal language model; lowbit quantizes decoders")


def _check_patterns(source: Source, recipe: Recipe) -> None:
    given = [("--include", p) for p in recipe.include] + [("--exclude", p) for p in recipe.exclude]
    for flag, pattern in given + [("rules", rule.match) for rule in recipe.rules]:
        if not any(matches(pattern, name) for name in source.tensors):
            raise RecipeError(
                f"{flag} {pattern!r} matches no tensor of {source.name}; give a module name, its last parts "
                "(mlp.down_proj) or re:EXPRESSION"
            )


def _check_fused(layers: list[LayerPlan], copies: list[CopyPlan]) -> None:
    """Refuse fused siblings with unlike schemes, and packed ones beside dense ones."""
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for layer in layers:
        groups[_fused_group(layer.name) or layer.name][layer.name] = str(layer.scheme)
    for copy in copies:
        name = _module(copy.name)
        if copy.linear and (key := _fused_group(name)):
            groups[key][name] = "dense"
    for members in groups.values():
        if len(set(members.values())) > 1:
            (a, one), (b, other) = _first_two_unlike(members)
            raise PlanError(
                f"{a} is {one} but {b} is {other}: engines run them as one layer; "
                "treat them alike or pass --allow-mixed-fused"
            )


def _first_two_unlike(members: dict[str, str]) -> tuple[tuple[str, str], tuple[str, str]]:
    first, *rest = members.items()
    return first, next(item for item in rest if item[1] != first[1])


def _check_supported(layers: list[LayerPlan], recipe: Recipe) -> None:
    """Refuse what the solver or the format cannot take, with their own reasons."""
    accepts: Callable[[QuantScheme], str | None] = FORMATS[recipe.format].accepts
    for layer in layers:
        if layer.method not in SOLVERS:
            raise RecipeError(f"--method {layer.method!r} is unknown; use one of {', '.join(SOLVERS)}")
        if layer.method == recipe.method:
            make_options(layer.method, recipe.solver)
        if reason := SOLVERS[layer.method].accepts(layer.scheme):
            raise PlanError(f"{layer.name}: --method {layer.method}: {reason}")
        reason = accepts(layer.scheme) or FORMATS[recipe.format].accepts_layer(layer.scheme, *layer.shape)
        if reason:
            raise PlanError(f"{layer.name}: --format {recipe.format}: {reason}")


def _check_names(layers: list[LayerPlan], copies: list[CopyPlan], recipe: Recipe) -> None:
    """Refuse a layer whose packed tensors would have the names of other tensors of the output."""
    owners = {copy.name: f"the tensor {copy.name}" for copy in copies}
    for layer in layers:
        for suffix in FORMATS[recipe.format].suffixes:
            name = f"{layer.name}.{suffix}"
            if name in owners:
                raise PlanError(
                    f"{layer.source}: quantized, it would be stored as {name}, which is {owners[name]}; "
                    f"keep it dense with --exclude {_module(layer.source)}"
                )
            owners[name] = f"part of {layer.source}"


def _nothing_left(copies: list[CopyPlan]) -> str:
    reasons = Counter(copy.reason for copy in copies if copy.linear and copy.reason != "output head")
    if not reasons:
        return "no linear layer was found in numbered decoder blocks; name them with --include"
    reason, count = reasons.most_common(1)[0]
    return f"no layer can be quantized ({count} linear layers: {reason}); try another --group or --include"


def _notes(layers: list[LayerPlan], recipe: Recipe) -> tuple[str, ...]:
    """What the user should know before starting."""
    asked = [f"--{key}" for key in ("calib", "samples", "seqlen") if getattr(recipe, key) is not None]
    unused = asked and not any(SOLVERS[layer.method].needs_data for layer in layers)
    notes = [f"{', '.join(asked)}: not used, {recipe.method} reads no calibration text"] if unused else []
    notes += [
        f"{count} {'layer' if count == 1 else 'layers'}: {reason}"
        for reason, count in Counter(layer.fallback for layer in layers if layer.fallback).items()
    ]
    cautions = (FORMATS[recipe.format].caution(layer.scheme) for layer in layers)
    notes += [f"{recipe.format}: {caution}" for caution in dict.fromkeys(cautions) if caution]
    conv1d = sum(layer.transposed and layer.expert is None for layer in layers)
    if conv1d:
        notes.append(f"{conv1d} Conv1D layers are stored as [out, in]; few engines load quantized Conv1D")
    return tuple(notes)

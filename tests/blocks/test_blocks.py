"""Statistics block by block, against hooks on the whole model; streams, fallbacks, memory and resuming."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, save_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lowbit import blocks, skeleton
from lowbit.blocks import EXPERT_FLOOR, Following, LayerWork, open_engine
from lowbit.checkpoint.source import open_source
from lowbit.errors import PlanError, SourceError
from lowbit.hessian import LayerStats
from lowbit.plan import LayerPlan, make_plan
from lowbit.products import Kept, Products
from lowbit.recipe import Recipe

Tiny = Callable[[str], Path]
EXPERT_MODELS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")

# layers whose output is added to the residual stream as it is, by the end of their names
MEETS = {
    name: ("o_proj", "down_proj")
    for name in ("llama", "llama-tied-bias", "qwen2", "qwen3", "mistral-window", "phi3")
} | {
    "granite": (),
    "gemma2": (),
    "gemma3": (),
    "olmo2": (),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "gpt_neox": ("dense_4h_to_h",),
    "opt": ("out_proj", "fc2"),
    "falcon": ("dense_4h_to_h",),
    "bloom": ("self_attention.dense", "dense_4h_to_h"),
    "mixtral": ("o_proj",),
    "qwen2_moe": ("o_proj",),
    "qwen3_moe": ("o_proj",),
    "deepseek_v2": ("o_proj", "layers.0.mlp.down_proj"),
    "deepseek_v3": ("o_proj", "layers.0.mlp.down_proj"),
}


def make_rows(count: int = 5, length: int = 32) -> Tensor:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(3))


def coarse(weight: Tensor) -> Tensor:
    """A stand-in for a solver that leaves a large error, exact in fp16."""
    return (weight * 16).round() / 16


@contextmanager
def opened(
    folder: Path, rows: Tensor, **options: Any
) -> Iterator[tuple[blocks.Engine, tuple[LayerPlan, ...]]]:
    with open_source(str(folder)) as source:
        plan = make_plan(source, Recipe(method="rtn", group=32))
        with open_engine(source, plan.layers, rows, **options) as engine:
            yield engine, plan.layers


def run(engine: blocks.Engine, stop_after: int | None = None) -> dict[str, LayerWork]:
    """Work through the engine with `coarse`; the work of every layer by name."""
    seen: dict[str, LayerWork] = {}
    for block in engine.blocks():
        for stage in block.stages():
            for work in stage.work():
                seen[work.layer.name] = work
                stage.replace(work.layer, coarse(work.weight))
        if block.index == stop_after:
            break
    return seen


def whole_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()


class Watched:
    """A whole model with a hook on every module: what went in and came out, for all rows at once."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.inputs: dict[str, tuple[Any, ...]] = {}
        self.outputs: dict[str, Any] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(self.hook(name), with_kwargs=True)

    def hook(self, name: str) -> Callable[..., None]:
        def seen(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.inputs[name] = tuple(args) + tuple(v for v in kwargs.values() if isinstance(v, Tensor))
            self.outputs[name] = output[0] if isinstance(output, tuple) else output

        return seen

    def run(self, rows: Tensor) -> None:
        with torch.no_grad():
            self.model(rows, use_cache=False)


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).double()


def matrix(model: Any, name: str, transposed: bool) -> Tensor:
    weight = model.get_submodule(name).weight.data
    return weight.T if transposed else weight


def residual_after(watched: Watched, name: str, block: str) -> Tensor:
    """The residual stream after the layer: the input of the norm after attention, or the block's output."""
    norms = ("post_attention_layernorm", "ln_2", "final_layer_norm")
    norm = next((f"{block}.{n}" for n in norms if f"{block}.{n}" in watched.inputs), None)
    last = name.rpartition(".")[2]
    attention = last in ("o_proj", "out_proj", "dense") or name.endswith("attn.c_proj")
    return watched.inputs[norm][0] if attention and norm else watched.outputs[block]


@pytest.mark.parametrize("name", MODELS, ids=str)
def test_skeleton_computes_what_from_pretrained_does(name: str, tiny: Tiny) -> None:
    rows = make_rows(2)
    with open_source(str(tiny(name))) as source:
        built = skeleton.build_skeleton(source, dtype=torch.float32, device=torch.device("cpu"))
        model = built.model
        names = [n for n in model.state_dict() if n not in model.all_tied_weights_keys]
        skeleton.load(built, source, names, lambda name, dtype: torch.float32, torch.device("cpu"))
    model.tie_weights()
    with torch.no_grad():
        torch.testing.assert_close(model(rows).logits, whole_model(tiny(name))(rows).logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS, ids=str)
def test_statistics_match_hooks_on_the_whole_model(name: str, tiny: Tiny) -> None:
    """H of every matrix, and D, against a model that has the weights replaced so far and an untouched one."""
    rows = make_rows()
    full, quantized = Watched(whole_model(tiny(name))), Watched(whole_model(tiny(name)))
    full.run(rows)
    checked = []
    with opened(tiny(name), rows) as (engine, layers):
        assert not engine.unreached
        for block in engine.blocks():
            for stage in block.stages():
                works = list(stage.work())
                quantized.run(rows)
                for work in works:
                    layer, stats = work.layer, work.stats
                    if ".experts." in layer.name:
                        continue
                    assert stats is not None, layer.name
                    x, x_full = (flat(w.inputs[layer.name][0]) for w in (quantized, full))
                    scale = 2 / len(x)
                    assert stats.tokens == rows.numel()
                    close(stats.hessian, scale * x.T @ x)
                    if layer.name.endswith(MEETS[name]) and MEETS[name]:
                        gap = flat(residual_after(full, layer.name, block.name))
                        gap = gap - flat(residual_after(quantized, layer.name, block.name))
                    else:
                        gap = (x_full - x) @ work.weight.double().T
                    assert stats.cross is not None
                    close(stats.cross, scale * gap.T @ x, floor=1e-4)
                    checked.append(layer.name)
                for work in works:
                    stage.replace(work.layer, coarse(work.weight))
                    put(quantized.model, engine.slots[work.layer.name], coarse(work.weight))
    assert len(checked) == sum(".experts." not in layer.name for layer in layers)


def put(model: Any, slot: skeleton.Slot, weight: Tensor) -> None:
    slot.view(model.get_parameter(slot.param).data).copy_(weight)


def close(found: Tensor, wanted: Tensor, floor: float = 0.0) -> None:
    """Equal up to float32 sums: a share of the largest entry. floor: an absolute error that is nothing."""
    error = (found.double() - wanted).abs().max()
    assert error <= 2e-5 * wanted.abs().max() + floor, (error, wanted.abs().max())


@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_experts_see_what_is_routed_to_them(name: str, tiny: Tiny) -> None:
    rows = make_rows(16)
    watched = Watched(whole_model(tiny(name)))
    found: dict[str, LayerStats] = {}
    with opened(tiny(name), rows) as (engine, layers):
        for block in engine.blocks():
            for stage in block.stages():
                for work in stage.work():
                    if ".experts." not in work.layer.name:
                        # the model stays as it is, so that one run of the whole is the truth
                        continue
                    assert work.stats is not None, work.reason
                    found[work.layer.name] = work.stats
    watched.run(rows)
    experts = [layer for layer in layers if ".experts." in layer.name]
    assert experts
    assert found.keys() == {layer.name for layer in experts}
    for layer in experts:
        slot = engine.slots[layer.name]
        module_name = slot.param.rpartition(".")[0]
        module = watched.model.get_submodule(module_name)
        hidden, chosen = (t for t in watched.inputs[module_name][:2])
        x = flat(hidden)[(chosen == slot.expert).any(-1)]
        if slot.param.endswith("down_proj"):
            gate, up = (x @ module.gate_up_proj[slot.expert].double().T).chunk(2, dim=-1)
            x = torch.nn.functional.silu(gate) * up
        assert found[layer.name].tokens == len(x)
        close(found[layer.name].hessian, 2 / len(x) * x.T @ x)


def test_a_never_routed_expert_is_named(tiny: Tiny) -> None:
    """Its three layers have no statistics and say why; all others have."""
    with opened(tiny("qwen3_moe"), make_rows()) as (engine, _):
        experts = engine.skeleton.model.get_submodule("model.layers.1.mlp.experts")
        # the tokens of expert 3 go elsewhere
        experts.register_forward_pre_hook(
            lambda module, args: (args[0], torch.where(args[1] == 3, (args[1] + 1) % 3, args[1]), args[2])
        )
        seen = run(engine)
    starved = {f"model.layers.1.mlp.experts.3.{part}" for part in ("gate_proj", "up_proj", "down_proj")}
    assert {name for name, work in seen.items() if work.stats is None} == starved
    assert {seen[name].reason for name in starved} == {blocks.NOT_REACHED}


def test_few_tokens_are_too_few(tiny: Tiny) -> None:
    rows = make_rows(1, EXPERT_FLOOR)
    with opened(tiny("qwen3_moe"), rows) as (engine, _):
        seen = run(engine)
    experts = {name: work for name, work in seen.items() if ".experts." in name}
    assert all(work.stats is None for work in experts.values())
    assert any("only" in (work.reason or "") for work in experts.values())
    assert all(work.stats is not None for name, work in seen.items() if name not in experts)


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "bloom", "qwen2_moe", "deepseek_v3"])
def test_streams_are_those_of_the_whole_models(name: str, tiny: Tiny) -> None:
    """At every block: what goes in is what a model with all earlier weights replaced gives there."""
    rows = make_rows()
    full, quantized = Watched(whole_model(tiny(name))), Watched(whole_model(tiny(name)))
    full.run(rows)
    with opened(tiny(name), rows) as (engine, _):
        for block in engine.blocks():
            quantized.run(rows)
            wanted = quantized.inputs[block.name][0]
            torch.testing.assert_close(engine.quantized, wanted, rtol=1e-4, atol=1e-5)
            assert engine.full is not None
            torch.testing.assert_close(engine.full, full.outputs[block.name], rtol=1e-4, atol=1e-5)
            # in later blocks the two are far apart, or this could not tell them from each other
            assert (block.index == 0) == (float((wanted - full.inputs[block.name][0]).abs().max()) < 0.01)
            for stage in block.stages():
                for work in stage.work():
                    stage.replace(work.layer, coarse(work.weight))
                    put(quantized.model, engine.slots[work.layer.name], coarse(work.weight))


def test_without_following_there_is_one_stream_and_no_target(tiny: Tiny) -> None:
    with opened(tiny("llama"), make_rows(), following=Following(target=False)) as (engine, _):
        assert engine.full is None
        alone = run(engine)
    with opened(tiny("llama"), make_rows()) as (engine, _):
        both = run(engine)
    for name, work in alone.items():
        assert work.stats is not None
        assert work.stats.cross is None
        close(work.stats.hessian, both[name].stats.hessian.double())


def same_work(a: dict[str, LayerWork], b: dict[str, LayerWork]) -> None:
    for name, work in a.items():
        assert torch.equal(work.weight, b[name].weight), name
        mine, other = ((s.hessian, s.cross) if s else (s,) for s in (work.stats, b[name].stats))
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_activations_on_disk_give_the_same_bytes(tiny: Tiny, tmp_path: Path) -> None:
    with opened(tiny("llama"), make_rows()) as (engine, _):
        in_memory = run(engine)
    with opened(tiny("llama"), make_rows(), memory_bytes=0, state=tmp_path / "state") as (engine, _):
        same_work(in_memory, run(engine))


class Counting(TorchFunctionMode):
    """Counts the products and attentions that are really computed, by the width of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            self.seen[f"{args[1].shape[0]} x {args[1].shape[1]}"] += 1
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.seen["attention"] += 1
        return func(*args, **(kwargs or {}))


def test_what_cannot_change_any_more_is_computed_once(build_llama: Callable[..., Path]) -> None:
    """One stream, from the first of two blocks to the second; without memory for it all is done again."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = build_llama(**sizes, num_hidden_layers=2)
    counts = {}
    for memory_bytes in (None, 0):
        options = {"following": Following(target=False), "memory_bytes": memory_bytes}
        with opened(folder, make_rows(), **options) as (engine, _):
            for block in engine.blocks():
                with Counting() as counting:
                    for stage in block.stages():
                        for work in stage.work():
                            stage.replace(work.layer, coarse(work.weight))
                    block.replay()
                counts[memory_bytes] = counting.seen
                break
    # q, k and v, o, gate and up, down
    assert counts[None] == {"64 x 64": 2, "32 x 64": 2, "96 x 64": 2, "64 x 96": 1, "attention": 1}
    assert counts[0] == {"64 x 64": 7, "32 x 64": 8, "96 x 64": 4, "64 x 96": 1, "attention": 4}


def test_a_result_that_is_written_into_is_not_taken_again() -> None:
    weight = torch.randn(8, 8)
    x = torch.randn(3, 8)
    kept = Kept(settled=lambda param: True, take=lambda nbytes: True)
    for _ in range(3):
        with Products({"w": weight}, torch.float32, kept=kept):
            y = torch.nn.functional.linear(x, weight)
            z = torch.nn.functional.linear(y, weight)
            # as models do that add their branches in place
            y += 1
        assert torch.equal(y, x @ weight.T + 1)
        assert torch.equal(z, x @ weight.T @ weight.T)
    assert kept.limit == 0


class Traced(nn.Module):
    """Calls `body`, whose mock counts the calls."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = Mock(side_effect=body)

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


class Chain(nn.Module):
    """first, the weight, then second; what is done to first's result afterwards is `then`."""

    def __init__(self, first: Callable[..., Any], then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.then = Traced(first), Traced(torch.tanh), then
        self.linear = nn.Linear(8, 8, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = self.then(y[0] if isinstance(y, tuple) else y)
        return self.second(self.linear(y)) + x


def write_into(x: Tensor) -> Tensor:
    return x.add_(1)


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        (torch.exp, torch.clone, True),
        (lambda x: (x.exp(), None), torch.clone, True),
        # may hold more than tensors
        (lambda x: (x.exp(), "state"), torch.clone, False),
        # a result that is written into, one that is the input, and an input that is written into
        (torch.exp, write_into, False),
        (lambda x: x, torch.clone, False),
        (lambda x: x.add_(1).exp(), torch.clone, False),
    ],
    ids=["tensor", "tuple", "other", "written into", "input", "writes into its input"],
)
def test_a_submodule_runs_once_where_its_result_says_it_all(
    first: Callable[..., Any], then: Callable[[Tensor], Tensor], kept: bool
) -> None:
    module, x, settled = Chain(first, then), torch.randn(3, 8), set()
    plain = Chain(first, then)
    plain.linear.weight = module.linear.weight
    known, entered = Kept(settled.__contains__, take=lambda nbytes: True), []
    module.first.register_forward_pre_hook(lambda *args: entered.append(args))
    for run in range(4):
        if run == 2:
            module.linear.weight.mul_(0.5)
            settled.add("w")
        with known.submodules(module), Products({"w": module.linear.weight}, torch.float32, kept=known):
            y = module(x.clone())
        torch.testing.assert_close(y, plain(x.clone()), rtol=0, atol=0)
    assert module.first.body.call_count == (1 if kept else 4)
    # the weight changed after two runs, and the third is the first of its result
    assert module.second.body.call_count == 3
    # hooks are the module's own
    assert len(entered) == 4
    assert "forward" not in module.first.__dict__


def test_a_submodule_s_result_takes_the_place_of_those_inside() -> None:
    """Bytes are counted once, and given back with what is dropped."""
    module = nn.Sequential(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()), nn.Linear(8, 4, bias=False))
    params = {"a": module[0][0].weight, "b": module[1].weight}
    left = [10**6]

    def take(nbytes: int) -> bool:
        left[0] -= nbytes
        return True

    kept = Kept({"a"}.__contains__, take)
    x = torch.randn(5, 8)
    for _ in range(2):
        with torch.no_grad(), kept.submodules(module), Products(params, torch.float32, kept=kept):
            y = module(x)
        assert torch.equal(y, x.matmul(params["a"].T).tanh() @ params["b"].T)
        # the inner Sequential's output, [5, 8] float32
        assert left[0] == 10**6 - 5 * 8 * 4


class Part(nn.Module):
    """A submodule with a weight, something to remember by, and `body` for a forward."""

    def __init__(self, body: Callable[..., Tensor], weight: nn.Parameter) -> None:
        super().__init__()
        self.body, self.weight = body, weight
        self.last: Any = None
        self.seen: list[Any] = []

    def forward(self, x: Tensor, box: dict[str, Tensor]) -> Tensor:
        return self.body(self, x, box)


class Whole(nn.Module):
    """The part, then what goes by its result and what it left behind."""

    def __init__(self, body: Callable[..., Tensor], then: Callable[..., Tensor], weight: Tensor) -> None:
        super().__init__()
        self.part, self.then = Part(body, nn.Parameter(weight, requires_grad=False)), then

    def forward(self, x: Tensor) -> Tensor:
        box: dict[str, Tensor] = {}
        y = self.part(x, box)
        return self.then(self.part, y, box)


def remember(part: Part, x: Tensor, box: dict[str, Tensor]) -> Tensor:
    part.last = x.mean()
    return x * 2


def remember_in_a_list(part: Part, x: Tensor, box: dict[str, Tensor]) -> Tensor:
    part.seen[:] = [x.mean()]
    return x * 2


def hand_back(part: Part, x: Tensor, box: dict[str, Tensor]) -> Tensor:
    box["mean"] = x.mean()
    return x * 2


def count_calls(part: Part, x: Tensor, box: dict[str, Tensor]) -> Tensor:
    part.last = (part.last or 0) + 1
    return x * part.last


def write_unseen(part: Part, y: Tensor, box: dict[str, Tensor]) -> Tensor:
    y.data.mul_(2)
    return y.clone()


@pytest.mark.parametrize(
    ("body", "then"),
    [
        # the weight, by functions that are not watched
        (lambda part, x, box: torch.einsum("mk,nk->mn", x, part.weight), lambda part, y, box: y),
        (
            lambda part, x, box: torch.nn.functional.linear(input=x, weight=part.weight),
            lambda part, y, box: y,
        ),
        (lambda part, x, box: x.double() @ part.weight.double().T, lambda part, y, box: y.float()),
        (lambda part, x, box: (x[:, None] * part.weight).sum(-1), lambda part, y, box: y),
        # what is left behind
        (remember, lambda part, y, box: y * part.last),
        (remember_in_a_list, lambda part, y, box: y * part.seen[0]),
        (hand_back, lambda part, y, box: y * box["mean"]),
        (count_calls, lambda part, y, box: y),
        # a write that no version counts
        (lambda part, x, box: x.exp(), write_unseen),
    ],
    ids=["einsum", "keyword", "other-dtype", "sum", "attribute", "list", "argument", "counter", "data"],
)
def test_what_is_kept_changes_no_result(body: Callable[..., Tensor], then: Callable[..., Tensor]) -> None:
    """Two batches in turn, a weight that changes between runs, and a module without anything kept."""
    weight, batches = torch.randn(8, 8), (torch.randn(3, 8), torch.randn(3, 8))
    module, plain = Whole(body, then, weight.clone()), Whole(body, then, weight.clone())
    settled: set[str] = set()
    known = [Kept(settled.__contains__, take=lambda nbytes: True) for _ in batches]
    params = {"w": module.part.weight.data}
    for run in range(4):
        if run == 2:
            for one in (module, plain):
                one.part.weight.data.mul_(0.5)
            settled.add("w")
        for kept, x in zip(known, batches, strict=True):
            with torch.no_grad(), kept.submodules(module), Products(params, torch.float32, kept=kept):
                y = module(x.clone())
            torch.testing.assert_close(y, plain(x.clone()), rtol=0, atol=0)


def in_place(block: LlamaDecoderLayer, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    attention, mlp = block.self_attn, block.mlp
    x = block.input_layernorm(hidden_states)
    q = attention.q_proj(x)
    # from here on x is another input at the same address
    x.mul_(3)
    hidden_states += attention.o_proj(x) + q
    gate = mlp.gate_proj(block.post_attention_layernorm(hidden_states))
    hidden_states += mlp.down_proj(gate)
    # the input of the layer that has met the stream
    gate.zero_()
    return hidden_states


def out_of_place(block: LlamaDecoderLayer, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    attention, mlp = block.self_attn, block.mlp
    x = block.input_layernorm(hidden_states)
    hidden_states = hidden_states + (attention.o_proj(x * 3) + attention.q_proj(x))
    gate = mlp.gate_proj(block.post_attention_layernorm(hidden_states))
    return hidden_states + mlp.down_proj(gate)


@pytest.mark.parametrize("target", [False, True])
def test_a_block_that_writes_into_its_tensors(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, target: bool
) -> None:
    """It gives what the same block gives that writes into nothing."""
    found = []
    for forward in (in_place, out_of_place):
        monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
        options: dict[str, Any] = {"following": Following(target=target, residual=False)}
        with opened(tiny("llama"), make_rows(), **options) as (engine, _):
            found.append((run(engine), engine.quantized, engine.full))
    same_work(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not target or torch.equal(found[0][2], found[1][2])


def test_an_input_that_is_written_into_before_it_meets_the_stream(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaDecoderLayer, "forward", in_place)
    with opened(tiny("llama"), make_rows()) as (engine, _):
        works = run(engine)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", out_of_place)
    with opened(tiny("llama"), make_rows()) as (engine, _):
        wanted = run(engine)
    stats, others = (w["model.layers.0.mlp.down_proj"].stats for w in (works, wanted))
    assert stats is not None
    assert others is not None
    torch.testing.assert_close(stats.hessian, others.hessian)
    assert stats.hessian.any()


@pytest.mark.parametrize("name", MODELS, ids=str)
def test_a_few_tokens_show_how_a_block_is_made(
    name: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for tokens in (make_rows().shape[1], 4):
        monkeypatch.setattr(blocks, "_PROBE_TOKENS", tokens)
        with opened(tiny(name), make_rows()) as (engine, _):
            found.append([block.groups for block in engine.blocks()])
    assert found[0] == found[1]


def test_weights_that_a_few_tokens_do_not_reach_are_looked_for_in_the_whole_row(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where each expert is a module of its own, and the first tokens go to others."""
    monkeypatch.setattr(blocks, "_PROBE_TOKENS", 8)
    with opened(tiny("llama"), make_rows()) as (engine, layers):
        mlp = engine.skeleton.model.get_submodule("model.layers.1.mlp")
        whole = mlp.forward
        monkeypatch.setattr(mlp, "forward", lambda x: whole(x) if x.shape[1] > 8 else torch.zeros_like(x))
        seen = run(engine)
        monkeypatch.undo()
    assert all(seen[layer.name].stats is not None for layer in layers)


def test_rows_in_one_batch_or_many_give_one_hessian(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tiny("gpt2"), make_rows()) as (engine, _):
        assert len(engine.batches) == 1
        together = run(engine)
    monkeypatch.setitem(blocks._BATCH_BYTES, "cpu", 2 * 4 * 256 * 32)
    with opened(tiny("gpt2"), make_rows()) as (engine, _):
        assert [batch.stop - batch.start for batch in engine.batches] == [2, 2, 1]
        apart = run(engine)
    for name, work in together.items():
        close(apart[name].stats.hessian, work.stats.hessian.double())


@pytest.mark.parametrize("stop_after", [0, 1])
def test_a_killed_run_goes_on_with_the_same_bytes(
    stop_after: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # every block is worth saving
    monkeypatch.setattr("lowbit.activations._SAVE_SHARE", float("inf"))
    with opened(tiny("llama"), make_rows()) as (engine, _):
        uninterrupted = run(engine)
    state = tmp_path / "state"
    with opened(tiny("llama"), make_rows(), state=state) as (engine, _):
        before = run(engine, stop_after=stop_after)
    done = frozenset(before)
    with opened(tiny("llama"), make_rows(), state=state, done=done) as (engine, _):
        assert engine.first_block == stop_after
        after = run(engine)
    same_work(before | after, uninterrupted)
    with opened(tiny("llama"), make_rows(), state=state, done=frozenset()) as (engine, _):
        # what was saved counts only with the layers that made it
        assert engine.first_block == 0


def test_one_block_is_resident_at_a_time(tiny: Tiny) -> None:
    with opened(tiny("llama"), make_rows()) as (engine, _):
        for block in engine.blocks():
            for name, module in engine.skeleton.blocks.items():
                resident = {not parameter.is_meta for parameter in module.parameters()}
                assert resident == {name == block.name}
            assert engine.skeleton.model.get_input_embeddings().weight.is_meta
            assert {p.dtype for p in block.params.values()} == {torch.float16}


MEMORY = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from test_blocks import coarse, make_rows, opened
from pathlib import Path

peaks = []
with opened(Path(sys.argv[1]), make_rows(2)) as (engine, _):
    for block in engine.blocks():
        for stage in block.stages():
            for work in stage.work():
                stage.replace(work.layer, coarse(work.weight))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(*peaks)
"""


def test_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    """The peak after eight blocks is that of the first two, within half a block."""
    size = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 192}
    save_model("llama", tmp_path, **size)
    block_kib = 2 * (768 * 768 * 3 + 3 * 768 * 2048) / 1024
    command = [sys.executable, "-c", MEMORY, str(tmp_path), str(Path(__file__).parent)]
    peaks = [
        int(p) for p in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    ]
    assert len(peaks) == 8
    assert peaks[-1] - peaks[1] < block_kib / 2, peaks


def test_random_states_of_the_caller_are_untouched(tiny: Tiny) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    grad, mode = torch.is_grad_enabled(), torch.get_default_dtype()
    with opened(tiny("gemma3"), make_rows()) as (engine, _):
        run(engine)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (grad, mode)


def test_a_weight_that_is_not_where_it_should_be_is_refused(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: gate and up of the experts looked for in each other's rows."""
    honest = blocks.find_slots

    def swapped(*args: Any) -> dict[str, skeleton.Slot]:
        slots = honest(*args)
        a, b = "model.layers.2.mlp.experts.1.gate_proj", "model.layers.2.mlp.experts.1.up_proj"
        return slots | {a: slots[b], b: slots[a]}

    monkeypatch.setattr(blocks, "find_slots", swapped)
    with opened(tiny("qwen3_moe"), make_rows()) as (engine, _), pytest.raises(PlanError, match="rearranges"):
        run(engine)


def test_an_incomplete_checkpoint_is_named(tiny: Tiny, tmp_path: Path) -> None:
    for file in tiny("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with (
        opened(tmp_path, make_rows()) as (engine, _),
        pytest.raises(SourceError, match=r"missing tensor for model\.layers\.1\.input_layernorm\.weight"),
    ):
        run(engine)


def test_a_config_of_more_blocks_than_there_are_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with open_source(str(folder)) as source, pytest.raises(SourceError, match=r"5 decoder blocks.*layers\.3"):
        blocks.check_model(source)


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (1, 64, 64), (4096,), (128, 64)], ids=str)
def test_a_weight_of_another_shape_than_the_config_s_is_refused(
    tiny: Tiny, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    folder = save_model("llama", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with (
        open_source(str(folder)) as source,
        pytest.raises(SourceError, match=r"layers\.1.*q_proj.* asks for"),
    ):
        blocks.check_model(source)


def test_experts_of_another_shape_than_the_config_s_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = save_model("mixtral", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("experts.1.w1.weight"))
    tensors[name] = tensors[name][1:].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with (
        pytest.raises(SourceError, match=r"experts.* not as config\.json says"),
        opened(folder, make_rows()) as (engine, _),
    ):
        run(engine)


def test_a_config_with_which_the_model_does_not_run_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = save_model("qwen3_moe", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 99}))
    with pytest.raises(PlanError, match="does not run as config"), opened(folder, make_rows()):
        pass


def test_layers_outside_the_blocks_are_listed(tiny: Tiny) -> None:
    with open_source(str(tiny("llama"))) as source:
        plan = make_plan(source, Recipe(method="rtn", group=32, include=("re:.*",)))
        names = {layer.name for layer in plan.layers}
        assert "lm_head" in names
        with open_engine(source, plan.layers, make_rows()) as engine:
            assert engine.unreached == {"lm_head": blocks.OUTSIDE}
            assert run(engine).keys() == names - {"lm_head"}

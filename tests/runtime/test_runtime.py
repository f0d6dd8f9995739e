"""lowbit.load and patch_model against models whose weights were dequantized by the second route."""

from __future__ import annotations

import json
import weakref
from itertools import permutations

import pytest
import torch
from safetensors.torch import save_file

from lowbit import load, patch_model, runtime, use_in_transformers
from lowbit.errors import OutputError, PlanError, SourceError
from lowbit.folder import DenseView, open_folder
from lowbit.pipeline import quantize
from lowbit.recipe import make_recipe
from lowbit.runtime import GatedMLP, GatedProduct, LinearRows, QuantLinear, share_products
from lowbit.scheme import QuantScheme
from lowbit_kernels.reference import dequantize, quantize_groups

IDS = torch.tensor([[3, 17, 254, 90, 8, 401, 77, 5], [9, 9, 9, 300, 12, 44, 2, 511]])
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    # large enough for the logits to differ, so that a wrong nibble shows
    "initializer_range": 0.1,
}
HEADS = {"head_dim": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MODELS = {
    "llama": ("LlamaConfig", {}),
    "qwen2, biases": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", HEADS),
    "mistral": ("MistralConfig", HEADS),
    "gemma2, tied": ("Gemma2Config", HEADS | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "gemma3, tied": ("Gemma3TextConfig", HEADS | {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "phi3, fused": ("Phi3Config", {"pad_token_id": 0}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", HEADS | EXPERTS),
    "gpt2, Conv1D": (
        "GPT2Config",
        {"n_embd": 128, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1},
    ),
}


def build(name, folder):
    import transformers

    kind, own = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**(SHAPE | own))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    # biases of 0 and norms of 1 would hide a lost one
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def dense_logits(folder, tmp_path):
    """By from_pretrained, from a plain checkpoint with the decoded weights."""
    from transformers import AutoModelForCausalLM

    view = DenseView(open_folder(folder))
    dense = tmp_path / "dense"
    dense.mkdir()
    tensors = {name: view.read(name) for name in view.tensors}
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    (dense / "config.json").write_text(json.dumps(view.config))
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()(IDS).logits


def close(a, b):
    # fp32 on both sides; only the order of the sums differs
    return float((a - b).abs().max()) <= 1e-4 * float(b.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_loaded_model_agrees_with_its_dequantized_weights(name, tmp_path):
    out = tmp_path / "out"
    quantize(build(name, tmp_path / "model"), out, make_recipe(method="rtn", device="cpu", group=64))
    truth = dense_logits(out, tmp_path)
    model = load(out, device="cpu")
    with torch.no_grad():
        assert close(model(IDS).logits, truth)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    packed = sum(m.words.nbytes for m in linears.values())
    assert packed == sum(layer.shape[0] * layer.shape[1] // 2 for layer in open_folder(out).layers.values())
    # a planted fault: one nibble of one layer
    next(iter(linears.values())).words[0, 0] ^= 0xF
    with torch.no_grad():
        assert not close(model(IDS).logits, truth)


@pytest.mark.parametrize("name", [name for name in MODELS if "Conv1D" not in name])
def test_transformers_loads_the_same_bits(name, tmp_path):
    """from_pretrained with compressed-tensors, whose code is not ours: every logit equal."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    quantize(build(name, tmp_path / "model"), out, make_recipe(method="rtn", device="cpu", group=64))
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, dense_logits(out, tmp_path))


@pytest.mark.parametrize("name", ["qwen2, biases", "phi3, fused", "qwen3_moe"])
def test_from_pretrained_runs_on_packed_linears_when_asked(name, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import auto

    out = tmp_path / "out"
    quantize(build(name, tmp_path / "model"), out, make_recipe(method="rtn", device="cpu", group=64))
    monkeypatch.setattr(auto, "AUTO_QUANTIZER_MAPPING", dict(auto.AUTO_QUANTIZER_MAPPING))
    use_in_transformers()
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    quantized = {layer for layer in open_folder(out).layers if ".experts." not in layer}
    with torch.no_grad():
        assert close(model(IDS).logits, dense_logits(out, tmp_path))
    # and they are still packed after a forward, q/k/v in one, gate/up with the gate in it
    packed = {n for n, m in model.named_modules() if isinstance(m, QuantLinear | LinearRows)}
    for name in [n for n, m in model.named_modules() if isinstance(m, GatedProduct)]:
        mlp = name.removesuffix(".gate_up_proj")
        packed = packed - {name} | {f"{mlp}.gate_proj", f"{mlp}.up_proj"}
    assert {n for n in packed if not n.endswith(".product.linear")} == quantized


FORMATS = [
    {"format": "gptq"},
    {"format": "gptq-v2", "sym": False, "bits": 3},
    {"format": "awq", "sym": False},
    {"format": "compressed-tensors", "sym": False, "group": -1},
    {"format": "compressed-tensors", "bits": 8, "group": 32},
    {"format": "gptq", "rules": [{"match": "re:.*mlp.*", "bits": 8}]},
]


@pytest.mark.parametrize("recipe", FORMATS, ids=str)
def test_every_format_runs(recipe, tmp_path):
    out = tmp_path / "out"
    quantize(
        build("llama", tmp_path / "model"),
        out,
        make_recipe(method="rtn", device="cpu", **{"group": 64} | recipe),
    )
    with torch.no_grad():
        assert close(load(out, device="cpu")(IDS).logits, dense_logits(out, tmp_path))


def siblings(names):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(128, n) for name, n in names.items()})
    patch_model(model, QuantScheme(4, 64))
    return model


QKV = {"q_proj": 64, "k_proj": 32, "v_proj": 32}


@pytest.mark.parametrize("order", list(permutations(QKV)), ids="-".join)
@torch.no_grad()
def test_siblings_share_a_product_and_nothing_is_kept(order):
    """Against the linears one by one, in any order, and with an x that is then overwritten."""
    model = siblings(QKV | {"o_proj": 64})
    x = torch.randn(2, 3, 128)
    inputs = [torch.randn(2, 3, 128) for _ in range(3)]
    truth = [{name: model[name](each) for name in order} for each in inputs]
    share_products(model)
    assert [type(module) for module in model.values()] == [LinearRows] * 3 + [QuantLinear]
    product = model["q_proj"].product
    calls = []
    product.linear.register_forward_hook(lambda *_: calls.append(1))
    for each, expected in zip(inputs, truth, strict=True):
        x.copy_(each)
        for name in order:
            assert close(model[name](x), expected[name])
        assert product.pending == (None, None, ())
    assert len(calls) == 3


@torch.no_grad()
def test_siblings_with_inputs_of_their_own():
    model = siblings(QKV)
    x, other = torch.randn(2, 3, 128), torch.randn(3, 128)
    truth = {name: (model[name](x), model[name](other)) for name in QKV}
    share_products(model)
    for name in ("k_proj", "k_proj", "q_proj"):
        assert close(model[name](x), truth[name][0])
    for name in ("k_proj", "v_proj"):
        assert close(model[name](other), truth[name][1])
    # taken before, so it is a new product, whatever became of x
    x.zero_()
    assert close(model["k_proj"](x), model["k_proj"](torch.zeros(1, 128)).expand(2, 3, 32))


def test_sharing_frees_each_block_before_the_next(monkeypatch):
    """Weights are never there twice: a model of 40 GB must not need 80."""
    model = torch.nn.ModuleList(siblings(QKV) for _ in range(3))
    parts = [weakref.ref(module) for module in model.modules() if isinstance(module, QuantLinear)]
    alive = []
    stack = runtime._stack

    def counted(given):
        alive.append(sum(part() is not None for part in parts))
        return stack(given)

    monkeypatch.setattr(runtime, "_stack", counted)
    share_products(model)
    assert alive == [9, 6, 3]


class MLP(torch.nn.Module):
    """As transformers writes it, but for what a test changes."""

    def __init__(self, act_fn=torch.nn.SiLU, up_bits=4, bias=True):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(128, 96, bias) for _ in range(2))
        self.down_proj = torch.nn.Linear(96, 128)
        self.act_fn = act_fn()
        patch_model(self, QuantScheme(up_bits, 32), skip=lambda name: name != "up_proj")
        patch_model(self, QuantScheme(4, 32), skip=lambda name: name == "up_proj")

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Doubled(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + 1))


class UpGated(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class InPlace(MLP):
    def forward(self, x):
        up = self.up_proj(x)
        up.mul_(2)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


def hooked():
    mlp = MLP()
    mlp.register_forward_hook(lambda module, args, y: y * 2)
    return mlp


def wrapped():
    mlp = MLP()
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * 2
    return mlp


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_the_gate_of_an_mlp_becomes_part_of_its_product(bias):
    torch.manual_seed(0)
    model = torch.nn.Sequential(MLP(bias=bias), MLP(bias=bias))
    inputs = [torch.randn(2, tokens, 128) for tokens in (1, 8, 9)]
    truth = [model(x) for x in inputs]
    share_products(model)
    assert [type(module) for module in model] == [GatedMLP] * 2
    for x, y in zip(inputs, truth, strict=True):
        assert close(model(x), y)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for x, y in zip(inputs, truth, strict=True):
        assert close(compiled(x), y)


@torch.no_grad()
@pytest.mark.parametrize(
    "mlp",
    [lambda: MLP(torch.nn.GELU), lambda: MLP(up_bits=8), Doubled, UpGated, InPlace, hooked, wrapped],
    ids=["gelu", "unlike bits", "more than a product", "gate and up changed", "in place", "hook", "wrapper"],
)
def test_other_mlps_keep_their_own_code(mlp):
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(mlp()), torch.randn(3, 128)
    truth = model(x)
    share_products(model)
    assert not any(isinstance(module, GatedProduct) for module in model.modules())
    assert close(model(x), truth)


def test_siblings_of_unlike_kinds_stay_apart():
    model = torch.nn.ModuleDict({"gate_proj": torch.nn.Linear(128, 32, bias=False)})
    model["up_proj"] = torch.nn.Linear(128, 32)
    patch_model(model, QuantScheme(4, 64))
    share_products(model)
    assert all(isinstance(module, QuantLinear) for module in model.values())


def test_siblings_on_devices_of_their_own_stay_apart():
    model = siblings(QKV)
    model["k_proj"].to("meta")
    share_products(model)
    assert all(isinstance(module, QuantLinear) for module in model.values())


@torch.no_grad()
def test_packed_linears_bear_the_hooks_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    model, x = siblings(QKV | {"o_proj": 64}), torch.randn(2, 128)
    truth = {name: module(x) for name, module in model.items()}
    share_products(model)
    accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=True)
    assert all(bias.is_meta for bias in model.parameters())
    for name, module in model.items():
        assert close(module(x), truth[name])


def test_loaded_model_compiles_in_one_graph(llama_folder, tmp_path):
    quantize(llama_folder, tmp_path / "out", make_recipe(method="rtn", device="cpu"))
    model = load(tmp_path / "out", device="cpu")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen2, biases"])
@pytest.mark.parametrize("recipe", [{}, {"sym": False}, {"bits": 8}], ids=str)
def test_on_a_gpu_as_on_the_cpu(name, recipe, tmp_path, gpu):
    """fp16 against fp32 with the same weights: 2^-11 a rounding, over two layers."""
    out = tmp_path / "out"
    quantize(
        build(name, tmp_path / "model"), out, make_recipe(method="rtn", device="cpu", group=64, **recipe)
    )
    with torch.no_grad():
        truth = load(out, device="cpu", dtype=torch.float32)(IDS).logits
        model = load(out, device="cuda", dtype=torch.float16)
        moved = load(out, device="cpu", dtype=torch.float16).to(gpu)
        for placed in (model, moved):
            y = placed(IDS.to(gpu)).logits.float().cpu()
            assert (y - truth).norm() <= 0.01 * truth.norm()
        back, there = model.to("cpu").float(), load(out, device="cpu", dtype=torch.float16).float()
        assert close(back(IDS).logits, there(IDS).logits)


@pytest.mark.gpu
def test_a_cuda_graph_replays_the_products(gpu):
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 256, dtype=torch.float16)
    holder = torch.nn.Sequential(linear)
    patch_model(holder, QuantScheme(4, 128))
    layer = holder.to(gpu)[0]
    x = torch.randn(1, 512, device=gpu, dtype=torch.float16)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        # slices of K may be added up in another order
        assert (y - layer(x)).norm() <= 2e-3 * y.norm()


@pytest.mark.gpu
def test_tuned_configs_are_taken_or_refused_aloud(llama_folder, tmp_path, gpu):
    quantize(llama_folder, tmp_path / "out", make_recipe(method="rtn", device="cpu"))
    (tmp_path / "out" / "lowbit_kernels.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"lowbit_kernels\.json: not a table"):
        load(tmp_path / "out", device="cuda")


def test_loaded_model_generates_and_keeps_its_generation_config(llama_folder, tmp_path):
    settings = json.dumps({"max_new_tokens": 5, "do_sample": False, "eos_token_id": 511, "pad_token_id": 1})
    (llama_folder / "generation_config.json").write_text(settings)
    quantize(llama_folder, tmp_path / "out", make_recipe(method="rtn", device="cpu"))
    model = load(tmp_path / "out", device="cpu")
    assert model.dtype == torch.bfloat16
    assert model.generate(IDS[:1]).shape[1] <= 8 + 5
    assert model.generation_config.max_new_tokens == 5


def test_what_cannot_be_loaded_says_why(llama_folder, tmp_path):
    with pytest.raises(SourceError, match="not quantized"):
        load(llama_folder)
    with pytest.raises(SourceError, match="no such folder"):
        load(tmp_path / "absent")
    quantize(llama_folder, tmp_path / "out", make_recipe(method="rtn", device="cpu"))
    (tmp_path / "out" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(SourceError, match="lowbit verify"):
        load(tmp_path / "out")


def test_patch_rounds_every_linear_in_place_but_the_head(llama_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()
    truth = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()
    outcome = patch_model(model, QuantScheme(4, 128), skip=lambda name: "layers.1.mlp" in name)
    assert outcome["lm_head"] == "the output layer"
    assert outcome["model.layers.1.mlp.up_proj"] == "skipped"
    patched = [name for name, reason in outcome.items() if reason is None]
    assert len(patched) == 11
    for name in patched:
        linear = truth.get_submodule(name)
        codes, scale, _ = quantize_groups(linear.weight.data, 4, 128, True, torch.float32)
        linear.weight.data = dequantize(codes, scale, None, 4)
        assert isinstance(model.get_submodule(name), QuantLinear)
    with torch.no_grad():
        assert close(model(IDS).logits, truth(IDS).logits)


def test_models_of_packed_linears_refuse_to_be_saved_without_them(llama_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    quantize(llama_folder, tmp_path / "out", make_recipe(method="rtn", device="cpu"))
    patched = AutoModelForCausalLM.from_pretrained(llama_folder)
    untouched = AutoModelForCausalLM.from_pretrained(llama_folder)
    patch_model(patched, QuantScheme(4, 128))
    patch_model(untouched, QuantScheme(4, 128), skip=lambda name: True)
    for model in (load(tmp_path / "out"), patched):
        with pytest.raises(OutputError, match="lowbit quantize"):
            model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    untouched.save_pretrained(tmp_path / "saved")


def test_a_loaded_model_does_not_ask_to_be_quantized(llama_folder, tmp_path):
    """lm_eval hands such a config to the quantizers of transformers, which want their packages."""
    quantize(llama_folder, tmp_path / "out", make_recipe(method="rtn", device="cpu"))
    assert not hasattr(load(tmp_path / "out").config, "quantization_config")


def test_patch_leaves_what_groups_do_not_fill():
    model = torch.nn.Sequential(torch.nn.Linear(96, 32), torch.nn.Linear(32, 32))
    outcome = patch_model(model, QuantScheme(4, 64))
    assert set(outcome) == {"0", "1"}
    assert all("not a multiple of group size 64" in reason for reason in outcome.values())
    assert patch_model(model, QuantScheme(4, -1, symmetric=False)) == {"0": None, "1": None}


def test_stacked_layers_of_unlike_schemes_are_refused(tmp_path):
    rules = [{"match": "re:.*experts\\.0\\.up_proj", "bits": 8}]
    recipe = make_recipe(method="rtn", device="cpu", group=64, rules=rules, allow_mixed_fused=True)
    quantize(build("qwen3_moe", tmp_path / "model"), tmp_path / "out", recipe)
    with pytest.raises(PlanError, match="another scheme"):
        load(tmp_path / "out", device="cpu")

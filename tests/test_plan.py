"""What plan decides for each tensor, from names, shapes and config alone; no weight exists in these tests."""

from math import prod
from types import SimpleNamespace

import pytest

from lowbit.errors import PlanError, RecipeError
from lowbit.plan import make_plan
from lowbit.recipe import Recipe, Rule, make_recipe, matches

BYTES = {"F16": 2, "BF16": 2, "F32": 4, "F8_E4M3": 1}


def source(shapes, config=None, dtype="F16"):
    """A source with these tensors ({name: shape}) and nothing behind them."""
    tensors = {
        name: SimpleNamespace(
            name=name, shape=shape, dtype=dtype, nbytes=prod(shape) * BYTES[dtype], file="model.safetensors"
        )
        for name, shape in shapes.items()
    }
    config = config or {"model_type": "llama"}
    return SimpleNamespace(name="model", config=config, tensors=tensors, notes=())


def llama(layers=2, hidden=256, intermediate=512, **more):
    shapes = {"model.embed_tokens.weight": (512, hidden)}
    for i in range(layers):
        block = f"model.layers.{i}."
        shapes |= {block + f"self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {block + f"mlp.{name}_proj.weight": (intermediate, hidden) for name in ("gate", "up")}
        shapes[block + "mlp.down_proj.weight"] = (hidden, intermediate)
        shapes[block + "input_layernorm.weight"] = (hidden,)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (512, hidden)}
    config = {"model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers}
    return source(shapes | more.pop("extra", {}), config, **more)


def reasons(plan):
    return {copy.name: copy.reason for copy in plan.copies}


def test_every_decoder_linear_and_nothing_else_is_quantized():
    model = llama()
    plan = make_plan(model, Recipe())
    assert len(plan.layers) == 14
    assert all(str(layer.scheme) == "int4 sym g128" for layer in plan.layers)
    assert {layer.source for layer in plan.layers} | set(reasons(plan)) == set(model.tensors)
    assert plan.dense_linears == ("lm_head",)
    # words and scales of 4 attention and 3 MLP layers, twice, counted by hand
    weights = 2 * (4 * 256 * 256 + 3 * 256 * 512)
    assert sum(layer.packed_bytes for layer in plan.layers) == weights // 2 + weights // 128 * 2
    assert plan.bits_per_weight == 4 + 16 / 128


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("model.layers.0.mlp.gate.weight", (4, 256), "router"),
        ("model.layers.0.block_sparse_moe.gate.weight", (4, 256), "router"),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 256), "router"),
        ("model.vision_tower.layers.0.q_proj.weight", (256, 256), "part of a vision or audio tower"),
        ("visual.blocks.0.attn.qkv.weight", (768, 256), "part of a vision or audio tower"),
        ("multi_modal_projector.linear_1.weight", (256, 256), "part of a vision or audio tower"),
        ("embed_out.weight", (512, 256), "output head"),
        ("transformer.wte.weight", (512, 256), "embedding"),
        ("model.decoder.project_in.weight", (256, 128), "outside the decoder blocks"),
        ("model.layers.2.mtp.eh_proj.weight", (256, 512), "not one of the 2 decoder blocks"),
        ("model.layers.0.mixer.conv1d.weight", (256, 1, 4), "not a matrix"),
        ("model.layers.0.self_attn.q_proj.bias", (256,), "not a matrix"),
    ],
)
def test_what_stays_dense_says_why(name, shape, reason):
    assert reasons(make_plan(llama(extra={name: shape}), Recipe()))[name] == reason


def test_an_unknown_3d_weight_is_refused_by_name_and_can_be_excluded():
    model = llama(extra={"model.layers.0.moe.banks.weight": (4, 256, 256)})
    with pytest.raises(PlanError, match=r"banks\.weight: 3-D weight \[4, 256, 256\].*--exclude"):
        make_plan(model, Recipe())
    plan = make_plan(model, Recipe(exclude=("model.layers.0.moe.banks",)))
    assert reasons(plan)["model.layers.0.moe.banks.weight"] == "excluded"


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_become_the_layers_of_per_expert_checkpoints(transposed):
    hidden, inner, experts = 256, 128, 3
    gate_up, down = (experts, 2 * inner, hidden), (experts, hidden, inner)
    if transposed:
        gate_up, down = (experts, hidden, 2 * inner), (experts, inner, hidden)
    block = "model.layers.0.mlp.experts"
    shapes = {f"{block}.gate_up_proj": gate_up, f"{block}.down_proj": down}
    kind = "llama4_text" if transposed else "qwen3_moe"
    config = {"model_type": kind, "hidden_size": hidden, "num_hidden_layers": 1}
    plan = make_plan(source(shapes, config), Recipe())
    layers = {layer.name: layer for layer in plan.layers}
    assert len(layers) == 3 * experts
    up = layers[f"{block}.1.up_proj"]
    assert (up.shape, up.expert, up.rows, up.transposed) == (
        (inner, hidden),
        1,
        (inner, 2 * inner),
        transposed,
    )
    assert layers[f"{block}.2.down_proj"].shape == (hidden, inner)
    assert sum(layer.source_bytes for layer in plan.layers) == plan.source_bytes == 2 * 9 * inner * hidden


def test_experts_whose_orientation_cannot_be_told_are_refused():
    shapes = {"model.layers.0.mlp.experts.gate_up_proj": (4, 256, 256)}
    with pytest.raises(PlanError, match="cannot tell inputs from outputs"):
        make_plan(source(shapes, {"model_type": "new_moe", "hidden_size": 256}), Recipe())


def test_fused_experts_that_do_not_halve_are_refused():
    experts = {"model.layers.0.mlp.experts.gate_up_proj": (4, 385, 256)}
    with pytest.raises(PlanError, match="385 rows are not gate_proj and up_proj"):
        make_plan(llama(extra=experts), Recipe())
    plan = make_plan(llama(extra=experts), Recipe(exclude=("gate_up_proj",)))
    assert reasons(plan)["model.layers.0.mlp.experts.gate_up_proj"] == "excluded"


def test_conv1d_is_transposed():
    shapes = {"h.0.attn.c_attn.weight": (256, 768), "h.0.mlp.c_proj.weight": (1024, 256)}
    plan = make_plan(source(shapes, {"model_type": "gpt2"}), Recipe())
    assert [(layer.shape, layer.transposed) for layer in plan.layers] == [
        ((768, 256), True),
        ((256, 1024), True),
    ]
    assert "Conv1D" in plan.notes[-1]


# ---- groups that do not divide


def test_smaller_group_is_chosen_and_told():
    plan = make_plan(llama(hidden=576, intermediate=1536), Recipe())
    groups = {layer.name.rpartition(".")[2]: layer.scheme.group_size for layer in plan.layers}
    assert groups == {**{f"{p}_proj": 64 for p in ("q", "k", "v", "o", "gate", "up")}, "down_proj": 128}
    assert plan.notes == ("12 layers: in_features 576 is not a multiple of 128: group 64",)


def test_skip_takes_fused_siblings_along_and_error_names_the_layer():
    shapes = {f"model.layers.0.self_attn.{p}_proj.weight": (256, 256) for p in "qkv"}
    shapes |= {"model.layers.0.mlp.w1.weight": (320, 320), "model.layers.0.mlp.w3.weight": (320, 320)}
    plan = make_plan(source(shapes), Recipe(on_indivisible="skip"))
    assert set(reasons(plan).values()) == {"in_features 320 is not a multiple of 128"}
    assert len(plan.layers) == 3
    with pytest.raises(PlanError, match=r"mlp\.w1: in_features 320"):
        make_plan(source(shapes), Recipe(on_indivisible="error"))


def test_who_cannot_load_zero_points_is_told_before_the_work():
    (note,) = make_plan(llama(), Recipe(sym=False)).notes
    assert "dequantize=True" in note
    assert make_plan(llama(), Recipe(sym=True)).notes == ()
    # what a method does not read is not taken in silence
    (note,) = make_plan(llama(), Recipe(method="rtn", calib="text.txt", samples=8)).notes
    assert note == "--calib, --samples: not used, rtn reads no calibration text"
    assert make_plan(llama(), Recipe(method="gptq", calib="text.txt", samples=8)).notes == ()
    assert make_plan(llama(), Recipe(sym=False, format="awq")).notes == ()


def test_nothing_quantized_is_a_failure():
    with pytest.raises(PlanError, match="14 linear layers: in_features 200 is not a multiple of 32"):
        make_plan(llama(hidden=200, intermediate=200), Recipe())


def test_experts_of_a_block_share_the_smallest_group():
    block = "model.layers.0.mlp.experts."
    shapes = {}
    for e in range(2):
        shapes |= {f"{block}{e}.{p}_proj.weight": (192, 256) for p in ("gate", "up")}
        shapes[f"{block}{e}.down_proj.weight"] = (256, 192)
    plan = make_plan(source(shapes), Recipe())
    assert {layer.scheme.group_size for layer in plan.layers} == {64}
    assert plan.layers[0].fallback == "fused with a layer of group 64"


# ---- include, exclude, rules


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("mlp.down_proj", "model.layers.0.mlp.down_proj.weight", True),
        ("down_proj", "model.layers.0.mlp.down_proj.weight", True),
        ("proj", "model.layers.0.mlp.down_proj.weight", False),
        ("re:.*down", "model.layers.0.mlp.down_proj.weight", True),
        ("re:down", "model.layers.0.mlp.down_proj.weight", False),
        (r"re:.*\.weight$", "model.layers.0.mlp.down_proj.weight", True),
        ("kv_proj", "model.layers.0.qkv_proj.weight", False),
        ("lm_head", "lm_head.weight", True),
    ],
)
def test_patterns(pattern, name, expected):
    assert matches(pattern, name) is expected


@pytest.mark.parametrize("flag", ["include", "exclude"])
def test_a_pattern_without_a_match_is_an_error(flag):
    with pytest.raises(RecipeError, match=rf"--{flag} 're:\.\*router\.\*' matches no tensor"):
        make_plan(llama(), Recipe(**{flag: ("re:.*router.*",)}))


def test_include_leaves_unknown_layouts_alone():
    model = llama(extra={"model.layers.0.moe.banks.weight": (4, 256, 256)})
    plan = make_plan(model, Recipe(include=("down_proj",)))
    assert reasons(plan)["model.layers.0.moe.banks.weight"] == "not included"
    assert "model.layers.0.moe.banks" not in plan.dense_linears


@pytest.mark.parametrize("shape", [(0, 256), (256, 0), (0, 0)])
@pytest.mark.parametrize("group", [128, -1])
def test_an_empty_matrix_is_copied(shape, group):
    name = "model.layers.0.mlp.spare_proj.weight"
    for include in ((), ("re:.*proj",)):
        plan = make_plan(llama(extra={name: shape}), Recipe(group=group, include=include))
        assert reasons(plan)[name] == "empty"


@pytest.mark.parametrize(
    ("format", "suffix"), [("compressed-tensors", "weight_scale"), ("gptq", "scales"), ("gptq", "g_idx")]
)
def test_packed_tensors_must_not_take_a_name_that_is_taken(format, suffix):
    taken = f"model.layers.0.mlp.down_proj.{suffix}"
    with pytest.raises(PlanError, match=rf"{taken}.*--exclude model\.layers\.0\.mlp\.down_proj$"):
        make_plan(llama(extra={taken: (256,)}), Recipe(format=format))


def test_fused_and_separate_experts_of_one_name_are_refused():
    experts = {
        "model.layers.0.mlp.experts.down_proj": (4, 256, 512),
        "model.layers.0.mlp.experts.3.down_proj.weight": (256, 512),
    }
    with pytest.raises(PlanError, match=r"experts\.3\.down_proj\.weight_packed, which is part of"):
        make_plan(llama(extra=experts), Recipe())


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("rtn", {"iterations": 3}, "no option 'iterations'"),
        ("hqq", {"iterations": "3"}, "iterations is '3', expected int"),
        ("hqq", {"iterations": True}, "iterations is True, expected int"),
        ("gptq", {"damping": "much"}, "damping is 'much', expected float"),
        ("gptq", {"damping": 99}, "damping 99 is not between"),
    ],
)
def test_options_of_a_solver_are_checked(method, options, words):
    with pytest.raises(RecipeError, match=words):
        make_plan(llama(), Recipe(method=method, solver=options))


def test_include_replaces_the_selection_and_reaches_the_head():
    plan = make_plan(llama(), Recipe(include=("lm_head", "down_proj")))
    assert [layer.name for layer in plan.layers] == [
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
        "lm_head",
    ]
    assert reasons(plan)["model.layers.0.self_attn.q_proj.weight"] == "not included"


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(exclude=("model.layers.0.self_attn.k_proj",)),
        Recipe(rules=(Rule(match="up_proj", bits=8),)),
        Recipe(rules=(Rule(match="model.layers.1.self_attn.v_proj", skip=True),)),
    ],
)
def test_unlike_schemes_in_a_fused_launch_are_refused(recipe):
    with pytest.raises(PlanError, match="--allow-mixed-fused"):
        make_plan(llama(), recipe)
    assert make_plan(llama(), recipe.model_copy(update={"allow_mixed_fused": True}))


def test_rules_override_the_recipe_for_what_they_match():
    plan = make_plan(llama(), Recipe(rules=(Rule(match="mlp.down_proj", bits=8, group=-1),)))
    schemes = {layer.name.rpartition(".")[2]: str(layer.scheme) for layer in plan.layers}
    assert schemes["down_proj"] == "int8 sym row"
    assert schemes["q_proj"] == "int4 sym g128"


# ---- refusals


def test_an_encoder_is_not_a_decoder():
    model = source({"encoder.layer.0.attention.self.query.weight": (384, 384)}, {"model_type": "bert"})
    with pytest.raises(PlanError, match="not a causal language model"):
        make_plan(model, Recipe())


def test_a_weight_that_is_already_low_precision_is_refused():
    with pytest.raises(PlanError, match=r"q_proj\.weight: dtype F8_E4M3"):
        make_plan(llama(dtype="F8_E4M3"), Recipe())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"bits": 5}, "bits: use one of 2, 3, 4, 8"),
        ({"group": 100}, "group: use one of"),
        ({"method": "awq"}, "method: "),
        ({"colour": 1}, "colour: unknown key"),
        ({"exclude": ("re:(",)}, "not a regular expression"),
    ],
)
def test_a_bad_recipe_names_the_key(keys, message):
    with pytest.raises(RecipeError, match=message):
        make_recipe(**keys)


def test_flags_win_over_the_recipe_file(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("bits: 8\ngroup: 64\n")
    recipe = make_recipe(file, bits=4, group=None)
    assert (recipe.bits, recipe.group) == (4, 64)
    file.write_text("- bits\n")
    with pytest.raises(RecipeError, match="expected keys"):
        make_recipe(file)

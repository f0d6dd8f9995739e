"""The bytes of GPTQ and AWQ files, against loops written from the formats' definitions and golden words."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from lowbit import decode as second_route
from lowbit.checkpoint.formats import FORMATS, awq, format_of, gptq
from lowbit.checkpoint.formats.patterns import patterns
from lowbit.checkpoint.source import open_source
from lowbit.errors import PlanError, SourceError
from lowbit.plan import LayerPlan, make_plan
from lowbit.recipe import make_recipe
from lowbit.scheme import PackedTensor, QuantScheme
from lowbit_kernels.layout import pack_words

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def make_packed(scheme, n, k, seed=0):
    """Random codes and scales; zero-points that take every value, 0 next to the largest."""
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, scheme.max_code + 1, (n, k), generator=rng, dtype=torch.uint8)
    scale = torch.rand((n, scheme.groups(k)), generator=rng).to(torch.float16) + 0.01
    zero = torch.arange(n * scheme.groups(k)).view(n, -1).flip(0) % (scheme.max_code + 1)
    zero[0, :], zero[1, :] = 0, scheme.max_code
    zero_point = None if scheme.symmetric else zero.to(torch.uint8)
    return codes, PackedTensor(pack_words(codes, scheme.bits), scale, zero_point, scheme, k)


def bits_of(words):
    """A list of int32 words as one Python integer, the first word lowest."""
    return sum((int(word) & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words))


def assert_same(a, b):
    assert torch.equal(a.words, b.words)
    assert torch.equal(a.scale, b.scale)
    assert (a.zero_point is None) == (b.zero_point is None)
    assert a.zero_point is None or torch.equal(a.zero_point, b.zero_point)


GPTQ_CASES = [
    (QuantScheme(bits, group, symmetric), n, k, less)
    for bits, group, symmetric, (n, k) in itertools.product(
        (2, 3, 4, 8), (32, -1), (True, False), ((64, 96), (32, 32))
    )
    for less in ((1, 0) if symmetric else (0,))
]


@pytest.mark.parametrize(("scheme", "n", "k", "less"), GPTQ_CASES, ids=str)
def test_gptq_words_follow_the_definition(scheme, n, k, less):
    codes, packed = make_packed(scheme, n, k)
    out = gptq.encode("m", packed, less)
    b, mask = scheme.bits, scheme.max_code
    assert out["m.qweight"].shape == (k * b // 32, n)
    assert out["m.qzeros"].shape == (scheme.groups(k), n * b // 32)
    for column in (0, 1, n - 1):
        stream = bits_of(out["m.qweight"][:, column])
        assert [(stream >> (b * i)) & mask for i in range(k)] == codes[column].tolist()
    for group in range(scheme.groups(k)):
        stream = bits_of(out["m.qzeros"][group])
        found = [(stream >> (b * i)) & mask for i in range(n)]
        zero = [2 ** (b - 1)] * n if packed.zero_point is None else packed.zero_point[:, group].tolist()
        assert found == [z - less for z in zero]
    assert out["m.g_idx"].tolist() == [i // scheme.width(k) for i in range(k)]
    assert torch.equal(out["m.scales"].T, packed.scale)


@pytest.mark.parametrize(("scheme", "n", "k", "less"), GPTQ_CASES, ids=str)
def test_gptq_comes_back_and_the_second_route_agrees(scheme, n, k, less):
    codes, packed = make_packed(scheme, n, k)
    out = gptq.encode("m", packed, less)
    assert_same(gptq.decode("m", out.__getitem__, scheme, (n, k), less), packed)
    parts = {name.removeprefix("m."): tensor for name, tensor in out.items()}
    other, order = second_route.decode_layer("gptq" if less else "gptq-v2", parts, scheme, (n, k))
    assert order is None
    assert torch.equal(other.codes, codes)
    assert other.zero_point is None or torch.equal(other.zero_point, packed.zero_point)


def test_gptq_golden_words():
    """Symmetric zero-points as AutoGPTQ (version 1) and GPTQModel (version 2) write them."""
    codes = (torch.arange(32) % 16).to(torch.uint8).repeat(8, 1)
    scheme = QuantScheme(4, 32)
    packed = PackedTensor(pack_words(codes, 4), torch.ones(8, 1), None, scheme, 32)
    first, second = gptq.encode("m", packed, 1), gptq.encode("m", packed, 0)
    assert first["m.qzeros"].tolist() == [[0x77777777]]
    assert second["m.qzeros"].view(torch.uint8).tolist() == [[0x88] * 4]
    assert first["m.qweight"][0].tolist() == [0x76543210] * 8


@pytest.mark.parametrize("group", [32, 64, -1])
def test_awq_words_follow_the_definition(group):
    scheme = QuantScheme(4, group, symmetric=False)
    codes, packed = make_packed(scheme, 24, 64)
    out = awq.encode("m", packed)
    for row, word in itertools.product((0, 17, 63), range(3)):
        stored = int(out["m.qweight"][row, word]) & 0xFFFFFFFF
        found = [(stored >> (4 * i)) & 15 for i in range(8)]
        assert found == [int(codes[8 * word + AWQ_ORDER[i], row]) for i in range(8)]
    stored = int(out["m.qzeros"][0, 0]) & 0xFFFFFFFF
    assert [(stored >> (4 * i)) & 15 for i in range(8)] == packed.zero_point[AWQ_ORDER, 0].tolist()
    assert_same(awq.decode("m", out.__getitem__, scheme, (24, 64)), packed)
    parts = {name.removeprefix("m."): tensor for name, tensor in out.items()}
    other, _ = second_route.decode_layer("awq", parts, scheme, (24, 64))
    assert torch.equal(other.codes, codes)
    assert torch.equal(other.zero_point, packed.zero_point)


def test_awq_golden_word():
    codes = torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 32)
    scheme = QuantScheme(4, 32, symmetric=False)
    zero = torch.zeros((8, 1), dtype=torch.uint8)
    out = awq.encode("m", PackedTensor(pack_words(codes, 4), torch.ones(8, 1), zero, scheme, 32))
    assert out["m.qweight"][:, 0].tolist() == [0x75316420] * 32


def test_reordered_columns_and_false_zeros_are_refused():
    scheme = QuantScheme(4, 32)
    _, packed = make_packed(scheme, 32, 64)
    out = gptq.encode("m", packed, 1)
    out["m.g_idx"] = out["m.g_idx"].flip(0)
    with pytest.raises(SourceError, match=r"m\.g_idx.*desc_act"):
        gptq.decode("m", out.__getitem__, scheme, (32, 64), 1)
    out = gptq.encode("m", packed, 1)
    with pytest.raises(SourceError, match=r"m\.qzeros: not all 8"):
        gptq.decode("m", out.__getitem__, scheme, (32, 64), 0)


REFUSALS = [
    (awq.accepts, (QuantScheme(8, 128, False),), "holds 4 bits, not 8"),
    (awq.accepts, (QuantScheme(4, 128, True),), "--asym"),
    (awq.accepts, (QuantScheme(4, 128, False),), None),
    (
        awq.accepts_layer,
        (QuantScheme(4, 128, False), 12, 128),
        "out_features to be a multiple of 8, it is 12",
    ),
    (awq.accepts_layer, (QuantScheme(4, 128, False), 16, 128), None),
    (gptq.accepts_v1, (QuantScheme(4, 128, False),), "gptq-v2"),
    (gptq.accepts_v1, (QuantScheme(4, 128, True),), None),
    (gptq.accepts_v2, (QuantScheme(4, 128, False),), None),
    (gptq.accepts_layer, (QuantScheme(4, 128), 12, 128), "out_features to be a multiple of 8"),
    (gptq.accepts_layer, (QuantScheme(2, -1), 24, 64), "out_features to be a multiple of 16"),
    (gptq.accepts_layer, (QuantScheme(3, -1), 64, 48), "in_features to be a multiple of 32"),
    (gptq.accepts_layer, (QuantScheme(8, 32), 8, 96), None),
]


@pytest.mark.parametrize(("question", "arguments", "answer"), REFUSALS)
def test_refusals_say_why(question, arguments, answer):
    found = question(*arguments)
    assert (found is None) if answer is None else (answer in found)


def layer(name, scheme):
    return LayerPlan(name, (64, 64), scheme, "rtn", f"{name}.weight", 1)


def test_gptq_config_tells_every_module_its_scheme():
    """By the matching of the readers: the first `dynamic` rule that matches the start of the name."""
    four, eight = QuantScheme(4, 128), QuantScheme(8, 32)
    names = [f"model.layers.{i}.mlp.{p}_proj" for i in range(12) for p in ("gate", "up", "down")]
    schemes = {name: eight if ".1." in name or "down" in name else four for name in names}
    dense = ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(12)), "model.layers.2.self_attn.q_proj"]
    config = gptq.quantization_config([layer(n, s) for n, s in schemes.items()], dense, "gptq")
    assert (config["bits"], config["group_size"], config["sym"], config["lm_head"]) == (4, 128, True, False)

    def reader(name):
        for key, fields in config["dynamic"].items():
            if re.match(key[2:], name):
                return None if key.startswith("-:") else (fields["bits"], fields["group_size"])
        return config["bits"], config["group_size"]

    scheme_of = gptq.read_config(config)
    for name, scheme in schemes.items():
        assert reader(name) == (scheme.bits, scheme.group_size), name
        assert scheme_of(name, "Linear") == scheme
    for name in dense:
        assert scheme_of(name, "Linear") is None
        assert name == "lm_head" or reader(name) is None
    assert reader("model.layers.1.mlp.gate_up_proj") == (8, 32), "vLLM asks with the fused name"
    assert reader("model.layers.2.self_attn.qkv_proj") is None
    assert reader("model.layers.21.mlp.up_proj") == (4, 128)


def test_gptq_config_of_one_scheme_has_no_rules():
    config = gptq.quantization_config([layer("a.b", QuantScheme(4, 128))], ["lm_head"], "gptq_v2")
    assert "dynamic" not in config
    assert config["checkpoint_format"] == "gptq_v2"


def test_config_names_its_format():
    for name, symmetric in (("compressed-tensors", True), ("gptq", True), ("gptq-v2", False), ("awq", False)):
        config = FORMATS[name].quantization_config([layer("a.b", QuantScheme(4, 128, symmetric))], [])
        assert format_of(config).name == name
        assert FORMATS[name].read_config(config)("a.b", "Linear") == QuantScheme(4, 128, symmetric)
    assert format_of({"quant_method": "gptq"}).name == "gptq"
    with pytest.raises(SourceError, match="'bitsandbytes' is not one of"):
        format_of({"quant_method": "bitsandbytes"})


MALFORMED = [
    ("gptq", {"bits": 5, "group_size": 128, "sym": True}, "bits 5"),
    ("gptq", {"bits": 4, "group_size": 128}, "malformed.*sym"),
    ("gptq", {"bits": 4, "group_size": 128, "sym": True, "dynamic": {"+:(": {}}}, "malformed"),
    ("awq", {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemv"}, "'gemv' is not known"),
    ("awq", {"bits": 4, "zero_point": True}, "malformed.*group_size"),
]


@pytest.mark.parametrize(("name", "config", "says"), MALFORMED, ids=str)
def test_malformed_configs_are_refused(name, config, says):
    with pytest.raises(SourceError, match=says):
        FORMATS[name].read_config(config)


def test_tensors_of_the_wrong_shape_or_dtype_are_named():
    scheme = QuantScheme(4, 32, False)
    _, packed = make_packed(scheme, 32, 64)
    for name, part, other in (("gptq-v2", "qzeros", torch.int64), ("awq", "qweight", torch.uint8)):
        out = FORMATS[name].encode("m", packed)
        for wrong in (out[f"m.{part}"][:-1], out[f"m.{part}"].to(other)):
            bad = out | {f"m.{part}": wrong}
            with pytest.raises(SourceError, match=rf"m\.{part}: "):
                FORMATS[name].decode("m", bad.__getitem__, scheme, (32, 64))


def test_awq_config_refuses_what_substrings_confuse():
    scheme = QuantScheme(4, 128, False)
    config = awq.quantization_config([layer("m.0.up_proj", scheme)], ["lm_head", "m.0.gate"])
    scheme_of = awq.read_config(config)
    assert scheme_of("m.0.up_proj", "Linear") == scheme
    assert scheme_of("m.0.gate", "Linear") is None
    with pytest.raises(PlanError, match=r"keep m\.0\.gate and quantize m\.0\.gate_proj"):
        awq.quantization_config([layer("m.0.gate_proj", scheme)], ["m.0.gate"])
    with pytest.raises(PlanError, match="one scheme"):
        awq.quantization_config([layer("a", scheme), layer("b", QuantScheme(4, 64, False))], [])


def test_patterns_match_the_names_and_no_other():
    every = [f"model.layers.{i}.mlp.{p}_proj" for i in range(13) for p in ("gate", "up", "down")]
    every += [f"model.layers.{i}.experts.{e}.w{w}" for i in range(3) for e in range(4) for w in (1, 2)]
    every += ["lm_head", "model.layers.1.mlp.gate", "layers.1"]
    chosen = [name for i, name in enumerate(every) if i % 3 or i % 5 == 0]
    found = patterns(chosen)
    assert len(found) < len(chosen) / 3
    assert {name for name in every if any(re.fullmatch(p, name) for p in found)} == set(chosen)


def test_layers_that_awq_cannot_mix_are_refused_in_the_plan(build_llama):
    """down_proj has 320 inputs, so its groups are 64: found before any weight is read."""
    with open_source(str(build_llama(intermediate_size=320))) as source:
        recipe = make_recipe(method="rtn", format="awq", sym=False)
        with pytest.raises(PlanError, match="--group 64"):
            make_plan(source, recipe)
        assert make_plan(source, make_recipe(method="rtn", format="awq", sym=False, group=64)).layers

"""compressed-tensors: golden bytes, a naive reader, its library's matchers, and transformers as loader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.checkpoint.formats import FORMATS
from lowbit.errors import SourceError
from lowbit.plan import LayerPlan
from lowbit.scheme import PackedTensor, QuantScheme
from lowbit_kernels.layout import pack_words
from lowbit_kernels.reference import dequantize, quantize_groups

FORMAT = FORMATS["compressed-tensors"]


def layer(name: str, scheme: QuantScheme, shape: tuple[int, int] = (8, 256)) -> LayerPlan:
    return LayerPlan(name, shape, scheme, "rtn", name + ".weight", 0)


def pack(weight: Tensor, scheme: QuantScheme) -> tuple[PackedTensor, Tensor]:
    """Return the packed weight and its dequantized values."""
    dtype = getattr(torch, scheme.scale_dtype)
    k = weight.shape[1]
    codes, scale, zero = quantize_groups(weight, scheme.bits, scheme.width(k), scheme.symmetric, dtype)
    packed = PackedTensor(pack_words(codes, scheme.bits), scale, zero, scheme, k)
    return packed, dequantize(codes, scale, zero, scheme.bits)


def naive(values: list[int], bits: int, count: int) -> list[int]:
    """Read count values of `bits` each from 32-bit words as one long number, lowest bits first."""
    number = sum((word % 2**32) << (32 * i) for i, word in enumerate(values))
    return [(number >> (bits * i)) % 2**bits for i in range(count)]


def test_golden_bytes_of_the_symmetric_grid() -> None:
    codes = torch.tensor(
        [[0, 1, 2, 3, 4, 5, 6, 7] * 4, [15, 14, 13, 12, 11, 10, 9, 8] * 4], dtype=torch.uint8
    )
    packed = PackedTensor(
        pack_words(codes, 4), torch.tensor([[0.5], [2.0]], dtype=torch.float16), None, QuantScheme(4, 32), 32
    )
    tensors = FORMAT.encode("a.b", packed)
    assert set(tensors) == {"a.b.weight_packed", "a.b.weight_scale", "a.b.weight_shape"}
    assert tensors["a.b.weight_packed"].numpy().tobytes().hex() == "10325476" * 4 + "efcdab89" * 4
    assert tensors["a.b.weight_scale"].numpy().tobytes().hex() == "0038" + "0040"
    assert tensors["a.b.weight_shape"].numpy().tobytes().hex() == "02" + "00" * 7 + "20" + "00" * 7
    assert tensors["a.b.weight_shape"].dtype == torch.int64


def test_golden_bytes_of_zero_points_along_outputs() -> None:
    """Zero-points of 9 outputs fill one word and start a second one, for each of two groups."""
    zero = torch.stack([torch.arange(9), 15 - torch.arange(9)], dim=1).to(torch.uint8)
    scheme = QuantScheme(4, 32, symmetric=False)
    packed = PackedTensor(torch.zeros(9, 8, dtype=torch.int32), torch.ones(9, 2), zero, scheme, 64)
    stored = FORMAT.encode("p", packed)["p.weight_zero_point"]
    assert stored.tolist() == [[0x76543210, 0x89ABCDEF - 2**32], [0x8, 0x7]]
    assert stored.dtype == torch.int32
    assert stored.is_contiguous()


def test_eight_bits_hold_four_codes_a_word() -> None:
    codes = torch.tensor([[1, 2, 3, 255] * 8], dtype=torch.uint8)
    packed = PackedTensor(pack_words(codes, 8), torch.ones(1, 1), None, QuantScheme(8, 32), 32)
    assert FORMAT.encode("p", packed)["p.weight_packed"].numpy().tobytes().hex() == "010203ff" * 8


CASES = [
    (bits, group, symmetric, n, k)
    for bits in (4, 8)
    for group in (32, 128, -1)
    for symmetric in (True, False)
    for n, k in ((16, 256), (7, 128), (33, 384))
]


@pytest.mark.parametrize(("bits", "group", "symmetric", "n", "k"), CASES)
def test_a_naive_reader_finds_the_weight(bits: int, group: int, symmetric: bool, n: int, k: int) -> None:
    scheme = QuantScheme(bits, group, symmetric)
    torch.manual_seed(bits * n)
    packed, truth = pack(torch.randn(n, k), scheme)
    tensors = FORMAT.encode("p", packed)
    assert FORMAT.accepts(scheme) is None
    assert {name.removeprefix("p.") for name in tensors} <= set(FORMAT.suffixes)
    codes = torch.tensor([naive(row, bits, k) for row in tensors["p.weight_packed"].tolist()])
    zero = torch.full((n, scheme.groups(k)), 2 ** (bits - 1))
    assert ("p.weight_zero_point" in tensors) is not symmetric
    if not symmetric:
        columns = tensors["p.weight_zero_point"].T.tolist()
        zero = torch.tensor([naive(column, bits, n) for column in columns]).T
    width = scheme.width(k)
    values = (codes - zero.repeat_interleave(width, 1)) * tensors["p.weight_scale"].float().repeat_interleave(
        width, 1
    )
    assert torch.equal(values, truth)
    again = FORMAT.decode("p", tensors.__getitem__, scheme, (n, k))
    assert torch.equal(again.words, packed.words)
    assert (again.zero_point is None) is symmetric
    assert symmetric or torch.equal(again.zero_point, packed.zero_point)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight_packed", lambda t: t[:, 1:]),
        ("weight_scale", lambda t: t[:-1]),
        ("weight_scale", lambda t: t.to(torch.int8)),
        ("weight_zero_point", lambda t: t.T),
        ("weight_shape", lambda t: t + 1),
    ],
)
def test_decode_refuses_tensors_of_another_layer(name: str, change: Callable[[Tensor], Tensor]) -> None:
    scheme = QuantScheme(4, 32, symmetric=False)
    tensors = FORMAT.encode("p", pack(torch.randn(24, 128), scheme)[0])
    tensors[f"p.{name}"] = change(tensors[f"p.{name}"])
    with pytest.raises(SourceError, match=f"p.{name}: "):
        FORMAT.decode("p", tensors.__getitem__, scheme, (24, 128))


@pytest.mark.parametrize("bits", [2, 3])
def test_widths_without_one_layout_are_refused(bits: int) -> None:
    reason = FORMAT.accepts(QuantScheme(bits))
    assert reason is not None
    assert f"{bits} bits" in reason


NAMES = [
    f"model.layers.{i}.{part}"
    for i in range(12)
    for part in (
        "self_attn.q_proj",
        "self_attn.qkv_proj",
        "mlp.gate",
        "mlp.gate_proj",
        "mlp.experts.0.up_proj",
        "mlp.experts.1.up_proj",
        "mlp.experts.10.up_proj",
    )
] + ["lm_head", "model.visual.blocks.1.lm_head", "model_layers_0_mlp_gate", "model.layers.0.mlp"]
A, B, C = QuantScheme(4, 128), QuantScheme(8, 128), QuantScheme(4, -1, symmetric=False)
CHOICES: dict[str, Callable[[str], QuantScheme | None]] = {
    "one scheme": lambda n: A if n.endswith("_proj") else None,
    "routers and heads dense": lambda n: None if "gate" in n.rpartition(".")[2] or "head" in n else C,
    "first layer dense": lambda n: None if ".layers.0." in n or "head" in n else A,
    "second layer only": lambda n: A if ".layers.1." in n else None,
    "last layer eight": lambda n: B if ".layers.11." in n else (A if "_proj" in n else None),
    "one expert of one layer eight": lambda n: B if n.endswith("layers.3.mlp.experts.1.up_proj") else A,
    "experts by parity": lambda n: (A if ".1" in n else C) if "experts" in n else None,
    "all three": lambda n: [A, B, C, None][sum(map(ord, n)) % 4],
    "head quantized": lambda n: A,
}


@pytest.mark.parametrize("case", CHOICES)
def test_each_module_gets_its_scheme_by_every_matcher(case: str) -> None:
    """The config agrees with the plan, read back by us and by compressed-tensors' own matcher."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import is_match

    wanted = {name: CHOICES[case](name) for name in NAMES}
    layers = [layer(name, scheme) for name, scheme in wanted.items() if scheme]
    dense = [name for name, scheme in wanted.items() if not scheme]
    config = FORMAT.quantization_config(layers, dense)
    json.dumps(config)
    theirs = QuantizationConfig.model_validate(config)
    linear = torch.nn.Linear(1, 1)
    scheme_of = FORMAT.read_config(config)
    for name, scheme in wanted.items():
        assert scheme_of(name, "Linear") == scheme, name
        hits = {
            (group.weights.num_bits, group.weights.group_size or -1, group.weights.symmetric)
            for group in theirs.config_groups.values()
            if is_match(name, linear, group.targets, theirs.ignore)
        }
        assert hits == ({(scheme.bits, scheme.group_size, scheme.symmetric)} if scheme else set()), name
    for rule in config["ignore"]:
        assert rule.startswith("re:") or rule in wanted


def test_rules_stay_few() -> None:
    """40 layers of 64 experts are a handful of expressions, not 7680 names."""
    names = [
        f"model.layers.{i}.mlp.experts.{e}.{part}_proj"
        for i in range(40)
        for e in range(64)
        for part in ("gate", "up", "down")
    ]
    layers = [layer(name, B if ".layers.7." in name else A) for name in names]
    groups = FORMAT.quantization_config(layers, ["lm_head"])["config_groups"]
    assert [len(group["targets"]) for group in groups.values()] == [3, 3]


def test_a_tied_head_is_ignored_without_a_tensor() -> None:
    assert FORMAT.quantization_config([layer("a.b", A)], [])["ignore"] == ["lm_head"]


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, "float weights"),
        ({"num_bits": 4, "strategy": "tensor"}, "by tensor"),
        ({"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"}, "actorder"),
        ({"num_bits": 5, "strategy": "channel"}, "bits 5"),
        ({"strategy": "channel"}, "malformed"),
        (None, "malformed"),
    ],
)
def test_configs_of_other_layouts_are_refused(weights: Any, words: str) -> None:
    config = FORMAT.quantization_config([layer("a", A)], [])
    config["config_groups"]["group_0"]["weights"] = weights
    with pytest.raises(SourceError, match=words):
        FORMAT.read_config(config)


SERVED: dict[str, Callable[[str], QuantScheme | None]] = {
    "group 128": lambda n: None if n == "lm_head" else QuantScheme(4, 128, True, "bfloat16"),
    "group 32, 8 bits": lambda n: None if n == "lm_head" else QuantScheme(8, 32, True, "bfloat16"),
    "channel": lambda n: None if n == "lm_head" else QuantScheme(4, -1, True, "bfloat16"),
    "head too": lambda n: QuantScheme(4, 64, True, "bfloat16"),
    "mixed": lambda n: {
        "self_attn": QuantScheme(4, 64, True, "bfloat16"),
        "mlp": QuantScheme(8, 128, True, "bfloat16"),
    }.get(n.split(".")[-2] if "layers.1" in n else ""),
}


@pytest.mark.parametrize("case", SERVED)
def test_transformers_computes_with_the_dequantized_weights(case: str, llama_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    modules = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    stored = load_file(llama_folder / "model.safetensors")
    layers = []
    for name, module in modules.items():
        scheme = SERVED[case](name)
        if scheme:
            packed, values = pack(stored.pop(f"{name}.weight"), scheme)
            stored |= FORMAT.encode(name, packed)
            layers.append(layer(name, scheme, packed.shape))
            module.weight.data = values.to(torch.bfloat16)
    dense = [name for name in modules if SERVED[case](name) is None]
    save_file(stored, llama_folder / "model.safetensors", {"format": "pt"})
    config = json.loads((llama_folder / "config.json").read_text())
    config["quantization_config"] = FORMAT.quantization_config(layers, dense)
    (llama_folder / "config.json").write_text(json.dumps(config))

    tokens = torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(0))
    loaded, info = AutoModelForCausalLM.from_pretrained(llama_folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        truth, logits = model(tokens).logits, loaded(tokens).logits
    assert torch.equal(truth, logits)
    # the planted fault: another weight gives other logits
    next(iter(modules.values())).weight.data[0] += 0.5
    with torch.no_grad():
        assert not torch.equal(model(tokens).logits, logits)

"""The experts of a layer: one launch for all of them, or one by one, has to be the same sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from lowbit import runtime
from lowbit.runtime import QuantExperts, QuantLinear
from lowbit_kernels.dispatch import GemmWeight
from lowbit_kernels.functional import quantize

EXPERTS, HIDDEN, INNER = 6, 128, 64


def make(bits: list[int]) -> tuple[QuantExperts, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Experts of the given bits, and their dequantized gate_up and down in float64."""
    generator = torch.Generator().manual_seed(0)
    linears, dense = [], []
    for width in bits:
        pair, truth = [], []
        for n, k in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
            weight = torch.randn(n, k, generator=generator) / k**0.5
            words, scale, zero = quantize(weight, width, 32, symmetric=False, scale_dtype=torch.float16)
            pair.append(QuantLinear(GemmWeight(words, scale, zero, width, 32, k)))
            codes = torch.stack([words >> (width * i) & (2**width - 1) for i in range(32 // width)], -1)
            spread = [t.double().repeat_interleave(32, dim=1) for t in (scale, zero)]
            truth.append((codes.view(n, k).double() - spread[1]) * spread[0])
        linears.append(pair)
        dense.append((truth[0], truth[1]))
    gate_up, down = ([pair[i] for pair in linears] for i in (0, 1))
    return QuantExperts(gate_up, down, silu), dense


def assert_right(experts: QuantExperts, dense: list[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).half()
    scores = torch.randn(tokens, EXPERTS, generator=generator)
    weights, index = scores.softmax(-1).topk(2)
    expected = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    for token in range(tokens):
        for place in range(2):
            gate_up, down = dense[index[token, place]]
            gate, up = (gate_up @ x[token].double()).chunk(2)
            expected[token] += weights[token, place].double() * (down @ (silu(gate) * up))
    y = experts(x, index, weights.half())
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    # gate, up, their product, y, weight and sum are rounded to fp16, half a unit of 2^-10 each at most
    assert (y.double() - expected).norm() <= 6 * 2**-11 * expected.norm()


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("pairs", [0, runtime.ROUTED_PAIRS], ids=["one by one", "all at once"])
def test_experts_match_float64(tokens, pairs, monkeypatch):
    monkeypatch.setattr(runtime, "ROUTED_PAIRS", pairs)
    experts, dense = make([4] * EXPERTS)
    assert experts.stacks is not None
    assert_right(experts, dense, tokens)


def test_the_linears_share_the_memory_of_the_stack():
    experts, _ = make([4] * EXPERTS)
    assert experts.stacks is not None
    for linears, stack in zip((experts.gate_up, experts.down), experts.stacks, strict=True):
        for expert, layer in enumerate(linears):
            assert layer.words.data_ptr() == stack.words[expert].data_ptr()


def test_experts_that_differ_in_scheme_go_one_by_one():
    experts, dense = make([4, 8] * (EXPERTS // 2))
    assert experts.stacks is None
    assert_right(experts, dense, 5)


def test_experts_that_accelerate_moved_go_one_by_one():
    experts, dense = make([4] * EXPERTS)
    assert experts.stacks is not None
    left_behind = [replace(stack, words=stack.words.to("meta")) for stack in experts.stacks]
    experts.stacks = (left_behind[0], left_behind[1])
    assert_right(experts, dense, 5)

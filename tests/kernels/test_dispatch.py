"""The choice of a kernel, and what matmul refuses before anything is launched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowbit_kernels import dispatch
from lowbit_kernels.dispatch import (
    VARIANTS,
    GemmWeight,
    KernelConfig,
    Problem,
    bucket,
    choose,
    matmul,
    refusals,
)


def problem(**changes) -> Problem:
    fields = {"bits": 4, "group_size": 128, "has_zero": False, "act_dtype": "float16", "m_bucket": 1}
    return Problem(**{**fields, "n": 4096, "k": 4096, "arch": "sm_90", **changes})


def weight(n: int = 8, k: int = 64, group_size: int = 32, **changes) -> GemmWeight:
    fields = {
        "words": torch.zeros(n, k // 8, dtype=torch.int32),
        "scale": torch.ones(n, k // group_size, dtype=torch.float16),
        "zero_point": None,
        "bits": 4,
        "group_size": group_size,
        "in_features": k,
    }
    return GemmWeight(**{**fields, **changes})


def test_tokens_are_bucketed_by_powers_of_two():
    assert [bucket(m) for m in (0, 1, 2, 3, 4, 5, 16, 17, 4097)] == [1, 1, 2, 4, 4, 8, 16, 32, 8192]


@pytest.mark.parametrize("m", [1, 16, 64, 4096])
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(4096, 4096, 128), (17, 200, 200), (64, 96, 96), (1, 32, 32)]
)
def test_every_candidate_of_every_variant_fits_its_problem(m, n, k, group_size):
    for bits in (2, 3, 4, 8):
        p = problem(bits=bits, m_bucket=m, n=n, k=k, group_size=group_size)
        accepting = [name for name, reason in refusals(p).items() if reason is None]
        assert choose(p).variant == accepting[0]
        for name in accepting:
            candidates = VARIANTS[name].candidates(p)
            assert VARIANTS[name].default(p) in candidates
            for config in candidates:
                assert config.variant == name
                assert config.split_k >= 1
                assert group_size == k or group_size % config.block_k == 0 or config.scale_weights


@pytest.mark.parametrize("group_size", [128, 64, 32])
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (14336, 4096), (4096, 14336)])
def test_at_16_tokens_all_programs_of_gemm_run_at_once(n, k, group_size):
    """Seven of four warps on each of 132 multiprocessors, and no place in twenty is left empty."""
    posed = problem(m_bucket=16, n=n, k=k, group_size=group_size, order="fragment")
    config = VARIANTS["gemm"].default(posed)
    assert (config.variant, config.block_m, config.block_n, config.num_warps) == ("gemm", 16, 64, 4)
    assert 0.95 * 7 * 132 <= n // 64 * config.split_k <= 7 * 132


@pytest.mark.parametrize(
    ("bits", "m", "scaled"), [(4, 16, False), (3, 9, False), (8, 16, True), (4, 32, True)]
)
def test_two_groups_of_few_tokens_have_a_product_each(bits, m, scaled):
    """Where a block has whole words for each; four groups, or more tokens, share one of scaled weights."""
    p = problem(bits=bits, m_bucket=bucket(m), n=28672, group_size=64, order="fragment")
    config = VARIANTS["gemm"].default(p)
    assert (config.block_k, config.scale_weights) == (128, scaled)
    assert VARIANTS["gemm"].default(replace(p, group_size=32)).scale_weights


@pytest.mark.parametrize(("n", "k"), [(57344, 8192), (8192, 28672), (28672, 4096)])
@pytest.mark.parametrize("m", [1, 8])
def test_large_layers_of_groups_of_64_are_launched_as_those_of_128(n, k, m):
    large = problem(n=n, k=k, m_bucket=m, order="fragment")
    config = VARIANTS["decode"].default(replace(large, group_size=64))
    assert replace(config, block_k=128) == VARIANTS["decode"].default(large)


def test_a_refusal_says_why_and_a_wrong_config_is_refused():
    odd = problem(group_size=48)
    assert VARIANTS["plain"].accepts(odd) == "group size 48 is neither a multiple of 32 nor the whole row"
    x = torch.zeros(1, 96, dtype=torch.float16)
    w = weight(k=96, group_size=48)
    with pytest.raises(ValueError, match="plain cannot run this problem: group size 48"):
        matmul(x, w, config=KernelConfig("plain", 16, 32, 32))


def test_no_variant_left_names_every_reason(monkeypatch):
    monkeypatch.setattr(dispatch, "VARIANTS", {"plain": VARIANTS["plain"]})
    with pytest.raises(ValueError, match="no kernel takes this problem: plain: group size 48"):
        choose(problem(group_size=48, k=96))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "bits 5 is not supported"),
        ({"group_size": 48}, "in_features 64 is not a multiple of group_size 48"),
        ({"words": torch.zeros(8, 9, dtype=torch.int32)}, r"words is \[8, 9\] int32, wanted \[8, 8\] int32"),
        ({"words": torch.zeros(8, 8)}, r"words is \[8, 8\] float32"),
        ({"scale": torch.ones(8, 3)}, r"scale is \[8, 3\] float32, wanted \[8, 2\]"),
        ({"zero_point": torch.ones(8, 2, dtype=torch.int32)}, r"zero_point is \[8, 2\] int32"),
        ({"scale": torch.ones(2, 8).T}, "must be contiguous"),
    ],
)
def test_a_weight_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        weight(**changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.zeros(1, 64, dtype=torch.float64)}, "x is float64; use float16"),
        ({"x": torch.zeros(1, 63, dtype=torch.float16)}, r"x is \[1, 63\] float16, wanted \[1, 64\]"),
        ({"out": torch.zeros(1, 8)}, r"out is \[1, 8\] float32, wanted \[1, 8\] float16"),
        ({"bias": torch.zeros(7)}, r"bias is \[7\] float32, wanted \[8\]"),
        ({"bias": torch.zeros(8, device="meta")}, "bias is on meta, x on cpu"),
    ],
)
def test_matmul_refuses_what_does_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        matmul(**{"x": torch.zeros(1, 64, dtype=torch.float16), "weight": weight(), **arguments})

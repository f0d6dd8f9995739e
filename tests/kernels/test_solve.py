"""The solvers' inner loops as kernels: numbers in the interpreter, then that they compile everywhere.

That hqq_groups and the torch path agree bit for bit is held by tests/solvers/test_hqq.py.
"""

from __future__ import annotations

import pytest
import torch
from kernel_compile import TARGETS, compile_kernel

from lowbit_kernels import solve


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive_block(target, base, feed, step, low, high):
    """Codes and δ in float64, one weight at a time."""
    target, base, feed, step = (t.double() for t in (target, base, feed, step))
    codes, delta = torch.empty_like(target), torch.empty_like(target)
    for lane in range(target.shape[1]):
        for j in range(target.shape[0]):
            t = target[j, lane] + (feed[:j, j] * delta[:j, lane]).sum()
            codes[j, lane] = torch.round(t / step[j, lane]).clamp(low[j, lane], high[j, lane])
            delta[j, lane] = codes[j, lane] * step[j, lane] - base[j, lane]
    return codes, delta


def block(width: int, lanes: int) -> dict[str, torch.Tensor]:
    zero = torch.randint(0, 16, (width, lanes), generator=torch.Generator().manual_seed(1)).float()
    return {
        "target": randn(width, lanes),
        "base": randn(width, lanes, seed=2),
        "feed": randn(width, width, seed=3) / width**0.5,
        "step": 0.1 + randn(width, lanes, seed=4).abs() * 0.1,
        "low": -zero,
        "high": 15 - zero,
    }


@pytest.mark.parametrize(("width", "lanes"), [(128, 16), (128, 21), (3, 5), (17, 1), (1, 33)], ids=str)
def test_block_is_rounded_one_column_after_another(width, lanes, device):
    problem = block(width, lanes)
    codes = torch.full((width, lanes), torch.nan)
    given = {name: tensor.clone().to(device) for name, tensor in problem.items()}
    codes = codes.to(device)
    delta = solve.round_block(**given, codes=codes)
    want_codes, want_delta = naive_block(**problem)
    # a value on the edge between two codes may fall either way in float32, with all that follows in its lane
    same = (codes.cpu() == want_codes).all(0)
    assert same.float().mean() > 0.9
    torch.testing.assert_close(delta.cpu()[:, same].double(), want_delta[:, same], rtol=1e-4, atol=1e-4)
    if width > 1:
        planted, _ = naive_block(**{**problem, "feed": problem["feed"].T})
        assert not (codes.cpu() == planted).all()


def test_feed_may_be_part_of_a_wider_matrix(device):
    problem = {name: tensor.to(device) for name, tensor in block(16, 8).items()}
    wide = torch.full((16, 40), torch.nan, device=device)
    wide[:, 5:21] = problem["feed"]
    codes = [torch.empty_like(problem["target"]) for _ in range(2)]
    first = solve.round_block(**{**problem, "target": problem["target"].clone()}, codes=codes[0])
    second = solve.round_block(**{**problem, "feed": wide[:, 5:21]}, codes=codes[1])
    assert torch.equal(first, second)
    assert torch.equal(*codes)


@pytest.mark.parametrize("name", ["target", "feed", "codes"])
def test_operands_that_do_not_fit_are_named(name):
    problem = {**block(8, 4), "codes": torch.empty(8, 4)}
    problem[name] = problem[name].double()
    with pytest.raises(ValueError, match=name):
        solve.round_block(**problem)


def test_groups_that_do_not_fill_the_row_are_refused():
    with pytest.raises(ValueError, match="not a multiple"):
        solve.hqq_groups(randn(2, 96), 4, 64, torch.float16, False, 20)


def test_a_weight_that_is_not_finite_is_refused():
    weight = randn(2, 64)
    weight[1, 3] = torch.nan
    with pytest.raises(ValueError, match="row 1, group 0"):
        solve.hqq_groups(weight, 4, 64, torch.float16, False, 3)


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("target", TARGETS)
def test_round_block_compiles(target):
    pointers = {
        f"{name}_ptr": "*fp32" for name in ("target", "base", "feed", "step", "low", "high", "codes", "delta")
    }
    sizes = dict.fromkeys(["width", "lanes", "feed_stride"], "i32")
    constexprs = {"WIDTH": 128, "ROWS": 16}
    compile_kernel(solve.round_block_kernel, {**pointers, **sizes}, constexprs, target, num_warps=4)


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("weight", "scale", "bits", "kind", "log", "rows"),
    [
        ("bf16", "fp16", 4, "fractional", 7, 16),
        ("fp16", "bf16", 3, "whole", 6, 32),
        ("bf16", "fp32", 2, "whole", 12, 1),
    ],
)
def test_hqq_compiles_without_fused_or_approximate_arithmetic(weight, scale, bits, kind, log, rows, target):
    pointers = {
        "weight_ptr": f"*{weight}",
        "codes_ptr": "*u8",
        "scale_ptr": f"*{scale}",
        "zero_ptr": "*fp32" if kind == "fractional" else "*u8",
    }
    sizes = dict.fromkeys(["total", "group_size", "iterations"], "i32")
    constexprs = solve.hqq_constants(bits, kind == "fractional", log, rows)
    compiled = compile_kernel(
        solve.hqq_kernel, {**pointers, **sizes}, constexprs, target, num_warps=4, enable_fp_fusion=False
    )
    if "ptx" in compiled.asm:
        for inexact in ("div.full", "div.approx", "rcp.approx", "fma.rn"):
            assert inexact not in compiled.asm["ptx"]

"""Half-quadratic grids against the published update, one group at a time in float64."""

import dataclasses

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lowbit.errors import RecipeError
from lowbit.scheme import QuantizedTensor, QuantScheme
from lowbit.solvers import half_quadratic, hqq, rtn
from lowbit_kernels.solve import hqq_groups

FRACTIONAL = hqq.Options(fractional_zero=True)
WHOLE = hqq.Options()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heavy_tailed(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return 0.02 * randn(n, k, seed=seed) * (1 + randn(n, k, seed=seed + 1).exp())


def dequantized(q: QuantizedTensor) -> torch.Tensor:
    """float64 by the definition of the grid."""
    n, k = q.codes.shape
    zero = 2 ** (q.scheme.bits - 1) if q.zero_point is None else q.zero_point.double()[..., None]
    codes = q.codes.double().view(n, q.scale.shape[1], -1)
    return ((codes - zero) * q.scale.double()[..., None]).view(n, k)


def absolute_error(q: QuantizedTensor, weight: torch.Tensor) -> torch.Tensor:
    """Σ |w - w^| of every group."""
    return (dequantized(q) - weight.double()).abs().unflatten(1, (q.scale.shape[1], -1)).sum(-1)


def published(group: torch.Tensor, bits: int, iterations: int = 20, p: float = 0.7, beta: float = 10.0):
    """Codes and zero-point by the package's rule (optimize_weights_proximal): w_e = shrink(w - w_r),
    zero = mean(w_q - (w - w_e) / s), stop at the first iterate that is not better."""
    w, top = group.double(), 2**bits - 1
    s = ((w.max() - w.min()) / top).half().double()
    zero, best, found = -w.min() / s, float("inf"), None
    for _ in range(iterations):
        codes = torch.round(w / s + zero).clamp(0, top)
        error = w - s * (codes - zero)
        if error.abs().mean() >= best:
            break
        best, found = error.abs().mean(), (codes, zero)
        sparse = error.sign() * (error.abs() - error.abs().pow(p - 1) / beta).clamp(min=0)
        zero = (codes - (w - sparse) / s).mean()
        beta *= 1.01
    return found


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_fractional_zero_follows_the_published_rule(bits):
    weight = heavy_tailed(8, 256)
    q = hqq.solve(weight, QuantScheme(bits, 64, False), None, FRACTIONAL)
    agree, ours, theirs, start = [], 0.0, 0.0, 0.0
    for index, group in enumerate(weight.view(-1, 64)):
        codes, zero = published(group, bits)
        s = q.scale.view(-1)[index].double()
        agree.append((q.codes.view(-1, 64)[index] == codes).double().mean())
        theirs += (s * (codes - zero) - group).abs().sum()
        first, zero = published(group, bits, iterations=1)
        start += (s * (first - zero) - group).abs().sum()
    ours = absolute_error(q, weight).sum()
    assert torch.stack(agree).mean() > 0.98
    assert ours == pytest.approx(theirs.item(), rel=0.005)
    # the rule does something, and the wrong β does something else
    assert ours < 0.99 * start


def test_clip_is_the_part_of_the_error_that_shrinkage_leaves():
    scale, d = torch.tensor([0.01, 1e-4, 3.0, 1e-30]), torch.logspace(-6, 1, 200)
    d = torch.cat([d, -d, torch.zeros(1)])[:, None].repeat(1, 4)
    scratch = torch.empty_like(d)
    found = half_quadratic._clip(d.clone(), scale, 3, scratch.to(torch.int32), scratch).double()
    s, e = scale.double(), d.double()
    threshold = (s * e.abs()).pow(-0.3) / (10 * 1.01**3) / s
    wanted = e.sign() * torch.minimum(e.abs(), threshold)
    usual = [0, 1, 2]
    torch.testing.assert_close(found[:-1, usual], wanted[:-1, usual], rtol=0.08, atol=0)
    assert not found[-1].any()
    assert torch.isfinite(found).all()
    assert (found[:, usual] / wanted[:, usual] - 1)[:-1].abs().max() > 0.01


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_whole_zero_beats_rounding_to_nearest_within_the_format(bits):
    weight, scheme = heavy_tailed(32, 256), QuantScheme(bits, 64, False)
    ours = absolute_error(hqq.solve(weight, scheme, None, WHOLE), weight)
    nearest = absolute_error(rtn.solve(weight, scheme, None, rtn.Options()), weight)
    assert (ours <= nearest * (1 + 1e-6)).all()
    assert ours.sum() < (0.995 if bits == 8 else 0.97) * nearest.sum()


CONSTANT = torch.cat([torch.full((1, 128), v) for v in (0.25, 0.0, -3.0, 1e-40, 6e-8)])


@pytest.mark.parametrize("options", [FRACTIONAL, WHOLE], ids=["fractional", "whole"])
def test_constant_and_vanishing_groups(options):
    q = hqq.solve(CONSTANT, QuantScheme(4, 32, False), None, options)
    found = dequantized(q)
    assert torch.isfinite(q.scale).all()
    assert torch.equal(found[:3].float(), CONSTANT[:3])
    assert (found[3:].abs() <= 1e-7).all()


def test_positive_group_far_from_zero_needs_no_zero_on_its_grid():
    weight = 5 + 0.01 * randn(4, 64)
    scheme = QuantScheme(4, 64, False)
    fractional, whole = (
        absolute_error(hqq.solve(weight, scheme, None, options), weight) for options in (FRACTIONAL, WHOLE)
    )
    assert (fractional < 0.15 * whole).all()


def test_scale_that_overflows_is_named():
    weight = randn(3, 64)
    weight[1, 40] = 1e7
    with pytest.raises(ValueError, match="row 1, group 1"):
        hqq.solve(weight, QuantScheme(4, 32, False), None, WHOLE)


def test_result_does_not_depend_on_chunks_or_stages(monkeypatch):
    weight, scheme = heavy_tailed(40, 192), QuantScheme(4, 64, False)
    for options in (FRACTIONAL, WHOLE):
        whole = hqq.solve(weight, scheme, None, options)
        with monkeypatch.context() as patch:
            patch.setattr(half_quadratic, "_CHUNK", 64 * 7)
            patch.setattr(half_quadratic, "_STAGES", (1, 2, 19))
            parts = hqq.solve(weight, scheme, None, options)
        assert torch.equal(whole.codes, parts.codes)
        assert torch.equal(whole.scale, parts.scale)
        assert torch.equal(whole.zero_point, parts.zero_point)


def test_weight_is_left_alone_and_its_strides_do_not_matter():
    weight, scheme = heavy_tailed(24, 128), QuantScheme(4, 32, False)
    before = weight.clone()
    first = hqq.solve(weight, scheme, None, WHOLE)
    assert torch.equal(weight, before)
    second = hqq.solve(weight.T.contiguous().T, scheme, None, WHOLE)
    assert torch.equal(first.codes, second.codes)


# without shrinking: an example takes half a second in the interpreter
@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    width=st.sampled_from([32, 96, 64, 20]),
    rows=st.integers(1, 3),
    kind=st.sampled_from(["fractional", "whole"]),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.bfloat16]),
    scale_dtype=st.sampled_from(["float16", "float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_kernel_gives_the_same_bits(bits, width, rows, kind, dtype, scale_dtype, seed):
    weight = heavy_tailed(rows, 2 * width, seed) + (0.1 if seed % 4 == 0 else 0)
    weight[0, :width] = [0.25, 0.0, -3.0, 1e-40][seed % 4]
    weight = weight.to(dtype)
    scheme = QuantScheme(bits, -1, False, scale_dtype)
    grouped = weight.view(-1, width)
    ours = half_quadratic.fit(grouped, scheme, kind == "fractional", 20)
    kernel = hqq_groups(weight, bits, width, getattr(torch, scale_dtype), kind == "fractional", 20)
    for mine, its in zip(ours, kernel, strict=True):
        assert torch.equal(mine.flatten(), its.flatten())


def test_kernel_with_one_step_less_is_seen():
    weight = heavy_tailed(4, 128)
    whole, less = (hqq_groups(weight, 4, 64, torch.float16, True, iterations) for iterations in (20, 2))
    assert not torch.equal(whole[2], less[2])


@pytest.mark.parametrize("bad", [0, -1, 2.5])
def test_options_outside_their_range_are_named(bad):
    with pytest.raises(RecipeError, match="iterations"):
        dataclasses.replace(WHOLE, iterations=bad)


def test_the_symmetric_grid_is_refused_with_a_way_out():
    assert "--asym" in hqq.accepts(QuantScheme(4, 64, True))
    assert hqq.accepts(QuantScheme(4, 64, False)) is None

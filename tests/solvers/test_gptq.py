"""GPTQ and its refinements against float64 references that share no code with them."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.errors import RecipeError
from lowbit.hessian import LayerStats, factor
from lowbit.scheme import QuantizedTensor, QuantScheme
from lowbit.solvers import columns, gptq, rtn

PLAIN = gptq.PLAIN
FULL = gptq.Options()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated_inputs(tokens: int, k: int, seed: int = 0) -> torch.Tensor:
    """Inputs with a few strong directions and very different sizes per feature, as in language models."""
    mix = randn(k, k, seed=seed) / k**0.5
    return randn(tokens, k, seed=seed + 1) @ (mix * torch.logspace(1, -1, k)) + randn(
        tokens, k, seed=seed + 2
    )


def stats_of(x: torch.Tensor, cross: torch.Tensor | None = None) -> LayerStats:
    return LayerStats(2 / len(x) * x.T @ x, len(x), cross)


def dequantized(q: QuantizedTensor) -> torch.Tensor:
    """float64 by the definition of the grid, group by group."""
    n, k = q.codes.shape
    zero = 2 ** (q.scheme.bits - 1) if q.zero_point is None else q.zero_point.double()[..., None]
    codes = q.codes.double().view(n, q.scale.shape[1], -1)
    return ((codes - zero) * q.scale.double()[..., None]).view(n, k)


def losses(q: QuantizedTensor, target: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    error = dequantized(q) - target.double()
    return ((error @ hessian.double()) * error).sum(1)


def naive_gptq(weight, hessian, q: QuantizedTensor, damping: float, act_order: bool) -> torch.Tensor:
    """Codes by the published algorithm: one column at a time, explicit float64 inverse, on q's grid."""
    n, k = weight.shape
    order = torch.argsort(hessian.diagonal(), descending=True) if act_order else torch.arange(k)
    zero = torch.full_like(q.scale, 2 ** (q.scheme.bits - 1)) if q.zero_point is None else q.zero_point
    scale, zero = (t.double().repeat_interleave(k // t.shape[1], 1)[:, order] for t in (q.scale, zero))
    H = hessian.double()[order][:, order]
    H += damping * H.diagonal().mean() * torch.eye(k)
    W, codes = weight.double()[:, order], torch.zeros(n, k, dtype=torch.float64)
    for j in range(k):
        Hinv = torch.linalg.inv(H[j:, j:])
        codes[:, j] = (torch.round(W[:, j] / scale[:, j]) + zero[:, j]).clamp(0, q.scheme.max_code)
        error = (W[:, j] - (codes[:, j] - zero[:, j]) * scale[:, j]) / Hinv[0, 0]
        W[:, j:] -= error[:, None] * Hinv[0]
    return codes[:, torch.argsort(order)].to(torch.uint8)


CASES = [
    (4, 64, True, 9, 192),
    (4, 32, False, 33, 160),
    (3, 64, False, 8, 320),
    (2, 32, True, 40, 96),
    (8, 128, True, 6, 256),
    (4, -1, False, 7, 131),
]


@pytest.mark.parametrize(("bits", "group", "symmetric", "n", "k"), CASES, ids=str)
@pytest.mark.parametrize("act_order", [True, False], ids=["act-order", "in-order"])
def test_plain_gptq_is_the_published_algorithm(bits, group, symmetric, n, k, act_order):
    weight, stats = randn(n, k), stats_of(correlated_inputs(3 * k, k))
    scheme = QuantScheme(bits, group, symmetric)
    options = dataclasses.replace(PLAIN, act_order=act_order)
    q = gptq.solve(weight, scheme, stats, options)
    grid = rtn.solve(weight, scheme, None, rtn.Options())
    assert torch.equal(q.scale, grid.scale)
    naive = naive_gptq(weight, stats.hessian, grid, options.damping, act_order)
    # in float32 a weight on the edge between two codes can go either way and moves the rest of its row
    assert (naive == q.codes).all(1).float().mean() > 0.7
    theirs = losses(dataclasses.replace(q, codes=naive), weight, stats.hessian)
    torch.testing.assert_close(losses(q, weight, stats.hessian).sum(), theirs.sum(), rtol=0.01, atol=0)
    planted = naive_gptq(weight, stats.hessian, grid, options.damping, not act_order)
    assert (planted == q.codes).float().mean() < (naive == q.codes).float().mean()


def test_target_is_the_unconstrained_optimum():
    k, n = 48, 10
    x, full, weight = correlated_inputs(200, k), correlated_inputs(200, k, seed=5), randn(n, k)
    y = full @ weight.T
    cross = 2 / 200 * (y - x @ weight.T).T @ x
    stats = stats_of(x, cross)
    ridge = 1e-3
    shared = gptq._prepare(stats, gptq.Options(correction_damping=ridge))
    target = gptq._target(weight, cross, shared).T.double()
    # ridge regression towards W of the targets on the inputs
    penalty = (ridge * stats.hessian.diagonal().mean().double() * 200 / 2) ** 0.5
    design = torch.cat([x.double(), penalty * torch.eye(k)])
    wanted = torch.linalg.lstsq(design, torch.cat([y.double(), penalty * weight.double().T])).solution.T
    torch.testing.assert_close(target, wanted, rtol=2e-3, atol=2e-3)
    assert not torch.allclose(target, weight.double(), atol=0.05)


def test_correction_brings_the_outputs_closer_to_the_target():
    k, n = 128, 64
    full = correlated_inputs(400, k)
    x, weight = full + 0.3 * correlated_inputs(400, k, seed=9), randn(n, k)
    y = full @ weight.T
    stats = stats_of(x, 2 / 400 * (y - x @ weight.T).T @ x)
    error = {}
    for correction in (True, False):
        # judged on the rows that it was fitted to, so that a small λ does what there is to do
        options = dataclasses.replace(FULL, correction=correction, correction_damping=0.2)
        q = gptq.solve(weight, QuantScheme(4, 64), stats, options)
        error[correction] = (x.double() @ dequantized(q).T - y).square().mean().item()
    assert error[True] < 0.8 * error[False]


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_step_lowers_the_objective(bits, symmetric):
    weight, stats = randn(24, 192), stats_of(correlated_inputs(600, 192))
    scheme = QuantScheme(bits, 64, symmetric)
    # with next to no damping what is minimised is what is measured
    least = dataclasses.replace(FULL, damping=1e-5, search="minmax", correction=False)
    found = [losses(rtn.solve(weight, scheme, None, rtn.Options()), weight, stats.hessian).sum()]
    for rounds, passes in ((0, 0), (1, 0), (1, 2), (3, 2)):
        q = gptq.solve(weight, scheme, stats, dataclasses.replace(least, rounds=rounds, passes=passes))
        found.append(losses(q, weight, stats.hessian).sum())
    assert all(after < before for before, after in itertools.pairwise(found))


@pytest.mark.parametrize("k", [48, 300])
def test_losses_are_those_without_the_damping(k):
    """By the factor of the damped Hessian in another order of columns, against the product with H itself."""
    hessian, gap = stats_of(correlated_inputs(3 * k, k)).hessian, randn(k, 7, seed=4)
    order = torch.argsort(hessian.diagonal(), descending=True)
    found = factor(hessian[order][:, order], 0.1)
    ridge = 0.1 * hessian.diagonal().mean().item()
    damped = columns.Damped(found.root, ridge, order)
    wanted = (gap.double() * (hessian.double() @ gap.double())).sum(0)
    torch.testing.assert_close(damped.losses(gap).double(), wanted, rtol=1e-4, atol=0)
    # a part of the sum is enough to see that no row is below its limit, and not enough if one is
    low, high = 0.5 * wanted.float(), 2 * wanted.float()
    assert (damped.losses(gap, limit=low) >= low).all()
    mixed = torch.cat([high[:1], low[1:]])
    torch.testing.assert_close(damped.losses(gap, limit=mixed).double(), wanted, rtol=1e-4, atol=0)
    planted = columns.Damped(found.root, 0.0, order)
    assert (planted.losses(gap).double() > 1.01 * wanted).all()


@pytest.mark.parametrize("k", [40, 300])
def test_gptq_knows_the_loss_of_its_codes(k):
    hessian, target = stats_of(correlated_inputs(3 * k, k)).hessian, randn(k, 6)
    root = torch.linalg.cholesky(hessian.double().flip(0, 1)).flip(0, 1)
    group = torch.arange(k) // (k // 4)
    grid = columns.Grid(torch.full((4, 6), 0.3), torch.full((4, 6), -8.0), torch.full((4, 6), 7.0), group)
    codes, losses = columns.gptq(target, root.float(), grid)
    gap = codes.double() * 0.3 - target.double()
    torch.testing.assert_close(losses.double(), (gap * (hessian.double() @ gap)).sum(0), rtol=1e-3, atol=0)
    gap[3, 2] += 0.3
    assert not torch.allclose(losses.double(), (gap * (hessian.double() @ gap)).sum(0), rtol=1e-3)


def test_descent_ends_where_no_single_code_can_improve():
    k, n = 24, 6
    weight, hessian = randn(k, n), stats_of(correlated_inputs(80, k)).hessian
    grid = columns.Grid(
        torch.full((2, n), 0.4), torch.full((2, n), -4.0), torch.full((2, n), 3.0), torch.arange(k) // 12
    )
    codes = columns.nearest_codes(weight, grid)
    for _ in range(30):
        columns.descend(codes, weight, hessian, grid)

    def loss(c):
        error = c.double() * 0.4 - weight.double()
        return (error * (hessian.double() @ error)).sum(0)

    best = loss(codes)
    for j, change in itertools.product(range(k), (-1, 1)):
        moved = codes.clone()
        moved[j] = (moved[j] + change).clamp(-4, 3)
        assert (loss(moved) >= best - 1e-5 * best).all()
    assert (best < loss(columns.nearest_codes(weight, grid))).all()


def test_refit_is_least_squares_in_the_scales():
    k, n, width = 96, 5, 32
    target, hessian = randn(k, n), stats_of(correlated_inputs(300, k)).hessian
    group = torch.arange(k) // width
    grid = columns.Grid(torch.full((3, n), 0.5), torch.full((3, n), -4.0), torch.full((3, n), 3.0), group)
    codes = columns.nearest_codes(target, grid)
    codes[:width, 1] = 0
    refit = columns.refit_scales(codes, hessian @ target, hessian, grid, torch.float32)
    root = torch.linalg.cholesky(hessian.double())
    for row in range(n):
        design = root.T @ (codes[:, row, None].double() * torch.nn.functional.one_hot(group).double())
        wanted = torch.linalg.lstsq(design, root.T @ target[:, row].double(), driver="gelsd").solution
        wanted = torch.where(codes[:, row].view(3, -1).any(1), wanted, 0.5)
        torch.testing.assert_close(refit[:, row].double(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [PLAIN, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_hessian_without_full_rank(options, symmetric):
    """16 tokens for 256 features, one always 0, two identical: finite, and not above rounding to nearest."""
    x = correlated_inputs(16, 256)
    x[:, 7], x[:, 9] = 0, x[:, 8]
    weight, stats, scheme = randn(12, 256), stats_of(x), QuantScheme(4, 128, symmetric)
    q = gptq.solve(weight, scheme, stats, options)
    ours = losses(q, weight, stats.hessian)
    nearest = losses(rtn.solve(weight, scheme, None, rtn.Options()), weight, stats.hessian)
    assert torch.isfinite(q.scale).all()
    assert (ours <= nearest * 1.001).all()
    assert ours.sum() < 0.5 * nearest.sum()
    assert not dequantized(q)[:, 7].any()


def test_what_the_hessian_took_is_noted():
    x, weight = correlated_inputs(300, 64), randn(4, 64)
    assert gptq.solve(weight, QuantScheme(4, 32), stats_of(x), FULL).notes == ()
    x[:, 5] = 0
    assert gptq.solve(weight, QuantScheme(4, 32), stats_of(x), FULL).notes == (
        "1 inputs were 0 in all tokens: their weights are 0",
    )
    indefinite = stats_of(x).hessian - 0.2 * torch.diag(stats_of(x).hessian.diagonal().mean().expand(64))
    note = gptq.solve(weight, QuantScheme(4, 32), LayerStats(indefinite, 300), PLAIN).notes[-1]
    assert note.startswith("the Hessian took damping")
    assert note.endswith("instead of 0.01")


def test_rows_that_gptq_makes_worse_fall_back():
    """Uncorrelated inputs and a weight on the grid already: nothing beats rounding to nearest."""
    scheme = QuantScheme(4, 32, symmetric=True)
    codes = torch.randint(0, 16, (6, 64), generator=torch.Generator().manual_seed(0))
    codes[:, ::32] = 0
    weight = (codes - 8) * 0.25
    q = gptq.solve(weight, scheme, stats_of(correlated_inputs(40, 64)), FULL)
    assert torch.equal(dequantized(q), weight.double())


def test_columns_without_data_leave_the_rest_alone():
    x, weight, scheme = correlated_inputs(300, 128), randn(8, 128), QuantScheme(4, 32)
    x[:, 64:] = 0
    q = gptq.solve(weight, scheme, stats_of(x), PLAIN)
    half = gptq.solve(weight[:, :64], scheme, stats_of(x[:, :64]), PLAIN)
    assert torch.equal(q.codes[:, :64], half.codes)
    dead = gptq.solve(weight, scheme, stats_of(torch.zeros_like(x)), FULL)
    assert not dequantized(dead).any()


def test_rows_are_independent_of_how_they_are_chunked(monkeypatch):
    weight, stats = randn(40, 128), stats_of(correlated_inputs(300, 128), randn(40, 128, seed=3))
    whole = gptq.solve(weight, QuantScheme(), stats, FULL)
    monkeypatch.setattr(gptq, "_CPU_ELEMENTS", 16 * 128)
    parts = gptq.solve(weight, QuantScheme(), stats, FULL)
    assert (whole.codes == parts.codes).float().mean() > 0.98


def test_same_input_same_codes_and_no_trace_left():
    weight, stats = randn(16, 128), stats_of(correlated_inputs(300, 128), randn(16, 128, seed=3))
    before, state = [t.clone() for t in (weight, stats.hessian, stats.cross)], torch.get_rng_state()
    first, second = (gptq.solve(weight, QuantScheme(4, 64, False), stats, FULL) for _ in range(2))
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scale, second.scale)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, (weight, stats.hessian, stats.cross)))


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    width=st.sampled_from([32, 64, -1]),
    groups=st.integers(1, 5),
    n=st.integers(1, 9),
    symmetric=st.booleans(),
    seed=st.integers(0, 99),
    search=st.sampled_from(["minmax", "norm", "hessian"]),
)
def test_never_above_rounding_to_nearest(bits, width, groups, n, symmetric, seed, search):
    k = 64 * groups if width > 0 else 17 * groups
    weight = randn(n, k, seed=seed) + (seed % 3)
    weight[0] = 0.25
    x = correlated_inputs(1 + seed, k, seed=seed)
    scheme = QuantScheme(bits, width, symmetric)
    stats = stats_of(x)
    q = gptq.solve(weight, scheme, stats, dataclasses.replace(FULL, search=search))
    nearest = losses(rtn.solve(weight, scheme, None, rtn.Options()), weight, stats.hessian)
    assert (losses(q, weight, stats.hessian) <= nearest * 1.001 + 1e-4).all()
    assert int(q.codes.max()) <= scheme.max_code


@pytest.mark.parametrize(
    "bad",
    [
        {"act_order": "no"},
        {"correction": 1},
        {"search": "best"},
        {"damping": 0.0},
        {"correction_damping": -1},
        {"rounds": -1},
        {"passes": 1.5},
    ],
)
def test_options_outside_their_range_are_named(bad):
    with pytest.raises(RecipeError, match=next(iter(bad))):
        gptq.Options(**bad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("options", [PLAIN, FULL], ids=["plain", "full"])
def test_gpu_and_cpu_come_to_the_same_objective(options):
    weight, x = randn(96, 512), correlated_inputs(2000, 512)
    stats = stats_of(x, randn(96, 512, seed=7) * 0.1)
    there = LayerStats(stats.hessian.cuda(), stats.tokens, stats.cross.cuda())
    target = gptq._target(weight, stats.cross, gptq._prepare(stats, options)).T if options == FULL else weight
    for scheme in (QuantScheme(4, 128), QuantScheme(2, 64, symmetric=False)):
        q = gptq.solve(weight.cuda(), scheme, there, options)
        moved = QuantizedTensor(
            q.codes.cpu(), q.scale.cpu(), None if q.zero_point is None else q.zero_point.cpu(), scheme
        )
        here = losses(gptq.solve(weight, scheme, stats, options), target, stats.hessian).sum()
        torch.testing.assert_close(losses(moved, target, stats.hessian).sum(), here, rtol=0.01, atol=0)

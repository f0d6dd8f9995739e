"""Searched ranges against every shrink factor tried by hand in float64."""

import pytest
import torch

from lowbit.scheme import QuantScheme
from lowbit.solvers.grid import abs_power, range_grid, search_grid


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loss(w, scale, zero, top, norm, importance):
    """Σ h |w - Q(w)|^norm of one group, float64."""
    w, scale, zero = w.double(), scale.double(), zero.double()
    codes = (torch.round(w / scale) + zero).clamp(0, top)
    return (importance.double() * (w - (codes - zero) * scale).abs().pow(norm)).sum()


def by_hand(w, bits, symmetric, norm, importance):
    """The smallest loss over shrink factors from 0.28 to 1, one group at a time."""
    top, half = 2**bits - 1, 2 ** (bits - 1)
    found = []
    for shrink in torch.linspace(0.28, 1.0, 145).tolist():
        lo, hi = shrink * w.min().double(), shrink * w.max().double()
        if symmetric:
            s, z = torch.maximum(hi / (half - 1), -lo / half).half(), torch.tensor(float(half))
        else:
            s = ((hi.clamp(min=0) - lo.clamp(max=0)) / top).half()
            z = torch.round(-lo.clamp(max=0) / s.double()).clamp(0, top)
        found.append(loss(w, s, z, top, norm, importance))
    return torch.stack(found).min()


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("norm", "weighted"), [(2.4, False), (2.0, True), (2.0, False)], ids=str)
def test_searched_range_is_close_to_the_best_one(bits, symmetric, norm, weighted):
    weight, scheme = randn(6, 128) * torch.logspace(-2, 1, 6)[:, None], QuantScheme(bits, 32, symmetric)
    importance = randn(128, seed=1).exp() if weighted else torch.ones(128)
    searched = search_grid(weight, scheme, norm=norm, importance=importance if weighted else None)
    nearest = range_grid(weight, scheme)
    found, start, best = [], [], []
    for row, group in torch.cartesian_prod(torch.arange(6), torch.arange(4)).tolist():
        columns = slice(32 * group, 32 * group + 32)
        w, h = weight[row, columns], importance[columns]
        for grid, losses in ((searched, found), (nearest, start)):
            losses.append(loss(w, grid[0][row, group], grid[1][row, group], scheme.max_code, norm, h))
        best.append(by_hand(w, bits, symmetric, norm, h))
    found, start, best = (torch.stack(losses) for losses in (found, start, best))
    assert (found <= start * 1.0001).all()
    assert (found <= best * 1.25).all()
    assert found.sum() <= best.sum() * 1.05
    assert found.sum() < start.sum() * 0.95


def test_importance_is_that_of_the_group_s_own_columns():
    """All weight on one column: the grid must serve that column, whichever group it is in."""
    weight, scheme = randn(5, 96), QuantScheme(2, 32, symmetric=False)
    for column in (3, 40, 95):
        importance = torch.full((96,), 1e-6)
        importance[column] = 1.0
        scale, zero = search_grid(weight, scheme, norm=2.0, importance=importance)
        group = column // 32
        s, z, w = scale[:, group].float(), zero[:, group], weight[:, column]
        error = (w - ((torch.round(w / s) + z).clamp(0, 3) - z) * s).abs()
        plain, plain_zero = search_grid(weight, scheme, norm=2.0)
        s, z = plain[:, group].float(), plain_zero[:, group]
        assert error.sum() < 0.5 * (w - ((torch.round(w / s) + z).clamp(0, 3) - z) * s).abs().sum()


@pytest.mark.parametrize("exponent", [0.2, 0.4, 0.9])
def test_power_is_off_by_no_more_than_it_says(exponent):
    x = torch.logspace(-9, 9, 4001) * torch.tensor([1.0, -1.0]).repeat(2001)[:4001]
    ratio = abs_power(x, exponent, out=torch.empty_like(x)).double() / x.abs().double().pow(exponent)
    assert (ratio - 1).abs().max() < 0.031 * (1 + exponent)
    assert (ratio - 1).abs().max() > 0.01
    assert abs_power(torch.zeros(1), exponent, out=torch.empty(1)) < 1e-3


def test_chunks_do_not_show(monkeypatch):
    from lowbit.solvers import grid

    weight, scheme, importance = randn(9, 128), QuantScheme(4, 32), randn(128, seed=1).exp()
    whole = search_grid(weight, scheme, norm=2.0, importance=importance)
    monkeypatch.setitem(grid._CHUNK, "cpu", 32 * 5)
    parts = search_grid(weight, scheme, norm=2.0, importance=importance)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])

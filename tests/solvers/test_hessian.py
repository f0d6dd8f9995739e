"""Sums over tokens against float64 by hand, and the factor of a damped Hessian."""

import pytest
import torch

from lowbit import hessian
from lowbit.errors import CalibrationError
from lowbit.hessian import DAMPING_LADDER, add_tokens, dead_columns, factor, finish, start_moments


def tokens(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [5, 256, 300, 513], ids=lambda k: f"K{k}")
def test_hessian_is_two_over_n_times_the_outer_products(k):
    x = tokens(70, k)
    moments = start_moments(k)
    for rows in x.split([1, 33, 36]):
        moments = add_tokens(moments, rows[None])
    stats = finish(moments)
    assert stats.tokens == 70
    assert stats.cross is None
    torch.testing.assert_close(
        stats.hessian.double(), 2 / 70 * x.double().T @ x.double(), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(stats.hessian, stats.hessian.T)


@pytest.mark.parametrize("with_gap", [False, True])
def test_cross_is_the_residual_of_the_full_precision_target(with_gap):
    k, n = 40, 24
    x, weight, gap = tokens(64, k), tokens(n, k, 1), tokens(64, n, 2)
    full = x + 0.1 * tokens(64, k, 3)
    moments = start_moments(k, shift=True, gap_features=n if with_gap else 0)
    for part in (slice(0, 20), slice(20, 64)):
        moments = add_tokens(moments, x[part], full=full[part], gap=gap[part] if with_gap else None)
    target = full.double() @ weight.double().T + (gap.double() if with_gap else 0)
    wanted = 2 / 64 * (target - x.double() @ weight.double().T).T @ x.double()
    torch.testing.assert_close(finish(moments, weight).cross.double(), wanted, rtol=1e-4, atol=1e-4)
    planted = finish(moments, -weight).cross.double()
    assert not torch.allclose(planted, wanted, rtol=1e-2, atol=1e-2)


def test_layers_that_read_the_same_input_share_one_sum():
    x, gap = tokens(32, 16), tokens(32, 8, 1)
    moments = add_tokens(start_moments(16, shift=True, gap_features=8), x, full=x, gap=gap)
    first, second = finish(moments, tokens(8, 16, 2)), finish(moments, tokens(4, 16, 3), use_gap=False)
    assert torch.equal(first.hessian, second.hessian)
    assert second.cross.shape == (4, 16)
    assert not second.cross.any()
    assert first.cross.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30], ids=str)
@pytest.mark.parametrize("where", ["x", "full", "gap"])
def test_values_that_are_not_finite_are_refused(bad, where):
    x, full, gap = tokens(8, 6), tokens(8, 6, 1), tokens(8, 4, 2)
    {"x": x, "full": full, "gap": gap}[where][3, 1] = bad if bad != 1e30 or where == "x" else float("inf")
    moments = add_tokens(start_moments(6, shift=True, gap_features=4), x, full=full, gap=gap)
    with pytest.raises(CalibrationError, match="NaN"):
        finish(moments, tokens(4, 6, 3))


def test_a_layer_without_tokens_is_refused():
    with pytest.raises(CalibrationError, match="no calibration token"):
        finish(start_moments(4))


@pytest.mark.parametrize("k", [1, 33, 256])
def test_factor_is_upper_and_gives_back_the_damped_matrix(k):
    matrix = finish(add_tokens(start_moments(k), tokens(2 * k + 5, k))).hessian
    result = factor(matrix, 0.05)
    assert torch.equal(result.root, torch.triu(result.root))
    wanted = matrix.double() + 0.05 * matrix.diagonal().double().mean() * torch.eye(k).double()
    torch.testing.assert_close(result.root.double() @ result.root.double().T, wanted, rtol=1e-4, atol=1e-5)
    assert (result.damping, result.dtype) == (0.05, torch.float32)


def test_ladder_records_what_it_took(monkeypatch):
    singular = finish(add_tokens(start_moments(64), tokens(8, 64))).hessian
    assert factor(singular, 0.01).damping == 0.01
    # eight tokens in 64 dimensions: rounding alone makes the zero eigenvalues negative
    assert 1e-9 < factor(singular, 1e-9).damping < 2e-6
    indefinite = torch.diag(torch.tensor([1.0, 1.0, 1.0, -0.3]))
    assert factor(indefinite, 0.01).damping == pytest.approx(1.0)
    with pytest.raises(CalibrationError, match="not positive definite"):
        factor(torch.diag(torch.tensor([1.0, -1.0])), 0.01 / DAMPING_LADDER[-1])
    root = hessian._upper_root
    monkeypatch.setattr(
        hessian,
        "_upper_root",
        lambda h, ridge, dtype: root(h, ridge, dtype) if dtype == torch.float64 else None,
    )
    assert factor(singular, 0.01).damping == 0.01
    assert factor(singular, 0.01).dtype == torch.float64


def test_dead_columns_are_the_inputs_that_never_fired():
    x = tokens(8, 5)
    x[:, 3] = 0
    assert dead_columns(finish(add_tokens(start_moments(5), x)).hessian).tolist() == [False] * 3 + [
        True,
        False,
    ]

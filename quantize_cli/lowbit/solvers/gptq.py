"""GPTQ with a corrected target: codes for the outputs that the full-precision model would have given.

Minimise over V on the grid   tr((V - W*) H (V - W*)ᵀ),   W* = W + D (H + λ mean(diag H) I)⁻¹

with H and D of lowbit.hessian; without D, W* = W and this is GPTQ [1]. W* is the best unconstrained answer to
Σ |V x - y~|², where x is the input in the already quantized model and y~ the target of the full-precision
stream (as in Qronos [2] and GPTAQ [3]).

Four steps, each an option:
 1. the target W*;
 2. a grid per group, its range searched (norm 2.4, or weighted by diag H);
 3. GPTQ: columns in order of diag H (groups stay where they are), each rounded after the errors of the ones
    before it were fed forward. With R Rᵀ = damped H, R upper triangular, the column j is rounded at
        w*_j + Σ_{i<j} (w*_i - v_i) R_ij / R_jj
    which is what the inverse-Hessian updates of [1] come to, without an inverse;
 4. refinement: group scales by least squares for the codes, then coordinate descent on the codes [4], in
    turn.

[1] arXiv:2210.17323  [2] arXiv:2505.11695  [3] arXiv:2504.02692  [4] QuantEase, arXiv:2309.01885
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from lowbit.errors import RecipeError
from lowbit.scheme import QuantizedTensor, QuantScheme

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.hessian import LayerStats


# weights solved at a time: bounds the temporaries, of which there are about eight
_CPU_ELEMENTS = 1 << 23
_GPU_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class Options:
    """Keys under `solver:` of a recipe.

    correction: aim at the full-precision outputs where the statistics hold them.  correction_damping: λ.
    search: how the range of a group is chosen, "minmax" is that of rtn.
    damping: first rung of lowbit.hessian.DAMPING_LADDER.  act_order: columns by descending diag H.
    rounds: of refinement, 0 is plain GPTQ.  passes: of coordinate descent in each.
    """

    correction: bool = True
    correction_damping: float = 1.0
    search: Literal["minmax", "norm", "hessian"] = "hessian"
    damping: float = 0.1
    act_order: bool = True
    rounds: int = 3
    passes: int = 2

    def __post_init__(self) -> None:
        if self.search not in ("minmax", "norm", "hessian"):
            raise RecipeError(f"solver: search {self.search!r} is not one of minmax, norm, hessian")
        for key in ("damping", "correction_damping"):
            if not 0 < getattr(self, key) < 10:
                raise RecipeError(f"solver: {key} {getattr(self, key)!r} is not between 0 and 10")
        for key in ("correction", "act_order"):
            if not isinstance(getattr(self, key), bool):
                raise RecipeError(f"solver: {key} {getattr(self, key)!r} is not true or false")
        for key in ("rounds", "passes"):
            if not isinstance(getattr(self, key), int) or getattr(self, key) < 0:
                raise RecipeError(f"solver: {key} {getattr(self, key)!r} is not a whole number from 0")


PLAIN = Options(correction=False, search="minmax", damping=0.01, rounds=0)
"""GPTQ as published, with static-groups act-order."""


def accepts(scheme: QuantScheme) -> str | None:
    """Every grid can be solved for."""
    return None


def solve(weight: Tensor, scheme: QuantScheme, stats: LayerStats | None, options: Options) -> QuantizedTensor:
    """Quantize weight [N, K] (any float dtype) for the inputs that stats describes, on stats' device.

    Never worse than rounding W* to nearest on the objective above, row by row.
    Raises CalibrationError if no damping makes the Hessian positive definite, ValueError if a scale is not
    finite in its stored dtype.
    """
    import torch

    assert stats is not None, "gptq needs calibration statistics"
    n, k = weight.shape
    rows_at_once = max(1, (_CPU_ELEMENTS if stats.hessian.device.type == "cpu" else _GPU_ELEMENTS) // k)
    with torch.no_grad():
        shared = _prepare(stats, options)
        cross = stats.cross if options.correction else None
        parts = []
        for first in range(0, n, rows_at_once):
            rows = slice(first, min(first + rows_at_once, n))
            target = _target(weight[rows], None if cross is None else cross[rows], shared)
            parts.append(_solve_rows(target, scheme, shared, options))
        codes, scale, zero = (torch.cat(part) for part in zip(*parts, strict=True))
    return QuantizedTensor(codes, scale, None if scheme.symmetric else zero, scheme, shared.notes)


@dataclass(frozen=True)
class _Shared:
    """What all rows of a layer share.

    hessian: [K, K], damped, dead columns decoupled.  ridge: the damping in it.  dead: [K] bool.
    order: [K] int64, columns in the order in which they are rounded.
    root: factor of hessian in that order.  target_root: the same with λ for damping.
    notes: what of the Hessian needed more than was asked for.
    """

    hessian: Tensor
    ridge: float
    dead: Tensor
    order: Tensor
    root: Tensor
    target_root: Tensor
    notes: tuple[str, ...]


def _prepare(stats: LayerStats, options: Options) -> _Shared:
    import torch

    from lowbit.hessian import dead_columns, factor

    dead = dead_columns(stats.hessian)
    hessian = stats.hessian.clone()
    live_mean = hessian.diagonal()[~dead].double().mean().item() if not dead.all() else 1.0
    # a dead column has no couplings: any positive number on its diagonal keeps it out of the way
    hessian.diagonal()[dead] = live_mean
    order = torch.arange(len(dead), device=dead.device)
    if options.act_order:
        order = torch.argsort(stats.hessian.diagonal(), descending=True, stable=True)
    ordered = hessian.index_select(0, order).index_select(1, order)
    wanted = [options.damping]
    if stats.cross is not None and options.correction and options.correction_damping != options.damping:
        wanted.append(options.correction_damping)
    factors = [factor(ordered, damping) for damping in wanted]
    del ordered
    notes = []
    if dead.any():
        notes.append(f"{int(dead.sum())} inputs were 0 in all tokens: their weights are 0")
    for found, asked in zip(factors, wanted, strict=True):
        if found.damping > asked:
            notes.append(f"the Hessian took damping {found.damping:g} instead of {asked:g}")
        elif found.dtype == torch.float64:
            notes.append("the Hessian was factored in float64")
    ridge = factors[0].damping * live_mean
    hessian.diagonal().add_(ridge)
    return _Shared(hessian, ridge, dead, order, factors[0].root, factors[-1].root, tuple(notes))


def _target(weight: Tensor, cross: Tensor | None, shared: _Shared) -> Tensor:
    """W*ᵀ [K, N] float32, dead columns zero, for rows of weight and D."""
    import torch

    target = weight.to(shared.hessian.device).T.float().contiguous()
    if cross is not None:
        root = shared.target_root
        shift = torch.linalg.solve_triangular(root, cross.T[shared.order], upper=True)
        shift = torch.linalg.solve_triangular(root.T, shift, upper=False)
        target[shared.order] += shift
    target[shared.dead] = 0
    return target


def _solve_rows(
    target: Tensor, scheme: QuantScheme, shared: _Shared, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] uint8, scale [N, G] and zero_point [N, G] uint8 for W*ᵀ [K, N]."""
    import torch

    from lowbit.solvers import columns
    from lowbit.solvers.grid import range_grid, search_grid

    k = target.shape[0]
    dtype = getattr(torch, scheme.scale_dtype)
    group = torch.arange(k, device=target.device) // scheme.width(k)

    def grid_of(scale: Tensor, zero: Tensor) -> columns.Grid:
        return columns.Grid(
            scale.float().T.contiguous(), -zero.T.contiguous(), scheme.max_code - zero.T.contiguous(), group
        )

    nearest = grid_of(*range_grid(target.T, scheme))
    importance = shared.hessian.diagonal() - shared.ridge
    grid = nearest
    if options.search == "norm":
        grid = grid_of(*search_grid(target.T, scheme, norm=2.4))
    elif options.search == "hessian":
        grid = grid_of(*search_grid(target.T, scheme, norm=2.0, importance=importance))

    order = shared.order
    ordered, losses = columns.gptq(target.index_select(0, order), shared.root, grid.of(order))
    codes = torch.empty_like(target).index_copy_(0, order, ordered)
    if options.rounds:
        aim = shared.hessian @ target
    for _ in range(options.rounds):
        grid = replace(grid, step=columns.refit_scales(codes, aim, shared.hessian, grid, dtype))
        for _ in range(options.passes):
            columns.descend(codes, target, shared.hessian, grid)
    damped = columns.Damped(shared.root, shared.ridge, order)
    gap = columns.gap_of(codes, target, grid)
    losses = damped.losses(gap) if options.rounds else damped.undamp(losses, gap)
    codes, grid = columns.better_rows(codes, grid, losses, target, nearest, damped)
    zero = -grid.low
    shifted = columns.grouped(codes, grid) + (zero - 128)[:, None]
    # int8 is a faster conversion than uint8 by far
    codes = shifted.view(codes.shape).to(torch.int8).view(torch.uint8) ^ 128
    return codes.T.contiguous(), grid.step.T.to(dtype).contiguous(), zero.T.to(torch.uint8).contiguous()

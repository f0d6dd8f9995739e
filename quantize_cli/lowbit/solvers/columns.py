"""Rounding one column after another, where each column's error moves the ones after it.

GPTQ and coordinate descent are the same loop over columns j of a block, in different variables:

    v_j = to the grid(t_j),   δ_j = v_j - base_j,   t_k += feed_jk δ_j  for k > j

Everything here is transposed, [K, N]: a column of the weight is contiguous, and rows of the weight are
independent lanes. Codes are kept signed, code - zero_point, as float32: v = code · step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# columns per block: between blocks errors travel by matrix products
BLOCK = 128
# on a CPU errors travel one rank-1 update at a time within strips of so many columns, by products beyond
_STRIP = 16


@dataclass(frozen=True)
class Grid:
    """The grid of a transposed weight [K, N].

    step: [G, N] float32.  low, high: [G, N] float32, the smallest and largest signed code.
    group: [K] int64, the group of each column.
    """

    step: Tensor
    low: Tensor
    high: Tensor
    group: Tensor

    def rows(self, columns: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
        """step, low and high of the given columns, [columns, N] each."""
        group = self.group[columns]
        return self.step[group], self.low[group], self.high[group]


def reorder(grid: Grid, order: Tensor) -> Grid:
    """The same grid for columns taken in another order."""
    return replace(grid, group=grid.group[order])


def round_block(
    target: Tensor, base: Tensor, feed: Tensor, step: Tensor, low: Tensor, high: Tensor, codes: Tensor
) -> Tensor:
    """Run the loop above over the B columns of one block; return δ [B, N].

    target: [B, N], consumed.  base: [B, N].  feed: [B, B], used above the diagonal.
    step, low, high: [B, N].  codes: [B, N], written.
    """
    if target.is_cuda:
        from lowbit_kernels.solve import round_block as kernel

        return kernel(target, base, feed, step, low, high, codes)
    with _one_thread():
        return _round_block_cpu(target, base, feed, step, low, high, codes)


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """Let a GPU round the operands of float32 products to 11 bits.

    Only for descent: its products move each target by under a thousandth of a step, and the next pass starts
    from the codes again.
    """
    settings = torch.backends.cuda.matmul
    before = settings.allow_tf32
    settings.allow_tf32 = True
    try:
        yield
    finally:
        settings.allow_tf32 = before


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep PyTorch on this thread: waking another one costs more than a column's arithmetic, and on a busy
    machine twenty times more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _round_block_cpu(
    target: Tensor, base: Tensor, feed: Tensor, step: Tensor, low: Tensor, high: Tensor, codes: Tensor
) -> Tensor:
    """round_block in PyTorch."""
    width = target.shape[0]
    delta = torch.empty_like(target)
    against = base.neg()
    # one list per operand: indexing a tensor costs as much as the arithmetic on a column
    t, s, lo, hi, q, d, b = (x.unbind(0) for x in (target, step, low, high, codes, delta, against))
    weights = feed[:, :, None]
    for first in range(0, width, _STRIP):
        last = min(first + _STRIP, width)
        for j in range(first, last):
            torch.div(t[j], s[j], out=q[j]).round_().clamp_(lo[j], hi[j])
            torch.addcmul(b[j], q[j], s[j], out=d[j])
            if j + 1 < last:
                target[j + 1 : last].addcmul_(weights[j, j + 1 : last], d[j])
        if last < width:
            target[last:].addmm_(feed[first:last, last:].T, delta[first:last])
    return delta


def gptq(target: Tensor, root: Tensor, grid: Grid) -> Tensor:
    """GPTQ over all columns in the order given; return signed codes [K, N].

    target: [K, N] W*ᵀ.  root: [K, K] upper, root rootᵀ = damped H.
    """
    codes, delta = torch.empty_like(target), torch.empty_like(target)
    for first in range(0, target.shape[0], BLOCK):
        block = slice(first, min(first + BLOCK, target.shape[0]))
        feed = root[: block.stop, block] / -root.diagonal()[block]
        moved = target[block].clone()
        if first:
            moved.addmm_(feed[:first].T, delta[:first])
        delta[block] = round_block(moved, target[block], feed[first:], *grid.rows(block), codes=codes[block])
    return codes


def descend(codes: Tensor, target: Tensor, hessian: Tensor, grid: Grid) -> None:
    """One pass of coordinate descent over codes [K, N], in place: each code takes the best value for the
    others as they are. tr((V - W*) H (V - W*)ᵀ) does not increase.

    target: [K, N] W*ᵀ.  hessian: [K, K].
    """
    gap = codes * grid.step[grid.group] - target
    for first in range(0, target.shape[0], BLOCK):
        block = slice(first, min(first + BLOCK, target.shape[0]))
        diagonal = hessian.diagonal()[block]
        base = gap[block] + target[block]
        with _tensor_cores():
            moved = torch.addmm(base, hessian[block] / -diagonal[:, None], gap)
        feed = hessian[block, block] / -diagonal
        gap[block] += round_block(moved, base, feed, *grid.rows(block), codes=codes[block])


def refit_scales(codes: Tensor, aim: Tensor, hessian: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Return [G, N] float32 steps, rounded to dtype: for every row the least-squares scales for its codes,
    or the old ones where the new ones are not better.

    codes: [K, N] signed, groups contiguous and equally wide.  aim: [K, N] H W*ᵀ.  hessian: [K, K].

    A row's objective is sᵀ A s - 2 bᵀ s + const, with A_gh = c_gᵀ H_gh c_h and b_g = c_gᵀ (H w*)_g.
    """
    groups, n = grid.step.shape
    width = codes.shape[0] // groups
    A = torch.empty(groups, groups, n, device=codes.device)
    for g in range(groups):
        columns = slice(g * width, (g + 1) * width)
        product = hessian[columns.start :, columns] @ codes[columns]
        product.mul_(codes[columns.start :])
        A[g:, g] = product.view(groups - g, width, n).sum(1)
        A[g, g + 1 :] = A[g + 1 :, g]
    b = (codes * aim).view(groups, width, n).sum(1)
    A, b, old = A.permute(2, 0, 1).contiguous(), b.T.contiguous(), grid.step.T
    solvable = A.clone()
    diagonal = solvable.diagonal(dim1=1, dim2=2)
    # a group of zero codes has any scale; the ridge keeps nearly parallel groups apart
    diagonal.copy_(torch.where(diagonal > 0, diagonal * (1 + 1e-5), 1.0))
    lower, _ = torch.linalg.cholesky_ex(solvable)
    new = torch.cholesky_solve(b[..., None], lower)[..., 0]
    new = new.to(dtype).float()
    new = torch.where(torch.isfinite(new) & (new >= torch.finfo(dtype).tiny), new, old)

    def loss(s: Tensor) -> Tensor:
        return (s * (torch.einsum("ngh,nh->ng", A, s) - 2 * b)).sum(1)

    return torch.where((loss(new) < loss(old))[:, None], new, old).T.contiguous()


def nearest_codes(target: Tensor, grid: Grid) -> Tensor:
    """Signed codes [K, N] of target rounded to nearest."""
    step, low, high = grid.rows(slice(None))
    return (target / step).round_().clamp_(low, high)


def row_losses(codes: Tensor, target: Tensor, hessian: Tensor, ridge: float, grid: Grid) -> Tensor:
    """(v - w*) (H - ridge I) (v - w*)ᵀ of every row, [N]."""
    gap = codes * grid.step[grid.group] - target
    return (gap * torch.addmm(gap, hessian, gap, beta=-ridge)).sum(0)


def better_rows(
    first: tuple[Tensor, Grid], second: tuple[Tensor, Grid], target: Tensor, hessian: Tensor, ridge: float
) -> tuple[Tensor, Grid]:
    """Of two solutions (codes, grid), the one with the smaller row_losses, row by row; ties to the first."""
    losses = [row_losses(codes, target, hessian, ridge, grid) for codes, grid in (first, second)]
    swap = losses[1] < losses[0]
    (codes, grid), (other, other_grid) = first, second
    return torch.where(swap, other, codes), replace(
        grid,
        step=torch.where(swap, other_grid.step, grid.step),
        low=torch.where(swap, other_grid.low, grid.low),
        high=torch.where(swap, other_grid.high, grid.high),
    )

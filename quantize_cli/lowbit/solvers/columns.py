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

    def of(self, columns: Tensor | slice) -> Grid:
        """The grid of the given columns, in their order."""
        return replace(self, group=self.group[columns])


def grouped(x: Tensor, grid: Grid) -> Tensor:
    """x [K, N] as [G, K / G, N], for groups that are contiguous and equally wide."""
    return x.view(len(grid.step), -1, x.shape[1])


def gap_of(codes: Tensor, target: Tensor, grid: Grid) -> Tensor:
    """v - w* [K, N] of codes, for groups that are contiguous and equally wide."""
    values = grouped(codes, grid) * grid.step[:, None]
    return values.view(codes.shape).sub_(target)


def round_block(target: Tensor, base: Tensor, feed: Tensor, grid: Grid, codes: Tensor) -> Tensor:
    """Run the loop above over the B columns of one block; return δ [B, N].

    target: [B, N], consumed.  base: [B, N].  feed: [B, B], used above the diagonal.
    grid: of these columns.  codes: [B, N], written.
    """
    if target.is_cuda:
        from lowbit_kernels.solve import round_block as kernel

        step, low, high = (x[grid.group] for x in (grid.step, grid.low, grid.high))
        return kernel(target, base, feed, step, low, high, codes)
    delta = torch.empty_like(target)
    # a column is little arithmetic: leaving out what autograd would need to know is a quarter of the time
    with _one_thread(), torch.inference_mode():
        _round_block_cpu(target, base, feed, grid, codes, delta)
    return delta


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
    target: Tensor, base: Tensor, feed: Tensor, grid: Grid, codes: Tensor, delta: Tensor
) -> None:
    """round_block in PyTorch; delta [B, N] is written."""
    width = target.shape[0]
    # one list per operand: indexing a tensor costs as much as the arithmetic on a column
    t, q, d, b = (x.unbind(0) for x in (target, codes, delta, base.neg()))
    steps, lows, highs = (x.unbind(0) for x in (grid.step, grid.low, grid.high))
    group = grid.group.tolist()
    weights = feed[:, :, None]
    for first in range(0, width, _STRIP):
        last = min(first + _STRIP, width)
        for j in range(first, last):
            step = steps[group[j]]
            torch.div(t[j], step, out=q[j]).round_().clamp_(lows[group[j]], highs[group[j]])
            torch.addcmul(b[j], q[j], step, out=d[j])
            if j + 1 < last:
                target[j + 1 : last].addcmul_(weights[j, j + 1 : last], d[j])
        if last < width:
            target[last:].addmm_(feed[first:last, last:].T, delta[first:last])


def gptq(target: Tensor, root: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """GPTQ over all columns in the order given; return signed codes [K, N], and |(v - w*) root|² [N].

    target: [K, N] W*ᵀ.  root: [K, K] upper, root rootᵀ = damped H.
    """
    codes, delta = torch.empty_like(target), torch.empty_like(target)
    losses = target.new_zeros(target.shape[1])
    for first in range(0, target.shape[0], BLOCK):
        block = slice(first, min(first + BLOCK, target.shape[0]))
        diagonal = root.diagonal()[block, None]
        within = root[block, block]
        carried = root[:first, block].T @ delta[:first]
        moved = torch.addcdiv(target[block], carried, diagonal, value=-1)
        feed = within / -root.diagonal()[block]
        delta[block] = round_block(moved, target[block], feed, grid.of(block), codes[block])
        losses += carried.addmm_(within.T, delta[block]).square_().sum(0)
    return codes, losses


def descend(codes: Tensor, target: Tensor, hessian: Tensor, grid: Grid) -> None:
    """One pass of coordinate descent over codes [K, N], in place: each code takes the best value for the
    others as they are. tr((V - W*) H (V - W*)ᵀ) does not increase.

    target: [K, N] W*ᵀ.  hessian: [K, K].  Groups are contiguous and equally wide.
    """
    gap = gap_of(codes, target, grid)
    for first in range(0, target.shape[0], BLOCK):
        block = slice(first, min(first + BLOCK, target.shape[0]))
        diagonal = hessian.diagonal()[block]
        base = gap[block] + target[block]
        with _tensor_cores():
            moved = torch.addmm(base, hessian[block] / -diagonal[:, None], gap)
        feed = hessian[block, block] / -diagonal
        gap[block] += round_block(moved, base, feed, grid.of(block), codes[block])


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
    """Signed codes [K, N] of target rounded to nearest, for groups that are contiguous and equally wide."""
    codes = grouped(target, grid) / grid.step[:, None]
    return codes.round_().clamp_(grid.low[:, None], grid.high[:, None]).view(target.shape)


@dataclass(frozen=True)
class Damped:
    """H, as what it is damped by and the factor of that.

    root: [K, K] upper, of H + ridge I with columns in `order`.  order: [K] int64.
    """

    root: Tensor
    ridge: float
    order: Tensor

    def undamp(self, losses: Tensor, gap: Tensor) -> Tensor:
        """gap H gapᵀ of every row of gap [K, N], from |gap root|² [N]."""
        return losses - self.ridge * gap.square().sum(0)

    def losses(self, gap: Tensor, limit: Tensor | None = None) -> Tensor:
        """gap H gapᵀ of every row of gap [K, N], [N]; with limit [N] no more of the sum than shows that no
        row stays below it."""
        ordered = gap.index_select(0, self.order)
        losses = self.undamp(gap.new_zeros(gap.shape[1]), gap)
        for first in range(0, len(gap), BLOCK):
            block = slice(first, min(first + BLOCK, len(gap)))
            losses += (self.root[: block.stop, block].T @ ordered[: block.stop]).square_().sum(0)
            if limit is not None and bool((losses >= limit).all()):
                break
        return losses


def better_rows(
    codes: Tensor, grid: Grid, losses: Tensor, target: Tensor, nearest: Grid, hessian: Damped
) -> tuple[Tensor, Grid]:
    """codes [K, N] and grid, but rows whose loss [N] is above that of rounding to `nearest` are rounded."""
    rounded = nearest_codes(target, nearest)
    swap = hessian.losses(gap_of(rounded, target, nearest), limit=losses) < losses
    if not swap.any():
        return codes, grid
    return torch.where(swap, rounded, codes), replace(
        grid,
        step=torch.where(swap, nearest.step, grid.step),
        low=torch.where(swap, nearest.low, grid.low),
        high=torch.where(swap, nearest.high, grid.high),
    )

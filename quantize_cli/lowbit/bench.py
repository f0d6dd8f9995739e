"""Time the products of a checkpoint's layers on this GPU beside the dense ones they replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from lowbit.errors import RecipeError
from lowbit.folder import KERNELS, open_quantized
from lowbit.report import KernelPoint, roofline_figure
from lowbit.runtime import use_tuned
from lowbit.tune import measurable, stored_kinds
from lowbit.whole import whole_file
from lowbit_kernels import bench as kernels
from lowbit_kernels.tuning import Shape

# q/k/v, o, gate/up and down of an 8B model, as engines fuse them.
USUAL = (Shape(6144, 4096), Shape(4096, 4096), Shape(28672, 4096), Shape(4096, 14336))


def bench(
    path: str | Path | None = None,
    *,
    tokens: Iterable[int] = kernels.TOKENS,
    on_row: Callable[[kernels.BenchRow], None] = lambda row: None,
) -> list[kernels.BenchRow]:
    """Measure every kind of layer of a folder, or the layers of an 8B model, for each number of tokens.

    Configs are those that lowbit.load would take, from the folder's lowbit_kernels.json where it was tuned.
    Raises RecipeError without a GPU or if the folder has no layer that the fast kernels read.
    """
    if not torch.cuda.is_available():
        raise RecipeError(
            "bench measures on a GPU and torch sees none here; run it where the model will serve"
        )
    if path is None:
        return kernels.bench(USUAL, tokens, on_row)
    folder = open_quantized(path, "bench")
    shapes = measurable(stored_kinds(folder))
    if not shapes:
        raise RecipeError(f"{path}: none of its layers has a kernel that can be measured")
    use_tuned(folder.path / KERNELS, torch.device("cuda"))
    return kernels.bench(shapes, tokens, on_row)


def plot(rows: Sequence[kernels.BenchRow], file: Path) -> None:
    """Draw the right rows under the roof of this GPU; the ending of file says how: .png, .svg, .pdf.

    Raises RecipeError if the ending is none of matplotlib's, matplotlib is missing or nothing was right.
    """
    points = [
        KernelPoint(row.n, row.k, row.m, row.config.variant, row.us, row.nbytes + 2 * row.m * (row.n + row.k))
        for row in rows
        if row.us is not None
    ]
    if not points:
        raise RecipeError(f"{file}: no product was right, so there is nothing to draw")
    with whole_file(file) as half:
        roofline_figure(points, torch.cuda.get_device_name()).savefig(half, dpi=200)


def check_plot(file: Path) -> None:
    """Refuse a file that plot() could not write, before anything is measured."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RecipeError("--plot needs matplotlib; run `pip install 'lowbit[report]'`") from None
    known = Figure().canvas.get_supported_filetypes()
    if file.suffix[1:] not in known:
        raise RecipeError(
            f"{file}: not a picture that can be written; use one of .{', .'.join(sorted(known))}"
        )
    if not file.absolute().parent.is_dir():
        raise RecipeError(f"{file}: no such folder {file.absolute().parent}")

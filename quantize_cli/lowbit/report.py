"""One self-contained HTML page about a quantized checkpoint: what was done, what it cost, where it hurts.

Pictures are SVG by matplotlib, inside the page; their ink takes the page's colours, so that they are legible
on light and dark alike. Nothing is fetched from a network.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from lowbit.checkpoint.header import read_json
from lowbit.checkpoint.source import Source
from lowbit.errors import OutputError, SourceError
from lowbit.evaluate import EvalReport, Scores
from lowbit.folder import EVALUATION, KERNELS, REPORT, DenseView, Folder, open_quantized
from lowbit.inspection import summarize, tensor_parallel
from lowbit.verify import VerifyReport, reach_source, source_weight
from lowbit.whole import whole_file

HISTOGRAMS = 4
BINS = 81

# device name contains -> TB/s of memory and dense TFLOP/s in 16 bits, from NVIDIA's and AMD's data sheets
PEAKS = {
    "H200": (4.8, 989.0),
    "H100": (3.35, 989.0),
    "A100": (2.0, 312.0),
    "L40S": (0.864, 362.0),
    "MI300X": (5.3, 1307.0),
}

# matplotlib draws in these; the page's style sheet replaces them with its variables
INK, MUTED, BEFORE, AFTER = "#010203", "#040506", "#070809", "#0a0b0c"
VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", BEFORE: "var(--before)", AFTER: "var(--after)"}


@dataclass(frozen=True)
class Row:
    """One layer of the page. errors are relative; snr_db in dB."""

    name: str
    scheme: str
    output_error: float
    weight_error: float
    snr_db: float
    fallback: str | None


def report(
    path: str | Path,
    out: str | Path | None = None,
    source: str | Path | None = None,
    verified: VerifyReport | None = None,
) -> Path:
    """Write the page for a folder that lowbit quantized, and return its path.

    out: None is report.html in the folder.  source: original model for the histograms; None takes the
    manifest's if it is on this machine.  verified: the outcome of verify, shown and preferred to the recorded
    errors.
    Raises SourceError for a folder without lowbit.json, or if a library of the `report` extra is missing;
    OutputError if out cannot be a file.
    """
    try:
        import jinja2
        import markupsafe
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise SourceError(f"report needs {e.name}; run `pip install 'lowbit[report]'`") from None
    folder = open_quantized(path, "report")
    target = Path(out) if out is not None else folder.path / REPORT
    if target.is_dir() or not target.parent.is_dir():
        raise OutputError(
            f"{target}: {'a folder' if target.is_dir() else 'no such folder'}; name a file to write"
        )
    # weights, for one
    if target.is_file() and target.suffix.lower() not in (".html", ".htm"):
        raise OutputError(f"{target}: is there and no .html file; name another file to write")
    if folder.manifest is None:
        raise SourceError(f"{path}: no lowbit.json; report takes the folder that lowbit quantize wrote")
    rows = layer_rows(folder.manifest, verified)
    worst = rows[:10]
    with ExitStack() as stack:
        origin, _ = reach_source(folder, source, stack)
        shown = [row.name for row in worst if row.name in folder.layers][:HISTOGRAMS]
        histograms = [histogram(folder, folder.manifest, origin, name) for name in shown]
    kernels, points = read_kernels(folder.path / KERNELS)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = (resources.files("lowbit") / "templates" / "report.html").read_text(encoding="utf-8")
    page = environment.from_string(template).render(
        title=Path(path).resolve().name,
        folder=folder,
        manifest=folder.manifest,
        sizes=sizes(folder),
        schemes=summarize(folder),
        tensor_parallel=tensor_parallel(folder),
        rows=rows,
        worst=worst,
        fallbacks=[row for row in rows if row.fallback],
        copied=copied(folder.manifest),
        heat_map=heat_map(rows) if rows else None,
        histograms=histograms,
        evaluation=read_evaluation(folder.path / EVALUATION),
        kernels=kernels,
        points=points,
        roofline=roofline(points, kernels["device"]) if kernels and points else None,
        verified=verified,
        percent=percent,
        size=human_size,
        breakable=lambda name: markupsafe.escape(name).replace(".", markupsafe.Markup(".<wbr>")),
    )
    with whole_file(target) as file:
        file.write_text(page, encoding="utf-8")
    return target


def layer_rows(manifest: dict[str, Any], verified: VerifyReport | None) -> list[Row]:
    """Layers with known errors, the worst output error first."""
    measured = {layer.name: layer.errors for layer in verified.layers} if verified else {}
    rows = []
    for layer in manifest["layers"]:
        errors = {**(layer.get("errors") or {}), **measured.get(layer["name"], {})}
        if "output_error" in errors:
            scheme = layer["scheme"]
            group = "row" if scheme["group_size"] == -1 else f"g{scheme['group_size']}"
            text = f"int{scheme['bits']} {'sym' if scheme['symmetric'] else 'asym'} {group}"
            rows.append(
                Row(
                    layer["name"],
                    text,
                    errors["output_error"],
                    errors["weight_error"],
                    errors["snr_db"],
                    layer.get("fallback"),
                )
            )
    return sorted(rows, key=lambda row: -row.output_error)


@dataclass(frozen=True)
class Sizes:
    """Bytes. before: with two bytes for each quantized weight, as bf16 or fp16 models have."""

    before: int
    after: int
    packed: int
    weights: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.packed / max(1, self.weights)


def sizes(folder: Folder) -> Sizes:
    packed = sum(layer.nbytes for layer in folder.layers.values())
    weights = sum(math.prod(layer.shape) for layer in folder.layers.values())
    after = sum(info.nbytes for info in folder.entries.values())
    return Sizes(after - packed + 2 * weights, after, packed, weights)


def copied(manifest: dict[str, Any]) -> list[tuple[str, int, int]]:
    """(reason, tensors, bytes) of what was not quantized, most bytes first."""
    groups: dict[str, list[int]] = {}
    for row in manifest["copied"]:
        groups.setdefault(row["reason"], []).append(row["nbytes"])
    return sorted(((why, len(each), sum(each)) for why, each in groups.items()), key=lambda row: -row[2])


# ---- pictures


def heat_map(rows: Sequence[Row]) -> str:
    """Output error by decoder block (down) and module (across); experts of a block show their worst."""
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    cells: dict[tuple[int, str], Row] = {}
    for row in rows:
        # rows come worst first
        cells.setdefault(cell_of(row.name), row)
    blocks = sorted({block for block, _ in cells})
    modules = list(dict.fromkeys(module for _, module in sorted(cells, key=lambda cell: _order(cell[1]))))
    errors = np.array([max(row.output_error, 1e-9) for row in cells.values()])
    norm = LogNorm(errors.min(), max(errors.max(), errors.min() * 1.0001))
    colours = _matplotlib().colormaps["YlOrRd"]
    figure, axes = _figure(max(3.4, 0.62 * len(modules) + 0.6), 0.22 * len(blocks) + 1.2)
    titles = {}
    for i, ((block, module), row) in enumerate(cells.items()):
        x, y = modules.index(module), blocks.index(block)
        worst = i == 0
        axes.add_patch(
            Rectangle(
                (x + 0.03, y + 0.06),
                0.94,
                0.88,
                facecolor=colours(norm(max(row.output_error, 1e-9))),
                edgecolor=INK if worst else "none",
                linewidth=2 if worst else 0,
                zorder=3 if worst else 2,
                gid=f"cell-{x}-{y}",
            )
        )
        titles[f"cell-{x}-{y}"] = f"{row.name}: output error {percent(row.output_error)}, {row.snr_db:.1f} dB"
        if worst:
            axes.annotate(
                "worst", (x + 0.5, y + 0.5), ha="center", va="center", color="white", fontsize=9, zorder=4
            )
    axes.set(xlim=(0, len(modules)), ylim=(len(blocks), 0))
    axes.set_xticks(
        [i + 0.5 for i in range(len(modules))], [_short(m) for m in modules], rotation=40, ha="left"
    )
    step = max(1, len(blocks) // 16)
    axes.set_yticks([i + 0.5 for i in range(0, len(blocks), step)], [str(b) for b in blocks[::step]])
    axes.set_ylabel("decoder block")
    axes.xaxis.tick_top()
    return _svg(figure, "Relative output error of every layer, by decoder block and module", titles)


def histogram(folder: Folder, manifest: dict[str, Any], source: Source | None, name: str) -> str:
    """Distribution of a layer's weights before (if there is a source) and after, on one axis."""
    after = DenseView(folder).layer(name)
    row = next(row for row in manifest["layers"] if row["name"] == name)
    weight = None if source is None else source_weight(source, name, row)
    before = None if weight is None else weight.float()
    label = _short(name)
    shown = after if before is None else before
    edge = float(shown.abs().max()) or 1.0
    edges = np.linspace(-edge, edge, BINS + 1)
    figure, axes = _figure(4.2, 2.3)
    if before is not None:
        counts, _ = np.histogram(before.numpy(), edges)
        axes.stairs(counts + 1, edges, fill=True, color=BEFORE, alpha=0.45, label="before", baseline=1)
    counts, _ = np.histogram(after.numpy().clip(-edge, edge), edges)
    axes.stairs(counts + 1, edges, color=AFTER, linewidth=1.2, label="after", baseline=1)
    axes.set_yscale("log")
    axes.set_xlabel("weight")
    axes.set_ylabel("count + 1")
    axes.set_title(label, fontsize=9, color=INK)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return _svg(figure, f"Histogram of the weights of {label} before and after", {})


def cell_of(name: str) -> tuple[int, str]:
    """(block, module) of a layer name; layers outside of blocks are in block -1."""
    found = re.search(r"\.(\d+)\.(.+)$", name)
    if found is None:
        return -1, name
    return int(found[1]), re.sub(r"\.\d+\.", ".*.", found[2])


# columns of the heat map, in the order in which a block runs them
_ORDER = (
    "q", "k", "v", "qkv", "c_attn", "query_key_value", "o", "out", "dense",
    "gate", "up", "gate_up", "c_fc", "fc1", "w1", "w3", "down", "w2", "fc2",
)  # fmt: skip


def _order(module: str) -> tuple[int, str]:
    leaf = module.rpartition(".")[2].removesuffix("_proj")
    return (_ORDER.index(leaf) if leaf in _ORDER else len(_ORDER)), module


def _short(name: str) -> str:
    """The last two parts of a module name, without words that say nothing."""
    parts = [
        part for part in name.split(".") if part not in ("model", "layers", "self_attn", "mlp", "transformer")
    ]
    return ".".join(parts).removesuffix("_proj")


def _matplotlib() -> Any:
    import matplotlib

    return matplotlib


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure that needs no display and no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.tick_params(which="both", colors=INK, labelsize=9, length=0)
    axes.xaxis.label.set(color=MUTED, fontsize=8)
    axes.yaxis.label.set(color=MUTED, fontsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure, axes


def _svg(figure: Any, label: str, titles: dict[str, str]) -> str:
    """The figure as an <svg> element that scales with the page; titles: what the pointer shows, by gid."""
    out = io.StringIO()
    with _matplotlib().rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "lowbit", "font.family": "sans-serif"}
    ):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    for gid, text in titles.items():
        svg = svg.replace(f'<g id="{gid}">', f'<g id="{gid}"><title>{escape(text)}</title>')
    width = re.search(r'width="([\d.]+)pt"', svg)
    style = f'style="max-width:{float(width[1]) * 1.5:.0f}px"' if width else ""
    svg = re.sub(r'(width|height)="[\d.]+pt" ?', "", svg, count=2)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" {style} ', 1)


@dataclass(frozen=True)
class KernelPoint:
    """One measured product of lowbit_kernels.json: y [M, N] = x [M, K] W^T in `us` microseconds."""

    n: int
    k: int
    tokens: int
    variant: str
    us: float
    nbytes: float

    @property
    def flops(self) -> float:
        return 2.0 * self.tokens * self.n * self.k

    @property
    def tflops(self) -> float:
        return self.flops / self.us / 1e6

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / self.us / 1e3

    @property
    def intensity(self) -> float:
        """Floating-point operations for each byte that has to move."""
        return self.flops / self.nbytes


def kernel_points(table: dict[str, Any] | None) -> list[KernelPoint]:
    """The measured rows of lowbit_kernels.json (see lowbit_kernels.tables), in its order; none if untuned."""
    points = []
    for row in (table or {}).get("rows", []):
        if row["us"] is None:
            continue
        problem = row["problem"]
        n, k, m = problem["n"], problem["k"], problem["m_bucket"]
        # codes, one 16-bit scale a group (and zero-point), activations in and out
        stored_with_group = 4 if problem["has_zero"] else 2
        weight = n * k * (problem["bits"] / 8 + stored_with_group / problem["group_size"])
        points.append(KernelPoint(n, k, m, row["config"]["variant"], row["us"], weight + 2 * m * (n + k)))
    return points


def roofline(points: Sequence[KernelPoint], device: str) -> str:
    """roofline_figure as an <svg> element."""
    figure = roofline_figure(points, device)
    return _svg(figure, f"Measured speed of the tuned kernels on {device}", {})


def roofline_figure(points: Sequence[KernelPoint], device: str) -> Any:
    """TFLOP/s over operations a byte, a line for each shape, under the roof of the device if it is known."""
    figure, axes = _figure(6.4, 3.6)
    intensities = [point.intensity for point in points]
    peaks = next((peak for name, peak in PEAKS.items() if name in device), None)
    if peaks is not None:
        at = np.geomspace(min(intensities) / 1.5, max(intensities) * 1.5, 64)
        axes.plot(at, np.minimum(peaks[0] * at, peaks[1]), color=MUTED, linewidth=1, linestyle="--")
    colours = _matplotlib().colormaps["viridis"]
    shapes = list(dict.fromkeys((point.n, point.k) for point in points))
    for i, shape in enumerate(shapes):
        own = sorted((p for p in points if (p.n, p.k) == shape), key=lambda point: point.tokens)
        axes.plot(
            [point.intensity for point in own],
            [point.tflops for point in own],
            marker="o",
            markersize=3,
            linewidth=1,
            color=colours(0.25 + 0.6 * i / max(1, len(shapes) - 1)),
            label=f"{shape[0]} × {shape[1]}",
        )
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, title="out × in", title_fontproperties={"size": 8})
    axes.get_legend().get_title().set_color(MUTED)
    return figure


# ---- text


def percent(value: float) -> str:
    # a no-break space: the sign stays with its number
    return f"{100 * value:.{2 if value < 0.1 else 1}f}\u00a0%"


def human_size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def read_kernels(file: Path) -> tuple[dict[str, Any] | None, list[KernelPoint]]:
    """The table of `lowbit tune` and its measurements; SourceError if it is none."""
    if not file.is_file():
        return None, []
    table = read_json(file)
    try:
        return {key: table[key] for key in ("device", "arch", "rows")} | table, kernel_points(table)
    except (KeyError, TypeError, ArithmeticError) as e:
        raise _not_written(file, "lowbit tune", e) from None


def read_evaluation(file: Path) -> dict[str, Any] | None:
    """The fields of `lowbit eval`'s result, also an earlier version's; SourceError if it is none."""
    if not file.is_file():
        return None
    found = read_json(file)
    try:
        domains = {name: _scores(values) for name, values in found["domains"].items()}
        return asdict(EvalReport(**(found | {"total": _scores(found["total"]), "domains": domains})))
    except (KeyError, TypeError, AttributeError) as e:
        raise _not_written(file, "lowbit eval", e) from None


def _scores(values: dict[str, Any]) -> Scores:
    for name, value in values.items():
        if value is not None and not isinstance(value, int | float):
            raise TypeError(f"{name} is {value!r}")
    return Scores(**values)


def _not_written(file: Path, command: str, error: Exception) -> SourceError:
    return SourceError(
        f"{file}: not what {command} writes ({type(error).__name__}: {error}); run it again or remove it"
    )

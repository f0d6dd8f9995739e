"""`lowbit plan MODEL`: what quantize would do, from headers alone."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from lowbit.cli import options
from lowbit.cli.output import Output, counted, duration, facts, output, percent, size, small_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lowbit.estimate import Estimate
    from lowbit.plan import LayerPlan, Plan


@options.with_recipe_flags
def plan(
    model: options.Model,
    *,
    flags: dict[str, Any],
    recipe: options.RecipeFile = None,
    revision: options.Revision = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show what quantize would do, from headers alone; reads no weight, writes nothing."""
    with output(json, quiet) as out:
        show_plan(out, model, recipe, revision, flags)


def show_plan(
    out: Output, model: str, recipe: Path | None, revision: str | None, flags: dict[str, Any]
) -> None:
    """Plan and print it: `lowbit plan` and `lowbit quantize --dry-run`."""
    from lowbit.checkpoint.source import open_source
    from lowbit.events import PlanReady
    from lowbit.recipe import make_recipe

    # a mistyped flag or path need not wait for torch, whose import takes seconds
    wanted = make_recipe(recipe, **flags)
    with open_source(model, trust_remote_code=wanted.trust_remote_code, revision=revision) as source:
        with out.starting():
            from lowbit.calib import calibration_size
            from lowbit.device import pick_device
            from lowbit.estimate import estimate
            from lowbit.plan import make_plan
        device = pick_device(wanted.device)
        planned = make_plan(source, wanted)
    widest = max(layer.shape[1] for layer in planned.layers)
    tokens = prod(calibration_size(wanted.samples, wanted.seqlen, device.type, widest))
    expected = estimate(planned, device, tokens)
    out.event(PlanReady(planned).to_json() | {"expected": [asdict(row) for row in expected]})
    out.show(*plan_view(planned), *estimate_view(expected, str(device), tokens))


def estimate_view(expected: list[Estimate], device: str, tokens: int) -> list[RenderableType]:
    """What each method would take here, in round figures."""
    table = small_table(f"expected on {device}, without reading and writing")
    table.add_column("method", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    for row in expected:
        gpu = f" + {size(row.device_bytes)} on the GPU" if row.device_bytes else ""
        method = f"{row.method}, {tokens} tokens" if row.method == "gptq" else row.method
        table.add_row(method, f"about {duration(row.seconds)}", f"{size(row.host_bytes)}{gpu}")
    return [table, ""]


def kind(name: str) -> str:
    """A tensor name with every index as `*`: what repeats from block to block and expert to expert."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def plan_view(plan: Plan) -> list[RenderableType]:
    """The plan for people: layers by kind, notes on fallbacks, what is copied or dropped, sizes."""
    views: list[RenderableType] = [_layer_table(plan)]
    if any(layer.fallback for layer in plan.layers):
        views.append(Text("* not the group asked for", style="dim"))
    views.append("")
    if plan.notes:
        views += [_list("notes", [(note, "") for note in plan.notes]), ""]
    if plan.copies:
        views += [_list("copied as they are", _copied(plan)), ""]
    if plan.dropped:
        dropped = Counter(plan.dropped.values())
        views += [_list("dropped", [(why, counted(n, "tensor")) for why, n in dropped.items()]), ""]
    return [*views, _sizes(plan), ""]


def _layer_table(plan: Plan) -> RenderableType:
    """One row for each kind of layer with one shape, scheme and method."""
    rows: defaultdict[tuple[str, tuple[int, int], str, str, bool], list[LayerPlan]] = defaultdict(list)
    for layer in plan.layers:
        fell_back = layer.fallback is not None
        rows[kind(layer.name), layer.shape, str(layer.scheme), layer.method, fell_back].append(layer)
    prefix = _common_prefix([key[0] for key in rows])
    methods = {layer.method for layer in plan.layers}

    table = small_table(plan.model)
    table.add_column(f"layers of {prefix}" if prefix else "layers", overflow="fold")
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("out×in", justify="right", no_wrap=True)
    table.add_column(f"{' and '.join(sorted(methods))} scheme", no_wrap=True)
    table.add_column("before → after", justify="right", no_wrap=True)
    for (name, (n, k), scheme, method, fell_back), layers in rows.items():
        before, after = (sum(getattr(x, key) for x in layers) for key in ("source_bytes", "packed_bytes"))
        table.add_row(
            name.removeprefix(f"{prefix}."),
            str(len(layers)),
            f"{n}×{k}",
            (scheme if len(methods) == 1 else f"{method} {scheme}") + (" *" if fell_back else ""),
            f"{size(before)} → {size(after)}",
        )
    return table


def _common_prefix(kinds: list[str]) -> str:
    """The leading name parts that all kinds share, always leaving them a name of their own."""
    if not kinds:
        return ""
    shared = []
    for parts in zip(*(name.split(".")[:-1] for name in kinds), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _copied(plan: Plan) -> list[tuple[str, str]]:
    """Reasons with the number, bytes and kinds of the tensors that they keep."""
    by_reason: defaultdict[str, list] = defaultdict(list)
    for copy in plan.copies:
        by_reason[copy.reason].append(copy)
    return [
        (
            f"{reason}: {', '.join(dict.fromkeys(kind(copy.name) for copy in copies))}",
            f"{counted(len(copies), 'tensor')}, {size(sum(copy.nbytes for copy in copies))}",
        )
        for reason, copies in by_reason.items()
    ]


def _list(title: str, rows: list[tuple[str, str]]) -> RenderableType:
    """A titled list whose rows end with how many there are of each."""
    table = Table(
        box=None, title=title, title_justify="left", title_style="bold", show_header=False, padding=(0, 2)
    )
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True, style="dim")
    for text, count in rows:
        table.add_row(Text(text), count)
    return table


def _sizes(plan: Plan) -> RenderableType:
    bits = f"{plan.bits_per_weight:.2f} bits per quantized weight"
    return facts(
        [
            (
                "quantized",
                f"{counted(len(plan.layers), 'layer')}, {percent(plan.coverage)} of the bytes; {bits}",
            ),
            ("checkpoint", f"{size(plan.source_bytes)} → {size(plan.output_bytes)}"),
        ]
    )

"""Tables of measured configs: the shipped ones under tuned/, and those that `lowbit tune` writes.

    {"device", "arch", "driver", "torch", "triton", "kernels", "date",
     "rows": [{"problem": {...}, "config": {...}, "us", "rel_err"}, ...]}

A table holds for the device it was measured on. One that a user made also has to match the Triton release and
the source of the kernels, as either may change which config is fastest, or right.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .problem import KernelConfig, Problem

SHIPPED = Path(__file__).parent / "tuned"


@functools.cache
def shipped_configs(arch: str, device: str | None) -> dict[Problem, KernelConfig]:
    """The shipped table for this device; without a device, the first one for its architecture."""
    for path in sorted(SHIPPED.glob("*.json")):
        table = json.loads(path.read_text())
        if table["arch"] == arch and device in (None, table["device"]):
            return _configs(table)
    return {}


def read_table(path: Path, device: str | None) -> tuple[dict[Problem, KernelConfig], str | None]:
    """The configs of a table that `lowbit tune` wrote, and None; or no configs, and the reason.

    An untuned table says what choose() would choose without it: no configs, and no reason.
    device: name of the GPU that would use it.
    """
    try:
        table = json.loads(path.read_text())
        if table.get("tuned") is False:
            return {}, None
        stamp = table["device"], table["triton"], table["kernels"]
        here = device, _version("triton"), kernel_hash()
        # before the configs, whose fields are other ones for other kernels
        for name, found, wanted in zip(("device", "Triton", "kernels"), stamp, here, strict=True):
            if found != wanted:
                return {}, f"{path}: tuned for {name} {found}, this is {wanted}; run `lowbit tune` again"
        return _configs(table), None
    except OSError as e:
        return {}, f"{path}: {e.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        return {}, f"{path}: not a table of kernel configs ({type(e).__name__}: {e})"


def write_table(
    path: Path, stamp: dict[str, Any], rows: Iterable[tuple[Problem, KernelConfig, float, float]]
) -> None:
    """Write a table.  stamp: device, arch, driver, torch, date.  rows end in microseconds and error."""
    path.write_text(table_text(stamp, rows))


def table_text(
    stamp: dict[str, Any], rows: Iterable[tuple[Problem, KernelConfig, float | None, float | None]]
) -> str:
    """A table as JSON, one row a line; rows that were not measured end in None, None."""
    head = json.dumps({**stamp, "triton": _version("triton"), "kernels": kernel_hash()}, indent=1)
    lines = [
        json.dumps(
            {
                "problem": asdict(problem),
                "config": asdict(config),
                "us": None if us is None else round(us, 2),
                "rel_err": None if error is None else float(f"{error:.2g}"),
            }
        )
        for problem, config, us, error in rows
    ]
    return head[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


@functools.cache
def kernel_hash() -> str:
    """Names the code of the kernels: changes when it does, not with comments or docstrings."""
    digest = hashlib.sha256()
    for name in ("device.py", "fragment.py", "hopper.py", "resident.py", "wna16.py"):
        tree = ast.parse((Path(__file__).parent / name).read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and _is_docstring(body[0]):
                body.pop(0)
        digest.update(repr(_plain(tree)).encode())
    return digest.hexdigest()[:16]


def _plain(node: Any) -> Any:
    """A syntax tree as lists, without the empty fields, in which Python's releases differ."""
    if isinstance(node, ast.AST):
        held = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
        return [type(node).__name__, *((name, _plain(value)) for name, value in held)]
    return [_plain(each) for each in node] if isinstance(node, list) else node


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def _configs(table: dict[str, Any]) -> dict[Problem, KernelConfig]:
    """The rows of a table; TypeError for a value of another type than its field."""
    found = {}
    for row in table["rows"]:
        problem, config = Problem(**row["problem"]), KernelConfig(**row["config"])
        for part in (problem, config):
            for field in fields(part):
                value = getattr(part, field.name)
                # annotations are text here
                if type(value).__name__ != field.type:
                    raise TypeError(f"{field.name} is {value!r}")
        found[problem] = config
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

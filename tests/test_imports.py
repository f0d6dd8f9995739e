"""The house plan: imports go one way, heavy libraries stay in their rooms, and help needs none of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {"lowbit": ROOT / "quantize_cli/lowbit", "lowbit_kernels": ROOT / "kernels/lowbit_kernels"}

# A module may import those above it and beside it, never those below.
LEVELS = {
    "lowbit": [
        {"errors"},
        {"scheme"},
        {"events", "recipe", "hessian", "decode", "solvers", "checkpoint"}
        | {"ahead", "device", "manifest", "whole"},
        {"plan", "calib", "blocks", "validate", "folder", "verify", "evaluate", "tune", "bench", "report"}
        | {
            "inspect",
            "generate",
            "hub",
            "convert",
            "runtime",
            "folder",
            "inspection",
            "skeleton",
            "streamed",
            "tasks",
            "activations",
            "products",
            "estimate",
        },
        {"pipeline"},
        {"cli"},
    ],
    "lowbit_kernels": [
        {"layout"},
        {"reference", "device", "problem"},
        {"wna16", "packing", "solve", "fragment", "hopper", "resident", "tables"},
        {"dispatch"},
        {"measure", "tuning", "bench", "functional"},
    ],
}

# Library -> the only modules that may import it.
ROOMS = {
    "typer": {"lowbit.cli"},
    "click": set(),
    "rich": {"lowbit.cli"},
    "transformers": {"lowbit.skeleton", "lowbit.calib", "lowbit.plan", "lowbit.evaluate", "lowbit.generate"}
    | {"lowbit.runtime"},
    "safetensors": {"lowbit.checkpoint"},
    "triton": {"lowbit_kernels"},
}


def module_name(package: str, file: Path) -> str:
    parts = file.relative_to(SOURCES[package]).with_suffix("").parts
    return ".".join((package, *(part for part in parts if part != "__init__")))


def runtime_imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Absolute names that a file imports when it runs (functions included, TYPE_CHECKING not), with lines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            yield node.module, node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
        else:
            yield from runtime_imports(node)


def files() -> list[tuple[str, str, Path]]:
    return [
        (package, module_name(package, file), file)
        for package, folder in SOURCES.items()
        for file in sorted(folder.rglob("*.py"))
    ]


def level(package: str, module: str) -> int | None:
    """The level of a module of the package by the first part of its name; None for the package itself."""
    rest = module.split(".")[1:]
    if not rest:
        return None
    found = [i for i, names in enumerate(LEVELS[package]) if rest[0] in names]
    assert found, f"{module}: not in the house plan; give it a level in LEVELS"
    return found[0]


def wrong_imports(package: str, module: str, source: str) -> list[str]:
    """What a module imports against the house plan, one line each."""
    wrong = []
    own = level(package, module)
    known = {name for names in LEVELS[package] for name in names}
    for name, line in runtime_imports(ast.parse(source)):
        top = name.split(".")[0]
        if top == "lowbit" and package == "lowbit_kernels":
            wrong.append(f"{module}:{line}: the kernel package knows nothing of lowbit")
        elif top == package and own is not None and name.split(".")[1:2] and name.split(".")[1] in known:
            other = level(package, name)
            if other is not None and other > own:
                wrong.append(f"{module}:{line}: imports {name}, which is below it")
        elif top in ROOMS and not any(module == room or module.startswith(f"{room}.") for room in ROOMS[top]):
            wrong.append(
                f"{module}:{line}: {top} is imported only in {', '.join(sorted(ROOMS[top])) or 'nothing'}"
            )
    return wrong


@pytest.mark.parametrize(
    ("package", "module", "file"), files(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_imports_go_one_way(package: str, module: str, file: Path) -> None:
    assert wrong_imports(package, module, file.read_text()) == []


@pytest.mark.parametrize(
    ("package", "module", "source"),
    [
        ("lowbit", "lowbit.scheme", "from lowbit import pipeline"),
        ("lowbit", "lowbit.scheme", "import lowbit.pipeline"),
        ("lowbit", "lowbit.solvers.rtn", "def f():\n    from lowbit.plan import Plan"),
        ("lowbit", "lowbit.verify", "import typer"),
        ("lowbit", "lowbit.cli.app", "import click"),
        ("lowbit", "lowbit.plan", "from safetensors.torch import load_file"),
        ("lowbit_kernels", "lowbit_kernels.layout", "from lowbit.scheme import QuantScheme"),
        ("lowbit_kernels", "lowbit_kernels.layout", "import lowbit_kernels.wna16"),
    ],
)
def test_a_wrong_import_is_caught(package: str, module: str, source: str) -> None:
    assert len(set(wrong_imports(package, module, source))) >= 1


def modules_after(code: str, cwd: Path) -> set[str]:
    """Top-level names in sys.modules after the code ran in a fresh interpreter."""
    script = f"import sys\n{code}\nprint('MODULES', *sorted({{m.split('.')[0] for m in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=cwd)
    return set(run.stdout.rpartition("MODULES")[2].split())


HELP = """
from lowbit.cli.app import app
try:
    app({args})
except SystemExit:
    pass
"""


HEAVY = {"torch", "triton", "transformers", "datasets", "numpy", "yaml", "safetensors", "huggingface_hub"}


@pytest.mark.parametrize(
    ("args", "heavy"),
    [
        (["--help"], HEAVY | {"lowbit_kernels", "pydantic", "asyncio"}),
        (["--version"], HEAVY | {"lowbit_kernels", "pydantic", "asyncio"}),
        # typer itself needs pydantic to describe the types of options
        (["quantize", "--help"], HEAVY | {"lowbit_kernels"}),
    ],
    ids=["help", "version", "help of a command"],
)
def test_help_imports_no_heavy_library(args: list[str], heavy: set[str], tmp_path: Path) -> None:
    assert not modules_after(HELP.format(args=args), tmp_path) & heavy


TYPO = """
from lowbit.cli.app import app
from lowbit.cli.errors import exit_code
assert exit_code(lambda: app({args}, standalone_mode=False)) == 2
"""


@pytest.mark.parametrize(
    "args",
    [
        "quantize nowhere",
        "quantize . --bits 5",
        "plan nowhere",
        "plan . --device tpu",
        "plan . --method awq",
        "plan . --format gguf",
        "quantize . --recipe nowhere.yaml",
        "quantize .",
        *(f"{command} nowhere" for command in ("verify", "inspect", "report", "tune")),
        "convert nowhere --format gptq",
        "push nowhere me/m",
    ],
)
def test_a_typo_is_answered_before_torch_is_imported(args: str, tmp_path: Path) -> None:
    assert not modules_after(TYPO.format(args=args.split()), tmp_path) & {"torch", "triton", "transformers"}


def test_importing_the_packages_needs_no_gpu_library(tmp_path: Path) -> None:
    assert not modules_after("import lowbit, lowbit_kernels", tmp_path) & {"triton", "transformers"}


def test_the_name_kernels_is_left_to_its_owner(tmp_path: Path) -> None:
    # transformers probes for the PyPI project `kernels`: a folder of ours must not answer
    code = "from importlib.util import find_spec; print(find_spec('kernels'))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert str(ROOT) not in found.stdout
    assert not (ROOT / "kernels/__init__.py").exists()
    assert not (ROOT / "quantize_cli/__init__.py").exists()

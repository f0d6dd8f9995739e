"""The kernels as a Kernel Hub package, and as two functions of plain tensors."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowbit_kernels import functional, quantize_weight_int4_grouped, w4a16_gemm
from lowbit_kernels.dispatch import GemmWeight, prepare

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kernels" / "lowbit_kernels"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_two_functions_match_float64(dtype):
    torch.manual_seed(0)
    weight, x = torch.randn(40, 256).to(dtype), torch.randn(3, 5, 256).to(dtype)
    packed, scales, zeros = quantize_weight_int4_grouped(weight, 64)
    assert (packed.shape, packed.dtype) == ((40, 32), torch.int32)
    assert (scales.shape, scales.dtype, zeros.shape, zeros.dtype) == ((40, 4), dtype, (40, 4), torch.uint8)
    # code k of a row is nibble k of the row's bytes, lowest first
    codes = torch.stack([packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4], -1).view(40, 4, 64)
    truth = ((codes.double() - zeros.double()[..., None]) * scales.double()[..., None]).view(40, 256)
    step = scales.double().repeat_interleave(64, 1)
    # half a step, one more where rounding the zero-point pushed an edge out, and the rounding of the scale
    assert ((truth - weight.double()).abs() <= 1.1 * step).all()
    y = w4a16_gemm(x, packed, scales, zeros, 64)
    exact = x.double() @ truth.T
    assert y.dtype == dtype
    assert (y.double() - exact).abs().max() <= exact.abs().max() * (torch.finfo(dtype).eps + 256 * 2**-24)
    wrong = w4a16_gemm(x, packed, scales, (zeros + 1) % 16, 64)
    assert (wrong.double() - exact).abs().max() > exact.abs().max() * 0.05


def test_compiled_in_one_graph():
    """fullgraph raises at a graph break; the fake kernel must give the shape and dtype of the real one."""
    torch.manual_seed(0)
    packed, scales, zeros = quantize_weight_int4_grouped(torch.randn(48, 128), 64)

    def block(x):
        return torch.relu(w4a16_gemm(x + 1, packed, scales, zeros, 64)) * 2

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (1, 3, 7):
        x = torch.randn(2, tokens, 128)
        assert torch.equal(compiled(x), block(x))
    x = torch.randn(3, 128).to(torch.bfloat16)
    torch.library.opcheck(functional.linear, (x, packed, scales, zeros, torch.randn(48), 4, 64, 48))
    torch.library.opcheck(functional.linear, (x, packed, scales, None, None, 4, 64, 48))
    torch.library.opcheck(functional.linear, (x, packed, scales, zeros, torch.randn(48), 4, 64, 48, True))


PREPARED = [
    # bits, group, symmetric, N, K: whole tiles, padded rows, padded inputs, one group a row
    (4, 64, True, 64, 256),
    (4, 128, False, 40, 384),
    (8, 32, False, 24, 96),
    (3, 64, True, 72, 192),
    (2, 160, False, 16, 160),
]


@pytest.mark.parametrize(("bits", "group", "symmetric", "n", "k"), PREPARED)
def test_prepared_weight_comes_back_and_gives_the_same_product(bits, group, symmetric, n, k):
    torch.manual_seed(0)
    weight = GemmWeight(
        *functional.quantize(torch.randn(n, k), bits, group, symmetric, torch.float16), bits, group, k
    )
    prepared = prepare(weight)
    assert prepared.words.dim() == 4
    back = functional.restore(prepared)
    for name in ("words", "scale", "zero_point"):
        before, after = getattr(weight, name), getattr(back, name)
        assert (before is None and after is None) or torch.equal(before, after), name
    x, bias = torch.randn(3, k), torch.randn(n)
    grid = bits, group, n
    y = functional.linear(x, weight.words, weight.scale, weight.zero_point, bias, *grid)
    assert torch.equal(
        functional.linear(x, prepared.words, prepared.scale, prepared.zero_point, bias, *grid), y
    )


def test_misfits_are_refused():
    packed, scales, zeros = quantize_weight_int4_grouped(torch.randn(8, 128), 64)
    with pytest.raises(ValueError, match="not a multiple"):
        quantize_weight_int4_grouped(torch.randn(8, 100), 64)
    with pytest.raises(ValueError, match="words is"):
        w4a16_gemm(torch.randn(2, 192), packed, scales, zeros, 64)
    with pytest.raises(ValueError, match="scale is"):
        w4a16_gemm(torch.randn(2, 128), packed, scales, zeros, 32)


def test_package_imports_itself_only_relatively():
    """The Hub's loader imports it under another name."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            assert not any(name.split(".")[0] == "lowbit_kernels" for name in names), file


def build(out):
    subprocess.run(
        [sys.executable, ROOT / "tools" / "kernel_package.py", out], check=True, capture_output=True
    )
    return out


def test_built_variants_name_their_backend_and_hold_every_source(tmp_path):
    out = build(tmp_path / "hub")
    sources = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    ids = set()
    for backend in ("cuda", "rocm", "cpu"):
        variant = out / "build" / f"torch-{backend}"
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend}
        assert metadata["id"].isidentifier()
        ids.add(metadata["id"])
        assert {path.relative_to(variant) for path in variant.rglob("*.py")} == sources
    assert len(ids) == 1


LOAD = """
import sys, torch
from pathlib import Path
from kernels import get_local_kernel
k = get_local_kernel(Path(sys.argv[1]))
assert "lowbit_kernels" not in sys.modules, "the package imported itself by its own name"
packed, scales, zeros = k.quantize_weight_int4_grouped(torch.eye(64), 32)
y = k.w4a16_gemm(torch.ones(2, 64), packed, scales, zeros, 32)
assert torch.equal(y, torch.ones(2, 64)), y
print("LOADED", k.__name__)
"""


@pytest.mark.parametrize("built", [True, False], ids=["build folder", "source folder"])
def test_kernels_package_loads_it(tmp_path, built):
    """In a process of its own, with nothing of this repository on the path."""
    pytest.importorskip("kernels.load", reason="the kernels package is not installed: pip install kernels")
    import kernels

    folder = build(tmp_path / "hub") if built else PACKAGE
    run = subprocess.run(
        [sys.executable, "-c", LOAD, folder],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(Path(kernels.__file__).parents[1])},
    )
    assert "LOADED lowbit_kernels" in run.stdout, run.stderr

"""The interpreter in an ordinary process, the package without Triton, and the exact rounding helpers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kernel_truth as truth
import numpy as np
import pytest
import torch
import triton.language as tl
from kernel_compile import compile_kernel

import lowbit_kernels
from lowbit_kernels.device import jit, launch, round_half_even, round_to
from lowbit_kernels.dispatch import GemmWeight, matmul
from lowbit_kernels.wna16 import reduce_split_kernel

ROOT = str(Path(lowbit_kernels.__file__).parents[1])


@jit()
def round_kernel(x_ptr, whole_ptr, half_ptr, brain_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(whole_ptr + offsets, round_half_even(x))
    tl.store(half_ptr + offsets, round_to(x, tl.float16))
    tl.store(brain_ptr + offsets, round_to(x, tl.bfloat16))


def test_rounding_is_half_to_even_everywhere(device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, generator=generator) * 300
    x[:512] = (torch.arange(512) - 256) * 0.5
    # ties between neighbours of fp16 and of bfloat16, and the carry into the next exponent
    x[512:520] = torch.tensor(
        [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 2 - 2**-9, 65519, 1e-7, 0]
    )
    whole, half, brain = (torch.empty_like(x, device=device) for _ in range(3))
    launch(round_kernel, (1,), x.to(device), whole, half, brain, BLOCK=1024)
    assert whole.tolist() == [round(v) for v in x.tolist()]
    assert half.tolist() == [float(np.float16(v)) for v in x.numpy()]
    assert brain.tolist() == [float(truth.round_to(v, torch.bfloat16)) for v in x.numpy()]


def small_matmul() -> torch.Tensor:
    words = torch.full((4, 4), 0x7A7A7A7A, dtype=torch.int32)
    weight = GemmWeight(words, torch.ones(4, 1, dtype=torch.float16), None, 4, 32, 32)
    return matmul(torch.ones(1, 32, dtype=torch.float16), weight)


@pytest.mark.usefixtures("fresh_cache")
def test_interpreting_leaves_triton_able_to_compile():
    # codes alternate 10 and 7, so each row sums 16 · (2 - 1)
    assert small_matmul().tolist() == [[16.0] * 4]
    pointers = {"partial_ptr": "*fp32", "bias_ptr": "*fp16", "out_ptr": "*fp16"}
    sizes = dict.fromkeys(["m", "n", "stride_om", "stride_on"], "i32")
    constexprs = {"HAS_BIAS": True, "SPLIT_K": 2, "BLOCK_N": 256}
    compiled = compile_kernel(reduce_split_kernel, {**pointers, **sizes}, constexprs, "sm_90")
    assert "ld.global" in compiled.asm["ptx"]
    assert small_matmul().tolist() == [[16.0] * 4]


def run(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter that sees the package."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": ROOT, "PATH": "", "CUDA_VISIBLE_DEVICES": "", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MATMUL = """
import torch
from lowbit_kernels.dispatch import GemmWeight, matmul
words = torch.full((4, 4), 0x7A7A7A7A, dtype=torch.int32)
weight = GemmWeight(words, torch.ones(4, 1, dtype=torch.float16), None, 4, 32, 32)
x = torch.ones(1, 32, dtype=torch.float16)
"""


def test_global_interpreter_switch_is_honoured():
    assert run(MATMUL + "print(matmul(x, weight)[0, 0].item())", TRITON_INTERPRET="1") == "16.0\n"


def test_without_triton_everything_imports_and_a_launch_says_so():
    code = """
import sys
sys.modules["triton"] = None
from lowbit_kernels import device, dispatch, layout, packing, reference, wna16
"""
    launch_it = """
try:
    matmul(x, weight)
except RuntimeError as error:
    print(error)
w = weight
print(reference.matmul_reference(x, w.words, w.scale, None, 4, 32)[0, 0].item())
"""
    printed = run(code + MATMUL + launch_it)
    assert printed == "Triton is not installed: install triton to run lowbit's kernels\n16.0\n"


@pytest.mark.parametrize("lacks", ["gluon.constexpr_function", "gluon.language", "gluon"])
def test_with_a_triton_whose_gluon_lacks_something_the_rest_runs(lacks):
    """Triton 3.4 has a Gluon without constexpr_function, and other releases may lack other parts."""
    code = f"""
import sys
import triton.experimental.gluon
parent, _, name = "triton.experimental.{lacks}".rpartition(".")
vars(sys.modules[parent]).pop(name)
if "triton.experimental.{lacks}" in sys.modules:
    sys.modules["triton.experimental.{lacks}"] = None
from lowbit_kernels import hopper
print(hopper.missing())
"""
    absent, product = run(code + MATMUL + "print(matmul(x, weight)[0, 0].item())").splitlines()
    assert absent.endswith("has no Gluon for Hopper")
    assert product == "16.0"


def test_importing_does_not_touch_the_environment():
    code = """
import os, torch
before = dict(os.environ), torch.get_default_dtype(), torch.random.get_rng_state().sum()
from lowbit_kernels import device, dispatch, packing, wna16
print(before == (dict(os.environ), torch.get_default_dtype(), torch.random.get_rng_state().sum()))
print(torch.cuda.is_initialized())
"""
    assert run(code) == "True\nFalse\n"

"""Every kernel compiles for every GPU we name; the interpreter proves numbers, not that it compiles."""

from __future__ import annotations

import pytest
from kernel_compile import TARGETS, compile_kernel

from lowbit_kernels.packing import quantize_pack_kernel
from lowbit_kernels.reference import TINY_SCALE
from lowbit_kernels.wna16 import reduce_split_kernel, wna16_kernel

pytestmark = pytest.mark.usefixtures("fresh_cache")

# activations, zero-point type or None, bits, group size (0: one per row), split K, block M, N, K
WNA16 = {
    "4 bits fp16 decode": ("fp16", None, 4, 128, 8, 16, 64, 64),
    "4 bits bf16 prefill asym": ("bf16", "u8", 4, 128, 1, 64, 64, 64),
    "3 bits fp16 row": ("fp16", None, 3, 0, 1, 16, 64, 64),
    "2 bits bf16 fractional zero": ("bf16", "fp32", 2, 32, 4, 16, 32, 32),
    "8 bits fp32": ("fp32", "u8", 8, 64, 1, 32, 64, 32),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", WNA16)
def test_wna16_compiles(name, target):
    act, zero, bits, group_size, split_k, block_m, block_n, block_k = WNA16[name]
    pointers = {
        "x_ptr": f"*{act}",
        "words_ptr": "*i32",
        "scale_ptr": f"*{act}",
        "zero_ptr": f"*{zero or act}",
        "bias_ptr": f"*{act}",
        "out_ptr": f"*{act}" if split_k == 1 else "*fp32",
    }
    sizes = dict.fromkeys(
        ["m", "n", "k", "groups", "blocks_per_split", "stride_xm", "stride_xk", "stride_om", "stride_on"],
        "i32",
    )
    constexprs = {
        "BITS": bits,
        "GROUP_SIZE": group_size,
        "HAS_ZERO": zero is not None,
        "HAS_BIAS": split_k == 1,
        "SPLIT_K": split_k,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
    }
    compile_kernel(wna16_kernel, {**pointers, **sizes}, constexprs, target, num_warps=4, num_stages=3)


@pytest.mark.parametrize("target", TARGETS)
def test_split_reduction_compiles(target):
    pointers = {"partial_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    sizes = dict.fromkeys(["m", "n", "stride_om", "stride_on"], "i32")
    constexprs = {"HAS_BIAS": True, "SPLIT_K": 8, "BLOCK_N": 256}
    compile_kernel(reduce_split_kernel, {**pointers, **sizes}, constexprs, target, num_warps=4)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("weight", "scale", "bits", "symmetric", "rows", "block"),
    [
        ("bf16", "bf16", 4, True, 16, 128),
        ("fp16", "fp16", 3, False, 1, 2048),
        ("fp32", "fp32", 8, False, 32, 64),
    ],
)
def test_quantize_pack_compiles_to_exact_arithmetic(weight, scale, bits, symmetric, rows, block, target):
    pointers = {"weight_ptr": f"*{weight}", "words_ptr": "*i32", "scale_ptr": f"*{scale}", "zero_ptr": "*u8"}
    sizes = dict.fromkeys(["total", "groups", "group_size", "width", "stride_n", "stride_k"], "i32")
    constexprs = {"BITS": bits, "SYMMETRIC": symmetric, "TINY": TINY_SCALE, "ROWS": rows, "BLOCK": block}
    compiled = compile_kernel(quantize_pack_kernel, {**pointers, **sizes}, constexprs, target, num_warps=4)
    if "ptx" in compiled.asm:
        ptx = compiled.asm["ptx"]
        # Triton 3.4 divides with .ftz; TINY_SCALE makes flushed weights round to 0 either way
        assert "div.rn.f32" in ptx or "div.rn.ftz.f32" in ptx
        for inexact in ("div.full", "div.approx", "rcp.approx", "fma.rn"):
            assert inexact not in ptx
    else:
        # the target's IEEE division: scale, refine, fix up
        assert "v_div_fixup_f32" in compiled.asm["amdgcn"]

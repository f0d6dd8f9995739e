"""The fragment kernels compile for every GPU we name, and decode's loop is what it is meant to be.

That loop is fast because nothing in it moves data between lanes. Whether that holds depends on how a Triton
release lays out operands, and no numeric test would notice.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from kernel_compile import TARGETS, compile_kernel, loop_instructions, machine_loop

from lowbit_kernels import fragment

pytestmark = pytest.mark.usefixtures("fresh_cache")

POINTERS = {"words_ptr": "*i32", "partial_ptr": "*fp32", "semaphore_ptr": "*i32", "routes_ptr": "*i32"}


def arguments(kernel: Any, act: str, constexprs: dict[str, Any], zero: str | None = None) -> dict[str, str]:
    """Triton types of a kernel's run-time arguments: pointers to act unless POINTERS knows better."""
    names = [name for name in kernel.arg_names if name not in constexprs]
    types = {name: POINTERS.get(name, f"*{act}") if name.endswith("_ptr") else "i32" for name in names}
    return types | ({"zero_ptr": f"*{zero}"} if zero else {})


def compile_decode(target: str, act: str = "fp16", zero: str | None = None, warps: int = 1, **changes) -> Any:
    constexprs = {
        "stride_on": 1,
        "BITS": 4,
        "CENTRE": 8,
        "GROUP_SIZE": 128,
        "HAS_ZERO": zero is not None,
        "HAS_BIAS": False,
        "BLOCK_M": 8,
        "ROWS16": 2,
        "GROUPS": 1,
        "SLICES": warps,
        "SPLIT_K": 4,
        "DEPTH": 0,
        "ONE_ROUND": False,
        "EVEN": True,
        "X_WIDE": False,
        "KWIDTH": fragment.operand_width(_target(target)),
        "PAIRS": False,
        "LOP3": target.startswith("sm_"),
        "EXPERTS": False,
        "GATED": False,
        "DEPENDENT": False,
    } | changes
    constexprs["BLOCK_M"] = max(constexprs["BLOCK_M"], fragment.least_tokens(_target(target)))
    types = arguments(fragment.decode_kernel, act, constexprs, zero)
    return compile_kernel(fragment.decode_kernel, types, constexprs, target, num_warps=warps, num_stages=1)


def compile_gemm(
    target: str,
    act: str = "fp16",
    zero: str | None = None,
    warps: int = 4,
    registers: int = 0,
    multiples: tuple[str, ...] = (),
    **changes,
) -> Any:
    constexprs = {
        "stride_on": 1,
        "BITS": 4,
        "CENTRE": 8,
        "GROUP_SIZE": 128,
        "HAS_ZERO": zero is not None,
        "HAS_BIAS": True,
        "BLOCK_M": 64,
        "ROWS16": 4,
        "BLOCK_K": 64,
        "GROUPS": 1,
        "SPLIT_K": 1,
        "WARP_ROWS": 4,
        "SCALE_WEIGHTS": False,
        "EVEN_N": True,
        "ASK": 0,
        "DESCRIPTOR": False,
        "KWIDTH": 2 if target == "sm_90" else fragment.operand_width(_target(target)),
        "LOP3": target.startswith("sm_"),
        "STAGES": 3,
        "DEPENDENT": False,
    } | changes
    types = arguments(fragment.gemm_kernel, act, constexprs, zero)
    if constexprs["DESCRIPTOR"]:
        types["x_ptr"] = f"tensordesc<{act}[{constexprs['BLOCK_M']},{constexprs['BLOCK_K']}]>"
    registers = registers or (128 if warps == 8 and constexprs["BLOCK_M"] <= 32 else 0)
    options = {"num_warps": warps, "num_stages": 3} | ({"maxnreg": registers} if registers else {})
    return compile_kernel(fragment.gemm_kernel, types, constexprs, target, multiples, **options)


def _target(name: str) -> tuple[str, int | str, int]:
    target = TARGETS[name]
    return target.backend, target.arch, target.warp_size


DECODE = {
    "4 bits": {},
    "4 bits, 16 tokens, x by sectors": {"BLOCK_M": 16, "X_WIDE": True, "warps": 4},
    "4 bits bf16, zero, a step ahead": {"act": "bf16", "zero": "u8", "DEPTH": 1, "EVEN": False},
    "8 bits bf16, one step": {
        "act": "bf16",
        "BITS": 8,
        "CENTRE": 128,
        "DEPTH": 1,
        "ONE_ROUND": True,
        "warps": 2,
    },
    "2 bits, groups of 32": {"BITS": 2, "CENTRE": 2, "GROUP_SIZE": 32, "GROUPS": 4, "zero": "fp16"},
    "4 bits, experts": {"EXPERTS": True, "DEPTH": 2},
    "4 bits bf16, gated, bias": {"act": "bf16", "GATED": True, "HAS_BIAS": True, "SPLIT_K": 1, "warps": 2},
}
GEMM = {
    "4 bits": {},
    "4 bits bf16, zero, scaled weights": {"act": "bf16", "zero": "u8", "SCALE_WEIGHTS": True, "BLOCK_M": 128},
    "4 bits bf16, its own zero-points": {"act": "bf16", "zero": "bf16", "BLOCK_M": 16, "BLOCK_K": 128},
    "2 bits, its own zero-points, past the end": {
        "BITS": 2,
        "CENTRE": 2,
        "zero": "fp16",
        "ROWS16": 16,
        "BLOCK_K": 128,
        "EVEN_N": False,
    },
    "8 bits, groups of 32, split": {"BITS": 8, "CENTRE": 128, "GROUP_SIZE": 32, "BLOCK_K": 32, "SPLIT_K": 4},
    "4 bits, four groups a block": {
        "GROUP_SIZE": 32,
        "BLOCK_K": 128,
        "GROUPS": 4,
        "SCALE_WEIGHTS": True,
        "zero": "u8",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", DECODE)
def test_decode_compiles(name, target):
    compile_decode(target, **DECODE[name])


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", GEMM)
def test_gemm_compiles(name, target):
    compile_gemm(target, **GEMM[name])


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
def test_hopper_features_compile(target):
    assert "griddepcontrol.wait" in compile_decode(target, DEPENDENT=True).asm["ptx"]
    ptx = compile_gemm(target, DESCRIPTOR=True, DEPENDENT=True, ASK=2).asm["ptx"]
    assert "griddepcontrol.wait" in ptx
    # asked for before that wait
    assert "prefetch.global.L2" in ptx.split("griddepcontrol.wait")[0]
    assert "cp.async.bulk.tensor" in ptx


@pytest.mark.parametrize("target", TARGETS)
def test_repack_and_dequantize_compile(target):
    constexprs = {"BITS": 3, "FIELD": 4, "CHUNKS": 4}
    types = arguments(fragment.repack_kernel, "i32", constexprs)
    compile_kernel(fragment.repack_kernel, types, constexprs, target, num_warps=4)
    constexprs = {"BITS": 4, "CENTRE": 8, "GROUP_SIZE": 128, "HAS_ZERO": True, "ROWS16": 4, "BLOCK_K": 128}
    constexprs |= {"LOP3": target.startswith("sm_")}
    types = arguments(fragment.dequantize_kernel, "bf16", constexprs, "u8")
    compile_kernel(fragment.dequantize_kernel, types, constexprs, target, num_warps=4)


@pytest.mark.parametrize("target", TARGETS)
def test_route_compiles(target):
    constexprs = {"BY_RANK": False, "BLOCK_M": 8, "BLOCK": 128, "DEPENDENT": target == "sm_90"}
    types = {"index_ptr": "*i64", "routes_ptr": "*i32", "pairs": "i32", "slots": "i32"}
    compile_kernel(fragment.route_kernel, types, constexprs, target, num_warps=4)


# What moves data between lanes, waits for other warps, or spills.
MOVES = ("SHFL", "STS", "STSM", "LDS", "LDSM", "BAR", "STL", "LDL", "MOVM")

LOOPS = {
    "two fragments of rows": {},
    "four": {"ROWS16": 4},
    "a step ahead": {"ROWS16": 4, "DEPTH": 1},
    "four warps share a tile": {"ROWS16": 1, "warps": 4},
    "zero-points": {"zero": "u8"},
    "bf16": {"act": "bf16"},
    "16 tokens": {"BLOCK_M": 16},
    "groups of 64": {"GROUP_SIZE": 64, "GROUPS": 2},
    "groups of 32": {"GROUP_SIZE": 32, "GROUPS": 4},
    "two steps ahead": {"ROWS16": 1, "DEPTH": 2},
    "8 bits": {"BITS": 8, "CENTRE": 128},
    "2 bits": {"BITS": 2, "CENTRE": 2},
}


eight_tokens = pytest.mark.skipif(
    fragment.least_tokens(_target("sm_90")) > 8, reason="this Triton's dot has 16 columns or more"
)


def moves(loop: list[str]) -> set[str]:
    return {opcode for opcode in loop if opcode.split(".")[0] in MOVES}


@pytest.mark.parametrize("name", LOOPS)
def test_decode_loop_keeps_data_in_its_lane(name, tmp_path):
    loop = machine_loop(compile_decode("sm_90", **LOOPS[name]), tmp_path)
    assert any(opcode.startswith("HMMA") for opcode in loop)
    assert any(opcode.startswith("LDG") and opcode.endswith("128") for opcode in loop), "narrow weight loads"
    assert moves(loop) == set()


@eight_tokens
def test_x_by_sectors_exchanges_x_alone(tmp_path):
    loop = machine_loop(compile_decode("sm_90", X_WIDE=True), tmp_path)
    # four stores and four matrix loads a step: x, eight tokens of 128 inputs
    assert moves(loop) <= {"STS.128", "LDSM.16.M88.4", "BAR.SYNC.DEFER_BLOCKING"}
    assert sum(opcode.startswith("LDSM") for opcode in loop) == 4


@eight_tokens
@pytest.mark.skipif(
    fragment.operand_width(_target("sm_90")) == 2 or not fragment._HAS_MAP,
    reason="this Triton makes operands of pairs anyway, or has nothing that it does not look through",
)
def test_x_by_sectors_is_not_moved_between_registers(tmp_path):
    """Operands of four neighbours want two registers of a matrix load that are not next to each other."""
    moved = {}
    for pairs in (False, True):
        loop = machine_loop(compile_decode("sm_90", X_WIDE=True, PAIRS=pairs), tmp_path)
        moved[pairs] = sum(opcode.startswith(("MOV", "IMAD.MOV")) for opcode in loop)
        assert moves(loop) <= {"STS.128", "LDSM.16.M88.4", "BAR.SYNC.DEFER_BLOCKING"}
    # 16 products of x take two registers each
    assert moved[False] >= 32
    assert moved[True] <= 12


@eight_tokens
def test_a_field_costs_one_instruction(tmp_path):
    """Two fragments hold 16 words a lane, four fields each: and and or in one lop3."""
    loop = machine_loop(compile_decode("sm_90"), tmp_path)
    assert 64 <= sum(opcode.startswith("LOP3") for opcode in loop) <= 70
    assert len(loop) <= 200


def test_the_wrong_operand_order_is_caught(tmp_path):
    right = fragment.operand_width(_target("sm_90"))
    loop = machine_loop(compile_decode("sm_90", KWIDTH=6 - right), tmp_path)
    assert moves(loop)


def test_gemm_has_wgmma_without_spills(tmp_path):
    compiled = compile_gemm(
        "sm_90", warps=8, WARP_ROWS=8, ROWS16=8, BLOCK_M=128, SCALE_WEIGHTS=True, DESCRIPTOR=True
    )
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    loop = machine_loop(compiled, tmp_path)
    assert not moves(loop) & {"STL", "LDL", "STL.64", "LDL.64"}


@pytest.mark.parametrize("rows16", [4, 16])
def test_zero_points_cost_gemm_no_instruction_a_weight(rows16, tmp_path):
    """One instruction for two weights, with the centre or the zero-point, and nothing that repacks them."""
    shape = {"ROWS16": rows16, "warps": 8 if rows16 == 16 else 4, "BLOCK_M": 16, "BLOCK_K": 128}
    shape["WARP_ROWS"] = shape["warps"]
    for zero in (None, "u8", "fp16"):
        loop = machine_loop(compile_gemm("sm_90", zero=zero, **shape), tmp_path)
        counts = Counter(opcode.split(".")[0] for opcode in loop)
        # 16 x 128 weights are 64 a lane, and a warp has one or two such tiles
        tiles = rows16 // shape["warps"]
        assert 32 * tiles <= counts["HADD2"] + counts["HFMA2"] <= 40 * tiles
        assert counts["PRMT"] <= 8 * tiles


def test_bf16_needs_no_more_rotations_than_fp16(tmp_path):
    """Seven bits of mantissa hold one field: the other is brought there by a product, on another unit."""
    rotations = {}
    for act in ("fp16", "bf16"):
        loops = [
            machine_loop(compile_gemm("sm_90", act, BLOCK_M=16, BLOCK_K=128), tmp_path),
            machine_loop(compile_decode("sm_90", act), tmp_path),
        ]
        rotations[act] = [sum(opcode.startswith("SHF.L.W") for opcode in loop) for loop in loops]
    # a tile has 16 words a lane, or 8 for each of two
    assert rotations["fp16"] == rotations["bf16"] == [8, 16]


FEW = {"BLOCK_M": 16, "BLOCK_K": 128, "SPLIT_K": 2, "HAS_BIAS": False, "DEPENDENT": True, "ASK": 1}
SIZES = ("n", "padded_n", "blocks", "stride_xm", "stride_om")
STEPS = {
    "symmetric": {},
    "bf16": {"act": "bf16"},
    "zero-points": {"zero": "u8"},
    "fractional": {"zero": "fp16"},
    "groups of 64, a product each": {"GROUP_SIZE": 64, "GROUPS": 2},
    "groups of 32": {"GROUP_SIZE": 32, "GROUPS": 4, "SCALE_WEIGHTS": True},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_does_not_wait_for_the_scales_of_the_next(name, tmp_path):
    """No copy, packing or conversion of what it loads: that would wait, and the words after it with it."""
    compiled = compile_gemm("sm_90", registers=72, multiples=SIZES, **FEW, **STEPS[name])
    loop = max(loop_instructions(compiled, tmp_path), key=len)
    loads = [
        (place, re.match(r"\s*(R\d+)\b", operands)[1])
        for place, (opcode, operands) in enumerate(loop)
        if opcode.startswith("LDG.E.U")
    ]
    assert len(loads) >= 2
    for place, register in loads:
        later = [operands for _, operands in loop[place + 1 :] if re.search(rf"\b{register}\b", operands)]
        assert later == []


def test_seven_programs_of_gemm_fit_a_multiprocessor(tmp_path):
    """Which the rule counts on at 16 tokens: 65536 registers for 7 x 128 threads, and none in memory."""
    compiled = compile_gemm("sm_90", registers=72, multiples=SIZES, **FEW)
    loop = machine_loop(compiled, tmp_path)
    assert any(opcode.startswith("HGMMA") for opcode in loop)
    assert not {opcode for opcode in loop if opcode.startswith(("STL", "LDL"))}

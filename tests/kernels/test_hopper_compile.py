"""hopper_kernel compiles for sm_90 to the loop that it is meant to be, which needs no GPU.

It is fast because dequantizing is arithmetic on registers between asynchronous products. A compiler that
moves weights through shared memory, waits for every product or spills would still be right.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kernel_compile import opcodes

from lowbit_kernels import dispatch, hopper
from lowbit_kernels.dispatch import VARIANTS, KernelConfig, Problem

pytestmark = [
    pytest.mark.usefixtures("fresh_cache"),
    pytest.mark.skipif(not hopper.HAS_GLUON, reason="this Triton has no Gluon for Hopper"),
]


def test_this_triton_compiles_it():
    assert hopper.missing() is None


def loops(ptx: str) -> list[str]:
    """The basic blocks that multiply, as PTX: from their label to the branch back."""
    return [
        block
        for block in re.findall(r"^\$L__BB\d+_\d+:.*?^\s+@%p\d+ bra", ptx, re.MULTILINE | re.DOTALL)
        if "wgmma.mma_async" in block
    ]


def check(compiled: Any, config: KernelConfig, folder: Path) -> None:
    assert not {"STL", "LDL"} & {opcode.split(".")[0] for opcode in opcodes(compiled, folder)}, "spills"
    found = loops(compiled.asm["ptx"])
    assert len(found) == config.slices
    # 64 rows to an instruction of a warpgroup, 16 of the 128 inputs
    repeats = config.block_n // (16 * config.num_warps)
    for loop in found:
        assert loop.count("wgmma.mma_async") == 8 * repeats
        # always for the product before, never for all
        assert loop.count("wgmma.wait_group.sync.aligned 1;") == 128 // config.block_k
        assert "wgmma.wait_group.sync.aligned 0;" not in loop
        # two loads of 16 bytes for each 16 rows of a warp, and nothing else comes from shared memory
        assert loop.count("ld.shared.v4") == loop.count("ld.shared") == 2 * repeats
        assert not re.search(r"st\.shared|stmatrix|ldmatrix|shfl", loop)
    # none that nobody waits for: what is dead may share its place with the arguments of the fetching warp
    several = config.at_once > 0
    barriers = 2 * config.num_stages + 1 + (config.slices - 1) * (1 + several)
    assert compiled.asm["ptx"].count("mbarrier.init") == barriers
    # where ptxas finds too few registers it waits for every single product all the same
    waits = sum(opcode.startswith("WARPGROUP.DEPBAR") for opcode in opcodes(compiled, folder))
    assert waits == config.slices * (128 // config.block_k + 1)


def compile_config(config: KernelConfig, **changes: Any) -> Any:
    return hopper.compile_kernel(
        **{
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "SEVERAL": config.at_once > 0,
            "SHARED": config.split_k > 1 or config.at_once > 0,
            "STORE": config.at_once > 0,
            "STAGES": config.num_stages,
            "SLICES": config.slices,
            "DEPENDENT": config.dependent,
            "num_warps": config.num_warps,
        }
        | changes
    )


NARROW = KernelConfig("hopper", 64, 128, 16, split_k=3, num_warps=4, num_stages=4)
WIDE = KernelConfig("hopper", 256, 128, 32, num_warps=8, num_stages=3)
SLICED = KernelConfig("hopper", 128, 64, 32, num_warps=4, num_stages=5, slices=2, at_once=132)


@pytest.mark.parametrize("config", [NARROW, WIDE, SLICED], ids=["narrow", "wide", "sliced"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"HAS_ZERO": True},
        {"HAS_ZERO": True, "zero": "fp16", "GROUP_SIZE": 0},
        {"act": "bf16", "GROUP_SIZE": 64},
        {"act": "bf16", "HAS_ZERO": True, "GROUP_SIZE": 32},
        {"HAS_BIAS": True, "CENTRE": 4, "aligned": False},
    ],
    ids=str,
)
def test_the_loop_is_arithmetic_between_products(config, changes, tmp_path):
    check(compile_config(config, **changes), config, tmp_path)


def candidates(m: int, n: int, k: int, group_size: int = 128, has_zero: bool = False) -> list[KernelConfig]:
    problem = Problem(4, group_size, has_zero, "float16", m, n, k, "sm_90", "fragment")
    return list(VARIANTS["hopper"].candidates(problem))


@pytest.mark.slow
@pytest.mark.parametrize(("group_size", "has_zero"), [(128, False), (128, True), (64, True), (32, True)])
def test_every_candidate_compiles_without_spills(group_size, has_zero, tmp_path):
    most = {"zero": "fp16", "HAS_BIAS": True, "aligned": False} if has_zero else {}
    shapes = [
        (n, k) for n in (2048, 4096, 6144, 10240, 14336, 28672, 57344) for k in (2048, 4096, 8192, 28672)
    ]
    tiles = {
        replace(config, split_k=1, at_once=0)
        for n, k in shapes
        for m in (64, 128, 256, 512, 1024)
        for config in candidates(m, n, k, group_size, has_zero)
    }
    for tile in sorted(tiles, key=str):
        for at_once in (0, 132):
            config = replace(tile, at_once=at_once)
            changes = {"GROUP_SIZE": group_size, "HAS_ZERO": has_zero, **most}
            check(compile_config(config, **changes), config, tmp_path)


def test_tiles_beyond_the_last_full_round_are_divided():
    # 160 tiles of 256 x 128 for 132 multiprocessors; 80; 112, of which a whole one each is the least
    assert [c.at_once for c in candidates(512, 10240, 8192)[:1]] == [132]
    assert all(c.at_once in (132, 264) for c in candidates(256, 10240, 8192)[:2])
    assert candidates(256, 14336, 4096)[0] == KernelConfig(
        "hopper", 256, 128, 64, num_warps=8, num_stages=3, dependent=True
    )
    # a full round to begin with has nothing left over
    assert candidates(256, 132 * 128, 4096)[0].at_once == 0


@pytest.mark.parametrize(("n", "k"), [(57344, 8192), (4096, 14336), (6144, 4096), (4096, 4096), (2048, 2048)])
@pytest.mark.parametrize("m", [2048, 4096])
def test_many_tokens_go_on_in_programs_of_several_tiles(m, n, k):
    # 5 to 12 % faster there than a program for every tile, and than cuBLAS after dequantizing
    tiles = -(-m // 256) * -(-n // 128)
    if tiles > 132:
        config = dispatch.rule(Problem(4, 128, False, "float16", m, n, k, "sm_90", "fragment"))
        assert (config.variant, config.block_m, config.block_n, config.at_once) == ("hopper", 256, 128, 132)


def test_a_gpu_or_triton_that_cannot_is_told_why(monkeypatch):
    problem = Problem(4, 128, False, "float16", 256, 4096, 4096, "sm_90", "fragment")
    assert dispatch.refusals(problem)["hopper"] is None
    assert "sm_80" in dispatch.refusals(replace(problem, arch="sm_80"))["hopper"]
    assert "2 bits" in dispatch.refusals(replace(problem, bits=2))["hopper"]
    assert "tokens" in dispatch.refusals(replace(problem, m_bucket=8))["hopper"]
    monkeypatch.setattr(hopper, "HAS_GLUON", False)
    hopper.missing.cache_clear()
    assert "Gluon" in dispatch.refusals(problem)["hopper"]
    hopper.missing.cache_clear()

"""resident_kernel compiles for sm_90 to the loop that it is meant to be, which needs no GPU.

It is fast because words go from memory to registers a block ahead and little is done to them. A compiler that
moves weights through shared memory, spills, or loads words by fewer than 16 bytes would still be right.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kernel_compile import machine_loops, opcodes

from lowbit_kernels import dispatch, hopper, resident
from lowbit_kernels.dispatch import VARIANTS, Problem

pytestmark = [
    pytest.mark.usefixtures("fresh_cache"),
    pytest.mark.skipif(not resident.HAS_GLUON, reason="this Triton has no Gluon for Hopper"),
]


def test_this_triton_compiles_it():
    assert resident.missing() is None


def loop_of(compiled: Any, folder: Path) -> list[str]:
    """Opcodes of the loop over blocks: the shortest with a barrier of all warps and products."""
    loops = [loop for loop in machine_loops(compiled, folder) if {"HMMA", "BAR"} <= {*map(kind, loop)}]
    return min(loops, key=len)


def kind(opcode: str) -> str:
    return opcode.split(".")[0]


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        # instructions for 16 x 128 weights and a warp, all of a block's counted
        ({}, 92),
        ({"SPLIT_K": 2}, 92),
        ({"BLOCK_M": 8}, 74),
        ({"HAS_ZERO": True}, 110),
        ({"HAS_ZERO": True, "zero": "fp16"}, 110),
        ({"act": "bf16"}, 112),
        ({"act": "bf16", "HAS_ZERO": True}, 126),
        ({"GROUP_SIZE": 64}, 108),
        ({"GROUP_SIZE": 0, "EVEN": False, "HAS_BIAS": True}, 96),
    ],
    ids=str,
)
def test_a_block_is_words_and_products_and_little_else(changes, limit, tmp_path):
    compiled = resident.compile_kernel(**changes)
    loop = loop_of(compiled, tmp_path)
    counts = Counter(map(kind, loop))
    # a warp's 4 tiles along K of 2 tiles of rows
    tiles, tokens = 8, changes.get("BLOCK_M", 16)
    assert sum(counts.values()) <= limit * tiles
    # 8 products of 16 inputs a tile for 8 tokens each
    assert counts["HMMA"] == tiles * 8 * tokens // 8
    # one rotation and four masks a word and lane, of which a tile has 8
    assert counts["LOP3"] <= tiles * 8 * 4 + 45
    assert sum(bool(re.match(r"LDG\..*128", opcode)) for opcode in loop) == 2 * tiles
    # x by matrix loads, of 16 inputs for 16 tokens, or 32 for 8, once for both tiles of rows; and the sums
    assert counts["LDSM"] <= tiles // 2 * 8 * tokens // 16 + 4
    assert counts["SHFL"] == 0
    assert counts["BAR"] == 2


@pytest.mark.parametrize("act", ["fp16", "bf16"])
@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_groups_of_128_take_no_memory_for_registers(act, turns, tmp_path):
    compiled = resident.compile_kernel(act=act, TURNS=turns)
    assert not {"STL", "LDL"} & {*map(kind, opcodes(compiled, tmp_path))}, "spills"


def test_a_gpu_or_triton_that_cannot_is_told_why(monkeypatch):
    problem = posed(16, 28672, 4096)
    assert dispatch.refusals(problem)["resident"] is None
    assert "sm_80" in dispatch.refusals(replace(problem, arch="sm_80"))["resident"]
    assert "2 bits" in dispatch.refusals(replace(problem, bits=2))["resident"]
    assert "32 tokens" in dispatch.refusals(replace(problem, m_bucket=32))["resident"]
    assert "groups of 32" in dispatch.refusals(replace(problem, group_size=32))["resident"]
    monkeypatch.setattr(hopper, "HAS_GLUON", False)
    resident.missing.cache_clear()
    assert "Gluon" in dispatch.refusals(problem)["resident"]
    resident.missing.cache_clear()


def posed(m: int, n: int, k: int, group_size: int = 128) -> Problem:
    return Problem(4, group_size, False, "float16", m, n, k, "sm_90", "fragment")


LAYERS = [(28672, 4096), (14336, 4096), (4096, 4096), (6144, 4096), (10240, 8192), (57344, 8192)]
LAYERS += [(4096, 14336), (4096, 11008), (5120, 5120), (13824, 5120), (2048, 2048), (1024, 4096)]


@pytest.mark.parametrize(("n", "k"), LAYERS)
def test_16_tokens_are_a_program_a_multiprocessor_which_keeps_all_of_its_x(n, k):
    config = dispatch.rule(posed(16, n, k))
    assert config.variant == "resident"
    assert config.at_once == 132
    for candidate in VARIANTS["resident"].candidates(posed(16, n, k)):
        assert candidate.slices % candidate.num_warps == 0
        # all of K, and no slice that is mostly empty
        assert k <= candidate.slices * candidate.split_k * 128 <= 1.15 * k
        # 227 KB: x and the sums of the warps, and what products start from in groups of 64
        x, sums = candidate.slices * 128 * 16 * 2, 8 * 16 * candidate.block_n * 4
        assert x + sums + 2 * 2 * candidate.slices * 16 * 4 < 227 << 10


@pytest.mark.parametrize(
    ("m", "n", "k", "variant"),
    [
        # where decode waits less, and where slices of K are too many
        (1, 28672, 4096, "resident"),
        (1, 4096, 4096, "decode"),
        (1, 4096, 14336, "decode"),
        (2, 14336, 4096, "resident"),
        (2, 6144, 4096, "decode"),
        (4, 4096, 4096, "resident"),
        (4, 2048, 2048, "decode"),
        (8, 2048, 2048, "resident"),
        (8, 57344, 8192, "decode"),
        (8, 8192, 28672, "decode"),
        (16, 8192, 28672, "gemm"),
        # a slice and a little, and too few rows or inputs
        (16, 4096, 5376, "gemm"),
        (16, 512, 4096, "decode"),
        (16, 4096, 1024, "decode"),
        (32, 28672, 4096, "gemm"),
    ],
)
def test_what_is_faster_is_chosen(m, n, k, variant):
    assert dispatch.rule(posed(m, n, k)).variant == variant


def test_groups_of_64_of_long_rows_are_left_to_gemm():
    assert dispatch.rule(posed(16, 13824, 5120, 64)).variant == "gemm"
    assert dispatch.rule(posed(8, 13824, 5120, 64)).variant == "resident"

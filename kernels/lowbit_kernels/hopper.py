"""y = x Wᵀ + bias on Hopper from weights in fragment order, in Gluon: dequantizing while wgmma runs.

A program owns a [BLOCK_N, BLOCK_M] tile of yᵀ, like fragment.gemm_kernel, and takes 128 inputs a step. Words
and x come to a ring of shared memory by TMA. The weight is the left operand of wgmma and lives in registers:
a stored word is the four registers that a lane contributes to a product of 16 inputs, so that dequantizing is
nothing but arithmetic,

    v = (word & mask) | magic,    w = (v - magic - centre) · s + (centre - z) · s,

the subtraction exact, the rest one rounding (a product for a symmetric weight). Triton's own loops wait for a
product before they make the next operand. Here a product of BLOCK_K inputs is issued asynchronously and the
operand of the next is made meanwhile, in other registers: the wait after it is for the product before and
names that one's registers, which keeps the compiler from reusing them while the instruction may read them.

One more warp fetches, released by barriers in shared memory, which it initializes too, the first just before
its first fetch: that way a program starts a microsecond sooner. The others only compute. Scales come a step
ahead, by loads that find them in L2, where the fetching warp asked for them at the start. In small tiles a
step takes longer for waiting than for multiplying: there two slices of K, four warps each, take steps in
turn, and the first adds the other's sum to its own.

Tiles that do not fill the multiprocessors once more are divided along K (share_out): a program takes a share
of their steps, which may end one tile and begin another. The program with the first part of a tile adds the
others' to its own, in their order. Theirs mostly come at the beginning of a share and the first at the end
of one, so that it waits little, and only for programs that were launched before it.

Bytes moved: words and scales once per BLOCK_M tokens, x once per BLOCK_N outputs, both mostly from L2;
8 · BLOCK_N · BLOCK_M for every part of a tile but the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from .device import HAS_TRITON, launch, triton
from .fragment import FragmentWeight, padded_x, workspace
from .layout import TILE_K, TILE_N

try:
    from triton.experimental import gluon

    # which Triton 3.4 has not
    from triton.experimental.gluon import constexpr_function
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:
    # only what is evaluated when a kernel is defined
    gluon = SimpleNamespace(jit=lambda fn=None, **options: fn or (lambda fn: fn))
    constexpr_function = lambda fn: fn  # noqa: E731
    gl = SimpleNamespace(constexpr=int)
    HAS_GLUON = False
else:
    HAS_GLUON = True
    # their names until Triton 3.6 and from 3.7 on, and from 3.9 on and before
    thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
    tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
    # what TMA writes: rows of x in the order that wgmma reads, words as they are
    X_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WORDS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@constexpr_function
def _split_rows(block_n, num_warps, unit, columns):
    """Bases of the 16-row blocks of a tile, in steps of unit: those of registers, and those of warps."""
    steps = [16 * 2**i for i in range((block_n // 16).bit_length() - 1)]
    bases = [[step // 16 * unit] + [0] * columns for step in steps]
    count = num_warps.bit_length() - 1
    return bases[count:], bases[:count]


@constexpr_function
def _words_layout(block_n, num_warps):
    """[BLOCK_N / 16, 128] words of 64 inputs: 16 bytes a lane, a warp for every 16 rows."""
    registers, warps = _split_rows(block_n, num_warps, 1, 1)
    lanes = [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *registers], lanes, warps, [], [block_n // 16, 128])


@constexpr_function
def _rows_layout(block_n, num_warps):
    """[BLOCK_N / 16 · 2 · 32]: a value for each lane that holds a row, by half of 16 rows."""
    registers, warps = _split_rows(block_n, num_warps, 64, 0)
    lanes = [[1], [2], [4], [8], [16]]
    return gl.DistributedLinearLayout([[32], *registers], lanes, warps, [], [block_n * 4])


@constexpr_function
def _flat_layout(block_n, block_m, num_warps):
    """The accumulator in one dimension, so that a lane has 16 bytes and a warp 512 at a time."""
    bases = [[2**i] for i in range((block_n * block_m).bit_length() - 1)]
    warp = 7 + num_warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        bases[:2] + bases[warp:], bases[2:7], bases[7:warp], [], [block_n * block_m]
    )


@constexpr_function
def _unpacking(centre, bf16, has_zero):
    """PTX of a word: $0-$3 pairs of weights, $4 the word, $12-$15 their scales, $16-$19 (centre - z) · s."""
    kind = "bf16x2" if bf16 else "f16x2"
    # How far the word is turned, and the mantissa bit where a field then starts. Ones are counted above 32 in
    # bf16, above 256 and 16 in fp16.
    rotations, bits = ((0, 4, 8, 12), (2, 2, 2, 2)) if bf16 else ((0, 0, 8, 8), (2, 6, 2, 6))
    lines = ["{", ".reg .b32 rotated, zero;"]
    for i in range(4):
        magic = (134 - bits[i]) << 7 if bf16 else (25 - bits[i]) << 10
        lines.append(f"shf.r.wrap.b32 rotated, $4, $4, {rotations[i]};")
        lines.append(f"lop3.b32 ${i}, rotated, {(15 << bits[i]) * 0x10001}, {magic * 0x10001}, 0xea;")
        lines.append(f"mov.b32 zero, {(magic + (centre << bits[i])) * 0x10001};")
        lines.append(f"sub.{kind} ${i}, ${i}, zero;")
        if has_zero:
            lines.append(f"fma.rn.{kind} ${i}, ${i}, ${12 + i}, ${16 + i};")
        else:
            lines.append(f"mul.{kind} ${i}, ${i}, ${12 + i};")
    return "\n".join([*lines, "}"])


@gluon.jit
def _spread_words(words, OPERAND: gl.constexpr):
    """[R, 32, P] words, P of each lane, to [16 R, 16 P]: each word at all eight weights it holds."""
    R: gl.constexpr = words.shape[0]
    P: gl.constexpr = words.shape[2]
    w = gl.permute(gl.reshape(words, (R, 8, 4, P)), (0, 1, 3, 2))
    # rows, half, lane // 4, word, run, lane % 4, odd
    w = gl.reshape(w, (R, 1, 8, P, 1, 4, 1)).broadcast_to((R, 2, 8, P, 2, 4, 2))
    return gl.convert_layout(gl.reshape(w, (R * 16, P * 16)), OPERAND, assert_trivial=True)


@gluon.jit
def _spread_rows(values, P: gl.constexpr, OPERAND: gl.constexpr):
    """Values as _rows_layout holds them to [16 R, 16 P]."""
    R: gl.constexpr = values.shape[0] // 64
    v = gl.reshape(values, (R, 2, 8, 1, 1, 4, 1)).broadcast_to((R, 2, 8, P, 2, 4, 2))
    return gl.convert_layout(gl.reshape(v, (R * 16, P * 16)), OPERAND, assert_trivial=True)


@gluon.jit
def _dequantize(words, scale, shift, CENTRE: gl.constexpr, HAS_ZERO: gl.constexpr, OPERAND: gl.constexpr):
    """Words of [R, 32, P] as the left operand, in scale's dtype."""
    P: gl.constexpr = words.shape[2]
    w = _spread_words(words, OPERAND)
    s = _spread_rows(scale, P, OPERAND)
    ASM: gl.constexpr = _unpacking(CENTRE, s.dtype == gl.bfloat16, HAS_ZERO)
    # eight weights share a word, whose eight copies are one register
    OPERANDS: gl.constexpr = "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r"
    if HAS_ZERO:
        z = _spread_rows(shift, P, OPERAND)
        return gl.inline_asm_elementwise(
            ASM, OPERANDS + ",r,r,r,r", [w, s, z], dtype=s.dtype, is_pure=True, pack=8
        )
    else:
        return gl.inline_asm_elementwise(ASM, OPERANDS, [w, s], dtype=s.dtype, is_pure=True, pack=8)


@gluon.jit
def _load_quarter(
    scale_ptr,
    zero_ptr,
    tile,
    padded_n,
    QUARTER: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
):
    """Scales and zero-points of 32 inputs of a tile."""
    group = 0 if GROUP_SIZE == 0 else (tile * 128 + QUARTER * 32) // GROUP_SIZE
    s = gl.load(scale_ptr + group * padded_n)
    z = s
    if HAS_ZERO:
        z = gl.load(zero_ptr + group * padded_n)
    return s, z


@gluon.jit
def _load_rows(scale_ptr, zero_ptr, tile, padded_n, GROUP_SIZE: gl.constexpr, HAS_ZERO: gl.constexpr):
    """Scales and zero-points of the quarters of a tile, each group loaded once."""
    s0, z0 = _load_quarter(scale_ptr, zero_ptr, tile, padded_n, 0, GROUP_SIZE, HAS_ZERO)
    s1, z1 = s0, z0
    if GROUP_SIZE == 32:
        s1, z1 = _load_quarter(scale_ptr, zero_ptr, tile, padded_n, 1, GROUP_SIZE, HAS_ZERO)
    s2, z2 = s0, z0
    if GROUP_SIZE == 32 or GROUP_SIZE == 64:
        s2, z2 = _load_quarter(scale_ptr, zero_ptr, tile, padded_n, 2, GROUP_SIZE, HAS_ZERO)
    s3, z3 = s2, z2
    if GROUP_SIZE == 32:
        s3, z3 = _load_quarter(scale_ptr, zero_ptr, tile, padded_n, 3, GROUP_SIZE, HAS_ZERO)
    return (s0, s1, s2, s3), (z0, z1, z2, z3)


@gluon.jit
def _first_rows(
    scale_ptr,
    zero_ptr,
    first,
    tiles,
    padded_n,
    GROUP_SIZE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    SLICES: gl.constexpr,
    SLICE: gl.constexpr,
):
    """_load_rows of the first two tiles of a slice from `first` on, or of the last one there is."""
    a = _load_rows(scale_ptr, zero_ptr, gl.minimum(first + SLICE, tiles - 1), padded_n, GROUP_SIZE, HAS_ZERO)
    b = _load_rows(
        scale_ptr, zero_ptr, gl.minimum(first + SLICE + SLICES, tiles - 1), padded_n, GROUP_SIZE, HAS_ZERO
    )
    return a, b


@gluon.jit
def _ask_for(values_ptr, groups, padded_n, BLOCK_N: gl.constexpr):
    """Ask for BLOCK_N values of each of so many groups in L2, by one warp, a line of 128 bytes a lane."""
    WIDTH: gl.constexpr = 1024 // values_ptr.dtype.element_ty.primitive_bitwidth
    LINES: gl.constexpr = (BLOCK_N + WIDTH - 1) // WIDTH
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    cells = values_ptr + lane // LINES * padded_n + lane % LINES * WIDTH
    for group in range(0, groups, 32 // LINES):
        gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r",
            [(cells + group * padded_n).to(gl.int64), (group + lane // LINES < groups).to(gl.int32)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _ask_for_rows(
    scale_ptr,
    zero_ptr,
    row,
    first,
    count,
    padded_n,
    BLOCK_N: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
):
    """Ask for scales and zero-points of count tiles: memory takes longer to answer than a step takes."""
    if GROUP_SIZE > 0:
        begin = first * 128 // GROUP_SIZE
        groups = gl.cdiv((first + count) * 128, GROUP_SIZE) - begin
        offset = begin * padded_n + row
        _ask_for(scale_ptr + offset, groups, padded_n, BLOCK_N)
        if HAS_ZERO:
            _ask_for(zero_ptr + offset, groups, padded_n, BLOCK_N)


@gluon.jit
def _settle(values):
    """values in other registers than the load's, which the compiler would keep, to wait for the next load."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2
    )


@gluon.jit
def _convert_quarter(scale, zero, CENTRE: gl.constexpr, HAS_ZERO: gl.constexpr, dtype: gl.constexpr):
    """Scale and (centre - z) · s in dtype; the latter unused where all zero-points are the centre."""
    s = _settle(scale.to(dtype))
    z = s
    if HAS_ZERO:
        if scale.dtype == dtype and zero.dtype == gl.uint8:
            # whole and below 16: the last bits of a number's mantissa
            BITS: gl.constexpr = 0x4300 if dtype == gl.bfloat16 else 0x6400
            BEFORE: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
            z = (BEFORE + CENTRE - (zero.to(gl.int16) | BITS).to(dtype, bitcast=True)) * scale
        elif scale.dtype == dtype and zero.dtype == dtype:
            z = gl.fma(-zero, scale, CENTRE * scale)
        else:
            z = ((CENTRE - zero.to(gl.float32)) * scale.to(gl.float32)).to(dtype)
        z = _settle(z)
    return s, z


@gluon.jit
def _convert_rows(
    s, z, CENTRE: gl.constexpr, GROUP_SIZE: gl.constexpr, HAS_ZERO: gl.constexpr, dtype: gl.constexpr
):
    """What _dequantize takes, of the four quarters that _load_rows gives."""
    s0, z0 = _convert_quarter(s[0], z[0], CENTRE, HAS_ZERO, dtype)
    s1, z1 = s0, z0
    if GROUP_SIZE == 32:
        s1, z1 = _convert_quarter(s[1], z[1], CENTRE, HAS_ZERO, dtype)
    s2, z2 = s0, z0
    if GROUP_SIZE == 32 or GROUP_SIZE == 64:
        s2, z2 = _convert_quarter(s[2], z[2], CENTRE, HAS_ZERO, dtype)
    s3, z3 = s2, z2
    if GROUP_SIZE == 32:
        s3, z3 = _convert_quarter(s[3], z[3], CENTRE, HAS_ZERO, dtype)
    return (s0, s1, s2, s3), (z0, z1, z2, z3)


@gluon.jit
def _words_of(words, layout: gl.constexpr, CHUNK: gl.constexpr, BLOCK_K: gl.constexpr):
    """The words of chunk CHUNK of a tile, in parts of BLOCK_K inputs: [R, 32, BLOCK_K / 16] each."""
    R: gl.constexpr = words.shape[0]
    w = gl.reshape(words.slice(CHUNK * 128, 128, 1).load(layout), (R, 32, 2, 2))
    if BLOCK_K == 64:
        return (gl.reshape(w, (R, 32, 4)),)
    else:
        low, high = gl.split(gl.permute(w, (0, 1, 3, 2)))
        if BLOCK_K == 32:
            return low, high
        else:
            w0, w1 = gl.split(low)
            w2, w3 = gl.split(high)
            return (
                gl.reshape(w0, (R, 32, 1)),
                gl.reshape(w1, (R, 32, 1)),
                gl.reshape(w2, (R, 32, 1)),
                gl.reshape(w3, (R, 32, 1)),
            )


@gluon.jit
def _let_next_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait_for_previous():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _fetch_words(words_desc, x_desc, words, full, stage, row, tile, pred):
    """Start the copy of one tile of words; the barrier waits for x as well."""
    barrier = full.index(stage)
    mbarrier.expect(barrier, words_desc.block_type.nbytes + x_desc.block_type.nbytes, pred=pred)
    tma_load(words_desc, [row // 16, tile * 256], barrier, words.index(stage), pred=pred)


@gluon.jit
def _fetch_x(x_desc, x, full, stage, token, tile, pred):
    tma_load(x_desc, [token, tile * 128], full.index(stage), x.index(stage), pred=pred)


@gluon.jit
def _units_of(place, program, m, n, whole, share, pitch, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """First unit of the whole tile `place`, or where there is none of the program's share, and the first that
    is not in it; equal where the program has no share.

    Units are the steps of one tile after the other, pitch of them to a tile. The last programs have the first
    shares: who starts a tile waits for those that go on with it, and only for programs launched before it.
    """
    units = gl.cdiv(m, BLOCK_M) * gl.cdiv(n, BLOCK_N) * pitch
    unit = whole * pitch + (gl.cdiv(units - whole * pitch, share) - 1 - program) * share
    end = gl.minimum(unit + share, units)
    if place < whole:
        unit = place * pitch
        end = unit + pitch
    elif unit < whole * pitch:
        unit = units
        end = units
    return unit, end


@gluon.jit
def _next(
    unit, end, program, programs, m, n, whole, share, pitch, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """The range of units after unit's tile: of every programs-th whole tile, and then of the share."""
    place = unit // pitch
    if place < whole:
        unit, end = _units_of(place + programs, program, m, n, whole, share, pitch, BLOCK_M, BLOCK_N)
    else:
        unit = gl.minimum((place + 1) * pitch, end)
    return unit, end


@gluon.jit
def _segment(unit, end, m, n, tiles, pitch, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, ONE: gl.constexpr):
    """Where unit is, and what of its tile comes before end: token, row, first step, and how many steps.

    ONE: there is a program for each tile. Divisions are the longest part of a program's start.
    """
    GROUP_M: gl.constexpr = 8
    tiles_m = gl.cdiv(m, BLOCK_M)
    tiles_n = gl.cdiv(n, BLOCK_N)
    if ONE:
        place, first, count = gl.program_id(0), 0, tiles
    else:
        place = unit // pitch
        first = unit - place * pitch
        count = gl.minimum(end - unit, tiles - first)
    # GROUP_M rows of tiles at a time, so that programs that run together share weights and x in L2
    first_m = 0
    if tiles_m > GROUP_M:
        group = place // (GROUP_M * tiles_n)
        first_m = group * GROUP_M
        place -= group * GROUP_M * tiles_n
    height = gl.minimum(tiles_m - first_m, GROUP_M)
    column = place // height
    return (first_m + place - column * height) * BLOCK_M, column * BLOCK_N, first, count


@gluon.jit
def _produce(
    arguments,
    GROUP_SIZE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    ONE: gl.constexpr,
    SEVERAL: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Fetch into every stage as soon as it is free; the first words before the kernel ahead has ended.

    ready: that the barriers of all stages may be waited for.
    """
    (
        x_desc,
        words_desc,
        scale_ptr,
        zero_ptr,
        x,
        words,
        full,
        empty,
        ready,
        unit,
        end,
        m,
        n,
        padded_n,
        tiles,
        whole,
        share,
        pitch,
    ) = arguments
    STAGES: gl.constexpr = x.shape[0]
    AHEAD: gl.constexpr = min(STAGES, 4)
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = words_desc.block_type.shape[0] * 16
    program, programs = gl.program_id(0), gl.num_programs(0)
    token, row, first, count = _segment(unit, end, m, n, tiles, pitch, BLOCK_M, BLOCK_N, ONE)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
        if stage == 0:
            hopper.fence_async_shared()
            _fetch_words(words_desc, x_desc, words, full, stage, row, first + stage, stage < count)
    hopper.fence_async_shared()
    mbarrier.arrive(ready, count=1)
    for stage in gl.static_range(1, AHEAD):
        _fetch_words(words_desc, x_desc, words, full, stage, row, first + stage, stage < count)
    if DEPENDENT:
        _wait_for_previous()
    done = 0
    while unit < end:
        for i in range(count):
            free = (done + i) % STAGES
            if done > 0 or i >= AHEAD:
                if done > 0 or i >= STAGES:
                    mbarrier.wait(empty.index(free), ((done + i) // STAGES & 1) ^ 1)
                _fetch_words(words_desc, x_desc, words, full, free, row, first + i, True)
            _fetch_x(x_desc, x, full, free, token, first + i, True)
            if i == 2:
                # those of the first steps are on their way
                _ask_for_rows(scale_ptr, zero_ptr, row, first, count, padded_n, BLOCK_N, GROUP_SIZE, HAS_ZERO)
        if SEVERAL:
            done += count
            unit, end = _next(unit, end, program, programs, m, n, whole, share, pitch, BLOCK_M, BLOCK_N)
            if unit < end:
                # past the last tile this would divide by zero
                token, row, first, count = _segment(unit, end, m, n, tiles, pitch, BLOCK_M, BLOCK_N, ONE)
        else:
            unit = end


@gluon.jit
def _compute(
    arguments,
    SLICE: gl.constexpr,
    SLICES: gl.constexpr,
    CENTRE: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SEVERAL: gl.constexpr,
    SHARED: gl.constexpr,
    STORE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Multiply every SLICES-th of the units unit ... end - 1; write the tiles they belong to or leave them in
    the workspace. Slices after the first leave their part of a tile in sums, where the first finds it.

    SEVERAL: they may be of several tiles.
    """
    (
        scale_ptr,
        zero_ptr,
        bias_ptr,
        out_ptr,
        out_desc,
        partial_ptr,
        semaphore_ptr,
        x,
        words,
        full,
        empty,
        ready,
        sums,
        given,
        taken,
        unit,
        end,
        m,
        n,
        padded_n,
        tiles,
        whole,
        share,
        pitch,
        most_parts,
        stride_om,
        stride_on,
    ) = arguments
    STAGES: gl.constexpr = x.shape[0]
    BLOCK_M: gl.constexpr = x.shape[1]
    BLOCK_N: gl.constexpr = words.shape[1] * 16
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = _words_layout(BLOCK_N, WARPS)
    ONE: gl.constexpr = not SEVERAL and not SHARED
    # whether the last stage of a tile is released in the next one
    KEPT: gl.constexpr = STORE and SLICE == 0
    dtype: gl.constexpr = out_ptr.dtype.element_ty

    e = gl.arange(0, BLOCK_N * 4, layout=_rows_layout(BLOCK_N, WARPS))
    lane_row = e // 64 * 16 + e // 32 % 2 * 8 + e % 32 // 4
    program, programs = gl.program_id(0), gl.num_programs(0)
    token, row, first, count = _segment(unit, end, m, n, tiles, pitch, BLOCK_M, BLOCK_N, ONE)
    scales = scale_ptr + row + lane_row
    zeros = zero_ptr + row + lane_row
    rows, later = _first_rows(scales, zeros, first, tiles, padded_n, GROUP_SIZE, HAS_ZERO, SLICES, SLICE)
    stage, phase, last = SLICE, 0, 0
    done, turns = 0, 0
    mbarrier.wait(ready, 0)
    while unit < end:
        scale, shift = _convert_rows(rows[0], rows[1], CENTRE, GROUP_SIZE, HAS_ZERO, dtype)
        rows = later
        acc = hopper.warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA))
        before = gl.zeros([BLOCK_N, BLOCK_K], dtype, OPERAND)
        for i in range(SLICE, count, SLICES):
            mbarrier.wait(full.index(stage), phase)
            mine = words.index(stage)
            w = _words_of(mine, WORDS, 0, BLOCK_K) + _words_of(mine, WORDS, 1, BLOCK_K)
            next_scale, next_shift = scale, shift
            for j in gl.static_range(128 // BLOCK_K):
                s = scale[j * BLOCK_K // 32]
                a = _dequantize(w[j], s, shift[j * BLOCK_K // 32], CENTRE, HAS_ZERO, OPERAND)
                b = x.index(stage).slice(j * BLOCK_K, BLOCK_K, 1).permute((1, 0))
                acc = hopper.warpgroup_mma(a, b, acc, is_async=True)
                # the product before has ended, and its registers are free
                hopper.warpgroup_mma_wait(1, deps=[before])
                before = a
                if j == 0:
                    # and so has the last one of the step before, whose stage nobody reads any more: of this
                    # tile, or of the one before, once TMA has read y there
                    if STORE:
                        tma.store_wait(0)
                    mbarrier.arrive(empty.index(last), count=1, pred=(i > SLICE) | (KEPT & (turns > 0)))
                    # what was asked for a step ago and, as the answer takes one, what the next but one needs
                    next_scale, next_shift = _convert_rows(
                        rows[0], rows[1], CENTRE, GROUP_SIZE, HAS_ZERO, dtype
                    )
                    ahead = gl.minimum(first + i + 2 * SLICES, tiles - 1)
                    rows = _load_rows(scales, zeros, ahead, padded_n, GROUP_SIZE, HAS_ZERO)
            scale, shift = next_scale, next_shift
            last = stage
            stage += SLICES
            if stage >= STAGES:
                stage -= STAGES
                phase ^= 1
        if SLICES > 1:
            done += count
            stage = (done + SLICE) % STAGES
            phase = (done + SLICE) // STAGES & 1
        busy = count > SLICE
        # nowhere: with the same place the compiler would hold the addresses of y all the while
        after, after_end, next_token, next_row = end, end, 0, 0
        if SEVERAL:
            # the next tile's scales come while this one is written
            after, after_end = _next(
                unit, end, program, programs, m, n, whole, share, pitch, BLOCK_M, BLOCK_N
            )
            at = gl.minimum(after, gl.cdiv(m, BLOCK_M) * gl.cdiv(n, BLOCK_N) * pitch - 1)
            next_token, next_row, first, count = _segment(
                at, after_end, m, n, tiles, pitch, BLOCK_M, BLOCK_N, ONE
            )
            scales = scale_ptr + next_row + lane_row
            zeros = zero_ptr + next_row + lane_row
            rows, later = _first_rows(
                scales, zeros, first, tiles, padded_n, GROUP_SIZE, HAS_ZERO, SLICES, SLICE
            )
        y = _flat(hopper.warpgroup_mma_wait(0, deps=[acc, before])[0], WARPS)
        if SLICE > 0:
            if SEVERAL:
                mbarrier.arrive(empty.index(last), count=1, pred=busy)
                # what the first slice had of the tile before
                mbarrier.wait(taken, turns & 1 ^ 1)
            sums.store(y)
            # every thread's is there before one of them says so
            thread_barrier()
            mbarrier.arrive(given, count=1)
        else:
            if SLICES > 1:
                mbarrier.wait(given, turns & 1)
                y += sums.load(y.type.layout)
                if SEVERAL:
                    thread_barrier()
                    mbarrier.arrive(taken, count=1)
            _finish(
                y,
                x.index(last).slice(0, BLOCK_N, 1),
                bias_ptr,
                out_ptr,
                out_desc,
                partial_ptr,
                semaphore_ptr,
                unit,
                token,
                row,
                m,
                n,
                tiles,
                whole,
                share,
                pitch,
                most_parts,
                stride_om,
                stride_on,
                BLOCK_M,
                BLOCK_N,
                HAS_BIAS,
                SHARED,
                STORE,
                WARPS,
            )
            if SEVERAL and not STORE:
                # y went through the memory that TMA writes to next
                hopper.fence_async_shared()
                mbarrier.arrive(empty.index(last), count=1)
        unit, end, token, row = after, after_end, next_token, next_row
        turns += 1
    if STORE:
        tma.store_wait(0)


@gluon.jit
def _part(unit, tiles, whole, share, pitch):
    """Which of the tiles that are shared unit belongs to, which of its parts, and of how many."""
    place = unit // pitch - whole
    earlier = place * pitch // share
    part = (unit - whole * pitch) // share - earlier
    return place, part, (place * pitch + tiles - 1) // share - earlier + 1


@gluon.jit
def _flat(acc, WARPS: gl.constexpr):
    """The accumulator as _flat_layout has it."""
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    # repeat, warp, half, lane // 4, run of tokens, lane % 4, odd: lanes last but for the 16 bytes of each
    y = gl.reshape(acc, (BLOCK_N // (16 * WARPS), WARPS, 2, 8, BLOCK_M // 8, 4, 2))
    y = gl.reshape(gl.permute(y, (0, 4, 1, 3, 5, 2, 6)), (BLOCK_N * BLOCK_M,))
    return gl.convert_layout(y, _flat_layout(BLOCK_N, BLOCK_M, WARPS), assert_trivial=True)


@gluon.jit
def _finish(
    sums,
    memory,
    bias_ptr,
    out_ptr,
    out_desc,
    partial_ptr,
    semaphore_ptr,
    unit,
    token,
    row,
    m,
    n,
    tiles,
    whole,
    share,
    pitch,
    most_parts,
    stride_om,
    stride_on,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SHARED: gl.constexpr,
    STORE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Write the tile sums, or leave it in the workspace for the program that has the first part of its tile.

    partial: fp32 [tiles that are shared, most_parts - 1, BLOCK_N · BLOCK_M].  semaphore: [tiles that are
    shared], counts the parts that are there, 0 again afterwards.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    SIZE: gl.constexpr = BLOCK_N * BLOCK_M
    FLAT: gl.constexpr = sums.type.layout
    REPEATS: gl.constexpr = BLOCK_N // (16 * WARPS)
    mine = True
    if SHARED:
        place, part, parts = _part(unit, tiles, whole, share, pitch)
        if place >= 0 and parts > 1:
            cells = gl.arange(0, SIZE, layout=FLAT)
            cells += partial_ptr + place.to(gl.int64) * (most_parts - 1) * SIZE
            if part > 0:
                gl.store(cells + (part - 1) * SIZE, sums, cache_modifier=".cg")
                # every thread's share is stored before one of them says so
                thread_barrier()
                gl.atomic_add(semaphore_ptr + place, 1, sem="release")
                mine = False
            else:
                while gl.atomic_add(semaphore_ptr + place, 0, sem="acquire") < parts - 1:
                    pass
                gl.store(semaphore_ptr + place, 0)
                for other in range(parts - 1):
                    sums += gl.load(cells + other * SIZE, cache_modifier=".cg")
    if mine:
        y = gl.reshape(sums, (REPEATS, BLOCK_M // 8, WARPS, 8, 4, 2, 2))
        y = gl.reshape(gl.permute(y, (0, 2, 5, 3, 1, 4, 6)), (BLOCK_N, BLOCK_M))
        y = gl.convert_layout(y, MMA, assert_trivial=True)
        _write(
            y,
            memory,
            bias_ptr,
            out_ptr,
            out_desc,
            token,
            row,
            m,
            n,
            stride_om,
            stride_on,
            HAS_BIAS,
            STORE,
            WARPS,
        )


@gluon.jit
def _write(
    y,
    memory,
    bias_ptr,
    out_ptr,
    out_desc,
    token,
    row,
    m,
    n,
    stride_om,
    stride_on,
    HAS_BIAS: gl.constexpr,
    STORE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Transpose through the memory that held x, and write whole rows of y."""
    MMA: gl.constexpr = y.type.layout
    BLOCK_N: gl.constexpr = y.shape[0]
    BLOCK_M: gl.constexpr = y.shape[1]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    if HAS_BIAS:
        rows = row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, MMA))
        y += gl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(gl.float32)[:, None]
    memory.permute((1, 0)).store(y.to(dtype))
    if STORE:
        hopper.fence_async_shared()
        tma_store(out_desc, [token, row], memory)
    else:
        rows = row + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, ROWS))
        tokens = token + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROWS))
        cells = out_ptr + tokens.to(gl.int64)[:, None] * stride_om + rows.to(gl.int64)[None, :] * stride_on
        gl.store(cells, memory.load(ROWS), mask=(tokens < m)[:, None] & (rows < n)[None, :])


@gluon.jit(do_not_specialize=["m", "padded_n", "tiles", "whole", "share", "pitch", "most_parts"])
def hopper_kernel(
    x_desc,
    words_desc,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    out_desc,
    partial_ptr,
    semaphore_ptr,
    m,
    n,
    padded_n,
    tiles,
    whole,
    share,
    pitch,
    most_parts,
    stride_om,
    stride_on,
    CENTRE: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SEVERAL: gl.constexpr,
    SHARED: gl.constexpr,
    STORE: gl.constexpr,
    STAGES: gl.constexpr,
    SLICES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Tiles [BLOCK_N, BLOCK_M] of yᵀ: the first `whole` in turn, a share of the others for each program.

    x_desc: of x [m, tiles · 128] with block [BLOCK_M, 128].  words_desc: of words as [padded_n / 16,
    tiles · 256] with block [BLOCK_N / 16, 256].  partial, semaphore: see _finish.  GROUP_SIZE: a multiple of
    BLOCK_K, or 0 if rows are groups.  HAS_ZERO: otherwise all zero-points are CENTRE.  tiles: along K, and
    so the steps of a tile.  whole, share, pitch, most_parts: see Shares.  SEVERAL: a program may have to do
    with several tiles.  SHARED: most_parts > 1.  STORE: y by TMA, which goes on during the next tile, through
    out_desc, of out with block [BLOCK_M, BLOCK_N].  SLICES: of K within a program, of num_warps each; fewer
    than STAGES.
    """
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    program = gl.program_id(0)
    ONE: gl.constexpr = not SEVERAL and not SHARED
    unit, end = 0, 1
    if not ONE:
        unit, end = _units_of(program, program, m, n, whole, share, pitch, BLOCK_M, BLOCK_N)

    x = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, 128], x_desc.layout)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N // 16, 256], words_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    # The second slice's part of a tile, that it is there, and that it is read; stand-ins where unasked. Not
    # allocated for nobody: what nobody uses later may share its place with the arguments of the warps below.
    sums, given, taken = full, full, full
    if SLICES > 1:
        sums = gl.allocate_shared_memory(
            gl.float32, [BLOCK_N * BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(given, count=1)
        if SEVERAL:
            taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
            mbarrier.init(taken, count=1)
    hopper.fence_async_shared()
    if DEPENDENT:
        _let_next_start()
    WARPS: gl.constexpr = gl.num_warps()
    compute = (
        scale_ptr,
        zero_ptr,
        bias_ptr,
        out_ptr,
        out_desc,
        partial_ptr,
        semaphore_ptr,
        x,
        words,
        full,
        empty,
        ready,
        sums,
        given,
        taken,
        unit,
        end,
        m,
        n,
        padded_n,
        tiles,
        whole,
        share,
        pitch,
        most_parts,
        stride_om,
        stride_on,
    )
    produce = (
        x_desc,
        words_desc,
        scale_ptr,
        zero_ptr,
        x,
        words,
        full,
        empty,
        ready,
        unit,
        end,
        m,
        n,
        padded_n,
        tiles,
        whole,
        share,
        pitch,
    )
    if SLICES == 1:
        gl.warp_specialize(
            [
                (
                    _compute,
                    (
                        compute,
                        0,
                        1,
                        CENTRE,
                        GROUP_SIZE,
                        HAS_ZERO,
                        HAS_BIAS,
                        BLOCK_K,
                        SEVERAL,
                        SHARED,
                        STORE,
                        WARPS,
                    ),
                ),
                (_produce, (produce, GROUP_SIZE, HAS_ZERO, ONE, SEVERAL, DEPENDENT)),
            ],
            [1],
            # four warps cannot use all there are anyway
            [256 if BLOCK_M == 256 and WARPS == 4 else 24],
        )
    else:
        gl.static_assert(SLICES == 2)
        gl.warp_specialize(
            [
                (
                    _compute,
                    (
                        compute,
                        0,
                        2,
                        CENTRE,
                        GROUP_SIZE,
                        HAS_ZERO,
                        HAS_BIAS,
                        BLOCK_K,
                        SEVERAL,
                        SHARED,
                        STORE,
                        WARPS,
                    ),
                ),
                (
                    _compute,
                    (
                        compute,
                        1,
                        2,
                        CENTRE,
                        GROUP_SIZE,
                        HAS_ZERO,
                        HAS_BIAS,
                        BLOCK_K,
                        SEVERAL,
                        SHARED,
                        STORE,
                        WARPS,
                    ),
                ),
                (_produce, (produce, GROUP_SIZE, HAS_ZERO, ONE, SEVERAL, DEPENDENT)),
            ],
            [WARPS, 1],
            # More than there are, so that ptxas leaves all warps those they start with: exchanging them takes
            # time, and where the fetching warp has fewer it waits for every single product.
            [240, 240],
        )


@dataclass(frozen=True)
class Shares:
    """How programs divide the tiles of y: every programs-th of the first `whole` is one's own, then a share.

    Steps are counted through the other tiles, pitch to a tile, and `share` of them make a share.
    most_parts: of one tile.
    """

    programs: int
    whole: int
    share: int
    pitch: int
    most_parts: int


@functools.cache
def share_out(tiles: int, steps: int, split_k: int, at_once: int) -> Shares:
    """Shares of tiles of so many steps each.

    at_once: programs that the GPU runs at a time; they take tiles in turn, and what would not be a full round
    is divided. 0: a program for every tile or slice.
    split_k: slices that each tile is cut into, or each that is left over; 1, with at_once: all programs share
    what is left evenly, whatever tiles they begin and end in.
    """
    whole = tiles // at_once * at_once if at_once else 0
    rest = tiles - whole
    if not rest:
        return Shares(at_once, tiles, steps, steps, 1)
    if at_once and split_k == 1:
        share = -(-rest * steps // at_once)
        starts = range(0, rest * steps, steps)
        most = max((start + steps - 1) // share - start // share + 1 for start in starts)
        return Shares(max(whole and at_once, -(-rest * steps // share)), whole, share, steps, most)
    share = -(-steps // split_k)
    # a slice without a step would not wait for the kernel ahead
    parts = -(-steps // share)
    if parts == 1 and not at_once:
        return Shares(tiles, tiles, steps, steps, 1)
    return Shares(max(whole and at_once, rest * parts), whole, share, share * parts, parts)


def multiply(
    x: Tensor,
    weight: FragmentWeight,
    bias: Tensor | None,
    out: Tensor,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    split_k: int,
    at_once: int,
    dependent: bool,
    num_warps: int,
    num_stages: int,
    slices: int = 1,
) -> None:
    """Fill out [M, N] with x [M, K] @ Wᵀ + bias by hopper_kernel.

    block_m: a power of two, 16 to 256.  block_n: 64 or 128, 16 · num_warps at least.  block_k: inputs of one
    product, 16, 32 or 64, a divisor of the group size.  split_k, at_once: see share_out.  num_warps: 4 or 8.
    slices: of K within a program, 1 or, with 4 warps each, 2.
    """
    layout = weight.layout
    x = padded_x(x, layout.padded_k)
    m, n = out.shape
    tiles = -(-n // block_n) * -(-m // block_m)
    shares = share_out(tiles, layout.tiles, split_k, at_once)
    rest = tiles - shares.whole
    cells = rest * (shares.most_parts - 1) * block_n * block_m
    partial, semaphore = workspace(out, shares.most_parts, rest, cells)
    words = weight.words.view(layout.shape[0], -1)
    # TMA leaves time for the next tile, and the last one waits for it a little longer
    several = at_once > 0 and shares.whole > 0
    store = several and out.stride(1) == 1 and out.stride(0) % 8 == 0 and out.data_ptr() % 16 == 0
    launch(
        hopper_kernel,
        (shares.programs,),
        TensorDescriptor.from_tensor(x, [block_m, TILE_K], X_LAYOUT),
        TensorDescriptor.from_tensor(words, [block_n // TILE_N, 256], WORDS_LAYOUT),
        weight.scale,
        weight.scale if weight.zero_point is None else weight.zero_point,
        out if bias is None else bias,
        out,
        TensorDescriptor.from_tensor(out, [block_m, block_n], X_LAYOUT) if store else out,
        partial,
        semaphore,
        m,
        n,
        layout.padded_n,
        layout.tiles,
        shares.whole,
        shares.share,
        shares.pitch,
        shares.most_parts,
        *out.stride(),
        CENTRE=1 << (weight.bits - 1),
        GROUP_SIZE=0 if weight.scale.shape[0] == 1 else weight.group_size,
        HAS_ZERO=weight.zero_point is not None,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SEVERAL=at_once > 0,
        SHARED=shares.most_parts > 1,
        STORE=store,
        STAGES=num_stages,
        SLICES=slices,
        DEPENDENT=dependent,
        num_warps=num_warps,
        **({"launch_pdl": True} if dependent else {}),
        **_registers(num_warps, block_m, slices),
    )


def _registers(num_warps: int, block_m: int, slices: int) -> dict[str, int]:
    """Option of the compiler that leaves room for a second program where four warps compute.

    Otherwise a program takes all registers of a multiprocessor: its fetching warp counts as four. A product
    of 256 tokens needs more to compile.
    """
    return {"maxnreg": 128} if num_warps == 4 and block_m < 256 and slices == 1 else {}


@functools.cache
def missing() -> str | None:
    """What this installation lacks for hopper_kernel; None if Triton compiles it."""
    return what_lacks(
        lambda: compile_kernel(BLOCK_M=64, BLOCK_N=64, STAGES=3, SLICES=2, STORE=True, num_warps=4)
    )


def what_lacks(compile_one: Callable[[], object]) -> str | None:
    """What this installation lacks for a Gluon kernel that compile_one compiles; None for nothing.

    Gluon is young and changes with every release of Triton: so the compiler itself is asked.
    """
    if not HAS_TRITON:
        return "Triton is not installed"
    if not HAS_GLUON:
        return f"Triton {triton.__version__} has no Gluon for Hopper"
    try:
        compile_one()
    except Exception as e:
        return f"Triton {triton.__version__} does not compile the kernel ({type(e).__name__})"
    return None


def compile_kernel(
    act: str = "fp16", zero: str = "u8", num_warps: int = 8, aligned: bool = True, **constexprs: Any
) -> Any:
    """hopper_kernel compiled for sm_90, which needs no GPU.

    act, zero: Triton types of the activations and zero-points.  aligned: n and the rows of out are multiples
    of 16.  constexprs: other than those of a symmetric 4-bit weight in groups of 128 without split.
    """
    constants = {
        "stride_on": 1,
        "CENTRE": 8,
        "GROUP_SIZE": 128,
        "HAS_ZERO": False,
        "HAS_BIAS": False,
        "BLOCK_M": 128,
        "BLOCK_N": 128,
        "BLOCK_K": 64,
        "SEVERAL": False,
        "SHARED": False,
        "STORE": False,
        "STAGES": 4,
        "SLICES": 1,
        "DEPENDENT": False,
    } | constexprs
    x_block, words_block = [constants["BLOCK_M"], TILE_K], [constants["BLOCK_N"] // TILE_N, 256]
    y_block = [constants["BLOCK_M"], constants["BLOCK_N"]]
    types = {
        "x_desc": f"tensordesc<{act}{x_block},{X_LAYOUT!r}>",
        "words_desc": f"tensordesc<i32{words_block},{WORDS_LAYOUT!r}>",
        "out_desc": f"tensordesc<{act}{y_block},{X_LAYOUT!r}>" if constants["STORE"] else f"*{act}",
    }
    return compile_gluon(
        hopper_kernel,
        types,
        constants,
        {"n", "stride_om"} if aligned else set(),
        act,
        zero,
        num_warps=num_warps,
        **_registers(num_warps, constants["BLOCK_M"], constants["SLICES"]),
    )


def compile_gluon(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    multiples: set[str],
    act: str,
    zero: str,
    **options: int,
) -> Any:
    """A Gluon kernel of this package compiled for sm_90.

    types: of arguments that it has alone.  constants: its constexprs.  multiples: of 16, among its integers.
    act, zero: Triton types of the activations and zero-points.
    """
    names = kernel.arg_names
    types = {
        "words_ptr": "*i32",
        "partial_ptr": "*fp32",
        "semaphore_ptr": "*i32",
        "zero_ptr": f"*{zero if constants['HAS_ZERO'] else act}",
        **dict.fromkeys(("scale_ptr", "bias_ptr", "out_ptr"), f"*{act}"),
        **types,
    }
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in names}
    divisible = multiples | {name for name in names if signature[name].startswith("*")}
    return triton.compile(
        GluonASTSource(
            kernel,
            signature,
            {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
        ),
        target=triton.backends.compiler.GPUTarget("cuda", 90, 32),
        options=options,
    )

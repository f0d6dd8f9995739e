"""y = x Wᵀ + bias from weights in fragment order (layout.py): the fast family, one launch a call.

The weight is the left operand of the matrix instruction, so a program owns a [BLOCK_N, BLOCK_M] tile of yᵀ
and the padded dimension is tokens, in steps of 8. A word holds, in fields of each half-word, codes of rows r
and r + 8 for neighbouring inputs; `(word & mask) | magic` turns a field of both halves into floats 2^e + q,
and joins and reshapes that the compiler resolves to register renaming make the operand. Nothing is shuffled.

    decode      few tokens. Operands go from memory to registers: no shared memory, no barrier in the loop.
                The offset of the magic numbers leaves in the product,
                    y = Σ_g s_g (Σ_k (2^e + q) x  -  (2^e + z_g) Σ_k x),
                with Σ_k x from the same instruction and a left operand of ones, so that zero-points, whole or
                fractional, are free; or, where z is known, the second sum from an operand of -(2^e + z).
                Groups smaller than a tile are products of their own. SLICES warps share a tile along K and
                add up through shared memory. Weights are loaded DEPTH steps ahead, the first of them before
                the kernel ahead has ended. For stacked experts a program's tokens come from a table.
    gemm        more tokens. x goes through shared memory, by a TMA descriptor where that is possible; weights
                are centred, and scaled before the product (SCALE_WEIGHTS) or after it.
    dequantize  writes W for a dense product.

Split K: partial sums go to a workspace, and the last program of a tile adds them, slice 0 first, so a result
does not depend on the order in which programs finish.

Bytes moved: words and scales once per BLOCK_M tokens; x once per BLOCK_N outputs, mostly from cache;
SPLIT_K · M · N · 8 for the split.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .device import jit, launch, tl, triton
from .layout import EXPERT_TOKENS, TILE_K, TILE_N, FragmentLayout, expert_slots


@jit()
def _rotate_right(word, BY: tl.constexpr):
    if BY == 0:
        return word
    else:
        bits = word.to(tl.uint32, bitcast=True)
        return ((bits >> BY) | (bits << (32 - BY))).to(tl.int32, bitcast=True)


@jit()
def _pair(
    word,
    less,
    MASK: tl.constexpr,
    MAGIC: tl.constexpr,
    ZERO: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    DOWN: tl.constexpr,
    dtype: tl.constexpr,
    LOP3: tl.constexpr,
):
    """Fields of both half-words as floats minus `less`: int32 [...] to dtype [..., 2].

    less: int16, the bits of a float, broadcast to word; None: ZERO, or nothing if that is 0.
    MASK, MAGIC: of one half-word.  ZERO_BITS: ZERO in dtype.
    """
    if LOP3:
        # From `&` and `|` with two immediates ptxas makes two instructions, and LLVM releases differ in
        # whether a subtraction takes both halves at once.
        if DOWN > 0:
            # Fields DOWN bits too high are subnormal halves: a product moves them and a sum adds the magic
            # number, exactly, on other units than those of the shifts and masks.
            bits = tl.inline_asm_elementwise(
                "and.b32 $0, $1, $2; fma.rn.f16x2 $0, $0, $3, $4;",
                "=&r,r,r,r,r",
                [word, (MASK << DOWN) * 0x10001, ((MAGIC >> 10) + 14 - DOWN) * 0x4000400, MAGIC * 0x10001],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            bits = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, $2, $3, 0xea;",
                "=r,r,r,r",
                [word, MASK * 0x10001, MAGIC * 0x10001],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        if less is None and ZERO != 0:
            less = ZERO_BITS
        if less is not None:
            # a half of a register serves both, no instruction doubles it
            if dtype == tl.float16:
                bits = tl.inline_asm_elementwise(
                    "{ .reg .b32 both; mov.b32 both, {$2, $2}; sub.f16x2 $0, $1, both; }",
                    "=r,r,h",
                    [bits, less],
                    dtype=tl.int32,
                    is_pure=True,
                    pack=1,
                )
            else:
                # sm_80 has no sub.bf16x2; -1 · zero + x
                bits = tl.inline_asm_elementwise(
                    "{ .reg .b32 both; mov.b32 both, {$2, $2}; fma.rn.bf16x2 $0, both, $3, $1; }",
                    "=r,r,h,r",
                    [bits, less, -0x407F4080],
                    dtype=tl.int32,
                    is_pure=True,
                    pack=1,
                )
    else:
        bits = (word & (MASK * 0x10001)) | (MAGIC * 0x10001)
    pair = _halves(bits, dtype)
    if LOP3:
        return pair
    elif less is None:
        return pair - ZERO
    else:
        return pair - tl.expand_dims(less.to(dtype, bitcast=True), -1)


@jit()
def _halves(bits, dtype: tl.constexpr):
    low = (bits & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, high)


@jit()
def _fine_pair(word, less, MASK: tl.constexpr, DOWN: tl.constexpr, dtype: tl.constexpr):
    """Fields of both half-words plus `less` in one instruction after the mask: int32 [...] to dtype [..., 2].

    A field at bit 2 or above is a subnormal number, which a product scales up; DOWN: bits it is too high.
    less: a value of dtype, broadcast to word.
    """
    if dtype == tl.float16:
        bits = tl.inline_asm_elementwise(
            "{ .reg .b32 both; mov.b32 both, {$4, $4}; and.b32 $0, $1, $2; fma.rn.f16x2 $0, $0, $3, both; }",
            "=&r,r,r,r,h",
            # times 2^15
            [word, MASK * 0x10001, 0x78007800, less],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    elif DOWN == 0:
        bits = tl.inline_asm_elementwise(
            "{ .reg .b32 both; mov.b32 both, {$4, $4}; and.b32 $0, $1, $2; fma.rn.bf16x2 $0, $0, $3, both; }",
            "=&r,r,r,r,h",
            # times 2^127
            [word, MASK * 0x10001, 0x7F007F00, less],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        bits = tl.inline_asm_elementwise(
            "{ .reg .b32 both; mov.b32 both, {$5, $5}; and.b32 $0, $1, $2; mul.rn.f16x2 $0, $0, $3;"
            " fma.rn.bf16x2 $0, $0, $4, both; }",
            "=&r,r,r,r,r,h",
            [word, (MASK << DOWN) * 0x10001, (15 - DOWN) * 0x4000400, 0x7F007F00, less],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return _halves(bits, dtype)


@jit()
def _field(
    word,
    zero,
    HALF: tl.constexpr,
    RUN: tl.constexpr,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    dtype: tl.constexpr,
    LOP3: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Codes of rows HALF of run RUN minus `zero`: dtype [..., 2].

    zero: of _whole_point, broadcast to word; or dtype, -zero · _fine_unit, and so is what is returned,
    rounded once; None: CENTRE, or if that is None minus _field_offset.
    PRODUCTS: rather multiply than rotate.
    """
    # eight bits need the ten-bit mantissa of fp16
    wide: tl.constexpr = dtype == tl.float16 or BITS == 8
    mantissa: tl.constexpr = 10 if wide else 7
    # both rows' fields fit the mantissa of one rotation, or the second row needs its own
    at: tl.constexpr = 2 + BITS * HALF if mantissa >= 2 + 2 * BITS else 2
    # the second row's field where the first row's rotation has it
    down: tl.constexpr = BITS if PRODUCTS and HALF == 1 and at == 2 and BITS == 4 else 0
    rotated = _rotate_right(word, BITS * (HALF + 2 * RUN) + 2 - at - down)
    mask: tl.constexpr = ((1 << BITS) - 1) << at
    # the exponent of 2^(mantissa - at), whose field at `at` counts ones
    magic: tl.constexpr = (25 - at) << 10 if wide else (134 - at) << 7
    half: tl.constexpr = tl.float16 if wide else dtype
    # in bf16, codes of 8 bits fit only centred
    centre: tl.constexpr = 128 if CENTRE is None and half != dtype else CENTRE
    offset: tl.constexpr = 1.0 * (1 << (mantissa - at))
    if zero is not None and zero.dtype.is_floating():
        return _fine_pair(rotated, zero, mask, down, dtype)
    elif zero is not None:
        return _pair(rotated, zero.to(tl.int16), mask, magic, 0.0, 0, down, half, LOP3).to(dtype)
    elif centre is None:
        return _pair(rotated, None, mask, magic, 0.0, 0, down, half, LOP3)
    else:
        bits: tl.constexpr = magic + (centre << at)
        return _pair(rotated, None, mask, magic, offset + centre, bits, down, half, LOP3).to(dtype)


@jit()
def _field_offset(half, BITS: tl.constexpr, dtype: tl.constexpr):
    """What _field adds to the codes of rows `half` (0 or 1, a tensor)."""
    if BITS == 8 and dtype != tl.float16:
        return tl.where(half == 0, -128.0, -128.0)
    else:
        mantissa: tl.constexpr = 10 if dtype == tl.float16 else 7
        second: tl.constexpr = 2 + BITS if mantissa >= 2 + 2 * BITS else 2
        return tl.where(half == 0, 1.0 * (1 << (mantissa - 2)), 1.0 * (1 << (mantissa - second)))


@jit()
def _whole_point(zero, half, BITS: tl.constexpr, dtype: tl.constexpr):
    """int32, whose low half are the bits of _field_offset + zero, for rows `half` (0 or 1, a tensor)."""
    wide: tl.constexpr = dtype == tl.float16 or BITS == 8
    second: tl.constexpr = 2 + BITS if (wide and BITS < 8) or 2 + 2 * BITS <= 7 else 2
    # the exponents of the numbers that _field makes
    first_one: tl.constexpr = 23 << 10 if wide else 132 << 7
    second_one: tl.constexpr = (25 - second) << 10 if wide else (134 - second) << 7
    shifted = zero.to(tl.int32) << tl.where(half == 0, 2, second)
    return shifted + tl.where(half == 0, first_one, second_one)


@jit()
def _fine_unit(half, BITS: tl.constexpr, dtype: tl.constexpr):
    """What one step of a code is in _field with zero-points of dtype, for rows `half` (0 or 1, a tensor)."""
    # what the product leaves of a field at bit 2
    mantissa: tl.constexpr = 10 if dtype == tl.float16 else 7
    unit: tl.constexpr = 2.0**-7 if dtype == tl.float16 else 2.0**-4
    second: tl.constexpr = unit * (1 << BITS) if mantissa >= 2 + 2 * BITS else unit
    return tl.where(half == 0, unit, second)


@jit()
def _runs(
    word,
    zero,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    dtype: tl.constexpr,
    LOP3: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """_field of every run of rows HALF: dtype [..., 2], then a dimension of 2 for each bit of the run."""
    first = _field(word, zero, HALF, 0, BITS, CENTRE, dtype, LOP3, PRODUCTS)
    if BITS < 8:
        first = tl.join(first, _field(word, zero, HALF, 1, BITS, CENTRE, dtype, LOP3, PRODUCTS))
    if BITS < 4:
        third = _field(word, zero, HALF, 2, BITS, CENTRE, dtype, LOP3, PRODUCTS)
        fourth = _field(word, zero, HALF, 3, BITS, CENTRE, dtype, LOP3, PRODUCTS)
        first = tl.join(first, tl.join(third, fourth))
    return first


@jit()
def _operand(
    words,
    zero0,
    zero1,
    SLICES: tl.constexpr,
    ROWS16: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    ORDER: tl.constexpr,
    dtype: tl.constexpr,
    LOP3: tl.constexpr,
):
    """[CHUNKS · ROWS16 · SLICES, 32 · WIDE] words to the left operand [SLICES, 16 · ROWS16, INPUTS].

    zero0, zero1: see _field, for rows of either half, [1 or CHUNKS, ROWS16, 1, 8, 4, 1 or WIDE].
    ORDER: of inputs within a block of 32, free as long as _x_operand takes the same: 2 or 4, the neighbours
    that a lane holds in the operand that the compiler picked, and registers are renamed instead of moved.
    """
    w = tl.reshape(words, (CHUNKS, ROWS16, SLICES, 8, 4, WIDE))  # c r s lane//4 lane%4 i
    # rotations and masks keep one unit busy; with few rows a warp, products in their place were slower
    PRODUCTS: tl.constexpr = LOP3 and ROWS16 > 1
    rows0 = _runs(w, zero0, 0, BITS, CENTRE, dtype, LOP3, PRODUCTS)
    p = tl.join(rows0, _runs(w, zero1, 1, BITS, CENTRE, dtype, LOP3, PRODUCTS))
    if BITS == 8:
        p = tl.permute(p, (2, 1, 7, 3, 0, 5, 4, 6))  # c r s nl t i odd half
    elif BITS == 4:
        p = tl.permute(p, (2, 1, 8, 3, 0, 5, 7, 4, 6))  # c r s nl t i odd run half
    else:
        p = tl.permute(p, (2, 1, 9, 3, 0, 5, 8, 7, 4, 6))  # c r s nl t i odd run%2 run//2 half
    INPUTS: tl.constexpr = CHUNKS * WIDE * 64 // BITS
    p = tl.reshape(p, (SLICES, ROWS16 * 16, INPUTS // 32, 2, 2, 4, 2))  # s row block//2 block%2 run t odd
    if ORDER == 2:
        pass
    elif ORDER == 4:
        p = tl.permute(p, (0, 1, 2, 3, 5, 4, 6))
    else:
        p = tl.permute(p, (0, 1, 2, 4, 5, 3, 6))
    return tl.reshape(p, (SLICES, ROWS16 * 16, INPUTS))


@jit()
def _weights(
    words,
    zero0,
    zero1,
    ROWS16: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    ORDER: tl.constexpr,
    dtype: tl.constexpr,
    LOP3: tl.constexpr,
):
    """Words to q - CENTRE or q - zero, exact: [16 · ROWS16, CHUNKS · WIDE · 64 / BITS]; see _operand."""
    a = _operand(words, zero0, zero1, 1, ROWS16, CHUNKS, WIDE, BITS, CENTRE, ORDER, dtype, LOP3)
    return tl.reshape(a, (ROWS16 * 16, CHUNKS * WIDE * 64 // BITS))


@jit()
def _x_operand(x, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, WIDE: tl.constexpr, ORDER: tl.constexpr):
    """A tile of x a slice, as decode_kernel loads it, to [SLICES, 128, BLOCK_M] in _operand's ORDER."""
    if WIDE:
        x = tl.reshape(x, (BLOCK_M // 8, 4, SLICES, 8, 2, 2, 4, 2))  # mr c s m b run t odd
        x = tl.permute(x, (2, 1, 4, 5, 6, 7, 0, 3))
    else:
        x = tl.reshape(x, (BLOCK_M // 8, 4, 2, 2, SLICES, 8, 4, 2))  # mr c b run s m t odd
        x = tl.permute(x, (4, 1, 2, 3, 6, 7, 0, 5))
    x = tl.reshape(x, (SLICES, 4, 2, 2, 4, 2, BLOCK_M))
    if ORDER == 2:
        pass
    elif ORDER == 4:
        x = tl.permute(x, (0, 1, 2, 4, 3, 5, 6))
    else:
        x = tl.permute(x, (0, 1, 3, 4, 2, 5, 6))
    return tl.reshape(x, (SLICES, 128, BLOCK_M))


@jit()
def _groups_apart(a, b, GROUPS: tl.constexpr):
    """Operands [SLICES, rows, 128] and [SLICES, 128, columns] of one tile a slice, cut into groups of inputs.

    The group comes first, and warps take slices: a lane keeps what it has.
    """
    if GROUPS > 1:
        S: tl.constexpr = a.shape[0]
        a = tl.permute(tl.reshape(a, (S, a.shape[1], GROUPS, 128 // GROUPS)), (2, 0, 1, 3))
        a = tl.reshape(a, (GROUPS * S, a.shape[2], 128 // GROUPS))
        b = tl.permute(tl.reshape(b, (S, GROUPS, 128 // GROUPS, b.shape[2])), (1, 0, 2, 3))
        b = tl.reshape(b, (GROUPS * S, 128 // GROUPS, b.shape[3]))
    return a, b


@jit()
def _per_row(value, SLICES: tl.constexpr, ROWS16: tl.constexpr, BLOCK_M: tl.constexpr):
    """[2 · ROWS16 · SLICES · 32], one value a row and lane, to fp32 [SLICES, 16 · ROWS16, BLOCK_M]."""
    v = tl.reshape(value, (ROWS16, 2, SLICES, 8, 4)).to(tl.float32)
    v = tl.reshape(tl.permute(v, (2, 0, 1, 3, 4)), (SLICES, ROWS16, 2, 8, 1, 4, 1))
    v = tl.broadcast_to(v, (SLICES, ROWS16, 2, 8, BLOCK_M // 8, 4, 2))
    return tl.reshape(v, (SLICES, ROWS16 * 16, BLOCK_M))


@jit()
def _on_rows(value, GROUPS: tl.constexpr, ROWS16: tl.constexpr, WARP_ROWS: tl.constexpr):
    """[GROUPS · ROWS16 · 64], a value a row and lane as gemm_kernel loads them: [ROWS16, 2, 8, GROUPS, 4]."""
    v = tl.reshape(value, (GROUPS, ROWS16 // WARP_ROWS, 2, WARP_ROWS, 8, 4))
    return tl.reshape(tl.permute(v, (1, 3, 2, 4, 0, 5)), (ROWS16, 2, 8, GROUPS, 4))


@jit()
def _on_weights(value, BLOCK_K: tl.constexpr):
    """[ROWS16, 2, 8, GROUPS, 4], the same for every lane of a row, to [16 · ROWS16, BLOCK_K]."""
    ROWS16: tl.constexpr = value.shape[0]
    GROUPS: tl.constexpr = value.shape[3]
    v = tl.reshape(value, (ROWS16, 2, 8, GROUPS, 1, 4, 1))
    v = tl.broadcast_to(v, (ROWS16, 2, 8, GROUPS, BLOCK_K // GROUPS // 8, 4, 2))
    return tl.reshape(v, (ROWS16 * 16, BLOCK_K))


@jit()
def _on_words(value, CHUNKS: tl.constexpr, WIDE: tl.constexpr):
    """[ROWS16, 2, 8, GROUPS, 4] to a value for each word of _operand and half of its rows: two tensors."""
    ROWS16: tl.constexpr = value.shape[0]
    GROUPS: tl.constexpr = value.shape[3]
    v = tl.permute(value, (3, 0, 2, 4, 1))
    if GROUPS > 1:
        v = tl.reshape(v, (GROUPS, 1, ROWS16, 8, 4, 2))
        v = tl.broadcast_to(v, (GROUPS, CHUNKS * WIDE // GROUPS, ROWS16, 8, 4, 2))
        v = tl.permute(tl.reshape(v, (CHUNKS, WIDE, ROWS16, 8, 4, 2)), (0, 2, 3, 4, 1, 5))
        return tl.split(tl.reshape(v, (CHUNKS, ROWS16, 1, 8, 4, WIDE, 2)))
    else:
        return tl.split(tl.reshape(v, (1, ROWS16, 1, 8, 4, 1, 2)))


@jit()
def _first_group(block, BLOCK_K: tl.constexpr, GROUP_SIZE: tl.constexpr):
    if GROUP_SIZE == 0:
        return block * 0
    elif GROUP_SIZE <= BLOCK_K:
        return block * (BLOCK_K // GROUP_SIZE)
    else:
        return block // (GROUP_SIZE // BLOCK_K)


@jit()
def _next_cell(cell, block, blocks, padded_n, BLOCK_K: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Where the scales of the block after `block` begin, of the last one at most; cell: of this one."""
    if GROUP_SIZE > 0 and GROUP_SIZE <= BLOCK_K:
        step = BLOCK_K // GROUP_SIZE * padded_n
        return tl.minimum(cell + step, (blocks - 1) * step)
    else:
        return _first_group(tl.minimum(block + 1, blocks - 1), BLOCK_K, GROUP_SIZE) * padded_n


@jit()
def _every_input(row, SLICES: tl.constexpr, GROUPS: tl.constexpr, dtype: tl.constexpr, PAIRS: tl.constexpr):
    """A left operand [SLICES, rows, 128 / GROUPS] that has row's values [rows] for every input."""
    rows: tl.constexpr = row.shape[0]
    if PAIRS:
        return tl.broadcast_to(row.to(dtype)[None, :, None], (SLICES, rows, 128 // GROUPS))
    else:
        part = tl.broadcast_to(row.to(dtype)[None, :, None], (SLICES, rows, 64 // GROUPS))
        # joined so that the compiler picks the same operand order for it as for the weight
        return tl.reshape(tl.join(part, part), (SLICES, rows, 128 // GROUPS))


@jit()
def _same(value):
    return value


# Triton 3.4 has no map_elementwise, and looks for what a kernel names even where it is not used.
_HAS_MAP = hasattr(tl, "map_elementwise")
if _HAS_MAP:

    @jit()
    def _unseen(value):
        """value, but the compiler does not look through this."""
        return tl.map_elementwise(_same, value)
else:
    _unseen = _same


@jit()
def _dot(a, b, acc):
    """acc [slices, rows, columns] plus the product of every slice; one slice uses the plain instruction."""
    if a.shape[0] == 1:
        a = tl.reshape(a, (a.shape[1], a.shape[2]))
        b = tl.reshape(b, (b.shape[1], b.shape[2]))
        product = tl.dot(a, b, tl.reshape(acc, (a.shape[0], b.shape[1])))
        return tl.reshape(product, acc.shape)
    else:
        return tl.dot(a, b, acc)


@jit()
def _let_next_start():
    """Allow the next kernel to start, which waits for this one before it reads what this one writes."""
    # Triton 3.4 has broken wrappers of these two
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@jit()
def _wait_for_previous():
    """Wait until the kernel before has ended and what it wrote can be read."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@jit()
def _issue():
    """Loads written before this are issued before it: ptxas would delay each to just before its use."""
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@jit()
def _finish(
    acc,
    rows,
    tokens,
    bias_ptr,
    out_ptr,
    partial_ptr,
    semaphore_ptr,
    tile,
    split,
    m,
    n,
    stride_om,
    stride_on,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """Write the tile acc [rows, tokens] of yᵀ, or leave it for the tile's last program to add.

    The semaphore counts the programs that are done and is 0 again when all are.
    """
    mask = (rows < n)[:, None] & (tokens < m)[None, :]
    if SPLIT_K > 1:
        cells = partial_ptr + tokens.to(tl.int64)[None, :] * n + rows[:, None]
        step = m.to(tl.int64) * n
        tl.store(cells + split * step, acc, mask=mask, cache_modifier=".cg")
        # every thread's part is stored before one of them counts this program as done
        tl.debug_barrier()
        done = tl.atomic_add(semaphore_ptr + tile, 1, sem="acq_rel")
        if done == SPLIT_K - 1:
            acc = tl.zeros(acc.shape, dtype=tl.float32)
            # all loads of eight are under way together; more would need more registers than the product
            # Triton 3.4 takes no min() of constants for one
            AT_ONCE: tl.constexpr = 8 if SPLIT_K > 8 else SPLIT_K
            for start in tl.range(0, SPLIT_K, 8, num_stages=1):
                for i in tl.static_range(AT_ONCE):
                    there = mask & (start + i < SPLIT_K)
                    acc += tl.load(cells + (start + i) * step, mask=there, other=0.0, cache_modifier=".cg")
            _write(acc, rows, tokens, mask, bias_ptr, out_ptr, n, stride_om, stride_on, HAS_BIAS)
            tl.store(semaphore_ptr + tile, 0)
    else:
        _write(acc, rows, tokens, mask, bias_ptr, out_ptr, n, stride_om, stride_on, HAS_BIAS)


@jit()
def _write(acc, rows, tokens, mask, bias_ptr, out_ptr, n, stride_om, stride_on, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
    cells = out_ptr + tokens.to(tl.int64)[None, :] * stride_om + rows.to(tl.int64)[:, None] * stride_on
    tl.store(cells, acc.to(out_ptr.dtype.element_ty), mask=mask)


@jit()
def _load_tile(
    words,
    scale,
    zero,
    first,
    tiles,
    padded_n,
    SLICES: tl.constexpr,
    ROWS16: tl.constexpr,
    CHUNKS: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Words, scales and zero-points of the tiles that slices take when slice 0 takes tile `first`."""
    word_tile = first + tl.arange(0, CHUNKS * ROWS16 * SLICES) % SLICES
    e = tl.arange(0, ROWS16 * 2 * GROUPS * SLICES * 32)
    row_tile = first + e // 32 % SLICES
    if not EVEN:
        word_tile = tl.minimum(word_tile, tiles - 1)
        row_tile = tl.minimum(row_tile, tiles - 1)
    w = tl.load(words + word_tile[:, None] * (64 * BITS), eviction_policy="evict_first")
    if GROUP_SIZE == 0:
        group = e * 0
    else:
        group = (row_tile * 128 + e // (32 * SLICES) % GROUPS * (128 // GROUPS)) // GROUP_SIZE
    s = tl.load(scale + group * padded_n)
    z = s
    if HAS_ZERO:
        z = tl.load(zero + group * padded_n)
    return w, s, z


@jit()
def _load_x(x, x_mask, first, last, SLICES: tl.constexpr, EVEN: tl.constexpr):
    """x of the tiles that slices take when slice 0 takes tile `first`."""
    x_tile = first + tl.arange(0, x.shape[0]) % SLICES
    if not EVEN:
        # past the end x reads as 0, whatever the clamped weight is
        x_mask = x_mask & (x_tile < last)[:, None]
    return tl.load(x + x_tile[:, None] * 128, mask=x_mask, other=0.0)


@jit()
def _add_tile(
    acc,
    loaded,
    x,
    dtype: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS16: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    X_WIDE: tl.constexpr,
    ORDER: tl.constexpr,
    PAIRS: tl.constexpr,
    LOP3: tl.constexpr,
):
    """acc [SLICES, 16 · ROWS16, BLOCK_M] plus the products of what _load_tile and _load_x loaded."""
    w, s, z = loaded
    batch: tl.constexpr = GROUPS * SLICES
    b = _x_operand(x, SLICES, BLOCK_M, X_WIDE, ORDER)
    a = _operand(w, None, None, SLICES, ROWS16, CHUNKS, WIDE, BITS, None, ORDER, dtype, LOP3)
    if PAIRS:
        # Of joined words Triton 3.6 makes operands of four neighbours, for which x has to be moved between
        # registers. It does not look through this, which is nothing, and takes pairs.
        a = _unseen(a)
    a, b = _groups_apart(a, b, GROUPS)
    half = tl.arange(0, ROWS16 * 16) // 8 % 2
    nothing = tl.zeros((batch, ROWS16 * 16, BLOCK_M), dtype=tl.float32)
    if HAS_ZERO or GROUPS > 1 or PAIRS:
        ones = _every_input(half * 0 + 1.0, batch, GROUPS, dtype, PAIRS)
        e = tl.arange(0, ROWS16 * 2 * batch * 32) // (32 * batch) % 2
        centre = _field_offset(e, BITS, dtype) + (z if HAS_ZERO else CENTRE)
        centre = _per_row(centre, batch, ROWS16, BLOCK_M)
        if PAIRS and ROWS16 > 1 and GROUPS < 4:
            product = _dot(a, b, -centre * _dot(ones, b, nothing))
        else:
            product = _dot(a, b, nothing) - centre * _dot(ones, b, nothing)
    else:
        # known before: the product starts from it, unless many short ones would wait for many such starts
        excess = _every_input(-_field_offset(half, BITS, dtype) - CENTRE, batch, GROUPS, dtype, False)
        product = _dot(a, b, _dot(excess, b, nothing))
    product = product * _per_row(s, batch, ROWS16, BLOCK_M)
    if GROUPS > 1:
        product = tl.sum(tl.reshape(product, (GROUPS, SLICES, ROWS16 * 16, BLOCK_M)), axis=0)
    return acc + product


@jit(do_not_specialize=["pairs", "slots"])
def route_kernel(
    index_ptr,
    routes_ptr,
    pairs,
    slots,
    BY_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Group (token, place) pairs by expert into tiles of BLOCK_M, in one program.

    index: [pairs] integer, the expert of each.  routes: int32, first [slots, 4] of (expert, start in the
    order, how many, -), how many being 0 where there is no tile; then the order, [pairs] by expert.
    """
    if DEPENDENT:
        _let_next_start()
    lane = tl.arange(0, BLOCK)
    for start in range(0, slots, BLOCK):
        tl.store(routes_ptr + (start + lane) * 4 + 2, 0, mask=start + lane < slots)
    # a slot may be cleared by one thread and filled by another
    tl.debug_barrier()
    for start in range(0, pairs, BLOCK):
        pair = start + lane
        expert = tl.load(index_ptr + pair, mask=pair < pairs, other=0).to(tl.int32)
        below = tl.zeros((BLOCK,), dtype=tl.int32)
        earlier = tl.zeros((BLOCK,), dtype=tl.int32)
        same = tl.zeros((BLOCK,), dtype=tl.int32)
        for start_other in range(0, pairs, BLOCK):
            other = start_other + lane
            # no expert has this number
            rival = tl.load(index_ptr + other, mask=other < pairs, other=0x7FFFFFFF).to(tl.int32)
            equal = rival[None, :] == expert[:, None]
            below += tl.sum((rival[None, :] < expert[:, None]).to(tl.int32), axis=1)
            earlier += tl.sum((equal & (other[None, :] < pair[:, None])).to(tl.int32), axis=1)
            same += tl.sum(equal.to(tl.int32), axis=1)
        rank = below + earlier
        tl.store(routes_ptr + slots * 4 + rank, pair, mask=pair < pairs)
        # different for every tile, without knowing how many tiles the experts before have
        slot = rank if BY_RANK else below // BLOCK_M + expert + earlier // BLOCK_M
        tile = routes_ptr + slot * 4
        begins = (pair < pairs) & (earlier % BLOCK_M == 0)
        tl.store(tile, expert, mask=begins)
        tl.store(tile + 1, rank, mask=begins)
        tl.store(tile + 2, tl.minimum(same - earlier, BLOCK_M), mask=begins)


@jit(do_not_specialize=["m", "tiles_per_program", "share"])
def decode_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    semaphore_ptr,
    routes_ptr,
    m,
    n,
    padded_n,
    tiles,
    tiles_per_program,
    share,
    stride_xm,
    stride_om,
    stride_on,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS16: tl.constexpr,
    GROUPS: tl.constexpr,
    SLICES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DEPTH: tl.constexpr,
    ONE_ROUND: tl.constexpr,
    EVEN: tl.constexpr,
    X_WIDE: tl.constexpr,
    KWIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    LOP3: tl.constexpr,
    EXPERTS: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One [16 · ROWS16, BLOCK_M] tile of yᵀ, or its share of the tiles along K.

    x: [m, tiles · 128], rows stride_xm apart, zero past in_features.  words: FragmentLayout, BITS its field.
    scale, zero: [groups, padded_n].  bias: [n].  out: [m, n].
    partial: fp32 [SPLIT_K, m, n] and semaphore: zeroed int32, one a tile; both unused when SPLIT_K is 1.
    CENTRE: zero-point of a symmetric weight.  GROUP_SIZE: 0 if rows are groups.  GROUPS: that a tile spans.
    DEPTH: steps of SLICES tiles whose weights are on their way while the one before is multiplied: a round.
    A program has tiles_per_program tiles, whole rounds.  ONE_ROUND: just one.  EVEN: none goes past the end.
    DEPENDENT: launched while the kernel before still runs; only the weight is read before that has ended.
    EXPERTS: weights are [experts, ...], a tile's tokens are what route_kernel's table in routes says, and
    token i has row i // share of x; BLOCK_M is the fewest tokens that a product may have.
    GATED: rows are those of reference.gated, and out is [m, n / 2]; K is not split.
    """
    BLOCK_N: tl.constexpr = ROWS16 * 16
    block = tl.program_id(0)
    split = tl.program_id(1)
    block_m = tl.program_id(2)
    tokens = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if EXPERTS:
        if DEPENDENT:
            _wait_for_previous()
            _let_next_start()
        expert = tl.load(routes_ptr + block_m * 4).to(tl.int64)
        count = tl.load(routes_ptr + block_m * 4 + 2)
        if count == 0:
            return
        order = routes_ptr + tl.num_programs(2) * 4 + tl.load(routes_ptr + block_m * 4 + 1)
        inside = tl.arange(0, BLOCK_M) < count
        # tokens past the end are not written
        tokens = tl.where(inside, tl.load(order + tl.arange(0, BLOCK_M), mask=inside, other=0), m)
        words_ptr += expert * (padded_n // 16) * tiles * (64 * BITS)
        groups = padded_n * (1 if GROUP_SIZE == 0 else tiles * 128 // GROUP_SIZE)
        scale_ptr += expert * groups
        zero_ptr += expert * groups
    first = split * tiles_per_program
    last = tl.minimum(first + tiles_per_program, tiles)

    # words of a lane for one tile: WIDE neighbours in each of CHUNKS chunks
    WIDE: tl.constexpr = 4
    CHUNKS: tl.constexpr = BITS // 2
    e = tl.arange(0, CHUNKS * ROWS16 * SLICES)
    word_rows = (block * ROWS16 + e // SLICES % ROWS16).to(tl.int64) * tiles * (64 * BITS)
    words = words_ptr + (word_rows + e // (SLICES * ROWS16) * 128)[:, None] + tl.arange(0, 128)[None, :]

    # X_WIDE: 16 bytes a lane, full sectors of every row; lanes then exchange what the operand wants.
    # Otherwise two inputs a lane, which is what the operand wants: nothing moves between lanes.
    RUN: tl.constexpr = 32 if X_WIDE else 8
    VECTOR: tl.constexpr = 8 if X_WIDE else 2
    e = tl.arange(0, BLOCK_M * 16 // RUN * SLICES)
    lane = tl.arange(0, 8 * RUN)
    if EXPERTS:
        mine = lane // RUN < count
        token = tl.load(order + lane // RUN, mask=mine, other=0)[None, :] // share
        x_mask = mine[None, :]
    else:
        token = block_m * BLOCK_M + (e // (SLICES * 128 // RUN) * 8)[:, None] + (lane // RUN)[None, :]
        x_mask = token < m
    column = (e // SLICES % (128 // RUN) * RUN)[:, None] + (lane % RUN)[None, :]
    x_offset = token.to(tl.int64) * stride_xm + column
    x = x_ptr + tl.max_contiguous(tl.multiple_of(x_offset, (VECTOR, VECTOR)), (1, VECTOR))

    batch: tl.constexpr = GROUPS * SLICES
    e = tl.arange(0, ROWS16 * 2 * batch * 32)
    row = block * BLOCK_N + e // (32 * batch) * 8 + e % 32 // 4
    scale = scale_ptr + row
    zero = zero_ptr + row

    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # matrix loads from shared memory deliver pairs in another order
    ORDER: tl.constexpr = 2 if PAIRS else 5 if X_WIDE and KWIDTH == 4 else KWIDTH
    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_M), dtype=tl.float32)
    pending = ()
    for step in tl.static_range(DEPTH):
        loaded = _load_tile(
            words,
            scale,
            zero,
            first + step * SLICES,
            tiles,
            padded_n,
            SLICES,
            ROWS16,
            CHUNKS,
            BITS,
            GROUPS,
            GROUP_SIZE,
            HAS_ZERO,
            EVEN,
        )
        pending += (loaded,)  # type: ignore[assignment]
    if DEPENDENT and not EXPERTS:
        _wait_for_previous()
        # not before: kernels that only wait would hold registers, and their loads compete with this one's
        _let_next_start()
    elif DEPTH > 0 and LOP3:
        _issue()
    # the last round has nothing left to load
    final = first + tiles_per_program - DEPTH * SLICES
    ROUND: tl.constexpr = DEPTH if DEPTH > 0 else 1
    for start in tl.range(first, first if ONE_ROUND else final, ROUND * SLICES, num_stages=1):
        for step in tl.static_range(ROUND):
            loaded = _load_tile(
                words,
                scale,
                zero,
                start + (DEPTH + step) * SLICES,
                tiles,
                padded_n,
                SLICES,
                ROWS16,
                CHUNKS,
                BITS,
                GROUPS,
                GROUP_SIZE,
                HAS_ZERO,
                EVEN,
            )
            pending += (loaded,)  # type: ignore[assignment]
            if DEPTH > 0 and LOP3:
                _issue()
            acc = _add_tile(
                acc,
                pending[0],  # type: ignore[misc]
                _load_x(x, x_mask, start + step * SLICES, last, SLICES, EVEN),
                dtype,
                SLICES,
                ROWS16,
                CHUNKS,
                WIDE,
                BITS,
                CENTRE,
                GROUPS,
                HAS_ZERO,
                BLOCK_M,
                X_WIDE,
                ORDER,
                PAIRS,
                LOP3,
            )
            pending = pending[1:]
    for step in tl.static_range(DEPTH):
        acc = _add_tile(
            acc,
            pending[step],
            _load_x(x, x_mask, final + step * SLICES, last, SLICES, EVEN),
            dtype,
            SLICES,
            ROWS16,
            CHUNKS,
            WIDE,
            BITS,
            CENTRE,
            GROUPS,
            HAS_ZERO,
            BLOCK_M,
            X_WIDE,
            ORDER,
            PAIRS,
            LOP3,
        )

    total = tl.reshape(acc, (BLOCK_N, BLOCK_M)) if SLICES == 1 else tl.sum(acc, axis=0)
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        if HAS_BIAS:
            total += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
        # a lane has rows r and r + 8
        halves = tl.permute(tl.reshape(total, (ROWS16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
        gate, up = tl.split(halves)
        total = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, (BLOCK_N // 2, BLOCK_M))
        rows = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        n //= 2
    _finish(
        total,
        rows,
        tokens,
        bias_ptr,
        out_ptr,
        partial_ptr,
        semaphore_ptr,
        block_m * tl.num_programs(0) + block,
        split,
        m,
        n,
        stride_om,
        stride_on,
        HAS_BIAS and not GATED,
        SPLIT_K,
    )


@jit()
def _load_rows(cells, BARE: tl.constexpr):
    """Scales or zero-points; with BARE those of 8 and 16 bits alone in an int32 each.

    A byte that a loop carries has to be cut out of its register again, and a half may share one with a
    constant, which then is not there before memory has answered.
    """
    if BARE and cells.dtype.element_ty.primitive_bitwidth == 8:
        return tl.inline_asm_elementwise(
            "ld.global.u8 $0, [$1];", "=r,l", [cells.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    elif BARE and cells.dtype.element_ty.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            "ld.global.u16 $0, [$1];", "=r,l", [cells.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return tl.load(cells)


@jit()
def _parts(value, PARTS: tl.constexpr):
    """[ROWS16, 2, 8, GROUPS, 4] of _on_rows for each part of a block's groups: one or two, a tuple."""
    if PARTS == 1:
        return (value,)
    else:
        v = tl.reshape(value, (value.shape[0], 2, 8, 2, value.shape[3] // 2, 4))
        return tl.split(tl.permute(v, (0, 1, 2, 4, 5, 3)))


@jit()
def _floats(loaded, dtype: tl.constexpr):
    """Numbers of dtype as _load_rows has them, to fp32."""
    if loaded.dtype != tl.int32 or dtype == tl.uint8:
        return loaded.to(tl.float32)
    elif dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }",
            "=f,r",
            [loaded],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return (loaded << 16).to(tl.float32, bitcast=True)


@jit()
def _halves_of(loaded, dtype: tl.constexpr):
    """Numbers of dtype as _load_rows and _on_rows have them, in dtype: those of two rows in one register."""
    if loaded.dtype == tl.int32:
        low, high = tl.split(tl.permute(loaded, (0, 2, 3, 4, 1)))
        both = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
        return tl.permute(_halves(both, dtype), (0, 4, 1, 2, 3))
    else:
        return loaded


@jit()
def _points(
    loaded,
    stored: tl.constexpr,
    WHOLE: tl.constexpr,
    FINE: tl.constexpr,
    BITS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Zero-points of type stored, as _load_rows and _on_rows have them: what _field takes, or fp32."""
    half = tl.reshape(tl.arange(0, 2), (1, 2, 1, 1, 1))
    if WHOLE:
        return _whole_point(loaded, half, BITS, dtype)
    elif FINE:
        if loaded.dtype == tl.int32:
            loaded = loaded.to(tl.int16).to(dtype, bitcast=True)
        return loaded * -_fine_unit(half, BITS, dtype).to(dtype)
    else:
        return _floats(loaded, stored)


@jit()
def _word_parts(words, PARTS: tl.constexpr):
    """Words of a block, chunk after chunk, for each part of its inputs: one or two, a tuple."""
    if PARTS == 1:
        return (words,)
    else:
        v = tl.reshape(words, (2, words.shape[0] // 2, words.shape[1]))
        return tl.split(tl.permute(v, (1, 2, 0)))


@jit()
def _ask_for(cells, stride, count, WIDTH: tl.constexpr, THREADS: tl.constexpr):
    """Ask for `count` runs of WIDTH values in L2, `stride` values apart, by so many threads.

    Memory takes longer to answer than a step of gemm_kernel, and may do so before the kernel ahead has ended.
    """
    LINE: tl.constexpr = 1024 // cells.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (WIDTH + LINE - 1) // LINE
    for start in range(0, count * LINES, THREADS):
        line = start + tl.arange(0, THREADS)
        run = line // LINES
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r",
            [
                (cells + run.to(tl.int64) * stride + line % LINES * LINE).to(tl.int64),
                (run < count).to(tl.int32),
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit(do_not_specialize=["m", "blocks_per_split"])
def gemm_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    semaphore_ptr,
    m,
    n,
    padded_n,
    blocks,
    blocks_per_split,
    stride_xm,
    stride_om,
    stride_on,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS16: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    WARP_ROWS: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    EVEN_N: tl.constexpr,
    ASK: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    KWIDTH: tl.constexpr,
    LOP3: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One [16 · ROWS16, BLOCK_M] tile of yᵀ, or of one slice of its partial sums; see decode_kernel.

    x_ptr: with DESCRIPTOR a tensor descriptor of x with block [BLOCK_M, BLOCK_K].  blocks: of BLOCK_K inputs.
    SCALE_WEIGHTS: scales act on the weights, in x's dtype; otherwise on the fp32 product of a group's part of
    a block.  GROUPS: that a block spans; without SCALE_WEIGHTS one, or two of whole chunks of words.
    EVEN_N: no tile goes past padded_n.
    ASK: for what in L2 before the kernel ahead has ended, see _asks.
    """
    BLOCK_N: tl.constexpr = ROWS16 * 16
    # as in layout.py
    ROW_BLOCK: tl.constexpr = 128
    GROUP_M: tl.constexpr = 8
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    stored_s: tl.constexpr = scale_ptr.dtype.element_ty
    stored_z: tl.constexpr = zero_ptr.dtype.element_ty
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    # GROUP_M rows of tiles at a time, so that programs that run together share weights and x in L2
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    block_m = first_m + tile % (GROUP_M * tiles_n) % height
    block_n = tile % (GROUP_M * tiles_n) // height
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, blocks)
    rows = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = block_m * BLOCK_M + tl.arange(0, BLOCK_M)

    # whole zero-points are subtracted from the codes instead of CENTRE
    WHOLE: tl.constexpr = HAS_ZERO and not stored_z.is_floating()
    # parts of a block with products of their own
    PARTS: tl.constexpr = 1 if SCALE_WEIGHTS else GROUPS
    # Scales that only act on a block's product are loaded after it, which was faster; with zero-points not,
    # as the wait for those would then be one for these.
    LATE: tl.constexpr = not HAS_ZERO and not SCALE_WEIGHTS and GROUPS == 1
    # with other bits compilers then move words through shared memory
    BARE: tl.constexpr = LOP3 and BITS == 4
    # those of x's own type are a part of what makes codes floats, where that is one instruction
    FINE: tl.constexpr = (
        HAS_ZERO and stored_z == dtype and not SCALE_WEIGHTS and LOP3 and (BITS < 8 or dtype == tl.float16)
    )
    lane_words: tl.constexpr = BLOCK_K * BITS // 64
    WIDE: tl.constexpr = 4 if lane_words >= 4 else lane_words
    CHUNKS: tl.constexpr = lane_words // WIDE
    e = tl.arange(0, CHUNKS * ROWS16)
    columns = tl.arange(0, 32 * WIDE)
    if WIDE < 4:
        columns = columns // WIDE * 4 + columns % WIDE
    word_rows = block_n * ROWS16 + e % ROWS16
    if BLOCK_N > ROW_BLOCK:
        # rows past padded_n repeat the last ones; they are never stored
        word_rows = tl.minimum(word_rows, padded_n // 16 - 1)
    word_rows = word_rows.to(tl.int64) * blocks * (BLOCK_K * BITS // 2) + e // ROWS16 * 128
    words = words_ptr + word_rows[:, None] + columns[None, :]
    if not DESCRIPTOR:
        # rows past m repeat row 0; they are never stored
        source = tl.where(tokens < m, tokens, 0).to(tl.int64)
        x_rows = x_ptr + source[:, None] * stride_xm + tl.arange(0, BLOCK_K // PARTS)[None, :]

    first_group = _first_group(tl.minimum(first, blocks - 1), BLOCK_K, GROUP_SIZE)
    if ASK > 0:
        # of rows that are there for sure
        SURE: tl.constexpr = BLOCK_N if EVEN_N else ROW_BLOCK
        THREADS: tl.constexpr = WARP_ROWS * 32
        groups = _first_group(last - 1, BLOCK_K, GROUP_SIZE) + GROUPS - first_group
        begin = first_group * padded_n + block_n * BLOCK_N
        _ask_for(scale_ptr + begin, padded_n, groups, SURE, THREADS)
        if HAS_ZERO:
            _ask_for(zero_ptr + begin, padded_n, groups, SURE, THREADS)
        if ASK > 1:
            FIRST: tl.constexpr = (STAGES - 1) * (BLOCK_K * BITS // 2)
            begin = ((block_n * ROWS16).to(tl.int64) * blocks + first) * (BLOCK_K * BITS // 2)
            runs = tl.where(last - first >= STAGES - 1, SURE // 16, 0)
            _ask_for(words_ptr + begin, blocks * (BLOCK_K * BITS // 2), runs, FIRST, THREADS)
    if DEPENDENT:
        _wait_for_previous()

    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    # One value for every lane that holds a row: lanes, then warps, then registers, then groups. What the
    # registers of a lane differ by is added last: a constant, which costs the loop nothing.
    e = tl.arange(0, GROUPS * ROWS16 * 64)
    run = e // (64 * WARP_ROWS) % (ROWS16 // WARP_ROWS) * (16 * WARP_ROWS)
    if BLOCK_N > ROW_BLOCK and not EVEN_N:
        run = tl.where(block_n * BLOCK_N + run < padded_n, run, run % ROW_BLOCK)
    run += e // (32 * WARP_ROWS) % 2 * 8
    row = block_n * BLOCK_N + e // 32 % WARP_ROWS * 16 + e % 32 // 4
    groups = e // (ROWS16 * 64) * padded_n if GROUPS > 1 else 0
    scales = scale_ptr + row + run
    zeros = zero_ptr + row + run
    cell = first_group * padded_n
    s = _load_rows(scales + (cell + groups), BARE)
    if HAS_ZERO:
        z = _load_rows(zeros + (cell + groups), BARE)
    # one sum for a lane that reads one row of words, but several for one that reads more
    w_at = (first.to(tl.int64) if ROWS16 == WARP_ROWS else first) * (CHUNKS * 128)
    x_at = first * BLOCK_K
    for block in tl.range(first, last, num_stages=STAGES):
        # Loads this small are not pipelined. What the block before loaded is put to use first, and then what
        # the next needs is loaded into the same registers: a copy would wait for it, and delay the words.
        s_parts = _parts(_on_rows(s, GROUPS, ROWS16, WARP_ROWS), PARTS)
        steps = ()
        for part in tl.static_range(PARTS):
            if SCALE_WEIGHTS:
                steps += (_halves_of(s_parts[part], stored_s),)  # type: ignore[assignment]
            else:
                steps += (_floats(s_parts[part], stored_s),)  # type: ignore[assignment]
        if HAS_ZERO:
            z_parts = _parts(_on_rows(z, GROUPS, ROWS16, WARP_ROWS), PARTS)
            points = ()
            for part in tl.static_range(PARTS):
                point = _points(z_parts[part], stored_z, WHOLE, FINE, BITS, dtype)
                if WHOLE and ROWS16 == WARP_ROWS:
                    # narrow numbers are made at once, which two rows of words a warp have no registers for
                    point = point.to(tl.int16)
                points += (point,)  # type: ignore[assignment]
        cell = _next_cell(cell, block, blocks, padded_n, BLOCK_K, GROUP_SIZE)
        if not LATE:
            s = _load_rows(scales + (cell + groups), BARE)
        if HAS_ZERO:
            z = _load_rows(zeros + (cell + groups), BARE)
        if WIDE < 4:
            # blocks smaller than a chunk start within it
            within = block * lane_words
            w = tl.load(words + (within // 4 * 128 + within % 4))
        else:
            w = tl.load(words + w_at)
        w_parts = _word_parts(w, PARTS)
        for part in tl.static_range(PARTS):
            if DESCRIPTOR:
                x = x_ptr.load([block_m * BLOCK_M, x_at + part * (BLOCK_K // PARTS)])
            else:
                x = tl.load(x_rows + x_at + part * (BLOCK_K // PARTS))
            zero0, zero1 = None, None
            if WHOLE or FINE:
                zero0, zero1 = _on_words(points[part], CHUNKS // PARTS, WIDE)
            a = _weights(
                w_parts[part], zero0, zero1, ROWS16, CHUNKS // PARTS, WIDE, BITS, CENTRE, KWIDTH, dtype, LOP3
            )
            step = steps[part]  # type: ignore[var-annotated]
            if SCALE_WEIGHTS:
                a = a * _on_weights(step.to(dtype), BLOCK_K)
                if HAS_ZERO and not WHOLE:
                    # one fma with the product
                    shift = ((CENTRE - points[part]) * step.to(tl.float32)).to(dtype)
                    a = a + _on_weights(shift, BLOCK_K)
                acc = tl.dot(a, tl.trans(x), acc)
                if LOP3:
                    # Triton 3.6 reuses the registers of operands that wgmma with a carried accumulator still
                    # reads; using the accumulator makes it wait
                    acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
            else:
                if HAS_ZERO and not WHOLE and not FINE:
                    a = a - _on_weights((points[part] - CENTRE).to(dtype), BLOCK_K // PARTS)
                step = tl.reshape(step, (ROWS16, 2, 8, 1, 4, 1))
                step = tl.broadcast_to(step, (ROWS16, 2, 8, BLOCK_M // 8, 4, 2))
                acc += tl.dot(a, tl.trans(x)) * tl.reshape(step, (BLOCK_N, BLOCK_M))
        if LATE:
            s = _load_rows(scales + (cell + groups), BARE)
        w_at += CHUNKS * 128
        x_at += BLOCK_K
    if FINE:
        acc = acc * (1.0 / _fine_unit(tl.arange(0, BLOCK_N) // 8 % 2, BITS, dtype))[:, None]
    if DEPENDENT:
        # Not before: where this kernel leaves places free, programs of the next would take them early, and
        # later some multiprocessors would have more of them than others.
        _let_next_start()
    _finish(
        acc,
        rows,
        tokens,
        bias_ptr,
        out_ptr,
        partial_ptr,
        semaphore_ptr,
        tile,
        split,
        m,
        n,
        stride_om,
        stride_on,
        HAS_BIAS,
        SPLIT_K,
    )


@jit()
def dequantize_kernel(
    words_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    n,
    k,
    padded_n,
    tiles,
    BITS: tl.constexpr,
    CENTRE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    ROWS16: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOP3: tl.constexpr,
):
    """(q - z) · s of one [16 · ROWS16, BLOCK_K] tile: out [n, k], contiguous, fp16, bf16 or fp32."""
    BLOCK_N: tl.constexpr = ROWS16 * 16
    block_n = tl.program_id(0)
    block = tl.program_id(1)
    rows = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    lane_words: tl.constexpr = BLOCK_K * BITS // 64
    WIDE: tl.constexpr = 4 if lane_words >= 4 else lane_words
    CHUNKS: tl.constexpr = lane_words // WIDE
    e = tl.arange(0, CHUNKS * ROWS16)
    columns = tl.arange(0, 32 * WIDE)
    if WIDE < 4:
        columns = columns // WIDE * 4 + columns % WIDE
    word_rows = (block_n * ROWS16 + e % ROWS16).to(tl.int64) * tiles * (64 * BITS) + e // ROWS16 * 128
    within = block * lane_words
    w = tl.load(
        words_ptr + (word_rows + within // 4 * 128 + within % 4)[:, None] + columns[None, :],
        eviction_policy="evict_first",
    )
    group = 0 if GROUP_SIZE == 0 else block * BLOCK_K // GROUP_SIZE
    e = tl.arange(0, ROWS16 * 64)
    half = e // (32 * ROWS16) % 2
    row = block_n * BLOCK_N + e // 32 % ROWS16 * 16 + half * 8 + e % 32 // 4
    s = _on_rows(tl.load(scale_ptr + group * padded_n + row).to(tl.float32), 1, ROWS16, ROWS16)
    # whole numbers up to 255 are exact in fp16
    a = _weights(w, None, None, ROWS16, CHUNKS, WIDE, BITS, CENTRE, 2, tl.float16, LOP3).to(tl.float32)
    if HAS_ZERO:
        z = tl.load(zero_ptr + group * padded_n + row).to(tl.float32) - CENTRE
        a = a - _on_weights(_on_rows(z, 1, ROWS16, ROWS16), BLOCK_K)
    a = a * _on_weights(s, BLOCK_K)
    ks = block * BLOCK_K + tl.arange(0, BLOCK_K)
    cells = out_ptr + rows.to(tl.int64)[:, None] * k + ks[None, :]
    tl.store(cells, a.to(out_ptr.dtype.element_ty), mask=(rows < n)[:, None] & (ks < k)[None, :])


@jit()
def repack_kernel(
    stored_ptr,
    words_ptr,
    n,
    k,
    width,
    chunks,
    BITS: tl.constexpr,
    FIELD: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """CHUNKS chunks of 16 rows: stored words [n, width] to words of FragmentLayout."""
    r = tl.program_id(0)
    e = tl.arange(0, CHUNKS * 128)
    c = tl.program_id(1) * CHUNKS + e // 128
    lane = e // 4 % 32
    word = tl.zeros((CHUNKS * 128,), dtype=tl.int32)
    for half in tl.static_range(2):
        row = r * 16 + half * 8 + lane // 4
        for run in tl.static_range(8 // FIELD):
            for odd in tl.static_range(2):
                column = ((c * 4 + e % 4) * (8 // FIELD) + run) * 8 + lane % 4 * 2 + odd
                inside = (row < n) & (column < k) & (c < chunks)
                bit = column * BITS
                source = stored_ptr + row.to(tl.int64) * width + bit // 32
                code = tl.load(source, mask=inside, other=0).to(tl.uint32, bitcast=True) >> (bit % 32).to(
                    tl.uint32
                )
                if BITS == 3:
                    spills = inside & (bit % 32 > 29)
                    above = tl.load(source + 1, mask=spills, other=0).to(tl.uint32, bitcast=True)
                    code = code | (above << ((32 - bit % 32) % 32).to(tl.uint32))
                code = code & ((1 << BITS) - 1)
                # the one field that the final rotation cuts wraps around
                word = word | _rotate_right(
                    code.to(tl.int32, bitcast=True), (62 - FIELD * (half + 2 * run) - 16 * odd) % 32
                )
    offset = (r.to(tl.int64) * chunks + c) * 128 + e % 128
    tl.store(words_ptr + offset, word, mask=c < chunks)


@dataclass(frozen=True)
class FragmentWeight:
    """A weight in fragment order, as this family takes it; made from the stored words by repack().

    words: int32 of layout.shape.  scale: [groups, layout.padded_n] float, groups filled up to whole tiles.
    zero_point: like scale, uint8 or float; None for the symmetric grid.  group_size: K for one group a row.
    """

    layout: FragmentLayout
    words: Tensor
    scale: Tensor
    zero_point: Tensor | None
    group_size: int

    @property
    def bits(self) -> int:
        return self.layout.bits

    @property
    def in_features(self) -> int:
        return self.layout.in_features

    @property
    def out_features(self) -> int:
        return self.layout.out_features

    @property
    def nbytes(self) -> int:
        """Bytes a product has to read: words, scales and zero-points."""
        return sum(t.nbytes for t in (self.words, self.scale, self.zero_point) if t is not None)


def refuses(group_size: int, in_features: int) -> str | None:
    """Why a weight cannot be put in fragment order; None if it can."""
    if group_size not in (32, 64, in_features) and group_size % TILE_K:
        return f"group size {group_size} is not 32, 64, a multiple of {TILE_K} or the whole row"
    return None


def repack(
    words: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int, group_size: int, in_features: int
) -> FragmentWeight:
    """Stored words [N, W], scale and zero_point [N, G] to fragment order, on the same device.

    Waits for the result: later launches may read the weight before the kernels ahead of them have ended.
    Raises ValueError where refuses() has a reason.
    """
    if (reason := refuses(group_size, in_features)) is not None:
        raise ValueError(reason)
    n, groups = scale.shape
    layout = FragmentLayout(bits, n, in_features)
    rows, chunks = layout.shape[:2]
    target = torch.empty(layout.shape, dtype=torch.int32, device=words.device)
    per_program = 4
    launch(
        repack_kernel,
        (rows, -(-chunks // per_program)),
        words,
        target,
        n,
        in_features,
        words.shape[1],
        chunks,
        BITS=bits,
        FIELD=layout.field,
        CHUNKS=per_program,
        num_warps=4,
    )
    filled = 1 if groups == 1 else max(groups, layout.padded_k // group_size)

    def by_group(t: Tensor) -> Tensor:
        # filling rows and groups hold scale 0 and code 0
        return torch.nn.functional.pad(t.t(), (0, layout.padded_n - n, 0, filled - groups)).contiguous()

    if words.is_cuda:
        _reserve_counters(words.device)
        torch.cuda.current_stream(words.device).synchronize()
    return FragmentWeight(
        layout, target, by_group(scale), None if zero_point is None else by_group(zero_point), group_size
    )


def concatenate(weights: Sequence[FragmentWeight]) -> FragmentWeight:
    """The rows of all weights below each other; all of one kind. Waits for the device, as repack() does.

    Rows are taken in blocks of TILE_N, so every weight but the last has to fill its last block.
    """
    first = weights[0]
    blocks = [-(-w.out_features // TILE_N) for w in weights]
    if any(w.out_features % TILE_N for w in weights[:-1]):
        raise ValueError(f"out_features {[w.out_features for w in weights]} are not multiples of {TILE_N}")
    layout = FragmentLayout(first.bits, sum(w.out_features for w in weights), first.in_features)

    def by_group(parts: list[Tensor]) -> Tensor:
        rows = torch.cat([t[:, : w.out_features] for t, w in zip(parts, weights, strict=True)], dim=1)
        return torch.nn.functional.pad(rows, (0, layout.padded_n - layout.out_features)).contiguous()

    words = first.words.new_zeros(layout.shape)
    torch.cat([w.words[:b] for w, b in zip(weights, blocks, strict=True)], out=words[: sum(blocks)])
    zeros = [w.zero_point for w in weights if w.zero_point is not None]
    scale, zero_point = by_group([w.scale for w in weights]), by_group(zeros) if zeros else None
    if words.is_cuda:
        torch.cuda.current_stream(words.device).synchronize()
    return FragmentWeight(layout, words, scale, zero_point, first.group_size)


def decode(
    x: Tensor,
    weight: FragmentWeight,
    bias: Tensor | None,
    out: Tensor,
    *,
    block_m: int,
    block_n: int,
    split_k: int,
    slices: int,
    num_warps: int,
    depth: int,
    x_wide: bool,
    dependent: bool,
    routes: Tensor | None = None,
    gated: bool = False,
) -> None:
    """Fill out [M, N] with x [M, K] @ Wᵀ + bias by decode_kernel; any M, meant for M <= 32.

    block_m: a power of two, at least 8.  block_n: rows a program owns, 16 to ROW_BLOCK, a power of two.
    slices: powers of two, at least num_warps; tiles along K that a program takes at once, in a step.
    depth: steps that weights are loaded ahead.
    routes: of route(), for the weights of all experts stacked, and x [M or M / experts per token, K].
    gated: the weight's rows are those of reference.gated, out is [M, N / 2] and split_k 1.
    dependent: programmatic dependent launch, CUDA from sm_90 on.
    """
    layout = weight.layout
    target = _target(x.device)
    width = operand_width(target)
    block_m = max(block_m, least_tokens(target))
    x = padded_x(x, layout.padded_k)
    m = out.shape[0]
    slices = min(slices, _power_of_two(layout.tiles))
    steps = -(-layout.tiles // (slices * split_k))
    depth = min(depth, steps)
    if depth:
        steps = -(-steps // depth) * depth
    split_k = -(-layout.tiles // (slices * steps))
    blocks_n = -(-layout.out_features // block_n)
    groups = 1 if weight.scale.shape[-2] == 1 else max(1, TILE_K // weight.group_size)
    blocks_m = -(-m // block_m) if routes is None else (routes.numel() - m) // 4
    partial, semaphore = workspace(out, split_k, blocks_n * blocks_m, split_k * out.numel())
    # several groups a tile take more registers than the rule counts on, and programs a second round
    crowded = target[0] == "cuda" and groups > 1 and block_n > TILE_N and (block_n == 64 or depth > 0)
    limit = {"maxnreg": 128} if crowded else {}
    launch(
        decode_kernel,
        (blocks_n, split_k, blocks_m),
        x,
        weight.words,
        weight.scale,
        weight.scale if weight.zero_point is None else weight.zero_point,
        out if bias is None else bias,
        out,
        partial,
        semaphore,
        out if routes is None else routes,
        m,
        layout.out_features,
        layout.padded_n,
        layout.tiles,
        steps * slices,
        m // x.shape[0],
        x.stride(0),
        *out.stride(),
        **_grid_constants(weight),
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        ROWS16=block_n // TILE_N,
        GROUPS=groups,
        SLICES=slices,
        SPLIT_K=split_k,
        DEPTH=depth,
        ONE_ROUND=steps == depth,
        EVEN=layout.tiles == steps * slices * split_k,
        X_WIDE=x_wide,
        KWIDTH=width,
        PAIRS=x_wide and width == 4 and _HAS_MAP,
        LOP3=target[0] == "cuda",
        EXPERTS=routes is not None,
        GATED=gated,
        DEPENDENT=dependent,
        num_warps=min(num_warps, slices),
        **limit,
        **({"launch_pdl": True} if dependent else {}),
    )


def route(index: Tensor, experts: int) -> Tensor:
    """Which tiles of tokens a product with stacked experts has, for decode; nothing waits for a device.

    index: [tokens, experts per token] integer, each below `experts`.
    Returns int32 [4 · slots + pairs], see route_kernel.
    """
    pairs = index.numel()
    slots = expert_slots(pairs, experts)
    routes = torch.empty(4 * slots + pairs, dtype=torch.int32, device=index.device)
    launch(
        route_kernel,
        (1,),
        index.contiguous(),
        routes,
        pairs,
        slots,
        BY_RANK=slots == pairs,
        BLOCK_M=EXPERT_TOKENS,
        BLOCK=min(128, max(16, _power_of_two(pairs))),
        DEPENDENT=False,
        num_warps=4,
    )
    return routes


def gemm(
    x: Tensor,
    weight: FragmentWeight,
    bias: Tensor | None,
    out: Tensor,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    split_k: int,
    scale_weights: bool,
    descriptor: bool,
    dependent: bool,
    num_warps: int,
    num_stages: int,
) -> None:
    """Fill out [M, N] with x [M, K] @ Wᵀ + bias by gemm_kernel.

    block_m, block_n, block_k: powers of two; block_n a multiple of 16; block_k 32 to TILE_K, and a divisor of
    the group size, with scale_weights also a multiple, otherwise (not with 2 bits) also twice the size 64.
    """
    layout = weight.layout
    x = padded_x(x, layout.padded_k)
    m = x.shape[0]
    groups = 1 if weight.scale.shape[0] == 1 else max(1, block_k // weight.group_size)
    parts = 1 if scale_weights else groups
    blocks = layout.padded_k // block_k
    split_k = min(split_k, blocks)
    steps = -(-blocks // split_k)
    programs = -(-layout.out_features // block_n) * -(-m // block_m)
    partial, semaphore = workspace(out, split_k, programs, split_k * out.numel())
    target = _target(x.device)
    launch(
        gemm_kernel,
        (programs, split_k),
        triton.tools.tensor_descriptor.TensorDescriptor.from_tensor(x, [block_m, block_k // parts])
        if descriptor
        else x,
        weight.words,
        weight.scale,
        weight.scale if weight.zero_point is None else weight.zero_point,
        out if bias is None else bias,
        out,
        partial,
        semaphore,
        m,
        layout.out_features,
        layout.padded_n,
        blocks,
        steps,
        x.stride(0),
        *out.stride(),
        **_grid_constants(weight),
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        ROWS16=block_n // TILE_N,
        BLOCK_K=block_k,
        GROUPS=groups,
        SPLIT_K=split_k,
        WARP_ROWS=min(num_warps, block_n // TILE_N),
        SCALE_WEIGHTS=scale_weights,
        EVEN_N=layout.padded_n % block_n == 0,
        ASK=_asks(block_m, num_warps, steps) if dependent else 0,
        DESCRIPTOR=descriptor,
        # wgmma takes pairs, whatever the older instruction is given
        KWIDTH=2 if target[0] == "cuda" and str(target[1]) == "90" else operand_width(target),
        LOP3=target[0] == "cuda",
        STAGES=num_stages,
        DEPENDENT=dependent,
        num_warps=num_warps,
        num_stages=num_stages,
        **_register_limit(target, block_m, num_warps, programs * split_k, x.device),
        **({"launch_pdl": True} if dependent else {}),
    )


def _asks(block_m: int, num_warps: int, steps: int) -> int:
    """What gemm_kernel asks for ahead, from measurements: 1 scales and zero-points, 2 its first words too."""
    if block_m > 32 or (block_m == 32 and num_warps == 8):
        return 0
    return 2 if block_m == 32 or steps <= 4 else 1


def _register_limit(
    target: tuple[str, int | str, int], block_m: int, num_warps: int, programs: int, device: torch.device
) -> dict[str, int]:
    """The option that lets programs of few tokens run all at once, where the rule counts on that."""
    if target[0] != "cuda" or block_m > 32:
        return {}
    if num_warps == 8:
        # two of them a multiprocessor
        return {"maxnreg": 128}
    if num_warps != 4 or str(target[1]) != "90":
        return {}
    # four would fit anyway, but with as many registers the last program of a tile has more slices under way
    limits = {6: {"maxnreg": 80}, 7: {"maxnreg": 72}} if block_m <= 16 else {4: {"maxnreg": 128}}
    return limits.get(-(-programs // _multiprocessors(device)), {})


def dequantize(weight: FragmentWeight, dtype: torch.dtype) -> Tensor:
    """(q - z) · s as [N, K] in dtype, rounded once."""
    layout = weight.layout
    n, k = layout.out_features, layout.in_features
    out = torch.empty((n, k), dtype=dtype, device=weight.words.device)
    block_k = min(TILE_K, weight.group_size) if weight.group_size != k else TILE_K
    rows16 = 4
    target = _target(out.device)
    launch(
        dequantize_kernel,
        (-(-n // (TILE_N * rows16)), -(-k // block_k)),
        weight.words,
        weight.scale,
        weight.scale if weight.zero_point is None else weight.zero_point,
        out,
        n,
        k,
        layout.padded_n,
        layout.tiles,
        **_grid_constants(weight),
        ROWS16=rows16,
        BLOCK_K=block_k,
        LOP3=target[0] == "cuda",
        num_warps=4,
    )
    return out


def _grid_constants(weight: FragmentWeight) -> dict[str, object]:
    return {
        "BITS": weight.layout.field,
        "CENTRE": 1 << (weight.bits - 1),
        "GROUP_SIZE": 0 if weight.scale.shape[-2] == 1 else weight.group_size,
        "HAS_ZERO": weight.zero_point is not None,
    }


def padded_x(x: Tensor, padded_k: int) -> Tensor:
    """x [M, K] as the kernels read it: rows of padded_k inputs that start at multiples of 16 bytes.

    Copies only when that does not hold already, or rows overlap, which TMA need not take.
    """
    m, k = x.shape
    unit = 16 // x.element_size()
    apart = m == 1 or (x.stride(0) >= k and x.stride(0) % unit == 0)
    if k == padded_k and x.stride(1) == 1 and apart and x.data_ptr() % 16 == 0:
        return x if m > 1 else x.as_strided((1, k), (k, 1))
    rows = x.new_zeros((m, padded_k))
    rows[:, :k] = x
    return rows


# Counters of running split-K kernels, all 0 between launches. A device has one block of them, zeroed when its
# first weight is repacked: memory taken later may belong to the pool of a graph. A stream has a region of it,
# which its launches use one after the other, and so has every stream of a capture, since graphs may replay
# side by side.
_COUNTERS, _REGION = 1 << 20, 1 << 12
_unused_counters: dict[int, Tensor] = {}
_regions: dict[tuple[int, int, int], Tensor] = {}
_counters_lock = threading.Lock()
_lent: ContextVar[Tensor | None] = ContextVar("counters lent to this thread", default=None)


def _reserve_counters(device: torch.device) -> None:
    with _counters_lock:
        if device.index not in _unused_counters:
            _unused_counters[device.index] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()


@contextmanager
def lent_counters() -> Iterator[None]:
    """Launches of this thread inside share counters of their own.

    Graphs that are captured inside replay one at a time and must not outlive it.
    """
    token = _lent.set(torch.zeros(1 << 16, dtype=torch.int32, device="cuda"))
    torch.cuda.current_stream().synchronize()
    try:
        yield
    finally:
        _lent.reset(token)


def _counters(device: torch.device, count: int) -> Tensor:
    """`count` zeros for a launch in the current stream, which leaves them so.

    A capture gets zeros of its own for each launch, which its graph clears at each replay, where the block is
    used up or was never reserved.
    """
    lent = _lent.get()
    if lent is not None and lent.device == device and lent.numel() >= count:
        return lent[:count]
    stream = torch.cuda.current_stream(device).cuda_stream
    capture = _capture_of(stream) if torch.cuda.is_current_stream_capturing() else 0
    if not capture:
        _reserve_counters(device)
    key, size = (device.index, stream, capture), max(count, _REGION)
    with _counters_lock:
        region = _regions.get(key)
        if region is None or region.numel() < count:
            unused = _unused_counters.get(device.index)
            if unused is not None and unused.numel() >= size:
                region, _unused_counters[device.index] = unused[:size], unused[size:]
            elif capture:
                return torch.zeros(count, dtype=torch.int32, device=device)
            else:
                region = torch.zeros(size, dtype=torch.int32, device=device)
            _regions[key] = region
    return region[:count]


def _capture_of(stream: int) -> int:
    """Number of the capture that a stream is part of, which no other capture of this process has."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    if _capture_info()(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None):
        raise RuntimeError("the driver does not tell which graph a stream is captured in")
    return number.value


@functools.cache
def _capture_info() -> Any:
    """The driver's function of a stream, pointers to status and number, and three that may be null."""
    if torch.version.hip:
        return ctypes.CDLL("libamdhip64.so").hipStreamGetCaptureInfo_v2
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    return ctypes.CDLL(library).cuStreamGetCaptureInfo_v2


def workspace(out: Tensor, split_k: int, tiles: int, cells: int) -> tuple[Tensor, Tensor]:
    """fp32 [cells] and `tiles` zeroed counters on out's device; stand-ins when K is not split."""
    if split_k == 1:
        return out, out
    partial = torch.empty(cells, dtype=torch.float32, device=out.device)
    if not out.is_cuda:
        return partial, torch.zeros(tiles, dtype=torch.int32, device=out.device)
    return partial, _counters(out.device, tiles)


def _power_of_two(value: int) -> int:
    """value rounded up to a power of two."""
    return 1 << (value - 1).bit_length()


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _target(device: torch.device) -> tuple[str, int | str, int]:
    """Backend, architecture and warp size that kernels compile for; ("cpu", 0, 0) where interpreted."""
    if device.type == "cpu":
        return "cpu", 0, 0
    with torch.cuda.device(device):
        target = triton.runtime.driver.active.get_current_target()
    return target.backend, target.arch, target.warp_size


def operand_width(target: tuple[str, int | str, int]) -> int:
    """Neighbouring inputs that a lane holds in the operand Triton picks for decode_kernel: 2 or 4."""
    return _probe(target)[0] if target[0] == "cuda" else 2


def least_tokens(target: tuple[str, int | str, int]) -> int:
    """The fewest tokens that a product of decode_kernel may have: 8, or 16 on AMD and before Triton 3.5."""
    return {"cpu": 8, "hip": 16}.get(target[0]) or _probe(target)[1]


@functools.cache
def _probe(target: tuple[str, int | str, int]) -> tuple[int, int]:
    """operand_width and least_tokens of a target.

    Triton's releases differ, the wrong order is right but slow, and numbers of releases are no promise: so
    the compiler itself is asked, once a process.
    """
    for tokens in (8, 16):
        try:
            compiled = _compile_probe(target, tokens)
        except triton.compiler.CompilationError:
            continue
        widths = re.findall(r"opIdx = 0, parent = #\w+, kWidth = (\d+)", compiled.asm["ttgir"])
        return max(map(int, widths), default=2), tokens
    raise RuntimeError(f"Triton {triton.__version__} does not compile the decode kernel for {target[:2]}")


def _compile_probe(target: tuple[str, int | str, int], tokens: int) -> Any:
    names = decode_kernel.arg_names
    constants = {
        "stride_on": 1,
        "BITS": 4,
        "CENTRE": 8,
        "GROUP_SIZE": 128,
        "HAS_ZERO": False,
        "HAS_BIAS": False,
        "BLOCK_M": tokens,
        "ROWS16": 1,
        "GROUPS": 1,
        "SLICES": 1,
        "SPLIT_K": 1,
        "DEPTH": 1,
        "ONE_ROUND": True,
        "EVEN": True,
        "X_WIDE": False,
        "KWIDTH": 2,
        "PAIRS": False,
        "LOP3": target[0] == "cuda",
        "EXPERTS": False,
        "GATED": False,
        "DEPENDENT": False,
    }
    pointers = {"words_ptr": "*i32", "partial_ptr": "*fp32", "semaphore_ptr": "*i32", "routes_ptr": "*i32"}
    signature = {name: pointers.get(name, "*fp16") if name.endswith("_ptr") else "i32" for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    by_index = {(names.index(name),): value for name, value in constants.items()}
    return triton.compile(
        triton.compiler.ASTSource(decode_kernel, signature, by_index),
        target=triton.backends.compiler.GPUTarget(*target),
        options={"num_warps": 1, "num_stages": 1},
    )

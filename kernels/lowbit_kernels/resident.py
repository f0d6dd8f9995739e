"""y = x Wᵀ + bias for few tokens on Hopper from weights in fragment order, in Gluon: x stays in its place.

Up to 16 tokens of a slice of K fit beside a program for the whole launch, so every multiprocessor gets one
program, which reads x once and then takes blocks of rows in turn. Each of its warps has TURNS tiles of
that slice for its own: their words come from memory straight to registers a whole block ahead, 16 bytes a
lane, and are the four registers that a lane contributes to a product of 16 inputs (mma.sync). Nothing is
subtracted from them,

    y = Σ_g s_g (Σ_k v x  -  (offset + z_g · unit) Σ_k x),    v = offset + q · unit,

where the sums of x are computed once, from products with ones, and the second term is what a product starts
from: zero-points of any kind cost a product an element and group. In fp16 v is the field where it lies in
its half-word, a subnormal number, offset 0 and unit 2^-22 or 2^-18: one `and`. In bf16, whose mantissa holds
one field, v is 32 + q; the field of rows r + 8 is moved there by an fp16 product of subnormals, on another
unit than that of masks and rotations.

The warps' sums of a block are added through shared memory, in their order. Slices of K in different
programs are added by the one of them that ends last, slice 0 first.

Bytes moved: words and scales once; x once a program, from L2; 8 · M · N for every slice if there are several.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from .device import launch
from .fragment import FragmentWeight, padded_x, workspace
from .hopper import HAS_GLUON, compile_gluon, constexpr_function, gl, gluon, what_lacks
from .layout import TILE_N

if HAS_GLUON:
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .hopper import _let_next_start, _wait_for_previous, thread_barrier, tma_load

    # what TMA writes: 64 inputs a row, in the order that matrix loads read without conflicts
    X_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


@constexpr_function
def _words_layout(warps, rows16):
    """[WARPS, ROWS16, 128] words of 64 inputs: 16 bytes a lane."""
    rows = [[0, 2**i, 0] for i in range(rows16.bit_length() - 1)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 0, 64]]
    slices = [[2**i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2], *rows], lanes, slices, [], [warps, rows16, 128])


@constexpr_function
def _operand_layout(warps):
    """The accumulator, a warp a slice."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@constexpr_function
def _groups(group_size):
    """Groups that a tile spans, each of which is a product."""
    return 1 if group_size == 0 or group_size >= 128 else 128 // group_size


@constexpr_function
def _group(chunk, part, groups):
    """Which of the groups of all turns a part of a chunk of 64 inputs is in."""
    return chunk // 2 * groups + chunk % 2 * (groups // 2) + part


@constexpr_function
def _ring(turns, groups):
    """Groups whose scales are loaded ahead: a block's, unless they would take too many registers."""
    return min(turns * groups, 8)


@constexpr_function
def _unpacking(bf16):
    """PTX of a word, $4: $0-$3 pairs of what a product takes for codes, see the module's docstring."""
    lines = ["{", ".reg .b32 turned, factor, magic;", "shf.r.wrap.b32 turned, $4, $4, 8;"]
    if bf16:
        # 2^11, and 32 as bf16
        lines += ["mov.b32 factor, 0x68006800;", "mov.b32 magic, 0x42004200;"]
    for run, source in enumerate(("$4", "turned")):
        first, second = f"${2 * run}", f"${2 * run + 1}"
        if bf16:
            lines.append(f"lop3.b32 {first}, {source}, 0x003C003C, magic, 0xea;")
        else:
            lines.append(f"and.b32 {first}, {source}, 0x003C003C;")
        lines.append(f"and.b32 {second}, {source}, 0x03C003C0;")
        if bf16:
            lines.append(f"fma.rn.f16x2 {second}, {second}, factor, magic;")
    return "\n".join([*lines, "}"])


@gluon.jit
def _operand(words, x, OPERAND: gl.constexpr):
    """[WARPS, ROWS16, 32, P] words, P of each lane, as left operand [WARPS, 16 · ROWS16, 16 · P] for x."""
    W: gl.constexpr = words.shape[0]
    R: gl.constexpr = words.shape[1]
    P: gl.constexpr = words.shape[3]
    w = gl.permute(gl.reshape(words, (W, R, 8, 4, P)), (0, 1, 2, 4, 3))
    # rows, half, lane // 4, word, run, lane % 4, odd
    w = gl.reshape(w, (W, R, 1, 8, P, 1, 4, 1)).broadcast_to((W, R, 2, 8, P, 2, 4, 2))
    w = gl.convert_layout(gl.reshape(w, (W, R * 16, P * 16)), OPERAND, assert_trivial=True)
    ASM: gl.constexpr = _unpacking(x.dtype == gl.bfloat16)
    # eight weights share a word, whose eight copies are one register
    return gl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r", [w], dtype=x.dtype, is_pure=True, pack=8
    )


@gluon.jit
def _part_of_words(words, PART: gl.constexpr, BLOCK_K: gl.constexpr):
    """Part PART, of BLOCK_K inputs, of the words of 64: [WARPS, ROWS16, 32, BLOCK_K / 16]."""
    W: gl.constexpr = words.shape[0]
    R: gl.constexpr = words.shape[1]
    if BLOCK_K == 64:
        return gl.reshape(words, (W, R, 32, 4))
    else:
        first, second = gl.split(gl.permute(gl.reshape(words, (W, R, 32, 2, 2)), (0, 1, 2, 4, 3)))
        if PART == 0:
            return first
        else:
            return second


@gluon.jit
def _part_of_x(x, PART: gl.constexpr, BLOCK_K: gl.constexpr, OPERAND: gl.constexpr):
    """Part PART of the right operand [WARPS, 64, tokens]: [WARPS, BLOCK_K, tokens]."""
    if BLOCK_K == 64:
        return x
    else:
        W: gl.constexpr = x.shape[0]
        M: gl.constexpr = x.shape[2]
        first, second = gl.split(gl.permute(gl.reshape(x, (W, 2, 32, M)), (0, 2, 3, 1)))
        if PART == 0:
            return gl.convert_layout(first, OPERAND, assert_trivial=True)
        else:
            return gl.convert_layout(second, OPERAND, assert_trivial=True)


@gluon.jit
def _x_operand(x, CHUNK: gl.constexpr, OPERAND: gl.constexpr):
    """Chunk CHUNK of x [2 · TURNS, WARPS, tokens, 64] as the right operand."""
    return x.index(CHUNK).permute((0, 2, 1)).load(OPERAND)


@gluon.jit
def _issue():
    """Loads written before this are issued before it: ptxas would delay each to just before its use."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _cells_of(cells, block, tiles, CHUNK: gl.constexpr, ROWS16: gl.constexpr):
    """Where the words of chunk CHUNK, 0 or 1, of a block's tiles are; cells: of block 0 and chunk 0."""
    return cells + (block.to(gl.int64) * ROWS16 * tiles * 256 + CHUNK * 128)


@gluon.jit
def _load_part(
    values_ptr,
    block,
    following,
    turns,
    padded_n,
    AT: gl.constexpr,
    TURNS: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    ROW: gl.constexpr,
):
    """[WARPS, ROWS] scales or zero-points of group AT of a block's turns, or of the block's that follows.

    turns: for each turn [WARPS], the tile along K that a warp has.
    """
    GROUPS: gl.constexpr = _groups(GROUP_SIZE)
    if AT >= TURNS * GROUPS:
        block = following
    tile = turns[AT // GROUPS % TURNS]
    group = tile * 0 if GROUP_SIZE == 0 else (tile * 128 + AT % GROUPS * (128 // GROUPS)) // GROUP_SIZE
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, ROW))
    return gl.load(values_ptr + block * ROWS + (group * padded_n)[:, None] + rows[None, :])


@gluon.jit
def _whole(points):
    """Zero-points as fp32 and what they are too much: bytes become the last bits of 2^23."""
    if points.dtype.is_floating():
        return points.to(gl.float32), 0.0
    else:
        return (points.to(gl.int32) | 0x4B000000).to(gl.float32, bitcast=True), 8388608.0


@gluon.jit
def _add_block(
    words,
    scales,
    points,
    x,
    starts,
    full,
    cells,
    turns,
    scale_ptr,
    zero_ptr,
    block,
    last,
    spread,
    tiles,
    padded_n,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    CENTRE: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    ROWS16: gl.constexpr,
):
    """The product of a block and x, [WARPS, 16 · ROWS16, tokens] in _units; words, scales and points loaded
    for the block after it.

    words: of each chunk.  scales, points: of the first groups of the block.  starts: of every group the
    second term or what it is a multiple of, which FIRST leaves there; in fp16 that of rows r, and then, where
    all zero-points are CENTRE, that of rows r + 8.  LAST: nothing comes after it.
    """
    W: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = ROWS16 * 16
    TURNS: gl.constexpr = x.shape[0] // 2
    BLOCK_M: gl.constexpr = x.shape[2]
    GROUPS: gl.constexpr = _groups(GROUP_SIZE)
    BLOCK_K: gl.constexpr = 64 if GROUPS < 4 else 32
    MMA: gl.constexpr = _operand_layout(W)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROW: gl.constexpr = gl.SliceLayout(2, MMA)
    TOKEN: gl.constexpr = gl.SliceLayout(1, MMA)
    HALF: gl.constexpr = x.dtype == gl.float16
    RING: gl.constexpr = _ring(TURNS, GROUPS)
    upper = (gl.arange(0, ROWS, layout=gl.SliceLayout(0, ROW)) // 8 % 2 == 0)[None, :]
    if HALF:
        minus = gl.where(upper, -(2.0**-22), -(2.0**-18))
    following = block + spread
    if FIRST:
        # which may be the only one
        following = gl.minimum(following, last)
    acc = gl.zeros([W, ROWS, BLOCK_M], gl.float32, MMA)
    for chunk in gl.static_range(2 * TURNS):
        if FIRST and chunk % 2 == 0:
            mbarrier.wait(full.index(chunk // 2), 0)
        b = _x_operand(x, chunk, RIGHT)
        for part in gl.static_range(64 // BLOCK_K):
            if GROUPS > 1 or chunk % 2 == 0:
                if FIRST:
                    ones = gl.full([W, 16, BLOCK_K], 1.0, x.dtype, LEFT)
                    total = mma_v2(
                        ones, _part_of_x(b, part, BLOCK_K, RIGHT), gl.zeros([W, 16, BLOCK_M], gl.float32, MMA)
                    )
                    if GROUPS == 1:
                        total = mma_v2(ones, _x_operand(x, chunk + 1, RIGHT), total)
                    # all rows are the same
                    start = gl.max(total, axis=1)
                    if not HAS_ZERO and HALF:
                        lower = start * (-CENTRE * 2.0**-18)
                        starts.index(TURNS * GROUPS + _group(chunk, part, GROUPS)).store(lower)
                        start *= -CENTRE * 2.0**-22
                    elif not HAS_ZERO:
                        start *= -32.0 - CENTRE
                    starts.index(_group(chunk, part, GROUPS)).store(start)
                else:
                    start = starts.index(_group(chunk, part, GROUPS)).load(TOKEN)
                    if not HAS_ZERO and HALF:
                        lower = starts.index(TURNS * GROUPS + _group(chunk, part, GROUPS)).load(TOKEN)
                if HAS_ZERO:
                    point, above = _whole(points[0])
                    points = points[1:]
                    if HALF:
                        product = (point * minus - above * minus)[:, :, None] * start[:, None, :]
                    else:
                        product = (above - 32.0 - point)[:, :, None] * start[:, None, :]
                elif HALF:
                    product = gl.where(upper[:, :, None], start[:, None, :], lower[:, None, :])
                else:
                    product = gl.zeros([W, ROWS, BLOCK_M], gl.float32, MMA) + start[:, None, :]
            a = _operand(_part_of_words(words[0], part, BLOCK_K), b, LEFT)
            product = mma_v2(a, _part_of_x(b, part, BLOCK_K, RIGHT), product)
            if GROUPS > 1 or chunk % 2 == 1:
                acc += product * scales[0].to(gl.float32)[:, :, None]
                scales = scales[1:]
                if not LAST or _group(chunk, part, GROUPS) + RING < TURNS * GROUPS:
                    scales += (
                        _load_part(
                            scale_ptr,
                            block,
                            following,
                            turns,
                            padded_n,
                            _group(chunk, part, GROUPS) + RING,
                            TURNS,
                            GROUP_SIZE,
                            ROWS,
                            ROW,
                        ),
                    )
                    if HAS_ZERO:
                        points += (
                            _load_part(
                                zero_ptr,
                                block,
                                following,
                                turns,
                                padded_n,
                                _group(chunk, part, GROUPS) + RING,
                                TURNS,
                                GROUP_SIZE,
                                ROWS,
                                ROW,
                            ),
                        )
        words = words[1:]
        if not LAST:
            source = _cells_of(cells[chunk // 2], following, tiles, chunk % 2, ROWS16)
            if FIRST:
                there = gl.full(source.shape, block < last, gl.int1, source.type.layout)
                words += (gl.load(source, mask=there, eviction_policy="evict_first"),)
            else:
                words += (gl.load(source, eviction_policy="evict_first"),)
        _issue()
    return acc, words, scales, points


@gluon.jit
def _leave(
    acc,
    sums,
    bias_ptr,
    out_ptr,
    partial_ptr,
    block,
    split,
    m,
    n,
    stride_om,
    stride_on,
    HAS_BIAS: gl.constexpr,
    SPLIT_K: gl.constexpr,
):
    """Add up what _add_block returns, and write it or leave it in the workspace."""
    W: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    BLOCK_M: gl.constexpr = acc.shape[2]
    ADD: gl.constexpr = gl.BlockedLayout([W, 1, 1], [1, 1, 32], [1, W, 1], [2, 1, 0])
    sums.permute((0, 2, 1)).store(acc)
    y = gl.sum(sums.load(ADD), axis=0)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(0, ADD)))
    tokens = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, gl.SliceLayout(0, ADD)))[:, None]
    if out_ptr.dtype.element_ty == gl.float16:
        y *= gl.where(rows // 8 % 2 == 0, 2.0**22, 2.0**18)[None, :]
    rows = (block * ROWS + rows)[None, :]
    inside = (tokens < m) & (rows < n)
    if SPLIT_K > 1:
        gl.store(
            partial_ptr + (split.to(gl.int64) * m + tokens) * n + rows, y, mask=inside, cache_modifier=".cg"
        )
    else:
        _write(y, bias_ptr, out_ptr, tokens, rows, inside, stride_om, stride_on, n, HAS_BIAS)


@gluon.jit
def _take_block(
    loaded,
    block,
    factors,
    target,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    KIND: gl.constexpr,
):
    """_add_block and _leave of one block; the words, scales and points that are loaded for the next."""
    CENTRE: gl.constexpr = KIND[0]
    GROUP_SIZE: gl.constexpr = KIND[1]
    HAS_ZERO: gl.constexpr = KIND[2]
    HAS_BIAS: gl.constexpr = KIND[3]
    ROWS16: gl.constexpr = KIND[4]
    SPLIT_K: gl.constexpr = KIND[5]
    words, scales, points = loaded
    x, starts, full, cells, turns, scale_ptr, zero_ptr, last, spread, tiles, padded_n = factors
    acc, words, scales, points = _add_block(
        words,
        scales,
        points,
        x,
        starts,
        full,
        cells,
        turns,
        scale_ptr,
        zero_ptr,
        block,
        last,
        spread,
        tiles,
        padded_n,
        FIRST,
        LAST,
        CENTRE,
        GROUP_SIZE,
        HAS_ZERO,
        ROWS16,
    )
    sums, bias_ptr, out_ptr, partial_ptr, split, m, n, stride_om, stride_on = target
    _leave(
        acc,
        sums,
        bias_ptr,
        out_ptr,
        partial_ptr,
        block,
        split,
        m,
        n,
        stride_om,
        stride_on,
        HAS_BIAS,
        SPLIT_K,
    )
    return words, scales, points


@gluon.jit
def _write(y, bias_ptr, out_ptr, tokens, rows, inside, stride_om, stride_on, n, HAS_BIAS: gl.constexpr):
    if HAS_BIAS:
        y += gl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(gl.float32)
    cells = out_ptr + tokens.to(gl.int64) * stride_om + rows.to(gl.int64) * stride_on
    gl.store(cells, y.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _add_slices(
    bias_ptr,
    out_ptr,
    partial_ptr,
    first,
    blocks,
    spread,
    m,
    n,
    stride_om,
    stride_on,
    BLOCK_M: gl.constexpr,
    ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SPLIT_K: gl.constexpr,
):
    """Add the slices of every spread-th block from `first` on, several blocks at once, and write them."""
    W: gl.constexpr = gl.num_warps()
    # so that about as much is under way as registers hold
    BLOCKS: gl.constexpr = 16 if SPLIT_K <= 3 else 8
    FLAT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 128 // ROWS, ROWS // 4], [W, 1, 1], [2, 1, 0])
    which = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, FLAT)))[:, None, None]
    tokens = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(2, FLAT)))[None, :, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, FLAT)))[None, None, :]
    for block in range(first, blocks, spread * BLOCKS):
        rows = (block + which * spread) * ROWS + row
        inside = (tokens < m) & (rows < n)
        cells = partial_ptr + tokens.to(gl.int64) * n + rows
        y = gl.zeros([BLOCKS, BLOCK_M, ROWS], gl.float32, FLAT)
        for i in gl.static_range(SPLIT_K):
            y += gl.load(cells + i * m.to(gl.int64) * n, mask=inside, other=0.0, cache_modifier=".cg")
        _write(y, bias_ptr, out_ptr, tokens, rows, inside, stride_om, stride_on, n, HAS_BIAS)


@gluon.jit(do_not_specialize=["m", "padded_n", "tiles", "blocks", "spread"])
def resident_kernel(
    x_desc,
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
    tiles,
    blocks,
    spread,
    stride_om,
    stride_on,
    CENTRE: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    ROWS16: gl.constexpr,
    TURNS: gl.constexpr,
    SPLIT_K: gl.constexpr,
    EVEN: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Every spread-th block of 16 · ROWS16 rows of yᵀ, or of one of SPLIT_K slices of its sums.

    x_desc: of x as [tiles, m, 128] with block [warps, BLOCK_M, 64].  The rest is as in
    fragment.decode_kernel, but partial: fp32 [SPLIT_K, m, n] and semaphore: [spread].
    blocks: in all.  TURNS: tiles along K that each warp has.  EVEN: none is past the end.
    """
    W: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = ROWS16 * 16
    GROUPS: gl.constexpr = _groups(GROUP_SIZE)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    WORDS: gl.constexpr = _words_layout(W, ROWS16)
    ROW: gl.constexpr = gl.SliceLayout(2, _operand_layout(W))
    RING: gl.constexpr = _ring(TURNS, GROUPS)
    split = gl.program_id(0) // spread
    first = gl.program_id(0) % spread
    # the last that this program has
    last = first + (blocks - 1 - first) // spread * spread

    x = gl.allocate_shared_memory(dtype, [2 * TURNS, W, BLOCK_M, 64], x_desc.layout)
    # lanes with two tokens each write 32 different banks
    sums = gl.allocate_shared_memory(
        gl.float32, [W, BLOCK_M, ROWS], gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])
    )
    starts = gl.allocate_shared_memory(
        gl.float32, [2 * TURNS * GROUPS, W, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    full = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(TURNS):
        mbarrier.init(full.index(turn), count=1)
    hopper.fence_async_shared()

    warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    row_tile = gl.arange(0, ROWS16, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    word = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    turns = ()
    cells = ()
    words = ()
    for turn in gl.static_range(TURNS):
        begin = (split * TURNS + turn) * W
        tile = begin + gl.arange(0, W, layout=gl.SliceLayout(1, ROW))
        word_tile = begin + warp
        if not EVEN:
            # past the end x reads as 0, whatever the clamped weight is
            tile = gl.minimum(tile, tiles - 1)
            word_tile = gl.minimum(word_tile, tiles - 1)
        turns += (tile,)  # type: ignore[assignment]
        offset = (word_tile[:, None, None] + (row_tile * tiles)[None, :, None]) * 256 + word[None, None, :]
        cells += (words_ptr + offset,)  # type: ignore[assignment]
        for chunk in gl.static_range(2):
            source = _cells_of(cells[turn], first, tiles, chunk, ROWS16)
            words += (gl.load(source, eviction_policy="evict_first"),)  # type: ignore[assignment]
    scales = ()
    points = ()
    for at in gl.static_range(RING):
        scales += (_load_part(scale_ptr, first, first, turns, padded_n, at, TURNS, GROUP_SIZE, ROWS, ROW),)  # type: ignore[assignment]
        if HAS_ZERO:
            points += (_load_part(zero_ptr, first, first, turns, padded_n, at, TURNS, GROUP_SIZE, ROWS, ROW),)  # type: ignore[assignment]
    _issue()
    if DEPENDENT:
        _wait_for_previous()
        # its programs find no place before this one's end
        _let_next_start()
    for turn in gl.static_range(TURNS):
        mbarrier.expect(full.index(turn), W * BLOCK_M * 256)
        for chunk in gl.static_range(2):
            tma_load(
                x_desc,
                [(split * TURNS + turn) * W, 0, chunk * 64],
                full.index(turn),
                x.index(2 * turn + chunk),
            )

    loaded = (words, scales, points)
    factors = (x, starts, full, cells, turns, scale_ptr, zero_ptr, last, spread, tiles, padded_n)
    target = (sums, bias_ptr, out_ptr, partial_ptr, split, m, n, stride_om, stride_on)
    # as constants: of a plain tuple they would be values that only the GPU knows
    KIND: gl.constexpr = (CENTRE, GROUP_SIZE, HAS_ZERO, HAS_BIAS, ROWS16, SPLIT_K)
    loaded = _take_block(loaded, first, factors, target, True, False, KIND)
    for block in range(first + spread, last, spread):
        loaded = _take_block(loaded, block, factors, target, False, False, KIND)
    if last > first:
        _take_block(loaded, last, factors, target, False, True, KIND)
    if SPLIT_K > 1:
        # every thread's part is stored before one of them counts this program as done
        thread_barrier()
        if gl.atomic_add(semaphore_ptr + first, 1, sem="acq_rel") == SPLIT_K - 1:
            _add_slices(
                bias_ptr,
                out_ptr,
                partial_ptr,
                first,
                blocks,
                spread,
                m,
                n,
                stride_om,
                stride_on,
                BLOCK_M,
                ROWS,
                HAS_BIAS,
                SPLIT_K,
            )
            gl.store(semaphore_ptr + first, 0)


def multiply(
    x: Tensor,
    weight: FragmentWeight,
    bias: Tensor | None,
    out: Tensor,
    *,
    block_m: int,
    block_n: int,
    slices: int,
    at_once: int,
    dependent: bool,
    num_warps: int,
) -> None:
    """Fill out [M, N] with x [M, K] @ Wᵀ + bias by resident_kernel.

    block_m: 8 or 16, at least M.  block_n: rows of a block, 16, 32 or 64.  slices: tiles along K that a
    program has, a multiple of num_warps; x of so many, block_m · 256 bytes each, must fit in shared memory.
    at_once: programs that the GPU runs at a time.
    """
    layout = weight.layout
    x = padded_x(x, layout.padded_k)
    m, n = out.shape
    assert m <= block_m
    assert slices % num_warps == 0
    blocks = -(-n // block_n)
    split_k = -(-layout.tiles // slices)
    spread = min(max(1, at_once // split_k), blocks)
    partial, semaphore = workspace(out, split_k, spread, split_k * out.numel())
    launch(
        resident_kernel,
        (spread * split_k,),
        TensorDescriptor(
            x, [layout.tiles, m, 128], [128, x.stride(0), 1], [num_warps, block_m, 64], X_LAYOUT
        ),
        weight.words,
        weight.scale,
        weight.scale if weight.zero_point is None else weight.zero_point,
        out if bias is None else bias,
        out,
        partial,
        semaphore,
        m,
        n,
        layout.padded_n,
        layout.tiles,
        blocks,
        spread,
        *out.stride(),
        CENTRE=1 << (weight.bits - 1),
        GROUP_SIZE=0 if weight.scale.shape[0] == 1 else weight.group_size,
        HAS_ZERO=weight.zero_point is not None,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        ROWS16=block_n // TILE_N,
        TURNS=slices // num_warps,
        SPLIT_K=split_k,
        EVEN=layout.tiles == split_k * slices,
        DEPENDENT=dependent,
        num_warps=num_warps,
        **({"launch_pdl": True} if dependent else {}),
    )


@functools.cache
def missing() -> str | None:
    """What this installation lacks for resident_kernel; None if Triton compiles it."""
    return what_lacks(
        lambda: compile_kernel(ROWS16=1, TURNS=1, GROUP_SIZE=32, SPLIT_K=2, EVEN=False, num_warps=4)
    )


def compile_kernel(act: str = "fp16", zero: str = "u8", num_warps: int = 8, **constexprs: Any) -> Any:
    """resident_kernel compiled for sm_90, which needs no GPU.

    act, zero: Triton types of the activations and zero-points.  constexprs: other than those of 16 tokens and
    a symmetric 4-bit weight in groups of 128 without split.
    """
    constants = {
        "stride_on": 1,
        "CENTRE": 8,
        "GROUP_SIZE": 128,
        "HAS_ZERO": False,
        "HAS_BIAS": False,
        "BLOCK_M": 16,
        "ROWS16": 2,
        "TURNS": 4,
        "SPLIT_K": 1,
        "EVEN": True,
        "DEPENDENT": True,
    } | constexprs
    block = [num_warps, constants["BLOCK_M"], 64]
    types = {"x_desc": f"tensordesc<{act}{block},{X_LAYOUT!r}>"}
    return compile_gluon(
        resident_kernel, types, constants, {"n", "stride_om"}, act, zero, num_warps=num_warps
    )

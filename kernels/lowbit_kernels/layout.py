"""Where each code sits in the stored words: the one place that knows bit order.

The stored ("row") order is one dense bit stream per output row: code k of a row occupies bits
k · bits .. k · bits + bits - 1 of the row, bit 0 being the least significant bit of word 0. With 2, 4 and
8 bits a word holds whole codes; with 3 bits codes 10, 21, 31, ... of every 32 straddle two words. The last
word of a row is filled up with zero bits. These words are compressed-tensors' `weight_packed`, and for 2, 4
and 8 bits the transpose of GPTQ's `qweight`.

Packing works on eight codes at once: eight bytes are one int64, and three shift-or-mask steps fold them
into 8 · bits contiguous low bits. That relies on little-endian memory, like safetensors files do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = (2, 3, 4, 8)

# Elements a CPU loop handles at a time and thread: their fp32 copy is 1 MiB, an L2 cache, and enough work to
# hide the cost of calling PyTorch. Elsewhere one launch per step over a large chunk limits temporaries.
_CPU_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 27

# Integer types as wide as eight codes of so many bits; three bytes have none.
_EIGHT_CODES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PackLayout:
    """How codes of one weight are laid out in words.

    bits: 2, 3, 4 or 8.  word: bits per stored integer.  order: "row" is the interoperable stream above.
    """

    bits: int
    word: int = 32
    order: str = "row"

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits {self.bits} is not supported; use one of {', '.join(map(str, BITS))}")
        if self.word != 32:
            raise ValueError(f"word {self.word} is not supported; words are 32 bits")
        if self.order != "row":
            raise ValueError(f'order "{self.order}" is not supported; use "row"')

    def width(self, in_features: int) -> int:
        """Words per row of in_features codes."""
        return -(-in_features * self.bits // self.word)


def row_chunks(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows whose temporaries stay in cache on a CPU, and in bounds on an accelerator."""
    elements = _CPU_CHUNK * torch.get_num_threads() if device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, elements // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into the stored words.

    codes: [N, K] uint8, every value below 2^bits (not checked: a larger one spills into its neighbours).
    Returns [N, ceil(K · bits / 32)] int32 on the same device.
    Raises ValueError for another dtype, rank or width.
    """
    if codes.dtype != torch.uint8 or codes.dim() != 2:
        raise ValueError(f"codes must be [N, K] uint8, got {list(codes.shape)} {codes.dtype}")
    n, k = codes.shape
    words = codes.new_empty((n, PackLayout(bits).width(k)), dtype=torch.int32)
    for rows in row_chunks(n, k, codes.device):
        words[rows] = _pack_rows(codes[rows], bits)[:, : words.shape[1]]
    return words


def unpack_words(words: Tensor, bits: int, k: int) -> Tensor:
    """Undo pack_words: the first k codes of each row.

    words: [N, ceil(k · bits / 32)] int32.  Returns [N, k] uint8.
    Raises ValueError when the words do not have the width that k codes need.
    """
    width = PackLayout(bits).width(k)
    if words.dtype != torch.int32 or words.dim() != 2 or words.shape[1] != width:
        raise ValueError(
            f"{k} codes of {bits} bits need [N, {width}] int32 words, got {list(words.shape)} {words.dtype}"
        )
    codes = words.new_empty((words.shape[0], k), dtype=torch.uint8)
    for rows in row_chunks(words.shape[0], k, words.device):
        codes[rows] = _unpack_rows(words[rows], bits)[:, :k]
    return codes


def _pack_rows(codes: Tensor, bits: int) -> Tensor:
    """[R, K] uint8 to [R, ceil(K / 32) · bits] int32; missing codes count as 0."""
    rows, k = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -k % 32)) if k % 32 else codes.contiguous()
    # flat first: a single row that was a column counts as contiguous, but its stride does not allow the view
    eight = codes.view(-1).view(torch.int64).view(rows, -1)
    for width in (8, 16, 32):
        filled = bits * width // 8
        if filled < width:
            # two fields of `width` bits, `filled` of them used, become one of twice the width
            eight = (eight | eight >> (width - filled)) & _every(2 * width, 2 * filled)
    if bits == 3:
        return eight.view(torch.uint8).view(rows, -1, 8)[..., :3].reshape(rows, -1).view(torch.int32)
    return eight.to(_EIGHT_CODES[bits]).view(torch.int32)


def _unpack_rows(words: Tensor, bits: int) -> Tensor:
    """[R, W] int32 to [R, at least 32 W / bits] uint8, the steps of _pack_rows backwards."""
    rows, width = words.shape
    words = torch.nn.functional.pad(words, (0, -width % bits)) if width % bits else words.contiguous()
    if bits == 3:
        eight = torch.nn.functional.pad(words.view(torch.uint8).view(rows, -1, 3), (0, 5)).view(torch.int64)
        eight = eight.view(rows, -1)
    else:
        # the mask drops the sign that widening spreads upwards
        eight = words.view(-1).view(_EIGHT_CODES[bits]).view(rows, -1).to(torch.int64) & _every(64, 8 * bits)
    for width in (32, 16, 8):
        filled = bits * width // 8
        if filled < width:
            eight = (eight | eight << (width - filled)) & _every(width, filled)
    return eight.view(torch.uint8)


def _every(field: int, used: int) -> int:
    """Mask, as a signed 64-bit number, of the low `used` bits in every field of `field` bits."""
    mask = sum(((1 << used) - 1) << shift for shift in range(0, 64, field))
    return mask - (1 << 64) if mask >> 63 else mask


# A fragment tile: the rows and inputs of one left operand of the matrix instruction, times eight along K.
TILE_N = 16
TILE_K = 128

# Rows are filled up to whole programs of the widest kernel.
ROW_BLOCK = 128


@dataclass(frozen=True)
class FragmentLayout:
    """The run-time order of one weight's words: what a lane of the matrix instruction holds, lane by lane.

    words[r, c, lane, i] of 32 bits, with field = 4 for 3-bit codes and bits otherwise, holds at bit
    field · (half + 2 · run) + 16 · odd, then rotated left by 2, the code of

        row    16 r + 8 half + lane // 4                              half in 0, 1
        input  8 ((4 c + i) · (8 / field) + run) + 2 (lane % 4) + odd      run below 8 / field, odd in 0, 1

    Rows are padded to a multiple of ROW_BLOCK and inputs to one of TILE_K, with code 0. It is derived from
    the stored words when a weight is loaded and never written to a checkpoint.
    """

    bits: int
    out_features: int
    in_features: int

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits {self.bits} is not supported; use one of {', '.join(map(str, BITS))}")

    @property
    def field(self) -> int:
        """Bits a code takes: 3-bit codes travel in 4, so that no code straddles two words."""
        return 4 if self.bits == 3 else self.bits

    @property
    def runs(self) -> int:
        """Runs of eight inputs that one word draws from."""
        return 8 // self.field

    @property
    def padded_n(self) -> int:
        return -(-self.out_features // ROW_BLOCK) * ROW_BLOCK

    @property
    def tiles(self) -> int:
        """Tiles along K."""
        return -(-self.in_features // TILE_K)

    @property
    def padded_k(self) -> int:
        return self.tiles * TILE_K

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.padded_n // TILE_N, self.tiles * self.field // 2, 32, 4


def fragment_words(codes: Tensor, bits: int) -> Tensor:
    """Codes to the run-time words of FragmentLayout, in plain PyTorch.

    codes: [N, K] uint8.  Returns int32 of the layout's shape.
    """
    layout = FragmentLayout(bits, *codes.shape)
    rows, chunks = layout.shape[:2]
    padded = codes.new_zeros((layout.padded_n, layout.padded_k))
    padded[: codes.shape[0], : codes.shape[1]] = codes
    # [r, half, lane // 4, word, run, lane % 4, odd]
    fields = padded.view(rows, 2, 8, chunks * 4, layout.runs, 4, 2)
    words = codes.new_zeros((rows, 8, chunks * 4, 4), dtype=torch.int64)
    for half in range(2):
        for run in range(layout.runs):
            for odd in range(2):
                shift = (layout.field * (half + 2 * run) + 16 * odd + 2) % 32
                code = fields[:, half, :, :, run, :, odd].to(torch.int64)
                words |= code << shift | code >> (32 - shift)
    words = words.view(rows, 8, chunks, 4, 4).permute(0, 2, 1, 4, 3).reshape(layout.shape)
    # the low 32 bits, as a signed number
    return (words << 32 >> 32).to(torch.int32)


def unfragment_words(words: Tensor, layout: FragmentLayout) -> Tensor:
    """Undo fragment_words: [N, K] uint8."""
    if words.dtype != torch.int32 or tuple(words.shape) != layout.shape:
        raise ValueError(f"wanted {list(layout.shape)} int32, got {list(words.shape)} {words.dtype}")
    rows, chunks = layout.shape[:2]
    lanes = words.view(rows, chunks, 8, 4, 4).permute(0, 2, 1, 4, 3).reshape(rows, 8, chunks * 4, 4)
    lanes = lanes.to(torch.int64) & 0xFFFFFFFF
    fields = words.new_empty((rows, 2, 8, chunks * 4, layout.runs, 4, 2), dtype=torch.uint8)
    for half in range(2):
        for run in range(layout.runs):
            for odd in range(2):
                shift = (layout.field * (half + 2 * run) + 16 * odd + 2) % 32
                code = (lanes >> shift | lanes << (32 - shift)) & ((1 << layout.field) - 1)
                fields[:, half, :, :, run, :, odd] = code.to(torch.uint8)
    codes = fields.view(layout.padded_n, layout.padded_k)
    return codes[: layout.out_features, : layout.in_features].contiguous()


# Tokens of one expert that a tile of a product with stacked experts has at most.
EXPERT_TOKENS = 8


def expert_slots(pairs: int, experts: int) -> int:
    """Places for tiles that are enough however `pairs` tokens fall on experts; some stay empty."""
    return min(pairs, pairs // EXPERT_TOKENS + experts)

"""The second route from files to weights, for proof and for evaluation.

Written from the format descriptions alone, in byte arithmetic; nothing is shared with `lowbit_kernels.layout`
or `checkpoint.formats`, so that a mistake there and a mistake here do not cancel.

`checksum` states what a tensor holds as one exact integer. The pipeline records it for the codes, scales and
zero-points a solver returned, before they are packed; whatever format they were written in, decoding the
files must give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowbit.errors import SourceError
from lowbit.scheme import PackedTensor, QuantizedTensor, QuantScheme

# tensors that stand in place of P.weight, by format: the ones always there, then the ones that may be
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "compressed-tensors": (
        ("weight_packed", "weight_scale", "weight_shape"),
        ("weight_zero_point", "weight_g_idx"),
    ),
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx",)),
    "gptq-v2": (("qweight", "qzeros", "scales"), ("g_idx",)),
    "awq": (("qweight", "qzeros", "scales"), ()),
}

# nibble i of an AWQ word holds this column of its eight
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)

_CHUNK = 1 << 18
_WEIGHTS = (np.arange(1, _CHUNK + 1, dtype=np.int64) * 0x9E3779B1) % (1 << 31) | 1


def checksum(tensor: Tensor) -> str:
    """Return 16 hex digits: the 32-bit words, each times an odd weight of its place, summed mod 2^64.

    A changed word changes the sum by less than 2^63 in magnitude and never by 0; so does the exchange of two
    different words within 2^18 words of each other. Independent of device and of how the tensor is packed.
    """
    sums = Checksum()
    sums.update(tensor)
    return sums.result()


class Checksum:
    """The checksum of a tensor that comes in pieces, each a whole number of words but for the last."""

    def __init__(self) -> None:
        # of the chunks that are complete; of the one that is not; its words
        self.total, self.partial, self.filled = 0, 0, 0

    def update(self, piece: Tensor) -> None:
        """Add the bytes of a tensor on any device; bytes that fill no word end with zeros."""
        raw = piece.detach().contiguous().reshape(-1).view(torch.uint8)
        if len(raw) % 4:
            raw = torch.nn.functional.pad(raw, (0, -len(raw) % 4))
        words = raw.view(torch.int32)
        if words.device.type != "cpu" and not self.filled:
            whole = len(words) // _CHUNK * _CHUNK
            for chunk_sum in _chunk_sums(words[:whole]):
                self.total = self.total * 3 + chunk_sum
            words = words[whole:]
        while len(words):
            part, words = words.split([room := min(len(words), _CHUNK - self.filled), len(words) - room])
            self.partial += _weighted_sum(part, self.filled)
            self.filled += room
            if self.filled == _CHUNK:
                self.total, self.partial, self.filled = self.total * 3 + self.partial, 0, 0

    def result(self) -> str:
        # the last chunk counts even if it is empty
        return f"{(self.total * 3 + self.partial) % (1 << 64):016x}"


def _weighted_sum(words: Tensor, place: int) -> int:
    """Sum of int32 words times the weights from `place` on, mod 2^64: integer arithmetic wraps there."""
    weights = _WEIGHTS[place : place + len(words)]
    if words.device.type == "cpu":
        # one pass without a temporary; torch's product and sum take three times as long
        return int(np.einsum("i,i->", words.numpy(), weights, dtype=np.int64))
    return int((words * torch.from_numpy(weights).to(words.device)).sum())


def _chunk_sums(words: Tensor) -> Iterator[int]:
    """The weighted sums of whole chunks, on a device where every answer that is waited for counts."""
    weights = torch.from_numpy(_WEIGHTS).to(words.device)
    for chunks in words.view(-1, _CHUNK).split(64):
        yield from torch.mul(chunks, weights).sum(1).tolist()


def file_checksum(path: Path) -> str:
    """Return the checksum of a small file's bytes."""
    return checksum(torch.frombuffer(bytearray(path.read_bytes() or b"\0"), dtype=torch.uint8))


def checksums(quantized: QuantizedTensor) -> dict[str, str]:
    """Return the checksums of codes, scale and (asymmetric grid) zero_point, as the manifest records them."""
    return {"codes": checksum(quantized.codes)} | grid_checksums(quantized.scale, quantized.zero_point)


def grid_checksums(scale: Tensor, zero_point: Tensor | None) -> dict[str, str]:
    """Those of scale and zero_point."""
    zeros = {} if zero_point is None else {"zero_point": checksum(zero_point.to(torch.float32))}
    return {"scale": checksum(scale)} | zeros


def unpack_rows(words: Tensor, bits: int, count: int) -> Tensor:
    """Return uint8 [R, count]: value i of each int32 row lies at bit i * bits, lowest bits first."""
    rows = words.shape[0]
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data[:, :count]
    if bits == 3:
        stream = np.unpackbits(data.cpu().numpy(), axis=1, bitorder="little")[:, : count * 3]
        values = stream.reshape(rows, count, 3) @ np.array([1, 2, 4], np.uint8)
        return torch.from_numpy(values).to(words.device)
    # spread each byte over a lane with one byte for every value in it; what else falls there is masked
    per_byte, mask = 8 // bits, 2**bits - 1
    lanes = data.to({2: torch.int16, 4: torch.int32}[per_byte])
    spread = lanes << (8 - bits)
    spread |= lanes
    for i in range(2, per_byte):
        spread |= lanes << ((8 - bits) * i)
    spread &= sum(mask << (8 * i) for i in range(per_byte))
    return spread.view(torch.uint8)[:, :count]


@dataclass(frozen=True)
class LayerCodes:
    """A layer whose codes are unpacked when they are asked for, so that a pass over it needs no copy of it.

    shape: (N, K).  scale: [N, G].  zero_point: uint8 [N, G] or None.  unpack: rows -> codes [R, K] uint8.
    order: None, or for a GPTQ layer with activation order the input that each column belongs to, [K].
    """

    shape: tuple[int, int]
    scale: Tensor
    zero_point: Tensor | None
    scheme: QuantScheme
    unpack: Callable[[slice], Tensor]
    order: Tensor | None = None

    def rows(self, rows: slice) -> QuantizedTensor:
        """Some rows of the layer, decoded."""
        zero_point = None if self.zero_point is None else self.zero_point[rows]
        return QuantizedTensor(self.unpack(rows), self.scale[rows], zero_point, self.scheme)

    def chunks(self, weights: int) -> Iterator[slice]:
        """All rows in order, about `weights` weights at a time."""
        # codes of four rows are whole words, and of eight whole words of AWQ's
        step = max(8, weights // self.shape[1] // 8 * 8)
        for start in range(0, self.shape[0], step):
            yield slice(start, min(start + step, self.shape[0]))


def codes_of(packed: PackedTensor) -> LayerCodes:
    """The layer of words in memory, by this module's arithmetic."""
    bits, k = packed.scheme.bits, packed.in_features
    return LayerCodes(
        packed.shape,
        packed.scale,
        packed.zero_point,
        packed.scheme,
        lambda rows: unpack_rows(packed.words[rows], bits, k).contiguous(),
    )


def decode_packed(packed: PackedTensor) -> QuantizedTensor:
    """Return the codes of words in memory, by this module's arithmetic."""
    return codes_of(packed).rows(slice(None))


def open_layer(
    format: str, parts: Mapping[str, Tensor], scheme: QuantScheme, shape: tuple[int, int]
) -> LayerCodes:
    """Return one layer of a checkpoint, its scales and zero-points decoded.

    parts: the stored tensors by their suffix in PARTS[format], on any device.  shape: (N, K).
    Raises SourceError if a tensor is missing or has not the shape or dtype that the other arguments want.
    """
    read = _Parts(parts)
    if format in ("gptq", "gptq-v2"):
        # the first version stores zero-points less one
        return _gptq(read, scheme, shape, 1 if format == "gptq" else 0)
    return {"compressed-tensors": _compressed_tensors, "awq": _awq}[format](read, scheme, shape)


def decode_layer(
    format: str, parts: Mapping[str, Tensor], scheme: QuantScheme, shape: tuple[int, int]
) -> tuple[QuantizedTensor, Tensor | None]:
    """Return the whole of open_layer(...) and its order."""
    layer = open_layer(format, parts, scheme, shape)
    return layer.rows(slice(None)), layer.order


@dataclass(frozen=True)
class _Parts:
    """The stored tensors of a layer; asking for one states what it must be."""

    tensors: Mapping[str, Tensor]

    def __call__(self, suffix: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        tensor = self.tensors.get(suffix)
        if tensor is None:
            raise SourceError(f"{suffix} is missing")
        if tuple(tensor.shape) != shape:
            raise SourceError(
                f"{suffix} has shape {list(tensor.shape)}, config and layer shape ask for {list(shape)}"
            )
        if dtype is not None and tensor.dtype != dtype:
            raise SourceError(f"{suffix} is {tensor.dtype}, wanted {dtype}")
        return tensor


def dequantize(
    quantized: QuantizedTensor, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """Return (codes - zero_point) * scale as [N, K], computed in fp32 and rounded to dtype (that of out)."""
    n, k = quantized.shape
    device = quantized.codes.device
    if out is None:
        # numpy asks for huge pages, without which a fresh matrix costs more to fault in than to compute
        fresh = torch.from_numpy(np.empty(n * k * dtype.itemsize, np.uint8)).view(dtype).view(n, k)
        out = fresh if device.type == "cpu" else torch.empty((n, k), dtype=dtype, device=device)
    groups = quantized.scale.shape[1]
    # on a CPU, rows that stay in cache
    step = max(1, _CHUNK // k) if device.type == "cpu" else n
    for rows in (slice(start, start + step) for start in range(0, n, step)):
        values = out[rows] if out.dtype == torch.float32 else torch.empty_like(out[rows], dtype=torch.float32)
        grouped = values.view(-1, groups, k // groups).copy_(
            quantized.codes[rows].view(-1, groups, k // groups)
        )
        if quantized.zero_point is None:
            grouped -= quantized.scheme.symmetric_zero
        else:
            grouped -= quantized.zero_point[rows, :, None].to(torch.float32)
        grouped *= quantized.scale[rows, :, None].to(torch.float32)
        if values.dtype != out.dtype:
            out[rows] = values
    return out


def _check_padding(words: Tensor, bits: int, count: int) -> None:
    """Raise SourceError if the bits after the last value of a row are not all 0."""
    used = count * bits % 32
    if used and bool(((words[:, -1].to(torch.int64) & 0xFFFFFFFF) >> used).any()):
        raise SourceError(f"the {32 - used} bits that pad a row of {count} values are not 0")


def _codes(words: Tensor, bits: int, count: int) -> Tensor:
    """unpack_rows of words whose padding is 0."""
    _check_padding(words, bits, count)
    return unpack_rows(words, bits, count)


def _compressed_tensors(get: _Parts, scheme: QuantScheme, shape: tuple[int, int]) -> LayerCodes:
    n, k = shape
    words = get("weight_packed", (n, -(-k * scheme.bits // 32)), torch.int32)
    scale = get("weight_scale", (n, scheme.groups(k)))
    stated = get("weight_shape", (2,)).tolist()
    if stated != [n, k]:
        raise SourceError(f"weight_shape holds {stated}, the layer is {[n, k]}")
    zero_point = None
    if not scheme.symmetric:
        # packed along N; codes and zero-points carry the same offset, so it drops out
        packed = get(
            "weight_zero_point",
            (-(-n * scheme.bits // 32), scheme.groups(k)),
            torch.int32,
        )
        zero_point = _codes(packed.T, scheme.bits, n).T.contiguous()
    _check_padding(words, scheme.bits, k)
    return codes_of(PackedTensor(words, scale, zero_point, scheme, k))


def _gptq(get: _Parts, scheme: QuantScheme, shape: tuple[int, int], less: int) -> LayerCodes:
    (n, k), bits, groups = shape, scheme.bits, scheme.groups(shape[1])
    words = get("qweight", (-(-k * bits // 32), n), torch.int32)
    zeros = get("qzeros", (groups, -(-n * bits // 32)), torch.int32)
    scale = get("scales", (groups, n)).T.contiguous()
    _check_padding(words.T, bits, k)
    zero_point = ((_codes(zeros, bits, n).T + less) & scheme.max_code).contiguous()
    if scheme.symmetric and not bool((zero_point == scheme.symmetric_zero).all()):
        raise SourceError(f"qzeros are not all {scheme.symmetric_zero}, though the config says symmetric")
    order = _column_order(get("g_idx", (k,)), k, scheme.width(k)) if "g_idx" in get.tensors else None

    def unpack(rows: slice) -> Tensor:
        codes = unpack_rows(words[:, rows].T, bits, k)
        return codes.contiguous() if order is None else codes[:, order]

    return LayerCodes(shape, scale, None if scheme.symmetric else zero_point, scheme, unpack, order)


def _awq(get: _Parts, scheme: QuantScheme, shape: tuple[int, int]) -> LayerCodes:
    (n, k), groups = shape, scheme.groups(shape[1])
    words = get("qweight", (k, n // 8), torch.int32)
    zeros = get("qzeros", (groups, n // 8), torch.int32)
    scale = get("scales", (groups, n)).T.contiguous()
    zero_point = _awq_columns(zeros, n)
    if scheme.symmetric:
        raise SourceError("AWQ files hold zero-points, the config says symmetric")

    def unpack(rows: slice) -> Tensor:
        start, stop, step = rows.indices(n)
        first, last = start // 8, -(-stop // 8)
        codes = _awq_columns(words[:, first:last], 8 * (last - first))
        return codes[start - 8 * first : stop - 8 * first : step]

    return LayerCodes(shape, scale, zero_point, scheme, unpack)


def _awq_columns(words: Tensor, n: int) -> Tensor:
    """Return uint8 [N, R] from AWQ words int32 [R, N/8]."""
    nibbles = unpack_rows(words, 4, n).view(words.shape[0], -1, 8)
    columns = torch.empty_like(nibbles)
    columns[:, :, list(_AWQ_COLUMNS)] = nibbles
    return columns.view(words.shape[0], n).T.contiguous()


def _column_order(g_idx: Tensor, k: int, width: int) -> Tensor | None:
    """Return None if g_idx is k // width, else the inputs sorted by group; groups must be full."""
    g_idx = g_idx.long()
    counts = torch.bincount(g_idx.clamp(min=0), minlength=k // width)
    if int(g_idx.min()) < 0 or counts.tolist() != [width] * (k // width):
        raise SourceError(f"g_idx does not put {width} inputs in each of {k // width} groups")
    order = torch.sort(g_idx, stable=True).indices
    return None if torch.equal(order, torch.arange(k, device=order.device)) else order

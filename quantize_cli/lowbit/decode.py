"""The second route from files to weights, for proof and for evaluation.

Written from the format descriptions alone, in byte arithmetic; nothing is shared with `lowbit_kernels.layout`
or `checkpoint.formats`, so that a mistake there and a mistake here do not cancel.

`checksum` states what a tensor holds as one exact integer. The pipeline records it for the codes, scales and
zero-points a solver returned, before they are packed; whatever format they were written in, decoding the
files must give the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = 0
    # integer arithmetic wraps at 2^64, on every device
    for chunk_sum in _sums_on_cpu(raw) if raw.device.type == "cpu" else _sums_on_device(raw):
        total = total * 3 + chunk_sum
    return f"{total % (1 << 64):016x}"


def _sums_on_cpu(raw: Tensor) -> Iterator[int]:
    """Weighted sums of whole chunks and of the part, maybe empty, that follows them; bytes end with zeros.

    numpy's dot of integers is three times as fast as torch's product and sum.
    """
    data = raw.numpy()
    words = (np.pad(data, (0, -len(data) % 4)) if len(data) % 4 else data).view(np.int32)
    for start in range(0, len(words) + 1, _CHUNK):
        part = words[start : start + _CHUNK].astype(np.int64)
        yield int(np.dot(part, _WEIGHTS[: len(part)]))


def _sums_on_device(raw: Tensor) -> Iterator[int]:
    """The same, where the tensor is."""
    whole = len(raw) // (4 * _CHUNK) * (4 * _CHUNK)
    rest = torch.nn.functional.pad(raw[whole:], (0, 4 * _CHUNK - (len(raw) - whole))).view(torch.int32)
    weights = torch.from_numpy(_WEIGHTS).to(raw.device)
    for part in (*raw[:whole].view(torch.int32).view(-1, _CHUNK).split(64), rest[None]):
        yield from torch.mul(part, weights).sum(1).tolist()


def file_checksum(path: Path) -> str:
    """Return the checksum of a small file's bytes."""
    return checksum(torch.frombuffer(bytearray(path.read_bytes() or b"\0"), dtype=torch.uint8))


def checksums(quantized: QuantizedTensor) -> dict[str, str]:
    """Return the checksums of codes, scale and (asymmetric grid) zero_point, as the manifest records them."""
    sums = {"codes": checksum(quantized.codes), "scale": checksum(quantized.scale)}
    if quantized.zero_point is not None:
        sums["zero_point"] = checksum(quantized.zero_point.to(torch.float32))
    return sums


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
    # spread each byte over a lane with one byte for every value in it
    per_byte, mask = 8 // bits, 2**bits - 1
    lanes = data.to({2: torch.int16, 4: torch.int32}[per_byte])
    spread = lanes & mask
    for i in range(1, per_byte):
        spread |= ((lanes >> (i * bits)) & mask) << (8 * i)
    return spread.view(torch.uint8)[:, :count]


def decode_packed(packed: PackedTensor) -> QuantizedTensor:
    """Return the codes of words in memory, by this module's arithmetic."""
    codes = unpack_rows(packed.words, packed.scheme.bits, packed.in_features)
    return QuantizedTensor(codes.contiguous(), packed.scale, packed.zero_point, packed.scheme)


def decode_layer(
    format: str, parts: Mapping[str, Tensor], scheme: QuantScheme, shape: tuple[int, int]
) -> tuple[QuantizedTensor, Tensor | None]:
    """Return one layer of a checkpoint and the order of its columns.

    parts: the stored tensors by their suffix in PARTS[format].  shape: (N, K).  The order is None, or for a
    GPTQ layer with activation order the input that each column of the codes belongs to, [K].
    Raises SourceError if a tensor is missing or has not the shape or dtype that the other arguments want.
    """
    read = _Parts(parts)
    if format in ("gptq", "gptq-v2"):
        # the first version stores zero-points less one
        return _gptq(read, scheme, shape, 1 if format == "gptq" else 0)
    return {"compressed-tensors": _compressed_tensors, "awq": _awq}[format](read, scheme, shape), None


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


def dequantize(quantized: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return (codes - zero_point) * scale as [N, K], computed in fp32 and rounded to dtype."""
    n, k = quantized.shape
    groups = quantized.scale.shape[1]
    device = quantized.codes.device
    # numpy asks for huge pages, without which a fresh matrix costs more to fault in than to compute
    fresh = torch.from_numpy(np.empty(n * k * dtype.itemsize, np.uint8)).view(dtype).view(n, k)
    weight = fresh if device.type == "cpu" else torch.empty((n, k), dtype=dtype, device=device)
    # on a CPU, rows that stay in cache
    step = max(1, _CHUNK // k) if weight.device.type == "cpu" else n
    for rows in (slice(start, start + step) for start in range(0, n, step)):
        values = quantized.codes[rows].to(torch.float32).view(-1, groups, k // groups)
        if quantized.zero_point is None:
            values -= quantized.scheme.symmetric_zero
        else:
            values -= quantized.zero_point[rows, :, None].to(torch.float32)
        values *= quantized.scale[rows, :, None].to(torch.float32)
        weight[rows] = values.view(-1, k)
    return weight


def _codes(words: Tensor, bits: int, count: int) -> Tensor:
    """unpack_rows, and SourceError if the bits after the last value of a row are not all 0."""
    used = count * bits % 32
    if used and bool(((words[:, -1].to(torch.int64) & 0xFFFFFFFF) >> used).any()):
        raise SourceError(f"the {32 - used} bits that pad a row of {count} values are not 0")
    return unpack_rows(words, bits, count)


def _compressed_tensors(get: _Parts, scheme: QuantScheme, shape: tuple[int, int]) -> QuantizedTensor:
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
    return QuantizedTensor(_codes(words, scheme.bits, k).contiguous(), scale, zero_point, scheme)


def _gptq(
    get: _Parts, scheme: QuantScheme, shape: tuple[int, int], less: int
) -> tuple[QuantizedTensor, Tensor | None]:
    (n, k), bits, groups = shape, scheme.bits, scheme.groups(shape[1])
    words = get("qweight", (-(-k * bits // 32), n), torch.int32)
    zeros = get("qzeros", (groups, -(-n * bits // 32)), torch.int32)
    scale = get("scales", (groups, n)).T.contiguous()
    codes = _codes(words.T, bits, k).contiguous()
    zero_point = ((_codes(zeros, bits, n).T + less) & scheme.max_code).contiguous()
    if scheme.symmetric and not bool((zero_point == scheme.symmetric_zero).all()):
        raise SourceError(f"qzeros are not all {scheme.symmetric_zero}, though the config says symmetric")
    order = _column_order(get("g_idx", (k,)), k, scheme.width(k)) if "g_idx" in get.tensors else None
    if order is not None:
        codes = codes[:, order].contiguous()
    return QuantizedTensor(codes, scale, None if scheme.symmetric else zero_point, scheme), order


def _awq(get: _Parts, scheme: QuantScheme, shape: tuple[int, int]) -> QuantizedTensor:
    (n, k), groups = shape, scheme.groups(shape[1])
    words = get("qweight", (k, n // 8), torch.int32)
    zeros = get("qzeros", (groups, n // 8), torch.int32)
    scale = get("scales", (groups, n)).T.contiguous()
    zero_point = _awq_columns(zeros, n)
    if scheme.symmetric:
        raise SourceError("AWQ files hold zero-points, the config says symmetric")
    return QuantizedTensor(_awq_columns(words, n), scale, zero_point, scheme)


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
    return None if torch.equal(order, torch.arange(k)) else order

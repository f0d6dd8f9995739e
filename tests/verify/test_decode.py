"""The second decode route against bit-by-bit loops in plain Python and against compressed-tensors itself."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from lowbit import decode
from lowbit.errors import SourceError
from lowbit.scheme import QuantizedTensor, QuantScheme

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def stream_words(values: list[int], bits: int) -> list[int]:
    """Signed 32-bit words of a bit stream, one Python integer at a time."""
    whole = sum(v << (i * bits) for i, v in enumerate(values))
    count = -(-len(values) * bits // 32)
    unsigned = [(whole >> (32 * i)) & 0xFFFFFFFF for i in range(count)]
    return [w - (1 << 32) if w >> 31 else w for w in unsigned]


def pack_loop(values: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.tensor([stream_words(row, bits) for row in values.tolist()], dtype=torch.int32)


def random_layer(bits: int, n: int, k: int, symmetric: bool, group: int = 32) -> QuantizedTensor:
    g = torch.Generator().manual_seed(bits * 1000 + n)
    scheme = QuantScheme(bits, group, symmetric)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=g)
    scale = (torch.rand(n, k // group, generator=g) + 0.5).half()
    zero = None if symmetric else torch.randint(0, 2**bits, (n, k // group), dtype=torch.uint8, generator=g)
    return QuantizedTensor(codes, scale, zero, scheme)


def write(format: str, q: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The stored tensors of a layer, by loops."""
    bits, (n, k) = q.scheme.bits, q.shape
    zero = (
        torch.full_like(q.scale, q.scheme.symmetric_zero).int()
        if q.zero_point is None
        else q.zero_point.int()
    )
    if format == "compressed-tensors":
        parts = {
            "weight_packed": pack_loop(q.codes, bits),
            "weight_scale": q.scale,
            "weight_shape": torch.tensor([n, k]),
        }
        if q.zero_point is not None:
            parts["weight_zero_point"] = pack_loop(zero.T, bits).T.contiguous()
        return parts
    if format.startswith("gptq"):
        return {
            "qweight": pack_loop(q.codes, bits).T.contiguous(),
            "qzeros": pack_loop((zero.T - (1 if format == "gptq" else 0)) % 2**bits, bits),
            "scales": q.scale.T.contiguous(),
            "g_idx": torch.arange(k, dtype=torch.int32) // q.scheme.group_size,
        }
    shuffled = [[8 * c + j for j in AWQ_COLUMNS] for c in range(n // 8)]
    flat = [j for eight in shuffled for j in eight]
    return {
        "qweight": pack_loop(q.codes.T[:, flat], 4),
        "qzeros": pack_loop(zero.T[:, flat], 4),
        "scales": q.scale.T.contiguous(),
    }


CASES = [
    ("compressed-tensors", bits, n, 96, symmetric)
    for bits in (2, 3, 4, 8)
    for n, symmetric in ((5, True), (12, False), (33, False))
]
CASES += [
    (format, bits, 32, 96, symmetric)
    for format in ("gptq", "gptq-v2")
    for bits in (2, 3, 4, 8)
    for symmetric in (True, False)
]
CASES += [("awq", 4, 24, 96, False)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decoding_gives_the_codes_that_loops_wrote(case):
    format, bits, n, k, symmetric = case
    q = random_layer(bits, n, k, symmetric)
    if format == "gptq" and q.zero_point is not None:
        q.zero_point.clamp_(min=1)
    parts = write(format, q)
    got, order = decode.decode_layer(format, parts, q.scheme, (n, k))
    assert order is None
    assert torch.equal(got.codes, q.codes)
    assert torch.equal(got.scale, q.scale)
    assert (got.zero_point is None) == symmetric
    assert symmetric or torch.equal(got.zero_point, q.zero_point)
    assert decode.checksums(got) == decode.checksums(q)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rows_are_the_words_of_compressed_tensors(bits):
    q = random_layer(bits, 7, 96, True)
    words = pack_to_int32((q.codes.int() - q.scheme.symmetric_zero).to(torch.int8), bits)
    assert torch.equal(decode.unpack_rows(words, bits, 96), q.codes)


def test_activation_order_is_undone():
    q = random_layer(4, 8, 96, True)
    parts = write("gptq", q)
    shuffle = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    parts["g_idx"] = parts["g_idx"][shuffle]
    parts["qweight"] = pack_loop(q.codes[:, shuffle], 4).T.contiguous()
    got, order = decode.decode_layer("gptq", parts, q.scheme, (8, 96))
    restored = torch.empty(8, 96)
    restored[:, order] = decode.dequantize(got)
    naive = torch.empty(8, 96)
    for j in range(96):
        naive[:, j] = (q.codes[:, shuffle[j]].float() - 8) * q.scale[:, parts["g_idx"][j]].float()
    assert torch.equal(restored, naive)


def test_a_group_of_the_wrong_size_is_named():
    q = random_layer(4, 8, 96, True)
    parts = write("compressed-tensors", q)
    with pytest.raises(SourceError, match=r"weight_scale has shape \[8, 3\].*\[8, 1\]"):
        decode.decode_layer("compressed-tensors", parts, QuantScheme(4, -1), (8, 96))


@pytest.mark.parametrize("symmetric", [True, False])
def test_dequantize_matches_float64(symmetric):
    q = random_layer(4, 5, 96, symmetric)
    zero = np.full((5, 3), 8.0) if symmetric else q.zero_point.double().numpy()
    want = np.empty((5, 96))
    for row in range(5):
        for j in range(96):
            want[row, j] = (int(q.codes[row, j]) - zero[row, j // 32]) * float(q.scale[row, j // 32])
    # the product of a whole number below 2^5 and an 11-bit scale is exact in fp32
    assert np.array_equal(decode.dequantize(q).double().numpy(), want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_checksum_sees_every_bit_and_every_exchange(dtype):
    raw = torch.randint(0, 256, (3 * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    before = decode.checksum(raw.view(dtype))
    for bit in range(8 * len(raw)):
        flipped = raw.clone()
        flipped[bit // 8] ^= 1 << (bit % 8)
        assert decode.checksum(flipped.view(dtype)) != before
    swapped = raw.view(6, 4)[[1, 0, 2, 3, 4, 5]].reshape(-1)
    assert decode.checksum(swapped.view(dtype)) != before
    assert decode.checksum(raw.view(dtype).clone()) == before


def test_checksum_takes_any_size():
    long = torch.zeros((1 << 20) + 5, dtype=torch.uint8)
    sums = {decode.checksum(long)}
    for place in (0, 1 << 19, (1 << 20) + 4):
        changed = long.clone()
        changed[place] = 1
        sums.add(decode.checksum(changed))
    assert len(sums) == 4
    assert decode.checksum(torch.empty(0)) == "0" * 16


@pytest.mark.parametrize(
    "pieces", [(0,), (1,), (4,), (1001,), (1 << 20,), ((1 << 20) + 1,), (3 << 20, 17), (8, 4, 3)]
)
def test_checksum_is_that_of_a_loop_whatever_the_pieces(pieces):
    count = sum(pieces)
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    sums = decode.Checksum()
    for piece in raw.split(list(pieces)):
        sums.update(piece)
    words = np.frombuffer(bytes(raw.tolist()) + bytes(-count % 4), np.int32).tolist()
    total = 0
    for start in range(0, len(words) + 1, 1 << 18):
        chunk = words[start : start + (1 << 18)]
        total = total * 3 + sum(
            word * (((i + 1) * 0x9E3779B1 % (1 << 31)) | 1) for i, word in enumerate(chunk)
        )
    assert sums.result() == decode.checksum(raw) == f"{total % (1 << 64):016x}"
    # as a GPU sums them
    whole = np.frombuffer(raw.numpy(), np.int32, count // 4)[: count // 4 >> 18 << 18].copy()
    assert list(decode._chunk_sums(torch.from_numpy(whole))) == [
        decode._weighted_sum(torch.from_numpy(chunk), 0) for chunk in whole.reshape(-1, 1 << 18)
    ]


@pytest.mark.parametrize("case", [case for case in CASES if case[2] >= 24], ids=str)
def test_rows_are_those_of_the_whole(case):
    format, bits, n, k, symmetric = case
    q = random_layer(bits, n, k, symmetric)
    if format == "gptq" and q.zero_point is not None:
        q.zero_point.clamp_(min=1)
    layer = decode.open_layer(format, write(format, q), q.scheme, (n, k))
    assert list(layer.chunks(8 * k)) == [slice(at, min(at + 8, n)) for at in range(0, n, 8)]
    for rows in (slice(0, 8), slice(8, 21), slice(3, None, 7)):
        part = layer.rows(rows)
        assert torch.equal(part.codes, q.codes[rows])
        assert torch.equal(decode.dequantize(part), decode.dequantize(q)[rows])

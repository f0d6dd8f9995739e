"""Bit order of the stored words: a wrong one gives a checkpoint that every loader reads as noise."""

from __future__ import annotations

import kernel_truth as truth
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit_kernels import layout
from lowbit_kernels.layout import PackLayout, pack_words, unpack_words

# Written out by hand from the definition: code k at bit k · bits, lowest bits first.
GOLDEN = {
    "4 bits, one word": (4, [1, 2, 3, 4, 5, 6, 7, 8], [0x87654321]),
    "4 bits, ragged": (4, [1, 2, 3], [0x00000321]),
    "4 bits, sign bit": (4, [0] * 7 + [15, 9], [0xF0000000, 0x00000009]),
    "2 bits": (2, [0, 1, 2, 3] * 4, [0xE4E4E4E4]),
    "8 bits": (8, [0x01, 0x80, 0xFF, 0x10], [0x10FF8001]),
    # 0..7 at three bits each is 0xFAC688; four of those fill three words
    "3 bits, 0..7 cycling": (3, list(range(8)) * 4, [0x88FAC688, 0xC688FAC6, 0xFAC688FA]),
    # code 10 owns bits 30..32, code 21 bits 63..65
    "3 bits, code 10 straddles": (3, [0] * 10 + [0b101], [0x40000000, 0x00000001]),
    "3 bits, code 21 straddles": (3, [0] * 21 + [0b110], [0, 0, 0b11]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_words(name):
    bits, codes, words = GOLDEN[name]
    packed = pack_words(torch.tensor([codes], dtype=torch.uint8), bits)
    assert [word & 0xFFFFFFFF for word in packed[0].tolist()] == words
    assert unpack_words(packed, bits, len(codes))[0].tolist() == codes


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (2, 33), (5, 96), (7, 200), (300, 320)], ids=str)
def test_words_are_one_integer_per_row(bits, shape):
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    words = pack_words(codes, bits)
    assert torch.equal(words, truth.pack(codes, bits))
    assert torch.equal(unpack_words(words, bits, shape[1]), codes)


@settings(max_examples=60, deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), data=st.data())
def test_any_codes_survive(bits, data):
    row = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=130))
    words = pack_words(torch.tensor([row], dtype=torch.uint8), bits)
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == truth.pack_row(row, bits)
    assert unpack_words(words, bits, len(row))[0].tolist() == row


def test_swapped_nibbles_are_caught():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 2)
    swapped = codes.view(2, -1, 2).flip(-1).reshape(2, -1)
    assert not torch.equal(pack_words(swapped, 4), truth.pack(codes, 4))


def test_strided_codes_pack_like_their_copy():
    codes = torch.randint(0, 16, (64, 40), dtype=torch.uint8)
    assert torch.equal(pack_words(codes.T, 4), pack_words(codes.T.contiguous(), 4))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_column_as_single_row(bits):
    """[1, K] with both strides 1 is contiguous to torch, and not viewable as a wider type."""
    codes = (torch.arange(64) % 2**bits).to(torch.uint8)[:, None].T
    words = pack_words(codes, bits)
    assert torch.equal(words, pack_words(codes.clone(memory_format=torch.contiguous_format), bits))
    assert torch.equal(unpack_words(words[0][:, None].T, bits, 64), codes)


def test_chunks_do_not_show(monkeypatch):
    monkeypatch.setattr(layout, "_CPU_CHUNK", 640 // torch.get_num_threads())
    codes = torch.randint(0, 8, (101, 64), dtype=torch.uint8)
    words = pack_words(codes, 3)
    assert torch.equal(words, truth.pack(codes, 3))
    assert torch.equal(unpack_words(words, 3, 64), codes)


def test_wrong_inputs_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"codes must be \[N, K\] uint8, got \[2, 8\] torch.int32"):
        pack_words(torch.zeros(2, 8, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match=r"9 codes of 4 bits need \[N, 2\] int32 words, got \[1, 1\]"):
        unpack_words(torch.zeros(1, 1, dtype=torch.int32), 4, 9)
    with pytest.raises(ValueError, match="bits 5 is not supported"):
        PackLayout(5)

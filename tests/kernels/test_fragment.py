"""The kernels on fragment order against float64: wrong lanes, groups, tails, partial sums are silent faults.

The truth never sees a word: it starts from the codes, and the stored words come from the integer packer.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace

import kernel_truth as truth
import pytest
import torch

from lowbit_kernels import fragment
from lowbit_kernels.dispatch import (
    VARIANTS,
    GemmWeight,
    KernelConfig,
    _launch_decode,
    choose,
    concatenate,
    gated_matmul,
    matmul,
    prepare,
    problem_of,
    refusals,
)
from lowbit_kernels.layout import FragmentLayout, fragment_words, unfragment_words
from lowbit_kernels.measure import time_graph

DECODE = KernelConfig("decode", 8, 32, 128, num_warps=1)
GEMM = KernelConfig("gemm", 16, 64, 32)
DENSE = KernelConfig("dense", 0, 64, 32)


@dataclass(frozen=True)
class Case:
    """m, n, k, group_size; zero: dtype of the zero-points or None; config: what launches it."""

    m: int
    n: int
    k: int
    group_size: int
    config: KernelConfig
    bits: int = 4
    zero: torch.dtype | None = None
    bias: bool = False

    def __str__(self) -> str:
        zero = "sym" if self.zero is None else str(self.zero).removeprefix("torch.")
        c = self.config
        how = f"{c.variant}{c.block_m}x{c.block_n}x{c.block_k}-split{c.split_k}-slices{c.slices}"
        how += "".join(f"-{name}" for name in ("depth", "x_wide", "scale_weights") if getattr(c, name))
        return f"{self.bits}b-{self.m}x{self.n}x{self.k}-g{self.group_size}-{zero}-{how}"


def decode(**changes) -> KernelConfig:
    return replace(DECODE, **changes)


def gemm(**changes) -> KernelConfig:
    return replace(GEMM, **changes)


CASES = [
    # every width in every variant; groups of 32 in a ragged K; odd M and N
    *(Case(5, 33, 160, 32, decode(block_k=32), bits) for bits in (2, 3, 4, 8)),
    *(Case(5, 33, 160, 32, gemm(), bits, torch.uint8) for bits in (2, 3, 4, 8)),
    *(Case(5, 33, 160, 32, DENSE, bits, torch.uint8, bias=True) for bits in (2, 3, 4, 8)),
    # zero-points whole and fractional, bias, slices and split K that do not divide the tiles
    *(Case(3, 20, 640, 128, decode(slices=2, split_k=2), bits, torch.uint8, True) for bits in (2, 4, 8)),
    *(Case(2, 20, 640, 128, decode(split_k=3), bits, torch.float16, True) for bits in (3, 4)),
    Case(2, 20, 128, 64, decode(block_k=64), 4, torch.float32),
    # one group a row, rows that end within a tile
    *(Case(2, 9, 200, 200, decode(slices=2, depth=1), bits) for bits in (2, 3, 4, 8)),
    Case(1, 1, 33, 33, decode(), 4, torch.uint8),
    # all of K in one step; more slices than tiles; weights a step ahead, with and without a last partial step
    Case(1, 40, 1024, 128, decode(block_n=16, slices=8)),
    Case(1, 40, 256, 128, decode(block_n=16, slices=16)),
    Case(4, 40, 1024, 256, decode(slices=2, depth=1), 4, torch.uint8),
    Case(4, 40, 640, 128, decode(slices=2, depth=1)),
    # two steps ahead: whole rounds, a last round past the end, all in one round of two tiles a warp
    Case(3, 40, 1024, 128, decode(slices=2, depth=2)),
    Case(3, 40, 896, 128, decode(slices=2, depth=2, split_k=2), 4, torch.uint8),
    Case(3, 40, 1024, 128, decode(slices=4, depth=2, num_warps=2)),
    # several groups a tile, ahead, by sectors, and for 16 tokens
    Case(3, 40, 512, 32, decode(block_k=32, slices=2, depth=1, x_wide=True), 4, torch.float16),
    Case(3, 40, 256, 64, decode(block_k=64, slices=2, depth=1), 2),
    Case(13, 40, 256, 32, decode(block_m=16, block_k=32, slices=2, x_wide=True), 8, torch.uint8),
    # x by sectors, 16 tokens, and more tokens than one tile
    Case(8, 40, 512, 128, decode(slices=2, x_wide=True), 4, torch.uint8),
    Case(7, 33, 160, 32, decode(block_k=32, x_wide=True)),
    Case(16, 40, 512, 128, decode(block_m=16, slices=4, x_wide=True)),
    Case(19, 40, 256, 128, decode(split_k=2)),
    # gemm: scales on the weights or on the product, split K, more rows than one tile
    Case(18, 70, 256, 128, gemm(block_k=64, split_k=2), 4, torch.uint8, True),
    Case(18, 70, 256, 128, gemm(block_k=128, scale_weights=True), 4, torch.float16),
    Case(40, 130, 256, 64, gemm(block_m=32, block_n=128, block_k=64, split_k=3), 2),
    # a last tile that goes past the rows that there are
    Case(5, 300, 256, 128, gemm(block_n=256, block_k=128), 4, torch.uint8),
    Case(5, 300, 128, 64, gemm(block_n=256, block_k=128, scale_weights=True)),
    # zero-points of x's own type, whose product is scaled at the end
    *(Case(18, 300, 256, 128, gemm(block_n=256, block_k=128), bits, torch.float16) for bits in (2, 3, 4, 8)),
    Case(5, 70, 384, 128, gemm(block_k=128, split_k=3), 4, torch.float16, True),
    Case(5, 70, 256, 128, gemm(block_k=128), 4, torch.float32),
    # more slices than are added at a time
    Case(5, 33, 1408, 128, gemm(block_k=128, split_k=11), 4, torch.uint8),
    # several groups a block, all widths, with zero-points of both kinds and without
    *(Case(5, 70, 288, 32, gemm(block_k=128, scale_weights=True, split_k=2), bits) for bits in (2, 3, 4, 8)),
    Case(18, 70, 256, 32, gemm(block_k=128, scale_weights=True), 4, torch.uint8, True),
    Case(18, 130, 192, 64, gemm(block_n=128, block_k=128, scale_weights=True), 3, torch.float16),
    Case(18, 70, 256, 32, gemm(block_k=64, scale_weights=True), 4, torch.uint8),
    # two groups a block with a product each, in the last block of a slice and past a ragged K as well
    *(Case(5, 70, 448, 64, gemm(block_k=128, split_k=2), bits) for bits in (3, 4, 8)),
    Case(18, 70, 192, 64, gemm(block_k=128), 4, torch.uint8, True),
    Case(5, 300, 256, 64, gemm(block_n=256, block_k=128), 4, torch.float16),
    Case(5, 70, 256, 64, gemm(block_k=128), 4, torch.float32),
    Case(40, 130, 200, 200, gemm(block_m=32, block_n=128, block_k=64, scale_weights=True), 8),
]

# As in test_wna16: one unit u of the output's dtype in RMS, five at most. Scaling the weights, and writing
# them out, rounds each of them once more, which adds as much again.
RMS = {torch.float16: 2**-11, torch.bfloat16: 2**-8}


@dataclass(frozen=True)
class Tensors:
    x: torch.Tensor
    codes: torch.Tensor
    weight: GemmWeight
    bias: torch.Tensor | None
    truth: torch.Tensor


def make_problem(case: Case, device: torch.device | str = "cpu", act: torch.dtype = torch.float16) -> Tensors:
    """Inputs on device and the float64 result on the CPU."""
    generator = torch.Generator().manual_seed(case.k + case.bits)
    codes = torch.randint(0, 2**case.bits, (case.n, case.k), dtype=torch.uint8, generator=generator)
    groups = case.k // case.group_size
    scale = ((torch.rand(case.n, groups, generator=generator) + 0.5) * 0.02).to(act)
    zero = None
    if case.zero is not None:
        zero = (torch.rand(case.n, groups, generator=generator) * (2**case.bits - 1)).to(case.zero)
    bias = torch.randn(case.n, generator=generator).to(act) if case.bias else None
    x = torch.randn(case.m, case.k, generator=generator).to(act)
    expected = truth.matmul(x, codes, scale, zero, case.bits, bias)

    def put(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    weight = GemmWeight(
        put(truth.pack(codes, case.bits)), put(scale), put(zero), case.bits, case.group_size, case.k
    )
    return Tensors(put(x), codes, weight, put(bias), expected)


def assert_close(y: torch.Tensor, expected: torch.Tensor, rounded_weights: bool = False) -> None:
    limit = RMS[y.dtype] * (2 if rounded_weights else 1)
    error, rms = y.cpu().double() - expected, expected.square().mean().sqrt()
    assert error.square().mean().sqrt() <= limit * rms
    assert error.abs().max() <= 5 * limit * rms


def rounds_weights(config: KernelConfig) -> bool:
    return config.scale_weights or config.variant in ("hopper", "dense")


def launch(problem: Tensors, weight, config: KernelConfig) -> torch.Tensor:
    """Run one variant whatever its rule says of the problem, into a poisoned output."""
    shape, x = (problem.x.shape[0], weight.out_features), problem.x
    out = torch.full(shape, float("nan"), dtype=x.dtype, device=x.device)
    VARIANTS[config.variant].launch(problem.x, weight, problem.bias, out, config)
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case, device):
    problem = make_problem(case, device)
    y = launch(problem, prepare(problem.weight), case.config)
    assert_close(y, problem.truth, rounds_weights(case.config))


GATED = [
    Case(1, 64, 512, 128, decode(block_n=16, slices=2, num_warps=2, depth=1)),
    Case(3, 96, 256, 64, decode(block_k=64, x_wide=True), 4, torch.uint8, bias=True),
    Case(9, 80, 384, 128, decode(block_n=64, slices=2), 8),
    Case(2, 48, 160, 32, decode(block_k=32, block_n=16), 3, torch.float16, bias=True),
]


def gated_truth(y: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, float64, of columns that are eight of gate and eight of up in turn."""
    columns = []
    for first in range(0, y.shape[1], 16):
        for gate in range(first, first + 8):
            columns.append(y[:, gate] * torch.sigmoid(y[:, gate]) * y[:, gate + 8])
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("case", GATED, ids=str)
def test_the_gate_of_a_product_matches_float64(case, device):
    problem = make_problem(case, device)
    weight, config = prepare(problem.weight), case.config
    out = torch.full((case.m, case.n // 2), float("nan"), dtype=torch.float16, device=device)
    _launch_decode(problem.x, weight, problem.bias, out, config, gated=True)
    expected = gated_truth(problem.truth)
    # the only rounding is that of the output
    assert (out.cpu().double() - expected).norm() <= RMS[torch.float16] * expected.norm()
    # a planted fault: gate and up changed
    assert (out.cpu().double() - gated_truth(problem.truth.roll(8, dims=1))).norm() > 0.1 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("act", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 3, 8, 16, 40])
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (28672, 4096), (4096, 8192)])
def test_gated_products_match_float64(m, n, k, act):
    """Whatever choose() takes for them: the gate within decode, or after a product."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU, and the interpreter's bfloat16 dot product is wrong")
    problem = make_problem(Case(m, n, k, 128, DECODE, bias=True), "cuda", act)
    for weight in (prepare(problem.weight), problem.weight):
        y = gated_matmul(problem.x, weight, problem.bias)
        error = (y.cpu().double() - gated_truth(problem.truth)).norm()
        # where gate and up are rounded before they meet, and silu(gate) as well
        assert error <= 4 * RMS[act] * gated_truth(problem.truth).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [3, 8, 16, 32, 33, 128, 300])
@pytest.mark.parametrize(
    ("bits", "group_size", "zero", "act"),
    [
        (4, 128, None, torch.float16),
        (4, 32, torch.float16, torch.float16),
        (4, 64, torch.uint8, torch.bfloat16),
        (2, 32, None, torch.bfloat16),
        (4, 128, None, torch.bfloat16),
        (4, 128, torch.bfloat16, torch.bfloat16),
        (8, 128, torch.float16, torch.float16),
    ],
)
def test_every_candidate_matches_float64(m, bits, group_size, zero, act):
    if not torch.cuda.is_available():
        pytest.skip("no GPU, and the interpreter's bfloat16 dot product is wrong")
    case = Case(m, 1000, 2048 + group_size, group_size, DECODE, bits, zero, bias=True)
    problem = make_problem(case, "cuda", act)
    weight = prepare(problem.weight)
    posed = problem_of(problem.x, weight)
    for name, reason in refusals(posed).items():
        for config in VARIANTS[name].candidates(posed) if reason is None else ():
            assert_close(launch(problem, weight, config), problem.truth, rounds_weights(config))


# One row and one input each: word, lane and bit by hand from FragmentLayout's docstring.
GOLDEN = [
    # bits, row, input -> (r, chunk, lane, word), bit before the rotation
    (4, 0, 0, (0, 0, 0, 0), 0),
    (4, 0, 1, (0, 0, 0, 0), 16),
    (4, 0, 8, (0, 0, 0, 0), 8),
    (4, 8, 9, (0, 0, 0, 0), 28),
    (4, 5, 6, (0, 0, 23, 0), 0),
    (4, 17, 16, (1, 0, 4, 1), 0),
    (4, 3, 127, (0, 1, 15, 3), 24),
    (8, 0, 8, (0, 0, 0, 1), 0),
    (8, 15, 37, (0, 1, 30, 0), 24),
    (2, 1, 24, (0, 0, 4, 0), 12),
    (2, 8, 127, (0, 0, 3, 3), 30),
    (3, 0, 9, (0, 0, 0, 0), 24),
]


@pytest.mark.parametrize(("bits", "row", "column", "place", "bit"), GOLDEN)
def test_a_code_sits_where_the_layout_says(bits, row, column, place, bit):
    codes = torch.zeros(20, 128, dtype=torch.uint8)
    codes[row, column] = 2**bits - 1
    words = fragment_words(codes, bits)
    assert words.count_nonzero() == 1
    field = (2**bits - 1) << bit
    rotated = (field << 2 | field >> 30) & 0xFFFFFFFF
    assert words[place].item() & 0xFFFFFFFF == rotated


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_kernel_and_torch_agree_on_the_words(bits, device):
    codes = torch.randint(0, 2**bits, (37, 200), dtype=torch.uint8)
    words = fragment_words(codes, bits)
    layout = FragmentLayout(bits, 37, 200)
    assert words.shape == layout.shape
    assert torch.equal(unfragment_words(words, layout), codes)
    stored = truth.pack(codes, bits).to(device)
    repacked = fragment.repack(stored, torch.ones(37, 1).half().to(device), None, bits, 200, 200)
    assert torch.equal(repacked.words.cpu(), words)


@pytest.mark.parametrize("order", ["row", "fragment"])
@pytest.mark.parametrize("zero", [None, torch.uint8], ids=str)
def test_rows_below_each_other_are_the_weight_of_all_rows(order, zero, device):
    parts = [make_problem(Case(1, n, 200, 40, DECODE, 4, zero), device).weight for n in (32, 144, 7)]
    if order == "fragment":
        parts = [make_problem(Case(1, n, 192, 64, DECODE, 4, zero), device).weight for n in (32, 144, 7)]
    whole = replace(
        parts[0],
        words=torch.cat([part.words for part in parts]),
        scale=torch.cat([part.scale for part in parts]),
        zero_point=None if zero is None else torch.cat([part.zero_point for part in parts]),
    )
    found, wanted = concatenate([prepare(part) for part in parts]), prepare(whole)
    assert type(found) is type(wanted)
    assert found.out_features == 183
    for name in ("words", "scale") if zero is None else ("words", "scale", "zero_point"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


def test_rows_of_unlike_weights_are_not_put_together():
    part = make_problem(Case(1, 24, 128, 64, DECODE)).weight
    with pytest.raises(ValueError, match="multiples of 16"):
        concatenate([prepare(part), prepare(part)])
    with pytest.raises(ValueError, match="unlike"):
        concatenate([part, make_problem(Case(1, 24, 128, 32, DECODE)).weight])


def test_words_of_another_layout_are_refused():
    with pytest.raises(ValueError, match="wanted"):
        unfragment_words(torch.zeros(8, 1, 32, 4, dtype=torch.int32), FragmentLayout(4, 20, 128))


def test_groups_that_cross_a_tile_stay_in_stored_order():
    weight = GemmWeight(torch.zeros(4, 24, dtype=torch.int32), torch.ones(4, 2).half(), None, 4, 96, 192)
    assert prepare(weight) is weight
    assert "96" in (fragment.refuses(96, 192) or "")
    with pytest.raises(ValueError, match="96"):
        fragment.repack(weight.words, weight.scale, None, 4, 96, 192)


def swap_rows(weight):
    return replace(weight, words=weight.words.roll(8, dims=2))


def swap_halves(weight):
    return replace(weight, words=weight.words >> 16 & 0xFFFF | weight.words << 16)


def next_group(weight):
    return replace(weight, scale=weight.scale.roll(1, dims=0))


def zero_off_by_one(weight):
    return replace(weight, zero_point=weight.zero_point + 1)


def one_code(weight):
    words = weight.words.clone()
    words[0, 0, 0, 0] ^= 1 << 5
    return replace(weight, words=words)


@pytest.mark.parametrize("config", [decode(slices=2), gemm(block_k=64)], ids=["decode", "gemm"])
@pytest.mark.parametrize(
    "fault", [swap_rows, swap_halves, next_group, zero_off_by_one, one_code], ids=lambda f: f.__name__
)
def test_faults_are_caught(fault, config):
    case = Case(5, 33, 256, 128, config, 4, torch.uint8)
    problem = make_problem(case)
    with pytest.raises(AssertionError):
        assert_close(launch(problem, fault(prepare(problem.weight)), config), problem.truth)


def test_strided_x_odd_offsets_and_strided_out(device):
    case = Case(6, 20, 128, 64, decode(block_k=64))
    problem = make_problem(case, device)
    weight = prepare(problem.weight)
    transposed = problem.x.T.contiguous().T
    assert not transposed.is_contiguous()
    shifted = torch.empty(6 * 128 + 1, dtype=torch.float16, device=device)[1:].view(6, 128).copy_(problem.x)
    wide = torch.zeros(6, 130, dtype=torch.float16, device=device)
    wide[:, 1:129] = problem.x
    for x in (transposed, shifted, wide[:, 1:129]):
        assert_close(matmul(x, weight), problem.truth)
    out = torch.full((6, 25), float("nan"), dtype=torch.float16, device=device)
    matmul(problem.x, weight, out=out[:, :20])
    assert_close(out[:, :20], problem.truth)
    assert out[:, 20:].isnan().all()


def test_rows_of_x_that_overlap_are_copied(device):
    problem = make_problem(Case(6, 20, 128, 64, DECODE), device)
    weight = prepare(problem.weight)
    repeated = problem.x[:1].expand(6, -1)
    assert_close(matmul(repeated, weight), problem.truth[:1].expand(6, -1))
    # TMA is made for rows that do not
    for x in (repeated, problem.x.reshape(-1).as_strided((6, 128), (8, 1))):
        rows = fragment.padded_x(x, 128)
        assert rows.stride() == (128, 1)
        assert torch.equal(rows, x)


def test_no_tokens_and_float32_activations(device):
    problem = make_problem(Case(3, 20, 128, 64, DECODE), device)
    weight = prepare(problem.weight)
    assert matmul(problem.x[:0], weight).shape == (0, 20)
    y = matmul(problem.x.float(), weight)
    assert y.dtype == torch.float32
    error = (y.cpu().double() - problem.truth).norm() / problem.truth.norm()
    assert error < 1e-5
    assert choose(problem_of(problem.x.float(), weight)).variant == "dense"


@pytest.mark.parametrize("config", [decode(split_k=4), gemm(block_k=64, split_k=4)], ids=["decode", "gemm"])
def test_same_bits_every_time(config, device):
    problem = make_problem(Case(5, 40, 512, 128, config), device)
    weight = prepare(problem.weight)
    first = launch(problem, weight, config)
    for _ in range(3):
        assert torch.equal(first, launch(problem, weight, config))


def on_gpu(config):
    """A problem on the GPU, its weight as kernels read it, and what config makes of them."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    problem = make_problem(Case(5, 4096, 2048, 128, config), "cuda")
    weight = prepare(problem.weight)
    return problem, weight, launch(problem, weight, config)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [decode(split_k=4), gemm(block_k=64, split_k=4)], ids=["decode", "gemm"])
def test_split_k_under_a_graph_and_two_streams(config):
    problem, weight, expected = on_gpu(config)
    out = torch.empty_like(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        VARIANTS[config.variant].launch(problem.x, weight, None, out, config)
    other = torch.cuda.Stream()
    for _ in range(50):
        out.fill_(float("nan"))
        beside = torch.full_like(expected, float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(other):
            VARIANTS[config.variant].launch(problem.x, weight, None, beside, config)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        assert torch.equal(beside, expected)


@pytest.mark.gpu
def test_timing_gives_counters_back():
    config = decode(split_k=4)
    problem, weight, _ = on_gpu(config)
    before = {device: counters.numel() for device, counters in fragment._unused_counters.items()}
    time_graph(lambda i: launch(problem, weight, config), 2)
    assert {device: counters.numel() for device, counters in fragment._unused_counters.items()} == before


@pytest.fixture
def streams(monkeypatch):
    """fragment's counters as on a GPU of 3 regions, whose current stream and capture the test sets."""
    now = SimpleNamespace(cuda_stream=7, capture=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capture > 0)
    monkeypatch.setattr(fragment, "_capture_of", lambda stream: now.capture)
    block = torch.zeros(3 * fragment._REGION, dtype=torch.int32)
    monkeypatch.setattr(fragment, "_unused_counters", {None: block})
    monkeypatch.setattr(fragment, "_regions", {})
    now.block = block
    return now


def test_launches_share_counters_only_where_they_are_ordered(streams):
    def first_of(stream: int, capture: int, count: int = 100) -> int:
        streams.cuda_stream, streams.capture = stream, capture
        counters = fragment._counters(torch.device("cpu"), count)
        assert counters.numel() == count
        assert not counters.any()
        return (counters.data_ptr() - streams.block.data_ptr()) // 4

    # one stream; the same stream in a capture; the next capture of it
    assert [first_of(7, 0), first_of(7, 1), first_of(7, 0), first_of(7, 1)] == [0, 4096, 0, 4096]
    assert first_of(7, 2, 4096) == 8192
    # used up: zeros of their own, which a graph clears, and which a stream keeps
    within = range(streams.block.numel())
    assert first_of(8, 2) not in within
    assert len({first_of(8, 0), first_of(8, 0, 50)} - {*within}) == 1
    assert first_of(7, 0, 5000) not in within


def test_lent_counters_are_those_of_one_thread(streams, monkeypatch):
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **rest: torch.full(shape, 0, **rest))
    streams.synchronize = lambda: None
    outside = fragment._counters(torch.device("cpu"), 8)
    with fragment.lent_counters():
        lent = [fragment._counters(torch.device("cpu"), 8).data_ptr() for streams.capture in (1, 2)]
        streams.capture = 0
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(fragment._counters, torch.device("cpu"), 8).result()
    assert lent[0] == lent[1] != outside.data_ptr()
    assert other.data_ptr() == outside.data_ptr() == fragment._counters(torch.device("cpu"), 8).data_ptr()
    assert fragment._unused_counters[None].numel() == 2 * fragment._REGION


@pytest.mark.gpu
def test_launches_of_a_graph_share_counters():
    config = decode(split_k=4)
    problem, weight, expected = on_gpu(config)
    for _ in range(2):
        before = fragment._unused_counters[0].numel()
        outs = [torch.full_like(expected, float("nan")) for _ in range(20)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for out in outs:
                VARIANTS[config.variant].launch(problem.x, weight, None, out, config)
        assert fragment._unused_counters[0].numel() == before - fragment._REGION
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs)

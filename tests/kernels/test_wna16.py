"""The GEMM on stored words against float64: wrong tails, groups, zero-points and bit order are silent faults.

The truth unpacks nothing: it starts from the codes, and the words come from the integer packer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import kernel_truth as truth
import pytest
import torch

from lowbit_kernels.dispatch import VARIANTS, GemmWeight, KernelConfig, matmul, problem_of
from lowbit_kernels.reference import matmul_reference
from lowbit_kernels.wna16 import block_within_group


@dataclass(frozen=True)
class Case:
    """m, n, k, group_size; zero: dtype of the zero-points or None; split_k; bias; act: dtype of x."""

    m: int
    n: int
    k: int
    group_size: int
    bits: int = 4
    zero: torch.dtype | None = None
    split_k: int = 1
    bias: bool = False
    act: torch.dtype = torch.float16

    def __str__(self) -> str:
        zero = "sym" if self.zero is None else str(self.zero).removeprefix("torch.")
        act = str(self.act).removeprefix("torch.")
        bias = "+bias" if self.bias else ""
        shape = f"{self.m}x{self.n}x{self.k}-g{self.group_size}"
        return f"{self.bits}b-{shape}-{zero}-split{self.split_k}-{act}{bias}"


CASES = [
    # every width, odd M and N, with and without zero-points
    *(Case(5, 33, 160, 32, bits) for bits in (2, 3, 4, 8)),
    *(Case(3, 17, 128, 64, bits, torch.uint8, bias=True) for bits in (2, 3, 4, 8)),
    *(Case(1, 40, 256, 128, bits, torch.float32, split_k=3, bias=True) for bits in (2, 3, 4, 8)),
    # one group per row, rows that end within a word and within a block
    *(Case(2, 9, 200, 200, bits, torch.float16, act=torch.float32) for bits in (2, 3, 4, 8)),
    Case(1, 1, 32, 32),
    Case(4, 6, 33, 33, 4, torch.uint8),
    # groups that are no power of two; more rows than one tile; more slices than blocks
    Case(19, 70, 192, 96, 4, torch.uint8, split_k=2, bias=True),
    Case(70, 130, 64, 32, 4, None, split_k=8),
    Case(17, 31, 512, 256, 4, torch.uint8, split_k=2, act=torch.float32, bias=True),
]

# RMS and largest error in units of the output's RMS. Rounding y to its dtype is off by at most one unit, and
# no output here is over five RMS; fp32 sums of up to 512 terms add some 1e-6.
TOLERANCE = {
    torch.float16: (2**-11, 5 * 2**-11),
    torch.bfloat16: (2**-8, 5 * 2**-8),
    torch.float32: (1e-6, 1e-5),
}


@dataclass(frozen=True)
class Tensors:
    x: torch.Tensor
    codes: torch.Tensor
    weight: GemmWeight
    bias: torch.Tensor | None
    truth: torch.Tensor


def make_problem(case: Case, device: torch.device | str = "cpu") -> Tensors:
    """Inputs on device and the float64 result on the CPU."""
    generator = torch.Generator().manual_seed(case.k + case.bits)
    codes = torch.randint(0, 2**case.bits, (case.n, case.k), dtype=torch.uint8, generator=generator)
    groups = case.k // case.group_size
    scale = ((torch.rand(case.n, groups, generator=generator) + 0.5) * 0.02).to(case.act)
    zero = None
    if case.zero is not None:
        zero = (torch.rand(case.n, groups, generator=generator) * (2**case.bits - 1)).to(case.zero)
    bias = torch.randn(case.n, generator=generator).to(case.act) if case.bias else None
    x = torch.randn(case.m, case.k, generator=generator).to(case.act)
    expected = truth.matmul(x, codes, scale, zero, case.bits, bias)

    def put(tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The tensor on device, with NaN behind it: reading past its end shows."""
        if tensor is None or not tensor.is_floating_point():
            return None if tensor is None else tensor.to(device)
        behind = torch.full((64, *tensor.shape[1:]), float("nan"), dtype=tensor.dtype)
        return torch.cat([tensor, behind]).to(device)[: len(tensor)]

    words = truth.pack(codes, case.bits)
    weight = GemmWeight(put(words), put(scale), put(zero), case.bits, case.group_size, case.k)
    return Tensors(put(x), codes, weight, put(bias), expected)


def assert_close(y: torch.Tensor, expected: torch.Tensor) -> None:
    rms_limit, max_limit = TOLERANCE[y.dtype]
    error, rms = y.cpu().double() - expected, expected.square().mean().sqrt()
    assert error.square().mean().sqrt() <= rms_limit * rms
    assert error.abs().max() <= max_limit * rms


def config_for(case: Case) -> KernelConfig:
    return KernelConfig("plain", 16, 32, block_within_group(case.group_size, case.k, 64), case.split_k)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wna16_matches_float64(case, device):
    problem = make_problem(case, device)
    out = torch.full((case.m, case.n), float("nan"), dtype=case.act, device=device)
    y = matmul(problem.x, problem.weight, problem.bias, out=out, config=config_for(case))
    assert y is out
    assert_close(y, problem.truth)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_code_and_zero_point_is_read_exactly(bits, device):
    """Identity activations return the weight itself; at 3 bits some codes straddle two words."""
    rows, columns = torch.arange(17)[:, None], torch.arange(96)[None, :]
    codes = ((columns + rows) % 2**bits).to(torch.uint8)
    zero = (rows * 15 % 2**bits).to(torch.uint8)
    scale = torch.full((17, 1), 0.125, dtype=torch.float16)
    words = truth.pack(codes, bits).to(device)
    weight = GemmWeight(words, scale.to(device), zero.to(device), bits, 96, 96)
    y = matmul(torch.eye(96, dtype=torch.float16, device=device), weight)
    assert torch.equal(y.cpu().float(), (codes.float() - zero.float()).T / 8)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_config_matches_float64_in_bfloat16(case):
    if not torch.cuda.is_available():
        pytest.skip("no GPU, and the interpreter's bfloat16 dot product is wrong")
    case = replace(case, act=torch.bfloat16)
    problem = make_problem(case, "cuda")
    for name, variant in VARIANTS.items():
        if variant.accepts(problem_of(problem.x, problem.weight)) is not None:
            continue
        for config in variant.candidates(problem_of(problem.x, problem.weight)):
            assert config.variant == name
            out = torch.full((case.m, case.n), float("nan"), dtype=case.act, device="cuda")
            assert_close(
                matmul(problem.x, problem.weight, problem.bias, out=out, config=config), problem.truth
            )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_reference_matches_float64(bits):
    case = Case(5, 33, 160, 32, bits, torch.uint8, bias=True)
    problem = make_problem(case)
    weight = problem.weight
    y = matmul_reference(problem.x, weight.words, weight.scale, weight.zero_point, bits, 32, problem.bias)
    assert_close(y, problem.truth)


@pytest.mark.parametrize("split_k", [1, 4])
def test_same_bits_every_time(split_k, device):
    problem = make_problem(Case(5, 33, 512, 64, split_k=split_k), device)
    config = KernelConfig("plain", 16, 32, 64, split_k)
    first = matmul(problem.x, problem.weight, config=config)
    assert torch.equal(first, matmul(problem.x, problem.weight, config=config))


def test_strided_batched_x_and_strided_out(device):
    problem = make_problem(Case(6, 20, 64, 32), device)
    transposed = problem.x.T.contiguous().T
    assert not transposed.is_contiguous()
    assert_close(matmul(transposed, problem.weight), problem.truth)
    every_other = torch.stack([problem.x, problem.x], dim=1).view(12, 64)[::2].view(2, 3, 64)
    assert_close(matmul(every_other, problem.weight).view(6, 20), problem.truth)
    wide = torch.full((6, 25), float("nan"), dtype=torch.float16, device=device)
    matmul(problem.x, problem.weight, out=wide[:, :20])
    assert_close(wide[:, :20], problem.truth)
    assert wide[:, 20:].isnan().all()


def test_no_tokens(device):
    problem = make_problem(Case(1, 20, 64, 32), device)
    y = matmul(torch.empty(2, 0, 64, dtype=torch.float16, device=device), problem.weight)
    assert y.shape == (2, 0, 20)


def swap_nibbles(codes, scale, zero):
    return codes.view(-1, 2).flip(1).reshape(codes.shape), scale, zero


def wrong_group(codes, scale, zero):
    return codes, scale.roll(1, dims=1), zero


def zero_off_by_one(codes, scale, zero):
    return codes, scale, zero + 1


def one_code(codes, scale, zero):
    codes = codes.clone()
    codes[-1, -1] ^= 8
    return codes, scale, zero


@pytest.mark.parametrize(
    "fault", [swap_nibbles, wrong_group, zero_off_by_one, one_code], ids=lambda f: f.__name__
)
def test_faults_are_caught(fault):
    case = Case(5, 33, 160, 32, zero=torch.uint8)
    problem = make_problem(case)
    weight = problem.weight
    codes, scale, zero = fault(problem.codes, weight.scale, weight.zero_point)
    broken = replace(weight, words=truth.pack(codes, 4), scale=scale.contiguous(), zero_point=zero)
    with pytest.raises(AssertionError):
        assert_close(matmul(problem.x, broken, config=config_for(case)), problem.truth)


@pytest.mark.gpu
def test_offsets_past_two_billion_elements():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    m, n, k = 262145, 8256, 64
    problem = make_problem(Case(4, n, k, 32), "cuda")
    x = torch.zeros((m, k), dtype=torch.float16, device="cuda")
    x[-4:] = problem.x
    assert_close(matmul(x, problem.weight)[-4:], problem.truth)

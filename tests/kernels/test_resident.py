"""resident_kernel on a Hopper GPU against float64; Gluon has no interpreter: nothing runs without one.

Its faults would be rows, groups or turns that are mixed up where a program has one block, two or many, sums
in shared memory that are read too early, and slices that are added before they are there. Hence outputs full
of NaN, and the same bits every time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_fragment import Case, assert_close, launch, make_problem

from lowbit_kernels import resident
from lowbit_kernels.dispatch import VARIANTS, KernelConfig, prepare, problem_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper_gpu() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    if reason := resident.missing():
        pytest.skip(reason)


FOUR = KernelConfig("resident", 16, 32, 128, num_warps=8, num_stages=1, slices=32, at_once=132)
# eight tokens, 16 rows a block, and few programs, which then have many blocks
EIGHT = replace(FOUR, block_m=8, block_n=16, at_once=3)

CASES = [
    # tails of every kind: tokens, rows, inputs; fewer tiles than warps; one block, two and many a program
    Case(1, 1, 33, 33, FOUR),
    Case(9, 130, 640, 128, FOUR, bias=True),
    Case(16, 1000, 4224, 128, FOUR),
    *(Case(16, 1000, 4096, 128, replace(FOUR, at_once=once)) for once in (32, 31, 16, 15, 5, 1)),
    *(Case(7, 300, 4096, 128, replace(EIGHT, at_once=once), bias=True) for once in (19, 10, 7, 1)),
    # slices of K: whole ones, a last one with few tiles, more blocks than are added at a time, and as few
    # programs as slices
    *(Case(16, 1000, 8192, 128, replace(FOUR, slices=16, at_once=once), bias=True) for once in (132, 20, 4)),
    Case(13, 300, 4224, 128, replace(FOUR, slices=8, at_once=40), zero=torch.uint8),
    Case(5, 70, 2200, 2200, replace(EIGHT, slices=8)),
    # odd numbers of turns, other numbers of warps and rows
    Case(16, 1000, 5120, 128, replace(FOUR, slices=24)),
    Case(16, 260, 4096, 128, replace(FOUR, num_warps=4, slices=8, at_once=9)),
    Case(16, 260, 4096, 128, replace(FOUR, num_warps=16, block_n=16, at_once=9)),
    Case(16, 260, 4096, 128, replace(FOUR, block_n=64, slices=16, at_once=5)),
    # groups within, of and across a tile; widths, zero-points whole and fractional
    *(
        Case(11, 260, 1280, group, replace(FOUR, slices=8, at_once=20), bits, zero, True)
        for group, bits, zero in (
            (32, 4, None),
            (32, 4, torch.uint8),
            (32, 4, torch.float16),
            (64, 3, torch.uint8),
            (64, 4, None),
            (128, 4, torch.float16),
            (128, 4, torch.float32),
            (256, 4, torch.uint8),
            (1280, 3, None),
        )
    ),
    *(Case(8, 260, 1280, group, replace(EIGHT, slices=16), 4, torch.uint8) for group in (32, 64, 128, 1280)),
]


@pytest.mark.parametrize("act", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case, act):
    problem = make_problem(case, "cuda", act)
    weight = prepare(problem.weight)
    # with the next launch close behind, or without
    config = replace(case.config, dependent=act == torch.float16)
    for _ in range(3):
        assert_close(launch(problem, weight, config), problem.truth)


def test_an_output_with_strides_is_filled_and_nothing_beside_it():
    problem = make_problem(Case(11, 300, 4096, 128, FOUR), "cuda")
    weight = prepare(problem.weight)
    for config in (FOUR, replace(FOUR, slices=8)):
        around = torch.full((13, 700), float("nan"), dtype=torch.float16, device="cuda")
        out = around[1:12, 7:607:2]
        VARIANTS["resident"].launch(problem.x, weight, None, out, config)
        assert_close(out, problem.truth)
        assert around.isnan().sum() == around.numel() - out.numel()


@pytest.mark.parametrize("config", [FOUR, EIGHT, replace(FOUR, slices=8)], ids=["whole", "eight", "split"])
def test_faults_are_caught(config):
    problem = make_problem(Case(8, 260, 2048, 128, config), "cuda")
    weight = prepare(problem.weight)
    for broken in (
        replace(weight, words=weight.words.roll(8, dims=2)),
        replace(weight, scale=weight.scale.roll(1, dims=0)),
    ):
        with pytest.raises(AssertionError):
            assert_close(launch(problem, broken, config), problem.truth)


@pytest.mark.parametrize("slices", [32, 16, 8])
def test_same_bits_every_time_and_in_graphs(slices):
    config = replace(FOUR, slices=slices, at_once=20, dependent=True)
    problem = make_problem(Case(16, 1024, 4096, 128, config), "cuda")
    weight = prepare(problem.weight)
    first = launch(problem, weight, config)
    out = torch.empty_like(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(30):
            VARIANTS["resident"].launch(problem.x, weight, None, out, config)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1000, 5120), (4096, 14336), (2048, 28672)])
def test_every_candidate_is_right(n, k):
    problem = make_problem(Case(16, n, k, 128, FOUR), "cuda")
    weight = prepare(problem.weight)
    for config in VARIANTS["resident"].candidates(problem_of(problem.x, weight)):
        for _ in range(3):
            assert_close(launch(problem, weight, config), problem.truth)

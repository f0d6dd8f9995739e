"""hopper_kernel on a Hopper GPU against float64; Gluon has no interpreter, so nothing here runs without one.

Its faults would be races: registers or shared memory overwritten while the matrix unit still reads them, and
partial sums read too early. Hence many steps of K, outputs full of NaN, and the same bits every time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_fragment import Case, assert_close, launch, make_problem

from lowbit_kernels import hopper
from lowbit_kernels.dispatch import VARIANTS, KernelConfig, prepare, problem_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper_gpu() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    if reason := hopper.missing():
        pytest.skip(reason)


# two programs of the first share a multiprocessor
NARROW = KernelConfig("hopper", 64, 128, 16, num_warps=4, num_stages=4)
WIDE = KernelConfig("hopper", 128, 128, 32, num_warps=8, num_stages=4)
# two slices of K in a program
SLICED = KernelConfig("hopper", 64, 64, 64, num_warps=4, num_stages=10, slices=2)

CASES = [
    # tails of every kind: tokens, rows, inputs; fewer tiles than stages; more slices than tiles
    Case(1, 1, 33, 33, NARROW),
    Case(65, 130, 640, 128, NARROW, bias=True),
    Case(200, 1000, 4224, 128, NARROW),
    Case(200, 1000, 4224, 128, WIDE, bias=True),
    Case(70, 300, 384, 128, replace(NARROW, split_k=8)),
    Case(300, 300, 2200, 2200, replace(WIDE, block_m=256, num_stages=3)),
    # sums of slices, in twos and odd numbers
    *(Case(129, 260, 4096, 128, replace(NARROW, split_k=split)) for split in (2, 3, 4, 7)),
    *(Case(129, 260, 4096, 128, replace(WIDE, split_k=split)) for split in (2, 3)),
    # 18 or 27, 36 tiles: most whole and the rest in slices, or shared by fewer programs, by more, or by a few
    # that each have the end of a tile, whole ones and the beginning of another
    *(Case(150, 1100, 4096, 128, replace(NARROW, split_k=3, at_once=once)) for once in (8, 100)),
    *(Case(150, 1100, 4096, 128, replace(WIDE, at_once=once), zero=torch.uint8) for once in (17, 7, 5, 31)),
    *(Case(500, 1100, 4096, 128, replace(NARROW, at_once=once), bias=True) for once in (20, 50, 264)),
    # rows of y that TMA can write, with tails, by programs of several tiles
    Case(500, 1096, 4096, 128, replace(WIDE, at_once=7), bias=True),
    Case(300, 1000, 2176, 128, replace(WIDE, block_m=256, num_stages=3, at_once=9)),
    # slices: one step in all, an odd number, fewer stages than steps, several tiles, and shares of them
    Case(1, 1, 33, 33, SLICED),
    Case(70, 300, 384, 128, SLICED, bias=True),
    Case(200, 1000, 4224, 128, replace(SLICED, block_m=128, num_stages=5)),
    Case(200, 1000, 4224, 128, replace(SLICED, block_k=16, num_stages=3, split_k=3)),
    *(Case(500, 1096, 2048, 128, replace(SLICED, at_once=once), zero=torch.uint8) for once in (7, 31, 100)),
    # groups within, of and across a tile; widths, zero-points whole and fractional
    *(
        Case(90, 260, 1280, group, config, bits, zero, True)
        for config in (NARROW, WIDE, replace(SLICED, block_k=32))
        for group, bits, zero in (
            (32, 4, None),
            (32, 4, torch.uint8),
            (64, 3, torch.uint8),
            (128, 4, torch.float16),
            (256, 4, torch.uint8),
            (1280, 3, None),
        )
    ),
]


@pytest.mark.parametrize("act", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case, act):
    problem = make_problem(case, "cuda", act)
    weight = prepare(problem.weight)
    # with the next launch close behind, or without
    config = replace(case.config, dependent=act == torch.float16)
    for _ in range(3):
        assert_close(launch(problem, weight, config), problem.truth, rounded_weights=True)


@pytest.mark.parametrize(
    "config",
    [NARROW, WIDE, SLICED, replace(NARROW, split_k=3)],
    ids=["narrow", "wide", "sliced", "split"],
)
def test_faults_are_caught(config):
    problem = make_problem(Case(64, 260, 1024, 128, config), "cuda")
    weight = prepare(problem.weight)
    for broken in (
        replace(weight, words=weight.words.roll(8, dims=2)),
        replace(weight, scale=weight.scale.roll(1, dims=0)),
    ):
        with pytest.raises(AssertionError):
            assert_close(launch(problem, broken, config), problem.truth, rounded_weights=True)


@pytest.mark.parametrize(("split_k", "at_once"), [(1, 0), (2, 0), (3, 0), (4, 3), (1, 3), (1, 132)])
def test_same_bits_every_time_and_in_graphs(split_k, at_once):
    for kind in (NARROW, replace(WIDE, dependent=True), replace(SLICED, dependent=True)):
        config = replace(kind, split_k=split_k, at_once=at_once)
        problem = make_problem(Case(128, 512, 2048, 128, config), "cuda")
        weight = prepare(problem.weight)
        first = launch(problem, weight, config)
        out = torch.empty_like(first)
        run = VARIANTS["hopper"].launch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(30):
                run(problem.x, weight, None, out, config)
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, first)


@pytest.mark.parametrize("m", [64, 128, 256, 512])
def test_every_candidate_is_right_over_many_steps(m):
    problem = make_problem(Case(m, 256, 8192, 128, NARROW), "cuda")
    weight = prepare(problem.weight)
    # a layer that is wide enough for every tile
    posed = replace(problem_of(problem.x, weight), n=8192)
    for config in VARIANTS["hopper"].candidates(posed):
        for _ in range(3):
            assert_close(launch(problem, weight, config), problem.truth, rounded_weights=True)


@pytest.mark.parametrize("at_once", [0, 132])
def test_offsets_past_two_billion_elements(at_once):
    # y has 2^31 elements and 300 rows more, the last of them of a tile that is not whole
    m, n = 2**16 + 300, 2**15
    config = replace(WIDE, block_m=256, num_stages=3, at_once=at_once)
    problem = make_problem(Case(300, n, 128, 128, config), "cuda")
    weight = prepare(problem.weight)
    x = torch.zeros(m, 128, dtype=torch.float16, device="cuda")
    x[-300:] = problem.x
    out = torch.full((m, n), float("nan"), dtype=torch.float16, device="cuda")
    VARIANTS["hopper"].launch(x, weight, None, out, config)
    assert_close(out[-300:], problem.truth, rounded_weights=True)
    assert not out[:-300].any()

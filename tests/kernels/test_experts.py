"""One launch for all experts: a token at the wrong expert, a tile too many or too few are silent faults.

The truth is a float64 product for every (token, place) pair, which knows nothing of tiles or orders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import kernel_truth as truth
import pytest
import torch

from lowbit_kernels import fragment
from lowbit_kernels.dispatch import GemmWeight, expert_matmul, prepare
from lowbit_kernels.functional import expert_linear, route
from lowbit_kernels.layout import EXPERT_TOKENS, expert_slots
from lowbit_kernels.reference import route_reference


def draw(tokens: int, top: int, experts: int) -> torch.Tensor:
    """[tokens, top], different experts for each token, low numbers more often."""
    generator = torch.Generator().manual_seed(tokens + experts)
    odds = 1.0 / torch.arange(1, experts + 1)
    return torch.multinomial(odds.expand(tokens, -1), top, generator=generator)


# as many pairs as slots, more, one expert for all, more pairs than a block of the kernel
INDICES = {
    "one token": draw(1, 8, 64),
    "few": draw(5, 2, 4),
    "many": draw(40, 2, 3),
    "one expert": torch.full((20, 1), 2),
    "several blocks": draw(70, 4, 16),
    "int32": draw(9, 2, 8).int(),
}


@pytest.mark.parametrize("name", INDICES)
def test_every_pair_is_in_one_tile_of_its_expert(name, device):
    index = INDICES[name]
    experts, pairs = 64, index.numel()
    routes = fragment.route(index.to(device), experts).cpu()
    tiles, order = routes[:-pairs].view(-1, 4), routes[-pairs:]
    assert len(tiles) == expert_slots(pairs, experts)
    seen = []
    for expert, first, count, _ in tiles.tolist():
        assert 0 <= count <= EXPERT_TOKENS
        members = order[first : first + count].tolist() if count else []
        assert all(index.flatten()[pair] == expert for pair in members)
        seen += members
    assert sorted(seen) == list(range(pairs))
    used, counts = tiles[:, 2] > 0, torch.bincount(index.flatten().long())
    assert int(used.sum()) == sum(-(-count // EXPERT_TOKENS) for count in counts.tolist())


@pytest.mark.parametrize("name", INDICES)
def test_the_reference_makes_the_same_tiles(name):
    index = INDICES[name]
    kernel, reference = fragment.route(index, 64), route_reference(index.long(), 64)
    pairs = index.numel()
    tiles, wanted = (routes[:-pairs].view(-1, 4) for routes in (kernel, reference))
    used = tiles[:, 2] > 0
    assert torch.equal(used, wanted[:, 2] > 0)
    # the fourth number means nothing, and so do all of an empty tile
    assert torch.equal(tiles[used, :3], wanted[used, :3])
    assert torch.equal(kernel[-pairs:], reference[-pairs:])


@dataclass(frozen=True)
class Case:
    tokens: int
    top: int
    experts: int
    n: int
    k: int
    group_size: int
    bits: int = 4
    zero: torch.dtype | None = None
    shared: bool = True

    def __str__(self) -> str:
        zero = "sym" if self.zero is None else str(self.zero).removeprefix("torch.")
        x = "token" if self.shared else "pair"
        shape = f"{self.tokens}x{self.top}of{self.experts}-{self.n}x{self.k}"
        return f"{self.bits}b-{shape}-g{self.group_size}-{zero}-x-a-{x}"


CASES = [
    Case(1, 2, 3, 40, 256, 128),
    Case(5, 2, 4, 40, 256, 128, zero=torch.uint8),
    Case(5, 2, 4, 20, 160, 32, bits=3, shared=False),
    Case(12, 2, 3, 33, 200, 200, bits=8, zero=torch.float16),
    Case(4, 3, 16, 24, 128, 64, bits=2, shared=False),
]


@dataclass(frozen=True)
class Tensors:
    x: torch.Tensor
    index: torch.Tensor
    stored: list[GemmWeight]
    truth: torch.Tensor


def make_problem(case: Case, device: torch.device | str = "cpu", act: torch.dtype = torch.float16) -> Tensors:
    generator = torch.Generator().manual_seed(case.k)
    groups, pairs = case.k // case.group_size, case.tokens * case.top
    codes = torch.randint(
        0, 2**case.bits, (case.experts, case.n, case.k), dtype=torch.uint8, generator=generator
    )
    scale = ((torch.rand(case.experts, case.n, groups, generator=generator) + 0.5) * 0.02).to(act)
    zero = None
    if case.zero is not None:
        zero = (torch.rand(scale.shape, generator=generator) * (2**case.bits - 1)).to(case.zero)
    index = draw(case.tokens, case.top, case.experts)
    rows = case.tokens if case.shared else pairs
    x = torch.randn(rows, case.k, generator=generator).to(act)
    expected = torch.stack(
        [
            truth.matmul(
                x[pair * rows // pairs],
                codes[expert],
                scale[expert],
                None if zero is None else zero[expert],
                case.bits,
            )
            for pair, expert in enumerate(index.flatten().tolist())
        ]
    )
    stored = [
        GemmWeight(
            truth.pack(codes[e], case.bits).to(device),
            scale[e].to(device),
            None if zero is None else zero[e].to(device),
            case.bits,
            case.group_size,
            case.k,
        )
        for e in range(case.experts)
    ]
    return Tensors(x.to(device), index.to(device), stored, expected)


def stack(weights: list, names: tuple[str, ...] = ("words", "scale", "zero_point")) -> dict:
    parts = {name: [getattr(weight, name) for weight in weights] for name in names}
    return {name: None if part[0] is None else torch.stack(part) for name, part in parts.items()}


def assert_close(y: torch.Tensor, expected: torch.Tensor) -> None:
    """As in test_fragment: one unit of the output's dtype in RMS, five at most."""
    unit = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[y.dtype]
    error, rms = y.cpu().double() - expected, expected.square().mean().sqrt()
    assert error.square().mean().sqrt() <= unit * rms
    assert error.abs().max() <= 5 * unit * rms


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case, device):
    problem = make_problem(case, device)
    weights = [prepare(weight) for weight in problem.stored]
    routes = fragment.route(problem.index, case.experts)
    y = expert_matmul(problem.x, replace(weights[0], **stack(weights)), routes, case.tokens * case.top)
    assert_close(y, problem.truth)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_operator_matches_float64_in_either_order_of_words(case):
    problem = make_problem(case)
    routes = route(problem.index, case.experts)
    for weights in (problem.stored, [prepare(weight) for weight in problem.stored]):
        parts = stack(weights)
        y = expert_linear(
            problem.x, *parts.values(), routes, case.bits, case.group_size, case.n, case.tokens * case.top
        )
        assert_close(y, problem.truth)


def next_expert(routes, slots):
    routes[: 4 * slots].view(-1, 4)[:, 0].add_(1).remainder_(4)


def one_too_few(routes, slots):
    routes[: 4 * slots].view(-1, 4)[:, 2].clamp_(max=1)


def another_order(routes, slots):
    routes[4 * slots :] = routes[4 * slots :].flip(0)


@pytest.mark.parametrize("fault", [next_expert, one_too_few, another_order], ids=lambda f: f.__name__)
def test_faults_are_caught(fault):
    case = CASES[1]
    problem = make_problem(case)
    weights = [prepare(weight) for weight in problem.stored]
    routes, pairs = fragment.route(problem.index, case.experts), case.tokens * case.top
    fault(routes, expert_slots(pairs, case.experts))
    with pytest.raises(AssertionError):
        assert_close(
            expert_matmul(problem.x, replace(weights[0], **stack(weights)), routes, pairs), problem.truth
        )


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones():
    case = CASES[1]
    problem = make_problem(case)
    torch.library.opcheck(route, (problem.index, case.experts), test_utils=("test_schema", "test_faketensor"))
    parts, routes = stack(problem.stored), route(problem.index, case.experts)
    grid = case.bits, case.group_size, case.n, case.tokens * case.top
    torch.library.opcheck(
        expert_linear,
        (problem.x, *parts.values(), routes, *grid),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_an_x_that_does_not_fit_is_refused():
    problem = make_problem(CASES[0])
    weights = [prepare(weight) for weight in problem.stored]
    weight, routes = replace(weights[0], **stack(weights)), fragment.route(problem.index, 3)
    for x in (problem.x[:, :128], problem.x.float(), problem.x.repeat(3, 1)):
        with pytest.raises(ValueError, match="wanted a row of 256"):
            expert_matmul(x, weight, routes, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("act", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_a_graph_follows_the_router(tokens, act):
    """Captured once, replayed with other experts, half of them with two tokens' worth of partial sums."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    case = Case(tokens, 4, 16, 1000, 2048 + 128, 128)
    problem = make_problem(case, "cuda", act)
    weights = [prepare(weight) for weight in problem.stored]
    parts = stack(weights)
    grid = case.bits, case.group_size, case.n, tokens * case.top

    def product() -> torch.Tensor:
        routes = route(index, case.experts)
        return expert_linear(problem.x, *parts.values(), routes, *grid)

    index = torch.zeros_like(problem.index)
    product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product()
    for _ in range(3):
        index.copy_(problem.index)
        y.fill_(float("nan"))
        graph.replay()
        assert_close(y, problem.truth)
        index.zero_()
        graph.replay()

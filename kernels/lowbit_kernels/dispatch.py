"""Which kernel multiplies by a quantized weight, and how it is launched.

    weight = prepare(weight)       once, at load: the order of words that the fast kernels read
    matmul(x, weight) -> problem_of(x, weight) -> choose(problem) -> VARIANTS[config.variant].launch(...)

VARIANTS is the plug point: a variant says why it does not take a problem (`accepts` returns the reason),
which config it would use untuned and which ones are worth measuring. A tuned table decides where it knows
the problem; otherwise the first variant that accepts, with the config of its rule.

The rules count warps: one streaming multiprocessor of an H200 needs about 27 of decode's to saturate memory.
They were fitted to the search in benchmarks/NOTES.md and need no measurement on the user's side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import fragment, hopper, resident, wna16
from .fragment import FragmentWeight
from .layout import BITS, EXPERT_TOKENS, TILE_K, FragmentLayout, PackLayout
from .problem import KernelConfig, Problem
from .reference import gated
from .tables import shipped_configs

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class GemmWeight:
    """A packed weight as kernels take it.

    words: [N, ceil(K · bits / 32)] int32.  scale: [N, G] float.  zero_point: [N, G] uint8 or float, None for
    the symmetric grid.  group_size: inputs per group, K for one group per row.  in_features: K.
    Raises ValueError when the shapes or dtypes do not fit each other.
    """

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bits: int
    group_size: int
    in_features: int

    def __post_init__(self) -> None:
        n, k = self.words.shape[0], self.in_features
        if self.bits not in BITS:
            raise ValueError(f"bits {self.bits} is not supported; use one of {', '.join(map(str, BITS))}")
        if self.group_size < 1 or k % self.group_size:
            raise ValueError(f"in_features {k} is not a multiple of group_size {self.group_size}")
        _require("words", self.words, (n, PackLayout(self.bits).width(k)), (torch.int32,))
        _require("scale", self.scale, (n, k // self.group_size), FLOATS)
        if self.zero_point is not None:
            _require("zero_point", self.zero_point, (n, k // self.group_size), (torch.uint8, *FLOATS))
        if any(t is not None and not t.is_contiguous() for t in (self.words, self.scale, self.zero_point)):
            raise ValueError("words, scale and zero_point must be contiguous")

    @property
    def out_features(self) -> int:
        return self.words.shape[0]


AnyWeight = GemmWeight | FragmentWeight


@dataclass(frozen=True)
class Variant:
    """One way to compute the product.

    accepts: None if it can take the problem, otherwise the reason, which the user sees.
    default: the config it uses untuned.  candidates: the configs worth measuring, default among them.
    launch: (x [M, K], weight, bias, out [M, N], config), all checked before.
    """

    accepts: Callable[[Problem], str | None]
    default: Callable[[Problem], KernelConfig]
    candidates: Callable[[Problem], tuple[KernelConfig, ...]]
    launch: Callable[[Tensor, AnyWeight, Tensor | None, Tensor, KernelConfig], None]


def prepare(weight: GemmWeight) -> GemmWeight | FragmentWeight:
    """The weight in the order that the fast kernels read; as it is where that order cannot hold it.

    A copy: the stored words can be dropped afterwards. Waits for the device.
    """
    if fragment.refuses(weight.group_size, weight.in_features) is not None:
        return weight
    return fragment.repack(
        weight.words, weight.scale, weight.zero_point, weight.bits, weight.group_size, weight.in_features
    )


def concatenate(weights: Sequence[AnyWeight]) -> AnyWeight:
    """The rows of all weights below each other, as one weight in the order that the first has.

    Raises ValueError if bits, group size, in_features, order, dtype or the presence of zero-points differ.
    """
    first = weights[0]
    kinds = {
        (type(w), w.bits, w.group_size, w.in_features, w.scale.dtype, w.zero_point is None) for w in weights
    }
    if len(kinds) > 1:
        raise ValueError(f"weights of unlike kinds cannot be one: {sorted(map(str, kinds))}")
    if isinstance(first, FragmentWeight):
        return fragment.concatenate([w for w in weights if isinstance(w, FragmentWeight)])
    zeros = [w.zero_point for w in weights if w.zero_point is not None]
    return GemmWeight(
        torch.cat([w.words for w in weights]),
        torch.cat([w.scale for w in weights]),
        torch.cat(zeros) if zeros else None,
        first.bits,
        first.group_size,
        first.in_features,
    )


def order_of(group_size: int, in_features: int) -> str:
    """The order of words that prepare() gives a weight."""
    return "row" if fragment.refuses(group_size, in_features) else "fragment"


def matmul(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    config: KernelConfig | None = None,
) -> Tensor:
    """Return x @ dequantized.T + bias, accumulated in fp32.

    x: [..., K] float16, bfloat16 or float32, any strides.  bias: [N] float.  out: [..., N] of x's dtype,
    every element of which is written.  config: None lets choose() decide.
    CPU tensors run in Triton's interpreter: right, and only for small tiles bearable.
    Raises ValueError for shapes, dtypes or devices that do not fit, or a config whose variant refuses.
    """
    n, k = weight.out_features, weight.in_features
    _check(x, weight, bias)
    if out is None:
        out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    _require("out", out, (*x.shape[:-1], n), (x.dtype,))
    _same_device("out", out, x)
    if x.numel() == 0:
        return out
    problem = problem_of(x, weight)
    if config is None:
        config = choose(problem)
    elif (reason := VARIANTS[config.variant].accepts(problem)) is not None:
        raise ValueError(f"{config.variant} cannot run this problem: {reason}")
    flat = out.view(-1, n)
    VARIANTS[config.variant].launch(x.reshape(-1, k), weight, bias, flat, config)
    return out


def gated_matmul(x: Tensor, weight: AnyWeight, bias: Tensor | None = None) -> Tensor:
    """Return reference.gated of matmul(x, weight, bias), [..., N / 2]; for few tokens in one launch.

    Raises ValueError for an x or a bias that does not fit.
    """
    n, k = weight.out_features // 2, weight.in_features
    _check(x, weight, bias)
    if isinstance(weight, FragmentWeight) and x.numel():
        problem = problem_of(x, weight)
        config = choose(problem)
        if config.variant == "resident" and VARIANTS["decode"].accepts(problem) is None:
            # a kernel less is worth more than what resident_kernel is faster
            config = VARIANTS["decode"].default(problem)
        if config.variant == "decode" and config.split_k == 1:
            out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
            _launch_decode(x.reshape(-1, k), weight, bias, out.view(-1, n), config, gated=True)
            return out
    return gated(matmul(x, weight, bias))


def _check(x: Tensor, weight: AnyWeight, bias: Tensor | None) -> None:
    """Raise ValueError for what cannot be multiplied."""
    if x.dtype not in FLOATS:
        raise ValueError(f"x is {_name(x.dtype)}; use float16, bfloat16 or float32")
    _require("x", x, (*x.shape[:-1], weight.in_features), (x.dtype,))
    _same_device("weight", weight.words, x)
    if bias is not None:
        _require("bias", bias, (weight.out_features,), FLOATS)
        _same_device("bias", bias, x)


def _same_device(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device}, x on {x.device}")


def expert_matmul(x: Tensor, weight: FragmentWeight, routes: Tensor, pairs: int) -> Tensor:
    """Return [pairs, N]: the product of every (token, place) pair with its expert, in one launch.

    x: [T, K] float16 or bfloat16, or [pairs, K].  weight: of all experts, stacked.  routes: fragment.route's.
    Raises ValueError for an x that does not fit.
    """
    k = weight.in_features
    if x.dim() != 2 or x.shape[1] != k or x.dtype not in FLOATS[:2] or pairs % max(x.shape[0], 1):
        raise ValueError(f"x is {list(x.shape)} {_name(x.dtype)}, wanted a row of {k} 16-bit floats a token")
    out = torch.empty((pairs, weight.out_features), dtype=x.dtype, device=x.device)
    if pairs:
        # as a plain product with as many rows as all experts have that may be read
        experts = min(pairs, weight.words.shape[0])
        problem = replace(problem_of(x, weight), m_bucket=bucket(-(-pairs // weight.words.shape[0])))
        config = _default_decode(
            replace(problem, n=problem.n * experts, m_bucket=min(problem.m_bucket, EXPERT_TOKENS))
        )
        _launch_decode(x, weight, None, out, config, routes)
    return out


def problem_of(x: Tensor, weight: AnyWeight) -> Problem:
    """The problem that x [..., K] and weight pose."""
    return Problem(
        bits=weight.bits,
        group_size=weight.group_size,
        has_zero=weight.zero_point is not None,
        act_dtype=_name(x.dtype),
        m_bucket=bucket(x.numel() // weight.in_features),
        n=weight.out_features,
        k=weight.in_features,
        arch=arch_of(x.device),
        order="fragment" if isinstance(weight, FragmentWeight) else "row",
    )


def bucket(tokens: int) -> int:
    """tokens rounded up to a power of two; configs are chosen per bucket."""
    return 1 << max(tokens - 1, 0).bit_length()


# Tables that the user loaded; choose() asks them before the shipped one.
_installed: dict[Problem, KernelConfig] = {}


def install(configs: dict[Problem, KernelConfig]) -> None:
    """Let choose() prefer these configs, such as those that tables.read_table() found in a model's folder."""
    _installed.update(configs)
    choose.cache_clear()


def _device_name() -> str | None:
    """Name of the current GPU; None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def arch_of(device: torch.device) -> str:
    """Architecture name of a device: sm_90, gfx942, or cpu."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def refusals(problem: Problem) -> dict[str, str | None]:
    """For every variant, why it cannot take the problem; None where it can."""
    return {name: variant.accepts(problem) for name, variant in VARIANTS.items()}


@functools.cache
def choose(problem: Problem) -> KernelConfig:
    """The config of a tuned table if its variant accepts, or else the rule of the first variant that does.

    A shipped table names variants that this Triton may not compile, a user's one may name any.
    Raises ValueError with every reason if no variant accepts.
    """
    tuned = _installed.get(problem) or shipped_configs(problem.arch, _device_name()).get(problem)
    if tuned is None or tuned.variant not in VARIANTS:
        return rule(problem)
    return tuned if VARIANTS[tuned.variant].accepts(problem) is None else rule(problem)


def rule(problem: Problem) -> KernelConfig:
    """choose() without any table."""
    reasons = refusals(problem)
    for name, reason in reasons.items():
        if reason is None:
            return VARIANTS[name].default(problem)
    raise ValueError("no kernel takes this problem: " + "; ".join(f"{n}: {r}" for n, r in reasons.items()))


def _accepts_decode(problem: Problem) -> str | None:
    if (reason := _accepts_fragments(problem)) is not None:
        return reason
    if problem.m_bucket > 16 or (problem.m_bucket > 8 and problem.n * problem.k > SMALL):
        return f"{_tokens(problem)}: gemm reads x once for more outputs"
    return None


def _accepts_gemm(problem: Problem) -> str | None:
    if (reason := _accepts_fragments(problem)) is not None:
        return reason
    small = problem.n * problem.k <= SMALL
    middling = small or 4096 < problem.n < 16384
    if problem.m_bucket > 2048 or (problem.m_bucket > 512 and middling) or (problem.m_bucket > 128 and small):
        return f"{_tokens(problem)}: a dense product of the dequantized weight is faster than this"
    return None


def _accepts_hopper(problem: Problem) -> str | None:
    if (reason := _accepts_gluon(problem)) is not None:
        return reason
    if problem.m_bucket < 64:
        return f"{_tokens(problem)}: the others are as fast on fewer than 64"
    plain = not problem.has_zero and _block_k(problem, TILE_K) == TILE_K
    if problem.m_bucket == 64 and plain and problem.n * problem.k > LARGE:
        return "64 tokens: gemm scales the sums of a large layer instead of its weights"
    return hopper.missing()


def _tokens(problem: Problem) -> str:
    return "1 token" if problem.m_bucket == 1 else f"{problem.m_bucket} tokens"


def _accepts_resident(problem: Problem) -> str | None:
    if (reason := _accepts_gluon(problem)) is not None:
        return reason
    if problem.m_bucket > 16:
        return f"{_tokens(problem)}: x of more than 16 does not fit beside a program"
    if _block_k(problem, TILE_K) < 64:
        return "groups of 32: decode and gemm scale weights for less"
    if (reason := _faster_than_resident(problem)) is not None:
        return reason
    return resident.missing()


def _faster_than_resident(problem: Problem) -> str | None:
    """Where another kernel is as fast, from measurements of sixteen layers and 1, 2, 4, 8 and 16 tokens."""
    m, size, tiles = problem.m_bucket, problem.n * problem.k, -(-problem.k // TILE_K)
    config = _default_resident(problem)
    if tiles < 16 or problem.n < 1024:
        return f"{problem.n}x{problem.k}: decode and gemm have more programs for a small layer"
    if tiles * 8 < config.split_k * config.slices * 7:
        return f"{tiles} tiles along K would leave much of {config.split_k} slices of 32 empty"
    if config.split_k > 4 or (m <= 8 and config.split_k > 1 and size > 1 << 28):
        return f"{problem.n}x{problem.k}: decode and gemm leave fewer partial sums of {config.split_k} slices"
    if m > 8 and config.slices > 32 and _block_k(problem, TILE_K) < TILE_K:
        return f"{tiles} tiles of small groups a program: too few registers"
    least = {1: MIDDLING, 2: MIDDLING, 4: SMALL}
    if size <= least.get(m, 0) or (m == 1 and problem.n < 10240):
        return f"{_tokens(problem)}: decode does not wait for x"
    return None


def _accepts_gluon(problem: Problem) -> str | None:
    if (reason := _accepts_fragments(problem)) is not None:
        return reason
    if problem.arch != "sm_90":
        return f"{problem.arch}: it is written for sm_90"
    if problem.bits not in (3, 4):
        return f"{problem.bits} bits: only fields of 4 bits are a register each"
    return None


def _accepts_fragments(problem: Problem) -> str | None:
    if problem.order != "fragment":
        return "the words are in stored order; prepare() reorders them"
    if problem.act_dtype == "float32":
        return "float32 activations: the matrix instruction takes 16 bits"
    return None


def _accepts_dense(problem: Problem) -> str | None:
    return None if problem.order == "fragment" else "the words are in stored order; prepare() reorders them"


# Weights (N · K): up to the first all of K is loaded at once, up to the second most of it, and what counts is
# latency; beyond the third many programs in turn hide it, and registers count.
SMALL, MIDDLING, LARGE = 1 << 23, 1 << 25, 100 << 20


def _default_decode(problem: Problem) -> KernelConfig:
    """Rows and slices until enough warps run, and as much in flight as their registers hold together.

    Beyond two tokens x is what costs: programs own more rows, and soon load x by sectors.
    """
    m, n, k = problem.m_bucket, problem.n, problem.k
    size, tiles, few, block_k = n * k, -(-k // TILE_K), m <= 2, _block_k(problem, TILE_K)
    grouped = block_k < TILE_K
    # words of a lane for 16 rows of a tile
    words = 2 * FragmentLayout(problem.bits, n, k).field
    if m > 8 and not grouped:
        slices = _floor_power(min(tiles, 16))
        return _decode(problem, 16, slices, 1, min(8, slices), 1, True)
    if m > 8:
        slices = _whole(tiles, _floor_power(max(1, min(8, 4200 * 32 / n))))
        return _decode(problem, 32, slices, 1, slices, 2 if block_k == 64 else 1, True)
    if size > LARGE:
        block_n = 64 if block_k >= 64 else 32
        slices, split_k = _share(tiles, 2660 * block_n / n, 4)
        return _decode(problem, block_n, slices, split_k, slices, 0, True)
    if few or size <= (SMALL if not grouped else 2 * SMALL if block_k == 64 else MIDDLING):
        num_warps = 8 if n < 2048 or k > 8192 else 4
        warps = n / 16 * num_warps
        together = _floor_power(max(1, min(4, (2200 if grouped else 4400) / warps * 8 / words)))
        depth = _floor_power(max(1, 55000 / (words * warps * together)))
        depth = min(depth, 2) if grouped else depth
        slices = _whole(tiles, num_warps * together)
        return _decode(problem, 16, slices, 1, min(num_warps, slices), depth, not few)
    if size <= MIDDLING:
        # two tiles a warp at once, twice: all of K in one round or two
        slices, split_k = _share(tiles, 1536 * 32 / n, 1)
        together = 2 if words <= 8 and tiles % (4 * slices * split_k) == 0 else 1
        return _decode(problem, 32, slices * together, split_k, slices, 2, True)
    slices, split_k = _share(tiles, 2660 * 32 / n, 4)
    x_wide = m > 4 or grouped
    # with x by sectors a warp that loads ahead has registers enough for 18 a multiprocessor
    ahead = not x_wide or n / 32 * slices * split_k <= 2300
    return _decode(problem, 32, slices, split_k, slices, int(ahead), x_wide)


def _share(tiles: int, ways: float, most: int) -> tuple[int, int]:
    """Slices of a program and of the grid that together share K in about so many ways.

    Slices of one program need no workspace, but more than `most` hold each other up.
    """
    total = _floor_power(max(1, min(tiles, ways)))
    if total <= most:
        return _whole(tiles, total), 1
    slices = min(total, 2)
    return slices, total // slices


def _whole(tiles: int, slices: int) -> int:
    """slices, or fewer if the last step of few tiles would be mostly empty; a power of two."""
    slices = min(slices, _floor_power(tiles))
    while slices > 1 and -(-tiles // slices) * slices > 1.2 * tiles:
        slices //= 2
    return slices


def _decode(
    problem: Problem, block_n: int, slices: int, split_k: int, num_warps: int, depth: int, x_wide: bool
) -> KernelConfig:
    tiles = -(-problem.k // TILE_K)
    steps = -(-tiles // (slices * split_k))
    # rounds that are not whole are filled up with nothing
    while depth > 1 and steps % depth:
        depth //= 2
    return KernelConfig(
        "decode",
        block_m=8 if problem.m_bucket <= 8 else 16,
        block_n=block_n,
        block_k=_block_k(problem, TILE_K),
        split_k=split_k,
        num_warps=num_warps,
        num_stages=1,
        slices=slices,
        depth=depth,
        x_wide=x_wide,
        dependent=_dependent_launch(problem.arch),
    )


def _decode_candidates(problem: Problem) -> tuple[KernelConfig, ...]:
    """The rule's config, others that load more or less ahead, and half and twice its rows or share of K."""
    default = _default_decode(problem)
    tiles = -(-problem.k // TILE_K)
    together = default.slices // default.num_warps
    ways = default.num_warps * default.split_k
    found = [default, replace(default, x_wide=not default.x_wide)]
    found += [replace(default, depth=depth) for depth in (0, 1, 2)]
    for block_n in {default.block_n, 16, 32} | ({64} if ways <= 8 else set()):
        for total in (ways // 2, ways, ways * 2):
            for warps in {2, min(8, total)} if total > 1 else {1}:
                slices = warps * min(together, max(1, 64 // block_n))
                if total <= warps * 16 and warps <= total and slices * (total // warps) <= tiles:
                    depth, x_wide = default.depth, default.x_wide
                    found.append(_decode(problem, block_n, slices, total // warps, warps, depth, x_wide))
    return tuple(dict.fromkeys(found))


def _default_gemm(problem: Problem) -> KernelConfig:
    """Tiles by tokens, then by how many of them there are; K is split until enough programs run.

    Up to 32 tokens the tile has them all, see _gemm_at_once; up to 128, tiles of 64 tokens, or of 32 where
    layers are small; beyond, 128 with scales on the weights.
    """
    m, n, k = problem.m_bucket, problem.n, problem.k
    if m <= 16:
        # two products a block want registers
        halves = _block_k(problem, TILE_K) == 64
        wide = n > 64 * (7 if halves else 6) * _MULTIPROCESSORS or (k > 16384 and not halves)
        return _gemm_at_once(problem, 256 if wide else 64)
    if m <= 32:
        return _gemm_at_once(problem, 128 if n * k > LARGE else 64)
    if m <= 64 and n <= 8192 and k < 8192:
        return _gemm(problem, 32, 64, 128, _split(problem, 512, 64, 32, 512), 4, 3)
    if m <= 64 and (n > 10240 or k > 16384):
        return _gemm(problem, 64, 128, 128, _split(problem, 256, 128, 64), 4, 3)
    if m <= 64:
        return _gemm(problem, 64, 64, 128, _split(problem, 450, 64, 64), 4, 3)
    if m <= 128 and n <= 16384:
        block_n = 128 if k > n or n > 10240 else 64
        num_warps = 8 if block_n == 128 and n >= 8192 else 4
        return _gemm(problem, 64, block_n, 128, _split(problem, 400, block_n, 64, 1024), num_warps, 3)
    if m == 256 and n <= 4096:
        return _gemm(problem, 64, 128, 128, _split(problem, 256, 128, 64), 8, 3)
    if m in (256, 512) and k > 8192:
        return _gemm(problem, 128, 128, 64, _split(problem, 256, 128, 128), 4, 3)
    if m <= 256 or (m <= 512 and n < 16384):
        return _gemm(problem, 128, 64, 64, _split(problem, 400, 64, 128) if m <= 256 else 1, 4, 3)
    return _gemm(problem, 128, 128, 64, 1, 4, 3)


def _gemm_at_once(problem: Problem, block_n: int) -> KernelConfig:
    """A tile of all of up to 32 tokens, and K split into as many programs as run at once.

    Of tiles of 64 rows, with 4 warps, a multiprocessor has registers for 5, or 7 with 16 tokens; of wider
    ones, with 8, for two. A slice has four steps or more.
    """
    few, grouped = problem.m_bucket <= 16, _block_k(problem, TILE_K) < TILE_K
    tiles = -(-problem.n // block_n)
    # 7 have few registers each, which is worth it where nearly all of them run
    full = 7 * _MULTIPROCESSORS % tiles < 7 * _MULTIPROCESSORS / 20
    places = 2 if block_n > 64 else 5 if not few else 7 if full or grouped else 6
    split_k = max(1, min(places * _MULTIPROCESSORS // tiles, problem.k // (4 * TILE_K), 14))
    if not few:
        # adding up more slices costs a place
        split_k = min(8, _floor_power(split_k))
    config = _gemm(problem, 16 if few else 32, block_n, 128, split_k, 4 if block_n == 64 else 8, 3)
    return config if block_n == 64 or split_k == 1 else replace(config, descriptor=False)


def _split(problem: Problem, programs: int, block_n: int, block_m: int, least: int = 256) -> int:
    """Slices of K that make at most so many programs: a power of two up to 8, of `least` inputs or more."""
    tiles = -(-problem.n // block_n) * -(-problem.m_bucket // block_m)
    return min(8, _floor_power(max(1, min(programs / tiles, problem.k / least))))


def _gemm(
    problem: Problem, block_m: int, block_n: int, block_k: int, split_k: int, num_warps: int, num_stages: int
) -> KernelConfig:
    cuda = problem.arch.startswith("sm_")
    groups = block_k // _block_k(problem, block_k)
    few, fields = block_m <= 16, FragmentLayout(problem.bits, problem.n, problem.k).field == 4
    return KernelConfig(
        "gemm",
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        split_k=split_k,
        num_warps=num_warps,
        num_stages=num_stages,
        # several groups a block share a product, but two of few tokens have one each
        scale_weights=block_m >= 128 or (groups > 1 and not (groups == 2 and few and fields)),
        descriptor=_dependent_launch(problem.arch) and block_m >= 32,
        dependent=_dependent_launch(problem.arch) and problem.m_bucket <= 64 and cuda,
    )


def _gemm_candidates(problem: Problem) -> tuple[KernelConfig, ...]:
    m = problem.m_bucket
    found = [_default_gemm(problem)]
    if m <= 8:
        return tuple(found)
    if m <= 32:
        for block_n in (64, 128, 256) if m <= 16 else (64, 128):
            config = _gemm_at_once(problem, block_n)
            fewer = {config.split_k, _floor_power(config.split_k), max(1, config.split_k // 2)}
            found += [replace(config, split_k=split_k) for split_k in sorted(fewer)]
        return tuple(dict.fromkeys(found))
    if m <= 128:
        shapes = [(32, 64, 128, 4, 3), (64, 64, 128, 4, 3), (64, 128, 128, 4, 3), (64, 128, 128, 8, 3)]
        shapes += [(128, 64, 64, 4, 3), (128, 128, 64, 8, 3)] if m == 128 else []
    else:
        shapes = [(64, 128, 128, 8, 3), (128, 64, 64, 4, 3), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3)]
    for block_m, block_n, block_k, num_warps, num_stages in shapes:
        for split_k in (1, 2, 4, 8):
            programs = -(-problem.n // block_n) * -(-m // block_m) * split_k
            enough = split_k == 1 or programs <= 1200
            if (
                enough
                and programs >= min(64, programs * 8 // split_k)
                and split_k * 256 <= max(problem.k, 256)
            ):
                found.append(_gemm(problem, block_m, block_n, block_k, split_k, num_warps, num_stages))
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class _HopperTile:
    """A tile of hopper_kernel and what it costs on an H200.

    programs: that a multiprocessor holds.  alone, full: microseconds for 128 inputs when half of the programs
    that the GPU holds are running, and when all are.
    """

    config: KernelConfig
    programs: int
    alone: float
    full: float


def _hopper(
    block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int, slices: int = 1
) -> KernelConfig:
    return KernelConfig(
        "hopper",
        block_m,
        block_n,
        block_k,
        num_warps=num_warps,
        num_stages=num_stages,
        slices=slices,
        dependent=True,
    )


# Fitted, with the microseconds of _hopper_cost, to measurements of nine layers and 64 to 1024 tokens, which
# scatter by 3 % around it; tiles of two slices to three layers and 64 to 512 tokens, with twice the scatter.
_HOPPER_TILES = (
    _HopperTile(_hopper(256, 128, 64, 8, 3), 1, 1.18, 1.39),
    _HopperTile(_hopper(256, 64, 64, 4, 3), 1, 0.58, 0.76),
    _HopperTile(_hopper(128, 128, 16, 4, 2), 2, 1.25, 1.58),
    _HopperTile(_hopper(128, 128, 64, 8, 5), 1, 0.66, 0.80),
    _HopperTile(_hopper(128, 64, 16, 4, 3), 2, 0.61, 0.81),
    _HopperTile(_hopper(128, 64, 64, 4, 5, slices=2), 1, 0.345, 0.415),
    _HopperTile(_hopper(64, 128, 64, 4, 4), 2, 0.80, 0.98),
    _HopperTile(_hopper(64, 64, 16, 4, 5), 2, 0.455, 0.57),
    _HopperTile(_hopper(64, 64, 64, 4, 10, slices=2), 1, 0.24, 0.285),
    _HopperTile(_hopper(32, 64, 64, 4, 14, slices=2), 1, 0.205, 0.25),
)

_MULTIPROCESSORS = 132


def _hopper_cost(tile: _HopperTile, tiles: int, steps: int, split_k: int, at_once: int) -> float:
    """Microseconds by a simple count: rounds of programs, the steps of each, and the adding of parts."""
    slots = _MULTIPROCESSORS * tile.programs
    shares = hopper.share_out(tiles, steps, split_k, at_once)
    rounds = [slots] * (shares.whole // slots) + [shares.whole % slots]
    later = -(-(tiles - shares.whole) * shares.pitch // shares.share)
    parts = [slots] * (later // slots) + [later % slots]
    # programs of one tile start and end sooner
    us = 0.5 if at_once or tiles > slots else 0.1
    if not at_once:
        # a program of its own for every tile starts with an empty ring, which another may hide
        us += 6.0 / tile.programs * (max(shares.whole - 1, 0) // slots)
    for running, length in [(r, steps) for r in rounds] + [(r, shares.share) for r in parts]:
        if running:
            busy = min(1.0, max(0.0, 2 * running / slots - 1))
            us += 1.2 + length * (tile.alone + (tile.full - tile.alone) * busy)
    if shares.most_parts > 1:
        size = tile.config.block_m * tile.config.block_n / 2**14
        if split_k > 2 or not at_once:
            # slices all end at once, and the sums of many fill L2
            size *= max(1.0, size)
        us += 1.55 + 1.13 * shares.most_parts * size
    if split_k == 1 and at_once and not shares.whole and steps > 32 and tile.config.block_m > 64:
        # no two programs are at the same place of K, nor read the same x
        us *= 1.1
    return us


def _hopper_divisions(problem: Problem, tile: _HopperTile, tiles: int, steps: int) -> list[tuple[int, int]]:
    """split_k and at_once worth a thought: none, all tiles in slices, or those left over from full rounds.

    K is only cut until the multiprocessors have their programs, with thirds where two rounds are to become
    one and a half.
    """
    slots = _MULTIPROCESSORS * tile.programs
    rest = tiles % slots
    found = [(1, 0)]
    found += [(s, 0) for s in (2, 4, 6, 8) if tiles * s <= slots + 16 and steps >= 2 * s]
    found += [(3, 0)] if tiles * 3 <= 2 * slots + 16 and steps >= 6 else []
    if tiles > slots:
        found += [(s, slots) for s in (2, 3, 4, 8) if 0 < rest * s <= slots and steps >= 4 * s]
    # programs at unlike places of K read more of x than L2 gives them to narrow tiles, or holds of long rows
    wide = tile.config.block_n > 64 and problem.k <= 16384
    if rest and tiles * steps > 3 * slots and (wide or problem.k <= 4096):
        found.append((1, slots))
    return found


def _hopper_by_cost(problem: Problem) -> list[KernelConfig]:
    """Every tile and division worth a thought, cheapest first. A tile has no more tokens than the problem."""
    steps = -(-problem.k // TILE_K)
    options = []
    for tile in _HOPPER_TILES:
        config = replace(tile.config, block_k=_block_k(problem, tile.config.block_k))
        tiles = -(-problem.n // config.block_n) * -(-problem.m_bucket // config.block_m)
        # two scales and zero-points a row, or more, leave no registers for 128 x 128 by four warps
        crowded = (config.block_m, config.block_n, config.num_warps) == (128, 128, 4)
        if config.block_m > problem.m_bucket or (crowded and problem.has_zero and problem.group_size <= 64):
            continue
        for split_k, at_once in _hopper_divisions(problem, tile, tiles, steps):
            us = _hopper_cost(tile, tiles, steps, split_k, at_once)
            options.append((us, replace(config, split_k=split_k, at_once=at_once)))
    return [config for _, config in sorted(options, key=lambda option: option[0])]


def _default_hopper(problem: Problem) -> KernelConfig:
    return _hopper_by_cost(problem)[0]


def _hopper_candidates(problem: Problem) -> tuple[KernelConfig, ...]:
    """The four cheapest."""
    return tuple(_hopper_by_cost(problem)[:4])


def _default_resident(problem: Problem) -> KernelConfig:
    """A program a multiprocessor and slices of 32 tiles, or one of up to 40.

    Blocks of 32 rows; of 16 where there would be about one for each program, unless that is over soon.
    """
    tiles = -(-problem.k // TILE_K)
    turns = -(-tiles // 8) if tiles <= 40 else 4
    narrow = 16 < tiles <= 40 and -(-problem.n // 32) <= 1.25 * _MULTIPROCESSORS
    return _resident(problem, 16 if narrow else 32, turns)


def _resident(problem: Problem, block_n: int, turns: int) -> KernelConfig:
    """turns: tiles along K that each of the 8 warps keeps."""
    return KernelConfig(
        "resident",
        block_m=8 if problem.m_bucket <= 8 else 16,
        block_n=block_n,
        block_k=_block_k(problem, TILE_K),
        split_k=-(-problem.k // (TILE_K * 8 * turns)),
        num_warps=8,
        num_stages=1,
        slices=8 * turns,
        dependent=True,
        at_once=_MULTIPROCESSORS,
    )


def _resident_candidates(problem: Problem) -> tuple[KernelConfig, ...]:
    """The rule's config, other rows, and fewer tiles a warp where that fills slices better."""
    default = _default_resident(problem)
    turns = default.slices // 8
    found = [default] + [_resident(problem, block_n, turns) for block_n in (16, 32)]
    if default.split_k > 1:
        found += [_resident(problem, 32, 3)]
    return tuple(dict.fromkeys(found))


def _default_dense(problem: Problem) -> KernelConfig:
    return KernelConfig("dense", block_m=0, block_n=64, block_k=_block_k(problem, TILE_K))


def _block_k(problem: Problem, at_most: int) -> int:
    """Inputs a block may span without leaving its group."""
    return (
        at_most if problem.group_size == problem.k else min(at_most, problem.group_size & -problem.group_size)
    )


def _dependent_launch(arch: str) -> bool:
    """Whether the target has programmatic dependent launch and TMA descriptors."""
    return arch.startswith("sm_") and int(arch[3:]) >= 90


def _floor_power(value: float) -> int:
    """value >= 1 rounded down to a power of two."""
    return 1 << (int(value).bit_length() - 1)


def _launch_decode(
    x: Tensor,
    weight: AnyWeight,
    bias: Tensor | None,
    out: Tensor,
    config: KernelConfig,
    routes: Tensor | None = None,
    gated: bool = False,
) -> None:
    assert isinstance(weight, FragmentWeight)
    fragment.decode(
        x,
        weight,
        bias,
        out,
        block_m=config.block_m,
        block_n=config.block_n,
        split_k=config.split_k,
        slices=config.slices,
        num_warps=config.num_warps,
        depth=config.depth,
        x_wide=config.x_wide,
        dependent=config.dependent,
        routes=routes,
        gated=gated,
    )


def _launch_gemm(
    x: Tensor, weight: AnyWeight, bias: Tensor | None, out: Tensor, config: KernelConfig
) -> None:
    assert isinstance(weight, FragmentWeight)
    fragment.gemm(
        x,
        weight,
        bias,
        out,
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        split_k=config.split_k,
        scale_weights=config.scale_weights,
        descriptor=config.descriptor,
        dependent=config.dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _launch_hopper(
    x: Tensor, weight: AnyWeight, bias: Tensor | None, out: Tensor, config: KernelConfig
) -> None:
    assert isinstance(weight, FragmentWeight)
    hopper.multiply(
        x,
        weight,
        bias,
        out,
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        split_k=config.split_k,
        at_once=config.at_once,
        dependent=config.dependent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        slices=config.slices,
    )


def _launch_resident(
    x: Tensor, weight: AnyWeight, bias: Tensor | None, out: Tensor, config: KernelConfig
) -> None:
    assert isinstance(weight, FragmentWeight)
    resident.multiply(
        x,
        weight,
        bias,
        out,
        block_m=config.block_m,
        block_n=config.block_n,
        slices=config.slices,
        at_once=config.at_once,
        dependent=config.dependent,
        num_warps=config.num_warps,
    )


def _launch_dense(
    x: Tensor, weight: AnyWeight, bias: Tensor | None, out: Tensor, config: KernelConfig
) -> None:
    assert isinstance(weight, FragmentWeight)
    dense = fragment.dequantize(weight, x.dtype)
    if bias is None:
        torch.mm(x, dense.t(), out=out)
    else:
        torch.addmm(bias.to(x.dtype), x, dense.t(), out=out)


def _accepts_plain(problem: Problem) -> str | None:
    if problem.order != "row":
        return "the words are in fragment order"
    if problem.group_size != problem.k and problem.group_size % 32:
        return f"group size {problem.group_size} is neither a multiple of 32 nor the whole row"
    return None


def _default_plain(problem: Problem) -> KernelConfig:
    """Tiles of 64 outputs; K is split until about 512 programs run, each with 4 blocks or more."""
    block_m = min(max(problem.m_bucket, 16), 64)
    if problem.arch == "cpu":
        # the interpreter's time goes by operations, whatever their size
        return KernelConfig(
            "plain", block_m, 64, wna16.block_within_group(problem.group_size, problem.k, 512), split_k=2
        )
    block_k = wna16.block_within_group(problem.group_size, problem.k, 64)
    tiles = -(-problem.m_bucket // block_m) * -(-problem.n // 64)
    split_k = max(1, min(512 // tiles, -(-problem.k // block_k) // 4, 16))
    return KernelConfig("plain", block_m, 64, block_k, split_k)


def _plain_candidates(problem: Problem) -> tuple[KernelConfig, ...]:
    default = _default_plain(problem)
    deep = wna16.block_within_group(problem.group_size, problem.k, 128)
    return (
        default,
        *(
            KernelConfig("plain", default.block_m, block_n, block_k, split_k)
            for block_n in (32, 64, 128)
            for block_k in sorted({default.block_k, deep})
            for split_k in (1, 4, 8)
        ),
    )


def _launch_plain(
    x: Tensor, weight: AnyWeight, bias: Tensor | None, out: Tensor, config: KernelConfig
) -> None:
    assert isinstance(weight, GemmWeight)
    wna16.wna16(
        x,
        weight.words,
        weight.scale,
        weight.zero_point,
        bias,
        out,
        bits=weight.bits,
        group_size=weight.group_size,
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
        split_k=config.split_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


VARIANTS: dict[str, Variant] = {
    "resident": Variant(_accepts_resident, _default_resident, _resident_candidates, _launch_resident),
    "decode": Variant(_accepts_decode, _default_decode, _decode_candidates, _launch_decode),
    "hopper": Variant(_accepts_hopper, _default_hopper, _hopper_candidates, _launch_hopper),
    "gemm": Variant(_accepts_gemm, _default_gemm, _gemm_candidates, _launch_gemm),
    "dense": Variant(
        _accepts_dense, _default_dense, lambda problem: (_default_dense(problem),), _launch_dense
    ),
    "plain": Variant(_accepts_plain, _default_plain, _plain_candidates, _launch_plain),
}


def _require(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        wanted = " or ".join(map(_name, dtypes))
        raise ValueError(
            f"{name} is {list(tensor.shape)} {_name(tensor.dtype)}, wanted {list(shape)} {wanted}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

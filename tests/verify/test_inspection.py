"""inspect: what it says of sizes is counted by hand, of engines what their rules say."""

import pytest

from lowbit import inspection, pipeline
from lowbit.errors import RecipeError, SourceError
from lowbit.recipe import Recipe


@pytest.fixture(scope="module")
def look(build_llama, tmp_path_factory):
    """A function (keys of the recipe, config of the model) -> Inspection."""

    def make(config=None, **keys):
        out = tmp_path_factory.mktemp("inspect") / "out"
        pipeline.quantize(
            build_llama(tie_word_embeddings=True, **(config or {})), out, Recipe(**({"method": "rtn"} | keys))
        )
        return inspection.inspect(out, kernels=True, arch="sm_90")

    return make


def engine(found, name):
    return next(engine for engine in found.engines if engine.name == name)


def test_sizes_are_those_counted_by_hand(look):
    found = look(group=64)
    weights = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 512)
    packed = weights // 2 + weights // 64 * 2 + 14 * 16
    dense = 2 * (512 * 256 + 256 + 2 * 2 * 256)
    assert [(row.layers, row.weights, row.packed_bytes) for row in found.schemes] == [(14, weights, packed)]
    assert (found.dense_bytes, found.total_bytes) == (dense, dense + packed)
    assert found.original_bytes == dense + 2 * weights
    assert found.architecture == "LlamaForCausalLM"
    assert found.faults == ()


RULES = [
    ({"group": 128}, "vLLM, CUDA", True, "Machete (Hopper), else Marlin"),
    ({"group": 32}, "vLLM, CUDA", True, "Marlin"),
    ({"group": 256}, "vLLM, CUDA", True, "Triton"),
    ({"group": 128}, "SGLang, CUDA", True, "Marlin"),
    ({"group": 256}, "SGLang, CUDA", False, None),
    ({"bits": 8}, "vLLM, CPU", False, None),
    ({"group": 128, "sym": False}, "vLLM, CUDA", True, "Machete (Hopper), else Marlin"),
    ({"sym": False}, "transformers", True, "dense after load"),
    ({"format": "gptq-v2", "sym": False}, "vLLM, CUDA", False, None),
    ({"format": "gptq"}, "vLLM, CUDA", True, "Machete (Hopper), else Marlin"),
    ({"exclude": ("re:.*k_proj",), "allow_mixed_fused": True}, "vLLM, CUDA", False, None),
]


@pytest.mark.parametrize(("keys", "name", "loads", "kernel"), RULES, ids=str)
def test_engines_follow_their_rules(look, keys, name, loads, kernel):
    found = engine(look(**keys), name)
    assert found.loads == loads, found.note
    assert found.kernels[:1] == ((kernel,) if kernel else ())
    assert loads or found.note


@pytest.mark.parametrize(
    ("config", "group", "degree", "reason"),
    [
        # o_proj has 256 inputs: two groups of 128
        ({}, 128, 2, "256 inputs in groups of 128"),
        # four heads
        ({}, 64, 4, "4 attention heads"),
        # down_proj has 384 inputs: three groups, which two ranks cannot share
        ({"intermediate_size": 384}, 128, 1, "384 inputs in groups of 128"),
        ({"intermediate_size": 384}, -1, 4, "4 attention heads"),
    ],
)
def test_the_highest_tensor_parallel_degree_has_its_reason(look, config, group, degree, reason):
    found = look(config, group=group)
    assert found.tensor_parallel == degree
    assert reason in found.tensor_parallel_limit


def test_the_kernel_table_lists_every_shape_once(look):
    found = look(rules=({"match": "re:.*down_proj$", "bits": 8},))
    rows = {(row.n, row.k, row.scheme): row.layers for row in found.kernels if row.tokens == 1}
    assert rows == {
        (256, 256, "int4 sym g128"): 4,
        (128, 256, "int4 sym g128"): 4,
        (512, 256, "int4 sym g128"): 4,
        (256, 512, "int8 sym g128"): 2,
    }
    # on a GPU the words are put in fragment order, which the plain kernel cannot read
    assert {row.chosen for row in found.kernels if row.tokens == 256} <= {"hopper", "gemm", "dense"}
    assert all("fragment order" in row.refusals["plain"] for row in found.kernels)


def test_without_a_gpu_the_kernel_table_says_so(build_llama, tmp_path):
    pipeline.quantize(build_llama(), tmp_path / "out", Recipe(method="rtn"))
    rows = inspection.inspect(tmp_path / "out", kernels=True, arch="cpu").kernels
    assert {row.chosen for row in rows} == {"plain"}
    reasons = {reason for row in rows for reason in row.refusals.values()}
    assert reasons == {"needs a GPU; --arch sm_90 shows what one would run"}


def test_a_plain_model_is_refused(build_llama):
    with pytest.raises(SourceError, match="not quantized"):
        inspection.inspect(build_llama())


def test_an_architecture_that_is_none_is_refused(build_llama, tmp_path):
    pipeline.quantize(build_llama(), tmp_path / "out", Recipe(method="rtn"))
    with pytest.raises(RecipeError, match="--arch hopper"):
        inspection.inspect(tmp_path / "out", arch="hopper")
    # asking for one asks for its kernels
    assert inspection.inspect(tmp_path / "out", arch="gfx942").kernels

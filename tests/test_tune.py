"""lowbit_kernels.json: what quantize leaves, who minds it, and what `tune` says where it cannot measure."""

import json

import pytest
import torch

from lowbit.errors import RecipeError
from lowbit.folder import KERNELS
from lowbit.pipeline import quantize
from lowbit.recipe import Recipe, Rule
from lowbit.scheme import QuantScheme
from lowbit.tune import kinds, tune
from lowbit.verify import verify
from lowbit_kernels.dispatch import choose
from lowbit_kernels.problem import KernelConfig, Problem
from lowbit_kernels.tables import read_table


def test_alike_layers_are_one_kind_and_a_row_is_its_width():
    sym, row = QuantScheme(4, 128, True, "bfloat16"), QuantScheme(8, -1, False, "float32")
    layers = {"a": ((256, 512), sym), "b": ((256, 512), sym), "c": ((128, 512), sym), "d": ((256, 512), row)}
    found = kinds(layers)
    assert [
        (kind.n, kind.k, kind.bits, kind.group_size, kind.has_zero, kind.act_dtype) for kind in found
    ] == [
        (256, 512, 4, 128, False, "bfloat16"),
        (128, 512, 4, 128, False, "bfloat16"),
        (256, 512, 8, 512, True, "float16"),
    ]


def test_siblings_of_one_scheme_are_one_product():
    sym, other = QuantScheme(4, 128, True, "bfloat16"), QuantScheme(8, 128, True, "bfloat16")
    layers = {f"0.{name}": ((n, 512), sym) for name, n in (("v_proj", 64), ("q_proj", 256), ("k_proj", 64))}
    layers |= {"0.gate_proj": ((1024, 512), sym), "0.up_proj": ((1024, 512), other)}
    layers |= {"1.gate_proj": ((128, 512), sym)}
    assert [(kind.n, kind.bits) for kind in kinds(layers)] == [(384, 4), (1024, 4), (1024, 8), (128, 4)]


def test_quantize_leaves_the_choice_that_would_be_made_without_it(llama_folder, tmp_path):
    recipe = Recipe(method="rtn", device="cpu", rules=(Rule(match="down_proj", bits=8, group=-1),))
    quantize(llama_folder, tmp_path / "out", recipe)
    file = tmp_path / "out" / KERNELS
    table = json.loads(file.read_text())
    assert table["tuned"] is False
    problems = [Problem(**row["problem"]) for row in table["rows"]]
    assert {(p.n, p.k, p.bits) for p in problems} == {
        (256, 256, 4), (512, 256, 4), (1024, 256, 4), (256, 512, 8),
    }  # fmt: skip
    assert [KernelConfig(**row["config"]) for row in table["rows"]] == [
        choose(problem) for problem in problems
    ]
    # nothing to install, and nothing to warn of
    assert read_table(file, "any GPU") == ({}, None)


def test_a_table_may_change_after_the_manifest(llama_folder, tmp_path):
    quantize(llama_folder, tmp_path / "out", Recipe(method="rtn", device="cpu"))
    (tmp_path / "out" / KERNELS).write_text("{}")
    assert verify(tmp_path / "out", llama_folder).ok


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_without_a_gpu_tune_says_where_to_run_it(tmp_path):
    with pytest.raises(RecipeError, match="measures on a GPU"):
        tune(tmp_path)


@pytest.mark.gpu
def test_tune_writes_a_table_that_is_taken(llama_folder, tmp_path):
    quantize(llama_folder, tmp_path / "out", Recipe(method="rtn"))
    summary = tune(tmp_path / "out", tokens=(1, 16))
    configs, reason = read_table(tmp_path / "out" / KERNELS, torch.cuda.get_device_name())
    assert reason is None
    assert len(configs) == summary["rows"] == 2 * summary["kinds"]

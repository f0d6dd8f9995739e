"""The recipes that we ship parse, and do what their names say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lowbit.recipe import Recipe, make_recipe, matches

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_parses_and_says_what_it_is_for(file: Path) -> None:
    assert make_recipe(file) is not None
    assert file.read_text().startswith("# ")


def test_int4_is_the_defaults_written_out() -> None:
    recipe = make_recipe(RECIPES / "int4.yaml")
    assert recipe.symmetric == Recipe().symmetric
    assert recipe.model_copy(update={"sym": None}) == Recipe()


def test_int8_has_eight_bits() -> None:
    recipe = make_recipe(RECIPES / "int8.yaml")
    assert (recipe.bits, recipe.symmetric) == (8, True)


def test_down_proj_and_nothing_else_gets_eight_bits() -> None:
    (rule,) = make_recipe(RECIPES / "int4-down8.yaml").rules
    names = [f"model.layers.3.mlp.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")]
    names.append("model.layers.3.self_attn.o_proj.weight")
    assert [name for name in names if matches(rule.match, name)] == ["model.layers.3.mlp.down_proj.weight"]
    assert rule.bits == 8


def test_rtn_asym_stays_rtn_and_asymmetric() -> None:
    recipe = make_recipe(RECIPES / "rtn-asym.yaml")
    assert (recipe.method, recipe.symmetric, recipe.group) == ("rtn", False, 64)


@pytest.mark.parametrize(
    ("name", "method"), [("gptq", "gptq"), ("hqq-asym", "hqq"), ("int4", "gptq"), ("rtn-asym", "rtn")]
)
def test_the_method_is_what_the_name_says(name: str, method: str) -> None:
    assert make_recipe(RECIPES / f"{name}.yaml").method == method


@pytest.mark.parametrize(
    ("name", "schemes"),
    [
        ("int4", {("o_proj", 4, 128, True), ("down_proj", 4, 128, True)}),
        ("int8", {("o_proj", 8, 128, True), ("down_proj", 8, 128, True)}),
        ("int4-down8", {("o_proj", 4, 128, True), ("down_proj", 8, 128, True)}),
        ("rtn-asym", {("o_proj", 4, 64, False), ("down_proj", 4, 64, False)}),
        ("gptq", {("o_proj", 4, 128, True), ("down_proj", 4, 128, True)}),
        ("hqq-asym", {("o_proj", 4, 64, False), ("down_proj", 4, 64, False)}),
    ],
)
def test_plan_of_a_model_takes_the_recipe(
    name: str, schemes: set[tuple[str, int, int, bool]], llama_folder: Path, lowbit: Callable
) -> None:
    ran = lowbit("plan", llama_folder, "--recipe", RECIPES / f"{name}.yaml", "--json")
    assert ran.code == 0
    layers = {row["name"].rpartition(".")[2]: row["scheme"] for row in ran.event("plan")["layers"]}
    got = {
        (last, layers[last]["bits"], layers[last]["group_size"], layers[last]["symmetric"])
        for last in ("o_proj", "down_proj")
    }
    assert got == schemes


def test_every_recipe_has_its_test() -> None:
    tested = {"int4", "int8", "int4-down8", "rtn-asym", "gptq", "hqq-asym"}
    assert {file.stem for file in RECIPES.glob("*.yaml")} == tested


def test_flags_win_over_the_file_and_only_those_given() -> None:
    recipe = make_recipe(RECIPES / "rtn-asym.yaml", bits=8, group=None)
    assert (recipe.bits, recipe.group, recipe.symmetric) == (8, 64, False)

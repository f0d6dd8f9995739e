"""The flags are the recipe's keys, and the help tells the recipe's defaults."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from lowbit.checkpoint.formats import FORMATS
from lowbit.cli import options
from lowbit.cli.app import app
from lowbit.cli.options import RECIPE_FLAGS
from lowbit.recipe import FormatName, Method, OnIndivisible, Recipe
from lowbit.scheme import BITS, GROUP_SIZES

# Keys that only a recipe file can hold: they have structure.
FILE_ONLY = {"rules", "solver"}
# What the help says where the recipe's default is a rule and not a value.
IN_WORDS = {
    "sym": "sym (hqq: asym)",
    "include": "every decoder linear",
    "exclude": "none",
    "calib": "text in the package",
    "strict": "off",
    "allow_mixed_fused": "off",
    "samples": "128, on a CPU 8 or more",
    "seqlen": "2048, on a CPU 512",
    "trust_remote_code": "off",
    "validate_layers": "on",
}


def option(key: str) -> Any:
    return get_args(RECIPE_FLAGS[key])[1]


def test_every_recipe_key_has_a_flag() -> None:
    assert set(RECIPE_FLAGS) == set(Recipe.model_fields) - FILE_ONLY


@pytest.mark.parametrize("key", RECIPE_FLAGS)
def test_help_tells_the_recipes_default(key: str) -> None:
    told = re.search(r"Default: (.*)\.\[/dim\]$", option(key).help)
    assert told is not None
    default = getattr(Recipe(), key)
    if key not in IN_WORDS:
        assert told[1] == str(default)
    else:
        assert told[1] == IN_WORDS[key]
        assert default in (None, (), IN_WORDS[key] == "on")


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("method", get_args(Method)),
        ("format", tuple(FORMATS)),
        ("on_indivisible", get_args(OnIndivisible)),
        ("bits", BITS),
        ("group", GROUP_SIZES),
    ],
)
def test_help_tells_every_choice(key: str, names: tuple[object, ...]) -> None:
    assert [name for name in names if str(name) not in option(key).help.rpartition("[dim]")[0]] == []


def test_a_recipe_takes_every_format_of_the_table() -> None:
    assert get_args(FormatName) == tuple(FORMATS)


def test_the_default_grid_in_words_is_the_recipes() -> None:
    assert Recipe().symmetric
    assert not Recipe(method="hqq").symmetric


def received(*args: str) -> dict[str, Any]:
    """The flags that a command of this table receives for a command line."""
    import typer

    got: dict[str, Any] = {}
    probe = typer.Typer()

    @probe.command()
    @options.with_recipe_flags
    def command(model: options.Model, *, flags: dict[str, Any], quiet: options.Quiet = False) -> None:
        got.update(flags)

    with pytest.raises(SystemExit) as end:
        probe(["m", *args])
    assert end.value.code == 0
    return got


@pytest.mark.parametrize(
    ("args", "flags"),
    [
        ("", {}),
        ("--bits 8 --group -1", {"bits": 8, "group": -1}),
        ("--sym", {"sym": True}),
        ("--asym", {"sym": False}),
        ("--no-validate", {"validate_layers": False}),
        ("--strict --allow-mixed-fused --trust-remote-code",
         {"strict": True, "allow_mixed_fused": True, "trust_remote_code": True}),
        ("--include re:a --include b --exclude c", {"include": ["re:a", "b"], "exclude": ["c"]}),
        ("--seed 0", {"seed": 0}),
        ("--on-indivisible skip --format gptq --method hqq --device cuda:1",
         {"on_indivisible": "skip", "format": "gptq", "method": "hqq", "device": "cuda:1"}),
        ("--calib a.txt --samples 4 --seqlen 64", {"calib": "a.txt", "samples": 4, "seqlen": 64}),
    ],
)  # fmt: skip
def test_only_given_flags_reach_the_recipe(args: str, flags: dict[str, Any]) -> None:
    # a flag that is not given must stay out: it would silence the recipe file
    assert received(*args.split()) == flags


@pytest.mark.parametrize("command", ["quantize", "plan"])
def test_quantize_and_plan_have_the_same_recipe_flags(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        app([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    # in Annotated, typer.Option keeps the first name in the place of a default
    names = {option(key).default for key in RECIPE_FLAGS}
    assert {"--bits", "--sym/--asym", "--validate/--no-validate"} <= names
    assert [name for name in names if not all(part in text for part in name.split("/"))] == []

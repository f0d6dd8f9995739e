"""Recipe files: what is in them is taken as it stands or refused in one line, never half understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowbit.errors import RecipeError
from lowbit.recipe import make_recipe

# text of the file -> what the message must hold
REFUSED = {
    "- a": "expected keys",
    "hello": "expected keys",
    "4: x": "4: unknown key",
    "yes: 1": "True: unknown key",
    "~: x": "None: unknown key",
    "? [a]\n: x": "not YAML",
    "foo: 1": "foo: unknown key",
    "out: x": "out: unknown key",
    "bits: 4\nbits: 8": "bits is there twice",
    "on-indivisible: skip\non_indivisible: error": "on_indivisible is there twice",
    "rules: [{match: a, bits: 4, bits: 8}]": "bits is there twice",
    "bits:": "bits: must be a valid integer (got None)",
    "bits: 5": "2, 3, 4, 8 (got 5)",
    "bits: true": "bits: use one of",
    "bits: [4]": "bits: ",
    "bits: .nan": "bits: ",
    "bits: &a [*a]": "bits: ",
    "bits: 2024-99-99": "not YAML",
    "seed: " + "9" * 5000: "not YAML",
    "seed: -1": "seed: ",
    "seed: 4294967296": "seed: ",
    "samples: 0": "samples: ",
    "seqlen: -5": "seqlen: ",
    "sym: maybe": "sym: ",
    "include: mlp.down_proj": "include: ",
    "exclude: ['re:(']": "is not a regular expression",
    "exclude: ['re:a{99999999999}']": "is not a regular expression",
    "exclude: ['re:" + "(" * 5000 + ")" * 5000 + "']": "is not a regular expression",
    "rules: [{bits: 8}]": "rules.0.match",
    "rules: [~]": "rules.0",
    "rules: [{match: a, bit: 8}]": "rules.0.bit: unknown key; did you mean bits? (got 8)",
    "bit: 8": "bit: unknown key; did you mean bits? (got 8)",
    "group-size: 64": "group_size: unknown key; did you mean group? (got 64)",
    "method: awq": "method: awq is a --format; use rtn, hqq or gptq",
    "format: gguf": "format: use compressed-tensors, gptq, gptq-v2 or awq (got 'gguf')",
    "rules: [{match: a, group: 48}]": "rules.0.group",
    "!!python/object/apply:os.system ['x']": "not YAML",
    "bits: 4\n---\nbits: 8": "not YAML",
    "bits: 4\0": "not YAML",
    "a: " + "[" * 5000: "not YAML",
}


def test_a_recipe_without_an_end_is_refused() -> None:
    with pytest.raises(RecipeError, match="/dev/zero: a device"):
        make_recipe("/dev/zero")


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:30].encode("unicode_escape").decode())
def test_what_a_recipe_cannot_mean_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        make_recipe(file)
    message = str(error.value)
    assert REFUSED[text] in message
    assert str(file) in message
    assert "\n" not in message


@pytest.mark.parametrize("data", [b"\xff\xfe\x00\x01", b"bits: \xe9"], ids=["utf-16", "latin-1"])
def test_a_recipe_that_is_not_utf8_is_refused(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(data)
    with pytest.raises(RecipeError, match="not YAML"):
        make_recipe(file)


@pytest.mark.parametrize(
    ("text", "bits", "group"),
    [
        ("", 4, 128),
        ("# nothing", 4, 128),
        ("bits: '8'", 8, 128),
        ("bits: 0x8\r\ngroup: 64\r\n", 8, 64),
        ("\ufeffbits: 8", 8, 128),
        ("<<: {bits: 8}\ngroup: 64", 8, 64),
        ('{"bits": 8}', 8, 128),
    ],
)
def test_what_yaml_allows_is_understood(text: str, bits: int, group: int, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text, encoding="utf-8", newline="")
    recipe = make_recipe(file)
    assert (recipe.bits, recipe.group) == (bits, group)


def test_flags_win_over_the_file_in_either_spelling(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("on-indivisible: skip\nbits: 8")
    recipe = make_recipe(file, on_indivisible="error", group=64)
    assert (recipe.on_indivisible, recipe.bits, recipe.group) == ("error", 8, 64)


@pytest.mark.parametrize("name", ["", "absent.yaml", "a" * 300])
def test_a_file_that_is_not_there_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="pass --recipe a YAML file"):
        make_recipe(tmp_path / name)

"""The README names every command, flag and format that there is, with the defaults that hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from lowbit.checkpoint.formats import FORMATS
from lowbit.cli.app import app
from lowbit.cli.options import RECIPE_FLAGS
from lowbit.recipe import Recipe

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without head and rule, backquotes removed."""
    section = README.partition(f"## {heading}\n")[2]
    rows = re.search(r"(?:^\|.*\n)+", section, re.M)
    assert rows is not None
    return [
        [cell.strip().replace("`", "") for cell in row.strip("|").split("|")]
        for row in rows[0].splitlines()[2:]
    ]


def test_every_command_is_listed_and_no_other() -> None:
    listed = {row[0].split()[1] for row in table("Commands")}
    assert listed == {command.name for command in app.registered_commands}


def test_every_format_is_listed_and_no_other() -> None:
    assert {row[0].split()[0] for row in table("Formats, and who loads them")} == set(FORMATS)


def test_every_recipe_flag_is_listed() -> None:
    listed = {name for row in table("Flags of `quantize` and `plan`") for name in row[0].split(", ")}
    wanted = {name for option in RECIPE_FLAGS.values() for name in get_args(option)[1].default.split("/")}
    assert listed == wanted


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("--method", "method"),
        ("--bits", "bits"),
        ("--group", "group"),
        ("--format", "format"),
        ("--on-indivisible", "on_indivisible"),
        ("--device", "device"),
    ],
)
def test_defaults_are_the_recipes(flag: str, key: str) -> None:
    told: dict[str, Any] = {row[0]: row[1] for row in table("Flags of `quantize` and `plan`")}
    assert told[flag] == str(getattr(Recipe(), key))


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)h][^)]*)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    assert (Path(__file__).parents[2] / link).exists()

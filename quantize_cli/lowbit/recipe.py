"""What the user asked for: the flags of `lowbit quantize`, the keys of a recipe file and the arguments of
`lowbit.quantize`, which are one and the same.

    bits: 4
    group: 128
    rules:
      - match: 're:.*\\.mlp\\.down_proj$'
        bits: 8
      - match: model.layers.0.self_attn.q_proj
        skip: true

Flags win over the file; the first rule that matches a layer wins over the top-level keys.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from lowbit.errors import RecipeError, one_line
from lowbit.scheme import BITS, GROUP_SIZES

Method = Literal["rtn", "hqq", "gptq"]
FormatName = Literal["compressed-tensors", "gptq", "gptq-v2", "awq"]
OnIndivisible = Literal["smaller-group", "skip", "error"]


def matches(pattern: str, name: str) -> bool:
    """True if pattern selects the tensor or module `name`.

    `re:EXPR` matches from the start of the module or tensor name; anything else is the whole name or its last
    dotted parts: `mlp.down_proj` selects model.layers.0.mlp.down_proj.weight, `proj` does not.
    """
    module = name.removesuffix(".weight")
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], whole) for whole in (module, name))
    return pattern == name or f".{module}".endswith(f".{pattern}")


def _check_pattern(pattern: str) -> str:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        # the last two: a{99999999999}, and parentheses a thousand deep
        except (re.error, OverflowError, RecursionError) as e:
            raise ValueError(f"{pattern!r} is not a regular expression: {e}") from None
    return pattern


class _Keys(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("bits", check_fields=False)
    @classmethod
    def _known_bits(cls, bits: int | None) -> int | None:
        if bits is not None and bits not in BITS:
            raise ValueError(f"use one of {', '.join(map(str, BITS))}")
        return bits

    @field_validator("group", check_fields=False)
    @classmethod
    def _known_group(cls, group: int | None) -> int | None:
        if group is not None and group not in GROUP_SIZES:
            raise ValueError(f"use one of {', '.join(map(str, GROUP_SIZES))}")
        return group


class Rule(_Keys):
    """What differs for the layers that `match` selects; None keeps the recipe's value."""

    match: str
    bits: int | None = None
    group: int | None = None
    sym: bool | None = None
    method: Method | None = None
    skip: bool = False

    _pattern = field_validator("match")(_check_pattern)


class Recipe(_Keys):
    """Everything that decides the bytes of the output, with the defaults that the command line shows."""

    method: Method = "gptq"
    bits: int = 4
    group: int = 128
    sym: bool | None = None
    format: FormatName = "compressed-tensors"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    on_indivisible: OnIndivisible = "smaller-group"
    allow_mixed_fused: bool = False
    calib: str | None = None
    samples: int | None = Field(default=None, ge=1)
    seqlen: int | None = Field(default=None, ge=1)
    # what random, numpy and torch all take
    seed: int = Field(default=0, ge=0, lt=2**32)
    strict: bool = False
    trust_remote_code: bool = False
    device: str = "auto"
    validate_layers: bool = True
    solver: dict[str, Any] = {}
    rules: tuple[Rule, ...] = ()

    @field_validator("include", "exclude")
    @classmethod
    def _patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_check_pattern, patterns))

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError("use auto, cpu, cuda or cuda:N")
        return device

    @property
    def symmetric(self) -> bool:
        """The grid asked for; hqq is asymmetric unless told otherwise."""
        return self.method != "hqq" if self.sym is None else self.sym


class _Loader(yaml.SafeLoader):
    """YAML in which a key stands once; the plain loader takes the last of two and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = str(key.value).replace("-", "_")
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{name} is there twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def make_recipe(file: str | Path | None = None, **given: Any) -> Recipe:
    """Return the recipe of a YAML file (or none) with the `given` keys that are not None on top.

    Raises RecipeError naming the file or flag and the allowed values.
    """
    keys: dict[str, Any] = {}
    if file is not None:
        try:
            # such as /dev/zero, which has no end
            if Path(file).is_char_device() or Path(file).is_block_device():
                raise RecipeError(f"{file}: a device; pass --recipe a YAML file")
            keys = yaml.load(Path(file).read_text(encoding="utf-8-sig"), _Loader) or {}
        except OSError as e:
            raise RecipeError(f"{file}: {e.strerror or e}; pass --recipe a YAML file") from None
        # ValueError: not UTF-8, or a date or number that Python cannot hold
        except (yaml.YAMLError, ValueError, RecursionError) as e:
            raise RecipeError(f"{file}: not YAML: {one_line(e, None)}") from None
        if not isinstance(keys, dict):
            raise RecipeError(f"{file}: expected keys like 'bits: 4', found {type(keys).__name__}")
    keys = {str(k).replace("-", "_"): v for k, v in keys.items()}
    keys |= {k: v for k, v in given.items() if v is not None}
    try:
        return Recipe(**keys)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(map(str, first["loc"])) or "recipe"
        flag = first["loc"] and given.get(str(first["loc"][0])) is not None
        where = f"--{first['loc'][0]}".replace("_", "-") if flag else f"{file}: {key}"
        raise RecipeError(f"{where}: {_reason(first)}") from None


def _reason(error: Any) -> str:
    """What is wrong with a key, in words that say what to do."""
    got = error["input"]
    match error["type"]:
        case "extra_forbidden":
            known = Rule.model_fields if error["loc"][0] == "rules" else Recipe.model_fields
            near = get_close_matches(str(error["loc"][-1]), known, n=1)
            return f"unknown key{f'; did you mean {near[0]}?' if near else ''} (got {got!r})"
        case "literal_error":
            names = error["ctx"]["expected"].replace("'", "")
            if error["loc"][-1] == "method" and got in get_args(FormatName):
                return f"{got} is a --format; use {names} for the method"
            return f"use {names} (got {got!r})"
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{message} (got {got!r})"

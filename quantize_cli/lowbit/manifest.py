"""What lowbit.json has to look like for verify, report and runtime to rely on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lowbit.errors import SourceError

Pair = Annotated[list[int], Field(min_length=2, max_length=2)]


class _Part(BaseModel):
    # values of the wrong type are refused rather than converted; later versions may add keys
    model_config = ConfigDict(strict=True, extra="ignore")


class _Scheme(_Part):
    bits: int
    group_size: int
    symmetric: bool
    scale_dtype: str


class _Errors(_Part):
    """What was measured of a layer, see validate.LayerErrors; nothing where layers were not proved."""

    weight_error: float
    output_error: float
    snr_db: float


class _Nothing(_Part):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Layer(_Part):
    """A quantized layer and where its weight lies in the source, see plan.LayerPlan."""

    name: str
    source: str
    shape: Pair
    scheme: _Scheme
    method: str
    packed_bytes: int
    expert: int | None = None
    rows: Pair | None = None
    transposed: bool = False
    fallback: str | None
    checksums: dict[str, str] = {}
    errors: _Errors | _Nothing


class _Copied(_Part):
    """A tensor that was copied as it is, see plan.CopyPlan."""

    name: str
    shape: list[int]
    dtype: str
    nbytes: int
    reason: str
    linear: bool
    checksum: str | None = None


class _Source(_Part):
    name: str
    files: dict[str, str]


class _Output(_Part):
    files: dict[str, str]
    checksums: dict[str, str] = {}


class _Recipe(_Part):
    bits: int
    format: str


class _Manifest(_Part):
    lowbit: str
    recipe: _Recipe
    versions: dict[str, str]
    seed: int
    source: _Source
    output: _Output
    layers: list[_Layer]
    copied: list[_Copied]
    dropped: dict[str, str]
    notes: list[str]
    eval: dict[str, float] = {}


def complaint(manifest: dict[str, Any]) -> str | None:
    """Why a manifest cannot be relied on: the first value that is missing or of the wrong type, else None."""
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as e:
        first = e.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return None


def check_folder(path: Path) -> None:
    """Raise SourceError if path is not a folder with a config.json; this much can be told without torch."""
    if not path.is_dir():
        found = "is no folder" if path.exists() else "no such folder"
        raise SourceError(f"{path}: {found}; pass the folder that lowbit quantize wrote")
    if not (path / "config.json").is_file():
        raise SourceError(f"{path}: no config.json; pass the folder that lowbit quantize wrote")

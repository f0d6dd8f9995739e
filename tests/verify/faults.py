"""Faults planted in a written checkpoint, by byte arithmetic on the safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Q_PROJ = "model.layers.0.self_attn.q_proj"
SAME_SHAPE = "model.layers.1.self_attn.q_proj"
NUMPY = {"I32": np.int32, "I64": np.int64, "F16": np.float16, "F32": np.float32, "BF16": np.uint16}


@dataclass
class File:
    """One safetensors file in memory: header entries and data."""

    path: Path
    header: dict[str, Any]
    data: bytearray

    def save(self) -> None:
        text = json.dumps(self.header).encode()
        self.path.write_bytes(len(text).to_bytes(8, "little") + text + self.data)

    def array(self, name: str) -> np.ndarray:
        """A view of a tensor that can be written to."""
        item = self.header[name]
        begin, end = item["data_offsets"]
        view = np.frombuffer(
            self.data, NUMPY[item["dtype"]], (end - begin) // NUMPY[item["dtype"]]().itemsize, begin
        )
        return view.reshape(item["shape"])


def load(folder: Path, name: str) -> File:
    """The file that holds tensor `name`."""
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        if name in header:
            return File(path, header, bytearray(raw[8 + length :]))
    raise AssertionError(f"{name} is in no file of {folder}")


def flip(name: str, bit: int) -> Callable[[Path], None]:
    """Flip one bit in the middle of a tensor."""

    def plant(folder: Path) -> None:
        file = load(folder, name)
        begin, end = file.header[name]["data_offsets"]
        file.data[(begin + end) // 2] ^= 1 << bit
        file.save()

    return plant


def swap_scale_rows(folder: Path) -> None:
    name = f"{Q_PROJ}.weight_scale"
    file = load(folder, name)
    scale = file.array(name)
    scale[[3, 4]] = scale[[4, 3]]
    file.save()


def raise_zero_points(folder: Path) -> None:
    """Every zero-point of a layer plus one, modulo 16."""
    name = f"{Q_PROJ}.weight_zero_point"
    file = load(folder, name)
    words = file.array(name).view(np.uint32)
    fields = [((words >> np.uint32(4 * i)) + np.uint32(1)) & np.uint32(15) for i in range(8)]
    words[:] = sum((field << np.uint32(4 * i) for i, field in enumerate(fields)), np.zeros_like(words))
    file.save()


def delete_tensor(name: str) -> Callable[[Path], None]:
    """Take a tensor out of its file, so that the file itself stays well formed."""

    def plant(folder: Path) -> None:
        file = load(folder, name)
        begin, end = file.header.pop(name)["data_offsets"]
        del file.data[begin:end]
        for key, item in file.header.items():
            if key != "__metadata__" and item["data_offsets"][0] >= end:
                item["data_offsets"] = [at - (end - begin) for at in item["data_offsets"]]
        file.save()

    return plant


def add_tensor(name: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        file = load(folder, f"{Q_PROJ}.weight_scale")
        at = len(file.data)
        file.header[name] = {"dtype": "I32", "shape": [2], "data_offsets": [at, at + 8]}
        file.data += bytes(8)
        file.save()

    return plant


def truncate(folder: Path) -> None:
    path = load(folder, f"{Q_PROJ}.weight_scale").path
    path.write_bytes(path.read_bytes()[:-100])


def exchange_layers(folder: Path) -> None:
    """Two layers of one shape trade all their tensors, as if their files had been mixed up."""
    for suffix in ("weight_packed", "weight_scale"):
        one = load(folder, f"{Q_PROJ}.{suffix}")
        other = load(folder, f"{SAME_SHAPE}.{suffix}")
        assert one.path == other.path, "the fixture has one file"
        a, b = one.array(f"{Q_PROJ}.{suffix}"), one.array(f"{SAME_SHAPE}.{suffix}")
        a[:], b[:] = b.copy(), a.copy()
        one.save()


def edit_config(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config, indent=2))

    return plant


def _halve_groups(config: dict[str, Any]) -> None:
    for group in config["quantization_config"]["config_groups"].values():
        group["weights"]["group_size"] //= 2


def _whole_rows(config: dict[str, Any]) -> None:
    for group in config["quantization_config"]["config_groups"].values():
        group["weights"] |= {"group_size": None, "strategy": "channel"}


def _forget_head(config: dict[str, Any]) -> None:
    config["quantization_config"]["ignore"] = []


def _other_norm(config: dict[str, Any]) -> None:
    config["rms_norm_eps"] = 1e-3


def alter_side_file(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<s>", "<S>"))


WEIGHTS = "model.safetensors"

# fault -> (what plants it, in which file, a word of the tensor or file that numbers have to name,
# in a checkpoint with zero-points?)
FAULTS: dict[str, tuple[Callable[[Path], None], str, str, bool]] = {
    "lowest bit of a code": (flip(f"{Q_PROJ}.weight_packed", 0), WEIGHTS, "q_proj", False),
    "highest bit of a code": (flip(f"{Q_PROJ}.weight_packed", 7), WEIGHTS, "q_proj", False),
    "last bit of a scale": (flip(f"{Q_PROJ}.weight_scale", 0), WEIGHTS, "q_proj", False),
    "bit of a stored shape": (flip(f"{Q_PROJ}.weight_shape", 1), WEIGHTS, "q_proj", False),
    "bit of a zero-point": (flip(f"{Q_PROJ}.weight_zero_point", 2), WEIGHTS, "q_proj", True),
    "bit of an embedding": (flip("model.embed_tokens.weight", 0), WEIGHTS, "embed_tokens", False),
    "bit of a norm": (flip("model.norm.weight", 0), WEIGHTS, "model.norm", False),
    "scale rows swapped": (swap_scale_rows, WEIGHTS, "q_proj", False),
    "zero-points plus one": (raise_zero_points, WEIGHTS, "q_proj", True),
    "group size halved": (edit_config(_halve_groups), "config.json", "proj", False),
    "group size removed": (edit_config(_whole_rows), "config.json", "proj", False),
    "head not ignored": (edit_config(_forget_head), "config.json", "lm_head", False),
    "another setting": (edit_config(_other_norm), "config.json", "config.json", False),
    "packed tensor deleted": (delete_tensor(f"{Q_PROJ}.weight_packed"), WEIGHTS, "q_proj", False),
    "scale deleted": (delete_tensor(f"{Q_PROJ}.weight_scale"), WEIGHTS, "q_proj", False),
    "zero-point deleted": (delete_tensor(f"{Q_PROJ}.weight_zero_point"), WEIGHTS, "q_proj", True),
    "copied tensor deleted": (delete_tensor("model.norm.weight"), WEIGHTS, "model.norm", False),
    "extra tensor": (add_tensor("model.layers.0.extra"), WEIGHTS, "extra", False),
    "zero-point of a symmetric layer": (
        add_tensor(f"{Q_PROJ}.weight_zero_point"),
        WEIGHTS,
        "weight_zero_point",
        False,
    ),
    "file truncated": (truncate, WEIGHTS, WEIGHTS, False),
    "layers exchanged": (exchange_layers, WEIGHTS, "q_proj", False),
    "side file altered": (alter_side_file, "tokenizer.json", "tokenizer.json", False),
}

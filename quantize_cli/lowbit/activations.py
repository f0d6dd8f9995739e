"""Activations between blocks: in memory while they fit, on disk beyond, and kept for a run that is killed."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# a save may cost this share of the time since the last one
_SAVE_SHARE = 0.05
# assumed until a save has been timed
_DISK_BYTES_PER_SECOND = 500e6


class Workspace:
    """Hands out tensors on the device, beyond `memory_bytes` (a quarter of its memory if None) in files.

    The files have no name, so that they vanish with the process, however it ends.
    """

    def __init__(self, device: torch.device, memory_bytes: int | None, folder: Path | None) -> None:
        self.device, self.folder = device, folder
        self.left = _memory(device) // 4 if memory_bytes is None else memory_bytes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised tensor, whose bytes count until the end of the scope."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes <= self.left:
            self.left -= nbytes
            return torch.empty(shape, dtype=dtype, device=self.device)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            data = np.memmap(file, dtype=np.uint8, mode="w+", shape=(max(1, nbytes),))
        return torch.from_numpy(data)[:nbytes].view(dtype).view(shape)

    def take(self, nbytes: int) -> bool:
        """Whether so many bytes may be held in memory besides; they count until the end of the scope, or
        until a negative number gives them back."""
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is handed out inside is dropped by the caller at the end."""
        left = self.left
        yield
        self.left = left


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Saved:
    """Both streams at the input of block `block`; full is None where it is not followed."""

    block: int
    quantized: Tensor
    full: Tensor | None


class State:
    """Saves the streams between blocks in one file, as often as is cheap beside the work that it saves."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.saved_at = time.monotonic()
        self.seconds: float | None = None

    def save(self, saved: Saved) -> None:
        """Replace the file by `saved`, if it is time to; complete or not at all."""
        if self.path is None:
            return
        tensors = [t for t in (saved.quantized, saved.full) if t is not None]
        cost = self.seconds or sum(t.nbytes for t in tensors) / _DISK_BYTES_PER_SECOND
        now = time.monotonic()
        if cost > _SAVE_SHARE * (now - self.saved_at):
            return
        half = self.path.with_suffix(".half")
        with half.open("wb") as file:
            torch.save({"block": saved.block, "quantized": saved.quantized, "full": saved.full}, file)
            file.flush()
            os.fsync(file.fileno())
        half.replace(self.path)
        self.saved_at = time.monotonic()
        self.seconds = self.saved_at - now

    def load(self) -> Saved | None:
        """What was saved last, None if there is nothing."""
        if self.path is None or not self.path.is_file():
            return None
        found: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        return Saved(**found)

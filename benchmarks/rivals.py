"""Other W4A16 kernels, as columns of w4a16.py: each takes the same codes and scales, or says that it cannot.

    marlin     github.com/IST-DASLab/marlin, built by hand: MARLIN_SO names a library with
               extern "C" int marlin_mul(A, B, C, s, m, n, k, workspace, groupsize, dev, stream, thread_k,
               thread_n, sms, max_par), a wrapper around marlin_cuda(), and MARLIN_PY its marlin/__init__.py,
               whose permutations are used. On an H200 with nvcc 13.0 the cp.async with a cache hint had to be
               replaced by the plain one; the original ends in an illegal instruction.
    gemlite    if it can be imported; with the H100 configs that it ships, which an H200 does not load alone
    tinygemm   in torch; bf16 activations

A rival is a class with make(problem), which builds `copies` weights, and call(x, i) -> [M, N].
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels.measure import copies_for

GROUP = 128


@dataclass(frozen=True)
class Codes:
    """A symmetric 4-bit weight in plain form: codes [N, K] uint8, scale [N, K / 128] fp16, on the GPU."""

    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k


class Marlin:
    largest_m = 4096

    def __init__(self) -> None:
        if "MARLIN_SO" not in os.environ or "MARLIN_PY" not in os.environ:
            raise RuntimeError("MARLIN_SO and MARLIN_PY are not set")
        self.mul = ctypes.CDLL(os.environ["MARLIN_SO"]).marlin_mul
        number, pointer = ctypes.c_int, ctypes.c_void_p
        self.mul.argtypes = [pointer] * 4 + [number] * 3 + [pointer] + [number] * 2 + [pointer] + [number] * 4
        # the extension module that marlin/__init__.py wants is not needed for its tables
        sys.modules.setdefault("marlin_cuda", types.ModuleType("marlin_cuda"))
        spec = importlib.util.spec_from_file_location("marlin_tables", os.environ["MARLIN_PY"])
        assert spec is not None
        assert spec.loader is not None
        self.tables: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.tables)

    def make(self, weight: Codes) -> None:
        n, k = weight.shape
        order = self.tables._perm.cuda()
        scale_order = torch.tensor(self.tables._scale_perm, device="cuda")
        words = torch.empty(k // 16, n * 2, dtype=torch.int32, device="cuda")
        for first in range(0, k // 16, 64):
            last = min(k // 16, first + 64)
            tile = weight.codes[:, first * 16 : last * 16].t().reshape(last - first, 16, n // 16, 16)
            tile = tile.permute(0, 2, 1, 3).reshape(-1, order.numel())[:, order].reshape(last - first, -1, 8)
            part = torch.zeros(tile.shape[:2], dtype=torch.int32, device="cuda")
            for i in range(8):
                part |= tile[:, :, i].to(torch.int32) << (4 * i)
            words[first:last] = part
        scale = weight.scale.t().reshape(-1, scale_order.numel())[:, scale_order].reshape(-1, n).contiguous()
        self.n, self.k = n, k
        self.copies = copies_for(words.nbytes)
        self.words = [words.clone() for _ in range(self.copies)]
        self.scale = [scale.clone() for _ in range(self.copies)]
        self.locks = torch.zeros(n // 128 * 16, dtype=torch.int32, device="cuda")

    def call(self, x: Tensor, i: int) -> Tensor:
        m = x.shape[0]
        out = torch.empty(m, self.n, dtype=torch.float16, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        pointers = (x.data_ptr(), self.words[i].data_ptr(), out.data_ptr(), self.scale[i].data_ptr())
        status = self.mul(
            *pointers, m, self.n, self.k, self.locks.data_ptr(), GROUP, 0, stream, -1, -1, -1, 16
        )
        if status != 0:
            raise RuntimeError(f"marlin refuses this shape ({status})")
        return out


class GemLite:
    largest_m = 64

    def __init__(self) -> None:
        import gemlite

        self.gemlite = gemlite
        core = gemlite.core
        core.GEMLITE_TRITON_CONFIG_CACHE.clear()
        gemlite.load_config(str(Path(gemlite.__file__).parent / "configs/h100.json"))

    def make(self, weight: Codes) -> None:
        if weight.shape not in GEMLITE_SHAPES:
            raise RuntimeError("no shipped config for this shape, and its autotuning takes minutes")
        helper = self.gemlite.helper.A16W4_HQQ_INT(device="cuda:0", dtype=torch.float16)
        layer = helper.from_weights(
            weight.codes.clone(), weight.scale.clone(), torch.full_like(weight.scale, 8.0)
        )
        tensors = layer.get_tensor_args()
        self.meta = layer.get_meta_args()
        self.copies = copies_for(tensors[0].nbytes)
        self.tensors = [[t.clone() for t in tensors] for _ in range(self.copies)]

    def call(self, x: Tensor, i: int) -> Tensor:
        core = self.gemlite.core
        kind = "GEMV_REVSPLITK" if x.shape[0] == 1 else "GEMM_SPLITK"
        choice = core.GEMLITE_MATMUL_TYPES_MAPPING[kind]
        return core.forward_functional(x, None, self.tensors[i], self.meta, choice)


# The shapes of our list that GemLite's H100 file holds.
GEMLITE_SHAPES = {(2048, 2048), (4096, 4096), (6144, 4096), (4096, 14336), (14336, 4096), (28672, 4096)}


class TinyGemm:
    # from eight tokens on its time grows with M
    largest_m = 64

    def make(self, weight: Codes) -> None:
        pairs = (weight.codes[:, ::2] << 4 | weight.codes[:, 1::2]).contiguous()
        words = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
        scale = weight.scale.t().bfloat16()
        scale_and_zero = torch.stack([scale, torch.zeros_like(scale)], dim=2).contiguous()
        self.copies = copies_for(words.nbytes)
        self.words = [words.clone() for _ in range(self.copies)]
        self.scale_and_zero = [scale_and_zero.clone() for _ in range(self.copies)]

    def call(self, x: Tensor, i: int) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, self.words[i], GROUP, self.scale_and_zero[i])


RIVALS: dict[str, Any] = {"marlin": Marlin, "gemlite": GemLite, "tinygemm": TinyGemm}

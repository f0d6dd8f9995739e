"""What every kernel file shares: Triton if it is installed, how kernels are launched, and jit helpers.

    HAS_TRITON     whether launch can run anything
    tl, jit        Triton's language and decorator; without Triton, stand-ins that let the modules import
    launch         run a kernel: compiled on a GPU, in Triton's interpreter for CPU tensors
    unpack_codes, unpack_codes_3, round_half_even, round_to   device functions

The interpreter executes a kernel with NumPy, a few milliseconds per program: enough to prove a sampled tile
on a machine without a GPU. Its bfloat16 dot product is wrong (the bits are multiplied as integers), so use
float16 or float32 there; its float32 -> bfloat16 conversion truncates, so round_to comes before a cast.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.runtime import interpreter
except ImportError:
    triton = None
    # Only what is evaluated when a kernel is defined; its body never runs.
    tl = SimpleNamespace(constexpr=int)

HAS_TRITON = triton is not None

# The interpreter keeps the current program in globals of its module.
_interpreter_lock = threading.Lock()


def jit(**options: Any) -> Any:
    """triton.jit(**options), or the identity without Triton."""
    return (lambda fn: fn) if triton is None else triton.jit(**options)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run kernel over grid on the device of its first tensor argument; CPU tensors are interpreted.

    args, meta: the kernel's arguments and constexprs, and num_warps, num_stages.
    Raises RuntimeError without Triton.
    """
    if triton is None:
        raise RuntimeError("Triton is not installed: install triton to run lowbit's kernels")
    if 0 in grid:
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    if device.type == "cpu":
        with _interpreting():
            interpreter.InterpretedFunction(kernel.fn)[grid](*args, **meta)
    else:
        with torch.cuda.device(device):
            kernel[grid](*args, **meta)


@contextmanager
def _interpreting() -> Iterator[None]:
    """Let Triton's interpreter run kernels here, one thread at a time, and leave Triton able to compile.

    The interpreter replaces attributes of triton.language while it runs and does not put all of them back,
    and without TRITON_INTERPRET=1 tl.sum and our helpers, compiled functions, refuse a call from Python.
    Compiling a kernel on another thread meanwhile is not supported.
    """
    jitted = triton.runtime.JITFunction
    modules = (tl, tl.core, tl.math, tl.standard, interpreter)
    classes = (tl.tensor, tl.dtype, tl.core.tensor_descriptor_base, jitted)
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, *scope: Any) -> None:
        # Triton 3.4 to 3.6 convert an array of one element by int(), which NumPy 2.4 refuses
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    with _interpreter_lock:
        saved = [(place, dict(vars(place))) for place in modules + classes]
        jitted.__call__ = lambda self, *args, **kwargs: interpreter.InterpretedFunction(self.fn)(
            *args, **kwargs
        )
        interpreter._patch_lang_tensor = patch_tensor_and_index
        try:
            yield
        finally:
            for place, attributes in saved:
                for name in set(vars(place)) - set(attributes) if place in classes else ():
                    delattr(place, name)
                for name, value in attributes.items():
                    if vars(place).get(name) is not value:
                        setattr(place, name, value)


@jit()
def unpack_codes(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """[ROWS, COLUMNS] words of 2, 4 or 8-bit codes to [ROWS, COLUMNS · 32 / BITS] int32 codes."""
    shifts = tl.arange(0, 32 // BITS) * BITS
    codes = (words[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(codes, (ROWS, COLUMNS * (32 // BITS)))


@jit()
def unpack_codes_3(w0, w1, w2, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Three [ROWS, COLUMNS] words of every 32 codes of 3 bits to [ROWS, COLUMNS · 32] int32 codes.

    The 96 bits are cut into four runs of 24 bits, eight whole codes each.
    """
    run0 = w0 & 0xFFFFFF
    run1 = ((w0 >> 24) & 0xFF) | ((w1 & 0xFFFF) << 8)
    run2 = ((w1 >> 16) & 0xFFFF) | ((w2 & 0xFF) << 16)
    run3 = (w2 >> 8) & 0xFFFFFF
    runs = tl.join(tl.join(run0, run2), tl.join(run1, run3))
    runs = tl.reshape(runs, (ROWS, COLUMNS * 4))
    codes = (runs[:, :, None] >> (tl.arange(0, 8) * 3)[None, None, :]) & 7
    return tl.reshape(codes, (ROWS, COLUMNS * 32))


@jit()
def round_half_even(x):
    """Nearest whole number of fp32 |x| <= 2^22, halves to even.

    Adding 1.5 · 2^23 leaves no fraction bits, so the addition itself rounds, the same way on every target.
    """
    return (x + 12582912.0) - 12582912.0


@jit()
def round_to(x, dtype: tl.constexpr):
    """fp32 x rounded to the nearest value of dtype, halves to even, as fp32; what is not finite stays so."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return tl.where(tl.abs(x) < float("inf"), rounded.to(tl.float32, bitcast=True), x)
    else:
        return x.to(dtype).to(tl.float32)


@jit()
def pack_codes(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """[ROWS, COLUMNS · 32 / BITS] int32 codes of 2, 4 or 8 bits to [ROWS, COLUMNS] words."""
    fields = (
        tl.reshape(codes, (ROWS, COLUMNS, 32 // BITS)) << (tl.arange(0, 32 // BITS) * BITS)[None, None, :]
    )
    # disjoint bits: adding is or-ing
    return tl.sum(fields, axis=2)


@jit()
def pack_codes_3(codes, word: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Word 0, 1 or 2 of every 32 codes of 3 bits: [ROWS, COLUMNS · 32] codes to [ROWS, COLUMNS] words."""
    # where code i starts, seen from this word; 30 and 31, or -1 and -2, straddle its edges
    start = (tl.arange(0, 32) * 3 - 32 * word)[None, None, :]
    codes = tl.reshape(codes, (ROWS, COLUMNS, 32))
    here = tl.where((start >= 0) & (start < 32), codes << (start & 31), 0)
    before = tl.where((start < 0) & (start > -3), codes >> (-start & 31), 0)
    return tl.sum(here + before, axis=2)

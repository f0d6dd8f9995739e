"""Compile a kernel for a GPU that is not here: what a target refuses shows without the hardware."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}


def compile_kernel(
    kernel: Any,
    arguments: dict[str, str],
    constexprs: dict[str, Any],
    target: str,
    multiples: tuple[str, ...] = (),
    **options: int,
) -> Any:
    """The kernel compiled for TARGETS[target]; its `.asm` holds every stage ("ptx", "amdgcn", ...).

    arguments: Triton type of every run-time argument, such as "*fp16" or "i32"; pointers are taken to be
    16-byte aligned, as torch allocates them.  multiples: integers that are, of 16.
    options: num_warps, num_stages, maxnreg.
    """
    names = kernel.arg_names
    missing = set(names) ^ {*arguments, *constexprs}
    assert not missing, f"arguments that do not match the kernel's: {missing}"
    signature = {name: arguments.get(name, "constexpr") for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in multiples
    }
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constexprs.items()}, aligned)
    try:
        return triton.compile(source, target=TARGETS[target], options=options)
    except Exception as error:
        # before 3.5 Triton links for AMD with a ld.lld that comes with ROCm
        if "ROCm linker" in str(error):
            pytest.skip(str(error))
        raise


def disassemble(compiled: Any, folder: Path) -> str:
    """Machine code of a kernel compiled for CUDA; Triton brings the disassembler."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    return subprocess.run([disassembler, "-c", cubin], capture_output=True, text=True, check=True).stdout


INSTRUCTION = re.compile(r"\s*/\*\w+\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*);")


def opcodes(compiled: Any, folder: Path) -> list[str]:
    """Opcodes of all of a kernel compiled for CUDA."""
    lines = map(INSTRUCTION.match, disassemble(compiled, folder).splitlines())
    return [line[1] for line in lines if line]


def loop_instructions(compiled: Any, folder: Path) -> list[list[tuple[str, str]]]:
    """Opcodes and operands of every loop of a kernel compiled for CUDA, and a first one without any."""
    labels: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    loops: list[list[tuple[str, str]]] = [[]]
    for line in disassemble(compiled, folder).splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(found)
        if instruction := INSTRUCTION.match(line):
            found.append((instruction[1], instruction[2]))
            target = re.search(r"\.L_\w+", instruction[2]) if instruction[1].startswith("BRA") else None
            if target and target[0] in labels:
                loops.append(found[labels[target[0]] :])
    return loops


def machine_loops(compiled: Any, folder: Path) -> list[list[str]]:
    """Opcodes of every loop of a kernel compiled for CUDA, and a first one without any."""
    return [[opcode for opcode, _ in loop] for loop in loop_instructions(compiled, folder)]


def machine_loop(compiled: Any, folder: Path) -> list[str]:
    """Opcodes of the longest loop of a kernel compiled for CUDA."""
    return max(machine_loops(compiled, folder), key=len)

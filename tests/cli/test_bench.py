"""`lowbit bench`: whose layers are measured, and what is shown of a product that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lowbit_kernels.bench import BenchRow
from lowbit_kernels.problem import KernelConfig
from lowbit_kernels.tuning import Shape

RIGHT = BenchRow(4096, 4096, 1, 40.0, 10.0, 12.0, 8.0, 8_912_896, 1e-4, KernelConfig("decode", 64, 16, 128))
WRONG = BenchRow(4096, 4096, 16, 40.0, None, 12.0, 8.0, 8_912_896, 0.3, KernelConfig("gemm", 64, 16, 128))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[Shape]]:
    """The shapes that were measured on a pretended GPU, where one product is right and one is wrong."""
    import lowbit.bench

    shapes: list[list[Shape]] = []

    def measure(of: list[Shape], tokens: object, on_row: Callable[[BenchRow], None]) -> list[BenchRow]:
        shapes.append(list(of))
        for row in (RIGHT, WRONG):
            on_row(row)
        return [RIGHT, WRONG]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(lowbit.bench.kernels, "bench", measure)
    return shapes


def test_a_wrong_product_has_no_time(asked: list[list[Shape]], lowbit: Callable) -> None:
    ran = lowbit("bench")
    assert ran.code == 0
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["4096×4096", "1", "40.0", "10.0", "4.00x", "891", "80.00", "%", "decode"] in rows
    assert ["4096×4096", "16", "40.0", "wrong", "–", "–", "–", "gemm"] in rows
    events = lowbit("bench", "--json").events
    assert [(event["m"], event["us"], event["speedup"]) for event in events] == [
        (1, 10.0, 4.0),
        (16, None, None),
    ]


def test_a_folders_own_layers_are_measured(
    asked: list[list[Shape]],
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lowbit: Callable,
) -> None:
    with monkeypatch.context() as no_gpu:
        no_gpu.setattr(torch.cuda, "is_available", lambda: False)
        command = ["quantize", llama_folder, "--out", tmp_path / "out", "--method", "rtn", "--device", "cpu"]
        assert lowbit(*command).code == 0
    assert lowbit("bench", tmp_path / "out").code == 0
    # o, q/k/v, gate/up and down
    assert {(shape.n, shape.k) for shape in asked[0]} == {(256, 256), (512, 256), (1024, 256), (256, 512)}
    assert {shape.act for shape in asked[0]} == {torch.bfloat16}
    (tmp_path / "out" / "lowbit_kernels.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"lowbit_kernels\.json: not a table.*; using the shipped configs"):
        lowbit("bench", tmp_path / "out")


def test_the_roofline_is_drawn_or_refused_before_measuring(
    asked: list[list[Shape]], tmp_path: Path, lowbit: Callable
) -> None:
    picture = tmp_path / "roof.png"
    assert lowbit("bench", "--plot", picture).code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    asked.clear()
    for file, words in (("roof.xyz", ".png"), ("absent/roof.png", "no such folder")):
        ran = lowbit("bench", "--plot", tmp_path / file)
        assert ran.code == 2
        assert words in ran.err
    assert asked == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_without_a_gpu_it_says_so(lowbit: Callable) -> None:
    ran = lowbit("bench")
    assert (ran.code, ran.out) == (2, "")
    assert "measures on a GPU" in ran.err

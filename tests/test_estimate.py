"""The figures of `lowbit plan`: counted by hand on one model, and within reach of what a run really takes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from lowbit.checkpoint.source import open_source
from lowbit.estimate import Rates, estimate, measure_rates
from lowbit.pipeline import quantize
from lowbit.plan import Plan, make_plan
from lowbit.recipe import Recipe

CPU = torch.device("cpu")
RATES = Rates(product_flops=1e9, rtn_weights=1e6, hqq_weights=1e5, threads=2)


def planned(folder: Path) -> Plan:
    with open_source(str(folder)) as source:
        return make_plan(source, Recipe())


def test_work_is_counted_from_shapes(llama_folder: Path) -> None:
    """hidden 256, intermediate 512, 2 blocks; q and o [256, 256], k and v [128, 256]."""
    weights = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 512)
    rtn, hqq, gptq = estimate(planned(llama_folder), CPU, 1000, RATES)
    assert [row.method for row in (rtn, hqq, gptq)] == ["rtn", "hqq", "gptq"]
    assert rtn.seconds == pytest.approx(weights / 2e6)
    assert hqq.seconds == pytest.approx(weights / 2e5)
    # inputs: attention's, the MLP's of width 256, the MLP's of width 512
    sums = 2 * 2 * (256**2 + 256**2 + 512**2) * 1000
    solving = 2 * 14 * ((2 * 256 + 2 * 128 + 2 * 512) * 256**2 + 256 * 512**2)
    assert gptq.seconds == pytest.approx((5 * weights * 1000 + sums) / 2e9 + solving / 0.25e9)
    assert gptq.device_bytes == 0


def test_more_tokens_take_longer_and_more_memory(llama_folder: Path) -> None:
    plan = planned(llama_folder)
    few, many = (estimate(plan, CPU, tokens, RATES)[2] for tokens in (1000, 100_000))
    assert many.seconds > 10 * few.seconds
    assert many.host_bytes > few.host_bytes


def test_a_run_takes_about_as_long(llama_folder: Path, tmp_path: Path) -> None:
    """Within a factor of ten either way: a tiny model is mostly what is not counted."""
    recipe = Recipe(method="gptq", device="cpu", samples=64, seqlen=512)
    expected = estimate(planned(llama_folder), CPU, 64 * 512, measure_rates(CPU))[2]
    started = time.monotonic()
    quantize(llama_folder, tmp_path / "out", recipe)
    assert expected.seconds / 10 < time.monotonic() - started < 10 * expected.seconds + 10

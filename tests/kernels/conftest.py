"""Where kernels run in these tests: always Triton's interpreter, and a GPU where there is one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The interpreter's device, then the GPU's."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device(request.param)


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch) -> None:
    """Compile anew, into a folder of this test's own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

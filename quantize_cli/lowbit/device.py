"""Which device --device names."""

from __future__ import annotations

import torch

from lowbit.errors import RecipeError
from lowbit_kernels.device import HAS_TRITON


def pick_device(name: str) -> torch.device:
    """The device that --device names; `auto` is the GPU if there is one and Triton to use it with.

    Raises RecipeError for a name that torch does not know or a GPU that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() and HAS_TRITON else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RecipeError(f"--device {name!r} is not a device; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise RecipeError(f"--device {name}: torch sees {count} GPUs here; use auto or cpu")
    if device.type == "cuda" and not HAS_TRITON:
        raise RecipeError(f"--device {name}: Triton is not installed; `pip install triton`, or use cpu")
    if device.type not in ("cpu", "cuda"):
        raise RecipeError(f"--device {name}: only cpu and cuda (NVIDIA and AMD) are supported")
    return device

"""PyTorch `.bin` checkpoints, without running their pickles and without mapping them.

torch.load with weights_only builds nothing but tensors; under FakeTensorMode it builds them without data and
notes at which byte of the file each storage starts. Reading is then the same as for safetensors.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowbit.checkpoint.header import TORCH_NAMES, StridedInfo
from lowbit.errors import SourceError

NAMES = TORCH_NAMES | {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


def read_pickle(path: Path) -> list[StridedInfo]:
    """Return the tensors of a `.bin` file in the order of their data.

    Raises SourceError if it is cut short, holds anything but tensors, or is of a format before PyTorch 1.6.
    """
    try:
        with FakeTensorMode():
            state = torch.load(path, weights_only=True, map_location="cpu")
    except OSError as e:
        raise SourceError(f"{path}: {e.strerror}; check the file") from None
    except pickle.UnpicklingError:
        raise SourceError(
            f"{path}: damaged, or holds objects that could run code; save the model as safetensors"
        ) from None
    # whatever a damaged zip or pickle makes the parser raise, the cause is the file
    except Exception as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise SourceError(
            f"{path}: not a PyTorch checkpoint, or cut short ({reason}); download it again"
        ) from None
    if not isinstance(state, dict):
        raise SourceError(
            f"{path}: holds one {type(state).__name__}, not named tensors; save model.state_dict()"
        )
    tensors = [_describe(path, name, tensor) for name, tensor in state.items()]
    return sorted(tensors, key=lambda t: t.offset)


def _describe(path: Path, name: str, tensor: object) -> StridedInfo:
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise SourceError(
            f"{path}: {name} is a {type(tensor).__name__}, not a tensor; save model.state_dict()"
        )
    plain = tensor.layout == torch.strided
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None) if plain else None
    if start is None:
        raise SourceError(
            f"{path}: {name} is not a plain tensor in a zip file; save the model as safetensors"
        )
    dtype = NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise SourceError(f"{path}: {name} has dtype {tensor.dtype}; save the model in bf16, fp16 or fp32")
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return StridedInfo(
        name=name,
        dtype=dtype,
        shape=tuple(tensor.shape),
        nbytes=tensor.nbytes,
        file=str(path),
        offset=start + tensor.storage_offset() * tensor.itemsize,
        stride=tensor.stride(),
        span=(last + 1) * tensor.itemsize if tensor.numel() else 0,
    )

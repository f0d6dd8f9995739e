"""The whole line on small models: what is written, that it is right, and that nothing half-done is left."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit import ahead, pipeline, validate
from lowbit.errors import GateError, OutputError, RecipeError, SourceError
from lowbit.folder import DenseView, open_folder
from lowbit.pipeline import default_out, quantize
from lowbit.recipe import Recipe, Rule

RTN = Recipe(method="rtn", device="cpu")


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def manifest(folder):
    return json.loads((folder / "lowbit.json").read_text())


def nearest(weight, bits, group, symmetric):
    """Round-to-nearest from the definition, row by row and group by group in float64; scales in bfloat16."""
    result = np.empty_like(weight)
    for i, row in enumerate(weight):
        for start in range(0, len(row), group):
            w = row[start : start + group]
            if symmetric:
                scale, zero = (
                    max(w.max() / (2 ** (bits - 1) - 1), -w.min() / 2 ** (bits - 1)),
                    2 ** (bits - 1),
                )
            else:
                scale = (max(w.max(), 0) - min(w.min(), 0)) / (2**bits - 1)
            scale = torch.tensor(scale, dtype=torch.float32).bfloat16().double().item()
            if not symmetric:
                zero = np.clip(np.round(-min(w.min(), 0) / scale), 0, 2**bits - 1)
            codes = np.clip(np.round(w / scale) + zero, 0, 2**bits - 1)
            result[i, start : start + group] = (codes - zero) * scale
    return result


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
def test_the_files_hold_the_nearest_grid_points(llama_folder, tmp_path, bits, symmetric):
    from lowbit.decode import decode_layer, dequantize
    from lowbit.scheme import QuantScheme

    quantize(llama_folder, tmp_path / "out", RTN.model_copy(update={"bits": bits, "sym": symmetric}))
    written, source = (
        load_file(tmp_path / "out/model.safetensors"),
        load_file(llama_folder / "model.safetensors"),
    )
    name = "model.layers.1.mlp.down_proj"
    scheme = QuantScheme(bits, 128, symmetric, "bfloat16")
    weight = source[f"{name}.weight"]
    parts = {key.removeprefix(f"{name}."): tensor for key, tensor in written.items() if name in key}
    quantized, _ = decode_layer("compressed-tensors", parts, scheme, tuple(weight.shape))
    expected = nearest(weight.double().numpy(), bits, 128, symmetric)
    # a weight within an fp32 rounding of a tie may fall on either side
    difference = (dequantize(quantized).double().numpy() != expected).mean()
    assert difference < 1e-3


def test_every_source_tensor_is_accounted_for(llama_folder, tmp_path):
    quantize(llama_folder, tmp_path / "out", RTN)
    written, source = (
        load_file(tmp_path / "out/model.safetensors"),
        load_file(llama_folder / "model.safetensors"),
    )
    record = manifest(tmp_path / "out")
    quantized = {row["source"] for row in record["layers"]}
    copied = {row["name"] for row in record["copied"]}
    assert quantized | copied | set(record["dropped"]) == set(source)
    assert not quantized & copied
    for name in copied:
        assert torch.equal(written[name], source[name])
    assert {name.rpartition(".")[0] for name in written if name.endswith("_packed")} == {
        row["name"] for row in record["layers"]
    }
    side = {path.name for path in llama_folder.iterdir()} - {"model.safetensors", "config.json", "README.md"}
    for name in side:
        assert (tmp_path / "out" / name).read_bytes() == (llama_folder / name).read_bytes()
    unlisted = {"lowbit.json", "lowbit_kernels.json"}
    assert record["output"]["files"].keys() | unlisted == {path.name for path in (tmp_path / "out").iterdir()}


def test_the_same_input_gives_the_same_bytes_and_leaves_the_generators_alone(
    llama_folder, tmp_path, monkeypatch
):
    states = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    quantize(llama_folder, tmp_path / "a", RTN)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tobytes() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    monkeypatch.setattr(ahead, "WORKERS", 1)
    monkeypatch.setattr(ahead, "IN_FLIGHT_BYTES", 1)
    quantize(llama_folder, tmp_path / "b", RTN)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


def test_a_packer_that_is_wrong_fails_the_run(llama_folder, tmp_path, monkeypatch):
    pack_words = pipeline.pack_words
    monkeypatch.setattr(pipeline, "pack_words", lambda codes, bits: pack_words((codes + 1) % 16, bits))
    with pytest.raises(GateError, match=r"model\.layers\.0\.\S+: the packed weight is 1\.\d+ steps"):
        quantize(llama_folder, tmp_path / "out", RTN)
    assert not (tmp_path / "out").exists()


def test_what_is_not_finite_is_named(llama_folder, tmp_path):
    from safetensors.torch import save_file

    tensors = load_file(llama_folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, llama_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        quantize(llama_folder, tmp_path / "out", RTN)
    assert not (tmp_path / "out").exists()


def test_side_files_of_any_bytes(llama_folder, tmp_path):
    (llama_folder / "README.md").write_bytes(b"\xef\xbb\xbf---\nlicense: mit\n---\ncaf\xe9\n")
    (llama_folder / "quantize_config.json").write_text('{"bits": 2}')
    (llama_folder / os.fsdecode(b"\xff.txt")).write_text("x")
    quantize(llama_folder, tmp_path / "out", RTN.model_copy(update={"format": "gptq"}))
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert "license: mit" in card
    assert "caf\ufffd" in card
    assert json.loads((tmp_path / "out/quantize_config.json").read_text())["bits"] == 4
    assert os.fsdecode(b"\xff.txt") in manifest(tmp_path / "out")["output"]["files"]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("models/tiny/", "tiny"),
        ("a/b.gguf", "b"),
        (".", "here"),
        ("..", "up"),
        ("/", "model"),
        ("demo", "demo"),
    ],
)
def test_the_default_folder_has_a_name(model, name, tmp_path, monkeypatch):
    (tmp_path / "up" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "up" / "here")
    assert default_out(model, Recipe(bits=8, group=-1)) == Path(f"{name}-int8-row")


def test_unlike_checkpoints_get_unlike_names():
    usual = Recipe()
    recipes = [Recipe(method=method, sym=sym) for method in ("rtn", "gptq") for sym in (True, False)]
    names = {default_out("m", recipe).name for recipe in [*recipes, Recipe(method="hqq")]}
    assert len(names) == 5
    assert default_out("m", usual).name == "m-int4-g128" in names


Q0 = "model.layers.0.self_attn.q_proj"


def set_rows(folder, *rows):
    """Give the first rows of layer 0's q_proj these values."""
    from safetensors.torch import save_file

    tensors = load_file(folder / "model.safetensors")
    for i, row in enumerate(rows):
        tensors[f"{Q0}.weight"][i] = torch.as_tensor(row)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors[f"{Q0}.weight"]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_extreme_rows_are_quantized_and_proven(build_llama, tmp_path, dtype, symmetric):
    folder = build_llama(dtype=dtype)
    most = torch.finfo(getattr(torch, dtype)).max
    tiny = 6e-8 if dtype == "float16" else 1e-40
    rows = [0, 0.25, -3, tiny, most, -most, [most, 0.1] * 128, torch.linspace(0.1, 0.8, 256)]
    weight = set_rows(folder, *rows).double()
    quantize(folder, tmp_path / "out", RTN.model_copy(update={"sym": symmetric, "group": 64}))
    row = next(row for row in manifest(tmp_path / "out")["layers"] if row["name"] == Q0)
    assert all(np.isfinite(error) for error in row["errors"].values())
    assert row["errors"]["step_error"] <= 0.5
    decoded = DenseView(open_folder(tmp_path / "out")).read(f"{Q0}.weight").double()
    assert torch.equal(decoded[[0, 1, 2, 4, 5]], weight[[0, 1, 2, 4, 5]])
    assert (decoded - weight)[7].abs().max() < 0.1


def test_a_scale_that_no_dtype_holds_names_the_layer(llama_folder, tmp_path):
    most = torch.finfo(torch.bfloat16).max
    set_rows(llama_folder, [most, -most] * 128)
    with pytest.raises(SourceError, match=rf"^{Q0}: row 0, group 0: .*--exclude {Q0}$"):
        quantize(llama_folder, tmp_path / "out", RTN.model_copy(update={"sym": False}))


def test_a_fault_in_huge_weights_is_seen(llama_folder, tmp_path, monkeypatch):
    set_rows(llama_folder, *[torch.randn(256) * 1e30 for _ in range(256)])
    pack = pipeline.pack

    def off_by_one(quantized):
        huge = quantized.scale.max() > 1e20
        return pack(replace(quantized, codes=(quantized.codes + 1) % 16) if huge else quantized)

    monkeypatch.setattr(pipeline, "pack", off_by_one)
    with pytest.raises(GateError, match=Q0):
        quantize(llama_folder, tmp_path / "out", RTN)


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda"])
def test_without_triton_only_the_kernel_itself_goes_untried(llama_folder, tmp_path, monkeypatch, device):
    monkeypatch.setattr("lowbit_kernels.device.triton", None)
    for module in ("pipeline", "validate", "device"):
        monkeypatch.setattr(f"lowbit.{module}.HAS_TRITON", False)
    if device == "cuda":
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        with pytest.raises(RecipeError, match="Triton is not installed"):
            quantize(llama_folder, tmp_path / "out", RTN.model_copy(update={"device": device}))
        return
    events = []
    recipe = RTN.model_copy(update={"device": device})
    quantize(llama_folder, tmp_path / "out", recipe, on_event=events.append)
    assert [e.level for e in events if "Triton is not installed" in getattr(e, "message", "")] == ["warning"]
    assert all(row["errors"]["kernel_error"] < 1e-5 for row in manifest(tmp_path / "out")["layers"])


@pytest.mark.parametrize("value", [0.0, 6e-8])
def test_layers_of_next_to_nothing_pass_and_a_wrong_kernel_does_not(
    build_llama, tmp_path, monkeypatch, value
):
    """Their products are 0, or sums of terms that cancel: rounding is all of it, and no fault."""
    source = build_llama(seed=3)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if "_proj" in name:
            tensor.copy_(torch.full_like(tensor, value) * torch.randn(tensor.shape).sign())
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    recipe = Recipe(method="hqq", device="cpu", group=32)
    quantize(source, tmp_path / "out", recipe)
    assert DenseView(open_folder(tmp_path / "out")).layer("model.layers.0.mlp.up_proj").abs().max() <= value
    right = validate.matmul_reference

    def one_row_off(x, words, *grid):
        changed = words.clone()
        changed[0] ^= 1
        return right(x, changed, *grid)

    monkeypatch.setattr(validate, "matmul_reference", one_row_off)
    with pytest.raises(GateError, match="kernel"):
        quantize(source, tmp_path / "wrong", recipe)


def test_a_changed_source_file_is_named(llama_folder, tmp_path, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(pipeline, "write_side_files", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quantize(llama_folder, tmp_path / "out", RTN)
    (llama_folder / "generation_config.json").write_text("{}")
    with pytest.raises(OutputError, match=r"differs in source\.generation_config\.json \(\[\d+, \d+\], now"):
        quantize(llama_folder, tmp_path / "out", RTN)


@pytest.mark.parametrize(("device", "message"), [("cuda:99", "torch sees"), ("tpu", "is not a device")])
def test_a_device_that_is_not_there(llama_folder, tmp_path, device, message):
    with pytest.raises(RecipeError, match=message):
        quantize(llama_folder, tmp_path / "out", RTN.model_copy(update={"device": device}))


def test_an_output_that_is_the_source_is_refused(llama_folder):
    before = hashes(llama_folder)
    with pytest.raises(OutputError):
        quantize(llama_folder, llama_folder, RTN, overwrite=True)
    assert hashes(llama_folder) == before


RUN = """
import sys
from lowbit.pipeline import quantize
from lowbit.recipe import Recipe
quantize(sys.argv[1], sys.argv[2], Recipe(method="rtn", device="cpu"))
"""


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_bytes(build_llama, tmp_path):
    folder = build_llama(num_hidden_layers=24)
    quantize(folder, tmp_path / "clean", RTN)
    out = tmp_path / "out"
    for delay in (0.0, 0.05, 0.15):
        process = subprocess.Popen([sys.executable, "-c", RUN, str(folder), str(out)])
        staging = tmp_path / ".out.lowbit-staging"
        deadline = time.monotonic() + 60
        while not staging.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        # complete or not there at all
        assert not out.exists() or hashes(out) == hashes(tmp_path / "clean")
    if not out.exists():
        quantize(folder, out, RTN)
    assert hashes(out) == hashes(tmp_path / "clean")
    assert {path.name for path in tmp_path.iterdir()} >= {"clean", "out"}
    assert not staging.exists()


def test_mixed_bits_reach_files_and_manifest(llama_folder, tmp_path):
    recipe = RTN.model_copy(update={"rules": (Rule(match="mlp.down_proj", bits=8, group=64),)})
    quantize(llama_folder, tmp_path / "out", recipe)
    bits = {
        row["name"].rpartition(".")[2]: row["scheme"]["bits"] for row in manifest(tmp_path / "out")["layers"]
    }
    assert bits["down_proj"] == 8
    assert bits["q_proj"] == 4
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert sorted(group["weights"]["num_bits"] for group in config["config_groups"].values()) == [4, 8]


@pytest.mark.slow
def test_the_demo_model(smollm2_gguf, tmp_path):
    summary = quantize("demo", tmp_path / "out", RTN)
    assert (summary["layers"], summary["copied"]) == (210, 62)
    assert summary["worst"][0]["output_error"] < 0.25
    assert Path(summary["out"]).name == "out"


@pytest.mark.gpu
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_gpu_writes_the_bytes_that_a_cpu_writes(build_llama, tmp_path, symmetric):
    folder = build_llama(intermediate_size=576)
    for device in ("cpu", "cuda"):
        quantize(folder, tmp_path / device, RTN.model_copy(update={"device": device, "sym": symmetric}))
    name = "model.safetensors"
    assert hashes(tmp_path / "cpu")[name] == hashes(tmp_path / "cuda")[name]

"""lowbit convert: the same codes in another format, proven by the second decode route and by the source."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file

from lowbit import convert as module
from lowbit.checkpoint.formats import FORMATS
from lowbit.convert import convert
from lowbit.errors import GateError, OutputError, PlanError, RecipeError, SourceError
from lowbit.folder import DenseView, open_folder
from lowbit.hub import model_card
from lowbit.pipeline import quantize
from lowbit.recipe import make_recipe
from lowbit.verify import verify

SOURCE_CARD = "---\nlicense: mit\ntags: [chat]\n---\n# Original\n"


@pytest.fixture(scope="module")
def quantized(build_llama, tmp_path_factory):
    """A function of a recipe to a quantized folder, made once for each recipe."""
    done = {}

    def make(**recipe):
        key = json.dumps(recipe, sort_keys=True)
        if key not in done:
            source = build_llama()
            (source / "README.md").write_text(SOURCE_CARD)
            (source / "extra.txt").write_text("kept")
            done[key] = tmp_path_factory.mktemp("q") / "out"
            quantize(source, done[key], make_recipe(method="rtn", device="cpu", **recipe))
        return done[key]

    return make


def weights(folder):
    """Every weight of the original model, decoded by the second route."""
    view = DenseView(open_folder(folder))
    return {name: view.read(name) for name in view.tensors}


PAIRS = [
    ({"format": "compressed-tensors"}, "gptq"),
    ({"format": "compressed-tensors"}, "gptq-v2"),
    ({"format": "compressed-tensors", "bits": 8, "group": 64}, "gptq"),
    ({"format": "gptq"}, "compressed-tensors"),
    ({"format": "gptq"}, "gptq-v2"),
    ({"format": "compressed-tensors", "sym": False}, "awq"),
    ({"format": "awq", "sym": False}, "gptq-v2"),
    ({"format": "gptq-v2", "sym": False}, "compressed-tensors"),
    ({"format": "compressed-tensors", "rules": [{"match": "re:.*down_proj", "bits": 8}]}, "gptq"),
    ({"format": "gptq", "bits": 3, "group": 64}, "gptq-v2"),
]


@pytest.mark.parametrize(("recipe", "format"), PAIRS, ids=str)
def test_every_weight_stays_bit_for_bit(quantized, tmp_path, recipe, format):
    folder = quantized(**recipe)
    summary = convert(folder, format, tmp_path / "out")
    before, after = weights(folder), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    report = verify(tmp_path / "out", forward=False)
    assert report.ok, report.failures
    found = open_folder(tmp_path / "out")
    assert {n: layer.scheme for n, layer in found.layers.items()} == {
        n: layer.scheme for n, layer in open_folder(folder).layers.items()
    }
    suffixes = {name.rpartition(".")[2] for name in found.entries} - {"weight"}
    assert suffixes <= set(FORMATS[format].suffixes)
    assert summary["layers"] == len(found.layers) == 14


def test_back_and_forth_gives_the_same_files(quantized, tmp_path):
    folder = quantized(format="compressed-tensors")
    convert(folder, "gptq", tmp_path / "there")
    convert(tmp_path / "there", "compressed-tensors", tmp_path / "back")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name in ("config.json", "README.md"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes(), name


def test_manifest_card_and_side_files_state_the_new_format(quantized, tmp_path):
    folder = quantized(format="compressed-tensors")
    convert(folder, "gptq", tmp_path / "out")
    out = tmp_path / "out"
    manifest, old = (json.loads((path / "lowbit.json").read_text()) for path in (out, folder))
    assert manifest["recipe"] == old["recipe"] | {"format": "gptq"}
    assert manifest["layers"] == old["layers"]
    assert "compressed-tensors to gptq" in manifest["notes"][-1]
    listed = manifest["output"]["files"]
    assert set(listed) | {"lowbit.json", "lowbit_kernels.json"} == {p.name for p in out.iterdir()}
    for name, digest in listed.items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert (out / "README.md").read_text() == model_card(manifest, SOURCE_CARD)
    assert (out / "extra.txt").read_text() == "kept"
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert json.loads((out / "quantize_config.json").read_text()) == config
    back = tmp_path / "back"
    convert(out, "compressed-tensors", back)
    assert not (back / "quantize_config.json").exists(), "a stale config of the other format"


def test_what_the_format_cannot_hold_is_refused_before_writing(quantized, tmp_path):
    folder = quantized(format="compressed-tensors", sym=False)
    with pytest.raises(PlanError, match=r"model\.layers\.0\.\S+: version 1 of GPTQ cannot hold"):
        convert(folder, "gptq", tmp_path / "out")
    with pytest.raises(PlanError, match="3 bits"):
        convert(quantized(format="gptq", bits=3, group=64), "compressed-tensors", tmp_path / "out")
    # convert has no --asym
    with pytest.raises(PlanError, match="quantize with --asym"):
        convert(quantized(format="gptq", group=64), "awq", tmp_path / "out")
    with pytest.raises(RecipeError, match="use one of compressed-tensors"):
        convert(folder, "ggml", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_wrong_folders_are_refused(quantized, tmp_path, llama_folder):
    with pytest.raises(SourceError, match="no such folder"):
        convert(tmp_path / "absent", "gptq", tmp_path / "out")
    with pytest.raises(SourceError, match=r"config\.json: is no folder"):
        convert(llama_folder / "config.json", "gptq", tmp_path / "out")
    with pytest.raises(SourceError, match="not quantized; convert takes"):
        convert(llama_folder, "gptq", tmp_path / "out")
    folder = quantized(format="compressed-tensors")
    with pytest.raises(OutputError):
        convert(folder, "gptq", folder)


def test_an_encoder_that_loses_a_bit_is_caught(quantized, tmp_path, monkeypatch):
    real = module._equal
    monkeypatch.setattr(module, "_equal", lambda a, b: (b.words.view(-1)[:1].bitwise_xor_(1), real(a, b))[1])
    with pytest.raises(GateError, match="does not give back the same codes"):
        convert(quantized(format="compressed-tensors"), "gptq", tmp_path / "out")
    assert not (tmp_path / "out").exists()

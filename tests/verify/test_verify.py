"""verify accepts what quantize writes and finds every planted fault, by hashes alone and by numbers alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faults import FAULTS, Q_PROJ, delete_tensor, flip, load

from lowbit import pipeline, verify
from lowbit.checkpoint.sink import Sink
from lowbit.errors import LowbitError
from lowbit.recipe import Recipe

# what each check is allowed to use
CHECKS = {
    "hash": ({"numeric": False, "forward": False}, {"hash"}),
    "numbers and source": ({"hash": False, "forward": False}, {"numbers", "source", "structure", "config"}),
    "numbers alone": ({"hash": False, "forward": False}, {"numbers", "structure", "config"}),
}


@pytest.fixture(scope="module")
def written(build_llama, tmp_path_factory) -> Callable[..., tuple[Path, Path]]:
    """A function of a recipe's keys: (source, a good output), made once for each recipe."""
    source = build_llama(tie_word_embeddings=False)
    made: dict[str, Path] = {}

    def write(**keys) -> tuple[Path, Path]:
        name = repr(sorted(keys.items()))
        if name not in made:
            made[name] = tmp_path_factory.mktemp("out") / "good"
            pipeline.quantize(source, made[name], Recipe(**({"method": "rtn"} | keys)))
        return source, made[name]

    return write


@pytest.fixture
def damaged(written, tmp_path):
    """A copy of a good output (with zero-points or not) that the test may damage, and its source."""

    def copy(zero_points: bool) -> tuple[Path, Path]:
        source, good = written(sym=not zero_points, group=64)
        return source, shutil.copytree(good, tmp_path / "out")

    return copy


GOOD = [
    {"group": 128},
    {"group": 64, "sym": False},
    {"group": -1},
    {"bits": 8},
    {"bits": 8, "sym": False, "group": 32},
    {"rules": ({"match": "re:.*down_proj$", "bits": 8},)},
    {"exclude": ("re:.*layers\\.0\\..*",)},
    {"format": "gptq"},
    {"format": "gptq-v2", "bits": 3, "sym": False, "group": 32},
    {"format": "awq", "sym": False},
]


@pytest.mark.parametrize("keys", GOOD, ids=str)
def test_a_good_output_is_accepted(written, keys):
    source, good = written(**keys)
    report = verify.verify(good, source)
    assert report.ok, report.failures
    assert set(report.checks.values()) == {"ok"}
    assert len(report.layers) == len(manifest_layers(good))
    assert all(layer.errors["kernel_error"] < 1e-5 for layer in report.layers)


def manifest_layers(folder: Path) -> list[str]:
    return [row["name"] for row in json.loads((folder / "lowbit.json").read_text())["layers"]]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(damaged, fault, check):
    plant, file, named, zero_points = FAULTS[fault]
    source, folder = damaged(zero_points)
    plant(folder)
    switches, allowed = CHECKS[check]
    if check == "numbers alone":
        # the manifest names the source, which is not there any more
        hide_source(folder)
    report = verify.verify(folder, source if check == "numbers and source" else None, **switches)
    found = [fault for fault in report.failures if fault.check in allowed]
    assert not report.ok
    named = file if check == "hash" else named
    assert any(named in str(fault) for fault in found), report.failures


PARTS = {
    "gptq-v2": (("qweight", "qzeros", "scales", "g_idx"), {"format": "gptq-v2", "sym": False}),
    "gptq": (("qweight", "qzeros", "scales", "g_idx"), {"format": "gptq"}),
    "awq": (("qweight", "qzeros", "scales"), {"format": "awq", "sym": False}),
}


@pytest.mark.parametrize(("format", "part"), [(name, part) for name in PARTS for part in PARTS[name][0]])
def test_one_flipped_bit_is_found_by_numbers_in_every_format(written, tmp_path, format, part):
    _, good = written(**PARTS[format][1])
    folder = shutil.copytree(good, tmp_path / "out")
    flip(f"{Q_PROJ}.{part}", 1)(folder)
    hide_source(folder)
    report = verify.verify(folder, hash=False, forward=False)
    assert any(Q_PROJ in fault.where for fault in report.failures)
    assert {fault.check for fault in report.failures} == {"numbers"}


FOREIGN = [
    {"group": 64},
    {"sym": False},
    {"format": "gptq"},
    {"format": "gptq-v2", "sym": False},
    {"format": "awq", "sym": False},
]


@pytest.mark.parametrize("keys", FOREIGN, ids=str)
def test_a_checkpoint_of_another_tool_is_checked_against_its_source(written, tmp_path, keys):
    """Without lowbit.json: accepted against the right source, refused against a changed one."""
    source, good = written(**keys)
    folder = shutil.copytree(good, tmp_path / "out")
    (folder / "lowbit.json").unlink()
    report = verify.verify(folder, source)
    assert report.ok, report.failures
    assert report.checks["hash"] == "no manifest"
    assert len(report.layers) == 14
    other = shutil.copytree(source, tmp_path / "other")
    file = load(other, f"{Q_PROJ}.weight")
    file.array(f"{Q_PROJ}.weight")[:] = file.array(f"{Q_PROJ}.weight")[::-1].copy()
    file.save()
    report = verify.verify(folder, other, forward=False)
    assert {fault.where for fault in report.failures} == {Q_PROJ}


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_compressed_tensors_itself_writes_is_accepted(build_llama, tmp_path, symmetric):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import AutoModelForCausalLM

    source = build_llama(dtype="float16", tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    args = QuantizationArgs(num_bits=4, symmetric=symmetric, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], format="pack-quantized")
    )
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            groups = module.weight.float().view(module.weight.shape[0], -1, 32)
            scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
            module.weight_scale.data.copy_(scale)
            if not symmetric:
                module.weight_zero_point.data.copy_(zero_point)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "out")
    compressor.update_config(tmp_path / "out")
    report = verify.verify(tmp_path / "out", source)
    assert report.ok, report.failures
    assert len(report.layers) == 14
    assert all(layer.errors["step_error"] < 0.5 for layer in report.layers)
    # without a manifest, what shows is that the weights are another layer's
    file = load(tmp_path / "out", f"{Q_PROJ}.weight_packed")
    words = file.array(f"{Q_PROJ}.weight_packed")
    words[:] = words[::-1].copy()
    file.save()
    report = verify.verify(tmp_path / "out", source, forward=False)
    assert {fault.where for fault in report.failures} == {Q_PROJ}


def hide_source(folder: Path) -> None:
    path = folder / "lowbit.json"
    manifest = json.loads(path.read_text())
    manifest["source"]["name"] = "nobody/nothing"
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_fault_each_check_alone_is_content(damaged, check):
    source, folder = damaged(True)
    switches, _ = CHECKS[check]
    if check == "numbers alone":
        hide_source(folder)
    report = verify.verify(folder, source if check == "numbers and source" else None, **switches)
    assert report.ok, report.failures


def test_a_packer_that_is_off_by_one_is_caught_from_the_original_weights(build_llama, tmp_path, monkeypatch):
    """CASES 62: the files agree with themselves, and every code in them is wrong."""
    source = build_llama(tie_word_embeddings=False)
    pack = pipeline.pack_words
    monkeypatch.setattr(pipeline, "pack_words", lambda codes, bits: pack((codes + 1) % 2**bits, bits))
    pipeline.quantize(source, tmp_path / "out", Recipe(method="rtn", validate_layers=False))
    report = verify.verify(tmp_path / "out", source, forward=False)
    by_check = {fault.check for fault in report.failures}
    assert {"numbers", "source"} <= by_check
    assert any(Q_PROJ in fault.where for fault in report.failures)


def test_another_source_is_noticed(written, build_llama):
    _, good = written(group=64)
    report = verify.verify(good, build_llama(seed=1, tie_word_embeddings=False), hash=False, forward=False)
    assert not report.ok
    assert any(fault.check == "source" and "q_proj" in fault.where for fault in report.failures)


def test_errors_are_those_of_float64(written):
    """One layer's errors from the report against a decode and a product in float64."""
    source, good = written(group=64)
    report = verify.verify(good, source, forward=False)
    layer = next(layer for layer in report.layers if layer.name == Q_PROJ)
    words = load(good, f"{Q_PROJ}.weight_packed").array(f"{Q_PROJ}.weight_packed").view("uint32")
    scale = load(good, f"{Q_PROJ}.weight_scale").array(f"{Q_PROJ}.weight_scale")
    weight = load(source, f"{Q_PROJ}.weight").array(f"{Q_PROJ}.weight")
    codes = torch.tensor([[(int(word) >> 4 * i) & 15 for word in row for i in range(8)] for row in words])
    scale = torch.from_numpy(scale.copy()).view(torch.bfloat16).double().repeat_interleave(64, 1)
    want = torch.from_numpy(weight.copy()).view(torch.bfloat16).double()
    error = ((codes.double() - 8) * scale - want).norm() / want.norm()
    assert layer.errors["weight_error"] == pytest.approx(float(error), rel=1e-6)


def test_hidden_states_that_are_not_finite_fail_the_forward_check(damaged, monkeypatch):
    _, folder = damaged(False)
    monkeypatch.setattr(verify, "first_nonfinite", lambda *_: "model.layers.1")
    report = verify.verify(folder)
    assert [(fault.check, fault.where) for fault in report.failures] == [("forward", "model.layers.1")]


@pytest.mark.parametrize(
    ("tensor", "where"),
    [
        ("model.layers.1.post_attention_layernorm.weight", "model.layers.1"),
        ("lm_head.weight", "the output layer"),
    ],
)
def test_a_weight_that_is_not_finite_shows_in_the_forward_pass(damaged, tensor, where):
    """Neither hashes nor numbers look: the model itself says where."""
    _, folder = damaged(False)
    file = load(folder, tensor)
    # infinity in bfloat16
    file.array(tensor)[:] = 0x7F80
    file.save()
    report = verify.verify(folder, hash=False, numeric=False)
    assert [(fault.check, fault.where) for fault in report.failures] == [("forward", where)]


@pytest.mark.parametrize("switches", [switches for switches, _ in CHECKS.values()])
def test_a_missing_file_is_named(damaged, switches):
    _, folder = damaged(False)
    (folder / "tokenizer.json").unlink()
    report = verify.verify(folder, **switches)
    assert [fault.where for fault in report.failures if fault.check == "structure"] == ["tokenizer.json"]


def nodes(value, path=()):
    """Paths to every value in a JSON document, lists by their first element only."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from nodes(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from nodes(value[0], (*path, 0))


def with_value(document, path, value):
    document = json.loads(json.dumps(document))
    *parents, last = path
    place = document
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return document


@pytest.mark.parametrize("file", ["lowbit.json", "config.json", "model.safetensors.index.json"])
def test_a_malformed_document_is_a_finding_and_no_crash(damaged, file):
    source, folder = damaged(True)
    path = folder / file
    if not path.exists():
        names = load(folder, f"{Q_PROJ}.weight_scale").header.keys() - {"__metadata__"}
        path.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}))
    good = json.loads(path.read_text())
    ways = [path for path in nodes(good) if path and "tensors" not in path]
    for way in ways[:80]:
        for value in (..., None, -1, "x", [], {"a": 1}, ["a"]):
            path.write_text(json.dumps(with_value(good, way, value)))
            try:
                verify.verify(folder, source, hash=False, forward=False, numeric=False)
            except LowbitError:
                continue
    for text in ("", "[]", "{", "null"):
        path.write_text(text)
        assert refused(folder, source)


def refused(folder, source):
    try:
        return not verify.verify(folder, source, hash=False, forward=False, numeric=False).ok
    except LowbitError:
        return True


def test_a_tensor_that_was_lost_is_noticed(damaged):
    """The source has a tensor that the output neither quantized, copied nor dropped."""
    source, folder = damaged(False)
    path = folder / "lowbit.json"
    manifest = json.loads(path.read_text())
    manifest["copied"] = [row for row in manifest["copied"] if row["name"] != "model.norm.weight"]
    path.write_text(json.dumps(manifest))
    delete_tensor("model.norm.weight")(folder)
    report = verify.verify(folder, source, hash=False, forward=False)
    assert [fault.where for fault in report.failures] == ["model.norm.weight"]


@pytest.mark.parametrize("check", CHECKS)
def test_exchanged_files_are_found(build_llama, tmp_path, monkeypatch, check):
    """Two shards trade places: each is intact, and not what the index says."""
    monkeypatch.setitem(Sink.__init__.__kwdefaults__, "shard_bytes", 400_000)
    source, folder = build_llama(tie_word_embeddings=False), tmp_path / "out"
    pipeline.quantize(source, folder, Recipe(method="rtn", group=64))
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) >= 3
    moved = set(header_names(shards[0]) + header_names(shards[1]))
    assert verify.verify(folder, source, forward=False).ok
    shards[0].rename(folder / "aside")
    shards[1].rename(shards[0])
    (folder / "aside").rename(shards[1])
    switches, allowed = CHECKS[check]
    if check == "numbers alone":
        hide_source(folder)
    report = verify.verify(folder, source if check == "numbers and source" else None, **switches)
    found = {fault.where for fault in report.failures if fault.check in allowed}
    assert found == ({shards[0].name, shards[1].name} if check == "hash" else moved)


def header_names(file: Path) -> list[str]:
    raw = file.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return [name for name in header if name != "__metadata__"]

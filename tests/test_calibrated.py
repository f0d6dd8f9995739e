"""gptq through the whole line: what is written, what falls back and why, killed runs, what it is worth."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_model

from lowbit import pipeline
from lowbit.decode import decode_layer, dequantize
from lowbit.errors import CalibrationError, PlanError, SourceError
from lowbit.recipe import Recipe, Rule
from lowbit.scheme import QuantScheme

GPTQ = Recipe(method="gptq", group=32, device="cpu", samples=16, seqlen=64)
Build = Callable[..., Path]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory, build_llama: Build) -> Path:
    """A mixture of experts with a tokenizer."""
    folder = save_model("qwen3_moe", tmp_path_factory.mktemp("moe") / "moe", vocab_size=512)
    for file in build_llama().iterdir():
        if "token" in file.name or "chat" in file.name:
            shutil.copy(file, folder)
    return folder


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "lowbit.json").read_text())


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that the files hold, by layer name."""
    tensors = load_file(folder / "model.safetensors")
    weights = {}
    for row in manifest(folder)["layers"]:
        prefix = f"{row['name']}."
        parts = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        quantized, _ = decode_layer(
            "compressed-tensors", parts, QuantScheme(**row["scheme"]), tuple(row["shape"])
        )
        weights[row["name"]] = dequantize(quantized)
    return weights


def divergence(source: Path, out: Path, rows: torch.Tensor) -> float:
    """KL to the source of a model that holds the decoded weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(rows).logits.log_softmax(-1)
        for name, weight in decoded(out).items():
            model.get_submodule(name).weight.copy_(weight)
        found = model(rows).logits.log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def test_calibration_is_worth_it(llama_folder: Path, tmp_path: Path) -> None:
    """On text it has not seen, with the bits of rtn: closer than plain GPTQ, and that closer than rtn."""
    from lowbit.calib import load_rows

    plain = {"correction": False, "search": "minmax", "rounds": 0, "damping": 0.01}
    recipes = {
        "rtn": GPTQ.model_copy(update={"method": "rtn"}),
        "plain": GPTQ.model_copy(update={"solver": plain}),
        "corrected": GPTQ,
    }
    config = {"vocab_size": 512}
    unseen = load_rows(None, llama_folder, samples=8, seqlen=64, seed=7, config=config).rows
    found = {}
    for name, recipe in recipes.items():
        pipeline.quantize(llama_folder, tmp_path / name, recipe)
        found[name] = divergence(llama_folder, tmp_path / name, unseen)
    sizes = {(tmp_path / name / "model.safetensors").stat().st_size for name in recipes}
    assert len(sizes) == 1
    assert found["corrected"] < found["plain"] < found["rtn"], found


def test_the_manifest_tells_what_was_calibrated_on(llama_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a quantizer rounds every weight to a grid " * 30)
    pipeline.quantize(llama_folder, tmp_path / "out", GPTQ.model_copy(update={"calib": str(text)}))
    told = manifest(tmp_path / "out")
    assert told["calibration"]["origin"] == str(text)
    assert told["calibration"]["tokens"] < told["calibration"]["asked_tokens"] == 16 * 64
    assert any("asked for 16 rows" in note for note in told["notes"])
    assert {row["method"] for row in told["layers"]} == {"gptq"}


def test_two_runs_write_the_same_bytes(llama_folder: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        pipeline.quantize(llama_folder, tmp_path / name, GPTQ)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "other")


class Killed(BaseException):
    pass


@pytest.mark.parametrize(("after", "block"), [(1, 1), (7, 1), (11, 2)])
def test_a_killed_run_writes_the_same_bytes(
    after: int, block: int, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the first block, at its end, and in the second, with and without a saved state."""
    monkeypatch.setattr("lowbit.activations._SAVE_SHARE", float("inf"))
    pipeline.quantize(llama_folder, tmp_path / "clean", GPTQ)
    seen = []

    def kill(event: Any) -> None:
        seen.append(event.to_json()["event"])
        if seen.count("layer") == after:
            raise Killed

    with pytest.raises(Killed):
        pipeline.quantize(llama_folder, tmp_path / "killed", GPTQ, on_event=kill)
    assert not (tmp_path / "killed").exists()
    notes = []
    pipeline.quantize(llama_folder, tmp_path / "killed", GPTQ, on_event=lambda e: notes.append(e.to_json()))
    told = [note["message"] for note in notes if note.get("level") == "status"]
    units = len(load_file(llama_folder / "model.safetensors"))
    assert told[0].endswith(f" of {units} tensors are already written")
    assert told[1] == f"resuming: calibration goes on at block {block} of 2"
    assert hashes(tmp_path / "killed") == hashes(tmp_path / "clean")


def test_another_text_does_not_continue_a_run(llama_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    recipe = GPTQ.model_copy(update={"calib": str(text)})

    def kill(event: Any) -> None:
        if event.to_json()["event"] == "layer":
            raise Killed

    text.write_text("she sells sea shells by the sea shore " * 200)
    with pytest.raises(Killed):
        pipeline.quantize(llama_folder, tmp_path / "out", recipe, on_event=kill)
    text.write_text("seven wise owls watch from the old oak tree " * 200)
    with pytest.raises(Exception, match="calibration"):
        pipeline.quantize(llama_folder, tmp_path / "out", recipe)


def test_starved_experts_are_rounded_in_the_same_layout(experts: Path, tmp_path: Path) -> None:
    """CASES 23: the router hardly ever picks experts 2 and 3 of layer 1."""
    folder = tmp_path / "starved"
    shutil.copytree(experts, folder)
    tensors = load_file(folder / "model.safetensors")
    router = tensors["model.layers.1.mlp.gate.weight"]
    # three rows win or lose together and two experts are picked
    router[1:] = router[0]
    router[0] *= 2
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    pipeline.quantize(folder, tmp_path / "out", GPTQ)
    rows = {row["name"]: row for row in manifest(tmp_path / "out")["layers"]}
    fallen = {name for name, row in rows.items() if row["method"] == "rtn"}
    assert fallen
    assert all(".mlp.experts." in name for name in fallen)
    for name in fallen:
        assert "rtn: " in rows[name]["fallback"]
        assert rows[name]["scheme"] == rows["model.layers.1.mlp.experts.0.gate_proj"]["scheme"]
    assert any("calibration token" in note for note in manifest(tmp_path / "out")["notes"])


def test_rules_mix_methods_and_the_head_falls_back(llama_folder: Path, tmp_path: Path) -> None:
    recipe = GPTQ.model_copy(
        update={
            "include": ("re:.*",),
            "rules": (Rule(match="re:.*down_proj.*", method="rtn", bits=8),),
            "solver": {"rounds": 1},
        }
    )
    pipeline.quantize(llama_folder, tmp_path / "out", recipe)
    rows = {row["name"]: row for row in manifest(tmp_path / "out")["layers"]}
    assert rows["lm_head"]["method"] == "rtn"
    assert "outside the decoder blocks" in rows["lm_head"]["fallback"]
    assert {rows[f"model.layers.{i}.mlp.down_proj"]["method"] for i in (0, 1)} == {"rtn"}
    assert rows["model.layers.0.mlp.down_proj"]["fallback"] is None
    assert rows["model.layers.1.mlp.up_proj"]["method"] == "gptq"


def test_bad_text_is_refused_before_anything_is_written(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    for spec in ("empty.txt", "none.txt"):
        with pytest.raises(CalibrationError):
            pipeline.quantize(
                llama_folder, tmp_path / "out", GPTQ.model_copy(update={"calib": str(tmp_path / spec)})
            )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt"]


def test_a_nan_is_named_wherever_it_is(llama_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(llama_folder / "model.safetensors")
    for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        broken = {k: v.clone() for k, v in tensors.items()}
        broken[name].view(-1)[5] = float("nan")
        save_file(broken, llama_folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(SourceError, match=name):
            pipeline.quantize(llama_folder, tmp_path / "out", GPTQ)
        assert not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / ".out.lowbit-staging", ignore_errors=True)


def test_layers_solved_as_one_are_solved_alike(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.quantize(llama_folder, tmp_path / "together", GPTQ)
    monkeypatch.setattr(pipeline, "STACKED_WEIGHTS", {"cpu": 1})
    pipeline.quantize(llama_folder, tmp_path / "alone", GPTQ)
    together, alone = decoded(tmp_path / "together"), decoded(tmp_path / "alone")
    for name, weight in together.items():
        # sums of other blocks of a product round differently, which a code here and there shows
        assert (weight != alone[name]).double().mean() < 0.01, name


def test_a_model_that_transformers_does_not_know_is_refused_before_anything_is_written(
    llama_folder: Path, tmp_path: Path
) -> None:
    config = json.loads((llama_folder / "config.json").read_text())
    (llama_folder / "config.json").write_text(json.dumps(config | {"model_type": "not_yet_known"}))
    with pytest.raises(PlanError, match="--method rtn and hqq need no model code"):
        pipeline.quantize(llama_folder, tmp_path / "out", GPTQ)
    assert not list(tmp_path.glob("*out*"))

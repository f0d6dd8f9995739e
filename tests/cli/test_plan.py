"""`lowbit plan`: every tensor is accounted for, nothing is read or written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lowbit.cli.commands.plan import _common_prefix, kind


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.17.mlp.down_proj", "model.layers.*.mlp.down_proj"),
        ("model.layers.0.mlp.experts.127.w1", "model.layers.*.mlp.experts.*.w1"),
        ("h.3", "h.*"),
        ("conv1.2d.weight", "conv1.2d.weight"),
        ("lm_head", "lm_head"),
    ],
)
def test_kind_hides_indices_and_nothing_else(name: str, expected: str) -> None:
    assert kind(name) == expected


@pytest.mark.parametrize(
    ("kinds", "prefix"),
    [
        (["a.*.q", "a.*.k"], "a.*"),
        (["a.*.q"], "a.*"),
        (["a.q", "b.q"], ""),
        (["lm_head"], ""),
        (["a.b", "a.b.c"], "a"),
        ([], ""),
    ],
)
def test_common_prefix_leaves_every_kind_a_name(kinds: list[str], prefix: str) -> None:
    assert _common_prefix(kinds) == prefix


def test_json_accounts_for_every_source_tensor(llama_folder: Path, lowbit: Callable) -> None:
    ran = lowbit("plan", llama_folder, "--json", "--group", "128")
    assert ran.code == 0
    plan = ran.event("plan")
    header = (llama_folder / "model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    tensors = set(json.loads(header[8 : 8 + length])) - {"__metadata__"}
    listed = [row["source"] for row in plan["layers"]] + [row["name"] for row in plan["copied"]]
    assert sorted([*listed, *plan["dropped"]]) == sorted(tensors)
    assert len(plan["layers"]) == 14


def test_people_see_layers_by_kind_with_counts_and_sizes(llama_folder: Path, lowbit: Callable) -> None:
    ran = lowbit("plan", llama_folder)
    assert ran.code == 0
    rows = [line.split() for line in ran.out.splitlines()]
    # two blocks of 512 x 256 in bf16: 0.5 MiB become 132 KiB of words and scales
    assert ["mlp.gate_proj", "2", "512×256", "int4", "sym", "g128", "512", "KiB", "→", "132", "KiB"] in rows
    assert "copied as they are" in ran.out
    assert "lm_head" in ran.out


def test_a_fallback_is_shown_with_its_reason_and_count(build_llama: Callable, lowbit: Callable) -> None:
    ran = lowbit("plan", build_llama(intermediate_size=320), "--group", "128")
    assert ran.code == 0
    assert any("mlp.down_proj" in line and "g64 *" in line for line in ran.out.splitlines())
    fallback = next(line for line in ran.out.splitlines() if "320 is not a multiple of 128" in line)
    assert "2 layers" in fallback
    assert "* not the group asked for" in ran.out.splitlines()
    assert "* not the group" not in lowbit("plan", build_llama(), "--group", "128").out


def test_a_recipe_file_holds_where_no_flag_is_given(
    llama_folder: Path, tmp_path: Path, lowbit: Callable
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("bits: 8\ngroup: 32\n")
    plan = lowbit("plan", llama_folder, "--recipe", recipe, "--group", "64", "--json").event("plan")
    assert {(row["scheme"]["bits"], row["scheme"]["group_size"]) for row in plan["layers"]} == {(8, 64)}


@pytest.mark.parametrize("command", [["plan"], ["quantize", "--dry-run"]], ids=" ".join)
def test_nothing_is_written(
    command: list[str], llama_folder: Path, tmp_path: Path, lowbit: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {file: file.stat().st_mtime_ns for file in llama_folder.iterdir()}
    assert lowbit(*command, llama_folder).code == 0
    assert list(tmp_path.iterdir()) == []
    assert {file: file.stat().st_mtime_ns for file in llama_folder.iterdir()} == before


def test_dry_run_is_plan(llama_folder: Path, lowbit: Callable) -> None:
    flags = [llama_folder, "--bits", "8", "--exclude", "re:.*down_proj"]
    dry, plan = lowbit("quantize", *flags, "--dry-run").out, lowbit("plan", *flags).out
    # what follows is measured anew by each
    (dry, dry_times), (plan, plan_times) = (text.split("expected on") for text in (dry, plan))
    assert dry == plan
    assert "gptq" in dry_times
    assert "gptq" in plan_times


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--bits", "5"], ["error: --bits: use one of 2, 3, 4, 8 (got 5)"]),
        (["--group", "100"], ["error: --group: ", "32, 64, 128, 256, -1"]),
        (["--method", "magic"], ["error: --method: use rtn, hqq or gptq (got 'magic')"]),
        (["--method", "awq"], ["error: --method: awq is a --format"]),
        (["--format", "gguf"], ["gguf", "compressed-tensors"]),
        (["--exclude", "re:.*router.*"], ["re:.*router.*"]),
        (["--include", "re:("], ["error: --include: ", "re:("]),
        (["--on-indivisible", "never"], ["error: --on-indivisible: use smaller-group, skip or error"]),
        (["--recipe", "/nowhere/recipe.yaml"], ["/nowhere/recipe.yaml"]),
        (["--exclude", "re:.*"], ["no layer", "excluded"]),
        (["--device", "tpu"], ["error: --device: use auto, cpu, cuda or cuda:N (got 'tpu')"]),
        (["--device", "cuda:99"], ["--device", "cuda:99"]),
        (["--samples", "0"], ["error: --samples: must be greater than or equal to 1 (got 0)"]),
    ],
    ids=str,
)
def test_bad_flags_exit_2_with_one_line(
    flags: list[str], says: list[str], llama_folder: Path, lowbit: Callable
) -> None:
    ran = lowbit("plan", llama_folder, *flags)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("lowbit: error: ")
    assert ran.err.count("\n") == 1
    assert [text for text in says if text not in ran.err] == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("plan", "missing argument"),
        ("plan x --bits four", "--bits: must be a valid integer; see lowbit plan --help"),
        ("plan x --bits", "--bits: requires an argument"),
        ("plan x y", "extra argument"),
        ("eval x --window 1", "--window: "),
        ("nonsense", "no such command 'nonsense'; see lowbit --help"),
        ("plan x --nonsense", "no such option: --nonsense"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(args: str, says: str, lowbit: Callable) -> None:
    ran = lowbit(*args.split())
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("lowbit: error: ")
    assert says in ran.err
    assert "--help" in ran.err
    assert ran.err.count("\n") == 1


def test_without_arguments_the_help_is_shown(lowbit: Callable) -> None:
    ran = lowbit()
    assert ran.code == 2
    assert "quantize" in ran.out + ran.err
    assert "error" not in ran.err


def test_names_are_shown_as_they_are(llama_folder: Path, lowbit: Callable) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(llama_folder / "model.safetensors")
    names = ["model.layers.0.[/red]", "model.layers.0.[bold]x[/]", "model.layers.0.:smile:"]
    tensors |= {f"{name}.weight": tensors["lm_head.weight"].clone() for name in names}
    save_file(tensors, llama_folder / "model.safetensors", metadata={"format": "pt"})
    ran = lowbit("plan", llama_folder)
    assert ran.code == 0
    assert [name for name in ("[/red]", "[bold]x[/]", ":smile:") if name not in ran.out] == []


@pytest.mark.slow
def test_streams_that_are_closed_or_speak_ascii(llama_folder: Path, tmp_path: Path, spawn: Callable) -> None:
    folder = llama_folder.rename(tmp_path / os.fsdecode("café ".encode() + b"\xff"))
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    for flags in ([], ["--json"]):
        process = spawn("plan", folder, *flags, env=ascii_only)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert (out + err).isascii()
    assert json.loads(out)["model"] == str(folder)
    closed = spawn("plan", folder, stdout=None, preexec_fn=lambda: os.close(1))
    assert closed.communicate(timeout=60)[1] == ""
    assert closed.returncode == 0


def test_a_missing_model_is_one_line_and_an_event(lowbit: Callable) -> None:
    ran = lowbit("plan", "/nowhere/model", "--json")
    assert ran.code == 2
    assert ran.event("error")["exit_code"] == 2
    assert "/nowhere/model" in ran.event("error")["message"]
    assert ran.err == f"lowbit: error: {ran.event('error')['message']}\n"


def test_json_is_ascii_whatever_the_names(llama_folder: Path, lowbit: Callable) -> None:
    odd = llama_folder.with_name("模型")
    llama_folder.rename(odd)
    ran = lowbit("plan", odd, "--json")
    assert ran.out.isascii()
    assert ran.event("plan")["model"] == str(odd)

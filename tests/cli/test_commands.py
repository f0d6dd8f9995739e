"""The commands that read a written folder: what they say, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def original(build_llama: Callable) -> Path:
    return build_llama()


@pytest.fixture(scope="module")
def written(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that quantize wrote, for tests that only read it."""
    import lowbit as library

    out = tmp_path_factory.mktemp("written") / "llama-int4"
    library.quantize(original, out, method="rtn", device="cpu")
    return out


@pytest.fixture
def damaged(written: Path, tmp_path: Path) -> Path:
    """The same with one bit of one packed weight turned over."""
    folder = tmp_path / "damaged"
    shutil.copytree(written, folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return folder


def test_verify_accepts_a_good_folder_and_names_every_check(written: Path, lowbit: Callable) -> None:
    ran = lowbit("verify", written)
    assert ran.code == 0
    rows = [line.split() for line in ran.out.splitlines()]
    for check in ("structure", "config", "hash", "numbers", "kernel", "source", "forward"):
        assert [check, "ok"] in rows
    assert ["verified", str(written)] in rows
    assert rows[-1][:3] == ["next", "lowbit", "eval"]


def test_verify_fails_a_damaged_folder_with_exit_1_and_names_the_fault(
    damaged: Path, lowbit: Callable
) -> None:
    ran = lowbit("verify", damaged)
    assert ran.code == 1
    assert "NOT verified" in ran.out
    assert ran.err.splitlines()[-1].startswith(f"lowbit: error: {damaged}: ")
    assert "model.safetensors" in ran.out
    assert "next" not in ran.out.split()


def test_verify_json_holds_the_report_and_the_error(damaged: Path, lowbit: Callable) -> None:
    ran = lowbit("verify", damaged, "--json", "--no-forward")
    assert ran.code == 1
    assert ran.event("done")["ok"] is False
    assert ran.event("done")["checks"]["hash"] == "failed"
    assert ran.event("done")["checks"]["forward"] == "switched off"
    assert ran.events[-1] == {
        "event": "error",
        "message": ran.err.splitlines()[-1].removeprefix("lowbit: error: "),
        "exit_code": 1,
    }


@pytest.mark.parametrize("switch", ["--no-hash", "--no-numeric"])
def test_hash_and_numbers_find_the_fault_without_each_other(
    switch: str, damaged: Path, lowbit: Callable
) -> None:
    assert lowbit("verify", damaged, "--quiet", switch, "--no-forward").code == 1


def test_eval_of_a_model_beside_itself_loses_nothing(
    original: Path, tmp_path: Path, lowbit: Callable
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 40)
    ran = lowbit(
        "eval",
        original,
        "--source",
        original,
        "--text",
        text,
        "--max-tokens",
        "128",
        "--window",
        "32",
        "--json",
    )
    assert ran.code == 0
    done = ran.event("done")
    assert done["total"]["kl_mean"] == pytest.approx(0, abs=1e-6)
    assert done["total"]["top1"] == 1
    assert ran.event("stage")["unit"] == "tokens"
    assert not (original / "lowbit_eval.json").exists()


def test_scores_are_shown_where_they_cannot_be_kept(written: Path, tmp_path: Path, lowbit: Callable) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(written, folder)
    # where it would be kept; root may write to folders that are read-only
    (folder / "lowbit_eval.json").mkdir()
    ran = lowbit("eval", folder, "--max-tokens", "256", "--window", "64")
    assert ran.code == 0
    assert "perplexity" in ran.out
    assert "lowbit_eval.json: not written (Is a directory)" in ran.err


def test_eval_of_a_quantized_folder_is_shown_and_kept_for_the_report(
    written: Path, original: Path, tmp_path: Path, lowbit: Callable
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(written, folder)
    ran = lowbit("eval", folder, "--source", original, "--max-tokens", "256", "--window", "64")
    assert ran.code == 0
    assert "perplexity" in ran.out
    assert (folder / "lowbit_eval.json").is_file()
    page = tmp_path / "page.html"
    assert lowbit("report", folder, "--out", page).code == 0
    assert page.read_text().startswith("<!doctype html>")


def test_generate_compares_with_the_original_that_the_manifest_names(
    written: Path, original: Path, lowbit: Callable
) -> None:
    ran = lowbit("generate", written, "the quick brown", "--compare", "--max-new-tokens", "4", "--json")
    assert ran.code == 0
    done = ran.event("done")
    assert done["prompt"] == "the quick brown"
    assert isinstance(done["source_text"], str)
    assert f"{original} (the original)" in ran.err
    assert ("…" in ran.err) == (done["cut"] or done["source_cut"])


def test_inspect_names_scheme_sizes_and_engines(written: Path, lowbit: Callable) -> None:
    ran = lowbit("inspect", written, "--kernels")
    assert ran.code == 0
    rows = [line.split() for line in ran.out.splitlines()]
    # 1,179,648 weights at 4.125 bits, and 16 bytes of shape in each of 14 layers
    assert ["int4", "sym", "g128", "14", "1,179,648", "594", "KiB", "4.13"] in rows
    assert any(row[:2] == ["transformers", "yes"] for row in rows)
    assert any("512×256" in row for row in rows)


def test_convert_keeps_the_weights_and_says_where(written: Path, tmp_path: Path, lowbit: Callable) -> None:
    out = tmp_path / "gptq"
    ran = lowbit("convert", written, "--format", "gptq", "--out", out)
    assert ran.code == 0
    assert ["written", str(out)] in [line.split() for line in ran.out.splitlines()]
    assert lowbit("verify", out, "--quiet").code == 0
    refused = lowbit("convert", written, "--format", "awq", "--out", tmp_path / "awq")
    assert refused.code == 2
    assert "awq" in refused.err
    assert not (tmp_path / "awq").exists()


@pytest.mark.parametrize("command", ["verify", "inspect", "report"])
def test_a_folder_that_is_not_there_exits_2_with_one_line(command: str, lowbit: Callable) -> None:
    ran = lowbit(command, "/nowhere/folder")
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("lowbit: error: /nowhere/folder: ")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [["verify"], ["inspect"], ["report"], ["convert", "--format", "gptq"], ["push", "me/m"]],
    ids=lambda args: args[0],
)
def test_a_model_that_is_not_quantized_exits_2_with_one_line(
    args: list[str], original: Path, lowbit: Callable
) -> None:
    command, *rest = args
    ran = lowbit(command, original, *rest)
    assert ran.code == 2
    assert ran.out == ""
    message = f"not quantized; {command} takes a folder that lowbit quantize wrote"
    assert ran.err == f"lowbit: error: {original}: {message}\n"


def test_a_quantized_folder_that_lost_its_marks_is_still_judged(
    written: Path, tmp_path: Path, lowbit: Callable
) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(written, folder)
    (folder / "lowbit.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert lowbit("verify", folder, "--quiet", "--no-forward").code == 1


def test_push_dry_run_lists_and_needs_no_network(written: Path, lowbit: Callable) -> None:
    ran = lowbit("push", written, "someone/llama-int4", "--dry-run", "--json")
    assert ran.code == 0
    assert ran.event("done")["files"] == sorted(file.name for file in written.iterdir())
    assert ran.event("done")["uploaded"] == []


def test_push_dry_run_shows_people_the_files_and_that_verify_ran(written: Path, lowbit: Callable) -> None:
    ran = lowbit("push", written, "someone/llama-int4", "--dry-run")
    rows = [line.split() for line in ran.out.splitlines()]
    assert {row[0] for row in rows if row} >= {file.name for file in written.iterdir()}
    assert ["verified", "by", "lowbit", "verify,", "just", "now"] in rows


def test_push_refuses_what_verify_refuses(damaged: Path, lowbit: Callable) -> None:
    ran = lowbit("push", damaged, "someone/llama-int4", "--dry-run")
    assert ran.code == 1


@pytest.mark.parametrize(("own", "wanted"), [(None, "passive"), ("active", "active")])
def test_threads_wait_without_spinning_unless_told_otherwise(monkeypatch, own, wanted):
    from lowbit.cli.app import main

    environ = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    monkeypatch.setattr("os.environ", environ | ({} if own is None else {"OMP_WAIT_POLICY": own}))
    monkeypatch.setattr("sys.argv", ["lowbit", "--version"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    assert os.environ["OMP_WAIT_POLICY"] == wanted

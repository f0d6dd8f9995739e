"""`lowbit quantize` from the command line: what it writes, says and returns, also when it is stopped."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest


def hashes(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def weights(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in hashes(folder).items() if name.endswith(".safetensors")}


def test_the_summary_says_where_how_large_how_good_and_what_next(
    llama_folder: Path, tmp_path: Path, lowbit: Callable
) -> None:
    out = tmp_path / "a folder"
    ran = lowbit("quantize", llama_folder, "--out", out, "--device", "cpu")
    assert ran.code == 0
    lines = [line.strip() for line in ran.out.splitlines()]
    assert f"written          {out}" in lines
    assert "bits per weight  4.12 in 14 layers" in lines
    assert any("model.layers" in line and line.endswith("dB") for line in lines)
    assert lines[-1] == f"next  lowbit verify '{out}'"
    assert "\x1b" not in ran.out + ran.err


def test_json_ends_with_done_and_every_line_is_an_event(
    llama_folder: Path, tmp_path: Path, lowbit: Callable
) -> None:
    ran = lowbit("quantize", llama_folder, "--out", tmp_path / "out", "--json", "--device", "cpu")
    assert ran.code == 0
    assert [event["event"] for event in ran.events][:1] == ["plan"]
    assert ran.events[-1]["event"] == "done"
    assert ran.events[-1]["out"] == str(tmp_path / "out")
    layers = [event for event in ran.events if event["event"] == "layer"]
    assert [event["done_bytes"] for event in layers] == sorted(event["done_bytes"] for event in layers)
    assert layers[-1]["done_bytes"] == ran.event("plan")["source_bytes"]


def test_quiet_says_nothing(llama_folder: Path, tmp_path: Path, lowbit: Callable) -> None:
    ran = lowbit("quantize", llama_folder, "--out", tmp_path / "out", "--quiet", "--device", "cpu")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert (tmp_path / "out" / "config.json").exists()


def test_the_command_line_and_python_write_the_same(
    llama_folder: Path, tmp_path: Path, lowbit: Callable
) -> None:
    import lowbit as library

    assert lowbit("quantize", llama_folder, "--out", tmp_path / "a", "--device", "cpu").code == 0
    library.quantize(llama_folder, tmp_path / "b", device="cpu")
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    recipes = [json.loads((tmp_path / name / "lowbit.json").read_text())["recipe"] for name in "ab"]
    assert recipes[0] == recipes[1]


def test_an_existing_folder_needs_overwrite(llama_folder: Path, tmp_path: Path, lowbit: Callable) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "model-00003-of-00003.safetensors").write_bytes(b"stale")
    refused = lowbit("quantize", llama_folder, "--out", out, "--device", "cpu")
    assert refused.code == 2
    assert "--overwrite" in refused.err
    assert lowbit("quantize", llama_folder, "--out", out, "--overwrite", "--device", "cpu").code == 0
    assert not (out / "model-00003-of-00003.safetensors").exists()


def test_the_source_is_never_the_output(llama_folder: Path, tmp_path: Path, lowbit: Callable) -> None:
    link = tmp_path / "link"
    link.symlink_to(llama_folder)
    before = hashes(llama_folder)
    for out in (llama_folder, link):
        assert lowbit("quantize", llama_folder, "--out", out, "--overwrite", "--device", "cpu").code == 2
    assert hashes(llama_folder) == before


@pytest.fixture(scope="module")
def larger(build_llama: Callable) -> Path:
    """A model that takes a second or two, so that a signal finds its run still going."""
    return build_llama(hidden_size=512, intermediate_size=2048, num_hidden_layers=12)


@pytest.fixture(scope="module")
def undisturbed(larger: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Hashes of the weights that an undisturbed run writes."""
    import lowbit as library

    out = tmp_path_factory.mktemp("undisturbed") / "out"
    library.quantize(larger, out, method="rtn", device="cpu")
    return weights(out)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_exits_130_and_the_same_command_resumes(
    signum: signal.Signals,
    larger: Path,
    undisturbed: dict[str, str],
    tmp_path: Path,
    lowbit: Callable,
    spawn: Callable,
) -> None:
    command = ["quantize", larger, "--out", tmp_path / "out", "--method", "rtn", "--device", "cpu", "--json"]
    process = spawn(*command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "layer":
            break
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run the same command again to resume" in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()

    resumed = lowbit(*command)
    assert resumed.code == 0
    assert any("resuming" in event.get("message", "") for event in resumed.events)
    assert weights(tmp_path / "out") == undisturbed


def test_a_terminal_shows_a_live_bar(llama_folder: Path, tmp_path: Path, spawn: Callable) -> None:
    import pty

    primary, secondary = pty.openpty()
    process = spawn(
        "quantize", llama_folder, "--out", tmp_path / "out", "--device", "cpu",
        stdout=secondary, stderr=secondary, env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(secondary)
    shown, deadline = b"", time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            part = os.read(primary, 65536)
        except OSError:
            break
        shown += part
    os.close(primary)
    assert process.wait(timeout=60) == 0
    text = shown.decode()
    assert "quantize" in text
    assert "━" in text
    assert "100%" in text
    assert "lowbit verify" in text
    assert "Traceback" not in text

"""`lowbit push` as a program: exit codes, streams and the token, against the loopback Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lowbit.pipeline import quantize
from lowbit.recipe import make_recipe


@pytest.fixture
def run(server, llama_folder, tmp_path):
    """A function of arguments to the finished process of `lowbit push DIR ...`."""
    out = tmp_path / "out"
    quantize(llama_folder, out, make_recipe(method="rtn", device="cpu"))
    environment = os.environ | {
        "HF_ENDPOINT": server.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
    }

    def python(code, *arguments):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert server.token not in done.stdout + done.stderr
        return done

    def push(*arguments):
        return python("from lowbit.cli.app import main; main()", "push", str(out), *arguments)

    push.python = python
    return push


def test_push_ends_with_the_address(run, server):
    server.fail("PUT", "/upload/", 503, times=2)
    done = run("me/m", "--private", "--json")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[-1]["event"] == "done"
    assert events[-1]["url"].startswith(f"{server.url}/me/m/commit/")
    assert server.repos["me/m"].private
    assert set(events[-1]["uploaded"]) == set(server.repos["me/m"].files("main"))


LOAD = """
import lowbit, torch
model = lowbit.load("me/m", device="cpu")
print("LOADED", model(torch.tensor([[1, 2, 3]])).logits.isfinite().all().item())
"""


def test_pushed_model_is_loaded_by_its_name(run, tmp_path):
    assert run("me/m").returncode == 0
    done = run.python(LOAD)
    assert "LOADED True" in done.stdout, done.stderr


def test_refusal_is_one_line_and_exit_2(run, server):
    done = run("someone/else")
    assert done.returncode == 2
    assert "may not write there" in done.stderr
    assert "Traceback" not in done.stderr


def test_dry_run_needs_no_server(run, server):
    done = run("me/m", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert server.requests == []

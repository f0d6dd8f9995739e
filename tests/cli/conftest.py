"""Run the program as a user does, in this process or in one of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

PROGRAM = "from lowbit.cli.app import main; main()"


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The lines of --json."""
        return [json.loads(line) for line in self.out.splitlines()]

    def event(self, name: str) -> dict[str, Any]:
        """The one event of that name."""
        (event,) = [event for event in self.events if event["event"] == name]
        return event


@pytest.fixture
def lowbit(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """lowbit("plan", folder, ...) in this process."""
    from lowbit.cli.app import app
    from lowbit.cli.errors import exit_code

    def run(*args: object) -> Ran:
        capsys.readouterr()
        words = [str(arg) for arg in args]
        code = exit_code(
            lambda: app(words, prog_name="lowbit", standalone_mode=False), events="--json" in words
        )
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """spawn("quantize", folder, ...) in a process of its own with pipes, killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: object, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, *map(str, args)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, **(pipes | options)))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()

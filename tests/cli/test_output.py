"""What people see on a terminal and in a log, and what a program reads from --json."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lowbit.cli.output import (
    PLAIN_WIDTH,
    LineProgress,
    LiveProgress,
    NoProgress,
    Output,
    _progress,
    decibel,
    duration,
    note_list,
    output,
    percent,
    quoted,
    size,
    small_table,
)
from lowbit.errors import PlanError
from lowbit.events import LayerDone, Note, Stage


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (19 * 2**20, "19.0 MiB"),
        (257.4 * 2**20, "257 MiB"),
        (999.9 * 2**10, "0.98 MiB"),
        (1000 * 2**20, "0.98 GiB"),
        (5 * 2**30, "5.00 GiB"),
        (1500 * 2**30, "1500.00 GiB"),
    ],
)
def test_size(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 s"), (9.94, "9.9 s"), (10.2, "0:10"), (125, "2:05"), (3600, "1:00:00")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_an_exact_layer_and_an_unmeasured_one_have_words() -> None:
    assert (decibel(math.inf), decibel(None), decibel(20.04)) == ("exact", "–", "20.0 dB")
    assert (percent(0.1234), percent(None)) == ("12.34 %", "–")


def test_json_lines_are_strict_json(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"event": "layer", "path": Path("a"), "errors": {"snr_db": math.inf, "x": math.nan, "y": 1.5}}
    with output(json=True, quiet=False) as out:
        out.event(event)
        out.show("a table")
    captured = capsys.readouterr()

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in captured.out.splitlines()]
    assert lines == [{"event": "layer", "path": "a", "errors": {"snr_db": None, "x": None, "y": 1.5}}]
    assert captured.err == "a table\n"


def test_without_json_tables_go_to_stdout_and_events_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    with output(json=False, quiet=False) as out:
        out.event({"event": "layer"})
        out.show("a table")
        out.note(Note("8 of 128 rows", level="warning"))
        out.note(Note("resuming", level="status"))
        out.note(Note("kept in the summary"))
    captured = capsys.readouterr()
    assert captured.out == "a table\n"
    assert captured.err == "warning: 8 of 128 rows\nresuming\n"


def test_quiet_keeps_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with output(json=False, quiet=True) as out:
        out.show("a table")
        out.note(Note("8 of 128 rows", level="warning"))
        out.note(Note("resuming", level="status"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "warning: 8 of 128 rows\n"


@pytest.mark.parametrize("json_flag", ["True", "False"])
def test_a_reader_that_leaves_ends_the_run_quietly(json_flag: str) -> None:
    code = f"""
import sys
from lowbit.cli.errors import exit_code
from lowbit.cli.output import output
def run():
    with output(json={json_flag}, quiet=False) as out:
        for i in range(100_000):
            out.event({{"line": i}})
            if not out.json:
                out.show("a line of a table")
sys.exit(exit_code(run))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 130
    assert process.stderr.read() == ""
    process.stderr.close()


def screen(width: int, terminal: bool = True) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_live_progress_fits_the_terminal(width: int) -> None:
    console = screen(width)
    name = "model.layers.17.self_attn.a_projection_with_a_long_name"
    with LiveProgress(console) as bar:
        bar.stage(Stage("quantize", "", 2**31))
        bar.done(LayerDone(name, 2**30))
        with console.capture() as captured:
            console.print(bar.live.get_renderable())
    row, layer = captured.get().splitlines()
    assert all(part in row for part in ("quantize", "50%", "1.00 GiB of 2.00 GiB", "iB/s", "ETA"))
    assert layer.strip() == name
    assert len(row) <= width


def test_live_progress_keeps_a_row_for_each_stage_and_ends_without_a_layer() -> None:
    console = screen(100)
    with LiveProgress(console) as bar:
        bar.stage(Stage("calibrate", "32 rows"))
        bar.stage(Stage("quantize", "", 1000))
        bar.done(LayerDone("q_proj", 1000))
        bar.stage(Stage("quantize", "again", 500))
    end = shown(console).rpartition("calibrate")[2]
    assert end.count("quantize") == 1
    assert "q_proj" not in end


@pytest.mark.parametrize(
    ("terminal", "term", "stdout_terminal", "flags", "kind"),
    [
        (True, "xterm", False, {}, LiveProgress),
        (True, "xterm", True, {}, LiveProgress),
        (True, "dumb", False, {}, LineProgress),
        (False, "xterm", False, {}, LineProgress),
        # JSON lines would be torn by a bar on the same terminal
        (True, "xterm", True, {"json": True}, LineProgress),
        (True, "xterm", False, {"json": True}, LiveProgress),
        (True, "xterm", False, {"quiet": True}, NoProgress),
    ],
)
def test_progress_suits_where_stderr_goes(
    terminal: bool,
    term: str,
    stdout_terminal: bool,
    flags: dict[str, bool],
    kind: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: stdout_terminal)
    status = screen(80, terminal)
    chosen = _progress(Output(**({"json": False, "quiet": False} | flags), data=status, status=status))
    assert type(chosen) is kind


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_line_progress_prints_one_line_in_ten_seconds_with_rate_and_eta() -> None:
    clock, console = Clock(), screen(200, terminal=False)
    with LineProgress(console, clock) as lines:
        lines.stage(Stage("quantize", "rtn", 4 * 2**30))
        for second in range(1, 21):
            clock.now += 1
            lines.done(LayerDone(f"layer.{second}", second * 2**30 // 10))
        lines.stage(Stage("finish"))
    assert shown(console).splitlines() == [
        "quantize: rtn, 4.00 GiB",
        "quantize  25%  1.00 GiB of 4.00 GiB  102 MiB/s  ETA 0:30  layer.10",
        "quantize  50%  2.00 GiB of 4.00 GiB  102 MiB/s  ETA 0:20  layer.20",
        "quantize  100%  4.00 GiB  205 MiB/s  0:20",
        "finish",
    ]


def test_a_stage_may_count_something_else_than_bytes() -> None:
    clock, console = Clock(), screen(200, terminal=False)
    with LineProgress(console, clock) as lines:
        lines.stage(Stage("eval", "2 texts", 8192, unit="tokens"))
        clock.now += 16
        lines.done(LayerDone("news", 2048))
    assert shown(console).splitlines() == [
        "eval: 2 texts, 8,192 tokens",
        "eval  25%  2,048 tokens of 8,192 tokens  128 tokens/s  ETA 0:48  news",
        "eval  100%  8,192 tokens  512 tokens/s  0:16",
    ]


def test_a_log_holds_no_control_codes_and_no_cut_names(capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.0.mlp.experts.127." + "x" * PLAIN_WIDTH
    with output(json=False, quiet=False) as out:
        out.note(Note(name, level="warning"))
        with LineProgress(out.status) as lines:
            lines.stage(Stage("quantize", name))
    err = capsys.readouterr().err
    assert err.count(name) == 2
    assert "\x1b" not in err


def test_a_stage_that_failed_is_not_called_done() -> None:
    console = screen(200, terminal=False)
    lines = LineProgress(console)
    lines.stage(Stage("quantize", "", 2**30))
    lines.__exit__(PlanError)
    assert shown(console) == "quantize, 1.00 GiB\n"


@pytest.mark.parametrize(("columns", "width"), [(None, 80), ("100", 100), ("60", 60), ("wide", 80)])
def test_without_a_terminal_tables_take_columns_or_80_and_end_in_no_spaces(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    with output(json=False, quiet=False) as out:
        table = small_table("a title")
        table.add_column("name", overflow="fold")
        table.add_row("x" * 150)
        table.add_row("y")
        out.show(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) in (width - 1, width)
    assert [line for line in lines if line != line.rstrip()] == []


def test_markup_in_names_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    with output(json=False, quiet=False) as out:
        out.note(Note("[bold]odd[/] name", level="warning"))
        out.show(note_list(["[red]odd[/red] name"]))
    captured = capsys.readouterr()
    assert "[bold]odd[/] name" in captured.err
    assert "[red]odd[/red] name" in captured.out


def test_more_notes_than_fit_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with output(json=False, quiet=False) as out:
        out.show(note_list([f"note {i}" for i in range(11)], most=8))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "• note 0"
    assert len(lines) == 9
    assert lines[-1].strip() == "… and 3 more in lowbit.json"


@pytest.mark.parametrize(("path", "typed"), [("out", "out"), ("my model", "'my model'"), ("-m", "./-m")])
def test_a_path_can_be_pasted_after_a_command(path: str, typed: str) -> None:
    assert quoted(path) == typed

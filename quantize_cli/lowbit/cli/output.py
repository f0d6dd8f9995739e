"""What a person sees and what a program reads.

Data (tables, summaries) goes to stdout, progress and notes to stderr. With --json stdout holds one JSON
object a line and everything for people moves to stderr; with --quiet people get warnings and errors only.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TaskProgressColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from lowbit.cli.errors import reader_gone
from lowbit.events import Event, LayerDone, Note, OnEvent, Stage

# width of tables where neither a terminal nor COLUMNS tells it
PLAIN_WIDTH = 80
SECONDS_BETWEEN_LINES = 10.0


def size(nbytes: float) -> str:
    """Bytes with three digits, in the unit that leaves one to three of them before the point."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB"):
        nbytes /= 1024
        if nbytes < 999.5:
            return f"{nbytes:.{2 - (nbytes >= 9.995) - (nbytes >= 99.95)}f} {unit}"
    return f"{nbytes / 1024:.2f} GiB"


def amount(count: float, unit: str) -> str:
    """Bytes as size() writes them, anything else as 1,234 tokens."""
    return size(count) if unit == "bytes" else f"{count:,.0f} {unit}"


def rate(count: float, seconds: float, unit: str) -> str:
    """What is done in a second, as amount() writes it."""
    return f"{amount(count / seconds, unit)}/s"


def counted(number: int, noun: str) -> str:
    """1 tensor, 2 tensors."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds as 1.4 s, 2:05 or 1:00:00."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


def decibel(value: float | None) -> str:
    return "–" if value is None else "exact" if math.isinf(value) else f"{value:.1f} dB"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


class _Console(Console):
    """A console whose reader may leave: `lowbit plan MODEL | head -1` ends quietly."""

    def on_broken_pipe(self) -> None:
        reader_gone()


class _Trimmed:
    """A stream whose lines lose the spaces at their ends, with which tables fill their width."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(re.sub(r" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _console(stream: TextIO) -> Console:
    # names of tensors and files are shown as they are, [/red] and :smile: too
    console = partial(_Console, highlight=False, markup=False, emoji=False)
    if stream.isatty():
        return console(file=stream)
    # asked for none, rich would take the width of another stream's terminal
    width = None if os.environ.get("COLUMNS", "").isdigit() else PLAIN_WIDTH
    return console(file=cast(TextIO, _Trimmed(stream)), width=width)


def _json_value(value: Any) -> Any:
    """The value with what JSON cannot hold (infinite SNR, paths, tuples) as null, text and lists."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {str(key): _json_value(item) for key, item in value.items()}
        case list() | tuple():
            return [_json_value(item) for item in value]
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)


@dataclass(frozen=True)
class Output:
    """Where a command prints. data: tables and summaries.  status: progress, notes, warnings."""

    json: bool
    quiet: bool
    data: Console
    status: Console

    def event(self, event: dict[str, Any]) -> None:
        """Print one JSON line, if --json was given."""
        if self.json:
            try:
                print(json.dumps(_json_value(event)), flush=True)
            except BrokenPipeError:
                reader_gone()

    def show(self, *renderables: RenderableType) -> None:
        """Print to people, unless they asked for quiet."""
        if not self.quiet:
            for renderable in renderables:
                # a command or path is copied from the screen: the terminal wraps it, without a line break
                self.data.print(renderable, soft_wrap=isinstance(renderable, Text))

    @contextmanager
    def starting(self) -> Iterator[None]:
        """A spinner on a terminal while the libraries are imported, which takes seconds."""
        if self.quiet or not self.status.is_terminal:
            yield
        else:
            with self.status.status("starting"):
                yield

    def check_folder(self, folder: Path) -> None:
        """Refuse a mistyped folder at once: importing torch takes seconds."""
        from lowbit.manifest import check_folder

        check_folder(folder)

    def note(self, note: Note) -> None:
        """Print a warning or where a run stands at once; other notes wait for the closing summary."""
        if note.level == "warning":
            self.status.print(Text(f"warning: {note.message}", style="yellow"), soft_wrap=True)
        elif note.level == "status" and not self.quiet:
            self.status.print(Text(note.message, style="dim"), soft_wrap=True)


@contextmanager
def output(json: bool, quiet: bool) -> Iterator[Output]:
    """The output of one command; with --json people read on stderr."""
    out = Output(json, quiet, _console(sys.stderr if json else sys.stdout), _console(sys.stderr))
    yield out


def next_command(command: str) -> RenderableType:
    """The last line of a success: what to run now."""
    return Text.assemble(("next  ", "dim"), (command, "bold cyan"))


def quoted(path: object) -> str:
    """A path as a shell takes it; one that begins with a dash would be taken for a flag."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def small_table(title: str) -> Table:
    """A titled table with a line under its head and no frame, which leaves names their room."""
    return Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )


def facts(rows: list[tuple[str, str]]) -> Text:
    """Names and values in two columns, as a summary lists them; the paths among them are not broken."""
    width = max(len(name) for name, _ in rows)
    lines = (Text.assemble((name.ljust(width), "dim"), "  ", value) for name, value in rows)
    return Text("\n").join(lines)


def note_list(notes: list[str], most: int = 8) -> RenderableType:
    """Notes as a list with hanging indents; past `most`, how many more the manifest holds."""
    lines = [Padding(Text.assemble(("• ", "dim"), note), (0, 0, 0, 0)) for note in notes[:most]]
    if len(notes) > most:
        lines.append(Padding(Text(f"… and {len(notes) - most} more in lowbit.json", style="dim"), (0, 0)))
    return Group(*lines)


class _Done(ProgressColumn):
    """Done of all; nothing for a stage that does not count."""

    def render(self, task: Task) -> Text:
        unit = task.fields["unit"]
        if not task.total or unit is None:
            return Text("")
        return Text(f"{amount(task.completed, unit)} of {amount(task.total, unit)}", style="dim")


class _Rate(ProgressColumn):
    """What was done a second since the stage began."""

    def render(self, task: Task) -> Text:
        seconds = task.finished_time if task.finished else task.elapsed
        if not seconds or not task.completed or task.fields["unit"] is None:
            return Text("")
        return Text(rate(task.completed, seconds, task.fields["unit"]), style="cyan")


class _Left(ProgressColumn):
    """Time that is left; for a finished stage the time that it took."""

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(duration(task.finished_time or 0.0), style="green")
        if not task.total or not task.completed or not task.elapsed:
            return Text("")
        # over the whole stage: layers differ in size, and the rate of the last few says little
        left = task.elapsed * (task.total - task.completed) / task.completed
        return Text(f"ETA {duration(left)}", style="bold")


class LiveProgress:
    """On a terminal: one bar a stage, and below the bars the layer that was last finished."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.layer = ""
        self.tasks: dict[str, TaskID] = {}
        self.bars = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8)),
            TaskProgressColumn(),
            _Done(table_column=Column(no_wrap=True, justify="right")),
            _Rate(table_column=Column(no_wrap=True, justify="right")),
            _Left(table_column=Column(no_wrap=True, justify="right", min_width=8)),
            console=console,
            expand=True,
            auto_refresh=False,
        )
        # stdout stays untouched: it may be a pipe that a program reads
        self.live = Live(
            get_renderable=self._render, console=console, refresh_per_second=8, redirect_stdout=False
        )

    def _render(self) -> RenderableType:
        layer = Text(f"  {self.layer}", style="dim", no_wrap=True, overflow="ellipsis")
        return Group(self.bars.get_renderable(), layer) if self.layer else self.bars.get_renderable()

    def __enter__(self) -> LiveProgress:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.live.is_started:
            self.layer = ""
            if error is None:
                self._finish()
            self.live.stop()

    def stage(self, stage: Stage) -> None:
        self._finish()
        self.layer = stage.detail
        total, unit = (stage.total_bytes, stage.unit) if stage.total_bytes else (None, None)
        if stage.name in self.tasks:
            self.bars.reset(self.tasks[stage.name], total=total, unit=unit)
        else:
            self.tasks[stage.name] = self.bars.add_task(stage.name, total=total, unit=unit)
        self.live.start()

    def _finish(self) -> None:
        """Fill the bars when the next stage begins: what was left, such as a resumed part, is done."""
        for task in self.bars.tasks:
            total = task.total or 1
            self.bars.update(task.id, total=total, completed=total)

    def done(self, layer: LayerDone) -> None:
        self.layer = layer.name
        if self.bars.tasks:
            self.bars.update(self.bars.tasks[-1].id, completed=layer.done_bytes)


class LineProgress:
    """Elsewhere: a line when a stage begins, one every ten seconds, and one when all is done."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.clock = clock
        self.now = Stage("")
        self.began = self.printed = clock()

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._finish()

    def _finish(self) -> None:
        """Say what the stage took, if it counted something."""
        if self.now.total_bytes:
            seconds, total, unit = self.clock() - self.began, self.now.total_bytes, self.now.unit
            speed = rate(total, max(seconds, 1e-9), unit)
            self._line(f"{self.now.name}  100%  {amount(total, unit)}  {speed}  {duration(seconds)}")

    def stage(self, stage: Stage) -> None:
        self._finish()
        self.now = stage
        self.began = self.printed = self.clock()
        total = f", {amount(stage.total_bytes, stage.unit)}" if stage.total_bytes else ""
        self._line(f"{stage.name}{': ' if stage.detail else ''}{stage.detail}{total}")

    def done(self, layer: LayerDone) -> None:
        now = self.clock()
        if now - self.printed < SECONDS_BETWEEN_LINES:
            return
        self.printed = now
        seconds, total, unit = now - self.began, self.now.total_bytes, self.now.unit
        parts = [self.now.name]
        if total and layer.done_bytes:
            left = seconds * (total - layer.done_bytes) / layer.done_bytes
            parts.append(f"{100 * layer.done_bytes / total:.0f}%")
            parts.append(f"{amount(layer.done_bytes, unit)} of {amount(total, unit)}")
            parts.append(rate(layer.done_bytes, seconds, unit))
            parts.append(f"ETA {duration(left)}")
        self._line("  ".join([*parts, layer.name]))

    def _line(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)


class NoProgress:
    """With --quiet."""

    def __enter__(self) -> NoProgress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stage(self, stage: Stage) -> None:
        pass

    def done(self, layer: LayerDone) -> None:
        pass


def _progress(out: Output) -> LiveProgress | LineProgress | NoProgress:
    """The progress display that suits where stderr goes."""
    if out.quiet:
        return NoProgress()
    # JSON lines and a live bar on one terminal would overwrite each other
    live = out.status.is_terminal and not out.status.is_dumb_terminal
    if live and not (out.json and sys.stdout.isatty()):
        return LiveProgress(out.status)
    return LineProgress(out.status)


@contextmanager
def listener(out: Output) -> Iterator[OnEvent]:
    """A function for `on_event=`: it draws progress while the block runs and prints events with --json."""
    with _progress(out) as progress:

        def on_event(event: Event) -> None:
            out.event(event.to_json())
            match event:
                case Stage():
                    progress.stage(event)
                case LayerDone():
                    progress.done(event)
                case Note():
                    out.note(event)

        yield on_event

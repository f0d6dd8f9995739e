"""How a run ends: 0 done, 1 a gate failed, 2 bad input or usage, 130 interrupted.

Users' errors are one line on stderr. Anything else is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, cast

import typer

from lowbit.errors import LowbitError, one_line

INTERRUPTED = 130
BAD_INPUT = 2

# What the operating system refuses because of the user's disk or rights, and what to do about it.
_REMEDY = {
    errno.ENOSPC: "no space left on the device; free some and run the same command again to resume",
    errno.EDQUOT: "disk quota exceeded; free some and run the same command again to resume",
    errno.EACCES: "permission denied; check who may read and write it",
    errno.EPERM: "operation not permitted; check who may read and write it",
    errno.EROFS: "read-only file system; write to another place",
    errno.EFBIG: "larger than files may be here; raise `ulimit -f` or write to another file system",
    errno.ENAMETOOLONG: "file name too long; use a shorter one",
    errno.ELOOP: "too many symbolic links; check where they point",
    errno.EMFILE: "too many open files; raise `ulimit -n`",
}


# what typer raises for a command line that it cannot take; it exports this one of the family only
UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])


class Interrupted(BaseException):
    """SIGINT, SIGTERM or a reader that has gone; the message, if any, says how to go on.

    Not an Exception: no `except Exception` on the way may swallow it, and every context manager still closes.
    """


def os_error_line(error: OSError) -> str | None:
    """The one line for a refusal of the operating system that the user can mend, None for any other."""
    if error.errno not in _REMEDY:
        return None
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    return where + _REMEDY[error.errno]


def _interrupt(signum: int, _frame: FrameType | None) -> NoReturn:
    # a second signal must end a run that is stuck in its cleanup
    signal.signal(signum, signal.SIG_DFL)
    raise Interrupted("interrupted")


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise Interrupted inside; afterwards they do what they did before."""
    before = {signum: signal.signal(signum, _interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def reader_gone() -> NoReturn:
    """End the run because nobody reads stdout any more (`lowbit plan MODEL | head -1`)."""
    # the interpreter flushes stdout once more at exit: give it somewhere to go
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise Interrupted("")


def usage_line(error: Any) -> str:
    """The one line for a UsageError: the flag as it was typed, what is wrong, where the help is."""
    text = (
        error.format_message().rstrip(".").replace("Input should be", "must be").partition(", unable to")[0]
    )
    text = re.sub(r"^(?:Invalid value for|Option) '(.+?)':? ", r"\1: ", text)
    command = error.ctx.command_path if error.ctx else "lowbit"
    return f"{text[:1].lower()}{text[1:]}; see {command} --help"


def exit_code(run: Callable[[], object], *, events: bool = False) -> int:
    """Call `run`, print the user's error or interruption as one line, return the exit code.

    run: its own exit code, if it returns a number.  events: print errors on stdout too, as JSON.
    """
    try:
        with _interruptible():
            ended = run()
    except SystemExit as e:
        return int(e.code or 0)
    except UsageError as e:
        # without any argument typer shows the help, and the message is empty
        return _fail(usage_line(e), BAD_INPUT, events) if str(e) else BAD_INPUT
    except LowbitError as e:
        return _fail(str(e), e.exit_code, events)
    except OSError as e:
        line = os_error_line(e)
        if line is None:
            raise
        return _fail(line, BAD_INPUT, events)
    except Interrupted as e:
        if str(e):
            _say(str(e))
        return INTERRUPTED
    return ended if isinstance(ended, int) else 0


def _fail(message: str, code: int, events: bool) -> int:
    """Print an error, as an event too if a program reads them; return the exit code."""
    _say(f"error: {message}")
    if events:
        # the program may have gone
        with suppress(OSError):
            print(json.dumps({"event": "error", "message": message, "exit_code": code}), flush=True)
    return code


def _say(message: str) -> None:
    """Print to stderr on one line, whatever file names and library messages hold."""
    print(f"lowbit: {one_line(message, None)}", file=sys.stderr)

"""How a run ends: the exit code, one line on stderr, no traceback for what users can mend."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from lowbit import errors
from lowbit.cli.errors import Interrupted, exit_code, os_error_line


def raising(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (errors.SourceError("a.safetensors: cut short"), 2, "lowbit: error: a.safetensors: cut short"),
        (errors.GateError("q_proj: SNR 3 dB"), 1, "lowbit: error: q_proj: SNR 3 dB"),
        (errors.PlanError("two\nlines"), 2, "lowbit: error: two lines"),
        (Interrupted("interrupted"), 130, "lowbit: interrupted"),
    ],
    ids=str,
)
def test_exit_code_and_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(raising(error)) == code
    captured = capsys.readouterr()
    assert captured.err == line + "\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (errors.PlanError("q_proj: no"), 2, "q_proj: no"),
        (errors.GateError("q_proj: bad"), 1, "q_proj: bad"),
        (OSError(errno.ENOSPC, "", "/out/x"), 2, "/out/x: no space left"),
    ],
    ids=str,
)
def test_a_program_reads_the_error_as_the_last_event(
    error: Exception, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(raising(error), events=True) == code
    event = json.loads(capsys.readouterr().out)
    assert event.pop("message").startswith(message)
    assert event == {"event": "error", "exit_code": code}


@pytest.mark.parametrize(
    "words", [["plan"], ["plan", "x", "--bits", "four"], ["verify", "--nonsense"]], ids=str
)
def test_a_command_line_that_is_wrong_is_an_event_too(words: list[str], lowbit: Callable) -> None:
    ran = lowbit(*words, "--json")
    assert ran.code == 2
    assert ran.event("error") == {
        "event": "error",
        "message": ran.err.removeprefix("lowbit: error: ").rstrip("\n"),
        "exit_code": 2,
    }
    assert lowbit(*words).out == ""


def test_every_user_error_has_its_exit_code() -> None:
    codes = {
        error.__name__: error.exit_code
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.LowbitError)
    }
    assert codes.pop("GateError") == 1
    assert set(codes.values()) == {2}


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "permission denied"),
        (errno.EROFS, "read-only"),
        (errno.EFBIG, "ulimit -f"),
        (errno.ENAMETOOLONG, "too long"),
        (errno.ELOOP, "symbolic links"),
        (errno.EMFILE, "ulimit -n"),
    ],
)
def test_refusals_of_the_system_are_one_line(
    number: int, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(raising(OSError(number, os.strerror(number), "/out/model.safetensors"))) == 2
    err = capsys.readouterr().err
    assert err.startswith("lowbit: error: /out/model.safetensors: ")
    assert remedy in err
    assert err.count("\n") == 1


def test_other_os_errors_are_bugs_and_keep_their_traceback() -> None:
    assert os_error_line(OSError(errno.EBADF, "bad")) is None
    with pytest.raises(OSError, match="bad"):
        exit_code(raising(OSError(errno.EBADF, "bad")))
    with pytest.raises(ZeroDivisionError):
        exit_code(raising(ZeroDivisionError("ours")))


SLEEPER = """
import sys, time
from lowbit.cli.errors import exit_code
def run():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except Exception:
        print("swallowed", flush=True)
    finally:
        print("closed", flush=True)
        {cleanup}
sys.exit(exit_code(run))
"""


def sleeper(cleanup: str = "pass") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER.format(cleanup=cleanup)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_close_context_managers_and_exit_130(signum: signal.Signals) -> None:
    process = sleeper()
    process.send_signal(signum)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "closed\n", "lowbit: interrupted\n")


def test_a_second_signal_ends_a_cleanup_that_hangs() -> None:
    process = sleeper(cleanup="time.sleep(60)")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "closed\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("end", "code"), [(0, 0), (None, 0), (2, 2)])
def test_typers_own_exits_keep_their_code(end: int | None, code: int) -> None:
    assert exit_code(raising(SystemExit(end))) == code


def test_signal_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    exit_code(lambda: None)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

"""An append-only list of finished work that can be trusted after any interruption.

A line is the CRC-32 of its JSON, a space, the JSON. Lines are written by a thread that first brings the data
they speak of to the disk: whatever is in the ledger is in the data files, also after a power cut. Lines that
arrive while it waits for the disk share the next trip, so that writers never wait for it.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# at most so much work is repeated after a kill
COMMIT_SECONDS = 1.0


def read_ledger(path: Path) -> tuple[list[Any], int]:
    """Return the entries up to the first torn or damaged line, and how many bytes they take."""
    entries, size = [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n") or line[:8] != b"%08x" % zlib.crc32(line[9:-1]):
            break
        entries.append(json.loads(line[9:-1]))
        size += len(line)
    return entries, size


class Ledger:
    """The writing end; close it. Failures of its thread are raised by the next call, as OSError."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """Continue the ledger after its first `size` bytes."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._fd, size)
        self._wake = threading.Condition()
        self._lines: list[bytes] = []
        self._dirty: set[int] = set()
        self._asked = self._done = 0
        self._hurry = self._closing = False
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def append(self, entry: Any, descriptors: Iterable[int] = ()) -> None:
        """Record an entry once the files behind descriptors are on the disk."""
        text = json.dumps(entry, separators=(",", ":")).encode()
        with self._wake:
            self._check()
            self._lines.append(b"%08x %s\n" % (zlib.crc32(text), text))
            self._dirty |= set(descriptors)
            self._asked += 1
            self._wake.notify_all()

    def flush(self) -> None:
        """Return when everything appended is on the disk."""
        with self._wake:
            target, self._hurry = self._asked, True
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._done >= target or self._failure)
            self._hurry = False
            self._check()

    def close(self) -> None:
        """Commit what is pending, as far as the disk allows, and stop."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        os.close(self._fd)

    def _check(self) -> None:
        if self._failure:
            raise self._failure

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._lines or self._closing)
                if not self._lines:
                    return
                lines, dirty, target = self._lines, self._dirty, self._asked
                self._lines, self._dirty = [], set()
            try:
                for descriptor in dirty:
                    os.fsync(descriptor)
                _write_all(self._fd, b"".join(lines))
                os.fsync(self._fd)
            except OSError as e:
                with self._wake:
                    self._failure = e
                    self._wake.notify_all()
                return
            with self._wake:
                self._done = target
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._hurry or self._closing, timeout=COMMIT_SECONDS)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]

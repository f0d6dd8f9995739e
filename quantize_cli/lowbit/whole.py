"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowbit.errors import OutputError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to that becomes `path` at the end; what was there stays if the writing fails.

    It has the same ending, and is beside `path`, so that a place that cannot be written is refused at once. A
    device or a pipe is written to itself.
    Raises OutputError, naming path, for what the operating system refuses.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            yield path
            return
        half = target.with_name(f".lowbit-{os.getpid()}{target.suffix}")
        try:
            half.touch()
            yield half
            half.replace(target)
        finally:
            half.unlink(missing_ok=True)
    except OSError as e:
        raise OutputError(
            f"{path}: not written ({e.strerror or e}); make room or choose another place"
        ) from None

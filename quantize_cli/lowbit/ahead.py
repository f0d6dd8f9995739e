"""Work on a stream of units in a few threads, in bounded memory, with results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

# Bytes in work at a time. A larger unit is worked on alone.
IN_FLIGHT_BYTES = 768 << 20
WORKERS = min(8, os.cpu_count() or 1)


def workers() -> ThreadPoolExecutor:
    """A few threads that each compute alone."""
    return ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,))


def ahead(work: Callable[[T], R], units: Iterable[T], size: Callable[[T], int]) -> Iterator[tuple[T, R]]:
    """Yield (unit, work(unit)) in order while workers run ahead, at most IN_FLIGHT_BYTES of them."""
    with workers() as pool:
        pending: deque[tuple[T, Future[R]]] = deque()
        in_flight = 0
        try:
            for unit in units:
                while pending and (in_flight + size(unit) > IN_FLIGHT_BYTES or len(pending) > 2 * WORKERS):
                    first, future = pending.popleft()
                    yield first, future.result()
                    in_flight -= size(first)
                pending.append((unit, pool.submit(work, unit)))
                in_flight += size(unit)
            while pending:
                first, future = pending.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)

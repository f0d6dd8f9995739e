"""Tasks of EleutherAI's lm_eval (github.com/EleutherAI/lm-evaluation-harness), run on our model in memory."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lowbit.errors import RecipeError, one_line

# lm_eval leaves accelerate, which its models of transformers import, to an extra that brings more
NEEDS = ("lm_eval", "accelerate")


def check_installed() -> None:
    """Raise RecipeError if lm_eval, or what it needs for our models, is not there; nothing is imported."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        install = " ".join(missing)
        raise RecipeError(
            f"--tasks needs {' and '.join(missing)}, not installed here; run `pip install {install}`"
        )


def load_tasks(names: Sequence[str]) -> list[Any]:
    """Return lm_eval's tasks by name, group, pattern or path of a YAML file, with their data sets.

    Raises RecipeError for a name that it does not know and for data that it cannot get.
    """
    check_installed()
    with _own_random_state():
        from lm_eval.tasks import TaskManager

        manager = TaskManager()
    found = []
    for name in names:
        try:
            with _own_random_state():
                loaded = manager.load([name])["tasks"]
        # whatever a task's own loading code and the libraries under it raise
        except Exception as e:
            reason = one_line(e) or type(e).__name__
            raise RecipeError(f"--tasks {name}: lm_eval cannot load it: {reason}") from None
        if not loaded:
            raise RecipeError(f"--tasks {name}: no such task; `lm_eval ls tasks` lists them")
        found += loaded.values()
    return found


def run_tasks(
    model: Any, tokenizer: Any, tasks: Sequence[Any], *, limit: int | None = None, batch: int = 8
) -> dict[str, dict[str, float]]:
    """Return lm_eval's metrics of every task by name, standard errors as METRIC_stderr.

    model: a transformers model that is loaded.  tasks: what load_tasks returned.  limit: first examples of
    each task, all if None.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with _own_random_state():
        ours = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)
        result = simple_evaluate(ours, tasks=list(tasks), limit=limit, log_samples=False)
    assert result is not None
    return {name: _metrics(values) for name, values in result["results"].items()}


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """`acc,none` and `acc_stderr,none` under their names, without what is no number."""
    numbers = {key: value for key, value in values.items() if isinstance(value, int | float) and "," in key}
    return {key.partition(",")[0]: float(value) for key, value in numbers.items()}


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Let lm_eval seed what it likes, and put the caller's state back."""
    import numpy as np
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

"""The methods that choose codes for a weight, in one table.

A solver is a pure function (weight, scheme, stats, options) -> QuantizedTensor; `options` is its own frozen
dataclass, whose fields are the keys that a recipe may set under `solver:`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from lowbit.errors import RecipeError
from lowbit.scheme import PackedTensor, QuantizedTensor, QuantScheme
from lowbit.solvers import gptq, hqq, rtn

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.hessian import LayerStats


@dataclass(frozen=True)
class Solver:
    """solve: weight [N, K] in the source dtype, the scheme, calibration statistics or None, options.

    accepts: the reason why a scheme cannot be solved, None if it can.
    solve_packed: solve and pack a weight on a GPU in one kernel, for methods that have one.
    """

    name: str
    needs_data: bool
    options: type
    accepts: Callable[[QuantScheme], str | None]
    solve: Callable[[Tensor, QuantScheme, LayerStats | None, Any], QuantizedTensor]
    solve_packed: Callable[[Tensor, QuantScheme], PackedTensor] | None = None


SOLVERS: dict[str, Solver] = {
    "rtn": Solver("rtn", False, rtn.Options, rtn.accepts, rtn.solve, rtn.solve_packed),
    "hqq": Solver("hqq", False, hqq.Options, hqq.accepts, hqq.solve),
    "gptq": Solver("gptq", True, gptq.Options, gptq.accepts, gptq.solve),
}


def make_options(method: str, given: dict[str, Any]) -> Any:
    """The options of a method with the `given` values; RecipeError if it has no such option or type."""
    options = SOLVERS[method].options
    known = {f.name: type(f.default) for f in fields(options)}
    for key, value in given.items():
        if key not in known:
            raise RecipeError(f"solver: {method} has no option {key!r}; it has {', '.join(known) or 'none'}")
        # 1 is as good as 1.0, but True is no number
        if type(value) is not known[key] and (known[key], type(value)) != (float, int):
            raise RecipeError(f"solver: {key} is {value!r}, expected {known[key].__name__}")
    return options(**given)

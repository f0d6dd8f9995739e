"""What a running command tells its caller, in order: one PlanReady, then stages, layers and notes, then Done.

The command line draws them or, with --json, prints each as one JSON object a line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowbit.plan import Plan


@dataclass(frozen=True)
class PlanReady:
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        return {"event": "plan", **self.plan.to_json()}


@dataclass(frozen=True)
class Stage:
    """A phase begins: read, calibrate, solve, verify, write, tune. unit: what it counts, where not bytes."""

    name: str
    detail: str = ""
    total_bytes: int = 0
    unit: str = "bytes"

    def to_json(self) -> dict[str, Any]:
        return {"event": "stage", **asdict(self)}


@dataclass(frozen=True)
class LayerDone:
    """One unit is written; done_bytes counts source bytes since the start of the stage."""

    name: str
    done_bytes: int
    errors: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"event": "layer", **asdict(self)}


@dataclass(frozen=True)
class Note:
    """Something the user should know: a fallback, a skip, a resumed run, a shortage of samples.

    level: "info" is for the end, "status" and "warning" are for now.
    """

    message: str
    level: str = "info"

    def to_json(self) -> dict[str, Any]:
        return {"event": "note", **asdict(self)}


@dataclass(frozen=True)
class Done:
    summary: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"event": "done", **self.summary}


Event = PlanReady | Stage | LayerDone | Note | Done
OnEvent = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener of callers that listen to nothing."""

"""Measured steps of a real engine beside the cost model: single ones where a call's time is its step's, else stretches.

A call of `Engine.step` that leaves its tokens unread ends when the step before it does. So the time of a call is the
time of its step where a decode step follows others; steps with a prompt's chunk are compared in stretches, from one
call that leaves nothing unread to the next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tidekv.replay.cost import CostModel, StepLoad

STEPS = "replay_steps.json"  # in the folder of a run


@dataclass
class MeasuredStep:
    """One step of the real engine, planning and sampling included."""

    policy: str
    load: StepLoad
    graphed: bool  # replayed from a CUDA graph
    seconds: float
    workload: str = "chats"
    unread: bool | None = None  # its tokens were left for the next call; None: not noted

    @property
    def kind(self) -> str:
        """What dominates it."""
        load = self.load
        name = "prefill" if load.prefill_tokens else "decode"
        if load.decode_batch and load.prefill_tokens:
            name = "prefill + decode"
        if load.streamed_bytes:
            name += ", streaming"
        if load.from_host_bytes or load.to_host_bytes:
            name += ", moves"
        if load.behind_bytes:
            name += ", pages coming in under it"
        return name + ("" if self.graphed or load.prefill_tokens else ", launch by launch")


@dataclass(frozen=True)
class Stretch:
    """Steps whose time together is known."""

    kind: str
    steps: tuple[MeasuredStep, ...]

    @property
    def seconds(self) -> float:
        """As measured."""
        return sum(step.seconds for step in self.steps)

    def said_s(self, cost: CostModel) -> float:
        """As the model says."""
        return sum(cost.step_s(step.load) for step in self.steps)


def stretches(steps: Sequence[MeasuredStep], cost: CostModel) -> list[Stretch]:
    """Decode steps behind other decode steps one by one, where neither moves pages before itself; those with chunks
    from one wait to the next. What began before the first wait is left out, and a stretch in which a kernel was
    compiled or a step captured (0.3 s and more)."""
    found, open_steps = [], []
    is_open = False
    for i, step in enumerate(steps):
        before = steps[i - 1] if i else None
        if before is None or (before.workload, before.policy) != (step.workload, step.policy):
            open_steps, is_open = [], False
        elif not left_unread(before, step, cost):
            open_steps, is_open = [], True
        elif not any(s.load.prefill_tokens or s.load.from_host_bytes or s.load.to_host_bytes for s in (before, step)):
            found.append(Stretch(step.kind, (step,)))
        open_steps.append(step)
        after = steps[i + 1] if i + 1 < len(steps) else None
        ends = step.unread is False or (after is not None and not left_unread(step, after, cost))
        if is_open and ends and any(s.load.prefill_tokens for s in open_steps):
            found.append(Stretch(stretch_kind(open_steps), tuple(open_steps)))
    return [stretch for stretch in found if all(step.seconds < 0.3 for step in stretch.steps)]


def left_unread(step: MeasuredStep, after: MeasuredStep, cost: CostModel) -> bool:
    """Where it was not noted: the next one is no decode step that ends well before its own time, as one does that finds
    nothing to wait for."""
    if step.unread is not None:
        return step.unread
    return bool(after.load.prefill_tokens) or after.seconds > 0.6 * cost.compute_s(after.load)


def stretch_kind(steps: Sequence[MeasuredStep]) -> str:
    """What those with a prompt's chunk have beside it."""
    loads = [step.load for step in steps if step.load.prefill_tokens]
    name = "stretch with prompts' chunks"
    if any(load.streamed_bytes for load in loads):
        name += ", streaming"
    if any(load.behind_bytes for load in loads):
        name += ", pages coming in under them"
    if any(step.load.from_host_bytes or step.load.to_host_bytes for step in steps):
        name += ", moves"
    return name


def kinds(steps: Sequence[MeasuredStep], cost: CostModel) -> list[tuple[str, list[Stretch]]]:
    """Each kind with at least 5 of it."""
    found: dict[str, list[Stretch]] = {}
    for stretch in stretches(steps, cost):
        found.setdefault(stretch.kind, []).append(stretch)
    return [(kind, mine) for kind, mine in sorted(found.items()) if len(mine) >= 5]


COLUMNS = ("workload", "policy", "graphed", "unread", "seconds")


def save_steps(path: Path, steps: Sequence[MeasuredStep]) -> None:
    """Every measured step, a list a line under the names of its columns."""
    names = [f.name for f in fields(StepLoad)]
    lines = [
        json.dumps(
            [s.workload, s.policy, s.graphed, s.unread, round(s.seconds, 6), *asdict(s.load).values()],
            separators=(",", ":"),
        )
        for s in steps
    ]
    columns = json.dumps([*COLUMNS, *names])
    path.write_text(f'{{"columns": {columns}, "rows": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


def saved_rows(folder: Path) -> list[dict[str, Any]]:
    """What `save_steps` wrote, now or before, each step as a dictionary."""
    found: Any = json.loads((folder / STEPS).read_text())
    if isinstance(found, dict):
        return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    return list(found)


def saved_steps(folder: Path) -> list[MeasuredStep]:
    """The same as steps."""
    names, steps = [f.name for f in fields(StepLoad)], []
    for row in saved_rows(folder):
        # Files of before say nothing of a narrow pool: it is known only of steps that read something of it.
        row.setdefault("any_narrow", bool(row["streamed_bytes"] or row["behind_bytes"]))
        load = StepLoad(**{name: row[name] for name in names})
        known = {"workload": row.get("workload", "chats"), "unread": row.get("unread")}
        steps.append(MeasuredStep(row["policy"], load, row["graphed"], row["seconds"], **known))
    return steps

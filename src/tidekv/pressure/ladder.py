"""Which rung of the pressure ladder comes next: a pure function of counts, so that every tensor-parallel rank agrees.

0  evict unreferenced cached prefixes; then merge half-empty pages that need no halving
1  low  over low_max_pages        and low  can halve -> halve low,  keep low_max_pages
2  high over high_reserved_pages  and high can halve -> halve high, keep high_reserved_pages
3  low  can halve                                    -> halve low,  forced
4  high can halve                                    -> halve high, forced
5  nothing left: None
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tidekv.memory.ledger import HIGH, LOW


class Rung(IntEnum):
    """The rungs by their numbers in the design; the two halves of rung 0 are EVICT and MERGE."""

    EVICT = 0
    LOW_OVER_BUDGET = 1
    HIGH_OVER_BUDGET = 2
    LOW_FORCED = 3
    HIGH_FORCED = 4
    MERGE = 10


@dataclass(frozen=True)
class Budgets:
    """Thresholds for pressure, in pages; not caps on allocation. `defaults` gives the fractions of the design."""

    low_max_pages: int
    high_reserved_pages: int
    dynamic_max_pages: int

    @staticmethod
    def defaults(num_pages: int, layer_num: int, low_layers: int = 2) -> Budgets:
        """low = P*l // (L+l), dynamic = ceil(P*l / (L+l)), high = the rest, with l = low_layers."""
        low = num_pages * low_layers // (layer_num + low_layers)
        dynamic = -(-num_pages * low_layers // (layer_num + low_layers))
        return Budgets(low, num_pages - low - dynamic, dynamic)


@dataclass(frozen=True)
class PressureState:
    """All that the choice depends on. `*_can_halve` is False at minimum width and where halving was refused just
    now."""

    evictable_pages: int
    mergeable_pages: int
    low_used: int
    high_used: int
    low_can_halve: bool
    high_can_halve: bool
    budgets: Budgets


@dataclass(frozen=True)
class Action:
    """One rung and what it works on: `_halve_and_repack(code, max_keep_pages)` for rungs 1 to 4."""

    rung: Rung
    code: int = 0
    max_keep_pages: int = 0


def choose(state: PressureState) -> Action | None:
    """The first rung that applies, or None (rung 5)."""
    low = Action(Rung.LOW_OVER_BUDGET, LOW, state.budgets.low_max_pages)
    high = Action(Rung.HIGH_OVER_BUDGET, HIGH, state.budgets.high_reserved_pages)
    if state.evictable_pages > 0:
        return Action(Rung.EVICT)
    if state.mergeable_pages > 0:
        return Action(Rung.MERGE)
    if state.low_used > low.max_keep_pages and state.low_can_halve:
        return low
    if state.high_used > high.max_keep_pages and state.high_can_halve:
        return high
    if state.low_can_halve:
        return Action(Rung.LOW_FORCED, LOW, low.max_keep_pages)
    if state.high_can_halve:
        return Action(Rung.HIGH_FORCED, HIGH, high.max_keep_pages)
    return None

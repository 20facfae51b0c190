"""A decision about memory while it is being made: nothing of it has reached the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tidekv.memory.ledger import AllocationSplit, IntArray, Ledger
from tidekv.pressure.repack import Work


@dataclass
class Decision:
    """A decision in the making: the demand so far, the books as they were, and the device's part, not yet run."""

    touched: Callable[[], IntArray]  # slots that go on being filled: they need staging if they are narrow
    stages_new_slots: bool  # new narrow slots get tokens in this step, so they need staging too
    has_host_pages: bool  # new slots bring host pages along (a parked request coming back)
    demand: dict[int, int] = field(default_factory=dict)  # priority code -> slots
    splits: dict[int, AllocationSplit] = field(default_factory=dict)  # how `_fits` met it
    saved: Ledger | None = None
    works: list[Work] = field(default_factory=list)
    num_evicted: int = 0
    refused: set[int] = field(default_factory=set)  # codes whose halving was refused since the last progress

    def follow(self, slots: IntArray) -> IntArray:
        """The ids that these slots have after what was decided so far."""
        for work in self.works:
            slots = slots if work.lookup is None else work.lookup[slots]
        return slots

"""What the random tests draw: one description of values serves hypothesis (shrinking) and the plain driver (speed)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Int:
    low: int
    high: int

    def sample(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def strategy(self) -> st.SearchStrategy[int]:
        return st.integers(self.low, self.high)


@dataclass(frozen=True)
class OneOf:
    values: tuple[Any, ...]

    def sample(self, rng: random.Random) -> Any:
        return rng.choice(self.values)

    def strategy(self) -> st.SearchStrategy[Any]:
        return st.sampled_from(self.values)


FLAG = OneOf((False, True))


@dataclass(frozen=True)
class Fields:
    """A dict with one drawn value a name."""

    specs: dict[str, Any]

    def sample(self, rng: random.Random) -> dict[str, Any]:
        return {name: spec.sample(rng) for name, spec in self.specs.items()}

    def strategy(self) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({name: spec.strategy() for name, spec in self.specs.items()})


@dataclass(frozen=True)
class Many:
    spec: Any
    low: int
    high: int

    def sample(self, rng: random.Random) -> list[Any]:
        return [self.spec.sample(rng) for _ in range(rng.randint(self.low, self.high))]

    def strategy(self) -> st.SearchStrategy[list[Any]]:
        return st.lists(self.spec.strategy(), min_size=self.low, max_size=self.high)


PICK = Int(0, 11)  # an index into whatever there is, modulo its length

# One request of a batch: a new one or `requests[pick]`, how many pages and tokens more, its class, a shared prefix.
ITEM = Fields(
    {
        "pick": PICK,
        "fresh": FLAG,
        "pages": OneOf((0, 0, 0, 1, 1, 2, 3)),
        "tokens": Int(0, 17),
        "high": FLAG,
        "share": FLAG,
    }
)
BATCH = Many(ITEM, 1, 4)
FORM = Int(0, 2)  # how priorities are given: as short as possible, as a list, as a tensor

# Odd layer counts, tiny pools, budgets that bind and budgets that never do.
CONFIG = Fields(
    {
        "layer_num": OneOf((2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 11, 13)),
        "num_pages": Int(2, 12),
        "page_size": OneOf((1, 1, 4, 4, 4, 16)),
        "min_slot_width": OneOf((1, 2, 2)),
        "host_pages": OneOf((0, 3, 8, 16, 40, 200, 200, 200)),
        "low_max_pages": OneOf((None, 0, 1, 0.5)),
        "high_reserved_pages": OneOf((None, 0, 1, 0.5)),
        "dynamic_max_pages": OneOf((None, 0, 1, 3)),
        "write_through": FLAG,
        "need_sort": FLAG,
        "int32": FLAG,
        "evictor": FLAG,
    }
)

# name -> (weight, arguments). The names are methods of `oracle.CacheModel`.
OPERATIONS: dict[str, tuple[int, Fields]] = {
    "extend": (14, Fields({"items": BATCH, "form": FORM})),
    "decode": (14, Fields({"picks": Many(PICK, 1, 6), "form": FORM})),
    "alloc": (3, Fields({"pages": Int(0, 4), "tokens": Int(0, 15), "high": FLAG})),
    "free": (12, Fields({"picks": Many(PICK, 1, 3), "which": Int(0, 2), "group": FLAG})),
    "free_group_around_extend": (2, Fields({"pick": PICK, "items": BATCH, "form": FORM})),
    "abort": (2, Fields({"items": BATCH, "form": FORM})),
    "share": (3, Fields({"pick": PICK, "pages": Int(1, 3)})),
    "drop_prefix": (2, Fields({"pick": PICK})),
    "ensure_capacity": (2, Fields({"pages": Int(0, 8), "high": FLAG})),
    "halve": (3, Fields({"high": FLAG, "keep": Int(0, 8)})),
    "restore_widths": (
        5,
        Fields({"max_slots": Int(0, 6), "start": OneOf((0.0, 0.1, 0.25)), "stop": OneOf((0.0, 0.5, 1.0))}),
    ),
    "park": (3, Fields({"pick": PICK})),
    "unpark": (3, Fields({"pick": PICK, "high": FLAG})),
    "drop_parked": (1, Fields({"pick": PICK})),
    "promote": (2, Fields({"pick": PICK})),
    "backup_extend_restore": (3, Fields({"items": BATCH, "form": FORM})),
    "backup_free_restore": (2, Fields({"pick": PICK, "items": BATCH, "form": FORM})),
    "rewrite": (2, Fields({"pick": PICK, "position": Int(0, 400)})),
    "step": (4, Fields({})),
    "toggle_write_through": (1, Fields({})),
    "misuse": (2, Fields({"pick": PICK, "kind": Int(0, 4)})),
    "clear": (1, Fields({"really": OneOf((False,) * 19 + (True,))})),
}

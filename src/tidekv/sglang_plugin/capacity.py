"""How many tokens may be admitted over a pool: the virtual page space. Arithmetic only.

SGLang admits requests, and checks at idle that no page leaked, against one number, `max_total_num_tokens`. Stock that
is the pool. Here it is the size of a *virtual* page space: every page that SGLang hands out has a virtual id, and the
core can hold more of them than there are physical pages, because pages give up layers. The number must be one that the
pool can always carry, or a prefill that was admitted would find no memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tidekv.pressure.ladder import Budgets

HOST_SHARE = 0.25  # of the machine's memory, for pinned host pages of all ranks together


def machine_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this machine or container may use: the same number for every rank on it, whatever is free now."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        file = cgroup / name
        text = file.read_text().strip() if file.is_file() else ""
        if text.isdigit():
            total = min(total, int(text))
    return total


def default_host_pages(page_bytes: int, num_ranks: int, memory_bytes: int) -> int:
    """Host pages of one rank where host memory is pinned, that is real: a quarter of the machine for all ranks."""
    return int(memory_bytes * HOST_SHARE) // num_ranks // page_bytes


@dataclass(frozen=True)
class Capacity:
    """physical_pages   P of the device pool
    virtual_pages    page ids that SGLang may have in use at a time, >= P
    host_pages       pages of the host pool
    """

    physical_pages: int
    virtual_pages: int
    host_pages: int


def plan_capacity(
    physical_pages: int,
    layer_num: int,
    num_widths: int,
    step_slots: int,
    overcommit: float,
    host_pages: int | None = None,
) -> Capacity:
    """The largest virtual space, up to `overcommit` times the physical one, that is always met.

    num_widths   steps of the width ladder; a page at the narrowest holds 2 ** (num_widths - 1) slots
    step_slots   slots that one step can write, at most: each needs a pair of staging cells if it is narrow
    host_pages   of the host pool; None: one for each virtual page, so that all of them can be narrow

    With everything at minimum width, `staging` pages hold the step's staging pairs and the others hold the slots; two
    priorities leave at most one page each partly empty, which costs at most one page's slots less one.
    """
    slots_a_page = 1 << (num_widths - 1)
    pairs = layer_num // 2
    budget = Budgets.defaults(physical_pages, layer_num).dynamic_max_pages
    staging = max(1, budget, -(-step_slots // pairs))
    most = (physical_pages - staging) * slots_a_page - (slots_a_page - 1)
    virtual = min(most, int(physical_pages * overcommit))
    if host_pages is not None:
        virtual = min(virtual, host_pages)
    virtual = max(physical_pages, virtual)
    return Capacity(physical_pages, virtual, virtual if host_pages is None else host_pages)

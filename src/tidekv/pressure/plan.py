"""Decide: which slots shrink, which move where, what the books will say. Pure, from the ledger alone; moves nothing.

A plan is data. It is refused as a whole (a `Refusal` with the reason) if any part of it cannot be done.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidekv.memory.ledger import CODE_NAMES, DYNAMIC, NO_SLOTS, BoolArray, IntArray, Ledger


@dataclass(frozen=True)
class Refusal:
    """Why a plan cannot be made; nothing was changed."""

    reason: str


@dataclass(frozen=True)
class Moves:
    """Occupied slots of donor pages -> free slots of receivers, same width. `freed_pages` are the donors."""

    src: IntArray
    dst: IntArray
    width_level: npt.NDArray[np.int8]
    freed_pages: IntArray

    @staticmethod
    def concat(parts: list[Moves]) -> Moves:
        if not parts:
            return Moves(NO_SLOTS, NO_SLOTS, np.empty(0, dtype=np.int8), NO_SLOTS)
        return Moves(
            np.concatenate([part.src for part in parts]),
            np.concatenate([part.dst for part in parts]),
            np.concatenate([part.width_level for part in parts]),
            np.concatenate([part.freed_pages for part in parts]),
        )


@dataclass(frozen=True)
class RepackPlan:
    """One `_halve_and_repack`, or a merge without halving (`target_level` None).

    shrink       occupied slots that lose layers; they keep their ids (halving moves no slot)
    from_level   ladder index of each before the halving
    bare         of these, the slots that have no host page yet
    moves        what the merge does afterwards, in ids after the halving
    staging_pages  pages that become staging, so that what is narrow can be read back
    """

    code: int
    target_level: int | None
    shrink: IntArray
    from_level: npt.NDArray[np.int8]
    bare: IntArray
    moves: Moves
    staging_pages: int

    @staticmethod
    def merge_only(code: int, moves: Moves) -> RepackPlan:
        """A merge of pages that are half empty already: nothing shrinks, no layer leaves."""
        return RepackPlan(code, None, NO_SLOTS, np.empty(0, dtype=np.int8), NO_SLOTS, moves, 0)

    def __str__(self) -> str:
        what = "merge" if self.target_level is None else f"halve to level {self.target_level}"
        return (
            f"{what} {CODE_NAMES[self.code]}: {len(self.shrink)} slots shrink, {len(self.moves.src)} move, "
            f"{len(self.moves.freed_pages)} pages freed, {self.staging_pages} to staging"
        )

    def apply_to(self, ledger: Ledger) -> None:
        """Book the plan. The KV moves separately (`repack.Repacker`), from the same plan."""
        ledger.give_host_pages(self.bare)
        if self.target_level is not None:
            ledger.narrow_pages(self.code, self.target_level)
        ledger.move(self.moves.src, self.moves.dst)
        ledger.grow_staging(self.staging_pages)

    def lookup(self, num_combined: int) -> IntArray:
        """The lookup table over combined ids: identity but for what moves."""
        table = np.arange(num_combined, dtype=np.int64)
        table[self.moves.src] = self.moves.dst
        return table


def plan_repack(ledger: Ledger, code: int, max_keep_pages: int) -> RepackPlan | Refusal:
    """Halve `code` once and merge until at most `max_keep_pages` pages are used or no merge frees another page."""
    target = ledger.level[code] + 1
    if target >= len(ledger.ladder):
        return Refusal(f"{CODE_NAMES[code]} is at its minimum width {ledger.ladder[-1]}")
    pages = ledger.wider_pages(code, target)
    shrink = ledger.occupied_slots(pages, target)
    bare = shrink[ledger.host_plus_1[shrink] == 0]
    if len(bare) > len(ledger.host_free):
        return Refusal(f"{len(bare)} host pages needed, {len(ledger.host_free)} of {ledger.num_host_pages} free")
    from_level = ledger.levels_of(shrink)
    narrow = sum(ledger.num_narrow) + int((from_level == 0).sum())
    staging = max(0, ledger.staging_target(narrow) - ledger.used[DYNAMIC])
    wanted = max(ledger.used[code] - max_keep_pages, staging - ledger.num_free_pages)
    moves = plan_merge(ledger, code, wanted, narrowed_to=target)
    staging = min(staging, ledger.num_free_pages + len(moves.freed_pages))
    if narrow and staging + ledger.used[DYNAMIC] == 0:
        return Refusal(f"halving {CODE_NAMES[code]} frees no page, so nothing is left to stage its layers through")
    return RepackPlan(code, target, shrink, from_level, bare, moves, staging)


def plan_merge(
    ledger: Ledger, code: int, max_freed: int, *, narrowed_to: int = 0, only_level: int | None = None
) -> Moves:
    """Moves that free up to `max_freed` pages of this priority, as if its pages were already cut to `narrowed_to`.

    Slots of one width are alike, so a group of n pages with s slots each that holds k occupied slots can give up
    exactly n - ceil(k / s) pages. The emptiest pages are donors (fewest moves); the fullest of the others are filled
    first. Donors are emptied whole, over as many receivers as it takes.
    """
    pages = np.flatnonzero(ledger.page_code == code)
    levels = np.maximum(ledger.page_level[pages], narrowed_to)
    parts: list[Moves] = []
    for level in range(len(ledger.ladder) - 1, 0, -1):  # narrow pages first: fewer bytes a freed page
        if max_freed <= 0:
            break
        if only_level is not None and level != only_level:
            continue
        part = _merge_group(ledger, pages[levels == level], level, max_freed)
        if part is not None:
            parts.append(part)
            max_freed -= len(part.freed_pages)
    return Moves.concat(parts)


def _merge_group(ledger: Ledger, pages: IntArray, level: int, max_freed: int) -> Moves | None:
    slots = pages[:, None] + ledger.slot_offsets[level]  # [n, slots a page]
    taken: BoolArray = ledger.occupied[slots]
    counts = taken.sum(1)
    freed = min(len(pages) - -(-int(counts.sum()) // slots.shape[1]), max_freed)
    if freed <= 0:
        return None
    order = np.argsort(counts, kind="stable")
    donors, receivers = order[:freed], order[freed:][::-1]
    src = slots[donors][taken[donors]]
    dst = slots[receivers][~taken[receivers]][: len(src)]
    return Moves(src, dst, np.full(len(src), level, dtype=np.int8), pages[donors])

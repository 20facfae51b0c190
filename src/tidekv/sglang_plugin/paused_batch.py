"""Paused requests inside SGLang's scheduler: takes them out of the running batch, narrows them, brings them back.

A paused request keeps its row, its tree lock and its KV; it is a request of the running batch that no forward reads.
`batch` holds them as a ScheduleBatch of their own while the others decode. Whatever else looks at the running batch
(an abort, a flush, a pause of the engine) must find them there, so they are merged back before SGLang handles what it
received; the next decode splits them off again. Who pauses is decided in `pausing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tidekv.memory.ledger import HIGH, LOW, NO_SLOTS, IntArray
from tidekv.sglang_plugin.allocator import TideAllocator
from tidekv.sglang_plugin.page_mirror import row_of
from tidekv.sglang_plugin.pausing import Member, Room, Rules, admits, choose, victims
from tidekv.sglang_plugin.request_pages import RequestPages, committed_len
from tidekv.sglang_plugin.split_batch import put_together, take_aside

JOIN_EVERY = 64  # decode steps after which everybody is merged, for those who look at the running batch without a call
REFUSED = 256  # steps before pages that could not leave (host pool full) are tried again
LOOK_EVERY = 8  # decode steps between two looks at everybody, which takes 0.5 ms for 64, while nothing has changed


@dataclass
class Paused:
    """A paused request. pages: virtual pages that narrowed for it; away: how many of them still are narrow."""

    pages: IntArray
    away: int


class PausedRequests:
    """rows: SGLang's table of virtual locs, [requests, tokens]; is_high: a request's class"""

    def __init__(
        self, allocator: TideAllocator, rows: torch.Tensor, rules: Rules, is_high: Callable[[Any], bool]
    ) -> None:
        self.allocator, self.rules, self.is_high = allocator, rules, is_high
        self.pages = RequestPages(allocator, rows, is_high)
        self.batch: Any = None  # the paused ones, while they are split off
        self.paused: dict[Any, Paused] = {}
        self.arriving: set[Any] = set()  # paused ones whose pages come in under this step: they run in the next
        self.running: Any = None  # the batch that a prefill may take pages from
        self.num_resting = 0  # narrow pages that nobody reads, since only paused requests hold them
        self.num_pauses = self.num_resumes = self.num_steps = 0
        self._next_order = 0
        self._joined_at = 0
        self._owed = 0  # narrow pages of running high requests
        self._mixed = False  # some paused ones may be in the running batch
        self._seen = ((0, 0), 0)  # requests that ran and paused, and free pages, at the step before

    # ---- the batch -----------------------------------------------------------------------------------------------

    def join(self, running: Any) -> Any:
        """Everybody in one batch: `running`, or the paused ones' if nobody else is left."""
        batch, self.batch, self._joined_at, self._mixed = self.batch, None, self.num_steps, True
        return running if batch is None else put_together(running, batch)

    def is_due(self, running: Any) -> bool:
        """The paused ones are split off and have to be in the batch now: nobody else is left, or it is their time."""
        if self.batch is None:
            return False
        return self.num_steps - self._joined_at >= JOIN_EVERY or all(req.finished() for req in running.reqs)

    def _split(self, batch: Any) -> None:
        """Take the paused ones out of `batch`, which has everybody; nobody, if nobody would be left."""
        self.batch = take_aside(batch, self.paused)
        self._mixed = self.batch is None and any(req in self.paused for req in batch.reqs)

    # ---- decode --------------------------------------------------------------------------------------------------

    def before_decode(self, batch: Any) -> None:
        """Choose who decodes next; `batch`, which is not empty, then has just those. Its requests are announced."""
        self.num_steps += 1
        self.running = batch
        ledger = self.allocator.core.ledger
        if any(ledger.level):  # what the ladder once took is not taken from new pages
            ledger.level[HIGH] = ledger.level[LOW] = 0
        self._forget()
        self._go_on(self.arriving)
        changed = self._mixed
        if changed:
            self.join(batch)
            self._split(batch)
        if not changed and not ledger.num_narrow[HIGH] and self._nothing_new(batch):
            return
        self._count_owed(batch)
        for _ in range(8):  # shared pages give up less than they seem to: look again
            reqs = [req for req in self._everybody(batch) if req not in self.arriving]
            members = [self._member(req) for req in reqs]
            demand = sum(m.opens for m in members if not m.paused)
            if demand > self._free():
                self.allocator.gather(demand)  # old pages of windows come before anybody pauses
            choice = choose(members, self._free(), self.rules)
            if not choice.pause and not choice.resume:
                break
            changed = True
            self._pause([reqs[i] for i in choice.pause], reqs)
            self._resume([reqs[i] for i in choice.resume], batch)
            if not choice.pause:
                break
        if changed:
            self.join(batch)
            self._split(batch)
        if self._owed:
            self.widen_running(batch)

    def _count_owed(self, batch: Any) -> None:
        """Pages of high requests that the ladder took: low ones pause for them, and do not come back before."""
        ledger, self._owed = self.allocator.core.ledger, 0
        if ledger.num_narrow[HIGH]:
            pages = self.pages.of([req for req in batch.reqs if self.is_high(req) and not req.finished()])
            self._owed = int(self.pages.are_narrow(np.unique(np.concatenate([NO_SLOTS, *pages]))).sum())

    def _nothing_new(self, batch: Any) -> bool:
        """The step fits, and nobody can go on who could not at the last look. Costs no loop over the requests."""
        if not self.paused and self.batch is None and self.allocator.has_plenty(len(batch.reqs)):
            return True
        if batch.seq_lens_cpu is None:
            return False
        free = self._free()
        if int((batch.seq_lens_cpu % self.rules.page_size == 0).sum()) > free:
            return False
        if not self.paused or self._mixed:
            return not self.paused and self.batch is None
        now = (len(batch.reqs), len(self.paused))
        seen, self._seen = self._seen, (now, free)
        return seen[0] == now and free <= seen[1] and self.num_steps % LOOK_EVERY != 0

    def _everybody(self, batch: Any) -> list[Any]:
        reqs = [*batch.reqs, *(self.batch.reqs if self.batch is not None else ())]
        return [req for req in reqs if not req.finished()]

    def _forget(self) -> None:
        """Those that have ended (a result was still on its way when they paused) or lost their row are not paused any
        more, nor are those that are about to end: SGLang runs them once more and frees them."""
        ending = [req for req in self.paused if not req.finished() and req.to_finish is not None]
        gone = [req for req in self.paused if req.finished() or row_of(req) is None]
        for req in {*ending, *gone}:
            del self.paused[req]
            self.arriving.discard(req)
        if ending or gone:
            self._mixed = True
            self._count_away()

    def forget(self, reqs: Sequence[Any]) -> None:
        """These are prefilled, again perhaps: they run."""
        for req in reqs:
            self.paused.pop(req, None)
            self.arriving.discard(req)

    def _member(self, req: Any) -> Member:
        known = self.paused.get(req)
        committed = committed_len(req)
        page_size = self.rules.page_size
        return Member(
            order=self.order_of(req),
            high=self.is_high(req),
            pages=-(-committed // page_size),
            away=0 if known is None else known.away,
            opens=committed % page_size == 0,
            tokens=len(req.output_ids),
            steps=self.num_steps - getattr(req, "tidekv_came", -(1 << 30)),
            paused=known is not None,
            may_pause=req.to_finish is None and self.num_steps >= getattr(req, "tidekv_refused", 0),
        )

    def order_of(self, req: Any) -> int:
        """Its place in the order of arrival: of first prefills, which is the same on all ranks."""
        found: int | None = getattr(req, "tidekv_order", None)
        if found is None:
            found = req.tidekv_order = self._next_order
            self._next_order += 1
        return found

    def _free(self) -> int:
        """Pages to be had without narrowing what must be read: free ones, and cached prefixes that nobody
        references."""
        allocator = self.allocator
        allocator.collect_freed()
        # The first narrowing opens a staging page.
        reserve = 0 if allocator.core.ledger.any_narrow else 1
        return allocator.core.ledger.num_free_pages + allocator.evictable_pages() - reserve - self._owed

    # ---- prefill -------------------------------------------------------------------------------------------------

    def make_pages(self, short: int) -> None:
        """Low requests pause until `short` more pages are free, as far as that goes. They are split off later."""
        if self.running is None:
            return
        self._forget()
        for _ in range(8):
            reqs = self._everybody(self.running)
            chosen = victims([self._member(req) for req in reqs], short, self.rules)
            before = self.allocator.core.ledger.num_free_pages
            self._mixed = True
            self._pause([reqs[i] for i in chosen], reqs)
            short -= self.allocator.core.ledger.num_free_pages - before
            if not chosen or short <= 0:
                return

    def admits(self, need: int, high: bool, added: int, num_added: int) -> bool:
        """Whether a newcomer whose prompt takes `need` pages is prefilled now, beside `num_added` with `added`."""
        self._forget()
        if not high and self.paused and not self.rules.paused_share:
            return False  # without a look at everybody: this is asked at every step while somebody waits
        reqs = [] if self.running is None else self._everybody(self.running)
        members = [self._member(req) for req in reqs]
        room = Room(
            pages=self.allocator.core.geometry.num_pages,
            free=self._free(),
            pausable=min(
                sum(m.pages for m in members if not m.high and not m.paused and m.may_pause),
                self.allocator.wide_low_pages() - self.allocator.evictable_pages(),
            ),
            yielding=0 if high else self.allocator.yielding_pages(),
            paused=self.rules.held(sum(known.away for known in self.paused.values())),
            num_running=sum(not m.paused for m in members),
            num_paused=sum(m.paused for m in members),
            added=added,
            num_added=num_added,
        )
        return admits(need, high, room, self.rules)

    # ---- narrower and wider ------------------------------------------------------------------------------------------

    def _pause(self, chosen: Sequence[Any], everybody: Sequence[Any]) -> None:
        """One repack for all of them. Pages that somebody else who runs shares stay as they are."""
        if not chosen:
            return
        leaving = set(chosen)
        others = [req for req in everybody if req not in leaving and (req not in self.paused or req in self.arriving)]
        theirs = np.unique(np.concatenate([NO_SLOTS, *self.pages.of(others)]))
        parts = [self.pages.parts(req, pages) for req, pages in zip(chosen, self.pages.of(chosen), strict=True)]
        mine = [seen[~np.isin(seen, theirs)] for seen, _ in parts]
        ledger, window = self.allocator.core.ledger, self.allocator.window
        # What a request goes on filling is no copy for long.
        complete = [
            np.setdiff1d(pages, every[committed_len(req) // self.rules.page_size :])
            for req, pages, every in zip(chosen, mine, self.pages.of(chosen), strict=True)
        ]
        narrowed = self.pages.narrow(mine, ledger.ladder[-1], complete)
        if window is not None:
            old = [pages[~np.isin(pages, theirs)] for _, pages in parts]
            self.allocator.num_window_pages += self.pages.narrow(old, ledger.ladder[window.level(ledger)])
        for req, pages in zip(chosen, mine, strict=True):
            if not narrowed:
                req.tidekv_refused = self.num_steps + REFUSED
                continue
            self.paused[req] = Paused(pages, 0)
            self.num_pauses += 1
        self._count_away()

    def _resume(self, chosen: Sequence[Any], batch: Any) -> None:
        """They get their pages back, as many as there are. While others decode, what comes from the host comes under
        their step, and these go on in the next; but pages that those read come at once."""
        if not chosen:
            return
        self.num_resumes += len(chosen)
        pages = np.unique(np.concatenate([NO_SLOTS, *(self.paused[req].pages for req in chosen)]))
        others = [req for req in batch.reqs if req not in self.paused and not req.finished()]
        theirs = np.concatenate([NO_SLOTS, *self.pages.of(others)])
        behind = self.pages.widen_behind(np.setdiff1d(pages, theirs)) if others else 0
        self.pages.widen(pages)
        if behind:
            self.arriving.update(chosen)
            self._count_away()
        else:
            self._go_on(chosen)

    def _go_on(self, chosen: Collection[Any]) -> None:
        """They decode from now on."""
        if not chosen:
            return
        for req in chosen:
            del self.paused[req]
            req.tidekv_came = self.num_steps
        self.arriving = self.arriving - set(chosen)
        self._mixed = True
        self._count_away()

    def widen_running(self, batch: Any) -> int:
        """What the ladder, or a shared prefix, left narrow under those that run gets its width back, high first."""
        ledger = self.allocator.core.ledger
        if sum(ledger.num_narrow) <= self.num_resting and not any(ledger.level):
            return 0
        reqs = [req for req in batch.reqs if not req.finished() and req not in self.paused]
        ledger.level[HIGH] = ledger.level[LOW] = 0
        opens = sum(committed_len(req) % self.rules.page_size == 0 for req in reqs)
        spare = self._free() + self._owed - max(opens, 0 if self._owed else self.rules.margin(len(reqs)))
        widened = 0
        for req in sorted(reqs, key=lambda req: self._member(req).rank(self.rules.turn)):
            pages, _ = self.pages.parts(req, self.pages.of([req])[0])
            narrow = pages[self.pages.are_narrow(pages)][: max(0, spare - widened)]
            widened += self.pages.widen(narrow) if len(narrow) else 0
        if widened:
            self._count_away()
            self._count_owed(batch)
        return widened

    def _count_away(self) -> None:
        narrow = [NO_SLOTS]
        for known in self.paused.values():
            narrow.append(known.pages[self.pages.are_narrow(known.pages)])
            known.away = len(narrow[-1])
        self.num_resting = len(np.unique(np.concatenate(narrow)))

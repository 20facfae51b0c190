"""Width comes back under `narrow`: parked and paused requests in order of rank, a batch of pages at a time.

Under a step, which then does without them, as far as it hides the bytes; else between steps, as the move budget goes.
"""

from __future__ import annotations

from tidekv.engine import streaming_policy as policy
from tidekv.engine.narrow_room import NarrowRoom
from tidekv.engine.request import Request, RequestState


class NarrowReturns(NarrowRoom):
    """Nobody overtakes who was paused or parked before: what is free is kept for the first in rank."""

    def _widen(self) -> None:
        """The first in rank get their pages back, a batch a step."""
        wanting = [r for r in self.running if self._wants_width(r)] + self.parked
        if not wanting:
            return
        left, hidden = self._move_limit(), self._hidden_bytes()
        arrival = policy.owed_bytes(self.rates, self.rates.behind_step_s)  # once a step that pages come in under
        # A page for everybody's growth, and what this very step opens: else it would take back what just came in.
        spare = max(sum(not self._is_paused(r) for r in self.running) + 1, self._demand())
        for request in sorted(wanting, key=self._rank):
            need = self._pages_away(request)
            behind = self._comes_behind(request)
            batch = min(policy.WIDEN_BATCH, need) * self._slot_bytes()
            if behind and hidden < self._slot_bytes():
                behind = False  # a slow link: not even one page fits under a step
            if behind and hidden - self.arriving_bytes < min(batch, hidden):
                return
            if behind and not self.arriving_bytes and arrival > max(0, self.move_bytes):
                return
            if not behind and min(self.move_bytes, left) < batch:
                return  # save up: every batch rewrites the tables of locations once
            streams = not self._mode(request).streams_nothing
            may_stream = streams and request.parked is None and need * self._slot_bytes() <= hidden
            if may_stream and not policy.restore_pays(batch, batch, self._steps_left(request)):
                continue  # its last token: streaming it once costs the same and needs no page
            if need + spare > self.widths.available_pages():
                self._give_way(request, need + spare)
            room = self.widths.available_pages() - spare
            if need > room:
                if request.is_high_priority and request.parked is None:
                    continue  # it is stepped all the same
                # What is free is kept for it: a smaller one behind it would take it for ever. Where it is streamed,
                # every page that it has makes that cheaper, and it goes on once a step hides what is left.
                if not (behind and streams and room >= policy.WIDEN_BATCH):
                    return
                need = room
            if request.parked is not None and not self._unpark(request):
                continue
            if self._is_overdue(request):
                request.turn_end = len(request.output_ids) + self._quantum(request)
            if behind and request.state is not RequestState.DECODE:
                continue  # it was parked in its prompt
            need = min(need, self._pages_away(request))
            widened = 0
            if behind and need:
                most = (hidden - self.arriving_bytes) // self._slot_bytes()
                widened = self.widths.widen_behind(request, min(need, most))
                if widened and not self.arriving_bytes:
                    self.move_bytes -= arrival
                self.arriving_bytes += widened * self._slot_bytes()
                if widened:
                    self.arriving.add(request)
            if need and not widened:  # nor where none of its pages may come in behind a step
                most = min(self.move_bytes, left) // self._slot_bytes()
                widened = self.widths.widen(request, max(1, min(need, most)))
                self.move_bytes -= widened * self._slot_bytes()
                left -= widened * self._slot_bytes()
            self.num_widenings += widened > 0
            spare += self._pages_away(request)  # the rest of it is promised

    def _comes_behind(self, request: Request) -> bool:
        """Its pages may come in under a step that it is not in: low priority, written through, decodes."""
        if request.is_high_priority or not self.memory.allocator.write_through:
            return False
        return request.state is RequestState.DECODE or (request.parked is not None and bool(request.output_ids))

    def _hidden_bytes(self) -> int:
        """What this step hides, as far as it is known before it is planned: those who run at full width, and the
        prompts that are being computed."""
        decodes = [r for r in self.running if r.state is RequestState.DECODE and not self._is_paused(r)]
        prompt = sum(r.num_tokens - r.num_computed for r in self.running if r.state is RequestState.PREFILL)
        seconds = policy.step_s(
            self.rates, len(decodes), sum(r.num_computed for r in decodes), min(prompt, self.prefill_chunk)
        )
        read = sum(r.away_cells for r in decodes if not self._mode(r).streams_nothing) * self.cell_bytes
        return policy.stream_budget_bytes(self.rates, seconds) - read

    def _wants_width(self, request: Request) -> bool:
        """It decodes narrow, or is a prompt whose narrow context the next chunk would not hide."""
        if not request.due_pages:
            return False
        is_read = request.state is RequestState.DECODE or self._mode(request).streams_nothing
        return is_read or self._hidden_context(request, self.prefill_chunk) <= 0

    def _move_limit(self) -> int:
        """Bytes that widening may take out of this step at once, of what was saved up for it."""
        prompts = bool(self.waiting) or any(r.state is RequestState.PREFILL for r in self.running)
        batch = policy.WIDEN_BATCH * self._slot_bytes()
        return max(batch, policy.burst_bytes(self.rates, self.step_s, 0 if prompts else self.prefill_chunk))

    def _give_way(self, request: Request, pages: int) -> None:
        """The last in rank narrow for `request`, if that makes enough room.

        Low priority for a parked request of high; one that is paused, to whom its pages are of no use, for those before
        it; one that had its turn for one that waited too long. So two equals never push each other out.
        """
        if request.is_high_priority and request.parked is None:
            return
        rank, overdue = self._rank(request), self._is_overdue(request)
        after = [
            r
            for r in self._wide_lows()
            if request.is_high_priority
            or (self._is_paused(r) and self._rank(r) > rank)
            or (overdue and self._had_turn(r) and not self._is_overdue(r))
        ]
        after.sort(key=self._rank)
        if self.widths.available_pages() + sum(self._wide_pages(r) for r in after) < pages:
            return
        while after and self.widths.available_pages() < pages:
            self._narrow(after.pop())

    def _unpark(self, request: Request) -> bool:
        """Back on the device; widening comes after."""
        pages, width = len(request.owned_pages), self._return_width(request)
        with self.widths.opening_low_at(width):
            if not self.memory.unpark(request):
                return False
        self.move_bytes -= pages * width * self.cell_bytes
        self.widths.count_away([request])
        self.parked.remove(request)
        self.running.append(request)
        return True

    def _resume(self) -> None:
        """`_widen` brings parked requests back by rank; here only when nothing else runs."""
        if not self.running and self.parked:
            self._unpark(min(self.parked, key=self._rank))

    def _bring_in(self, request: Request) -> Request:
        """It is stepped now: what its window reads in full comes before the step, and the last of low priority make
        room."""
        self._settle()
        while self._mode(request).streams_nothing and request.due_pages:
            self.widths.widen(request, request.due_pages)
            others = [r for r in self.running if r is not request and not r.is_high_priority]
            if not others or not request.due_pages or not self._park(max(others, key=self._rank)):
                break
        return request

    def end_step(self) -> None:
        """Widths that nobody in particular waits for: old pages of a window, pages that the ladder took."""
        if not self.widths.can_narrow or self.move_bytes <= 0:
            return
        most = min(self.move_bytes, policy.WIDEN_BATCH * self._slot_bytes())
        widened = self.memory.allocator.restore_widths(max(1, most // self._slot_bytes()))
        self.move_bytes -= widened * self._slot_bytes()

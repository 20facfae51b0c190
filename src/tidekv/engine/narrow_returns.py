"""Width comes back under `narrow`: parked and paused requests in order of rank, a batch of pages at a time.

Under a step, which then does without them, as far as it hides the bytes; else between steps, as the move budget goes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidekv.engine import streaming_policy as policy
from tidekv.engine.narrow_room import NarrowRoom
from tidekv.engine.request import Request, RequestState


@dataclass
class _Means:
    """What is left of a step for widening."""

    move_bytes: int  # between steps, of what was saved up
    hidden_bytes: int  # under it, before anything arrives
    spare_pages: int  # that must stay free


class NarrowReturns(NarrowRoom):
    """Nobody overtakes who was paused or parked before: what is free is kept for the first in rank."""

    def _widen(self) -> None:
        """The first in rank get their pages back, a batch a step."""
        wanting = [r for r in self.running if self._wants_width(r)] + self.parked
        if not wanting:
            return
        # A page for everybody's growth, and what this very step opens: else it would take back what just came in.
        spare = max(sum(not self._is_paused(r) for r in self.running) + 1, self._demand())
        means = _Means(self._move_limit(), self._hidden_bytes(), spare)
        for request in sorted(wanting, key=self._rank):
            need = self._pages_away(request)
            # A slow link hides not even one page under a step.
            behind = self._comes_behind(request) and means.hidden_bytes >= self._slot_bytes()
            batch_bytes = min(policy.WIDEN_BATCH, need) * self._slot_bytes()
            if not self._is_paid(batch_bytes, behind, means):
                return
            streams = not self._mode(request).streams_nothing
            may_stream = streams and request.parked is None and need * self._slot_bytes() <= means.hidden_bytes
            if may_stream and not policy.restore_pays(batch_bytes, batch_bytes, self._steps_left(request)):
                continue  # its last token: streaming it once costs the same and needs no page
            room = self._room_for(request, need, means)
            if need > room:
                if request.is_high_priority and request.parked is None:
                    continue  # it is stepped all the same
                # What is free is kept for it: a smaller one behind it would take it for ever. Where it is streamed,
                # every page that it has makes that cheaper, and it goes on once a step hides what is left.
                if not (behind and streams and room >= policy.WIDEN_BATCH):
                    return
            if request.parked is not None and not self._unpark(request):
                continue
            if self._is_overdue(request):
                request.turn_end = len(request.output_ids) + self._quantum(request)
            if behind and request.state is not RequestState.DECODE:
                continue  # it was parked in its prompt
            self._bring_pages(request, min(need, room, self._pages_away(request)), behind, means)
            means.spare_pages += self._pages_away(request)  # the rest of it is promised

    def _is_paid(self, batch_bytes: int, behind: bool, means: _Means) -> bool:
        """A batch of pages may come in now, under this step (`behind`) or before it. Else it is saved up for: every
        batch rewrites the tables of locations once."""
        if not behind:
            return min(self.move_bytes, means.move_bytes) >= batch_bytes
        if means.hidden_bytes - self.arriving_bytes < min(batch_bytes, means.hidden_bytes):
            return False
        return self.arriving_bytes > 0 or self._arrival_bytes() <= max(0, self.move_bytes)

    def _arrival_bytes(self) -> int:
        """What a step costs of the move budget, once, for having pages come in under it."""
        return policy.owed_bytes(self.rates, self.rates.behind_step_s)

    def _room_for(self, request: Request, need: int, means: _Means) -> int:
        """Pages that it can have, once others have given way for it."""
        if need + means.spare_pages > self.widths.available_pages():
            self._give_way(request, need + means.spare_pages)
        return self.widths.available_pages() - means.spare_pages

    def _bring_pages(self, request: Request, most: int, behind: bool, means: _Means) -> None:
        """Widen up to `most` of its pages, as far as it is paid for."""
        widened = 0
        if behind and most:
            hidden = (means.hidden_bytes - self.arriving_bytes) // self._slot_bytes()
            widened = self.widths.widen_behind(request, min(most, hidden))
            if widened:
                self.move_bytes -= 0 if self.arriving_bytes else self._arrival_bytes()
                self.arriving_bytes += widened * self._slot_bytes()
                self.arriving.add(request)
        if most and not widened:  # nor where none of its pages may come in behind a step
            paid = min(self.move_bytes, means.move_bytes) // self._slot_bytes()
            widened = self.widths.widen(request, max(1, min(most, paid)))
            self.move_bytes -= widened * self._slot_bytes()
            means.move_bytes -= widened * self._slot_bytes()
        self.num_widenings += widened > 0

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

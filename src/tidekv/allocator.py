"""`DynamicPagedTokenToKVPoolAllocator`: the whole story of a layer-elastic KV cache, on one page.

    alloc_extend / alloc_decode / alloc
      -> _plain_slots                 the steady state: full width and enough free pages, any page does for anyone; else
      -> ensure_capacity              once per priority in the batch; while the demand does not fit:
           -> _try_backpressure       the first rung of the ladder that applies
                -> _halve_and_repack  A _halve_slot_width  B _merge_across_pages  C _remap_loc_holders
      -> _allocate_pages              partial slots first, then fresh pages, no static cap
      -> alloc_extend_kernel / alloc_decode_kernel, one launch; results in the caller's order
      -> (out_indices, dynamic_indices)

Deciding happens in the ledger, on the host, in a transaction; the device's part is queued and runs when the decision is
final. So a refusal (`None`, `False`) leaves every bit as it was.

What is allocated is decided here. How room is made, from `ensure_capacity` down, is `pressure/pool_pressure.py`; how
widths come back and requests leave and return, `pressure/ways_back.py`; what the pool owns, frees and can be asked,
`pressure/pool_state.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from tidekv.errors import ConfigError, InvariantError
from tidekv.kernels import assign
from tidekv.memory import contract
from tidekv.memory.contract import Priorities
from tidekv.memory.ledger import DYNAMIC, HIGH, LOW, NO_SLOTS, AllocationSplit, BoolArray, IntArray
from tidekv.memory.upload import upload
from tidekv.pressure.decision import Decision
from tidekv.pressure.ways_back import PoolWithWaysBack

Indices = tuple[torch.Tensor, torch.Tensor | None]


def _num_pages(lens: IntArray, page_size: int) -> IntArray:
    """[bs] pages that hold so many tokens each. numpy divides 64 lengths in the time of 20 shifts."""
    if page_size & (page_size - 1):
        return -(-lens // page_size)
    return (lens + (page_size - 1)) >> (page_size.bit_length() - 1)


def _opens_page(seq_lens: IntArray, page_size: int) -> BoolArray:
    """[bs] whether token seq - 1 is the first of a page."""
    power_of_2 = page_size & (page_size - 1) == 0
    offset = seq_lens & (page_size - 1) if power_of_2 else seq_lens % page_size
    opens: BoolArray = offset == 1 % page_size
    return opens


@dataclass(frozen=True)
class _Batch:
    """What `_allocate_batch` found for the kernels."""

    slots: IntArray  # new slots, request after request in the caller's order
    is_run: bool  # they are the run of the free list that was handed out last
    last_loc: torch.Tensor
    touched: Callable[[], IntArray]  # the slots that go on being filled, by the ids they have now


class DynamicPagedTokenToKVPoolAllocator(PoolWithWaysBack):
    """SGLang's paged allocator contract, over pages that can give up layers.

    size, page_size, dtype, device, kvcache   as SGLang's `PagedTokenToKVPoolAllocator`; `size` in tokens
    need_sort             accepted for the contract; the free list is sorted at every merge anyway
    req_to_token_pool     rewritten when locations change; other holders: `register_loc_holder`
    host_pool             where layers go; None makes one. With a pool of 0 bytes nothing ever narrows
    low_max_pages, high_reserved_pages, dynamic_max_pages   thresholds in pages (int) or as a fraction of P (float)
    write_through         low-priority KV is copied to the host as it is produced, so that halving it copies nothing

    Locations are int64 on the device. With everything at full width they are those of an ordinary paged pool.
    """

    # ==== allocation ============================================================================================

    def alloc(self, need_size: int, is_high_priority: bool | None = None) -> Indices | None:
        """`need_size` tokens in slots of their own -> (locs [need_size], dynamic or None), or None: nothing changed."""
        if need_size < 0:
            raise ConfigError(f"need_size must be >= 0, got {need_size}")
        code = LOW if is_high_priority is not None and not is_high_priority else HIGH
        pages = -(-need_size // self.page_size)
        with self._deciding() as decision:
            if not self.ensure_capacity(pages, code):
                return None
        slots, is_run = self._allocate_slots(pages, code, decision.splits[code])
        self.new_slots = slots
        out = self._locs_of(slots, is_run)[:need_size]
        return out, self._dynamic_indices(out, slots)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        is_high_priority: Priorities = None,
        *,
        last_slots: IntArray | None = None,
    ) -> Indices | None:
        """Tokens [prefix, seq) of each request -> (out_indices [extend_num_tokens] int64, dynamic_indices), or None.

        prefix_lens, seq_lens, last_loc: [bs] int64 on the device; *_cpu: the same on the host. `last_loc` is the
        location of token prefix - 1 (-1 if there is none), read before the call. On None nothing has changed.
        last_slots: [bs] combined ids of the slots that `last_loc` lies in, if the caller knows them on the host: then
        nothing here waits for the device.
        """
        prefix = contract.host_lens("prefix_lens_cpu", prefix_lens_cpu)
        seq = contract.host_lens("seq_lens_cpu", seq_lens_cpu)
        contract.check_extend(prefix, seq, extend_num_tokens)
        page_size = self.page_size
        new_pages = _num_pages(seq, page_size) - _num_pages(prefix, page_size)
        for name, tensor in (("prefix_lens", prefix_lens), ("seq_lens", seq_lens), ("last_loc", last_loc)):
            contract.check_device_vector(name, tensor, len(seq), self.device)
        if self.device.type == "cpu":
            contract.check_last_loc(self.ledger, last_loc, prefix, seq > prefix, last_slots)

        def goes_on() -> BoolArray:
            going_on: BoolArray = (prefix % page_size != 0) & (seq > prefix)
            return going_on

        touched = self._touched(goes_on, last_loc, last_slots)
        num_pages = int(np.add.reduce(new_pages))
        plain = self._plain_slots(new_pages, num_pages, is_high_priority, touched)
        if plain is not None:
            pages, run = plain
            out = assign.alloc_extend(
                prefix_lens, seq_lens, last_loc, pages, extend_num_tokens, page_size, run=run, checked=True
            )
            return out, None
        batch = self._allocate_batch(new_pages, touched, last_loc, is_high_priority)
        if batch is None:
            return None
        new_slots, run = self._slots_on_device(batch.slots, batch.is_run)
        out = assign.alloc_extend(
            prefix_lens, seq_lens, batch.last_loc, new_slots, extend_num_tokens, page_size, run=run, checked=True
        )
        return out, self._dynamic_indices(out, batch.slots, batch.touched)

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        is_high_priority: Priorities = None,
        *,
        last_slots: IntArray | None = None,
    ) -> Indices | None:
        """One more token for each request -> (out_indices [bs] int64, dynamic_indices), or None with nothing changed.

        seq_lens: [bs] int64 with the new token counted in; last_loc: [bs] int64, the location of the token before it;
        last_slots: as in `alloc_extend`.
        """
        seq = contract.host_lens("seq_lens_cpu", seq_lens_cpu)
        opens = _opens_page(seq, self.page_size)
        for name, tensor in (("seq_lens", seq_lens), ("last_loc", last_loc)):
            contract.check_device_vector(name, tensor, len(seq), self.device)
        if self.device.type == "cpu":
            contract.check_last_loc(self.ledger, last_loc, seq - 1, np.ones(len(seq), dtype=np.bool_), last_slots)
        touched = self._touched(lambda: ~opens, last_loc, last_slots)
        num_pages = int(np.count_nonzero(opens))
        plain = self._plain_slots(opens, num_pages, is_high_priority, touched)
        if plain is not None:
            pages, run = plain
            return assign.alloc_decode(seq_lens, last_loc, pages, self.page_size, run=run, checked=True), None
        batch = self._allocate_batch(opens, touched, last_loc, is_high_priority)
        if batch is None:
            return None
        new_slots, run = self._slots_on_device(batch.slots, batch.is_run)
        out = assign.alloc_decode(seq_lens, batch.last_loc, new_slots, self.page_size, run=run, checked=True)
        return out, self._dynamic_indices(out, batch.slots, batch.touched)

    def _touched(
        self, goes_on: Callable[[], BoolArray], last_loc: torch.Tensor, last_slots: IntArray | None
    ) -> Callable[[], IntArray]:
        """The slots that go on being filled, by the ids they have at this call; goes_on(): [bs] which requests do so.

        Asked for when something is narrow or has to be narrowed. Without `last_slots` that waits for the device.
        """

        def touched() -> IntArray:
            going_on = goes_on()
            if not going_on.any():
                return NO_SLOTS
            slots = last_loc.cpu().numpy() // self.page_size if last_slots is None else last_slots
            return slots[going_on]

        return touched

    def _allocate_batch(
        self,
        new_pages: IntArray | BoolArray,
        touched: Callable[[], IntArray],
        last_loc: torch.Tensor,
        is_high_priority: Priorities,
    ) -> _Batch | None:
        """Capacity for each group, then slots for each group, high before low; None with nothing changed.

        new_pages: [bs] pages that each request opens; touched(): the slots that go on being filled.
        """
        is_high: BoolArray | None = None
        code = contract.uniform_code(is_high_priority)
        if code is not None:
            groups = [(code, int(np.add.reduce(new_pages, dtype=np.int64)))]
        else:
            is_high = np.repeat(contract.priority_mask(is_high_priority, len(new_pages)), new_pages)  # of each new page
            num_high = int(np.count_nonzero(is_high))
            groups = [(HIGH, num_high), (LOW, len(is_high) - num_high)]

        with self._deciding(touched) as decision:
            for code, pages_needed in groups:
                if not self.ensure_capacity(pages_needed, code):
                    return None
        splits, works = decision.splits, decision.works
        carried = last_loc
        for work in works:
            if work.lookup is not None:  # the caller read last_loc before this call: carry it along
                carried = self.loc_holders.remapped(carried, work.lookup)
        slots, is_run = self._allocate_slots(groups[0][1], groups[0][0], splits[groups[0][0]])
        if is_high is not None:
            high_slots, low_slots = slots, self._allocate_slots(groups[1][1], LOW, splits[LOW])[0]
            slots, is_run = np.empty(len(is_high), dtype=np.int64), False
            slots[is_high], slots[~is_high] = high_slots, low_slots

        def touched_now() -> IntArray:
            found = touched()
            for work in works:
                found = found if work.lookup is None else work.lookup[found]
            return found

        self.new_slots = slots
        if self._in_step:
            self._written.append((lambda: np.concatenate([slots, touched_now()]), len(self._lookups)))
        return _Batch(slots, is_run, carried, touched_now)

    def _plain_slots(
        self,
        new_pages: IntArray | BoolArray,
        num_pages: int,
        is_high_priority: Priorities,
        touched: Callable[[], IntArray],
    ) -> tuple[torch.Tensor, tuple[int, int]] | None:
        """The steady state, in a few microseconds: full width everywhere and enough free pages. Else None: decide.

        Returns (new slots on the device, the run of them that these requests take): the mirror of the free list as a
        rule, so nothing is uploaded. High requests take their pages before low ones, but with `mixed_in_one_run` in the
        caller's order.
        """
        ledger = self.ledger
        if self._decision is not None or not ledger.at_full_width or num_pages > ledger.num_free_pages:
            return None
        codes = contract.codes_of_new_pages(is_high_priority, new_pages, num_pages)
        slots = NO_SLOTS
        high_first = num_pages > 0 and not (isinstance(codes, int) or self.mixed_in_one_run)
        if high_first:
            turns = np.argsort(codes, kind="stable")
            slots = np.empty(num_pages, dtype=np.int64)
            slots[turns] = ledger.open_pages(np.asarray(codes, dtype=np.int8)[turns], num_pages)
        elif num_pages:
            slots = ledger.open_pages(codes, num_pages)
        if num_pages:
            low = slots[np.full(num_pages, codes) == LOW] if self.write_through else NO_SLOTS
            if len(low):
                ledger.write_through(low)
        self.new_slots = slots
        if self._in_step:
            self._written.append((lambda: np.concatenate([slots, touched()]), len(self._lookups)))
        return (torch.from_numpy(slots), (0, num_pages)) if high_first else self._free_list_run(num_pages)

    def _allocate_pages(self, num_pages: int, priority_code: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`num_pages` slots, partial ones first -> (page_ids [n], slot_starts [n]) int64. Capacity must have been
        ensured."""
        split = self.ledger.split(priority_code, num_pages, self.ledger.num_free_pages)
        if split is None:
            raise InvariantError(f"no capacity for {num_pages} pages: call ensure_capacity first")
        slots = torch.from_numpy(self._allocate_slots(num_pages, priority_code, split)[0]).to(self.device)
        return slots % self.geometry.page_stride, slots // self.geometry.page_stride + 1

    def _allocate_slots(self, num_slots: int, code: int, split: AllocationSplit) -> tuple[IntArray, bool]:
        """`_allocate_pages` in combined ids, on the host; and whether they are the run of the free list that was handed
        out last."""
        ledger = self.ledger
        slots = ledger.allocate(code, num_slots, split)
        if ledger.any_narrow and not ledger.used[DYNAMIC]:
            ledger.grow_staging(1)
        if self.write_through and code == LOW:
            ledger.write_through(slots)
        return slots, split.fresh_pages == num_slots and not ledger.level[code]

    def _dynamic_indices(
        self, out: torch.Tensor, new_slots: IntArray, touched: Callable[[], IntArray] = lambda: NO_SLOTS
    ) -> torch.Tensor | None:
        """None when every token is in a full-width slot; else [T] int64: its staging location, or 0 (the sink)."""
        ledger = self.ledger
        if not ledger.any_narrow:
            return None
        if not self._in_step:
            ledger.drop_dynamic(ledger.staging_assigned)
        mine = self._narrow_of(np.concatenate([new_slots, touched()]))
        # Slots that an earlier call of this step gave tokens to may have been narrowed by this one.
        both = np.concatenate([mine, np.setdiff1d(self._narrow_of(self._written_slots()), mine)])
        if not ledger.assign_dynamic(both):
            raise InvariantError(f"staging for {len(both)} slots was promised and is not there")
        if not len(mine) or not self.gives_dynamic_indices:
            return None
        keys, staged = upload(self.device, (mine, ledger.dynamic_of[mine]))
        combined = out // self.page_size
        at = torch.searchsorted(keys, combined).clamp_(max=len(mine) - 1)
        return torch.where(keys[at] == combined, staged[at] * self.page_size + out % self.page_size, 0)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One forward step: dynamic slots given by several calls inside stay valid until it ends.

        Outside a step each allocating call begins a new one, and the dynamic slots of the call before are reused.
        """
        self.ledger.end_step()
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
            self._written, self._lookups = [], []
            self.ledger.end_step()

    # ==== counts ===============================================================================================

    def available_size(self, is_high_priority: bool | None = None) -> int:
        """Tokens that `alloc` would give this class now, without any pressure (whole pages)."""
        self._collect_freed()
        code, ledger = (LOW if is_high_priority is not None and not is_high_priority else HIGH), self.ledger
        most = (ledger.num_free_pages << ledger.level[code]) + ledger.num_partial(code)
        if not ledger.any_narrow and not ledger.level[code]:
            return most * self.page_size
        trial = Decision(lambda: NO_SLOTS, stages_new_slots=True, has_host_pages=False)
        low, high = 0, most + 1  # fits(low), not fits(high)
        while high - low > 1:
            trial.demand = {code: (low + high) // 2}
            low, high = (trial.demand[code], high) if self._fits(trial) else (low, trial.demand[code])
        return low * self.page_size

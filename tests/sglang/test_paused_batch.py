"""Requests paused inside real ScheduleBatches, over the real allocator: what SGLang's scheduler does, step by step,
without its processes. KV is written for every token and read back for every layer."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang.srt")

from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.sampling.penaltylib import BatchedFrequencyPenalizer, BatchedPenalizerOrchestrator
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from tidekv.geometry import KVGeometry
from tidekv.memory.device_pool import DeviceKVPool
from tidekv.memory.host_pool import HostKVPool
from tidekv.sglang_plugin.allocator import TideAllocator
from tidekv.sglang_plugin.capacity import plan_capacity
from tidekv.sglang_plugin.page_mirror import row_of
from tidekv.sglang_plugin.paused_batch import PausedRequests
from tidekv.sglang_plugin.pausing import Rules
from tidekv.sglang_plugin.pressed_pages import BatchView, TideCore
from tidekv.sglang_plugin.request_pages import committed_len
from tidekv.sglang_plugin.window import Window

LAYERS, PAGES, PAGE_SIZE, VOCAB, HIGH = 8, 40, 4, 50, 10


class World:
    """A pool, its rows, and the running batch that SGLang's loop holds between two steps."""

    def __init__(self, quantum: int = 4, turn: int = 16) -> None:
        geometry = KVGeometry(LAYERS, PAGES, PAGE_SIZE, 1, 4, torch.float32)
        pool = DeviceKVPool(geometry, "cpu")
        capacity = plan_capacity(PAGES, LAYERS, 3, 8, 4.0)
        host = HostKVPool(geometry, capacity.host_pages * geometry.page_bytes)
        core = TideCore(PAGES * PAGE_SIZE, PAGE_SIZE, torch.float32, "cpu", pool, host_pool=host)
        size = capacity.virtual_pages * PAGE_SIZE
        self.tide = TideAllocator(size, PAGE_SIZE, torch.float32, "cpu", pool, False, core)  # type: ignore[arg-type]
        self.rows = torch.zeros((64, 400), dtype=torch.int32)
        self.free_rows = list(range(1, 64))
        rules = Rules(PAGE_SIZE, 4, quantum=quantum, turn=turn)
        self.paused = self.tide.paused = PausedRequests(self.tide, self.rows, rules, lambda req: req.priority >= HIGH)
        self.running: Any = None
        self.done: list[Any] = []
        self.next_value = 1.0
        self.ran_narrow = 0  # times that a page was read in every layer and was not full width

    def announce(self, reqs: list[Any]) -> None:
        self.tide.batch = BatchView(tuple(r.priority >= HIGH for r in reqs), reqs, lambda: 0, lambda tokens: None)

    def prefill(self, prompt: int, output: int, priority: int = 0, penalty: float = 0.0) -> Any:
        """A newcomer, in a batch of its own, then merged as SGLang does; None if the pool does not admit it."""
        self.paused.running = self.running
        if not self.paused.admits(-(-prompt // PAGE_SIZE) + 1, priority >= HIGH, 0, 0):
            return None
        params = SamplingParams(max_new_tokens=output, frequency_penalty=penalty)
        req = Req(f"r{self.next_value}", "", array("q", range(prompt)), params, vocab_size=VOCAB, priority=priority)
        req.values = []
        self.paused.order_of(req)
        self.announce([req])
        lens = torch.tensor([prompt])
        out = self.tide.alloc_extend(torch.tensor([0]), torch.tensor([0]), lens, lens, torch.tensor([-1]), prompt)
        assert out is not None
        row = self.free_rows.pop()
        holder = req if hasattr(req, "req_pool_idx") else req.kv
        if holder is None:
            from sglang.srt.managers.schedule_batch import ReqKvInfo

            holder = req.kv = ReqKvInfo()
        holder.req_pool_idx = row
        (req if hasattr(req, "kv_committed_len") else req.kv).kv_committed_len = prompt
        self.rows[row, :prompt] = out.to(torch.int32)
        self.write(req, out)
        batch = self.batch_of(req)
        if self.running is None or self.running.is_empty():
            self.running = batch
        else:
            self.running.merge_batch(batch)
        req.output_ids.append(1)
        return req

    def batch_of(self, req: Any) -> Any:
        batch = ScheduleBatch(reqs=[req], device="cpu", model_config=SimpleNamespace(is_encoder_decoder=False))
        batch.token_to_kv_pool_allocator, batch.tree_cache = self.tide, None
        committed = committed_len(req)
        batch.req_pool_indices = batch.req_pool_indices_cpu = torch.tensor([row_of(req)])
        batch.seq_lens = batch.seq_lens_cpu = torch.tensor([committed])
        batch.orig_seq_lens = torch.tensor([committed], dtype=torch.int32)
        batch.input_ids = torch.tensor([1])
        one = torch.ones(1)
        batch.sampling_info = SamplingBatchInfo(
            temperatures=one[:, None] * row_of(req), top_ps=one, top_ks=one.int(), min_ps=one, is_all_greedy=True,
            is_any_greedy=True, need_top_p_sampling=False, need_top_k_sampling=False, need_min_p_sampling=False,
            vocab_size=VOCAB, device="cpu",
        )  # fmt: skip
        made = BatchedPenalizerOrchestrator(VOCAB, batch, {BatchedFrequencyPenalizer})
        batch.sampling_info.penalizer_orchestrator = made
        return batch

    def write(self, req: Any, locs: torch.Tensor) -> None:
        for loc in locs.tolist():
            where = self.tide.pages.locations(torch.tensor([loc]))
            for layer in range(LAYERS):
                kv = torch.full((1, 1, 4), self.next_value * LAYERS + layer)
                self.tide.core.write_kv(layer, where, kv, -kv)
            req.values.append(self.next_value)
            self.next_value += 1

    def step(self) -> list[Any]:
        """One decode; those that ran."""
        self.tide.end_step()
        self.tide.core.repacker.behind.join()
        if self.paused.is_due(self.running):
            self.running = self.paused.join(self.running)
        batch = self.running
        batch.filter_batch()
        if batch.is_empty():
            return []
        self.announce(batch.reqs)
        self.paused.before_decode(batch)
        ran = list(batch.reqs)
        self.announce(ran)
        lens = np.array([committed_len(req) for req in ran])
        assert batch.seq_lens.tolist() == lens.tolist(), "tensors follow their requests"
        assert batch.sampling_info.temperatures[:, 0].tolist() == [row_of(req) for req in ran]
        for req, pages in zip(ran, self.paused.pages.of(ran), strict=True):
            seen, _ = self.paused.pages.parts(req, pages)
            slots = self.tide.pages.slots_of(seen)
            self.ran_narrow += bool((self.tide.core.ledger.levels_of(slots) > 0).any())
            behind = self.tide.core.repacker.behind
            assert not (behind.is_pending and behind.touches(slots)), "a page is read whose copies run under this step"
        last = self.rows[[row_of(req) for req in ran], lens - 1]
        opens = (lens % PAGE_SIZE == 0).astype(np.int64)
        touched = np.unique(last.numpy()[opens == 0].astype(np.int64) // PAGE_SIZE)
        assert self.tide.make_room(opens, list(self.tide.batch.high), lens, lambda: touched)
        if batch.sampling_info.penalizer_orchestrator.is_required:
            batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(torch.full((len(ran),), 7))
        seq = torch.from_numpy(lens + 1)
        out = self.tide.alloc_decode(seq, seq, last)
        assert out is not None
        batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens + 1, batch.seq_lens_cpu + 1
        batch.orig_seq_lens = batch.orig_seq_lens + 1
        for req, loc in zip(ran, out, strict=True):
            self.rows[row_of(req), committed_len(req)] = int(loc)
            (req if hasattr(req, "kv_committed_len") else req.kv).kv_committed_len += 1
            self.write(req, loc[None])
            req.output_ids.append(7)
            if req.to_finish is not None or len(req.output_ids) >= req.sampling_params.max_new_tokens:
                self.finish(req)
        return ran

    def finish(self, req: Any) -> None:
        """As SGLang ends a request: read it once more, free its pages, give back the row."""
        self.read(req)
        req.finished_reason = req.to_finish or FINISH_LENGTH(len(req.output_ids))
        row, count = row_of(req), committed_len(req)
        self.tide.free(self.rows[row, :count].to(torch.int64))
        self.free_rows.append(row)
        (req if hasattr(req, "req_pool_idx") else req.kv).req_pool_idx = None
        self.done.append(req)

    def read(self, req: Any) -> None:
        locs = self.tide.pages.locations(self.rows[row_of(req), : committed_len(req)])
        for layer in range(LAYERS):
            k, v = self.tide.core.read_kv(layer, locs)
            want = torch.tensor(req.values) * LAYERS + layer
            assert torch.equal(k[:, 0, 0], want)
            assert torch.equal(v[:, 0, 0], -want)

    def run(self, most: int = 2000) -> int:
        """Decode until nobody is left; the steps it took."""
        for steps in range(most):
            if not self.step() and self.paused.batch is None:
                return steps
        raise AssertionError(f"not done after {most} steps: {len(self.paused.paused)} paused")

    def assert_clean(self) -> None:
        self.tide.check()
        ledger = self.tide.core.ledger
        assert self.tide.pages.num_live == 0
        assert not ledger.any_narrow
        assert len(ledger.host_free) == ledger.num_host_pages
        assert not self.paused.paused
        assert self.paused.batch is None
        assert self.paused.num_pauses == self.paused.num_resumes


def test_pressure_pauses_and_everybody_ends_at_full_width() -> None:
    world = World()
    reqs = [world.prefill(8, 40, HIGH if i % 4 == 0 else 0) for i in range(8)]  # 8 * 12 pages for 40
    assert all(reqs)
    world.run()
    world.assert_clean()
    assert len(world.done) == 8
    assert world.paused.num_pauses > 3
    assert world.ran_narrow == 0
    assert all(req.priority == HIGH for req in world.done[:2]), "high requests are never paused"
    assert world.tide.core.num_halvings


def test_what_comes_back_comes_under_a_step_of_the_others() -> None:
    world = World()
    for i in range(8):
        assert world.prefill(8, 40, HIGH if i % 4 == 0 else 0)
    counters, behind = world.tide.core.repacker.counters, world.tide.core.repacker.behind
    arrivals = 0
    while len(world.done) < 8:
        ran = world.step()
        arriving = set(world.paused.arriving)
        assert not arriving & set(ran)
        if arriving:
            arrivals += 1
            assert behind.is_pending
            assert arriving <= set(world.step()), "they run in the next step, and nobody else comes in between"
    cell_bytes = world.tide.core.geometry.cell_bytes
    assert arrivals > 3
    # Not the pages that were being filled, nor those of the last ones, who had nobody to come in under.
    assert behind.num_cells * cell_bytes > 0.5 * counters.from_host_bytes
    world.run()
    world.assert_clean()


def test_a_page_that_paused_before_is_not_copied_out_again() -> None:
    world = World(quantum=1, turn=0)
    low, other = world.prefill(60, 60), world.prefill(60, 60)
    counters, core = world.tide.core.repacker.counters, world.tide.core
    while not world.paused.paused:
        world.step()
    (paused,) = world.paused.paused
    assert paused is other
    first = counters.to_host_bytes
    while world.paused.paused:
        world.step()
    complete = committed_len(other) // PAGE_SIZE
    (pages,) = world.paused.pages.of([other])
    assert core.ledger.backed[world.tide.pages.slots_of(pages)][: complete - 2].all()
    assert low.finished()
    before = counters.to_host_bytes
    assert world.prefill(100, 2, HIGH)
    assert other in world.paused.paused
    assert counters.to_host_bytes - before < first / 8, "two pages of 19 have come since, or are still being filled"
    world.run()
    world.assert_clean()


def test_old_pages_of_windows_narrow_before_anybody_pauses_and_stay_narrow() -> None:
    world = World()
    window = world.tide.window = Window(8, PAGE_SIZE)

    def old_pages() -> np.ndarray:
        found = [np.empty(0, dtype=np.int64)]
        reqs = [] if world.running is None else [r for r in world.running.reqs if not r.finished()]
        for req, pages in zip(reqs, world.paused.pages.of(reqs), strict=True):
            found.append(world.paused.pages.parts(req, pages)[1])
        return np.concatenate(found)

    world.tide.old_pages = old_pages
    reqs = [world.prefill(32, 60, HIGH if i == 0 else 0) for i in range(4)]  # 4 * 23 pages for 40
    assert all(reqs), "a low newcomer is measured by what its neighbours' old pages would free"
    while not world.paused.paused:
        world.step()
        assert world.tide.num_window_pages or not world.paused.paused
    world.run()
    assert world.ran_narrow == 0
    assert len(world.done) == 4
    assert window.level(world.tide.core.ledger) == 2
    world.assert_clean()


def test_without_pressure_nothing_happens() -> None:
    world = World()
    for _ in range(3):
        assert world.prefill(8, 20)
    world.run()
    world.assert_clean()
    assert world.paused.num_pauses == 0


def test_two_equals_take_turns_of_a_quantum_at_least() -> None:
    world = World(quantum=8, turn=0)
    first, second = world.prefill(60, 40), world.prefill(60, 40)
    ran = []
    while len(world.done) < 2:
        ran.append(world.step())
    assert world.done == [first, second]
    assert world.paused.num_pauses == 1
    assert all(first in batch for batch in ran[:38])


def test_a_high_newcomer_takes_the_pages_of_low_ones() -> None:
    world = World()
    lows = [world.prefill(44, 20) for _ in range(3)]
    assert all(lows)
    assert world.prefill(44, 20) is None, "a low newcomer waits"
    newcomer = world.prefill(60, 20, HIGH)
    assert newcomer is not None
    assert world.paused.num_pauses >= 1
    assert newcomer in world.step()
    assert world.ran_narrow == 0
    world.run()
    world.assert_clean()
    assert world.done[0] is newcomer


def test_an_abort_of_a_paused_request_frees_all_it_holds() -> None:
    world = World()
    reqs = [world.prefill(8, 40) for _ in range(8)]
    while not world.paused.paused:
        world.step()
    victim = next(iter(world.paused.paused))
    world.running = world.paused.join(world.running)  # as before SGLang handles what it received
    assert set(world.running.reqs) == {req for req in reqs if not req.finished()}
    victim.to_finish = FINISH_ABORT()
    assert victim in world.step()
    assert victim.finished()
    world.run()
    world.paused.num_resumes += 1  # the aborted one never went on
    world.assert_clean()


def test_an_abort_of_all_of_them() -> None:
    world = World()
    reqs = [world.prefill(8, 40) for _ in range(8)]
    while len(world.paused.paused) < 3:
        world.step()
    aborted = len(world.paused.paused)
    world.running = world.paused.join(world.running)
    for req in reqs:
        req.to_finish = FINISH_ABORT()
    world.step()
    assert all(req.finished() for req in reqs)
    world.run()
    world.paused.num_resumes += aborted
    world.assert_clean()


def test_who_ends_while_paused_keeps_nobody_out() -> None:
    """With overlap scheduling the result of the step before comes after the pause."""
    world = World()
    reqs = [world.prefill(8, 40) for _ in range(8)]
    while not world.paused.paused:
        world.step()
    for req in reqs:
        if not req.finished():
            world.finish(req)
    newcomer = world.prefill(8, 4)
    assert newcomer is not None
    assert world.step() == [newcomer]
    world.run()
    world.paused.num_resumes = world.paused.num_pauses
    world.assert_clean()


def test_high_requests_that_the_ladder_took_are_widened_first() -> None:
    world = World()
    highs, lows = [world.prefill(20, 40, HIGH) for _ in range(2)], [world.prefill(20, 40) for _ in range(2)]
    world.step()
    ledger = world.tide.core.ledger
    (pages,) = world.paused.pages.of(highs[:1])
    world.tide.core.narrow_slots(world.tide.pages.slots_of(pages), ledger.ladder[-1])
    taken = world.tide.core.ledger.num_free_pages  # as if the ladder had found no other way
    filler = world.tide.core.alloc((taken - 1) * PAGE_SIZE, True)
    assert filler is not None
    world.tide.core.ledger.promote(filler[0].numpy() // PAGE_SIZE)
    assert world.tide.core.ledger.num_narrow[1] > 0
    ran = world.step()
    assert world.tide.core.ledger.num_narrow[1] == 0
    assert set(highs) <= set(ran)
    assert not set(lows) <= set(ran), "a low request pauses for them"
    world.tide.core.free(filler[0])
    world.run()
    world.assert_clean()


def test_penalties_follow_their_requests() -> None:
    world = World()
    reqs = [world.prefill(8, 40, penalty=0.1 * (i + 1)) for i in range(8)]
    while not world.paused.paused:
        world.step()
    for batch in (world.running, world.paused.batch):
        made = batch.sampling_info.penalizer_orchestrator
        assert made.batch is batch
        (penalizer,) = made.penalizers.values()
        assert penalizer.orchestrator is made, "a penalizer of the other batch's would see the other requests"
        wanted = [0.1 * (reqs.index(req) + 1) * (len(req.output_ids) - 1) for req in batch.reqs if not req.finished()]
        torch.testing.assert_close(penalizer.cumulated_frequency_penalties[: len(wanted), 7], torch.tensor(wanted))
    world.run()
    world.assert_clean()


@pytest.mark.parametrize("seed", range(3))
def test_random_loads_end_clean(seed: int) -> None:
    rng = random.Random(seed)
    world = World(quantum=rng.choice([1, 4, 16]), turn=rng.choice([0, 8, 32]))
    aborted, waiting = 0, 40
    for _ in range(3000):
        if (
            waiting
            and rng.random() < 0.4
            and world.prefill(rng.randint(1, 40), rng.randint(2, 60), HIGH if rng.random() < 0.3 else 0)
        ):
            waiting -= 1
        if world.running is None:
            continue
        if rng.random() < 0.05 and world.running.reqs:
            world.running = world.paused.join(world.running)
            victim = rng.choice(world.running.reqs)
            aborted += victim in world.paused.paused and not victim.finished() and victim.to_finish is None
            victim.to_finish = FINISH_ABORT()
        world.step()
        world.tide.check()
        if not waiting and len(world.done) == 40:
            break
    assert len(world.done) == 40
    world.run()
    world.paused.num_resumes = world.paused.num_pauses
    world.assert_clean()

"""Pages of paused requests that come in under a step which does without them. On the CPU the copies run at the latest
moment that is allowed, and until then the pages hold NaN; on CUDA they run on their own stream.

Catches: a request that is stepped before its pages are there, a page that is narrowed, parked, freed or shared while
its copies still wait, a host page that is given away under a copy, copies that an interrupted plan forgets.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine_cases import Ask, answers, assert_clean, make_engine, pages_together, tokens
from tidekv.engine.engine import Engine, EngineConfig
from tidekv.engine.narrow_scheduler import NarrowScheduler
from tidekv.engine.sampling import SamplingParams
from tidekv.engine.streaming_policy import StepRates
from tidekv.memory.ledger import IntArray

# Far more than a page of these models under a step, so that everything that may come in under one does.
RATES = StepRates(link_rate=2e7, base_s=5e-3, request_s=0.0, context_s=0.0, prompt_s=1e-5)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


@contextmanager
def poisoned(engine: Engine) -> Iterator[None]:
    """Cells that wait for their copies hold NaN."""
    behind, pool = engine.allocator.repacker.behind, engine.device_pool
    add = behind.add

    def spoil(host_cells: IntArray, device_cells: IntArray) -> None:
        add(host_cells, device_cells)
        pages = torch.from_numpy(device_cells).to(pool.device)
        for flat in (pool.k_flat, pool.v_flat):
            flat.view(-1, engine.geometry.page_size, *flat.shape[1:])[pages] = float("nan")

    behind.add = spoil  # type: ignore[method-assign]
    try:
        yield
    finally:
        del behind.add  # type: ignore[method-assign]


def engine_on(device: str, num_pages: int, page_size: int, **options: object) -> Engine:
    if device == "cpu":
        return make_engine(4, num_pages, page_size, write_through=True, host_pages=2000, **options)
    settings = {"model": "random:tiny", "dtype": torch.float32, "host_memory": "64MiB", "write_through": True}
    return Engine(EngineConfig(**{**settings, **options}, device=device, num_pages=num_pages, page_size=page_size))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_answers_are_those_of_ample_memory(device: str) -> None:
    came_in = 0
    for seed, page_size, share in ((1, 4, 0.35), (2, 1, 0.5), (3, 4, 0.5)):
        rng = random.Random(100 + seed)
        load = [Ask(tokens(rng, rng.randint(8, 30)), rng.randint(20, 60), i in (3, 6)) for i in range(7)]
        pool = max(int(share * pages_together(load, page_size)), *(ask.pages(page_size) for ask in load))
        chunk = {"prefill_chunk": 8 * page_size, "max_running": 16}
        engine = engine_on(device, pool, page_size, rates=RATES, dynamic_max_pages=2, **chunk)
        ample = engine_on(device, pages_together(load, page_size) + 8, page_size, prefix_cache=False, **chunk)
        with poisoned(engine):
            assert answers(engine, load) == answers(ample, load), (seed, share)
        assert engine.stats()["retractions"] == 0
        came_in += engine.allocator.repacker.behind_bytes
        assert_clean(engine)
    assert came_in > 0


def paused_request(engine: Engine) -> str:
    """Two low requests run at full width; then one of them is at minimum width, and a page more than it needs is
    free."""
    rng = random.Random(3)
    names = [
        engine.add_request(tokens(rng, 30), SamplingParams(max_new_tokens=40, ignore_eos=True), False) for _ in range(2)
    ]
    for _ in range(12):
        engine.step()
    request = engine.requests[names[1]]
    scheduler = engine.scheduler
    assert isinstance(scheduler, NarrowScheduler)
    assert scheduler._narrow(request) > 0
    return names[1]


def kv_of(engine: Engine, name: str) -> torch.Tensor:
    """[layers, T, ...] K of all its tokens."""
    request = engine.requests[name]
    locs = engine.memory.pool.req_to_token[request.row, : request.num_computed].to(torch.int64)
    return torch.stack([engine.allocator.read_kv(layer, locs)[0] for layer in range(4)]).cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("then", ["nothing", "narrow", "park", "interrupt"])
def test_what_the_same_plan_does_next_finds_the_bytes(device: str, then: str) -> None:
    engine = engine_on(device, 64, 4, rates=RATES, prefix_cache=False)
    name = paused_request(engine)
    request, scheduler = engine.requests[name], engine.scheduler
    assert isinstance(scheduler, NarrowScheduler)
    before = kv_of(engine, name)
    with poisoned(engine):
        assert scheduler.widths.widen_behind(request, 99) > 0
        assert engine.allocator.repacker.behind.is_pending
        if then == "narrow":
            assert scheduler._narrow(request) > 0
        elif then == "park":
            assert engine.memory.park(request)
            assert engine.memory.unpark(request)
        assert engine.allocator.repacker.behind.is_pending == (then in ("nothing", "interrupt"))
        if then == "interrupt":
            engine.scheduler.plan = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        else:
            engine.allocator.repacker.behind.fork()
            engine.allocator.repacker.behind.join()
    assert torch.equal(kv_of(engine, name), before)
    engine.check()


def interrupted() -> None:
    raise KeyboardInterrupt


def test_a_newcomer_that_shares_pages_on_their_way_waits_for_them() -> None:
    rng = random.Random(5)
    prefix = tokens(rng, 32)
    asks = [Ask(prefix + tokens(rng, 4), 30), Ask(prefix + tokens(rng, 5), 6)]
    ample = make_engine(4, 200, 4, prefix_cache=False)
    right = answers(ample, asks)
    engine = make_engine(4, 64, 4, rates=RATES, write_through=True, host_pages=2000)
    first = engine.add_request(asks[0].prompt, SamplingParams(max_new_tokens=30))
    for _ in range(8):
        engine.step()
    request, scheduler = engine.requests[first], engine.scheduler
    assert isinstance(scheduler, NarrowScheduler)
    assert scheduler._narrow(request) > 0
    second = engine.add_request(asks[1].prompt, SamplingParams(max_new_tokens=6))
    with poisoned(engine):
        while scheduler.has_work:  # the first one's pages come in under the plan that admits the second
            engine.step()
            engine.check()
    assert engine.requests[second].num_shared_pages == 0  # released by now
    assert [engine.output(name).token_ids for name in (first, second)] == right


def test_whoever_is_stepped_at_once_is_brought_in_before_the_step() -> None:
    engine = make_engine(4, 64, 4, rates=RATES, write_through=True, host_pages=2000, prefix_cache=False)
    name = paused_request(engine)
    for other in [n for n in engine.requests if n != name]:
        engine.abort(other)
    with poisoned(engine):
        made = len(engine.requests[name].output_ids)
        engine.step()  # nobody else runs: no step is spent on waiting
        assert len(engine.requests[name].output_ids) == made + 1
    assert engine.allocator.repacker.behind_bytes == 0


def test_a_cached_page_that_is_narrow_counts_by_its_width() -> None:
    # If each counted as a page, widening would take what this step opens, and give it back in the same plan.
    engine = make_engine(4, 64, 4, rates=RATES, write_through=True, host_pages=2000)
    name = engine.add_request(list(range(1, 41)), SamplingParams(max_new_tokens=8, ignore_eos=True))
    for _ in range(4):
        engine.step()
    scheduler = engine.scheduler
    assert isinstance(scheduler, NarrowScheduler)
    assert engine.prefix_cache is not None
    assert scheduler._narrow(engine.requests[name]) >= 10
    engine.abort(name)  # its prompt stays in the cache, at half width
    cached = engine.prefix_cache.evictable_pages
    assert cached == 10
    free = engine.allocator.num_free_pages
    assert scheduler.widths.available_pages() <= free + cached // 2 + 1
    assert engine.allocator.gather_pages(64) >= scheduler.widths.available_pages()

"""The engine end to end on tiny models: under every policy and any pool, the answers are those of ample memory.

Catches: answers that depend on memory, pages or rows that are not given back, a request that hangs or is refused
wrongly, pressure that takes more than it must.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine_cases import (
    Ask,
    ample_answers,
    answers,
    assert_clean,
    drive,
    locs_of,
    make_engine,
    pages_together,
    poison_everything,
    random_load,
    slots_of,
    tiny_model,
    tokens,
    watch_logits,
)
from tidekv.engine import runner as runner_module
from tidekv.engine.engine import Engine, EngineConfig, as_priority, parse_bytes
from tidekv.engine.request import RequestState
from tidekv.engine.sampling import SamplingParams
from tidekv.errors import CapacityError, ConfigError
from tidekv.memory.ledger import HIGH, LOW

LONGEST = {1: 12, 4: 36, 16: 90}  # prompt tokens at most, by page size


def load_for(seed: int, page_size: int, count: int = 6) -> list[Ask]:
    return random_load(random.Random(seed), count, LONGEST[page_size], 16)


def pool_for(load: list[Ask], page_size: int, share: float) -> int:
    """`share` of what all need together, but not less than the largest one needs."""
    return max(int(share * pages_together(load, page_size)), *(ask.pages(page_size) for ask in load))


# ---- the same answers, whatever happens to memory --------------------------------------------------------------------


@pytest.mark.parametrize("layer_num", [4, 5, 8])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_narrow_equals_ample(layer_num: int, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow_steps = 0
    for seed, share in ((1, 0.3), (4, 0.3)):
        load = load_for(100 * layer_num + seed, page_size)
        staging = {"dynamic_max_pages": 1} if seed == 4 else {}  # the less staging, the more is admitted
        engine = make_engine(layer_num, pool_for(load, page_size, share), page_size, host_pages=1000, **staging)
        begin = engine.backend.begin

        def count(batch: Any, begin: Any = begin) -> None:
            nonlocal narrow_steps
            narrow_steps += batch.narrow is not None
            begin(batch)

        monkeypatch.setattr(engine.backend, "begin", count)
        assert answers(engine, load) == ample_answers(layer_num, load, page_size), (seed, share)
        stats = engine.stats()
        assert stats["retractions"] == stats["recomputed_tokens"] == 0
        assert_clean(engine)
    assert narrow_steps > 0


@pytest.mark.parametrize("pressure", ["retract", "swap", "reserve"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_other_policies_give_the_same_answers(pressure: str, prefix_cache: bool) -> None:
    worked = 0
    for seed, layer_num, page_size in ((1, 4, 4), (2, 5, 1), (3, 8, 4), (4, 4, 16)):
        load = load_for(seed, page_size)
        engine = make_engine(
            layer_num, pool_for(load, page_size, 0.4), page_size, pressure=pressure, prefix_cache=prefix_cache
        )
        assert answers(engine, load) == ample_answers(layer_num, load, page_size), seed
        stats = engine.stats()
        assert stats["halvings_low"] == stats["halvings_high"] == stats["streamed_bytes"] == 0
        if pressure != "swap":
            assert stats["parkings"] == 0
        if pressure != "retract":
            assert stats["retractions"] == stats["recomputed_tokens"] == 0
        worked += {"retract": stats["retractions"], "swap": stats["parkings"], "reserve": 1}[pressure]
        assert_clean(engine)
    assert worked > 0


def test_swapping_moves_the_bytes_that_it_says() -> None:
    rng = random.Random(2)
    load = [Ask(tokens(rng, 12), 16) for _ in range(3)]
    engine = make_engine(4, 10, 4, pressure="swap", prefix_cache=False)
    assert answers(engine, load) == ample_answers(4, load, 4)
    stats = engine.stats()
    page_bytes = engine.geometry.page_bytes
    assert stats["parkings"] > 0
    assert stats["bytes_to_host"] == stats["bytes_from_host"] > 0
    assert stats["bytes_to_host"] % page_bytes == 0


def test_write_through_equals_ample_and_halving_copies_nothing() -> None:
    rng = random.Random(7)
    load = [Ask(tokens(rng, 40), 12) for _ in range(5)]  # low only: their KV is on the host as it is produced
    expected = ample_answers(8, load, 4)
    to_host = {}
    for write_through in (False, True):
        engine = make_engine(8, 26, 4, write_through=write_through, host_pages=200)
        assert answers(engine, load) == expected
        assert engine.stats()["streamed_bytes"] > 0
        to_host[write_through] = engine.allocator.repacker.counters.to_host_bytes
        assert_clean(engine)
    assert to_host[False] > 0
    assert to_host[True] == 0


def test_write_through_with_a_host_pool_too_small_for_it() -> None:
    load = load_for(3, 4)
    engine = make_engine(5, pool_for(load, 4, 0.45), 4, write_through=True, host_pages=7)
    assert answers(engine, load) == ample_answers(5, load, 4)
    assert_clean(engine)


@pytest.mark.parametrize("host_pages", [0, 1, 6, 14])
def test_a_full_host_pool_falls_back_and_the_answers_stay(host_pages: int) -> None:
    rng = random.Random(5)
    load = [Ask(tokens(rng, rng.randint(8, 24)), 14, i % 3 == 0) for i in range(6)]
    engine = make_engine(4, 12, 4, host_pages=host_pages)
    assert answers(engine, load) == ample_answers(4, load, 4)
    if host_pages == 0:
        stats = engine.stats()
        assert stats["halvings_low"] == stats["halvings_high"] == stats["parkings"] == stats["bytes_to_host"] == 0
    assert_clean(engine)


def test_memory_that_nobody_wrote_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    load = load_for(9, 4)
    engine = make_engine(8, pool_for(load, 4, 0.35), 4)
    poison_everything(engine)
    with watch_logits(engine, monkeypatch) as seen:
        assert answers(engine, load) == ample_answers(8, load, 4)
    assert seen.one_part_steps + seen.several_parts_steps > 0


@pytest.mark.parametrize("pressure", ["narrow", "retract", "swap"])
def test_sampling_does_not_depend_on_memory(pressure: str) -> None:
    rng = random.Random(11)
    load = [Ask(tokens(rng, rng.randint(4, 30)), 16, i % 3 == 0) for i in range(6)]
    sampling = {"temperature": 0.8, "top_p": 0.9}
    expected = ample_answers(5, load, 4, {**sampling, "seed": 3})
    assert expected != ample_answers(5, load, 4, {**sampling, "seed": 4})  # the seed decides something
    assert expected != ample_answers(5, load, 4)
    engine = make_engine(5, pool_for(load, 4, 0.4), 4, pressure=pressure)
    assert answers(engine, load, {**sampling, "seed": 3}) == expected
    stats = engine.stats()
    assert stats["halvings_low"] + stats["parkings"] + stats["retractions"] > 0


def test_chunks_of_a_prompt_equal_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(4)
    load = [Ask(tokens(rng, 61), 4), Ask(tokens(rng, 33), 4, True)]
    expected = ample_answers(4, load, 4)
    for chunk, least_steps in ((4, 24), (12, 8), (256, 1)):
        engine = make_engine(4, 60, 4, prefill_chunk=chunk)
        sizes: list[int] = []
        run = engine.runner.run

        def watched(work: Any, run: Any = run, sizes: list[int] = sizes) -> Any:
            sizes.append(sum(n for r, n in work if r.state is RequestState.PREFILL))
            return run(work)

        monkeypatch.setattr(engine.runner, "run", watched)
        assert answers(engine, load) == expected
        assert max(sizes) <= chunk
        assert sum(size > 0 for size in sizes) >= least_steps


# ---- the prefix cache ------------------------------------------------------------------------------------------------


def test_a_prefix_shared_by_high_and_low_survives_halving(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(6)
    prefix = tokens(rng, 32)  # 8 pages
    low, high = Ask(prefix + tokens(rng, 6), 24), Ask(prefix + tokens(rng, 5), 24, True)
    others = [Ask(tokens(rng, 40), 20) for _ in range(2)]
    expected = ample_answers(8, [low, high, *others], 4)
    engine = make_engine(8, 40, 4)
    with watch_logits(engine, monkeypatch):
        names = [engine.add_request(low.prompt, SamplingParams(max_new_tokens=24))]
        while engine.requests[names[0]].state is not RequestState.DECODE:
            engine.step()
        first = engine.requests[names[0]]
        codes = engine.allocator.ledger.page_code
        stride = engine.geometry.page_stride
        assert set(codes[slots_of(engine, first)[:8] % stride]) == {LOW}
        names.append(engine.add_request(high.prompt, SamplingParams(max_new_tokens=24), True))
        second = engine.requests[names[1]]
        while second.state is RequestState.WAITING:
            engine.step()
        shared = slots_of(engine, first)[:8]
        assert shared.tolist() == slots_of(engine, second)[:8].tolist()
        assert second.num_shared_pages == 8
        assert set(engine.allocator.ledger.page_code[shared % stride]) == {HIGH}
        names += [engine.add_request(ask.prompt, SamplingParams(max_new_tokens=20)) for ask in others]
        # What pressure does, at a moment of our choice: both classes are halved, and merged as far as it goes.
        for code in (LOW, HIGH):
            assert engine.allocator._halve_and_repack(code, 0)
        engine.check()
        narrow = slots_of(engine, first)[:8]
        assert narrow.tolist() == slots_of(engine, second)[:8].tolist()
        assert narrow.tolist() != shared.tolist()  # they moved, and both rows and the tree moved along
        assert (engine.allocator.ledger.levels_of(narrow) == 1).all()
        both = 0
        while engine.scheduler.has_work:
            engine.step()
            engine.check()
            if {first.state, second.state} <= {RequestState.PREFILL, RequestState.DECODE}:
                mine, its = slots_of(engine, first)[:8], slots_of(engine, second)[:8]
                assert mine.tolist() == its.tolist()
                assert set(engine.allocator.ledger.page_code[mine % stride]) == {HIGH}
                both += 1
    assert both > 10
    assert engine.stats()["streamed_bytes"] > 0
    assert [engine.output(name).token_ids for name in names] == expected
    assert_clean(engine)


def test_cached_prefixes_go_before_anything_narrows() -> None:
    rng = random.Random(8)
    engine = make_engine(4, 16, 4)
    answers(engine, [Ask(tokens(rng, 40), 4)])
    assert engine.prefix_cache is not None
    assert engine.prefix_cache.evictable_pages == 10
    answers(engine, [Ask(tokens(rng, 44), 4)])
    stats = engine.stats()
    assert engine.allocator.num_evicted_pages > 0
    assert stats["halvings_low"] == stats["halvings_high"] == stats["bytes_to_host"] == 0


@pytest.mark.parametrize("pressure", ["narrow", "retract"])
def test_a_cached_prefix_gives_the_same_answer_for_less_work(pressure: str) -> None:
    rng = random.Random(9)
    ask = Ask(tokens(rng, 41), 6)
    engine = make_engine(5, 30, 4, pressure=pressure)
    first = answers(engine, [ask])
    computed = engine.stats()["prefill_tokens"]
    assert answers(engine, [ask]) == first == ample_answers(5, [ask], 4)
    assert engine.stats()["prefill_tokens"] - computed == 41 - 40  # 10 pages found, one token to compute
    # A later turn finds the answer too: 41 + 6 - 1 = 46 tokens with KV, 11 whole pages.
    answers(engine, [Ask(ask.prompt + first[0] + tokens(rng, 3), 2)])
    assert engine.stats()["prefill_tokens"] - computed - 1 == 41 + 6 + 3 - 44
    assert_clean(engine)


# ---- abort -----------------------------------------------------------------------------------------------------------


def until(engine: Engine, name: str, state: RequestState, computed: int = 0) -> None:
    request = engine.requests[name]
    for _ in range(300):
        if request.state is state and request.num_computed >= computed:
            return
        engine.step()
    raise AssertionError(f"{name} never was {state.value}")


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("state", list(RequestState))
def test_abort_leaks_nothing(state: RequestState, prefix_cache: bool) -> None:
    rng = random.Random(10)
    pressure = "swap" if state is RequestState.PAUSED else "narrow"
    engine = make_engine(4, 12, 4, prefill_chunk=8, prefix_cache=prefix_cache, pressure=pressure)
    prompts = [tokens(rng, 20) for _ in range(3)]
    names = [engine.add_request(prompt, SamplingParams(max_new_tokens=16)) for prompt in prompts]
    victim = {RequestState.WAITING: 2, RequestState.PAUSED: 1}.get(state, 0)
    name = names[victim]
    if state is RequestState.WAITING:
        until(engine, names[0], RequestState.DECODE)
        assert engine.requests[name].state is RequestState.WAITING
    elif state is RequestState.PREFILL:
        until(engine, name, state, computed=8)
        assert engine.requests[name].num_computed < 20
    elif state is RequestState.ABORTED:
        until(engine, name, RequestState.DECODE)
        engine.abort(name)
    else:
        until(engine, name, state)
    tokens_before = list(engine.requests[name].output_ids)
    engine.abort(name)
    engine.check()
    output = engine.output(name)
    assert output.finish_reason == ("length" if state is RequestState.FINISHED else "abort")
    assert output.token_ids == tokens_before
    drive(engine)
    expected = ample_answers(4, [Ask(prompt, 16) for prompt in prompts], 4)
    for i, other in enumerate(names):
        if i != victim:
            assert engine.output(other).token_ids == expected[i]
    assert engine.output(name).token_ids == tokens_before
    assert_clean(engine)


def test_abort_of_a_stranger_and_of_a_narrowed_request() -> None:
    rng = random.Random(12)
    engine = make_engine(8, 14, 4)
    names = [engine.add_request(tokens(rng, 40), SamplingParams(max_new_tokens=20)) for _ in range(2)]
    engine.abort("nobody")
    while not engine.allocator.ledger.any_narrow:
        engine.step()
    for name in names:
        engine.abort(name)
        engine.abort(name)
        engine.check()
    assert engine.step() == []
    assert_clean(engine)


@pytest.mark.parametrize("pressure", ["narrow", "swap", "retract", "reserve"])
def test_aborts_at_random_leak_nothing(pressure: str) -> None:
    rng = random.Random(13)
    engine = make_engine(5, 14, 4, pressure=pressure, prefill_chunk=8)
    load = load_for(21, 4, 16)
    names: list[str] = []
    ended: set[RequestState] = set()
    while load or engine.scheduler.has_work:
        if load and rng.random() < 0.5:
            ask = load.pop()
            if ask.pages(4) <= 14:
                names.append(
                    engine.add_request(ask.prompt, SamplingParams(max_new_tokens=ask.max_new_tokens), ask.is_high)
                )
        engine.step()
        live = [name for name in names if not engine.requests[name].is_done]
        if live and rng.random() < 0.15:
            name = rng.choice(live)
            ended.add(engine.requests[name].state)
            engine.abort(name)
        engine.check()
    assert len(ended) >= 2
    assert_clean(engine)


# ---- what fits, and what never can -----------------------------------------------------------------------------------

# layers, pages, page size, options: two and three widths and more, odd counts, host pools that are the limit or absent
GEOMETRIES: list[tuple[int, int, int, dict[str, Any]]] = [
    (4, 6, 4, {}),
    (4, 6, 4, {"prefix_cache": False}),
    (4, 9, 1, {"dynamic_max_pages": 1}),
    (5, 7, 4, {}),
    (5, 7, 16, {"dynamic_max_pages": 0}),
    (8, 5, 4, {}),
    (8, 8, 4, {"dynamic_max_pages": 1}),
    (8, 12, 1, {"low_max_pages": 12, "high_reserved_pages": 12}),
    (8, 9, 4, {"low_max_pages": 0, "high_reserved_pages": 0, "write_through": True}),
    (8, 3, 4, {"min_slot_width": 1, "dynamic_max_pages": 1}),
    (3, 6, 4, {"min_slot_width": 1, "dynamic_max_pages": 1}),  # one pair of staging cells a page
    (2, 6, 4, {"min_slot_width": 1, "dynamic_max_pages": 1}),
    (8, 6, 4, {"dynamic_max_pages": 1, "host_pages": 13}),
    (8, 6, 4, {"dynamic_max_pages": 1, "host_pages": 7}),
    (8, 6, 4, {"dynamic_max_pages": 1, "host_pages": 3}),
    (5, 6, 4, {"host_pages": 0}),
    (4, 1, 4, {}),
    (4, 2, 4, {}),
    (8, 2, 4, {"dynamic_max_pages": 1}),
]


@pytest.mark.parametrize(("layer_num", "num_pages", "page_size", "options"), GEOMETRIES)
def test_the_largest_request_runs_alone_and_one_token_more_is_refused(
    layer_num: int, num_pages: int, page_size: int, options: dict[str, Any]
) -> None:
    for prompt_share, is_high in ((0.5, False), (0.95, True)):  # growth by decoding, and by prefill
        engine = make_engine(layer_num, num_pages, page_size, **options)
        most = engine.scheduler.largest_request()
        assert num_pages * page_size <= most <= num_pages * page_size << 3
        prompt = tokens(random.Random(1), max(1, int(prompt_share * most)))
        new = most - len(prompt) + 1  # the last token is never fed back
        with pytest.raises(CapacityError, match=rf"needs room for {most + 1} tokens .* at most {most} fit"):
            engine.add_request(prompt, SamplingParams(max_new_tokens=new + 1), is_high)
        assert not engine.scheduler.has_work
        assert answers(engine, [Ask(prompt, new, is_high)]) == ample_answers(
            layer_num, [Ask(prompt, new, is_high)], page_size
        )
        assert engine.stats()["retractions"] == 0
        assert_clean(engine)


def test_narrowing_lets_a_request_grow_past_full_width() -> None:
    engine = make_engine(8, 8, 4, dynamic_max_pages=1)
    assert engine.scheduler.largest_request() > 2 * 8 * 4
    for pressure in ("retract", "swap", "reserve"):
        assert make_engine(8, 8, 4, pressure=pressure).scheduler.largest_request() == 8 * 4
    assert make_engine(8, 8, 4, dynamic_max_pages=1, max_context_len=50).scheduler.largest_request() == 50


@pytest.mark.parametrize(
    ("layer_num", "num_pages", "page_size", "options"), [g for g in GEOMETRIES if g[1] > 4 and g[2] < 16]
)
def test_the_largest_request_runs_alone_after_others_left_their_prefixes(
    layer_num: int, num_pages: int, page_size: int, options: dict[str, Any]
) -> None:
    """Shared pages of the other class, narrow ones too, must not cost the page that it needs at its end."""
    rng = random.Random(2)
    engine = make_engine(layer_num, num_pages, page_size, **options)
    most = engine.scheduler.largest_request()
    prefix = tokens(rng, most // 2)
    answers(engine, [Ask(prefix[: most // 3], 2, True), Ask(tokens(rng, most // 3), 2), Ask(prefix, 1, True)])
    ask = Ask(prefix + tokens(rng, most // 4), 1)
    ask = Ask(ask.prompt, most - len(ask.prompt) + 1)
    assert answers(engine, [ask]) == ample_answers(layer_num, [ask], page_size)
    assert_clean(engine)


@pytest.mark.parametrize("pressure", ["narrow", "swap", "retract", "reserve"])
@pytest.mark.parametrize("seed", range(6))
def test_tiny_pools_never_hang(pressure: str, seed: int, request: pytest.FixtureRequest) -> None:
    """Everything finishes, right, in a bounded number of steps, however small the pools."""
    rng = random.Random(f"{request.node.name}")
    layer_num, page_size = rng.choice([3, 4, 5, 8]), rng.choice([1, 4])
    load = random_load(rng, 7, LONGEST[page_size], 12)
    pages = sorted(ask.pages(page_size) for ask in load)
    num_pages = pages[len(pages) // 2] if pressure == "narrow" else pages[-1]
    options = {"dynamic_max_pages": 1} if rng.random() < 0.5 else {}
    if rng.random() < 0.5:
        options["host_pages"] = rng.choice([num_pages // 2, num_pages, 2 * num_pages])
    engine = make_engine(
        layer_num,
        max(2, num_pages),
        page_size,
        pressure=pressure,
        prefill_chunk=page_size * rng.choice([1, 3, 16]),
        max_running=rng.choice([2, 3, 8]),
        min_slot_width=rng.choice([1, 2]),
        write_through=rng.random() < 0.3,
        **options,
    )
    most = engine.scheduler.largest_request()
    load = [ask for ask in load if len(ask.prompt) + ask.max_new_tokens - 1 <= most]
    assert load
    assert answers(engine, load) == ample_answers(layer_num, load, page_size)
    assert_clean(engine)


def test_growth_under_narrow_never_retracts_while_the_host_has_room() -> None:
    rng = random.Random(3)
    for seed, layer_num in enumerate((5, 8)):
        load = [Ask(tokens(rng, rng.randint(4, 12)), rng.randint(16, 28), rng.random() < 0.3) for _ in range(6)]
        engine = make_engine(layer_num, 11, 4, dynamic_max_pages=1, host_pages=400)
        answers(engine, load)
        stats = engine.stats()
        assert stats["retractions"] == stats["recomputed_tokens"] == 0, seed
        assert stats["halvings_low"] > 0


# ---- one request -----------------------------------------------------------------------------------------------------


def test_stop_tokens_and_lengths() -> None:
    rng = random.Random(14)
    prompt = tokens(rng, 9)
    full = ample_answers(4, [Ask(prompt, 12)], 4)[0]
    stop = full[5]
    cut = full[: full.index(stop) + 1]
    engine = make_engine(4, 20, 4)
    (stopped,) = engine.generate([prompt], SamplingParams(max_new_tokens=12, stop_token_ids=(stop,)))
    assert (stopped.token_ids, stopped.finish_reason) == (cut, "stop")
    (one,) = engine.generate([prompt], SamplingParams(max_new_tokens=1))
    assert (one.token_ids, one.finish_reason, one.per_token_s) == (full[:1], "length", None)
    (last,) = engine.generate([prompt], SamplingParams(max_new_tokens=len(cut), stop_token_ids=(stop,)))
    assert last.finish_reason == "stop"  # both at once: the stop token is the reason
    (single,) = engine.generate([prompt[:1]], SamplingParams(max_new_tokens=3))
    assert single.token_ids == ample_answers(4, [Ask(prompt[:1], 3)], 4)[0]
    assert_clean(engine)


def test_the_models_own_end_token_stops_unless_ignored() -> None:
    from dataclasses import replace

    prompt = tokens(random.Random(15), 9)
    full = ample_answers(4, [Ask(prompt, 8)], 4)[0]
    model = replace(tiny_model(4), eos_token_ids=frozenset({full[3]}))
    engine = Engine(EngineConfig(device="cpu", num_pages=20, page_size=4, prefill_chunk=32), loaded=model)
    (out,) = engine.generate([prompt], SamplingParams(max_new_tokens=8))
    assert (out.token_ids, out.finish_reason) == (full[: full.index(full[3]) + 1], "stop")
    (out,) = engine.generate([prompt], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert (out.token_ids, out.finish_reason) == (full, "length")


def test_high_priority_goes_first() -> None:
    rng = random.Random(16)
    engine = make_engine(4, 40, 4, prefill_chunk=8)
    low = [engine.add_request(tokens(rng, 16), SamplingParams(max_new_tokens=2)) for _ in range(2)]
    high = [engine.add_request(tokens(rng, 16), SamplingParams(max_new_tokens=2), True) for _ in range(2)]
    ended: list[str] = []
    while engine.scheduler.has_work:
        ended += [output.id for output in engine.step()]
    assert ended == [*high, *low]


def test_outputs_come_in_the_order_of_the_prompts_with_honest_times() -> None:
    rng = random.Random(17)
    prompts = [tokens(rng, n) for n in (30, 3, 12)]
    lengths = [3, 9, 1]
    engine = make_engine(4, 40, 4)
    outputs = engine.generate(prompts, [SamplingParams(max_new_tokens=n) for n in lengths], [False, True, False])
    assert [len(output.token_ids) for output in outputs] == lengths
    for output in outputs:
        assert output.ttft_s is not None
        assert 0 < output.ttft_s <= output.e2e_s
        assert output.text is None
    assert engine.stats()["generated_tokens"] == sum(lengths)
    assert engine.stats()["prefill_tokens"] == 45


# ---- what the caller gets wrong, and interruptions -------------------------------------------------------------------


def test_one_bad_prompt_aborts_those_queued_with_it() -> None:
    engine = make_engine(4, 10, 4)
    mine = engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=4))
    bad_prompts = (([], ConfigError), ([512], ConfigError), ([-1], ConfigError), ([1] * 500, CapacityError))
    for bad, error in bad_prompts:
        with pytest.raises(error):
            engine.generate([[4, 5], [6, 7], bad], SamplingParams(max_new_tokens=4))
        assert [r.id for r in engine.scheduler.waiting] == [mine]
    with pytest.raises(ConfigError, match="no tokenizer"):
        engine.generate([[4, 5], "text"], SamplingParams(max_new_tokens=4))
    with pytest.raises(ConfigError, match="2 prompts, 1 sampling params, 2 priorities"):
        engine.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(ConfigError, match="1 priorities"):
        engine.generate([[1], [2]], priorities=[True])
    with pytest.raises(ConfigError, match="in use"):
        engine.add_request([1], request_id=mine)
    drive(engine)
    assert engine.output(mine).token_ids == ample_answers(4, [Ask([1, 2, 3], 4)], 4)[0]
    assert_clean(engine)


@pytest.mark.parametrize("at", ["on_step", "forward"])
def test_an_interruption_leaves_the_engine_clean(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(18)
    load = [Ask(tokens(rng, 30), 20, i == 0) for i in range(4)]
    engine = make_engine(8, 22, 4, dynamic_max_pages=2)
    params = SamplingParams(max_new_tokens=20)
    calls = 0

    def interrupt(*args: Any) -> Any:
        nonlocal calls
        calls += engine.allocator.ledger.any_narrow
        if calls == 3:
            raise KeyboardInterrupt
        return forward(*args) if at == "forward" else None

    forward = runner_module.forward_packed
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        if at == "forward":
            patch.setattr(runner_module, "forward_packed", interrupt)
        engine.generate([a.prompt for a in load], params, on_step=interrupt if at == "on_step" else None)
    assert calls == 3
    assert all(request.state is RequestState.ABORTED for request in engine.requests.values())
    assert_clean(engine)
    assert answers(engine, load) == ample_answers(8, load, 4)  # and it goes on


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (7, 7),
        ("7", 7),
        ("512MiB", 512 << 20),
        ("2GB", 2 << 30),
        ("1.5g", 3 << 29),
        (" 4 KiB ", 4096),
        ("1t", 1 << 40),
        (".5k", 512),
    ],
)
def test_parse_bytes(text: int | str, wanted: int) -> None:
    assert parse_bytes("x", text) == wanted


@pytest.mark.parametrize("text", ["", "GB", "1.2.3", "-1", "2 gigs", "1e9", "."])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="host_memory must be bytes or text"):
        parse_bytes("host_memory", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": 4, "pressure": "hope"}, "pressure must be one of narrow, retract, swap, reserve, got 'hope'"),
        ({}, "exactly one of num_pages"),
        ({"num_pages": 4, "kv_memory": 1 << 20}, "exactly one of num_pages"),
        ({"num_pages": 4, "page_size": 0}, "page_size must be >= 1"),
        ({"num_pages": 4, "max_running": 0}, "max_running must be >= 1"),
        ({"num_pages": 4, "prefill_chunk": 0}, "prefill_chunk must be >= 1"),
        ({"num_pages": 4, "page_size": 16, "prefill_chunk": 24}, "multiple of page_size"),
        ({"kv_memory": 100}, "holds no page: give at least 32768 bytes"),
        ({"num_pages": 0}, "num_pages"),
        ({"num_pages": 4, "host_memory": "lots"}, "host_memory"),
        ({"num_pages": 4, "host_memory": -1}, "capacity_bytes"),
        ({"num_pages": 4, "low_max_pages": 5}, "low_max_pages must lie in"),
    ],
)
def test_config_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(EngineConfig(device="cpu", **options), loaded=tiny_model(4))


def test_kv_memory_is_what_the_pool_takes() -> None:
    config = EngineConfig(device="cpu", kv_memory="1MiB", page_size=16)
    engine = Engine(config, loaded=tiny_model(4))
    pool = engine.device_pool
    taken = pool.k_flat.nbytes + pool.v_flat.nbytes  # the sink page included
    page_bytes = engine.geometry.page_bytes
    assert taken <= 1 << 20 < taken + page_bytes
    assert engine.host_pool.num_pages == 4 * engine.geometry.num_pages


def test_stats_add_up() -> None:
    import json

    load = load_for(30, 4)
    engine = make_engine(8, pool_for(load, 4, 0.4), 4)
    answers(engine, load)
    stats = engine.stats()
    assert json.loads(json.dumps(stats)) == stats
    assert sum(stats["pages"].values()) == engine.geometry.num_pages
    assert stats["bytes_from_host"] >= stats["streamed_bytes"] > 0
    assert stats["generated_tokens"] == sum(ask.max_new_tokens for ask in load)


def test_two_runs_are_alike_step_by_step() -> None:
    """No decision depends on a clock or on an address: tensor-parallel ranks must decide alike."""

    def trace() -> list[Any]:
        load = load_for(31, 4, 8)
        engine = make_engine(5, pool_for(load, 4, 0.35), 4)
        for ask in load:
            engine.add_request(ask.prompt, SamplingParams(max_new_tokens=ask.max_new_tokens), ask.is_high)
        seen = []
        while engine.scheduler.has_work:
            engine.step()
            seen.append([(r.id, locs_of(engine, r).tolist()) for r in engine.scheduler.running])
        return seen

    assert trace() == trace()


def test_a_used_engine_is_as_good_as_a_new_one() -> None:
    """Widths, staging and caches left by one load do not change the answers of the next."""
    engine = make_engine(8, 20, 4)
    for seed in range(3):
        load = [ask for ask in load_for(40 + seed, 4) if ask.pages(4) <= 20]
        assert answers(engine, load) == ample_answers(8, load, 4)
    assert engine.stats()["streamed_bytes"] > 0
    assert_clean(engine)
    assert not any(engine.allocator.ledger.level)
    assert torch.all(engine.memory.pool.req_to_token == 0)


def test_a_priority_is_a_bool_or_its_name() -> None:
    assert [as_priority(value) for value in (True, False, "high", "low", 1, 0)] == [
        True,
        False,
        True,
        False,
        True,
        False,
    ]
    for wrong in ("urgent", 2, None):
        with pytest.raises(ConfigError, match="a priority is"):
            as_priority(wrong)  # type: ignore[arg-type]

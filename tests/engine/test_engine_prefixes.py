"""The engine with prefixes that requests share, on a tiny model.

Catches: a shared page that narrows for one and is read wrongly by another, cached prefixes that are kept while living
requests narrow.
"""

from __future__ import annotations

import random

import pytest

from engine_cases import (
    Ask,
    ample_answers,
    answers,
    assert_clean,
    make_engine,
    slots_of,
    tokens,
    watch_logits,
)
from tidekv.engine.request import RequestState
from tidekv.engine.sampling import SamplingParams
from tidekv.memory.ledger import HIGH, LOW


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

"""A request is aborted in every state, and at random.

Catches: pages, rows, host pages or staging that are not given back.
"""

from __future__ import annotations

import random

import pytest

from engine_cases import (
    Ask,
    ample_answers,
    assert_clean,
    drive,
    load_for,
    make_engine,
    tokens,
)
from tidekv.engine.engine import Engine
from tidekv.engine.request import RequestState
from tidekv.engine.sampling import SamplingParams


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
    ahead = state is RequestState.ENDING  # where steps are launched ahead, and others go on
    engine = make_engine(
        4, 40 if ahead else 12, 4, prefill_chunk=8, prefix_cache=prefix_cache, pressure=pressure, overlap=ahead
    )
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

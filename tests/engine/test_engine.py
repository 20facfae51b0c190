"""Requests from the caller's side: when they stop, in which order they come, what is refused, what is counted.

Catches: an end token that is ignored, times or counts that are not what they say, an interruption that leaves something
behind, a wrong setting that is taken.
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
    load_for,
    locs_of,
    make_engine,
    pool_for,
    tiny_model,
    tokens,
)
from tidekv.engine import runner as runner_module
from tidekv.engine.engine import Engine, EngineConfig, as_priority, parse_bytes
from tidekv.engine.request import RequestState
from tidekv.engine.sampling import SamplingParams
from tidekv.errors import CapacityError, ConfigError


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

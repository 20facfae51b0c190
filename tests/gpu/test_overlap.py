"""Steps that are planned and launched while the GPU still computes the one before, with pages that narrow, move, park
and come back in between. Streams are late by a random time, staging and whatever nobody owns is NaN.

Catches: a copy that the next step's moves do not wait for, a host page given away under a copy, a staging cell filled
while it is read, new tokens that are read back before they are on the host, and a plan that waits for the device."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_cases import Ask, assert_clean, pages_together, random_load
from gpu.engine_pair import (
    CYCLES_A_MS,
    Recorder,
    delay_and_poison,
    live_kv,
    make,
    poison_free,
    run,
    start,
    widen,
)
from tidekv.engine.engine import Engine, EngineConfig
from tidekv.engine.model import LoadedModel
from tidekv.engine.request import Request
from tidekv.engine.runner import Launched
from tidekv.engine.sampling import SamplingParams
from tidekv.engine.streaming_policy import StepRates
from tidekv.memory.ledger import HIGH, LOW

LENGTHS = [300, 33, 700, 161]
RATES = StepRates(link_rate=2e7, base_s=5e-3, request_s=0.0, context_s=0.0, prompt_s=1e-5)


def slow_steps(engine: Engine, ms: float) -> list[bool]:
    """Each step's work starts `ms` late on the device. Returns, for each step whose tokens are read after the next one
    was launched, whether they had arrived by then; on the CPU always."""
    launch, arrived = engine.runner.launch, []  # type: ignore[attr-defined]

    def late(work: list[tuple[Request, int]], unread: Launched | None = None) -> Launched:
        if torch.cuda.is_available():
            torch.cuda._sleep(int(ms * CYCLES_A_MS))
        launched = launch(work, unread)
        if unread is not None:
            arrived.append(unread.copied is None or bool(unread.copied.query()))
        return launched

    engine.runner.launch = late  # type: ignore[attr-defined]
    return arrived


def halve(engine: Engine, code: int) -> None:
    assert engine.allocator._halve_and_repack(code, 0), engine.allocator.refusals


@pytest.mark.parametrize("write_through", [False, True])
def test_steps_ahead_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, device: str, llama: tuple[LoadedModel, torch.dtype], write_through: bool
) -> None:
    """Logits of every step and KV of every layer equal those of ample memory, launch by launch."""
    loaded, dtype = llama
    recorder = Recorder(monkeypatch)
    ample = make(loaded, device, dtype)
    ample_names = start(ample, LENGTHS, 60, high=(1,))
    run(ample, 30)
    want, want_kv = recorder.take(), live_kv(ample, ample_names)
    del ample

    engine = make(loaded, device, dtype, overlap=True, write_through=write_through)
    counts, arrived = delay_and_poison(engine, device), slow_steps(engine, 30.0)
    names = start(engine, LENGTHS, 60, high=(1,))
    moves: dict[int, Any] = {
        6: lambda: halve(engine, LOW),
        10: lambda: halve(engine, LOW),
        13: lambda: halve(engine, HIGH),
        18: lambda: widen(engine),
        23: lambda: halve(engine, LOW),
    }
    for i in range(30):
        if i in moves:
            moves[i]()
        engine.step()
        engine.allocator.ledger.check()  # not the rows: reading them would wait
        assert poison_free(engine) > 0
    engine.check()
    assert counts["copies"] > 50
    assert len(arrived) > 24
    if device == "cuda":
        assert sum(arrived) < len(arrived) // 4, "the host was not ahead: nothing was tested"
    got = recorder.take()
    assert len(got) == len(want)
    for step, (mine, right) in enumerate(zip(got, want, strict=True)):
        assert not mine.isnan().any(), f"NaN in step {step}"
        assert torch.equal(mine, right), f"step {step} differs by {(mine.float() - right.float()).abs().max():g}"
    for i, (mine, right) in enumerate(zip(live_kv(engine, names), want_kv, strict=True)):
        assert torch.equal(mine, right), f"KV {i}"


@pytest.mark.parametrize("write_through", [False, True])
def test_replayed_steps_ahead_give_the_same_tokens(on_gpu: bool, tiny: LoadedModel, write_through: bool) -> None:
    """CUDA graphs of narrowed steps, replayed one behind the other without a wait between."""
    device = "cuda" if on_gpu else "cpu"
    outputs = []
    for overlap in (False, True):
        options: dict[str, Any] = {"overlap": overlap, "write_through": write_through, "prefix_cache": True}
        engine = make(tiny, device, torch.float32, graphs=on_gpu, **options)
        arrived = slow_steps(engine, 3.0) if overlap else []
        names = start(engine, LENGTHS, 70, high=(1,))
        for i in range(60):
            if i in (8, 30, 45):
                halve(engine, LOW)
            elif i in (24, 40):
                widen(engine)
            elif i == 16:
                halve(engine, HIGH)
            engine.step()
            poison_free(engine)
        while any(not engine.requests[name].is_done for name in names):
            engine.step()
        outputs.append([engine.requests[name].output_ids for name in names])
        assert not overlap or len(arrived) > 50
        if on_gpu:
            counted: Any = engine.runner.graphs  # type: ignore[attr-defined]
            assert counted.narrow_replays > 20
        assert_clean(engine)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("rates", [None, RATES], ids=["ladder", "rates"])
def test_a_load_under_pressure_gives_the_answers_of_ample_memory(
    device: str, tiny: LoadedModel, rates: StepRates | None
) -> None:
    """Whatever the scheduler does: pausing, parking, pages that come in under a step, stop tokens seen late."""
    asks: list[Ask] = random_load(random.Random(31), 14, 90, 60)

    def served(engine: Engine, sampling: dict[str, Any] | None, poison: bool) -> list[list[int]]:
        names = [
            engine.add_request(a.prompt, SamplingParams(max_new_tokens=a.max_new_tokens, **(sampling or {})), a.is_high)
            for a in asks
        ]
        while engine.scheduler.has_work:
            engine.step()
            engine.allocator.ledger.check()  # not the rows: reading them would wait
            if poison:
                poison_free(engine)
        return [engine.output(name).token_ids for name in names]

    def engine_of(pages: int, **options: Any) -> Engine:
        settings: dict[str, Any] = {"page_size": 4, "prefill_chunk": 32, "max_running": 16, "host_memory": "256MiB"}
        return Engine(EngineConfig(device=device, dtype=torch.float32, num_pages=pages, **settings, **options), tiny)

    ample = engine_of(pages_together(asks, 4) + 8, prefix_cache=False, overlap=False)
    free_running = served(ample, None, poison=False)
    inner = [token for answer in free_running for token in answer[1:-2]]
    stop = {"stop_token_ids": (max(set(inner), key=inner.count),)}
    for sampling, share in ((None, 0.3), (stop, 0.15)):
        want = served(ample, sampling, poison=False)
        engine = engine_of(int(share * pages_together(asks, 4)), overlap=True, write_through=True, rates=rates)
        arrived = slow_steps(engine, 2.0)
        assert served(engine, sampling, poison=True) == want
        assert len(arrived) > 10
        stats = engine.stats()
        assert stats["halvings_low"] + stats["halvings_high"] > 0 or sampling is not None
        assert_clean(engine)


@pytest.mark.parametrize(("write_through", "temperature"), [(False, 0.0), (True, 0.0), (False, 0.8)])
def test_a_narrowed_step_is_launched_without_a_wait(
    on_gpu: bool, tiny: LoadedModel, write_through: bool, temperature: float
) -> None:
    """Each step takes 60 ms on the device; the next one is planned and launched meanwhile, and torch sees no call that
    synchronises."""
    if not on_gpu:
        pytest.skip("waits are counted by CUDA's side of torch")
    engine = make(tiny, "cuda", torch.float32, graphs=True, overlap=True, write_through=write_through)
    for name in start(engine, [40, 50, 60, 30], 80, high=(0,)):
        request = engine.requests[name]
        request.sampling = replace(request.sampling, temperature=temperature, top_p=0.9, seed=request.arrival_order)
    run(engine, 6)
    halve(engine, LOW)
    run(engine, 8)  # narrowed steps are captured at their second time
    arrived = slow_steps(engine, 60.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(18):  # each request opens a page
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert engine.allocator.ledger.any_narrow
    waits = [f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing CUDA operation" in str(w.message)]
    assert waits == []
    # The first step of the loop follows one that was not slow; the books' check before it has waited, too.
    assert sum(arrived[1:]) == 0, arrived

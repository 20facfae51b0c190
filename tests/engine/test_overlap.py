"""An engine that plans ahead of the tokens it has read, at full width and while pages are narrow. Would catch: a wrong
token fed to the next step, a token too many after a stop, memory held by a request that ended late, a retracted or
parked request that loses its last token, a plan that asks the device, rows on the host that miss a move.

What only a GPU shows, a race of copies, is in tests/gpu/test_overlap.py."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_cases import (
    VOCAB,
    Ask,
    ample_answers,
    answers,
    assert_clean,
    drive,
    make_engine,
    pages_together,
    poison_everything,
    random_load,
    tokens,
)
from tidekv.engine.engine import Engine
from tidekv.engine.host_rows import HostRows
from tidekv.engine.request import Request, RequestState
from tidekv.engine.runner import Launched
from tidekv.engine.sampling import SamplingParams
from tidekv.engine.streaming_policy import StepRates
from tidekv.errors import InvariantError

# A few pages of these models come over the link under a step: requests pause, stream, widen and park.
RATES = StepRates(link_rate=2e7, base_s=5e-3, request_s=0.0, context_s=0.0, prompt_s=1e-5)
# Less than a page: who has narrowed stays so for long.
SLOW = replace(RATES, link_rate=2e5)


def count_ahead(engine: Engine) -> Counter[str]:
    """Steps launched before the tokens of the last one were read ("ahead"); those of them with something narrow in the
    pool ("pool"), in the batch ("narrow")."""
    launch, seen = engine.runner.launch, Counter()

    def counted(work: list[tuple[Request, int]], unread: Launched | None = None) -> Launched:
        if unread is not None:
            seen["ahead"] += 1
            seen["pool"] += engine.allocator.ledger.any_narrow
            seen["narrow"] += bool(engine.memory.narrow_slots([r for r, _ in work]).any())
        return launch(work, unread)

    engine.runner.launch = counted  # type: ignore[method-assign]
    return seen


def hold_widths(engine: Engine, steps: int = 12) -> None:
    """Widths come back only every so many steps: else these short loads are narrow for a step or two at a time."""
    scheduler, end_step = engine.scheduler, engine.scheduler.end_step
    scheduler.end_step = lambda: None if scheduler.num_steps % steps else end_step()  # type: ignore[method-assign]


def both(load: list[Ask], share: float, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Answers without and with overlap, in a pool of `share` of what the load needs."""
    sampling, layers = options.pop("sampling", None), options.pop("layers", 4)
    out = []
    for overlap in (False, True):
        engine = make_engine(layers, max(8, int(share * pages_together(load, 4))), 4, overlap=overlap, **options)
        seen = count_ahead(engine)
        hold_widths(engine)
        out.append(answers(engine, load, sampling))
        assert_clean(engine)
        assert (seen["ahead"] > 3) == overlap
        if overlap and share < 1 and engine.config.narrows:
            # By cost, who is narrow pauses: it is in few batches, but there while others run ahead.
            assert seen["narrow" if engine.config.rates is None else "pool"] > 10
    return out[0], out[1]


def stop_of(answers: list[list[int]]) -> int:
    """A token that some answers hold in their middle, so that they end early and the others go on."""
    inner = [token for answer in answers for token in answer[1:-2]]
    return max(set(inner), key=inner.count)


@pytest.mark.parametrize("pressure", ["narrow", "retract", "swap", "reserve"])
@pytest.mark.parametrize("share", [0.4, 1.5])
def test_the_same_answers_under_every_policy(pressure: str, share: float) -> None:
    load = random_load(random.Random(3), 14, 40, 60)
    plain, ahead = both(load, share, pressure=pressure)
    assert ahead == plain


@pytest.mark.parametrize("layers", [4, 5, 8])
@pytest.mark.parametrize("write_through", [False, True])
@pytest.mark.parametrize("rates", [None, RATES], ids=["ladder", "rates"])
def test_the_same_answers_while_pages_are_narrow(layers: int, write_through: bool, rates: StepRates | None) -> None:
    load = random_load(random.Random(20 + layers), 10, 40, 80)
    options: dict[str, Any] = {"write_through": write_through, "rates": rates, "host_pages": 2000}
    plain, ahead = both(load, 0.35, layers=layers, **options)
    assert ahead == plain == ample_answers(layers, load, 4)


def test_the_same_draws() -> None:
    load = random_load(random.Random(4), 8, 30, 60)
    sampling = {"temperature": 0.9, "top_p": 0.8, "seed": 7}
    plain, ahead = both(load, 0.6, pressure="narrow", sampling=sampling)
    assert ahead == plain


def test_a_stop_token_ends_the_answer_where_it_stands() -> None:
    load = random_load(random.Random(5), 10, 30, 30)
    free_running = both(load, 2.0)[0]
    stop = stop_of(free_running)
    plain, ahead = both(load, 2.0, sampling={"stop_token_ids": (stop,)})
    assert ahead == plain
    early = [a for a, f in zip(plain, free_running, strict=True) if len(a) < len(f)]
    assert early
    assert all(a[-1] == stop and stop not in a[:-1] for a in early)


@pytest.mark.parametrize("options", [
    {"pressure": "narrow"},
    {"pressure": "narrow", "write_through": True},
    {"pressure": "narrow", "write_through": True, "rates": SLOW, "max_running": 16, "host_pages": 2000, "share": 0.1},
    {"pressure": "swap"},
    {"pressure": "retract"},
], ids=["ladder", "write-through", "rates", "swap", "retract"])  # fmt: skip
def test_stop_tokens_seen_late_leave_nothing_under_pressure(options: dict[str, Any]) -> None:
    load = random_load(random.Random(6), 16, 30, 80)
    free_running = ample_answers(4, load, 4)
    stop = stop_of(free_running)
    settings = {"share": 0.2} | options
    plain, ahead = both(load, sampling={"stop_token_ids": (stop,)}, **settings)
    assert ahead == plain
    assert sum(len(a) < len(f) for a, f in zip(plain, free_running, strict=True)) > 3


def test_a_request_that_is_parked_before_its_stop_token_is_read() -> None:
    """It ends on the host: nothing of it is published, and its host pages are free."""
    rng = random.Random(11)
    prompts = [tokens(rng, 12) for _ in range(2)]
    stop = ample_answers(4, [Ask(prompts[1], 12)], 4)[0][6]
    engine = make_engine(4, 64, 4, overlap=True)
    first = engine.add_request(prompts[0], SamplingParams(max_new_tokens=30))
    name = engine.add_request(prompts[1], SamplingParams(max_new_tokens=30, stop_token_ids=(stop,)))
    request = engine.requests[name]
    while not (request.num_unread and int(engine._unread.on_host[engine._unread.requests.index(request)]) == stop):  # type: ignore[union-attr]
        engine.step()
    plan = engine.scheduler.plan

    def parking() -> Any:
        assert engine.memory.park(request)
        engine.scheduler.running.remove(request)
        engine.scheduler.parked.append(request)
        engine.scheduler._resume = lambda: None  # type: ignore[method-assign]
        return plan()

    engine.scheduler.plan = parking  # type: ignore[method-assign]
    engine.step()
    del engine.scheduler.plan, engine.scheduler._resume  # type: ignore[method-assign]
    assert request.finish_reason == "stop"
    assert request.output_ids[-1] == stop
    drive(engine)
    assert len(engine.output(first).token_ids) == 30
    assert_clean(engine)


@pytest.mark.parametrize("rates", [None, SLOW], ids=["ladder", "rates"])
def test_aborts_while_pages_are_narrow_leave_nothing(rates: StepRates | None) -> None:
    load = random_load(random.Random(7), 16, 40, 80)
    right = ample_answers(4, load, 4)
    engine = make_engine(
        4, int(0.35 * pages_together(load, 4)), 4, overlap=True, write_through=True, rates=rates, host_pages=2000
    )
    seen = count_ahead(engine)
    hold_widths(engine)
    names = [engine.add_request(a.prompt, SamplingParams(max_new_tokens=a.max_new_tokens), a.is_high) for a in load]
    rng, aborted = random.Random(8), set()
    while engine.scheduler.has_work:
        engine.step()
        unread = [r.id for r in engine._unread.requests if r.num_unread] if engine._unread is not None else []
        if unread and len(aborted) < 5 and engine.allocator.ledger.any_narrow and rng.random() < 0.3:
            victim = rng.choice(unread)
            aborted.add(victim)
            engine.abort(victim)
        engine.check()
    assert seen["pool"] > 10
    assert aborted
    for name, answer in zip(names, right, strict=True):
        given = engine.output(name).token_ids
        assert given == (answer[: len(given)] if name in aborted else answer)
    assert_clean(engine)


def test_a_lossy_window_reads_the_same() -> None:
    """What is narrow is decided by counts alone: which pages are left out does not depend on when tokens are read."""
    rng = random.Random(9)
    load = [Ask(tokens(rng, 40), 24) for _ in range(4)] + [Ask(tokens(rng, 12), 12, True)]
    given = []
    for _ in range(2):
        engine = make_engine(8, 40, 4, host_pages=2000, rates=RATES, low_reads="window", window_tokens=8, overlap=True)
        poison_everything(engine)
        seen = count_ahead(engine)
        given.append(answers(engine, load))
        assert seen["narrow"] > 3
        assert_clean(engine)
    assert given[0] == given[1]


def narrowed_engine(**options: Any) -> Engine:
    """Four requests that decode on, two of them at half width, a step of them unread."""
    engine = make_engine(4, 200, 4, overlap=True, host_pages=2000, dynamic_max_pages=60, prefix_cache=False, **options)
    rng = random.Random(12)
    for i in range(4):
        engine.add_request(tokens(rng, 14 + i), SamplingParams(max_new_tokens=60, ignore_eos=True), i < 2)
    for _ in range(4):
        engine.step()
    engine.scheduler.end_step = lambda: None  # type: ignore[method-assign]  # or the widths come back at once
    assert engine.allocator._halve_and_repack(2, 0), engine.allocator.refusals
    engine.step()
    assert engine._unread is not None
    return engine


@pytest.mark.parametrize("write_through", [False, True])
def test_a_narrowed_decode_step_asks_the_device_for_nothing(
    write_through: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA each of these would wait for the step that is on its way."""
    engine = narrowed_engine(write_through=write_through)
    asked: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("cpu", "item"):
            original = getattr(torch.Tensor, name)

            def noted(tensor: torch.Tensor, *args: Any, _name: str = name, _original: Any = original, **kw: Any) -> Any:
                asked.append(_name)
                return _original(tensor, *args, **kw)

            patch.setattr(torch.Tensor, name, noted)
        patch.setattr(engine.runner, "_forward", lambda *_: torch.zeros(4, VOCAB))  # attention on the CPU is not CUDA's
        for _ in range(9):  # two pages are opened in each row
            engine.step()
    assert engine.allocator.ledger.any_narrow
    assert asked == []


def test_rows_on_the_host_that_miss_a_move_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the checker sees it, and the step that reads by them."""
    load = random_load(random.Random(3), 14, 40, 60)
    engine = make_engine(4, int(0.4 * pages_together(load, 4)), 4, overlap=True)
    monkeypatch.setattr(HostRows, "remap", lambda *_: None)
    engine.allocator.loc_holders._followers.clear()
    with pytest.raises(InvariantError, match="the host has"):
        answers(engine, load)


def test_a_request_that_ends_by_its_length_stops_nobody_from_running_ahead() -> None:
    """Its pages are free for the very next plan, its token is read one step later."""
    asks = [Ask(tokens(random.Random(i), 9), 6 + i) for i in range(8)]
    engine = make_engine(4, 80, 4, overlap=True, prefix_cache=False)
    seen = count_ahead(engine)
    names = [engine.add_request(a.prompt, SamplingParams(max_new_tokens=a.max_new_tokens)) for a in asks]
    ended, while_ending = [], 0
    while engine.scheduler.has_work:
        ended += engine.step()
        for request in engine.scheduler.ending:
            while_ending += 1
            assert request.row == -1
            assert request.num_unread == 1
            assert len(request.output_ids) + 1 == request.sampling.max_new_tokens
        engine.check()
    assert while_ending == 7  # the last one's token is read at once: nobody goes on
    assert seen["ahead"] >= 11  # all but the first decode, behind the prompts
    assert [output.id for output in ended] == names
    assert [output.token_ids for output in ended] == ample_answers(4, asks, 4)
    assert all(output.finish_reason == "length" for output in ended)
    assert_clean(engine)


def test_an_abort_of_a_request_whose_last_token_is_unread() -> None:
    engine = make_engine(4, 80, 4, overlap=True)
    names = [engine.add_request([1 + i, 2, 3], SamplingParams(max_new_tokens=6 + 6 * i)) for i in range(2)]
    while not engine.scheduler.ending:
        engine.step()
    engine.abort(names[0])
    assert engine.output(names[0]).finish_reason == "abort"
    assert len(engine.output(names[0]).token_ids) == 5
    drive(engine)
    assert len(engine.output(names[1]).token_ids) == 12
    assert_clean(engine)


def test_an_abort_between_launch_and_read_leaves_nothing() -> None:
    engine = make_engine(4, 60, 4, overlap=True)
    names = [engine.add_request([1 + i, 2, 3, 4, 5], SamplingParams(max_new_tokens=30)) for i in range(3)]
    while engine.requests[names[0]].num_unread == 0:
        engine.step()
    request = engine.requests[names[0]]
    assert request.state is RequestState.DECODE
    known = list(request.output_ids)
    engine.abort(names[0])
    assert engine.output(names[0]).token_ids == known
    drive(engine)
    assert request.output_ids == known
    assert [len(engine.output(name).token_ids) for name in names[1:]] == [30, 30]
    assert_clean(engine)


def test_aborting_everybody_ends_the_work_and_the_next_request_is_served() -> None:
    engine = make_engine(4, 60, 4, overlap=True)
    alone = answers(make_engine(4, 60, 4), [Ask([9, 8, 7], 6)])[0]
    name = engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=30))
    while engine.requests[name].num_unread == 0:
        engine.step()
    engine.abort(name)
    assert not engine.scheduler.has_work
    assert answers(engine, [Ask([9, 8, 7], 6)]) == [alone]
    assert_clean(engine)


def test_an_interrupted_plan_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(make_engine(4, 60, 4), [Ask([9, 8, 7], 20)])[0]
    engine = make_engine(4, 60, 4, overlap=True)
    name = engine.add_request([9, 8, 7], SamplingParams(max_new_tokens=20))
    while engine.requests[name].num_unread == 0:
        engine.step()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "plan", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    drive(engine)
    assert engine.output(name).token_ids == expected
    assert_clean(engine)

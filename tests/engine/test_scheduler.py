"""Who runs and who gives way. Each test first builds the situation and checks that it is the one that was meant.

Catches: a low request that never gets its turn, a parked one that never comes back, the wrong victim, and the
standstills in which everybody holds a little and nobody can grow.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from engine_cases import Ask, ample_answers, answers, assert_clean, drive, make_engine, queues, tokens
from tidekv.engine.engine import Engine
from tidekv.engine.request import Request, RequestState
from tidekv.engine.sampling import SamplingParams
from tidekv.engine.scheduler import by_rank
from tidekv.errors import InvariantError


def watch_steps(engine: Engine) -> list[list[str]]:
    """Ids of the requests of each step."""
    steps: list[list[str]] = []
    run = engine.runner.run

    def watched(work: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        steps.append([r.id for r, _ in work])
        return run(work)

    engine.runner.run = watched  # type: ignore[method-assign]
    return steps


def add(engine: Engine, ask: Ask, name: str) -> None:
    engine.add_request(ask.prompt, SamplingParams(max_new_tokens=ask.max_new_tokens), ask.is_high, name)


def longest_gap(engine: Engine, steps: list[list[str]], name: str) -> int:
    """Most steps in a row without the request, between its first step and its last."""
    at = [i for i, ids in enumerate(steps) if name in ids]
    return max((b - a for a, b in itertools.pairwise(at)), default=0)


def test_rank_is_high_first_then_arrival() -> None:
    made = [
        Request(str(i), [1], SamplingParams(), is_high, i, 0.0) for i, is_high in enumerate([False, True, False, True])
    ]
    assert [r.id for r in by_rank(reversed(made))] == ["1", "3", "0", "2"]


@pytest.mark.parametrize("with_high", [False, True])
def test_rotation_is_fair_when_narrowed_slots_exceed_staging(with_high: bool) -> None:
    """One staging page of 4 pairs; the long request alone has more narrowed slots, and still gets its turns."""
    rng = random.Random(1)
    load = {"long": Ask(tokens(rng, 40), 24), "a": Ask(tokens(rng, 12), 40), "b": Ask(tokens(rng, 12), 40)}
    if with_high:
        load["high"] = Ask(tokens(rng, 12), 60, True)
    num_pages = 26 if with_high else 16
    engine = make_engine(8, num_pages, 4, dynamic_max_pages=1, low_max_pages=0, prefix_cache=False)
    for name, ask in load.items():
        add(engine, ask, name)
    steps = watch_steps(engine)
    most_narrow = 0
    while engine.scheduler.has_work:
        engine.step()
        engine.check()
        most_narrow = max(most_narrow, sum(engine.allocator.ledger.num_narrow))
    assert most_narrow > 4, "staging was large enough for everybody"
    for name in load:
        assert longest_gap(engine, steps, name) <= 30, (name, steps)  # of about 100 steps
    if with_high:
        assert longest_gap(engine, steps, "high") == 1
    assert [engine.output(name).token_ids for name in load] == ample_answers(8, list(load.values()), 4)
    assert engine.stats()["retractions"] == engine.stats()["recomputed_tokens"] == 0


@pytest.mark.parametrize("pressure", ["swap", "retract"])
def test_the_lowest_newest_request_gives_way(pressure: str) -> None:
    rng = random.Random(3)
    load = {
        "low, old": Ask(tokens(rng, 12), 12),
        "high, old": Ask(tokens(rng, 12), 12, True),
        "low, new": Ask(tokens(rng, 12), 12),
        "high, new": Ask(tokens(rng, 12), 12, True),
    }
    engine = make_engine(4, 14, 4, pressure=pressure, prefix_cache=False)  # 12 pages for the prompts, 24 at the end
    for name, ask in load.items():
        add(engine, ask, name)
    left: list[str] = []
    while engine.scheduler.has_work:
        before = {r.id: r.times_retracted + r.times_paused for r in engine.requests.values()}
        engine.step()
        engine.check()
        left += [r.id for r in engine.requests.values() if r.times_retracted + r.times_paused > before[r.id]]
    assert left[0] == "low, new"
    assert left[1] == "low, old"
    ended = sorted(engine.requests.values(), key=lambda r: r.finish_s or 0.0)
    assert {r.id for r in ended[:2]} == {"high, old", "high, new"}
    assert [engine.output(name).token_ids for name in load] == ample_answers(4, list(load.values()), 4)
    if pressure == "retract":
        assert engine.stats()["recomputed_tokens"] == sum(r.recomputed_tokens for r in engine.requests.values()) > 0
        assert engine.stats()["parkings"] == 0
    else:
        assert engine.stats()["recomputed_tokens"] == 0
    assert_clean(engine)


def test_parked_requests_come_back_before_newcomers_of_their_class() -> None:
    rng = random.Random(4)
    engine = make_engine(4, 10, 4, pressure="swap", prefix_cache=False)
    for i in range(3):
        add(engine, Ask(tokens(rng, 12), 12), f"old {i}")
    while not engine.scheduler.parked:
        engine.step()
    parked = [r.id for r in engine.scheduler.parked]
    assert parked == ["old 2"]
    add(engine, Ask(tokens(rng, 3), 2), "newcomer")
    steps = watch_steps(engine)
    drive(engine)
    back = next(i for i, ids in enumerate(steps) if "old 2" in ids)
    assert back <= next(i for i, ids in enumerate(steps) if "newcomer" in ids)
    assert_clean(engine)


@pytest.mark.parametrize("pressure", ["narrow", "swap", "retract", "reserve"])
def test_a_published_prefix_that_a_waiting_request_holds_does_not_stop_the_others(pressure: str) -> None:
    """The standstill that was: parking left the published prompt behind, locked; two such filled the pool."""
    rng = random.Random(5)
    load = [Ask(tokens(rng, 40), 16, i == 0) for i in range(2)]  # 10 pages each at once, 14 at the end
    engine = make_engine(3, 21, 4, pressure=pressure)  # 3 layers: narrow has one width to give
    assert answers(engine, load) == ample_answers(3, load, 4)
    stats = engine.stats()
    assert (stats["parkings"] > 0) is (pressure == "swap")
    assert (stats["retractions"] > 0) is (pressure == "retract")
    assert stats["parkings"] < 20
    assert_clean(engine)


def test_parking_leaves_behind_only_what_a_running_request_shares() -> None:
    rng = random.Random(6)
    prefix = tokens(rng, 16)  # 4 pages
    engine = make_engine(4, 40, 4, pressure="swap")
    add(engine, Ask(prefix + tokens(rng, 9), 20), "a")
    while engine.requests["a"].state is not RequestState.DECODE:
        engine.step()
    add(engine, Ask(prefix + tokens(rng, 14), 20), "b")
    while engine.requests["b"].state is not RequestState.DECODE:
        engine.step()
    # A branch of the tree below b's own part that nobody references: it goes, or it would hang in the air.
    b = engine.requests["b"]
    below = engine.memory.pages(b.num_computed) - 1
    assert b.num_shared_pages == 4
    used = engine.geometry.num_pages - engine.allocator.num_free_pages
    owned = engine.memory.pages(b.num_computed)
    assert engine.memory.park(b)
    engine.scheduler.running.remove(b)
    engine.scheduler.parked.append(b)
    engine.check()
    assert used - (engine.geometry.num_pages - engine.allocator.num_free_pages) == owned - 4
    assert len(b.prefix_nodes) == 4 < below
    assert engine.prefix_cache is not None
    assert engine.prefix_cache.num_nodes == len(engine.requests["a"].prefix_nodes)
    drive(engine)
    assert engine.requests["b"].times_paused == 1
    assert_clean(engine)


def test_parking_takes_along_the_unused_branches_below_it_and_pages_that_were_computed_twice() -> None:
    rng = random.Random(7)
    prefix = tokens(rng, 12)
    engine = make_engine(4, 60, 4, pressure="swap", prefill_chunk=64)
    for name in ("a", "b"):  # both miss the cache, both publish: the tree keeps the pages of the first
        add(engine, Ask([*prefix, 1, 2, 3], 30), name)
    engine.step()
    a, b = (engine.requests[name] for name in "ab")
    assert a.owned_pages.tolist() == [False, False, False, True]
    assert b.owned_pages.tolist() == [True, True, True, True]
    assert a.prefix_nodes.tolist() == b.prefix_nodes.tolist()
    answers_of_branch = engine.generate([prefix + tokens(rng, 9)], SamplingParams(max_new_tokens=2))
    assert len(answers_of_branch[0].token_ids) == 2
    engine.abort("a")  # now b alone holds the three nodes; a's own pages stand in the tree, with a dead branch below
    engine.check()
    assert engine.prefix_cache is not None
    assert engine.prefix_cache.num_nodes > 3
    assert engine.memory.park(b)
    engine.scheduler.running.remove(b)
    engine.scheduler.parked.append(b)
    engine.check()
    assert engine.prefix_cache.num_nodes == 0
    assert engine.allocator.num_free_pages == engine.geometry.num_pages
    drive(engine)
    assert engine.output("b").token_ids == ample_answers(4, [Ask([*prefix, 1, 2, 3], 30)], 4)[0]
    assert_clean(engine)


def test_a_request_that_gave_way_in_the_middle_of_planning_is_not_planned() -> None:
    """Two prefills in one step: room for the first is made by the second, whose turn then comes with no pages."""
    rng = random.Random(8)
    for pressure in ("swap", "retract"):
        load = [Ask(tokens(rng, 40), 2), Ask(tokens(rng, 40), 2)]
        engine = make_engine(4, 11, 4, pressure=pressure, prefill_chunk=16, prefix_cache=False)
        for i, ask in enumerate(load):
            add(engine, ask, str(i))
        # Both get a first chunk: the pool has 11 pages, each needs 11.
        first, second = engine.requests["0"], engine.requests["1"]
        with engine.allocator.step():
            for request in (first, second):
                engine.memory.admit(request)
                engine.scheduler.waiting.remove(request)
                engine.scheduler.running.append(request)
                assert engine.memory.extend(request, 16)
        engine.runner.run([(first, 16), (second, 16)])
        assert first.state is second.state is RequestState.PREFILL
        drive(engine)
        assert second.times_paused + second.times_retracted > 0
        assert first.times_paused + first.times_retracted == 0
        assert [engine.output(str(i)).token_ids for i in range(2)] == ample_answers(4, load, 4)
        assert_clean(engine)


def test_alone_with_a_full_host_the_parked_ones_give_way() -> None:
    """High grows; the host is full of a parked low request, which begins anew. Only then is anything recomputed."""
    rng = random.Random(9)
    engine = make_engine(8, 8, 4, dynamic_max_pages=1, host_pages=14)
    add(engine, Ask(tokens(rng, 20), 20), "low")
    while engine.requests["low"].state is not RequestState.DECODE:
        engine.step()
    low = engine.requests["low"]
    assert engine.memory.park(low)
    engine.scheduler.running.remove(low)
    engine.scheduler.parked.append(low)
    most = engine.scheduler.largest_request()
    assert most > 8 * 4
    load = [Ask(tokens(rng, 30), most - 29, True)]
    add(engine, load[0], "high")
    engine.scheduler._resume = lambda: None if engine.scheduler.running or engine.scheduler.waiting else resume()  # type: ignore[method-assign]
    resume = type(engine.scheduler)._resume.__get__(engine.scheduler)
    drive(engine)
    assert low.times_retracted == 1
    assert engine.output("high").token_ids == ample_answers(8, load, 4)[0]
    assert engine.output("low").recomputed_tokens > 0
    assert_clean(engine)


def test_a_number_that_was_wrong_is_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(4, 4, 4)
    monkeypatch.setattr(engine.scheduler, "largest_pool", lambda: 1000)
    add(engine, Ask(tokens(random.Random(10), 200), 4), "too long")
    with pytest.raises(InvariantError, match=r"too long has the pool to itself and no room for token \d+ of 203"):
        drive(engine, max_steps=200)
    engine.abort("too long")
    assert_clean(engine)


@pytest.mark.parametrize(("pressure", "at_once"), [("reserve", 1), ("retract", 3), ("narrow", 3)])
def test_admission(pressure: str, at_once: int) -> None:
    """10 pages; three requests of 2 pages now and 7 at their ends."""
    rng = random.Random(11)
    engine = make_engine(8, 10, 4, pressure=pressure, prefix_cache=False, dynamic_max_pages=1, prefill_chunk=64)
    for i in range(3):
        add(engine, Ask(tokens(rng, 8), 20), str(i))
    engine.step()
    assert len(engine.scheduler.running) == at_once, queues(engine)
    drive(engine)
    assert_clean(engine)


def test_rows_limit_what_runs() -> None:
    rng = random.Random(12)
    engine = make_engine(4, 60, 4, max_running=2)
    steps = watch_steps(engine)
    load = [Ask(tokens(rng, 8), 6, i == 3) for i in range(4)]
    assert answers(engine, load) == ample_answers(4, load, 4)
    assert max(len(set(ids)) for ids in steps) == 2


def test_a_newcomer_that_finds_no_page_waits_and_is_not_overtaken() -> None:
    rng = random.Random(13)
    engine = make_engine(4, 8, 4, pressure="retract", prefix_cache=False, prefill_chunk=64)
    add(engine, Ask(tokens(rng, 26), 4), "first")  # 7 of 8 pages
    add(engine, Ask(tokens(rng, 16), 4), "large")
    add(engine, Ask(tokens(rng, 2), 2), "small")
    order: list[Any] = []
    while engine.scheduler.has_work:
        order += [output.id for output in engine.step()]
        engine.check()
    assert order[0] == "first"
    assert engine.requests["small"].first_token_s >= engine.requests["large"].first_token_s

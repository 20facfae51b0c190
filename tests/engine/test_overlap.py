"""An engine that plans ahead of the tokens it has read. Would catch: a wrong token fed to the next step, a token too
many after a stop, memory held by a request that ended late, a retracted or parked request that loses its last token."""

from __future__ import annotations

import random

import pytest

from engine_cases import Ask, answers, assert_clean, drive, make_engine, pages_together, random_load
from tidekv.engine.request import RequestState
from tidekv.engine.sampling import SamplingParams


def both(load: list[Ask], share: float, **options: object) -> tuple[list[list[int]], list[list[int]]]:
    """Answers without and with overlap, in a pool of `share` of what the load needs."""
    sampling = options.pop("sampling", None)
    out = []
    for overlap in (False, True):
        engine = make_engine(4, max(8, int(share * pages_together(load, 4))), 4, overlap=overlap, **options)
        ran_ahead = 0
        if overlap:
            launch = engine.runner.launch

            def counted(work, unread=None, launch=launch):
                nonlocal ran_ahead
                ran_ahead += unread is not None
                return launch(work, unread)

            engine.runner.launch = counted
        out.append(answers(engine, load, sampling))
        assert_clean(engine)
        assert (ran_ahead > 3) == overlap
    return out[0], out[1]


@pytest.mark.parametrize("pressure", ["narrow", "retract", "swap", "reserve"])
@pytest.mark.parametrize("share", [0.4, 1.5])
def test_the_same_answers_under_every_policy(pressure: str, share: float) -> None:
    load = random_load(random.Random(3), 14, 40, 20)
    plain, ahead = both(load, share, pressure=pressure)
    assert ahead == plain


def test_the_same_draws() -> None:
    load = random_load(random.Random(4), 8, 30, 20)
    sampling = {"temperature": 0.9, "top_p": 0.8, "seed": 7}
    plain, ahead = both(load, 0.6, pressure="narrow", sampling=sampling)
    assert ahead == plain


def test_a_stop_token_ends_the_answer_where_it_stands() -> None:
    load = random_load(random.Random(5), 10, 30, 30)
    free_running = both(load, 2.0)[0]
    # A token that some answers hold in their middle, so that they end early and the others go on.
    inner = [token for answer in free_running for token in answer[1:-2]]
    stop = max(set(inner), key=inner.count)
    plain, ahead = both(load, 2.0, sampling={"stop_token_ids": (stop,)})
    assert ahead == plain
    early = [a for a, f in zip(plain, free_running, strict=True) if len(a) < len(f)]
    assert early
    assert all(a[-1] == stop and stop not in a[:-1] for a in early)


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

"""Who pauses and who goes on, from tables; and the same rules played to the end of whole workloads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from benchmarks import sglang_rules

from tidekv.errors import ConfigError
from tidekv.sglang_plugin.pausing import Choice, Member, Room, Rules, admits, choose, victims

RULES = Rules(page_size=64, slots_a_page=16)


def low(order: int, **fields: object) -> Member:
    return replace(Member(order=order, pages=32), **fields)  # type: ignore[arg-type]


def high(order: int, **fields: object) -> Member:
    return low(order, high=True, **fields)


@pytest.mark.parametrize(
    ("members", "free", "pause", "resume"),
    [
        ([low(0, opens=True), low(1, opens=True)], 2, (), ()),
        # the last of those that arrived gives way, not the last of the list; its own new page is not needed then
        ([low(1, opens=True), low(0, opens=True)], 1, (0,), ()),
        # high requests never do, wherever they arrived
        ([low(0, opens=True), high(1, opens=True)], 1, (0,), ()),
        ([high(0, opens=True), high(1, opens=True)], 1, (), ()),
        # as many as it takes, at once: 18 pages missing, and 9 pages give 8 and save their own new page
        ([low(i, pages=9, opens=True) for i in range(8)], -10, (7, 6), ()),
        # somebody goes on
        ([low(0, opens=True)], 0, (), ()),
        # about to end, or its pages could not leave: the next one
        ([low(0, opens=True), low(1, opens=True, may_pause=False)], 1, (0,), ()),
        # who came back a moment ago is the last to go
        ([low(0, opens=True), low(1, opens=True, steps=5)], 1, (0,), ()),
        # who had more turns is the first to go
        ([low(0, opens=True, tokens=300), low(1, opens=True, tokens=10)], 1, (0,), ()),
        # back in order of arrival, with a margin of 32 steps' pages for all that run then: 1 request, 2, 3
        ([high(0), low(2, paused=True, away=32), low(1, paused=True, away=32)], 32, (), ()),
        ([high(0), low(2, paused=True, away=32), low(1, paused=True, away=32)], 33, (), (2,)),
        ([high(0), low(2, paused=True, away=32), low(1, paused=True, away=32)], 66, (), (2, 1)),
        # a small one does not pass a large one
        ([high(0), low(1, paused=True, away=32), low(2, paused=True, away=3)], 20, (), ()),
        # with nobody else left the first one goes on, whatever is free
        ([low(1, paused=True, away=32), low(0, paused=True, away=40)], 8, (), (1,)),
        # a paused one takes the place of one that had more turns, and not of an equal
        ([low(0, tokens=256), low(1, paused=True, away=20, tokens=255)], 0, (0,), (1,)),
        ([low(0, tokens=255), low(1, paused=True, away=20, tokens=0)], 0, (), ()),
        # not of one that has just come, nor of a high one, nor of one that holds too little
        ([low(0, tokens=256, steps=5), low(1, paused=True, away=20)], 0, (), ()),
        ([high(0, tokens=256), low(1, paused=True, away=20)], 0, (), ()),
        ([low(0, tokens=256, pages=8), low(1, paused=True, away=20)], 0, (), ()),
    ],
)
def test_choices(members: list[Member], free: int, pause: tuple[int, ...], resume: tuple[int, ...]) -> None:
    assert choose(members, free, RULES) == Choice(pause, resume)


def test_a_prompt_may_pause_every_low_request() -> None:
    members = [high(0), low(1), low(2)]
    assert victims(members, 10, RULES) == (2,)
    assert victims(members, 50, RULES) == (2, 1)
    assert victims(members, 500, RULES) == (2, 1)


def test_order_of_arrival_alone() -> None:
    members = [low(0, tokens=999), low(1, paused=True, away=20)]
    assert choose(members, 0, replace(RULES, turn=0)) == Choice()


ROOM = Room(pages=937, free=100, pausable=0, paused=0, num_running=10, num_paused=0)


@pytest.mark.parametrize(
    ("need", "is_high", "room", "expected"),
    [
        (99, False, ROOM, False),  # 2 pages of margin for 11 requests
        (98, False, ROOM, True),
        (98, False, replace(ROOM, added=1, num_added=1), False),
        (10, False, replace(ROOM, num_paused=1, paused=3), False),  # those that wait with KV come first
        (100, True, ROOM, True),
        (101, True, ROOM, False),
        (120, True, replace(ROOM, pausable=32), True),  # 30 pages come free if the low one pauses
        (120, False, replace(ROOM, yielding=30), True),  # old pages of windows narrow for it
        (120, True, replace(ROOM, yielding=30), False),
        (900, False, replace(ROOM, free=900, num_running=0), True),
        (2000, False, replace(ROOM, num_running=0), True),  # alone it may be larger than the pool: its pages narrow
        (2000, False, replace(ROOM, num_running=0, num_paused=1), False),
    ],
)
def test_newcomers(need: int, is_high: bool, room: Room, expected: bool) -> None:
    assert admits(need, is_high, room, RULES) is expected


def test_a_share_of_the_pool_lets_low_newcomers_in_to_be_paused() -> None:
    rules, full = replace(RULES, paused_share=0.01), replace(ROOM, free=0, pausable=64, num_paused=1, paused=3)
    assert admits(33, False, full, rules)  # 3 + 3 pages of 9, and the two that run hold 60
    assert not admits(33, False, replace(full, paused=7), rules)
    assert not admits(61, False, full, rules)


def test_a_pool_that_cannot_narrow_has_no_rules() -> None:
    with pytest.raises(ConfigError, match="slots_a_page must be >= 2, got 1"):
        Rules(page_size=64, slots_a_page=1)


@dataclass
class Played:
    """What a workload came to. ends: step at which each request ended, by order of arrival."""

    ends: list[int]
    pauses: int
    longest_pause: int
    shortest_run: int


def play(prompts: list[int], outputs: list[int], highs: list[bool], pages: int, rules: Rules) -> Played:
    """All requests decode from step 0 on, in a pool of so many pages; the rules decide. The pool never overflows."""
    size = rules.page_size
    lens, away = list(prompts), [0] * len(prompts)
    made, came, left = [0] * len(prompts), [-(10**6)] * len(prompts), [0] * len(prompts)
    ends, step, pauses, longest, shortest = [-1] * len(prompts), 0, 0, 0, 10**6
    while -1 in ends:
        live = [i for i, end in enumerate(ends) if end < 0]
        for _ in range(2):
            narrow = sum(away[i] for i in live)
            wide = sum(-(-lens[i] // size) - away[i] for i in live)
            free = pages - wide - rules.held(narrow) - 1
            members = [
                Member(
                    i, highs[i], -(-lens[i] // size), away[i], lens[i] % size == 0, made[i], step - came[i], away[i] > 0
                )
                for i in live
            ]
            choice = choose(members, free, rules)
            for i in (live[c] for c in choice.pause):
                away[i], left[i], pauses = -(-lens[i] // size), step, pauses + 1
                shortest = min(shortest, step - came[i])
            for i in (live[c] for c in choice.resume):
                away[i], came[i], longest = 0, step, max(longest, step - left[i])
        running = [i for i in live if not away[i]]
        used = sum(-(-(lens[i] + 1) // size) for i in running) + rules.held(sum(away[i] for i in live))
        assert running, "everybody is paused"
        assert used <= pages, f"{used} of {pages} pages at step {step}"
        for i in running:
            lens[i], made[i] = lens[i] + 1, made[i] + 1
            if made[i] == outputs[i]:
                ends[i] = step
        step += 1
        assert step < 100_000
    return Played(ends, pauses, longest, shortest)


def test_two_equals_do_not_push_each_other_out() -> None:
    played = play([320, 320], [256, 256], [False, False], 12, RULES)
    assert played.pauses == 1
    assert played.ends[0] == 255


def test_high_requests_end_as_if_they_were_alone() -> None:
    highs = [i % 3 == 0 for i in range(30)]
    played = play([512] * 30, [600] * 30, highs, 250, RULES)
    assert {played.ends[i] for i in range(30) if highs[i]} == {599}
    assert played.pauses > 10


def test_nobody_starves_and_turns_end_sooner_than_order_of_arrival() -> None:
    args = [512] * 64, [1024] * 64, [i % 3 == 0 for i in range(64)], 937
    turns, arrival = play(*args, RULES), play(*args, replace(RULES, turn=0))
    # 42 low requests take turns of 256: whoever pauses is back before all others have had one.
    assert turns.longest_pause <= 42 * 256
    assert max(turns.ends) < 0.85 * max(arrival.ends)
    assert turns.pauses < 64  # each takes its KV out and in: fewer than one for each request
    assert turns.shortest_run >= RULES.quantum


def test_the_page_prints_what_the_rules_come_to() -> None:
    """Of the whole workloads that were measured; a changed rule shows in docs/sglang.md."""
    page = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
    lines = sglang_rules.table()
    assert len([line for line in lines if line.startswith("| defaults")]) == 2
    assert [line for line in lines if line not in page] == []

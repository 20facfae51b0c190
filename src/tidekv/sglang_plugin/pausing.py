"""Who decodes and who pauses, when not all low requests fit at full width. Pure functions of counts: no clock, no
event, so that every tensor-parallel rank decides alike.

A narrowed page costs its missing layers over the link at *every* step that reads it. A paused request is not read: its
pages lie at minimum width until it goes on, and cost the link once out and once in. So the batch that runs is full
width, and whoever does not fit beside it waits, with everything it has computed.

    rank      high before low; then who had fewer turns of `turn` tokens; then order of arrival
    victims   low, the last in rank first; those that came back less than `quantum` steps ago last of all
    resume    the first in rank, when its pages and a margin for everybody's growth during `quantum` steps are free
    swap      a paused request takes the place of running ones that had more turns than it, one request a step

Nobody starves: a request that runs reaches its next turn after `turn` tokens, and from then on every paused request
that had fewer turns comes before it.

Example: 937 pages of 64 tokens and 32 layers, minimum width 2: a paused request of 2,300 tokens holds 36 / 16 -> 3
pages and gives 33 back. Its way out and in takes 2 * 280 MB / 55 GB/s = 10 ms, 1.5 steps of 7 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidekv.errors import ConfigError


@dataclass(frozen=True)
class Rules:
    """page_size in tokens; slots_a_page: logical pages that a page holds at minimum width (16: 32 layers, width 2)

    quantum       steps that a request runs at least once it came back; the margin lasts as long
    turn          tokens after which a low request falls behind those that had fewer; 0: order of arrival alone
    paused_share  part of the pool that paused requests may hold before low newcomers wait in SGLang's queue
    """

    page_size: int
    slots_a_page: int
    quantum: int = 32
    turn: int = 256
    paused_share: float = 0.0

    def __post_init__(self) -> None:
        if self.slots_a_page < 2:
            raise ConfigError(f"pausing needs a narrower width: slots_a_page must be >= 2, got {self.slots_a_page}")

    def margin(self, num_running: int, newcomers: bool = False) -> int:
        """Pages that so many requests open in a quantum; in a quarter of one for newcomers, who have nothing to lose
        yet: those who wait in the queue use no memory, and a pool with more of it in use decodes more at a time."""
        return -(-num_running * max(1, self.quantum // (4 if newcomers else 1)) // self.page_size)

    def held(self, pages: int) -> int:
        """Pages that so many pages take at minimum width."""
        return -(-pages // self.slots_a_page)


@dataclass(frozen=True)
class Member:
    """One decoding request. pages: that it holds; away: those that are narrow because it is paused."""

    order: int
    high: bool = False
    pages: int = 0
    away: int = 0
    opens: bool = False  # its next token opens a page
    tokens: int = 0  # that it has generated
    steps: int = 1 << 30  # since it came back
    paused: bool = False
    may_pause: bool = True  # False: it is about to end (aborted), or its pages could not leave

    def rank(self, turn: int) -> tuple[bool, int, int]:
        """Who gets memory first, smallest first."""
        return (not self.high, self.turns(turn), self.order)

    def turns(self, turn: int) -> int:
        """Whole turns that it had. High requests take none."""
        return 0 if self.high or not turn else self.tokens // turn


@dataclass(frozen=True)
class Choice:
    """Indices of those that pause and of those that go on, in order."""

    pause: tuple[int, ...] = ()
    resume: tuple[int, ...] = ()


def choose(members: Sequence[Member], free: int, rules: Rules) -> Choice:
    """Who pauses and who goes on before the next decode step. free: pages to be had without narrowing anything."""
    running = [i for i, m in enumerate(members) if not m.paused]
    demand = sum(members[i].opens for i in running)
    if demand > free:
        return Choice(pause=_victims(members, running, demand - free, rules))
    waiting = [i for i, m in enumerate(members) if m.paused]
    waiting.sort(key=lambda i: members[i].rank(rules.turn))
    spare = free - demand
    resume: list[int] = []
    for i in waiting:
        need = members[i].away + members[i].opens
        alone = not running and not resume
        if not alone and spare < need + rules.margin(len(running) + len(resume) + 1):
            break  # what is free is kept for it: a smaller one behind it would take it for ever
        resume.append(i)
        spare -= need
    if resume or not waiting:
        return Choice(resume=tuple(resume))
    return _swap(members, running, waiting[0], spare, rules)


def victims(members: Sequence[Member], short: int, rules: Rules) -> tuple[int, ...]:
    """Who pauses so that `short` more pages become free, for a prompt say; as many as there are if that is too few."""
    running = [i for i, m in enumerate(members) if not m.paused]
    return _victims(members, running, short, rules, keep=0)


def _victims(
    members: Sequence[Member], running: Sequence[int], short: int, rules: Rules, keep: int = 1
) -> tuple[int, ...]:
    """The last in rank until `short` pages come free; at least `keep` of those that run go on."""
    able = [i for i in running if not members[i].high and members[i].may_pause]
    able.sort(key=lambda i: (members[i].steps >= rules.quantum, *members[i].rank(rules.turn)), reverse=True)
    chosen: list[int] = []
    gained = pages = 0
    while able and gained < short and len(running) - len(chosen) > keep:
        chosen.append(able.pop(0))
        pages += members[chosen[-1]].pages
        gained = pages - rules.held(pages) + sum(members[i].opens for i in chosen)
    return tuple(chosen)


def _swap(members: Sequence[Member], running: Sequence[int], first: int, spare: int, rules: Rules) -> Choice:
    """`first` takes the place of those that had more turns, if they hold enough."""
    mine = members[first].turns(rules.turn)
    able = [
        i
        for i in running
        if not members[i].high
        and members[i].may_pause
        and members[i].turns(rules.turn) > mine
        and members[i].steps >= rules.quantum
    ]
    able.sort(key=lambda i: members[i].rank(rules.turn), reverse=True)
    need = members[first].away + members[first].opens + rules.margin(len(running)) - spare
    chosen: list[int] = []
    gained = pages = 0
    while able and gained < need:
        chosen.append(able.pop(0))
        pages += members[chosen[-1]].pages
        gained = pages - rules.held(pages) + sum(members[i].opens for i in chosen)
    return Choice(tuple(chosen), (first,)) if gained >= need else Choice()


@dataclass(frozen=True)
class Room:
    """What newcomers are measured against. pages: of the whole pool; free: to be had without narrowing anything

    pausable: full-width pages that running low requests hold; yielding: pages that they would free, and go on running,
    if old pages of their windows narrowed; paused: pages that paused ones hold now; added: pages promised to newcomers
    of the same prefill, and how many newcomers those are
    """

    pages: int
    free: int
    pausable: int
    paused: int
    num_running: int
    num_paused: int
    yielding: int = 0
    added: int = 0
    num_added: int = 0


def admits(need: int, high: bool, room: Room, rules: Rules) -> bool:
    """Whether a newcomer whose prompt takes `need` pages is prefilled now, or waits in SGLang's queue.

    High: when low requests that would pause for it make room. Low: when it fits beside those that run; or, within
    `paused_share`, when it is paused right after its first token. With nobody else there, always.
    """
    if not room.num_running and not room.num_paused and not room.num_added:
        return True
    free = room.free - room.added
    gives = room.pausable - rules.held(room.pausable)
    if high:
        return need <= free + gives
    margin = rules.margin(room.num_running + room.num_added + 1, newcomers=True)
    if not room.num_paused and need + margin <= free + room.yielding:
        return True
    paused = room.paused + rules.held(need)
    return paused <= rules.paused_share * room.pages and need <= free + gives

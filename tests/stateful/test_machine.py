"""Random load by hypothesis (which shrinks a failure to a few steps) and by the soak (which does many): at least
100,000 operations, each followed by a full recount and a bit-for-bit read-back of every live token of every layer.

Catches: KV lost, stale, or in a wrong cell after any order of extend, decode, free, share, abort, halve, merge,
restore, park, promote and backup; leaks of pages, slots, staging and host pages; refusals that change something;
holders that are not remapped.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from oracle import CacheModel
from stateful import soak
from strategies import CONFIG, OPERATIONS

SEED = 20240607
WORKERS = 2
OPERATIONS_IN_CI = 100_000


class CacheMachine(RuleBasedStateMachine):
    """One rule for each operation of `CacheModel`; the rules are added below, from the same table as the soak's."""

    model: CacheModel

    @initialize(config=CONFIG.strategy())
    def start(self, config: dict[str, Any]) -> None:
        self.model = CacheModel(config, read_all=True)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "model"):
            self.model.verify()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.finish()


def _rule(name: str) -> Any:
    def step(self: CacheMachine, arguments: dict[str, Any]) -> None:
        getattr(self.model, name)(**arguments)

    step.__name__ = name
    return rule(arguments=OPERATIONS[name][1].strategy())(step)


for _name in OPERATIONS:
    setattr(CacheMachine, f"do_{_name}", _rule(_name))


def test_hypothesis_machine() -> None:
    """Catches what the soak catches, and says it in the fewest steps."""
    health = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=60, stateful_step_count=30, suppress_health_check=health)
    )


def _soak(seed: int, operations: int) -> soak.Totals:
    torch.set_num_threads(1)
    return soak.soak(seed, operations)


@pytest.mark.timeout(900)
def test_soak() -> None:
    """Catches what needs a long history: leftovers of halvings, staging that comes and goes, reused host pages."""
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("fork")) as pool:
        share = OPERATIONS_IN_CI // WORKERS
        futures = [pool.submit(_soak, SEED + worker, share) for worker in range(WORKERS)]
        totals = [future.result() for future in futures]
    operations = sum(t.operations for t in totals)
    events: Counter[str] = sum((t.events for t in totals), Counter())
    print(f"seeds {SEED}..{SEED + WORKERS - 1}: {operations} operations, {dict(events)}")
    assert operations >= OPERATIONS_IN_CI
    for name, least in (
        ("halved_high", 1000),
        ("halved_low", 1000),
        ("merged", 200),
        ("restored", 300),
        ("evicted", 100),
        ("refused", 1000),
    ):
        assert events[name] >= least, f"the soak has hardly {name} anything: {dict(events)}"
